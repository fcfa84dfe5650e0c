"""Samples of the past are what was sampled, whatever the clock and the counters did.

A plain model keeps every sample in a list and looks for each wanted time from the start.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.management.api_error import ApiError
from shardmq.broker.controller.management.metrics import past, time_range
from shardmq.broker.controller.management.metrics.past import (
    CHANNEL,
    COARSE_S,
    FINE_KEPT_S,
    FINE_ROWS,
    KINDS,
    LENGTHS,
    MSG_RATES,
    QUEUE,
    VHOST,
    Column,
    Kind,
    Past,
    Points,
    Ring,
    Series,
    with_point,
)
from shardmq.broker.controller.management.metrics.time_range import (
    SAMPLES_MAX,
    Asked,
    TimeRange,
    add_samples,
    asked,
    check_samples,
)

EPOCH_S = 1_700_000_000.0
PAIR = Kind(
    "pair",
    (Column("depth", "", LENGTHS, counter=False), Column("count", "stats", MSG_RATES)),
    most=3,
    busiest=1,
    is_long=True,
)


class Step(NamedTuple):
    """What happened between two samples."""

    seconds: float  # may be negative: a clock that jumps
    depth: int
    risen: int | None  # None: a shard died, and its counter begins again


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([5.0, 5.0, 5.0, 5.001, 4.999, 0.0, -3.0, 17.0, 310.0, 4000.0]),
        st.integers(0, 1000),
        st.none() | st.integers(0, 500),
    ),
    min_size=1,
    max_size=60,
)
RANGES = st.builds(
    lambda last, incr, count: TimeRange((last - count * incr) * 1000, last * 1000, incr * 1000),
    st.integers(int(EPOCH_S), int(EPOCH_S) + 20_000),
    st.sampled_from([1, 5, 7, 60, 300]),
    st.integers(0, 40),
)


def played(steps: list[Step]) -> tuple[Series, list[tuple[float, int, int]]]:
    """Return the series, and all samples that a model keeps: time, depth and count."""
    series, model = Series(PAIR, 0.0), []
    now, count = 100.0, 0
    for step in steps:
        now += step.seconds
        count = 0 if step.risen is None else count + step.risen
        series.add(now, (step.depth, count))
        if not model or now > model[-1][0]:
            model.append((now, step.depth, count))
    return series, model


def shown(points: Points, wanted: TimeRange) -> dict[str, Any]:
    row: dict[str, Any] = {"depth": 0, "stats": {"count": 0}}
    add_samples(row, PAIR, points, Asked({LENGTHS: wanted, MSG_RATES: wanted}, EPOCH_S))
    return {"depth": row["depth_details"], "count": row["stats"]["count_details"]}


def check(
    steps: list[Step], wanted: TimeRange, show: Callable[[Points, TimeRange], Any] = shown
) -> None:
    """Compare what is shown with the model."""
    series, model = played(steps)
    points = series.points()
    assert list(points.times) == sorted(set(points.times)), "in the order of time"
    known = [*zip(points.times, *points.columns, strict=True)]
    assert set(known) <= set(model), "nothing is invented"
    assert known[-FINE_ROWS:] == model[-FINE_ROWS:]
    found = show(points, wanted)
    times = range(wanted.last, wanted.first - 1, -wanted.incr)
    expected: list[tuple[int, int, float, float]] = []  # timestamp, depth, bounds of the count
    for timestamp in times:
        at = timestamp / 1000 - EPOCH_S
        earlier = [row for row in known if row[0] <= at]
        later = [row for row in known if row[0] > at]
        if earlier:
            then = earlier[-1]
            most = max(then[2], later[0][2]) if later else then[2]
            expected.append((timestamp, then[1], then[2], most))
    assert [one["timestamp"] for one in found["depth"]["samples"]] == [one[0] for one in expected]
    assert [one["sample"] for one in found["depth"]["samples"]] == [one[1] for one in expected]
    for one, (timestamp, _, least, most) in zip(found["count"]["samples"], expected, strict=True):
        assert one["timestamp"] == timestamp
        assert least <= one["sample"] <= most, "between the samples before and after"
    for details in found.values():
        assert {"avg", "avg_rate"} <= details.keys() or len(details["samples"]) < 2
    for name in ("rate", "avg_rate"):
        assert found["count"].get(name, 0.0) >= 0.0, "a counter that fell has no negative rate"


@given(STEPS, RANGES)
def test_samples_are_what_was_sampled(steps: list[Step], wanted: TimeRange) -> None:
    check(steps, wanted)


RESTARTED = [Step(5.0, 1, 100), Step(5.0, 2, None), Step(5.0, 3, 7)]
OVER_ALL = TimeRange((int(EPOCH_S) + 105) * 1000, (int(EPOCH_S) + 120) * 1000, 5000)


def falling(points: Points, wanted: TimeRange) -> Any:
    """Show samples as if a counter were a depth: it may then fall."""
    found = shown(points, wanted)
    samples = found["count"]["samples"]
    seconds = (samples[0]["timestamp"] - samples[-1]["timestamp"]) / 1000
    found["count"]["avg_rate"] = (samples[0]["sample"] - samples[-1]["sample"]) / seconds
    return found


def late(points: Points, wanted: TimeRange) -> Any:
    """Show for each time the sample after it."""
    return shown(Points([at - 5 for at in points.times], points.columns), wanted)


def test_what_the_model_compares_is_right_for_a_restart() -> None:
    check(RESTARTED, OVER_ALL)


@pytest.mark.parametrize("broken", [falling, late])
def test_a_broken_way_to_show_samples_is_caught(broken: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        check(RESTARTED, OVER_ALL, broken)


class Forgetful(Ring):
    """A ring that takes samples of any time."""

    def add(self, at: float, numbers: past.Numbers) -> None:
        self._numbers.append(at)
        self._numbers.extend(numbers)


def test_a_ring_that_takes_what_is_not_later_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "Ring", Forgetful)
    with pytest.raises(AssertionError):
        check([Step(5.0, 1, 1), Step(-3.0, 1, 1)], OVER_ALL)


def test_ten_minutes_are_kept_at_5_s_and_a_day_at_5_min() -> None:
    series = Series(PAIR, 0.0)
    for number in range(2 * 86_400 // 5):
        series.add(5.0 * number, (number, number))
    times = series.points().times
    assert times[-1] - times[-FINE_ROWS] == past.FINE_KEPT_S
    assert times[-1] - times[0] == pytest.approx(past.COARSE_KEPT_S, abs=COARSE_S)
    steps = {round(b - a, 3) for a, b in pairwise(times)}
    assert {5.0, COARSE_S} <= steps and max(steps) == COARSE_S


@given(st.lists(st.integers(0, 6), max_size=80))
def test_the_objects_that_were_seen_last_are_kept(seen: list[int]) -> None:
    clock = [0.0]
    kept, model = Past(lambda: clock[0]), list[int]()
    kept._kept["pair"] = type(kept._kept["queue"])()  # a kind with few objects
    for key in seen:
        clock[0] += 1
        kept.see(PAIR, key)
        model = [*[one for one in model if one != key][-(PAIR.most - 1) :], key]
        assert [key for key, _ in kept.sampled(PAIR)] == model
    clock[0] += past.UNSEEN_S_MAX + 1
    assert kept.sampled(PAIR) == []


def test_all_samples_together_are_bounded() -> None:
    kept = Past()
    for kind in KINDS:
        for key in range(kind.most + 2):
            series = kept.see(kind, key)
            at = 0.0
            for _ in range(FINE_ROWS + 3):
                series.add(at := at + COARSE_S, [1.0] * len(kind.columns))
            if series._coarse is not None:
                for _ in range(past.COARSE_ROWS + 3):
                    series.add(at := at + COARSE_S, [1.0] * len(kind.columns))
    rings = [
        ring
        for kind in KINDS
        for _, series in kept.sampled(kind)
        for ring in (series._fine, series._coarse)
        if ring is not None
    ]
    held = sum(sys.getsizeof(ring._numbers) for ring in rings)
    assert past.BYTES_MAX / 2 < held < past.BYTES_MAX, held


def test_a_number_that_is_not_known_is_left_out() -> None:
    points = with_point(Points((), [(), ()]), 100.0, (math.nan, 3))
    points = with_point(points, 105.0, (4, 4))
    found = shown(points, OVER_ALL)
    assert [one["sample"] for one in found["depth"]["samples"]] == [4, 4, 4, 4]
    assert [one["sample"] for one in found["count"]["samples"]] == [4, 4, 4, 4]
    assert found["depth"].get("rate") is None


def test_a_counter_rises_evenly_between_two_samples() -> None:
    points = Points([100.0, 110.0, 120.0], [[1.0, 2.0, 3.0], [0.0, 100.0, 40.0]])
    found = shown(points, TimeRange(*(1000 * (int(EPOCH_S) + at) for at in (100, 120)), 5000))
    assert [one["sample"] for one in found["count"]["samples"]] == [40, 100, 100, 50, 0]
    assert found["count"]["avg_rate"] == 100 / 20, "what it lost by a restart is not taken away"
    assert "rate" not in found["count"], "it fell"


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ({"lengths_age": "x"}, "lengths_age: not a whole number"),
        ({"lengths_incr": "5.5"}, "lengths_incr: not a whole number"),
        ({"node_stats_age": "60", "node_stats_incr": "0"}, "age 60, incr 0"),
        ({"data_rates_age": "9" * 5000, "data_rates_incr": "9" * 4999}, "age 9999"),
    ],
)
def test_bad_ranges_are_refused(query: dict[str, str], wrong: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(query)
    assert refused.value.status == 400
    assert wrong in refused.value.reason and len(refused.value.reason) < 200


@given(st.integers(1, 10**14), st.integers(1, 10**14), st.floats(0, 4e9), st.floats(-1e9, 1e9))
def test_no_range_has_more_samples_than_are_allowed(
    age: int, incr: int, wall_s: float, clock_s: float
) -> None:
    query = {"lengths_age": str(age), "lengths_incr": str(incr)}
    if age // incr > SAMPLES_MAX:
        with pytest.raises(ApiError):
            asked(query, wall_s, clock_s)
        return
    found = asked(query, wall_s, clock_s)
    assert found is not None
    points = Points([clock_s - 10.0, clock_s], [[1.0, 2.0], [1.0, 2.0]])
    row: dict[str, Any] = {"depth": 1}
    add_samples(row, PAIR, points, found)
    assert len(row["depth_details"]["samples"]) <= SAMPLES_MAX + 1


@pytest.mark.parametrize(
    ("kind", "rows", "age", "incr", "is_refused"),
    [
        (QUEUE, 500, FINE_KEPT_S, 5, False),  # all samples that are kept
        (QUEUE, 100_000, FINE_KEPT_S, 5, False),  # at most 500 of these queues are sampled
        (QUEUE, 500, SAMPLES_MAX, 1, True),
        (QUEUE, 100_000, SAMPLES_MAX, 1, True),
        (QUEUE, 153, SAMPLES_MAX, 1, False),
        (QUEUE, 154, SAMPLES_MAX, 1, True),
        (CHANNEL, 100_000, SAMPLES_MAX, 1, False),
        (VHOST, 100_000, SAMPLES_MAX, 1, False),
    ],
)
def test_an_answer_with_too_many_samples_is_refused(
    kind: Kind, rows: int, age: int, incr: int, is_refused: bool
) -> None:
    query = {}
    for prefix in (LENGTHS, MSG_RATES):
        query |= {f"{prefix}_age": str(age), f"{prefix}_incr": str(incr)}
    found = asked(query)
    assert found is not None
    if not is_refused:
        check_samples(found, kind, rows)
        return
    with pytest.raises(ApiError, match=r"ask for at most \d+ rows") as refused:
        check_samples(found, kind, rows)
    assert refused.value.status == 400


def test_nothing_is_asked_by_half_a_range() -> None:
    for query in ({}, {"lengths_age": "60"}, {"lengths_incr": "5"}, {"lengths_age": ""}):
        assert asked(query) is None
    assert time_range.asked({"lengths_age": "", "lengths_incr": ""}) is None
