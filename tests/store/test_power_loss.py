"""What was synced outlives a power cut at any call; and the check itself is checked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.store_history import live_through_power_cut


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_was_synced_outlives_two_power_cuts_in_the_middle_of_calls(seed: int) -> None:
    live_through_power_cut(seed)


def test_a_store_that_reports_a_sync_before_doing_it_is_caught() -> None:
    caught = 0
    for seed in range(20):
        try:
            live_through_power_cut(seed, sync_lies=True)
        except AssertionError as error:
            caught += "was owed" in str(error)
    if not caught:
        pytest.fail("the checker saw nothing")
