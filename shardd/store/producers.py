"""Keep the highest sequence of each producer, beyond the life of the segments that hold it.

    producers  0  "SHMQPROD" | u32 FORMAT | u32 crc32c of nothing, begun from FORMAT
              16  blocks: u32 crc32c of the rest | u32 bytes of places
                  | u64 number of the last segment covered | places (drawn in sequences.pyx)

The records IN_SEQUENCE are the truth: a sequence is taken as stored when its record is found. A
sealed segment is *covered* when the file has the highest sequence of each of its producers. Until
then the segment is neither removed, nor merged, nor given an index, so a recovery scans it. The
block that covers segments is written in a sync after the segments themselves: the file never
speaks of a message that a power cut took and that nobody has settled.

Each segment names the last segment before it that was written and has records IN_SEQUENCE, with
the end of that segment. Where that segment or a part of it is missing, a power cut came before the
sync, and nothing behind it was confirmed. The sequences behind it are not taken as stored,
because messages with lower sequences may be lost, and would look like repetitions when they are
sent again. At worst an unconfirmed message is stored twice; none is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardmq.shardd.store import record
from shardmq.shardd.store.files import Files, is_full, is_missing
from shardmq.shardd.store.segment import NO_CHAIN, Segment, refuse_newer
from shardmq.shardd.store.sequences import Screened, Sequences

FORMAT = 1
MAGIC = b"SHMQPROD"
NAME = "producers"
HEADER = struct.Struct("<8sII")
BLOCK = struct.Struct("<IIQ")
# The file is written anew when it is larger than this, and larger than twice its size after the
# last time that it was written anew.
REWRITE_BYTES = 256 << 10
# Producers that one store remembers, counted once for each queue. When there are more, the half
# that was heard longest ago is forgotten.
PRODUCERS_MAX = 1 << 20
# Sealed segments that may wait to be covered while nobody asks for a sync.
UNCOVERED_MAX = 16
EVERYWHERE = 1 << 62

# The room of a queue that rejects messages beyond its limits: messages that count, the most that
# may, bytes that count, the most that may.
Room = tuple[int, int | None, int, int | None]


@dataclass(slots=True, eq=False)
class Cover:
    """The block to be written after a sync of the segments.

    `run` is called in the thread of the sync.
    """

    files: Files
    directory: str
    sync: bool
    block: bytes
    at: int  # 0: the file is written anew
    covered: int
    segments: list[Segment]
    full: bool = False

    def run(self) -> None:
        """Write the block. On a full disk the segments stay uncovered."""
        try:
            self._write()
        except OSError as error:
            if not is_full(error):
                raise
            self.full = True

    def _write(self) -> None:
        path = f"{self.directory}/{NAME}"
        handle = self.files.open(path if self.at else path + ".new", create=True)
        try:
            if not self.at:
                self.files.truncate(handle, 0)
            self.files.write(
                handle, self.block if self.at else encode_header() + self.block, self.at
            )
            if self.sync:
                self.files.sync(handle)
        finally:
            self.files.close(handle)
        if not self.at:
            self.files.rename(path + ".new", path)
            if self.sync:
                self.files.sync_directory(self.directory)


class Producers:
    """The producers of one store: their table, its file, and the segments not covered yet."""

    def __init__(self, files: Files, directory: str, sync: bool) -> None:
        self.files = files
        self.directory = directory
        self.sync = sync
        self.table = Sequences()
        self.uncovered: dict[Segment, None] = {}  # sealed segments, some of them dead
        self.covered = 0  # the highest number of a segment whose sequences are in the file
        self._covering: list[Segment] = []  # the segments of the cover that runs
        self._end = 0  # end of the file; 0: the file is to be written anew
        self._whole_bytes = 0  # size of the file when it was last written anew
        self._forgotten: set[int] = set()  # ids of queues that are gone
        self._seen: dict[int, int] = {}  # where the scanned segments end, by number
        self._trusting = True

    # -- a batch -----------------------------------------------------------------------------------

    def screen(
        self, records: bytes | bytearray | memoryview, rooms: Mapping[int, Room]
    ) -> Screened:
        if len(self.table) >= PRODUCERS_MAX:
            self.table.sweep(self.table.heard_before(2), None, self._forgotten)
        return self.table.screen(records, rooms)

    def appended(self, segment: Segment) -> None:
        """Note that records IN_SEQUENCE were appended to the segment."""
        segment.in_sequence = True

    def sealed(self, segment: Segment) -> None:
        if segment.in_sequence:
            self.uncovered[segment] = None

    def chain_before(self, segment: Segment) -> tuple[int, int]:
        """Return the chain for the header of a segment that is about to be written.

        The chain is the number and the end of the last written segment before it that is not
        covered. A segment that was never written is left out: all its messages are settled, so none
        can be missing.
        """
        known = (*self.uncovered, *self._covering)
        written = [
            (one.number, one.flushed)
            for one in known
            if one.flushed and one.number < segment.number
        ]
        return max(written, default=NO_CHAIN)

    def forget_queue(self, queue_id: int) -> None:
        """Forget the producers of a queue with the next sweep."""
        if len(self.table):
            self._forgotten.add(queue_id)

    def sweep(self, heard_before_ms: int) -> int:
        """Forget producers that were last heard before this time; return how many."""
        forgotten, self._forgotten = self._forgotten, set()
        return self.table.sweep(heard_before_ms, None, forgotten)

    # -- cover -------------------------------------------------------------------------------------

    def begin(self) -> Cover | None:
        """Return the cover of all sealed segments, or None when all are covered.

        The caller runs the cover after a sync of all that was written, then calls `end`.
        """
        if not self.uncovered:
            return None
        segments = self._covering = list(self.uncovered)
        self.uncovered = {}
        anew = not self._end or self._end > max(REWRITE_BYTES, 2 * self._whole_bytes)
        covered = max(self.covered, *(segment.number for segment in segments))
        block = encode_block(self.table.take_changes(anew), covered)
        at = 0 if anew else self._end
        return Cover(self.files, self.directory, self.sync, block, at, covered, segments)

    def end(self, cover: Cover) -> list[Segment]:
        """End a cover after its `run`; return the segments that may go now."""
        self._covering = []
        if cover.full:
            # A part of the block may be in the file. Only a file that is written anew has all
            # changes.
            self._end = 0
            self.uncovered = dict.fromkeys([*cover.segments, *self.uncovered])
            return []
        self.covered = cover.covered
        self._end = (cover.at or HEADER.size) + len(cover.block)
        if not cover.at:
            self._whole_bytes = self._end
        for segment in cover.segments:
            segment.in_sequence = False
        return cover.segments

    # -- recovery ----------------------------------------------------------------------------------

    def recover(self) -> tuple[int, int] | None:
        """Read the file; return the (start, stop) of the bytes that cannot be read, or None.

        Raises FormatTooNew.
        """
        data = read(self.files, f"{self.directory}/{NAME}")
        blocks, end = decode(data)
        for places, covered in blocks:
            self.table.add(places)
            self.covered = max(self.covered, covered)
        return (end, len(data)) if end < len(data) else None

    def found(
        self, segment: Segment, data: bytearray, abstracts: bytes, holes: list[tuple[int, int]]
    ) -> bool:
        """Take the sequences of a scanned segment; segments come in the order of their numbers.

        Returns whether the segment has sequences that are not in the file.
        """
        if segment.number <= self.covered:
            return False
        before, end = segment.chain
        if before > self.covered and self._seen.get(before, 0) < end:
            self._trusting = False
        until = 0 if not self._trusting else holes[0][0] if holes else EVERYWHERE
        if self.table.gather(data, abstracts, until):
            self.appended(segment)
            self.sealed(segment)
        self._seen[segment.number] = segment.used
        return segment.in_sequence

    def damaged(self, segment: Segment) -> None:
        """Note that something is missing in a segment."""
        if segment.number > self.covered:
            self._trusting = False

    def recovered(self, queue_ids: Collection[int]) -> None:
        """Keep the producers of these queues only, after all segments were found."""
        self.table.sweep(0, frozenset(queue_ids))
        self._seen.clear()


def encode_header() -> bytes:
    return HEADER.pack(MAGIC, FORMAT, record.crc32c(b"", FORMAT))


def encode_block(places: bytes, covered: int) -> bytes:
    rest = struct.pack("<IQ", len(places), covered) + places
    return struct.pack("<I", record.crc32c(rest)) + rest


def decode(data: bytes) -> tuple[list[tuple[bytes, int]], int]:
    """Return ([(places, number of the last segment covered)], end of the last good block)."""
    if len(data) < HEADER.size:
        return [], 0
    magic, version, crc = HEADER.unpack_from(data)
    if magic != MAGIC or crc != record.crc32c(b"", version):
        return [], 0
    refuse_newer(NAME, version, FORMAT)
    blocks: list[tuple[bytes, int]] = []
    at = HEADER.size
    while at + BLOCK.size <= len(data):
        crc, size, covered = BLOCK.unpack_from(data, at)
        stop = at + BLOCK.size + size
        if stop > len(data) or record.crc32c(memoryview(data)[at + 4 : stop]) != crc:
            break
        blocks.append((data[at + BLOCK.size : stop], covered))
        at = stop
    return blocks, at


def read(files: Files, path: str) -> bytes:
    """Return all bytes of the file, or none when there is no file."""
    try:
        handle = files.open(path, read_only=True)
    except OSError as error:
        if is_missing(error):
            return b""
        raise
    try:
        data = bytearray(files.size(handle))
        with memoryview(data) as view:
            got = files.read_into(handle, view, 0)
        return bytes(data[:got])
    finally:
        files.close(handle)
