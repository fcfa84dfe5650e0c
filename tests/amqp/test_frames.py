"""What the compiled loops write is what pamqp reads; what a row says is what was published."""

from __future__ import annotations

import datetime
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header

from shardmq.broker.amqp import (
    Connection,
    ConnectionException,
    Publishes,
    contents,
    frames,
    properties,
)
from shardmq.broker.amqp.methods import decode_method, decode_table, encode_method, encode_table
from tests.amqp.bytes_of import publish, received, shake_hands
from tests.support.raw_client import raw_frame

SHORT = st.text(max_size=20)
BODY = st.binary(max_size=300)


def stored(exchange: str, key: str, props: commands.Basic.Properties, content: bytes) -> bytes:
    e, k, p = exchange.encode(), key.encode(), props.marshal()
    return (
        struct.pack("<II", len(content), len(p))
        + bytes([len(e)])
        + e
        + bytes([len(k)])
        + k
        + p
        + content
    )


def read_frames(data: bytes) -> list[object]:
    found = []
    while data:
        used, _, what = frame.unmarshal(data)
        found.append(what)
        data = data[used:]
    return found


@given(
    st.lists(st.tuples(SHORT, SHORT, BODY), max_size=5), st.integers(0, 2**62), st.integers(9, 200)
)
def test_deliveries_are_what_was_stored(
    messages: list[tuple[str, str, bytes]], tag: int, frame_max: int
) -> None:
    props = commands.Basic.Properties(delivery_mode=2, headers={"a": "b"})
    blob = b"".join(stored(exchange, key, props, content) for exchange, key, content in messages)
    found = iter(
        read_frames(contents.deliveries(blob, len(messages), 3, b"ctag", tag, True, frame_max))
    )
    for number, (exchange, key, content) in enumerate(messages):
        deliver, head = next(found), next(found)
        assert isinstance(deliver, commands.Basic.Deliver)
        assert (deliver.consumer_tag, deliver.delivery_tag, deliver.redelivered) == (
            "ctag",
            tag + number,
            True,
        )
        assert (deliver.exchange, deliver.routing_key) == (exchange, key)
        assert isinstance(head, header.ContentHeader)
        assert (head.body_size, head.properties.headers) == (len(content), {"a": "b"})
        got = b""
        while len(got) < len(content):
            part = next(found)
            assert isinstance(part, body.ContentBody)
            assert part.value is not None
            assert len(part.value) <= frame_max - 8
            got += part.value
        assert got == content
    assert list(found) == []


def test_delivery_parts_are_views_of_what_was_stored() -> None:
    content = bytes(range(256)) * 1024
    blob = stored("e" * 255, "k" * 255, commands.Basic.Properties(delivery_mode=2), content) * 2
    parts = contents.delivery_parts(memoryview(blob), 2, 3, b"c" * 255, 7, False, 131072)
    assert b"".join(parts) == contents.deliveries(blob, 2, 3, b"c" * 255, 7, False, 131072)
    views = [part for part in parts if isinstance(part, memoryview)]
    assert all(view.obj is blob for view in views)
    assert b"".join(views) == content * 2


@given(SHORT, SHORT, BODY)
def test_get_ok_is_what_was_stored(exchange: str, key: str, content: bytes) -> None:
    message = stored(exchange, key, commands.Basic.Properties(), content)
    got, _head, *parts = read_frames(contents.get_ok(message, 1, 7, False, 9, 4096))
    assert isinstance(got, commands.Basic.GetOk)
    assert (got.delivery_tag, got.redelivered, got.message_count) == (7, False, 9)
    assert (got.exchange, got.routing_key, len(parts)) == (exchange, key, bool(content))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_stored_message_are_refused(data: bytes) -> None:
    try:
        exchange, key, props, content = contents.read_stored(data)
    except ValueError:
        return
    assert 10 + len(exchange) + len(key) + len(props) + len(content) <= len(data)


@given(
    st.one_of(st.none(), st.text(alphabet="0123456789a-", max_size=11)),
    st.one_of(st.none(), st.integers(0, 255)),
    st.one_of(st.none(), st.sampled_from(["CC", "BCC", "ACC", "CCC"])),
)
def test_a_rows_facts_are_those_of_the_properties(
    expiration: str | None, priority: int | None, name: str | None
) -> None:
    headers = {name: ["x"]} if name else None
    props = commands.Basic.Properties(expiration=expiration, priority=priority, headers=headers)
    ttl, _, found, flags = frames.facts(props.marshal())
    # pamqp leaves out what is empty or 0
    digits = (
        expiration
        and expiration.isdigit()
        and len(expiration) <= 10
        and int(expiration) < 0xFFFFFFFF
    )
    assert ttl == (int(expiration) if digits and expiration else 0xFFFFFFFF)
    assert bool(flags & frames.BAD_EXPIRATION) == bool(expiration and not digits)
    read = properties.read(props.marshal())
    # 255 stands for none; as a priority it is served with 254.
    assert found == (0xFF if read.priority is None else min(read.priority, 0xFE))
    if name in ("CC", "BCC"):
        assert flags & frames.MAY_HAVE_CC


def test_equal_neighbours_are_one_event() -> None:
    made = Connection(server_properties={})
    shake_hands(made, 1)
    (event,) = received(made, b"".join(publish(1, "e", "k", b"x" * 16)) * 500)
    assert isinstance(event, Publishes)
    assert event.count == 500


def test_a_header_is_taken_out_and_nothing_else_changes() -> None:
    props = commands.Basic.Properties(
        headers={"BCC": ["x"], "a": 1, "z": {"BCC": 2}}, priority=4, reply_to="r"
    )
    message = properties.without_header(stored("e", "k", props, b"body"), "BCC")
    exchange, key, found, content = contents.read_stored(message)
    assert (exchange, key, content) == (b"e", b"k", b"body")
    kept = commands.Basic.Properties(headers={"a": 1, "z": {"BCC": 2}}, priority=4, reply_to="r")
    assert found == kept.marshal()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=9), VALUES, max_size=4))
def test_tables_come_back_as_they_were(table: dict[str, object]) -> None:
    assert decode_table(encode_table(table)) == table


@pytest.mark.parametrize("kind", commands.INDEX_MAPPING.values(), ids=lambda kind: kind.name)
def test_methods_are_read_as_pamqp_writes_them(kind: type) -> None:
    values = {"shortstr": "ab", "longstr": "cd", "table": {"k": "v"}, "bit": True}
    made = kind()
    for name in made.__slots__:
        value = values.get(made.amqp_type(name), 3)
        if name in ("ticket", "reserved_1"):
            value = 0
        setattr(made, name, value)
    payload = encode_method(made)
    back = decode_method(payload)
    assert [getattr(back, name) for name in made.__slots__] == [
        getattr(made, name) for name in made.__slots__
    ]
    with pytest.raises(ConnectionException):
        decode_method(payload + b"\0")
    _used, _, other = frame.unmarshal(struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce")
    assert [getattr(other, name) for name in made.__slots__] == [
        getattr(made, name) for name in made.__slots__
    ]


def some(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(st.none(), strategy)


PROPERTIES = st.fixed_dictionaries(
    {
        "content_type": some(SHORT),
        "content_encoding": some(SHORT),
        "headers": some(st.dictionaries(SHORT, st.integers(-9, 9), max_size=3)),
        "delivery_mode": some(st.integers(1, 2)),
        "priority": some(st.integers(0, 255)),
        "correlation_id": some(SHORT),
        "reply_to": some(SHORT),
        "expiration": some(st.just("60000")),
        "message_id": some(SHORT),
        "timestamp": some(
            st.datetimes(
                min_value=datetime.datetime(1970, 1, 2), max_value=datetime.datetime(2100, 1, 1)
            )
        ),
        "message_type": some(SHORT),
        "user_id": some(SHORT),
        "app_id": some(SHORT),
    }
)


@given(st.lists(st.tuples(PROPERTIES, BODY), min_size=1, max_size=5), st.integers(0, 2**63))
def test_who_has_no_timestamp_gets_this_one_and_nothing_else_changes(
    messages: list[tuple[dict[str, object], bytes]], seconds: int
) -> None:
    buffer, table = b"", b""
    for number, (said, content) in enumerate(messages):
        line, props = b"\x01e\x01k\x00", commands.Basic.Properties(**said).marshal()
        at = len(buffer)
        rest = raw_frame(3, 1, content) if content else b""
        buffer += line + props + rest
        facts = frames.facts(props)
        body_at = at + len(line) + len(props)
        table += frames.row(
            at, len(line), number, at + len(line), len(props), body_at, len(content), facts
        )
    made = frames.stamped(buffer, table, seconds)
    before = [
        contents.read_stored(contents.stored(buffer, table, number))
        for number in range(len(messages))
    ]
    kept = [properties.read(props).timestamp is not None for _, _, props, _ in before]
    assert (made is None) == all(kept)
    for number, (exchange, key, props, content) in enumerate(before):
        after = contents.read_stored(contents.stored(*made, number)) if made else before[number]
        assert after[:2] + after[3:] == (exchange, key, content)
        old, new = properties.read(props), properties.read(after[2])
        assert new.timestamp == (old.timestamp if kept[number] else seconds)
        assert after[2] == props if kept[number] else len(after[2]) == len(props) + 8
        for name, _ in properties.PROPERTIES:
            assert name == "timestamp" or getattr(new, name) == getattr(old, name)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), PROPERTIES, BODY), min_size=1, max_size=6),
    st.dictionaries(st.integers(0, 3), st.binary(min_size=1, max_size=255)),
)
def test_who_asks_for_direct_replies_gets_its_channels_name_and_nothing_else_changes(
    messages: list[tuple[int, bool, dict[str, object], bytes]], names: dict[int, bytes]
) -> None:
    buffer, table = b"", b""
    for channel, asks, said, content in messages:
        more = {"reply_to": "amq.rabbitmq.reply-to"} if asks else {}
        line, props = b"\x01e\x01k\x00", commands.Basic.Properties(**(said | more)).marshal()
        at = len(buffer)
        buffer += line + props + (raw_frame(3, 1, content) if content else b"")
        body_at = at + len(line) + len(props)
        place = at, len(line), channel, at + len(line), len(props), body_at, len(content)
        table += frames.row(*place, frames.facts(props))
    assert frames.asking(table) == {channel for channel, asks, _, _ in messages if asks}
    made = frames.with_replies(buffer, table, names)
    assert frames.asking(made[1]) == {channel for channel, asks, _, _ in messages if asks} - set(
        names
    )
    for number, (channel, asks, _, _) in enumerate(messages):
        before = contents.read_stored(contents.stored(buffer, table, number))
        after = contents.read_stored(contents.stored(*made, number))
        wanted = before[2]
        if asks and channel in names:
            given_name = bytes([len(names[channel])]) + names[channel]
            wanted = before[2].replace(b"\x15amq.rabbitmq.reply-to", given_name)
            assert frames.facts(after[2]) == (
                *frames.facts(before[2])[:3],
                frames.facts(before[2])[3] ^ 16,
            )
        assert after == (*before[:2], wanted, before[3])


def test_a_name_that_is_no_short_string_is_not_put_in() -> None:
    props = commands.Basic.Properties(reply_to="amq.rabbitmq.reply-to").marshal()
    table = frames.row(0, 5, 1, 5, len(props), 0, 0, frames.facts(props))
    with pytest.raises(ValueError, match="short string"):
        frames.with_replies(b"\x01e\x01k\x00" + props, table, {1: b"x" * 256})


@given(st.binary(min_size=1, max_size=80))
def test_properties_that_are_none_stay_as_they_are(props: bytes) -> None:
    """Others refuse such properties.

    Here they must only not be read past their end.
    """
    buffer = b"\x01e\x01k\x00" + props
    table = frames.row(0, 5, 1, 5, len(props), 0, 0, frames.facts(props))
    made = frames.stamped(buffer, table, 7)
    try:
        broken, known = False, properties.read(props).timestamp is not None
    except ConnectionException:
        broken, known = True, False
    if made is not None and not broken:
        assert not known
        assert properties.read(contents.read_stored(contents.stored(*made, 0))[2]).timestamp == 7
    assert made is not None or broken or known
