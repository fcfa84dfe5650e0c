"""What a queue keeps back is neither given nor lost, and comes behind the rest, in order, when it may."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardd.queues import Consumer, Limits, Queue, Window
from tests.queues.test_queue_model import Outlet, publish
from tests.support.dict_store import DictArrival, DictStore

HELD, OPEN = Limits(held=True), Limits()


def given_now(queue: Queue, outlet: Outlet) -> list[int]:
    outlet.given.clear()
    queue.deliver(0, outlet, 1 << 20)
    return [body for *_, body in outlet.given]


@given(st.lists(st.tuples(st.sampled_from(["publish", "hold", "open", "deliver"]), st.integers(1, 5)), max_size=40))
def test_what_is_kept_back_comes_in_order_when_it_may(steps: list[tuple[str, int]]) -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, OPEN)
    queue.attach(Consumer(queue, None, 1, Window(1 << 20)))
    ready: list[int] = []
    kept: list[int] = []
    held, last = False, 0
    for step, count in steps:
        if step == "publish":
            more = list(range(last, last + count))
            last += count
            publish(queue, store, more)
            (kept if held else ready).extend(more)
        elif step == "deliver":
            assert given_now(queue, outlet) == ready
            ready = []
        else:
            held = step == "hold"
            queue.change(HELD if held else OPEN, 0)
            if not held:
                ready, kept = ready + kept, []
        assert (queue.ready_count, queue.kept_back) == (len(ready), len(kept))
        assert len(queue.live()) == queue.ready_count + queue.kept_back + queue.unacked_count
    queue.change(OPEN, 0)
    assert given_now(queue, outlet) == ready + kept


def test_what_was_there_before_is_given_and_counted_until_it_is_settled() -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, OPEN)
    consumer = Consumer(queue, None, 1, Window(1 << 20), prefetch=2)
    publish(queue, store, [1, 2, 3])
    until = queue.newest()
    publish(queue, store, [4])
    queue.attach(consumer)
    assert given_now(queue, outlet) == [1, 2]
    assert queue.left_until(until) == 3  # one ready, two held
    queue.ack(*consumer.unacked.settle(1, 2))
    assert queue.left_until(until) == 1
    assert given_now(queue, outlet) == [3, 4]
    queue.ack(*consumer.unacked.settle(3, 3))
    assert queue.left_until(until) == 0


@pytest.mark.parametrize("act", ["purge", "drop"])
def test_what_is_kept_back_goes_with_the_rest(act: str) -> None:
    store = DictStore()
    queue = Queue(1, store, HELD)
    publish(queue, store, [1, 2])
    assert getattr(queue, act)() == 2
    assert queue.kept_back == 0
    queue.change(OPEN, 0)
    assert queue.ready_count == 0


def test_a_restarted_queue_that_keeps_back_gives_nothing_of_what_it_finds() -> None:
    store, outlet = DictStore(), Outlet()
    before = Queue(1, store, OPEN)
    publish(before, store, [1, 2])
    again = Queue(1, store, HELD)
    again.attach(Consumer(again, None, 1, Window(1 << 20)))
    again.restore(DictArrival(1, before.live(), 8), 0)
    assert given_now(again, outlet) == []
    again.change(OPEN, 0)
    assert given_now(again, outlet) == [1, 2]
