"""The compiled loops over chunks do what tests/reference does, on good and broken bytes."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.format import chunk
from tests.reference import chunk as reference
from tests.reference.chunk import Chunk
from tests.reference.record import Record, encode_message, split_messages

bodies = st.binary(max_size=40) | st.integers(30_000, 140_000).map(bytes)
messages = st.builds(
    encode_message, bodies, st.binary(max_size=5), st.binary(max_size=5), st.binary(max_size=6)
)
records = st.builds(
    Record,
    st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True).map(tuple),
    st.lists(messages, min_size=1, max_size=5).map(tuple),
    st.integers(0, 1 << 41),
    flags=st.sampled_from([0, 1, 1, 1, 3]),
)
batches = st.lists(records, min_size=1, max_size=8)


def packed(
    batch: list[Record], offset: int, filters: list[int] | None = None
) -> tuple[bytearray, array[int]]:
    wire = b"".join(record.encode() for record in batch)
    return chunk.Packer().pack(wire, offset, array("I", filters) if filters is not None else None)


def sealed(chunks: list[Chunk], salt: int) -> bytes:
    return b"".join(one.encode(salt) for one in chunks)


def small(numbers: list[int], offset: int = 0, mark: int = 0) -> list[Chunk]:
    """Chunks with that many messages each."""
    made = []
    for number in numbers:
        texts = tuple(encode_message(b"%d" % (offset + i)) for i in range(number))
        made.append(Chunk(offset, texts, 1000 + offset, (), mark))
        offset += number
    return made


@settings(max_examples=150, deadline=None)
@given(
    batches, st.integers(0, 1 << 60), st.integers(0, 0xFFFFFFFF), st.integers(0, 1 << 31), st.data()
)
def test_a_batch_becomes_chunks_of_consecutive_messages(
    batch: list[Record], offset: int, salt: int, mark: int, data: st.DataObject
) -> None:
    count = sum(len(record.messages) for record in batch)
    filters = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=count, max_size=count))
    chunks, rows = packed(batch, offset, filters)
    expected = reference.make_chunks(batch, offset, filters)
    starts = [0]
    for one in expected:
        starts.append(starts[-1] + len(one.encode()))
    assert list(rows[::3]) == starts[:-1] and starts[-1] == len(chunks)
    assert list(rows[1::3]) == [one.offset for one in expected]
    assert list(rows[2::3]) == [one.timestamp for one in expected]
    chunk.seal(chunks, 0, len(chunks), salt, mark // 8 * 8)
    marked = [
        Chunk(one.offset, one.messages, one.timestamp, one.filters, mark // 8 * 8, one.in_sequence)
        for one in expected
    ]
    assert bytes(chunks) == sealed(marked, salt)


def test_with_too_many_filter_values_a_chunk_may_have_any() -> None:
    record = Record((1,), tuple(encode_message(b"") for _ in range(2000)))
    for distinct in (1, 2, chunk.FILTERS_MAX, chunk.FILTERS_MAX + 1):
        filters = [5 + i % distinct for i in range(2000)]
        chunks, _ = packed([record], 0, filters)
        found = reference.decode_chunk(sealed_in_place(chunks), 0)
        assert found is not None
        assert found[0].filters == (
            tuple(range(5, 5 + distinct)) if distinct <= chunk.FILTERS_MAX else (chunk.ANY,)
        )


def sealed_in_place(chunks: bytearray) -> bytes:
    chunk.seal(chunks, 0, len(chunks), 0, 0)
    return bytes(chunks)


@given(records, st.data())
def test_a_batch_that_is_not_whole_and_true_is_refused(record: Record, data: st.DataObject) -> None:
    wire = bytearray(record.encode())
    wire[data.draw(st.integers(0, len(wire) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="of the batch"):
        chunk.Packer().pack(wire, 0)
    with pytest.raises(ValueError, match="filters"):
        chunk.Packer().pack(record.encode(), 0, array("I", [1] * (len(record.messages) + 1)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 0xFFFFFFFF), st.data())
def test_a_read_gives_the_messages_that_fit_and_says_where_to_go_on(
    numbers: list[int], salt: int, data: st.DataObject
) -> None:
    made = small(numbers, 7)
    everything = [message for one in made for message in one.messages]
    end = 7 + len(everything)
    window = bytearray(64 + len(sealed(made, salt)))
    window[64:] = sealed(made, salt)
    used = data.draw(st.integers(64, len(window)))
    offset, limit = data.draw(st.integers(0, end + 1)), data.draw(st.integers(7, end))
    bytes_max, at_least_one = data.draw(st.integers(0, 100)), data.draw(st.booleans())
    copier = chunk.Copier()
    blob, sizes, runs = copier.copy(
        window, 0, used, 64, 0, salt, offset, limit, bytes_max, at_least_one, None
    )
    got = split_messages(blob)
    begin = max(offset, 7)
    assert got == everything[begin - 7 : begin - 7 + len(got)]
    assert list(sizes) == [int.from_bytes(message[:4], "little") for message in got]
    assert list(runs) == ([begin, len(got)] if got else [])
    assert len(blob) <= bytes_max or (at_least_one and len(got) == 1)
    assert not copier.damaged
    if copier.full:
        assert len(blob) + len(everything[max(copier.offset, 7) - 7]) > bytes_max
    if copier.need:
        assert used < len(window) and copier.position + copier.need > used
    # Going on from there, with all that is needed, the rest comes out.
    rest, _, _ = copier.copy(
        window,
        0,
        len(window),
        copier.position,
        0,
        salt,
        max(copier.offset, offset),
        1 << 60,
        1 << 20,
        True,
        None,
    )
    assert got + split_messages(rest) == everything[begin - 7 :]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_a_scan_finds_every_good_chunk_whatever_the_windows_and_what_is_broken(
    numbers: list[int], data: st.DataObject
) -> None:
    salt = data.draw(st.integers(0, 0xFFFFFFFF))
    made = small(numbers, 3, mark=data.draw(st.integers(0, 100)) * 8)
    file = bytearray(sealed(made, salt) + bytes(data.draw(st.sampled_from([0, 8, 40, 200]))))
    for _ in range(data.draw(st.integers(0, 3))):
        file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        del file[data.draw(st.integers(0, len(file))) :]
    expected, end, holes = reference.contents(bytes(file), 0, len(file), salt, 3)
    scanner = chunk.Scanner(salt, 0, 3, 0, 1 << 60, 1)
    while True:
        size = max(scanner.need, data.draw(st.integers(1, 300)))
        window = bytearray(file[scanner.cursor : scanner.cursor + size])
        last = scanner.cursor + len(window) >= len(file)
        scanner.feed(window, len(window), last)
        if last:
            break
    assert scanner.end == end
    assert [(start, stop) for start, stop, _ in scanner.holes] == holes
    assert list(scanner.index()[::3]) == [one.offset for one in expected]
    if expected:
        assert scanner.offset == expected[-1].offset + len(expected[-1].messages)
        assert (
            scanner.last_chunk == expected[-1].offset
            and scanner.timestamp == expected[-1].timestamp
        )
        assert scanner.mark == max(one.mark for one in expected)
    assert end <= max(scanner.dirt, end) <= len(file)
    assert not any(file[max(scanner.dirt, end) :]), (
        "all that is not zero behind the last good chunk is dirt"
    )
    if holes:
        scanner.cut(0)
        kept = [one for one in expected if one.offset < scanner.offset]
        assert scanner.end == holes[0][0] and list(scanner.index()[::3]) == [
            one.offset for one in kept
        ]


@given(st.binary(max_size=200), st.integers(0, 0xFFFFFFFF))
def test_any_bytes_are_chunks_or_not_and_nothing_worse(data: bytes, salt: int) -> None:
    length, _, _, _ = chunk.chunk_at(bytearray(data), 0, len(data), 0, salt)
    found = reference.decode_chunk(data, 0, salt)
    assert length == (found[1] if found is not None else 0)
    scanner = chunk.Scanner(salt, 0, 0, 0, 1 << 60, 1)
    scanner.feed(bytearray(data), len(data), True)
    assert scanner.end <= len(data)
