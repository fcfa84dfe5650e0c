"""Listen for connections: TCP, TLS, a load balancer's PROXY header, the controller.

A connection takes the steps that it needs (proxy.py, tls.py) and enters the front door then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

from shardmq.broker.front_door.connections import Connections
from shardmq.broker.front_door.proxy import IPV4_AS_IPV6, Balancers, Greeting, Peer
from shardmq.broker.front_door.session import TlsPeer
from shardmq.broker.front_door.tls import Handshake
from shardmq.broker.shared import certificates
from shardmq.broker.shared.certificates import Certificates
from shardmq.broker.shared.config import BrokerConfig, ConfigError

log = logging.getLogger("shardmq.broker.front_door.listeners")

# Connections taken from a listening socket before others are served again.
ACCEPT_BURST = 64
ACCEPT_AGAIN_S = 1.0
INSIDE_BACKLOG = 128


class Listeners:
    """The listening sockets of one front door, and connections that have not entered yet."""

    def __init__(
        self, aio: asyncio.AbstractEventLoop, config: BrokerConfig, connections: Connections
    ) -> None:
        self._aio = aio
        self._config = config
        self._connections = connections
        self._listeners: list[socket.socket] = []
        self._plain: list[socket.socket] = []  # those of them for TCP without TLS
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._balancers = Balancers(config.proxy_protocol_from)
        self._handshakes: set[Handshake] = set()
        self._greetings: set[Greeting] = set()

    def start(self) -> None:
        """Accept connections."""
        if (anteroom := self._connections.anteroom) is not None:
            anteroom.failed = self._newcomers_fail
            self._aio.add_reader(anteroom.epoll, self._connections.newcomers_ready)
        for fd in self._config.listen_fds:
            self._listen(fd, secure=False)
        for fd in self._config.tls_listen_fds:
            self._listen(fd, secure=True)
        self._listen_inside()

    def _listen(self, fd: int, *, secure: bool) -> None:
        listener = socket.socket(fileno=fd)
        listener.setblocking(False)
        listener.listen(self._config.backlog)
        self._listeners.append(listener)
        if not secure:
            self._plain.append(listener)
        self._take_from(listener, secure)

    def _take_from(self, listener: socket.socket, secure: bool) -> None:
        """Accept connections: in the anteroom, if nothing comes before AMQP."""
        anteroom, fd = self._connections.anteroom, listener.fileno()
        if anteroom is None or secure or self._config.proxy_protocol_from:
            self._aio.add_reader(fd, self._accept, listener, secure)
        else:
            anteroom.listen(fd)

    def _leave(self, listener: socket.socket) -> None:
        self._aio.remove_reader(listener.fileno())
        if self._connections.anteroom is not None:
            self._connections.anteroom.leave(listener.fileno())

    def _newcomers_fail(self, fd: int, error: int) -> None:
        """Try again later to accept newcomers. The anteroom has left the listener."""
        log.error("cannot accept: %s", OSError(error, os.strerror(error)))
        for listener in self._plain:
            if listener.fileno() == fd:
                self._aio.call_later(ACCEPT_AGAIN_S, self._accept_again, listener, False)

    def _accept(self, listener: socket.socket, secure: bool) -> None:
        for _ in range(ACCEPT_BURST):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of file descriptors: some will be closed
                log.error("cannot accept: %s", error)
                self._aio.remove_reader(listener.fileno())
                self._aio.call_later(ACCEPT_AGAIN_S, self._accept_again, listener, secure)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(address[0].removeprefix(IPV4_AS_IPV6), address[1])
            if peer.host in self._balancers:
                self._greet(sock, peer, secure)
            else:
                self._let_in(sock, peer, secure)

    def _accept_again(self, listener: socket.socket, secure: bool) -> None:
        if listener.fileno() >= 0:
            self._leave(listener)
            self._take_from(listener, secure)

    def _greet(self, sock: socket.socket, peer: Peer, secure: bool) -> None:
        """Wait for the PROXY header of a load balancer."""

        def entered(greeting: Greeting) -> None:
            self._greetings.discard(greeting)
            self._let_in(sock, greeting.peer, secure)

        self._greetings.add(
            Greeting(
                self._aio,
                sock,
                peer,
                timeout_s=self._config.handshake_timeout_s,
                entered=entered,
                left=self._greetings.discard,
            )
        )

    def _let_in(self, sock: socket.socket, peer: Peer, secure: bool) -> None:
        if not secure:
            self._connections.enter(sock, peer)
            return
        assert self._certificates is not None
        self._handshakes.add(
            Handshake(
                self._aio,
                sock,
                peer,
                self._certificates.context,
                timeout_s=self._config.handshake_timeout_s,
                entered=self._hands_shaken,
                left=self._handshakes.discard,
            )
        )

    def _hands_shaken(self, handshake: Handshake) -> None:
        self._handshakes.discard(handshake)
        sock, given = handshake.sock, handshake.sock.certificate()
        assert self._config.tls is not None
        tls = TlsPeer(
            sock.version(),
            sock.cipher(),
            certificates.login_name(given, self._config.tls),
            bool(given),
            certificates.distinguished_name(given),
            certificates.distinguished_name(given, "issuer"),
        )
        self._connections.enter(sock, handshake.peer, tls)

    # -- from inside -----------------------------------------------------------------------------

    def _listen_inside(self) -> None:
        """Listen for the controller alone: only the broker's user can reach this socket."""
        path = f"{self._config.runtime_dir}/door-{self._config.door}.sock"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.setblocking(False)
        listener.listen(INSIDE_BACKLOG)
        self._listeners.append(listener)
        self._aio.add_reader(listener.fileno(), self._accept_inside, listener)

    def _accept_inside(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # gone again, or out of file descriptors: the controller says so
        sock.setblocking(False)
        self._connections.enter(sock, Peer("", 0), trusted=True)

    # -- reload, the end -------------------------------------------------------------------------

    def reload(self, config: BrokerConfig) -> None:
        """Take new settings, and certificates as they are on disk now, for new connections."""
        self._config = config
        self._balancers = Balancers(config.proxy_protocol_from)
        for listener in self._plain:
            self._leave(listener)
            self._take_from(listener, secure=False)
        if self._certificates is None or config.tls is None:
            return
        try:
            self._certificates.reload(config.tls)
            log.info("certificates are read anew")
        except ConfigError as error:
            log.error("certificates stay as they were: %s", error)

    def close(self) -> None:
        """Take no new connections."""
        for listener in self._listeners:
            self._leave(listener)
            listener.close()
        for handshake in self._handshakes:
            handshake.close()
        for greeting in self._greetings:
            greeting.close()
