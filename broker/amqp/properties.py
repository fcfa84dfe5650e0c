"""The properties of a message: read by name, and single headers changed in stored messages.

Otherwise properties stay the bytes they came as (drawn in shardd/content.pxd).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from shardmq.broker.amqp.contents import fields, numbered, read_stored, split
from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.amqp.methods import decode_table, encode_table, skip_value
from shardmq.broker.amqp.spec import SYNTAX_ERROR

# Name and kind, from bit 15 down.
PROPERTIES: Final = (
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

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_STORED = struct.Struct("<II")
_COUNT = struct.Struct(">cq")
_COUNT_NAME = b"\x10x-delivery-count"


class Properties:
    """The properties of a message; None for each that the message does not have.

    A short string that is no UTF-8 has its bad bytes replaced.
    """

    __slots__ = tuple(name for name, _ in PROPERTIES)

    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any] | None
    delivery_mode: int | None
    priority: int | None
    correlation_id: str | None
    reply_to: str | None
    expiration: str | None
    message_id: str | None
    timestamp: int | None
    type: str | None
    user_id: str | None
    app_id: str | None
    cluster_id: str | None

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, None)


def read(props: bytes) -> Properties:
    """Return all properties. Raises ConnectionException (502) when they are broken."""
    found = Properties()
    for name, kind, start, end in _fields(props):
        data = props[start:end]
        if kind == "s":
            setattr(found, name, data[1:].decode("utf-8", "replace"))
        elif kind == "F":
            found.headers = decode_table(data)
        else:
            setattr(found, name, data[0] if kind == "B" else _U64.unpack(data)[0])
    return found


def check(props: bytes) -> None:
    """Raise ConnectionException (502) when the property list is broken.

    Tables are not looked into.
    """
    _fields(props)


def without_header(message: bytes, name: str) -> bytes:
    """Return the stored message without one header.

    Everything else stays as it was, byte for byte.
    """
    exchange, key, props, body = read_stored(message)
    headers = next(
        ((start, end) for field, _, start, end in _fields(props) if field == "headers"), None
    )
    if headers is None:
        return bytes(message)
    start, end = headers
    kept = _without_key(props[start + 4 : end], name.encode())
    props = props[:start] + _U32.pack(len(kept)) + kept + props[end:]
    return _stored(exchange, key, props, body)


def without_header_in_each(blob: bytes | memoryview, count: int, name: str) -> bytes | memoryview:
    """Return `count` stored messages back to back, each without one header."""
    said = bytes([len(name)]) + name.encode()
    if said not in bytes(blob):
        return blob
    parts: list[bytes] = []
    for names, props, body in split(blob, count):
        if said in props and (inside := headers_inside(props)):
            props = with_headers(props, _without_key(inside, name.encode()))
        parts += (_STORED.pack(len(body), len(props)), names, props, body)
    return b"".join(parts)


def with_reply_to(message: bytes, name: str) -> bytes:
    """Return the stored message with another reply_to.

    It has had one. Everything else stays as it was, byte for byte.
    """
    exchange, key, props, body = read_stored(message)
    start, end = next(
        (start, end) for field, _, start, end in _fields(props) if field == "reply_to"
    )
    said = name.encode()
    return _stored(exchange, key, props[:start] + bytes([len(said)]) + said + props[end:], body)


def with_header(message: bytes, name: str, text: str) -> bytes:
    """Return the stored message with one header more, which it has not had.

    Everything else stays as it was, byte for byte.
    """
    exchange, key, props, body = read_stored(message)
    inside = headers_inside(props) + encode_table({name: text})[_U32.size :]
    return _stored(exchange, key, with_headers(props, inside), body)


def stored_with(exchange: bytes, key: bytes, headers: dict[str, Any], body: bytes) -> bytes:
    """Return a stored message that has these headers and no other property."""
    return _stored(
        exchange, key, with_headers(_U16.pack(0), encode_table(headers)[_U32.size :]), body
    )


def _stored(exchange: bytes, key: bytes, props: bytes, body: bytes) -> bytes:
    names = bytes([len(exchange)]) + exchange + bytes([len(key)]) + key
    return _STORED.pack(len(body), len(props)) + names + props + body


def with_delivery_count(blob: bytes | memoryview, count: int, times: int) -> bytes:
    """Return `count` stored messages back to back, each with the header x-delivery-count.

    The header says how often the message came back.
    """
    parts: list[bytes] = []
    known: dict[bytes, bytes] = {}
    said = _COUNT_NAME + _COUNT.pack(b"l", times)
    for names, props, body in split(blob, count):
        if props not in known:
            known[props] = with_headers(
                props, _without_key(headers_inside(props), _COUNT_NAME[1:]) + said
            )
        props = known[props]
        parts += (_STORED.pack(len(body), len(props)), names, props, body)
    return b"".join(parts)


def with_offsets(blob: bytes | memoryview, offsets: bytes | memoryview, name: bytes) -> bytes:
    """Return stored messages back to back, each with a header that has its offset.

    `offsets` are u64, little endian, one for each message.
    """
    found = numbered(blob, offsets, name)
    if found is not None:
        return found
    parts: list[bytes] = []
    for names, props, body in split(blob, len(offsets) // 8):
        cleaned = with_headers(props, _without_key(headers_inside(props), name))
        parts += (_STORED.pack(len(body), len(cleaned)), names, cleaned, body)
    return numbered(b"".join(parts), offsets, name, True) or b""


def headers_inside(props: bytes) -> bytes:
    """Return the entries of the headers without the length before them."""
    return next(
        (props[start + 4 : end] for name, _, start, end in _fields(props) if name == "headers"), b""
    )


def with_headers(props: bytes, inside: bytes) -> bytes:
    """Return the properties with these entries as headers.

    The other properties stay as they were, byte for byte.
    """
    return _with_parts(props, {"headers": _U32.pack(len(inside)) + inside})


def with_properties(props: bytes, given: dict[str, Any]) -> bytes:
    """Return the properties with these values instead; one that is None is taken away.

    The other properties stay as they were, byte for byte.
    """
    return _with_parts(
        props,
        {
            name: None if value is None else encode_properties({name: value})[_U16.size :]
            for name, value in given.items()
        },
    )


def entries(inside: bytes) -> dict[bytes, bytes]:
    """Return each value of a table with its type before it, by name.

    If a name is there twice, the last value counts.
    """
    found = {}
    at = 0
    while at < len(inside):
        value = at + 1 + inside[at]
        end = skip_value(inside, value)
        found[inside[at + 1 : value]] = inside[value:end]
        at = end
    return found


def with_entries(props: bytes, given: Mapping[bytes, bytes]) -> bytes:
    """Return the properties with the headers that `entries` has read, or with others like them."""
    return with_headers(
        props, b"".join(bytes((len(name),)) + name + value for name, value in given.items())
    )


def _with_parts(props: bytes, given: Mapping[str, bytes | None]) -> bytes:
    parts: dict[str, bytes | None] = {
        name: props[start:end] for name, _, start, end in _fields(props)
    }
    parts.update(given)
    flags = 0
    found = []
    for bit, (name, _) in zip(range(15, 1, -1), PROPERTIES, strict=True):
        if (part := parts.get(name)) is not None:
            flags |= 1 << bit
            found.append(part)
    return _U16.pack(flags) + b"".join(found)


def _without_key(table: bytes, unwanted: bytes) -> bytes:
    """Return the entries of a table without those of one key."""
    kept = bytearray()
    at = 0
    while at < len(table):
        value = at + 1 + table[at]
        end = skip_value(table, value)
        if table[at + 1 : value] != unwanted:
            kept += table[at:end]
        at = end
    return bytes(kept)


def _fields(props: bytes) -> list[tuple[str, str, int, int]]:
    """Return (name, kind, start, end) of each property that is there."""
    try:
        found = fields(props)
    except ValueError:
        raise ConnectionException(SYNTAX_ERROR, "broken content properties", 60, 40) from None
    return [(*PROPERTIES[15 - bit], start, end) for bit, start, end in found]


def encode_properties(given: dict[str, Any]) -> bytes:
    """Return flags and values; a value has the type that `PROPERTIES` asks for."""
    flags, parts = 0, []
    for bit, (name, kind) in zip(range(15, 1, -1), PROPERTIES, strict=True):
        value = given.get(name)
        if value is None:
            continue
        flags |= 1 << bit
        match kind:
            case "s":
                data = value.encode()
                parts.append(bytes((len(data),)) + data)
            case "F":
                parts.append(encode_table(value))
            case "B":
                parts.append(bytes((value,)))
            case _:
                parts.append(struct.pack(">Q", value))
    return struct.pack(">H", flags) + b"".join(parts)
