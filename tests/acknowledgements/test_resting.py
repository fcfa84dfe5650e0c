"""A returned message rests as long as its queue says.

It never rests shorter, and at most a sixteenth longer.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.queues import limits_of
from shardmq.shardd.queues.resting import REST_MS_MAX, STEPS, Resting, Retry

STEP = st.tuples(st.integers(0, 50), st.integers(0, 5), st.integers(0, 2000))


@given(st.lists(STEP, max_size=60))
def test_never_shorter_and_at_most_a_sixteenth_longer(steps: list[tuple[int, int, int]]) -> None:
    resting = Resting()
    since: dict[int, tuple[int, int]] = {}  # entry to (now, rest)
    now, last = 1 << 40, 0
    for wait, count, rest in steps:
        now += wait
        for _ in range(count):
            last += 16
            resting.add(array("Q", [last]), 3, rest)
            since[last] = (now, rest)
        resting.begin(now)
        entries, size = resting.take_due(now)
        assert size == 3 * len(entries)
        for entry in entries:
            began, length = since.pop(entry)
            assert began + length <= now
        assert all(now <= began + length + length // STEPS for began, length in since.values())
        assert sorted(resting.entries()) == sorted(since)
        assert bool(resting) == bool(since)
    entries, size = resting.take_all()
    assert (sorted(entries), size, bool(resting)) == (sorted(since), 3 * len(since), False)


def test_a_million_that_rest_equally_long_are_a_handful_of_parts() -> None:
    resting = Resting()
    for now in range(0, 60_000, 6):
        resting.add(array("Q", range(now * 160, now * 160 + 1600, 16)), 100, 60_000)
        resting.begin(now)
    assert len(resting.entries()) == 1_000_000
    assert len(resting._parts) <= STEPS + 2


@pytest.mark.row("C1.15")
@pytest.mark.parametrize(
    ("arguments", "rests"),
    [
        ({"x-delayed-retry-min": 100}, [100, 200, 300, 400]),
        ({"x-delayed-retry-min": 100, "x-delayed-retry-max": 250}, [100, 200, 250, 250]),
        ({"x-delayed-retry-min": 100, "x-delayed-retry-multiplier": 1}, [100, 100, 100, 100]),
        ({"x-delayed-retry-min": 100, "x-delayed-retry-multiplier": 3}, [100, 300, 900, 2700]),
        (
            {"x-delayed-retry-min": 400, "x-delayed-retry-max": 100, "x-delayed-retry-type": "all"},
            [100] * 4,
        ),
    ],
)
def test_the_time_grows_with_the_number_of_returns(
    arguments: dict[str, object], rests: list[int]
) -> None:
    retry = limits_of(arguments).retry
    assert retry is not None
    assert [retry.rest_ms(times) for times in range(1, 5)] == rests


def test_no_number_of_returns_makes_it_longer_than_can_be_told() -> None:
    assert Retry(1, multiplier=9).rest_ms(1_000_000_000) == REST_MS_MAX
    assert Retry(REST_MS_MAX).rest_ms(1 << 60) == REST_MS_MAX


def test_a_queue_that_is_told_so_makes_nothing_rest() -> None:
    assert limits_of({"x-delayed-retry-min": 100, "x-delayed-retry-type": "disabled"}).retry is None
    assert limits_of({"x-delayed-retry-type": "all"}).retry is None
