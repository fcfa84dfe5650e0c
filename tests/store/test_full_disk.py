"""Test a disk that something else has filled, by bytes or by inodes, at any moment.

A batch is refused as a whole, and everything else goes on. Stores and streams start and stop on the
full disk, and go on when there is room again.
"""

from __future__ import annotations

import errno
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles
from tests.support.small_disk import small_disk, take_all_bytes, take_all_inodes
from tests.support.syncing import sync

WAYS = [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.ENOSPC, True), (errno.EDQUOT, True)]
QUEUE = 1


def one(number: int, size: int = 300) -> bytes:
    return Record((QUEUE,), (message(number, size),)).encode()


def message(number: int, size: int = 300) -> bytes:
    return encode_message(b"x" * size, b"", b"%d" % number)


def store_on(files: FaultyFiles) -> tuple[SegmentStore, array[int]]:
    store = SegmentStore("d", files=files, segment_bytes=4096)
    found = store.recover([QUEUE]).get(QUEUE)
    return store, found.entries if found is not None else array("Q")


def stream_on(files: FaultyFiles) -> StreamLog:
    log = StreamLog("s", files=files, segment_bytes=4096)
    log.recover()
    return log


@pytest.mark.parametrize(("error", "inodes"), WAYS)
def test_a_store_begins_on_a_full_disk_and_takes_messages_when_there_is_room(
    error: int, inodes: bool
) -> None:
    files = FaultyFiles()
    files.fill(error, inodes=inodes)
    store, _ = store_on(files)
    for _ in range(3):
        with pytest.raises(DiskFull):
            store.append(one(1))
        sync(store)
    store.close({})
    store, _ = store_on(files.restarted(power_cut=False))
    store.close({})
    files.free()
    store, _ = store_on(files)
    entries = store.append(one(2))[0].entries
    sync(store)
    assert split_messages(store.read(entries, 1 << 20)[0]) == [message(2)]
    again, entries = store_on(files.restarted(power_cut=True))
    assert split_messages(again.read(entries, 1 << 20)[0]) == [message(2)]


@pytest.mark.parametrize(("error", "inodes"), WAYS)
def test_a_stream_begins_on_a_full_disk_and_takes_messages_when_there_is_room(
    error: int, inodes: bool
) -> None:
    files = FaultyFiles()
    files.fill(error, inodes=inodes)
    log = stream_on(files)
    log.positions.set(b"reader", 0)
    for _ in range(3):
        with pytest.raises(DiskFull):
            log.append(one(1))
        sync(log)
        assert QueueLog(log).batch(0, 1 << 20).next_offset == 0 and log.retain(1, max_bytes=1) == 0
    log.close()
    log = stream_on(files.restarted(power_cut=False))
    log.close()
    files.free()
    log = stream_on(files)
    log.append(one(2))
    sync(log)
    assert split_messages(log.read(0, 1 << 20).blob) == [message(2)]
    assert split_messages(stream_on(files.restarted(power_cut=True)).read(0, 1 << 20).blob) == [
        message(2)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_a_store_keeps_what_it_said_through_any_history_of_full_and_free(seed: int) -> None:
    rng, files = random.Random(seed), FaultyFiles(seed)
    store, entries = store_on(files)
    kept: list[int] = []  # of each entry, which message
    number = 0
    for _ in range(120):
        act = rng.choice(
            [
                "append",
                "append",
                "append",
                "settle",
                "sync",
                "full",
                "free",
                "restart",
                "stop",
                "reclaim",
            ]
        )
        if act == "append":
            number += 1
            try:
                entries.extend(store.append(one(number, rng.choice([20, 300, 5000])))[0].entries)
                kept.append(number)
            except DiskFull:
                assert files.bytes_max is not None or files.no_inodes, seed
        elif act == "settle" and entries:
            store.settle(QUEUE, entries[:1], True)
            del entries[0], kept[0]
        elif act == "sync":
            sync(store)
        elif act == "full":
            error, inodes = rng.choice(WAYS)
            files.fill(error, inodes=inodes)
        elif act == "free":
            files.free()
        elif act == "reclaim":
            store.compact()
        elif act in ("restart", "stop"):
            full = (files.bytes_max, files.no_inodes, files.full_error)
            if act == "stop":
                store.close({QUEUE: entries})
            else:
                sync(store)
            files = files.restarted(power_cut=False)
            files.bytes_max, files.no_inodes, files.full_error = full
            store, entries = store_on(files)
        if entries:
            whole = split_messages(store.read(entries, 1 << 30)[0])
            told = [numbered(text) for text in whole]
            # What is settled and could not be written comes again.
            assert told[-len(kept) :] == kept if kept else True, seed
            if act in ("restart", "stop"):
                kept = told
        else:
            assert not kept, seed


def numbered(stored: bytes) -> int:
    key = 9 + stored[8]
    return int(stored[key + 1 : key + 1 + stored[key]])


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_keeps_what_it_said_through_any_history_of_full_and_free(seed: int) -> None:
    rng, files = random.Random(seed), FaultyFiles(seed)
    log = stream_on(files)
    kept: list[bytes] = []
    for number in range(120):
        act = rng.choice(
            ["append", "append", "append", "sync", "full", "free", "restart", "stop", "position"]
        )
        if act == "append":
            size = rng.choice([20, 300, 5000])
            try:
                assert log.append(one(number, size)) == len(kept), seed
                kept.append(message(number, size))
            except DiskFull:
                assert files.bytes_max is not None or files.no_inodes, seed
        elif act == "sync":
            sync(log)
        elif act == "position":
            log.positions.set(b"r", rng.randrange(100))
        elif act == "full":
            error, inodes = rng.choice(WAYS)
            files.fill(error, inodes=inodes)
        elif act == "free":
            files.free()
        elif act in ("restart", "stop"):
            full = (files.bytes_max, files.no_inodes, files.full_error)
            if act == "stop":
                log.close()
            else:
                sync(log)
            files = files.restarted(power_cut=False)
            files.bytes_max, files.no_inodes, files.full_error = full
            log = stream_on(files)
            assert log.next_offset == len(kept) and not log.damage, (seed, log.damage)
        blob = log.read(0, 1 << 30).blob
        assert split_messages(blob) == kept[: log.committed_offset], seed


@pytest.mark.parametrize("fill", [take_all_bytes, take_all_inodes])
def test_on_a_real_disk_without_room_for_a_directory_both_begin_and_end_and_go_on(
    tmp_path: Path, fill: Callable[[Path], Callable[[], None]]
) -> None:
    with small_disk(tmp_path / "disk", mib=2, inodes=40) as disk:
        free = fill(disk)
        for _ in range(2):
            store = SegmentStore(f"{disk}/shard/d", segment_bytes=1 << 16)
            log = StreamLog(f"{disk}/shard/s", segment_bytes=1 << 16)
            assert store.recover([QUEUE]) == {}
            log.recover()
            log.positions.set(b"r", 0)
            for append in (store.append, log.append):
                with pytest.raises(DiskFull):
                    append(one(1, 30_000) * 2)
            with pytest.raises(DiskFull):
                QueueLog(log).append_records(
                    memoryview(one(1, 30_000) * 2), QUEUE, True, in_sequence=True
                )
            sync(store)
            sync(log)
            store.close({})
            log.close()
        gone = StreamLog(f"{disk}/shard/gone", segment_bytes=1 << 16)
        gone.recover()
        gone.delete_all()
        free()
        store = SegmentStore(f"{disk}/shard/d", segment_bytes=1 << 16)
        store.recover([QUEUE])
        store.append(one(1))
        sync(store)
        log = StreamLog(f"{disk}/shard/s", segment_bytes=1 << 16)
        log.recover()
        log.append(one(2))
        sync(log)
        store.close({})
        log.close()
        assert split_messages(stream_of(f"{disk}/shard/s").read(0, 1 << 20).blob) == [message(2)]


def stream_of(directory: str) -> StreamLog:
    log = StreamLog(directory, segment_bytes=1 << 16)
    log.recover()
    return log


@pytest.mark.parametrize("fill", [take_all_bytes, take_all_inodes])
def test_the_position_of_a_reader_waits_for_a_stream_to_have_a_directory(
    tmp_path: Path, fill: Callable[[Path], Callable[[], None]]
) -> None:
    with small_disk(tmp_path / "disk", mib=2, inodes=40) as disk:
        free = fill(disk)
        log = stream_of(f"{disk}/shard/s")
        log.positions.set(b"reader", 1)
        sync(log)
        assert log.begin_settled_sync() is None
        free()
        log.append(one(1))
        sync(log)
        if (job := log.begin_settled_sync()) is not None:  # unless the sync has written it
            job.run()
            log.finish_settled_sync(job)
        log.close()
        assert stream_of(f"{disk}/shard/s").positions.get(b"reader") == 1


@pytest.mark.parametrize("fill", [take_all_bytes, take_all_inodes])
def test_a_purge_of_a_stream_on_a_full_disk_ends_nothing(
    tmp_path: Path, fill: Callable[[Path], Callable[[], None]]
) -> None:
    with small_disk(tmp_path / "disk", mib=2, inodes=40) as disk:
        log = stream_of(f"{disk}/shard/s")
        log.append(one(1))
        sync(log)
        free = fill(disk)
        assert not log.truncate(), "nothing went"
        assert (log.first_offset, log.next_offset) == (0, 1)
        free()
        log.append(one(2))
        sync(log)
        assert split_messages(log.read(log.first_offset, 1 << 20).blob)[-1] == message(2)
        assert log.truncate()
        assert (log.first_offset, log.next_offset) == (2, 2)
        log.close()
        assert stream_of(f"{disk}/shard/s").next_offset == 2
