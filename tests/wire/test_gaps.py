"""Places of damage go from the reader to a shard: each once, and a few at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardmq.shardd.wire import gaps
from shardmq.shardd.wire.gaps import Gaps, path_of, tell


def all_of(shard: Gaps) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while some := shard.due():
        assert len(some) <= gaps.AT_ONCE
        found += some
    return found


def test_a_shard_takes_what_was_told_each_place_once(tmp_path: Path) -> None:
    path = path_of(str(tmp_path), 3)
    shard = Gaps(path)
    assert shard.due() == []
    tell(path, 7, [10, 20])
    tell(path, 8, [10])
    tell(path, 7, [20, 30])
    assert all_of(shard) == [(7, 10), (7, 20), (8, 10), (7, 30)]
    tell(path, 7, [10])
    assert all_of(shard) == [(7, 10)], "whoever meets it again tells it again"
    assert os.listdir(tmp_path) == []


def test_no_more_places_wait_for_a_shard_than_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaps, "WAITING_MAX", 5)
    path = path_of(str(tmp_path), 0)
    shard = Gaps(path)
    for first in range(0, 30, 3):
        tell(path, 1, [first, first + 1, first + 2])
    assert all_of(shard) == [(1, offset) for offset in range(5)]


def test_half_a_record_is_none(tmp_path: Path) -> None:
    path = path_of(str(tmp_path), 0)
    tell(path, 1, [5, 6])
    os.truncate(path, gaps.RECORD.size + 3)
    assert all_of(Gaps(path)) == [(1, 5)]
