"""The delayed messages of broker/amqp/contents.pyx in plain, slow, obvious Python.

Headers are decoded, the delay is negated, and they are encoded again.
"""

from __future__ import annotations

import struct
from typing import Any

from shardmq.broker.amqp import contents, properties

WIDTHS = {b"b": 1, b"s": 2, b"I": 4, b"l": 8, b"L": 8, b"B": 1, b"u": 2, b"i": 4}
SIGNED = {b"B": b"b", b"u": b"s", b"i": b"I"}


def negated(value: bytes) -> bytes:
    """`value`: with its type before it."""
    kind, rest = value[:1], value[1:]
    if kind in WIDTHS:
        width = WIDTHS[kind]
        signed = kind not in SIGNED
        number = int.from_bytes(rest, "big", signed=signed)
        if number < 0:
            return value
        if number >= 1 << (8 * width - 1):
            return kind + bytes(width)
        return (
            SIGNED.get(kind, kind) + (-number).to_bytes(width, "big", signed=True)
            if number
            else (SIGNED.get(kind, kind) + bytes(width))
        )
    if kind == b"S":
        return kind + rest[:4] + b"0" * (len(rest) - 4)
    if kind == b"D":
        return kind + rest[:1] + bytes(4)
    return kind + bytes(len(rest))


def released(blob: bytes, count: int, delay_of: Any) -> tuple[bytes, list[tuple[Any, ...]]]:
    """`delay_of(props)`: the delay's value in these properties, or None."""
    out = bytearray()
    runs: list[tuple[Any, ...]] = []
    for names, props, body in contents.split(blob, count):
        said = properties.read(props)
        value = delay_of(props)
        if value is not None:
            at = props.index(b"\x07x-delay" + value) + 8
            props = props[:at] + negated(value) + props[at + len(value) :]
        start = len(out)
        out += struct.pack("<II", len(body), len(props)) + names + props + body
        more = any(name in (said.headers or {}) for name in ("CC", "BCC", "x-dead-letter-exchange"))
        expiration = None if said.expiration is None else said.expiration.encode()
        priority = 255 if said.priority is None else min(said.priority, 254)
        look = (names, expiration, said.delivery_mode or 0, priority, more)
        if runs and runs[-1][3:] == look and not more:
            runs[-1] = (runs[-1][0], len(out), runs[-1][2] + 1, *look)
        else:
            runs.append((start, len(out), 1, *look))
    return bytes(out), runs
