"""Make records of messages for the life of their queue on another shard.

A message keeps the time, time to live, priority and flags of its record, so the records of its
segment are looked through. Queues keep the places of messages only.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from typing import Final, NamedTuple

from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.record import crc32c, segment_runs
from shardmq.shardd.store.format.segment_file import HEADER_BYTES
from shardmq.shardd.store.segments.retrieval import Retrieval
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments

# The most of one record; the bound of bytes may be exceeded by one message.
RECORD_MESSAGES_MAX: Final = 256
RECORD_BYTES_MAX: Final = 1 << 20
# Flags that hold for a record in its own place only: IN_SEQUENCE and LENT.
NOT_CARRIED: Final = 2 | 16
# Segments whose records are known at once: a queue goes from one to the next.
KNOWN_MAX: Final = 2

_ABSTRACT: Final = struct.Struct("<QIIHBB")
_HEAD: Final = struct.Struct("<QIIHBBI")
_LENGTHS: Final = struct.Struct("<II")


class Head(NamedTuple):
    """The facts that all messages of a record share."""

    time_ms: int
    ttl_ms: int
    priority: int
    flags: int


class _Records:
    """The records of one segment: the places of their first messages, and their heads."""

    def __init__(self) -> None:
        self.end = HEADER_BYTES
        self.firsts = array("I")
        self.heads: list[Head] = []

    def add(self, abstracts: bytes) -> None:
        at = 0
        while at < len(abstracts):
            time_ms, ttl_ms, count, queues, priority, flags = _ABSTRACT.unpack_from(abstracts, at)
            at += _ABSTRACT.size + 4 * queues
            self.firsts.append(struct.unpack_from("<I", abstracts, at)[0])
            self.heads.append(Head(time_ms, ttl_ms, priority, flags & ~NOT_CARRIED))
            at += 8 * count

    def head_of(self, position: int) -> Head:
        return self.heads[bisect_right(self.firsts, position) - 1]


class Letters:
    """The records of messages that leave one store."""

    def __init__(self, segments: Segments, retrieval: Retrieval) -> None:
        self._segments = segments
        self._retrieval = retrieval
        self._known: dict[tuple[Segment, int], _Records] = {}

    def records(self, entries: array[int], to: int, bytes_max: int) -> tuple[bytes, int]:
        """Return records of the queue `to` with the first messages of `entries`, and their count.

        As many messages are taken as fit in `bytes_max` bytes, but at least one. Raises Corrupt and
        OSError.
        """
        parts: list[bytes] = []
        size = done = 0
        heads = self._heads(entries)
        while done < len(entries) and (not done or size < bytes_max):
            stop = done + 1
            while (
                stop < len(entries)
                and heads[stop] == heads[done]
                and stop - done < RECORD_MESSAGES_MAX
            ):
                stop += 1
            room = min(RECORD_BYTES_MAX, bytes_max - size)
            blob, sizes = self._retrieval.read(entries[done:stop], max(room, 1))
            parts.append(_record(heads[done], to, len(sizes), blob))
            size += len(parts[-1])
            done += len(sizes)
        return b"".join(parts), done

    def _heads(self, entries: array[int]) -> list[Head]:
        found: list[Head] = []
        for number, start, stop in segment_runs(entries):
            segment = self._segments.by_number[number]
            placed = entries[start:stop]
            if segment.moves is not None:
                placed = segment.moves.find(entries, start, stop)
            records = self._records(segment)
            found += [records.head_of((entry & 0xFFFFFFFF) >> 4) for entry in placed]
        return found

    def _records(self, segment: Segment) -> _Records:
        """Return the records of a segment; those that came since the last call are added."""
        life = (segment, segment.number)  # a segment that begins anew has another number
        known = self._known.pop(life, None) or _Records()
        if known.end < segment.used:
            data = self._bytes(segment, known.end)
            # No queue has messages of the records that are not good.
            abstracts, _, _ = record.scan(data, known.end, segment.used, segment.salt)
            known.add(abstracts)
            known.end = segment.used
        while len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[life] = known
        return known

    def _bytes(self, segment: Segment, start: int) -> bytearray:
        """Return the bytes of a segment at their positions, from `start` on at least."""
        if segment.buffer is not None:
            segment.fill_lent()
            return segment.buffer
        data = bytearray(segment.used)
        with memoryview(data) as view, view[start:] as part:
            self._segments.files.read_into(self._segments.handles.of(segment), part, start)
        return data


def _record(head: Head, queue_id: int, count: int, messages: bytes) -> bytes:
    body = (
        _HEAD.pack(head.time_ms, head.ttl_ms, count, 1, head.priority, head.flags, queue_id)
        + messages
    )
    body += bytes(-(_LENGTHS.size + len(body)) % 8)
    return _LENGTHS.pack(_LENGTHS.size + len(body), crc32c(body)) + body


def times_of(records: bytes) -> array[int]:
    """Return the time of each message of these records, in ms since the epoch."""
    found = array("Q")
    at = 0
    while at < len(records):
        length, _ = _LENGTHS.unpack_from(records, at)
        time_ms, _, count, *_ = _HEAD.unpack_from(records, at + _LENGTHS.size)
        found.extend([time_ms] * count)
        at += length
    return found
