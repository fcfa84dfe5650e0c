"""A stored message gets its offset as a header, and all else stays as it was: pamqp reads it so."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import header
from pamqp.commands import Basic

from shardmq.broker.amqp import properties
from shardmq.broker.amqp.contents import numbered, split

NAME = b"x-stream-offset"
HEADERS: st.SearchStrategy[dict[str, Any] | None] = st.none() | st.dictionaries(
    st.sampled_from(["a", "b", "x-stream-offset", "x-stream-offset2"]),
    st.sampled_from([1, "text", "x-stream-offset", True, {"x-stream-offset": 1}, ["x"]]),
    max_size=3,
)
PROPERTIES = st.builds(
    Basic.Properties,
    headers=HEADERS,
    content_type=st.none() | st.sampled_from(["", "text/plain", "x" * 255]),
    content_encoding=st.none() | st.just("gzip"),
    message_id=st.none() | st.just("id"),
    delivery_mode=st.none() | st.just(2),
    cluster_id=st.just(""),
)


def stored(found: Basic.Properties, body: bytes) -> bytes:
    props = header.ContentHeader(body_size=0, properties=found).marshal()[12:]
    return struct.pack("<II", len(body), len(props)) + b"\x02ex\x01k" + props + body


def unpacked(props: bytes) -> Basic.Properties:
    made = header.ContentHeader()
    made.unmarshal(bytes(12) + props)
    return made.properties


@given(
    st.lists(st.tuples(PROPERTIES, st.binary(max_size=9)), max_size=5),
    st.integers(0, (1 << 63) - 10),
)
def test_each_message_says_its_offset_and_is_else_the_same(
    pairs: list[tuple[Any, bytes]], first: int
) -> None:
    blob = b"".join(stored(*pair) for pair in pairs)
    offsets = array("Q", range(first, first + len(pairs)))
    found = split(properties.with_offsets(blob, offsets.tobytes(), NAME), len(pairs))
    for (names, props, body), (expected, text), offset in zip(found, pairs, offsets, strict=True):
        assert (names, body) == (b"\x02ex\x01k", text)
        got = unpacked(props)
        assert got.headers == (expected.headers or {}) | {NAME.decode(): offset}
        expected.headers = got.headers
        # pamqp leaves out what is empty.
        assert {key: value or None for key, value in dict(got).items()} == {
            key: value or None for key, value in dict(expected).items()
        }


def test_a_header_of_that_name_is_there_once() -> None:
    blob = stored(Basic.Properties(headers={"x-stream-offset": 5}), b"")
    assert numbered(blob, array("Q", [7]).tobytes(), NAME) is None
    ((_, props, _),) = split(properties.with_offsets(blob, array("Q", [7]).tobytes(), NAME), 1)
    assert props.count(NAME) == 1


def test_a_message_that_is_cut_is_refused() -> None:
    blob = stored(Basic.Properties(headers={"a": 1}), b"body")
    for cut in range(len(blob)):
        with pytest.raises(ValueError):
            numbered(blob[:cut], array("Q", [7]).tobytes(), NAME)


@given(st.binary(max_size=40))
def test_broken_properties_are_refused_or_numbered_without_harm(props: bytes) -> None:
    blob = struct.pack("<II", 0, len(props)) + b"\0\0" + props
    try:
        numbered(blob, bytes(8), NAME)
    except ValueError as error:
        assert "properties" in str(error)
