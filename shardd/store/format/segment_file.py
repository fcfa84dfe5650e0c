"""Encode and decode the header and the index of a segment, and name the files of a store.

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
is no such segment that matters (segments/producers.py).

Files are used again. A record of a former use is recognized by its salt, since each use has a new
salt. An index is a cache. The index is written only when the whole segment is on stable storage, so
it never speaks of bytes that a power cut took.
"""

from __future__ import annotations

import struct

from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.format import record

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
