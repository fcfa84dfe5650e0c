"""The schema is the promised one, and pamqp reads the frames of published rows."""

from __future__ import annotations

import random
import struct
from typing import Any

import pamqp.frame
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.reader import publishing
from shardmq.shardd.reader.arrow import TYPES, schema_of
from shardmq.shardd.reader.publishing import framed, publishes_of, read
from shardmq.shardd.reader.scanning import Refused
from shardmq.shardd.wire.reader_protocol import COLUMNS, Publish
from tests.reader.rows import random_values
from tests.reference.columns import PROPERTIES, encode_props

FRAME_BYTES_MAX = 4096 + 4096


def test_the_schema_is_what_was_promised() -> None:
    """Letter for letter: those who read have it written down, Spark checks it."""
    assert tuple(TYPES) == COLUMNS
    shown = {field.name: str(field.type) for field in schema_of(COLUMNS)}
    assert shown == {
        "queue": "string",
        "shard": "int32",
        "offset": "int64",
        "timestamp": "timestamp[us, tz=UTC]",
        "exchange": "string",
        "routing_key": "string",
        "value": "binary",
        "headers": "list<element: struct<key: string, type: string, value: binary>>",
        "properties": "struct<content_type: string, content_encoding: string, delivery_mode: "
        "int32, priority: int32, correlation_id: string, reply_to: string, expiration: string, "
        "message_id: string, timestamp: timestamp[us, tz=UTC], type: string, user_id: string, "
        "app_id: string>",
    }
    assert all(field.nullable for field in schema_of(COLUMNS))


def call(**more: Any) -> Publish:
    return Publish("guest", "/", "", "ex", "key", True, **more)


def stream_of(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def table_of(messages: list[tuple[bytes, str | None, dict[str, Any]]]) -> Any:
    """Return the Arrow table of messages, each (body, routing key, properties)."""
    properties = []
    for _, _, values in messages:
        said = {field.name: values.get(field.name) for field in TYPES["properties"]}
        said["timestamp"] = None if said["timestamp"] is None else said["timestamp"] * 1_000_000
        properties.append(said)
    headers = [values.get("headers") for _, _, values in messages]
    pairs = [
        None if one is None else [dict(zip(("key", "type", "value"), h, strict=True)) for h in one]
        for one in headers
    ]
    return pa.table(
        {
            "value": pa.array([body for body, _, _ in messages], pa.binary()),
            "routing_key": pa.array([key for _, key, _ in messages], pa.string()),
            "headers": pa.array(pairs, TYPES["headers"]),
            "properties": pa.array(properties, TYPES["properties"]),
        }
    )


def frames_of(body: bytes, **more: Any) -> list[tuple[str, str, int, bytes, bytes]]:
    """(exchange, key, mandatory, props, body) of each message in the frames."""
    asked = call(**more)
    publishes = publishes_of(read(body), asked, FRAME_BYTES_MAX)
    data, row = b"", 0
    while row < publishes.rows:
        frames, row = publishes.encode(row, 1)
        data += frames
    found = []
    while data:
        count, channel, method = pamqp.frame.unmarshal(data)
        assert channel == 1
        data = data[count:]
        (size,) = struct.unpack_from(">I", data, 3)
        (body_bytes,) = struct.unpack_from(">Q", data, 11)
        props, data = data[19 : 7 + size], data[8 + size :]
        said = b""
        while len(said) < body_bytes:
            kind, _, size = struct.unpack_from(">BHI", data)
            assert kind == 3 and 0 < size <= FRAME_BYTES_MAX - 8 and data[7 + size] == 0xCE
            said, data = said + data[7 : 7 + size], data[8 + size :]
        found.append((method.exchange, method.routing_key, int(method.mandatory), props, said))
    return found


@pytest.mark.parametrize("kept_bytes_max", [0, 1, 700, 1 << 20])
def test_frames_are_the_same_however_many_are_kept(
    kept_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "FRAMES_BYTES", 300)
    monkeypatch.setattr(publishing, "KEPT_BYTES_MAX", kept_bytes_max)
    table = pa.table({"value": pa.array([bytes([row]) * row for row in range(40)], pa.binary())})
    publishes = publishes_of(read(stream_of(table)), call(), FRAME_BYTES_MAX)
    more = framed(publishes)
    pieces = list(iter(more, b""))
    assert b"".join(pieces) == publishes.encode(0, 1 << 20)[0]
    assert max(map(len, pieces)) < 300 + 100 and more() == b""


@given(st.integers(0, 2**32 - 1))
def test_rows_become_the_messages_they_say(seed: int) -> None:
    rng = random.Random(seed)
    messages = []
    for _ in range(rng.randrange(1, 12)):
        values = {name: value for name, value in random_values(rng).items() if name != "cluster_id"}
        if values.get("timestamp", 0) > 2**40:
            del values["timestamp"]
        size = rng.choice((0, 1, 100, FRAME_BYTES_MAX - 8, FRAME_BYTES_MAX - 7, 20_000))
        messages.append((rng.randbytes(size), rng.choice((None, "", "a.b", "ü")), values))
    table = table_of(messages)
    expected = [
        ("ex", "key" if key is None else key, 1, encode_props(values), body)
        for body, key, values in messages
    ]
    assert frames_of(stream_of(table)) == expected
    start = rng.randrange(len(messages))
    assert frames_of(stream_of(table.slice(start))) == expected[start:]


def test_a_producers_rows_say_their_place_and_no_other() -> None:
    old = [("x-producer-id", "S", b"old"), ("a", "I", bytes(4)), ("x-sequence", "l", bytes(8))]
    table = table_of([(b"1", None, {"headers": old}), (b"2", None, {})])
    own = [
        [("x-producer-id", "S", b"me"), ("x-sequence", "l", struct.pack(">q", n))] for n in (7, 8)
    ]
    expected = [encode_props({"headers": [old[1], *own[0]]}), encode_props({"headers": own[1]})]
    assert [
        props for *_, props, _ in frames_of(stream_of(table), producer="me", sequence=7)
    ] == expected


def test_without_properties_all_are_persistent() -> None:
    (_, _, _, props, body) = frames_of(stream_of(pa.table({"value": ["text"]})))[0]
    assert (props, body) == (encode_props({"delivery_mode": 2}), b"text")


BAD = {
    "no stream": (b"PAR1", "no Arrow IPC stream"),
    "no value": (stream_of(pa.table({"routing_key": ["a"]})), "there must be value"),
    "unknown column": (
        stream_of(pa.table({"value": ["a"], "offset": [1]})),
        "columns value, offset",
    ),
    "null value": (stream_of(pa.table({"value": ["a", None]})), "value: 1 rows are null"),
    "value of another type": (stream_of(pa.table({"value": [1.5]})), "value:"),
    "unknown property": (
        stream_of(pa.table({"value": ["a"], "properties": [{"colour": "red"}]})),
        "no property 'colour'",
    ),
    "properties no struct": (
        stream_of(pa.table({"value": ["a"], "properties": [1]})),
        "properties:",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_published_is_refused_in_words(name: str) -> None:
    body, reason = BAD[name]
    with pytest.raises(Refused) as refused:
        read(body)
    assert refused.value.answer.status == 400 and reason in refused.value.answer.reason


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"routing_key": ["k" * 256]}, "row 0: routing_key has more than 255 bytes"),
        ({"properties": [{"priority": 256}]}, "row 0: a property is 256"),
        ({"properties": [{"type": "t" * 256}]}, "row 0: a property has more than 255 bytes"),
        (
            {"headers": [[{"key": "h", "type": "I", "value": b"123"}]]},
            "row 0: header 'h' is no value of AMQP",
        ),
        (
            {"headers": [[{"key": "h", "type": "?", "value": b""}]]},
            "row 0: header 'h' is no value of AMQP",
        ),
    ],
)
def test_a_row_that_amqp_cannot_say_is_named(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("?", ".")):
        frames_of(stream_of(pa.table({"value": ["a"], **columns})))


def test_every_property_has_its_place() -> None:
    assert [field.name for field in TYPES["properties"]] == [
        name for name, _ in PROPERTIES if name not in ("headers", "cluster_id")
    ]
