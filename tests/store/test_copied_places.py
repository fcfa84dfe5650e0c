"""Positions and producers that a copy of a stream takes over last after its next sync."""

from __future__ import annotations

import pytest

from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from tests.reference.record import Record, encode_message
from tests.support.faulty_files import FaultyFiles
from tests.support.producer_lives import IN_SEQUENCE, message
from tests.support.stream_history import SEGMENT_BYTES
from tests.support.syncing import sync


class Counting(FaultyFiles):
    """Counts the syncs of files and directories."""

    syncs = 0

    def sync(self, handle: int) -> None:
        self.syncs += 1
        super().sync(handle)

    def sync_directory(self, path: str) -> None:
        self.syncs += 1
        super().sync_directory(path)


def of_a_producer() -> bytes:
    """Return how far a producer has come at another place."""
    log = StreamLog("s", files=FaultyFiles(), segment_bytes=SEGMENT_BYTES)
    log.recover()
    record = Record((1,), (message(b"p", 7, 10),), 1000, flags=IN_SEQUENCE).encode()
    QueueLog(log).append_records(memoryview(record), 1, alone=True, in_sequence=True)
    return log.producers.table.all_places()


def a_copy(files: FaultyFiles, is_synced: bool = True) -> StreamLog:
    log = StreamLog("d", files=files, segment_bytes=SEGMENT_BYTES, sync=is_synced)
    log.recover()
    log.append(Record((1,), (encode_message(b"x", b"", b"k"),), 1000, 5).encode())
    sync(log)
    return log


@pytest.mark.parametrize("before", [{}, {b"old": 1}], ids=["new", "known"])
def test_positions_and_producers_last_after_a_job_and_nothing_is_synced_before_it(
    before: dict[bytes, int],
) -> None:
    files = Counting()
    log = a_copy(files)
    for name, offset in before.items():
        log.positions.set(name, offset)
    sync(log)
    files.syncs = 0
    log.copies.take_places({b"name": 1}, of_a_producer())
    job = log.begin_sync()
    assert job is not None and files.syncs == 0
    job.run()
    log.finish_sync(job)
    assert files.syncs and not log.copies.lacks_room
    again = StreamLog("d", files=files.restarted(power_cut=True), segment_bytes=SEGMENT_BYTES)
    again.recover()
    assert again.positions.offsets == {b"name": 1}
    assert again.producers.table.all_places() == of_a_producer()


@pytest.mark.parametrize("seed", range(8))
def test_positions_last_whatever_a_power_cut_takes(seed: int) -> None:
    files = FaultyFiles(seed)
    log = a_copy(files)
    log.positions.set(b"old", 1)
    sync(log)
    log.copies.take_places({b"name": 1}, b"")
    job = log.begin_sync()
    assert job is not None
    log.positions.set(b"later", 1)
    log.flush()  # must not write to the file that the job replaces
    job.run()
    log.finish_sync(job)
    again = StreamLog("d", files=files.restarted(power_cut=True), segment_bytes=SEGMENT_BYTES)
    again.recover()
    assert again.positions.offsets == {b"name": 1}
    log.close()
    again = StreamLog("d", files=files.restarted(power_cut=True), segment_bytes=SEGMENT_BYTES)
    again.recover()
    assert again.positions.offsets == {b"name": 1, b"later": 1}


@pytest.mark.parametrize("is_synced", [True, False], ids=["synced", "without syncs"])
@pytest.mark.parametrize("places", ["positions", "producers"])
def test_a_copy_without_room_for_places_says_so_until_there_is_room(
    places: str, is_synced: bool
) -> None:
    files = FaultyFiles()
    log = a_copy(files, is_synced)
    files.fill()
    positions = {b"name": 1} if places == "positions" else {}
    log.copies.take_places(positions, of_a_producer() if places == "producers" else b"")
    sync(log)
    assert log.copies.lacks_room
    files.free()
    log.copies.take_places(positions, b"")
    sync(log)
    assert not log.copies.lacks_room
