"""Small reads that come fast share passes."""

from __future__ import annotations

from broker.pace import TIMES_ITS_WORK, Pace

TICK = 0.001
MUCH = TICK  # of the processor: half a core and more


def test_a_client_that_sends_rarely_never_waits() -> None:
    pace = Pace(TICK)
    assert all(pace.distance(now, now) <= 0 for now in (1.0, 1.0 + 2 * TICK, 5.0))


def test_small_passes_that_take_much_keep_a_tick_between_them() -> None:
    pace = Pace(TICK)
    assert pace.distance(1.0, MUCH) <= 0
    first = pace.distance(1.0 + TICK / 4, 2 * MUCH)
    assert abs(first - TICK * 3 / 4) < 1e-9
    second = pace.distance(1.0 + TICK + TICK / 4, 3 * MUCH)  # the first one ended at 1 + TICK
    assert abs(second - TICK * 3 / 4) < 1e-9


def test_small_passes_that_take_little_wait_for_as_little() -> None:
    pace = Pace(TICK)
    work = TICK / 4 / TIMES_ITS_WORK
    pace.distance(1.0, 7.0)
    assert abs(pace.distance(1.0 + TICK / 8, 7.0 + work) - TICK / 8) < 1e-9
    assert pace.distance(1.0 + TICK, 7.0 + 2 * work) <= 0


def test_a_large_read_is_not_held_up() -> None:
    pace = Pace(TICK)
    pace.distance(1.0, MUCH)
    pace.was_large()
    assert pace.distance(1.0 + TICK / 4, 2 * MUCH) <= 0
