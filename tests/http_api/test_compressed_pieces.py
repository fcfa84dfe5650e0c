"""CompressedPieces are the bytes they were made of: together as one gzip file, and one by one."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.management.responses import compressed_pieces
from shardmq.broker.controller.management.responses.compressed_pieces import (
    GZIP_HEAD,
    CompressedPieces,
    unpacked,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=20), st.integers(1, 150))
def test_pieces_are_what_was_added(added: list[bytes], piece_bytes: int) -> None:
    expected = b"".join(added)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compressed_pieces, "PIECE_BYTES", piece_bytes)
        made = CompressedPieces()
        for data in added:
            made.add(data)
        made.end()
    assert made.bytes_made == len(expected)
    if len(expected) <= piece_bytes:
        assert made.whole == expected and not made.packed
        return
    assert made.whole is None
    assert [len(unpacked(piece)) for piece in made.packed[:-1]] == [piece_bytes] * (
        len(made.packed) - 1
    )
    assert b"".join(unpacked(piece) for piece in made.packed) == expected
    assert gzip.decompress(GZIP_HEAD + b"".join(made.packed) + made.gzip_tail()) == expected
    assert made.bytes_held == sum(map(len, made.packed))


def test_a_list_takes_a_tenth_of_its_bytes() -> None:
    row = b'{"name":"queue-%05d","vhost":"/","durable":true,"messages":%d,"state":"running"},'
    made = CompressedPieces()
    for number in range(10_000):
        made.add(row % (number, number % 7))
    made.end()
    assert made.bytes_held * 10 < made.bytes_made


@pytest.mark.parametrize("size", [10, 3 * compressed_pieces.PIECE_BYTES])
@pytest.mark.parametrize("is_ended", [True, False])
def test_cleared_pieces_hold_nothing(size: int, is_ended: bool) -> None:
    made = CompressedPieces()
    made.add(b"x" * size)
    if is_ended:
        made.end()
    made.clear()
    assert (made.packed, made.whole, made._open, made._deflate, made.bytes_held) == (
        [],
        None,
        b"",
        None,
        0,
    )
