"""Read the files of a store at rest, message by message, for tools.

The tools inspect, count and rescue messages; nothing here writes. Bytes that cannot be understood
are reported as `Damage` with file and byte range; the rest is shown. Nothing here is fast: no index
is trusted and every byte is read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.files import Files, read_file
from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.segment_file import (
    HEADER_BYTES,
    decode_index,
    file_name,
    parse_name,
)
from shardmq.shardd.store.segments.recovery import Reader, is_ours
from shardmq.shardd.store.segments.segment import Segment

ABSTRACT = struct.Struct("<QIIHBB")
# Bounds of the records that salvage writes: enough messages for few records, and few enough for
# small ones.
RECORD_MESSAGES_MAX = 256
RECORD_BYTES_MAX = 1 << 20
NONE = 0xFFFFFFFF
NO_PRIORITY = 0xFF
PERSISTENT = 1  # a flag of a record, see store/format/README.md


@dataclass(frozen=True, slots=True)
class Message:
    segment: int
    position: int
    queues: tuple[int, ...]  # the ids that its record names
    live: tuple[int, ...]  # those of `queues` that have not settled the message
    timestamp: int
    ttl_ms: int
    priority: int
    flags: int
    stored: bytes  # the message as in the segment: lengths, exchange, key, properties, body


@dataclass(slots=True)
class Contents:
    """The contents of one segment, whole in memory."""

    segment: Segment
    data: bytearray
    abstracts: bytes
    settled: set[int]  # queue id << 32 | position
    damage: list[Damage]

    def messages(self) -> Iterator[Message]:
        return self._select(settled=True)

    def survivors(self) -> Iterator[Message]:
        """Return the messages that a queue still needs."""
        return self._select(settled=False)

    def _select(self, *, settled: bool) -> Iterator[Message]:
        number = self.segment.number
        for header, queues, positions in records(self.abstracts):
            timestamp, ttl_ms, _, _, priority, flags = header
            for position in positions:
                live = tuple(
                    [queue for queue in queues if queue << 32 | position not in self.settled]
                )
                if live or settled:
                    stored = bytes(
                        self.data[
                            position : position + record.message_bytes_at(self.data, position)
                        ]
                    )
                    yield Message(
                        number, position, queues, live, timestamp, ttl_ms, priority, flags, stored
                    )


def is_store(files: Files, directory: str) -> bool:
    return any(is_ours(name) or name == "state" for name in files.list(directory))


def contents(files: Files, directory: str) -> Iterator[Contents]:
    """Return the segments in publish order.

    A segment in which nothing is readable has a capacity of 0.
    """
    names = sorted(parsed for parsed in map(parse_name, files.list(directory)) if parsed)
    reader = Reader(files, directory, False)
    for number in [number for kind, number in names if kind == "lost"]:
        name = file_name("lost", number)
        size = len(read_file(files, f"{directory}/{name}"))
        nothing = Segment(number, 0, 0, f"{directory}/{name}", None)
        yield Contents(nothing, bytearray(), b"", set(), [Damage(name, "header", 0, size)])
    for number in reader.take_away_merged(
        [number for kind, number in names if kind == "msgs"], repair=False
    ):
        one = open_contents(files, directory, number)
        if one is not None:
            yield one


def open_contents(files: Files, directory: str, number: int) -> Contents | None:
    """Return the contents of a segment, or None when nothing of it ever reached the disk."""
    reader = Reader(files, directory, False)
    loaded = reader.load(number, repair=False, index=False)
    return (
        _with_companions(reader, loaded.segment, loaded.abstracts, loaded.damage)
        if loaded
        else None
    )


def _with_companions(
    reader: Reader, segment: Segment, abstracts: bytes, damage: list[Damage]
) -> Contents:
    if not segment.capacity:
        return Contents(segment, bytearray(), b"", set(), damage)
    acks_name, index_name = file_name("acks", segment.number), file_name("index", segment.number)
    pairs = reader.load_acks(segment, repair=False)
    acks_bytes = len(read_file(reader.files, f"{reader.directory}/{acks_name}"))
    if segment.acks_end < acks_bytes:
        damage = [*damage, Damage(acks_name, "torn", segment.acks_end, acks_bytes)]
    data = read_file(reader.files, f"{reader.directory}/{index_name}")
    index = decode_index(data, segment.number, segment.salt)
    # An index that recovery rejects costs only a scan. An index that recovery would accept must be
    # true, except where the segment was damaged after the index was written.
    if index is not None and not damage and index != (segment.used, abstracts):
        damage = [*damage, Damage(index_name, "untrue", 0, len(data))]
    settled = set(struct.unpack(f"<{len(pairs) // 8}Q", pairs))
    return Contents(segment, reader.buffer, abstracts, settled, damage)


def records(abstracts: bytes) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return (header, queue ids, positions) of each record."""
    at = 0
    while at < len(abstracts):
        header = ABSTRACT.unpack_from(abstracts, at)
        _, _, count, queues, _, _ = header
        at += ABSTRACT.size
        ids = struct.unpack_from(f"<{queues}I", abstracts, at)
        places = struct.unpack_from(f"<{2 * count}I", abstracts, at + 4 * queues)
        at += 4 * queues + 8 * count
        yield header, ids, places[::2]


def groups(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Return groups of neighbouring messages that can share a record."""
    for _, alike in itertools.groupby(
        messages, lambda m: (m.live, m.timestamp, m.ttl_ms, m.priority, m.flags)
    ):
        group: list[Message] = []
        size = 0
        for message in alike:
            if group and (
                len(group) == RECORD_MESSAGES_MAX or size + len(message.stored) > RECORD_BYTES_MAX
            ):
                yield group
                group, size = [], 0
            group.append(message)
            size += len(message.stored)
        yield group


def encode(group: list[Message]) -> bytes:
    """Return a record (drawn in record.pyx) for the queues that still need these messages."""
    first = group[0]
    head = ABSTRACT.pack(
        first.timestamp, first.ttl_ms, len(group), len(first.live), first.priority, first.flags
    ) + struct.pack(f"<{len(first.live)}I", *first.live)
    rest = head + b"".join(message.stored for message in group)
    rest += bytes(-len(rest) % 8)
    return struct.pack("<II", 8 + len(rest), record.crc32c(rest)) + rest


@dataclass(slots=True)
class Tally:
    """The counts of one segment or of many.

    A message is live as long as one queue needs it. `live_references` counts a message once for
    each queue that needs it.
    """

    records: int = 0
    messages: int = 0
    live_messages: int = 0
    dead_messages: int = 0
    live_references: int = 0
    live_bytes: int = 0
    dead_bytes: int = 0
    file_bytes: int = 0

    def add(self, one: Contents) -> None:
        self.records += sum(1 for _ in records(one.abstracts))
        live_bytes = 0
        for message in one.messages():
            self.messages += 1
            self.live_references += len(message.live)
            if message.live:
                self.live_messages += 1
                live_bytes += len(message.stored)
            else:
                self.dead_messages += 1
        self.live_bytes += live_bytes
        self.dead_bytes += max(one.segment.used - HEADER_BYTES, 0) - live_bytes
        self.file_bytes += one.segment.capacity
