"""One segment: its header, its bytes in memory and on disk, its counters. Which segment is written to, and when one
may go, is the store's.

    msgs.NNNNNNNNNN    0  "SHMQMSGS" | u32 FORMAT | u32 crc32c of [16, 64)
                      16  u64 number | u32 salt | u32 0 | u64 capacity | u64 first
                      48  u64 chain | u32 end of it | zeros
                      64  records, crc XOR salt; 8 zero bytes behind the last
    index.NNNNNNNNNN   0  "SHMQINDX" | u32 FORMAT | u32 crc32c of [16, end)
                      16  u64 number | u32 salt | u32 0 | u64 end of the last record
                      40  abstracts of all records (drawn in record.pyx)

Every crc of a file begins from the format's number, so a broken number is not taken for a later format.
A merged segment has format 2 and replaces those numbered from `first` on; else the format is 1 and `first` 0. `chain`
is the number of the last one written before it with records IN_SEQUENCE and its end, 0 if there is none that matters
(producers.py).
Files are used again: a record of a former life is told by the salt, which is new in each. An index is a cache. It is
written only when the whole segment is on stable storage, so it never speaks of bytes that a power cut took.
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
# Behind the last record, so that what a recycled file still holds is not taken for a torn record.
END_BYTES = 8
# An index is worth its writing only when reading it is much cheaper than scanning the segment.
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
    """`used` is where the next record goes, `flushed` up to where the file has it. `references` counts (message, queue)
    pairs ever put in, `live` those that a queue still needs."""

    number: int
    salt: int
    capacity: int
    path: str  # of the file, which has another name until its first flush
    handle: int | None
    buffer: bytearray | None = None
    used: int = HEADER_BYTES
    flushed: int = 0
    unnamed: bool = False  # it is written to, and its file has the name of a spare still
    records: int = 0
    messages: int = 0
    references: int = 0
    live: int = 0
    sealed: bool = False
    settled: bytearray = field(default_factory=bytearray)  # pairs not written yet
    acks_end: int = 0  # size of the acks file, 0: there is none
    index: bytes | None = None  # made, waits for the sync
    has_index: bool = False
    first: int = 0  # of the numbers that this one replaces, as its file says
    chain: tuple[int, int] = (
        NO_CHAIN  # the last before it with records IN_SEQUENCE, where it ends: as its file says
    )
    in_sequence: bool = False  # it has such records, and nothing else tells what they say
    moves: Moves | None = (
        None  # since this process merged it: from entries that queues know to those on disk
    )
    numbers: list[int] = field(
        default_factory=list
    )  # under which queues know it, when it has moves
    checked: int = (
        HEADER_BYTES  # up to where the file's records were found good when they were read back
    )
    forgotten: bytearray = field(
        default_factory=bytearray
    )  # pairs that no recovery will ask for, but merging does
    dead_until: int = 0  # no message below this position is needed
    recovered: bool = False  # some references may be of queues that are long gone
    merging: bool = False  # in the hands of a ReclaimJob
    stays: bool = False  # it cannot be read, or is not what it should be: not to be merged
    measured_live: int = 0  # when that many were left, they took measured_bytes
    measured_bytes: int = 0
    before: Segment | None = None  # its neighbours in publish order
    after: Segment | None = None
    abstracts: record.Abstracts | None = None  # of what is in the buffer, and only as long as that

    def room(self) -> int:
        return self.capacity - self.used - END_BYTES

    @property
    def is_needless(self) -> bool:
        """Whether nothing of the segment is on disk, and nobody needs what is in memory."""
        return self.live == 0 and self.flushed == 0 and not self.in_sequence

    def live_bytes(self) -> int:
        """An estimate: the store keeps no size of each message, only how many are left."""
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
        """What is appended from now on says at once what the index will say of it."""
        self.abstracts = record.Abstracts(self.used, self.capacity, INDEX_SHARE_MAX)

    def take_buffer(self) -> bytearray | None:
        """For the records of another segment: it has none any more."""
        buffer, self.buffer, self.abstracts = self.buffer, None, None
        return buffer

    def write_out(self, files: Files) -> None:
        """What the file has not, from the buffer."""
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
        """The index file's bytes; None when it would not pay."""
        assert self.buffer is not None
        if not self.index_is_worth_it():
            return None
        abstracts = self.abstracts.until(self.used) if self.abstracts is not None else None
        if (
            abstracts is None
        ):  # they were given up over small messages before large ones came, or not asked for
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
    """(number, salt, capacity, first, chain), None when this is no header."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, crc, number, salt, _, capacity, first, *chain = HEADER.unpack_from(data)
    if magic != MESSAGES_MAGIC or crc != record.crc32c(data[16:HEADER_BYTES], version):
        return None
    refuse_newer(file_name("msgs", number), version, MERGED_FORMAT)
    return number, salt, capacity, first, (chain[0], chain[1])


def refuse_newer(name: str, version: int, known: int = FORMAT) -> None:
    """Of a header whose crc is good. Guessing at a later format would throw away what it says."""
    if version > known:
        raise FormatTooNew(f"{name} has format {version}, this program knows up to {known}")


def salt_told(index: bytes, number: int) -> int | None:
    """What a good index says of its segment, which cannot say it itself any more."""
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
    """(end of the last record, abstracts), None when this is no index of that segment's present life."""
    if len(data) < INDEX_HEADER.size:
        return None
    magic, version, crc, of_number, of_salt, _, end = INDEX_HEADER.unpack_from(data)
    if magic != INDEX_MAGIC or (of_number, of_salt) != (number, salt):
        return None
    if crc != record.crc32c(memoryview(data)[16:], version):
        return None
    refuse_newer(file_name("index", number), version)
    return end, data[INDEX_HEADER.size :]
