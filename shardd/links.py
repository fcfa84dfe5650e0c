"""Receive and send the messages of a shard, through ZeroMQ and through lanes.

A lane (wire/lane.py) connects the shard with one front door, a local lane (wire/local_lane.py) with
the front door of the same process. ZeroMQ connects it with the controller and with front doors that
have no lane yet, and carries what a lane has no room for. Peers on other nodes come by sessions
(sessions.py). The loop of the shard waits here, for messages and for the other descriptors that it
registers in `poll`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time

import msgspec
import zmq

from shardmq.shardd.peers import SESSION, Outgoing
from shardmq.shardd.sessions import Outbox, Sessions
from shardmq.shardd.shard import Shard
from shardmq.shardd.short_way import RING, UNPOLLED_MAX, PlainPasses
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.lane import ALL, Lane, NoLane, accept, joined, listen
from shardmq.shardd.wire.local_lane import AnyLane, LocalLane
from shardmq.shardd.wire.recent import RecentKeys
from shardmq.shardd.wire.session import SessionKeys
from shardmq.shardd.wire.shared_memory import Reader, look_again
from shardmq.shardd.wire.spin import Spin

log = logging.getLogger(__name__)

RECONNECT_MS = 10
# Messages that are unsent at the end may take this long.
LINGER_MS = 500
# The messages taken in from one front door before syncs and deliveries go on.
RECEIVE_BURST = 32
# The constants of zmq are enums: each `&` with one of them costs as much as a call.
READABLE, AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)


class Links:
    def __init__(
        self,
        runtime_dir: str,
        shard: Shard,
        spin: Spin,
        session_fd: int = -1,
        keys: SessionKeys | None = None,
    ) -> None:
        """Accept messages and lanes from now on. `spin` says how long `wait` looks again.

        With `keys`, peers on other nodes are let in at the TCP socket `session_fd`.
        """
        self._shard = shard
        self.controller = f"ipc://{runtime_dir}/controller.sock"
        self.poll = select.epoll()
        self._context = zmq.Context()
        self._inbox = self._socket(zmq.PULL)
        self._inbox.bind(f"ipc://{runtime_dir}/shard-{shard.number}.sock")
        self._inbox_fd = self._inbox.fileno()
        self._inbox_told = True  # the inbox may have messages
        self._outboxes: dict[str, zmq.Socket[bytes] | Outbox] = {}
        self._lanes: dict[str, AnyLane] = {}  # by the endpoint of the front door
        # Endpoints of outboxes whose front door is gone: the end of its lane has told.
        self._deserted: set[str] = set()
        # By the number and incarnation of the front door; also lanes that have ended.
        self._lanes_of: dict[tuple[int, int], Lane] = {}
        self._heard: dict[int, Lane] = {}  # by the descriptor of the bell
        self._readers: list[Reader] = []  # of the lanes in `_heard`
        self._spin = spin
        self._came = False  # the pass before has taken something in
        self._unpolled = 0  # passes in a row that did not poll
        self._ends: dict[int, Lane] = {}  # by the descriptor whose end is the end of the lane
        self.plain = PlainPasses(
            shard.short_way, self.poll.fileno(), self._heard, self._lanes, RECEIVE_BURST, self.send
        )
        self._local: LocalLane | None = None
        # The number and incarnation of processes of another wire version.
        self._refused, self._refused_joins = RecentKeys(), RecentKeys()
        self._rings_full = 0  # counted by lanes that are closed
        self._listener = _listener(runtime_dir, shard.number)
        self._listens = False
        self.poll.register(self._inbox_fd, select.EPOLLIN)
        self.listen()
        self._sessions: Sessions | None = None
        if keys is not None:
            self._sessions = Sessions(self._context, session_fd, keys, self.poll)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        # The queues of messages are bounded by credit, not by a count.
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        return made

    def close(self) -> None:
        """Close all sockets. What is unsent may take a moment, unless its reader is gone."""
        for endpoint, outbox in self._outboxes.items():
            outbox.close(0 if endpoint in self._deserted else LINGER_MS)
        self._inbox.close(0)
        if self._sessions is not None:
            self._sessions.close(LINGER_MS)
        self._context.term()
        self.poll.close()

    # -- in ----------------------------------------------------------------------------------------

    def wait(self, wait_ms: int) -> list[tuple[int, int]] | None:
        """Wait for events, unless there is something to take in.

        Plain passes are run meanwhile. Returns the events of a pass that is not plain, or None if
        it has taken in its messages (`plain.taken` of them).
        """
        if wait_ms and self._inbox_told and self._inbox_speaks():
            wait_ms = 0
        sessions = self._sessions
        if wait_ms and sessions is not None and sessions.may_speak and sessions.speaks():
            wait_ms = 0
        if wait_ms and self._shard.short_way.is_on and self._shard.ready:
            look = self._look_again if self._spin.is_on and self._readers else None
            events = self.plain.run(wait_ms, self._came, look)
            self._came = self.plain.taken > 0
            return events
        may_look = wait_ms and self._came and self._spin.is_on and self._readers
        if may_look and self._look_again() == RING and self._unpolled < UNPOLLED_MAX:
            self._unpolled += 1
            return []
        self._unpolled = 0
        if wait_ms and not self.may_wait():
            wait_ms = 0
        return self.poll.poll(wait_ms / 1000)

    def may_wait(self) -> bool:
        """Return whether there is nothing to take in; if so, `poll` reports when there is.

        The descriptor of the inbox reports changes only: a message that is there already does not
        wake the poll. An inbox that was found empty stays empty until the descriptor reports a
        change. A local lane does not wake the poll, but calls its owner.
        """
        if self._inbox_told and self._inbox_speaks():
            return False
        sessions = self._sessions
        if sessions is not None and sessions.may_speak and sessions.speaks():
            return False
        for lane in self._heard.values():
            if not lane.sleep():
                return False
        return self._local is None or self._local.sleep()

    def _look_again(self) -> int:
        """Look at the rings and at `poll` before the sleep; return which of them has something."""
        most_ns = self._spin.most_ns(time.perf_counter_ns())
        if not most_ns:
            return 0
        found, took_ns = look_again(self._readers, self.poll.fileno(), most_ns)
        self._spin.looked(took_ns, found != 0)
        return found

    def hear(self, fd: int, now: int) -> bool:
        """Note that a descriptor is readable; return False if it is none of the links.

        A bell needs no answer: each ring is an event of its own, and `receive` looks at all rings.
        """
        if fd in self._heard:
            return True
        lane = self._ends.get(fd)
        if lane is not None:
            if lane.is_over():
                self._lose_lane(lane, now)
        elif fd == self._inbox_fd:
            self._inbox_told = True
        elif self._listener is not None and fd == self._listener.fileno():
            self._accept_lanes(self._listener)
        elif self._sessions is not None and fd in self._sessions.fds:
            self._sessions.hear(fd)
        else:
            return False
        return True

    def _inbox_speaks(self) -> bool:
        if self._inbox_told:
            # The value of this option is an int.
            self._inbox_told = bool(self._inbox.get(zmq.EVENTS) & READABLE)  # type: ignore[operator]
        return self._inbox_told

    def receive(self, now: int, most: int = RECEIVE_BURST) -> int:
        """Take in up to `most` messages of each link; return how many were taken in."""
        taken, self.plain.taken = self.plain.taken, 0
        if self._local is not None:
            taken += self._receive_by_ring(self._local, now, most)
        for lane in self._heard.values():
            taken += self._receive_by_ring(lane, now, most)
        by_zmq = 0
        # To ask first is cheaper than to get an exception from an empty inbox.
        while self._inbox_told and by_zmq < most and self._inbox_speaks():
            self._receive_by_zmq(self._inbox.recv(AT_ONCE), now)
            by_zmq += 1
        if by_zmq:
            self._send_last_words()
        taken += by_zmq
        sessions = self._sessions
        if sessions is not None and sessions.may_speak:
            taken += self._receive_by_sessions(sessions, now, most)
            if sessions.has_ended:
                self._end_sessions(sessions, now)
        self._came = taken > 0
        return taken

    def receive_last(self, now: int, most: int) -> None:
        """Take in messages that have arrived, whether the inbox has reported them or not."""
        self._inbox_told = True
        self.receive(now, most)

    def _receive_by_zmq(self, message: bytes, now: int) -> None:
        """Take in a message that came through ZeroMQ.

        Messages that came through the ring before it are taken in first.
        """
        try:
            head = envelope.read(message)
            lane = self._lanes_of.get((head.peer, head.incarnation))
            if lane is not None:
                for before in lane.came_by_zmq(head.kind):
                    self._shard.receive(before, now)
                lane.let_go()
            if head.kind != wire.RING:
                self._shard.receive(message, now)
        except envelope.OtherVersion as error:
            self._refuse(message, error)
        except envelope.WireError as error:
            log.error("a message was dropped: %s", error)

    def _refuse(self, message: bytes, error: envelope.OtherVersion, session: str = "") -> None:
        """Log the first message of a process of another wire version, and answer its first Join.

        The process refuses the answer in turn, and logs it. `session` names where it came from. A
        newer process of another node may come back with an older version.
        """
        peer, incarnation = error.head.peer, error.head.incarnation
        if self._refused.add((peer, incarnation)):
            if session and error.version > wire.WIRE_VERSION:
                log.info(
                    "peer %d speaks wire version %d and is asked for less", peer, error.version
                )
            else:
                log.error("a message was dropped: %s", error)
        if error.head.kind != wire.CONTROL:
            return
        try:
            join = envelope.read_control(message)
        except envelope.WireError:  # all versions share Join, and only Join
            return
        if isinstance(join, wire.Join) and self._refused_joins.add((peer, incarnation)):
            who = (peer, incarnation, self._shard.epoch, self._shard.number)
            self._send_apart(session or join.endpoint, who, wire.Hello(os.getpid(), ready=False))

    def _receive_by_ring(self, lane: AnyLane, now: int, most: int) -> int:
        taker = self._shard.short_way
        taker.now = now
        taken_before = taker.taken
        messages = lane.take(most, taker)
        for message in messages:
            try:
                self._shard.receive(message, now)
            except envelope.WireError as error:
                log.error("a message was dropped: %s", error)
        lane.let_go()
        return len(messages) + taker.taken - taken_before

    # -- sessions ----------------------------------------------------------------------------------

    def _receive_by_sessions(self, sessions: Sessions, now: int, most: int) -> int:
        taken = 0
        while taken < most and (came := sessions.take()) is not None:
            taken += 1
            name, message = came
            try:
                head = envelope.read(message)
                peer = self._shard.peers.get(head.peer)
                if peer is not None and peer.endpoint == name:
                    self._shard.receive(message, now)
                else:
                    self._let_join(name, head, message, now)
            except envelope.OtherVersion as error:
                self._refuse(message, error, name)
            except envelope.WireError as error:
                log.error("a message was dropped: %s", error)
        if taken:
            self._send_last_words()
        return taken

    def _let_join(
        self, name: str, head: envelope.Header, message: envelope.Message, now: int
    ) -> None:
        """Take in the Join of a session. All else is of a session that a newer one has followed."""
        join = envelope.read_control(message) if head.kind == wire.CONTROL else None
        if not isinstance(join, wire.Join):
            return
        membership = self._shard.membership
        if not membership.join(head, msgspec.structs.replace(join, endpoint=name), now):
            who = (head.peer, head.incarnation, self._shard.epoch, self._shard.number)
            lowest = membership.lowest_incarnation(head.peer)
            if head.incarnation < lowest:
                self._outbox(name).send(envelope.control(*who, wire.Outdated(lowest)), AT_ONCE)

    def _end_sessions(self, sessions: Sessions, now: int) -> None:
        """Forget the peers whose sessions have ended, behind their last messages."""
        self._receive_by_sessions(sessions, now, ALL)
        for name in sessions.ended():
            self._outboxes.pop(name, None)
            self._shard.membership.session_ended(name, now)

    # -- lanes -------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Accept lanes again, if the process had no descriptor left for one."""
        if self._listener is not None and not self._listens:
            self._listens = True
            self.poll.register(self._listener.fileno(), select.EPOLLIN)

    def add_local(self, endpoint: str, lane: LocalLane) -> None:
        """Connect the front door of this process, which has this endpoint."""
        self._local = self._lanes[endpoint] = lane

    @property
    def has_other_doors(self) -> bool:
        """Return whether a front door of another process is connected by a lane."""
        return bool(self._heard)

    def _accept_lanes(self, listener: socket.socket) -> None:
        while True:
            try:
                offered = accept(listener)
            except NoLane as error:
                log.warning("a lane was not made: %s", error)
                continue
            except OSError as error:
                # The offer waits and would wake the loop at once, again and again.
                log.warning("no lanes for now, all goes through ZeroMQ: %s", error)
                self.poll.unregister(listener.fileno())
                self._listens = False
                return
            if offered is None:
                return
            offer, shared = offered
            if offer.epoch != self._shard.epoch:
                shared.close()
                continue
            who = (offer.peer, offer.incarnation, offer.epoch, self._shard.number)
            peer = self._shard.peers.get(offer.peer)
            if shared.bodies is not None:
                if peer is None or peer.incarnation != offer.incarnation:
                    shared.close()  # without its Join nobody knows who lends these bodies
                    continue
                peer.sees(memoryview(shared.bodies))
                shared = shared._replace(bodies=None)  # a lane stays longer than its front door
            lane = Lane(shared, who, self._outbox(offer.endpoint).send, at_shard=True)
            self._deserted.discard(offer.endpoint)
            self._lanes[offer.endpoint] = self._lanes_of[
                offer.peer, offer.incarnation
            ] = self._heard[lane.bell] = self._ends[lane.fd] = lane
            self._readers.append(lane.reader)
            self.poll.register(lane.bell, select.EPOLLIN | select.EPOLLET)
            self.poll.register(lane.fd, select.EPOLLIN)

    def _lose_lane(self, lane: Lane, now: int) -> None:
        """Take in the last messages of a front door that is gone, and close its lane.

        Messages that it sent by ZeroMQ may still arrive, and their order with those of the ring
        counts. So `_lanes_of` keeps the lane until the front door is forgotten.
        """
        self._receive_by_ring(lane, now, ALL)
        self.poll.unregister(lane.bell)
        self.poll.unregister(lane.fd)
        del self._heard[lane.bell], self._ends[lane.fd]
        self._readers.remove(lane.reader)
        self._rings_full += lane.times_full
        for endpoint in [key for key, value in self._lanes.items() if value is lane]:
            del self._lanes[endpoint]
            self._deserted.add(endpoint)
        lane.close()

    # -- out ---------------------------------------------------------------------------------------

    def send(self, outgoing: list[Outgoing]) -> None:
        """Send messages. Those of one peer are neighbours, and its bell rings behind the last."""
        to_ring: AnyLane | None = None
        for endpoint, message in outgoing:
            lane = self._lanes.get(endpoint)
            if to_ring is not None and lane is not to_ring:
                to_ring.ring()
            to_ring = lane
            if lane is not None:
                lane.put(message)
            else:
                self._outbox(endpoint).send(joined(message), AT_ONCE)
        if to_ring is not None:
            to_ring.ring()

    def _send_last_words(self) -> None:
        """Tell processes that the shard refuses why; only ZeroMQ brings what leads to that."""
        last_words = self._shard.membership.last_words
        if last_words:
            self.send(last_words)
            last_words.clear()

    def _outbox(self, endpoint: str) -> zmq.Socket[bytes] | Outbox:
        found = self._outboxes.get(endpoint)
        if found is None and self._sessions is not None and endpoint.startswith(SESSION):
            return self._outboxes.setdefault(endpoint, Outbox(self._sessions, endpoint))
        if found is None:
            found = self._outboxes[endpoint] = self._socket(zmq.PUSH)
            found.connect(endpoint)
        return found

    def close_unused(self) -> None:
        """Close the sockets of peers that left, and forget their lanes."""
        here = {(peer.number, peer.incarnation) for peer in self._shard.peers.values()}
        for who in self._lanes_of.keys() - here:
            del self._lanes_of[who]
        in_use = {peer.endpoint for peer in self._shard.peers.values()} | self._lanes.keys()
        if wire.CONTROLLER not in self._shard.peers:
            in_use.add(self.controller)
        for endpoint in self._outboxes.keys() - in_use:
            self._outboxes.pop(endpoint).close()
        self._deserted &= self._outboxes.keys()

    def alarm_from_thread(self, reason: str) -> None:
        """Tell all peers why publishes must be held back, from another thread than the loop.

        So this uses sockets of its own, and only the parts of a peer that never change.
        """
        for peer in list(self._shard.peers.values()):
            self._send_apart(peer.endpoint, peer.who, wire.Alarm(reason))

    def _send_apart(
        self, endpoint: str, who: tuple[int, int, int, int], what: wire.Control
    ) -> None:
        """Send a message on a socket of its own, or by the session of that name."""
        if self._sessions is not None and endpoint.startswith(SESSION):
            self._sessions.send(endpoint, envelope.control(*who, what))
            return
        outbox = self._socket(zmq.PUSH)
        outbox.connect(endpoint)
        outbox.send(envelope.control(*who, what), AT_ONCE)
        outbox.close(LINGER_MS)

    # -- numbers -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        lanes = self._heard.values()
        numbers: dict[str, float] = {
            "ring_bytes": sum(lane.waiting_bytes() for lane in self._lanes.values()),
            "ring_full": self._rings_full + sum(lane.times_full for lane in lanes),
        }
        if self._sessions is not None:
            numbers |= {
                "sessions": self._sessions.count,
                "session_messages_dropped": self._sessions.dropped,
                "session_handshakes_failed": self._sessions.refused,
            }
        return numbers


def _listener(runtime_dir: str, shard: int) -> socket.socket | None:
    try:
        return listen(runtime_dir, shard)
    except OSError as error:
        log.warning("no lanes, all goes through ZeroMQ: %s", error)
        return None
