"""Write and read the file of the highest sequences of producers, of a store or a stream.

    producers  0  "SHMQPROD" | u32 FORMAT | u32 crc32c of nothing, begun from FORMAT
              16  blocks: u32 crc32c of the rest | u32 bytes of places
                  | u64 number of the last segment covered | places (drawn in sequences.pyx)

Of a stream, a block covers the messages below an offset, which it has in place of the segment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.files import Files, is_full
from shardmq.shardd.store.format import record

FORMAT = 1
MAGIC = b"SHMQPROD"
NAME = "producers"
HEADER = struct.Struct("<8sII")
BLOCK = struct.Struct("<IIQ")
# The file is written anew when it is larger than this, and larger than twice its size after the
# last time that it was written anew.
REWRITE_BYTES = 256 << 10


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
