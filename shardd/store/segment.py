"""Describe one segment: its header, its bytes in memory and on disk, its counters.

The store decides which segment is written to, and when a segment may go.

    msgs.NNNNNNNNNN    0  "SHMQMSGS" | u32 FORMAT | u32 crc32c of [16, 64)
                      16  u64 number | u32 salt | u32 0 | u64 capacity | u64 first
                      48  u64 chain | u32 end of it | zeros
                      64  records, crc XOR salt; 8 zero bytes behind the last
    index.NNNNNNNNNN   0  "SHMQINDX" | u32 FORMAT | u32 crc32c of [16, end)
                      16  u64 number | u32 salt | u32 0 | u64 end of the last record
                      40  abstracts of all records (drawn in record.pyx)

Every crc of a file begins from the number of the format, so that a damaged number is not taken for
a later format. A merged segment has format 2 and replaces the segments numbered from `first` on.
Any other segment has format 1 and a `first` of 0. `chain` is the number of the last segment written
before this one with records IN_SEQUENCE, followed by the end of that segment. Both are 0 if there
is no such segment that matters (producers.py).

Files are used again. A record of a former use is recognized by its salt, since each use has a new
salt. An index is a cache. The index is written only when the whole segment is on stable storage, so
it never speaks of bytes that a power cut took.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from shardmq.shardd.store import record, scanning
from shardmq.shardd.store.errors import FormatTooNew
from shardmq.shardd.store.files import Files
from shardmq.shardd.store.moves import Moves

FORMAT = 1
MERGED_FORMAT = 2
HEADER_BYTES = 64
HEADER = struct.Struct("<8sIIQIIQQQI4x")
NO_CHAIN = (0, 0)
MESSAGES_MAGIC = b"SHMQMSGS"
INDEX_HEADER = struct.Struct("<8sIIQIIQ")
INDEX_MAGIC = b"SHMQINDX"
# Zero bytes behind the last record, so that old bytes of a recycled file are not taken for a torn
# record.
END_BYTES = 8
# An index is written only if it is at least this many times smaller than the segment: reading it
# must be much cheaper than scanning the segment.
INDEX_SHARE_MAX = 8


def file_name(kind: str, number: int) -> str:
    return f"{kind}.{number:010d}"


def parse_name(name: str) -> tuple[str, int] | None:
    kind, dot, digits = name.partition(".")
    if dot and len(digits) == 10 and digits.isdecimal():
        return kind, int(digits)
    return None


@dataclass(slots=True, eq=False)
class Segment:
    """One segment of a store.

    `used` is the position of the next record. `flushed` is the position up to which the file has
    the records. `references` counts the (message, queue) pairs ever appended, `live` those that a
    queue still needs.
    """

    number: int
    salt: int
    capacity: int
    path: str  # path of the file, which has the name of a spare until its first flush
    handle: int | None
    buffer: bytearray | None = None
    used: int = HEADER_BYTES
    flushed: int = 0
    unnamed: bool = False  # the file has records, but still has the name of a spare
    records: int = 0
    messages: int = 0
    references: int = 0
    live: int = 0
    sealed: bool = False
    settled: bytearray = field(default_factory=bytearray)  # pairs not written yet
    acks_end: int = 0  # size of the acks file, 0: there is none
    index: bytes | None = None  # made, and waits for the sync of the segment
    has_index: bool = False
    first: int = 0  # the first number that this segment replaces, 0: it replaces none
    # The number and the end of the segment before it with records IN_SEQUENCE, as in the header.
    chain: tuple[int, int] = NO_CHAIN
    in_sequence: bool = False  # it has records IN_SEQUENCE that are not covered yet
    # From the entries that queues keep to those on disk, if this process merged the segment.
    moves: Moves | None = None
    # The segment numbers in the entries that queues keep, if the segment has moves.
    numbers: list[int] = field(default_factory=list)
    # Position up to which the records of the file were checked when they were read back.
    checked: int = HEADER_BYTES
    # Settled pairs that no recovery asks for, but that merging needs.
    forgotten: bytearray = field(default_factory=bytearray)
    dead_until: int = 0  # no message below this position is needed
    recovered: bool = False  # some references may belong to queues that are long gone
    merging: bool = False  # a ReclaimJob uses the segment
    stays: bool = False  # it cannot be read, or is not as expected: it is not merged
    # This many live references took `measured_bytes` when the segment was read.
    measured_live: int = 0
    measured_bytes: int = 0
    before: Segment | None = None  # the neighbours in publish order
    after: Segment | None = None
    # Abstracts of the records in the buffer, as long as there is a buffer.
    abstracts: record.Abstracts | None = None

    def room(self) -> int:
        return self.capacity - self.used - END_BYTES

    @property
    def is_needless(self) -> bool:
        """True when nothing of the segment is on disk, and no message of it is needed."""
        return self.live == 0 and self.flushed == 0 and not self.in_sequence

    def live_bytes(self) -> int:
        """Return an estimate of the bytes that queues still need.

        The store keeps no size of each message, only how many messages are left.
        """
        if self.measured_live:
            return self.measured_bytes * self.live // self.measured_live
        return (self.used - HEADER_BYTES) * self.live // self.references if self.references else 0

    def add(self, size: int, counts: tuple[int, int, int]) -> None:
        records, messages, references = counts
        self.used += size
        self.records += records
        self.messages += messages
        self.references += references
        self.live += references

    def collect_abstracts(self) -> None:
        """Collect the abstracts of the records appended from now on, for the index."""
        self.abstracts = record.Abstracts(self.used, self.capacity, INDEX_SHARE_MAX)

    def take_buffer(self) -> bytearray | None:
        """Return the buffer for use by another segment; this segment has none any more."""
        buffer, self.buffer, self.abstracts = self.buffer, None, None
        return buffer

    def write_out(self, files: Files) -> None:
        """Write to the file the bytes of the buffer that the file does not have."""
        assert self.buffer is not None and self.handle is not None
        stop = self.used + END_BYTES
        self.buffer[self.used : stop] = bytes(END_BYTES)
        if self.flushed == 0:
            self.buffer[:HEADER_BYTES] = encode_header(
                self.number, self.salt, self.capacity, chain=self.chain
            )
        with memoryview(self.buffer) as view, view[self.flushed : stop] as part:
            files.write(self.handle, part, self.flushed)
        self.flushed = self.used

    def index_is_worth_it(self) -> bool:
        share = 20 * self.records + 4 * self.references + 8 * self.messages
        return share * INDEX_SHARE_MAX <= self.used

    def make_index(self) -> bytes | None:
        """Return the bytes of the index file, or None when an index would not pay."""
        assert self.buffer is not None
        if not self.index_is_worth_it():
            return None
        abstracts = self.abstracts.until(self.used) if self.abstracts is not None else None
        if abstracts is None:
            # They were not collected, or were given up when small messages came before large ones.
            abstracts, end, holes = scanning.scan(self.buffer, HEADER_BYTES, self.used, self.salt)
            assert end == self.used and not holes, "the write buffer of a segment is damaged"
        return encode_index(self.number, self.salt, self.used, abstracts)


def encode_header(
    number: int, salt: int, capacity: int, first: int = 0, chain: tuple[int, int] = NO_CHAIN
) -> bytes:
    version = MERGED_FORMAT if first else FORMAT
    rest = HEADER.pack(MESSAGES_MAGIC, version, 0, number, salt, 0, capacity, first, *chain)[16:]
    return struct.pack("<8sII", MESSAGES_MAGIC, version, record.crc32c(rest, version)) + rest


def decode_header(
    data: bytes | bytearray | memoryview,
) -> tuple[int, int, int, int, tuple[int, int]] | None:
    """Return (number, salt, capacity, first, chain), or None when this is no header."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, crc, number, salt, _, capacity, first, *chain = HEADER.unpack_from(data)
    if magic != MESSAGES_MAGIC or crc != record.crc32c(data[16:HEADER_BYTES], version):
        return None
    refuse_newer(file_name("msgs", number), version, MERGED_FORMAT)
    return number, salt, capacity, first, (chain[0], chain[1])


def refuse_newer(name: str, version: int, known: int = FORMAT) -> None:
    """Raise FormatTooNew when a header with a good crc has a later format.

    Guessing at a later format could lose its messages.
    """
    if version > known:
        raise FormatTooNew(f"{name} has format {version}, this program knows up to {known}")


def salt_told(index: bytes, number: int) -> int | None:
    """Return the salt of a segment from its index, or None when the index is not good.

    The salt is needed when the header of the segment is damaged.
    """
    if len(index) < INDEX_HEADER.size:
        return None
    magic, version, crc, of_number, salt, _, _ = INDEX_HEADER.unpack_from(index)
    good = (
        magic == INDEX_MAGIC
        and of_number == number
        and crc == record.crc32c(memoryview(index)[16:], version)
    )
    return int(salt) if good else None


def encode_index(number: int, salt: int, end: int, abstracts: bytes) -> bytes:
    rest = INDEX_HEADER.pack(INDEX_MAGIC, FORMAT, 0, number, salt, 0, end)[16:]
    crc = record.crc32c(abstracts, record.crc32c(rest, FORMAT))
    return struct.pack("<8sII", INDEX_MAGIC, FORMAT, crc) + rest + abstracts


def decode_index(data: bytes, number: int, salt: int) -> tuple[int, bytes] | None:
    """Return (end of the last record, abstracts), or None for a wrong index.

    The index must be one of the segment's present use: the number and the salt must match.
    """
    if len(data) < INDEX_HEADER.size:
        return None
    magic, version, crc, of_number, of_salt, _, end = INDEX_HEADER.unpack_from(data)
    if magic != INDEX_MAGIC or (of_number, of_salt) != (number, salt):
        return None
    if crc != record.crc32c(memoryview(data)[16:], version):
        return None
    refuse_newer(file_name("index", number), version)
    return end, data[INDEX_HEADER.size :]
