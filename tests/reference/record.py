"""Read and make records in plain, slow and obvious Python.

shardd/store/format/record.pyx and scanning.pxi read the same records. Tests use this module to make
records.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

HEADER = struct.Struct("<IIQIIHBB")
NONE = 0xFFFFFFFF


@dataclass(frozen=True)
class Record:
    queues: tuple[int, ...]
    messages: tuple[bytes, ...]
    timestamp: int = 0
    ttl_ms: int = NONE
    priority: int = 255
    flags: int = 1

    def encode(self, salt: int = 0) -> bytes:
        rest = struct.pack(f"<{len(self.queues)}I", *self.queues) + b"".join(self.messages)
        length = (HEADER.size + len(rest) + 7) // 8 * 8
        head = HEADER.pack(
            length,
            0,
            self.timestamp,
            self.ttl_ms,
            len(self.messages),
            len(self.queues),
            self.priority,
            self.flags,
        )
        whole = (head + rest).ljust(length, b"\0")
        return whole[:4] + struct.pack("<I", crc32c(whole[8:]) ^ salt) + whole[8:]

    def fact(self) -> int:
        expires = 0 if self.ttl_ms == NONE else self.timestamp + self.ttl_ms
        return (0 if self.priority == 255 else self.priority) << 56 | expires

    def recovered_fact(self) -> int:
        """Return the fact of a recovered record, which for a ttl of 0 is only its time.

        Such a message is too old, or waits at an exchange until then.
        """
        return self.timestamp if self.ttl_ms == 0 else self.fact()


def encode_message(
    body: bytes, exchange: bytes = b"", key: bytes = b"k", props: bytes = b"\0\0"
) -> bytes:
    names = bytes([len(exchange)]) + exchange + bytes([len(key)]) + key
    return struct.pack("<II", len(body), len(props)) + names + props + body


def message_end(data: bytes, at: int) -> int:
    body, props = struct.unpack_from("<II", data, at)
    n = data[at + 8]
    m = data[at + 9 + n]
    return at + 10 + n + m + int(props) + int(body)


def split_messages(blob: bytes) -> list[bytes]:
    messages = []
    at = 0
    while at < len(blob):
        end = message_end(blob, at)
        messages.append(blob[at:end])
        at = end
    assert at == len(blob)
    return messages


def decode_record(data: bytes, at: int, salt: int = 0) -> tuple[Record, list[int], int] | None:
    """(record, offset of each message, end), None where there is no whole and true one."""
    if at + HEADER.size > len(data):
        return None
    length, crc, timestamp, ttl, count, queues, priority, flags = HEADER.unpack_from(data, at)
    end = at + length
    if (
        length % 8
        or length < HEADER.size + 4 * queues
        or end > len(data)
        or not queues
        or not count
    ):
        return None
    if crc32c(data[at + 8 : end]) ^ salt != crc:
        return None
    place = at + HEADER.size + 4 * queues
    ids = struct.unpack_from(f"<{queues}I", data, at + HEADER.size)
    offsets, messages = [], []
    for _ in range(count):
        if place + 10 > end or place + 10 + data[place + 8] > end or message_end(data, place) > end:
            return None
        offsets.append(place)
        messages.append(data[place : message_end(data, place)])
        place = message_end(data, place)
    if end - place >= 8:
        return None
    return Record(ids, tuple(messages), timestamp, ttl, priority, flags), offsets, end


def queues_of_pairs(pairs: bytes) -> set[int]:
    """Return the ids of the queues that settled pairs are of: (queue id, position) each."""
    return {queue_id for _, queue_id in struct.iter_unpack("<II", pairs)}
