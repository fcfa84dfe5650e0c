"""Play a store through random lives of several kinds, each a function of its seed alone.

Some stores are broken on purpose: if the lives do not catch these, the lives prove nothing. The
disk (faulty_files.py) loses unsynced bytes sector by sector, of 512 bytes or of 4 KiB, in any
combination. It tears writes at any byte, is full, breaks or hangs at any call, and flips bits.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from shardmq.shardd.store.errors import Corrupt, StoreFailed
from shardmq.shardd.store.files import read_file
from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.manifest import NAME as MANIFEST
from shardmq.shardd.store.format.manifest import Manifest
from shardmq.shardd.store.format.segment_file import file_name, parse_name
from shardmq.shardd.store.segments import ReclaimJob, SegmentStore
from shardmq.shardd.store.segments.reclaim import Reclaimer
from shardmq.shardd.store.segments.recovery import Reader
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.sync import SyncJob
from tests.support.faulty_files import Fault, Hang, PowerCut
from tests.support.store_history import DIRECTORY, History

# Calls that may fail, and how.
FAILURES = {
    "write": (errno.EIO, errno.ENOSPC), "allocate": (errno.ENOSPC, errno.EIO),
    "open": (errno.ENOSPC, errno.EIO), "sync": (errno.EIO, errno.ENOSPC),
    "sync_directory": (errno.EIO, errno.ENOSPC), "rename": (errno.EIO, errno.ENOSPC),
    "truncate": (errno.EIO,), "remove": (errno.EIO,), "read": (errno.EIO,),
}  # fmt: skip
# Whatever else an act may raise; a promise that is broken is an AssertionError.
NOT_OF_THE_DISK = (MemoryError, ValueError, RuntimeError)


def power_cuts(seed: int, store_class: type[SegmentStore] = SegmentStore) -> None:
    """Two lives, each ended in the middle of a call."""
    history = History(seed, store_class=store_class)
    for _ in range(2):
        history.files.cut_after = history.random.choice([3, 10, 30, 100, 300])
        with contextlib.suppress(PowerCut):
            history.play(60)
        history.crash(power_cut=True)


def failing_calls(seed: int) -> None:
    """Let the n-th call of a kind fail.

    It fails once, until there is room again, or until the process has ended.
    """
    history = History(seed)
    pick = history.random
    for _ in range(2):
        call = pick.choice(list(FAILURES))
        error: Callable[[], Exception] = functools.partial(
            OSError, pick.choice(FAILURES[call]), "on purpose"
        )
        if pick.random() < 0.3:
            error = pick.choice(NOT_OF_THE_DISK)
        history.files.faults = [
            Fault(call, pick.choice([0, 1, 3, 10, 30]), error, pick.choice([1, 1 << 30]))
        ]
        with contextlib.suppress(StoreFailed, Corrupt, OSError, *NOT_OF_THE_DISK):
            history.play(40)
            history.files.faults = []
            history.play(10)
        history.files.faults = []
        history.crash(power_cut=pick.random() < 0.5)


def hanging_syncs(seed: int) -> None:
    """Let a sync hang while appends, reads and settles go on and nothing is promised.

    Then the sync ends, or the power does.
    """
    history = History(seed)
    for _ in range(3):
        history.play(10)
        history.end_sync()
        history.append()
        history.sync_step()
        if history.job is None:  # all of it was settled, or merged, already
            continue
        _hang(history, history.job)
    history.crash(power_cut=True)


def hanging_merges(seed: int) -> None:
    """Let the disk not answer a merge: appends, settles and also syncs go on."""
    history = History(seed)
    for _ in range(3):
        history.play(20)
        history.sync()
        if history.reclaim is None:
            history.reclaim_step()
        job = history.reclaim
        if job is None or job.done:
            continue
        call = history.random.choice(["read", "sync", "write", "remove"])
        _hang(history, job, call, [history.sync_step])
    history.crash(power_cut=True)


def _hang(
    history: History,
    job: SyncJob | ReclaimJob,
    call: str = "sync",
    more: Sequence[Callable[[], None]] = (),
) -> None:
    hang = history.files.hang[call] = Hang()
    running = threading.Thread(target=job.run, daemon=True)
    running.start()
    try:
        while not hang.begun.wait(0.001) and running.is_alive():
            pass  # a job that only has a directory to sync does not hang
        history.files.hang.clear()
        for _ in range(history.random.randint(1, 20)):
            history.random.choice(
                [history.append, history.append, history.read, history.settle, *more]
            )()
        if history.random.random() < 0.5:
            history.crash(power_cut=True)  # of a disk that never came back
    finally:
        hang.over.set()
        running.join()
    if isinstance(job, SyncJob) and history.job is job:
        history.store.finish_sync(job)
        history.sync_ended()
    elif history.reclaim is job:
        history.reclaim_step()


def flipped_bits(seed: int) -> None:
    """Flip bits in a file of messages while the process is down.

    Only messages that lay there are lost, and nothing damaged comes.
    """
    history = History(seed)
    history.play(60)
    history.end_sync()
    before = {queue_id: dict(queue.live) for queue_id, queue in history.queues.items()}
    must = _what_was_flushed(history)
    history.files = history.files.restarted(power_cut=False)
    name = _flip_a_bit(history)
    if not name:
        return
    try:
        history.start_again(power_cut=False)
    # met while reading: the process ends, and the next finds all but what is damaged
    except Corrupt:
        history.start_again(power_cut=False)
    number = int(name.rpartition(".")[2])
    for queue_id, queue in history.queues.items():
        lost = [message for message in must[queue_id] if message not in queue.live]
        assert history.merged or all(
            before[queue_id][message] >> 32 == number for message in lost
        ), "lost elsewhere"
        # Who was cut off may have told it.
        assert not lost or history.store.damage or history.recovery_cut, (
            "a loss that nobody is told of"
        )


def bits_flipped_before_merging(seed: int) -> None:
    """Flip a bit while the process lives and merges.

    No merge copies damaged messages, and none loses them silently. Nobody reads meanwhile, because
    messages that were found good once are not checked again.
    """
    history = History(seed)
    history.play(60)
    history.end_sync()
    name = _flip_a_bit(history)
    there = _messages_in(history, name)
    acts = [history.append, history.settle, history.sync, history.compact, history.reclaim_step]
    with contextlib.suppress(Corrupt):
        for _ in range(20):
            history.random.choice(acts)()
    there |= _messages_in(history, name)  # a bad header costs what came behind it too
    must = _what_was_flushed(history)
    try:
        history.start_again(power_cut=False)
    except Corrupt:
        history.start_again(power_cut=False)
    for queue_id, queue in history.queues.items():
        lost = must[queue_id] - set(queue.live)
        assert lost <= there, "lost elsewhere"
        assert not lost or history.store.damage or history.recovery_cut, (
            "a loss that nobody is told of"
        )


def files_taken(seed: int, store_class: type[SegmentStore] = SegmentStore) -> None:
    """Remove a message file while the process is down, however it ended.

    A file that was listed is reported as missing, and the lost messages were in it.
    """
    history = History(seed, store_class=store_class)
    history.play(history.random.choice([40, 80]))
    for _ in range(history.random.randint(0, 4)):  # a second or two, without much to do
        history.sync()
        history.settled_step()
    power_cut = history.random.random() < 0.5
    history.files = history.files.restarted(power_cut=power_cut)
    candidates = listed(history)
    if not candidates:
        return
    number = history.random.choice(candidates)
    before = {queue_id: dict(queue.live) for queue_id, queue in history.queues.items()}
    must = {
        queue_id: queue.owed - queue.settled
        for queue_id, queue in history.queues.items()
        if queue.durable
    }
    history.taken = {file_name("msgs", number)}
    del history.files.names[f"{DIRECTORY}/{file_name('msgs', number)}"]
    history.start_again(power_cut=False)
    told = [one for one in history.store.damage if one.what == "missing"]
    assert told or history.recovery_cut, "a file that is gone and that nobody is told of"
    for queue_id, owed in must.items():
        lost = owed - set(history.queues[queue_id].live)
        assert history.merged or all(before[queue_id][one] >> 32 == number for one in lost), (
            "lost elsewhere"
        )
    history.play(10)
    history.crash(power_cut=False)  # told once, and no more


def listed(history: History) -> list[int]:
    """Return the message files that the list on the disk names and no other file proves."""
    files = history.files
    reader = Reader(files, DIRECTORY, False)
    numbers = Manifest(files, DIRECTORY).read(read_file(files, f"{DIRECTORY}/{MANIFEST}"))
    names = [parsed for parsed in map(parse_name, files.list(DIRECTORY)) if parsed]
    reclaimer = Reclaimer(files, DIRECTORY, history.segment_bytes, 0, False)
    spares = [reclaimer.numbers_of(number) for kind, number in names if kind == "spare"]
    there = reader.take_away_merged(
        sorted(number for kind, number in names if kind == "msgs"), repair=False
    )
    spoken_for = {number for first, last in spares for number in there if first <= number <= last}
    return [number for number in there if number in numbers and number not in spoken_for]


def _what_was_flushed(history: History) -> dict[int, set[bytes]]:
    """Return the messages that must be there after an end without a power cut."""
    queues = history.queues.items()
    return {
        queue_id: queue.flushed - queue.settled if queue.durable else set()
        for queue_id, queue in queues
    }


def _flip_a_bit(history: History) -> str:
    """In which file of messages; "" if there is none."""
    names = [name for name in history.files.names if name.startswith(f"{DIRECTORY}/msgs.")]
    if not names:
        return ""
    name = history.random.choice(names)
    data = history.files.names[name].data
    data[history.random.randrange(len(data))] ^= 1 << history.random.randrange(8)
    return name


def _messages_in(history: History, name: str) -> set[bytes]:
    segments = history.store._by_number
    lives = [queue.live.items() for queue in history.queues.values()]
    return {
        message for live in lives for message, entry in live if segments[entry >> 32].path == name
    }


def stops_of_every_kind(seed: int) -> None:
    history = History(seed)
    for _ in range(3):
        history.play(40)
        end_somehow(history)


def much_merging(seed: int) -> None:
    history = History(seed)
    for _ in range(2):
        for _ in range(8):
            history.play(8)
            history.sync()
            history.compact()
        end_somehow(history)


def without_syncs(seed: int) -> None:
    """Kill a store that nobody syncs: all messages that the process has flushed are there."""
    history = History(seed, sync=False)
    for _ in range(2):
        history.play(40)
        if history.random.random() < 0.3:
            history.stop_cleanly()
        else:
            history.crash(power_cut=False)


def end_somehow(history: History) -> None:
    end = history.random.choice(["stop", "kill", "power cut"])
    if end == "stop":
        history.stop_cleanly()
    else:
        history.crash(power_cut=end == "power cut")


# How many of each one run of all tests plays.
LIVES: dict[Callable[[int], None], int] = {
    power_cuts: 600,
    failing_calls: 350,
    hanging_syncs: 150,
    hanging_merges: 100,
    flipped_bits: 200,
    bits_flipped_before_merging: 200,
    stops_of_every_kind: 60,
    much_merging: 40,
    without_syncs: 100,
    files_taken: 200,
}


# -- broken on purpose -----------------------------------------------------------------------------


class ConfirmsBeforeSync(SegmentStore):
    def begin_sync(self) -> SyncJob | None:
        self.flush()
        return None


class ForgetsNames(SegmentStore):
    """Syncs its files, but not the directory that names them."""

    def begin_sync(self) -> SyncJob | None:
        job = super().begin_sync()
        if job is not None:
            job.with_directory = False
        return job


class ListsTooEarly(SegmentStore):
    """Lists files whose names may not outlive a power cut."""

    def __init__(self, directory: str, **more: Any) -> None:
        super().__init__(directory, **more)
        flush_segment = self._flusher.flush_segment

        def flush_and_list(segment: Segment) -> None:
            flush_segment(segment)
            if segment.flushed:
                self._segments.reclaimer.manifest.is_lasting(segment.number)
                self._segments.reclaimer.manifest.write()

        self._flusher.flush_segment = flush_and_list  # type: ignore[method-assign]


@contextlib.contextmanager
def files_listed_still() -> Iterator[None]:
    """Break the manifest on purpose: removed files stay in the list."""
    with mock.patch.object(Manifest, "clear"):
        yield


@contextlib.contextmanager
def list_not_synced() -> Iterator[None]:
    """Files are removed or used again before the list lasts that does not name them."""
    with mock.patch.object(Manifest, "begin_sync", lambda manifest: None):
        yield


@contextlib.contextmanager
def checksums_not_looked_at() -> Iterator[None]:
    """Recovery takes whatever has a length for a record."""
    scan = record.scan

    def gullible(
        segment: bytearray, start: int, stop: int, salt: int
    ) -> tuple[bytes, int, list[tuple[int, int]]]:
        at = start
        while (
            at + 8 < stop
            and 8 < (size := int.from_bytes(segment[at : at + 4], "little")) <= stop - at
        ):
            crc = record.crc32c(memoryview(segment)[at + 8 : at + size]) ^ salt
            segment[at + 4 : at + 8] = crc.to_bytes(4, "little")
            at += size
        return scan(segment, start, stop, salt)

    with mock.patch.object(record, "scan", gullible):
        yield


@contextlib.contextmanager
def merges_unchecked() -> Iterator[None]:
    """Only merging takes whatever has a length for a record."""
    read_records = Reader.read_records

    def gullible(
        reader: Reader, handle: int, start: int, stop: int, salt: int
    ) -> tuple[bytes, bool]:
        with checksums_not_looked_at():
            return read_records(reader, handle, start, stop, salt)

    with mock.patch.object(Reader, "read_records", gullible):
        yield
