"""The compiled ready list is the plain one, only faster."""

from __future__ import annotations

import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from shardd.queues import ready
from tests.reference import ready as reference

# Of a chunk in ready.pyx.
CHUNK_ENTRIES = 8192
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "push chunk", "drop", "back", "back chunk", "all"]), st.integers(0, 40)),
    max_size=50,
)


@settings(max_examples=80, deadline=None)
@given(STEPS, st.integers(0, 1 << 20))
def test_entries_come_in_order_and_go_back_to_their_place(steps: list[tuple[str, int]], seed: int) -> None:
    pick = random.Random(seed)
    both = (ready.Ready(), reference.Ready())
    out: list[int] = []
    last = 1 << 32
    for step, count in steps:
        if step in ("push", "push chunk"):
            count = CHUNK_ENTRIES - 20 + count if step == "push chunk" else count
            more = array("Q", [last + 16 * (i + 1) | pick.getrandbits(1) for i in range(count)])
            last += 16 * count
            for each in both:
                each.push_many(more)
        elif step == "drop":
            out += both[0].peek(count)
            for each in both:
                each.drop(count)
        elif step in ("back", "back chunk"):
            back = array("Q", sorted(pick.sample(out, min(len(out), count * (300 if step == "back chunk" else 1)))))
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


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=40), st.integers(0, 39))
def test_marks_are_the_plain_ones(values: list[int], start: int) -> None:
    entries = array("Q", values)
    start %= len(entries)
    assert ready.marked(entries) == reference.marked(entries)
    assert ready.same_mark(entries, start) == reference.same_mark(entries, start)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_sums_do_not_wrap(values: list[int]) -> None:
    assert ready.total(array("I", values)) == reference.total(array("I", values))
