"""Where a stream ended that was a shard is known after it went, and after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.broker.controller.stored.definitions import ENDED_NAME
from shardmq.broker.controller.streams import ended_streams
from shardmq.broker.controller.streams.ended_streams import EndedStreams
from shardmq.broker.controller.streams.stream_ranges import StreamRanges
from shardmq.broker.model.changes import DRAINING, QueuePut, ShardOf
from shardmq.shardd.wire.board import Board, path_of


def shard(index: int, kind: str = "stream", exchange: str = "orders") -> QueuePut:
    part = ShardOf(exchange, index, "", DRAINING)
    return QueuePut("/", f"q{index}", 10 + index, 0, arguments={"x-queue-type": kind}, part=part)


class World:
    def __init__(self, directory: Path) -> None:
        self.config: Any = SimpleNamespace(data_dir=str(directory), runtime_dir=str(directory))
        self.board = Board(path_of(str(directory), 0))
        self.board.show()
        self.ranges = StreamRanges()
        self.ended = self.restarted()

    def restarted(self) -> EndedStreams:
        return EndedStreams(self.ranges, lambda: self.config)

    def holds(self, queue: QueuePut, next_: int) -> None:
        self.board.put(queue.id, next_, next_)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_where_a_shard_ended_outlives_a_restart(world: World) -> None:
    for index, next_ in [(2, 70), (3, 80), (2, 75)]:  # the last of what is said of one counts
        world.holds(shard(index), next_)
        assert await world.ended.note(shard(index))
    expected = [
        {"shard": index, "id": world.ranges.id_of(world.config, shard(index)), "next": next_}
        for index, next_ in [(3, 80), (2, 75)]
    ]
    assert world.ended.of("/", "orders") == world.restarted().of("/", "orders") == expected
    assert world.restarted().of("/", "others") == world.restarted().of("v", "orders") == []


async def test_a_shard_whose_end_is_not_known_may_not_go_yet(world: World) -> None:
    assert not await world.ended.note(shard(0))
    world.holds(shard(0), 5)
    assert await world.ended.note(shard(0))


async def test_of_a_queue_that_is_no_stream_nothing_is_kept(world: World, tmp_path: Path) -> None:
    assert await world.ended.note(shard(0, "classic"))
    assert not (tmp_path / ENDED_NAME).exists()


async def test_a_full_disk_keeps_a_shard_and_breaks_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.holds(shard(0), 5)
    world.holds(shard(1), 6)
    assert await world.ended.note(shard(0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fdatasync", full)
        assert not await world.ended.note(shard(1))
    assert [each["shard"] for each in world.restarted().of("/", "orders")] == [0]
    assert await world.ended.note(shard(1))
    assert [each["shard"] for each in world.restarted().of("/", "orders")] == [0, 1]


async def test_only_so_many_are_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_streams, "ENDED_MAX", 3)
    for index in range(5):
        world.holds(shard(index), index)
        await world.ended.note(shard(index))
    assert [each["shard"] for each in world.restarted().of("/", "orders")] == [2, 3, 4]
    assert json.loads((tmp_path / ENDED_NAME).read_text())["format"] == 1


def test_a_file_that_cannot_be_read_is_told_and_stops_nothing(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ENDED_NAME).write_text("{")
    assert world.ended.of("/", "orders") == []
    assert "cannot be read" in caplog.text
