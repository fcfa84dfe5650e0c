"""Give a queue of a shard what it needs of a stream, beside the stream itself.

It takes the records of a PUBLISH, each message of a producer once, and gives deliveries with their
offsets.

What a message is to be found by (its filter value) is read from its headers when it is appended; a chunk that holds
none of the values wanted is passed over unread, and of the others only those messages are given that have one.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmq.shardd.store import intake
from shardmq.shardd.store.chunk import expanded
from shardmq.shardd.store.stream import StreamLog, wanted_filters
from shardmq.shardd.store.stream_reading import COUNT_MAX, OFFSET_MAX

_RECORD = struct.Struct("<I16xIH")  # of a record (drawn in record.pyx): length, messages, queues
_RECORD_HEADER = 28


@dataclass(slots=True)
class Batch:
    """Messages ready to be delivered. With none and `next_offset` moved on: read on from there."""

    blob: bytes  # u64 offset of each message, then the stored messages back to back
    entries: array[int]  # the offset of each message, + 1
    sizes: array[int]  # body_bytes of each
    next_offset: int


@dataclass(slots=True)
class Taken:
    """What became of a batch.

    `records`: those that were appended, with others between them that do not name the queue.
    `refused`: ordinals in the batch of messages that must not be stored before one is that was
    refused earlier. `known`: ordinals of those that were there already; `altered`: of these, those
    that were there with another body.
    """

    records: memoryview
    count: int
    repeated: int
    refused: list[int]
    known: list[int] = field(default_factory=list)
    altered: list[int] = field(default_factory=list)


class QueueLog:
    """The queue's side of one stream: `stream` is where the messages lie."""

    def __init__(self, stream: StreamLog) -> None:
        self.stream = stream

    def append_records(
        self, records: memoryview, queue_id: int, alone: bool, in_sequence: bool = False
    ) -> Taken:
        """Take those of the records that name the queue, of a batch `in_sequence` what is new.

        `alone`: all records name the queue.
        """
        if not in_sequence:
            return Taken(records, self._append_own(records, queue_id, alone), 0, [])
        screened = self.stream.screen(records, queue_id)
        kept = memoryview(screened.records)
        try:
            count = self._append_own(kept, queue_id, alone) if len(kept) else 0
        except Exception:
            self.stream.producers.table.undo()
            raise
        repeated = screened.repeated.get(queue_id, 0)
        return Taken(kept, count, repeated, screened.refused, screened.known, screened.altered)

    def _append_own(self, records: memoryview, queue_id: int, alone: bool) -> int:
        own = records if alone else intake.records_of(records, queue_id)
        before = self.stream.next_offset
        self.stream.append(own, intake.filters_of(own))
        return self.stream.next_offset - before

    def named_in(self, records: memoryview, queue_id: int, other: int) -> list[tuple[int, int]]:
        """Return which messages of the queue in these records went to the queue `other`, too.

        As (ordinal of the first, count) of each record that names both; ordinals count the messages
        of the queue. To be asked for a short time only: it looks at each record.
        """
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
        """Return what `batch` takes as `wanted`; None: everything."""
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
        """Read as `StreamLog.read` does; return messages ready to be delivered."""
        found = self.stream.read(offset, bytes_max, wanted, count_max, below)
        blob, sizes = found.blob, found.sizes
        offsets = expanded(found.runs, 0)
        if wanted is not None and offsets:
            blob, offsets, sizes = intake.select(blob, offsets, sizes, wanted)
            entries = array("Q", [offset + 1 for offset in offsets])
        else:
            entries = expanded(found.runs, 1)
        return Batch(offsets.tobytes() + blob, entries, sizes, found.next_offset)
