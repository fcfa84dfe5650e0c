"""Encode and decode the acks file: which messages of a segment are settled.

    acks.NNNNNNNNNN    0  "SHMQACKS" | u32 FORMAT | u32 crc32c of [16, 32)
                      16  u64 number | u32 salt | u32 0
                      32  blocks: u32 crc32c of the rest of the block, XOR salt | u32 count
                          | u64 pair[count]

The file lies beside the segment, and is removed with the segment. The file is written lazily: a
lost block means that messages are delivered again, never that one is lost.
"""

from __future__ import annotations

import struct

from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.segment_file import FORMAT, file_name

HEADER = struct.Struct("<8sIIQII")
MAGIC = b"SHMQACKS"
BLOCK = struct.Struct("<II")
PAIR_BYTES = 8


def encode_header(number: int, salt: int) -> bytes:
    rest = struct.pack("<QII", number, salt, 0)
    return struct.pack("<8sII", MAGIC, FORMAT, record.crc32c(rest, FORMAT)) + rest


def encode_block(pairs: bytes | bytearray, salt: int) -> bytes:
    rest = struct.pack("<I", len(pairs) // PAIR_BYTES) + pairs
    return struct.pack("<I", record.crc32c(rest) ^ salt) + rest


def decode(data: bytes, number: int, salt: int) -> tuple[bytes, int]:
    """Return (pairs, end of the last good block); an end of 0 means that the header is bad."""
    if len(data) < HEADER.size:
        return b"", 0
    if data[: HEADER.size] != encode_header(number, salt):
        _refuse_newer(data[: HEADER.size], number, salt)
        return b"", 0
    view = memoryview(data)
    at = HEADER.size
    blocks = []
    while at + BLOCK.size <= len(data):
        crc, count = BLOCK.unpack_from(data, at)
        stop = at + BLOCK.size + count * PAIR_BYTES
        if stop > len(data) or count == 0 or record.crc32c(view[at + 4 : stop]) ^ salt != crc:
            break
        blocks.append(view[at + BLOCK.size : stop])
        at = stop
    return b"".join(blocks), at


def _refuse_newer(head: bytes, number: int, salt: int) -> None:
    magic, version, crc, of_number, of_salt, _ = HEADER.unpack(head)
    if (
        magic == MAGIC
        and crc == record.crc32c(head[16:], version)
        and (of_number, of_salt) == (number, salt)
    ):
        refuse_newer(file_name("acks", number), version)
