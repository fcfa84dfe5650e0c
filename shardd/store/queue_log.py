"""A stream as a queue of a shard wants it: takes the records of a PUBLISH, gives deliveries with their offsets.

What a message is to be found by (its filter value) is read from its headers when it is appended; a chunk that holds
none of the values wanted is passed over unread, and of the others only those messages are given that have one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardd.store import intake
from shardd.store.chunk import expanded
from shardd.store.files import Files
from shardd.store.stream import StreamLog, StreamSync, wanted_filters
from shardd.store.stream_reading import COUNT_MAX, StreamCache


class Ranges(Protocol):
    """Who is told where streams begin and end."""

    def put(self, queue: int, first: int, next: int) -> None: ...
    def remove(self, queue: int) -> None: ...


@dataclass(slots=True)
class Batch:
    """`entries`: the offset of each message, + 1. With none and `next_offset` moved on: read on from there."""

    blob: bytes  # u64 offset of each message, then the stored messages back to back
    entries: array[int]
    sizes: array[int]  # body_bytes of each
    next_offset: int


class QueueLog(StreamLog):
    def __init__(
        self,
        directory: str,
        *,
        files: Files | None = None,
        segment_bytes: int = 500_000_000,
        sync: bool = True,
        cache: StreamCache | None = None,
        queue_id: int = 0,
        ranges: Ranges | None = None,
    ) -> None:
        super().__init__(directory, files=files, segment_bytes=segment_bytes, sync=sync, cache=cache)
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

    def truncate(self) -> None:
        super().truncate()
        self._tell()

    def delete_all(self) -> None:
        if self._ranges is not None:
            self._ranges.remove(self._queue_id)
        super().delete_all()

    def _tell(self) -> None:
        if self._ranges is not None:
            self._ranges.put(self._queue_id, self.first_offset, self.committed_offset)

    def append_records(self, records: memoryview, queue_id: int, alone: bool) -> int:
        """Take those of the records that name the queue (`alone`: all do); how many messages."""
        own = records if alone else intake.records_of(records, queue_id)
        before = self.next_offset
        self.append(own, intake.filters_of(own))
        return self.next_offset - before

    def filters(self, values: Sequence[str], unfiltered: bool) -> array[int] | None:
        """What `batch` takes as `wanted`; None: everything."""
        return wanted_filters([value.encode() for value in values], unfiltered=unfiltered) if values else None

    def batch(self, offset: int, bytes_max: int, count_max: int = COUNT_MAX, wanted: array[int] | None = None) -> Batch:
        """As `read`, ready to be delivered."""
        found = self.read(offset, bytes_max, wanted, count_max)
        blob, sizes = found.blob, found.sizes
        offsets = expanded(found.runs, 0)
        if wanted is not None and offsets:
            blob, offsets, sizes = intake.select(blob, offsets, sizes, wanted)
            entries = array("Q", [offset + 1 for offset in offsets])
        else:
            entries = expanded(found.runs, 1)
        return Batch(offsets.tobytes() + blob, entries, sizes, found.next_offset)
