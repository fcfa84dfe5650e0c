"""The compiled loops do what the plain Python in tests/reference does, also on broken bytes."""

from __future__ import annotations

import random
import re
from array import array
from pathlib import Path
from typing import Any

import crc32c as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.format import record
from tests.reference.record import (
    NONE,
    Record,
    decode_record,
    encode_message,
    queues_of_pairs,
    split_messages,
)

bodies = st.binary(max_size=40)
messages = st.builds(
    encode_message, bodies, st.binary(max_size=5), st.binary(max_size=5), st.binary(max_size=6)
)
records = st.builds(
    Record,
    st.lists(st.integers(0, 6) | st.just(0xFFFFFFFF), min_size=1, max_size=5, unique=True).map(
        tuple
    ),
    st.lists(messages, min_size=1, max_size=5).map(tuple),
    st.integers(0, 1 << 41),
    st.sampled_from([NONE, 0, 5, 0xFFFFFFFE]),
    st.sampled_from([255, 0, 7]),
)
# Of messages that wait at an exchange: the whole of 64 bits says when they are due.
waiting = st.builds(
    Record,
    st.lists(st.integers(0, 6), min_size=1, max_size=1).map(tuple),
    st.lists(messages, min_size=1, max_size=2).map(tuple),
    st.integers(0, (1 << 64) - 1),
    st.just(0),
    st.just(255),
)
records = records | waiting


SHARDD = Path(__file__).resolve().parents[2] / "shardd"


def test_the_flags_of_a_record_are_those_of_the_table_wherever_they_are_named() -> None:
    readme = (SHARDD / "store/format/README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", readme, re.MULTILINE)
    table = {name: int(bit) for bit, name in rows}
    packer = (SHARDD / "wire/packer.pxi").read_text()
    drawing = re.search(r"^ +27 u8 (.*?)^ +28 u32", packer, re.DOTALL | re.MULTILINE)
    assert drawing is not None
    drawn = {name: int(bit) for bit, name in re.findall(r"(\d+) = (\w+)", drawing[1])}
    assert drawn == table, "name each flag in wire/packer.pxi and in store/format/README.md"
    sources = [
        path for suffix in ("py", "pyx", "pxi", "pxd") for path in SHARDD.rglob(f"*.{suffix}")
    ]
    for name, bit in table.items():
        named = {
            path.name: int(found)
            for path in sources
            for found in re.findall(rf"^ *{name} = (\d+)", path.read_text(), re.MULTILINE)
        }
        assert set(named.values()) == {bit}, f"{name} is {bit} in store/format/README.md, {named}"


def assert_crc32c(data: bytes, before: int = 0) -> None:
    """By each of the ways, whichever this processor takes."""
    right = oracle.crc32c(data, before)
    for way in (record.crc32c, record.crc32c_narrow, record.crc32c_tables):
        assert way(data, before) == right


@given(st.binary(max_size=1200), st.integers(0, 0xFFFFFFFF))
def test_crc32c_is_the_one_everybody_knows(data: bytes, before: int) -> None:
    assert_crc32c(data, before)


def test_crc32c_of_long_data_at_every_alignment() -> None:
    data = random.Random(1).randbytes(40_000)
    for start in range(9):
        for size in (
            0,
            1,
            255,
            256,
            257,
            383,
            384,
            385,
            511,
            512,
            513,
            767,
            768,
            6143,
            6144,
            6145,
            30_001,
        ):
            assert_crc32c(data[start : start + size])


def described(arrivals: list[record.Arrival]) -> list[tuple[Any, ...]]:
    return [
        (
            one.queue_id,
            one.entries,
            one.body_bytes,
            one.facts,
            one.indexes,
            one.times,
            one.marks,
            one.kinds,
        )
        for one in arrivals
    ]


def put_whole(
    wire: bytes, salt: int
) -> tuple[bytearray, list[tuple[Any, ...]], tuple[int, int, int]]:
    batch, target = record.Batch(), bytearray(len(wire) + 64)
    batch.plan(wire)
    arrivals, counts = batch.put(wire, target, 64, 5, salt, True)
    return target, described(arrivals), counts


@settings(max_examples=80, deadline=None)
@given(st.lists(records, min_size=1, max_size=12), st.data())
def test_a_batch_gives_each_queue_its_messages_in_order(
    batch: list[Record], data: st.DataObject
) -> None:
    wire = b"".join(one.encode() for one in batch)
    ends = [0]
    for one in batch:
        ends.append(ends[-1] + len(one.encode()))
    cut = data.draw(st.sampled_from(ends[1:]))
    known = record.Batch()
    known.plan(wire)
    pieces = [(0, cut, 5, 64)] + ([(cut, len(wire), 6, 128)] if cut < len(wire) else [])
    arrivals = known.take(pieces, True)
    known.facts(wire, arrivals)
    if cut == len(wire):
        once = bytearray(len(wire) + 64)
        known.copy(wire, 0, cut, once, 64, 7)
        assert put_whole(wire, 7) == (once, described(arrivals), known.counts(0, cut))
    expected: dict[int, list[tuple[int, int, int, int]]] = {}
    at = ordinal = 0
    for one in batch:
        decoded = decode_record(wire, at)
        assert decoded is not None and decoded[0] == one
        segment, shift = (5, 64) if at < cut else (6, 128 - cut)
        for offset, message in zip(decoded[1], one.messages, strict=True):
            for queue_id in one.queues:
                item = (
                    segment << 32 | (offset + shift) << 4,
                    one.fact(),
                    ordinal,
                    int.from_bytes(message[:4], "little"),
                )
                expected.setdefault(queue_id, []).append(item)
            ordinal += 1
        at = decoded[2]
    assert [arrival.queue_id for arrival in arrivals] == list(expected)
    for arrival in arrivals:
        entries, facts, indexes, sizes = zip(*expected[arrival.queue_id], strict=True)
        assert tuple(arrival.entries) == entries and tuple(arrival.indexes or ()) == indexes
        assert arrival.body_bytes == sum(sizes)
        assert facts == (tuple(arrival.facts) if arrival.facts is not None else (0,) * len(facts))


@settings(max_examples=80, deadline=None)
@given(st.lists(records, min_size=1, max_size=6), st.integers(0, 3000))
def test_a_batch_is_cut_only_between_records_and_as_late_as_fits(
    batch: list[Record], room: int
) -> None:
    known = record.Batch()
    known.plan(b"".join(one.encode() for one in batch))
    ends = [0]
    for one in batch:
        ends.append(ends[-1] + len(one.encode()))
    for start in ends[:-1]:
        assert known.fit(start, room) == max(end for end in ends if start <= end <= start + room)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(records, min_size=1, max_size=6),
    st.integers(1, 0xFFFFFFFF),
    st.randoms(use_true_random=False),
)
def test_a_scan_finds_every_good_record_and_no_other(
    batch: list[Record], salt: int, pick: random.Random
) -> None:
    segment = (
        bytearray(64) + b"".join(one.encode(salt) for one in batch) + bytes(pick.choice([0, 8, 80]))
    )
    for _ in range(pick.choice([0, 0, 1, 3])):
        place = pick.randrange(64, len(segment))
        segment[place] ^= 1 << pick.randrange(8)
    if pick.random() < 0.3:
        del segment[pick.randrange(64, len(segment)) :]
    good, end, at = [], 64, 64
    while at < len(segment):
        decoded = decode_record(bytes(segment), at, salt)
        if decoded is None:
            at += 8
            continue
        good.append((decoded[0], decoded[1]))
        end = at = decoded[2]
    abstracts, found_end, _ = record.scan(segment, 64, len(segment), salt)
    queue_ids = sorted({queue_id for one, _ in good for queue_id in one.queues})
    known = record.Collector(queue_ids, queue_ids)
    records_found = known.add(abstracts, 9, b"", 1)[0]
    assert (records_found, found_end) == (len(good), end)
    for arrival in known.take():
        mine = [
            (one, offset)
            for one, offsets in good
            if arrival.queue_id in one.queues
            for offset in offsets
        ]
        assert list(arrival.entries) == [9 << 32 | offset << 4 | 1 for _, offset in mine]
        assert list(arrival.times or ()) == [one.timestamp for one, _ in mine]
        facts = [one.recovered_fact() for one, _ in mine]
        assert facts == (list(arrival.facts) if arrival.facts is not None else [0] * len(facts))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(records, min_size=1, max_size=6),
    st.integers(1, 0xFFFFFFFF),
    st.randoms(use_true_random=False),
)
def test_records_are_sound_up_to_the_first_that_is_bad_or_not_all_there(
    batch: list[Record], salt: int, pick: random.Random
) -> None:
    whole = b"".join(one.encode(salt) for one in batch)
    data = bytearray(whole)
    for _ in range(pick.choice([0, 0, 1, 3])):
        data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    stop = pick.choice([len(data), pick.randrange(len(data) + 1)])
    end = 0
    while end < stop and (found := decode_record(bytes(data[:stop]), end, salt)) is not None:
        end = found[2]
    got, needed = record.sound_until(data, 0, stop, salt)
    assert got == end
    if needed:
        assert end + needed > stop
    elif end < stop:
        assert decode_record(bytes(data), end, salt) is None, "it is whole, and good"


@given(st.binary(max_size=400), st.integers(0, 0xFFFFFFFF))
def test_garbage_is_no_record(garbage: bytes, salt: int) -> None:
    abstracts, end, holes = record.scan(bytearray(64) + garbage, 64, 64 + len(garbage), salt)
    assert (abstracts, end, holes) == (b"", 64, [])


def test_a_search_for_good_records_ends_when_bodies_pretend_to_be_records() -> None:
    # Each of these begins a plausible record that reaches to the end of the segment; none has the
    # right crc.
    fake = bytearray()
    size = 1 << 18
    while len(fake) < size:
        left = size - len(fake)
        body = max(left - 28 - 4 - 10 - 8, 0)
        head = Record((1,), (encode_message(b""),)).encode()[:32]
        fake += left.to_bytes(4, "little") + head[4:] + (body + 7).to_bytes(4, "little") + bytes(4)
    assert record.scan(bytearray(64) + fake, 64, 64 + size, 7)[0] == b""


@settings(max_examples=80, deadline=None)
@given(
    st.lists(messages, min_size=1, max_size=8),
    st.integers(0, 300),
    st.randoms(use_true_random=False),
)
def test_reading_takes_whole_messages_as_many_as_fit(
    stored: list[bytes], bytes_max: int, pick: random.Random
) -> None:
    offsets = [sum(map(len, stored[:i])) for i in range(len(stored))]
    wanted = [pick.randrange(len(stored)) for _ in range(10)]
    entries = array("Q", [3 << 32 | (offsets[i] + 100) << 4 | pick.randrange(2) for i in wanted])
    blob, sizes = record.copy_out(
        bytearray(b"".join(stored)), 100, sum(map(len, stored)), entries, 0, 10, bytes_max, True
    )
    got = split_messages(blob)
    assert got == [stored[i] for i in wanted[: len(got)]] and len(sizes) == len(got) >= 1
    assert len(blob) <= bytes_max or len(got) == 1
    assert len(got) == 10 or len(blob) + len(stored[wanted[len(got)]]) > bytes_max


@settings(max_examples=80, deadline=None)
@given(
    st.lists(messages, max_size=8),
    st.integers(0, 300),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_messages_read_alone_are_taken_while_they_are_whole_and_fit(
    stored: list[bytes], bytes_max: int, first: bool, pick: random.Random
) -> None:
    pieces = [
        one + bytes(pick.randrange(9)) if pick.random() < 0.8 else one[: pick.randrange(len(one))]
        for one in stored
    ]
    expected: list[bytes] = []
    fits = True
    for one, piece in zip(stored, pieces, strict=True):
        fits = (
            len(b"".join(expected)) + len(one) <= bytes_max
            or (first and not expected)
            or len(piece) < len(one)
        )
        if len(piece) < len(one) or not fits:
            break
        expected.append(one)
    blob, sizes, room = record.pieces_out(pieces, bytes_max, first)
    assert (split_messages(blob), room) == (expected, fits)
    assert list(sizes) == [int.from_bytes(one[:4], "little") for one in expected]


@given(st.lists(st.tuples(st.sampled_from([0, 1, 1, 1 << 31, (1 << 32) - 1]), st.integers(0, 99))))
def test_the_queues_of_settled_pairs_are_all_found(settled: list[tuple[int, int]]) -> None:
    pairs = b"".join(
        record.settled_pairs(queue_id, array("Q", [position << 4]), 0, 1)
        for queue_id, position in settled
    )
    assert record.queues_of_pairs(pairs) == queues_of_pairs(pairs) == {each for each, _ in settled}
    assert record.queues_of_pairs(bytearray(pairs)) == queues_of_pairs(pairs)


@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_redelivered_ones_are_told_by_their_flag(entries: list[int]) -> None:
    assert list(record.redelivered(array("Q", entries))) == [
        entry for entry in entries if entry & 1
    ]


@given(st.lists(st.integers(0, 30), unique=True), st.lists(st.integers(0, 30), unique=True))
def test_marks_set_the_flag_of_their_own_entries_alone(
    entries: list[int], marks: list[int]
) -> None:
    marked = array("Q", sorted(place << 4 for place in entries))
    record.mark_redelivered(marked, array("Q", sorted(place << 4 | 1 for place in marks)))
    assert list(marked) == [place << 4 | (place in marks) for place in sorted(entries)]


@given(st.lists(st.sampled_from([3, 3, 3, 9]), max_size=6))
def test_only_one_segment_is_told_from_several_and_from_none(segments: list[int]) -> None:
    entries = array("Q", [segment << 32 | at << 4 for at, segment in enumerate(segments, 4)])
    runs = record.segment_runs(entries)
    assert record.only_segment(entries) == (runs[0][0] if len(runs) == 1 else 0)
