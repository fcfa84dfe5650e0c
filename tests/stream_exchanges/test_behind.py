"""A held-back message is neither given nor lost, and comes behind the rest in its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.queues import Consumer, Limits, Queue, Window
from shardmq.shardd.queues.entry import PLACE
from shardmq.shardd.queues.limits import DeadLetters
from tests.queues.test_queue_model import Outlet, publish
from tests.support.dict_store import DictArrival, DictStore

HELD, OPEN = Limits(held=True), Limits()


def given_now(queue: Queue, outlet: Outlet) -> list[int]:
    outlet.given.clear()
    queue.deliver(0, outlet, 1 << 20)
    return [body for *_, body in outlet.given]


@given(
    st.lists(
        st.tuples(st.sampled_from(["publish", "hold", "open", "deliver"]), st.integers(1, 5)),
        max_size=40,
    )
)
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
        assert (queue.backlog.ready_count, queue.backlog.kept_back) == (len(ready), len(kept))
        assert (
            len(queue.live())
            == queue.backlog.ready_count + queue.backlog.kept_back + queue.backlog.unacked_count
        )
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
    assert queue.count_unsettled_until(until) == 3  # one ready, two held
    queue.ack(*consumer.unacked.settle(1, 2))
    assert queue.count_unsettled_until(until) == 1
    assert given_now(queue, outlet) == [3, 4]
    queue.ack(*consumer.unacked.settle(3, 3))
    assert queue.count_unsettled_until(until) == 0


@pytest.mark.parametrize("act", ["purge", "drop"])
def test_what_is_kept_back_goes_with_the_rest(act: str) -> None:
    store = DictStore()
    queue = Queue(1, store, HELD)
    publish(queue, store, [1, 2])
    assert getattr(queue, act)() == 2
    assert queue.backlog.kept_back == 0
    queue.change(OPEN, 0)
    assert queue.backlog.ready_count == 0


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


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "deliver", "ack", "let go", "requeue"]), st.integers(1, 6)
    ),
    max_size=30,
)


@given(STEPS)
def test_what_is_let_go_is_all_that_is_not_settled_up_to_a_place_and_nothing_behind(
    steps: list[tuple[str, int]],
) -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, Limits(dead_letters=DeadLetters("dlx")))
    consumer = Consumer(queue, None, 1, Window(1 << 20), prefetch=4)
    queue.attach(consumer)
    there: set[int] = set()  # places of what is not settled
    for step, count in steps:
        if step == "publish":
            publish(queue, store, list(range(count)))
            departed = (
                set(queue.backlog.departures.entries())
                if queue.backlog.departures is not None
                else set()
            )
            there |= {entry & PLACE for entry in queue.live()} - {
                entry & PLACE for entry in departed
            }
        elif step == "deliver":
            queue.deliver(0, outlet, 1 << 20)
        elif step in ("ack", "requeue"):
            first = consumer.unacked.first_number
            entries, size = consumer.unacked.settle(first, first)
            (queue.ack if step == "ack" else queue.requeue)(entries, size)
            if step == "ack":
                there -= {entry & PLACE for entry in entries}
        elif there:
            until = sorted(there)[min(count, len(there)) - 1]
            assert (
                queue.count_unsettled_until(until)
                == queue.dead_letter_until(until, "resharded")
                == min(count, len(there))
            )
            there = {place for place in there if place > until}
        departing = (
            queue.backlog.departures.entries() if queue.backlog.departures is not None else ()
        )
        assert {entry & PLACE for entry in queue.live()} - {
            entry & PLACE for entry in departing
        } == there
        assert queue.backlog.ready_count + queue.backlog.unacked_count == len(there)
        assert queue.backlog.unacked_count == consumer.unacked.count
