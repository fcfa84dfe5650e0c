"""Real nodes: queues are placed where locators say, and stream exchanges have queues on each."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pika
import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import RealCluster, api, connect, put, wait_for_nodes

pytestmark = pytest.mark.broker

SHARDS = 2
KEYS = 12
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, etcd_program: str) -> Iterator[RealCluster]:
    """Yield two nodes with two shards each; tests may add nodes."""
    directory = tmp_path_factory.mktemp("cluster")
    with (
        RealEtcd(tmp_path_factory.mktemp("etcd")) as etcd,
        RealCluster(directory, etcd, nodes=2, shards=SHARDS) as made,
    ):
        yield made


def node_name(node: RealBroker) -> str:
    return f"shardmq@{node.data_dir.name}"


def placed(node: RealBroker, prefix: str) -> dict[str, str]:
    """Return the nodes of the queues whose names begin with a prefix, by their names."""
    return {
        row["name"]: row["node"] for row in api(node, "queues") if row["name"].startswith(prefix)
    }


@pytest.mark.row("C1.14", "K9")
def test_client_local_is_the_node_that_was_asked_and_balanced_is_level(
    cluster: RealCluster,
) -> None:
    for node in cluster.nodes:
        with connect(node) as client:
            for index in range(4):
                client.channel().queue_declare(
                    f"near-{node_name(node)}-{index}",
                    arguments={"x-queue-leader-locator": "client-local"},
                )
        put(
            node,
            f"queues/%2F/near-{node_name(node)}-http",
            {"arguments": {"x-queue-leader-locator": "client-local"}},
        )
    for name, node_of_queue in placed(cluster.nodes[1], "near-").items():
        assert f"near-{node_of_queue}-" in name
    put(
        cluster.nodes[1],
        "policies/%2F/level",
        {"pattern": "^level-", "definition": {"queue-leader-locator": "balanced"}},
    )
    with connect(cluster.nodes[1]) as client:
        for index in range(8):
            client.channel().queue_declare(f"level-{index}")
    found = list(placed(cluster.nodes[0], "level-").values())
    assert {found.count(node_name(node)) for node in cluster.nodes} == {4}


class Load:
    """A publisher that confirms, at one node, and consumers of the virtual queue at others."""

    def __init__(self, name: str, publish_at: RealBroker, consume_at: list[RealBroker]) -> None:
        self.name = name
        self.sent: dict[str, int] = defaultdict(int)
        self.seen: dict[str, int] = defaultdict(int)
        self.faults: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._publish, args=(publish_at,)),
            *(threading.Thread(target=self._consume, args=(node,)) for node in consume_at),
        ]
        self._done = threading.Event()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _publish(self, node: RealBroker) -> None:
        with connect(node) as client:
            channel = client.channel()
            channel.confirm_delivery()
            number = 0
            while not self._stop.is_set():
                key = f"key-{number % KEYS}"
                body = f"{key} {self.sent[key] + 1}".encode()
                channel.basic_publish(self.name, key, body, PERSISTENT, mandatory=True)
                self.sent[key] += 1
                number += 1

    def _consume(self, node: RealBroker) -> None:
        with connect(node) as client:
            channel = client.channel()
            channel.basic_qos(prefetch_count=50)
            for method, _, body in channel.consume(self.name, inactivity_timeout=0.1):
                if self._done.is_set():
                    break
                if method is None:
                    continue
                key, number = body.decode().split()
                with self._lock:
                    if int(number) > self.seen[key] + 1:
                        self.faults.append(f"{key}: {number} after {self.seen[key]}")
                    self.seen[key] = max(self.seen[key], int(number))
                channel.basic_ack(method.delivery_tag)

    def finish(self) -> None:
        """Publish no more, and wait until all was consumed."""
        self._stop.set()
        self._threads[0].join()
        wait_until(lambda: dict(self.seen) == dict(self.sent), "all messages")
        assert not self.faults


def shards(node: RealBroker, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api(node, f"exchanges/%2F/{quote(name)}/shards")
    return found


def settled(node: RealBroker, name: str, nodes: list[str], each: int) -> bool:
    """Return whether an exchange has its queues at these nodes and no change is under way."""
    found = shards(node, name)
    bound = sorted(queue["node"] for queue in found["queues"] if queue["bound"])
    return found["step"] == "none" and bound == sorted(nodes * each)


def owners(node: RealBroker, name: str) -> list[dict[str, Any]]:
    command = ["list_shard_owners", name, "--url", f"http://{node.http}", "--formatter", "json"]
    found: list[dict[str, Any]] = json.loads(CliRunner().invoke(app, command).stdout)
    return found


def shards_per_node(node: RealBroker, number: int) -> None:
    definition = {"shards-per-node": number, "routing-key": "1"}
    put(
        node,
        "policies/%2F/orders",
        {"pattern": "^orders$", "definition": definition, "apply-to": "exchanges"},
    )


def are_near(rows: list[dict[str, Any]]) -> bool:
    """Return whether each shard queue has an owner that is connected to the queue's node."""
    return [row["node"] for row in rows] == [row["owner_node"] for row in rows]


@pytest.mark.row("E1.11", "E1.12", "E2.5", "E2.6", "E2.17", "K2", "K11", "P9")
def test_a_stream_exchange_follows_the_nodes_under_load_in_order_of_keys(
    cluster: RealCluster,
) -> None:
    first, second = cluster.nodes[:2]
    with connect(first) as client:
        client.channel().exchange_declare("orders", "x-consistent-hash", durable=True)
    shards_per_node(second, 2)
    names = [node_name(first), node_name(second)]
    assert set(placed(first, "sharding: orders")) == {
        f"sharding: orders - {name} - {index}" for name in names for index in (0, 1)
    }
    assert all(f" {node} " in name for name, node in placed(first, "sharding: orders").items())
    with Load("orders", first, [first, second]) as load:
        wait_until(lambda: len(load.seen) == KEYS, "messages")
        wait_until(lambda: are_near(owners(second, "orders")), "owners at the queues' nodes")
        third = cluster.new_node("node-2")
        cluster.nodes.append(third)
        wait_for_nodes(first, 3)
        names.append(node_name(third))
        wait_until(lambda: settled(second, "orders", names, 2), "the queues of a new node")
        load.finish()
    second.kill_all()
    wait_for_nodes(first, 2)
    shards_per_node(first, 3)
    assert settled(first, "orders", names, 2), "a change waits for a node that is down"
    assert 0 < passed_through(first, "orders") < KEYS
    second.restart()
    wait_for_nodes(first, 3)
    with connect(first) as client:  # some acks had not reached the disk of the node
        client.channel().queue_purge("orders")
    wait_until(lambda: settled(first, "orders", names, 3), "the change to begin and end")


def passed_through(node: RealBroker, name: str) -> int:
    """Publish a message of each key, and return how many came: all that were confirmed."""
    confirmed = 0
    with connect(node) as client:
        channel = client.channel()
        channel.confirm_delivery()
        for key in range(KEYS):
            with suppress(pika.exceptions.NackError):
                channel.basic_publish(name, f"key-{key}", b"", PERSISTENT)
                confirmed += 1
        for came, (method, _, _) in enumerate(channel.consume(name, inactivity_timeout=20), 1):
            assert method is not None, f"{came - 1} of {confirmed} came"
            channel.basic_ack(method.delivery_tag)
            if came == confirmed:
                break
    return confirmed
