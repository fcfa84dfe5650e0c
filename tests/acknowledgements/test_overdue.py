"""What a consumer holds for too long goes back, and only that; never early, at most a step late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.queues import Consumer, Getter, Queue, Window, limits_of
from shardmq.shardd.queues.handed import STEPS, Handed, step_of
from tests.queues.test_queue_model import Outlet, publish
from tests.support.dict_store import DictStore

STEP = st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 3))


@given(st.integers(1, 200), st.lists(STEP, max_size=40))
def test_never_early_and_at_most_a_step_late(
    timeout: int, steps: list[tuple[int, int, int]]
) -> None:
    handed = Handed()
    times: dict[int, int] = {}  # when each number was handed over
    now, next_number, settled = 1000, 1, 0
    for wait, more, fewer in steps:
        now += wait
        for number in range(next_number, next_number + more):
            times[number] = now
        next_number += more
        handed.note(next_number, now, timeout)
        for number in range(settled + 1, min(settled + 1 + fewer, next_number)):
            times.pop(number, None)
            settled = number
        handed.forget_before(settled + 1)
        overdue = handed.overdue(now, timeout)
        gone = [number for number in times if number < overdue]
        assert all(times[number] + timeout <= now for number in gone)
        for number in gone:
            del times[number]
        assert all(at + timeout + 2 * step_of(timeout) > now for at in times.values())
        assert len(handed._stamps) <= 2 * STEPS + 4


@pytest.mark.row("C1.11")
def test_what_is_overdue_goes_to_another_and_the_late_ack_is_nothing() -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, limits_of({"x-consumer-timeout": 160}))
    slow, other = (Consumer(queue, None, number, Window(1 << 20), prefetch=2) for number in (1, 2))
    queue.attach(slow)

    def turn(now: int) -> list[tuple[int, int, bool, int]]:
        outlet.given.clear()
        queue.deliver(now, outlet, 1 << 20)
        queue.take_overdue(now)
        return list(outlet.given)

    publish(queue, store, [0, 1, 2])
    assert turn(1000) == [(1, 1, False, 0), (1, 2, False, 1)]
    entries, size = slow.unacked.settle(1, 1)
    queue.ack(entries, size)
    assert turn(1100) == [(1, 3, False, 2)]
    queue.attach(other)
    due = queue.next_due()
    assert due == 1000 + 160 + step_of(160)
    assert turn(due - 1) == [] and queue.backlog.unacked_count == 2
    turn(due)
    assert queue.backlog.ready_count == 1 and queue.backlog.unacked_count == 1
    queue.detach(slow, due)
    assert turn(due + 1) == [(2, 1, True, 1)]
    assert not slow.unacked.settle(2, 2)[0]
    assert slow.unacked.count == 1


def test_who_settles_in_time_is_never_bothered() -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, limits_of({"x-consumer-timeout": 50}))
    consumer = Consumer(queue, None, 1, Window(1 << 20), prefetch=1)
    queue.attach(consumer)
    publish(queue, store, list(range(20)))
    for number in range(1, 21):
        queue.deliver(number * 40, outlet, 1 << 20)
        queue.take_overdue(number * 40)
        entries, size = consumer.unacked.settle(number, number)
        assert entries
        queue.ack(entries, size)
    assert [body for *_, body in outlet.given] == list(range(20)) and queue.next_due() is None


def test_what_basic_get_took_is_no_exception() -> None:
    store = DictStore()
    queue, getter = Queue(1, store, limits_of({"x-consumer-timeout": 50})), Getter()
    publish(queue, store, [0, 1])
    for now in (1000, 1010):
        assert queue.get(getter, now) is not None
    assert queue.next_due() == 1050
    queue.take_overdue(1049)
    assert queue.backlog.ready_count == 0
    queue.take_overdue(1055)
    assert (queue.backlog.ready_count, queue.backlog.unacked_count) == (
        1,
        1,
    ) and queue.next_due() == 1060
    assert getter.settle(1, 1) == [] and len(getter.settle(2, 2)) == 1


@pytest.mark.row("A6.7")
def test_where_channels_are_closed_for_it_a_late_consumer_is_told_once_and_keeps_its_messages() -> (
    None
):
    store, outlet = DictStore(), Outlet()
    limits = limits_of({"x-consumer-timeout": 160})._replace(timeout_closes=True)
    queue = Queue(1, store, limits)
    consumer, getter = Consumer(queue, None, 1, Window(1 << 20), prefetch=1), Getter()
    queue.attach(consumer)
    publish(queue, store, [0, 1, 2])
    queue.deliver(1000, outlet, 1 << 20)
    assert queue.late(1000) == []
    queue.get(getter, 1100)
    assert queue.late(1150) == []
    assert queue.late(1200) == [consumer]
    due = queue.next_due()
    assert due is not None and 1200 < due <= 1260
    assert queue.late(1260) == [getter] and queue.late(9999) == [] and not queue.take_overdue(9999)
    assert (
        queue.backlog.unacked_count == 2
        and queue.backlog.ready_count == 1
        and queue.next_due() is None
    )
