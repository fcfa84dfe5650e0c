"""A stream log does what a list does.

Appends, reads, syncs, retention, stops and crashes come in any order.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.streams.segments import UnderSync
from shardmq.shardd.store.sync import SyncJob
from tests.reference.record import Record, encode_message, split_messages
from tests.support.stream_history import StreamHistory, live_through_power_cut

seeds = st.integers(0, 1 << 32)


@settings(max_examples=80, deadline=None)
@given(seeds, st.booleans())
def test_a_stream_is_a_list_through_stops_and_crashes(seed: int, sync: bool) -> None:
    history = StreamHistory(seed, sync=sync)
    for _ in range(3):
        history.play(50)
        if history.random.random() < 0.5:
            history.stop_cleanly()
        else:
            history.crash(power_cut=False)


@settings(max_examples=250, deadline=None)
@given(seeds)
def test_what_was_committed_outlives_power_cuts_in_the_middle_of_calls(seed: int) -> None:
    live_through_power_cut(seed)


def test_a_stream_that_commits_before_its_sync_is_caught() -> None:
    caught = 0
    for seed in range(20):
        try:
            live_through_power_cut(seed, sync_lies=True)
        except AssertionError as error:
            caught += "that it owed" in str(error)
    if not caught:
        pytest.fail("the checker saw nothing")


def test_readers_go_on_while_a_thread_syncs_on_a_real_disk(tmp_path: Path) -> None:
    """Each of them sees all messages, in order, and none before its sync has ended."""
    log = StreamLog(str(tmp_path / "s"), segment_bytes=1 << 16)
    log.recover()
    readers = [0] * 10
    seen: list[list[bytes]] = [[] for _ in readers]
    with ThreadPoolExecutor(1) as thread:
        job: SyncJob[UnderSync] | None = None
        running: Future[None] | None = None
        number = 0
        while min(readers) < 20_000:
            if number < 20_000:
                texts = tuple(encode_message(b"%d" % at) for at in range(number, number + 50))
                assert log.append(Record((1,), texts, number).encode()) == number
                number += 50
            if running is not None and running.done():
                running.result()
                log.finish_sync(expect(job))
                running = None
            if running is None and (job := log.begin_sync()) is not None:
                running = thread.submit(job.run)
            for i, offset in enumerate(readers):
                found = log.read(offset, 100 + 300 * i)
                seen[i] += split_messages(found.blob)
                readers[i] = found.next_offset
                assert found.next_offset <= log.committed_offset <= log.next_offset == number
        if running is not None:
            running.result()
            log.finish_sync(expect(job))
    assert all(found == [encode_message(b"%d" % at) for at in range(20_000)] for found in seen)
    log.close()
    assert log.damage == []


def expect(job: SyncJob[UnderSync] | None) -> SyncJob[UnderSync]:
    assert job is not None
    return job
