"""The compiled loops of bridges do what `tests/reference/relay.py` does, and fear no bytes."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable

import pytest

from shardmq.bridges.relay import Fault, Relay, Settled
from tests.reference import relay as reference
from tests.reference.relay import frame, short

HISTORIES = 400
FRAME_MAX = 4096
HEARTBEAT = frame(8, 0, b"")


def delivery(
    tag: int, exchange: bytes, key: bytes, props: bytes, body: bytes, step: int, again: bool = False
) -> bytes:
    names = short(b"ctag") + struct.pack(">QB", tag, again) + short(exchange) + short(key)
    made = frame(1, 1, struct.pack(">HH", 60, 60) + names)
    made += frame(2, 1, struct.pack(">HHQ", 60, 0, len(body)) + props)
    return made + b"".join(frame(3, 1, body[at : at + step]) for at in range(0, len(body), step))


def random_deliveries(chance: random.Random, count: int) -> bytes:
    data = b""
    for tag in range(1, count + 1):
        props = chance.choice([b"\0\0", b"\x10\0\2", b"\x80\0" + short(b"text/plain")])
        body = chance.randbytes(chance.choice([0, 1, 16, 700, 5000]))
        name = chance.choice([b"", b"e", b"x" * 255])
        key = b"k" * chance.choice([0, 1, chance.randrange(255)])
        data += delivery(tag, name, key, props, body, 4000, chance.random() < 0.3)
        if chance.random() < 0.1:
            data += HEARTBEAT
    return data


def edit(props: bytes) -> bytes:
    return b"\x20\0\0\0\0\0" if props == b"\0\0" else props


def edit_by_names(props: bytes, names: bytes) -> bytes:
    return b"\x20\0" + struct.pack(">I", len(names)) + names if props == b"\0\0" else props


def edit_or_drop(props: bytes, told: bytes) -> bytes | None:
    """Drop a kind of messages, and edit another one unless it was redelivered."""
    if props.startswith(b"\x80"):
        return None
    return b"\x20\0\0\0\0\0" if props == b"\0\0" and told == b"\0" else props


def test_any_deliveries_cut_anywhere_are_the_publishes_of_the_reference(
    pytestconfig: pytest.Config,
) -> None:
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        data = random_deliveries(chance, chance.randrange(12)) + chance.choice(
            [b"", frame(1, 1, struct.pack(">HH", 60, 30) + short(b"ctag") + b"\0"),
             frame(1, 0, struct.pack(">HH", 10, 60) + short(b"low on memory"))]
        )  # fmt: skip
        given = (
            chance.choice([None, b"", b"to"]), chance.choice([None, b"q" * 200]),
            chance.random() < 0.5, chance.choice([None, edit]),
        )  # fmt: skip
        limit = chance.choice([-1, -1, 0, 3])
        with_names = chance.random() < 0.5
        may_drop = chance.random() < 0.3
        if may_drop:
            given = (*given[:3], edit_or_drop)
        elif with_names and given[3] is not None:
            given = (*given[:3], edit_by_names)
        relay = Relay(*given, FRAME_MAX, limit, with_names, may_drop)
        unread, out, taken, dropped = b"", b"", 0, []
        while taken < len(data):
            more = data[taken : taken + chance.choice([1, 7, 100, 10_000])]
            taken += len(more)
            unread += more
            at, made = relay.feed(unread, 0)
            out, unread = out + made, unread[at:]
            if chance.random() < 0.5:
                dropped += relay.take_dropped()
        at, expected, published, of = reference.relayed(data, *given, limit, with_names, may_drop)
        assert (out, len(data) - len(unread)) == (expected, at), history
        assert (relay.published, relay.dropped) == (published, len(of))
        assert relay.passed == relay.begun == published + len(of)
        assert dropped + relay.take_dropped() == of and relay.take_dropped() == []


@pytest.mark.row("J8")
@pytest.mark.parametrize("edits", [None, edit])
def test_the_first_message_of_a_size_that_none_before_had_is_named(
    pytestconfig: pytest.Config, edits: Callable[[bytes], bytes] | None
) -> None:
    chance = random.Random(pytestconfig.option.seed)
    sizes = [chance.randrange(60) for _ in range(50)]
    relay, data = Relay(None, None, False, edits, FRAME_MAX), b""
    for tag, size in enumerate(sizes, 1):
        data += delivery(tag, b"e", b"k%d" % tag, b"\0\0", bytes(size), 4000)
    while data:
        at, _ = relay.feed(data[: chance.randrange(1, 500)], 0)
        data = data[at:]
    for size in range(61):
        before = sizes[: sizes.index(size)] if size in sizes else [size]
        expected = ""
        if size > max(before, default=0):
            tag = len(before) + 1
            expected = f"message {tag} with the routing key 'k{tag}' and {size} bytes"
        assert relay.first_of(size) == expected, (size, sizes)


def test_of_many_messages_that_are_each_larger_the_last_thousand_are_known() -> None:
    relay = Relay(None, None, False, None, FRAME_MAX)
    for tag in range(1, 1003):
        relay.feed(delivery(tag, b"", b"k", b"\0\0", bytes(tag), 4000), 0)
    assert [bool(relay.first_of(tag)) for tag in (2, 3, 1002, 1003)] == [False, True, True, False]


@pytest.mark.parametrize(
    "data",
    [
        frame(1, 1, struct.pack(">HH", 60, 60)),
        frame(1, 1, struct.pack(">HH", 60, 60) + b"\xff" * 20),
        delivery(2, b"", b"", b"\0\0", b"", 1),  # not the next number
        frame(2, 1, bytes(14)),
        frame(3, 1, b"a"),
        frame(4, 1, b""),
        frame(1, 2, b""),
        frame(1, 1, b"abc"),
        struct.pack(">BHI", 1, 1, 100 << 20) + b"a",
        delivery(1, b"", b"", b"\0\0", b"", 1)[:-1] + b"x",
        delivery(1, b"", b"", b"\0\0", b"abc", 3) + frame(3, 1, b"d"),
        delivery(1, b"", b"", b"\0\0", b"abc", 3)[:-11] + delivery(2, b"", b"", b"\0\0", b"", 1),
    ],
)
def test_what_a_broker_would_not_send_is_a_fault(data: bytes) -> None:
    with pytest.raises(Fault):
        Relay(None, None, False, None, FRAME_MAX).feed(data, 0)


@pytest.mark.row("J8")
@pytest.mark.parametrize("cut", [1, 7, 100_000])
@pytest.mark.parametrize("room", [0, 1])
def test_a_message_that_fits_into_no_frame_is_named_and_those_before_it_are_published(
    room: int, cut: int
) -> None:
    """With `room` the edited properties of the second message are as large as a frame allows."""
    most = FRAME_MAX - 8 - 12
    large = b"\x20\0" + struct.pack(">I", most - 6 + 1 - room) + bytes(most - 6 + 1 - room)
    relay = Relay(
        None, b"q", False, lambda props: large if props == b"\x10\0\2" else props, FRAME_MAX
    )
    before = delivery(1, b"e", b"k", b"\0\0", b"abc", 9)
    data = before + delivery(2, b"e", "schlüssel".encode(), b"\x10\0\2", b"abcde", 9)
    data += delivery(3, b"e", b"k", b"\0\0", b"", 9)
    unread, out = b"", b""
    for start in range(0, len(data), cut):
        unread += data[start : start + cut]
        at, made = relay.feed(unread, 0)
        out, unread = out + made, unread[at:]
    expected = reference.relayed(before, None, b"q", False, None)[1]
    if room:
        assert (relay.unfit, relay.published, unread) == ("", 3, b"")
        assert out.startswith(expected) and large in out
        return
    assert relay.unfit == (
        "message 2 with the routing key 'schlüssel' and 5 bytes does not fit: with what is added, "
        f"its properties have {most + 1} bytes, and a frame has room for {most}"
    )
    assert (relay.begun, relay.published) == (2, 1)
    # The method of the second publish may be there. Its content never comes.
    method = frame(1, 1, struct.pack(">HHH", 60, 40, 0) + short(b"e") + short(b"q") + b"\0")
    assert out == expected + method
    assert unread.startswith(frame(2, 1, struct.pack(">HHQ", 60, 0, 5) + b"\x10\0\2"))


def test_no_bytes_are_read_or_written_outside(pytestconfig: pytest.Config) -> None:
    for history in range(4 * HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        data = bytearray(random_deliveries(chance, 3))
        for _ in range(chance.randrange(1, 5)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        by_names, drops = chance.random() < 0.5, chance.random() < 0.3
        edits = edit_or_drop if drops else edit_by_names if by_names else edit
        relay = Relay(None, b"k", True, edits, FRAME_MAX, -1, by_names, drops)
        confirms = Settled()
        with contextlib.suppress(Fault):
            relay.feed(bytes(data), 0)
        with contextlib.suppress(Fault):
            confirms.feed(bytes(data), 0, 3)


def confirm(tag: int, multiple: bool, is_nack: bool = False) -> bytes:
    return frame(1, 1, struct.pack(">HHQB", 60, 120 if is_nack else 80, tag, multiple))


def test_confirms_and_nacks_in_any_order_are_settled_up_to_the_first_gap(
    pytestconfig: pytest.Config,
) -> None:
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        kept = chance.choice([1.0, 1.0, 0.7, 0.1])
        deliveries = [chance.random() < kept for _ in range(chance.choice([1, 30, 200]))]
        confirms, seen, settled, refused = [], 0, Settled(), []
        for number, is_published in enumerate(deliveries, 1):
            if not is_published:
                settled.skip(number)
            seen, data = seen + is_published, b""
            while seen and chance.random() < 0.5:
                multiple = chance.random() < 0.1
                tag = chance.randrange(0 if multiple else 1, seen + 1)
                if chance.random() < 0.5:
                    tag = max(tag, seen - 5)
                confirms.append((tag or seen, multiple, chance.random() < 0.2))
                data += confirm(tag, *confirms[-1][1:])
            at = settled.feed(data[: chance.randrange(len(data) + 1)], 0, seen)
            assert settled.feed(data, at, seen) == len(data)
            if chance.random() < 0.2 or number == len(deliveries):
                refused += settled.take_refused()
                expected = reference.settled(confirms, deliveries[:number])
                assert (settled.low, refused, settled.skipped) == expected, (history, number)
                assert settled.take_refused() == []


def test_a_delivery_is_dropped_once_and_in_order() -> None:
    settled = Settled()
    settled.skip(1)
    settled.skip(4)
    assert (settled.low, settled.skipped) == (1, 1)
    for number in (0, 1, 3, 4):
        with pytest.raises(ValueError):
            settled.skip(number)


@pytest.mark.parametrize("is_nack", [False, True])
def test_a_confirm_of_what_was_not_published_is_a_fault(is_nack: bool) -> None:
    for tag in (0, 4):
        with pytest.raises(Fault):
            Settled().feed(confirm(tag, False, is_nack), 0, 3)
