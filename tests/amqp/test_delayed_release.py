"""Messages that have waited say so, lose nothing, and go together with those that are like them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.amqp.contents import released
from shardmq.broker.amqp.methods import decode_table
from tests.reference import delayed_release as reference

NUMBERS = {
    b"b": ">b",
    b"B": ">B",
    b"s": ">h",
    b"u": ">H",
    b"I": ">i",
    b"i": ">I",
    b"l": ">q",
    b"L": ">q",
}


def number(kind: bytes, value: int) -> bytes:
    return kind + struct.pack(NUMBERS[kind], value)


def integers() -> st.SearchStrategy[bytes]:
    def of(kind: bytes) -> st.SearchStrategy[bytes]:
        bits = 8 * struct.calcsize(NUMBERS[kind])
        signed = NUMBERS[kind][1].islower()
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        return st.integers(low, high).map(lambda value: number(kind, value))

    return st.sampled_from(sorted(NUMBERS)).flatmap(of)


TEXTS = st.text("0123456789", max_size=5).map(
    lambda text: b"S" + struct.pack(">I", len(text)) + text.encode()
)
OTHERS = st.sampled_from(
    [b"V", b"t\1", b"d" + struct.pack(">d", 2.5), b"D\1\0\0\0\x63", b"T" + bytes(8)]
)
DELAYS = st.one_of(integers(), TEXTS, OTHERS)
INNER = b"F" + struct.pack(">I", 10) + b"\x07x-delayt\0"  # in a table of its own it means nothing
MORE = st.lists(
    st.sampled_from(
        [b"\1a" + b"t\1", b"\1b" + INNER, b"\1c" + b"A" + struct.pack(">I", 2) + b"t\0"]
    ),
    max_size=2,
)
KEYS = st.sampled_from(
    [
        b"",
        b"\2CC" + b"A" + bytes(4),
        b"\3BCC" + b"A" + bytes(4),
        b"\x16x-dead-letter-exchange" + b"S" + bytes(4),
    ]
)


@st.composite
def messages(draw: Any) -> tuple[bytes, bytes | None]:
    """Draw a stored message and the value of its delay."""
    flags, props = 0, b""
    delay = draw(st.one_of(st.none(), DELAYS))
    if draw(st.booleans()):
        flags, props = flags | 1 << 15, b"\4text"
    if delay is not None or draw(st.booleans()):
        pairs = [b"\x07x-delay" + delay] if delay is not None else []
        inside = b"".join(draw(st.permutations([*pairs, *draw(MORE), draw(KEYS)])))
        flags, props = flags | 1 << 13, props + struct.pack(">I", len(inside)) + inside
    for bit, value in ((12, b"\2"), (11, b"\5"), (8, b"\x03" + b"600"), (6, bytes(8)), (2, b"\0")):
        if draw(st.integers(0, 3)) == 0:
            flags, props = flags | 1 << bit, props + value
    props = struct.pack(">H", flags) + props
    names, body = (
        draw(st.sampled_from([b"\1x\1k", b"\1x\1l", b"\0\0"])),
        draw(st.binary(max_size=5)),
    )
    return struct.pack("<II", len(body), len(props)) + names + props + body, delay


@settings(max_examples=150)
@given(st.lists(messages(), max_size=8))
def test_each_is_as_the_plain_rule_makes_it(some: list[tuple[bytes, bytes | None]]) -> None:
    delays = iter([delay for _, delay in some])
    blob = b"".join(message for message, _ in some)
    wanted = reference.released(blob, len(some), lambda props: next(delays))
    assert released(blob, len(some)) == wanted


@given(st.lists(messages(), min_size=1, max_size=3), st.data())
def test_broken_bytes_are_an_error_and_nothing_else(
    some: list[tuple[bytes, bytes | None]], data: Any
) -> None:
    blob = bytearray(b"".join(message for message, _ in some))
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(blob)))
    for each in (bytes(blob), bytes(blob[:cut])):
        try:
            out, runs = released(each, len(some))
        except ValueError:
            continue
        assert len(out) == len(each)
        assert sum(run[2] for run in runs) == len(some)


@pytest.mark.parametrize(
    ("said", "then"),
    [
        (number(b"I", 5000), -5000),
        (number(b"l", 1 << 40), -(1 << 40)),
        (number(b"B", 100), -100),
        (number(b"B", 200), 0),
        (number(b"I", -7), -7),
        (b"S" + struct.pack(">I", 3) + b"700", "000"),
    ],
)
def test_whoever_gets_it_sees_how_long_it_waited(said: bytes, then: Any) -> None:
    inside = b"\x07x-delay" + said
    props = struct.pack(">HI", 1 << 13, len(inside)) + inside
    out, _ = released(struct.pack("<II", 0, len(props)) + b"\0\0" + props, 1)
    assert decode_table(out[12:]) == {"x-delay": then}
