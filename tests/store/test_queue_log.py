"""Old segments of a stream are out of the way at once.

They are removed when somebody comes to the stream, also after a crash.
"""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from shardmq.shardd.store.streams.segment import SEGMENT_BYTES_MIN
from shardmq.shardd.store.streams.segments import GONE_PREFIX
from tests.reference.record import Record, encode_message
from tests.support.faulty_files import FaultyFiles


class Later:
    """A Remover that has not come to it."""

    def __init__(self, files: FaultyFiles) -> None:
        self.files = files
        self.paths: list[str] = []

    def remove(self, path: str) -> None:
        self.paths.append(path)

    def remove_directory(self, path: str) -> None:
        assert all(name in self.paths for name in self.files.names if name.startswith(path + "/"))

    def come_to_it(self) -> None:
        for path in dict.fromkeys(self.paths):
            self.files.remove(path)
        self.paths.clear()


def opened(files: FaultyFiles) -> tuple[StreamLog, Later]:
    later = Later(files)
    log = StreamLog(
        "s", remover=later, files=files, segment_bytes=SEGMENT_BYTES_MIN, cache=StreamCache(files)
    )
    log.recover()
    return log, later


def filled(log: StreamLog) -> None:
    for number in range(40):
        log.append(Record((1,), (encode_message(b"%d" % number + bytes(500)),)).encode())
        if number % 5 == 4:
            job = log.begin_sync()
            assert job is not None
            job.run()
            log.finish_sync(job)


def names(files: FaultyFiles) -> list[str]:
    return [name.partition("/")[2] for name in files.names]


def test_a_segment_that_goes_has_another_name_at_once() -> None:
    files = FaultyFiles()
    log, later = opened(files)
    filled(log)
    assert log.retain(0, max_messages=10) > 0
    assert sum(name.startswith("log.") for name in names(files)) == log.stats()["segments"]
    assert any(name.startswith(GONE_PREFIX) for name in names(files))
    first = log.first_offset
    found = QueueLog(log).batch(0, 1 << 20)
    assert [entry - 1 for entry in found.entries] == list(range(first, 40))
    later.come_to_it()
    assert not any(name.startswith(GONE_PREFIX) for name in names(files))


@given(st.booleans(), st.booleans())
def test_what_a_crash_leaves_behind_goes_with_the_next_start(
    power_cut: bool, deleted: bool
) -> None:
    files = FaultyFiles(3)
    log, _ = opened(files)
    filled(log)
    log.retain(0, max_messages=10)
    files = files.restarted(power_cut=power_cut)
    log, later = opened(files)
    if deleted:
        log.delete_all()
    later.come_to_it()
    assert not any(name.startswith(GONE_PREFIX) for name in names(files))
    assert not (deleted and names(files))
    if not deleted:
        assert log.committed_offset == 40


def test_who_has_no_remover_removes_at_once() -> None:
    files = FaultyFiles()
    log, _ = opened(files)
    filled(log)
    log.retain(0, max_messages=10)
    log = StreamLog("s", files=files, segment_bytes=SEGMENT_BYTES_MIN, cache=StreamCache(files))
    log.delete_all()
    assert not files.names


@given(st.integers(0, 45), st.integers(1, 45), st.integers(0, 4000))
def test_a_batch_is_as_many_as_asked_for_and_as_fit_but_at_least_one(
    offset: int, count: int, bytes_max: int
) -> None:
    log, _ = opened(FaultyFiles())
    filled(log)
    size = len(encode_message(b"0" + bytes(500)))
    found = QueueLog(log).batch(offset, bytes_max, count)
    offsets = [entry - 1 for entry in found.entries]
    assert offsets == list(range(offset, 40))[: len(offsets)]
    assert len(offsets) <= count
    if offset < 40:
        assert len(offsets) == max(min(count, 40 - offset, len(offsets)), 1)
        room = bytes_max // (size + 1)  # each has one or two digits
        assert len(offsets) >= min(count, 40 - offset, room)
    assert found.next_offset == max(offset, offset + len(offsets))
    assert list(array("Q", found.blob[: 8 * len(offsets)])) == offsets


@given(st.integers(0, 40), st.integers(0, 45), st.sampled_from(["all", "unfiltered", "none"]))
def test_nothing_is_read_beyond_an_end_the_log_has_had(
    offset: int, below: int, wanted: str
) -> None:
    log, _ = opened(FaultyFiles())
    filled(log)
    filters = None if wanted == "all" else QueueLog(log).filters(["a"], wanted == "unfiltered")
    found, at = [], offset
    while at < min(below, 40):
        batch = QueueLog(log).batch(at, 4000, wanted=filters, below=below)
        assert at < batch.next_offset <= below
        found += [entry - 1 for entry in batch.entries]
        at = batch.next_offset
    assert found == ([] if wanted == "none" else list(range(offset, min(below, 40))))
    assert not QueueLog(log).batch(at, 4000, wanted=filters, below=below).entries or below > at
