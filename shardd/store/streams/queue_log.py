"""Connect a queue of a shard with its stream.

The queue gives the records of a PUBLISH and gets deliveries with their offsets. Each message of a
producer is stored once.

The filter value of a message is read from its headers when the message is appended. A chunk that
holds none of the wanted values is skipped unread. Of the other chunks only the messages with a
wanted value are returned.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardmq.shardd.store.format.chunk import expanded, filters_of, records_of, select
from shardmq.shardd.store.streams.log import StreamLog, wanted_filters
from shardmq.shardd.store.streams.reading import COUNT_MAX, OFFSET_MAX

_RECORD = struct.Struct("<I16xIH")  # length, messages and queues of a record (drawn in record.pyx)
_RECORD_HEADER = 28


@dataclass(slots=True)
class Batch:
    """Messages ready to be delivered.

    A batch without messages may still have a larger `next_offset`: the next read begins there.
    """

    blob: bytes  # u64 offset of each message, then the stored messages back to back
    entries: array[int]  # the offset of each message, + 1
    sizes: array[int]  # body_bytes of each message
    next_offset: int


@dataclass(slots=True)
class AppendResult:
    """The result of appending a batch.

    `records`: the appended records, and between them records that do not name the queue. `count`:
    how many messages were appended. `repeated`: how many messages of the queue were repetitions.
    `refused`: ordinals in the batch of messages that must not be stored before an earlier refused
    message is. `known`: ordinals of messages that were stored before. `altered`: the ordinals in
    `known` whose stored body was another one.
    """

    records: memoryview
    count: int
    repeated: int
    refused: list[int]
    known: list[int] = field(default_factory=list)
    altered: list[int] = field(default_factory=list)


class QueueLog:
    """The queue's side of one stream; `stream` holds the messages."""

    def __init__(self, stream: StreamLog) -> None:
        self.stream = stream

    def append_records(
        self, records: memoryview, queue_id: int, alone: bool, in_sequence: bool = False
    ) -> AppendResult:
        """Append those of the records that name the queue.

        `alone`: all records name the queue. `in_sequence`: the records carry sequences of
        producers, and repetitions are left out.
        """
        if not in_sequence:
            return AppendResult(records, self._append_own(records, queue_id, alone), 0, [])
        screened = self.stream.screen(records, queue_id)
        kept = memoryview(screened.records)
        try:
            count = self._append_own(kept, queue_id, alone) if len(kept) else 0
        except Exception:
            self.stream.producers.table.undo()
            raise
        repeated = screened.repeated.get(queue_id, 0)
        return AppendResult(
            kept, count, repeated, screened.refused, screened.known, screened.altered
        )

    def _append_own(self, records: memoryview, queue_id: int, alone: bool) -> int:
        own = records if alone else records_of(records, queue_id)
        before = self.stream.next_offset
        self.stream.append(own, filters_of(own))
        return self.stream.next_offset - before

    def named_in(self, records: memoryview, queue_id: int, other: int) -> list[tuple[int, int]]:
        """Return which messages of the queue in these records went to the queue `other`, too.

        The result has (ordinal of the first message, count) for each record that names both queues.
        Ordinals count the messages of the queue. The call looks at each record, so it is for short
        times only.
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
        """Return the argument `wanted` of `batch`; None stands for all messages."""
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
            blob, offsets, sizes = select(blob, offsets, sizes, wanted)
            entries = array("Q", [offset + 1 for offset in offsets])
        else:
            entries = expanded(found.runs, 1)
        return Batch(offsets.tobytes() + blob, entries, sizes, found.next_offset)


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
