"""Keep one session (session.py) to a shard of another node, one after the other."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from shardmq.cluster.versions import WIRE
from shardmq.shardd.wire.messages import WIRE_VERSION
from shardmq.shardd.wire.session import (
    AT_ONCE,
    HANDSHAKE_S,
    READABLE,
    SessionKeys,
    at_version,
    prepare,
)

log = logging.getLogger(__name__)

# The wait before the next session. It is longer than the step of an incarnation, so that the next
# process of a peer has a higher incarnation than all sessions of this one.
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 2.0
# ZeroMQ is never to connect again. If it is told so (-1), it throws away what it has received, and
# nobody has taken, when a connection ends. So ZeroMQ is told to wait for a day, and a session is
# over before.
RECONNECT_MS = 24 * 3600 * 1000
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Dialer:
    """The sessions of one peer to one shard, of which at most one is open.

    `incarnation` is that of the session that is open or was open last, and `first` that of the
    first session. `began` is called for each new session, before it is connected: what is sent
    there leaves when it is. `speaks` is called when `take` may have messages, and takes one at
    least. `ended` is called when a session has ended, behind its last message.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: SessionKeys,
        first: int,
        *,
        began: Callable[[], None],
        speaks: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.address = address
        self.incarnation = first - 1
        self._context, self._keys = context, keys
        self._began, self._speaks, self._ended = began, speaks, ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the handshake, or of the next session
        self._backoff_s = BACKOFF_FIRST_S
        self._is_called = False  # `speaks` is about to be called
        # The wire version of the session, and that of the next one.
        self._version = self._next_version = WIRE.most

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the first session."""
        self._loop = loop
        self._dial()

    def close(self, linger_ms: int = 0) -> None:
        """End the session, without a call of `ended`. What is unsent may take `linger_ms`."""
        if self._timer is not None:
            self._timer.cancel()
        self._hang_up(linger_ms)
        self._loop = None

    def send(self, message: bytes) -> None:
        """Send a message, or drop it if the session has ended."""
        if self._socket is None:
            return
        if self._version != WIRE_VERSION:
            message = at_version(message, self._version)
        try:
            self._socket.send(message, AT_ONCE)
        except zmq.Again:
            return  # the address cannot be connected to
        # To send may use up the change that the descriptor would report.
        # The value of this option is an int.
        if not self._is_called and self._socket.get(zmq.EVENTS) & READABLE:  # type: ignore[operator]
            assert self._loop is not None
            self._is_called = True
            self._loop.call_soon(self._heard)

    def take(self) -> bytes | None:
        """Return the next message of the session, or None."""
        # The value of this option is an int.
        if self._socket is None or not self._socket.get(zmq.EVENTS) & READABLE:  # type: ignore[operator]
            return None
        self._backoff_s = BACKOFF_FIRST_S
        message = self._socket.recv(AT_ONCE)
        version = message[1] if len(message) > 1 else 0
        if version == self._version:
            return message if version == WIRE_VERSION else at_version(message, WIRE_VERSION)
        if version < self._version and version in WIRE:
            log.info("%s speaks wire version %d", self.address, version)
            self._next_version = version
            self._give_up()
            return None
        return message

    def outdated(self, lowest: int) -> None:
        """End a session that the shard has refused; the next one has the incarnation `lowest`."""
        self.incarnation = max(self.incarnation, lowest - 1)
        self._give_up()

    def _dial(self) -> None:
        assert self._loop is not None
        self.incarnation += 1
        self._version, self._next_version = self._next_version, WIRE.most
        made = self._socket = self._context.socket(zmq.DEALER)
        prepare(made, self._keys)
        made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        made.curve_serverkey = self._keys.public.encode()
        self._monitor = made.get_monitor_socket(ENDS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._loop.add_reader(self._monitor.fileno(), self._look)
        self._loop.add_reader(made.fileno(), self._heard)
        self._timer = self._loop.call_later(2 * HANDSHAKE_S, self._end)
        try:
            made.connect(self.address)
        except zmq.ZMQError as error:
            log.error("%s cannot be connected: %s", self.address, error)
        self._began()
        # A descriptor reports changes only: what happened before it was watched is looked at here.
        self._look()

    def _look(self) -> None:
        """Take the events of the monitor."""
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event & ENDS:
                self._end()
            elif self._timer is not None:  # shaken hands
                self._timer.cancel()

    def _heard(self) -> None:
        self._is_called = False
        if self._socket is not None:
            self._speaks()

    def _end(self) -> None:
        # The value of this option is an int.
        while self._socket is not None:
            if not self._socket.get(zmq.EVENTS) & READABLE:  # type: ignore[operator]
                break
            self._heard()  # the last words
        self._give_up()

    def _give_up(self) -> None:
        """End the session, if there is one, and plan the next one."""
        if self._socket is None:
            return
        self._hang_up(0)
        self._ended()
        if self._loop is not None:
            wait_s = self._backoff_s * random.uniform(1, 1.5)
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
            self._timer = self._loop.call_later(wait_s, self._dial)

    def _hang_up(self, linger_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is None or self._monitor is None:
            return
        made, monitor, self._socket, self._monitor = self._socket, self._monitor, None, None
        if self._loop is not None:
            self._loop.remove_reader(monitor.fileno())
            self._loop.remove_reader(made.fileno())
        made.disable_monitor()
        monitor.close()
        made.close(linger_ms)
