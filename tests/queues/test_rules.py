"""The rules of a queue are chosen when it is declared.

A rule that is added is asked for everywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from shardmq.shardd.queues import Consumer, Queue, Window, limits_of, rules
from shardmq.shardd.queues.limits import Limits
from shardmq.shardd.queues.rules import Rule, rules_of
from tests.support.dict_store import DictArrival, DictStore

SIZE = 4


class Bench:
    """A queue without any argument, and one consumer."""

    def __init__(self) -> None:
        self.store = DictStore()
        self.queue = Queue(1, self.store, limits_of({}))
        self.given: list[int] = []

    def publish(self, count: int) -> list[int]:
        entries = array(
            "Q", [self.store.put([1], SIZE.to_bytes(4, "little") + b"body") for _ in range(count)]
        )
        return self.queue.publish(DictArrival(1, entries, SIZE * count), 0) or []

    def attach(self) -> Consumer:
        consumer = Consumer(self.queue, None, 1, Window(1 << 30), prefetch=2)
        self.queue.attach(consumer)
        return consumer

    def turn(self, now: int = 0) -> None:
        # No grants here, and no stream.
        while self.queue.deliver(now, self, 1 << 20):  # type: ignore[arg-type]
            pass

    def deliver(
        self, consumer: Consumer, first: int, redelivered: bool, count: int, blob: bytes
    ) -> None:
        self.given += range(first, first + count)

    def deliver_again(
        self, consumer: Consumer, first: int, times: int, count: int, blob: bytes
    ) -> None:
        self.deliver(consumer, first, True, count, blob)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Add a rule that applies to every queue."""

    def add(name: str, **asked: Any) -> None:
        monkeypatch.setattr(
            rules, "RULES", [*rules.RULES, Rule(name, lambda limits: True, **asked)]
        )

    return add


def test_a_new_rule_is_asked_which_publishes_a_plain_queue_refuses(
    add: Callable[..., None],
) -> None:
    add("no more than two at once", refuse=lambda room, count, sizes: list(range(2, count)))
    bench = Bench()
    assert bench.publish(5) == [2, 3, 4]
    assert bench.publish(2) == []
    assert bench.queue.backlog.ready_count == 4
    assert not bench.queue.admission().reserve([SIZE] * 3)


def test_a_new_rule_that_remembers_messages_looks_at_each(add: Callable[..., None]) -> None:
    bench = Bench()
    bench.publish(3)
    assert bench.queue.backlog.facts is None
    add("each is looked at", remembers=True)
    bench = Bench()
    bench.publish(3)
    assert bench.queue.backlog.facts is not None


def test_a_new_rule_is_asked_how_many_have_to_go(add: Callable[..., None]) -> None:
    add("never more than three", excess=lambda ready: ready.ready_count - 3)
    bench = Bench()
    assert not bench.queue.is_asleep
    bench.publish(8)
    bench.turn()
    assert bench.queue.backlog.ready_count == 3
    assert bench.queue.counters.let_go == 5


def test_a_new_rule_is_asked_whether_a_message_came_back_too_often(
    add: Callable[..., None],
) -> None:
    add("once is enough", too_often=lambda limits, times: "once is enough" if times > 1 else None)
    bench = Bench()
    consumer = bench.attach()
    bench.publish(1)
    for left in (1, 0):
        bench.turn()
        bench.queue.requeue(*consumer.unacked.take_all())
        assert bench.queue.backlog.ready_count == left


def test_a_new_rule_is_asked_how_long_a_message_rests(add: Callable[..., None]) -> None:
    add("ten at first", rest_ms=lambda limits, times: 100 * times)
    bench = Bench()
    consumer = bench.attach()
    bench.publish(1)
    bench.turn()
    bench.queue.requeue(*consumer.unacked.take_all())
    bench.turn()
    assert (bench.queue.backlog.ready_count, len(bench.given)) == (0, 1)
    due = bench.queue.next_due()
    assert due is not None
    assert 100 <= due <= 110
    bench.turn(due)
    assert len(bench.given) == 2


def test_a_queue_with_a_new_rule_that_acts_alone_does_not_sleep(add: Callable[..., None]) -> None:
    assert Bench().queue.is_asleep
    add("by itself", acts_alone=True)
    assert not Bench().queue.is_asleep


def test_rules_are_decided_once_and_when_a_policy_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[Limits] = []
    monkeypatch.setattr(
        rules, "RULES", [*rules.RULES, Rule("none", lambda limits: bool(decided.append(limits)))]
    )
    bench = Bench()
    consumer = bench.attach()
    for marks in (0, 8, 4, 12):
        entries = array("Q", [bench.store.put([1], SIZE.to_bytes(4, "little") + b"body")])
        bench.queue.publish(DictArrival(1, entries, SIZE, marks=marks), 0)
        bench.turn()
        bench.queue.requeue(*consumer.unacked.take_all())
    assert decided == [limits_of({})]
    limits = limits_of({"x-max-length": 1})
    bench.queue.change(limits, 0)
    assert decided == [limits_of({}), limits]
    assert bench.queue.backlog.ready_count == 1


@pytest.mark.parametrize(("arguments", "asked"), [
    ({}, []),
    ({"x-message-ttl": 5}, ["looks_at_each"]),
    ({"x-max-priority": 3}, ["looks_at_each"]),
    ({"x-max-length": 3}, ["excess"]),
    ({"x-max-length-bytes": 3}, ["excess"]),
    ({"x-max-length": 3, "x-overflow": "reject-publish"}, ["may_refuse"]),
    ({"x-overflow": "reject-publish"}, []),
    ({"x-delivery-limit": 3}, ["counts_returns"]),
    ({"x-delayed-retry-min": 3}, ["counts_returns", "rests"]),
    ({"x-expires": 3}, ["acts_alone"]),
    ({"x-consumer-timeout": 3}, ["acts_alone"]),
])  # fmt: skip
def test_each_argument_brings_its_rule(arguments: dict[str, Any], asked: list[str]) -> None:
    found = rules_of(limits_of(arguments))
    moments = ("looks_at_each", "excess", "may_refuse", "counts_returns", "rests", "acts_alone")
    assert [moment for moment in moments if getattr(found, moment)] == asked
    assert found.takes_all is not bool({"looks_at_each", "may_refuse"} & set(asked))


def test_queues_with_the_same_rules_share_them() -> None:
    assert rules_of(limits_of({"x-max-length": 3})) is rules_of(limits_of({"x-max-length": 4}))
