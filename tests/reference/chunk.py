"""Make and read chunks of a stream as shardd/store/format/chunk.pyx does, in plain Python."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

from tests.reference.record import NONE, Record, split_messages

HEADER = struct.Struct("<IIQIIHBBQI")
MESSAGES_BYTES = 256 << 10
FILTERS_MAX = 1024
ANY = 0xFFFFFFFF


@dataclass(frozen=True)
class Chunk:
    offset: int
    messages: tuple[bytes, ...]
    timestamp: int
    filters: tuple[int, ...] = ()
    mark: int = 0
    in_sequence: bool = False

    def encode(self, salt: int = 0) -> bytes:
        words = struct.pack(f"<{len(self.filters)}I", *self.filters)
        rest = words + b"".join(self.messages)
        length = (HEADER.size + len(rest) + 7) // 8 * 8
        head = HEADER.pack(
            length, 0, self.timestamp, NONE, len(self.messages), 3 + len(self.filters), 255,
            3 if self.in_sequence else 1,
            self.offset, self.mark // 8,
        )  # fmt: skip
        whole = (head + rest).ljust(length, b"\0")
        return whole[:4] + struct.pack("<I", crc32c(whole[8:]) ^ salt) + whole[8:]


def make_chunks(
    records: list[Record], offset: int, filters: list[int] | None = None
) -> list[Chunk]:
    """Make as few chunks as possible.

    A chunk has at most MESSAGES_BYTES, unless it has one message, and does not mix records that are
    IN_SEQUENCE with others.
    """
    groups: list[list[tuple[bytes, int, int]]] = []
    in_sequence: list[bool] = []
    ordinal = 0
    for record in records:
        for message in record.messages:
            size = sum(len(other) for other, _, _ in groups[-1]) if groups else 0
            is_in = bool(record.flags & 2)
            if not groups or size + len(message) > MESSAGES_BYTES or is_in != in_sequence[-1]:
                groups.append([])
                in_sequence.append(is_in)
            groups[-1].append(
                (message, record.timestamp, filters[ordinal] if filters is not None else 0)
            )
            ordinal += 1
    chunks = []
    for group, is_in in zip(groups, in_sequence, strict=True):
        distinct = sorted({one for _, _, one in group}) if filters is not None else []
        chunks.append(
            Chunk(
                offset,
                tuple(message for message, _, _ in group),
                max(timestamp for _, timestamp, _ in group),
                tuple(distinct) if len(distinct) <= FILTERS_MAX else (ANY,),
                in_sequence=is_in,
            )
        )
        offset += len(group)
    return chunks


def decode_chunk(data: bytes, at: int, salt: int = 0) -> tuple[Chunk, int] | None:
    """(chunk, end), None where there is no whole and true one."""
    if at + HEADER.size > len(data):
        return None
    length, crc, timestamp, ttl, count, words, priority, flags, offset, mark = HEADER.unpack_from(
        data, at
    )
    end = at + length
    fixed = HEADER.size + 4 * (words - 3)
    if (
        length % 8
        or end > len(data)
        or not 3 <= words <= 3 + FILTERS_MAX
        or length < fixed + 10 * count
        or not count
    ):
        return None
    if (
        (ttl, priority) != (NONE, 255)
        or flags not in (1, 3)
        or crc32c(data[at + 8 : end]) ^ salt != crc
    ):
        return None
    filters = struct.unpack_from(f"<{words - 3}I", data, at + HEADER.size)
    body = data[at + fixed : end]
    messages: list[bytes] = []
    for _ in range(count):
        size = len(split_first(body))
        messages.append(body[:size])
        body = body[size:]
    return Chunk(offset, tuple(messages), timestamp, filters, 8 * mark, flags == 3), end


def split_first(data: bytes) -> bytes:
    body, props = struct.unpack_from("<II", data)
    n = data[8]
    return data[: 10 + n + data[9 + n] + int(props) + int(body)]


def contents(
    data: bytes, start: int, stop: int, salt: int, offset: int
) -> tuple[list[Chunk], int, list[tuple[int, int]]]:
    """Return the intact chunks of data[start:stop], the end of the last one, and the damage.

    Damage is given as pairs (from, to).
    """
    chunks: list[Chunk] = []
    holes = []
    at = end = start
    while at < stop:
        found = decode_chunk(data[:stop], at, salt)
        lost = at > end
        if found is None or found[0].offset < offset or (found[0].offset != offset and not lost):
            at += 8
            continue
        if lost:
            holes.append((end, at))
        chunks.append(found[0])
        offset = found[0].offset + len(found[0].messages)
        at = end = found[1]
    return chunks, end, holes


__all__ = ["Chunk", "contents", "decode_chunk", "make_chunks", "split_messages"]
