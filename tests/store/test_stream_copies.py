"""A log that is copied to another one has the same messages there, at the same offsets.

The source lives as in test_stream.py: appends, retention, truncation, positions, power cuts.
Between these, chunks go to the target, whose process dies, too. A request may come late or twice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.files import Files
from shardmq.shardd.store.format.chunk import chunk_at
from shardmq.shardd.store.streams import StreamCache, StreamLog, wanted_filters
from shardmq.shardd.store.streams.copies import Copied, LogCopies
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles, PowerCut
from tests.support.stream_history import SEGMENT_BYTES, StreamHistory
from tests.support.syncing import sync

seeds = st.integers(0, 1 << 32)


class Target:
    """The copy of the log of a history, and the processes that it lives in."""

    kind: type[LogCopies] = LogCopies

    def __init__(self, source: StreamHistory, seed: int) -> None:
        self.source = source
        self.random = random.Random(seed)
        self.files = FaultyFiles(seed, self.random.choice([512, 4096]))
        self.taken: list[Copied] = []
        self.log = self.new_log(self.files)

    def new_log(self, files: Files) -> StreamLog:
        cache = StreamCache(files, handles_max=2, indexes_bytes_max=100)
        log = StreamLog("copy", files=files, segment_bytes=SEGMENT_BYTES, cache=cache)
        log.copies = self.kind(log, log._state, log._segments, log._cache)
        log.recover()
        return log

    def step(self) -> None:
        if self.random.random() < 0.05:
            self.crash()
        if self.taken and self.random.random() < 0.1:
            self.put(self.random.choice(self.taken[-5:]))  # comes late, or again
        source = self.source.log
        assert self.log.next_offset <= source.next_offset, "more than the source has"
        copied = source.copies.copied_from(
            self.log.next_offset, self.random.choice([1, 300, 5000, 1 << 20])
        )
        self.taken.append(copied)
        if self.random.random() < 0.9:
            self.put(copied)

    def put(self, copied: Copied) -> None:
        is_there = copied.behind <= self.log.next_offset and not isinstance(self.log.copies, Blind)
        chunks = b"" if is_there else copied.chunks
        try:
            self.log.copies.take(chunks, copied.oldest, copied.newest_before)
        except ValueError:
            return  # it goes on elsewhere
        if self.random.random() < 0.7 and (job := self.log.begin_sync()) is not None:
            job.run()
            self.log.finish_sync(job)

    def crash(self) -> None:
        self.files = self.files.restarted(power_cut=self.random.random() < 0.7)
        self.log = self.new_log(self.files)

    def finish(self) -> None:
        """Copy what is left, as at the end of a move, and lose the power."""
        self.files.cut_after = None
        source = self.source
        source.end_sync()
        source.sync()
        while True:
            copied = source.log.copies.copied_from(self.log.next_offset, 5000)
            assert copied.end == source.log.committed_offset
            self.log.copies.take(copied.chunks, copied.oldest, copied.newest_before)
            if not copied.chunks:
                break
        if (job := self.log.begin_sync()) is not None:
            job.run()
            self.log.finish_sync(job)
        producers = source.log.producers.table.all_places()
        self.log.copies.take_places(dict(source.log.positions.offsets), producers)
        sync(self.log)
        assert not self.log.copies.lacks_room
        self.files = self.files.restarted(power_cut=True)
        self.log = self.new_log(self.files)


def all_of(log: StreamLog, first: int, values: tuple[bytes, ...] = ()) -> dict[int, bytes]:
    """Return the messages from an offset on, or those that a filter may let through."""
    wanted = wanted_filters(values, unfiltered=False) if values else None
    found: dict[int, bytes] = {}
    while first < log.committed_offset:
        read = log.read(first, 5000, wanted)
        messages = iter(split_messages(read.blob))
        for begin, count in zip(read.runs[::2], read.runs[1::2], strict=True):
            found.update((begin + at, next(messages)) for at in range(count))
        first = read.next_offset
    return found


def compare(source: StreamLog, target: StreamLog, now: int) -> None:
    assert target.next_offset == target.committed_offset == source.next_offset
    assert not target.damage
    first = max(source.first_offset, target.first_offset)
    assert all_of(source, first) == all_of(target, first)
    assert list(all_of(target, first)) == list(range(first, target.next_offset))
    assert all_of(source, first, (b"north",)) == all_of(target, first, (b"north",))
    for timestamp in range(now - 3000, now + 50, 50):
        assert max(source.find(timestamp), first) == max(target.find(timestamp), first)
    assert dict(source.positions.offsets) == dict(target.positions.offsets)


def is_cut(files: FaultyFiles) -> bool:
    return files.cut_after is not None and files.cut_after < 0


def live(seed: int, kind: type[Target] = Target) -> None:
    source = StreamHistory(seed)
    target = kind(source, seed + 1)
    for _ in range(4):
        if target.random.random() < 0.3:
            source.files.cut_after = target.random.choice([30, 100, 300])
        if target.random.random() < 0.3:
            target.files.cut_after = target.random.choice([3, 10, 30, 100])
        for _ in range(30):
            try:
                source.play(2)
            except PowerCut:
                source.crash(power_cut=True)
            try:
                target.step()
            except PowerCut:
                if is_cut(target.files):
                    target.crash()
                if is_cut(source.files):
                    source.crash(power_cut=True)
    source.files.cut_after = None
    target.finish()
    compare(source.log, target.log, source.now)


@settings(max_examples=150, deadline=None)
@given(seeds)
@example(306048357)  # the power fails while the copy begins anew
def test_a_copy_is_the_same_log_whatever_dies_meanwhile(seed: int) -> None:
    live(seed)


class Blind(LogCopies):
    """Appends chunks whatever offset they have."""

    def take(self, chunks: bytes, oldest: int, newest_before: int) -> None:
        if chunks:
            _, first, _, _ = chunk_at(bytearray(chunks), 0, len(chunks), 0, 0)
            self._log.next_offset = first
        super().take(chunks, oldest, newest_before)


class WithGaps(LogCopies):
    """Does not begin anew where the source has lost older messages by retention."""

    def take(self, chunks: bytes, oldest: int, newest_before: int) -> None:
        self._log.next_offset = max(self._log.next_offset, oldest)
        super().take(chunks, 0, newest_before)


class WithoutPlaces(LogCopies):
    def take_places(self, positions: Mapping[bytes, int], producers: bytes) -> None:
        pass


@pytest.mark.parametrize("kind", [Blind, WithGaps, WithoutPlaces])
def test_a_copy_that_is_wrong_is_found(kind: type[LogCopies]) -> None:
    class Wrong(Target): ...

    Wrong.kind = kind

    for seed in range(60):
        try:
            live(seed, Wrong)
        except Exception:
            return
    pytest.fail("nothing was found")


def test_nothing_is_left_to_copy_behind_the_last_message() -> None:
    log = StreamLog("d", files=FaultyFiles(), segment_bytes=SEGMENT_BYTES)
    log.recover()
    for number in range(50):
        log.append(
            Record((1,), (encode_message(b"x" * 500, b"", b"k"),), 1000 + number, 5).encode()
        )
    sync(log)
    assert log.copies.copied_from(0, 1).behind_bytes > 0
    assert log.copies.copied_from(log.committed_offset, 1 << 20).behind_bytes == 0
