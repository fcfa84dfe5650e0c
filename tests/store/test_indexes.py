"""The index of a segment has, to the byte, what a scan of the segment's file finds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.segment_file import (
    HEADER_BYTES,
    INDEX_SHARE_MAX,
    decode_header,
    encode_index,
)
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.segments.store import RENEW_BYTES
from tests.reference.record import NONE, Record, decode_record, encode_message
from tests.support.faulty_files import FaultyFiles
from tests.support.syncing import sync

QUEUES = tuple(range(1, 9))
SEGMENT_BYTES = 4096

small = st.binary(max_size=40)
large = st.integers(100, 1500).map(lambda size: b"L" * size)
# Larger than a segment: these are written alone.
huge = st.just(b"H" * (SEGMENT_BYTES + 1))


def records_of(bodies: st.SearchStrategy[bytes], count_max: int) -> st.SearchStrategy[Record]:
    messages = st.builds(
        encode_message, bodies, st.binary(max_size=5), st.binary(max_size=5), st.binary(max_size=6)
    )
    return st.builds(
        Record,
        st.lists(st.sampled_from(QUEUES), min_size=1, max_size=4, unique=True).map(tuple),
        st.lists(messages, min_size=1, max_size=count_max).map(tuple),
        st.integers(0, 1 << 41),
        st.sampled_from([NONE, 5, 0xFFFFFFFE]),
        st.sampled_from([255, 0, 7]),
        st.integers(0, 15),
    )


records = records_of(large, 4) | records_of(small | large, 6) | records_of(small, 20)
batches = st.lists(records, min_size=1, max_size=6) | records_of(huge, 1).map(lambda one: [one])
steps = st.lists(batches | st.sampled_from(["flush", "sync", "settle"]), min_size=1, max_size=30)


def encoded(batch: list[Record]) -> bytes:
    return b"".join(one.encode() for one in batch)


def opened(files: FaultyFiles, segment_bytes: int = SEGMENT_BYTES) -> SegmentStore:
    store = SegmentStore("d", files=files, segment_bytes=segment_bytes)
    store.recover(QUEUES)
    return store


def play(store: SegmentStore, history: list[list[Record] | str]) -> set[int]:
    """Carry out the steps; return the numbers of the segments with unsettled messages."""
    arrivals: list[record.Arrival] = []
    for step in history:
        if step == "flush":
            store.flush()
        elif step == "sync":
            sync(store)
        elif step == "settle":
            for arrival in arrivals:
                store.settle(arrival.queue_id, arrival.entries, True)
            arrivals = []
        else:
            assert isinstance(step, list)
            arrivals += store.append(encoded(step))
    return {entry >> 32 for arrival in arrivals for entry in arrival.entries}


def indexes(files: FaultyFiles) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    """Yield (number, index, right index) of each segment.

    The last is None where no index is worth writing.
    """
    for name, inode in sorted(files.names.items()):
        if name.startswith("d/msgs."):
            header = decode_header(inode.data)
            assert header is not None
            number, salt, capacity, *_ = header
            abstracts, end, holes = record.scan(inode.data, HEADER_BYTES, len(inode.data), salt)
            assert not holes
            index = files.names.get(name.replace("msgs", "index"))
            right = encode_index(number, salt, end, abstracts)
            worth = (
                share(bytes(inode.data), end, salt) * INDEX_SHARE_MAX <= end
                and capacity == SEGMENT_BYTES
            )
            yield number, None if index is None else bytes(index.data), right if worth else None


def share(data: bytes, end: int, salt: int) -> int:
    at, total = HEADER_BYTES, 0
    while at < end:
        found = decode_record(data, at, salt)
        assert found is not None
        one, offsets, at = found
        total += 20 + (8 + 4 * len(one.queues)) * len(offsets)
    return total


def one_of(size: int) -> list[Record]:
    return [Record((1,), (encode_message(b"L" * size),), 0)]


@settings(max_examples=80, deadline=None)
@given(steps)
# Nobody needs the segment any more: its last record is not written, and no index either.
@example([one_of(300), "flush", one_of(100), "settle"])
def test_each_segment_that_is_worth_an_index_has_the_one_that_a_scan_makes(
    history: list[list[Record] | str],
) -> None:
    files = FaultyFiles()
    store = opened(files)
    needed = play(store, history)
    store.close()
    for number, index, right in indexes(files):
        assert index == right or (index is None and number not in needed), number


@settings(max_examples=50, deadline=None)
@given(steps, steps, st.booleans())
def test_files_of_former_lives_leave_nothing_in_the_indexes_of_later_ones(
    history: list[list[Record] | str], later: list[list[Record] | str], clean: bool
) -> None:
    files = FaultyFiles()
    store = opened(files)
    play(store, history)
    if clean:
        store.close()
    files = files.restarted(power_cut=False)
    store = opened(files)
    play(store, later)
    store.compact()
    store.close()
    for number, index, right in indexes(files):
        assert index is None or right is None or index == right, number


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each scan of a segment ended, as they come."""
    ends: list[int] = []
    scan = record.scan

    def counted(
        segment: bytearray, start: int, stop: int, salt: int
    ) -> tuple[bytes, int, list[tuple[int, int]]]:
        ends.append(stop)
        return scan(segment, start, stop, salt)

    monkeypatch.setattr(record, "scan", counted)
    return ends


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("at_once", [1, 7, 40])
def test_what_was_appended_is_not_scanned_for_its_index(
    queues: int, at_once: int, scans: list[int]
) -> None:
    """Also of batches that were divided among segments."""
    files = FaultyFiles()
    store = opened(files)
    for number in range(0, 80, at_once):
        store.append(
            encoded(
                [
                    Record((1 + n % queues,), (encode_message(b"x" * 400),), n)
                    for n in range(number, number + at_once)
                ]
            )
        )
    store.close()
    assert not scans
    found = list(indexes(files))
    assert len(found) >= 10
    for number, index, right in found:
        assert index == right is not None, number


def test_an_open_segment_that_starts_anew_keeps_nothing_of_what_was_in_it(scans: list[int]) -> None:
    files = FaultyFiles()
    store = opened(files, 8 * RENEW_BYTES)
    batch = encoded([Record((1,), (encode_message(b"x" * 1000),) * 20)])
    for _ in range(2 * RENEW_BYTES // len(batch)):
        (arrival,) = store.append(batch)
        store.settle(1, arrival.entries, True)
    assert arrival.entries[0] >> 32 > 1
    store.append(batch)
    store.close()
    assert not scans
    ((_, index, _),) = indexes(files)
    (inode,) = (one for name, one in files.names.items() if name.startswith("d/msgs."))
    header = decode_header(inode.data)
    assert header is not None
    abstracts, end, _ = record.scan(inode.data, HEADER_BYTES, len(inode.data), header[1])
    assert index == encode_index(header[0], header[1], end, abstracts)


def test_large_messages_behind_many_small_ones_get_their_index_by_a_scan(scans: list[int]) -> None:
    files = FaultyFiles()
    store = opened(files, 1 << 20)
    store.append(encoded([Record((1,), (encode_message(b""),) * 1000)]))
    store.append(encoded([Record((1,), (encode_message(b"x" * 1000),) * 500)]))
    store.close()
    assert len(scans) == 1 and any(name.startswith("d/index.") for name in files.names)


def test_a_store_that_does_not_sync_makes_indexes_at_a_clean_stop_by_a_scan(
    scans: list[int],
) -> None:
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=SEGMENT_BYTES, sync=False)
    store.recover(QUEUES)
    for _ in range(20):
        store.append(encoded([Record((1,), (encode_message(b"x" * 1000),))]))
    assert not scans
    store.close()
    found = [(index, right) for _, index, right in indexes(files) if index is not None]
    assert scans and found and all(index == right for index, right in found)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(records, min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(512, 1 << 16),
)
def test_abstracts_are_all_that_a_scan_gives_or_none_and_never_more_than_an_index_may_take(
    history: list[list[Record]], capacity: int
) -> None:
    batch, target, end = record.Batch(), bytearray(HEADER_BYTES), HEADER_BYTES
    abstracts = record.Abstracts(end, capacity, INDEX_SHARE_MAX)
    for some in history:
        wire = encoded(some)
        target += bytes(len(wire))
        batch.plan(wire)
        before = abstracts.until(end)
        batch.put(wire, target, end, 1, 7, False, abstracts)
        end += len(wire)
        found = abstracts.until(end)
        assert found is None or (len(found) * INDEX_SHARE_MAX <= capacity and before is not None)
        assert found is None or found == record.scan(target, HEADER_BYTES, end, 7)[0]


def test_abstracts_with_a_gap_before_them_are_none() -> None:
    wire = encoded([Record((1,), (encode_message(b"x" * 400),))])
    batch, target = record.Batch(), bytearray(4 * len(wire))
    abstracts = record.Abstracts(8, 1 << 20, INDEX_SHARE_MAX)
    batch.plan(wire)
    for position in (8, 2 * len(wire), 3 * len(wire)):
        batch.copy(wire, 0, len(wire), target, position, 7, abstracts)
        assert (abstracts.until(position + len(wire)) is None) == (position > 8)
