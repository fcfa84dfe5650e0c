"""Test that the order of keys survives a change of the number of shards.

Messages between processes may be late or come twice, and processes may die. The first deliveries of
each key come in order, and all messages come in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.resharding.reshard_progress import Question, ReshardProgress
from shardmq.broker.controller.resharding.states import Step, hold_of, queues_losing_keys
from shardmq.broker.model.changes import OPEN, ParameterPut, QueuePut, ShardOf
from shardmq.broker.shared.control import Answer, QueueRemove
from shardmq.shardd.wire import messages as wire
from tests.stream_exchanges.resharding_play import KEYS, ReshardingPlay, Sent


class Kept:
    """A queue at its shard, slow and obvious."""

    def __init__(self) -> None:
        self.held = False
        self.ready: list[Sent] = []
        self.unacked: list[Sent] = []
        self.behind: list[Sent] = []
        self.marked: set[Sent] = set()

    def tell(self, held: bool) -> None:
        self.held = held
        if not held:
            self.ready, self.behind = self.ready + self.behind, []

    def arrive(self, sent: Sent) -> None:
        (self.behind if self.held else self.ready).append(sent)

    def restart(self) -> None:
        everything = self.unacked + self.ready + self.behind
        self.ready, self.unacked, self.behind = [], [], []
        for sent in everything:
            self.arrive(sent)


class Play(ReshardingPlay):
    """A controller, a front door with its own copy, shards and a consumer.

    One thing happens at a time.
    """

    def __init__(self, seed: int, kind: str, shards: int) -> None:
        super().__init__(seed)
        self.queues: dict[int, Kept] = {}
        self.seen: dict[str, int] = dict.fromkeys(KEYS, 0)
        self._told(self.declare(kind, shards).create)
        self.door_applies()

    def declare(self, kind: str, shards: int) -> Decision:
        return self.world.declare(type=kind, x_shards=shards)

    # -- what the carrier sees of the others

    async def ask(self, request: Any) -> Answer:
        decision = self.world.ask(request)
        self._told(
            [put for put in decision.create if self.world.catalog.queue_by_id(put.id) == put]
        )
        self._told(self.world.vhost.parts("e"))
        self._happen(2)
        self.door_applies()
        return Answer(0)

    async def tell_shards(self, queues: list[QueuePut]) -> list[QueuePut]:
        self._happen(2)
        self._told(queues)
        return queues

    async def fence(self) -> bool:
        if self.random.random() < 0.3:
            return False
        while self.on_the_way:
            self._arrive()
        return True

    def request(self, shard: int, message: Callable[[int], wire.Message]) -> asyncio.Future[Any]:
        self._happen(2)
        asked = message(1)
        assert isinstance(asked, wire.CountUnsettled)
        queue = self.queues[asked.queue]
        if not asked.until:
            queue.marked = {*queue.ready, *queue.unacked}
        left = queue.marked.intersection([*queue.ready, *queue.unacked])
        if asked.until != self.epochs + 1 and asked.until:  # places of another life mean nothing
            left = set()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reply.set_result(wire.UnsettledCount(1, asked.until or self.epochs + 1, len(left)))
        return reply

    # -- what happens

    def _told(self, queues: list[QueuePut]) -> None:
        for put in queues:
            self.queues.setdefault(put.id, Kept()).tell(hold_of(put) != OPEN)

    def _happen(self, most: int) -> None:
        for _ in range(self.random.randrange(most + 1)):
            self.random.choice([self.publish, self._arrive, self.consume, self.consume, self.ack])()

    def _arrive(self) -> None:
        if self.on_the_way:
            id, sent = self.on_the_way.pop(0)
            self.queues[id].arrive(sent)

    def consume(self) -> None:
        queue = self.random.choice([*self.queues.values()])
        if queue.ready:
            key, number = sent = queue.ready.pop(0)
            queue.unacked.append(sent)
            assert number <= self.seen[key] + 1, f"{key} {number} came after {self.seen[key]}"
            self.seen[key] = max(self.seen[key], number)

    def ack(self) -> None:
        queue = self.random.choice([*self.queues.values()])
        if queue.unacked:
            queue.unacked.pop(self.random.randrange(len(queue.unacked)))

    def shards_restart(self) -> None:
        self.epochs += 1
        for queue in self.queues.values():
            queue.restart()
        self._told(self.world.vhost.parts("e"))

    def controller_restarts(self) -> None:
        self.carrier = self.new_carrier()
        self.world.decisions.restore()

    def set(self, number: int) -> None:
        decision = self.world.ask(ParameterPut("/", "shards", "e", {"shards-per-node": number}))
        self._told(decision.create)

    def end(self) -> None:
        """No more is published; everything still there is consumed and acknowledged."""
        for _ in range(100):
            self.door_applies()
            while self.on_the_way:
                self._arrive()
            self.step()
            for queue in self.queues.values():
                queue.unacked.clear()
            for _ in range(40):
                self.consume()
        assert self.seen == self.last, (self.seen, self.last)


ACTS = [
    *(["publish", "consume", "ack"] * 6),
    "_arrive",
    "_arrive",
    "door_applies",
    *(["step"] * 4),
    "set",
]
KILLS = ["controller_restarts", "shards_restart"]
STEPS = 600


@pytest.mark.parametrize("case", range(40))
def test_keys_stay_in_order_and_all_comes_whatever_happens(
    case: int, request: pytest.FixtureRequest
) -> None:
    seed = request.config.option.seed + case
    chance = random.Random(seed)
    play = Play(
        seed, "x-modulus-hash" if case % 4 > 1 else "x-consistent-hash", chance.randint(1, 6)
    )
    play.run(
        [
            (chance.choice([*ACTS, *(KILLS if case % 2 else ())]), chance.randint(1, 6))
            for _ in range(STEPS)
        ]
    )
    play.end()
    assert sum(play.seen.values()) > STEPS // 10


def test_a_reshard_knows_nothing_of_one_before_whose_gaining_queue_was_deleted() -> None:
    play = Play(1, "x-consistent-hash", 2)
    play.fence = AsyncMock(return_value=True)  # type: ignore[method-assign]
    play._happen = lambda most: None  # type: ignore[method-assign]
    for _ in range(40):
        play.publish()
    while play.on_the_way:
        play._arrive()
    play.set(3)
    play.step()
    assert play.seen_step == Step.SETTLING
    (gaining,) = (queue for queue in play.world.vhost.parts("e") if hold_of(queue))
    # Both before the carrier looks again.
    play.world.ask(QueueRemove("/", gaining.name, False, False))
    play.set(4)
    play.fence = AsyncMock(return_value=False)  # type: ignore[method-assign]
    play.step()
    assert play.seen_step == Step.PASSING, (
        "what was routed since is on its way, whatever came before"
    )


QUEUES = [QueuePut("/", f"q{i}", i + 1, 0, part=ShardOf("e", i)) for i in range(2)]


def test_a_mark_of_a_former_life_is_set_anew() -> None:
    change = ReshardProgress(0.0)
    change.passed = True
    for question in change.questions(QUEUES):
        change.answered(question, 1, 50, 3)
    assert change.left(QUEUES) == {"q0": 3, "q1": 3}
    first, second = change.questions(QUEUES)
    assert first == Question(QUEUES[0], 50)
    change.answered(first, 2, 50, 0)  # by a shard that restarted: its places are others
    assert change.questions(QUEUES) == [Question(QUEUES[0], 0), second]
    assert not change.is_settled(QUEUES)


def test_nothing_is_asked_before_what_was_routed_by_the_old_bindings_has_arrived() -> None:
    change = ReshardProgress(0.0)
    assert change.questions(QUEUES) == []
    assert not change.is_settled([])


@pytest.mark.parametrize(
    ("deadline_ms", "overdue"), [(None, False), (1000, True), (1001, False), (0, True)]
)
def test_the_deadline_counts_from_the_change_of_the_bindings(
    deadline_ms: int | None, overdue: bool
) -> None:
    assert ReshardProgress(5.0).is_overdue(6.0, deadline_ms) == overdue


def test_queues_that_keep_back_are_not_waited_for() -> None:
    held = QueuePut("/", "q", 9, 0, part=ShardOf("e", 2, held=3))
    assert queues_losing_keys([*QUEUES, held]) == QUEUES
