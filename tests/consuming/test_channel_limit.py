"""Test the limits of unacknowledged messages.

The limit of a channel (basic.qos global) holds over all its consumers, also those that were there
before the limit. The prefetch of a consumer of a virtual queue holds over all its assignments.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.consume.consumers import (
    Assignment,
    Consumer,
    ConsumingChannel,
    GroupConsumer,
)
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.consume.settling import Settles
from shardmq.broker.shared.control import AssignmentName
from shardmq.shardd.wire import messages as wire

MANY = 1 << 30
NOBODY: Any = SimpleNamespace(say=lambda said: None)  # the controller


class Links:
    """All shards in one: a backlog for each consumer, handed out as Tune and Grant allow."""

    def __init__(self) -> None:
        self.links = [SimpleNamespace(epoch=1, settles=Settles())]
        self.to_shard: list[Any] = []
        self.settled: Counter[int] = Counter()  # by consumer

    def tell(self, shard: int, what: wire.Message) -> None:
        self.to_shard.append(what)

    def is_up(self, shard: int) -> bool:
        return True

    def tell_settled(self, shard: int) -> None:
        """All is told at once."""

    def settle(
        self, shard: int, epoch: int, consumer: int, kind: int, first: int, last: int
    ) -> None:
        self.settled[consumer] += last - first + 1

    def ack(
        self,
        shard: int,
        epoch: int,
        consumer: int,
        first: int,
        last: int,
        together: int,
        whole: int = 0,
    ) -> None:
        self.settled[consumer] += last - first + 1


class Bench:
    def __init__(self, consumers: int, no_ack: bool = False) -> None:
        self.links = Links()
        self.consuming = Consuming(self.links, NOBODY, SimpleNamespace(now=0.0))  # type: ignore[arg-type] # as much of them as is used here
        self.channel = ConsumingChannel(SimpleNamespace(), 1)  # type: ignore[arg-type]
        self.ready = dict.fromkeys(range(1, consumers + 1), 0)
        self.numbers = dict.fromkeys(self.ready, 1)
        self.limited = dict.fromkeys(self.ready, False)
        self.grants = dict.fromkeys(self.ready, 0)
        self.asked = dict.fromkeys(self.ready, False)
        self.lent: dict[int, int] = {}  # prefetch of those that share one
        self.recalled: dict[int, int | None] = {}
        self.began: dict[int, int] = {}  # the number that was next when it last got some of it
        for number in self.ready:
            consumer = Consumer(self.channel, number, f"tag-{number}")
            consumer.announced, consumer.no_ack = True, no_ack
            self.channel.consumers[consumer.tag] = self.consuming.consumers[number] = consumer

    def with_virtual(self, parts: int, limit: int) -> GroupConsumer:
        """Add a consumer of a virtual queue that owns `parts` shards."""
        whole = GroupConsumer(self.channel, 100, "virtual")
        whole.announced, whole.limit = True, limit
        self.channel.consumers[whole.tag] = whole
        for number in range(101, 101 + parts):
            part = whole.assignments[AssignmentName(number, 0)] = Assignment(
                whole, number, AssignmentName(number, 0)
            )
            part.shard = number  # each at one of its own
            self.consuming.consumers[number] = part
            self.ready[number], self.numbers[number], self.grants[number], self.asked[number] = (
                0,
                1,
                0,
                False,
            )
            self.limited[number] = False
            self.recalled[number], self.began[number] = None, 0
        for part in whole.assignments.values():
            self.consuming.grants.begin(part)
            self.lent[part.number] = part.prefetch
        return whole

    def lent_turn(self, number: int) -> None:
        """Of a consumer with a lent prefetch."""
        held = self.numbers[number] - 1 - self.links.settled[number]
        back, recalled = 0, self.recalled[number]
        fresh = self.numbers[number] == self.began[number]
        most = self.lent[number] if recalled is None or fresh else min(self.lent[number], recalled)
        count = min(self.ready[number], max(0, most - held))
        if count:
            self.deliver(number, count)
            held += count
            fresh = False
        if recalled is not None and not (fresh and self.ready[number]):
            back = max(0, self.lent[number] - max(held, recalled if self.ready[number] else 0))
            self.lent[number] -= back
        wants = self.ready[number] > 0 and self.lent[number] <= held and not self.asked[number]
        self.asked[number] |= wants
        if back or wants:
            self.consuming.ungranted(number, back, wants)

    def shard_turn(self) -> None:
        """Let the shards act on the messages that were sent to them, and answer."""
        said, self.links.to_shard = self.links.to_shard, []
        for what in said:
            number = what.consumer
            if isinstance(what, wire.Recall):
                self.recalled[number] = what.keep
            elif number in self.lent and isinstance(what, wire.Grant):
                self.lent[number] += what.count
                self.asked[number], self.recalled[number] = False, None
                self.began[number] = self.numbers[number]
            elif isinstance(what, wire.Tune):
                self.lent.pop(number, None)
                if what.lent:
                    self.lent[number], self.recalled[number] = what.prefetch, None
                assert self.limited[number] != what.granted
                self.limited[number], self.grants[number], self.asked[number] = (
                    what.granted,
                    0,
                    False,
                )
            elif self.limited[number]:
                self.grants[number] += what.count
                self.asked[number] = False
        for number in self.ready:
            if number in self.lent:
                self.lent_turn(number)
                continue
            count = min(self.ready[number], self.grants[number] if self.limited[number] else MANY)
            if count:
                self.deliver(number, count)
            if self.limited[number] and self.grants[number]:
                rest, self.grants[number] = self.grants[number], 0
                self.consuming.ungranted(number, rest, False)
            if self.limited[number] and self.ready[number] and not self.asked[number]:
                self.asked[number] = True
                self.consuming.ungranted(number, 0, True)

    def deliver(self, number: int, count: int) -> None:
        self.ready[number] -= count
        if self.limited[number]:
            self.grants[number] -= count
        consumer, channel = self.consuming.consumers[number], self.channel
        if not consumer.no_ack:
            channel.unacked.add(channel.next_tag, count, consumer, 1, self.numbers[number])
            channel.outstanding += count
            if isinstance(consumer, Assignment):
                consumer.held += count
                consumer.group.outstanding += count
        channel.next_tag += count
        self.numbers[number] += count
        if not consumer.lent:
            self.consuming.grants.use(consumer, count)

    def settle(self) -> None:
        """Until nobody says anything."""
        self.shard_turn()
        while self.links.to_shard:
            self.shard_turn()


STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "ack", "limit"]), st.integers(0, 9)), max_size=40
)


@given(STEPS, st.integers(1, 3))
def test_never_more_than_the_limit_and_never_less_than_there_is(
    steps: list[tuple[str, int]], consumers: int
) -> None:
    bench = Bench(consumers)
    channel = bench.channel
    before = 0
    for step, n in steps:
        held = channel.unacked.count
        if step == "publish":
            bench.ready[1 + n % consumers] += n
        elif step == "ack":
            bench.consuming.acks.settle(channel, [(wire.ACK, 0, 0, True)])
            before = held = 0
        else:
            bench.consuming.limit(channel, n % 6)
            before = held
        bench.settle()
        waiting = sum(bench.ready.values())
        if not channel.limit:
            assert not waiting
        else:
            assert channel.unacked.count <= max(channel.limit, before)
            assert not waiting or channel.unacked.count >= channel.limit
            assert channel.granted == sum(each.granted for each in channel.consumers.values()) == 0


@given(STEPS, st.integers(1, 4), st.integers(1, 7))
def test_prefetch_of_a_virtual_queue_is_the_total_of_all_shards(
    steps: list[tuple[str, int]], parts: int, prefetch: int
) -> None:
    bench = Bench(1)
    whole, channel = bench.with_virtual(parts, prefetch), bench.channel
    for step, n in steps:
        if step == "publish":
            bench.ready[101 + n % parts] += n
            bench.ready[1] += n % 3
        elif step == "ack":
            bench.consuming.acks.settle(channel, [(wire.ACK, 0, 0, True)])
        else:
            bench.consuming.limit(channel, n % 6)
        bench.settle()
        waiting = sum(count for number, count in bench.ready.items() if number > 100)
        held = sum(part.held for part in whole.assignments.values())
        assert held == whole.outstanding <= prefetch
        assert whole.granted == (0 if channel.limit else sum(bench.lent.values())) <= prefetch
        assert not channel.granted
        if channel.limit:
            assert not waiting or held == prefetch or channel.outstanding >= channel.limit
        else:
            assert not bench.ready[1] and (not waiting or held == prefetch)


@given(st.integers(1, 5), st.integers(1, 7))
def test_no_shard_of_a_virtual_queue_waits_for_another_to_be_empty(
    parts: int, prefetch: int
) -> None:
    bench = Bench(1)
    whole = bench.with_virtual(parts, prefetch)
    ready = dict.fromkeys((part.number for part in whole.assignments.values()), 1000)
    bench.ready |= ready
    bench.settle()
    for _ in range(10 * parts):
        bench.consuming.acks.settle(bench.channel, [(wire.ACK, 0, 0, True)])
        bench.settle()
    given = [1000 - bench.ready[number] for number in ready]
    assert min(given) >= 10 * prefetch // 2, given
    assert sum(given) >= 10 * parts * prefetch


def test_what_is_unacknowledged_counts_toward_a_limit_that_comes() -> None:
    bench = Bench(2)
    bench.ready = {1: 5, 2: 5}
    bench.settle()
    bench.consuming.limit(bench.channel, 12)
    assert bench.links.to_shard == [wire.Tune(1, 0, True), wire.Tune(2, 0, True)]
    bench.ready = {1: 5, 2: 5}
    bench.settle()
    assert bench.channel.unacked.count == 12


def test_another_limit_is_no_news_to_the_shard() -> None:
    bench = Bench(1)
    bench.consuming.limit(bench.channel, 3)
    bench.settle()
    bench.consuming.limit(bench.channel, 5)
    assert not bench.links.to_shard


def test_consumers_without_acks_wait_for_room_and_use_none() -> None:
    bench = Bench(2)
    bench.consuming.consumers[2].no_ack = True
    bench.consuming.limit(bench.channel, 1)
    bench.settle()
    bench.ready = {1: 2, 2: 0}
    bench.settle()
    bench.ready[2] = 3
    bench.settle()
    assert bench.ready == {1: 1, 2: 3}
    bench.consuming.acks.settle(bench.channel, [(wire.ACK, 0, 0, True)])
    bench.settle()
    bench.consuming.acks.settle(bench.channel, [(wire.ACK, 0, 0, True)])
    bench.settle()
    assert bench.ready == {1: 0, 2: 0}
    assert bench.channel.outstanding == bench.channel.granted == 0


def test_grants_given_back_after_the_limit_went_and_came_are_not_counted_twice() -> None:
    bench = Bench(1)
    bench.consuming.limit(bench.channel, 3)
    consumer = bench.consuming.consumers[1]
    bench.consuming.ungranted(1, 0, True)
    assert (consumer.granted, bench.channel.granted) == (3, 3)
    bench.consuming.limit(bench.channel, 0)
    bench.consuming.ungranted(1, 3, True)
    bench.consuming.limit(bench.channel, 3)
    assert (consumer.granted, bench.channel.granted, bench.channel.wanting) == (0, 0, {})
