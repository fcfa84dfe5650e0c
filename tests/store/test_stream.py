"""A stream log does what a list does, whatever the order of appends, reads, syncs, retention, stops and crashes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stream_history import StreamHistory, live_through_power_cut

seeds = st.integers(0, 1 << 32)


@settings(max_examples=150, deadline=None)
@given(seeds, st.booleans())
def test_a_stream_is_a_list_through_stops_and_crashes(seed: int, sync: bool) -> None:
    history = StreamHistory(seed, sync=sync)
    for _ in range(3):
        history.play(50)
        if history.random.random() < 0.5:
            history.stop_cleanly()
        else:
            history.crash(power_cut=False)


@settings(max_examples=500, deadline=None)
@given(seeds)
def test_what_was_committed_outlives_power_cuts_in_the_middle_of_calls(seed: int) -> None:
    live_through_power_cut(seed)


def test_a_stream_that_commits_before_its_sync_is_caught() -> None:
    caught = 0
    for seed in range(20):
        try:
            live_through_power_cut(seed, sync_lies=True)
        except AssertionError as error:
            caught += "that it owed" in str(error)
    if not caught:
        pytest.fail("the checker saw nothing")
