"""Acks last within about a second.

A power cut brings back only younger ones, and nothing is synced in vain.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from unittest import mock

import pytest

from shardmq.shardd.server import TICK_MS
from shardmq.shardd.store.format.segment_file import file_name
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.segments.pending_acks import ACKS_FILES_SYNCED_AT_ONCE
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.stores import Sync
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from tests.reference.record import Record, encode_message
from tests.support.faulty_files import FaultyFiles
from tests.support.shard_lives import DOORS, Known, Life
from tests.support.syncing import sync

STEP_MS = 50
# How long the disk takes in these plays, of the fake clock: two syncs of messages may be in the
# way.
SYNC_STEPS, SETTLED_SYNC_STEPS = 3, 4
BOUND_MS = TICK_MS + (2 * SYNC_STEPS + SETTLED_SYNC_STEPS + 1) * STEP_MS
QUEUE, STREAM = 1, 5


class Loop:
    """The turns of a shard's loop by a fake clock, with syncs that take some steps of it."""

    def __init__(self, seed: int, queue: int) -> None:
        self.files = FaultyFiles(seed)
        self.life = Life(self.files, 1, Known(), seed)
        self.life.targets = [(queue,)]
        self.queue = queue
        self.random = random.Random(seed)
        self.syncs: dict[str, tuple[Sync, int]] = {}  # under way: when it ends
        self.next_tick = 0
        self.settled_at: dict[int, int] = {}  # message or position: when it was settled
        self.life.start()
        self.life.attach()

    @property
    def now(self) -> int:
        return self.life.now

    def step(self, *, publishes: bool, acks: bool) -> None:
        """Play one pass in the order of server.py.

        First come the syncs that ended, then messages, then the tick, then syncs that begin.
        """
        life, shard = self.life, self.life.shard
        life.now += STEP_MS
        self._end("messages", shard.syncs.end)
        self._end("settled", shard.syncs.end_settled)
        if publishes:
            life.publish()
        if acks:
            self.ack()
        if self.now >= self.next_tick:
            self.next_tick = self.now + TICK_MS
            shard.syncs.want()
        self._begin_settled()
        if shard.syncs.may_begin:
            begun = shard.syncs.begin()
            if begun is not None:
                self.syncs["messages"] = begun, self.now + SYNC_STEPS * STEP_MS
        life.turn()
        self._begin_settled()

    def _begin_settled(self) -> None:
        begun = self.life.shard.syncs.begin_settled()
        if begun is not None:
            self.syncs["settled"] = begun, self.now + SETTLED_SYNC_STEPS * STEP_MS

    def _end(self, kind: str, ended: object) -> None:
        under_way, until = self.syncs.get(kind, (None, 0))
        if under_way is not None and self.now >= until:
            del self.syncs[kind]
            under_way.run()
            ended()  # type: ignore[operator] # of the shard

    def ack(self) -> None:
        """Acknowledge the oldest messages that are held."""
        for number, message in list(self.life.held[self.queue].items())[
            : self.random.choice([1, 4])
        ]:
            del self.life.held[self.queue][number]
            door = DOORS[self.queue % len(DOORS)]
            self.life.receive(
                envelope.settles(door, 1, 1, 0, [(self.queue, m.ACK, number, number)])
            )
            position = self.life.position(self.queue) if self.queue == STREAM else message
            self.settled_at[position] = self.now

    def oldest_back_ms(self) -> int:
        """Cut the power: how long ago the oldest was settled that comes back; 0: none does."""
        after = Life(self.files.restarted(power_cut=True), 2, Known())
        after.start()
        if self.queue == STREAM:
            position = after.position(STREAM)
            back = [at for stored, at in self.settled_at.items() if stored > position]
        else:
            found = {message for message, _ in after.contents(self.queue)}
            back = [at for message, at in self.settled_at.items() if message in found]
        return self.now - min(back, default=self.now)


def ages(queue: int, seeds: int) -> Iterator[int]:
    for seed in range(seeds):
        loop = Loop(seed, queue)
        pick = loop.random
        busy, until = pick.random() < 0.5, pick.randint(20, 120)
        for step in range(until):
            loop.step(publishes=busy or step < until // 2, acks=pick.random() < 0.7)
        for _ in range(pick.choice([0, 0, 10, 40])):
            loop.step(publishes=False, acks=False)
        age = loop.oldest_back_ms()
        print(f"seed {seed}: {age} ms, {len(loop.settled_at)} settled")
        yield age


@pytest.mark.parametrize("queue", [QUEUE, STREAM], ids=["classic", "stream"])
def test_a_power_cut_brings_back_the_acks_of_a_second_at_most(queue: int) -> None:
    found = list(ages(queue, 60))
    assert max(found) <= BOUND_MS
    assert any(found), "what is younger does come back"


@contextlib.contextmanager
def once_in_five_seconds() -> Iterator[None]:
    with mock.patch(f"{__name__}.TICK_MS", 5 * TICK_MS):
        yield


@contextlib.contextmanager
def written_alone() -> Iterator[None]:
    with (
        mock.patch.object(SegmentStore, "begin_settled_sync", lambda store, *_: None),
        mock.patch.object(StreamLog, "begin_settled_sync", lambda log: None),
    ):
        yield


@pytest.mark.parametrize(
    ("queue", "broken"), [(QUEUE, written_alone), (STREAM, once_in_five_seconds)],
    ids=["classic", "stream"],
)  # fmt: skip
def test_a_shard_that_syncs_acks_too_late_is_convicted(queue: int, broken: object) -> None:
    bound = BOUND_MS
    with broken():  # type: ignore[operator] # makes a context
        assert max(ages(queue, 60)) > bound


def syncs(files: FaultyFiles) -> int:
    return sum(call in ("sync", "sync_directory") for call in files.calls)


@pytest.mark.parametrize("queue", [QUEUE, STREAM], ids=["classic", "stream"])
def test_an_idle_shard_syncs_nothing(queue: int) -> None:
    loop = Loop(1, queue)
    for _ in range(40):
        loop.step(publishes=True, acks=True)
    for _ in range(3 * TICK_MS // STEP_MS):
        loop.step(publishes=False, acks=False)
    before = syncs(loop.files)
    for _ in range(10 * TICK_MS // STEP_MS):
        loop.step(publishes=False, acks=False)
    assert syncs(loop.files) == before


@pytest.mark.parametrize("queue", [QUEUE, STREAM], ids=["classic", "stream"])
def test_a_second_of_acks_costs_a_sync_of_a_file_and_one_of_a_directory_at_most(queue: int) -> None:
    loop = Loop(1, queue)
    for _ in range(200):
        loop.step(publishes=True, acks=False)
    for _ in range(3 * TICK_MS // STEP_MS):
        loop.step(publishes=False, acks=False)
    before, seconds = syncs(loop.files), 5
    for _ in range(seconds * TICK_MS // STEP_MS):
        loop.step(publishes=False, acks=True)
    assert seconds - 1 <= syncs(loop.files) - before <= 2 * (seconds + 1)


def test_publishes_alone_cost_no_more_syncs_than_without_acks() -> None:
    counts = []
    for broken in (contextlib.nullcontext, written_alone):
        with broken():
            loop = Loop(1, QUEUE)
            for _ in range(2 * TICK_MS // STEP_MS):  # readers that come have a position
                loop.step(publishes=False, acks=False)
            before = syncs(loop.files)
            for _ in range(100):
                loop.step(publishes=True, acks=False)
            counts.append(syncs(loop.files) - before)
    assert counts[0] == counts[1]


# -- of a store alone ------------------------------------------------------------------------------


def one(number: int) -> bytes:
    return Record((1,), (encode_message(b"x" * 1200, b"", b"%d" % number),)).encode()


def test_acks_in_more_files_than_one_sync_takes_are_all_synced_one_sync_after_the_other() -> None:
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=4096)
    store.recover([1])
    segments = ACKS_FILES_SYNCED_AT_ONCE + 20
    entries = [store.append(one(number))[0].entries for number in range(3 * segments)]
    sync(store)
    for settled in entries[::3]:
        store.settle(1, settled, True)
    rounds = 0
    while (job := store.begin_settled_sync()) is not None:
        assert len(job.paths) <= ACKS_FILES_SYNCED_AT_ONCE
        job.run()
        store.finish_settled_sync(job)
        rounds += 1
        if not job.more:
            break
    assert rounds == 2
    again = SegmentStore("d", files=files.restarted(power_cut=True), segment_bytes=4096)
    assert len(again.recover([1])[1].entries) == 2 * segments


def test_acks_that_a_killed_process_wrote_are_synced_by_the_next() -> None:
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=4096)
    store.recover([1])
    entries = store.append(one(1) + one(2))[0].entries
    sync(store)
    store.settle(1, entries[:1], True)
    store.flush()
    after = files.restarted(power_cut=False)
    store = SegmentStore("d", files=after, segment_bytes=4096)
    store.recover([1])
    job = store.begin_settled_sync()
    assert job is not None and job.paths == [f"d/{file_name('acks', entries[0] >> 32)}"]
    job.run()
    store.finish_settled_sync(job)
    assert store.begin_settled_sync() is None


def test_a_file_that_has_gone_meanwhile_is_no_failure() -> None:
    files = FaultyFiles()
    store = SegmentStore("d", files=files, segment_bytes=4096)
    store.recover([1])
    entries = store.append(one(1) + one(2))[0].entries
    sync(store)
    store.settle(1, entries[:1], True)
    job = store.begin_settled_sync()
    assert job is not None and job.paths
    files.remove(job.paths[0])
    job.run()
    store.finish_settled_sync(job)
    store.append(one(3))
