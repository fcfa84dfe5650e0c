"""The bytes of a long response, kept compressed, in pieces that can be unpacked one by one.

Each piece ends with a full flush of deflate, so that nothing in a piece refers to the piece before.
A client that takes gzip gets the pieces as they are, between GZIP_HEAD and `gzip_tail`. For any
other client each piece is unpacked just before it is sent.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

PIECE_BYTES: Final = 64 << 10  # before compression; a body up to this size is kept uncompressed
LEVEL: Final = 1  # lists and metrics repeat themselves: they shrink to a tenth at this level
MEMORY_LEVEL: Final = 7  # takes a tenth less time than 8, zlib's default
# RFC 1952: magic, deflate, no flags, no time, fastest, from Unix.
GZIP_HEAD: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\x03"
LAST_BLOCK: Final = b"\x03\x00"  # an empty last block of deflate


class CompressedPieces:
    """A body that grows by `add` until `end`."""

    def __init__(self) -> None:
        self._open = bytearray()
        self._deflate: Any = None  # takes 192 KiB, which short bodies do not need
        self._crc = 0
        self.bytes_made = 0  # before compression
        self.bytes_held = 0  # in memory
        self.packed: list[bytes] = []
        self.whole: bytes | None = None  # the uncompressed body, when it has ended and is short

    def add(self, data: bytes) -> None:
        self._open += data
        while len(self._open) > PIECE_BYTES:
            with memoryview(self._open) as open_bytes, open_bytes[:PIECE_BYTES] as piece:
                self._pack(piece)
            del self._open[:PIECE_BYTES]

    def end(self) -> None:
        if self.packed:
            self._pack(self._open)
        else:
            self.whole = bytes(self._open)
            self.bytes_made = self.bytes_held = len(self.whole)
        self._open.clear()
        self._deflate = None

    def _pack(self, data: bytearray | memoryview) -> None:
        if self._deflate is None:
            self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, MEMORY_LEVEL)
        piece = self._deflate.compress(data) + self._deflate.flush(zlib.Z_FULL_FLUSH)
        self._crc = zlib.crc32(data, self._crc)
        self.bytes_made += len(data)
        self.bytes_held += len(piece)
        self.packed.append(piece)

    def clear(self) -> None:
        """Free the bytes at once, although others may still refer to this object."""
        self.packed.clear()
        self._open.clear()
        self._deflate = self.whole = None
        self.bytes_held = 0

    def gzip_tail(self) -> bytes:
        """Return the end of the gzip file, after the last piece. Call it after `end`."""
        return LAST_BLOCK + struct.pack("<II", self._crc, self.bytes_made & 0xFFFFFFFF)


def unpacked(piece: bytes) -> bytes:
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(piece)
