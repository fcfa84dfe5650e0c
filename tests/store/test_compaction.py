"""Segments in which little is left become few, and nobody who holds an entry notices."""

from __future__ import annotations

import errno
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.format import manifest
from shardmq.shardd.store.format.segment_file import decode_header
from shardmq.shardd.store.segments import SegmentStore, compaction
from shardmq.shardd.store.tools.__main__ import main
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles, PowerCut
from tests.support.store_history import History
from tests.support.syncing import sync

SEGMENTS = 100


def one(number: int) -> bytes:
    queues = (1, 2) if number % 8 == 0 else (1,)
    return Record(
        queues, (encode_message(b"%06d" % number * 60, b"", b"%d" % number),), number
    ).encode()


def opened(files: FaultyFiles, directory: str = "d") -> SegmentStore:
    store = SegmentStore(directory, files=files, segment_bytes=4096)
    store.recover([1, 2])
    return store


def merge_all(store: SegmentStore) -> None:
    """Merge until there is nothing to do.

    Do also the sync after which the old files go.
    """
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
    return {
        queue: split_messages(store.read(entries, 1 << 30)[0]) for queue, entries in live.items()
    }


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
    assert (
        after["live_messages"] == before["live_messages"]
        and after["dead_bytes"] < before["dead_bytes"] // 4
    )
    assert all_of(store, kept) == expected
    sync(store)
    merge_all(store)
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
    assert [name for name in after.names if not name.startswith("d/spare")] == [
        f"d/{manifest.NAME}",
        "d/state",
    ]


def in_two(store: SegmentStore) -> tuple[array[int], list[int]]:
    """Return entries of which few are left in each segment.

    Return also positions in segment 2, whose first entry is left.
    """
    entries = array("Q", [store.append(one(8 * number + 1))[0].entries[0] for number in range(64)])
    sync(store)
    second = [entry for entry in entries if entry >> 32 == 2]
    kept = array("Q", sorted({second[0], *[entry for entry in entries if entry >> 32 != 2][::9]}))
    store.settle(1, array("Q", sorted(set(entries) - set(kept))), True)
    sync(store)
    return kept, [(entry & 0xFFFFFFFF) >> 4 for entry in second]


RECORD_HEADER_BYTES = 32  # of one queue


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("wiped", [8, 400])
@pytest.mark.parametrize("at", [-1, -2])
def test_damage_of_which_no_queue_needs_anything_goes_with_its_file(
    at: int, wiped: int, with_index: bool
) -> None:
    files = FaultyFiles()
    store = opened(files)
    kept, positions = in_two(store)
    expected = all_of(store, {1: kept})
    start = positions[at] - RECORD_HEADER_BYTES
    files.names["d/msgs.0000000002"].data[start : start + wiped] = bytes(wiped)
    if not with_index:
        files.names.pop("d/index.0000000002", None)
    merge_all(store)
    assert all_of(store, {1: kept}) == expected
    after = recovered(files.restarted(power_cut=False))
    assert after[1] == expected[1]


@pytest.mark.parametrize("where", [-RECORD_HEADER_BYTES, 0, 20])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_damaged_record_that_is_needed_is_never_merged_nor_lost_in_silence(
    where: int, with_index: bool
) -> None:
    files = FaultyFiles()
    store = opened(files)
    kept, positions = in_two(store)
    expected = all_of(store, {1: kept})[1]
    files.names["d/msgs.0000000002"].data[positions[0] + where] ^= 1
    if not with_index:
        files.names.pop("d/index.0000000002", None)
    with pytest.raises(Corrupt, match="msgs.0000000002"):
        merge_all(store)
    store.close()
    again = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096)
    found = {queue: arrival.entries for queue, arrival in again.recover([1, 2]).items()}
    assert [one.what for one in again.damage] == ["corrupt"] and again.damage[
        0
    ].file == "msgs.0000000002"
    merge_all(again)
    # Acks may be lost with a crash, messages not: all are there but the damaged one.
    lost = set(expected) - set(all_of(again, found)[1])
    assert len(lost) == 1


def test_what_is_good_beside_damage_that_recovery_told_is_merged() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept, positions = in_two(store)
    expected = all_of(store, {1: kept})[1]
    data = files.names["d/msgs.0000000002"].data
    for name in [name for name in files.names if "index" in name]:
        del files.names[name]
    data[positions[1]] ^= 1
    files = files.restarted(power_cut=False)
    again = SegmentStore("d", files=files, segment_bytes=4096)
    found = {queue: arrival.entries for queue, arrival in again.recover([1, 2]).items()}
    assert [one.what for one in again.damage] == ["corrupt"]
    assert all_of(again, found)[1] == expected
    merge_all(again)
    assert again.stats()["merged_segments"] > 2
    assert all_of(again, found)[1] == expected
    assert recovered(files.restarted(power_cut=False))[1] == expected


def test_a_bad_header_is_merged_away() -> None:
    """All it says is known to who wrote it."""
    files = FaultyFiles()
    store = opened(files)
    kept, _ = in_two(store)
    expected = all_of(store, {1: kept})
    files.names["d/msgs.0000000002"].data[20] ^= 1
    files.names.pop("d/index.0000000002", None)
    merge_all(store)
    assert all_of(store, {1: kept}) == expected
    assert recovered(files.restarted(power_cut=False))[1] == expected[1]


def test_a_segment_that_the_disk_cannot_read_stays_and_is_told() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept, _ = in_two(store)
    expected = all_of(store, {1: kept})
    job = store.begin_reclaim()
    assert job is not None and job.sources
    files.fail["read"] = (0, errno.EIO)
    job.run()
    files.fail.clear()
    assert store.finish_reclaim(job) == 0
    first = job.sources[0].segment
    assert len(job.left) == 1 and first.path in job.left[0] and "read fails" in job.left[0]
    merge_all(store)
    assert f"d/msgs.{first.number:010d}" in files.names and first.moves is None
    assert all_of(store, {1: kept}) == expected


def test_a_merged_segment_is_read_back_as_critically_as_any() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept, _ = in_two(store)
    merge_all(store)
    merged = next(segment for segment in store._by_number.values() if segment.moves is not None)
    files.names[merged.path].data[merged.used - 40] ^= 1
    wanted = array("Q", [entry for entry in kept if store._by_number[entry >> 32] is merged])
    with pytest.raises(Corrupt):
        store.read(wanted, 1 << 20)


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
                assert [message for message in messages if message in expected[queue]] == expected[
                    queue
                ]
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


def filled(
    store: SegmentStore, count: int, body: bytes = b"x" * 360, queues: tuple[int, ...] = (1,)
) -> array[int]:
    """Entries of the first queue, all on stable storage but for the last segments."""
    entries: array[int] = array("Q")
    for _ in range(count):
        entries += store.append(Record(queues, (encode_message(body),)).encode())[0].entries
    sync(store)
    return entries


def numbers_of(entries: array[int]) -> list[int]:
    return sorted({entry >> 32 for entry in entries})


def test_what_is_settled_while_a_merge_runs_is_settled_in_the_merged_one_for_ever() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store, 20)
    job = store.begin_reclaim()
    assert job is not None
    merged = {source.segment.number for source in job.sources}
    gone = array("Q", [entry for entry in kept[1] if entry >> 32 in merged][:2])
    store.settle(1, gone[:1], True)
    job.run()
    store.settle(1, gone[1:], True)
    sync(store)  # which must not write their acks to files that are about to go
    assert store.finish_reclaim(job) > 0
    kept[1] = array("Q", [entry for entry in kept[1] if entry not in gone])
    sync(store)
    merge_all(store)
    expected = all_of(store, kept)
    assert recovered(files.restarted(power_cut=False)) == expected


def test_a_merge_of_which_nothing_is_needed_at_its_end_leaves_nothing() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store, 20)
    job = store.begin_reclaim()
    assert job is not None
    job.run()
    for queue, entries in kept.items():
        store.settle(queue, entries, True)
    assert store.finish_reclaim(job) == 0
    sync(store)
    merge_all(store)
    assert [
        name
        for name in files.names
        if "msgs" in name and name != f"d/msgs.{store._segments.next_number - 1:010d}"
    ] == []


@pytest.mark.parametrize("how", ["not durable", "dropped", "gone before the start"])
def test_messages_no_recovery_will_ask_for_are_not_copied(how: str) -> None:
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=4096)
    store.recover([1, 2])
    kept: array[int] = array("Q")
    other: array[int] = array("Q")
    for number in range(200):
        kept += store.append(Record((1,), (encode_message(b"%d" % number),)).encode())[0].entries
        other += store.append(Record((2,), (encode_message(b"y" * 900),)).encode())[0].entries
    sync(store)
    if how == "not durable":
        for entry in other:
            store.settle(2, array("Q", [entry]), False)
    elif how == "dropped":
        store.drop_queue(2, other)
    else:
        store.close({1: kept})
        store = SegmentStore("d", files=files, segment_bytes=4096)
        kept = store.recover([1])[1].entries
    expected = all_of(store, {1: kept})
    merge_all(store)
    stats = store.stats()
    assert stats["live_messages"] == 200 and stats["disk_bytes"] <= 12 * 4096
    assert all_of(store, {1: kept}) == expected
    assert all_of(store, {1: kept})[1] == recovered(files.restarted(power_cut=False))[1]


def test_one_sparse_segment_between_full_ones_is_written_anew_alone() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = filled(store, 60)
    sparse = numbers_of(entries)[1::2][:2]
    gone = array(
        "Q",
        [e for number in sparse for e in [entry for entry in entries if entry >> 32 == number][1:]],
    )
    store.settle(1, gone, True)
    kept = {1: array("Q", [entry for entry in entries if entry not in gone])}
    expected = all_of(store, kept)
    merge_all(store)
    for number in sparse:
        assert len(files.names[f"d/msgs.{number:010d}"].data) < 4096 // 4
        assert f"d/acks.{number:010d}" not in files.names
    assert all_of(store, kept) == expected
    assert recovered(files.restarted(power_cut=False))[1] == expected[1]


def test_only_records_of_which_something_is_left_are_read_where_an_index_tells() -> None:
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=1 << 16)
    store.recover([1])
    entries = filled(store, 300, b"x" * 2000)
    kept = array(
        "Q",
        [
            [entry for entry in entries if entry >> 32 == number][3]
            for number in numbers_of(entries)[:4]
        ],
    )
    store.settle(
        1, array("Q", [entry for entry in entries if entry >> 32 <= 4 and entry not in kept]), True
    )
    expected = all_of(store, {1: kept})
    assert f"d/index.{4:010d}" in files.names
    merge_all(store)
    stats = store.stats()
    assert stats["merged_segments"] == 4
    assert stats["merge_bytes"] < 1 << 16, "of four times as much"
    assert all_of(store, {1: kept}) == expected


def test_the_acks_of_a_segment_are_folded_into_it_beyond_their_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A segment of few messages for very many queues may have more to settle than bytes."""
    monkeypatch.setattr(compaction, "ACKS_BYTES_MAX", 2000)
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=4096)
    queues = tuple(range(1, 61))
    store.recover(queues)
    arrivals: dict[int, array[int]] = {queue: array("Q") for queue in queues}
    while store.stats()["segments"] < 4:
        for arrival in store.append(Record(queues, (encode_message(b"x" * 20),) * 8).encode()):
            arrivals[arrival.queue_id] += arrival.entries
    sync(store)
    sizes = []
    for queue in queues[:40]:
        store.settle(queue, arrivals.pop(queue), True)
        sync(store)
        merge_all(store)
        sizes.append(
            len(files.names["d/acks.0000000001"].data) if "d/acks.0000000001" in files.names else 0
        )
    assert max(sizes) <= 2000 + 300, "one flush beyond"
    expected = all_of(store, arrivals)
    again = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096)
    assert (
        all_of(again, {queue: found.entries for queue, found in again.recover(queues).items()})
        == expected
    )


def test_when_the_disk_is_full_files_that_wait_to_be_removed_go_at_once() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = filled(store, 100)
    store.settle(1, entries, True)
    assert len([name for name in files.names if "spare" in name]) > 8
    files.bytes_max = sum(len(inode.data) for inode in files.names.values())
    assert len(filled(store, 60)) == 60
    assert store.stats()["disk_bytes"] <= files.bytes_max


def test_files_that_wait_to_be_removed_when_the_process_ends_are_no_messages_afterwards() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = filled(store, 100)
    store.settle(1, entries, True)
    files = files.restarted(power_cut=False)
    again = opened(files)
    assert len([name for name in files.names if "msgs" in name]) == 1, (
        "the open one, whose acks were not written"
    )
    merge_all(again)
    assert len(files.names) <= 4


def test_a_merge_that_is_still_running_does_not_hold_up_the_end() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store, 20)
    expected = all_of(store, kept)
    job = store.begin_reclaim()
    assert job is not None
    store.close(kept)
    job.run()
    again = files.restarted(power_cut=False)
    assert job.path in again.names
    assert recovered(again) == expected
    merge_all(opened(again))
    assert job.path not in again.names


def test_what_was_merged_and_then_settled_does_not_come_back_from_its_first_file() -> None:
    files = FaultyFiles()
    store = opened(files)
    kept = nearly_empty(store, 20)
    while store.compact():
        pass
    sync(store)
    assert store.begin_reclaim() is not None, "removes them, but does not come to it"
    for queue, entries in kept.items():
        store.settle(queue, entries, True)
    store.close({})
    assert recovered(files.restarted(power_cut=False)) == {}


def test_no_segment_has_the_number_of_one_whose_file_it_may_take() -> None:
    """A power cut may leave the new name and the old header."""
    files = FaultyFiles()
    store = opened(files)
    store.settle(1, filled(store, 60), True)
    sync(store)
    files = files.restarted(power_cut=False)
    for name in [name for name in files.names if "msgs" in name]:
        del files.names[name]
    again = opened(files)
    spares = [
        decode_header(files.names[spare.path].data) for spare in again._segments.reclaimer.spares
    ]
    (arrival,) = again.append(one(1))
    assert any(spares) and all(
        header is None or header[0] < arrival.entries[0] >> 32 for header in spares
    )
