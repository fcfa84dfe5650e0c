"""Test that damage in a stream is reported once, with the offsets that it costs.

The first process that meets the damage reports it. A missing file is reported too, and is never
taken for a segment that retention has deleted.
"""

from __future__ import annotations

import random
import struct
from array import array
from pathlib import Path

import pytest

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.errors import FormatTooNew
from shardmq.shardd.store.format import manifest
from shardmq.shardd.store.format.chunk import expanded
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.format.segment_file import encode_header
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.tools.stream_inspection import StreamContents
from tests.reference.record import Record, encode_message
from tests.support.faulty_files import FaultyFiles
from tests.support.syncing import sync

QUEUE = 1


def one(number: int, size: int) -> bytes:
    return Record((QUEUE,), (encode_message(b"x" * size, b"", b"%d" % number),)).encode()


def written(
    files: FaultyFiles, rng: random.Random, batches: int, segment_bytes: int = 1 << 16
) -> None:
    log = StreamLog("s", files=files, segment_bytes=segment_bytes)
    log.recover()
    for number in range(batches):
        log.append(
            b"".join(one(number, rng.choice([10, 200, 3000])) for _ in range(rng.randint(1, 9)))
        )
        if rng.random() < 0.5:
            sync(log)
    log.close()


def opened(files: FaultyFiles, segment_bytes: int = 1 << 16) -> tuple[StreamLog, list[Damage]]:
    log, heard = StreamLog("s", files=files, segment_bytes=segment_bytes), []
    log.recover()
    log.known_damage.heard = heard.append
    return log, heard


def offsets_read(log: StreamLog, start: int, rng: random.Random) -> list[int]:
    found: list[int] = []
    while start < log.committed_offset:
        read = log.read(start, rng.choice([1, 5000, 1 << 20]))
        found += expanded(read.runs, 0)
        start = read.next_offset
    return found


@pytest.mark.parametrize("seed", range(25))
def test_a_flipped_bit_in_a_sealed_file_is_told_with_the_offsets_that_readers_miss(
    seed: int,
) -> None:
    rng, files = random.Random(seed), FaultyFiles(seed)
    written(files, rng, 60)
    names = sorted(name for name in files.names if "/log." in name)
    for name in rng.sample(names, k=min(len(names), rng.randint(1, 2))):
        data = files.names[name].data
        data[rng.randrange(64, len(data))] ^= 1 << rng.randrange(8)
    log, heard = opened(files)
    assert heard == [] and log.stats()["damaged"] == 0, "an index is believed until somebody reads"
    there = offsets_read(log, rng.randrange(log.next_offset // 2), rng)
    there = sorted(set(there) | set(offsets_read(log, 0, rng)))
    lost = [offset for first, behind in log.gaps for offset in range(first, behind)]
    assert sorted(there + lost) == list(range(log.next_offset)), seed
    assert heard and heard == log.damage and len(set(heard)) == len(heard)
    assert log.stats()["damaged"] == len(heard)
    assert {(one.what, one.stop > one.start) for one in heard} == {("corrupt", True)}
    before = list(heard)
    assert offsets_read(log, 0, rng) == there and heard == before, "told once"


@pytest.mark.parametrize("seed", range(5))
def test_the_tool_tells_the_same_places_and_offsets(seed: int) -> None:
    rng, files = random.Random(seed), FaultyFiles(seed)
    written(files, rng, 40)
    name = rng.choice(sorted(name for name in files.names if "/log." in name))
    data = files.names[name].data
    data[rng.randrange(64, len(data))] ^= 1
    log, _ = opened(files)
    offsets_read(log, 0, rng)
    contents = StreamContents(files, "s")
    list(contents.tallies())
    assert [(one, one.offsets) for one in contents.damage] == [
        (one, one.offsets) for one in log.damage
    ]


def test_damage_that_a_recovery_finds_has_its_offsets_too() -> None:
    rng, files = random.Random(3), FaultyFiles(3)
    written(files, rng, 60)
    name = sorted(name for name in files.names if "/log." in name)[1]
    files.names[name].data[len(files.names[name].data) // 2] ^= 1
    for index in [name for name in files.names if "/index." in name]:
        del files.names[index]
    log, _ = opened(files)
    assert log.stats()["damaged"] == len(log.damage) == 1
    lost = [offset for first, behind in log.gaps for offset in range(first, behind)]
    assert lost and sorted(offsets_read(log, 0, rng) + lost) == list(range(log.next_offset))


@pytest.mark.parametrize("which", ["first but one", "middle", "last", "only"])
def test_a_stream_file_that_is_gone_is_told_and_its_offsets_are_not_used_again(which: str) -> None:
    rng, files = random.Random(5), FaultyFiles(5)
    written(files, rng, 2 if which == "only" else 60)
    names = sorted(name for name in files.names if "/log." in name)
    assert len(names) == 1 or which != "only"
    gone = {"first but one": 1, "middle": len(names) // 2, "last": -1, "only": 0}[which]
    whole, _ = opened(files.restarted(power_cut=False))
    segments = [int(name.rpartition(".")[2]) for name in names] + [whole.next_offset]
    first = segments[gone - 1 if gone == -1 else gone]
    behind = segments[segments.index(first) + 1]
    del files.names[names[gone]]
    for _ in range(2):
        log, _ = opened(files)
        assert log.damage == [Damage(f"log.{first:020d}", "missing", 0, 0)] and log.gaps == [
            (first, behind)
        ]
        assert log.stats()["damaged"] == 1 and log.next_offset == whole.next_offset
        assert offsets_read(log, 0, rng) == [*range(first), *range(behind, log.next_offset)]
        assert [one.what for one in StreamContents(files, "s").damage] == ["missing"]
        log.close()
    log, _ = opened(files)
    assert log.append(one(1, 5)) == whole.next_offset
    log.close()
    # Once newer messages are there, what was before them all might as well have been let go of.
    assert opened(files)[0].gaps == ([] if which == "only" else [(first, behind)])


@pytest.mark.parametrize("seed", range(10))
def test_a_stream_file_that_is_gone_after_a_crash_costs_its_own_messages_alone(seed: int) -> None:
    """Also the last one that was whole: what was written behind it is no torn end."""
    rng, files = random.Random(seed), FaultyFiles(seed)
    log, _ = opened(files)
    while len(message_files(files, "log")) < 4:
        log.append(b"".join(one(number, 3000) for number in range(rng.randint(1, 9))))
        sync(log)
    for _ in range(rng.randint(1, 3)):
        log.append(one(1, 10))
        sync(log)
    end = log.next_offset
    files = files.restarted(power_cut=False)
    names = message_files(files, "log")
    gone = rng.choice([1, len(names) - 2])
    first, behind = (int(name.rpartition(".")[2]) for name in names[gone : gone + 2])
    del files.names[names[gone]]
    for _ in range(2):
        log, _ = opened(files)
        assert log.gaps == [(first, behind)] and log.next_offset == end
        assert {one.what for one in log.damage} == {"missing"}
        assert offsets_read(log, 0, rng) == [*range(first), *range(behind, end)]
        files = files.restarted(power_cut=False)


def test_without_its_index_a_stream_file_in_the_middle_is_missed_too() -> None:
    rng, files = random.Random(5), FaultyFiles(5)
    written(files, rng, 60)
    names = sorted(name for name in files.names if "/log." in name)
    first, behind = (int(names[at].rpartition(".")[2]) for at in (2, 3))
    for name in (names[2], names[2].replace("/log.", "/index.")):
        del files.names[name]
    assert opened(files)[0].gaps == [(first, behind)]


@pytest.mark.parametrize("seed", range(20))
def test_what_retention_takes_is_never_told_as_missing(seed: int) -> None:
    rng, files = random.Random(seed), FaultyFiles(seed)
    log, _ = opened(files)
    for number in range(80):
        act = rng.choice(["append", "append", "sync", "retain", "truncate", "restart", "cut"])
        if act == "append":
            log.append(b"".join(one(number, 3000) for _ in range(9)))
        elif act == "sync":
            sync(log)
        elif act == "retain":
            sync(log)
            log.retain(1, max_bytes=rng.choice([1, 100_000]))
        elif act == "truncate":
            log.truncate()
        else:
            if act == "restart" and rng.random() < 0.5:
                log.close()
            files = files.restarted(power_cut=act == "cut")
            log, _ = opened(files)
            assert not [one for one in log.damage if one.what == "missing"], seed


def test_a_message_file_that_is_gone_since_a_clean_stop_is_told(tmp_path: Path) -> None:
    directory = str(tmp_path / "d")
    store = SegmentStore(directory, segment_bytes=4096)
    store.recover([QUEUE])
    entries: array[int] = array("Q")
    for number in range(40):
        entries += store.append(one(number, 1000))[0].entries
        sync(store)
    store.settle(QUEUE, entries[:20], True)
    store.close({QUEUE: entries[20:]})
    kept = SegmentStore(directory, segment_bytes=4096)
    kept.recover([QUEUE])
    assert kept.damage == [] and kept.stats()["damaged"] == 0, "what was settled has gone for good"
    kept.close({QUEUE: entries[20:]})
    gone = sorted((tmp_path / "d").glob("msgs.*"))[-2]
    gone.unlink()
    store = SegmentStore(directory, segment_bytes=4096)
    found = store.recover([QUEUE])[QUEUE]
    assert store.damage == [Damage(gone.name, "missing", 0, 0)] and store.stats()["damaged"] == 1
    assert 0 < len(found.entries) < 20


def killed(files: FaultyFiles, batches: int = 40) -> tuple[FaultyFiles, array[int]]:
    """Return the files of a process that was killed a second after its last message.

    Return also the entries.
    """
    store = SegmentStore("d", files=files, segment_bytes=4096)
    store.recover([QUEUE])
    entries: array[int] = array("Q")
    for number in range(batches):
        entries += store.append(one(number, 1000))[0].entries
        sync(store)
    store.settle(QUEUE, entries[: batches // 4], True)
    settled_sync(store)
    return files.restarted(power_cut=False), entries


def settled_sync(store: SegmentStore) -> None:
    job = store.begin_settled_sync()
    if job is not None:
        job.run()
        store.finish_settled_sync(job)


def message_files(files: FaultyFiles, kind: str = "msgs") -> list[str]:
    return sorted(name for name in files.names if f"/{kind}." in name)


def reopened(files: FaultyFiles) -> SegmentStore:
    store = SegmentStore("d", files=files, segment_bytes=4096)
    store.recover([QUEUE])
    return store


def test_a_message_file_that_is_gone_after_a_crash_is_told_once() -> None:
    files, _ = killed(FaultyFiles(1))
    gone = message_files(files)[2]
    del files.names[gone]
    store = reopened(files)
    assert store.damage == [Damage(gone[2:], "missing", 0, 0)] and store.stats()["damaged"] == 1
    assert reopened(files.restarted(power_cut=False)).damage == []


def test_the_newest_file_that_is_gone_leaves_its_number_free_for_when_it_is_put_back() -> None:
    files, _ = killed(FaultyFiles(1))
    gone = max(name for name in files.names if "/msgs." in name)
    del files.names[gone]
    store = reopened(files)
    assert store.damage == [Damage(gone[2:], "missing", 0, 0)]
    (arrival,) = store.append(one(1, 10))
    assert arrival.entries[0] >> 32 > int(gone.rpartition(".")[2])


def test_files_that_nobody_has_listed_are_listed_by_the_next_process() -> None:
    """Of a version that kept no list, say."""
    files, _ = killed(FaultyFiles(1))
    del files.names[f"d/{manifest.NAME}"]
    store = reopened(files)
    assert store.damage == []
    for _ in range(2):
        settled_sync(store)
    files = files.restarted(power_cut=False)
    gone = message_files(files)[2]
    del files.names[gone]
    assert [one.file for one in reopened(files).damage] == [gone[2:]]


def test_what_was_merged_and_removed_is_not_missed_where_a_power_cut_took_the_list_back() -> None:
    files = FaultyFiles(1)
    listed = manifest.Manifest(files, "d")
    for number in (1, 2, 3):
        listed.is_lasting(number)
    listed.write()
    handle = files.open("d/spare.0000000007", create=True)
    files.write(handle, encode_header(2, 5, 4096, first=1), 0)
    assert [one.file for one in reopened(files).damage] == ["msgs.0000000003"]


def test_a_full_disk_keeps_no_store_from_starting_and_from_removing_what_was_listed() -> None:
    files, entries = killed(FaultyFiles(1))
    files.fill()
    gone = message_files(files)[2]
    del files.names[gone]
    store = reopened(files)
    assert [one.file for one in store.damage] == [gone[2:]]
    first = int(gone.rpartition(".")[2]) + 1
    store.settle(
        QUEUE, array("Q", [entry for entry in entries if first <= entry >> 32 < first + 3]), True
    )
    store.compact()
    assert reopened(files.restarted(power_cut=False)).damage == []


@pytest.mark.parametrize("room", range(0, 200, 8))
def test_a_list_that_finds_no_room_lists_nothing_that_nobody_would_clear(room: int) -> None:
    files = FaultyFiles(1)
    listed = manifest.Manifest(files, "d")
    files.bytes_max = room
    for number in range(1, 4):
        listed.is_lasting(number)
    listed.write()
    listed.clear(2)
    for number in range(4, 12):
        listed.is_lasting(number)
    listed.write()
    data = files.names[f"d/{manifest.NAME}"].data if f"d/{manifest.NAME}" in files.names else b""
    told = manifest.Manifest(files, "d").read(bytes(data))
    assert set(told) == {number for number in range(1, 12) if number in listed}


def test_the_list_has_the_bytes_that_its_format_says() -> None:
    files = FaultyFiles(1)
    listed = manifest.Manifest(files, "d")
    for number in (3, 1 << 33):
        listed.is_lasting(number)
    listed.write()
    listed.clear(3)
    slot = struct.pack("<QI", 1 << 33, 0)
    data = bytes(files.names["d/index.0000000000"].data)
    assert data == struct.pack("<8sII", b"SHMQMANI", 1, crc32c(b"", 1)) + bytes(
        16
    ) + slot + struct.pack("<I", crc32c(slot, 1))
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    assert set(manifest.Manifest(files, "d").read(data)) == {1 << 33}
    assert not manifest.Manifest(files, "d").read(flipped), "what cannot be read is not listed"
    later = struct.pack("<8sII", b"SHMQMANI", 2, crc32c(b"", 2)) + data[16:]
    with pytest.raises(FormatTooNew, match="index.0000000000 has format 2"):
        manifest.Manifest(files, "d").read(later)
