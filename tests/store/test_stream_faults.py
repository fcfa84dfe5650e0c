"""Test a stream on a disk that is full, broken or damaged."""

from __future__ import annotations

import errno
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.errors import Closed, Corrupt, DiskFull, StoreFailed
from shardmq.shardd.store.streams import StreamCache, StreamLog, TooManyNames, positions
from shardmq.shardd.store.streams.reading import HANDLES_MAX, INDEXES_BYTES_MAX
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles
from tests.support.syncing import sync


def text(number: int, size: int = 300) -> bytes:
    return encode_message(b"x" * size, b"", b"%d" % number)


def one(number: int, size: int = 300) -> bytes:
    return Record((1,), (text(number, size),), 1000 + number).encode()


def opened(
    files: FaultyFiles, segment_bytes: int = 4096, cache: StreamCache | None = None
) -> StreamLog:
    log = StreamLog("d", files=files, segment_bytes=segment_bytes, cache=cache)
    log.recover()
    return log


def filled(files: FaultyFiles, count: int, size: int = 300, segment_bytes: int = 4096) -> StreamLog:
    """One message an append, each but the first few of a file with a mark."""
    log = opened(files, segment_bytes)
    for number in range(count):
        assert log.append(one(number, size)) == number
        sync(log)
    return log


def read_all(log: StreamLog, offset: int = 0, bytes_max: int = 1000) -> dict[int, bytes]:
    """Message by offset."""
    found: dict[int, bytes] = {}
    while offset < log.committed_offset:
        got = log.read(offset, bytes_max)
        messages = iter(split_messages(got.blob))
        for first, count in zip(got.runs[::2], got.runs[1::2], strict=True):
            for at in range(first, first + count):
                assert at >= offset and at not in found
                found[at] = next(messages)
        assert got.next_offset > offset
        offset = got.next_offset
    return found


@pytest.mark.parametrize("call", ["allocate", "open"])
@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_with_a_full_disk_appends_are_refused_whole_and_all_else_goes_on(
    call: str, times: int
) -> None:
    files = FaultyFiles()
    log = opened(files)
    files.fail[call] = (times, errno.ENOSPC)
    with pytest.raises(DiskFull):
        for number in range(0, 3000, 3):
            log.append(one(number) + one(number + 1, 9000) + one(number + 2))
    taken = log.next_offset
    assert taken % 3 == 0
    with pytest.raises(DiskFull):
        for _ in range(3):
            log.append(b"".join(one(number, 9000) for number in range(50)))
    assert log.next_offset == taken
    names = {name for name in files.names if "log." in name}
    assert len(names) == log.stats()["segments"], "no file of what was refused stays"
    del files.fail[call]
    sync(log)
    assert log.committed_offset == taken and len(read_all(log)) == taken
    for number in range(taken, taken + 30):
        assert log.append(one(number, 300)) == number
    sync(log)
    log = opened(files.restarted(power_cut=True))
    assert list(read_all(log)) == list(range(taken + 30)) and log.damage == []


@pytest.mark.parametrize("call", ["write", "sync", "sync_directory"])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_after_a_failed_write_or_sync_nothing_more_is_promised(call: str, times: int) -> None:
    files = FaultyFiles()
    log = filled(files, 1)
    files.fail[call] = (times, errno.EIO)
    committed = 1
    with pytest.raises(StoreFailed):
        for number in range(1, 200):
            log.append(one(number))
            sync(log)
            committed = number + 1
    files.fail.clear()
    for act in (lambda: log.append(one(1)), log.begin_sync, log.flush, log.seal, log.truncate):
        with pytest.raises((StoreFailed, AssertionError)):
            act()
    assert log.committed_offset == committed and len(read_all(log)) == committed, "reading goes on"
    log = opened(files.restarted(power_cut=True))
    assert [found for _, found in sorted(read_all(log).items())][:committed] == [
        text(n) for n in range(committed)
    ]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_a_damaged_chunk_is_skipped_told_and_costs_no_other_offset(seed: int, clean: bool) -> None:
    """The log is at rest or running.

    After a crash nothing proves that the last chunk was whole.
    """
    pick = random.Random(seed)
    files = FaultyFiles(seed)
    log = filled(files, 40, 60, segment_bytes=pick.choice([4096, 1 << 20]))
    if clean:
        log.close()
    names = [name for name in files.names if "log." in name]
    running = not clean and pick.random() < 0.5
    files = files if running else files.restarted(power_cut=False)
    flips = []
    for _ in range(pick.choice([1, 1, 3])):
        name = pick.choice(names)
        data = files.names[name].data
        used = len(bytes(data).rstrip(b"\0"))
        at = pick.randrange(64, used - (0 if clean or running else 300))
        data[at] ^= 1 << pick.randrange(8)
        flips.append((name.removeprefix("d/"), at))
    log = log if running else opened(files, 1 << 20)
    whole = {number: text(number, 60) for number in range(40)}
    found = read_all(log, bytes_max=pick.choice([50, 500, 1 << 20]))
    assert all(whole[at] == message for at, message in found.items())
    assert len(found) >= 40 - len(flips), "one chunk for each bit"
    assert log.next_offset == 40
    # Padding is in the crc too: every bit counts.
    assert len(found) < 40 or len({at for _, at in flips}) < len(flips)
    for name, at in flips if len(found) < 40 else []:
        told = [one for one in log.damage if one.file == name and one.start <= at < one.stop]
        assert told or len(flips) > 1, (flips, log.damage)
    before = len(log.damage)
    assert read_all(log) == found and len(log.damage) == before, "told once"
    assert log.append(one(40, 60)) == 40
    sync(log)
    assert read_all(log) == found | {40: text(40, 60)}


def test_a_reader_in_the_middle_of_damage_comes_out_behind_it() -> None:
    files = FaultyFiles()
    log = filled(files, 30, 60, segment_bytes=1 << 20)
    (name,) = [name for name in files.names if "log." in name]
    data = files.names[name].data
    at = 64 + 30 * 112 // 3
    data[at : at + 500] = bytes(500)
    missing = set(range(30)) - set(read_all(log))
    assert 4 <= len(missing) <= 6
    for offset in missing:
        assert log.read(offset, 1).runs.tolist() == [max(missing) + 1, 1]
    (damage,) = log.damage
    assert damage.what == "corrupt" and damage.start <= at and damage.stop >= at + 500


def test_a_segment_without_a_good_header_is_kept_aside_and_its_offsets_are_not_used_again() -> None:
    files = FaultyFiles()
    filled(files, 40).close()
    names = sorted(name for name in files.names if "log." in name)
    assert len(names) > 3
    for name, number in ((names[1], 1), (names[-1], 2)):
        after = files.restarted(power_cut=False)
        after.names[name].data[20] ^= 1
        log = opened(after)
        assert [damage.what for damage in log.damage] == ["header"]
        assert name.replace("log.", "lost.") in after.names
        first, found = int(name.rpartition(".")[2]), read_all(log)
        assert first not in found and all(found[at] == text(at) for at in found)
        assert (39 in found) == (number == 1) and 0 in found
        assert log.next_offset >= 40
        again = log.append(one(99))
        assert again >= 40
        sync(log)
        log = opened(after.restarted(power_cut=True))
        assert read_all(log) == found | {again: text(99)}


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("what", ["removed", "emptied", "broken"])
def test_an_index_is_a_cache(what: str, clean: bool) -> None:
    files = FaultyFiles()
    log = filled(files, 40)
    if clean:
        log.close()
    files = files.restarted(power_cut=False)
    for name in [name for name in files.names if "index." in name]:
        if what == "removed":
            del files.names[name]
        elif what == "emptied":
            files.names[name].data.clear()
        else:
            files.names[name].data[50] ^= 4
    log = opened(files)
    assert [read_all(log)[at] for at in range(40)] == [text(at) for at in range(40)]
    assert log.damage == [] and log.last_chunk_offset == 39 and log.find(1020) == 20
    assert opened(files.restarted(power_cut=True)).next_offset == 40


def test_what_cannot_be_read_is_said_and_can_be_tried_again() -> None:
    files = FaultyFiles()
    log = filled(files, 20)
    files.fail["read"] = (0, errno.EIO)
    with pytest.raises(Corrupt, match="cannot read byte"):
        log.read(0, 1 << 20)
    files.fail.clear()
    assert len(read_all(log)) == 20 and log.damage == []


def test_a_message_larger_than_a_segment_window_and_chunk_is_a_message_like_others() -> None:
    files = FaultyFiles()
    log = opened(files)
    sizes = [10, 300_000, 20, 3_000_000, 3_000_000, 30]
    log.append(b"".join(one(number, size) for number, size in enumerate(sizes)))
    sync(log)
    for bytes_max in (0, 1000, 400_000, 1 << 30):
        assert list(read_all(log, bytes_max=bytes_max).values()) == [
            text(n, size) for n, size in enumerate(sizes)
        ]
    assert [log.find(1000 + number) for number in range(6)] == list(range(6)) and log.damage == []
    (name,) = [name for name in files.names if name.endswith("log.00000000000000000003")]
    files.names[name].data[2_000_000] ^= 1
    log = opened(files.restarted(power_cut=False))
    assert list(read_all(log, bytes_max=1000)) == [0, 1, 2, 4, 5]
    assert [(damage.file, damage.what) for damage in log.damage] == [
        (name.removeprefix("d/"), "corrupt")
    ]


def test_streams_that_share_a_cache_keep_few_files_open_and_few_indexes() -> None:
    files = FaultyFiles()
    cache = StreamCache(files)
    logs = [StreamLog(f"d{i}", files=files, segment_bytes=4096, cache=cache) for i in range(200)]
    for log in logs:
        log.recover()
        log.append(b"".join(one(number) for number in range(20)))
        sync(log)
        log.seal()
    for log in logs * 2:
        assert list(read_all(log)) == list(range(20))
        assert len(files.handles) <= HANDLES_MAX
        assert cache._indexes_bytes <= INDEXES_BYTES_MAX
    for log in logs:
        log.close()
    assert not files.handles


def test_named_positions_outlive_a_stop_and_their_file_does_not_grow_without_end() -> None:
    files = FaultyFiles()
    log = filled(files, 1)
    for number in range(20_000):
        log.positions.set(b"reader %d" % (number % 10), number)
        if number % 3 == 0:
            log.flush()
    log.positions.forget(b"reader 3")
    assert log.positions.get(b"reader 3") is None and log.positions.get(b"reader 9") == 19_999
    assert len(files.names["d/positions"].data) < 3 * positions.REWRITE_BYTES_MIN
    expected = dict(log.positions.offsets)
    assert len(expected) == 9
    log.close()
    files = files.restarted(power_cut=True)
    log = opened(files)
    assert dict(log.positions.offsets) == expected and log.damage == []
    files.names["d/positions"].data[-3] ^= 1
    log = opened(files)
    assert len(dict(log.positions.offsets)) >= 8 and [damage.what for damage in log.damage] == [
        "torn"
    ]
    log.positions.set(b"late", 5)
    log.close()
    assert opened(files.restarted(power_cut=False)).positions.get(b"late") == 5


def test_there_are_bounds_on_names_and_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(FaultyFiles(), 1)
    for name, offset in ((b"n" * 256, 0), (b"n", -1), (b"n", 1 << 64)):
        with pytest.raises(ValueError):
            log.positions.set(name, offset)
    monkeypatch.setattr(positions, "NAMES_MAX", 2)
    log.positions.set(b"a", 1)
    log.positions.set(b"b", 1)
    with pytest.raises(TooManyNames):
        log.positions.set(b"c", 1)
    log.positions.set(b"b", 2)
    assert dict(log.positions.offsets) == {b"a": 1, b"b": 2}


def test_a_stream_that_is_not_open_says_so() -> None:
    log = StreamLog("d", files=FaultyFiles())
    for act in (lambda: log.append(one(1)), lambda: log.read(0, 1), lambda: log.find(0), log.flush):
        with pytest.raises(Closed):
            act()
    log.recover()
    log.close()
    with pytest.raises(Closed):
        log.read(0, 1)


def test_all_files_go_with_the_stream_and_nothing_else_does() -> None:
    files = FaultyFiles()
    log = filled(files, 40)
    log.positions.set(b"n", 3)
    log.flush()
    handle = files.open("d/notes", create=True)
    files.close(handle)
    log.delete_all()
    assert list(files.names) == ["d/notes"] and not files.handles


def test_a_filter_passes_over_chunks_without_reading_for_ever() -> None:
    log = opened(FaultyFiles(), 1 << 24)
    for number in range(100):
        log.append(one(number, 60_000), array("I", [7]))
    log.append(one(100), array("I", [9]))
    sync(log)
    offset, reads = 0, 0
    while not (found := log.read(offset, 1000, array("I", [9]))).sizes:
        assert found.next_offset > offset
        offset, reads = found.next_offset, reads + 1
    assert found.runs.tolist() == [100, 1] and 1 <= reads < 5
