"""A cluster is upgraded node by node: two releases work together, or one says why it cannot."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pika
import pytest

from shardmq.cluster.versions import CATALOG, STREAMS, WIRE
from tests.cluster.test_nodes import in_sync, refusal
from tests.support.etcd import RealEtcd
from tests.support.other_release import VARIABLE
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import (
    RealCluster,
    api,
    connect,
    node_arguments,
    node_environment,
    wait_for_nodes,
)

pytestmark = pytest.mark.broker

KINDS = {"streams": STREAMS, "wire": WIRE, "catalog": CATALOG}
# A release that understands one more version of everything.
NEWER = {kind: (range.least, range.most + 1) for kind, range in KINDS.items()}
COMMAND = ("tests.support.other_release",)
QUEUES = 9
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.fixture
def cluster(own: RealEtcd, tmp_path: Path) -> Iterator[RealCluster]:
    with RealCluster(tmp_path, own) as made:
        wait_for_nodes(made.nodes[0], 3)
        wait_until(lambda: len(in_sync(made)) == 3, "the copies to be in sync")
        yield made


def upgrade(cluster: RealCluster, node: RealBroker) -> RealBroker:
    """Stop a node, and start the newer release on its data."""
    node.stop()
    rest = cluster.others(node)
    wait_for_nodes(rest[0], 2)
    made = RealBroker(
        node.data_dir,
        shards=1,
        more=node_arguments(cluster.etcd, node.data_dir.name),
        command=COMMAND,
        environment={
            **node_environment(),
            "SHARDMQ_CLUSTER_REPLICAS": "1",
            VARIABLE: json.dumps(NEWER),
        },
    )
    cluster.nodes[cluster.nodes.index(node)] = made
    wait_for_nodes(rest[0], 3)
    wait_until(lambda: len(in_sync(cluster)) == 3, "the copy to be in sync")
    return made


def is_served(cluster: RealCluster, name: str) -> None:
    """Declare queues at each node, publish to them at the next one, and get at the one behind."""
    connections = [connect(node) for node in cluster.nodes]
    channels: list[Any] = [connection.channel() for connection in connections]
    for channel in channels:
        channel.confirm_delivery()
    names = [f"{name} {index}" for index in range(QUEUES)]
    for index, queue in enumerate(names):
        channels[index % 3].queue_declare(queue, durable=True)
    assert len({row["node"] for row in api(cluster.nodes[1], "queues")}) >= 3
    for index, queue in enumerate(names):
        for at in range(3):
            body = f"{queue} {at}".encode()
            channels[(index + at) % 3].basic_publish("", queue, body, PERSISTENT, mandatory=True)
    for index, queue in enumerate(names):
        got = [channels[(index + 2) % 3].basic_get(queue, auto_ack=True)[2] for _ in range(3)]
        assert got == [f"{queue} {at}".encode() for at in range(3)]
    for connection in connections:
        connection.close()


def format_at(node: RealBroker) -> int:
    """Return the version of the definitions on the disk of a node."""
    with (node.data_dir / "definitions.amqp").open("rb") as file:
        return int(struct.unpack("<8sI", file.read(12))[1])


def formats(cluster: RealCluster) -> list[int]:
    return [format_at(node) for node in cluster.nodes]


def logs(cluster: RealCluster) -> str:
    return "".join(node.log_path.read_text() for node in cluster.nodes)


def test_nodes_are_upgraded_one_after_the_other_and_serve_all_the_time(
    cluster: RealCluster, tmp_path: Path
) -> None:
    first = cluster.leader()
    for turn, node in enumerate(cluster.others(first)):
        upgrade(cluster, node)
        is_served(cluster, f"turn {turn}")
        assert formats(cluster) == [CATALOG.most] * 3
    assert "is not of use" not in logs(cluster)
    assert "restart all of one release" not in logs(cluster)
    # The leader comes last. Who leads now has an old node in the set, until that is upgraded.
    upgrade(cluster, first)
    is_served(cluster, "all")
    second = cluster.leader()
    second.kill("controller")
    is_served(cluster, "behind")
    wait_until(lambda: len(in_sync(cluster)) == 3, "the copies to be in sync")
    wait_until(lambda: formats(cluster) == [CATALOG.most + 1] * 3, "the newer version of all")

    # An older release does not start on newer files. On new ones it serves its clients, and gets no
    # copy of the definitions.
    older = next(node for node in cluster.nodes if node is not cluster.leader())
    older.stop()
    assert "written by a later version" in refusal(
        older.data_dir, *node_arguments(cluster.etcd, older.data_dir.name), **node_environment()
    )
    fresh, leader = cluster.new_node("fresh"), cluster.leader()
    cluster.nodes = [*cluster.others(older), fresh]
    wait_for_nodes(leader, 3)
    is_served(cluster, "an old one")
    why = f"the definitions have version {CATALOG.most + 1}, and shardmq@fresh understands "
    for node in (leader, fresh):
        wait_until(partial(node.has_logged, why), "both to say why")
    assert len(in_sync(cluster)) == 2


def test_a_node_without_a_common_version_is_refused_and_both_sides_say_why(
    own: RealEtcd, tmp_path: Path
) -> None:
    first = RealBroker(
        tmp_path / "a", shards=1, more=node_arguments(own, "a"), environment=node_environment()
    )

    def says(line: re.Pattern[str]) -> bool:
        return line.search(first.log_path.read_text()) is not None

    try:
        for kind, range in KINDS.items():
            apart = range.most + 1, range.most + 2
            said = refusal(
                tmp_path / kind,
                *node_arguments(own, kind),
                module=COMMAND[0],
                **node_environment(),
                **{VARIABLE: json.dumps({kind: apart})},
            )
            assert f"shardmq@{kind} understands versions {apart[0]} to {apart[1]} of " in said
            assert f", shardmq@a {range} (release " in said
            line = re.compile(
                f"is not of use: shardmq@a understands {range} of .*"
                f"shardmq@{kind} versions {apart[0]} to {apart[1]}"
            )
            wait_until(partial(says, line), "the other side")
        assert first.log_path.read_text().count("is not of use") == len(KINDS)
        assert api(first, "overview")["node"] == "shardmq@a"  # and goes on
        first.stop()
    finally:
        first.clean_up()
