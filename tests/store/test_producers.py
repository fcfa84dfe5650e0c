"""Test that a message that its producer repeats is stored once, whatever ends the process.

A missing message is never taken for a stored one.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.store.format.sequences import Sequences
from shardmq.shardd.store.segments import SegmentStore, producers
from shardmq.shardd.store.segments.producers import Producers
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.wire import codec
from tests.reference.record import Record, split_messages
from tests.reference.wire import records_of
from tests.support import producer_lives as lives
from tests.support.faulty_files import FaultyFiles
from tests.support.producer_lives import IN_SEQUENCE, headers, message, place_of

LIVES: dict[Callable[[int], int], int] = {
    lives.kills: 150,
    lives.power_cuts: 300,
    lives.full_disks: 100,
    lives.ends_after_commits: 150,
    lives.clean_stops: 80,
    lives.without_syncs: 60,
}


@pytest.mark.parametrize("kind", LIVES, ids=lambda kind: kind.__name__)
def test_confirmed_once_stored_once_and_nothing_is_lost(kind: Callable[[int], int]) -> None:
    first = random.randrange(1 << 40)
    repeated = 0
    for seed in range(first, first + LIVES[kind]):
        try:
            repeated += kind(seed)
        except BaseException as error:
            error.add_note(f"{kind.__name__}({seed})")
            raise
    assert repeated > LIVES[kind]


def found_by(kind: Callable[[int], int], text: str) -> bool:
    for seed in range(200):
        try:
            kind(seed)
        except AssertionError as error:
            if text in str(error):  # what is broken may first show in other ways
                return True
    return False


def test_these_lives_find_a_store_that_forgets_producers_with_their_segments() -> None:
    with mock.patch.object(Producers, "appended", lambda self, segment: None):
        assert found_by(lives.kills, "is forgotten")


def test_these_lives_find_a_recovery_that_believes_what_lies_behind_a_gap() -> None:
    def believes(self: Producers) -> bool:
        return True

    trusting = property(believes, lambda self, value: None)
    with mock.patch.object(Producers, "_trusting", trusting, create=True):
        assert found_by(lives.power_cuts, "is lost")


def test_these_lives_find_a_segment_that_loses_its_acks_before_it_is_covered() -> None:
    with mock.patch.object(Segment, "awaits_cover", False):
        assert found_by(lives.ends_after_commits, "comes back although a commit was answered")


# -- the table beside a dict -----------------------------------------------------------------------

SAMPLES = 4  # of the first and of the last messages of a producer in a queue bodies are compared
NAMES = st.sampled_from([b"p", b"q" * 255])


@given(
    st.lists(
        st.lists(
            st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True), NAMES,
                      st.integers(0, 12),
                      st.integers(1, 3), st.booleans(), st.sampled_from([3, 4])),
            min_size=1, max_size=6,
        ),
        max_size=8,
    ),
    st.data(),
)  # fmt: skip
def test_a_batch_is_screened_as_a_dict_would(
    batches: list[list[tuple[list[int], bytes, int, int, bool, int]]], data: st.DataObject
) -> None:
    table = Sequences()
    highest: dict[tuple[int, bytes], int] = {}
    gaps: dict[tuple[int, bytes], int] = {}
    bodies: dict[tuple[int, bytes], list[tuple[int, bytes]]] = {}  # by number, as they came
    for batch in batches:
        records = [
            Record(
                tuple(queues),
                tuple(message(name, first + i, size) for i in range(count)),
                flags=1 | 2 * in_sequence,
            )
            for queues, name, first, count, in_sequence, size in batch
        ]
        before = dict(highest)
        kept: list[tuple[int, bytes, int, int]] = []
        repeated: dict[int, int] = {}
        refused: set[int] = set()
        known: set[int] = set()
        altered: set[int] = set()
        stored: dict[tuple[int, bytes], int] = {}
        ordinal = 0
        for record in records:
            found: dict[int, list[tuple[int, bytes, int, int]]] = {}
            for one in record.messages:
                name, number = place_of(one)
                for queue_id in record.queues:
                    key = (queue_id, name)
                    this = (queue_id, name, number, ordinal)
                    if not record.flags & IN_SEQUENCE:
                        found.setdefault(queue_id, []).append(this)
                    elif number <= highest.get(key, -1):
                        repeated[queue_id] = repeated.get(queue_id, 0) + 1
                        known.add(ordinal)
                        had = bodies.get(key, [])
                        of_number = [
                            body
                            for at, body in had[:SAMPLES] + had[SAMPLES:][-SAMPLES:]
                            if at == number
                        ]
                        if of_number and one not in of_number:
                            altered.add(ordinal)
                    elif number > gaps.get(key, 1 << 60):
                        refused.add(ordinal)
                    else:
                        highest[key] = number
                        bodies.setdefault(key, []).append((number, one))
                        stored.setdefault(key, number)
                        if gaps.get(key) == number:
                            del gaps[key]
                        found.setdefault(queue_id, []).append(this)
                ordinal += 1
            kept += [this for queue_id in record.queues for this in found.get(queue_id, [])]
        screened = table.screen(b"".join(record.encode() for record in records), {})
        assert screened.repeated == repeated and screened.refused == sorted(refused)
        assert (screened.known, screened.altered) == (sorted(known), sorted(altered))
        assert got_of(screened.records, screened.origins) == sorted(kept)
        if data.draw(st.booleans()):  # there is no room for it
            table.undo()
            highest = before
            gaps |= stored
    again = Sequences()
    again.add(table.take_changes(True))
    for (queue_id, name), number in highest.items():
        assert table.highest(queue_id, name) == again.highest(queue_id, name) == number


def got_of(
    records: bytes | bytearray | memoryview, origins: array[int] | None
) -> list[tuple[int, bytes, int, int]]:
    found = []
    ordinal = 0
    for _, _, _, _, ids, messages, _ in records_of(bytes(records)):
        for one in messages:
            origin = origins[ordinal] if origins is not None else ordinal
            found += [(queue_id, *place_of(one), origin) for queue_id in ids]
            ordinal += 1
    return sorted(found)


def test_other_messages_under_known_numbers_are_told_as_far_as_numbers_are_remembered() -> None:
    """The first and the last ones of a producer are, in each queue."""
    table = Sequences()

    def screened(first: int, last: int, size: int) -> Any:
        messages = tuple(message(b"p", number, size) for number in range(first, last + 1))
        return table.screen(Record((1, 2), messages, flags=3).encode(), {})

    assert not screened(0, 99, 5).known
    again = screened(0, 99, 5)
    assert (again.known, again.altered) == (list(range(100)), [])
    others = screened(0, 99, 6)
    assert (others.known, others.altered) == (list(range(100)), [0, 1, 2, 3, 96, 97, 98, 99])


# -- by hand ---------------------------------------------------------------------------------------


def open_store(files: FaultyFiles) -> SegmentStore:
    store = SegmentStore("store", files=files, segment_bytes=4096)
    store.recover([1])
    return store


def publish(store: SegmentStore, name: bytes, *numbers: int, at: int = 1000) -> list[bytes]:
    """Publish these sequences; return the messages that were stored."""
    record = Record(
        (1,), tuple(message(name, number, 500) for number in numbers), at, flags=1 | IN_SEQUENCE
    )
    screened = store.screen(record.encode(), {})
    arrivals = store.append(screened.records, in_sequence=True)
    return [
        one
        for arrival in arrivals
        for one in split_messages(store.read(arrival.entries, 1 << 30)[0])
    ]


def test_idle_producers_are_forgotten_also_by_a_recovery() -> None:
    files = FaultyFiles()
    store = open_store(files)
    publish(store, b"idle", 1, at=1000)
    publish(store, b"busy", 1, at=5000)
    assert store.forget_producers(2000) == 1
    assert publish(store, b"idle", 1, at=5000) and not publish(store, b"busy", 1, at=5000)
    store.close({})
    store = open_store(files.restarted(power_cut=False))
    assert not publish(store, b"idle", 1, at=6000) and store.stats()["producers"] == 2


def test_after_a_crash_other_messages_are_told_by_what_recovery_has_read() -> None:
    files = FaultyFiles()
    store = open_store(files)
    publish(store, b"p", 1, 2, 3)
    job = store.begin_sync()
    assert job is not None
    job.run()
    store.finish_sync(job)
    store = open_store(files.restarted(power_cut=False))
    for size, altered in ((500, []), (499, [0, 1, 2])):
        again = Record(
            (1,), tuple(message(b"p", number, size) for number in (1, 2, 3)), flags=1 | IN_SEQUENCE
        )
        screened = store.screen(again.encode(), {})
        assert (screened.known, screened.altered) == ([0, 1, 2], altered)


def test_of_too_many_producers_the_half_heard_longest_ago_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 100)
    store = open_store(FaultyFiles())
    for i in range(150):
        publish(store, b"%d" % i, 0, at=i)
    assert store.stats()["producers"] <= 101
    assert not publish(store, b"149", 0, at=200) and publish(store, b"0", 0, at=200)


def test_what_a_damaged_file_of_producers_said_is_told() -> None:
    files = FaultyFiles()
    store = open_store(files)
    publish(store, b"p", 1)
    store.close({})
    files.names["store/producers"].data[-1] ^= 1
    store = open_store(files.restarted(power_cut=False))
    assert [one.file for one in store.damage] == ["producers"]


@given(st.binary(max_size=60))
def test_any_properties_give_a_place_or_none(data: bytes) -> None:
    for props in (data, b"\x20\x00" + data, headers(b"p", 3)[: len(data)], headers(b"p", 3) + data):
        try:
            found = codec.place_of(props)
        except ValueError:
            continue
        assert found is None or 0 < len(found[0]) <= 255


@pytest.mark.parametrize("value",
                         [b"b\x05", b"B\x05", b"s\0\x05", b"u\0\x05", b"I\0\0\0\x05",
                          b"i\0\0\0\x05",
                                   b"l" + bytes(7) + b"\x05",
                                   b"L" + bytes(7) + b"\x05"])  # fmt: skip
def test_a_sequence_may_be_any_integer(value: bytes) -> None:
    table = b"\x01aV" + b"\x0ax-sequence" + value + b"\x01bt\x01" + b"\x0dx-producer-idS\0\0\0\x01p"
    assert codec.place_of(b"\x20\x00" + len(table).to_bytes(4, "big") + table) == (b"p", 5)


@pytest.mark.parametrize(
    "value", [b"b\xff", b"S\0\0\0\x015", b"d" + bytes(8), b"l" + b"\xff" * 8, b"V", b"t\x01"]
)
def test_what_is_no_sequence_is_refused(value: bytes) -> None:
    table = b"\x0ax-sequence" + value + b"\x0dx-producer-idS\0\0\0\x01p"
    with pytest.raises(ValueError):
        codec.place_of(b"\x20\x00" + len(table).to_bytes(4, "big") + table)
