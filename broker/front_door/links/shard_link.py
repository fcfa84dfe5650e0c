"""The link to one shard: what was sent, what waits to be sent, and credit both ways.

ShardLinks (shard_links.py) holds a link to each shard. A shard of another node is reached by
sessions (shardd/wire/dialer.py): the end of one is the end of the shard's process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from shardmq.broker.front_door.consume.settling import Due, Settles
from shardmq.broker.front_door.hot_state import PUBLISH_WINDOW_BYTES, LinkState
from shardmq.broker.front_door.links.settled_waits import SettledWaits
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.dialer import Dialer
from shardmq.shardd.wire.histogram import Histogram
from shardmq.shardd.wire.lane import joined
from shardmq.shardd.wire.local_lane import AnyLane, LocalLane
from shardmq.shardd.wire.shared_memory import BodyMemory

log = logging.getLogger("shardmq.broker.front_door.links.shard_link")

# The last words of a shard arrive on another connection than the one whose end is noticed. Confirms
# among them still count.
LAST_WORDS_S = 0.05
# The session to a shard that is handed over ends behind the last confirms. The news of who leads
# next come by another way, and wait so long for the end of the session.
HANDED_OVER_S_MAX = 0.5
# Publishes that want a confirm wait this long for a shard that is away; then they are nacked.
AWAY_S_MAX = 2.0
# A shard of another node counts as down when it has been away for `cluster.node_timeout_s` and so
# much longer: what is asked about its queues is refused, and publishes for it are dropped. Other
# nodes that have copies of a shard take it over in less.
DOWN_MARGIN_S = 4.0
# A shard that is away is waited for anew when another node leads it, which may have to recover
# first. An address that changes without end is waited for so many times.
LEADERS_WAITED_FOR_MAX = 4
# zmq's own are enums: each `&` with one costs as much as a call.
AT_ONCE = int(zmq.NOBLOCK)


class Unconfirmed(Protocol):
    """Publishes that wait until their batch is stored.

    `confirmed` or `lost` is called once. Messages of the batch that a queue refused are named by
    `refuse` before that. If publishes with `in_sequence` are lost, nothing that was sent behind
    them may be stored.
    """

    @property
    def in_sequence(self) -> bool: ...
    def refuse(self, connection: int, channel: int, first: int, last: int) -> None: ...
    def confirmed(self) -> None: ...
    def lost(self) -> None: ...


class Events(Protocol):
    """The front door, which hears what the shards say."""

    def delivery(
        self,
        shard: int,
        section: tuple[int, int, int, int, bool, int, memoryview | wire.Weighed, int, bool],
    ) -> None: ...
    def away(self, shard: int) -> None:
        """Hear that the process of a shard is gone and has nothing more to say."""

    def restarted(self, shard: int) -> None: ...
    def told(self, shard: int, what: wire.Control) -> None: ...
    def outlived(self) -> None:
        """Hear that the shards take this process for gone and go on without it."""

    def known(self, connection: int, channel: int, first: int, last: int, altered: bool) -> None:
        """Hear that publishes with these confirm numbers repeat what a queue has had before.

        `altered`: they have the place of the earlier messages but are other messages.
        """

    def publish_room(self, shard: int) -> None: ...
    def receiving(self) -> None: ...
    def received(self) -> None: ...
    def write_borrowed(self) -> None:
        """Write deliveries that lie in part in a ring, as far as clients take them."""

    def own_deliveries(self) -> None:
        """Copy what is still needed of deliveries: the memory they lie in is about to change."""


class BatchSizes:
    """Histograms of the batches of all links."""

    def __init__(self) -> None:
        self.messages, self.bytes = Histogram(), Histogram()

    def add(self, messages: int, size: int) -> None:
        self.messages.add(messages)
        self.bytes.add(size)

    def report(self) -> dict[str, float]:
        return self.messages.report("batch_messages") | self.bytes.report("batch_bytes")


class ShardLink(LinkState):
    """The link to a shard: batches sent and waiting, and what the shard has answered.

    `way` is the socket to the processes of the shard, or the lane to the shard of this process.
    It is None for a shard of another node, which `dialer` leads to when the shard is known.
    A shard of another node is down when it has been away for `down_s`. `on_ended` is called when a
    process is gone and has nothing more to say.
    `process` is the incarnation of this front door, and `incarnation` that by which the shard knows
    it. `epoch` counts the processes of the shard, 0 before the first. `settles` holds the settles
    to tell. The packer, the sizes and `due` are shared by all links.
    """

    def __init__(
        self,
        shard: int,
        way: zmq.Socket[bytes] | LocalLane | None,
        *,
        peer: int,
        incarnation: int,
        packer: codec.Packer,
        sizes: BatchSizes,
        due: Due,
        events: Events,
        on_control: Callable[[ShardLink, envelope.Message], None],
        on_ended: Callable[[ShardLink], None],
        bodies: BodyMemory | None = None,
        process: int = 0,
        down_s: float = 0.0,
    ) -> None:
        self.shard = shard
        self.down_s = down_s
        self.lane: AnyLane | None = None
        self.socket: zmq.Socket[bytes] | None = None
        self.dialer: Dialer | None = None
        # The shard is one of this process, with a lane from its start to its end.
        self.is_local = isinstance(way, LocalLane)
        if isinstance(way, LocalLane):
            self.lane = way
        else:
            self.socket = way
        self.node = ""  # the name of the node that the shard is on, if it is another one
        self.epoch = 0
        # Loop time. A shard that the front door has not learnt of is away from the start on.
        self.away_since: float | None = None if way is not None else 0.0
        self.leaders_waited_for = 0  # since the shard was there last
        self.stalled = False  # the disk of the shard does not answer
        self.in_flight = 0  # bytes of publishes that the shard has not taken in
        self.settles = Settles(shard, due)
        self.due = due
        self.packing: list[Unconfirmed] = []  # those of the batch that is being packed
        self.credits: dict[int, int] = {}  # bytes of deliveries written, by connection
        self.credit_due = False  # the shard is to be told of them
        self.rings_full = 0  # times that lanes which are closed now were full
        # Handlers of messages: by kind, and by how a message of this epoch begins.
        self.by_kind: dict[int, Callable[[envelope.Message], None]] = {
            wire.DELIVER: self._on_deliver,
            wire.CONFIRMED: self._on_confirmed,
            wire.CREDIT: self._on_credit,
            wire.FREED: self._on_freed,
            wire.CONTROL: lambda message: on_control(self, message),
        }
        self.by_header: dict[envelope.Message, Callable[[envelope.Message], None]] = {}
        self.peer, self.incarnation, self._process = peer, incarnation, process
        self.packer, self._sizes, self._events = packer, sizes, events
        self._on_ended = on_ended
        self.batch_messages, self.batch_bytes = sizes.messages, sizes.bytes
        self._bodies = bodies
        self.lends = False  # the shard sees the memory of `bodies`
        self.batch = 0  # number of the batch that was sent last
        self.sent: deque[tuple[int, list[Unconfirmed]]] = deque()  # by number, unconfirmed
        self.settled_waits = SettledWaits()
        # Batches made while the shard was away, and what each weighs.
        self.aside: list[tuple[bytes, int, list[Unconfirmed]]] = []
        # The shard has been away for too long: logged once each.
        self._nacking = self._dropping = False
        # The process hands the shard over, or has ended. It is away, but for its last words.
        self.has_last_words = False

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the shard is one of another node, or of none that is known."""
        return self.socket is None and not self.is_local

    @property
    def up(self) -> bool:
        """Return whether the shard's process is there."""
        return self.epoch != 0 and self.away_since is None

    def connect(self, loop: asyncio.AbstractEventLoop, address: str) -> None:
        """Connect to the processes of the shard, now and later; a dialer knows its address.

        The end of the connection is noticed: on one host, it is the end of the shard's process. The
        wait for the shard begins now.
        """
        if self.away_since is None or self.leaders_waited_for < LEADERS_WAITED_FOR_MAX:
            self.away_since = loop.time()
            self.leaders_waited_for += 1
        if self.dialer is not None:
            self.dialer.start(loop)
        if self.socket is None:
            return
        monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

        def heard() -> None:
            while monitor.poll(0):
                recv_monitor_message(monitor)
                if self.up or self.has_last_words:
                    self.away_since = loop.time() if self.up else self.away_since
                    self.has_last_words = True
                    loop.call_later(LAST_WORDS_S, self.ended, self.epoch)

        loop.add_reader(monitor.fileno(), heard)
        heard()  # the descriptor becomes readable only after the events before were looked at
        self.socket.connect(address)

    def session_began(self) -> None:
        """Join the shard of another node in a new session."""
        assert self.dialer is not None
        self.incarnation = self.dialer.incarnation
        self.send_by_zmq(self.control(wire.Join("", self._process)))

    def session_ended(self) -> None:
        """Take the shard for gone: its session has ended."""
        self.ended(self.epoch)

    def move(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Take the process for gone, and have no way until there is one to the next process."""
        self.close(loop, 0)
        self.socket = self.dialer = None
        if loop is not None:
            self.ended(self.epoch)

    def leave(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Give up a shard that is not there any more, and what waits for it."""
        self.move(loop)
        self._lose_unsent()

    def close(self, loop: asyncio.AbstractEventLoop | None, linger_ms: int) -> None:
        if self.dialer is not None:
            self.dialer.close(linger_ms)
        if self.socket is None:
            return
        monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if loop is not None:
            loop.remove_reader(monitor.fileno())
        self.socket.disable_monitor()
        monitor.close()
        self.socket.close()

    # -- sending ----------------------------------------------------------------------------------

    def send(self, message: envelope.Parts) -> None:
        """Send by the lane if there is one, else by ZeroMQ."""
        self._put(message)
        if self.lane is not None:
            self.lane.ring()

    def _put(self, message: envelope.Parts) -> None:
        """Do the same as `send`, but a shard that sleeps is not woken: the caller rings."""
        if self.lane is not None:
            self.lane.put(message)
        else:
            self.send_by_zmq(joined(message))

    def send_by_zmq(self, message: bytes) -> None:
        """Send by ZeroMQ, if the shard is one of another process."""
        if self.socket is not None:
            self.socket.send(message, AT_ONCE)
        elif self.dialer is not None:
            self.dialer.send(message)
        elif self.lane is not None:
            self.lane.send(message)

    def control(self, what: wire.Message) -> bytes:
        """Return a control message to the process of this epoch."""
        # A member of the union.
        return envelope.control(self.peer, self.incarnation, self.epoch, self.shard, what)  # type: ignore[arg-type]

    def tell(self, what: wire.Message) -> None:
        """Send a control message behind everything that was packed before it."""
        self.flush()
        self.send(self.control(what))

    def join(self, endpoint: str) -> None:
        """Say where this front door is, by ZeroMQ: the process there may be another by now.

        The shard of another node hears it once in each session.
        """
        if self.dialer is None:
            self.send_by_zmq(self.control(wire.Join(endpoint, self._process)))

    def flush_slowly(self) -> None:
        """Do all that flush() may have to do.

        While the shard is away, the batch stays in the packer. Settles and credit are forgotten:
        the next process requeues what was delivered.
        """
        if not self.up:
            self.settles.take()
            self.credits.clear()
            return
        shard, epoch, packer = self.shard, self.epoch, self.packer
        peer, incarnation = self.peer, self.incarnation
        if self.settles:
            self._put(envelope.settles(peer, incarnation, epoch, shard, self.settles.take()))
        messages, weight = packer.messages(shard), packer.weight(shard)
        batch = packer.take_parts(
            shard, peer, incarnation, epoch, self.batch + 1, bool(self.packing)
        )
        if batch is not None:
            size = envelope.size_of(batch)
            self._sizes.add(messages, size)
            self.note_batch(size + weight, self.packing)
            self._put(batch)
            self.packing = []
        if self.credit_due:
            self.credit_due = False
            self._put(envelope.credit(peer, incarnation, epoch, shard, self.credits.items()))
            self.credits.clear()
        if self.lane is not None:
            self.lane.ring()

    def may_lend(self, may: bool) -> None:
        """Note whether the shard can see the bodies that this front door lends."""
        self.lends = may
        self.packer.may_lend(self.shard, may)

    def end_batch(self) -> None:
        """End the batch that is being packed: send it, or set it aside while the shard is away."""
        if self.up:
            self.flush()
            return
        self.may_lend(False)  # the next process cannot see the bodies yet
        messages, weight = self.packer.messages(self.shard), self.packer.weight(self.shard)
        batch = self.packer.take(self.shard, self.peer, self.incarnation, 0, 0)
        if batch is not None:
            self._sizes.add(messages, len(batch))
            weight += len(batch)
            self.aside.append((batch, weight, self.packing))
            self.in_flight += weight
            self.packing = []

    # -- the life of the shard's process ----------------------------------------------------------

    def begin(self, epoch: int, pid: int) -> None:
        """Start with a new process of the shard; what the old one has not confirmed is lost."""
        first_time = self.epoch == 0
        lost = self._lose_sent()
        self.may_lend(False)
        if self._bodies is not None:
            self._bodies.lost(self.shard)
        self.epoch = epoch
        who = self.peer, self.incarnation, epoch, self.shard
        self.sender = envelope.sender(*who)
        self.by_header = {envelope.header(kind, *who): do for kind, do in self.by_kind.items()}
        self.away_since = None
        self.leaders_waited_for = 0
        self._nacking = self._dropping = self.stalled = False
        self.has_last_words = False
        self.in_flight = 0
        self.settles.take()
        self.credits.clear()
        if not first_time:
            log.warning("shard %d is back (pid %d)%s", self.shard, pid, _nacked(lost))

    def send_aside(self) -> None:
        """Send the batches that were made while the shard was away."""
        aside, self.aside = self.aside, []
        for batch, weight, waiting in aside:
            readdressed = envelope.readdressed(batch, self.epoch, self.batch + 1)
            self.note_batch(weight, waiting)
            self._put(readdressed)
        if aside and self.lane is not None:
            self.lane.ring()

    def pause(self, now: float) -> None:
        """Send nothing more to this process of the shard, which hands the shard over.

        What was sent is still answered. What comes waits for the next process.
        """
        if self.up:
            self.tell(wire.Paused())
            self.away_since, self.has_last_words = now, True

    def ended(self, epoch: int) -> None:
        """Note that the process of this epoch is gone and has nothing more to say."""
        if self.epoch == epoch and (self.up or self.has_last_words):
            if self.up:
                self.away_since = asyncio.get_running_loop().time()
            self.has_last_words = False
            log.warning("shard %d is gone%s", self.shard, _nacked(self._lose_sent()))
            self.in_flight = sum(weight for _, weight, _ in self.aside)
            self._events.away(self.shard)
            self._events.received()
            self._on_ended(self)

    def tick(self, now: float) -> None:
        """Give up publishes that wait for a shard that stays away or whose disk does not answer.

        Those that nobody confirms wait as long as the process of a shard of this node takes, but
        not for another node.
        """
        if self.stalled and self._lose_sent():
            self._events.received()
        if self.away_since is None or now - self.away_since <= AWAY_S_MAX:
            return
        down = is_down(self, now)
        is_over = bool(self.packing) or any(waiting for _, _, waiting in self.aside)
        if down:
            is_over = bool(self.aside or self.packer.messages(self.shard))
        if not is_over:
            return
        # A publish among them has waited for too long.
        self._lose_unsent()
        self.in_flight = 0
        if not self._nacking:
            self._nacking = True
            log.warning("shard %d stays away: publishes that want a confirm are nacked", self.shard)
        if down and not self._dropping:
            self._dropping = True
            log.warning("shard %d is down: publishes that want no confirm are dropped", self.shard)
        self._events.publish_room(self.shard)
        self._events.received()

    def _lose_sent(self) -> int:
        """Report what the shard has not confirmed as lost. It may have stored it all the same."""
        lost = [waiting for _, batch in self.sent for waiting in batch]
        self.sent.clear()
        if any(waiting.in_sequence for waiting in lost):
            self._lose_unsent()
        for waiting in lost:
            waiting.lost()
        for settled in self.settled_waits.take():
            settled.lost()
        return len(lost)

    def _lose_unsent(self) -> None:
        self.packer.drop(self.shard)
        lost = [waiting for _, _, batch in self.aside for waiting in batch] + self.packing
        self.aside, self.packing = [], []
        for waiting in lost:
            waiting.lost()

    # -- what the shard says ----------------------------------------------------------------------

    def _on_deliver(self, message: envelope.Message) -> None:
        delivery, shard = self._events.delivery, self.shard
        for section in codec.read_deliveries(message):
            delivery(shard, section)

    def _on_confirmed(self, message: envelope.Message) -> None:
        batch, told = envelope.read_confirmed(message)
        refused = self._tell_known(told) if told else told
        while self.sent and self.sent[0][0] <= batch:
            for waiting in self.sent.popleft()[1]:
                for connection, channel, first, last in refused:
                    waiting.refuse(connection, channel, first, last)
                waiting.confirmed()

    def _tell_known(self, told: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """Tell the front door of repeated publishes; return those that were refused."""
        refused = []
        for connection, channel, first, last in told:
            if channel & (wire.KNOWN | wire.ALTERED):
                altered = bool(channel & wire.ALTERED)
                number = channel & (wire.KNOWN - 1)
                self._events.known(connection, number, first, last, altered)
            else:
                refused.append((connection, channel, first, last))
        return refused

    def _on_credit(self, message: envelope.Message) -> None:
        for _connection, count in envelope.read_credit(message):
            self.in_flight -= count
        if self.in_flight <= PUBLISH_WINDOW_BYTES // 2:
            self._events.publish_room(self.shard)

    def _on_freed(self, message: envelope.Message) -> None:
        if self._bodies is not None:
            self._bodies.freed(self.shard, message)


def is_down(link: ShardLink, now: float) -> bool:
    """Return whether nobody waits for a shard any more, because its node stays away."""
    since = link.away_since
    return since is not None and now - since > link.down_s and link.is_elsewhere


def _nacked(count: int) -> str:
    return "; publishes it had not confirmed are nacked" if count else ""
