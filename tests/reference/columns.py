"""Rows as store/columns.pyx makes them and publishes.pxi takes them, in plain Python."""

from __future__ import annotations

import struct
from typing import Any

SIZES = {
    "t": 1,
    "b": 1,
    "B": 1,
    "s": 2,
    "u": 2,
    "I": 4,
    "i": 4,
    "f": 4,
    "l": 8,
    "L": 8,
    "d": 8,
    "T": 8,
    "D": 5,
    "V": 0,
}
LONG = "SxFA"
PROPERTIES = (
    ("content_type", "s"),
    ("content_encoding", "s"),
    ("headers", "F"),
    ("delivery_mode", "B"),
    ("priority", "B"),
    ("correlation_id", "s"),
    ("reply_to", "s"),
    ("expiration", "s"),
    ("message_id", "s"),
    ("timestamp", "T"),
    ("type", "s"),
    ("user_id", "s"),
    ("app_id", "s"),
    ("cluster_id", "s"),
)
SECONDS_MAX = (2**63 - 1) // 1_000_000

Header = tuple[str, str, bytes]


def encode_header(header: Header) -> bytes:
    name, kind, value = header
    key = name.encode()
    length = struct.pack(">I", len(value)) if kind in LONG else b""
    return bytes([len(key)]) + key + kind.encode() + length + value


def encode_props(values: dict[str, Any]) -> bytes:
    """`headers`: a list of Header; a timestamp in seconds."""
    flags, parts = 0, []
    for bit, (name, kind) in zip(range(15, 1, -1), PROPERTIES, strict=True):
        value = values.get(name)
        if value is None:
            continue
        flags |= 1 << bit
        if kind == "s":
            data = value.encode()
            parts.append(bytes([len(data)]) + data)
        elif kind == "F":
            table = b"".join(map(encode_header, value))
            parts.append(struct.pack(">I", len(table)) + table)
        else:
            parts.append(struct.pack(">B" if kind == "B" else ">Q", value))
    return struct.pack(">H", flags) + b"".join(parts)


def row(
    offset: int, timestamp: int, exchange: bytes, key: bytes, values: dict[str, Any], body: bytes
) -> dict[str, Any]:
    """As pyarrow shows it, with numbers for times."""
    headers = values.get("headers")
    properties = {
        name: values.get(name) for name, _ in PROPERTIES if name not in ("headers", "cluster_id")
    }
    seconds = properties["timestamp"]
    properties["timestamp"] = (
        None if seconds is None or seconds > SECONDS_MAX else seconds * 1_000_000
    )
    return {
        "offset": offset,
        "timestamp": timestamp * 1000,
        "exchange": exchange.decode("utf-8", "replace"),
        "routing_key": key.decode("utf-8", "replace"),
        "value": body,
        "headers": None
        if headers is None
        else [{"key": name, "type": kind, "value": value} for name, kind, value in headers],
        "properties": properties,
    }
