"""Test the credit scheme in random histories: limits, allotments, and messages between them.

The limits and allotments are the real ones. Queues are counts of messages, connections are lists: a
message arrives when the history says so. Four things hold in each history: never more
unacknowledged than allowed; never idle while there is a message, room and credit; fair within a
bound; and few messages about credit for each message delivered. Broken variants of the scheme,
which the histories must catch, show that the histories can fail.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.front_door.consume import credit
from shardmq.broker.front_door.consume.credit import ROUND_S, Allotment, Limit
from shardmq.broker.front_door.hot_state import GRANTED, LEFT, AllotmentState, LimitState
from shardmq.shardd.queues import allotment as shard_side
from shardmq.shardd.queues.log_order import LogOrder
from shardmq.shardd.wire.messages import DRAIN, KEEP, STOP, UNLIMITED
from tests.reference import credit as slow

MANY = 1 << 30


class Violation(Exception):
    pass


class CountedQueue:
    """A queue, its only consumer, and what that consumer holds."""

    def __init__(self, number: int, shard: Shard, prefetch: int = 0) -> None:
        self.number = number
        self.shard = shard
        self.prefetch = prefetch  # of a consumer of its own
        self.allotment: Any = None
        self.is_attached = False
        self.is_paused = False
        self.ready = self.held = 0
        self.dispatch = self

    def head(self) -> int:
        return 0

    @property
    def may(self) -> bool:
        free = self.prefetch - self.held if self.prefetch else MANY
        return self.is_attached and not self.is_paused and self.ready > 0 and free > 0

    def room(self) -> int:
        mine = self.allotment
        if mine is None:
            return MANY
        order = mine.order
        waits = order is not None and mine.is_limited and order.current is not self
        if waits and not order.begin(self, self.shard.now):
            return 0
        return int(min(mine.left, self.prefetch - self.held if self.prefetch else MANY))

    def deliver(self) -> None:
        shard = self.shard
        while self.may and not shard.is_blocked:
            count = min(self.room(), self.ready, shard.piece)
            if count <= 0:
                break
            self.ready -= count
            self.held += count
            if self.allotment is not None:
                self.allotment.used += count
            shard.delivers(self, count)
        if (mine := self.allotment) is None:
            return
        waits = self.may and (mine.left <= 0 or shard.is_blocked)
        still = waits
        if mine.order is not None:
            mine.order.end(self, waits or (self.may and mine.order.current is not self), waits)
            still = not mine.order.is_idle
        if mine.ended(still, shard.is_blocked):
            shard.reports(mine)


class Shard:
    """One process of a shard, with the messages on their way to it and from it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.now = 0
        self.piece = MANY  # most messages of one delivery
        self.is_blocked = False  # the client does not read
        self.is_away = False
        self.stops = 0  # STOPs on their way here, or answers to them
        self.allotments: dict[int, Any] = {}
        self.queues: dict[int, CountedQueue] = {}
        self.dirty: dict[CountedQueue, None] = {}
        self.heard: deque[Callable[[], None]] = deque()
        self.said: deque[Callable[[], None]] = deque()

    def wake(self, queue: CountedQueue) -> None:
        self.dirty[queue] = None

    def delivers(self, queue: CountedQueue, count: int) -> None:
        self.world.on_way(queue, count)
        self.said.append(lambda: self.world.delivered(queue, count))

    def reports(self, mine: Any) -> None:
        number, used, waits = mine.report
        self.world.reports += 1
        self.said.append(lambda: self.world.reported(number, self.number, used, waits))

    def turn(self, most: int) -> None:
        for _ in range(min(most, len(self.heard))):
            self.heard.popleft()()
        for _ in range(most):
            if self.dirty:
                queue = next(iter(self.dirty))
                del self.dirty[queue]
                queue.deliver()

    def attach(self, queue: CountedQueue, number: int, is_group: bool, is_limited: bool) -> None:
        queue.is_attached = True
        self.dirty[queue] = None
        if is_group:
            if number not in self.allotments:
                order = LogOrder(self.wake)
                self.allotments[number] = shard_side.Allotment(number, None, order, is_limited)
            queue.allotment = self.allotments[number]
        elif is_limited:
            queue.allotment = self.allotments[number] = shard_side.Allotment(number)

    def allot(self, number: int, allowed: int, mode: int) -> None:
        mine = self.allotments.get(number)
        if mine is None:
            queue = self.queues[number]
            mine = self.allotments[number] = shard_side.Allotment(
                number, used=queue.held + queue.shard.settled(queue)
            )
            queue.allotment = mine
        if mode == STOP:
            mine.stop(allowed)
            self.reports(mine)
            self.said.append(self.stopped)
        elif mine.allow(None if allowed == UNLIMITED else allowed, mode == DRAIN):
            self.reports(mine)
        if mine.order is None:
            self.dirty[self.queues[number]] = None
        else:
            mine.order.go_on(self.now)

    def stopped(self) -> None:
        self.world.note_bound()
        self.stops -= 1

    def settled(self, queue: CountedQueue) -> int:
        return self.world.settled_here[queue]

    def detach(self, queue: CountedQueue) -> None:
        queue.is_attached = False
        if queue.allotment is not None and queue.allotment.order is not None:
            queue.allotment.order.leave(queue)


class World:
    """A channel with single consumers and group consumers, and its shards.

    Queue numbers up to `singles` are those of single consumers; the others belong to groups. With
    `is_compiled` the compiled code shares what it can, as in a front door with its short way.
    """

    is_compiled = False
    # Each ALLOT of the worlds since somebody cleared this list, and how many of them compiled code
    # has decided.
    told: list[tuple[float, int, int, int, int]] = []
    plain = 0

    def __init__(
        self, shards: int, most: int, groups: dict[int, int], seats: list[tuple[int, int, int]]
    ) -> None:
        """`most` is the limit of the channel, `groups` has those of group consumers by number.

        `seats` has the group (0: none), the shard and the own prefetch of each queue.
        """
        self.now = 0.0
        self.shards = [Shard(self, at) for at in range(shards)]
        self.channel = Limit(most)
        self.queues: list[CountedQueue] = []
        self.group_of: dict[CountedQueue, int] = {}  # number of the group
        self.groups = {number: Limit(most) for number, most in groups.items()}
        self.allotments: dict[tuple[int, int], Allotment] = {}  # by number and shard
        self.delivered_of: dict[CountedQueue, int] = {}  # of this process of its shard
        self.settled_here: dict[CountedQueue, int] = {}
        self.counted: dict[
            CountedQueue, int
        ] = {}  # deliveries that count for the limit of its group
        # What the client holds: queue, process of its shard, count.
        self.client: deque[tuple[CountedQueue, int, int]] = deque()
        self.processes = [0] * shards
        self.ways: dict[CountedQueue, int] = {}
        self.waiting_for_batch: dict[Limit, None] = {}
        self.reports = self.allots = self.deliveries = 0
        # More than a limit may be out when it is lowered: then no more than was out.
        self.bounds: dict[Limit, int] = {}
        for number, at, prefetch in seats:
            queue = CountedQueue(len(self.queues) + 1, self.shards[at], prefetch)
            self.queues.append(queue)
            queue.shard.queues[queue.number] = queue
            self.delivered_of[queue] = self.settled_here[queue] = self.counted[queue] = self.ways[
                queue
            ] = 0
            if number:
                self.group_of[queue] = number
            self.attach(queue)

    # -- the front door ------------------------------------------------------------------------

    def limits_of(self, number: int) -> tuple[Limit, ...]:
        limits = [self.groups[number]] if number in self.groups else []
        return tuple(limit for limit in (*limits, self.channel) if limit.most)

    def attach(self, queue: CountedQueue) -> None:
        number, shard = self.group_of.get(queue, queue.number), queue.shard
        limits = self.limits_of(number)
        if (number, shard.number) not in self.allotments and (limits or queue in self.group_of):
            mine = self.allotments[number, shard.number] = Allotment(number, shard.number)
            mine.put_under(limits)
        is_group = queue in self.group_of
        shard.heard.append(lambda: shard.attach(queue, number, is_group, bool(limits)))

    def tell(self, told: list[Allotment]) -> None:
        for each in told:
            shard = self.shards[each.shard]
            self.allots += 1
            World.told.append((self.now, each.number, each.shard, each.allowed, each.mode))
            if not shard.is_away:
                number, allowed, mode = each.number, each.allowed, each.mode
                shard.stops += mode == STOP
                shard.heard.append(lambda n=number, a=allowed, m=mode, s=shard: s.allot(n, a, m))  # type: ignore[misc]

    def share(self, limit: Limit, at_once: bool = False) -> None:
        if self.is_compiled and not at_once and limit.free >= limit.waits_for and limit.may_share:
            done = limit.go_on(self.now)
            assert done in (GRANTED, LEFT)
            if done == GRANTED:
                World.plain += 1
                assert limit.turn is not None
                self.tell([limit.turn])
                self.check_sums()
                return
        shared = limit.share(self.now, at_once)
        self.tell(shared.told)
        if shared.waits:
            self.waiting_for_batch[limit] = None
        self.check_sums()

    def share_all(self, at_once: bool = False) -> None:
        for limit in (self.channel, *self.groups.values()):
            self.share(limit, at_once)

    def delivered(self, queue: CountedQueue, count: int) -> None:
        self.ways[queue] -= count
        self.deliveries += count
        self.delivered_of[queue] += count
        self.client.append((queue, self.processes[queue.shard.number], count))
        self.channel.unacked += count
        number = self.group_of.get(queue, queue.number)
        if queue in self.group_of:
            self.groups[number].unacked += count
            self.counted[queue] += count
        mine = self.allotments.get((number, queue.shard.number))
        if mine is None:
            return
        used_up = mine.use(count) if self.is_compiled else slow.use(mine, count)
        if used_up and mine.limits and mine.home.may_share:
            self.share(mine.home)

    def reported(self, number: int, shard: int, used: int, waits: bool) -> None:
        mine = self.allotments.get((number, shard))
        if mine is not None:
            mine.reported(used, waits)
            if mine.limits:
                self.share(mine.home)

    def ack(self, count: int) -> None:
        """Settle the oldest deliveries that the client holds."""
        while count and self.client:
            queue, process, held = self.client.popleft()
            some = min(count, held)
            if some < held:
                self.client.appendleft((queue, process, held - some))
            count -= some
            self.channel.unacked -= some
            shard = queue.shard
            if process == self.processes[shard.number]:
                if queue in self.group_of:
                    self.groups[self.group_of[queue]].unacked -= min(some, self.counted[queue])
                    self.counted[queue] -= min(some, self.counted[queue])
                if not shard.is_away:
                    shard.heard.append(lambda q=queue, n=some: self._settle(q, n))  # type: ignore[misc]
        self.share_all()

    def _settle(self, queue: CountedQueue, count: int) -> None:
        queue.held -= count
        self.settled_here[queue] += count
        if queue.prefetch:
            queue.shard.dirty[queue] = None

    def acks_waited(self) -> None:
        waiting, self.waiting_for_batch = self.waiting_for_batch, {}
        for limit in waiting:
            self.share(limit, at_once=True)

    def change_limit(self, most: int) -> None:
        was = self.channel.most
        self.bounds[self.channel] = self.out(self.queues, lost_too=True)
        told: list[Allotment] = []
        if bool(was) == bool(most):
            told += self.channel.change(most) if most else []
        else:
            self.channel.most = most
            for queue in self.queues:
                number, shard = self.group_of.get(queue, queue.number), queue.shard.number
                mine = self.allotments.get((number, shard))
                if mine is None:
                    mine = self.allotments[number, shard] = Allotment(
                        number, shard, self.delivered_of[queue]
                    )
                if mine.limits != self.limits_of(number) and mine.put_under(self.limits_of(number)):
                    told.append(mine)
            told += self.channel.change(most) if most else []
        self.tell(list(dict.fromkeys(told)))
        self.share_all()

    def away(self, shard: Shard) -> None:
        """End the process of a shard; what it had sent is received."""
        shard.heard.clear()
        while shard.said:
            shard.said.popleft()()
        shard.is_away = True
        shard.stops = 0
        shard.heard.clear()
        shard.dirty.clear()
        shard.allotments.clear()
        for queue in shard.queues.values():
            queue.ready += queue.held
            queue.held = self.settled_here[queue] = self.delivered_of[queue] = 0
            queue.is_attached, queue.allotment = False, None
            if queue in self.group_of:
                self.groups[self.group_of[queue]].unacked -= self.counted[queue]
                self.counted[queue] = 0
        for key in [key for key in self.allotments if key[1] == shard.number]:
            self.allotments.pop(key).put_under(())
        self.share_all()

    def back(self, shard: Shard) -> None:
        shard.is_away = False
        self.processes[shard.number] += 1
        for queue in shard.queues.values():
            self.attach(queue)

    # -- what must hold ------------------------------------------------------------------------

    def out(self, queues: list[CountedQueue], lost_too: bool) -> int:
        """Return how many messages of these queues are on their way or not settled."""
        held = sum(
            count
            for queue, process, count in self.client
            if queue in queues
            and (
                lost_too
                or (process == self.processes[queue.shard.number] and not queue.shard.is_away)
            )
        )
        return held + sum(self.ways[queue] for queue in queues)

    def on_way(self, queue: CountedQueue, count: int) -> None:
        self.ways[queue] += count
        number = self.group_of.get(queue)
        if number is not None and self.groups[number].most:
            own = [each for each in self.queues if self.group_of.get(each) == number]
            if self.out(own, lost_too=False) > self.groups[number].most:
                raise Violation(
                    f"group {number}: {self.out(own, lost_too=False)} of {self.groups[number].most}"
                )

    def check_channel(self) -> None:
        """Check the limit of the channel, which may have come while messages were on their way."""
        self.note_bound()
        if self.channel.most:
            out, bound = self.out(self.queues, lost_too=True), self.bounds.get(self.channel, 0)
            if out > max(self.channel.most, bound):
                raise Violation(f"channel: {out} of {self.channel.most}")
            if out <= self.channel.most:
                self.bounds.pop(self.channel, None)

    def note_bound(self) -> None:
        """Note what may be out while the front door does not know what was delivered before."""
        if any(shard.stops for shard in self.shards):
            self.bounds[self.channel] = self.out(self.queues, lost_too=True) + self.channel.allotted

    def check_sums(self) -> None:
        for limit in (self.channel, *self.groups.values()):
            under = [each for each in self.allotments.values() if limit in each.limits]
            nested = sum(limit in each.limits[1:] for each in under)
            counts = (limit.allotted, limit.members, limit.nested)
            if counts != (sum(each.unused for each in under), len(under), nested):
                raise Violation("sums")

    def rest(self) -> None:
        """Let everything arrive."""
        for _ in range(2000):
            for shard in self.shards:
                if not shard.is_away:
                    shard.turn(3)
                for _ in range(min(3, len(shard.said))):
                    shard.said.popleft()()
            self.acks_waited()
            on_way = any(shard.heard or shard.said or shard.dirty for shard in self.shards)
            if not on_way and not self.waiting_for_batch:
                return
        raise Violation("they never come to rest")

    def check_not_idle(self) -> None:
        """Check, when all is at rest, that each message that waits has a reason."""
        for queue in self.queues:
            if not queue.may or queue.shard.is_blocked or queue.shard.is_away:
                continue
            limits = self.limits_of(self.group_of.get(queue, queue.number))
            if all(limit.unacked < limit.most for limit in limits):
                raise Violation(f"queue {queue.number} is idle")

    def check_agreed(self) -> None:
        for (number, at), mine in self.allotments.items():
            there = self.shards[at].allotments.get(number)
            if there is not None and mine.used != there.used:
                raise Violation(f"allotment {number}: {mine.used} here, {there.used} there")


def random_world(rng: random.Random, mosts: list[int]) -> World:
    shards, singles = rng.randint(1, 3), rng.randint(0, 3)
    seats = [(0, rng.randrange(shards), rng.choice([0, 0, 1, 5])) for _ in range(singles)]
    groups = {
        number: rng.choice([0, 1, 2, 3, 10, 60])
        for number in range(101, 101 + rng.randint(not singles, 2))
    }
    seats += [
        (number, rng.randrange(shards), 0) for number in groups for _ in range(rng.randint(1, 5))
    ]
    return World(shards, rng.choice(mosts), groups, seats)


def step(world: World, rng: random.Random) -> None:
    """Do one thing."""
    queue = rng.choice(world.queues)
    shard = rng.choice(world.shards)
    what = rng.randint(0, 99)
    if what < 20:
        queue.ready += rng.choice([1, 1, 2, 5, 30, 100])
        if queue.is_attached:
            queue.shard.dirty[queue] = None
    elif what < 40:
        world.ack(rng.choice([1, 1, 3, 10, MANY]))
    elif what < 60:
        if not shard.is_away:
            shard.turn(rng.randint(1, 4))
    elif what < 80:
        for _ in range(min(rng.randint(1, 4), len(shard.said))):
            shard.said.popleft()()
    elif what < 84:
        world.acks_waited()
    elif what < 87:
        ms = rng.choice([1, 5, 50, 200])
        world.now += ms / 1000
        for each in world.shards:
            each.now += ms
    elif what < 89:
        shard.is_blocked = not shard.is_blocked
        shard.dirty |= dict.fromkeys(each for each in shard.queues.values() if each.is_attached)
        shard.piece = rng.choice([1, 3, MANY])
    elif what < 91:
        queue.is_paused = not queue.is_paused
        if queue.is_attached:
            queue.shard.dirty[queue] = None
    elif what < 93:
        world.change_limit(rng.choice([0, 1, 2, 7, 40]))
    elif what < 94:
        if shard.is_away:
            world.back(shard)
        else:
            world.away(shard)
    elif what < 95:
        if queue.is_attached and queue in world.group_of:
            shard = queue.shard
            shard.heard.append(lambda: shard.detach(queue))
    elif what < 96:
        if not queue.is_attached and queue in world.group_of and not queue.shard.is_away:
            world.attach(queue)
    else:
        world.rest()
        world.check_not_idle()
        world.check_agreed()
    world.check_channel()


def history(seed: int) -> str:
    """Return what went wrong in a random history, "" if nothing did."""
    rng = random.Random(seed)
    world = random_world(rng, [0, 0, 1, 2, 7, 40])
    try:
        for _ in range(120):
            step(world, rng)
        for shard in world.shards:
            shard.is_blocked, shard.piece = False, MANY
            if shard.is_away:
                world.back(shard)
        for queue in world.queues:
            queue.is_paused = False
            if queue.is_attached:
                queue.shard.dirty[queue] = None
        for _ in range(3000):
            world.rest()
            world.check_not_idle()
            world.check_agreed()
            if not world.client:
                break
            world.ack(MANY)
        if any(queue.may for queue in world.queues):
            raise Violation("messages stay behind")
        if any(limit.unacked for limit in (world.channel, *world.groups.values())):
            raise Violation("something counts that nobody holds")
        # Each thing that happens may cause some, and each delivery four.
        if world.reports + world.allots > 4 * world.deliveries + 120 * 8:
            raise Violation(
                f"{world.reports} reports, {world.allots} allots, {world.deliveries} deliveries"
            )
    except Violation as violation:
        return str(violation)
    return ""


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_never_too_much_never_idle_and_few_messages(seed: int) -> None:
    assert not history(seed)


# -- fairness, and what a busy limit costs -----------------------------------------------------


def starved(seed: int) -> str:
    """Return which queue was starved while all were busy, "" if none was.

    A client settles in random pieces and with random pauses.
    """
    rng = random.Random(seed)
    world = random_world(rng, [0, 0, 1, 3, 20, 300])
    if not world.channel.most:
        world.queues = [queue for queue in world.queues if queue in world.group_of]
    hungry = dict.fromkeys(world.queues, world.now)
    acks = dict.fromkeys(world.queues, 0)
    given = dict.fromkeys(world.queues, 0)
    try:
        for _ in range(400):
            for queue in world.queues:
                queue.ready += max(0, 100 - queue.ready)
                queue.shard.dirty[queue] = None
            world.rest()
            pause = rng.choice([0.0, 0.001, 0.02, 0.1])
            world.now += pause
            for shard in world.shards:
                shard.now += round(pause * 1000)
            world.ack(rng.choice([1, 5, MANY]))
            for queue in world.queues:
                acks[queue] += 1
                if world.delivered_of[queue] > given[queue] or not world.limits_of(
                    world.group_of.get(queue, queue.number)
                ):
                    given[queue], hungry[queue], acks[queue] = (
                        world.delivered_of[queue],
                        world.now,
                        0,
                    )
                # Shards take turns, then the queues of a shard, each by time, with an ack each.
                patience = 2 * ROUND_S + 0.1 * len(world.queues)
                if world.now - hungry[queue] > 3 * patience and acks[queue] > 6 * len(
                    world.queues
                ) + most_of(world):
                    return f"queue {queue.number} waits for {acks[queue]} acks"
    except Violation as violation:
        return str(violation)
    return ""


def most_of(world: World) -> int:
    return max([limit.most for limit in (world.channel, *world.groups.values())])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_no_queue_is_starved(seed: int) -> None:
    assert not starved(seed)


def test_while_two_shards_are_busy_a_grant_travels_with_each_batch_of_acks() -> None:
    world = World(2, 0, {101: 2000}, [(101, 0, 0), (101, 1, 0)])
    for queue in world.queues:
        queue.ready = 1_000_000
    shares = []
    for _ in range(300):
        world.rest()
        world.now += 0.001
        before, said = dict(world.delivered_of), world.reports + world.allots
        world.ack(MANY)
        world.rest()
        shares.append([world.delivered_of[queue] - before[queue] for queue in world.queues])
        said = world.reports + world.allots - said
        assert len(shares) < 5 or said == 1
    turns = [share.index(2000) for share in shares[5:]]  # all of it goes to one of them
    changes = [at for at in range(1, len(turns)) if turns[at] != turns[at - 1]]
    assert {after - before for before, after in pairwise(changes)} == {round(ROUND_S * 500)}


# -- compiled code -----------------------------------------------------------------------------


def told_of(seed: int, is_compiled: bool) -> tuple[Any, ...]:
    """Return all that shards are told in two histories, and what the histories find wrong."""
    World.told.clear()
    with (
        mock.patch.object(World, "is_compiled", is_compiled),
        mock.patch.object(Allotment, "place", Allotment.place if is_compiled else slow.place),
    ):
        found = history(seed), starved(seed)
    return *found, list(World.told)


def differ(seeds: range) -> bool:
    """Return whether the compiled code tells the shards of some history anything else."""
    return any(told_of(seed, False) != told_of(seed, True) for seed in seeds)


def test_compiled_code_gives_the_same_credit() -> None:
    World.plain = 0
    seed = random.randrange(1 << 32)
    print(f"from seed {seed}")
    assert not differ(range(seed, seed + 15))
    assert World.plain > 300, "compiled code decided hardly anything"


def goes_on_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limit, "go_on", lambda self, now: LimitState.go_on(self, 0.0))


def takes_no_credit_back(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Limit, now: float) -> int:
        done = LimitState.go_on(self, now)
        if done == GRANTED and self.turn is not None:
            self.turn.give_back(KEEP)
        return done

    patch.setattr(Limit, "go_on", broken)


def forgets_what_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Allotment, "use", lambda self, count: AllotmentState.use(self, count - 1))


def takes_all_for_hungry(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Allotment) -> int:
        self.wants = self.wants or self.allowed <= self.used
        return AllotmentState.place(self)

    patch.setattr(Allotment, "place", broken)


@pytest.mark.parametrize(
    "broken",
    [goes_on_for_ever, takes_no_credit_back, forgets_what_is_used, takes_all_for_hungry],
)
def test_compiled_code_that_is_broken_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert differ(range(100))


# -- variants that are broken ------------------------------------------------------------------


def shard_keeps_what_it_cannot_use(patch: pytest.MonkeyPatch) -> None:
    ended = shard_side.Allotment.ended

    def broken(self: Any, waits: bool, blocked: bool = False) -> bool:
        return ended(self, waits, blocked) if self.left <= 0 else False

    patch.setattr(shard_side.Allotment, "ended", broken)


def shard_says_that_messages_wait_once_only(patch: pytest.MonkeyPatch) -> None:
    ended = shard_side.Allotment.ended
    asked: set[int] = set()

    def broken(self: Any, waits: bool, blocked: bool = False) -> bool:
        said = ended(self, waits, blocked)
        if said and self._said_waits:
            said = id(self) not in asked
            asked.add(id(self))
        return said

    patch.setattr(shard_side.Allotment, "ended", broken)


def acks_free_credit_at_the_shard_too(patch: pytest.MonkeyPatch) -> None:
    settle = World._settle

    def broken(self: World, queue: CountedQueue, count: int) -> None:
        settle(self, queue, count)
        if queue.allotment is not None:
            queue.allotment.used -= count

    patch.setattr(World, "_settle", broken)


def given_back_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    reported = Allotment.reported
    patch.setattr(Allotment, "reported", lambda self, used, wants: reported(self, self.used, wants))


def nobody_is_told_to_give_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(credit, "DRAIN", KEEP)


def credit_on_its_way_is_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limit, "free", property(lambda self: self.most - self.unacked))


def no_stop_when_a_limit_comes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limit, "change", lambda self, most: setattr(self, "most", most) or [])
    tell = World.tell

    def broken(self: World, told: list[Allotment]) -> None:
        tell(self, [each for each in told if each.mode != STOP])

    patch.setattr(World, "tell", broken)


def a_small_rest_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "acks_waited", lambda self: self.waiting_for_batch.clear())


def the_last_is_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limit, "_by_turn", lambda self, now: list(self.hungry)[::-1])


def a_turn_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(credit, "ROUND_S", 1e9)


def a_queue_keeps_its_turn(patch: pytest.MonkeyPatch) -> None:
    def broken(self: LogOrder, now: int) -> None:
        if self.current is not None:
            self.wake(self.current)

    patch.setattr(LogOrder, "go_on", broken)


@pytest.mark.parametrize(
    "broken",
    [
        shard_keeps_what_it_cannot_use,
        shard_says_that_messages_wait_once_only,
        acks_free_credit_at_the_shard_too,
        given_back_is_not_counted,
        nobody_is_told_to_give_back,
        credit_on_its_way_is_free,
        no_stop_when_a_limit_comes,
        a_small_rest_waits_for_ever,
    ],
)
def test_the_histories_catch(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert any(history(seed) for seed in range(200))


@pytest.mark.parametrize("broken", [the_last_is_first, a_turn_has_no_end, a_queue_keeps_its_turn])
def test_the_histories_catch_that_some_queue_is_starved(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert any(starved(seed) for seed in range(100))
