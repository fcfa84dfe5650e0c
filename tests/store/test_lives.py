"""Whatever becomes of its disk: what a store was to make last is there, in order, once, undamaged.

Thousands of random lives in each run, from another seed each time; `make torture` plays as many as
one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from shardmq.shardd.store.errors import Corrupt
from tests.support.store_history import History
from tests.support.store_lives import (
    LIVES,
    ConfirmsBeforeSync,
    ForgetsNames,
    ListsTooEarly,
    bits_flipped_before_merging,
    checksums_not_looked_at,
    failing_calls,
    files_listed_still,
    files_taken,
    flipped_bits,
    list_not_synced,
    listed,
    merges_unchecked,
    power_cuts,
)

LIVES_MIN = 2000
# A store that is broken is caught within so many lives.
CANARY_LIVES = 60
# One that tells of files that nobody has taken.
FALSE_ALARM_LIVES = 300


def test_a_run_plays_thousands_of_lives() -> None:
    assert sum(LIVES.values()) >= LIVES_MIN


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.__name__)
def test_every_promise_holds_through_random_lives(
    live: Callable[[int], None], request: pytest.FixtureRequest, lives_played: list[int]
) -> None:
    first = request.config.option.seed
    for seed in range(first, first + LIVES[live]):
        try:
            live(seed)
        except BaseException:
            print(
                f"to see it again: make torture ARGS='--seed {seed} --histories 1 -k "
                f"{live.__name__}'"
            )
            raise
        lives_played.append(seed)


def is_caught(
    live: Callable[..., None], seed: int, *more: object, by: Callable[[Exception], bool]
) -> bool:
    """Return whether a life ends with an error that tells of what is broken."""
    try:
        live(seed, *more)
    except (AssertionError, Corrupt, ValueError, IndexError) as error:
        return by(error)
    return False


def tells_of_a_missing_file(error: Exception) -> bool:
    return "told as missing" in str(error)


@pytest.mark.parametrize("store_class", [ConfirmsBeforeSync, ForgetsNames])
def test_a_store_that_promises_too_early_is_caught(store_class: type) -> None:
    def by(error: Exception) -> bool:
        return "was owed" in str(error) or isinstance(error, Corrupt)

    assert any(is_caught(power_cuts, seed, store_class, by=by) for seed in range(CANARY_LIVES))


@pytest.mark.parametrize("live", [flipped_bits, power_cuts])
def test_a_store_that_does_not_look_at_checksums_is_caught(live: Callable[[int], None]) -> None:
    """By bits that flipped on the disk, and by what a power cut left of former lives of a file."""
    with checksums_not_looked_at():
        assert any(
            is_caught(live, seed, by=lambda error: bool(str(error))) for seed in range(CANARY_LIVES)
        )


@pytest.mark.parametrize("broken", [files_listed_still, list_not_synced])
def test_a_list_of_files_that_is_kept_carelessly_is_caught(
    broken: Callable[[], AbstractContextManager[None]],
) -> None:
    with broken():
        assert any(
            is_caught(power_cuts, seed, by=tells_of_a_missing_file)
            for seed in range(FALSE_ALARM_LIVES)
        )


def test_a_list_of_files_that_may_not_last_is_caught() -> None:
    assert any(
        is_caught(power_cuts, seed, ListsTooEarly, by=tells_of_a_missing_file)
        for seed in range(FALSE_ALARM_LIVES)
    )


def test_lives_do_take_files_that_were_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(
        "tests.support.store_lives.listed",
        lambda history: taken.append(listed(history)) or taken[-1],
    )
    for seed in range(CANARY_LIVES):
        files_taken(seed)
    assert sum(map(bool, taken)) > CANARY_LIVES // 4


def test_a_merge_that_does_not_look_at_checksums_is_caught() -> None:
    with merges_unchecked():
        assert any(
            is_caught(
                bits_flipped_before_merging, seed, by=lambda error: "never published" in str(error)
            )
            for seed in range(CANARY_LIVES)
        )


def test_failing_calls_do_meet_full_disks_and_broken_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[History] = []
    monkeypatch.setattr(
        "tests.support.store_lives.History", lambda seed: seen.append(History(seed)) or seen[-1]
    )
    for seed in range(CANARY_LIVES):
        failing_calls(seed)
        if any(history.refused for history in seen):
            return
    raise AssertionError("no disk was full")
