"""A shard queue that is too much goes when it is surely empty, and never before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.changes import DRAINING, QueuePut, ShardOf
from broker.controller.draining import LOOK_S_FIRST, LOOK_S_MAX, Looks

QUEUES = [QueuePut("/", f"q{i}", i, 0, part=ShardOf("e", i, "", DRAINING)) for i in range(3)]


@given(st.lists(st.dictionaries(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_what_goes_was_seen_empty_twice_in_a_row(history: list[dict[int, int]]) -> None:
    looks, before = Looks(), dict[int, int]()
    for found in history:
        for queue in looks.seen(QUEUES, found):
            assert found[queue.id] == before[queue.id] == 0
        before = found


def test_an_empty_queue_goes_at_the_second_look_and_a_full_one_stays() -> None:
    looks = Looks()
    assert looks.seen(QUEUES, {0: 0, 1: 5}) == []
    assert looks.seen(QUEUES, {0: 0, 1: 5}) == [QUEUES[0]]
    assert looks.seen(QUEUES[1:], {1: 0}) == []
    assert looks.seen(QUEUES[1:], {1: 0}) == [QUEUES[1]]


def test_where_nothing_happens_looks_become_rare() -> None:
    looks = Looks()
    waits = []
    for _ in range(10):
        looks.seen(QUEUES, {1: 5})
        waits.append(looks.wait_s)
    assert waits[0] == LOOK_S_FIRST
    assert waits[-1] == LOOK_S_MAX
    looks.seen(QUEUES, {1: 4})
    assert looks.wait_s == LOOK_S_FIRST
    for _ in range(3):
        looks.seen([], {})
    assert looks.wait_s == LOOK_S_FIRST  # to look at nothing costs nothing
