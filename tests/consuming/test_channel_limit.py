"""Test the limits of unacknowledged messages.

The limit of a channel (basic.qos global) holds over all its consumers, also those that were there
before the limit. The prefetch of a consumer of a virtual queue holds over all its assignments.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.consume.consumers import (
    Assignment,
    Consumer,
    ConsumingChannel,
    GroupConsumer,
)
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.consume.credit import ROUND_S
from shardmq.broker.front_door.consume.credit import Allotment as Credit
from shardmq.broker.shared.control import AssignmentName
from shardmq.shardd.queues import Allotment
from shardmq.shardd.wire import messages as wire

MANY = 1 << 30
WHOLE = 100  # the number of the consumer of the virtual queue
NOBODY: Any = SimpleNamespace(say=lambda said: None)  # the controller


class Links:
    """All shards in one: a backlog for each consumer, handed out as its allotment allows."""

    def __init__(self) -> None:
        self.links = defaultdict(lambda: SimpleNamespace(epoch=1))
        self.to_shard: list[tuple[int, int, int]] = []  # allotment, allowed, mode
        self.settled: Counter[int] = Counter()  # by consumer
        self.on_acks_waited: Callable[[], None] = lambda: None
        self.acks_wait = False
        self.freed: dict[Any, None] = {}
        self.share_freed: Callable[[], None] = lambda: None

    def allot(self, shard: int, allotment: int, allowed: int, mode: int) -> None:
        self.to_shard.append((allotment if allotment != WHOLE else shard, allowed, mode))

    def wait_for_acks(self) -> None:
        """Let acks wait until the bench says so."""
        self.acks_wait = True

    def settle(
        self, shard: int, epoch: int, consumer: int, kind: int, first: int, last: int
    ) -> None:
        self.settled[consumer] += last - first + 1

    def ack(
        self, shard: int, epoch: int, consumer: int, first: int, last: int, together: int
    ) -> None:
        self.settled[consumer] += last - first + 1


class Bench:
    """Consumers 1, 2 ... of single queues, and 101, 102 ... of a virtual queue.

    Each of the latter is at a shard of its own.
    """

    def __init__(self, consumers: int, no_ack: bool = False) -> None:
        self.links = Links()
        self.clock: Any = SimpleNamespace(now=0.0)
        # As much of them as is used here.
        self.consuming = Consuming(self.links, NOBODY, self.clock)  # type: ignore[arg-type]
        self.channel = ConsumingChannel(SimpleNamespace(), 1)  # type: ignore[arg-type]
        self.ready = dict.fromkeys(range(1, consumers + 1), 0)
        self.numbers = dict.fromkeys(self.ready, 1)
        self.allotments: dict[int, Allotment] = {}
        for number in self.ready:
            consumer = Consumer(self.channel, number, f"tag-{number}")
            consumer.announced, consumer.no_ack = True, no_ack
            self.channel.consumers[consumer.tag] = self.consuming.consumers[number] = consumer

    def with_virtual(self, parts: int, limit: int) -> GroupConsumer:
        """Add a consumer of a virtual queue that owns `parts` shards."""
        whole = GroupConsumer(self.channel, WHOLE, "virtual")
        whole.announced, whole.limit.most = True, limit
        self.channel.consumers[whole.tag] = self.channel.groups[WHOLE] = whole
        for number in range(101, 101 + parts):
            part = whole.assignments[AssignmentName(number, 0)] = Assignment(
                whole, number, AssignmentName(number, 0)
            )
            part.shard = number  # each at one of its own
            self.consuming.consumers[number] = part
            self.ready[number], self.numbers[number] = 0, 1
            self.consuming.crediting.attach(part)
            self.allotments[number] = Allotment(number)
        return whole

    def shard_turn(self) -> None:
        """Let the shards act on the messages that were sent to them, and answer."""
        self.links.share_freed()
        said, self.links.to_shard = self.links.to_shard, []
        for number, allowed, mode in said:
            used = self.numbers[number] - 1
            mine = self.allotments.setdefault(
                number, Allotment(number, is_limited=False, used=used)
            )
            if mode == wire.STOP:
                mine.stop(allowed)
                self.report(number)
            else:
                mine.allow(None if allowed == wire.UNLIMITED else allowed, mode == wire.DRAIN)
        for number, ready in self.ready.items():
            mine = self.allotments.get(number)
            if count := min(ready, MANY if mine is None else max(0, mine.left)):
                self.deliver(number, count)
            if mine is not None and mine.ended(self.ready[number] > 0):
                self.report(number)

    def report(self, number: int) -> None:
        _, used, waits = self.allotments[number].report
        of, at = (WHOLE, number) if number > WHOLE else (number, 0)
        self.consuming.crediting.report(at, wire.CreditReport(of, used, waits))

    def deliver(self, number: int, count: int) -> None:
        self.ready[number] -= count
        if number in self.allotments:
            self.allotments[number].used += count
        consumer, channel = self.consuming.consumers[number], self.channel
        if not consumer.no_ack:
            channel.unacked.add(channel.next_tag, count, consumer, 1, self.numbers[number])
            channel.limit.unacked += count
            if isinstance(consumer, Assignment):
                consumer.held += count
                consumer.counted += count
                consumer.group.limit.unacked += count
        channel.next_tag += count
        self.numbers[number] += count
        consumer.delivered += count
        if consumer.allotment is not None:
            self.consuming.crediting.delivered(consumer.allotment, count, consumer.no_ack)

    def settle(self) -> None:
        """Until nobody says anything."""
        self.shard_turn()
        self.links.on_acks_waited()
        while self.links.to_shard:
            self.shard_turn()
            self.links.on_acks_waited()


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
        if not channel.limit.most:
            assert not waiting
        else:
            assert channel.unacked.count <= max(channel.limit.most, before)
            assert not waiting or channel.unacked.count >= channel.limit.most
            assert channel.limit.allotted == sum(
                max(0, mine.left) for mine in bench.allotments.values()
            )


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
        assert held == whole.limit.unacked <= prefetch
        assert whole.limit.allotted == sum(
            bench.allotments[number].left for number in bench.ready if number > WHOLE
        )
        assert whole.limit.unacked + whole.limit.allotted <= prefetch
        if channel.limit.most:
            assert not waiting or held == prefetch or channel.limit.unacked >= channel.limit.most
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
        bench.clock.now += ROUND_S  # else a turn goes on
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
    assert bench.links.to_shard == [(1, 5, wire.STOP), (2, 5, wire.STOP)]
    bench.ready = {1: 5, 2: 5}
    bench.settle()
    assert bench.channel.unacked.count == 12


def test_another_limit_is_no_news_to_the_shard_unless_it_must_give_back() -> None:
    bench = Bench(1)
    bench.consuming.limit(bench.channel, 3)
    bench.settle()
    bench.consuming.limit(bench.channel, 5)
    assert not bench.links.to_shard
    bench.ready = {1: 1}
    bench.settle()
    assert (bench.channel.limit.unacked, bench.channel.limit.allotted) == (1, 4)
    bench.consuming.limit(bench.channel, 2)
    assert bench.links.to_shard == [(1, 5, wire.STOP)]
    bench.ready = {1: 2}
    bench.settle()
    assert (bench.channel.limit.unacked, bench.channel.limit.allotted) == (2, 0)


def test_deliveries_of_a_consumer_that_was_cancelled_count_until_they_are_settled() -> None:
    bench = Bench(2)
    bench.consuming.limit(bench.channel, 2)
    bench.ready = {1: 2, 2: 2}
    bench.settle()
    held = bench.channel.unacked.count
    bench.consuming.crediting.close(bench.consuming.consumers[1])
    bench.ready[1] = 0
    del bench.allotments[1]
    bench.settle()
    assert held == bench.channel.unacked.count == 2
    bench.consuming.acks.settle(bench.channel, [(wire.ACK, 0, 0, True)])
    bench.settle()
    assert bench.ready[2] == 0 and bench.channel.limit.members == 1


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
    assert bench.channel.limit.unacked == 0


def test_credit_given_back_after_the_limit_went_and_came_is_not_counted_twice() -> None:
    bench = Bench(1)
    bench.consuming.limit(bench.channel, 3)
    report = bench.consuming.crediting.report
    report(0, wire.CreditReport(1, 0, waits=True))
    assert bench.channel.limit.allotted == 3
    bench.consuming.limit(bench.channel, 0)
    report(0, wire.CreditReport(1, 3, waits=True))
    bench.consuming.limit(bench.channel, 3)
    assert (bench.channel.limit.allotted, bench.channel.limit.free) == (0, 3)


def test_credit_that_a_handover_frees_is_told_though_no_pass_of_the_loop_ends() -> None:
    bench = Bench(0)
    bench.with_virtual(2, 1)
    bench.ready[101] = 1
    bench.settle()
    bench.ready[102] = 1
    bench.settle()
    given_up = bench.consuming.consumers[101]
    assert isinstance(given_up, Assignment) and given_up.held == 1
    bench.links.acks_wait = False
    bench.consuming.crediting.forget_held(given_up)
    assert bench.links.acks_wait
    bench.links.on_acks_waited()
    assert bench.links.to_shard == [(102, 1, wire.KEEP)]


def looks_at_allotments(monkeypatch: pytest.MonkeyPatch) -> list[Credit]:
    """Return a list that grows with each look at an allotment while credit is shared."""
    looks: list[Credit] = []
    for name in ("free", "is_needed"):
        found = getattr(Credit, name).fget

        def looked(self: Credit, found: Callable[[Credit], Any] = found) -> Any:
            looks.append(self)
            return found(self)

        monkeypatch.setattr(Credit, name, property(looked))
    return looks


def test_an_ack_costs_the_same_however_many_consumers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = looks_at_allotments(monkeypatch)
    bench = Bench(90)
    bench.consuming.limit(bench.channel, 10)
    bench.ready = dict.fromkeys(bench.ready, 3)
    bench.settle()
    for _ in range(10):
        looks.clear()
        bench.clock.now += ROUND_S
        bench.consuming.acks.settle(
            bench.channel, [(wire.ACK, next(bench.channel.unacked.runs()).first_tag, 0, True)]
        )
        bench.settle()
        assert len(looks) < 20


def test_who_waits_for_a_batch_costs_the_same_however_many_consumers_have_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = looks_at_allotments(monkeypatch)
    bench = Bench(90)
    bench.consuming.limit(bench.channel, 101 * 90 + 10)
    bench.settle()
    for number in bench.ready:
        bench.ready[number] = 1
        bench.settle()
    assert bench.channel.limit.free == 10 and len(bench.channel.limit.holding) == 90
    bench.ready[1] = 101
    looks.clear()
    bench.shard_turn()
    bench.links.share_freed()
    assert bench.ready[1] == 1 and bench.consuming.crediting._waiting and len(looks) < 20
    bench.settle()
    assert bench.ready[1] == 0


def test_both_sides_open_an_allotment_for_an_assignment_that_is_asked_for_in_vain() -> None:
    bench = Bench(0)
    bench.with_virtual(1, 0)
    part = bench.consuming.consumers[101]
    assert isinstance(part, Assignment)
    part.wanted = False
    # As much of a future as is used here.
    part.attaching = SimpleNamespace(done=lambda: False)  # type: ignore[assignment]
    bench.consuming.restarted(101, lambda number: None)
    assert part.allotment is not None
    bench.consuming.limit(bench.channel, 1)
    assert (101, 0, wire.STOP) in bench.links.to_shard
