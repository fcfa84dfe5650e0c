"""The compiled ready list is the plain one, only faster."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.queues import state
from tests.reference import ready as reference

# Of a chunk in order.pxi; a queue of more than four has chunks that are packed.
CHUNK_ENTRIES = 4096
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["push", "push chunk", "push deep", "drop", "drop deep", "back", "back chunk", "all"]
        ),
        st.integers(0, 40),
    ),
    max_size=50,
)
# Of a step, in units of its own.
PUSHED = {"push": 0, "push chunk": CHUNK_ENTRIES - 20, "push deep": 5 * CHUNK_ENTRIES - 20}


def some_entries(pick: random.Random, last: int, count: int) -> array[int]:
    """Draw ascending entries behind `last`, some of them redelivered.

    Their distances are equal, or any, or spread over the whole range.
    """
    spread = pick.choice([1, 1, 9, 1 << 10, 1 << 24, 1 << 36])
    marks = pick.choice([0, 1, pick.random()])
    entries = array("Q")
    for _ in range(count):
        last = (last & ~15) + 16 * pick.randint(max(1, spread - 3), spread)
        entries.append(last | (pick.random() < marks))
    return entries


@settings(max_examples=80, deadline=None)
@given(STEPS, st.integers(0, 1 << 20))
def test_entries_come_in_order_and_go_back_to_their_place(
    steps: list[tuple[str, int]], seed: int
) -> None:
    pick = random.Random(seed)
    both = (state.Ready(), reference.Ready())
    out: list[int] = []
    last = 1 << 32
    for step, count in steps:
        if step in PUSHED:
            more = some_entries(pick, last, PUSHED[step] + count)
            last = more[-1] if more else last
            for each in both:
                each.push_many(more)
        elif step in ("drop", "drop deep"):
            count *= 300 if step == "drop deep" else 1
            out += both[1].peek(count)
            for each in both:
                each.drop(count)
        elif step in ("back", "back chunk"):
            back = array(
                "Q",
                sorted(
                    pick.sample(out, min(len(out), count * (300 if step == "back chunk" else 1)))
                ),
            )
            gone = set(back)
            out = [entry for entry in out if entry not in gone]
            for each in both:
                each.merge(reference.marked(back))
        else:
            taken = both[0].take_all()
            assert taken == both[1].take_all()
            out += taken
        assert len(both[0]) == len(both[1])
        assert both[0].first() == both[1].first()
        assert both[0].peek(count) == both[1].peek(count)
    assert both[0].peek(1 << 30) == both[1].peek(1 << 30)


@pytest.mark.parametrize(("distance", "bytes_each"), [(1, 0.3), (60, 3.5), (5000, 3.5)])
def test_a_deep_backlog_costs_little_memory(distance: int, bytes_each: float) -> None:
    """Messages have one size or different sizes, alone or between those of other queues."""
    pick = random.Random(distance)
    count = 1_000_000
    queue = state.Ready()
    last, entries = 1 << 32, array("Q")
    for _ in range(count):
        last += 16 * pick.randint(max(1, distance // 2), distance)
        entries.append(last)
    for start in range(0, count, 1000):
        queue.push_many(entries[start : start + 1000])
    assert queue.held_bytes() < bytes_each * count
    assert queue.take_all() == entries
    assert queue.held_bytes() == 0


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=40), st.integers(0, 39))
def test_marks_are_the_plain_ones(values: list[int], start: int) -> None:
    entries = array("Q", values)
    start %= len(entries)
    assert state.marked(entries) == reference.marked(entries)
    assert state.same_mark(entries, start) == reference.same_mark(entries, start)


@given(st.sets(st.integers(0, 200)), st.randoms())
def test_two_lists_merge_as_the_plain_ones(places: set[int], pick: random.Random) -> None:
    both = (array("Q"), array("Q"))
    for place in sorted(places):
        pick.choice(both).append(place << 4 | pick.getrandbits(1))
    assert state.merged(*both) == reference.merged(*both)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_sums_do_not_wrap(values: list[int]) -> None:
    assert state.total(array("I", values)) == reference.total(array("I", values))


TIMES = st.integers(0, 100) | st.integers(1 << 40, 1 << 45)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 255), st.integers(0, 100) | st.integers(0, (1 << 56) - 1), TIMES),
        max_size=60,
    ),
    st.booleans(),
    st.booleans(),
    TIMES,
    st.none() | st.integers(0, 50) | st.integers(0, 1 << 62),
    st.integers(0, 255),
    st.none() | st.integers(0, 3),
)
def test_new_messages_are_judged_as_the_slow_way_does(
    said: list[tuple[int, int, int]],
    with_facts: bool,
    with_times: bool,
    now: int,
    ttl: int | None,
    levels: int,
    before: int | None,
) -> None:
    entries = array("Q", [16 * i + i % 2 for i in range(1, len(said) + 1)])
    facts = (
        array("Q", [priority << 56 | expiry for priority, expiry, _ in said])
        if with_facts
        else None
    )
    times = array("Q", [published for _, _, published in said]) if with_times else None
    kept, parts = state.judge(entries, facts, times, now, ttl, levels)
    assert (kept, parts) == reference.judge(entries, facts, times, now, ttl, levels)
    assert state.runs(entries, kept, before) == reference.runs(entries, kept, before)


def test_what_does_not_fit_together_is_refused() -> None:
    one, two = array("Q", [16]), array("Q", [16, 32])
    for call in (
        lambda: state.judge(two, one, None, 0, None, 0),
        lambda: state.judge(two, None, one, 0, None, 0),
        lambda: state.judge(two, None, None, 0, None, 256),
        lambda: state.runs(two, one, None),
    ):
        with pytest.raises(ValueError):
            call()
