"""What a store promises while it lives and when it is stopped or killed."""

from __future__ import annotations

import contextlib
import errno
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.queues.entry import LASTING_KIND, TRANSIENT_KIND
from shardmq.shardd.store.errors import Closed, StoreFailed
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.segments.pending_acks import ACKS_HANDLES_MAX
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import Fault, FaultyFiles
from tests.support.store_history import History
from tests.support.syncing import sync

SEEDS = st.integers(0, 1 << 32)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_clean_stop_keeps_exactly_what_is_live_in_order_with_flags(seed: int) -> None:
    history = History(seed)
    for _ in range(3):
        history.play(40)
        history.stop_cleanly()


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_killed_process_loses_nothing_that_was_flushed(seed: int) -> None:
    history = History(seed)
    for _ in range(3):
        history.play(40)
        history.crash(power_cut=False)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_stops_of_every_kind_follow_each_other(seed: int) -> None:
    history = History(seed)
    for _ in range(4):
        history.play(25)
        end = history.random.choice(["stop", "kill", "power cut"])
        if end == "stop":
            history.stop_cleanly()
        else:
            history.crash(power_cut=end == "power cut")


def one(body: bytes, *queues: int, key: bytes = b"k") -> bytes:
    return Record(queues or (1,), (encode_message(body, b"", key),)).encode()


def opened(
    files: FaultyFiles, queues: tuple[int, ...] = (1,), segment_bytes: int = 4096
) -> SegmentStore:
    store = SegmentStore("d", files=files, segment_bytes=segment_bytes)
    store.recover(queues)
    return store


def test_what_was_consumed_a_second_before_it_would_be_written_never_comes_back() -> None:
    for seed in range(20):  # each loses other parts of what was not synced
        files = FaultyFiles(seed)
        store = opened(files)
        (consumed,) = store.append(one(b"consumed"))
        store.settle(1, consumed.entries, True)
        assert store.begin_settled_sync() is None  # each second; nothing is in a file
        store.append(one(b"later"))
        sync(store)
        found = SegmentStore("d", files=files.restarted(power_cut=True), segment_bytes=4096)
        assert len(found.recover([1])[1].entries) == 1


def test_a_sync_opens_no_acks_file_that_one_before_it_has_written_to() -> None:
    files = FaultyFiles()
    store = opened(files)
    (arrival,) = store.append(one(b"x") * 20)
    sync(store)
    opens = []
    for entry in arrival.entries[:3]:
        store.settle(1, array("Q", [entry]), True)
        store.append(one(b"later"))
        files.calls.clear()
        sync(store)
        opens.append((files.calls.count("open"), files.calls.count("close")))
    assert opens == [(1, 0), (0, 0), (0, 0)]
    open_files = len(files.handles)
    store.settle(1, arrival.entries[3:], True)
    store.close()
    assert open_files and not files.handles


def test_few_acks_files_stay_open_and_none_of_a_segment_that_is_gone() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries = array("Q", [store.append(one(b"x" * 900))[0].entries[0] for _ in range(64)])
    sync(store)
    kept = len(files.handles)
    by_segment = {entry >> 32: entry for entry in entries}
    assert len(by_segment) > ACKS_HANDLES_MAX
    for entry in by_segment.values():
        store.settle(1, array("Q", [entry]), True)
    store.flush()
    assert acks_files_open(files) == ACKS_HANDLES_MAX == len(files.handles) - kept
    store.settle(1, array("Q", [one for one in entries if one not in by_segment.values()]), True)
    store.flush()
    sync(store)
    # What is open now was written to last: of the segment to which messages go.
    assert acks_files_open(files) <= 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_acks_file_that_could_not_be_written_is_closed(error: int) -> None:
    files = FaultyFiles()
    store = opened(files)
    (arrival,) = store.append(one(b"x") * 3)
    sync(store)
    store.settle(1, arrival.entries[:1], True)
    store.flush()
    assert acks_files_open(files) == 1
    store.settle(1, arrival.entries[1:2], True)
    files.faults.append(Fault("write", 0, lambda: OSError(error, "on purpose"), 1))
    with contextlib.suppress(StoreFailed):
        store.flush()
    assert acks_files_open(files) == 0
    if error == errno.ENOSPC:  # they wait for room
        store.flush()
        found = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096)
        assert len(found.recover([1])[1].entries) == 1


def acks_files_open(files: FaultyFiles) -> int:
    names = [inode for name, inode in files.names.items() if name.startswith("d/acks.")]
    return sum(any(inode is known for known in names) for inode in files.handles.values())


def test_messages_consumed_before_a_flush_never_touch_the_disk() -> None:
    files = FaultyFiles()
    store = opened(files)
    for number in range(1000):
        (arrival,) = store.append(one(b"%d" % number * 50))
        store.settle(1, arrival.entries, True)
        store.flush()
    assert files.calls.count("write") == 0
    assert files.calls.count("allocate") <= 3
    assert store.stats()["segments"] <= 2


def test_files_of_dead_segments_are_used_again_and_the_rest_removed() -> None:
    files = FaultyFiles()
    store = opened(files)
    entries: list[array[int]] = []
    for number in range(100):
        entries.append(store.append(one(b"x" * 900, key=b"%d" % number))[0].entries)
        sync(store)
    assert store.stats()["segments"] >= 20
    for some in entries:
        store.settle(1, some, True)
    store.compact()
    assert len(files.names) <= 4
    allocated = files.calls.count("allocate")
    for _ in range(10):
        store.append(one(b"y" * 900))
        sync(store)
    assert files.calls.count("allocate") <= allocated + 2


@pytest.mark.parametrize("power_cut", [False, True])
def test_records_of_a_file_s_former_life_never_come_back(power_cut: bool) -> None:
    files = FaultyFiles()
    store = opened(files)
    for _ in range(3):
        (arrival,) = store.append(b"".join(one(b"old", key=b"%d" % n) for n in range(80)))
        sync(store)
        store.settle(1, arrival.entries, True)
    store.append(one(b"new"))
    sync(store)
    files = files.restarted(power_cut=power_cut)
    store = SegmentStore("d", files=files, segment_bytes=4096)
    found = store.recover([1])
    (message,) = split_messages(store.read(found[1].entries[-1:], 1 << 20)[0])
    assert message == encode_message(b"new", b"", b"k")
    assert not store.damage


def test_a_record_bigger_than_a_segment_gets_one_of_its_own() -> None:
    files = FaultyFiles()
    store = opened(files)
    (arrival,) = store.append(one(b"before") + one(b"B" * 3_000_000) + one(b"after"))
    blob, sizes = store.read(arrival.entries, 1 << 30)
    assert list(sizes) == [6, 3_000_000, 5] and split_messages(blob)[1] == encode_message(
        b"B" * 3_000_000
    )
    sync(store)
    store = SegmentStore("d", files=files.restarted(power_cut=True), segment_bytes=4096)
    found = store.recover([1])
    assert store.read(found[1].entries, 1 << 30)[0] == blob
    store.settle(1, found[1].entries, True)
    assert store.stats()["segments"] == 0


def test_entries_of_queues_that_are_gone_are_dropped_and_free_their_segments() -> None:
    files = FaultyFiles()
    store = opened(files, (1, 2))
    for _ in range(20):
        store.append(one(b"x" * 500, 1, 2))
    store.close({})
    store = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096)
    assert set(store.recover([2])) == {2}
    store.close({})
    store = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096)
    assert store.recover([3]) == {}
    assert store.stats()["segments"] == 0


def test_timestamps_come_with_recovery_for_the_queues_that_ask() -> None:
    files = FaultyFiles()
    store = opened(files, (1, 2))
    store.append(
        Record((1, 2), (encode_message(b"a"), encode_message(b"b")), timestamp=77).encode()
    )
    store.close({})
    found = SegmentStore("d", files=files, segment_bytes=4096).recover([1, 2], timed=[2])
    assert found[1].times is None and list(found[2].times or []) == [77, 77]


def test_a_sequential_backlog_is_read_in_large_pieces() -> None:
    files = FaultyFiles()
    store = opened(files, segment_bytes=1 << 20)
    entries: array[int] = array("Q")
    for _ in range(40):
        entries.extend(
            store.append(Record((1,), (encode_message(b"x" * 1000),) * 200).encode())[0].entries
        )
    store.close(None)
    store = SegmentStore("d", files=files, segment_bytes=1 << 20)
    entries = store.recover([1])[1].entries
    files.calls.clear()
    for at in range(0, len(entries), 50):
        assert len(split_messages(store.read(entries[at : at + 50], 1 << 20)[0])) == 50
    assert files.calls.count("read") <= 40


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    st.integers(1, 400_000),
    st.integers(0, 3),
)
def test_looks_that_need_not_be_whole_give_all_of_it_in_order(
    sizes: list[int], bytes_max: int, kept: int
) -> None:
    """Of the disk, of memory, and of both."""
    files = FaultyFiles()
    store = opened(files, segment_bytes=1 << 20)
    entries: array[int] = array("Q")
    bodies = [bytes([n % 251]) * sizes[n % len(sizes)] for n in range(3000)]
    for n in range(0, len(bodies), 30):
        record = Record((1,), tuple(encode_message(body) for body in bodies[n : n + 30]))
        entries.extend(store.append(record.encode())[0].entries)
        if n % 300 == 0 and n < kept * 1000:
            sync(store)
    found: list[bytes] = []
    pieces = 0
    while len(found) < len(entries):
        blob, counted = store.look(entries[len(found) :], bytes_max, False)
        messages = split_messages(bytes(blob))
        assert len(counted) == len(messages) > 0 and (len(blob) <= bytes_max or len(messages) == 1)
        found += messages
        pieces += len(blob) < min(bytes_max, 128 << 10) // 2 and len(found) < len(entries)
    assert found == [encode_message(body) for body in bodies]
    longest = max(map(len, found)) + 1
    assert pieces <= 8 or bytes_max < 2 * longest, "many small pieces"


def test_delete_all_leaves_nothing() -> None:
    files = FaultyFiles()
    store = opened(files)
    for _ in range(30):
        store.append(one(b"x" * 800))
        sync(store)
    store.delete_all()
    assert files.names == {} and files.handles == {}
    with pytest.raises(Closed):
        store.append(one(b"x"))


def test_a_batch_that_is_not_whole_and_true_is_refused_whole() -> None:
    store = opened(FaultyFiles())
    good = one(b"good")
    for at in range(len(good)):
        bad = bytearray(good + good)
        bad[len(good) + at] ^= 4
        with pytest.raises(ValueError, match="of the batch"):
            store.append(bad)
        with pytest.raises(ValueError, match="of the batch"):
            store.append((good + good)[: len(good) + at] if at else b"short")
    assert store.stats()["live_messages"] == 0
    assert store.append(b"") == []


def test_the_real_disk_serves_too(tmp_path: object) -> None:
    path = f"{tmp_path}/deep/store"
    store = SegmentStore(path, files=OsFiles(), segment_bytes=1 << 16)
    assert store.recover([1]) == {}
    batches = [one(b"x" * 5000, key=b"%d" % number) for number in range(40)]
    entries: array[int] = array("Q")
    for batch in batches:
        entries.extend(store.append(batch)[0].entries)
        sync(store)
    blob, _ = store.read(entries, 1 << 30)
    store.settle(1, entries[:30], True)
    store.close({1: entries[30:]})
    store = SegmentStore(path, segment_bytes=1 << 16)
    found = store.recover([1])
    assert found[1].entries == entries[30:]
    assert store.read(found[1].entries, 1 << 30)[0] == b"".join(split_messages(blob)[30:])
    store.delete_all()
    assert OsFiles().list(f"{tmp_path}/deep") == []


@pytest.mark.parametrize("end", ["stop", "kill", "index"])
def test_a_queue_is_told_again_what_marks_its_messages_have(end: str) -> None:
    """The marks are the flags 4 and 8 of a record.

    Queues whose marked messages are all settled need none.
    """
    files = FaultyFiles()
    store = opened(files, (1, 2, 3))
    message = (encode_message(b"x", b"", b"k"),)
    flags = {(1, 2): 1 | 8, (2, 3): 1, (2,): 4}
    records = [Record(queues, message, flags=flags[queues]) for queues in flags]
    arrivals = store.append(b"".join(record.encode() for record in records))
    assert {arrival.queue_id: arrival.marks for arrival in arrivals} == {1: 8, 2: 12, 3: 0}
    if end == "index":
        store.append(b"".join(one(b"y" * 900) for _ in range(8)))
    sync(store)
    if end == "stop":
        store.close(
            {
                1: array("Q", arrivals[0].entries),
                2: array("Q", arrivals[1].entries),
                3: arrivals[2].entries,
            }
        )
    found = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096).recover(
        [1, 2, 3]
    )
    assert {queue: arrival.marks for queue, arrival in found.items()} == {1: 8, 2: 12, 3: 0}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_queue_is_told_again_what_kinds_of_messages_it_has(end: str) -> None:
    """Queues of which all messages of one kind are settled have the other kind alone."""
    files = FaultyFiles()
    store = opened(files, (1, 2, 3))
    message = (encode_message(b"x", b"", b"k"),)
    records = [Record(queues, message, flags=flags) for queues, flags in (((1, 3), 1), ((2, 3), 0))]
    arrivals = store.append(b"".join(record.encode() for record in records))
    kinds = {1: LASTING_KIND, 2: TRANSIENT_KIND, 3: LASTING_KIND | TRANSIENT_KIND}
    assert {arrival.queue_id: arrival.kinds for arrival in arrivals} == kinds
    mixed = next(arrival for arrival in arrivals if arrival.queue_id == 3)
    store.settle(3, mixed.entries[:1], True)
    sync(store)
    if end == "stop":
        store.close({arrival.queue_id: arrival.entries for arrival in arrivals})
    found = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096).recover(
        [1, 2, 3]
    )
    kinds[3] = TRANSIENT_KIND if end == "stop" else found[3].kinds
    assert {queue: arrival.kinds for queue, arrival in found.items()} == kinds
    assert found[3].kinds & TRANSIENT_KIND


def test_the_start_of_a_message_is_read_wherever_the_message_lies(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    store = SegmentStore(path, segment_bytes=4096)
    store.recover([1])
    entries = array("Q")
    for number in range(12):
        message = encode_message(b"%d" % number * 900, b"", b"key")
        (arrival,) = store.append(Record((1,), (message,)).encode())
        entries += arrival.entries
    sync(store)
    wholes = [store.read(entries[i : i + 1], 1)[0] for i in range(12)]
    assert [store.peek(entry, 64) for entry in entries] == [whole[:64] for whole in wholes]
    assert store.peek(entries[0], 1 << 20)[: len(wholes[0])] == wholes[0]
    store.close()
    again = SegmentStore(path, segment_bytes=4096)
    found = again.recover([1])[1].entries
    assert [again.peek(entry, 64) for entry in found] == [whole[:64] for whole in wholes]
    again.close()
    assert again.peek(found[0], 64) == b"", "a store that is closed reads nothing"


def test_a_store_knows_when_its_messages_came_also_after_a_restart() -> None:
    """Each time is that of the first note behind the message, or of the last record before one."""
    files = FaultyFiles()
    store = opened(files, (1,))
    entries, times = [], []
    for number in range(40):
        times.append(1_000_000 + 1500 * number)
        message = (encode_message(b"x" * 300, b"", b"k"),)
        (arrival,) = store.append(Record((1,), message, timestamp=times[-1]).encode())
        entries.append(arrival.entries[0])
        assert store.came_at(entries[-1]) is None, "not noted yet"
        store.note_time(times[-1] + 10)
    assert [store.came_at(entry) for entry in entries] == [time + 10 for time in times]
    sync(store)
    again = SegmentStore("d", files=files.restarted(power_cut=False), segment_bytes=4096)
    found = again.recover([1])[1].entries
    assert [again.came_at(entry) for entry in found] == times
