"""A shard over files that fail: whenever it ends, what it confirmed is there in its next life."""

from __future__ import annotations

import pytest

from tests.support.faulty_files import FaultyFiles
from tests.support.shard_lives import BROKEN, Known, Life, PromiseBroken, live_some_lives

HISTORIES = 300


def play(seed: int, asks: bool = True) -> Known:
    try:
        return live_some_lives(seed, asks)
    except BaseException:
        print(f"to see it again: make torture ARGS='--seed {seed} --histories 1 -k shard'")
        raise


def test_what_was_confirmed_and_not_settled_outlives_any_end(
    request: pytest.FixtureRequest,
) -> None:
    first = request.config.option.seed
    known = [play(seed) for seed in range(first, first + HISTORIES)]
    assert sum(each.confirms for each in known) > HISTORIES, "hardly anything was confirmed"
    assert sum(each.syncs_answered for each in known) > HISTORIES, "hardly any ack was asked for"
    assert sum(len(each.broken_off) for each in known) > HISTORIES // 4, "hardly anything broke"


# 1272: a full disk that refuses to make a directory that is there. 2751422585: the first look after
# a clean stop cannot open a file, so the life behind it follows no clean stop. 4231174442: a
# message that was consumed in memory is written much later with another, and the power fails before
# its ack is synced. 100004600: the power fails while the files behind the end of a stream are
# removed, and what is left looked like a file that is missing. 2831080496: two files are made for a
# batch, closing fails while they are taken back, and only the first is removed.
@pytest.mark.parametrize("seed", [1272, 2751422585, 4231174442, 100004600, 2831080496])
def test_a_history_that_once_broke_a_promise_keeps_it(seed: int) -> None:
    play(seed, asks=False)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_shard_that_says_too_much_is_convicted(broken: object) -> None:
    with broken(), pytest.raises(PromiseBroken):  # type: ignore[operator] # makes a context
        for seed in range(HISTORIES):
            live_some_lives(seed)


def test_the_check_would_notice_a_shard_that_confirms_too_early() -> None:
    files, known = FaultyFiles(1), Known()
    life = Life(files, 1, known)
    life.targets = [(1,)]
    life.start()
    while not known.last:
        life.publish()
    door = next(door for door in life.doors.values() if door.batch)
    life.confirmed(door, door.batch, [])  # no sync was waited for
    after = Life(files.restarted(power_cut=True), 2, known)
    after.start()
    with pytest.raises(PromiseBroken, match="confirmed and lost"):
        after.check()
