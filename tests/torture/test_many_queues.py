"""A hundred thousand queues over three nodes, made and deleted by clients of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pamqp import base, commands

from tests.support.etcd import PROGRAM, RealEtcd
from tests.support.raw_client import RawClient, method
from tests.support.real_broker import RealBroker
from tests.support.real_cluster import RealCluster, api, wait_for_nodes

pytestmark = [pytest.mark.torture, pytest.mark.broker, pytest.mark.timeout(1800)]

QUEUES = 100_000
AT_ONCE = 500  # requests of one client that are under way
FOLLOW_UP_S_MAX = 15.0


def of_node(index: int) -> list[str]:
    """Return the names of the queues that clients of one node make."""
    return [f"many-{number}" for number in range(index, QUEUES, 3)]


def ask_all(
    node: RealBroker, names: list[str], what: Callable[[str], base.Frame], answer: type[object]
) -> None:
    """Send a request for each name, some of them ahead of the answers."""
    port = int(node.amqp.rpartition(":")[2])
    with RawClient(port) as client:
        client.shake_hands()
        for at in range(0, len(names), AT_ONCE):
            some = names[at : at + AT_ONCE]
            client.send(b"".join(method(1, what(name)) for name in some))
            for _ in some:
                client.expect(answer)


def at_all_nodes(
    cluster: RealCluster,
    shift: int,
    what: Callable[[str], base.Frame],
    answer: type[object],
) -> float:
    """Ask for all queues; node n for those of node n + `shift`. Return the seconds."""
    begun = time.monotonic()
    with ThreadPoolExecutor(3) as clients:
        asked = [
            clients.submit(ask_all, node, of_node((index + shift) % 3), what, answer)
            for index, node in enumerate(cluster.nodes[:3])
        ]
        for each in asked:
            each.result()
    return time.monotonic() - begun


def queues_at(node: RealBroker) -> int:
    return int(api(node, "queues?page=1&page_size=1")["total_count"])


def test_a_hundred_thousand_queues_over_three_nodes(tmp_path: Path) -> None:
    if PROGRAM is None:
        pytest.skip("no etcd: run .ci/etcd")
    (tmp_path / "etcd").mkdir()
    with RealEtcd(tmp_path / "etcd") as etcd, RealCluster(tmp_path, etcd) as cluster:
        wait_for_nodes(cluster.nodes[0], 3)
        made_s = at_all_nodes(
            cluster,
            0,
            lambda name: commands.Queue.Declare(queue=name, durable=True),
            commands.Queue.DeclareOk,
        )
        assert [queues_at(node) for node in cluster.nodes] == [QUEUES] * 3
        # Each front door knows the queues that clients of the next node have made.
        known_s = at_all_nodes(
            cluster,
            1,
            lambda name: commands.Queue.Declare(queue=name, passive=True),
            commands.Queue.DeclareOk,
        )

        begun = time.monotonic()
        newcomer = cluster.new_node("node-3")
        cluster.nodes.append(newcomer)
        ask_all(
            newcomer,
            [f"many-{QUEUES - 1}"],
            lambda name: commands.Queue.Declare(queue=name, passive=True),
            commands.Queue.DeclareOk,
        )
        wait_for_nodes(newcomer, 4)
        new_s = time.monotonic() - begun

        deleted_s = at_all_nodes(
            cluster,
            2,
            lambda name: commands.Queue.Delete(queue=name),
            commands.Queue.DeleteOk,
        )
        assert [queues_at(node) for node in cluster.nodes] == [0] * 4
        print(
            f"{QUEUES} queues: made in {made_s:.1f} s, looked up in {known_s:.1f} s, "
            f"deleted in {deleted_s:.1f} s; a fourth node is there after {new_s:.1f} s"
        )
        assert new_s < FOLLOW_UP_S_MAX
