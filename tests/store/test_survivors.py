"""The rest of a segment is copied as the plain reference copies it.

Every moved message is found again.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.format.record import (
    Survivors,
    moved_again,
    moved_entries,
    moved_pairs,
    scan,
)
from tests.reference.record import Record, decode_record, encode_message
from tests.reference.survivors import survivors

HEADER_BYTES = 64
SALT = 0x5A175A17

records = st.builds(
    Record,
    queues=st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True).map(tuple),
    messages=st.lists(st.binary(max_size=60).map(encode_message), min_size=1, max_size=6).map(
        tuple
    ),
    timestamp=st.integers(0, 2),
    ttl_ms=st.sampled_from([0xFFFFFFFF, 0xFFFFFFFF, 1000]),
    priority=st.sampled_from([255, 255, 3]),
    flags=st.sampled_from([0, 1, 0xFE, 0xFF]),
)


@st.composite
def segments(draw: st.DrawFn) -> tuple[bytes, set[tuple[int, int]], int, set[int] | None]:
    """Draw the bytes of a segment, the settled messages, and the known queues.

    Draw also the position up to which nothing is needed.
    """
    data = bytes(HEADER_BYTES) + b"".join(
        record.encode() for record in draw(st.lists(records, max_size=12))
    )
    settled, at = set(), HEADER_BYTES
    while (found := decode_record(data, at)) is not None:
        record, offsets, at = found
        settled |= {
            (queue, offset) for queue in record.queues for offset in offsets if draw(st.booleans())
        }
    dead_until = draw(st.sampled_from([0, 0, 0, 200]))
    known = draw(st.none() | st.sets(st.integers(1, 5)))
    return data, settled, dead_until, known


def pairs_of(pairs: set[tuple[int, int]]) -> bytes:
    return array("Q", [queue << 32 | position for queue, position in pairs]).tobytes()


@settings(max_examples=100, deadline=None)
@given(st.lists(segments(), min_size=1, max_size=3))
def test_the_survivors_of_segments_are_copied_as_the_plain_reference_does(
    all_of_them: list[tuple[bytes, set[tuple[int, int]], int, set[int] | None]],
) -> None:
    one = Survivors(9, SALT, HEADER_BYTES)
    expected = b""
    messages = references = count = 0
    for number, (data, settled, dead_until, known) in enumerate(all_of_them, 1):
        left, moves = survivors(
            data, HEADER_BYTES, settled, dead_until, known, HEADER_BYTES + len(expected)
        )
        expected += b"".join(record.encode(SALT) for record in left)
        count += len(left)
        messages += sum(len(record.messages) for record in left)
        references += sum(len(record.messages) * len(record.queues) for record in left)
        buffer = bytearray(data)
        abstracts, end, holes = scan(buffer, HEADER_BYTES, len(buffer), 0)
        assert end == len(data) and not holes
        ids = None if known is None else array("I", sorted(known))
        known_entries, placed = one.add(
            buffer, abstracts, number, pairs_of(settled), dead_until, ids
        )
        assert list(known_entries) == [number << 32 | old << 4 for old, _ in moves]
        assert list(placed) == [9 << 32 | new << 4 for _, new in moves]
    assert (one.records, one.messages, one.references) == (count, messages, references)
    assert one.size == HEADER_BYTES + len(expected)
    assert one.take() == bytes(HEADER_BYTES) + expected


def test_records_made_anew_are_bounded_in_messages_and_bytes() -> None:
    many = Record((1,), (encode_message(b""),) * 1000).encode()
    big = Record((1,), (encode_message(b"x" * 400_000),) * 6).encode()
    for data in (bytes(HEADER_BYTES) + many, bytes(HEADER_BYTES) + big):
        one = Survivors(9, 0, HEADER_BYTES)
        left, _ = survivors(data, HEADER_BYTES, (), 0, None, HEADER_BYTES)
        one.add(
            bytearray(data), scan(bytearray(data), HEADER_BYTES, len(data), 0)[0], 1, b"", 0, None
        )
        assert one.take()[HEADER_BYTES:] == b"".join(record.encode() for record in left)
        assert max(len(record.messages) for record in left) <= 256


def test_abstracts_of_other_bytes_are_refused() -> None:
    data = bytearray(bytes(HEADER_BYTES) + Record((1,), (encode_message(b"x" * 50),)).encode())
    abstracts, _, _ = scan(data, HEADER_BYTES, len(data), 0)
    for wrong, said in ((data[:100], abstracts), (data, abstracts[:-1]), (data, abstracts + b"?")):
        with pytest.raises(ValueError):
            Survivors(9, 0, HEADER_BYTES).add(wrong, said, 1, b"", 0, None)


numbers = st.sets(st.integers(1, 1 << 40).map(lambda n: n << 4), max_size=40)


@settings(deadline=None)
@given(numbers)
def test_moved_messages_are_found_with_their_flags_and_no_others(found: set[int]) -> None:
    known = array("Q", sorted(found))
    placed = array("Q", [entry + 16 for entry in known])
    wanted = array("Q", [entry | entry >> 4 & 15 for entry in known][::2])
    assert list(moved_entries(known, placed, wanted, 0, len(wanted))) == [
        entry + 16 for entry in wanted
    ]
    with pytest.raises(KeyError):
        moved_entries(known, placed, array("Q", [8 << 60]), 0, 1)


@settings(deadline=None)
@given(st.sets(st.integers(1, 300)), st.sets(st.tuples(st.integers(1, 9), st.integers(1, 300))))
def test_pairs_follow_their_messages(left: set[int], pairs: set[tuple[int, int]]) -> None:
    known = array("Q", [7 << 32 | position << 4 for position in sorted(left)])
    placed = array("Q", [9 << 32 | (position + 1000) << 4 for position in sorted(left)])
    expected = {queue << 32 | position + 1000 for queue, position in pairs if position in left}
    assert set(array("Q", moved_pairs(known, placed, 7, pairs_of(pairs)))) == expected
    assert not moved_pairs(known, placed, 8, pairs_of(pairs))


@settings(deadline=None)
@given(numbers, numbers, numbers)
def test_what_was_moved_twice_is_known_by_its_first_entry(
    both: set[int], first: set[int], second: set[int]
) -> None:
    once = sorted(both | first)
    again = sorted(entry + 16 for entry in both | second)
    result = moved_again(
        array("Q", once),
        array("Q", [entry + 16 for entry in once]),
        array("Q", again),
        array("Q", [entry + 32 for entry in again]),
    )
    expected = [entry for entry in once if entry + 16 in again]
    assert [list(part) for part in result] == [expected, [entry + 48 for entry in expected]]
