"""Small reads that come fast share passes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.pace import PASSES_HELD_MAX, Pace, Reads

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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=40))
def test_batches_wait_for_few_passes_and_only_while_every_read_is_full(passes: list[tuple[int, int, bool]]) -> None:
    reads, waited = Reads(), 0
    for full, short, is_small in passes:
        reads.full += full
        reads.short += short
        may_wait = reads.may_wait()
        assert not (may_wait and short) and (full or waited or not may_wait)
        if may_wait and is_small:
            waited += full > 0
        else:
            reads.held = waited = 0
        assert reads.held == waited <= PASSES_HELD_MAX


def test_after_so_many_passes_nothing_waits() -> None:
    reads, found = Reads(), []
    for _ in range(PASSES_HELD_MAX + 1):
        reads.full += 1
        found.append(reads.may_wait())
    assert found == [True] * PASSES_HELD_MAX + [False]
