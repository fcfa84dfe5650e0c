"""Links of federation run at the node that leads, and move to another one when that dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.bridges.moving import bind, call, federate, federate_exchange, fill, uri, wait_for_keys
from tests.support.etcd import RealEtcd
from tests.support.real_broker import PATIENCE_S, RealBroker, wait_until
from tests.support.real_cluster import RealCluster, api, connect, wait_for_nodes

# A node takes half a minute to start on a crowded machine.
pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]
MESSAGES = 1000
PREFETCH = 50


@pytest.fixture(scope="module")
def cluster(real: RealEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """Yield three nodes, each of which has all messages."""
    RealBroker.may_start = True
    with RealCluster(tmp_path_factory.mktemp("cluster"), real, replicas=3, together=True) as made:
        wait_for_nodes(made.nodes[0], 3)
        made.wait_for_copies()
        yield made


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    RealBroker.may_start = True
    made = RealBroker(tmp_path_factory.mktemp("upstream") / "data", shards=1)
    yield made
    made.stop()


def links(node: RealBroker) -> dict[str, dict[str, Any]]:
    """Return the links by the name of what they federate, as a node lists them.

    While nobody leads there are none.
    """
    status, rows = call(node, "GET", "federation-links")
    return {row.get("queue") or row["exchange"]: row for row in rows} if status == 200 else {}


def are_running(node: RealBroker, names: list[str], at: RealBroker) -> bool:
    """Return whether a node lists these links as running at another one."""
    try:
        found = links(node)
    except OSError:
        return False
    return all(
        name in found
        and found[name]["status"] == "running"
        and found[name]["node"] == f"shardmq@{at.data_dir.name}"
        for name in names
    )


def moved(node: RealBroker, queue: str, wanted: set[bytes], count: int) -> set[bytes]:
    """Take messages of a queue until `count` wanted ones came, whatever channels end."""
    found: set[bytes] = set()
    end = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < end:
        try:
            with connect(node) as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=PREFETCH)
                for method, _, body in channel.consume(queue, inactivity_timeout=2.0):
                    if method is None:
                        break
                    channel.basic_ack(method.delivery_tag)
                    found |= {body} & wanted
                    if len(found) >= count:
                        break
        except (pika.exceptions.AMQPError, OSError):
            continue
    return found


def publish(broker: RealBroker, exchange: str, bodies: list[bytes]) -> None:
    with connect(broker) as connection:
        channel = connection.channel()
        channel.tx_select()
        for body in bodies:
            channel.basic_publish(exchange, "k.x", body, pika.BasicProperties(delivery_mode=2))
        channel.tx_commit()


@pytest.mark.row("J11", "J12")
def test_links_move_with_their_node_and_lose_nothing(
    cluster: RealCluster, upstream: RealBroker
) -> None:
    """The node dies when some messages of a queue, an exchange and a virtual queue have come.

    Half of those of the exchange are published while no link runs. What is on its way at a death is
    the subject of `tests/bridges/test_kills.py`.
    """
    for broker, name in ((upstream, "up"), (cluster.nodes[0], "down")):
        call(broker, "PUT", "cluster-name", {"name": name})
    lost = cluster.leader()
    first, second = cluster.others(lost)
    sharded = {"type": "x-modulus-hash", "durable": True, "arguments": {"x-shards": 3}}
    assert call(first, "PUT", "exchanges/%2F/virtual", sharded)[0] == 201
    assert call(first, "PUT", "queues/%2F/queue", {"durable": True})[0] == 201
    bodies = [b"%d" % number for number in range(MESSAGES)]
    wanted, half = set(bodies), MESSAGES // 2
    for name in ("queue", "virtual"):
        fill(upstream, name, bodies)
        federate(first, name, uri=uri(upstream), prefetch_count=PREFETCH)
    federate_exchange(first, "/", "exchange", uri=uri(upstream), prefetch_count=PREFETCH)
    bind(first, "/", "exchange", "of-exchange", "k.#")
    wait_for_keys(upstream, "/", "exchange", {"k.#"})
    names = ["queue", "virtual", "exchange"]
    wait_until(lambda: are_running(second, names, at=lost), "all links run")
    listed = {row["name"]: row["protocol"] for row in api(second, "connections")}
    for row in links(second).values():
        assert listed[row["local_connection"]] == "Direct 0-9-1"
    publish(upstream, "exchange", bodies[:half])
    places = {"queue": "queue", "virtual": "virtual", "of-exchange": "exchange"}
    found = {queue: moved(first, queue, wanted, half // 2) for queue in places}
    lost.kill_all()
    publish(upstream, "exchange", bodies[half:])
    for queue in places:
        found[queue] |= moved(second, queue, wanted - found[queue], MESSAGES - len(found[queue]))
    missing = {queue: len(wanted - found[queue]) for queue in places}
    assert not any(missing.values()), f"lost: {missing}"
    leader = cluster.named(links(first)["queue"]["node"])
    assert leader in (first, second)
    wait_until(lambda: are_running(first, names, at=leader), "all links run again")
    shown = CliRunner().invoke(app, ["federation_status", "--url", f"http://{second.http}"])
    lines = [line for line in shown.output.splitlines() if "running" in line]
    assert [f"shardmq@{leader.data_dir.name}" in line for line in lines] == [True] * 3
