"""Nodes stop in order under publishers that have many publishes under way: none is nacked."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Final

import pytest
from pamqp import commands

from tests.support.etcd import RealEtcd
from tests.support.kill_load import ACK, NACK, LoadClient, Lost, Worker, publishing
from tests.support.ledger import Ledger
from tests.support.real_broker import Address, wait_until
from tests.support.real_cluster import RealCluster, connect, names_on, wait_for_nodes

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600), pytest.mark.broker]

NODES: Final = 3
# A stop under which confirms are lost on their way was one of about thirty.
STOPS: Final = 60
WINDOW: Final = 300
PAUSE_S_MAX: Final = 0.004
BODY: Final = b"x" * 100
MORE: Final = 1000  # publishes of each publisher between two stops


class Publisher(Worker):
    """A publisher with up to WINDOW publishes under way, which comes back to its node.

    answered: how many publishes were confirmed or nacked.
    nacked: how many were nacked.
    """

    def __init__(self, at: Address, queue: str, seed: str) -> None:
        super().__init__(f"{queue} at {at.port}", at, Ledger(), seed)
        self._frames = publishing("", queue)(BODY)
        self.answered = self.nacked = 0

    def session(self) -> None:
        client = self.connect(LoadClient)
        try:
            client.ask(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
            waiting: set[int] = set()
            last = 0
            while self.going:
                count = self.random.randint(0, WINDOW - len(waiting))
                client.send(self._frames * count)
                waiting.update(range(last + 1, last + count + 1))
                last += count
                for kind, payload in client.frames(0.1):
                    self._hear(kind, payload, waiting)
                time.sleep(self.random.uniform(0, PAUSE_S_MAX))
        finally:
            client.close()

    def _hear(self, kind: int, payload: bytes, waiting: set[int]) -> None:
        what = int.from_bytes(payload[:4], "big") if kind == 1 else 0
        if what not in (ACK, NACK):
            raise Lost("the node stops")
        tag, multiple = int.from_bytes(payload[4:12], "big"), payload[12] & 1
        answered = {number for number in waiting if number <= tag} if multiple else {tag}
        waiting -= answered
        self.answered += len(answered)
        if what == NACK:
            self.nacked += len(answered)


def wait_for_more(publishers: list[Publisher]) -> None:
    goals = [publisher.answered + MORE for publisher in publishers]
    wait_until(
        lambda: all(
            publisher.answered >= goal for publisher, goal in zip(publishers, goals, strict=True)
        ),
        "more confirms",
    )


def test_orderly_stops_of_nodes_nack_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, etcd_program: str
) -> None:
    seed = request.config.option.seed
    print(f"to do the same: make torture ARGS='--seed {seed} -k orderly_stops'")
    chance = random.Random(seed)
    with (
        RealEtcd(tmp_path) as etcd,
        RealCluster(
            tmp_path,
            etcd,
            nodes=NODES,
            replicas=NODES,
            environment={"SHARDMQ_CLUSTER_GIVE_BACK_AFTER_S": "0"},
        ) as cluster,
    ):
        wait_for_nodes(cluster.nodes[0], NODES)
        cluster.wait_for_copies()
        queues = names_on(NODES, "q", NODES)
        with connect(cluster.nodes[0]) as client:
            for queue in queues:
                arguments = {"x-max-length": 10_000}
                client.channel().queue_declare(queue, durable=True, arguments=arguments)
        publishers = [
            Publisher(node.at, queue, str(seed)) for node in cluster.nodes for queue in queues
        ]
        for publisher in publishers:
            publisher.start()
        try:
            for stop in range(STOPS):
                wait_for_more(publishers)
                record = cluster.copies()[chance.choice(sorted(cluster.copies()))]
                node = cluster.named(record.leader)
                node.stop()
                wait_for_more([each for each in publishers if each.at != node.at])
                node.restart()
                wait_for_nodes(cluster.nodes[0], NODES)
                cluster.wait_for_copies()
                assert [each.nacked for each in publishers] == [0] * len(publishers), stop
        finally:
            for publisher in publishers:
                publisher.stop()
