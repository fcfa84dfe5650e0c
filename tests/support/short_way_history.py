"""Play one history on two shards, one with the short way and one without, and compare all of both.

The Python way is the reference of `shardd/short_way.pyx`. After each act both shards must have sent
the same bytes, raised the same errors, called the same functions of their disks with the same
result, and hold the same state.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple
from unittest import mock

from shardmq.shardd import peers
from shardmq.shardd.queues import Allotment, Consumer, Getter, Queue
from shardmq.shardd.shard import Shard
from shardmq.shardd.store.format.segment_file import HEADER_BYTES
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.codec import Packer
from shardmq.shardd.wire.lane import joined
from shardmq.shardd.wire.shared_memory import Reader, Writer
from tests.support.faulty_files import FaultyFiles

EPOCH = 7
SEGMENT_BYTES = 4096
DOORS = (0, 1)
# Plain queues first, so that most acts meet them.
ARGUMENTS: dict[int, dict[str, Any]] = {
    1: {},
    2: {},
    3: {},
    4: {"x-max-length": 3},
    5: {"x-message-ttl": 20},
    6: {"x-dead-letter-exchange": "dead"},
    7: {"x-queue-type": "stream"},
    8: {"x-max-priority": 3},
    9: {"x-single-active-consumer": True},
}
TRANSIENT = (3,)
PLAIN = (1, 1, 1, 2, 3)
QUEUES = (*PLAIN, 4, 5, 6, 7, 8, 9)
CONNECTIONS = (1, 2)
GROUPS = (901, 902)  # the numbers of group consumers of each front door
WINDOW_BYTES = 400
RING_AT, RING_BYTES = mmap.PAGESIZE, 256 << 10


class Home:
    """The place of the store and the streams of one shard, on a disk of its own."""

    def __init__(self, seed: int) -> None:
        self.files = FaultyFiles(seed)
        self._cache = StreamCache(self.files, handles_max=4, indexes_bytes_max=1000)

    def open(self, vhost: str) -> SegmentStore:
        return SegmentStore(
            "store", files=self.files, segment_bytes=SEGMENT_BYTES, spare_segments=1
        )

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> QueueLog:
        log = StreamLog(
            f"stream-{queue_id}", files=self.files, segment_bytes=SEGMENT_BYTES, cache=self._cache
        )
        log.recover()
        return QueueLog(log)

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None: ...
    def remove(self, vhost: str) -> None: ...
    def keep_only(self, vhosts: Collection[str]) -> None: ...
    def recovered(self, vhost: str, store: object) -> None: ...
    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None: ...


class Side:
    """One of the two shards, with a disk of its own."""

    def __init__(self, seed: int, short_way: bool) -> None:
        self.home = Home(seed)
        self.shard = Shard(0, EPOCH, 1, self.home, short_way=short_way)
        self.syncing: Any = None
        self.settling: Any = None
        memory = mmap.mmap(-1, RING_AT + RING_BYTES)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.writer = Writer(memory, 0, RING_AT, RING_BYTES, self.bell)
        self.reader = Reader(memory, 0, RING_AT, RING_BYTES, True)

    def do(self, act: Callable[[Side], Any]) -> Any:
        """Do something; return its result, or the error that it raised."""
        try:
            return act(self)
        except Exception as error:
            return type(error).__name__, str(error)

    def receive(self, message: bytes | memoryview, now: int) -> None:
        self.shard.receive(message, now)

    def receive_by_ring(self, messages: list[bytes], now: int) -> None:
        """Receive messages as the links of a shard do: some are taken in as they lie."""
        self.shard.short_way.now = now
        assert all(self.writer.put(message) for message in messages)
        if self.reader.offer(self.shard.short_way, len(messages)):
            try:
                for message in self.reader.take(len(messages))[0]:
                    self.shard.receive(message, now)
            finally:
                self.reader.let_go()

    def turn(self, now: int) -> list[tuple[str, bytes]]:
        return [(out.endpoint, joined(out.message)) for out in self.shard.turn_end(now)]

    def begin_sync(self) -> bool:
        self.syncing = self.syncing or self.shard.syncs.begin()
        return self.syncing is not None

    def end_sync(self) -> None:
        if self.syncing is not None:
            self.syncing.run()
            self.syncing = None
            self.shard.syncs.end()

    def begin_settled(self) -> bool:
        self.settling = self.settling or self.shard.syncs.begin_settled()
        return self.settling is not None

    def end_settled(self) -> None:
        if self.settling is not None:
            self.settling.run()
            self.settling = None
            self.shard.syncs.end_settled()

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield all that must be the same on both ways, each with its name."""
        shard = self.shard
        yield "dirty", [queue.id for queue in shard.registry.dirty]
        yield "stores to sync", len(shard.registry.dirty_stores)
        syncs = shard.syncs
        yield "syncs", (syncs.begun, syncs.ended, syncs.wanted, syncs.may_begin)
        yield "batches", (shard.batch_messages.counts, shard.batch_messages.sum)
        yield "bytes", (shard.batch_bytes.counts, shard.batch_bytes.sum)
        yield "next due", shard.next_due()
        for queue in shard.queues.used():
            yield f"queue {queue.id}", _queue(queue)
        for number, peer in shard.peers.items():
            held = [(each.batch, each.state.name, list(each.refused)) for each in peer.held]
            yield f"peer {number}", (peer.next_batch, peer.taken, peer.has_news, held)
            windows = {at: _window(window) for at, window in peer.windows.items()}
            yield f"windows of {number}", windows
            yield f"holders of {number}", {at: _holder(one) for at, one in peer.holders.items()}
            yield f"groups of {number}", {at: _group(one) for at, one in peer.allotments.items()}
        for store in shard.stores.values():
            assert isinstance(store, SegmentStore)
            yield from _store(store)
        calls = self.home.files.calls
        yield "calls", (len(calls), calls[-20:])
        yield "disk", {name: bytes(one.data) for name, one in self.home.files.names.items()}


def _queue(queue: Queue) -> Any:
    backlog, counters = queue.backlog, queue.counters
    return (
        {name: getattr(counters, name) for name in counters.__slots__},
        (backlog.ready_count, backlog.ready_bytes, backlog.unacked_count, backlog.unacked_bytes),
        [level.peek(len(level)).tolist() for level in backlog.levels],
        (backlog.marks, backlog.hides, backlog.is_watched, queue.closed, queue.deleted),
        (backlog.kinds, queue.dispatch.is_stuck),
        [consumer.number for level in queue.consumers.levels for consumer in level],
    )


def _window(window: Any) -> Any:
    served = None if window.served is None else window.served.id
    return window.room, window.consumers, [queue.id for queue in window.blocked], served


def _holder(holder: Consumer | Getter) -> Any:
    if isinstance(holder, Getter):
        return {number: held[1:] for number, held in holder._held.items()}
    unacked = holder.unacked
    numbers = (unacked.count, unacked.next_number, unacked.first_number, unacked.first_entry)
    own = None if holder.allotment is None else _allotment(holder.allotment)
    return holder.queue.id, holder.detached, numbers, unacked.held().tolist(), own


def _allotment(allotment: Allotment) -> Any:
    return allotment.allowed, allotment.report, allotment._drains, allotment.useless_at


def _group(allotment: Allotment) -> Any:
    order = allotment.order
    assert order is not None
    current = None if order.current is None else order.current.id
    wanting = [(queue.id, entry) for queue, entry in order._wanting.items()]
    chosen = [(queue.id, entry) for queue, entry in order._chosen.items()]
    return _allotment(allotment), current, order._until, order._passes, wanting, chosen


def _store(store: SegmentStore) -> Iterator[tuple[str, Any]]:
    yield "stats of the store", store.stats()
    segments = store._segments
    for segment in segments.distinct():
        numbers = (segment.used, segment.flushed, segment.records, segment.messages)
        counts = (segment.references, segment.live, segment.dead_until, segment.sealed)
        pairs = bytes(segment.settled), bytes(segment.forgotten)
        # The header is written with the first flush: until then it is what the memory had.
        written = 0 if segment.flushed else HEADER_BYTES
        data = None if segment.buffer is None else bytes(segment.buffer[written : segment.used])
        index = None if segment.abstracts is None else segment.abstracts.until(segment.used)
        yield f"segment {segment.number}", (numbers, counts, pairs, data, index)
    pending = segments.settled
    yield "pairs", (pending.settled_bytes, pending.forgotten_bytes, [*pending.with_settled])


class Differs(AssertionError):
    """Both ways came to different ends."""


class Sent(NamedTuple):
    """A consumer that was attached."""

    door: int
    queue: int
    connection: int


class History:
    """A history that is a function of its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sides = (Side(seed, True), Side(seed, False))
        self.now = 1000
        self.request = 100
        self.packer = Packer(1)
        self.batches = dict.fromkeys(DOORS, 0)
        self.incarnations = dict.fromkeys(DOORS, 5)
        self.consumers: dict[int, Sent] = {}
        self.next_consumer = 1
        # Most histories meet plain queues and plain messages only.
        self.is_plain = self.random.random() < 0.6
        self.queues = PLAIN if self.is_plain else QUEUES
        self.unusual = 0.002 if self.is_plain else 0.05
        self.acts = [act for act in ACTS if not self.is_plain or act not in RARE]

    def play(self, acts: int) -> None:
        with mock.patch.object(peers, "CONNECTION_WINDOW_BYTES", WINDOW_BYTES):
            self.start()
            try:
                for _ in range(acts):
                    self.random.choice(self.acts)(self)
            finally:
                self.close()

    def close(self) -> None:
        for side in self.sides:
            os.close(side.bell)

    def both(self, what: str, act: Callable[[Side], Any]) -> Any:
        """Do the same on both sides; raise Differs if anything differs then."""
        result = self.act(what, act)
        self.compare(what)
        return result

    def act(self, what: str, act: Callable[[Side], Any]) -> Any:
        """Do the same on both sides; raise Differs if the results or the errors differ."""
        results = [side.do(act) for side in self.sides]
        if results[0] != results[1]:
            raise Differs(f"{what}: {results[0]!r} on the short way, {results[1]!r} in Python")
        return results[0]

    def compare(self, what: str) -> None:
        """Raise Differs if anything differs in the state of both sides."""
        for (name, short), (_, python) in zip(
            self.sides[0].state(), self.sides[1].state(), strict=True
        ):
            if short != python:
                raise Differs(f"{what}: {name} is {short!r} on the short way, {python!r} in Python")

    def receive(self, what: str, message: bytes) -> None:
        """Let both sides receive a message: in a ring, alone, or in a view."""
        way = self.random.random()
        if way < 0.5 and len(message) < RING_BYTES // 4:
            self.both(what, lambda side: side.receive_by_ring([message], self.now))
            return
        given = memoryview(message) if way < 0.6 else message
        self.both(what, lambda side: side.receive(given, self.now))

    def tell(self, what: Any, peer: int = m.CONTROLLER, incarnation: int = 3) -> None:
        self.receive(type(what).__name__, envelope.control(peer, incarnation, EPOCH, 0, what))

    def start(self) -> None:
        self.join(m.CONTROLLER, 3)
        self.tell(m.Assign([_spec(queue) for queue in ARGUMENTS]))
        for door in DOORS:
            self.join(door, self.incarnations[door])
        self.turn()

    def join(self, peer: int, incarnation: int) -> None:
        self.receive("join", envelope.control(peer, incarnation, 0, 0, m.Join(f"peer-{peer}")))

    # -- acts --------------------------------------------------------------------------------------

    def publish(self) -> None:
        message = self.published()
        if message is not None:
            self.receive("publish", message)

    def publish_many(self) -> None:
        """Receive several batches that lie in the ring at once."""
        made = [self.published() for _ in range(self.random.randint(2, 6))]
        messages = [each for each in made if each is not None and len(each) < RING_BYTES // 8]
        self.both("publish many", lambda side: side.receive_by_ring(messages, self.now))
        self._follow_batches()

    def published(self) -> bytes | None:
        """Return a PUBLISH, most often of one message for one queue."""
        pick, door = self.random, self.random.choice(DOORS)
        for _ in range(pick.choice([1, 1, 1, 1, 2, 5])):
            queue = pick.choice(self.queues)
            count = pick.choice([1, 1, 1, 1, 3, 20])
            queues = (
                [queue]
                if self.is_plain or pick.random() < 0.9
                else [*{queue, pick.choice(self.queues)}]
            )
            size = pick.choice([0, 1, 16, 50, 50, 200, 900])
            body = bytes(pick.randrange(256) for _ in range(size))
            stored = struct.pack("<II", size, 0) + b"\0\1q" + body
            persistent = pick.random() < 0.5
            unusual = pick.random() < self.unusual
            for _ in range(count):
                self.packer.add_stored(
                    0,
                    queues,
                    stored,
                    pick.choice(CONNECTIONS),
                    1,
                    pick.choice([0, self.request, self.request + 1]),
                    self.now,
                    30 if unusual and pick.random() < 0.5 else 0xFFFFFFFF,
                    2 if unusual and pick.random() < 0.5 else 0xFF,
                    persistent,
                    persistent,
                    marks=pick.choice([4, 8]) if unusual else 0,
                )
            if self.is_plain or pick.random() < 0.7:
                break  # else the batch has records for several queues
        self.batches[door] += 1
        number = self.batches[door]
        if pick.random() < 0.01:
            number = pick.choice([0, number - 1, number + 1, 1 << 63])
            self.batches[door] -= 1
        incarnation = self.incarnations[door]
        return self.packer.take(0, door, incarnation, EPOCH, number, pick.random() < 0.7)

    def broken(self) -> None:
        """Receive a message with a wrong byte, or without its end."""
        pick = self.random
        door = pick.choice(DOORS)
        who = (door, self.incarnations[door], EPOCH, 0)
        consumer = pick.choice([*self.consumers, 99])
        made = [
            self.published(),
            envelope.settles(*who, [(consumer, m.ACK, 1, 3)]),
            envelope.credit(*who, [(1, 10)]),
        ]
        message = pick.choice(made)
        if message is None:
            return
        data = bytearray(message)
        for _ in range(pick.choice([0, 1, 1, 2])):
            data[pick.randrange(1, len(data))] ^= 1 << pick.randrange(8)
        if pick.random() < 0.5:
            del data[pick.randrange(len(data)) :]
        self.receive("a broken message", bytes(data))
        self._follow_batches()

    def _follow_batches(self) -> None:
        """Go on with the batch numbers that the shards expect."""
        for number in DOORS:
            peer = self.sides[0].shard.peers.get(number)
            if peer is not None and peer.next_batch is not None and peer.next_batch < 1 << 40:
                self.batches[number] = peer.next_batch - 1

    def turn(self) -> None:
        self.both("turn", lambda side: side.turn(self.now))

    def wait(self) -> None:
        self.now += self.random.choice([1, 10, 30])

    def attach(self) -> None:
        pick, door = self.random, self.random.choice(DOORS)
        self.request += 1
        number, self.next_consumer = self.next_consumer, self.next_consumer + 1
        sent = Sent(door, pick.choice(self.queues), pick.choice(CONNECTIONS))
        fields = (self.request, sent.queue, number, sent.connection, 1, "tag", pick.random() < 0.5)
        attach: m.Attach = m.Attach(
            *fields,
            exclusive=pick.random() < 0.03,
            priority=pick.choice([0, 0, 0, 1]),
            prefetch=pick.choice([0, 0, 1, 3]),
            limited=pick.random() < self.unusual,
            affinity=pick.random() < self.unusual,
        )
        if pick.random() < 0.4:
            attach = m.AttachPart(
                *fields, False, attach.priority, attach.prefetch, True, group=pick.choice(GROUPS)
            )
        if sent.queue == 7:
            attach = m.AttachReader(*fields, exclusive=False, priority=0, prefetch=3)
        self.consumers[number] = sent
        self.tell(attach, door, self.incarnations[door])

    def leave(self) -> None:
        number = self.random.choice([*self.consumers, 0])
        sent = self.consumers.get(number)
        if sent is None:
            return
        self.request += 1
        if self.random.random() < 0.5:
            self.tell(m.Detach(self.request, number), sent.door, self.incarnations[sent.door])
        else:
            del self.consumers[number]
            self.tell(m.Release(self.request, [number]), sent.door, self.incarnations[sent.door])

    def settle(self) -> None:
        pick, ranges = self.random, []
        number = pick.choice([*self.consumers, 99])
        door = self.consumers[number].door if number in self.consumers else 0
        for _ in range(pick.choice([1, 1, 1, 2, 3])):
            holder = (
                self.sides[0].shard.peers[door].holders.get(number) if door is not None else None
            )
            last = holder.unacked.next_number if isinstance(holder, Consumer) else 4
            first = pick.randint(0, last + 1)
            behind = first + pick.choice([0, 0, 0, 1, 3, last, (1 << 63) - last])
            kind = pick.choice([m.ACK] * 20 + [m.REJECT, m.REQUEUE, m.RETURN, m.ALLOT])
            if kind == m.ALLOT:
                first, behind = pick.choice([0, 2, 5, m.UNLIMITED]), pick.choice([m.KEEP, m.DRAIN])
            ranges.append((number, kind, first, behind))
            if pick.random() < 0.3:
                others = [at for at, sent in self.consumers.items() if sent.door == door]
                number = pick.choice([*others, 99])
        self.receive("settle", envelope.settles(door, self.incarnations[door], EPOCH, 0, ranges))

    def allot(self) -> None:
        """Settle what consumers of a front door hold, and give its group consumers more credit."""
        pick, door = self.random, self.random.choice(DOORS)
        peer = self.sides[0].shard.peers[door]
        holders = [each for each in peer.holders.values() if isinstance(each, Consumer)]
        ranges = []
        for holder in pick.sample(holders, min(len(holders), pick.choice([0, 1, 1, 3]))):
            first = holder.unacked.first_number
            ranges.append((holder.number, m.ACK, first, first + pick.choice([0, 0, 2, 20])))
        for number in pick.choice([[GROUPS[0]], [GROUPS[1]], GROUPS]):
            allotment = peer.allotments.get(number)
            used = allotment.used if allotment is not None else 0
            allowed = m.UNLIMITED if pick.random() < 0.05 else used + pick.choice([0, 1, 2, 5, 20])
            mode = pick.choice([m.KEEP] * 12 + [m.DRAIN] * 6 + [m.STOP])
            ranges.append((number, m.ALLOT, allowed, mode))
        if pick.random() < 0.1:
            pick.shuffle(ranges)
        self.receive("allot", envelope.settles(door, self.incarnations[door], EPOCH, 0, ranges))

    def close_group(self) -> None:
        ranges = [(self.random.choice(GROUPS), m.ALLOT, 0, m.CLOSE)]
        door = self.random.choice(DOORS)
        self.receive("close", envelope.settles(door, self.incarnations[door], EPOCH, 0, ranges))

    def credit(self) -> None:
        pick, door = self.random, self.random.choice(DOORS)
        freed = [
            (pick.choice((*CONNECTIONS, 9)), pick.choice([0, 1, 50, WINDOW_BYTES, 1 << 31]))
            for _ in range(pick.choice([1, 1, 2]))
        ]
        self.receive("credit", envelope.credit(door, self.incarnations[door], EPOCH, 0, freed))

    def get(self) -> None:
        pick, door = self.random, self.random.choice(DOORS)
        self.request += 1
        what = m.Get(self.request, pick.choice(self.queues), 1000 + door, 1, 1, pick.random() < 0.5)
        self.tell(what, door, self.incarnations[door])

    def purge(self) -> None:
        self.request += 1
        self.tell(m.Purge(self.request, self.random.choice(self.queues)), 0, self.incarnations[0])

    def change(self) -> None:
        """Change the arguments of a queue, as a policy does, or pause it, or delete it."""
        pick, queue = self.random, self.random.choice([1, 2, 3, 4, 5, 6, 8])
        self.request += 1
        if pick.random() < 0.3:
            self.tell(m.DeleteQueue(self.request, queue))
            return
        arguments = pick.choice([{}, {}, ARGUMENTS[queue], ARGUMENTS[pick.choice([4, 5, 6, 8, 9])]])
        paused, held = pick.random() < 0.1, pick.random() < 0.05
        spec = m.QueueSpec(
            queue, "/", f"q{queue}", queue not in TRANSIENT, False, False, arguments, paused, held
        )
        self.tell(m.CreateQueues(self.request, [spec]))

    def restart(self) -> None:
        """Let a front door end, and begin again with a new incarnation."""
        door = self.random.choice(DOORS)
        if self.random.random() < 0.5:
            self.tell(m.FrontDoorGone(door, self.incarnations[door]))
        self.incarnations[door] += 1
        self.batches[door] = self.random.choice([0, 100])
        self.consumers = {at: sent for at, sent in self.consumers.items() if sent.door != door}
        self.join(door, self.incarnations[door])

    def reserve(self) -> None:
        """Let a front door publish a transaction, or end that."""
        self.request += 1
        pick, door = self.random, self.random.choice(DOORS)
        if pick.random() < 0.5:
            self.tell(m.Reserve(self.request, 1, [(4, [5])]), door, self.incarnations[door])
        self.tell(m.Redeem(pick.choice([0, 0, 1])), door, self.incarnations[door])

    def begin_sync(self) -> None:
        if self.random.random() < 0.3:
            self.both("want a sync", lambda side: side.shard.syncs.want())
        self.both("begin a sync", Side.begin_sync)

    def end_sync(self) -> None:
        self.both("end a sync", Side.end_sync)

    def sync_settled(self) -> None:
        self.both("begin a sync of acks", Side.begin_settled)
        if self.random.random() < 0.7:
            self.both("end a sync of acks", Side.end_settled)

    def flush(self) -> None:
        # Both return None.
        self.both("flush", lambda side: [each.flush() for each in _stores(side.shard)])  # type: ignore[func-returns-value]


def _stores(shard: Shard) -> list[SegmentStore]:
    return [store for store in shard.stores.values() if isinstance(store, SegmentStore)]


def _spec(queue: int) -> m.QueueSpec:
    return m.QueueSpec(queue, "/", f"q{queue}", queue not in TRANSIENT, arguments=ARGUMENTS[queue])


ACTS: list[Callable[[History], None]] = [
    *[History.publish] * 10,
    *[History.publish_many] * 2,
    *[History.turn] * 10,
    *[History.settle] * 8,
    *[History.allot] * 6,
    *[History.credit] * 5,
    *[History.attach] * 3,
    *[History.begin_sync] * 2,
    *[History.end_sync] * 2,
    History.leave,
    History.broken,
    History.broken,
    History.get,
    History.purge,
    History.change,
    History.restart,
    History.reserve,
    History.sync_settled,
    History.flush,
    History.wait,
    History.close_group,
]
RARE = (History.change, History.reserve, History.restart, History.close_group)
