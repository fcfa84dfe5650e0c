"""Which steps a move takes, what is refused, and which queues move to even out their numbers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.controller.moving.spread import evened_out
from shardmq.broker.controller.requests import MOVED, Forget, Move, MoveOn, Removal
from shardmq.broker.front_door.publish.targets import is_shut
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    ARRIVED,
    BEGUN,
    CALLED_OFF,
    CHOSEN,
    HELD,
    PASSING,
    SHUT,
    Moving,
    QueuePut,
    ShardOf,
    VhostPut,
    other_life,
    taking,
)
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import QueueDeclare, QueueRemove


class World:
    def __init__(self) -> None:
        self.ids = 0
        self.catalog = Catalog(routes=False)
        self.catalog.apply(VhostPut("/"))
        self.decisions = Decisions(self.catalog, self._new_id, lambda: "name", Placement([0, 1, 2]))

    def _new_id(self) -> int:
        self.ids += 1
        return self.ids

    def ask(self, request: Any) -> Decision:
        decision = self.decisions.decide(request, "")
        for change in decision.changes:
            self.catalog.apply(change)
        return decision

    def declare(self, name: str = "q", **arguments: Any) -> QueuePut:
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.ask(QueueDeclare("/", name, True, False, False, named))
        return self.queue(name)

    def queue(self, name: str = "q") -> QueuePut:
        queue = self.catalog.queue("/", name)
        assert queue is not None
        return queue

    def move(self) -> tuple[QueuePut, QueuePut]:
        """Begin to move a queue; return it as it was and as it is."""
        old = self.declare()
        self.ask(Move("/", "q", (old.shard + 1) % 3))
        assert self.queue().id == old.id
        self.step(BEGUN)
        return old, self.queue()

    def step(self, step: int) -> Decision:
        moving = self.queue().moving
        assert moving is not None
        return self.ask(MoveOn("/", "q", moving.id, step))


def lives(queues: list[QueuePut]) -> list[tuple[int, int]]:
    return [(queue.id, queue.shard) for queue in queues]


def test_a_move_takes_its_steps_and_ends_with_the_old_life_deleted() -> None:
    world = World()
    old, new = world.move()
    assert new.id != old.id and new.shard != old.shard
    assert new.moving == Moving(old.id, old.shard, BEGUN)
    assert lives([taking(new)]) == lives([old])
    assert lives(world.step(PASSING).create) == lives([old])
    world.step(SHUT)
    assert lives(world.step(MOVED).drop) == lives([old])
    assert world.queue().moving is None and lives([world.queue()]) == lives([new])


def test_a_move_can_be_called_off_before_messages_pass_and_not_later() -> None:
    world = World()
    old, new = world.move()
    world.step(CALLED_OFF)
    assert lives([world.queue()]) == lives([taking(world.queue())]) == lives([old])
    assert lives(world.step(MOVED).drop) == lives([new])
    world = World()
    world.move()
    world.step(PASSING)
    with pytest.raises(Refusal, match="messages are at its new place"):
        world.step(CALLED_OFF)


def test_steps_that_come_late_or_twice_change_nothing() -> None:
    world = World()
    old, new = world.move()
    assert world.ask(MoveOn("/", "q", new.id, PASSING)) == Decision()
    for late in (SHUT, MOVED):
        assert not world.step(late).changes
    world.step(PASSING)
    assert not world.step(BEGUN).changes
    again = world.step(PASSING)
    assert not again.changes and lives(again.create) == [*lives([new]), *lives([old])]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"x_message_deduplication": True}, "deduplication"),
    ],
)
def test_what_cannot_move_is_refused(arguments: dict[str, Any], why: str) -> None:
    world = World()
    queue = world.declare(**arguments)
    with pytest.raises(Refusal, match=why):
        world.ask(Move("/", "q", (queue.shard + 1) % 3))


def test_a_queue_that_moves_goes_with_both_lives() -> None:
    for request in (
        lambda world: QueueRemove("/", "q", False, False),
        lambda world: Removal([world.queue().id]),
    ):
        world = World()
        old, new = world.move()
        assert lives(world.ask(request(world)).drop) == lives([new, old])
        assert world.catalog.queue("/", "q") is None
    world = World()
    old, new = world.move()
    assert lives(world.ask(Removal([new.id], at_shard=True)).drop) == lives([old])


def test_a_queue_that_moves_is_not_deleted_for_being_empty() -> None:
    world = World()
    world.move()
    with pytest.raises(Refusal, match="nobody knows whether it is empty"):
        world.ask(QueueRemove("/", "q", False, True))


def test_of_a_node_that_is_gone_only_what_is_nowhere_else_is_lost() -> None:
    world = World()
    old, new = world.move()
    world.step(PASSING)
    world.ask(Forget(frozenset((old.shard,))))
    assert world.queue().moving is None and lives([world.queue()]) == lives([new])
    world = World()
    old, new = world.move()
    world.step(PASSING)
    decision = world.ask(Forget(frozenset((new.shard,))))
    assert world.queue().moving == Moving(old.id, old.shard, PASSING)
    assert world.queue().id not in (old.id, new.id)
    assert lives(decision.create) == lives([world.queue(), old])
    world = World()
    queue = world.declare()
    assert not world.ask(Forget(frozenset((queue.shard,)))).drop
    assert world.catalog.queue("/", "q") is None


@pytest.mark.parametrize("seed", range(50))
def test_the_fewest_queues_move_until_their_numbers_differ_by_one(seed: int) -> None:
    pick = random.Random(seed)
    shards = list(range(pick.randrange(1, 6)))
    queues = [
        QueuePut("/", f"q{number}", number + 1, pick.choice([0, 0, *shards]))
        for number in range(pick.randrange(60))
    ]
    planned = evened_out(queues, shards)
    assert len({each.queue.id for each in planned}) == len(planned)
    to = {each.queue.id: each.to for each in planned}
    before = Counter(dict.fromkeys(shards, 0))
    before.update(queue.shard for queue in queues)
    after = Counter(dict.fromkeys(shards, 0))
    after.update(to.get(queue.id, queue.shard) for queue in queues)
    assert max(after.values()) - min(after.values()) <= 1
    least, more = divmod(len(queues), len(shards))
    most = sorted(before.values(), reverse=True)
    fewest = sum(max(0, count - least - (at < more)) for at, count in enumerate(most))
    assert len(planned) == fewest


def test_streams_move_to_even_out_and_those_of_exchanges_stay() -> None:
    arguments = {"x-queue-type": "stream"}
    streams = [QueuePut("/", f"s{n}", n, 0, arguments=arguments) for n in range(1, 5)]
    parts = [
        QueuePut("/", f"part{n}", n, 0, arguments=arguments, part=ShardOf("events", n))
        for n in range(10, 14)
    ]
    planned = evened_out([*streams, *parts], [0, 1])
    assert {each.queue.name for each in planned} == {"s1", "s2", "s3", "s4"}


# -- streams ---------------------------------------------------------------------------------------


def begin_stream(world: World) -> tuple[QueuePut, QueuePut]:
    """Begin to move a stream; return its old life and its new one."""
    old = world.declare(x_queue_type="stream")
    world.ask(Move("/", "q", (old.shard + 1) % 3))
    return old, other_life(world.queue())


def test_a_stream_is_used_at_one_place_at_a_time() -> None:
    world = World()
    old, new = begin_stream(world)
    for step in (HELD, CHOSEN, HELD):  # a shard was away
        world.step(step)
        assert lives([world.queue(), taking(world.queue())]) == lives([old, old])
        assert is_shut(world.queue()) == (step == HELD)
    told = world.step(ARRIVED).create
    assert lives([world.queue(), taking(world.queue())]) == lives([new, new])
    assert not is_shut(world.queue()) and lives(told)[0] == lives([new])[0]
    for late in (HELD, CHOSEN, SHUT, BEGUN):
        assert not world.step(late).changes
    with pytest.raises(Refusal, match="messages are at its new place"):
        world.step(CALLED_OFF)
    assert lives(world.step(MOVED).drop) == lives([old])
    assert world.queue().moving is None


def test_readers_know_a_stream_by_the_same_id_wherever_it_lives() -> None:
    world = World()
    old, _ = begin_stream(world)
    for _ in range(2):
        for step in (HELD, ARRIVED, MOVED):
            world.step(step)
            assert world.queue().stream_id == old.id
        world.ask(Move("/", "q", (world.queue().shard + 1) % 3))
        assert world.queue().stream_id == old.id != world.queue().id


@pytest.mark.parametrize("step", [CHOSEN, HELD])
def test_the_move_of_a_stream_is_called_off_until_it_has_arrived(step: int) -> None:
    world = World()
    old, new = begin_stream(world)
    world.step(step)
    world.step(CALLED_OFF)
    assert lives([world.queue(), taking(world.queue())]) == lives([old, old])
    assert not world.step(ARRIVED).changes
    assert lives(world.step(MOVED).drop) == lives([new])


@pytest.mark.parametrize("step", [CHOSEN, HELD, ARRIVED])
def test_of_a_stream_the_life_in_use_counts_when_a_node_is_gone(step: int) -> None:
    for which in (0, 1):
        world = World()
        both = begin_stream(world)
        for each in (CHOSEN, HELD, ARRIVED):
            world.step(each)
            if each == step:
                break
        gone, left = both[which], both[1 - which]
        decision = world.ask(Forget(frozenset((gone.shard,))))
        if step != ARRIVED and gone is both[0]:
            assert world.catalog.queue("/", "q") is None  # the other one does not have all
            continue
        assert lives([world.queue()]) == lives([left]) and world.queue().moving is None
        assert not decision.drop
