"""The compiled loops do what the plain ones do, also where the input is broken."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands

from shardmq.broker.amqp import Publishes, contents, copies_by_channel, frames
from shardmq.shardd.wire.histogram import Histogram
from tests.amqp.bytes_of import method, publish
from tests.reference import frames as reference

SHORT = st.text(alphabet="abc", max_size=4)
CHANNEL = st.integers(0, 3)
FRAME_MAX = 400
MESSAGE_MAX = 300

PROPS = st.fixed_dictionaries(
    {},
    optional={
        "delivery_mode": st.integers(1, 2),
        "priority": st.integers(0, 9),
        "expiration": st.sampled_from(
            ["0", "60000", "4294967295", "4294967294", "99999999999", "x", ""]
        ),
        "headers": st.dictionaries(
            st.sampled_from(["CC", "BCC", "aCC", "b", "x-dead-letter-exchange"]),
            st.sampled_from(["x", 1]),
            max_size=2,
        ),
        "reply_to": st.sampled_from(["q", "amq.rabbitmq.reply-to", "amq.rabbitmq.reply-to.1"]),
        "user_id": SHORT,
        "message_type": SHORT,
    },
)
SETTLE = st.one_of(
    st.builds(commands.Basic.Ack, st.integers(0, 9), st.booleans()),
    st.builds(commands.Basic.Nack, st.integers(0, 9), st.booleans(), st.booleans()),
    st.builds(commands.Basic.Reject, st.integers(0, 9), st.booleans()),
)
PUBLISH = st.builds(
    lambda channel, exchange, key, body, part, props: b"".join(
        publish(channel, exchange, key, body, part, **props)
    ),
    CHANNEL,
    SHORT,
    SHORT,
    st.binary(max_size=MESSAGE_MAX + 5),
    st.integers(1, 120),
    PROPS,
)
SETTLES = st.builds(
    lambda channel, some: b"".join(method(channel, each) for each in some),
    CHANNEL,
    st.lists(SETTLE, max_size=6),
)
ANY = st.builds(lambda channel: method(channel, commands.Channel.Open()), CHANNEL)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Frames, as often as not with some bytes wrong, or cut off."""
    data = bytearray(
        b"".join(
            draw(
                st.lists(
                    st.one_of(PUBLISH, PUBLISH, SETTLES, ANY, st.binary(max_size=9)), max_size=6
                )
            )
        )
    )
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=2)
    ):
        if data:
            data[at % len(data)] = value
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


STATES = st.binary(max_size=4).map(lambda states: bytes(state & 1 for state in states))


@settings(max_examples=250, deadline=None)
@given(streams(), STATES | st.just(b"\1\1\1\1"), st.data())
def test_scan(data: bytes, states: bytes, more: st.DataObject) -> None:
    at = more.draw(st.integers(0, len(data)) | st.just(0))
    end = more.draw(st.integers(at, len(data)) | st.just(len(data)))
    *found, needed = frames.scan(data, at, end, states, FRAME_MAX, MESSAGE_MAX)
    *expected, expected_needed = reference.scan(data, at, end, states, FRAME_MAX, MESSAGE_MAX)
    assert found == expected
    if found[3] == frames.INCOMPLETE:
        assert needed == expected_needed > end - found[0]
    for index in range(found[2]):
        assert contents.stored(data, found[1], index) == reference.stored(data, found[1], index)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(PUBLISH, min_size=1, max_size=8).map(b"".join),
    st.sets(CHANNEL),
    st.integers(0, 8),
    st.booleans(),
)
def test_copies_are_the_publishes_of_their_channels(
    data: bytes, channels: set[int], first: int, is_stamped: bool
) -> None:
    _, table, count, _, _ = frames.scan(data, 0, len(data), b"\1\1\1\1", FRAME_MAX, 1000)
    if is_stamped:  # properties lie behind all that was read
        data, table = frames.stamped(data, table, 7) or (data, table)
    expected: dict[int, list[bytes]] = {}
    for index in range(first, count):
        number = reference.ROW.unpack_from(table, index * reference.ROW.size)[2]
        if number in channels:
            expected.setdefault(number, []).append(reference.stored(data, table, index))
    copies = copies_by_channel(Publishes(data, table, count), channels, first)
    found = {
        n: [contents.stored(c.buffer, c.table, index) for index in range(c.count)]
        for n, c in copies.items()
    }
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_messages_of_sampled_traces_and_those_chosen_are_marked(data: st.DataObject) -> None:
    trace = st.builds(
        lambda before, kind, size, said, behind: (
            before + b"\x0btraceparent" + kind + size.to_bytes(4, "big") + said + behind
        ),
        st.binary(max_size=9),
        st.sampled_from([b"S", b"x", b"l"]),
        st.sampled_from([54, 55, 55, 60, 1 << 31]),
        st.text("0123456789abcdefg-", min_size=50, max_size=56).map(str.encode),
        st.binary(max_size=9),
    )
    buffer, table = b"", b""
    lists = data.draw(st.lists(trace | st.binary(max_size=90) | st.just(b""), max_size=5))
    for props in lists:
        table += frames.row(len(buffer), 5, 1, len(buffer) + 5, len(props), 0, 0, (9, 1, 2, 1))
        buffer += b"\x01e\x01k\0" + props
        assert frames.is_traced(props) == reference.is_traced(props)
    assert frames.is_traced(buffer) == reference.is_traced(buffer)
    rows = st.integers(0, max(0, len(lists) - 1))
    chosen = data.draw(st.lists(rows, max_size=2 if lists else 0))
    expected = reference.marked(buffer, table, chosen, 77)
    assert frames.marked(buffer, table, chosen, 77) == expected


def test_a_message_that_is_not_there_cannot_be_marked() -> None:
    with pytest.raises(IndexError):
        frames.marked(b"", EMPTY, [1], 77)


def test_a_publish_too_large_to_wait_for_is_another_matter() -> None:
    whole = b"".join(publish(1, "", "q", bytes(100_000), 50_000))
    for cut in (40, 60, 20_000, 60_000, len(whole)):
        found = frames.scan(whole[:cut], 0, cut, b"\0\1", 131072, 1 << 20)
        expected = reference.scan(whole[:cut], 0, cut, b"\0\1", 131072, 1 << 20)
        assert found[:4] == expected[:4]


EMPTY = frames.row(0, 0, 1, 0, 0, 0, 0, (0, 0, 0, 0))
SIZES = (
    st.integers(0, 40) | st.integers(0, (1 << 64) - 1) | st.integers(0, 63).map(lambda k: 1 << k)
)


@given(st.lists(st.tuples(SIZES, st.integers(1, 3)), max_size=8))
def test_sizes_fall_into_the_classes_of_a_histogram(runs: list[tuple[int, int]]) -> None:
    sizes = [size for size, times in runs for _ in range(times)]
    expected = Histogram()
    for size in sizes:
        expected.add(size)
    rows = [EMPTY[:24] + struct.pack("<Q", size) + EMPTY[32:] for size in sizes]
    found = frames.Sizes()
    found.add(b"".join(rows[:5]))
    found.add(b"".join(rows[5:]))
    assert found.classes == expected.counts
    assert found.sum == expected.sum % (1 << 64)


def test_rows_are_bounded() -> None:
    data = b"".join(publish(1, "", "q")) * 2100
    found = frames.scan(data, 0, len(data), b"\0\1", 4096, 10)
    assert found[:4] == reference.scan(data, 0, len(data), b"\0\1", 4096, 10)[:4]
    assert found[2:4] == (2048, frames.FULL)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=40) | PROPS.map(lambda props: commands.Basic.Properties(**props).marshal())
)
def test_facts(props: bytes) -> None:
    found, expected = frames.facts(props), reference.facts(props)
    if expected[3] & frames.BAD_PROPERTIES:
        assert found[3] & frames.BAD_PROPERTIES
    else:
        assert found == expected


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=40) | PROPS.map(lambda props: commands.Basic.Properties(**props).marshal())
)
def test_fields(props: bytes) -> None:
    try:
        expected = reference.fields(props)
    except ValueError:
        with pytest.raises(ValueError):
            contents.fields(props)
    else:
        assert contents.fields(props) == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(SETTLES, SETTLES, SETTLES, streams()), max_size=4).map(b"".join))
def test_settles(data: bytes) -> None:
    assert frames.settles(data, 0, len(data)) == reference.settles(data, 0, len(data))


def test_ranges_are_bounded() -> None:
    data = b"".join(method(1, commands.Basic.Ack(2 * n)) for n in range(1, 5001))
    first = frames.settles(data, 0, len(data))
    rest = frames.settles(data, first[0], len(data))
    assert len(first[2]) <= 4097
    assert [tag for _, tag, _, _ in first[2] + rest[2]] == [2 * n for n in range(1, 5001)]


BIND = st.builds(
    lambda channel, queue, exchange, key, nowait, arguments: method(
        channel,
        commands.Queue.Bind(queue=queue, exchange=exchange, routing_key=key, nowait=nowait,
                            arguments=arguments),
    ),
    st.just(1) | CHANNEL, SHORT, SHORT, st.sampled_from(["k", "", "grüße"]), st.booleans(),
    st.sampled_from([{}, {"a": 1}]),
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(
    st.lists(BIND | streams(), max_size=8).map(b"".join),
    STATES | st.just(b"\0\1\1\1"),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=2),
    st.data(),
)
def test_binds(
    data: bytes, states: bytes, wrong: list[tuple[int, int]], more: st.DataObject
) -> None:
    broken = bytearray(data)
    for at, value in wrong:
        if data:
            broken[at % len(data)] = value
    end = more.draw(st.integers(0, len(data)) | st.just(len(data)))
    assert frames.binds(broken, 0, end, states) == reference.binds(bytes(broken), 0, end, states)


def test_a_run_of_binds_is_bounded_and_goes_on() -> None:
    data = b"".join(
        method(1, commands.Queue.Bind(queue="q", exchange="e", routing_key=str(n)))
        for n in range(600)
    )
    at, found = 0, []
    while at < len(data):
        at, _, some, _ = frames.binds(data, at, len(data), b"\0\1")
        assert 0 < len(some) <= 256
        found += some
    assert found == [("e", "q", str(n)) for n in range(600)]


STORED = st.builds(
    lambda exchange, key, props, body: struct.pack("<II", len(body), len(props))
    + bytes([len(exchange)]) + exchange + bytes([len(key)]) + key + props + body,
    st.binary(max_size=5), st.binary(max_size=255), st.binary(max_size=30), st.binary(max_size=200),
)  # fmt: skip
BLOB = st.lists(STORED, max_size=4).map(b"".join)
BROKEN = st.one_of(
    BLOB,
    st.binary(max_size=40),
    st.tuples(BLOB, st.integers(0, 300)).map(lambda it: it[0][: it[1]]),
)
NUMBERS = (
    st.integers(0, 65535),
    st.binary(max_size=255),
    st.integers(0, 2**63),
    st.booleans(),
    st.integers(9, 300),
)


@settings(max_examples=150, deadline=None)
@given(BROKEN, st.integers(0, 4), *NUMBERS)
def test_deliveries(
    blob: bytes, count: int, channel: int, ctag: bytes, tag: int, again: bool, frame_max: int
) -> None:
    arguments = (blob, count, channel, ctag, tag, again, frame_max)
    assert _or_error(contents.deliveries, *arguments) == _or_error(reference.deliveries, *arguments)
    assert _or_error(_in_parts, *arguments) == _or_error(reference.deliveries, *arguments)


@settings(max_examples=150, deadline=None)
@given(st.lists(PUBLISH, max_size=5).map(b"".join), st.data(), *NUMBERS[:3], NUMBERS[-1])
def test_publishes_are_passed_on_as_if_they_had_been_stored(
    data: bytes, more: st.DataObject, channel: int, ctag: bytes, tag: int, frame_max: int
) -> None:
    _, table, _, _, _ = frames.scan(data, 0, len(data), b"\1\1\1\1", FRAME_MAX, MESSAGE_MAX)
    rows = len(table) // reference.ROW.size
    first = more.draw(st.integers(0, rows))
    count = more.draw(st.integers(0, rows - first))
    arguments = (data, table, first, count, channel, ctag, tag, frame_max)
    assert contents.passed_on(*arguments) == reference.passed_on(*arguments)
    with pytest.raises(IndexError):
        contents.passed_on(data, table, first, rows - first + 1, channel, ctag, tag, frame_max)


def _in_parts(*arguments: Any) -> bytes:
    return b"".join(contents.delivery_parts(*arguments))


@settings(max_examples=150, deadline=None)
@given(
    BROKEN,
    st.integers(0, 65535),
    st.integers(0, 2**63),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    NUMBERS[-1],
)
def test_get_ok_and_read_stored(
    message: bytes, channel: int, tag: int, again: bool, remaining: int, frame_max: int
) -> None:
    arguments = (message, channel, tag, again, remaining, frame_max)
    assert _or_error(contents.get_ok, *arguments) == _or_error(reference.get_ok, *arguments)
    assert _or_error(contents.read_stored, message) == _or_error(reference.read_stored, message)


@settings(deadline=None)
@given(
    NUMBERS[0], st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=400), NUMBERS[-1]
)
def test_content(channel: int, said: bytes, props: bytes, body: bytes, frame_max: int) -> None:
    arguments = (channel, said, props, body, frame_max)
    assert contents.content(*arguments) == reference.content(*arguments)


def _or_error(function: object, *arguments: object) -> object:
    try:
        return function(*arguments)  # type: ignore[operator]
    except ValueError:
        return ValueError
