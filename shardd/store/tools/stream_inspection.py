"""Read the files of a stopped stream for inspection tools: its segments, messages and damage.

No file is changed. Bytes that cannot be understood are reported as `Damage` with file and byte
range; everything else is shown. This code is slow: it trusts no index and reads every byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.files import Files, read_file
from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.chunk import Copier
from shardmq.shardd.store.streams.positions import NAME, Positions
from shardmq.shardd.store.streams.reading import OFFSET_MAX, StreamCache, Window, chunks, scan
from shardmq.shardd.store.streams.recovery import recover
from shardmq.shardd.store.streams.segment import (
    HEADER_BYTES,
    StreamSegment,
    decode_index,
    file_name,
    parse_name,
)


@dataclass(frozen=True, slots=True)
class StreamMessage:
    offset: int
    timestamp: int  # the timestamp of the chunk, ms
    stored: bytes


@dataclass(slots=True)
class SegmentTally:
    """Counts the chunks, messages and bytes of one segment."""

    file: str
    first_offset: int
    next_offset: int
    chunks: int = 0
    messages: int = 0
    newest: int = 0
    file_bytes: int = 0


class StreamContents:
    """The contents of a stream as its next start would find them.

    `damage` grows while `tallies` and `messages` read the segments.
    """

    def __init__(self, files: Files, directory: str) -> None:
        self.files = files
        self.directory = directory
        positions = Positions(files, directory, False)
        self.damage = positions.recover()
        self.positions = positions.offsets
        found = recover(files, directory, sync=False, repair=False)
        self.damage += found.damage
        self.segments = found.segments
        self.next_offset = found.next_offset
        self._told = {(one.file, one.start) for one in self.damage}

    def tallies(self) -> Iterator[SegmentTally]:
        for segment in self.segments:
            self._check_index(segment)
            tally = SegmentTally(file_name("log", segment.first), segment.first, segment.end)
            for _, _, _, count, timestamp in self._chunks(segment):
                tally.chunks += 1
                tally.messages += count
                tally.newest = max(tally.newest, timestamp)
            tally.file_bytes = segment.used
            yield tally

    def messages(self) -> Iterator[StreamMessage]:
        copier = Copier()
        for segment in self.segments:
            for window, position, first, count, timestamp in self._chunks(segment):
                blob, _, _ = copier.copy(
                    window.data, window.start, window.used, position, 0, segment.salt,
                    first, first + count, 1 << 62, True, None,
                )  # fmt: skip
                stored, at = bytearray(blob), 0
                for offset in range(first, first + count):
                    stop = at + record.message_bytes_at(stored, at)
                    yield StreamMessage(offset, timestamp, blob[at:stop])
                    at = stop

    def _chunks(self, segment: StreamSegment) -> Iterator[tuple[Window, int, int, int, int]]:
        cache = StreamCache(self.files, read_only=True)
        try:
            # Zeros behind the last chunk are preallocated space that was not given back.
            scanner = scan(self.files, cache.handle(segment), segment, segment.used, OFFSET_MAX)
            segment.synced = max(scanner.end, scanner.dirt)
            yield from chunks(cache, segment, HEADER_BYTES, self._report)
        finally:
            cache.forget(segment)

    def _check_index(self, segment: StreamSegment) -> None:
        """Report the index of a segment if recovery would accept it although it is untrue.

        An index that recovery rejects only costs a scan. A segment that was damaged after its index
        was written is not compared.
        """
        name = file_name("index", segment.first)
        data = read_file(self.files, f"{self.directory}/{name}")
        said = dataclasses.replace(segment)
        if not data or not decode_index(data, said, segment.used):
            return
        handle = self.files.open(segment.path, read_only=True)
        try:
            scanner = scan(self.files, handle, segment, segment.used, OFFSET_MAX)
        finally:
            self.files.close(handle)
        broken = scanner.holes or scanner.dirt > scanner.end
        if not broken and (scanner.index(), scanner.offset, scanner.end) != (
            said.entries,
            said.end,
            said.used,
        ):
            self._report(Damage(name, "untrue", 0, len(data)))

    def _report(self, damage: Damage) -> None:
        if (damage.file, damage.start) not in self._told:
            self._told.add((damage.file, damage.start))
            self.damage.append(damage)


def is_stream(files: Files, directory: str) -> bool:
    return any(parse_name(name) is not None or name == NAME for name in files.list(directory))
