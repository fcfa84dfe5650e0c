"""`bridges/relay.pyx` again, in plain Python: one frame after the other."""

from __future__ import annotations

import struct
from collections.abc import Callable

HEAD = struct.Struct(">BHI")


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return HEAD.pack(kind, channel, len(payload)) + payload + b"\xce"


def short(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def frames(data: bytes) -> list[tuple[int, int, bytes, int]]:
    """Return kind, channel, payload and end of each whole frame."""
    found, at = [], 0
    while len(data) - at >= HEAD.size:
        kind, channel, size = HEAD.unpack_from(data, at)
        end = at + HEAD.size + size + 1
        if end > len(data):
            break
        found.append((kind, channel, data[at + HEAD.size : end - 1], end))
        at = end
    return found


def relayed(
    data: bytes,
    exchange: bytes | None,
    key: bytes | None,
    mandatory: bool,
    edit: Callable[..., bytes | None] | None,
    limit: int = -1,
    with_names: bool = False,
    may_drop: bool = False,
) -> tuple[int, bytes, int, list[int]]:
    """Return where a relay stops, what it publishes, how many messages, and which it dropped.

    The publish of a message whose header has not come is not among them if it may be dropped.
    """
    out, at, begun, published, left, told = b"", 0, 0, 0, 0, b""
    method, is_dropped, dropped = b"", False, []
    for kind, channel, payload, end in frames(data):
        if kind != 8 and channel != 1:
            break
        if kind == 1:
            if payload[:4] != struct.pack(">HH", 60, 60) or begun == limit:
                break
            begun += 1
            place = 5 + payload[4] + 9
            told = payload[place - 1 : place] if may_drop else payload[place - 1 :]
            own_exchange = payload[place + 1 : place + 1 + payload[place]]
            place += 1 + payload[place]
            own_key = payload[place + 1 :]
            names = short(own_exchange if exchange is None else exchange)
            names += short(own_key if key is None else key)
            method = frame(1, 1, struct.pack(">HHH", 60, 40, 0) + names + bytes([mandatory]))
            if not may_drop:
                out += method
        elif kind == 2:
            left = int.from_bytes(payload[4:12], "big")
            props: bytes | None = payload[12:]
            if edit is not None:
                props = edit(props, told) if with_names or may_drop else edit(props)
            is_dropped = props is None
            if props is not None:
                out += (method if may_drop else b"") + frame(2, 1, payload[:12] + props)
        elif kind == 3:
            left -= len(payload)
            if not is_dropped:
                out += frame(3, 1, payload)
        if kind in (2, 3) and not left:
            published += not is_dropped
            dropped += [begun] * is_dropped
        at = end
    return at, out, published, dropped


def settled(
    confirms: list[tuple[int, bool, bool]], deliveries: list[bool]
) -> tuple[int, list[int], int]:
    """Return up to which delivery all are settled, the refused ones, and how many were dropped.

    `confirms` are (tag, multiple, whether it is a nack). `deliveries` says of each whether it was
    published; the others were dropped.
    """
    published = [number for number, is_published in enumerate(deliveries, 1) if is_published]
    known = set(range(1, len(deliveries) + 1)) - set(published)
    refused: list[int] = []
    for tag, multiple, is_nack in confirms:
        named = published[: tag or len(published)] if multiple else [published[tag - 1]]
        if is_nack:
            refused += [number for number in named if number not in known]
        known.update(named)
    low = next(number for number in range(len(deliveries) + 1) if number + 1 not in known)
    return low, refused, deliveries[:low].count(False)
