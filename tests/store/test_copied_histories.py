"""A copy of a log notices that the log has lost messages since, and has taken in others.

So it is if a copy of a shard leads that lacks the last messages (an unclean election).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.streams.copies import LogCopies
from tests.reference.record import Record, encode_message
from tests.store.test_stream_copies import all_of
from tests.support.faulty_files import FaultyFiles
from tests.support.stream_history import SEGMENT_BYTES
from tests.support.syncing import sync


class Wrong(Exception):
    """The copy has messages of two histories."""


def a_log(files: FaultyFiles, kind: type[LogCopies] = LogCopies) -> StreamLog:
    log = StreamLog("d", files=files, segment_bytes=SEGMENT_BYTES)
    log.copies = kind(log, log._state, log._segments, log._cache)
    log.recover()
    return log


def publish(log: StreamLog, pick: random.Random, word: bytes) -> None:
    for _ in range(pick.randrange(8)):
        body = b"%s %d" % (word, pick.randrange(1 << 30))
        messages = (encode_message(body * pick.choice([1, 1, 40]), b"", b"k"),)
        count = pick.choice([1, 1, 3])
        log.append(Record((1,), messages * count, 1000 + pick.randrange(3), 5).encode())
        if pick.random() < 0.5:
            sync(log)
    sync(log)


def copy(source: StreamLog, target: StreamLog, pick: random.Random, times: int) -> bool:
    """Copy some batches; return False if the target finds that it has other messages."""
    for _ in range(times):
        if target.next_offset > source.committed_offset:
            return False
        found = source.copies.copied_from(target.next_offset, pick.choice([1, 300, 5000]))
        if not target.copies.goes_on(found.first, found.before):
            return False
        target.copies.take(found.chunks, found.oldest, found.newest_before)
        if pick.random() < 0.5:
            sync(target)
    sync(target)
    return True


def live(seed: int, kind: type[LogCopies] = LogCopies) -> bool:
    """Return whether the source had lost messages of which the target had some."""
    pick = random.Random(seed)
    source, files = a_log(FaultyFiles(seed)), FaultyFiles(seed + 1)
    target = a_log(files, kind)
    publish(source, pick, b"common")
    behind = source._state.files.restarted(power_cut=False)  # type: ignore[attr-defined]
    common = source.committed_offset
    publish(source, pick, b"lost")
    copy(source, target, pick, pick.randrange(12))
    if pick.random() < 0.5:
        target = a_log(files.restarted(power_cut=True), kind)
    had_lost = target.next_offset > common
    source = a_log(behind)
    publish(source, pick, b"new")
    if pick.random() < 0.2:
        source.truncate()
    is_one = copy(source, target, pick, 50)
    if had_lost and is_one and source.first_offset < target.next_offset:
        both = max(source.first_offset, target.first_offset)
        if all_of(source, both) != all_of(target, both):
            raise Wrong
    if not had_lost:
        assert is_one and all_of(source, source.first_offset) == all_of(target, target.first_offset)
    return not is_one


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_copy_has_messages_of_one_history_only(seed: int) -> None:
    live(seed)


def test_no_chunk_is_summed_while_what_follows_waits_for_a_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = a_log(FaultyFiles())
    record = Record((1,), (encode_message(b"x", b"", b"k"),), 1000, 5).encode()
    log.append(record)
    sync(log)
    assert log.copies.copied_from(1, 100).before is not None
    log.append(record)
    monkeypatch.setattr(LogCopies, "_sum_before", lambda *_: pytest.fail("a chunk is summed"))
    found = log.copies.copied_from(1, 100)
    assert not found.chunks and found.before is None


class Trusting(LogCopies):
    def goes_on(self, first: int, before: int | None) -> bool:
        return True


def test_a_copy_that_does_not_look_is_found() -> None:
    assert any(live(seed) for seed in range(50))
    with pytest.raises(Wrong):
        for seed in range(50):
            live(seed, Trusting)
