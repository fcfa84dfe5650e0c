"""shardd/wire/packer.pxi and codec.pyx in plain Python: the result of packing publishes."""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """One publish as the AMQP library sees it, and where its route leads."""

    channel: int
    exchange: bytes
    key: bytes
    bits: int
    props: bytes
    frames: tuple[bytes, ...]  # the body, as its frames cut it
    ttl_ms: int
    delivery_mode: int
    priority: int
    flags: int


def stored(fact: Facts) -> bytes:
    body = b"".join(fact.frames)
    head = struct.pack("<II", len(body), len(fact.props))
    names = bytes([len(fact.exchange)]) + fact.exchange + bytes([len(fact.key)]) + fact.key
    return head + names + fact.props + body


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def read_of(facts: list[Facts]) -> tuple[bytes, bytes]:
    """Return the bytes that a client sends, and the AMQP library's table of them."""
    buffer = bytearray()
    rows = []
    for fact in facts:
        line = (
            bytes([len(fact.exchange)])
            + fact.exchange
            + bytes([len(fact.key)])
            + fact.key
            + bytes([fact.bits])
        )
        line_off = len(buffer) + 7 + 6
        buffer += frame(1, fact.channel, struct.pack(">HHH", 60, 40, 0) + line)
        body_len = sum(map(len, fact.frames))
        props_off = len(buffer) + 7 + 12
        buffer += frame(2, fact.channel, struct.pack(">HHQ", 60, 0, body_len) + fact.props)
        body_off = len(buffer) if body_len else 0
        for piece in fact.frames:
            buffer += frame(3, fact.channel, piece)
        rows.append(
            struct.pack(
                "<IHHIIIIQIBBBBQ",
                line_off,
                len(line),
                fact.channel,
                props_off,
                len(fact.props),
                body_off,
                len(fact.frames),
                body_len,
                fact.ttl_ms,
                fact.delivery_mode,
                fact.priority,
                fact.flags,
                0,
                0,
            )
        )
    return bytes(buffer), b"".join(rows)


def records_of(
    records: bytes,
) -> list[tuple[int, int, int, int, tuple[int, ...], list[bytes], int]]:
    """(timestamp, ttl, priority, flags, queue ids, stored messages, checksum) of each record."""
    found = []
    at = 0
    while at < len(records):
        length, crc, stamp, ttl, count, queues, priority, flags = struct.unpack_from(
            "<IIQIIHBB", records, at
        )
        assert length % 8 == 0
        ids = struct.unpack_from(f"<{queues}I", records, at + 28)
        inner = at + 28 + 4 * queues
        messages = []
        for _ in range(count):
            body, props = struct.unpack_from("<II", records, inner)
            n = records[inner + 8]
            m = records[inner + 9 + n]
            end = inner + 10 + n + m + props + body
            messages.append(records[inner:end])
            inner = end
        assert at + length - 8 < inner <= at + length
        assert not any(records[inner : at + length])
        found.append((stamp, ttl, priority, flags, ids, messages, crc))
        at += length
    assert at == len(records)
    return found
