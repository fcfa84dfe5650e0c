"""Lives of a shard whose disk fails, and what it says: whatever was confirmed is there in the next.

A life is one process of a shard, with a controller, two front doors that publish, consumers on all
queues, and streams. Its disk loses its power in the middle of a call, is full, or fails once or for
good, at any call and with any kind of exception. What the process says is heard as a front door
hears it: also its last words when it breaks off. What was settled before a second's syncs were
through does not come back, nor what a front door has heard to be on stable storage (SettledSynced).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import random
from array import array
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from shardmq.shardd.peers import APPENDING, CONFIRMABLE, HeldBatch, Outgoing, Refused
from shardmq.shardd.shard import Shard
from shardmq.shardd.store.errors import DiskFull, StoreFailed
from shardmq.shardd.store.format.record import Arrival
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.segments.ack_waits import AckWait
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from shardmq.shardd.store.sync import SyncJob
from shardmq.shardd.stores import Sync
from shardmq.shardd.sync_threads import Syncer
from shardmq.shardd.syncs import Syncs
from shardmq.shardd.upkeep import Step
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.reference.record import encode_message, split_messages
from tests.support.faulty_files import CALLS, Fault, FaultyFiles, PowerCut
from tests.support.producer_lives import headers

SEGMENT_BYTES = 4096
DOORS = (0, 1)
CONNECTION, CHANNEL = 9, 1
VHOST_OF = {1: "/", 2: "/", 3: "b", 4: "/", 5: "/", 6: "/"}
DURABLE, STREAMS = (1, 2, 3), (5, 6)
# One that is declared and deleted again and again; its messages are nobody's concern.
FLEETING = 7
STREAM = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": SEGMENT_BYTES}
SPECS = [
    m.QueueSpec(
        number,
        vhost,
        f"q{number}",
        number in DURABLE + STREAMS,
        arguments=STREAM if number in STREAMS else {},
    )
    for number, vhost in VHOST_OF.items()
]
# What a publish may reach: queues of one vhost.
TARGETS = [(1,), (1,), (2,), (1, 2), (3,), (1, 4), (4,), (5,), (5,), (1, 5), (5, 6), (2, 6)]
KINDS: dict[str, Callable[[], Exception]] = {
    name: functools.partial(OSError, getattr(errno, name), "on purpose")
    for name in ("ENOSPC", "EROFS", "EIO", "EMFILE")
} | {
    kind.__name__: functools.partial(kind, "on purpose")
    for kind in (MemoryError, ValueError, envelope.WireError)
}
FOR_GOOD = 1 << 30
# Calls that fail more often than the others.
OFTEN = (*["sync"] * 6, *["sync_directory"] * 2, *["write"] * 2, "open", "allocate", "rename")
LIVES_MAX = 4
# Within so many rounds of all syncs and merges each question about acks is answered.
ROUNDS_MAX = 4
# What happens in a life whose disk does what it is told.
GOOD_DISK = ("nothing", "stop", "cut")


class PromiseBroken(BaseException):
    """What the histories are played for. Not an Exception: nobody may take it for a fault."""


def promise(kept: bool, what: str) -> None:
    if not kept:
        raise PromiseBroken(what)


class ReadingStore(SegmentStore):
    """A store that may be unable to read what it is given."""

    def __init__(self, home: FaultyHome, directory: str, **more: Any) -> None:
        super().__init__(directory, **more)
        self._home = home

    def append(
        self, records: Any, indexes: bool = False, in_sequence: bool = False
    ) -> list[Arrival]:
        if self._home.unreadable:
            raise envelope.WireError("on purpose")
        return super().append(records, indexes, in_sequence)


class FaultyHome:
    def __init__(self, files: FaultyFiles) -> None:
        self.files = files
        self.unreadable = False  # what is appended next
        self._cache = StreamCache(files, handles_max=4, indexes_bytes_max=1000)

    def open(self, vhost: str) -> SegmentStore:
        return ReadingStore(
            self,
            f"vhost-{ord(vhost)}",
            files=self.files,
            segment_bytes=SEGMENT_BYTES,
            spare_segments=1,
        )

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> QueueLog:
        log = StreamLog(
            f"stream-{queue_id}", files=self.files, segment_bytes=segment_bytes, cache=self._cache
        )
        log.recover()
        return QueueLog(log)

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None:
        if FLEETING not in queue_ids and vhost == "/":
            StreamLog(
                f"stream-{FLEETING}", files=self.files, segment_bytes=SEGMENT_BYTES
            ).delete_all()

    def remove(self, vhost: str) -> None:
        raise AssertionError("no vhost is dropped here")

    def keep_only(self, vhosts: Collection[str]) -> None:
        assert set(vhosts) == set(VHOST_OF.values())

    def recovered(self, vhost: str, store: object) -> None:
        pass

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        assert 0 <= bytes_done <= bytes_total


def _by_queue() -> dict[int, set[int]]:
    return {queue: set() for queue in VHOST_OF}


@dataclass
class Known:
    """What the clients of all lives know, by queue; messages are numbers, in publish order."""

    published: dict[int, set[int]] = field(default_factory=_by_queue)
    owed: dict[int, set[int]] = field(default_factory=_by_queue)
    settled: dict[int, set[int]] = field(default_factory=_by_queue)
    # sent by a producer that says its place: maybe more than once
    repeated: set[int] = field(default_factory=set)
    last: int = 0
    confirms: int = 0  # messages confirmed
    sequences: dict[int, int] = field(default_factory=lambda: dict.fromkeys(DOORS, 0))
    broken_off: list[str] = field(default_factory=list)
    for_good: dict[int, set[int]] = field(default_factory=_by_queue)  # settled, and synced
    syncs_answered: int = 0  # questions about acks
    # Of a reader of each stream, since they were last synced.
    positions: dict[int, list[int]] = field(
        default_factory=lambda: {queue: [-1] for queue in STREAMS}
    )
    # by queue, when the last life stopped cleanly
    stopped_with: dict[int, list[tuple[int, bool]]] | None = None


@dataclass
class Sent:
    seq: int
    message: int
    queues: tuple[int, ...]
    persistent: bool


class Door:
    """A front door: its batches, and what it has heard of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.packer = codec.Packer(1)
        self.batch = 0
        self.seq = 0
        self.told = 0  # all batches up to this one were answered for
        self.waiting: dict[int, list[Sent]] = {}
        self.last_in_sequence: tuple[int, int, tuple[int, ...]] | None = None


@functools.cache
def _syncer() -> Syncer:
    """Return the sync thread of a shard; the test's thread calls its `run`."""
    return Syncer("sync")


class Life:
    def __init__(
        self, files: FaultyFiles, epoch: int, known: Known, seed: int = 0, asks: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.targets = self.random.sample(TARGETS, self.random.choice([1, 2, len(TARGETS)]))
        self.known = known
        self.epoch = epoch
        self.home = FaultyHome(files)
        self.shard = Shard(0, epoch, 1, self.home, no_room=(DiskFull,))
        self.doors = {number: Door(number) for number in DOORS}
        self.sync_under_way: Sync | None = None
        self.settled_sync_under_way: Sync | None = None
        self.step: Step | None = None
        self.fault = "nothing"
        self.settled = _by_queue()  # in this life
        # By the number of a SyncSettled: what was settled before it, in its queues.
        self.asked: dict[int, dict[int, set[int]]] = {}
        self.asking, self.asks = random.Random(f"asks of {seed}"), asks
        self.last_asked = 0
        self.now = 1000
        self.fleeting = False
        # delivery number: message
        self.held: dict[int, dict[int, int]] = {queue: {} for queue in VHOST_OF}

    # -- as the loop of server.py ------------------------------------------------------------------

    def receive(self, message: bytes) -> None:
        with contextlib.suppress(envelope.WireError):
            self.shard.receive(message, self.now)

    def tell(self, peer: int, what: m.Control, epoch: int | None = None) -> None:
        self.receive(envelope.control(peer, 1, self.epoch if epoch is None else epoch, 0, what))

    def start(self) -> None:
        for peer in (m.CONTROLLER, *DOORS):
            self.tell(peer, m.Join(f"peer-{peer}"), epoch=0)
        self.tell(m.CONTROLLER, m.Assign(SPECS))

    def attach(self) -> None:
        for queue in VHOST_OF:
            door = DOORS[queue % len(DOORS)]
            if queue in STREAMS:
                read = m.ReadFrom(start="first", name=f"reader-{queue}")
                self.tell(
                    door,
                    m.AttachReader(
                        1, queue, queue, CONNECTION, CHANNEL, "tag", False, False, 0, 5, read=read
                    ),
                )
            else:
                self.tell(
                    door, m.Attach(1, queue, queue, CONNECTION, CHANNEL, "tag", False, False, 0, 5)
                )

    def turn(self) -> None:
        self.hear_all(self.shard.turn_end(self.now))

    def begin_sync(self) -> None:
        if self.sync_under_way is None:
            self.sync_under_way = self.shard.syncs.begin()

    def end_sync(self) -> None:
        if self.sync_under_way is not None:
            sync, self.sync_under_way = self.sync_under_way, None
            _syncer().run(sync)
            self.shard.syncs.end()

    def begin_settled_sync(self) -> None:
        if self.settled_sync_under_way is None:
            self.settled_sync_under_way = self.shard.syncs.begin_settled()

    def end_settled_sync(self) -> None:
        if self.settled_sync_under_way is not None:
            sync, self.settled_sync_under_way = self.settled_sync_under_way, None
            _syncer().run(sync)
            self.shard.syncs.end_settled()

    def break_off(self, error: Exception) -> None:
        self.known.broken_off.append(repr(error))
        self.hear_all(self.shard.break_off("broken"))
        with contextlib.suppress(Exception):
            self.end_sync()
        self.shard.abandon()

    def stop(self) -> None:
        for _ in range(2):
            self.end_sync()
            self.shard.syncs.want()
            self.begin_sync()
        self.end_sync()
        self.answer_asked()
        self.hear_all(self.shard.answers())
        promise(
            not any(door.waiting for door in self.doors.values()), "every batch is answered for"
        )
        contents = {queue: self.contents(queue) for queue in DURABLE + STREAMS}
        self.shard.close()
        self.known.stopped_with = contents

    # -- acts --------------------------------------------------------------------------------------

    def play(self, acts: int) -> None:
        of = (
            [self.publish] * 6
            + [self.turn] * 2
            + [self.settle] * 4
            + [self.begin_sync, self.end_sync] * 2
        )
        of += [self.sync] * 2 + [
            self.tick,
            self.reclaim,
            self.reclaim,
            self.come_or_go,
            self.publish_unreadable,
        ]
        of += [self.second, self.second, self.begin_settled_sync, self.end_settled_sync]
        for _ in range(acts):
            self.random.choice(of)()
            self.note_positions()
            if self.asks and self.asking.random() < 0.2:
                self.asking.choice([self.ask, self.begin_settled_sync, self.end_settled_sync])()

    def publish(self) -> None:
        pick, known = self.random, self.known
        door = self.doors[pick.choice(DOORS)]
        vhost = VHOST_OF[pick.choice(self.targets)[0]]
        door.batch += 1
        sent = door.waiting[door.batch] = []
        for _ in range(pick.choice([1, 1, 2, 5])):
            chosen = pick.choice([each for each in self.targets if VHOST_OF[each[0]] == vhost])
            in_sequence = pick.random() < 0.3
            persistent = pick.random() < 0.9
            number, properties = known.last + 1, b"\0\0"
            if in_sequence and door.last_in_sequence is not None and pick.random() < 0.3:
                sequence, number, chosen = door.last_in_sequence
                known.repeated.add(number)
                if VHOST_OF[chosen[0]] != vhost:
                    continue
            else:
                known.last = number
                known.sequences[door.number] = sequence = known.sequences[door.number] + 1
            if in_sequence:
                door.last_in_sequence = (sequence, number, chosen)
                properties = headers(b"door-%d" % door.number, sequence)
                persistent = True
            door.seq += 1
            body = b"%d|" % number + bytes(pick.choice([0, 100, 100, 600, 6000]))
            stored = encode_message(body, props=properties)
            door.packer.add_stored(
                0, list(chosen), stored, CONNECTION, CHANNEL, door.seq, self.now, 0xFFFFFFFF, 0xFF,
                persistent, persistent, in_sequence=in_sequence,
            )  # fmt: skip
            sent.append(Sent(door.seq, number, chosen, persistent))
            for queue in chosen:
                known.published[queue].add(number)
        wanted = pick.random() < 0.9
        data = door.packer.take(0, door.number, 1, self.epoch, door.batch, wanted)
        if data is None or not wanted:
            del door.waiting[door.batch]
        if data is None:
            door.batch -= 1
            return
        self.receive(data)

    def publish_unreadable(self) -> None:
        """One that the store cannot make sense of: it is dropped, and the shard goes on."""
        # The short way does not ask `ReadingStore.append`.
        self.home.unreadable, self.shard.short_way.is_on = True, False
        self.publish()
        self.home.unreadable, self.shard.short_way.is_on = False, True

    def settle(self) -> None:
        queue = self.random.choice(list(VHOST_OF))
        for number, message in list(self.held[queue].items())[: self.random.choice([1, 3])]:
            kind = self.random.choice((m.ACK, m.ACK, m.ACK, m.REJECT, m.REQUEUE))
            del self.held[queue][number]
            if kind != m.REQUEUE and queue not in STREAMS:
                self.known.settled[queue].add(message)
                self.settled[queue].add(message)
            self.receive(
                envelope.settles(
                    DOORS[queue % len(DOORS)], 1, self.epoch, 0, [(queue, kind, number, number)]
                )
            )

    def sync(self) -> None:
        self.begin_sync()
        self.end_sync()
        self.turn()

    def tick(self) -> None:
        self.now += 1000
        self.shard.syncs.want()

    def second(self) -> None:
        """Let a second pass, with its syncs: what was settled before it does not come back."""
        settled = {queue: set(messages) for queue, messages in self.settled.items()}
        self.end_settled_sync()
        self.end_sync()
        self.tick()
        self.begin_sync()
        self.end_sync()
        self.begin_settled_sync()
        self.end_settled_sync()
        if self.fault in GOOD_DISK and self.step is None:
            for queue, messages in settled.items():
                self.known.for_good[queue] |= messages
            for queue in STREAMS:
                self.known.positions[queue] = [self.position(queue)]

    def ask(self) -> None:
        """Ask, as a commit does, to make last what was settled in some queues."""
        queues = self.asking.choice([(1,), (2,), (3,), (1, 2, 3), (4,), (1, 4, 5), (FLEETING,)])
        self.last_asked += 1
        self.asked[self.last_asked] = {
            queue: set(self.settled[queue]) for queue in queues if queue in DURABLE
        }
        self.tell(self.asking.choice(DOORS), m.SyncSettled(self.last_asked, list(queues)))

    def answer_asked(self) -> None:
        """End and begin what is under way, as a loop goes on: each question is answered soon."""
        for _ in range(ROUNDS_MAX):
            self.end_settled_sync()
            self.begin_sync()
            self.end_sync()
            self.begin_settled_sync()
            if self.step is not None:
                self.reclaim()
        self.end_settled_sync()
        self.hear_all(self.shard.answers())
        promise(not self.asked, "every question about acks is answered")

    def note_positions(self) -> None:
        for queue in STREAMS:
            self.known.positions[queue].append(self.position(queue))

    def position(self, queue: int) -> int:
        """Of the reader with a name; -1: none is known."""
        position = self.shard.streams.queues[queue].log.stream.positions.get(b"reader-%d" % queue)
        return -1 if position is None else position

    def reclaim(self) -> None:
        """Begin a step, or run and end the one that was begun."""
        if self.step is None:
            self.now += 1000
            self.step = self.shard.syncs.begin_reclaim(self.now)
        else:
            step, self.step = self.step, None
            _syncer().run(step)
            self.shard.syncs.end_reclaim(self.now)

    def come_or_go(self) -> None:
        """Declare a stream, or delete it."""
        self.fleeting = not self.fleeting
        if self.fleeting:
            self.tell(
                m.CONTROLLER,
                m.CreateQueues(1, [m.QueueSpec(FLEETING, "/", "fleeting", True, arguments=STREAM)]),
            )
        else:
            self.tell(m.CONTROLLER, m.DeleteQueue(1, FLEETING))

    # -- what is said ------------------------------------------------------------------------------

    def hear_all(self, outgoing: list[Outgoing]) -> None:
        for endpoint, message in outgoing:
            self.hear(int(endpoint.removeprefix("peer-")), joined(message))

    def hear(self, peer: int, message: bytes) -> None:
        kind = envelope.read(message).kind
        if kind == m.CONFIRMED:
            self.confirmed(self.doors[peer], *envelope.read_confirmed(message))
        elif kind == m.CONTROL:
            self.told(envelope.read_control(message))
        elif kind == m.DELIVER:
            for _, _, queue, first, _, count, blob, *_ in codec.read_deliveries(message):
                stored = bytes(blob)[8 * count if queue in STREAMS else 0 :]
                for i, body in enumerate(numbers_in(stored)):
                    self.held[queue][first + i] = body

    def told(self, what: m.Control) -> None:
        if isinstance(what, m.SettledSynced):
            settled = self.asked.pop(what.number)
            if self.fault in GOOD_DISK:
                promise(what.lasts, "where there is room, no question is answered by no")
            if what.lasts:
                self.known.syncs_answered += 1
                for queue, messages in settled.items():
                    self.known.for_good[queue] |= messages

    def confirmed(self, door: Door, through: int, refused: list[tuple[int, int, int, int]]) -> None:
        promise(door.told < through <= door.batch, "told once, in order, and of what was sent")
        door.told = through
        for batch in [batch for batch in door.waiting if batch <= through]:
            for one in door.waiting.pop(batch):
                if any(first <= one.seq <= last for _, _, first, last in refused):
                    continue
                self.known.confirms += 1
                for queue in one.queues:
                    if queue in STREAMS or one.persistent:
                        self.known.owed[queue].add(one.message)

    # -- what must be there ------------------------------------------------------------------------

    def contents(self, queue_id: int) -> list[tuple[int, bool]]:
        """Each message, and whether it was handed out before."""
        queue = self.shard.queues[queue_id]
        if queue_id in STREAMS:
            log = queue.log.stream  # type: ignore[attr-defined] # a stream has one
            harmed = log.gaps if self.fault in GOOD_DISK else []
            promise(not harmed, f"no damage where nothing was damaged: {harmed}")
            found: list[int] = []
            offset = log.first_offset
            while offset < log.committed_offset:
                read = log.read(offset, 1 << 20)
                promise(read.next_offset > offset, "a read of what is committed gets on")
                found, offset = found + numbers_in(read.blob), read.next_offset
            return [(number, False) for number in found]
        return [
            (numbers_in(queue.store.read(array("Q", [entry]), 1)[0])[0], bool(entry & 1))
            for entry in queue.live()
        ]

    def check(self) -> None:
        """Compare with what is known, at the begin of a life, whatever the end of the last."""
        # Taken first: where reading fails below, this life breaks off, and the next does not follow
        # a clean stop.
        stopped_with, self.known.stopped_with = self.known.stopped_with, None
        contents = {queue: self.contents(queue) for queue in VHOST_OF}
        if stopped_with is not None:
            kept = {queue: contents[queue] for queue in stopped_with}
            promise(
                kept == stopped_with,
                "a clean stop keeps each message, and who was handed out before",
            )
        for queue in VHOST_OF:
            found = [number for number, _ in contents[queue]]
            once = [number for number in found if number not in self.known.repeated]
            promise(once == sorted(set(once)), "order, or twice")
            promise(set(found) <= self.known.published[queue], "not ours")
            back = set(found) & self.known.for_good[queue] - self.known.repeated
            promise(queue not in DURABLE or not back, f"settled, synced and back: {back}")
            lost = self.known.owed[queue] - self.known.settled[queue] - set(found)
            if queue in DURABLE + STREAMS:
                promise(not lost, f"confirmed and lost: {sorted(lost)} of queue {queue}")
            else:
                promise(not found, "a queue that is not durable comes back empty")
        for queue in STREAMS:
            found_at, positions = self.position(queue), self.known.positions[queue]
            promise(found_at >= min(positions), f"a position fell back: {found_at} of {positions}")
            self.known.positions[queue] = [found_at]


def numbers_in(stored: bytes) -> list[int]:
    bodies = [
        message[-int.from_bytes(message[:4], "little") :] for message in split_messages(stored)
    ]
    return [int(body.partition(b"|")[0]) for body in bodies]


def _prepare(files: FaultyFiles, pick: random.Random) -> str:
    """Choose what happens to the disk."""
    what = pick.choice(["nothing", "stop", "cut", "cut", "cut", "full", *["fault"] * 8])
    if what == "cut":
        files.cut_after = pick.choice([3, 10, 30, 100, 200])
    elif what == "full":
        files.bytes_max = sum(len(inode.data) for inode in files.names.values()) + pick.randrange(
            4 * SEGMENT_BYTES
        )
    elif what == "fault":
        call, kind = pick.choice((*CALLS, *OFTEN)), pick.choice(list(KINDS))
        after, times = pick.choice([0, 1, 2, 4, 8, 16, 32]), pick.choice([1, 1, FOR_GOOD])
        files.faults.append(Fault(call, after, KINDS[kind], times))
        return f"{call} after {after}: {kind}"
    return what


def live_some_lives(seed: int, asks: bool = True) -> Known:
    """Play a history that is a function of its seed alone; raises PromiseBroken.

    Without `asks` no front door asks about acks, as none did when some old seeds were found.
    """
    pick, known = random.Random(seed), Known()
    files = FaultyFiles(seed, pick.choice([512, 4096]))
    for epoch in range(1, pick.randint(3, LIVES_MAX + 1)):
        life = Life(files, epoch, known, pick.randrange(1 << 30), asks)
        what = _prepare(files, pick)
        try:
            live(life, pick.choice([10, 30, 60]), what)
        except PowerCut:
            pass
        files = files.restarted(power_cut=what == "cut" or pick.random() < 0.7)
    last = Life(files, LIVES_MAX + 1, known)
    last.start()
    assert last.shard.ready
    last.check()
    return known


def live(life: Life, acts: int, what: str) -> None:
    life.fault = what
    stopped_with, life.known.stopped_with = life.known.stopped_with, None
    try:
        life.start()
        if not life.shard.ready:
            return
        life.known.stopped_with = stopped_with  # it is for a start that succeeds at once
        life.check()
        life.attach()
        life.play(acts)
        if what == "stop":
            life.stop()
    except Exception as error:
        if what in GOOD_DISK:
            raise  # with a good disk nothing breaks off
        life.break_off(error)


# -- broken on purpose -----------------------------------------------------------------------------


class _ConfirmableAtOnce(HeldBatch):
    """Nothing is waited for unless somebody says so."""

    __slots__ = ()

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.state = CONFIRMABLE

    def wait_for(self, sync: int) -> None:
        self.state = APPENDING
        super().wait_for(sync)

    def need_no_sync(self) -> None:
        self.state = APPENDING
        super().need_no_sync()


def _cannot_say(message: object, messages: int) -> list[Refused]:
    raise envelope.WireError("on purpose")


def _answers_all(shard: Shard, alarm: str) -> list[Outgoing]:
    for peer in shard.peers.values():
        for held in peer.held:
            held.state = CONFIRMABLE
    return _break_off(shard, alarm)


def _knows_only_errors_of_the_disk(job: SyncJob[Any]) -> None:
    try:
        _run(job)
    except StoreFailed:
        if isinstance(job.error, OSError):
            raise
        job.synced, job.error = True, None


def _syncs_names_alone(job: SyncJob[Any]) -> None:
    job.paths = []
    _make_last(job)


def _syncs_no_names(job: SyncJob[Any]) -> None:
    # only what is settled has none
    job.with_directory = job.with_directory and job.handles is not None
    _make_last(job)


class _Always:
    """An attribute that nothing changes."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __get__(self, owner: object, kind: type) -> bool:
        return self.value

    def __set__(self, owner: object, value: bool) -> None:
        pass


def _over_when_written(wait: AckWait, has_room: bool) -> None:
    wait.is_over = True


def _without_merges(
    wait: AckWait, segments: Segments, by_queue: Mapping[int, list[Segment]]
) -> dict[Segment, None]:
    found = wait.segments = {
        segment: None for segment in _look(wait, segments, by_queue) if not segment.merging
    }
    return found


_look = AckWait.look
_break_off, _run, _make_last = Shard.break_off, SyncJob.run, SyncJob._make_last

BROKEN: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a batch is confirmable before its append": lambda: mock.patch(
        "shardmq.shardd.peers.HeldBatch", _ConfirmableAtOnce
    ),
    "a batch that is dropped is not refused": lambda: mock.patch(
        "shardmq.shardd.shard._all_of", lambda *_: []
    ),
    "a batch that is dropped is never answered for": lambda: mock.patch(
        "shardmq.shardd.shard._all_of", _cannot_say
    ),
    "the last words confirm all": lambda: mock.patch.object(Shard, "break_off", _answers_all),
    "only errors of the disk fail a sync": lambda: mock.patch.object(
        SyncJob, "run", _knows_only_errors_of_the_disk
    ),
    "what is settled is never synced": lambda: mock.patch.object(
        Syncs, "begin_settled", lambda syncs: None
    ),
    "what is settled is in files that are not synced": lambda: mock.patch.object(
        SyncJob, "_make_last", _syncs_names_alone
    ),
    "what is settled is in files without lasting names": lambda: mock.patch.object(
        SyncJob, "_make_last", _syncs_no_names
    ),
    "a question about acks is answered at once": lambda: mock.patch.object(
        AckWait, "is_over", _Always(True), create=True
    ),
    "acks count as lasting when their sync begins": lambda: mock.patch.object(
        AckWait, "written", _over_when_written
    ),
    "acks that a merge holds back are not waited for": lambda: mock.patch.object(
        AckWait, "look", _without_merges
    ),
    "positions in streams are never synced": lambda: mock.patch.object(
        StreamLog, "begin_settled_sync", lambda stream: None
    ),
}
