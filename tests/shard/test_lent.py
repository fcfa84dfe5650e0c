"""Bodies that a front door lends arrive unchanged, and all memory comes back, whoever dies.

A front door with two consumers and a shard play random histories without sockets. The front door
reads into other memory as soon as it is free, so a body that was let go too early is not what was
published.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardmq.shardd.peers import CONNECTION_WINDOW_BYTES
from shardmq.shardd.shard import Shard
from shardmq.shardd.store.open_segment import RENEW_BYTES
from shardmq.shardd.store.segments import store
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.syncs import SEALED_BUFFERS_MAX
from shardmq.shardd.stores import NoRoom
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.codec import TARGETS, Routes
from shardmq.shardd.wire.lane import body_memory, joined
from shardmq.shardd.wire.shared_memory import BODY_BYTES_MIN, BodyMemory
from tests.reference.wire import Facts, read_of
from tests.shard.test_large import OneStore

DOOR, INCARNATION, QUEUE = 0, 5, 7
MEMORY_BYTES = 2 << 20
SEEDS = range(12)
STEPS = 250
LENT_SHARE = 4  # of a lent body weighs in a window
LIVES = 200  # tests/torture has more
NO_TTL, NO_PRIORITY = 0xFFFFFFFF, 0xFF
HEAD_BYTES = 13  # of a stored message before its body
SIZES = (0, 100, 16 << 10, 20_000, 32 << 10, 90_000, 200_000)


class Held(NamedTuple):
    """A delivery that waits for its ack."""

    consumer: int
    number: int


class Play:
    """A front door whose shard may die. `waiting` are the bodies that no delivery has shown yet."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.memory: BodyMemory = body_memory(MEMORY_BYTES, 1)
        self.packer = codec.Packer(1)
        self.packer.lend_from(self.memory)
        self.routes = Routes(1)
        self.routes.learn(b"\0\1q\0", TARGETS, [(0, [QUEUE])], True)
        self.epoch = self.batch = self.now = self.lives = 0
        self.no_ack = self.random.random() < 0.5
        self.consumers = self.random.choice((1, 2))
        self.begin()

    def begin(self) -> None:
        """Start a process of the shard; the one before is gone, and its messages with it."""
        self.memory.lost(0)
        self.packer.may_lend(0, False)
        self.lives += 1
        self.epoch += 2
        self.batch = 0
        self.waiting: list[bytes] = []
        self.held: list[Held] = []
        self.unwritten: list[memoryview] = []  # bodies that a client has not taken
        self.shard = Shard(0, self.epoch, 1, OneStore(self.directory / str(self.lives)))
        for peer in (m.CONTROLLER, DOOR):
            self.shard.receive(envelope.control(peer, 5, 0, 0, m.Join(f"peer-{peer}")), self.now)
        self.tell(m.CONTROLLER, m.Assign([m.QueueSpec(QUEUE, "/", "q", True)]))
        for consumer in range(1, self.consumers + 1):
            self.tell(
                DOOR, m.Attach(consumer, QUEUE, consumer, 9, 1, "c", self.no_ack, False, 20, 0)
            )
        if self.random.random() < 0.9:  # else it cannot see the memory
            # What was packed by now is for whoever comes next.
            self.shard.peers[DOOR].sees(memoryview(self.memory.mapped()))
            self.packer.may_lend(0, True)
        self.turn()

    def tell(self, peer: int, what: m.Control) -> None:
        self.shard.receive(envelope.control(peer, INCARNATION, self.epoch, 0, what), self.now)

    def publish(self, *bodies: bytes) -> None:
        """Receive a read of some messages and pack them."""
        bodies = bodies or tuple(
            self.random.randbytes(self.random.choice(SIZES))
            for _ in range(self.random.choice((1, 1, 4)))
        )
        mode = self.random.choice((1, 2))
        facts = [
            Facts(1, b"", b"q", 0, b"\0\0", (body,) if body else (), NO_TTL, mode, NO_PRIORITY, 0)
            for body in bodies
        ]
        data, table = read_of(facts)
        run = self.memory.take(len(data))
        if run is None:
            buffer = memoryview(bytearray(data))
        else:
            buffer = memoryview(run)
            buffer[:] = data
        lasting = self.random.random() < 0.5
        at, _ = self.packer.pack(self.routes, buffer, table, 0, 9, 0, self.now, lasting)
        assert at == len(facts)
        self.packer.take_touched()
        self.waiting += bodies
        if lasting or self.random.random() < 0.5:
            self.send()  # before the memory of the read is used again

    def send(self) -> None:
        self.batch += 1
        message = self.packer.take_parts(0, DOOR, INCARNATION, self.epoch, self.batch, False)
        if message is not None:
            self.shard.receive(memoryview(joined(message)), self.now)
        else:
            self.batch -= 1

    def turn(self) -> None:
        for outgoing in self.shard.turn_end(self.now):
            message = joined(outgoing.message)
            if outgoing.endpoint != f"peer-{DOOR}":
                continue
            kind = envelope.read(message).kind
            if kind == m.DELIVER:
                for section in codec.read_deliveries(message):
                    self.delivered(section)
            elif kind == m.FREED:
                self.memory.freed(0, message)

    def delivered(
        self, section: tuple[int, int, int, int, bool, int, memoryview | m.Weighed, int, bool]
    ) -> None:
        _, _, consumer, first, redelivered, count, blob, _, _ = section
        weight, pieces = len(blob), []
        if isinstance(blob, m.Weighed):
            weight = blob.weight
            if blob.is_lent:
                for head, body in self.memory.messages(0, blob.blob, count):
                    pieces.append(head[HEAD_BYTES:] + body)
                    self.unwritten.append(body)
            blob = blob.blob
        if not pieces:
            at = 0
            for _ in range(count):
                size = int.from_bytes(blob[at : at + 4], "little")
                pieces.append(bytes(blob[at + HEAD_BYTES : at + HEAD_BYTES + size]))
                at += HEAD_BYTES + size
        for number, piece in enumerate(pieces, first):
            if not redelivered:
                at = self.waiting.index(piece)  # two consumers get them by turns
                assert at == 0 or self.consumers > 1
                del self.waiting[at]
            if not self.no_ack:
                self.held.append(Held(consumer, number))
        self.shard.receive(
            envelope.credit(DOOR, INCARNATION, self.epoch, 0, [(9, weight)]), self.now
        )

    def settle(self, kind: int = m.ACK) -> None:
        count = self.random.randint(0, len(self.held))
        settled = [(each.consumer, kind, each.number, each.number) for each in self.held[:count]]
        del self.held[:count]
        if settled:
            message = envelope.settles(DOOR, INCARNATION, self.epoch, 0, settled)
            self.shard.receive(message, self.now)

    def step(self) -> None:
        self.now += 1
        what = self.random.random()
        if what < 0.45:
            self.publish()
        elif what < 0.6:
            self.turn()
        elif what < 0.75:
            self.settle()
        elif what < 0.85:
            self.unwritten = self.unwritten[self.random.randint(0, len(self.unwritten)) :]
        elif what < 0.9:
            self.shard.own_lent()
        elif what < 0.93:
            for store in self.shard.stores.values():
                store.flush()  # type: ignore[attr-defined] # it is a SegmentStore
        elif what < 0.95:
            self.send()
            self.begin()

    def end(self) -> None:
        """Consume everything that is left."""
        self.send()
        while self.waiting or self.held:
            self.turn()
            self.held.sort()
            self.settle()
        self.unwritten.clear()
        for _ in range(3):
            self.shard.own_lent()
        self.turn()


@pytest.mark.parametrize("seed", SEEDS)
def test_bodies_arrive_unchanged_and_all_memory_comes_back(tmp_path: Path, seed: int) -> None:
    play = Play(tmp_path, seed)
    for _ in range(STEPS):
        play.step()
    play.end()
    assert play.memory.lent_to(0) == 0
    assert play.memory.held_bytes == 0


def test_a_store_that_lets_go_too_early_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appended(self: Segment, size: int, counts: tuple[int, int, int]) -> None:
        add(self, size, counts)
        self.lent.let_go()

    add = Segment.add
    monkeypatch.setattr(Segment, "add", appended)
    with pytest.raises((AssertionError, ValueError)):
        for seed in SEEDS:
            test_bodies_arrive_unchanged_and_all_memory_comes_back(tmp_path / str(seed), seed)


def test_many_lives_of_a_shard_leave_no_memory_behind(tmp_path: Path) -> None:
    play = Play(tmp_path, 1)
    for _ in range(LIVES):
        for _ in range(3):
            play.publish()
        play.send()
        play.turn()
        play.begin()
    play.end()
    assert play.memory.held_bytes == 0


def test_a_batch_that_is_not_appended_leaves_no_hold_and_no_body_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        """A batch whose messages are laid out, and then cannot be put into the segment."""

        def plan(self, records: memoryview, checked: bool = False) -> None:
            raise MemoryError("the batch has no room")

    play = Play(tmp_path, 1)
    while not play.memory.lent_to(0):
        play.publish()
        play.send()
    (store,) = play.shard.stores.values()
    appender = store._appender  # type: ignore[attr-defined] # it is a SegmentStore
    play.turn()
    holds, waits = play.memory.lent_to(0), len(play.waiting)
    monkeypatch.setattr(appender, "batch", Failing())
    with pytest.raises(MemoryError):
        while True:
            play.publish()
            play.send()
    monkeypatch.undo()
    play.turn()
    assert play.memory.lent_to(0) <= holds, "holds of a batch that the shard has not taken in"
    del play.waiting[waits:]
    holds = play.memory.lent_to(0)
    while play.memory.lent_to(0) <= holds:
        play.publish()
        play.send()
    play.end()
    assert play.memory.lent_to(0) == 0
    assert play.memory.held_bytes == 0


def test_a_batch_for_which_the_disk_has_no_room_leaves_no_hold_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise NoRoom("the disk is full")

    play = Play(tmp_path, 1)
    (store,) = play.shard.stores.values()
    # It is a SegmentStore.
    monkeypatch.setattr(store._appender, "_with_room", full)  # type: ignore[attr-defined]
    for _ in range(5):
        play.publish(bytes(BODY_BYTES_MIN))
        play.send()
    assert play.memory.lent_to(0) == 5
    play.turn()
    assert play.memory.lent_to(0) == play.memory.held_bytes == 0


def test_lent_bodies_that_are_settled_at_once_take_no_segment_of_their_own(tmp_path: Path) -> None:
    play = Play(tmp_path, 1)
    (store,) = play.shard.stores.values()
    segments = store._segments  # type: ignore[attr-defined] # it is a SegmentStore
    first = segments.next_number
    for _ in range(LIVES):
        play.publish(bytes(BODY_BYTES_MIN))
        play.send()
        play.turn()
        play.settle()
    assert segments.next_number - first <= LIVES * BODY_BYTES_MIN // RENEW_BYTES + 1


def test_many_bodies_that_wait_are_copied_by_and_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MEMORY_BYTES", 16 << 20)
    monkeypatch.setattr(store, "OWN_BYTES_MAX", 1)  # a segment each time
    play = Play(tmp_path, 1)
    play.consumers = 0
    play.begin()
    for _ in range(20):
        play.publish(bytes(500_000))
        play.send()
    left = [play.memory.lent_to(0)]
    for _ in range(8):
        play.shard.own_lent()
        play.turn()  # tells the front door
        left.append(play.memory.lent_to(0))
    assert left[0] == left[1] == 20, "they wait for a call first"
    assert left[1] > left[2] > left[3] > left[4] and left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) <= (3 << 20) // 500_000


def test_segments_whose_bodies_a_sync_has_copied_are_written_without_another_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a segment is merged only when it has given up its buffer."""
    monkeypatch.setattr(sys.modules[__name__], "MEMORY_BYTES", 16 << 20)
    play = Play(tmp_path, 1)
    play.consumers = 0
    play.begin()
    for _ in range(20):
        play.publish(bytes(500_000))
        play.send()
    (kept,) = play.shard.stores.values()
    in_memory = kept._segments.in_memory  # type: ignore[attr-defined] # it is a SegmentStore
    assert len(in_memory) > SEALED_BUFFERS_MAX
    for segment in in_memory:
        segment.fill_lent()
    play.shard.own_lent()
    assert len(in_memory) == SEALED_BUFFERS_MAX


def test_a_client_that_takes_nothing_has_a_bounded_part_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 400_000
    monkeypatch.setattr(sys.modules[__name__], "MEMORY_BYTES", 16 << 20)
    play = Play(tmp_path, 1)
    shown = 0

    def show(section: tuple[Any, ...]) -> None:
        """Count the bytes of a delivery, which the client does not take from the front door."""
        nonlocal shown
        blob = section[6]
        assert isinstance(blob, m.Weighed) and blob.is_lent
        shown += sum(len(body) for _, body in play.memory.messages(0, blob.blob, section[5]))

    monkeypatch.setattr(play, "delivered", show)
    for _ in range(35):
        play.publish(bytes(size))
        play.send()
        play.turn()
    most = LENT_SHARE * CONNECTION_WINDOW_BYTES
    assert most - size <= shown <= most + size
