"""A shard over files that fail: whenever it ends, what was confirmed and not settled is there in its next life."""

from __future__ import annotations

import errno
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shardd.shard import Shard
from shardd.store import DiskFull, SegmentStore, StoreError
from shardd.wire import codec, envelope
from shardd.wire import messages as m
from shardd.wire import packer as packing
from shardd.wire.lane import joined
from tests.support.dict_store import NoStreams
from tests.support.faulty_files import FaultyFiles, PowerCut

SEGMENT_BYTES = 4096
BODY_BYTES = 100
DOOR, CONNECTION, CHANNEL = 0, 9, 1
VHOST_OF = {1: "/", 2: "/", 3: "b", 4: "/"}
DURABLE = (1, 2, 3)
SPECS = [m.QueueSpec(number, vhost, f"q{number}", number in DURABLE) for number, vhost in VHOST_OF.items()]
# What a publish may reach: queues of one vhost.
TARGETS = [(1,), (2,), (1, 2), (3,), (1, 4), (4,)]


class FaultyHome(NoStreams):
    def __init__(self, files: FaultyFiles) -> None:
        self.files = files

    def open(self, vhost: str) -> SegmentStore:
        return SegmentStore(f"vhost-{ord(vhost)}", files=self.files, segment_bytes=SEGMENT_BYTES, spare_segments=1)

    def remove(self, vhost: str) -> None:
        raise AssertionError("no vhost is dropped here")

    def keep_only(self, vhosts: Collection[str]) -> None:
        assert set(vhosts) == set(VHOST_OF.values())

    def recovered(self, vhost: str, store: object) -> None:
        pass

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        assert 0 <= bytes_done <= bytes_total


@dataclass
class Known:
    """What the clients of all lives know, by queue; messages are named by numbers in publish order."""

    published: dict[int, set[int]] = field(default_factory=lambda: {queue: set() for queue in VHOST_OF})
    owed: dict[int, set[int]] = field(default_factory=lambda: {queue: set() for queue in VHOST_OF})
    settled: dict[int, set[int]] = field(default_factory=lambda: {queue: set() for queue in VHOST_OF})
    last: int = 0


class Life:
    """One process of the shard, with a controller and a front door that has a consumer on each queue."""

    def __init__(self, files: FaultyFiles, epoch: int, known: Known) -> None:
        self.known = known
        self.epoch = epoch
        self.shard = Shard(0, epoch, 1, FaultyHome(files), no_room=(DiskFull,))
        self.packer = packing.Packer(1)
        self.batch = 0
        self.seq = 0
        self.sent: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}  # batch: seq, message, queues
        self.before: dict[int, list[tuple[int, bool]]] = {}  # a clean stop
        self.held: dict[int, dict[int, int]] = {queue: {} for queue in VHOST_OF}  # delivery number: message

    def start(self) -> None:
        for peer in (m.CONTROLLER, DOOR):
            self.shard.receive(envelope.control(peer, 1, 0, 0, m.Join(f"peer-{peer}")), 1000)
        self.shard.receive(envelope.control(m.CONTROLLER, 1, self.epoch, 0, m.Assign(SPECS)), 1000)
        assert self.shard.ready

    def attach(self) -> None:
        for queue in VHOST_OF:
            what = m.Attach(1, queue, queue, CONNECTION, CHANNEL, "tag", False, False, 0, 5)
            self.shard.receive(envelope.control(DOOR, 1, self.epoch, 0, what), 1000)

    # -- acts ------------------------------------------------------------------------------------------

    def publish(self, n: int) -> None:
        targets = TARGETS[n % len(TARGETS)]
        self.batch += 1
        for _ in range(1 + n % 7):
            self.seq += 1
            self.known.last += 1
            body = self.known.last.to_bytes(4, "little").ljust(BODY_BYTES, b".")
            stored = len(body).to_bytes(4, "little") + bytes(4) + b"\0\1q" + body
            self.packer.add_stored(
                0, list(targets), stored, CONNECTION, CHANNEL, self.seq, 1000, 0xFFFFFFFF, 0xFF, True, True
            )
            self.sent.setdefault(self.batch, []).append((self.seq, self.known.last, targets))
            for queue in targets:
                self.known.published[queue].add(self.known.last)
        data = self.packer.take(0, DOOR, 1, self.epoch, self.batch)
        assert data is not None
        self.shard.receive(data, 1000)

    def settle(self, n: int) -> None:
        queue = 1 + n % len(VHOST_OF)
        for number, message in list(self.held[queue].items())[: 1 + n % 3]:
            kind = (m.ACK, m.ACK, m.REJECT, m.REQUEUE)[n % 4]
            del self.held[queue][number]
            if kind != m.REQUEUE:
                self.known.settled[queue].add(message)
            data = envelope.settles(DOOR, 1, self.epoch, 0, [(queue, kind, number, number)])
            self.shard.receive(data, 1000)
        self.shard.want_sync()

    def turn(self, n: int) -> None:
        for each in self.shard.turn_end(1000):
            self.hear(joined(each.message))

    def sync(self, n: int) -> None:
        sync = self.shard.begin_sync()
        if sync is not None:
            if n % 2:
                self.publish(n)
            sync.run()
            self.shard.sync_ended()
        self.turn(0)

    def hear(self, message: bytes) -> None:
        kind = envelope.read(message).kind
        if kind == m.CONFIRMED:
            self.confirmed(*envelope.read_confirmed(message))
        elif kind == m.DELIVER:
            for _, _, queue, first, _, count, blob, *_ in codec.read_deliveries(message):
                for i, body in enumerate(bodies_of(bytes(blob), count)):
                    self.held[queue][first + i] = body

    def confirmed(self, through: int, refused: list[tuple[int, int, int, int]]) -> None:
        for batch in [batch for batch in self.sent if batch <= through]:
            for seq, message, queues in self.sent.pop(batch):
                if not any(first <= seq <= last for _, _, first, last in refused):
                    for queue in queues:
                        self.known.owed[queue].add(message)

    # -- what must be there ----------------------------------------------------------------------------

    def contents(self, queue_id: int) -> list[tuple[int, bool]]:
        queue = self.shard.queues[queue_id]
        found = []
        for entry in queue.live():
            blob, _ = queue.store.read(array("Q", [entry]), 1)
            found.append((bodies_of(blob, 1)[0], bool(entry & 1)))
        return found

    def check(self) -> None:
        """At the begin of a life, whatever the end of the last."""
        for queue in VHOST_OF:
            found = [message for message, _ in self.contents(queue)]
            assert found == sorted(set(found)), "order, or twice"
            assert set(found) <= self.known.published[queue], "not ours"
            if queue in DURABLE:
                assert self.known.owed[queue] - self.known.settled[queue] <= set(found), "confirmed and lost"
            else:
                assert not found


def bodies_of(blob: bytes, count: int) -> list[int]:
    step = len(blob) // count
    return [int.from_bytes(blob[i * step + 11 : i * step + 15], "little") for i in range(count)]


ACTS = st.tuples(
    st.sampled_from(["publish", "publish", "publish", "turn", "settle", "settle", "sync", "sync"]), st.integers(0, 99)
)


@st.composite
def lives(draw: st.DrawFn) -> tuple[str, int, list[tuple[str, int]]]:
    fault = draw(st.sampled_from(["none", "cut", "cut", "cut", "sync", "write", "full", "stop"]))
    return fault, draw(st.integers(0, 24)), draw(st.lists(ACTS, min_size=20, max_size=60))


def break_at(files: FaultyFiles, fault: str, at: int) -> None:
    if fault == "cut":
        files.cut_after = at
    elif fault in ("sync", "write"):
        files.fail[fault] = (at // 4, errno.EIO)
    elif fault == "full":
        files.bytes_max = sum(len(inode.data) for inode in files.names.values()) + at * SEGMENT_BYTES // 10


@settings(max_examples=120, deadline=None)
@given(st.lists(lives(), min_size=2, max_size=4), st.integers(0, 1 << 20))
def test_what_was_confirmed_and_not_settled_outlives_any_end(
    history: list[tuple[str, int, list[tuple[str, int]]]], seed: int
) -> None:
    files, known = FaultyFiles(seed), Known()
    for epoch, (fault, at, acts) in enumerate(history, 1):
        life = Life(files, epoch, known)
        break_at(files, fault, at)
        power_cut = True
        try:
            live(life, acts)
            if fault == "stop":
                stop(life)
                files = files.restarted(power_cut=True)
                expect_all_of(life, Life(files, epoch + 100, known))
            power_cut = bool(at % 2)
        except StoreError:
            life.shard.answers()
            save_what_can_be_saved(life)
        except PowerCut:
            pass
        files = files.restarted(power_cut=power_cut)
    last = Life(files, len(history) + 1, known)
    last.start()
    last.check()


def live(life: Life, acts: list[tuple[str, int]]) -> None:
    life.start()
    life.check()
    life.attach()
    for act, n in acts:
        getattr(life, act)(n)


def save_what_can_be_saved(life: Life) -> None:
    try:
        life.shard.abandon()
    except PowerCut:
        pass


def stop(life: Life) -> None:
    life.shard.want_sync()
    life.sync(0)
    for each in life.shard.answers():
        life.hear(joined(each.message))
    life.before = {queue: life.contents(queue) for queue in DURABLE}
    life.shard.close()


def expect_all_of(life: Life, after: Life) -> None:
    """A clean stop keeps each message, and who was handed out before."""
    after.start()
    assert {queue: after.contents(queue) for queue in DURABLE} == life.before


def test_the_check_would_notice_a_shard_that_confirms_too_early() -> None:
    files, known = FaultyFiles(1), Known()
    life = Life(files, 1, known)
    life.start()
    life.publish(0)
    life.confirmed(1, [])  # no sync was waited for
    after = Life(files.restarted(power_cut=True), 2, known)
    after.start()
    try:
        after.check()
    except AssertionError:
        return
    raise AssertionError("nothing was lost, or nobody noticed")
