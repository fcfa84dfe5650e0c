"""Whose turn it is, and who must wait."""

from __future__ import annotations

from typing import Any

from shardmq.shardd.queues import Allotment, Consumer, Queue, Window, limits_of
from shardmq.shardd.queues.consumers import NO_LIMIT, Consumers
from tests.support.dict_store import DictStore

QUEUE = Queue(1, DictStore(), limits_of({}))


def consumer(number: int, window: Window | None = None, **more: Any) -> Consumer:
    return Consumer(QUEUE, None, number, Window(1000) if window is None else window, **more)


def attached(*each: Consumer, single_active: bool = False) -> Consumers:
    consumers = Consumers(single_active)
    for one in each:
        consumers.add(one)
    return consumers


def numbers(consumers: Consumers) -> list[int]:
    return [each.number for each in consumers.takers()]


def test_the_one_behind_the_last_is_next() -> None:
    a, b, c = consumer(1), consumer(2), consumer(3)
    consumers = attached(a, b, c)
    assert numbers(consumers) == [1, 2, 3]
    consumers.took(b)
    assert numbers(consumers) == [3, 1, 2]
    consumers.took(c)
    assert numbers(consumers) == [1, 2, 3]


def test_lower_priorities_get_what_higher_ones_have_no_room_for() -> None:
    high = consumer(1, priority=5, allotment=Allotment(1))
    consumers = attached(consumer(2), high, consumer(3))
    assert numbers(consumers) == [2, 3]
    assert high.allotment is not None
    high.allotment.allow(1, drains=False)
    assert numbers(consumers) == [1]


def test_a_single_active_consumer_is_followed_by_the_next_that_came() -> None:
    a, b = consumer(1), consumer(2, priority=9)
    consumers = attached(a, b, single_active=True)
    assert numbers(consumers) == [1]
    assert (consumers.active(a), consumers.active(b)) == (True, False)
    consumers.remove(a)
    assert numbers(consumers) == [2]
    assert consumers.active(b)


def test_an_exclusive_consumer_is_first_and_last() -> None:
    assert not attached().refuses(exclusive=True)
    assert attached(consumer(1)).refuses(exclusive=True)
    assert not attached(consumer(1)).refuses(exclusive=False)
    assert attached(consumer(1, exclusive=True)).refuses(exclusive=False)


def test_room_is_the_least_of_prefetch_allotment_and_window() -> None:
    assert consumer(1).room() == NO_LIMIT
    assert consumer(1, prefetch=3).room() == 3
    assert consumer(1, prefetch=3, no_ack=True).room() == NO_LIMIT
    allotment = Allotment(1)
    limited = consumer(1, prefetch=3, allotment=allotment)
    assert limited.room() == 0
    allotment.allow(5, drains=False)
    assert limited.room() == 3
    allotment.used = 4
    assert limited.room() == 1
    limited.window.room = 0
    assert limited.room() == 0
    assert limited.window.unblocked() == [QUEUE]


def test_queues_that_share_too_little_room_get_it_in_turn() -> None:
    window = Window(100)
    queues = [Queue(number, DictStore(), limits_of({})) for number in range(1, 5)]
    takers = [Consumer(queue, None, queue.id, window) for queue in queues]
    order: list[Queue] = queues
    got: list[int] = []
    for _ in range(8):
        window.room = 100
        for queue in order:
            if takers[queue.id - 1].room() > 0:  # one takes it all, and looks for more
                window.room, window.served = 0, queue
                got.append(queue.id)
                takers[queue.id - 1].room()
        order = window.unblocked()
        assert sorted(queue.id for queue in order) == [1, 2, 3, 4]
    assert got == [1, 2, 3, 4, 1, 2, 3, 4]
    assert window.unblocked() == []


def test_a_queue_that_is_gone_waits_for_no_room() -> None:
    one = consumer(1, Window(0))
    assert one.room() == 0
    one.window.served = QUEUE
    one.window.forget(QUEUE)
    assert one.window.unblocked() == [] and one.window.served is None


def test_prefetch_never_promises_less_than_nothing() -> None:
    """A prefetch made smaller than what is held: wait, and nothing else."""
    one = consumer(1, prefetch=5)
    one.unacked.count = 4
    one.prefetch = 2
    consumers = attached(one)
    assert not consumers.takers()
    assert consumers.capacity() == 0


def test_credit_of_a_former_life_does_not_widen_a_window() -> None:
    window = Window(100)
    window.room = 90
    window.free(50)
    assert window.room == 100
