"""A histogram says to Prometheus what the values themselves would say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.wire.histogram import Histogram, cumulative, parts_of

VALUES = st.lists(st.one_of(st.integers(0, 70), st.integers(0, 1 << 63)), max_size=60)


def told(values: list[int]) -> dict[str, float]:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram.report("size")


@given(VALUES)
def test_each_bound_counts_what_is_not_above_it(values: list[int]) -> None:
    bounds, count, total = cumulative(parts_of(told(values), "size"), 0, 63)
    assert bounds == [(1 << k, sum(value <= 1 << k for value in values)) for k in range(64)]
    assert (count, total) == (len(values), float(sum(values)))


@given(VALUES, VALUES)
def test_two_processes_added_up_are_as_one_that_saw_both(one: list[int], other: list[int]) -> None:
    parts, both = [told(one), told(other)], told(one + other)
    added = {
        name: sum(part.get(name, 0.0) for part in parts)
        for name in parts[0].keys() | parts[1].keys()
    }
    assert added.keys() == both.keys()
    assert (
        cumulative(parts_of(added, "size"), 3, 20)[:2]
        == cumulative(parts_of(both, "size"), 3, 20)[:2]
    )


def test_others_with_a_name_that_begins_alike_are_not_taken_in() -> None:
    numbers = {"size.3": 1.0, "sizes.3": 5.0, "size": 7.0, "size.sum": 8.0}
    assert parts_of(numbers, "size") == {"3": 1.0, "sum": 8.0}
