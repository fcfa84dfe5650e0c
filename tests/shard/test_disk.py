"""A slow call of the disk is told once, and once more when it is over.

Those who ask later hear of it too.
"""

from __future__ import annotations

import contextlib
import threading
from array import array

import pytest

from shardmq.shardd.disk import Calls, StallWatch, WatchedFiles
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.wire.messages import DISK_STALLED, NODE_STALLED, TOO_FEW_IN_SYNC
from tests.reference.record import Record, encode_message
from tests.support.faulty_files import FaultyFiles, Hang

STALL_S = 10.0


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[str] = []
        self.calls = Calls(lambda: self.now)
        self.calls_the_disk = self.calls.timed("sync", lambda then: then())
        self.watch = StallWatch(
            self.calls, STALL_S, self.told.append, lambda: self.told.append("over")
        )

    def after(self, seconds: float) -> list[str]:
        self.now += seconds
        self.told.clear()
        self.watch.check()
        return self.told


def test_only_a_call_that_takes_too_long_is_told_and_only_once() -> None:
    bench = Bench()

    def meanwhile() -> None:
        assert bench.after(STALL_S) == []
        assert bench.after(0.1) == ["disk does not answer: sync takes more than 10 s"]
        assert bench.after(100) == []

    bench.calls_the_disk(meanwhile)
    assert bench.after(0) == ["over"]
    assert bench.after(100) == []


def test_what_a_sync_waits_for_is_told_as_it_is_now(caplog: pytest.LogCaptureFixture) -> None:
    bench, why = Bench(), [TOO_FEW_IN_SYNC]
    bench.watch = StallWatch(
        bench.calls, STALL_S, bench.told.append, lambda: bench.told.append("over"), lambda: why[0]
    )

    def meanwhile() -> None:
        said = "too few nodes are in sync: sync takes more than 10 s"
        assert bench.after(STALL_S + 1) == [said]
        assert bench.watch.why == TOO_FEW_IN_SYNC
        why[0] = NODE_STALLED
        assert bench.after(1) == ["a node in sync does not answer: sync takes more than 10 s"]
        assert bench.watch.why == NODE_STALLED
        assert bench.after(1) == []

    bench.calls_the_disk(meanwhile)
    why[0] = DISK_STALLED
    assert bench.after(0) == ["over"]
    assert bench.watch.why == NODE_STALLED, "for who looks only now"
    assert "disk" not in caplog.text.replace("shardd.disk", "").replace("disk.py", "")


def test_many_short_calls_are_no_long_one() -> None:
    bench = Bench()
    for _ in range(100):
        bench.calls_the_disk(lambda: bench.after(STALL_S / 2))
        assert bench.told == []


def test_a_stall_that_is_over_before_somebody_asks_is_seen_once() -> None:
    bench = Bench()
    assert not bench.watch.seen()
    bench.calls_the_disk(lambda: bench.after(STALL_S + 1))
    bench.after(0)
    assert bench.watch.seen()
    assert not bench.watch.seen()


def test_the_call_of_another_thread_counts_and_a_failed_one_ends() -> None:
    bench, entered, leave = Bench(), threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        leave.wait()
        raise OSError("and then it fails")

    def run() -> None:
        with contextlib.suppress(OSError):
            bench.calls_the_disk(hang)

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    assert bench.after(STALL_S + 1) != []
    leave.set()
    thread.join()
    assert bench.after(0) == ["over"]


@pytest.mark.row("K14")
def test_a_merge_that_hangs_is_a_stall() -> None:
    bench, disk = Bench(), FaultyFiles()
    store = SegmentStore("d", files=WatchedFiles(disk, bench.calls), segment_bytes=4096)
    store.recover([1])
    record = Record((1,), (encode_message(b"x" * 900),)).encode()
    entries = array("Q", [store.append(record)[0].entries[0] for _ in range(40)])
    sync = store.begin_sync()
    assert sync is not None
    sync.run()
    store.finish_sync(sync)
    store.settle(1, array("Q", [entry for at, entry in enumerate(entries) if at % 8]), True)
    job = store.begin_reclaim()
    assert job is not None and job.sources
    hang = disk.hang["read"] = Hang()
    thread = threading.Thread(target=job.run)
    thread.start()
    hang.begun.wait()
    assert bench.after(STALL_S + 1) == ["disk does not answer: read takes more than 10 s"]
    hang.over.set()
    thread.join()
    assert bench.after(0) == ["over"]
    assert store.finish_reclaim(job) > 0


def test_every_call_that_may_block_is_watched() -> None:
    """Whatever a store's files can do, but for making up a number."""
    calls = Calls()
    seen: set[str] = set()

    class Noting(FaultyFiles):
        def _call(self, name: str) -> None:
            assert calls.longest()[1], f"{name} goes unwatched"
            seen.add(name)

    files = WatchedFiles(Noting(), calls)
    files.make_directory("d")
    handle = files.open("d/a", create=True)
    files.allocate(handle, 16)
    files.write(handle, b"1234", 0)
    files.truncate(handle, 2)
    assert files.read_into(handle, memoryview(bytearray(2)), 0) == files.size(handle) == 2
    files.sync(handle)
    files.close(handle)
    files.rename("d/a", "d/b")
    files.sync_directory("d")
    assert files.list("d") == ["b"]
    files.remove("d/b")
    files.remove_directory("d")
    assert files.salt() and calls.longest() == (0.0, "")
    assert len(seen) == 13
