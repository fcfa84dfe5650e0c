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
from shardmq.shardd.store.files import Files, is_full, read_file, replace_file
from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.sequences import Sequences

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
    """The block to be written after a sync of the messages that it covers.

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
        """Write the block. On a full disk the messages stay uncovered."""
        try:
            self._write()
        except OSError as error:
            if not is_full(error):
                raise
            self.full = True

    def _write(self) -> None:
        path = f"{self.directory}/{NAME}"
        if not self.at:
            data = encode_header() + self.block
            replace_file(self.files, path, f"{path}.new", data, sync=self.sync)
            if self.sync:
                self.files.sync_directory(self.directory)
            return
        handle = self.files.open(path, create=True)
        try:
            self.files.write(handle, self.block, self.at)
            if self.sync:
                self.files.sync(handle)
        finally:
            self.files.close(handle)


class ProducersFile:
    """The file of one store or stream, with the table of the sequences that it has or will have."""

    def __init__(self, files: Files, directory: str, sync: bool) -> None:
        self.files = files
        self.directory = directory
        self.sync = sync
        self.table = Sequences()
        self.covered = 0  # the file covers all up to this segment, or below this offset
        self._end = 0  # size of the file; 0: it is to be written anew
        self._whole_bytes = 0  # size of the file when it was last written anew

    def recover(self) -> tuple[int, int] | None:
        """Read the file; return the (start, stop) of the bytes that cannot be read, or None.

        Raises FormatTooNew.
        """
        data = read_file(self.files, f"{self.directory}/{NAME}")
        blocks, end = decode(data)
        for places, covered in blocks:
            self.table.add(places)
            self.covered = max(self.covered, covered)
        return (end, len(data)) if end < len(data) else None

    def begin(self, covered: int) -> Cover:
        """Return the job that writes what the table has, up to `covered`; `end` follows its run."""
        anew = not self._end or self._end > max(REWRITE_BYTES, 2 * self._whole_bytes)
        block = encode_block(self.table.take_changes(anew), covered)
        at = 0 if anew else self._end
        return Cover(self.files, self.directory, self.sync, block, at, covered)

    def end(self, cover: Cover) -> bool:
        """Note the end of a job; return False if the disk was full."""
        if cover.full:
            # A part of the block may be in the file. Only a file that is written anew has all
            # changes, since the table no longer lists those of this block.
            self._end = 0
            return False
        self.covered = cover.covered
        self._end = (cover.at or HEADER.size) + len(cover.block)
        if not cover.at:
            self._whole_bytes = self._end
        return True


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
