"""Segments in which little is left become few, and nobody who holds an entry notices."""

from __future__ import annotations

import errno
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardd.store import SegmentStore
from shardd.store.__main__ import main
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles, PowerCut
from tests.support.store_history import History

SEGMENTS = 100


def one(number: int) -> bytes:
    queues = (1, 2) if number % 8 == 0 else (1,)
    return Record(queues, (encode_message(b"%06d" % number * 60, b"", b"%d" % number),), number).encode()


def opened(files: FaultyFiles, directory: str = "d") -> SegmentStore:
    store = SegmentStore(directory, files=files, segment_bytes=4096)
    store.recover([1, 2])
    return store


def sync(store: SegmentStore) -> None:
    job = store.begin_sync()
    if job is not None:
        job.run()
        store.finish_sync(job)


def merge_all(store: SegmentStore) -> None:
    """Until there is nothing to do, with what the owner owes it: the sync after which the old files go."""
    while (job := store.begin_reclaim()) is not None:
        job.run()
        store.finish_reclaim(job)
        sync(store)


def nearly_empty(store: SegmentStore, segments: int = SEGMENTS) -> dict[int, array[int]]:
    """One message of each segment left, in queue 1, and in queue 2 what it shares with it."""
    kept = {1: array("Q"), 2: array("Q")}
    number = 0
    while store.stats()["segments"] < segments + 2:
        before = store.stats()["segments"]
        for arrival in store.append(one(number)):
            if store.stats()["segments"] > before or number == 0:
                kept[arrival.queue_id].extend(arrival.entries)
            else:
                store.settle(arrival.queue_id, arrival.entries, True)
        number += 1
        if number % 50 == 0:
            sync(store)
    sync(store)
    return kept


def all_of(store: SegmentStore, live: dict[int, array[int]]) -> dict[int, list[bytes]]:
    return {queue: split_messages(store.read(entries, 1 << 30)[0]) for queue, entries in live.items()}


def test_one_unacked_message_in_each_of_a_hundred_segments_ends_in_a_few() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store)
    expected = all_of(store, kept)
    before = store.stats()
    while store.compact():
        pass
    after = store.stats()
    # What is in memory or open is left; a segment holds nine of these, and is filled half.
    assert before["segments"] > SEGMENTS and after["segments"] <= SEGMENTS // 4 + 3
    assert after["live_messages"] == before["live_messages"] and after["dead_bytes"] < before["dead_bytes"] // 4
    assert all_of(store, kept) == expected
    sync(store)
    store.close(kept)
    names = [name for name in files.names if "msgs" in name]
    assert len(names) <= SEGMENTS // 4 + 3
    again = opened(files.restarted(power_cut=True))
    assert again.damage == []


def test_with_segments_of_usual_size_they_end_in_two(tmp_path: Path) -> None:
    store = SegmentStore(str(tmp_path), segment_bytes=1 << 16)
    store.recover([1])
    kept: array[int] = array("Q")
    filler = Record((1,), (encode_message(b"x" * 360),) * 150).encode()
    for number in range(SEGMENTS):
        (arrival,) = store.append(one(8 * number + 1) + filler)
        kept.append(arrival.entries[0])
        store.settle(1, arrival.entries[1:], True)
    sync(store)
    expected = split_messages(store.read(kept, 1 << 20)[0])
    while store.compact():
        pass
    # Two, and the open one and the one before it, which are in memory.
    assert store.stats()["segments"] <= 4
    assert split_messages(store.read(kept, 1 << 20)[0]) == expected
    kept[3] |= 1
    store.close({1: kept})
    assert main(["verify", str(tmp_path)]) == 0
    again = SegmentStore(str(tmp_path), segment_bytes=1 << 16)
    found = again.recover([1])[1].entries
    assert split_messages(again.read(found, 1 << 20)[0]) == expected
    assert [entry & 15 for entry in found] == [0, 0, 0, 1] + [0] * (SEGMENTS - 4)


def test_what_is_settled_after_merging_is_settled_for_ever() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store, 20)
    while store.compact():
        pass
    expected = all_of(store, {1: kept[1][5:], 2: kept[2][1:]})
    store.settle(1, kept[1][:5], True)
    store.settle(2, kept[2][:1], True)
    sync(store)
    while store.compact():
        pass
    assert all_of(store, {1: kept[1][5:], 2: kept[2][1:]}) == expected
    assert recovered(files.restarted(power_cut=False)) == expected


def test_without_syncs_a_killed_process_finds_every_merged_message_too() -> None:
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=4096, sync=False)
    store.recover([1, 2])
    kept: array[int] = array("Q")
    for number in range(1, 300):
        (arrival,) = store.append(one(8 * number + 1))
        if number % 10 == 0:
            kept.extend(arrival.entries)
        else:
            store.settle(1, arrival.entries, True)
    store.flush()
    before = store.stats()["segments"]
    while store.compact():
        pass
    assert store.stats()["segments"] < before // 2
    store.flush()
    assert recovered(files.restarted(power_cut=False)) == all_of(store, {1: kept})


def test_a_merged_segment_of_which_nothing_is_needed_leaves_no_file() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store, 20)
    while store.compact():
        pass
    for queue, entries in kept.items():
        store.settle(queue, entries, True)
    store.close({})
    opened(files.restarted(power_cut=False)).close({})
    after = files.restarted(power_cut=False)
    opened(after).close({})
    assert [name for name in after.names if not name.startswith("d/spare")] == ["d/state"]


@pytest.mark.parametrize("wiped", [8, 400])
@pytest.mark.parametrize("from_end", [0, 1])
def test_a_segment_that_cannot_be_read_whole_is_left_as_it_is(from_end: int, wiped: int) -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = [store.append(one(8 * number + 1))[0].entries[0] for number in range(64)]
    sync(store)
    second = [entry for entry in entries if entry >> 32 == 2]
    kept = array("Q", sorted({second[0], *[entry for entry in entries if entry >> 32 != 2][::9]}))
    store.settle(1, array("Q", sorted(set(entries) - set(kept))), True)
    sync(store)
    expected = all_of(store, {1: kept})
    # The last record but `from_end`, of which no queue needs anything, is wiped.
    data = files.names["d/msgs.0000000002"].data
    position = (second[-1 - from_end] & 0xFFFFFFFF) >> 4
    data[position - 32 : position - 32 + wiped] = bytes(wiped)
    before = bytes(data)
    files.names.pop("d/index.0000000002", None)  # it would tell
    assert sum(store.compact() for _ in range(10)) > 0, "the others are merged"
    assert files.names["d/msgs.0000000002"].data == before
    assert all_of(store, {1: kept}) == expected


@pytest.mark.parametrize("call", ["allocate", "open"])
def test_with_a_full_disk_nothing_is_merged_and_nothing_breaks(call: str) -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store, 10)
    expected = all_of(store, kept)
    files.fail[call] = (0, errno.ENOSPC)
    assert store.compact() == 0
    files.fail.clear()
    assert all_of(store, kept) == expected
    store.append(one(1))


def test_a_power_cut_at_any_step_of_merging_leaves_every_message_once() -> None:
    for cut in range(200):
        files = FaultyFiles(cut)
        store = opened(files)
        kept = nearly_empty(store, 6)
        expected = all_of(store, kept)
        files.cut_after = cut
        try:
            merge_all(store)
        except PowerCut:
            for queue, messages in recovered(files.restarted(power_cut=True)).items():
                assert len(set(messages)) == len(messages)
                # What was settled may come back, its acks were not synced; nothing else.
                assert [message for message in messages if message in expected[queue]] == expected[queue]
            continue
        assert cut > 10
        return
    pytest.fail("merging never ended")


def recovered(files: FaultyFiles) -> dict[int, list[bytes]]:
    store = SegmentStore("d", files=files, segment_bytes=4096)
    found = {queue: arrival.entries for queue, arrival in store.recover([1, 2]).items()}
    assert store.damage == []
    return all_of(store, found)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_lives_with_much_merging_keep_every_promise(seed: int, power_cut: bool) -> None:
    history = History(seed)
    for _ in range(3):
        for _ in range(6):
            history.play(8)
            history.sync()
            history.compact()
        if history.random.random() < 0.5:
            history.stop_cleanly()
        else:
            history.crash(power_cut=power_cut)


def test_random_lives_do_merge() -> None:
    merged = 0
    for seed in range(20):
        history = History(seed)
        history.play(100)
        merged += history.merged
    assert merged > 0
