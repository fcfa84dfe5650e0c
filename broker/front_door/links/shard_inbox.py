"""Messages from all shards: by ZeroMQ and by lanes, handed on in the order each shard sent them.

One PULL socket takes what shards send by ZeroMQ. A lane (lane.py) to each process of a shard is the
short way. Both never block. What a message means says the link of its shard (shard_link.py).
"""

from __future__ import annotations

import asyncio
import logging
import time

import zmq

from shardmq.broker.front_door.links.shard_link import AT_ONCE, Events, ShardLink
from shardmq.broker.front_door.short_way import Watch
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.lane import ALL, Lane, NoLane, Offer, offer
from shardmq.shardd.wire.local_lane import AnyLane, LocalLane
from shardmq.shardd.wire.recent import RecentKeys
from shardmq.shardd.wire.shared_memory import BodyMemory, Taker, look_again, wait_for_any

log = logging.getLogger("shardmq.broker.front_door.links.shard_inbox")

# Messages that are handled before other events of the loop get their turn.
RECEIVE_BURST = 64
READABLE = int(zmq.POLLIN)  # an int: `&` with zmq's enum costs as much as a call


class ShardInbox:
    """Takes in what the shards say. `loop` is set before the first message may come.

    With a `watch`, compiled passes hear the bells and take in what is plain.
    """

    loop: asyncio.AbstractEventLoop | None = None
    watch: Watch | None = None

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        links: list[ShardLink],
        runtime_dir: str,
        events: Events,
        bodies: BodyMemory | None = None,
    ) -> None:
        self._bodies = bodies
        self._socket = socket
        self._links = links
        self._runtime_dir = runtime_dir
        self._events = events
        # By shard, the lane of a process that is gone: messages of it may still come by ZeroMQ.
        self._ended: dict[int, Lane] = {}
        self._refused = RecentKeys()  # number and epoch of shards of another wire version
        self._lanes: dict[int, ShardLink] = {}  # those with a lane, by its bell
        self._comes_back: set[AnyLane] = set()  # lanes that _come_back is planned for
        self._loop_fd = -1  # is readable when the loop has something to do

    def bind(self, endpoint: str) -> None:
        assert self.loop is not None
        self._socket.bind(endpoint)
        # Only uvloop has it, and calls it private. Without it a look sees the rings alone.
        self._loop_fd = getattr(self.loop, "_get_backend_id", lambda: -1)()
        if self.watch is not None and self._loop_fd >= 0:
            self.watch.loop_fd = self._loop_fd
        self.loop.add_reader(self._socket.fileno(), self._receive)
        self.loop.call_soon(self._receive)

    def close(self) -> None:
        for link in self._links:
            self.close_lane(link)
        self._socket.close(0)

    # -- ZeroMQ -----------------------------------------------------------------------------------

    def stop_receiving(self) -> None:
        if self.loop is not None:
            self.loop.remove_reader(self._socket.fileno())

    def _receive(self) -> None:
        """Take all messages, or come back: the socket's descriptor tells of a change only once."""
        self._events.receiving()
        try:
            self._receive_some()
        finally:
            self._events.received()

    def _receive_some(self) -> None:
        socket = self._socket
        for _ in range(RECEIVE_BURST):
            # Asking is cheaper than an exception.
            # This option is an int.
            if not socket.get(zmq.EVENTS) & READABLE:  # type: ignore[operator]
                return
            self.take_by_zmq(socket.recv(AT_ONCE))
        assert self.loop is not None
        self.loop.call_soon(self._receive)

    def take_by_zmq(self, message: bytes) -> None:
        """Handle a message that came by ZeroMQ, behind what came through the ring before."""
        head = self._head(message)
        if head is None:
            return
        try:
            link = self._links[head.shard]
            if head.incarnation != link.incarnation:
                return
            lane = link.lane or self._ended.get(head.shard)
            if lane is not None and head.epoch == link.epoch:
                self._take_all(link, lane.came_by_zmq(head.kind))
                self._let_go(lane)
                if head.kind == wire.RING:
                    self._hear(link, lane)
                elif link.lane is lane:
                    self._sleep_or_come_back(link, lane)
        except Exception:  # one bad message must not make this process deaf to all shards
            log.exception("a message of a shard cannot be handled")
            return
        if head.kind != wire.RING:
            self._take_all(link, [message])

    def _head(self, message: bytes) -> envelope.Header | None:
        """Return the head of a message, or None and log why not: another version once a life."""
        try:
            return envelope.read(message)
        except envelope.OtherVersion as error:
            if self._refused.add((error.head.shard, error.head.epoch)):
                log.error("from a shard: %s", error)
        except envelope.WireError as error:
            log.error("from a shard: %s", error)
        return None

    def hear_session(self, link: ShardLink) -> None:
        """Take messages of a shard of another node, and come back for the rest."""
        self._events.receiving()
        try:
            for _ in range(RECEIVE_BURST):
                message = link.dialer.take() if link.dialer is not None else None
                if message is None:
                    return
                self._take_by_session(link, message)
            assert self.loop is not None
            self.loop.call_soon(self.hear_session, link)
        finally:
            self._events.received()

    def _take_by_session(self, link: ShardLink, message: bytes) -> None:
        if message[: wire.HEADER_BYTES] not in link.by_header:
            head = self._head(message)
            if head is None or (head.shard, head.incarnation) != (link.shard, link.incarnation):
                return
        self._take_all(link, [message])

    def _take_all(self, link: ShardLink, messages: list[envelope.Message]) -> None:
        for message in messages:
            try:
                handle = link.by_header.get(message[: wire.HEADER_BYTES])
                if handle is None:
                    kind, _, _, epoch, _ = envelope.read(message)
                    if epoch != link.epoch and kind != wire.CONTROL:
                        continue
                    handle = link.by_kind[kind]
                handle(message)
            except Exception as error:
                self.cannot_handle(error)

    def cannot_handle(self, error: Exception) -> None:
        """Note an error of ours in a message of a shard, which harms no other message."""
        log.error("a message of a shard cannot be handled", exc_info=error)

    # -- lanes ------------------------------------------------------------------------------------

    def open_lane(self, link: ShardLink, what: Offer) -> None:
        """Offer a lane to the process that just said Hello."""
        assert self.loop is not None
        try:
            bodies = self._bodies.fd if self._bodies is not None else None
            lane = link.lane = offer(self._runtime_dir, link.shard, what, link.send_by_zmq, bodies)
        except NoLane as error:
            log.warning("no lane to shard %d, all goes through ZeroMQ: %s", link.shard, error)
            return
        self.listen(link, lane)

    def listen(self, link: ShardLink, lane: Lane) -> None:
        """Hear the bell of a lane from now on, and the end of the other process."""
        assert self.loop is not None
        if self.watch is None:
            self.loop.add_reader(lane.bell, self._rung, link, lane)
        else:
            self.watch.hear(lane.bell, link, lane, self._rung, self._hear_rest)
        self.loop.add_reader(lane.fd, self._end, link, lane)
        self._lanes[lane.bell] = link

    def close_lane(self, link: ShardLink) -> None:
        self._ended.pop(link.shard, None)
        if link.lane is not None:
            lane, link.lane = link.lane, None
            link.may_lend(False)
            if isinstance(lane, LocalLane):
                return
            link.rings_full += lane.times_full
            if self.loop is not None:
                if self.watch is None:
                    self.loop.remove_reader(lane.bell)
                else:
                    self.watch.leave(lane.bell)
                self.loop.remove_reader(lane.fd)
            del self._lanes[lane.bell]
            lane.close()

    def hear_for(self, seconds: float) -> None:
        """Sleep that long and handle meanwhile what shards ring about.

        An answer that one client waits for does not wait for what others publish.
        """
        if self.watch is not None:
            self.watch.wait(seconds)
            return
        until = time.perf_counter() + seconds
        while seconds > 0 and (rung := wait_for_any(list(self._lanes), seconds)):
            for bell in rung:
                link = self._lanes.get(bell)
                if link is not None and isinstance(link.lane, Lane):
                    self._rung(link, link.lane)
            seconds = until - time.perf_counter()

    def hear_local(self) -> None:
        """Handle messages of the shard of this process, which does not ring."""
        for link in self._links:
            lane = link.lane
            if isinstance(lane, LocalLane) and not lane.sleep():
                self._hear(link, lane)

    def look_again(self, most_ns: int) -> tuple[int, bool]:
        """Look at the rings and at all that the loop waits for, until there is something.

        Messages in a ring are handled. Returns the nanoseconds that the look took, at most about
        `most_ns`, and whether there was something.
        """
        pairs = [(link, link.lane) for link in self._lanes.values() if isinstance(link.lane, Lane)]
        readers = [lane.reader for _, lane in pairs]
        found, took_ns = look_again(readers, self._loop_fd, most_ns)
        for link, lane in pairs:
            if found and not lane.sleep():
                self._hear(link, lane)
            else:
                self._sleep_or_come_back(link, lane)
        return took_ns, found != 0

    def _rung(self, link: ShardLink, lane: Lane) -> None:
        lane.hear()
        if lane.is_accepted and not link.lends and link.lane is lane:
            link.may_lend(True)
        self._hear(link, lane)

    def _end(self, link: ShardLink, lane: Lane) -> None:
        """At the end of the other process, take all that it has said, and close the lane."""
        if lane.is_over() and link.lane is lane:
            self._hear(link, lane)
            self._take(link, lane, ALL)
            self._let_go(lane)
            self.close_lane(link)
            self._ended[link.shard] = lane

    def _hear(self, link: ShardLink, lane: AnyLane) -> None:
        """Take some messages of the ring and come back for the rest."""
        if link.lane is not lane:
            return
        self._events.receiving()
        try:
            self._take(link, lane, RECEIVE_BURST, link.outlet)
        finally:
            self._sleep_or_come_back(link, lane)
            try:
                self._events.received()
            finally:
                self._let_go(lane)

    def _hear_rest(self, link: ShardLink, lane: Lane, most: int) -> None:
        """Take messages that are not plain, at most so many, in a pass that ends by itself."""
        try:
            if most:
                self._take(link, lane, most)
        finally:
            self._sleep_or_come_back(link, lane)
            try:
                self._events.write_borrowed()
            finally:
                self._let_go(lane)

    def _take(self, link: ShardLink, lane: AnyLane, most: int, taker: Taker | None = None) -> None:
        """Take messages of a ring. If it is damaged, the rings of other shards are served on."""
        try:
            self._take_all(link, lane.take(most, taker))
        except Exception as error:
            self.cannot_handle(error)

    def _sleep_or_come_back(self, link: ShardLink, lane: AnyLane) -> None:
        """Have the bell rung for the next message of a ring, or come back for one that is there."""
        if not lane.sleep() and lane not in self._comes_back:
            assert self.loop is not None
            self._comes_back.add(lane)
            self.loop.call_soon(self._come_back, link, lane)

    def _come_back(self, link: ShardLink, lane: AnyLane) -> None:
        self._comes_back.discard(lane)
        self._hear(link, lane)

    def _let_go(self, lane: AnyLane) -> None:
        """Give the memory of what was taken back to the ring."""
        self._events.own_deliveries()
        lane.let_go()
