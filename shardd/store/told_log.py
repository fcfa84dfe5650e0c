"""A stream whose beginning and end others are told of: after whatever changes them, and never of more than is on stable
storage."""

from __future__ import annotations

from typing import Any, Protocol

from shardmq.shardd.store.queue_log import QueueLog
from shardmq.shardd.store.stream import StreamSync


class Ranges(Protocol):
    """Who is told."""

    def put(self, queue: int, first: int, next: int) -> None: ...
    def remove(self, queue: int) -> None: ...


class ToldLog(QueueLog):
    def __init__(self, directory: str, *, queue_id: int, ranges: Ranges, **more: Any) -> None:
        """`more`: as a QueueLog has it."""
        super().__init__(directory, **more)
        self._queue_id = queue_id
        self._ranges = ranges

    def recover(self) -> None:
        super().recover()
        self._tell()

    def flush(self) -> None:
        super().flush()
        self._tell()

    def finish_sync(self, job: StreamSync) -> None:
        super().finish_sync(job)
        self._tell()

    def retain(self, now: int, **bounds: Any) -> int:
        gone = super().retain(now, **bounds)
        if gone:
            self._tell()
        return gone

    def truncate(self) -> bool:
        all_went = super().truncate()
        self._tell()
        return all_went

    def delete_all(self) -> None:
        self._ranges.remove(self._queue_id)
        super().delete_all()

    def _tell(self) -> None:
        self._ranges.put(self._queue_id, self.first_offset, self.committed_offset)
