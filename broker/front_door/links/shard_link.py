"""The front door's links to the shards: batches out, deliveries and confirms in, credit both ways, restarts noticed.

Carries only: what a message means is said in publishing.py and consuming.py. One PULL socket takes in what all shards
send, one PUSH per shard sends; both never block; a lane (lane.py) to each process of a shard is the short way. What is
packed during one pass of the event loop leaves at its end, as one PUBLISH, one SETTLE and one CREDIT per shard at the
most.

A shard's end shows as the end of its connection: what it had not confirmed is reported lost at once. Publishes then
wait in the packer, and their clients are not read (credit); whoever wants a confirm waits AWAY_S_MAX at the most. The
next process of the shard says Hello with a new epoch: consumers are attached and requests asked again.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from shardmq.broker.front_door.consume.settling import ACKS_WAIT_S, Due, Settles
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.config import BrokerConfig
from shardmq.shardd.wire import codec, envelope, packer
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.histogram import Histogram
from shardmq.shardd.wire.lane import ALL, Lane, NoLane, Offer, joined, offer

log = logging.getLogger("shardmq.broker.front_door.links.shard_link")

# Publishes a shard may have from this front door and has not taken in: their bytes, and what the
# references of messages to several queues weigh. Beyond, their clients are not read.
PUBLISH_WINDOW_BYTES = 1 << 20
# Received messages handled before other events of the loop get their turn.
RECEIVE_BURST = 64
# Deliveries written to a client before its shard is told: an eighth of a connection's window there, so that a trickle
# costs no message of its own.
DELIVERY_CREDIT_BYTES = 128 << 10
# Connections with less than that before all are told of: those that left meanwhile would stay for ever.
CREDITS_MAX = 4096
RECONNECT_MS = 10
FENCE_LOOK_S = 0.05
# A shard's last words arrive on a connection other than the one whose end is noticed: confirms among them still count.
LAST_WORDS_S = 0.05
# Publishes that want a confirm wait this long for a shard that is away; then they are nacked.
AWAY_S_MAX = 2.0
# zmq's own are enums: each `&` with one costs as much as a call.
READABLE, AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)
# What is still unsent when the process ends may take this long.
LINGER_MS = 500


class Unconfirmed(Protocol):
    """What waits for a batch: told once, by confirmed() or by lost(); before, which of its messages were refused.
    `in_sequence`: when it is lost, nothing that was sent behind it may be stored."""

    @property
    def in_sequence(self) -> bool: ...
    def refuse(self, connection: int, channel: int, first: int, last: int) -> None: ...
    def confirmed(self) -> None: ...
    def lost(self) -> None: ...


class ShardRefused(Exception):
    """The shard answered Refused."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Events(Protocol):
    """Who hears what the shards say."""

    def delivery(
        self, shard: int, section: tuple[int, int, int, int, bool, int, memoryview, int, bool]
    ) -> None: ...
    def away(self, shard: int) -> None:
        """Its process is gone, and all it said is heard."""

    def restarted(self, shard: int) -> None: ...
    def told(self, shard: int, what: wire.Control) -> None: ...
    def known(self, connection: int, channel: int, first: int, last: int, altered: bool) -> None:
        """Publishes of these confirm numbers repeat what some queue had before; `altered`: as other messages."""

    def publish_room(self, shard: int) -> None: ...
    def receiving(self) -> None: ...
    def received(self) -> None: ...
    def own_deliveries(self) -> None:
        """What of deliveries is still needed is copied: the memory they lie in is about to change."""


class ShardLink:
    """One shard, as seen from here."""

    def __init__(self, shard: int, socket: zmq.Socket[bytes], due: Due) -> None:
        self.shard = shard
        self.socket = socket
        self.lane: Lane | None = None
        self.epoch = 0  # 0: never there
        self.away_since: float | None = None  # loop time
        self.nacking = False  # it has been away for too long
        self.stalled = False  # its disk does not answer
        self.batch = 0
        self.in_flight = 0  # bytes of publishes not yet taken in
        self.sent: deque[tuple[int, list[Unconfirmed]]] = deque()
        self.gathering: list[Unconfirmed] = []  # those of the batch being packed
        # Batches made while it was away, and what each weighs.
        self.aside: list[tuple[bytes, int, list[Unconfirmed]]] = []
        self.settles = Settles(shard, due)
        self.credits: dict[int, int] = {}
        self.credit_due = False
        self.rings_full = 0  # of lanes that are no more
        self.handlers: dict[
            envelope.Message, Handler
        ] = {}  # in this epoch, by how the message begins

    def send(self, message: envelope.Parts) -> None:
        if self.lane is not None:
            self.lane.send(message)
        else:
            self.send_far(joined(message))

    def send_far(self, message: bytes) -> None:
        self.socket.send(message, AT_ONCE)

    @property
    def up(self) -> bool:
        return self.epoch != 0 and self.away_since is None

    @property
    def waited_for(self) -> bool:
        """Whether somebody wants a confirm for what is not sent."""
        return bool(self.gathering or any(batch for _, _, batch in self.aside))


Handler = Callable[[ShardLink, envelope.Message], None]


class ShardLinks:
    """All shards of this host. `peer`: this front door's number; `incarnation`: of this process."""

    def __init__(self, config: BrokerConfig, incarnation: int, events: Events) -> None:
        self.peer = config.door
        self.incarnation = incarnation
        self.events = events
        self.packer = packer.Packer(config.shards)
        self._context = zmq.Context()
        self._inbox = self._socket(zmq.PULL)
        self._endpoint = f"ipc://{config.runtime_dir}/door-{config.door}-{incarnation}.sock"
        self._runtime_dir = config.runtime_dir
        self._due = Due()
        self.links = [
            ShardLink(shard, self._socket(zmq.PUSH), self._due) for shard in range(config.shards)
        ]
        self.vhost = ""  # whose publishes the packer holds
        self._batch_messages, self._batch_bytes = Histogram(), Histogram()
        self._requests: dict[
            int, tuple[int, Callable[[int], wire.Message], asyncio.Future[wire.Control]]
        ] = {}
        self._last_request = 0
        self._acks_wait = False  # some do, and a timer runs
        self._answered_in: dict[
            int, int
        ] = {}  # epoch of answers to basic.get, until their caller runs
        self._one_up: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bells = select.epoll()  # of all lanes
        self._bells_fd = self._bells.fileno()
        self._handlers: dict[int, Handler] = {
            wire.DELIVER: self._on_deliver,
            wire.CONFIRMED: self._on_confirmed,
            wire.CREDIT: self._on_credit,
            wire.CONTROL: self._on_control,
        }

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        # Bounded by credit, not by count: a full pipe here would mean a message neither sent nor kept.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        return socket

    # -- start, stop --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the first shard has said Hello. The others may still recover: what is for them waits."""
        self._loop = asyncio.get_running_loop()
        self._one_up = self._loop.create_future()
        self._inbox.bind(self._endpoint)
        self._loop.add_reader(self._inbox.fileno(), self._receive)
        for link in self.links:
            self._watch(link)
            link.socket.connect(f"ipc://{self._runtime_dir}/shard-{link.shard}.sock")
            self._join(link)
            link.away_since = self._loop.time()
        self._loop.call_soon(self._receive)
        await self._one_up

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fileno())
        self.flush()
        for link in self.links:
            self._close_lane(link)
            self._watch_no_more(link)
            link.socket.close()
        self._bells.close()
        self._inbox.close(0)
        self._context.term()

    def _watch(self, link: ShardLink) -> None:
        """Hear of the end of the connection to a shard: on one host, that of its process."""
        assert self._loop is not None
        loop = self._loop
        monitor = link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

        def heard() -> None:
            while monitor.poll(0):
                recv_monitor_message(monitor)
                if link.up:
                    link.away_since = loop.time()
                    loop.call_later(LAST_WORDS_S, self._ended, link, link.epoch)

        loop.add_reader(monitor.fileno(), heard)
        heard()  # the descriptor speaks only to who has looked at the events before

    def _watch_no_more(self, link: ShardLink) -> None:
        monitor = link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if self._loop is not None:
            self._loop.remove_reader(monitor.fileno())
        link.socket.disable_monitor()
        monitor.close()

    # -- out ----------------------------------------------------------------------------------------------

    def tell(self, shard: int, what: wire.Message) -> None:
        """A control message, behind everything packed before it."""
        link = self.links[shard]
        self._flush_link(link)
        link.send(self._control(link, what))

    def _join(self, link: ShardLink) -> None:
        """Always the long way: the process there may be another by now."""
        link.send_far(self._control(link, wire.Join(self._endpoint)))

    def _control(self, link: ShardLink, what: wire.Message) -> bytes:
        return envelope.control(self.peer, self.incarnation, link.epoch, link.shard, what)  # type: ignore[arg-type] # a member of the union

    def ask(self, shard: int, make: Callable[[int], wire.Message]) -> asyncio.Future[wire.Control]:
        """`make(request)` is the message; the future gives the answer or raises ShardRefused.

        The request outlives a restart of its shard: the message is made anew for the next process,
        as things are then.
        """
        assert self._loop is not None
        self._last_request = request = self._last_request + 1
        future: asyncio.Future[wire.Control] = self._loop.create_future()
        self._requests[request] = (shard, make, future)
        if self.links[shard].up:
            self.tell(shard, make(request))
        return future

    def forget(self, connection: int) -> None:
        """The client is gone, and with it the window of its deliveries."""
        for link in self.links:
            link.credits.pop(connection, None)

    async def ask_in_epoch(
        self, shard: int, make: Callable[[int], wire.Message]
    ) -> tuple[int, wire.Control]:
        """As ask(); with the epoch that answered, which may be over by the time the caller runs."""
        future = self.ask(shard, make)
        request = self._last_request
        try:
            answer = await future
            return self._answered_in[request], answer
        finally:
            self._answered_in.pop(request, None)

    def is_up(self, shard: int) -> bool:
        return self.links[shard].up

    async def count(self, queue: QueuePut) -> tuple[int, int]:
        """Ready messages and consumers; of a queue that just went: none."""
        return await self.look(queue) or (0, 0)

    async def look(self, queue: QueuePut) -> tuple[int, int] | None:
        """The same; None of a queue that just went, or takes no more consumers and is about to go."""
        done = await self._about(queue, wire.Count)
        return None if done is None else (done.messages, done.consumers)

    async def purge(self, queue: QueuePut) -> int:
        """Return how many messages went. Raises Refusal where the disk is too full for that, and they stay."""
        done = await self._about(queue, wire.Purge)
        return 0 if done is None else done.messages

    async def _about(
        self, queue: QueuePut, message: type[wire.Count | wire.Purge]
    ) -> wire.Done | None:
        try:
            done = await self.ask(queue.shard, lambda request: message(request, queue.id))
        except ShardRefused as refused:
            if refused.code == checks.NO_ROOM:
                raise checks.not_purged(queue, refused.text) from None
            return None
        assert isinstance(done, wire.Done)
        return done

    async def fence(self) -> None:
        """Returns when each shard has taken in what was packed for it before, or lost it with its process. What is
        packed for a shard that is away leaves when it is back, so that is waited for."""
        for link in self.links:
            while not link.up:
                await asyncio.sleep(FENCE_LOOK_S)
            # Says nothing, is answered in turn.
            await self.ask(link.shard, lambda request: wire.Release(request, []))

    def settle(
        self, shard: int, epoch: int, consumer: int, kind: int, first: int, last: int
    ) -> None:
        """Delivery numbers of an older epoch are forgotten: that shard has requeued them."""
        link = self.links[shard]
        if link.epoch == epoch:
            link.settles.add(consumer, kind, first, last)

    def ack(
        self,
        shard: int,
        epoch: int,
        consumer: int,
        first: int,
        last: int,
        together: int,
        whole: int = 0,
    ) -> None:
        """As settle(), but it may wait a moment for more of this consumer, or of all parts of `whole`, up to
        `together`."""
        link = self.links[shard]
        if link.epoch == epoch:
            link.settles.ack(consumer, first, last, together, whole)
            if not link.settles.due:
                self._wait_for_acks()

    def _wait_for_acks(self) -> None:
        if not self._acks_wait and self._loop is not None:
            self._acks_wait = True
            self._loop.call_later(ACKS_WAIT_S, self._acks_waited)

    def tell_settled(self, shard: int) -> None:
        """At once, whatever it is."""
        if self.links[shard].settles:
            self._flush_link(self.links[shard])

    def _acks_waited(self) -> None:
        self._acks_wait = False
        for link in self.links:
            if link.settles:
                if link.settles.may_wait_on():
                    self._wait_for_acks()
                else:
                    self._flush_link(link)

    def credit(self, shard: int, epoch: int, connection: int, count: int) -> None:
        """`count` bytes of deliveries that came in `epoch` left for that client."""
        link = self.links[shard]
        if epoch != link.epoch:
            return
        sum_now = link.credits[connection] = link.credits.get(connection, 0) + count
        if sum_now >= DELIVERY_CREDIT_BYTES or len(link.credits) > CREDITS_MAX:
            link.credit_due = True
            self._due.shards |= 1 << shard

    def flush(self, batch_bytes_min: int = 0, shared_bytes_min: int = 0) -> bool:
        """Send what this pass of the loop has gathered. Whether there are batches left that are smaller than that, or
        where several shards have some than `shared_bytes_min`, and have nothing else to leave with them."""
        packed, due = self.packer.waiting(), self._due.shards
        shards = packed | due
        if not shards:
            return False
        self._due.shards = 0
        if packed & (packed - 1):
            batch_bytes_min = shared_bytes_min
        left = False
        while shards:
            shard = shards.bit_length() - 1
            shards ^= 1 << shard
            if (
                not batch_bytes_min
                or due >> shard & 1
                or self.packer.pending(shard) >= batch_bytes_min
            ):
                self._flush_link(self.links[shard])
            else:
                left = True
        return left

    def _flush_link(self, link: ShardLink) -> None:
        if not link.up:
            link.settles.take()
            link.credits.clear()
            return
        shard, epoch, packer = link.shard, link.epoch, self.packer
        if link.settles:
            link.send(
                envelope.settles(self.peer, self.incarnation, epoch, shard, link.settles.take())
            )
        messages, weight = packer.messages(shard), packer.weight(shard)
        message = packer.take_parts(
            shard, self.peer, self.incarnation, epoch, link.batch + 1, bool(link.gathering)
        )
        if message is not None:
            size = envelope.size_of(message)
            self._batch_messages.add(messages)
            self._batch_bytes.add(size)
            self._send_batch(link, message, size + weight, link.gathering)
            link.gathering = []
        if link.credit_due:
            link.credit_due = False
            link.send(
                envelope.credit(self.peer, self.incarnation, epoch, shard, link.credits.items())
            )
            link.credits.clear()

    @staticmethod
    def _send_batch(
        link: ShardLink, message: envelope.Parts, weight: int, waiting: list[Unconfirmed]
    ) -> None:
        link.batch += 1
        link.in_flight += weight
        if waiting:
            link.sent.append((link.batch, waiting))
        link.send(message)

    def use_vhost(self, vhost: str) -> None:
        """What is packed next belongs to `vhost`: a batch goes to one store, so another vhost's leaves before."""
        if vhost != self.vhost:
            self.vhost = vhost
            for link in self.links:
                if self.packer.messages(link.shard):
                    if link.up:
                        self._flush_link(link)
                    else:
                        self._set_aside(link)

    def _set_aside(self, link: ShardLink) -> None:
        messages, weight = self.packer.messages(link.shard), self.packer.weight(link.shard)
        message = self.packer.take(link.shard, self.peer, self.incarnation, 0, 0)
        if message is not None:
            self._batch_messages.add(messages)
            self._batch_bytes.add(len(message))
            weight += len(message)
            link.aside.append((message, weight, link.gathering))
            link.in_flight += weight
            link.gathering = []

    def numbers(self) -> dict[str, float]:
        """Sizes of batches, and how each link is: under names with its shard."""
        told = self._batch_messages.report("batch_messages") | self._batch_bytes.report(
            "batch_bytes"
        )
        for link in self.links:
            lane = link.lane
            told[f"publish_window_bytes.{link.shard}"] = link.in_flight
            told[f"ring_bytes.{link.shard}"] = lane.waiting_bytes() if lane is not None else 0
            told[f"ring_full.{link.shard}"] = link.rings_full + (
                lane.turned if lane is not None else 0
            )
        return told

    def wait_for(self, shards: int, waiting: Unconfirmed) -> None:
        """`waiting` is told when the batches being packed for these shards (bit mask) are stored, once for each."""
        shard = 0
        while shards:
            if shards & 1:
                self.links[shard].gathering.append(waiting)
            shards >>= 1
            shard += 1

    def set_stalled(self, shard: int, stalled: bool) -> None:
        """While it is, whoever waits for a confirm is told no, with the next tick: nobody knows how long it takes."""
        link = self.links[shard]
        if stalled and not link.stalled:
            log.warning(
                "the disk of shard %d does not answer: publishes that want a confirm are nacked",
                shard,
            )
        link.stalled = stalled

    def crowded(self, shards: int) -> list[int]:
        """Those of the shards (bit mask) whose feeders must wait."""
        found = []
        while shards:
            shard = shards.bit_length() - 1
            shards ^= 1 << shard
            if self.links[shard].in_flight + self.packer.pending(shard) >= PUBLISH_WINDOW_BYTES:
                found.append(shard)
        return found

    # -- in --------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """The socket's descriptor tells of a change only once: take all that is there, or come back by oneself."""
        self.events.receiving()
        try:
            self._receive_some()
        finally:
            self.events.received()

    def _receive_some(self) -> None:
        inbox = self._inbox
        for _ in range(RECEIVE_BURST):
            # Cheaper to ask than to be told by an exception.
            if not inbox.get(zmq.EVENTS) & READABLE:  # type: ignore[operator] # this option is an int
                return
            self._take_far(inbox.recv(AT_ONCE))
        assert self._loop is not None
        self._loop.call_soon(self._receive)

    def _take_far(self, message: bytes) -> None:
        """Through ZeroMQ: behind what came through the ring."""
        try:
            head = envelope.read(message)
            if head.incarnation != self.incarnation:
                return
            link = self.links[head.shard]
            if link.lane is not None and head.epoch == link.epoch:
                self._take_all(link, link.lane.came_far(head.kind))
                self._let_go(link.lane)
                if head.kind == wire.LANE:
                    self._hear(link, link.lane)
        except envelope.WireError as error:
            log.error("from a shard: %s", error)
            return
        except Exception:  # one bad message must not make this process deaf to all shards
            log.exception("a message of a shard cannot be handled")
            return
        if head.kind != wire.LANE:
            self._take_all(link, [message])

    def _take_all(self, link: ShardLink, messages: list[envelope.Message]) -> None:
        for message in messages:
            try:
                handle = link.handlers.get(message[: wire.HEADER_BYTES])
                if handle is not None:
                    handle(link, message)
                    continue
                kind, _, _, epoch, _ = envelope.read(message)
                if epoch == link.epoch or kind == wire.CONTROL:
                    self._handlers[kind](link, message)
            except Exception:
                log.exception("a message of a shard cannot be handled")

    # -- lanes -----------------------------------------------------------------------------------------------

    def _open_lane(self, link: ShardLink) -> None:
        """To the process that just said Hello."""
        assert self._loop is not None
        what = Offer(self.peer, self.incarnation, link.epoch, self._endpoint)
        try:
            link.lane = offer(self._runtime_dir, link.shard, what, link.send_far)
        except NoLane as error:
            log.warning("no lane to shard %d, all goes through ZeroMQ: %s", link.shard, error)
            return
        self._loop.add_reader(link.lane.fd, self._heard, link, link.lane)
        self._bells.register(link.lane.fd, select.EPOLLIN)

    def _close_lane(self, link: ShardLink) -> None:
        if link.lane is not None:
            lane, link.lane = link.lane, None
            link.rings_full += lane.turned
            if self._loop is not None:
                self._loop.remove_reader(lane.fd)
            self._bells.unregister(lane.fd)
            lane.close()

    def _heard(self, link: ShardLink, lane: Lane) -> None:
        """The bell. At the end of the other process what it has said is taken before the link is told."""
        alive = lane.hear()
        self._hear(link, lane)
        if not alive and link.lane is lane:
            self._take_all(link, lane.take(ALL))
            self._let_go(lane)
            self._close_lane(link)

    def hear_for(self, seconds: float) -> None:
        """Sleep that long, and handle meanwhile what shards ring about: what a client waits for does not wait for what
        others publish."""
        until = time.perf_counter() + seconds
        # select() because it counts in microseconds; of the one descriptor, made at the start, that has all.
        while seconds > 0 and select.select((self._bells_fd,), (), (), seconds)[0]:
            rung = {fd for fd, _ in self._bells.poll(0)}
            for link in self.links:
                if link.lane is not None and link.lane.fd in rung:
                    self._heard(link, link.lane)
            seconds = until - time.perf_counter()

    def _hear(self, link: ShardLink, lane: Lane) -> None:
        """Take some of what the ring holds, come back for the rest."""
        if link.lane is not lane:
            return
        self.events.receiving()
        try:
            self._take_all(link, lane.take(RECEIVE_BURST))
        finally:
            if not lane.sleep():
                assert self._loop is not None
                self._loop.call_soon(self._hear, link, lane)
            try:
                self.events.received()
            finally:
                self._let_go(lane)

    def _let_go(self, lane: Lane) -> None:
        """Of what was taken."""
        self.events.own_deliveries()
        lane.let_go()

    def _on_deliver(self, link: ShardLink, message: envelope.Message) -> None:
        delivery, shard = self.events.delivery, link.shard
        for section in codec.read_deliveries(message):
            delivery(shard, section)

    def _on_confirmed(self, link: ShardLink, message: envelope.Message) -> None:
        batch, told = envelope.read_confirmed(message)
        refused = self._tell_known(told) if told else told
        while link.sent and link.sent[0][0] <= batch:
            for waiting in link.sent.popleft()[1]:
                for connection, channel, first, last in refused:
                    waiting.refuse(connection, channel, first, last)
                waiting.confirmed()

    def _tell_known(self, told: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """Returns those that were refused."""
        refused = []
        for connection, channel, first, last in told:
            if channel & (wire.KNOWN | wire.ALTERED):
                self.events.known(
                    connection,
                    channel & (wire.KNOWN - 1),
                    first,
                    last,
                    bool(channel & wire.ALTERED),
                )
            else:
                refused.append((connection, channel, first, last))
        return refused

    def _on_credit(self, link: ShardLink, message: envelope.Message) -> None:
        for _connection, count in envelope.read_credit(message):
            link.in_flight -= count
        if link.in_flight <= PUBLISH_WINDOW_BYTES // 2:
            self.events.publish_room(link.shard)

    def _on_control(self, link: ShardLink, message: envelope.Message) -> None:
        what = envelope.read_control(message)
        if isinstance(what, wire.Hello):
            self._on_hello(link, envelope.read(message).epoch, what)
            return
        if envelope.read(message).epoch != link.epoch:
            return
        request = getattr(what, "request", None)
        if request is None:
            self.events.told(link.shard, what)
            return
        waiting = self._requests.pop(request, None)
        if waiting is None or waiting[2].done():
            return
        if isinstance(what, (wire.Got, wire.GotAgain)):
            self._answered_in[request] = link.epoch
        if isinstance(what, wire.Refused):
            waiting[2].set_exception(ShardRefused(what.code, what.text))
        else:
            waiting[2].set_result(what)

    def _on_hello(self, link: ShardLink, epoch: int, hello: wire.Hello) -> None:
        if not hello.ready or epoch == link.epoch:
            return
        first_time = link.epoch == 0
        lost = self._lose_sent(link)
        link.epoch = epoch
        who = (self.peer, self.incarnation, epoch, link.shard)
        link.handlers = {
            envelope.header(kind, *who): handle for kind, handle in self._handlers.items()
        }
        link.away_since, link.nacking, link.stalled = None, False, False
        link.in_flight = 0
        link.settles.take()
        link.credits.clear()
        self._join(link)
        self._close_lane(link)
        self._open_lane(link)
        if not first_time:
            log.warning("shard %d is back (pid %d)%s", link.shard, hello.pid, _nacked(lost))
        aside, link.aside = link.aside, []
        for message, weight, batch in aside:
            self._send_batch(
                link, envelope.readdressed(message, epoch, link.batch + 1), weight, batch
            )
        self._ask_again(link)
        self.events.restarted(link.shard)
        self.events.publish_room(link.shard)
        if self._one_up is not None and not self._one_up.done():
            self._one_up.set_result(None)

    def _ended(self, link: ShardLink, epoch: int) -> None:
        """The process is gone, and all it has said is heard."""
        if link.epoch == epoch:
            log.warning("shard %d is gone%s", link.shard, _nacked(self._lose_sent(link)))
            link.in_flight = sum(weight for _, weight, _ in link.aside)
            self.events.away(link.shard)
            self.events.received()

    def _lose_sent(self, link: ShardLink) -> int:
        """What the shard was given and had not confirmed. It may be stored all the same."""
        lost = [waiting for _, batch in link.sent for waiting in batch]
        link.sent.clear()
        if any(waiting.in_sequence for waiting in lost):
            self._lose_unsent(link)
        for waiting in lost:
            waiting.lost()
        return len(lost)

    def _lose_unsent(self, link: ShardLink) -> None:
        self.packer.drop(link.shard)
        lost = [waiting for _, _, batch in link.aside for waiting in batch] + link.gathering
        link.aside, link.gathering = [], []
        for waiting in lost:
            waiting.lost()

    def _lose_packed(self, link: ShardLink) -> None:
        """Somebody has waited too long for a shard that is away: what waits for it is not sent any more."""
        self._lose_unsent(link)
        link.in_flight = 0
        if not link.nacking:
            link.nacking = True
            log.warning("shard %d stays away: publishes that want a confirm are nacked", link.shard)
        self.events.publish_room(link.shard)
        self.events.received()

    def _ask_again(self, link: ShardLink) -> None:
        """Requests the old process did not answer, in their order: a Release behind an Attach still undoes it.
        Consumers attached again are not among them: restarted() names those that are still wanted. Nor are those
        whose client has left: a message got for nobody would be lost."""
        for request, (shard, make, future) in list(self._requests.items()):
            if shard != link.shard:
                continue
            what = make(request)
            unwanted = isinstance(what, (wire.Attach, wire.Get, wire.Reserve)) and future.done()
            if unwanted or (isinstance(what, wire.Attach) and what.resumed):
                del self._requests[request]
            else:
                link.send(self._control(link, what))

    def tick(self) -> None:
        """Say Join again: a shard that restarted does not know where its front doors are."""
        if self._loop is None:
            return  # not started: the catalog is waited for
        now = self._loop.time()
        for link in self.links:
            self._join(link)
            if link.stalled and self._lose_sent(link):
                self.events.received()
            if (
                link.away_since is not None
                and now - link.away_since > AWAY_S_MAX
                and link.waited_for
            ):
                self._lose_packed(link)


def _nacked(count: int) -> str:
    return "; publishes it had not confirmed are nacked" if count else ""
