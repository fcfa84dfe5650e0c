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
    edit: Callable[..., bytes] | None,
    limit: int = -1,
    with_names: bool = False,
) -> tuple[int, bytes, int]:
    """Return where a relay stops, what it publishes, and how many messages that is."""
    out, at, begun, published, left, told = b"", 0, 0, 0, 0, b""
    for kind, channel, payload, end in frames(data):
        if kind != 8 and channel != 1:
            break
        if kind == 1:
            if payload[:4] != struct.pack(">HH", 60, 60) or begun == limit:
                break
            begun += 1
            place = 5 + payload[4] + 9
            told = payload[place - 1 :]
            own_exchange = payload[place + 1 : place + 1 + payload[place]]
            place += 1 + payload[place]
            own_key = payload[place + 1 :]
            names = short(own_exchange if exchange is None else exchange)
            names += short(own_key if key is None else key)
            out += frame(1, 1, struct.pack(">HHH", 60, 40, 0) + names + bytes([mandatory]))
        elif kind == 2:
            left = int.from_bytes(payload[4:12], "big")
            props = payload[12:]
            if edit is not None:
                props = edit(props, told) if with_names else edit(props)
            out += frame(2, 1, payload[:12] + props)
            published += not left
        elif kind == 3:
            left -= len(payload)
            out += frame(3, 1, payload)
            published += not left
        at = end
    return at, out, published


def settled(confirms: list[tuple[int, bool, bool]], published: int) -> tuple[int, list[int]]:
    """Return the number up to which all publishes are settled, and the refused ones.

    `confirms` are (tag, multiple, whether it is a nack).
    """
    known: set[int] = set()
    refused: list[int] = []
    for tag, multiple, is_nack in confirms:
        named = range(1, (tag or published) + 1) if multiple else [tag]
        if is_nack:
            refused += [number for number in named if number not in known]
        known.update(named)
    low = next(number for number in range(published + 1) if number + 1 not in known)
    return low, refused
