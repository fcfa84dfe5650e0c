"""The compiled reading of a batch for a stream finds what the plain reference finds."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import header
from pamqp.commands import Basic

from shardmq.shardd.store.format import chunk
from shardmq.shardd.store.streams import filter_of
from tests.reference import intake as reference
from tests.reference.record import Record, encode_message, split_messages

VALUES = st.sampled_from(["north", "south", "", "\u00fc"])
TABLES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "a": st.sampled_from(
            [1, -1, True, "text", bytearray(b"x"), 1.5, None, ["x", 2], {"x": {"y": "z"}}]
        ),
        "x-stream-filter-value": VALUES | st.sampled_from([7, ["north"]]),
        "x-stream-filter-valu": VALUES,
        "z": VALUES,
        "text": st.just("\x15x-stream-filter-valueS"),
    },
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    properties = Basic.Properties(
        headers=draw(st.none() | TABLES),
        content_type=draw(st.none() | st.just("text/plain")),
        content_encoding=draw(st.none() | st.just("gzip")),
        message_id=draw(st.none() | st.just("id")),
    )
    props = header.ContentHeader(body_size=0, properties=properties).marshal()[12:]
    return encode_message(draw(st.binary(max_size=20)), b"ex", draw(st.binary(max_size=3)), props)


records = st.lists(
    st.builds(
        Record,
        queues=st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True).map(tuple),
        messages=st.lists(messages(), min_size=1, max_size=5).map(tuple),
    ),
    max_size=6,
).map(lambda found: b"".join(record.encode() for record in found))


@given(records, st.integers(1, 5))
def test_a_stream_gets_the_records_that_name_it(data: bytes, queue_id: int) -> None:
    assert chunk.records_of(data, queue_id) == reference.records_of(data, queue_id)


@given(records)
def test_filter_values_are_those_of_the_headers(data: bytes) -> None:
    found = chunk.filters_of(data)
    assert (None if found is None else list(found)) == reference.filters_of(data)


@given(
    st.lists(messages(), max_size=10),
    st.lists(VALUES.map(str.encode).map(filter_of) | st.just(0), max_size=3),
)
def test_only_messages_that_are_wanted_are_selected(blobs: list[bytes], wanted: list[int]) -> None:
    offsets, sizes = array("Q", range(5, 5 + len(blobs))), array("I", range(len(blobs)))
    blob, some, some_sizes = chunk.select(b"".join(blobs), offsets, sizes, array("I", wanted))
    assert list(zip(some, split_messages(blob), strict=True)) == reference.select(
        b"".join(blobs), list(offsets), wanted
    )
    assert [size + 5 for size in some_sizes] == list(some)


def test_a_batch_that_is_cut_is_refused() -> None:
    data = Record((1,), (encode_message(b"x"),)).encode()
    for cut in range(1, len(data)):
        with pytest.raises(ValueError):
            chunk.records_of(data[:cut], 1)


@given(st.binary(max_size=60))
def test_broken_properties_say_nothing_and_do_no_harm(props: bytes) -> None:
    data = Record(
        (1,),
        (encode_message(b"x", props=b"\x20\0" + b"\0\0\0\x30\x15x-stream-filter-value" + props),),
    ).encode()
    found = chunk.filters_of(data)
    assert found is not None and len(found) == 1
