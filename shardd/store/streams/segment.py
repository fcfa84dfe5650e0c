"""Define a segment of a stream, and the formats of its header and its sparse index.

The log decides which segment is written to and when a segment is deleted.

    log.NNNNNNNNNNNNNNNNNNNN (the offset of its first message)
         0  "SHMQSTRM" | u32 FORMAT | u32 crc32c of [16, 64)
        16  u64 first offset | u32 salt | u32 0
        32  u64 newest: the latest timestamp of all chunks before this segment; 0: no chunk
        40  u64 previous: the timestamp of the last chunk before this segment
        48  zeros
        64  chunks (drawn in chunk.pyx); zeros behind the last while the segment is open
    index.NNNNNNNNNNNNNNNNNNNN
         0  "SHMQSIDX" | u32 FORMAT | u32 crc32c of [16, end)
        16  u64 first offset | u32 salt | u32 0
        32  u64 end of the last chunk | u64 offset behind the last message
        48  u64 timestamp of the last chunk | u64 newest up to its end
        64  u64 offset of the last chunk
        72  entries: u64 offset of a chunk | u64 newest before it | u64 position;
            one about every INDEX_EVERY_BYTES

An index is a cache. It is written only when its segment is sealed and on stable storage as a whole,
so a segment with an index is complete. The crc of each header is begun from the format's number,
so that a damaged number is not taken for a later format.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.format import record

FORMAT = 1
HEADER_BYTES = 64
HEADER = struct.Struct("<8sIIQIIQQ16x")
MAGIC = b"SHMQSTRM"
INDEX_HEADER = struct.Struct("<8sIIQIIQQQQQ")
INDEX_MAGIC = b"SHMQSIDX"
INDEX_EVERY_BYTES = 64 << 10
ENTRY_NUMBERS = 3
# A stored message has at least so many bytes, which bounds the number of messages in a file.
MESSAGE_BYTES_MIN = 10
SEGMENT_BYTES_MIN = 4096
SEGMENT_BYTES_MAX = 3_000_000_000
# Places remembered for the readers of one segment: one for each reader that reads by turns.
PLACES_MAX = 64
KINDS = ("log", "index", "lost")


def file_name(kind: str, first: int) -> str:
    return f"{kind}.{first:020d}"


def parse_name(name: str) -> tuple[str, int] | None:
    kind, dot, digits = name.partition(".")
    if dot and kind in KINDS and len(digits) == 20 and digits.isdecimal():
        return kind, int(digits)
    return None


@dataclass(slots=True, eq=False)
class StreamSegment:
    """One segment of a stream, open or sealed.

    `used` is the position of the next chunk. The file has the bytes up to `flushed`; the bytes up
    to `synced` are on stable storage. `end` is the offset behind the last message. A sealed segment
    may lack facts that are in its index.
    """

    first: int
    salt: int
    path: str
    newest_before: int = 0
    previous: int = 0
    used: int = HEADER_BYTES
    flushed: int = 0
    synced: int = 0
    allocated: int = 0
    end: int = 0
    timestamp: int = 0
    newest: int = 0
    last_chunk: int = 0
    sealed: bool = False
    has_index: bool = False
    entries: array[int] | None = None  # None: not in memory
    pending: list[bytearray] = field(default_factory=list)  # chunks between `flushed` and `used`
    # The position of the chunk of each offset that a reader goes on with.
    places: dict[int, int] = field(default_factory=dict)
    # The end of each range of damaged bytes, by its start.
    holes: dict[int, int] = field(default_factory=dict)

    def note(self, offset: int, timestamp: int, position: int) -> None:
        """Note a chunk that was put at `position`: its first offset and its timestamp."""
        assert self.entries is not None
        if not self.entries or position - self.entries[-1] >= INDEX_EVERY_BYTES:
            self.entries.extend((offset, self.newest, position))
        self.last_chunk, self.timestamp = offset, timestamp
        self.newest = max(self.newest, timestamp)

    def remember_place(self, offset: int, position: int) -> None:
        if len(self.places) >= PLACES_MAX:
            self.places.clear()
        self.places[offset] = position


def last_not_above(entries: array[int], offset: int) -> int:
    """Return the position of the last indexed chunk that begins at or before `offset`."""
    at = (
        bisect_right(
            range(len(entries) // ENTRY_NUMBERS), offset, key=lambda i: entries[ENTRY_NUMBERS * i]
        )
        - 1
    )
    return entries[ENTRY_NUMBERS * at + 2] if at >= 0 else HEADER_BYTES


def last_older(entries: array[int], timestamp: int) -> int:
    """Return the position of the last indexed chunk before which all is older than `timestamp`."""
    at = (
        bisect_left(
            range(len(entries) // ENTRY_NUMBERS),
            timestamp,
            key=lambda i: entries[ENTRY_NUMBERS * i + 1],
        )
        - 1
    )
    return entries[ENTRY_NUMBERS * at + 2] if at >= 0 else HEADER_BYTES


def encode_header(segment: StreamSegment) -> bytes:
    rest = HEADER.pack(
        MAGIC, FORMAT, 0, segment.first, segment.salt, 0, segment.newest_before, segment.previous
    )[16:]
    return struct.pack("<8sII", MAGIC, FORMAT, record.crc32c(rest, FORMAT)) + rest


def decode_header(data: bytes | bytearray | memoryview, path: str) -> StreamSegment | None:
    """Return the sealed segment that the header of the file `path` describes.

    Return None when `data` is no valid header. A header of a later format is an error.
    """
    if len(data) < HEADER_BYTES:
        return None
    magic, version, crc, first, salt, _, newest, previous = HEADER.unpack_from(data)
    if magic != MAGIC or crc != record.crc32c(data[16:HEADER_BYTES], version):
        return None
    refuse_newer(path.rpartition("/")[2], version)
    return StreamSegment(
        first,
        salt,
        path,
        newest,
        previous,
        sealed=True,
        end=first,
        newest=newest,
        timestamp=previous,
    )


def encode_index(segment: StreamSegment) -> bytes:
    assert segment.entries is not None
    rest = INDEX_HEADER.pack(
        INDEX_MAGIC, FORMAT, 0,
        segment.first, segment.salt, 0,
        segment.used, segment.end, segment.timestamp, segment.newest, segment.last_chunk,
    )[16:]  # fmt: skip
    entries = segment.entries.tobytes()
    crc = record.crc32c(entries, record.crc32c(rest, FORMAT))
    return struct.pack("<8sII", INDEX_MAGIC, FORMAT, crc) + rest + entries


def decode_index(data: bytes, segment: StreamSegment, size: int) -> bool:
    """Set the fields of a segment from its index; return False when `data` is no index of it.

    `size` is the size of the segment's file in bytes. An index of a later format is an error.
    """
    if len(data) < INDEX_HEADER.size or (len(data) - INDEX_HEADER.size) % (8 * ENTRY_NUMBERS):
        return False
    magic, version, crc, first, salt, _, used, end, timestamp, newest, last_chunk = (
        INDEX_HEADER.unpack_from(data)
    )
    if magic != INDEX_MAGIC or (first, salt) != (segment.first, segment.salt):
        return False
    if crc != record.crc32c(memoryview(data)[16:], version):
        return False
    refuse_newer(file_name("index", first), version)
    if used > size:
        return False
    segment.used = segment.flushed = segment.synced = used
    segment.end, segment.timestamp, segment.newest, segment.last_chunk = (
        end,
        timestamp,
        newest,
        last_chunk,
    )
    segment.entries = array("Q", data[INDEX_HEADER.size :])
    return True
