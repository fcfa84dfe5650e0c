"""Test the prefetch of a virtual consumer, which is divided among several shards.

Never are more messages than the prefetch on their way or unsettled. No message waits while there is
room, and no queue is forgotten. This holds in whatever order the processes hear of each other. The
queues, streams or not, are those of the shards; consuming is that of the front door; lists stand
for the connections between them.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardmq.broker.front_door.consume.consumers import Assignment, ConsumingChannel, GroupConsumer
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.consume.credit import ROUND_S
from shardmq.broker.front_door.consume.settling import Settles
from shardmq.broker.shared.control import AssignmentName
from shardmq.shardd.queues import (
    Allotment,
    Consumer,
    LogOrder,
    Queue,
    Reader,
    StreamQueue,
    Window,
    limits_of,
    retention_of,
)
from shardmq.shardd.queues.stream import SEGMENT_BYTES
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from shardmq.shardd.wire import messages as wire
from tests.reference.record import Record
from tests.support.dict_store import DictArrival, DictStore
from tests.support.faulty_files import FaultyFiles

ROOM = 1 << 30
ROUND_MS = round(ROUND_S * 1000)
MESSAGE = (1).to_bytes(4, "little") + bytes(4) + b"\0\0x"


class Shard:
    """Its queues, and what it says to the front door."""

    def __init__(self) -> None:
        self.store = DictStore()
        self.dirty: dict[Queue, None] = {}
        self.order = LogOrder(self.wake)
        self.allotment = Allotment(100, None, self.order)
        self.parts: dict[int, Consumer] = {}
        self.heard: deque[Callable[[], None]] = deque()
        self.said: deque[Callable[[], None]] = deque()
        self.now_ms = 0

    def wake(self, queue: Queue) -> None:
        self.dirty[queue] = None

    def publish(self, number: int, count: int) -> None:
        queue = self.parts[number].queue
        self.dirty[queue] = None
        if isinstance(queue, StreamQueue):
            if count:
                queue.append(
                    memoryview(Record((queue.id,), (MESSAGE,) * count).encode()), alone=True
                )
                if (job := queue.begin_sync()) is not None:
                    job.run()
                    queue.finish_sync(job)
            return
        entries = array("Q", [self.store.put([queue.id], MESSAGE) for _ in range(count)])
        queue.publish(DictArrival(queue.id, entries, count), 0)

    def turn(self, most: int) -> None:
        for _ in range(min(most, len(self.heard))):
            self.heard.popleft()()
        for _ in range(most):
            if self.dirty:
                queue = next(iter(self.dirty))
                del self.dirty[queue]
                more = queue.deliver(self.now_ms, self.outlet, ROOM)
                assert not more or isinstance(queue, StreamQueue)  # as much as is used
                while more:
                    more = queue.deliver(self.now_ms, self.outlet, ROOM)

    outlet: Any = None


class Bench:
    def __init__(self, layout: list[int], limit: int, streams: bool = False) -> None:
        """`layout`: how many queues each shard has."""
        self.streams = streams
        self.away: set[int] = set()
        self.shards = [Shard() for _ in layout]
        self.settles = [Settles() for _ in layout]
        self.links = [SimpleNamespace(epoch=1, settles=settles) for settles in self.settles]
        links: Any = SimpleNamespace(
            links=self.links,
            freed={},
            allot=lambda at, *told: self.settles[at].allot(*told),
            wait_for_acks=lambda: None,
            ack=lambda at, epoch, number, *rest: (
                epoch == self.links[at].epoch and self.settles[at].ack(number, *rest)
            ),
            settle=lambda at, epoch, *rest: (
                epoch == self.links[at].epoch and self.settles[at].add(*rest)
            ),
        )
        self.door: Any = SimpleNamespace(now=0.0)
        controller: Any = SimpleNamespace(say=lambda said: None)
        self.links_of_door = links
        self.consuming = Consuming(links, controller, self.door)
        client: Any = SimpleNamespace()
        self.channel = ConsumingChannel(client, 1)
        self.whole = GroupConsumer(self.channel, 100, "virtual")
        self.whole.announced, self.whole.limit.most = True, limit
        self.channel.groups[100] = self.whole
        self.channel.consumers["virtual"] = self.whole
        self.numbers: dict[int, Shard] = {}
        for shard, queues in enumerate(layout):
            for _ in range(queues):
                number = 101 + len(self.numbers)
                name = AssignmentName(number, 0)
                part = self.whole.assignments[name] = Assignment(self.whole, number, name)
                part.shard, part.attached = shard, True
                self.consuming.consumers[number] = part
                self.numbers[number] = self.shards[shard]
        for part in self.whole.assignments.values():
            self.consuming.crediting.attach(part)
            self.attach(part)
        self.given = dict.fromkeys(self.numbers, 0)
        self.on_way = 0
        # Consumers of single queues beside it, by queue, and what they hold.
        self.others: dict[int, Consumer] = {}
        self.of_others: list[tuple[Shard, Consumer, int, int]] = []
        self.stopping: set[int] = set()

    def attach(self, part: Assignment, again: Queue | None = None) -> None:
        shard = self.shards[part.shard]
        queue = again or self.new_queue(part.number, shard.store)
        kind = Reader if isinstance(queue, StreamQueue) else Consumer
        consumer = kind(queue, None, part.number, Window(ROOM), allotment=shard.allotment)
        if isinstance(queue, StreamQueue) and isinstance(consumer, Reader):
            consumer.begin(*queue.new_reader("first", 0, "position", [], False, 0))
        queue.attach(consumer)
        shard.parts[part.number] = consumer
        shard.outlet = SimpleNamespace(
            deliver=lambda consumer, first, redelivered, count, blob: self.deliver(
                shard, consumer, first, count
            ),
            report=lambda allotment: self.report(part.shard, allotment.report),
        )

    def new_queue(self, number: int, store: DictStore) -> Queue:
        if not self.streams:
            return Queue(number, store, limits_of({}))
        files = FaultyFiles()
        log = StreamLog("s", files=files, segment_bytes=SEGMENT_BYTES, cache=StreamCache(files))
        log.recover()
        return StreamQueue(number, store, QueueLog(log), retention_of({}))

    # -- between them ------------------------------------------------------------------------------

    def report(self, at: int, report: tuple[int, int, bool]) -> None:
        said = wire.CreditReport(*report)
        self.shards[at].said.append(lambda: self.consuming.crediting.report(at, said))

    def send(self, at: int, hear: Callable[[], None]) -> None:
        if at not in self.away:
            self.shards[at].heard.append(hear)

    def tell_settled(self, at: int) -> None:
        shard, told = self.shards[at], self.settles[at].take()

        def hear() -> None:
            for number, kind, first, last in told:
                if kind == wire.ALLOT:
                    if last in (wire.KEEP, wire.DRAIN) and shard.allotment.allow(
                        first, last == wire.DRAIN
                    ):
                        self.report(at, shard.allotment.report)
                    shard.order.go_on(shard.now_ms)
                    continue
                consumer = shard.parts[number]
                entries, size = consumer.unacked.settle(first, last)
                assert len(entries) == last + 1 - first
                queue = consumer.queue
                if isinstance(queue, StreamQueue):
                    queue.settled(consumer, kind == wire.ACK, entries, size, kind == wire.REQUEUE)
                    shard.dirty[queue] = None
                    continue
                (queue.ack if kind == wire.ACK else queue.requeue)(entries, size)
                if kind != wire.ACK or queue.dispatch.order is None:
                    shard.dirty[queue] = None

        if told:
            self.send(at, hear)

    def tell_due(self) -> None:
        """As at the end of each pass."""
        self.links_of_door.share_freed()
        for at, settles in enumerate(self.settles):
            if settles.due:
                self.tell_settled(at)

    def tell_all(self) -> None:
        """Acks have waited long enough."""
        self.links_of_door.on_acks_waited()
        for at in range(len(self.shards)):
            self.tell_settled(at)

    def deliver(self, shard: Shard, consumer: Consumer, first: int, count: int) -> None:
        if consumer.number not in self.numbers:
            self.of_others.append((shard, consumer, first, count))
            return
        self.on_way += count

        def hear() -> None:
            part = self.consuming.consumers[consumer.number]
            assert first == self.given[part.number] + 1
            self.given[part.number] += count
            self.on_way -= count
            self.channel.unacked.add(
                self.channel.next_tag, count, part, self.links[part.shard].epoch, first
            )
            self.channel.next_tag += count
            self.channel.limit.unacked += count
            assert isinstance(part, Assignment) and part.allotment is not None
            part.held += count
            part.counted += count
            self.whole.limit.unacked += count
            self.consuming.crediting.delivered(part.allotment, count, no_ack=False)

        shard.said.append(hear)
        assert self.in_use + self.on_way <= self.whole.limit.most

    def of_dead(self) -> int:
        """Return the number of unsettled messages from dead processes.

        They come again, and no longer count.
        """
        return sum(
            run.last_tag + 1 - run.first_tag
            for part in self.whole.assignments.values()
            for run in self.channel.unacked.of(part)
            if part.shard in self.away or run.epoch != self.links[part.shard].epoch
        )

    @property
    def in_use(self) -> int:
        return sum(part.held for part in self.whole.assignments.values()) - self.of_dead()

    # -- what happens ------------------------------------------------------------------------------

    def wait(self, ms: int) -> None:
        self.door.now += ms / 1000
        for shard in self.shards:
            shard.now_ms += ms

    def settle(self, share: int = 1) -> None:
        """Acknowledge the oldest unsettled messages with ack(multiple).

        A `share` of 1 means all of them, any other the oldest one.
        """
        if self.channel.unacked.count:
            tag = (
                self.channel.next_tag - 1
                if share == 1
                else self.channel.next_tag - self.channel.unacked.count
            )
            self.consuming.acks.settle(self.channel, [(wire.ACK, tag, tag, True)])
            self.tell_due()

    def requeue(self) -> None:
        if self.channel.unacked.count:
            tag = self.channel.next_tag - self.channel.unacked.count
            self.consuming.acks.settle(self.channel, [(wire.REQUEUE, tag, tag, True)])
            self.tell_due()

    def other(self, number: int) -> None:
        """Another consumer of that queue comes, or goes."""
        shard = self.numbers[number]
        queue = shard.parts[number].queue
        if self.streams:
            return  # who reads a stream takes nothing from others
        if number in self.others:
            queue.release(self.others.pop(number), shard.now_ms)
            self.of_others = [held for held in self.of_others if held[1].queue is not queue]
        else:
            self.others[number] = Consumer(queue, None, 0, Window(ROOM), prefetch=1)
            queue.attach(self.others[number])
        shard.dirty[queue] = None

    def others_settle(self) -> None:
        for shard, consumer, first, count in self.of_others:
            consumer.queue.ack(*consumer.unacked.settle(first, first + count - 1))
            shard.dirty[consumer.queue] = None
        self.of_others.clear()

    def stop(self, number: int) -> None:
        part, shard = self.consuming.consumers[number], self.numbers[number]
        consumer = shard.parts[number]
        assert isinstance(part, Assignment)
        if not part.wanted:
            return
        part.wanted = part.attached = False
        self.tell_settled(part.shard)
        self.stopping.add(number)

        def hear() -> None:
            consumer.queue.detach(consumer, 0)
            shard.said.append(lambda: self.stopped(part))

        self.send(part.shard, hear)

    def stopped(self, part: Assignment) -> None:
        self.stopping.remove(part.number)
        self.consuming.crediting.stopped(part)

    def go_away(self, at: int) -> None:
        """End the process of a shard; what it had sent is received."""
        shard = self.shards[at]
        if at in self.away:
            return
        shard.heard.clear()
        while shard.said:
            shard.said.popleft()()
        shard.heard.clear()  # what was answered to that comes too late
        self.away.add(at)
        for number in [number for number in self.others if self.numbers[number] is shard]:
            self.other(number)
        for number in [number for number, of in self.numbers.items() if of is shard]:
            # for the next process all of it is ready
            shard.parts[number].queue.release(shard.parts[number], 0)
        shard.said.clear()
        shard.dirty.clear()
        self.consuming.away(at)

    def come_back(self, at: int) -> None:
        if at not in self.away:
            return
        self.away.discard(at)
        shard = self.shards[at]
        shard.heard.clear()
        shard.order = LogOrder(shard.wake)
        shard.allotment = Allotment(100, None, shard.order)
        self.settles[at].take()
        self.links[at].epoch += 1
        self.consuming.crediting.lose(at, self.consuming.consumers.values())
        for number in [number for number, of in self.numbers.items() if of is shard]:
            part = self.consuming.consumers[number]
            assert isinstance(part, Assignment)
            if number in self.stopping:
                self.stopped(part)
            elif part.wanted:
                self.given[number] = 0
                self.consuming.crediting.attach(part)
                self.attach(part, shard.parts[number].queue)
                shard.dirty[shard.parts[number].queue] = None

    def door_turn(self, at: int, most: int) -> None:
        said = self.shards[at].said
        for _ in range(min(most, len(said))):
            said.popleft()()
        self.tell_due()

    def rest(self) -> None:
        """Until nobody has anything to say."""
        for _ in range(10_000):
            self.tell_all()
            for at, shard in enumerate(self.shards):
                shard.turn(3)
                self.door_turn(at, 3)
            if any(self.settles) or self.consuming.crediting._waiting:
                continue
            if not any(shard.heard or shard.said or shard.dirty for shard in self.shards):
                return
        raise AssertionError("they never come to rest")

    def waiting(self) -> int:
        """Parts that have something to get."""
        consumers = [shard.parts[number] for number, shard in self.numbers.items()]
        return sum(
            consumer.queue.has_for(consumer) for consumer in consumers if not consumer.detached
        )  # nor away


LAYOUTS = st.lists(st.integers(1, 4), min_size=1, max_size=3)
OF_CLIENTS = st.sampled_from(
    ["publish", "publish", "ack", "ack one", "requeue", "other", "others ack", "stop", "wait"]
)
OF_PROCESSES = st.sampled_from(["shard", "door", "tick", "rest", "away", "back"])
STEPS = st.lists(
    st.tuples(OF_CLIENTS | OF_PROCESSES, st.integers(0, 60)),
    max_size=60,
)


# Its last queue had looked for room when others there had some to spare, and was never told that
# they gave it back.
NEVER_ASKED = [
    *(("publish", n) for n in (2, 2, 4, 10, 12, 20, 54, 59)),
    *(("rest", 0), ("ack", 0), ("rest", 0), ("other", 0), ("publish", 5)),
    *(("ack one", 0), ("ack one", 0), ("rest", 0), ("ack", 0), ("wait", 20)),
]


# What the others there hold of the process that is gone was taken for what they use of the
# prefetch.
HELD_OF_THE_DEAD = [("publish", 19), ("publish", 28), ("rest", 0), ("away", 22), ("stop", 8)]


@pytest.mark.parametrize("streams", [False, True], ids=["queues", "streams"])
@example([2, 2], 3, NEVER_ASKED)
@example([1, 2, 3], 6, HELD_OF_THE_DEAD)
@given(LAYOUTS, st.integers(1, 20), STEPS)
def test_never_more_than_the_prefetch_and_nothing_waits_while_there_is_room(
    streams: bool, layout: list[int], limit: int, steps: list[tuple[str, int]]
) -> None:
    bench = Bench(layout, limit, streams)
    for step, n in steps:
        number = 101 + n % len(bench.numbers)
        if step == "publish":
            bench.numbers[number].publish(number, n % 17)
        elif step in ("ack", "ack one"):
            bench.settle(1 if step == "ack" else 0)
        elif step == "shard":
            bench.shards[n % len(layout)].turn(1 + n % 5)
        elif step == "tick":
            bench.tell_all()
        elif step == "wait":
            bench.wait(n)
        elif step == "door":
            bench.door_turn(n % len(layout), 1 + n % 5)
        elif step == "requeue":
            bench.requeue()
        elif step == "other":
            if bench.numbers[number] not in [bench.shards[at] for at in bench.away]:
                bench.other(number)
        elif step == "others ack":
            bench.others_settle()
        elif step == "stop":
            bench.stop(number)
        elif step == "away":
            bench.go_away(n % len(layout))
        elif step == "back":
            bench.come_back(n % len(layout))
        else:
            bench.rest()
            left_behind = sum(
                part.held for part in bench.whole.assignments.values() if not part.wanted
            )
            assert left_behind or not bench.waiting() or bench.in_use == limit
    for at in range(len(layout)):
        bench.come_back(at)
    while True:
        bench.rest()
        if not bench.channel.unacked.count and not bench.of_others:
            break
        bench.others_settle()
        bench.settle()
    assert not bench.waiting()
    assert bench.whole.limit.unacked == 0 <= bench.whole.limit.allotted <= limit


@pytest.mark.parametrize("streams", [False, True], ids=["queues", "streams"])
@settings(max_examples=30)
@given(LAYOUTS, st.integers(1, 20), st.integers(1, ROUND_MS))
def test_no_queue_waits_for_another_to_be_empty(
    streams: bool, layout: list[int], limit: int, pace_ms: int
) -> None:
    bench = Bench(layout, limit, streams)
    # So many as a turn of the whole broker lasts, at that pace.
    most = limit * (ROUND_MS // pace_ms + 20) * len(bench.numbers)
    for number, shard in bench.numbers.items():
        shard.publish(number, most)  # all of one before the next
    while max(bench.given.values()) < most - limit:
        bench.rest()
        bench.settle()
        bench.wait(pace_ms)
    assert min(bench.given.values()) > 0, bench.given


def given_by_turns(bench: Bench, times: int, pace_ms: int = ROUND_MS) -> list[list[int]]:
    """Return how many messages each shard gave in each round.

    In each round the client takes `pace_ms` and then settles everything.
    """
    found = []
    for _ in range(times):
        before = dict(bench.given)
        bench.wait(pace_ms)
        bench.settle()
        bench.rest()
        of_shard = [0] * len(bench.shards)
        for number, count in bench.given.items():
            of_shard[bench.shards.index(bench.numbers[number])] += count - before[number]
        found.append(of_shard)
    return found


def test_what_is_settled_at_once_makes_room_for_one_shard_in_turn() -> None:
    bench = Bench([4, 4], 400)
    for _ in range(10):
        for number, shard in bench.numbers.items():
            shard.publish(number, 100)
    bench.rest()
    assert sorted(bench.given.values()) == [0] * 6 + [200] * 2
    turns = given_by_turns(bench, 6)
    assert turns in ([[400, 0], [0, 400]] * 3, [[0, 400], [400, 0]] * 3)
    # it ends when a whole prefetch was taken
    assert max(bench.given.values()) - min(bench.given.values()) < 2 * 400


def test_the_turn_of_a_shard_lasts_while_its_client_is_fast() -> None:
    bench = Bench([1, 1], 400)
    for number, shard in bench.numbers.items():
        shard.publish(number, 40_000)
    bench.rest()
    given_by_turns(bench, 2)
    turns = given_by_turns(bench, 80, 1)
    who = [turn.index(400) for turn in turns]
    changes = [at for at in range(1, len(who)) if who[at] != who[at - 1]]
    assert {after - before for before, after in itertools.pairwise(changes)} == {ROUND_MS // 2}


def test_a_shard_that_has_nothing_in_its_turn_leaves_it_to_the_others() -> None:
    bench = Bench([1, 2, 1], 90)
    for number in (101, 102, 104):
        bench.numbers[number].publish(number, 90)
    bench.rest()
    given_by_turns(bench, 4)
    for number in (101, 102):
        bench.numbers[number].publish(number, 900)
    bench.rest()
    turns = given_by_turns(bench, 8)
    assert all(sum(turn) == 90 for turn in turns)
    assert (
        turns[0][2]
        == turns[-1][2]
        == 0
        < min(sum(turn[0] for turn in turns), sum(turn[1] for turn in turns))
    )


def test_what_parts_of_one_shard_hold_counts_when_they_all_stop_at_once() -> None:
    bench = Bench([2, 1, 1], 4)
    bench.numbers[103].publish(103, 9)
    bench.numbers[102].publish(102, 9)
    bench.rest()
    assert bench.in_use == 4
    bench.stop(101)
    bench.stop(102)
    bench.rest()  # the limit is checked with each delivery
    assert bench.in_use == 4


def test_the_credit_of_a_dead_shard_is_for_the_others_until_it_is_back() -> None:
    bench = Bench([1, 1, 1], 90)
    for number, shard in bench.numbers.items():
        shard.publish(number, 2000)
    bench.rest()
    given_by_turns(bench, 4)
    bench.go_away(1)
    bench.rest()
    turns = given_by_turns(bench, 6)
    assert all(sum(turn) == 90 for turn in turns[1:])
    bench.come_back(1)
    bench.rest()
    turns = given_by_turns(bench, 9)
    assert min(map(sum, zip(*turns, strict=True))) > 0


def starved(seed: int, beside_others: bool, streams: bool = False) -> str:
    """Return which shard was starved, or "" if none was.

    Clients are fast and slow by turns, clocks are set, and assignments stop. A shard is starved if
    it has messages and is granted none, for more acks than the whole prefetch and for longer than
    rounds take.
    """
    rng = random.Random(seed)
    bench = Bench(
        [rng.randint(1, 3) for _ in range(rng.randint(2, 3))],
        rng.choice([2, 3, 7, 20, 60]),
        streams,
    )
    for number, shard in bench.numbers.items():
        if rng.random() < 0.8:
            shard.publish(number, 3000)
    bench.rest()
    for number in bench.numbers if beside_others else ():
        if rng.random() < 0.6:
            bench.other(number)
    bench.rest()
    patience = 3 * (bench.whole.limit.most + len(bench.numbers))
    now, acks, since, last = 0, [0] * len(bench.shards), [0] * len(bench.shards), dict(bench.given)
    for _ in range(6):
        gap, share = rng.choice([0, 1, 3, 30, 100, 200]), rng.choice([0, 1])
        if rng.random() < 0.15:
            for shard in bench.shards:
                shard.now_ms += rng.choice([-100_000, -5, 50_000])
        if rng.random() < 0.3:
            bench.stop(rng.choice(list(bench.numbers)))
        for _ in range(rng.choice([30, 120])):
            now += gap
            bench.wait(gap)
            bench.settle(share)
            bench.rest()
            for at, shard in enumerate(bench.shards):
                own = [number for number, of in bench.numbers.items() if of is shard]
                parts = [shard.parts[number] for number in own]
                acks[at] += 1
                if not any(not part.detached and part.queue.has_for(part) for part in parts) or any(
                    bench.given[number] != last[number] for number in own
                ):
                    acks[at], since[at] = 0, now
                if acks[at] > patience and now - since[at] > max(1000, 2 * ROUND_MS + 4 * gap):
                    return f"shard {at}: {acks[at]} acks, {now - since[at]} ms"
            last = dict(bench.given)
    return ""


# In the second and the third a shard that had got everything by turns was never told that others
# had asked before.
@settings(deadline=None, max_examples=25)
@example(20, True)
@example(135, False)
@example(112, False)
@given(st.integers(0, 1 << 20), st.booleans())
def test_no_shard_waits_for_acks_that_make_room_elsewhere(seed: int, beside_others: bool) -> None:
    assert not starved(seed, beside_others)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1 << 20))
def test_no_shard_of_streams_waits_for_acks_that_make_room_elsewhere(seed: int) -> None:
    assert not starved(seed, beside_others=False, streams=True)
