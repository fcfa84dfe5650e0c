"""Accept the sessions of peers on other nodes: a ROUTER with CURVE at a TCP socket.

wire/session.py has the other end. Each TCP connection is a session of its own, with a name that
stands for the endpoint of the peer. Nobody gets a message in without the keys of the cluster.

What bounds the memory: a session gets deliveries, confirms and credit as far as the windows of its
peer allow, and one answer for each request. A session that does not read is silent, and ends with
all that is unsent. There are at most SESSIONS_MAX sessions. Strangers who say nothing wait in the
kernel for a while (TCP_DEFER_ACCEPT). Those who do not shake hands are cut off after HANDSHAKE_S,
and earlier if there are more than STRANGERS_MAX.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

from shardmq.cluster.versions import WIRE
from shardmq.shardd.peers import SESSION
from shardmq.shardd.wire.envelope import Parts
from shardmq.shardd.wire.lane import joined
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

SESSIONS_MAX = 4096
# Connections that have not said anything by a session. The oldest of more is cut off.
STRANGERS_MAX = 512
MONITOR = "inproc://monitor-of-sessions"
SO_COOKIE = 57  # Linux's number of a socket, which no other socket has
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Sessions:
    """The sessions of one shard.

    `fds` are watched in `poll`; `hear` is told of them. While `may_speak` is false, there is
    nothing to take in. The thread that watches the disk sends, too, so the socket is used under a
    lock.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen_fd: int,
        keys: SessionKeys,
        poll: select.epoll,
    ) -> None:
        self.dropped = 0  # messages to sessions that are gone
        self.refused = 0  # connections that did not shake hands
        self._public = keys.public.encode()
        self._names: dict[int, str] = {}  # by the descriptor of the connection
        self._strangers: dict[int, int] = {}  # the numbers of sockets by descriptor, oldest first
        self._over: list[str] = []  # sessions that have ended
        self._versions: dict[str, int] = {}  # of sessions that speak another one than this process
        self._lock = threading.Lock()
        self.may_speak = True  # a plain attribute, because the loop asks in each pass
        # Needed in a cluster only, and brings asyncio.
        from zmq.auth.thread import ThreadAuthenticator

        self._gate = ThreadAuthenticator(context)
        self._gate.configure_curve_callback(credentials_provider=self)
        self._gate.start()
        made = self._socket = context.socket(zmq.ROUTER)
        prepare(made, keys)
        made.curve_server = True
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        with socket.socket(fileno=os.dup(listen_fd)) as listener:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(HANDSHAKE_S))
            address = _address(listener)
            made.setsockopt(zmq.USE_FD, listener.detach())
        # The I/O thread of ZeroMQ would wait for room among the events, and with it all sessions.
        # So there is no bound by count: each pass of the loop takes in all events.
        made.monitor(MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | REFUSED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set_hwm(0)
        self._monitor.connect(MONITOR)
        # The descriptor of a socket reports events only after the socket was found empty once.
        self._look()
        made.bind(address)
        # Rung when a send has used up the change that the descriptor of the socket would report, or
        # has met a session that is gone.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._monitor_fd = self._monitor.fileno()
        self.fds = (made.fileno(), self._monitor_fd, self._bell)
        for fd in self.fds:
            poll.register(fd, select.EPOLLIN)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a connection with this public key may become a session."""
        return key == self._public and len(self._names) < SESSIONS_MAX

    def close(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
        self._gate.stop()
        os.close(self._bell)

    @property
    def count(self) -> int:
        return len(self._names)

    # -- in ----------------------------------------------------------------------------------------

    def hear(self, fd: int) -> None:
        """Note that one of `fds` is readable."""
        self.may_speak = True
        if fd == self._bell:
            os.eventfd_read(self._bell)
        elif fd == self._monitor_fd:
            self._look()

    def speaks(self) -> bool:
        """Return whether `take` has a message or `ended` a name."""
        return bool(self._over) or self._has_message()

    def _has_message(self) -> bool:
        if not self.may_speak:
            return False
        with self._lock:
            # The value of this option is an int.
            has_message = bool(self._socket.get(zmq.EVENTS) & READABLE)  # type: ignore[operator]
            self.may_speak = has_message or bool(self._over)
        return has_message

    def take(self) -> tuple[str, bytes] | None:
        """Return the next message behind the name of its session; None if there is none."""
        if not self._has_message():
            return None
        with self._lock:
            name = SESSION + self._socket.recv(AT_ONCE).hex()
            frame = self._socket.recv(AT_ONCE, copy=False)
        fd = int(frame.get(zmq.SRCFD))
        if self._names.get(fd) != name:
            self._look()  # at the end of a session that had this descriptor before
            self._names[fd] = name
            self._strangers.pop(fd, None)
            version = int.from_bytes(frame.bytes[1:2], "little")
            if version != WIRE_VERSION and version in WIRE:
                self._versions[name] = version
        message = frame.bytes
        spoken = self._versions.get(name)
        if spoken is not None and message[1:2] == bytes((spoken,)):
            message = at_version(message, WIRE_VERSION)
        return name, message

    @property
    def has_ended(self) -> bool:
        """Return whether `ended` has a name."""
        return bool(self._over)

    def ended(self) -> list[str]:
        """Return the names of sessions that have ended since the last call.

        The caller has taken the messages that were there.
        """
        over, self._over = self._over, []
        return over

    def _look(self) -> None:
        """Take the events of the monitor."""
        # The value of this option is an int.
        while self._monitor.get(zmq.EVENTS) & READABLE:  # type: ignore[operator]
            told = recv_monitor_message(self._monitor)
            event, fd = told["event"], int(told["value"])
            if event & REFUSED:
                self.refused += 1
            elif event == zmq.EVENT_ACCEPTED:
                self._strangers[fd] = _number(fd)
            else:
                self._strangers.pop(fd, None)
                if (name := self._names.pop(fd, None)) is not None:
                    self._versions.pop(name, None)
                    self._over.append(name)
        while len(self._strangers) > STRANGERS_MAX:
            fd = next(iter(self._strangers))
            _cut_off(fd, self._strangers.pop(fd))

    # -- out ---------------------------------------------------------------------------------------

    def send(self, name: str, message: Parts) -> None:
        """Send a message to a session, or drop it if the session is gone."""
        identity, whole = bytes.fromhex(name.removeprefix(SESSION)), joined(message)
        if (version := self._versions.get(name)) is not None:
            whole = at_version(whole, version)
        with self._lock:
            try:
                self._socket.send_multipart((identity, whole), AT_ONCE)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.dropped += 1
                self._over.append(name)
            # The value of this option is an int.
            speaks = self._over or self._socket.get(zmq.EVENTS) & READABLE  # type: ignore[operator]
        if speaks and not self.may_speak:
            os.eventfd_write(self._bell, 1)


class Outbox:
    """The way to one session, with the calls of the sockets that lead to other peers."""

    def __init__(self, sessions: Sessions, name: str) -> None:
        self._sessions, self._name = sessions, name

    def send(self, message: bytes, flags: int = AT_ONCE) -> None:
        self._sessions.send(self._name, message)

    def close(self, linger_ms: int = 0) -> None:
        """Do nothing: the session ends when its peer ends it."""


def _number(fd: int) -> int:
    """Return the number of the socket with this descriptor; 0 if it is closed."""
    try:
        with socket.socket(fileno=os.dup(fd)) as same:
            return int.from_bytes(same.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")
    except OSError:
        return 0


def _cut_off(fd: int, number: int) -> None:
    """End a connection of ZeroMQ, which closes it then, unless the descriptor is of another one."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as same:
        found = int.from_bytes(same.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")
        if found == number:
            same.shutdown(socket.SHUT_RDWR)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
