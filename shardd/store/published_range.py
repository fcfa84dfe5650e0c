"""Publish where a stream begins and ends, for processes that read it beside its shard."""

from __future__ import annotations

from typing import Protocol


class Ranges(Protocol):
    """The ranges of all streams of a shard: a `wire.board.Board`."""

    def put(self, queue: int, first: int, next: int) -> None: ...
    def remove(self, queue: int) -> None: ...


class QueueRange:
    """The range of one stream among those of a shard."""

    def __init__(self, ranges: Ranges, queue_id: int) -> None:
        self._ranges = ranges
        self._queue_id = queue_id

    def put(self, first: int, next: int) -> None:
        self._ranges.put(self._queue_id, first, next)

    def remove(self) -> None:
        self._ranges.remove(self._queue_id)
