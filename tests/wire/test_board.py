"""The board: whoever looks sees where a stream begins and ends, as it was said last, through lives of the shard."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardd.wire import board
from shardd.wire.board import Board, BoardView, Range


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
        assert view.look(looked) == expected.get(looked)


def test_nothing_is_seen_before_it_is_shown_and_the_old_board_until_the_new_one_is(tmp_path: Path) -> None:
    path = str(tmp_path / "board-0")
    view = BoardView(path)
    first = Board(path)
    first.put(1, 0, 5)
    assert view.look(1) is None
    first.show()
    assert view.look(1) == Range(0, 5)
    second = Board(path)
    second.put(2, 0, 7)
    assert (view.look(1), view.look(2)) == (Range(0, 5), None)
    second.show()
    assert (view.look(1), view.look(2)) == (None, Range(0, 7))


def test_streams_beyond_the_bound_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "STREAMS_MAX", 3)
    path = str(tmp_path / "board-0")
    shard, view = Board(path), BoardView(path)
    shard.show()
    for queue in range(1, 6):
        shard.put(queue, 0, queue)
    assert [view.look(queue) for queue in range(1, 6)] == [Range(0, 1), Range(0, 2), Range(0, 3), None, None]
    shard.remove(2)
    shard.put(5, 0, 5)
    assert view.look(5) == Range(0, 5)
