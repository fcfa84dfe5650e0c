"""Small reads that come fast share passes."""

from __future__ import annotations

from broker.pace import Pace

TICK = 0.001


def test_a_client_that_sends_rarely_never_waits() -> None:
    pace = Pace(TICK)
    assert all(pace.distance(now) <= 0 for now in (1.0, 1.0 + 2 * TICK, 5.0))


def test_small_passes_keep_a_tick_between_them() -> None:
    pace = Pace(TICK)
    assert pace.distance(1.0) <= 0
    first = pace.distance(1.0 + TICK / 4)
    assert abs(first - TICK * 3 / 4) < 1e-9
    second = pace.distance(1.0 + TICK + TICK / 4)  # the first one ended at 1 + TICK
    assert abs(second - TICK * 3 / 4) < 1e-9


def test_a_large_read_is_not_held_up() -> None:
    pace = Pace(TICK)
    pace.distance(1.0)
    pace.was_large()
    assert pace.distance(1.0 + TICK / 4) <= 0
