"""Publishers are held while that lets consumers keep up, and for no other reason.

A world of one shard is played in steps of a millisecond. Its publishers send as much as their
window of credit allows. Its consumers are of one kind, which may change: some take more when the
publishers wait, and some do not.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.shardd import holding
from shardmq.shardd.holding import (
    BEHIND_MESSAGES,
    HOLDING_MS,
    MEASURING_MS,
    OVERHEAD_BYTES,
    REST_MS,
    REST_MS_MAX,
    SETTLING_MS,
    SLOW_TIMES,
    TRYING_MS,
    Holding,
    State,
    Watch,
)
from shardmq.shardd.peers import PUBLISH_CREDIT_BYTES, Peer
from shardmq.shardd.shard import Shard
from shardmq.shardd.wire import envelope
from tests.support.dict_store import DictHome

WINDOW_BYTES = 1 << 20
BODY_BYTES = 16
WEIGHT = BODY_BYTES + OVERHEAD_BYTES
# What publishers send in a millisecond if nothing holds them.
FLOOD = 5000
TRIAL_MS = SETTLING_MS + TRYING_MS
# The longest time without credit while the consumers take nothing.
HELD_MS_MAX = TRIAL_MS + (SLOW_TIMES + 1) * holding.INTERVAL_MS

# What consumers take in a millisecond while publishers go on, and while publishers wait.
KINDS = {
    "starved": (40, 400),  # of the processor
    "starved a little": (200, 320),
    "quick, but full": (400, 400),
    "slow": (1, 1),
    "slow, and starved": (0, 5),
    "stuck": (0, 0),
    "the publisher itself": (100, 0),
}
HELD_FOR = {"starved", "starved a little"}


class Door:
    """A front door: it sends what its window allows, and counts what is credited."""

    def __init__(self) -> None:
        self.taken = self.withheld = self.in_flight = 0

    def send(self, most: int) -> int:
        sent = min(most, max(0, (WINDOW_BYTES - self.in_flight) // WEIGHT))
        self.in_flight += sent * WEIGHT
        self.taken += sent * WEIGHT
        return sent

    def answer(self) -> None:
        if self.taken >= PUBLISH_CREDIT_BYTES:
            self.in_flight -= self.taken
            self.taken = 0


class World:
    def __init__(self, made: Holding, kind: str, seed: int, doors: int = 1) -> None:
        self.numbers = random.Random(seed)
        self.holding, self.kind = made, kind
        self.doors = [Door() for _ in range(doors)]
        self.now = 1_000_000
        self.backlog = SimpleNamespace(
            ready_count=0, ready_bytes=0, counters=SimpleNamespace(delivered=0)
        )
        self.consumers = SimpleNamespace(all=[1])
        self.queue: Any = World.Queue(self)
        self.longest = self.published = 0
        self.without_credit = self.worst_without = 0
        self.held_ms = 0

    class Queue:
        deleted = False
        keeps_in_store = True

        def __init__(self, world: World) -> None:
            self.backlog, self.consumers = world.backlog, world.consumers

    def run(self, length_ms: int) -> World:
        for _ in range(length_ms):
            self._step()
        return self

    def _step(self) -> None:
        self.now += 1
        sent = sum(door.send(FLOOD // len(self.doors)) for door in self.doors)
        self.published += sent
        free, held = KINDS[self.kind]
        most = held if sent < FLOOD // 2 else free
        most = int(most * self.numbers.uniform(0.8, 1.2)) if most > 4 else most
        backlog = self.backlog
        taken = min(most, backlog.ready_count + sent) if self.consumers.all else 0
        backlog.ready_count += sent - taken
        backlog.ready_bytes = backlog.ready_count * BODY_BYTES
        backlog.counters.delivered += taken
        self.longest = max(self.longest, backlog.ready_count)
        # A shard that has nothing to do sleeps until it is due.
        due = self.holding.next_due
        if not (sent or taken or (due is not None and due <= self.now)):
            self.without_credit += 1
            self.worst_without = max(self.worst_without, self.without_credit)
            return
        if holding.is_behind(self.queue):
            self.holding.look(self.queue, self.now)
        if self.holding.is_on:
            self.holding.pace(self.doors, self.now)
        self.held_ms += any(door.withheld for door in self.doors)
        for door in self.doors:
            door.answer()
        stuck = not taken and all(door.in_flight + WEIGHT > WINDOW_BYTES for door in self.doors)
        self.without_credit = self.without_credit + 1 if stuck else 0
        self.worst_without = max(self.worst_without, self.without_credit)


def never_stuck(kind: type[Holding], seed: int) -> int:
    """Return the longest time in which nobody published and nobody consumed, as kinds change."""
    numbers = random.Random(seed)
    world = World(kind(), "starved", seed, numbers.randrange(1, 4))
    for _ in range(12):
        world.kind = numbers.choice(list(KINDS))
        world.consumers.all = [1] if numbers.random() < 0.8 else []
        world.run(numbers.choice([30, 300, 3000]))
    return world.worst_without


def longest(kind: type[Holding], what: str, seed: int, doors: int = 1) -> int:
    """Return how long a queue becomes beside a flood of ten seconds."""
    return World(kind(), what, seed, doors).run(10_000).longest


def share_held(kind: type[Holding], what: str, seed: int) -> float:
    """Return the share of twenty seconds of flood in which publishers were held."""
    return World(kind(), what, seed).run(20_000).held_ms / 20_000


# A trial needs this long, and the flood goes on for a part of it. One trial in vain is allowed for.
BOUND = BEHIND_MESSAGES + FLOOD * 2 * (MEASURING_MS + SETTLING_MS + REST_MS) * 1.2
# Trials with rests that become twice as long, in twenty seconds, and some milliseconds more.
SHARE_MAX = 12 * (TRIAL_MS + 10) / 20_000
SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_credit_comes_back_soon_whatever_consumers_do(seed: int) -> None:
    assert never_stuck(Holding, seed) <= HELD_MS_MAX


@pytest.mark.parametrize("what", sorted(HELD_FOR))
@pytest.mark.parametrize("doors", [1, 3])
def test_a_queue_whose_consumers_could_take_it_is_bounded(what: str, doors: int) -> None:
    assert max(longest(Holding, what, seed, doors) for seed in range(5)) <= BOUND


@pytest.mark.parametrize("what", sorted(KINDS.keys() - HELD_FOR))
def test_consumers_that_are_full_hold_nobody_for_long(what: str) -> None:
    assert max(share_held(Holding, what, seed) for seed in range(5)) <= SHARE_MAX


def test_a_queue_without_consumers_holds_nobody() -> None:
    world = World(Holding(), "starved", 1)
    world.consumers.all = []
    assert world.run(5000).held_ms == 0
    assert world.published == 5000 * FLOOD


def test_who_is_held_gets_credit_for_what_consumers_take() -> None:
    world = World(Holding(), "starved", 1).run(1000)
    before, taken = world.published, world.backlog.counters.delivered
    world.run(HOLDING_MS // 2)
    taken = world.backlog.counters.delivered - taken
    assert 0.6 * taken < world.published - before < taken + WINDOW_BYTES // WEIGHT


# -- broken variants must be caught --------------------------------------------------------------


class NeverLetsGo(Holding):
    """Holds for ever who was held once."""

    def pace(self, feeders: Any, now: int) -> None:
        held = self._withholds
        super().pace(feeders, now)
        if held and not self._withholds:
            for feeder in feeders:
                feeder.withheld, feeder.taken = feeder.withheld + feeder.taken, 0


class TriesNothing(Holding):
    """Holds whoever publishes to a queue that is behind."""

    def look(self, queue: Any, now: int) -> None:
        super().look(queue, now)
        watch = self._watches.get(queue)
        if watch is not None and watch.state is not State.HOLDING:
            watch.state, watch._limits, watch._held_at = State.HOLDING, True, now


class HoldsNobody(Holding):
    def look(self, queue: Any, now: int) -> None: ...


def test_broken_variants_are_caught() -> None:
    assert max(never_stuck(NeverLetsGo, seed) for seed in SEEDS) > HELD_MS_MAX
    assert share_held(TriesNothing, "quick, but full", 1) > SHARE_MAX
    assert longest(HoldsNobody, "starved", 1) > BOUND


def test_rests_become_longer_up_to_a_bound() -> None:
    world = World(Holding(), "slow", 1)
    rests = []
    state = None
    for _ in range(40_000):
        world._step()
        watch = world.holding._watches.get(world.queue)
        if watch is not None and watch.state is not state:
            state = watch.state
            if state is State.RESTING:
                rests.append(watch.until - world.now)
    assert rests[:8] == [min(REST_MS << n, REST_MS_MAX) for n in range(8)]
    assert rests[-1] == REST_MS_MAX


def test_a_queue_that_is_gone_is_forgotten_and_credit_with_it_comes_back() -> None:
    world = World(Holding(), "starved", 1)
    while not world.holding._withholds:
        world._step()
    world.queue.deleted = True
    world.holding.pace(world.doors, world.now)
    assert not world.holding.is_on and world.holding.next_due is None
    assert [door.withheld for door in world.doors] == [0]


def test_the_states_that_follow_each_other_are_those_of_the_table() -> None:
    watch = Watch(World(Holding(), "starved", 1).queue, 0)
    with pytest.raises(AssertionError):
        watch._become(State.HOLDING, 0, 1)


def test_credit_that_is_held_comes_back_with_the_next_pass_on_the_short_way_too() -> None:
    shard = Shard(0, 7, 1, DictHome())
    peer = shard.peers[3] = Peer(3, 5, "ipc://door", 7, 0)
    peer.withheld = 2 * PUBLISH_CREDIT_BYTES
    world = World(shard._serving.holding, "starved", 1)
    shard._serving.holding.look(world.queue, world.now)
    world.queue.deleted = True
    ((endpoint, message),) = shard.turn_end(world.now + 1)
    assert endpoint == peer.endpoint and isinstance(message, bytes)
    assert envelope.read_credit(message) == [(0, 2 * PUBLISH_CREDIT_BYTES)]
    assert (peer.withheld, shard._serving.holding.is_on) == (0, False)
