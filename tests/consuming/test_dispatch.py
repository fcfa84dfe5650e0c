"""A dispatch alone: who gets what of a backlog, without the queue around them."""

from __future__ import annotations

from array import array
from typing import Any

from shardmq.shardd.queues import Allotment, Consumer, Window, limits_of
from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.dispatch import Dispatch
from tests.support.dict_store import DictArrival, DictStore

SIZE = 4


class Bench:
    """Stands where a queue would: what a consumer asks of its queue, and nothing else."""

    keeps_in_store = True

    def __init__(self, **arguments: Any) -> None:
        self.store = DictStore()
        limits = limits_of(
            {"x-" + name.replace("_", "-"): value for name, value in arguments.items()}
        )
        self.backlog = Backlog(1, self.store, limits, True)
        self.dispatch = Dispatch(self.backlog)
        self.consumers = self.dispatch.consumers
        self.given: list[tuple[int, int, bool, int]] = []
        self.reports: list[tuple[int, int, bool]] = []

    def attach(self, number: int, window: int = 1 << 30, **more: Any) -> Consumer:
        consumer = Consumer(self, None, number, Window(window), **more)
        self.dispatch.attach(consumer)
        return consumer

    def publish(self, count: int) -> None:
        stored = SIZE.to_bytes(4, "little") + bytes(10)
        entries = array("Q", [self.store.put([1], stored) for _ in range(count)])
        self.backlog.take_in(DictArrival(1, entries, SIZE * count), 0)

    def turn(self, now: int = 0) -> dict[int, int]:
        """Return how many messages each consumer was given."""
        self.given.clear()
        while self.dispatch.deliver(now, self, 1 << 20):  # type: ignore[arg-type] # no stream
            pass
        found: dict[int, int] = {}
        for number, _, _, count in self.given:
            found[number] = found.get(number, 0) + count
        return found

    def has_for(self, consumer: Consumer) -> bool:
        return self.backlog.ready_count > 0

    def deliver(
        self, consumer: Consumer, first: int, redelivered: bool, count: int, blob: bytes
    ) -> None:
        self.given.append((consumer.number, first, redelivered, count))

    def deliver_again(
        self, consumer: Consumer, first: int, times: int, count: int, blob: bytes
    ) -> None:
        self.given.append((consumer.number, first, True, count))

    def report(self, allotment: Allotment) -> None:
        self.reports.append(allotment.report)


def test_equals_share_and_a_higher_priority_comes_first() -> None:
    bench = Bench()
    bench.attach(1)
    bench.attach(2)
    bench.publish(10)
    assert bench.turn() == {1: 5, 2: 5}
    bench.attach(3, priority=1, prefetch=7)
    bench.publish(9)
    assert bench.turn() == {3: 7, 1: 1, 2: 1}


def test_a_prefetch_and_a_window_bound_what_is_handed_out() -> None:
    bench = Bench()
    one = bench.attach(1, prefetch=3)
    bench.publish(10)
    assert bench.turn() == {1: 3}
    bench.dispatch.taken_back(*one.unacked.settle(1, 2))
    assert bench.turn() == {1: 2}
    full = bench.attach(2, window=1)
    assert bench.turn() == {2: 1}, "a message goes as long as the window is not full"
    assert bench in full.window.blocked


def test_only_one_is_active_where_the_queue_wants_it() -> None:
    bench = Bench(single_active_consumer=True)
    first, _ = bench.attach(1), bench.attach(2)
    bench.publish(4)
    assert bench.turn() == {1: 4}
    bench.dispatch.detach(first)
    bench.publish(3)
    assert bench.turn() == {2: 3}


def test_credit_is_asked_for_and_given_back() -> None:
    bench = Bench()
    allotment = Allotment(1)
    bench.attach(1, allotment=allotment)
    bench.publish(2)
    assert (bench.turn(), bench.reports) == ({}, [(1, 0, True)])
    allotment.allow(5, drains=True)
    assert (bench.turn(), bench.reports[1:]) == ({1: 2}, [(1, 5, False)])


def test_credit_that_nobody_else_wants_is_kept() -> None:
    bench = Bench()
    allotment = Allotment(1)
    bench.attach(1, allotment=allotment)
    bench.publish(2)
    bench.turn()
    allotment.allow(5, drains=False)
    assert (bench.turn(), bench.reports[1:]) == ({1: 2}, [])
    bench.publish(2)
    assert (bench.turn(), bench.reports[1:]) == ({1: 2}, [])
    bench.publish(2)
    assert (bench.turn(), bench.reports[1:]) == ({1: 1}, [])  # it said so before
    bench.backlog.take_all()
    assert (bench.turn(), bench.reports[1:]) == ({}, [(1, 5, False)])


def test_a_consumer_without_credit_asks_for_its_share_of_what_others_take() -> None:
    bench = Bench()
    first, low = Allotment(1), Allotment(3)
    bench.attach(1, allotment=first)
    bench.attach(2)
    bench.attach(3, allotment=low, priority=-1)
    bench.publish(2)
    assert (bench.turn(), bench.reports) == ({2: 2}, [(1, 0, True)])
    bench.publish(2)
    assert (bench.turn(), bench.reports[1:]) == ({2: 2}, []), "it said so before"
    first.allow(1, drains=False)
    assert (bench.turn(), bench.reports[1:]) == ({}, [])
    bench.publish(2)
    assert (bench.turn(), bench.reports[1:]) == ({1: 1, 2: 1}, [])
    assert (bench.turn(), bench.reports[1:]) == ({}, []), "it still wants its share"
    first.allow(2, drains=True)
    assert (bench.turn(), bench.reports[1:]) == ({}, [(1, 2, False)])
    bench.publish(2)
    assert (bench.turn(), bench.reports[2:]) == ({2: 2}, [(1, 2, True)])


def test_credit_that_helps_nobody_while_another_has_the_key_is_not_asked_for_again() -> None:
    bench = Bench()
    bench.attach(1, affinity=True, prefetch=1)
    allotments = Allotment(2), Allotment(3)
    for allotment in allotments:
        bench.attach(allotment.number, affinity=True, allotment=allotment)
    bench.publish(2)  # of one key
    bench.turn()
    asked = 0
    while asked < 20 and (waiting := [each for each in allotments if each.is_asleep]):
        asked += 1
        waiting[0].allow(waiting[0].used + 1, drains=True)
        assert bench.turn() == {}
    assert asked == 2


def test_an_only_consumer_whose_credit_suffices_asks_for_no_more() -> None:
    bench = Bench()
    allotment = Allotment(1)
    bench.attach(1, allotment=allotment)
    allotment.allow(2, drains=False)
    bench.publish(2)
    assert (bench.turn(), bench.reports) == ({1: 2}, [])


def test_who_holds_messages_is_known_until_they_are_settled() -> None:
    bench = Bench()
    consumer = bench.attach(1)
    bench.publish(3)
    bench.turn()
    bench.dispatch.detach(consumer)
    assert len(list(bench.dispatch.held_of(bench))) == 3
    (taken,) = bench.dispatch.take_until(bench, 1 << 63)
    assert (len(taken), bench.backlog.unacked_count) == (3, 0)
    assert not bench.dispatch.holders


def test_a_message_without_acks_is_settled_when_it_is_handed_over() -> None:
    bench = Bench()
    bench.attach(1, no_ack=True)
    bench.publish(3)
    assert bench.turn() == {1: 3}
    assert (bench.backlog.unacked_count, bench.store.live[1]) == (0, set())


def test_what_came_back_is_handed_out_as_redelivered_and_at_its_place() -> None:
    bench = Bench()
    consumer = bench.attach(1, prefetch=4)
    bench.publish(6)
    bench.turn()
    entries, size = consumer.unacked.settle(2, 3)
    bench.dispatch.taken_back(entries, size)
    bench.backlog.send_back(entries, size)
    bench.turn()
    assert bench.given == [(1, 5, True, 2)]
