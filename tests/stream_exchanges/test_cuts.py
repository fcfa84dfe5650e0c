"""Test readers of a stream exchange while its number of shards changes, again and again.

Every reader gets the new messages of each key in order, and all messages in the end, from whatever
offset it starts and whatever process dies meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardmq.broker.controller.groups.groups import (
    BOUND,
    GIVE,
    TAKE,
    Assignment,
    GroupConsumer,
    GroupOrder,
    Groups,
)
from shardmq.broker.controller.groups.groups import VirtualQueueName as Virtual
from shardmq.broker.controller.resharding import cuts
from shardmq.broker.controller.resharding.cuts import CUTS_MAX, FREE, Bounds, Crossing, Move
from shardmq.broker.model.changes import CLOSING, OPEN, Cut, ParameterPut, QueuePut, ShardOf
from shardmq.broker.shared.control import Answer, ConsumeTerms
from shardmq.shardd.wire import messages as wire
from tests.stream_exchanges.resharding_play import ReshardingPlay, Sent

VIRTUAL = Virtual("/", "e")
ROUNDS_MAX = 100  # until all is read: each gets over one change at least, or takes a step of one
STREAM = {"x-queue-type": "stream"}


@dataclass
class Log:
    """A stream at its shard: what is below `committed` lasts and can be read."""

    messages: list[Sent] = field(default_factory=list)
    committed: int = 0


@dataclass
class Reader:
    """A consumer's part at a stream. What it holds is not settled."""

    group: str
    offset: int
    stop: int | None
    mark: int | None
    holds: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return min([self.offset, *self.holds])


class Play(ReshardingPlay):
    """Controller, front door, shards and groups of consumers; one thing happens at a time."""

    def __init__(self, seed: int, kind: str, shards: int) -> None:
        super().__init__(seed)
        self.logs: dict[int, Log] = {}
        self.orders: list[GroupOrder] = []
        self.passes: list[tuple[GroupConsumer, Assignment, int]] = []
        self.readers: dict[tuple[GroupConsumer, Assignment], Reader] = {}
        self.consumers: dict[GroupConsumer, ConsumeTerms] = {}
        self.stored: dict[tuple[str, int], int] = {}  # by group and queue
        # numbers by group and key, in the order of first deliveries
        self.seen: dict[str, dict[str, list[int]]] = {}
        # by group that began at the end: what had been published
        self.since: dict[str, dict[str, int]] = {}
        self.groups = Groups(lambda n: 0)
        self.groups.begin()
        self.world.declare(type=kind, x_shards=shards, x_shard_arguments=STREAM)
        self.door_applies()
        self._exist()

    def _ids(self) -> tuple[int, ...]:
        return tuple(queue.id for queue in self.world.vhost.parts("e"))

    def _exist(self) -> None:
        for id in self._ids():
            self.logs.setdefault(id, Log())

    # -- what the carrier sees of the others

    async def ask(self, request: Any) -> Answer:
        self.world.ask(request)
        self._changed()
        self._happen(2)
        self.door_applies()
        return Answer(0)

    def _changed(self) -> None:
        self._exist()
        self.orders += self.groups.reshard(VIRTUAL, self._ids())
        self.orders += self.groups.cross(VIRTUAL, cuts.moves(self.world.vhost.parts("e")))

    async def tell_shards(self, queues: list[QueuePut]) -> list[QueuePut]:
        self._happen(2)
        return queues

    async def fence(self) -> bool:
        if self.random.random() < 0.3:
            return False
        while self.orders:
            self.obey()
        while self.on_the_way:
            self.arrive()
        return True

    def request(self, shard: int, message: Callable[[int], wire.Message]) -> asyncio.Future[Any]:
        self._happen(2)
        asked = message(1)
        assert isinstance(asked, wire.CountUnsettled)
        log = self.logs[asked.queue]
        until = asked.until or len(log.messages)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reply.set_result(wire.UnsettledCount(1, until, max(0, until - log.committed)))
        return reply

    # -- what happens

    def _happen(self, most: int) -> None:
        quiet = [
            self.publish,
            self.arrive,
            self.commit,
            self.deliver,
            self.deliver,
            self.settle,
            self.obey,
            self.tell,
        ]
        for _ in range(self.random.randrange(most + 1)):
            self.random.choice(quiet)()

    def arrive(self) -> None:
        if self.on_the_way:
            id, sent = self.on_the_way.pop(0)
            self.logs[id].messages.append(sent)

    def commit(self) -> None:
        log = self.random.choice([*self.logs.values()])
        log.committed = len(log.messages)

    def deliver(self, readers: list[tuple[GroupConsumer, Assignment]] | None = None) -> None:
        found = [*self.readers] if readers is None else readers
        if not found:
            return
        consumer, assignment = self.random.choice(found)
        reader, log = self.readers[consumer, assignment], self.logs[assignment.queue]
        if self._has_some(consumer, assignment):
            self._seen(reader.group, *log.messages[reader.offset])
            reader.holds.append(reader.offset)
            reader.offset += 1
        self._look(consumer, assignment)

    def _has_some(self, consumer: GroupConsumer, assignment: Assignment) -> bool:
        reader, log = self.readers[consumer, assignment], self.logs[assignment.queue]
        return reader.offset < (
            log.committed if reader.stop is None else min(log.committed, reader.stop)
        )

    def _seen(self, group: str, key: str, number: int) -> None:
        seen = self.seen[group].setdefault(key, [])
        if number not in seen:
            assert not seen or number > seen[-1], (
                f"group {group!r}: {key} {number} came after {seen[-1]}"
            )
            seen.append(number)

    def settle(self) -> None:
        if self.readers:
            consumer, assignment = self.random.choice([*self.readers])
            holds = self.readers[consumer, assignment].holds
            if holds:
                holds.pop(self.random.randrange(len(holds)))
            self._look(consumer, assignment)

    def _look(self, consumer: GroupConsumer, assignment: Assignment) -> None:
        reader = self.readers[consumer, assignment]
        if reader.mark is not None and reader.position >= reader.mark:
            reader.mark = None
            self.passes.append((consumer, assignment, reader.position))

    def tell(self) -> None:
        if self.passes:
            self.orders += self.groups.passed(*self.passes.pop(0))

    def obey(self) -> None:
        if not self.orders:
            return
        order = self.orders.pop(0)
        at = order.consumer, order.assignment
        if order.kind == GIVE:
            group = self.consumers[order.consumer].group if order.consumer in self.consumers else ""
            if not group:
                self.orders += self.groups.gave_up(*at)
                return
            assert not any(
                assignment == order.assignment and reader.group == group
                for (_, assignment), reader in self.readers.items()
            )
            log = self.logs[order.assignment.queue]
            begin = log.committed if group.startswith("next") and not order.fresh else 0
            offset = self.stored.setdefault((group, order.assignment.queue), begin)
            self.readers[at] = Reader(group, offset, *order.bounds)
            self._look(*at)
        elif order.kind == BOUND and at in self.readers:
            self.readers[at].stop, self.readers[at].mark = order.bounds
            self._look(*at)
        elif order.kind == TAKE:
            self._give_up(*at)

    def _give_up(self, consumer: GroupConsumer, assignment: Assignment) -> None:
        if (reader := self.readers.pop((consumer, assignment), None)) is not None:
            self.stored[reader.group, assignment.queue] = reader.position
        self.orders += self.groups.gave_up(consumer, assignment)

    def join(self, group: str = "") -> None:
        group = group or self.random.choice(["a", "a", "b"])
        consumer = GroupConsumer(0, 1, len(self.consumers) + 1)
        self.consumers[consumer] = ConsumeTerms(group=group)
        self.seen.setdefault(group, {})
        moves = cuts.moves(self.world.vhost.parts("e"))
        self.orders += self.groups.join(
            consumer, VIRTUAL, self.consumers[consumer], self._ids(), moves
        )

    def leave(self) -> None:
        here = [consumer for consumer, terms in self.consumers.items() if terms.group in ("a", "b")]
        if not here:
            return
        consumer = self.random.choice(here)
        self.consumers[consumer] = ConsumeTerms()  # its number is not used again
        self.orders += self.groups.leave(consumer)
        for who, assignment in [*self.readers]:
            if who == consumer:
                self._give_up(who, assignment)

    def rewind(self) -> None:
        """Somebody who reads it all from the beginning."""
        self.join(f"first {len(self.consumers)}")

    def shards_restart(self) -> None:
        """Restart the shards.

        Messages that are not on stable storage are lost; stored positions may be older ones.
        """
        self.epochs += 1
        for log in self.logs.values():
            del log.messages[log.committed :]
        for at, position in self.stored.items():
            self.stored[at] = (
                self.random.randint(0, position) if self.random.random() < 0.2 else position
            )
        for (consumer, assignment), reader in self.readers.items():
            reader.offset, reader.holds = reader.position, []
            self._look(consumer, assignment)

    def controller_restarts(self) -> None:
        self.carrier = self.new_carrier()
        self.world.decisions.restore()
        self.orders.clear()
        self.passes.clear()
        self.groups = Groups(lambda n: 0)
        moves = cuts.moves(self.world.vhost.parts("e"))
        for consumer, terms in self.consumers.items():
            assignments = [assignment for who, assignment in self.readers if who == consumer]
            if terms.group:
                self.orders += self.groups.restore(
                    consumer, VIRTUAL, terms, False, assignments, self._ids(), moves
                )
        self.orders += self.groups.begin()

    def set(self, number: int) -> None:
        self.world.ask(ParameterPut("/", "shards", "e", {"shards-per-node": number}))
        self._changed()

    def end(self) -> None:
        """No more is published; everything still there is read and settled."""
        for group in ("a", "b"):
            self.join(group)
        for _ in range(ROUNDS_MAX):
            self.door_applies()
            while self.on_the_way:
                self.arrive()
            for log in self.logs.values():
                log.committed = len(log.messages)
            self.step()
            while self.orders:
                self.obey()
            for at, reader in self.readers.items():
                while self._has_some(*at):
                    self.deliver([at])
                reader.holds.clear()
                self._look(*at)
            while self.passes:
                self.tell()
        there: dict[str, set[int]] = {}
        for log in self.logs.values():
            for key, number in log.messages:
                there.setdefault(key, set()).add(number)
        for group, seen in self.seen.items():
            for key, numbers in there.items():
                after = self.since.get(group, {}).get(key, 0)
                assert {n for n in numbers if n > after} <= set(seen.get(key, ())), (group, key)
        assert all(reader.stop is None for reader in self.readers.values())


ACTS = [
    *(["publish", "deliver", "settle", "arrive", "commit", "obey", "tell"] * 5),
    *(["step"] * 6),
    "set",
]
MEMBERS = ["join", "leave", "rewind"]
KILLS = ["controller_restarts", "shards_restart"]
STEPS = 500


@pytest.mark.parametrize("case", range(40))
def test_keys_stay_in_order_for_whoever_reads_and_all_comes(
    case: int, request: pytest.FixtureRequest
) -> None:
    seed = request.config.option.seed + case
    chance = random.Random(seed)
    play = Play(
        seed, "x-modulus-hash" if case % 4 > 1 else "x-consistent-hash", chance.randint(1, 6)
    )
    play.join("next")
    while play.orders:
        play.obey()
    acts = [*ACTS, *(MEMBERS * (case % 3)), *(KILLS if case % 2 else ())]
    play.run([(chance.choice(acts), chance.randint(1, 6)) for _ in range(STEPS)])
    play.end()
    assert sum(play.last.values()) > STEPS // 20


# -- one group at a change -------------------------------------------------------------------------

A, B, C = 1, 2, 3  # queues
GREW = Move(1, {C: 0}, {A: 5, B: 3})
AGAIN = Move(2, {A: 9}, {C: 0})
UNDER_WAY = Move(2, {A: 9}, None)


def test_who_has_not_settled_what_came_before_a_change_gets_nothing_of_what_came_after() -> None:
    crossing = Crossing()
    assert crossing.waits_for(GREW, (A, B, C)) == {A: 5, B: 3}
    open = crossing.open((GREW,), (A, B, C))
    assert [crossing.bounds(open, queue) for queue in (A, B, C)] == [
        Bounds(None, 5),
        Bounds(None, 3),
        Bounds(0, None),
    ]
    crossing.passed(A, 7)
    crossing.passed(B, 2)
    assert crossing.bounds(crossing.open((GREW,), (A, B, C)), C).stop == 0
    crossing.passed(B, 3)
    assert crossing.open((GREW,), (A, B, C)) == []


def test_a_change_waits_for_the_one_before_though_nothing_of_its_own_is_left() -> None:
    crossing = Crossing()
    assert crossing.open((GREW, AGAIN), (A, B, C)) == [GREW, AGAIN]
    assert crossing.bounds([GREW, AGAIN], A) == Bounds(9, 5)


def test_a_stream_that_is_gone_is_not_waited_for() -> None:
    crossing = Crossing()
    crossing.passed(A, 5)
    assert crossing.open((GREW,), (A, C)) == []


def test_nobody_gets_over_a_change_that_is_under_way() -> None:
    crossing = Crossing()
    for queue in (A, B, C):
        crossing.passed(queue, 100)
    open = crossing.open((GREW, UNDER_WAY), (A, B, C))
    assert open == [UNDER_WAY]
    assert [crossing.bounds(open, queue) for queue in (A, B)] == [Bounds(9, None), FREE]


def test_a_deadline_counts_for_each_group_and_for_one_change_after_the_other() -> None:
    crossing = Crossing()
    open = crossing.open((GREW, AGAIN), (A, B, C))
    assert crossing.overdue(open, 100.0, 1000) == set()
    assert crossing.overdue(open, 100.9, 1000) == set()
    assert crossing.overdue(open, 101.0, 1000) == {1}
    crossing.given_up.add(1)
    open = crossing.open((GREW, Move(2, {A: 9}, {C: 4})), (A, B, C))
    assert [move.number for move in open] == [2]
    assert crossing.overdue(open, 101.5, 1000) == set()
    assert crossing.overdue(open, 102.5, 1000) == {2}


def stream(id: int, held: int, *found: Cut) -> QueuePut:
    return QueuePut(
        "/", f"q{id}", id, 0, arguments=STREAM, part=ShardOf("e", id, held=held, cuts=found)
    )


def test_a_change_that_came_to_nothing_is_not_taken_for_the_next_one() -> None:
    given_up = stream(A, OPEN, Cut(1, 5, True))
    assert cuts.number_under_way([given_up, stream(B, OPEN)]) is None
    assert cuts.moves([given_up, stream(B, OPEN)]) == (Move(1, {A: 5}, {}),)
    closing = cuts.begun(stream(A, CLOSING, Cut(1, 5, True)), [given_up])
    assert cuts.cuts_of(closing) == () and cuts.number_of([closing]) == 1
    crossing = Crossing()
    assert crossing.open((Move(1, {A: 5}, {}),), (A, B)) == []
    assert crossing.open((), (A, B)) == []
    assert crossing.open((Move(1, {A: 9}, None),), (A, B)) == [Move(1, {A: 9}, None)]


def test_the_oldest_cuts_are_forgotten() -> None:
    queue = stream(A, OPEN)
    for number in range(1, CUTS_MAX + 3):
        queue = cuts.with_cut(queue, Cut(number, number, False))
    assert [cut.number for cut in cuts.cuts_of(queue)] == [*range(3, CUTS_MAX + 3)]


def test_a_group_goes_on_without_order_when_its_deadline_is_over() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    who = GroupConsumer(0, 1, 1)
    given = groups.join(who, VIRTUAL, ConsumeTerms(group="g"), (A, B, C), (GREW,))
    assert {order.assignment.queue: order.bounds.stop for order in given} == {
        A: None,
        B: None,
        C: 0,
    }
    assert groups.overdue(VIRTUAL, 10.0, 500) == ([], [])
    given_up, orders = groups.overdue(VIRTUAL, 10.5, 500)
    assert given_up == ["g"]
    assert {(order.kind, order.assignment.queue, order.bounds) for order in orders} == {
        (BOUND, q, FREE) for q in (A, B, C)
    }


def test_who_reads_one_shard_for_good_is_not_bound() -> None:
    groups = Groups(lambda n: n - 1)
    groups.begin()
    (order,) = groups.join(
        GroupConsumer(0, 1, 1), VIRTUAL, ConsumeTerms(assignment="random"), (A, B, C), (GREW,)
    )
    assert (order.assignment.queue, order.bounds) == (C, FREE)
