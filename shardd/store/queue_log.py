"""A stream as a queue of a shard wants it: takes the records of a PUBLISH, each message of a producer once, gives
deliveries with their offsets.

What a message is to be found by (its filter value) is read from its headers when it is appended; a chunk that holds
none of the values wanted is passed over unread, and of the others only those messages are given that have one.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardmq.shardd.store import intake
from shardmq.shardd.store.chunk import expanded
from shardmq.shardd.store.files import is_missing
from shardmq.shardd.store.stream import StreamLog, StreamSync, wanted_filters
from shardmq.shardd.store.stream_producers import StreamProducers
from shardmq.shardd.store.stream_reading import COUNT_MAX, OFFSET_MAX, chunks
from shardmq.shardd.store.stream_segment import StreamSegment, last_not_above

_RECORD = struct.Struct("<I16xIH")  # of a record (drawn in record.pyx): length, messages, queues
_RECORD_HEADER = 28


@dataclass(slots=True)
class Batch:
    """`entries`: the offset of each message, + 1. With none and `next_offset` moved on: read on from there."""

    blob: bytes  # u64 offset of each message, then the stored messages back to back
    entries: array[int]
    sizes: array[int]  # body_bytes of each
    next_offset: int


@dataclass(slots=True)
class Taken:
    """What became of a batch. `records`: those that were appended, with others between them that do not name the queue.
    `refused`: ordinals in the batch of messages that must not be stored before one is that was refused earlier.
    `known`: of those that were there already, `altered`: of these, of those that were there with another body."""

    records: memoryview
    count: int
    repeated: int
    refused: list[int]
    known: list[int] = field(default_factory=list)
    altered: list[int] = field(default_factory=list)


# What a file is called that is about to be removed.
GONE_PREFIX = "gone."


class Remover(Protocol):
    """Removes what nobody needs any more, in that order, whenever it comes to it: a large file takes long."""

    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...


class QueueLog(StreamLog):
    def __init__(self, directory: str, *, remover: Remover | None = None, **more: Any) -> None:
        """`more`: as a StreamLog has it. Without a remover files are removed at once."""
        super().__init__(directory, **more)
        self._remover = remover
        self._producers = StreamProducers(self._files, self.directory, self.sync)

    def recover(self) -> None:
        super().recover()
        if not self._has_directory:
            return
        self._recover_producers()
        self._quietly(self._remove_left_behind)

    def _remove_left_behind(self) -> None:
        """What a former process did not come to."""
        for name in self._files.list(self.directory):
            if name.startswith(GONE_PREFIX):
                self._hand_over(f"{self.directory}/{name}")

    def _hand_over(self, path: str) -> None:
        if self._remover is None:
            self._files.remove(path)
        else:
            self._remover.remove(path)

    def _remove(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        if self._remover is None or not name.startswith("log."):
            super()._remove(path)
            return
        try:
            self._files.rename(path, f"{directory}/{GONE_PREFIX}{name}")
        except OSError as error:
            if not is_missing(error):
                raise
        else:
            self._remover.remove(f"{directory}/{GONE_PREFIX}{name}")

    def delete_all(self) -> None:
        if not self._has_directory and self._is_missing():
            super().delete_all()
            return
        self._remove_left_behind()
        if self._remover is not None:
            for name in self._files.list(self.directory):
                if name.startswith("log."):
                    self._remove(f"{self.directory}/{name}")
        super().delete_all()
        if self._remover is not None:
            self._remover.remove_directory(self.directory)

    def append_records(
        self, records: memoryview, queue_id: int, alone: bool, in_sequence: bool = False
    ) -> Taken:
        """Take those of the records that name the queue (`alone`: all do); of a batch `in_sequence` what is new."""
        if not in_sequence:
            return Taken(records, self._append_own(records, queue_id, alone), 0, [])
        self._check_usable()
        try:
            self._make_directory()
            screened = self._producers.screen(records, queue_id, self.committed_offset)
        except Exception as error:
            raise self._named(error) from error
        kept = memoryview(screened.records)
        try:
            count = self._append_own(kept, queue_id, alone) if len(kept) else 0
        except Exception:
            self._producers.table.undo()
            raise
        repeated = screened.repeated.get(queue_id, 0)
        return Taken(kept, count, repeated, screened.refused, screened.known, screened.altered)

    def _append_own(self, records: memoryview, queue_id: int, alone: bool) -> int:
        own = records if alone else intake.records_of(records, queue_id)
        before = self.next_offset
        self.append(own, intake.filters_of(own))
        self._producers.appended(len(own))
        return self.next_offset - before

    # -- how far producers have come ------------------------------------------------------------------

    def forget_producers(self, heard_before: int) -> int:
        """Those last heard before that (ms since the epoch); how many."""
        return self._producers.table.sweep(heard_before)

    def _recover_producers(self) -> None:
        """What the file says, and the chunks behind what it covers."""
        try:
            offset = self._producers.recover()
        except OSError as error:
            raise self._named(error) from error
        if offset is None:
            return
        if self.first_offset > offset:
            self._cover()  # from here on all is as it should be
            return
        for segment in self._segments:
            if segment.end <= offset:
                continue
            position = last_not_above(self._cache.index(segment), offset)
            for window, at, first, count, _ in chunks(self._cache, segment, position, self._report):
                if first + count > offset:
                    self._producers.found(window.data, at - window.start)

    def begin_sync(self) -> StreamSync | None:
        job = super().begin_sync()
        if self._producers.is_due:
            if job is None:
                self._cover()
            else:
                job.cover = self._producers.cover(self.next_offset)
        return job

    def finish_sync(self, job: StreamSync) -> None:
        super().finish_sync(job)
        if job.cover is not None:
            self._producers.covered(job.cover)

    def _cover(self) -> None:
        """At once. All that was appended is on stable storage, or nobody asks for that."""
        cover = self._producers.cover(self.next_offset)
        try:
            cover.run()
        except Exception as error:  # met by the next append or sync
            self._fail(error)
        else:
            self._producers.covered(cover)

    def _let_go(self, segment: StreamSegment) -> bool:
        """Not before something else tells how far its producers have come."""
        if self._producers.in_use and segment.end > self._producers.covered_to:
            if self._job is not None or self.committed_offset != self.next_offset:
                return False  # what comes with the next look
            self._cover()
            if segment.end > self._producers.covered_to:
                return False
        return super()._let_go(segment)

    def close(self) -> None:
        clean = self._state == "open" and not self._failure
        super().close()
        if clean and self._producers.in_use and self._producers.covered_to < self.next_offset:
            self._cover()

    # -- out -------------------------------------------------------------------------------------------

    def named_in(self, records: memoryview, queue_id: int, other: int) -> list[tuple[int, int]]:
        """Of the messages in the records that name the queue, those whose record names `other`, too: (ordinal of the
        first, count) of each record. To be asked for a short time only: it looks at each record."""
        found: list[tuple[int, int]] = []
        at = ordinal = 0
        while at < len(records):
            length, count, queues = _RECORD.unpack_from(records, at)
            ids = struct.unpack_from(f"<{queues}I", records, at + _RECORD_HEADER)
            if queue_id in ids:
                if other in ids:
                    found.append((ordinal, count))
                ordinal += count
            at += length
        return found

    def filters(self, values: Sequence[str], unfiltered: bool) -> array[int] | None:
        """What `batch` takes as `wanted`; None: everything."""
        return (
            wanted_filters([value.encode() for value in values], unfiltered=unfiltered)
            if values
            else None
        )

    def batch(
        self,
        offset: int,
        bytes_max: int,
        count_max: int = COUNT_MAX,
        wanted: array[int] | None = None,
        below: int = OFFSET_MAX,
    ) -> Batch:
        """As `read`, ready to be delivered."""
        found = self.read(offset, bytes_max, wanted, count_max, below)
        blob, sizes = found.blob, found.sizes
        offsets = expanded(found.runs, 0)
        if wanted is not None and offsets:
            blob, offsets, sizes = intake.select(blob, offsets, sizes, wanted)
            entries = array("Q", [offset + 1 for offset in offsets])
        else:
            entries = expanded(found.runs, 1)
        return Batch(offsets.tobytes() + blob, entries, sizes, found.next_offset)
