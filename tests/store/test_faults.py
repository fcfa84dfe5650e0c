"""Test a disk that is full, broken, torn or written by a later version."""

from __future__ import annotations

import errno
import random
import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.errors import Corrupt, DiskFull, FormatTooNew, StoreFailed
from shardmq.shardd.store.format import manifest
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.segments import SegmentStore, recovery
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import Fault, FaultyFiles
from tests.support.syncing import sync

RECORD_BYTES = 3 * 200 + 64  # more than any of three short messages takes


def one(number: int, size: int = 300) -> bytes:
    return Record((1,), (encode_message(b"x" * size, b"", b"%d" % number),)).encode()


def opened(files: FaultyFiles) -> SegmentStore:
    store = SegmentStore("d", files=files, segment_bytes=4096)
    store.recover([1])
    return store


def read_all(store: SegmentStore, entries: array[int]) -> list[bytes]:
    return split_messages(store.read(entries, 1 << 30)[0])


@pytest.mark.parametrize("call", ["allocate", "open"])
@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_with_a_full_disk_appends_are_refused_whole_and_all_else_goes_on(
    call: str, times: int
) -> None:
    files = FaultyFiles()
    store = opened(files)
    files.fail[call] = (times, errno.ENOSPC)
    kept: array[int] = array("Q")
    with pytest.raises(DiskFull):
        for number in range(200):
            kept.extend(
                store.append(one(number) + one(number + 1000, 9000) + one(number + 2000))[0].entries
            )
    before = store.stats()
    with pytest.raises(DiskFull):
        store.append(b"".join(one(number) for number in range(50)))
    assert store.stats()["live_messages"] == before["live_messages"] == len(kept)
    assert len(read_all(store, kept)) == len(kept)
    if call == "open":
        del files.fail[call]
    sync(store)
    half = len(kept) // 2
    store.settle(1, kept[:half], True)
    files.fail.clear()
    more = store.append(b"".join(one(number) for number in range(50)))[0].entries
    sync(store)
    store = SegmentStore("d", files=files.restarted(power_cut=True), segment_bytes=4096)
    found = store.recover([1])[1]
    assert read_all(store, found.entries)[-50:] == [
        encode_message(b"x" * 300, b"", b"%d" % number) for number in range(50)
    ]
    assert len(found.entries) >= len(kept) - half + len(more)


@pytest.mark.parametrize("call", ["write", "sync", "sync_directory", "rename"])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_after_a_failed_write_or_sync_nothing_more_is_promised(call: str, times: int) -> None:
    files = FaultyFiles()
    store = opened(files)
    store.append(one(0))
    sync(store)
    files.fail[call] = (times, errno.EIO)
    with pytest.raises(StoreFailed):
        for number in range(200):
            store.append(one(number))
            sync(store)
    files.fail.clear()
    for act in (lambda: store.append(one(1)), store.begin_sync, store.flush):
        with pytest.raises((StoreFailed, AssertionError)):
            act()
    store = SegmentStore("d", files=files.restarted(power_cut=True), segment_bytes=4096)
    assert read_all(store, store.recover([1])[1].entries)[0] == encode_message(
        b"x" * 300, b"", b"0"
    )


def test_a_rename_that_a_full_disk_refused_is_made_up_for_before_anything_is_promised() -> None:
    files = FaultyFiles()
    store = opened(files)
    store.append(one(0))
    files.fail["rename"] = (0, errno.ENOSPC)
    with pytest.raises(DiskFull):
        store.begin_sync()
    files.fail.clear()
    sync(store)
    store = SegmentStore("d", files=files.restarted(power_cut=True), segment_bytes=4096)
    assert read_all(store, store.recover([1])[1].entries) == [encode_message(b"x" * 300, b"", b"0")]


def test_a_sync_refused_for_want_of_room_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system takes what it could not write for written: the second try would succeed."""
    monkeypatch.setattr("shardmq.shardd.store.segments.syncs.UNSYNCED_MAX", 1)
    files = FaultyFiles()
    store = opened(files)
    files.fail["sync"] = (0, errno.ENOSPC)
    with pytest.raises(StoreFailed):
        for number in range(200):
            store.append(one(number))
    files.fail.clear()
    with pytest.raises(StoreFailed):
        store.begin_sync()


@pytest.mark.parametrize("error", [MemoryError(), ValueError(), RuntimeError()], ids=repr)
@pytest.mark.parametrize("call", ["sync", "sync_directory"])
def test_a_sync_that_met_anything_at_all_promises_nothing(error: Exception, call: str) -> None:
    files = FaultyFiles()
    store = opened(files)
    store.append(one(0))
    job = store.begin_sync()
    assert job is not None
    files.faults.append(Fault(call, 0, lambda: error, 1))
    with pytest.raises(StoreFailed):
        job.run()
    with pytest.raises(StoreFailed):
        store.finish_sync(job)


def test_a_merge_that_a_full_disk_gave_no_name_changes_nothing() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = array("Q", [entry for n in range(60) for entry in store.append(one(n))[0].entries])
    sync(store)
    store.settle(1, array("Q", [entry for i, entry in enumerate(entries) if i % 10]), True)
    sync(store)
    job = store.begin_reclaim()
    assert job is not None and job.sources
    job.run()
    files.faults.append(Fault("rename", 0, lambda: OSError(errno.ENOSPC, "full"), 1))
    assert job.merged is not None and store.finish_reclaim(job) == 0
    left = array("Q", entries[::10])
    assert len(read_all(store, left)) == len(left)
    sync(store)
    assert store.compact() > 0
    assert len(read_all(store, left)) == len(left)


def test_a_write_torn_at_any_byte_costs_only_what_was_being_written() -> None:
    files = FaultyFiles()
    store = opened(files)
    store.append(one(0) + one(1, 20))
    store.flush()
    (name,) = [name for name in files.names if "msgs" in name]
    before = bytes(files.names[name].data)
    store.append(one(2, 40) + one(3, 5))
    store.flush()
    after = bytes(files.names[name].data)
    first = next(i for i in range(len(after)) if after[i] != before[i])
    last = max(i for i in range(len(after)) if after[i] != before[i])
    assert last - first > 100
    for cut in range(first, last + 2):
        torn = files.restarted(power_cut=False)
        torn.names[name].data[:] = after[:cut] + before[cut:]
        again = SegmentStore("d", files=torn, segment_bytes=4096)
        found = again.recover([1])[1].entries
        assert 2 <= len(found) <= 4
        assert (
            read_all(again, found)
            == [
                encode_message(b"x" * size, b"", b"%d" % number)
                for number, size in enumerate([300, 20, 40, 5])
            ][: len(found)]
        )
        assert again.damage == [] or [one.what for one in again.damage] == ["torn"]
        assert len(found) == 4 or cut <= last


def test_a_damaged_record_is_skipped_told_by_name_and_costs_no_other() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = store.append(b"".join(one(number) for number in range(8)))[0].entries
    store.flush()
    (name,) = [name for name in files.names if "msgs" in name]
    files = files.restarted(power_cut=False)
    files.names[name].data[((entries[3] & 0xFFFFFFFF) >> 4) + 100] ^= 1
    store = SegmentStore("d", files=files, segment_bytes=4096)
    found = store.recover([1])[1]
    assert [entry & ~15 for entry in found.entries] == [
        entry for i, entry in enumerate(entries) if i != 3
    ]
    ((damage),) = store.damage
    assert (damage.what, damage.file) == ("corrupt", name.removeprefix("d/"))
    assert damage.start < (entries[3] & 0xFFFFFFFF) >> 4 < damage.stop
    segment, kept = files.names[name].data, files.names[name.replace("msgs", "damaged")].data
    assert (
        kept[:64] == segment[:64] and kept[damage.start :] == segment[damage.start : damage.stop]
    ), "kept for people"
    assert not any(kept[64 : damage.start])


def test_more_damage_than_is_kept_aside_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "DAMAGED_BYTES_MAX", 100)
    files = FaultyFiles()
    store = opened(files)
    entries = store.append(b"".join(one(number) for number in range(8)))[0].entries
    store.flush()
    files = files.restarted(power_cut=False)
    (name,) = [name for name in files.names if "msgs" in name]
    files.names[name].data[((entries[3] & 0xFFFFFFFF) >> 4) + 100] ^= 1
    store = SegmentStore("d", files=files, segment_bytes=4096)
    assert len(store.recover([1])[1].entries) == 7 and len(store.damage) == 1
    assert not any("damaged" in name for name in files.names)


def test_a_damaged_header_that_the_index_can_tell_is_mended_and_costs_nothing() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = store.append(b"".join(one(number) for number in range(8)))[0].entries
    sync(store)
    store.close({1: entries})
    (name,) = [name for name in files.names if "msgs" in name]
    files.names[name].data[20] ^= 1
    store = SegmentStore("d", files=files, segment_bytes=4096)
    found = store.recover([1])[1].entries
    assert found == entries and len(read_all(store, found)) == 8
    assert [damage.what for damage in store.damage] == ["mendable"]
    store.close({1: entries})
    store = SegmentStore("d", files=files, segment_bytes=4096)
    assert store.recover([1])[1].entries == entries and not store.damage


@pytest.mark.parametrize("again", [False, True], ids=["in the same life", "after a clean stop"])
def test_what_broke_behind_a_good_index_is_never_read_and_costs_no_other(again: bool) -> None:
    """A recovery believes the index and reads no record: who reads it does."""
    files = FaultyFiles()
    store = opened(files)
    batches = [
        b"".join(one(number) for number in range(start, start + 4)) for start in range(0, 40, 4)
    ]
    entries = array("Q", [entry for batch in batches for entry in store.append(batch)[0].entries])
    sync(store)
    if again:
        store.close({1: entries})
        store = SegmentStore("d", files=files, segment_bytes=4096)
        assert list(store.recover([1])[1].entries) == list(entries)
    bad = entries[5]
    name = f"d/msgs.{bad >> 32:010d}"
    files.names[name].data[((bad & 0xFFFFFFFF) >> 4) + 100] ^= 1
    assert read_all(store, entries[:5]) and any("index." in name for name in files.names)
    with pytest.raises(Corrupt, match=f"the record at byte .* of {name} is damaged"):
        store.read(entries[5:], 1 << 30)
    assert not any("index." in name for name in files.names if not name.endswith(manifest.NAME))
    store.close(None)
    store = SegmentStore("d", files=files, segment_bytes=4096)
    found = store.recover([1])[1].entries
    assert [entry & ~15 for entry in found] == [entry for entry in entries if entry != bad]
    assert [damage.what for damage in store.damage] == ["corrupt"]
    assert len(read_all(store, found)) == 39


def read_in_small_pieces(store: SegmentStore, entries: array[int]) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < len(entries):
        found += split_messages(store.read(entries[len(found) :], 700)[0])
    return found


@settings(max_examples=200)
@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 3))
def test_whatever_bits_flip_no_damaged_message_is_read_and_only_what_is_beside_them_is_lost(
    pick: random.Random, clean: bool, flips: int
) -> None:
    files = FaultyFiles()
    store = opened(files)
    sent: dict[int, bytes] = {}
    for start in range(0, 60, 3):
        numbers = range(start, start + 3)
        bodies = tuple(encode_message(b"%d " % number * 60, b"", b"") for number in numbers)
        entries = store.append(Record((1,), bodies).encode())[0].entries
        sent.update(zip(entries, bodies, strict=True))
    sync(store)
    store.close({1: array("Q", sent)} if clean else None)
    names = sorted(name for name in files.names if "spare" not in name)
    hit: dict[str, set[int]] = {}
    for _ in range(flips):
        name = pick.choice(names)
        at = pick.randrange(len(files.names[name].data))
        files.names[name].data[at] ^= 1 << pick.randrange(8)
        hit.setdefault(name, set()).add(at)
    for _ in range(2):
        store = SegmentStore("d", files=files, segment_bytes=4096)
        arrivals = store.recover([1])
        found = arrivals[1].entries if arrivals else array("Q")
        try:
            bodies_found = read_in_small_pieces(store, found)
            break
        except Corrupt:
            store.close(None)
    else:
        raise AssertionError("found damaged again by the one who reads, after all was read anew")
    assert bodies_found == [sent[entry & ~15] for entry in found]
    lost = set(sent) - {entry & ~15 for entry in found}
    for entry in lost:
        places = hit.get(f"d/msgs.{entry >> 32:010d}", set())
        index = f"d/index.{entry >> 32:010d}"
        near = any(abs(at - ((entry & 0xFFFFFFFF) >> 4)) < RECORD_BYTES for at in places)
        assert near or (min(places, default=64) < 64 and (index in hit or index not in names)), (
            entry,
            hit,
        )


def test_a_segment_without_a_good_header_is_kept_aside_and_told() -> None:
    files = FaultyFiles()
    store = opened(files)
    store.append(one(0))
    store.flush()
    (name,) = [name for name in files.names if "msgs" in name]
    files = files.restarted(power_cut=False)
    files.names[name].data[20] ^= 1
    store = SegmentStore("d", files=files, segment_bytes=4096)
    assert store.recover([1]) == {}
    assert [damage.what for damage in store.damage] == ["header"]
    assert [name for name in files.names if "lost." in name]
    assert store.append(one(1))


@pytest.mark.parametrize("kind", ["index", "acks", "state"])
def test_a_damaged_companion_file_costs_no_message(kind: str) -> None:
    for at in (0, 9, 17, 30, 45, -1):
        files = FaultyFiles()
        store = opened(files)
        entries = store.append(b"".join(one(number) for number in range(30)))[0].entries
        store.settle(1, entries[1:3], True)
        sync(store)
        store.close({1: array("Q", [entries[0] | 1, *entries[3:]])})
        names = [name for name in files.names if kind in name]
        assert names
        files = files.restarted(power_cut=False)
        for name in names:
            data = files.names[name].data
            data[min(at, len(data) - 1)] ^= 1
        store = SegmentStore("d", files=files, segment_bytes=4096)
        found = [entry & ~15 for entry in store.recover([1])[1].entries]
        assert set(found) >= {entries[0], *entries[3:]} and found == sorted(found)


def test_files_of_a_later_version_are_left_alone() -> None:
    files = FaultyFiles()
    store = opened(files)
    store.append(one(0))
    store.close({})
    (name,) = [name for name in files.names if "msgs" in name]
    head = files.names[name].data
    struct.pack_into("<II", head, 8, 99, crc32c(bytes(head[16:64]), 99))
    with pytest.raises(FormatTooNew):
        opened(files)
    assert name in files.names
