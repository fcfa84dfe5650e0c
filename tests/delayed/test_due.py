"""Messages come in the order of their times, and none comes early."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.queues import Kind, Queue, Roster, limits_of
from shardmq.shardd.queues.delay_queue import DEPARTING_MAX
from shardmq.shardd.queues.limits import DUE
from shardmq.shardd.queues.state import DueOrder
from tests.reference import due as reference
from tests.support.dict_store import DictArrival, DictStore

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push many", "push now", "pop", "pop all", "clear"]),
        st.integers(0, 60),
    ),
    max_size=40,
)
SOON, LATE = 1000, (1 << 64) - 1


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 1 << 20))
def test_the_heap_gives_what_a_sorted_list_gives(steps: list[tuple[str, int]], seed: int) -> None:
    pick = random.Random(seed)
    both = (DueOrder(), reference.DueOrder())
    last = 1 << 32
    for step, count in steps:
        if step.startswith("push"):
            count *= 50 if step == "push many" else 1
            entries = array("Q", [last + 16 * (i + 1) | pick.randrange(2) for i in range(count)])
            last += 16 * count
            times = [
                pick.choice([pick.randrange(SOON), 7, LATE, pick.getrandbits(64)])
                for _ in range(count)
            ]
            for each in both:
                each.push_many(entries, None if step == "push now" else array("Q", times))
        elif step == "clear":
            for each in both:
                each.clear()
        else:
            now, most = (
                (LATE, 1 << 40)
                if step == "pop all"
                else (pick.randrange(SOON), count * pick.choice([1, 40]))
            )
            assert both[0].pop_due(now, most) == both[1].pop_due(now, most)
        assert len(both[0]) == len(both[1])
        assert both[0].first_due() == both[1].first_due()
        assert sorted(both[0].entries()) == list(both[1].entries())
        assert both[0].held_bytes() <= 16 * max(16, 4 * len(both[0]), 2 * 60 * 50)


def test_a_million_cost_sixteen_bytes_each_and_give_it_back() -> None:
    order = DueOrder()
    for start in range(0, 1_000_000, 50_000):
        entries = array("Q", range((1 << 32) + 16 * start, (1 << 32) + 16 * (start + 50_000), 16))
        order.push_many(entries, array("Q", [1_000_000 - each % 977 for each in range(50_000)]))
    assert order.held_bytes() <= 1.5 * 16_000_000
    while len(order):
        order.pop_due(LATE, 8192)
    assert order.held_bytes() <= 16 * 16


def test_each_entry_needs_its_fact() -> None:
    with pytest.raises(ValueError, match="1 facts for 2 entries"):
        DueOrder().push_many(array("Q", [16, 32]), array("Q", [1]))


# -- the queue -------------------------------------------------------------------------------------


def delay_queue(store: DictStore) -> Queue:
    roster = Roster()
    roster.put(1, Kind(store, limits_of({"x-delays-for": "x"}), True, False), 0)
    queue = roster.get(1)
    assert queue is not None
    return queue


def publish(queue: Queue, store: DictStore, dues: list[int]) -> list[int]:
    entries = array("Q", [store.put([queue.id], b"body") for _ in dues])
    queue.publish(DictArrival(queue.id, entries, 4 * len(dues), array("Q", dues)), 0)
    return list(entries)


class NoOutlet:
    def __getattr__(self, name: str) -> object:
        raise AssertionError("nobody consumes here")


def departed(queue: Queue) -> list[int]:
    return list(queue.backlog.departures.entries()) if queue.backlog.departures is not None else []


def test_nothing_leaves_before_it_is_due_and_then_it_leaves_in_order_of_time() -> None:
    store = DictStore()
    queue = delay_queue(store)
    a, b, c = publish(queue, store, [300, 100, 200])
    assert queue.next_due() == 100
    assert not queue.deliver(99, NoOutlet(), 1) and departed(queue) == []
    assert not queue.deliver(100, NoOutlet(), 1) and departed(queue) == [b]
    assert queue.next_due() == 200
    assert not queue.deliver(1000, NoOutlet(), 1) and departed(queue) == [b, c, a]
    assert queue.next_due() is None
    assert queue.backlog.departures is not None and queue.backlog.departures.first(9).reason == DUE


def test_it_is_empty_to_whoever_counts_ready_messages_and_nothing_is_lost_on_the_way() -> None:
    store = DictStore()
    queue = delay_queue(store)
    entries = publish(queue, store, [300, 100])
    queue.deliver(100, NoOutlet(), 1)
    assert (queue.backlog.ready_count, queue.backlog.unacked_count, queue.delayed_count) == (
        0,
        0,
        2,
    )
    # To a clean stop what is on its way was handed out, what waits was not.
    assert list(queue.live()) == [entries[0], entries[1] | 1]
    assert store.live[1] == set(entries)


def test_only_so_many_are_on_their_way_and_the_rest_follows() -> None:
    store = DictStore()
    queue = delay_queue(store)
    entries = publish(queue, store, [5] * (DEPARTING_MAX + 3))
    while queue.deliver(5, NoOutlet(), 1):
        pass
    assert departed(queue) == entries[:DEPARTING_MAX]
    assert queue.next_due() is None
    assert queue.backlog.departures is not None
    queue.backlog.departures.hand_over(1, 10)
    queue.backlog.departures.take_off(1, [])
    assert queue.next_due() == 5
    queue.deliver(5, NoOutlet(), 1)
    assert queue.delayed_count == DEPARTING_MAX + 3 - 10
    assert departed(queue)[-3:] == entries[-3:]


def test_what_a_recovery_found_waits_as_before() -> None:
    store = DictStore()
    queue = delay_queue(store)
    entries = array("Q", [store.put([1], b"body") | 1 for _ in range(3)])
    queue.restore(DictArrival(1, entries, 12, array("Q", [30, 10, 20])), 15)
    queue.deliver(20, NoOutlet(), 1)
    assert departed(queue) == [entries[1], entries[2]]


def test_times_have_all_64_bits() -> None:
    store = DictStore()
    queue = delay_queue(store)
    first, last, second = publish(queue, store, [1 << 56, (1 << 64) - 1, (1 << 56) + 1])
    assert queue.next_due() == 1 << 56
    queue.deliver((1 << 56) - 1, NoOutlet(), 1)
    assert departed(queue) == []
    queue.deliver((1 << 56) + 1, NoOutlet(), 1)
    assert departed(queue) == [first, second]
    assert queue.next_due() == (1 << 64) - 1
    queue.deliver((1 << 64) - 1, NoOutlet(), 1)
    assert departed(queue) == [first, second, last]


def test_it_goes_with_all_it_has_when_it_is_deleted() -> None:
    store = DictStore()
    queue = delay_queue(store)
    publish(queue, store, [300, 100])
    queue.drop()
    assert queue.delayed_count == 0
    assert not store.live.get(1)


def test_an_argument_of_another_type_makes_no_such_queue() -> None:
    assert not limits_of({"x-delays-for": 1}).delays
