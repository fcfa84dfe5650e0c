"""Queues move between nodes of a cluster: one by one, off a drained node, and to even them out."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest

from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import RealCluster, connect, login, wait_for_nodes

pytestmark = pytest.mark.broker
QUEUES = 6
MESSAGES = 200
MOVED_S = 60.0
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.fixture
def cluster(real: RealEtcd, tmp_path: Path) -> Iterator[RealCluster]:
    RealBroker.may_start = True
    with RealCluster(tmp_path, real) as made:
        wait_for_nodes(made.nodes[0], 3)
        yield made


def ask(node: RealBroker, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{node.http}/api/{path}", data, method=method)
    request.add_header("Authorization", f"Basic {login(node)}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def nodes_of(cluster: RealCluster) -> Counter[str]:
    """Return how many queues lie on each node; a queue that moves counts as nowhere."""
    rows = ask(cluster.nodes[0], "GET", "queues")
    return Counter("" if "moving" in row else row["node"] for row in rows)


def refusal(cluster: RealCluster, method: str, path: str, body: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(cluster.nodes[0], method, path, body)
    return error.value.read().decode()


class StreamOnTheWay:
    """A stream that is moved to a node before this is drained, and a consumer that reads on."""

    def __init__(self, cluster: RealCluster, node: str) -> None:
        self.got: list[tuple[int, bytes, bool]] = []
        self.connection = connect(cluster.nodes[0])
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        self.channel.basic_qos(prefetch_count=20)
        self.channel.queue_declare("stream", durable=True, arguments={"x-queue-type": "stream"})
        self.channel.basic_consume(
            "stream", self._take, arguments={"x-stream-offset": "first"}, consumer_tag="mine"
        )
        self.published = 0
        self._publish()
        self._cluster = cluster
        ask(cluster.nodes[0], "POST", "queues/%2F/stream/relocation", {"node": node})
        wait_until(lambda: self._is_on(node), "the stream at the node", MOVED_S)
        self._publish()
        wait_until(self._all_came, "the messages of the stream", MOVED_S)

    def _is_on(self, node: str) -> bool:
        self.connection.process_data_events(0.05)
        row = ask(self._cluster.nodes[0], "GET", "queues/%2F/stream")
        return "moving" not in row and row["node"] == node

    def _publish(self) -> None:
        for _ in range(MESSAGES):
            self.channel.basic_publish("", "stream", b"%d" % self.published, PERSISTENT)
            self.published += 1

    def _take(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        offset = properties.headers["x-stream-offset"]
        assert method.consumer_tag == "mine" and int(body) == offset
        self.got.append((offset, body, method.redelivered))
        channel.basic_ack(method.delivery_tag)

    def _all_came(self) -> bool:
        self.connection.process_data_events(0.05)
        fresh = [offset for offset, _, again in self.got if not again]
        assert fresh == list(range(len(fresh)))
        return len(fresh) == self.published

    def check_moved(self) -> None:
        """Look whether the consumer has come along, and delete the stream."""
        self._publish()
        wait_until(self._all_came, "the messages of the stream", MOVED_S)
        self.channel.queue_delete("stream")
        self.connection.close()


@pytest.mark.row("K9", "K13")
def test_nodes_are_drained_evened_out_and_forgotten(cluster: RealCluster) -> None:
    names = [f"queue-{number}" for number in range(QUEUES)]
    connections = [connect(node) for node in cluster.nodes]
    channels = [connection.channel() for connection in connections]
    for at, name in enumerate(names):
        channels[0].queue_declare(name, durable=True)
        for number in range(MESSAGES):
            channels[at % 2].basic_publish("", name, b"%d" % number, PERSISTENT)
    got: dict[str, list[int]] = {name: [] for name in names}

    def take(channel: Any, method: Any, _: Any, body: bytes) -> None:
        got[method.consumer_tag].append(int(body))
        channel.basic_ack(method.delivery_tag)

    last = cluster.nodes[2]
    name = next(row["name"] for row in ask(last, "GET", "nodes") if row["shards"] == [2])
    stream = StreamOnTheWay(cluster, name)
    ask(cluster.nodes[1], "PUT", f"nodes/{name}/drain")
    wait_until(lambda: ask(last, "GET", f"nodes/{name}/drain")["queues"] == 0, "drain", MOVED_S)
    assert name not in nodes_of(cluster)
    stream.check_moved()
    channels[2].queue_declare("new", durable=True)
    assert name not in nodes_of(cluster)
    for each in names:
        channels[1].basic_consume(each, take, consumer_tag=each)

    def all_came() -> bool:
        connections[1].process_data_events(0.05)
        return all(len(numbers) >= MESSAGES for numbers in got.values())

    wait_until(all_came, "all messages", MOVED_S)
    assert all(numbers == list(range(MESSAGES)) for numbers in got.values())

    assert "alive" in refusal(cluster, "POST", f"nodes/{name}/forget", {})
    ask(last, "DELETE", f"nodes/{name}/drain")
    plan = ask(last, "POST", "cluster/rebalance", {"dry_run": True})
    assert plan and {move["to_node"] for move in plan} == {name}
    ask(last, "POST", "cluster/rebalance", {})

    def is_even() -> bool:
        connections[1].process_data_events(0.05)
        counts = nodes_of(cluster)
        is_quiet = counts[name] > 0 and not counts[""]
        return is_quiet and max(counts.values()) - min(counts.values()) <= 1

    wait_until(is_even, "even numbers of queues", MOVED_S)
    for each in names:  # consumers have come along
        channels[0].basic_publish("", each, b"%d" % MESSAGES, PERSISTENT)
    wait_until(
        lambda: all_came() and all(MESSAGES in numbers for numbers in got.values()),
        "more messages",
        MOVED_S,
    )
    there = nodes_of(cluster)[name]
    last.kill_all()
    wait_until(
        lambda: (
            not next(row for row in ask(cluster.nodes[0], "GET", "nodes") if row["name"] == name)[
                "running"
            ]
        ),
        "the node to be missed",
    )
    assert f"{there} queues" in refusal(cluster, "POST", f"nodes/{name}/forget", {})
    told = ask(cluster.nodes[1], "POST", f"nodes/{name}/forget", {"lose": True})
    lost = {"queues_lost": there, "queues_kept": 0, "shards_lost": [2]}
    assert told == {"node": name, **lost, "new_homes": {}}
    wait_until(lambda: len(ask(cluster.nodes[0], "GET", "nodes")) == 2, "the node to go")
    assert len(ask(cluster.nodes[0], "GET", "queues")) == QUEUES + 1 - there

    # A move waits for all shards, but not for the one that was lost.
    (name,) = {row["name"] for row in ask(cluster.nodes[0], "GET", "nodes")} - {
        ask(cluster.nodes[0], "GET", "overview")["node"]
    }
    ask(cluster.nodes[0], "PUT", f"nodes/{name}/drain")
    wait_until(
        lambda: ask(cluster.nodes[0], "GET", f"nodes/{name}/drain")["queues"] == 0, "drain", MOVED_S
    )
