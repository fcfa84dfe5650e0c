"""The board shows where a stream begins and ends, through all lives of the shard."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from shardmq.shardd.wire import board
from shardmq.shardd.wire.board import Board, BoardView, Range


def test_who_looks_sees_what_was_put_last(tmp_path: Path) -> None:
    path, rng = str(tmp_path / "board-0"), random.Random(7)
    shard, view = Board(path), BoardView(path)
    shard.show()
    expected: dict[int, Range] = {}
    for _ in range(3000):
        queue = rng.randrange(1, 60)
        if rng.random() < 0.1:
            shard.remove(queue)
            expected.pop(queue, None)
        else:
            first = rng.randrange(1000)
            expected[queue] = Range(first, first + rng.randrange(1000))
            shard.put(queue, *expected[queue])
        looked = rng.randrange(1, 61)
        assert view.range_of(looked) == expected.get(looked)


def test_nothing_is_seen_before_it_is_shown_and_the_old_board_until_the_new_one_is(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "board-0")
    view = BoardView(path)
    first = Board(path)
    first.put(1, 0, 5)
    assert view.range_of(1) is None
    first.show()
    assert view.range_of(1) == Range(0, 5)
    second = Board(path)
    second.put(2, 0, 7)
    assert (view.range_of(1), view.range_of(2)) == (Range(0, 5), None)
    second.show()
    assert (view.range_of(1), view.range_of(2)) == (None, Range(0, 7))


def test_streams_beyond_the_bound_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "STREAMS_MAX", 3)
    path = str(tmp_path / "board-0")
    shard, view = Board(path), BoardView(path)
    shard.show()
    for queue in range(1, 6):
        shard.put(queue, 0, queue)
    assert [view.range_of(queue) for queue in range(1, 6)] == [
        Range(0, 1),
        Range(0, 2),
        Range(0, 3),
        None,
        None,
    ]
    shard.remove(2)
    shard.put(5, 0, 5)
    assert view.range_of(5) == Range(0, 5)


def test_a_slot_without_room_on_the_disk_is_never_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole of a mapped file on a full disk is no error but a signal, which ends the process."""
    path = str(tmp_path / "board-0")
    shard, view = Board(path), BoardView(path)
    shard.show()
    real = os.posix_fallocate

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full on purpose")

    monkeypatch.setattr(os, "posix_fallocate", full)
    shard.put(7, 0, 5)
    # In this order: where files lie in memory (tmpfs), to read a hole gives it a page.
    assert os.stat(path).st_blocks == 0 and view.range_of(7) is None
    monkeypatch.setattr(os, "posix_fallocate", real)
    shard.put(7, 0, 6)
    assert view.range_of(7) == (0, 6)


def test_a_board_that_cannot_be_made_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "board-0")
    before = Board(path)
    before.put(7, 0, 5)
    before.show()
    real = os.open

    def full(name: str, flags: int, *more: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "no inode left on purpose")
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", full)
    after = Board(path)
    after.put(7, 2, 9)
    after.show()
    assert BoardView(path).range_of(7) == (0, 5)
