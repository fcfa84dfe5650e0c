"""Merging and removing files goes on beside everything else, within its budget.

It also goes on when the shard is never idle.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field

from shardmq.shardd.shard import Shard
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.upkeep import LOOK_EACH_MS, NOT_DUE, RECLAIM_BYTES_PER_S, Upkeep
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from tests.support.dict_store import NoStreams
from tests.support.faulty_files import FaultyFiles

EPOCH = 7
SEGMENT_BYTES = 4096
SECOND_MS = 1000
SEGMENTS = 100
# What is kept takes two segments' worth; then two spares, the open one, the one before it, and
# their companions.
SMALL_BYTES = 8 * SEGMENT_BYTES
TURNS_MAX = 80


@dataclass
class FakeStep:
    cost_bytes: int = 0
    error: OSError | None = None
    left: list[str] = field(default_factory=list)

    def run(self) -> None:
        pass


class FakeStore:
    def __init__(self, *steps: FakeStep) -> None:
        self.steps = list(steps)
        self.written_bytes = 0
        self.ended: list[FakeStep] = []

    def begin_reclaim(self) -> FakeStep | None:
        return self.steps.pop(0) if self.steps else None

    def finish_reclaim(self, step: FakeStep) -> int:
        self.ended.append(step)
        return 0


def test_steps_of_stores_come_in_turn_and_one_at_a_time() -> None:
    stores = [FakeStore(FakeStep(), FakeStep()), FakeStore(), FakeStore(FakeStep())]
    upkeep = Upkeep()
    served = []
    for _ in range(3):
        assert upkeep.begin(stores, 0)
        assert upkeep.due == NOT_DUE and upkeep.begin(stores, 10**9) is None
        served.append(stores.index(upkeep.end(stores, 0)))  # type: ignore[arg-type]
    assert served == [0, 2, 0]
    assert upkeep.begin(stores, 5) is None
    assert upkeep.due == 5 + LOOK_EACH_MS


def test_bytes_are_paid_for_by_time() -> None:
    stores = [FakeStore(*[FakeStep(RECLAIM_BYTES_PER_S // 4) for _ in range(100)])]
    upkeep, now, begun = Upkeep(), 0, 0
    while now < 10 * SECOND_MS:
        if upkeep.begin(stores, now):
            begun += 1
            upkeep.end(stores, now)
        now += 1
    assert begun == 40, "a quarter second's worth each"


def test_what_publishes_write_pays_too_so_that_a_busy_shard_keeps_up() -> None:
    store = FakeStore(*[FakeStep(RECLAIM_BYTES_PER_S) for _ in range(100)])
    upkeep, now, begun = Upkeep(), 0, 0
    while now < 10 * SECOND_MS:
        # four times what time alone would pay for
        store.written_bytes += RECLAIM_BYTES_PER_S * 4 // SECOND_MS
        if upkeep.begin([store], now):
            begun += 1
            upkeep.end([store], now)
        now += 1
    assert 40 <= begun <= 51


def test_after_an_error_such_as_a_full_disk_it_waits() -> None:
    stores = [FakeStore(FakeStep(error=OSError(28, "full")), FakeStep())]
    upkeep = Upkeep()
    upkeep.begin(stores, 0)
    upkeep.end(stores, 0)
    assert upkeep.begin(stores, LOOK_EACH_MS - 1) is None
    assert upkeep.begin(stores, LOOK_EACH_MS)


class Home(NoStreams):
    def __init__(self) -> None:
        self.files = FaultyFiles()

    def open(self, vhost: str) -> SegmentStore:
        return SegmentStore("d", files=self.files, segment_bytes=SEGMENT_BYTES)

    def remove(self, vhost: str) -> None: ...
    def keep_only(self, vhosts: object) -> None: ...
    def recovered(self, vhost: str, store: SegmentStore) -> None: ...
    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None: ...


class Bench:
    """A shard on a disk in memory with a controller and a front door, and two durable queues."""

    def __init__(self) -> None:
        self.home = Home()
        self.start()

    def start(self) -> None:
        self.now = 1000
        self.batch = 0
        self.shard = Shard(0, EPOCH, 1, self.home)  # type: ignore[arg-type]
        specs = [m.QueueSpec(1, "/", "work", True), m.QueueSpec(2, "/", "filler", True)]
        for peer, what in ((m.CONTROLLER, m.Assign(specs)), (0, None)):
            self.shard.receive(envelope.control(peer, 5, 0, 0, m.Join(f"peer-{peer}")), self.now)
            if what is not None:
                self.tell(what, peer)

    def tell(self, what: m.Control, peer: int = 0) -> None:
        self.shard.receive(envelope.control(peer, 5, EPOCH, 0, what), self.now)

    def publish(self, queue: int, body: bytes) -> None:
        self.batch += 1
        packer = codec.Packer(1)
        message = struct.pack("<II", len(body), 0) + b"\0\1q" + body
        packer.add_stored(0, [queue], message, 9, 1, 1, self.now, 0xFFFFFFFF, 0xFF, True, True)
        data = packer.take(0, 0, 5, EPOCH, self.batch)
        assert data is not None
        self.shard.receive(data, self.now)

    def turn(self) -> None:
        """As the loop does it, an eighth of a second later."""
        self.now += SECOND_MS // 8
        self.shard.syncs.want()
        sync = self.shard.syncs.begin()
        step = self.shard.syncs.begin_reclaim(self.now)
        for job in (step, sync):
            if job is not None:
                job.run()
        if sync is not None:
            self.shard.syncs.end()
        if step is not None:
            self.shard.syncs.end_reclaim(self.now)
        self.shard.turn_end(self.now)

    def bodies(self) -> list[bytes]:
        queue = self.shard.queues[1]
        entries = queue.live()
        blob, sizes = queue.store.read(entries, 1 << 30)
        at, found = 0, []
        for size in sizes:
            found.append(blob[at + 11 : at + 11 + size])
            at += 11 + size
        return found

    def turn_until_small(self) -> None:
        for _ in range(TURNS_MAX):
            if self.disk_bytes() <= SMALL_BYTES:
                return
            self.turn()
        raise AssertionError(f"{self.disk_bytes()} bytes are left")

    def disk_bytes(self) -> int:
        return sum(len(inode.data) for inode in self.home.files.names.values())


def one_left_in_each_segment(bench: Bench) -> list[bytes]:
    kept = []
    for number in range(SEGMENTS):
        kept.append(b"kept %d" % number)
        bench.publish(1, kept[-1])
        for _ in range(4):
            bench.publish(2, b"x" * 900)
        if number % 10 == 0:
            bench.turn()
    return kept


def test_one_message_left_in_each_of_a_hundred_segments_ends_in_one_while_publishes_go_on() -> None:
    bench = Bench()
    kept = one_left_in_each_segment(bench)
    assert bench.disk_bytes() > SEGMENTS * SEGMENT_BYTES
    bench.tell(m.Purge(1, 2))
    for number in range(TURNS_MAX):
        bench.publish(2, b"busy %d" % number)
        bench.turn()
        bench.tell(m.Purge(1, 2))
    assert bench.disk_bytes() <= SMALL_BYTES
    assert bench.bodies() == kept
    bench.shard.close()
    bench.home.files = bench.home.files.restarted(power_cut=False)
    bench.start()
    assert bench.bodies() == kept


def test_a_deleted_queue_frees_the_segments_it_shared_also_after_a_restart() -> None:
    bench = Bench()
    kept = one_left_in_each_segment(bench)
    bench.shard.close()
    bench.home.files = bench.home.files.restarted(power_cut=False)
    bench.start()
    bench.tell(m.DeleteQueue(1, 2), m.CONTROLLER)
    bench.turn_until_small()
    assert bench.bodies() == kept


def test_a_dropped_vhost_goes_when_neither_a_sync_nor_a_step_has_its_files() -> None:
    bench = Bench()
    one_left_in_each_segment(bench)
    bench.turn()
    bench.tell(m.Purge(1, 2))
    bench.turn()
    bench.now += 10 * SECOND_MS
    step = bench.shard.syncs.begin_reclaim(bench.now)
    assert step is not None
    bench.tell(m.DropVhost(1, "/"), m.CONTROLLER)
    assert bench.home.files.names
    step.run()
    bench.shard.syncs.end_reclaim(bench.now)
    assert not bench.home.files.names


def test_unacked_messages_that_were_merged_can_be_acked_and_come_back_in_order() -> None:
    bench = Bench()
    kept = one_left_in_each_segment(bench)
    queue = bench.shard.queues[1]
    bench.tell(
        m.Attach(50, 1, 1, 9, 1, "tag", no_ack=False, exclusive=False, priority=0, prefetch=0)
    )
    bench.turn()
    assert queue.backlog.unacked_count == SEGMENTS
    bench.tell(m.Purge(1, 2))
    bench.turn_until_small()
    consumer = next(iter(queue.consumers))
    entries, size = consumer.unacked.settle(1, 10)
    queue.ack(entries, size)
    bench.tell(m.Release(51, [1]))
    assert bench.bodies() == kept[10:]
    assert queue.live() == array("Q", [entry | 1 for entry in queue.live()])
