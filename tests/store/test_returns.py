"""The number of returns of a message outlives the process, merges and torn writes.

It costs no room for ever.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.errors import FormatTooNew
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.segments import SegmentStore, returns
from tests.reference.record import split_messages
from tests.store.test_compaction import nearly_empty, sync
from tests.store.test_store import one
from tests.support.faulty_files import FaultyFiles

Counts = dict[tuple[int, int], int]


def opened(files: FaultyFiles) -> tuple[SegmentStore, Mapping[int, array[int]]]:
    store = SegmentStore("d", files=files, segment_bytes=4096)
    return store, {queue: arrival.entries for queue, arrival in store.recover([1, 2]).items()}


def times_by_message(store: SegmentStore, queue: int, entries: array[int]) -> dict[bytes, int]:
    messages = split_messages(store.read(entries, 1 << 30)[0])
    return {
        message: store.times_returned(queue, entry)
        for message, entry in zip(messages, entries, strict=True)
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "return", "settle", "sync"]), st.integers(0, 50)),
        max_size=60,
    ),
    st.sampled_from(["stop", "kill"]),
)
def test_counts_outlive_a_stop_and_a_killed_process(steps: list[tuple[str, int]], end: str) -> None:
    files = FaultyFiles()
    store, _ = opened(files)
    live: array[int] = array("Q")
    counts: dict[int, int] = {}
    for number, (act, n) in enumerate(steps):
        if act == "append":
            live += store.append(one(b"%d" % number * (1 + n), 1))[0].entries
        elif act == "sync":
            sync(store)
        elif live and act == "return":
            entry = live[n % len(live)]
            counts[entry] = counts.get(entry, 0) + 1
            assert store.count_returns(1, array("Q", [entry | 1])) == [counts[entry]]
        elif live:
            entry = live.pop(n % len(live))
            counts.pop(entry, None)
            store.settle(1, array("Q", [entry]), True)
    expected = times_by_message(store, 1, live) if live else {}
    assert list(expected.values()) == [counts.get(entry, 0) for entry in live]
    if end == "stop":
        store.close({1: live})
    else:
        store.flush()
    again, found = opened(files.restarted(power_cut=end == "stop"))
    known = times_by_message(again, 1, found[1]) if found.get(1) else {}
    assert {message: known[message] for message in expected} == expected


def test_where_segments_were_merged_the_counts_are_with_their_messages() -> None:
    files = FaultyFiles()
    store, _ = opened(files)
    kept = nearly_empty(store, 30)
    for i, entry in enumerate(kept[1]):
        for _ in range(i % 4):
            store.count_returns(1, array("Q", [entry]))
    expected = times_by_message(store, 1, kept[1])
    while store.compact():
        pass
    assert times_by_message(store, 1, kept[1]) == expected
    store.flush()
    again, found = opened(files.restarted(power_cut=False))
    known = times_by_message(again, 1, found[1])
    assert {message: known[message] for message in expected} == expected and len(
        set(expected.values())
    ) == 4


def test_the_file_does_not_grow_with_what_is_settled() -> None:
    files = FaultyFiles()
    store, _ = opened(files)
    (keep,) = store.append(one(b"kept"))
    for _ in range(40):
        (arrival,) = store.append(b"".join(one(b"%d" % number) for number in range(500)))
        store.count_returns(1, arrival.entries)
        store.count_returns(1, keep.entries)
        sync(store)
        store.settle(1, arrival.entries, True)
    assert len(files.names["d/returns"].data) < 2 * returns.REWRITE_BYTES
    again, found = opened(files.restarted(power_cut=False))
    assert again.times_returned(1, found[1][0]) == 40


def _file(counts: list[Counts]) -> bytes:
    """As it is after one flush for each of these."""
    files = FaultyFiles()
    said = returns.Returns()
    for changes in counts:
        for (queue, place), times in changes.items():
            for _ in range(times):
                said.count(queue, array("Q", [place]))
        said.write(files, "d", lambda places: places)
    return bytes(files.names["d/returns"].data)


def test_torn_at_any_byte_it_says_what_was_whole() -> None:
    whole = [{(1, 1 << 32): 2, (2, 1 << 32): 1}, {(1, 1 << 32): 1, (1, (1 << 32) + 16): 3}]
    first, both = _file(whole[:1]), _file(whole)
    for end in range(len(both) + 1):
        said = returns.decode(both[:end])
        if end == len(both):
            assert said == {(1, 1 << 32): 3, (2, 1 << 32): 1, (1, (1 << 32) + 16): 3}
        else:
            assert said == (whole[0] if end >= len(first) else {})


def test_the_bytes_of_format_1_stay_what_they_are() -> None:
    golden = "53484d515245544e0100000001000000" + "9a8dc3f40100000040000000020000000700000002000000"
    assert _file([{(7, 0x200000040): 2}]).hex() == golden


def test_a_later_format_is_refused_and_left() -> None:
    files = FaultyFiles()
    store, _ = opened(files)
    (arrival,) = store.append(one(b"x"))
    store.count_returns(1, arrival.entries)
    store.close({1: arrival.entries})
    data = files.names["d/returns"].data
    struct.pack_into("<II", data, 8, 99, crc32c(b"", 99))
    before = {name: bytes(inode.data) for name, inode in files.names.items()}
    with pytest.raises(FormatTooNew, match="returns has format 99, this program knows up to 1"):
        opened(files)
    assert {name: bytes(inode.data) for name, inode in files.names.items()} == before
