"""Shards with copies: `kill -9` of a whole node loses nothing that was confirmed.

The queues of the node go on at another one, in order, and the node follows when it is back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import RealCluster, api, connect, wait_for_nodes

pytestmark = pytest.mark.broker
QUEUES = 6
PERSISTENT = pika.BasicProperties(delivery_mode=2)
# The time to live of a lease, the time after which a silent member leaves the in-sync set, and what
# a crowded machine adds to both.
WITHOUT_CONFIRMS_S_MAX = 2 + 5 + 15
CONFIRMS_MORE = 200
# Python runs a module of this name at each start, if it finds one.
PATCH_NAME = "sitecustomize.py"
CONFIRMS_ALONE = """
from shardmq.cluster.rules import Leader

Leader._numbers = lambda self, nodes: ()
"""


@pytest.fixture(scope="module")
def cluster(real: RealEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    RealBroker.may_start = True
    with RealCluster(tmp_path_factory.mktemp("copies"), real, replicas=2) as made:
        wait_for_nodes(made.nodes[0], 3)
        made.wait_for_copies()
        yield made


class Pump(threading.Thread):
    """A publisher at one node, which goes on at another node when its own is gone.

    confirmed: the numbers that were confirmed, by queue.
    longest_s: the longest time without a confirm.
    """

    def __init__(self, nodes: list[RealBroker], queues: list[str]) -> None:
        super().__init__(daemon=True)
        self._nodes = nodes
        self._ends = threading.Event()
        self.confirmed: dict[str, list[int]] = {queue: [] for queue in queues}
        self.count = 0
        self.longest_s = 0.0
        self._last = time.monotonic()

    def run(self) -> None:
        number, node, channel = 0, 0, None
        queues = list(self.confirmed)
        while not self._ends.is_set():
            number += 1
            queue = queues[number % len(queues)]
            try:
                channel = channel or _confirming(self._nodes[node % len(self._nodes)])
                channel.basic_publish("", queue, b"%d" % number, PERSISTENT, mandatory=True)
            except pika.exceptions.NackError:
                continue
            except (pika.exceptions.AMQPError, OSError):
                channel = None
                node += 1
                time.sleep(0.05)
                continue
            self.confirmed[queue].append(number)
            self.count += 1
            now = time.monotonic()
            self.longest_s, self._last = max(self.longest_s, now - self._last), now

    def end(self) -> None:
        self._ends.set()
        self.join(60)
        assert not self.is_alive()


def _confirming(node: RealBroker) -> BlockingChannel:
    channel = connect(node).channel()
    channel.confirm_delivery()
    return channel


def all_of(node: RealBroker, queue: str) -> list[int]:
    """Take all messages of a queue at a node."""
    with connect(node) as connection:
        channel, found = connection.channel(), []
        while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
            found.append(int(got[2]))
    return found


def more_confirms(pumps: list[Pump]) -> None:
    goals = [pump.count + CONFIRMS_MORE for pump in pumps]
    wait_until(
        lambda: all(pump.count >= goal for pump, goal in zip(pumps, goals, strict=True)),
        "more confirms",
    )


def test_nodes_are_killed_one_after_the_other_and_nothing_confirmed_is_lost(
    cluster: RealCluster, name: str
) -> None:
    pumps = []
    for first in range(3):
        queues = [f"{name}-{first}-{index}" for index in range(QUEUES)]
        with connect(cluster.nodes[first]) as client:
            for queue in queues:
                client.channel().queue_declare(queue, durable=True)
        # The front door of the first node is gone for a while when the node is killed.
        nodes = cluster.nodes[first:] + cluster.nodes[:first]
        pumps.append(Pump(nodes, queues))
    for pump in pumps:
        pump.start()
    more_confirms(pumps)
    for turn in range(2):
        leader = cluster.leader()
        lost = leader if turn else cluster.others(leader)[0]
        lost.kill_all()
        lost_name = f"shardmq@{lost.data_dir.name}"
        wait_until(
            lambda lost_name=lost_name: all(  # type: ignore[misc]
                record.leader != lost_name for record in cluster.copies().values()
            ),
            "other nodes to lead",
        )
        more_confirms(pumps)
        lost.restart()
        cluster.wait_for_copies()
        more_confirms(pumps)
    for pump in pumps:
        pump.end()
    for pump in pumps:
        for queue, confirmed in pump.confirmed.items():
            found = all_of(cluster.nodes[0], queue)
            assert set(confirmed) <= set(found)
            assert found == sorted(set(found))
        assert pump.longest_s < WITHOUT_CONFIRMS_S_MAX


@pytest.mark.parametrize("confirms_alone", [False, True])
def test_a_confirm_says_that_a_follower_has_the_message(
    own: RealEtcd, tmp_path: Path, *, confirms_alone: bool
) -> None:
    """A leader that confirms before its follower has synced loses messages, and this finds it."""
    environment = {}
    if confirms_alone:
        (tmp_path / PATCH_NAME).write_text(CONFIRMS_ALONE)
        path = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{path}"
    with RealCluster(tmp_path, own, 2, replicas=2, environment=environment) as cluster:
        cluster.wait_for_copies()
        first, second = cluster.nodes
        with connect(first) as client:
            for index in range(QUEUES):
                client.channel().queue_declare(f"q{index}", durable=True)
        queue = next(row["name"] for row in api(first, "queues") if row["shard"] == 0)
        pump = Pump([first], [queue])
        pump.start()
        more_confirms([pump])
        follower = second.pid("shard", 0)
        os.kill(follower, signal.SIGSTOP)
        time.sleep(1)  # less than it takes until the follower is out of the in-sync set
        first.kill_all()
        # What has reached the follower's host and not its disk is lost with the process.
        os.kill(follower, signal.SIGKILL)
        wait_until(lambda: cluster.copies()[0].leader == "shardmq@node-1", "the other node to lead")
        wait_for_nodes(second, 1)
        pump.end()
        found = all_of(second, queue)
        is_lost = not set(pump.confirmed[queue]) <= set(found)
        assert is_lost == confirms_alone
