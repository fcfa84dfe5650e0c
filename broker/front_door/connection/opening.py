"""The handshake of AMQP: who the client is, and which vhost it may open.

What is decided by the catalog alone is in login.py. Here a password that takes long to check, and
limits that the controller counts, are waited for; the client is not read meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from pamqp import commands

from shardmq.broker.amqp import ChannelException, ConnectionException, StartOk
from shardmq.broker.front_door import login
from shardmq.broker.front_door.connection.session import Session
from shardmq.broker.front_door.connection.socket import PAUSE_LOGIN, ClientSocket
from shardmq.broker.front_door.connection.work_queue import WorkQueue
from shardmq.broker.front_door.services import Services
from shardmq.broker.shared.control import ConnectionOpen
from shardmq.broker.shared.logins import TakesLong

log = logging.getLogger("shardmq.broker.front_door.connection.opening")


class Opened(Protocol):
    """The connection that is being opened."""

    session: Session
    services: Services
    socket: ClientSocket
    work: WorkQueue

    def opened(self) -> None:
        """Take note that the session has a user and a vhost."""

    def fail(self, error: ChannelException | ConnectionException, number: int) -> None: ...
    def close(self, error: ConnectionException) -> None: ...
    def disconnect(self) -> None: ...


class Opening:
    """The handshake of one connection, which has a limited time."""

    def __init__(self, connection: Opened, connected: Callable[[], int]) -> None:
        """Start the clock of a handshake.

        `connected` returns how many open connections of clients this front door has.
        """
        self._connection = connection
        self._connected = connected
        services = connection.services
        timeout_s = services.config.handshake_timeout_s
        self._timer = services.loop.aio.call_later(timeout_s, self._too_slow, timeout_s)

    def close(self) -> None:
        """Stop the clock: the connection is open, or has ended."""
        self._timer.cancel()

    def _too_slow(self, timeout_s: float) -> None:
        log.warning("%s: no handshake within %g s", self._connection.session.name, timeout_s)
        self._connection.disconnect()

    def log_in(self, said: StartOk, known: str | None = None) -> None:
        """Check what start-ok says; tune, or refuse.

        `known` is the verdict on the password, if it took a while.
        """
        connection, services = self._connection, self._connection.services
        session, amqp, catalog = connection.session, connection.socket.amqp, services.catalog
        session.client_properties = said.client_properties
        if session.trusted and said.response.decode() in catalog.users:
            session.user, session.auth_mechanism = said.response.decode(), said.mechanism
            amqp.tune()
            return

        def verdict(user: str, password: str) -> str:
            if known is not None:
                return known
            put, now = catalog.users.get(user), services.loop.aio.time()
            return services.logins.at_once(put, user, password, session.peer_host, now)

        try:
            session.user = login.authenticate(
                said.mechanism,
                said.response,
                said.client_properties,
                catalog,
                verdict=verdict,
                peer_host=session.peer_host,
                relayed=session.relayed,
                loopback_users=services.config.loopback_users,
                tls=session.tls,
            )
        except TakesLong as asked:
            connection.socket.pause(PAUSE_LOGIN)
            connection.work.start(self._log_in_slowly(said, asked))
            return
        except login.LoginRefused as refused:
            services.counts.logins_failed += 1
            if not refused.said:
                log.warning("%s: login refused: %s", session.name, refused.reason)
            if refused.tell:
                connection.close(refused.answer)
            else:
                connection.disconnect()
            return
        services.counts.logins_succeeded += 1
        session.auth_mechanism = said.mechanism
        amqp.tune()

    async def _log_in_slowly(self, said: StartOk, asked: TakesLong) -> None:
        services, socket = self._connection.services, self._connection.socket
        known = await services.logins.slowly(
            services.catalog.users.get(asked.user),
            asked.user,
            asked.password,
            self._connection.session.peer_host,
            services.loop.aio.time(),
        )
        if not socket.lost:
            self.log_in(said, known)
            socket.gather()
            socket.resume(PAUSE_LOGIN)

    def open(self, vhost: str) -> None:
        """Open a vhost for connection.open. Raises ConnectionException when the user may not."""
        connection, services = self._connection, self._connection.services
        session, amqp, config = connection.session, connection.socket.amqp, services.config
        vhost = vhost or "/"
        connected = 0 if session.trusted else self._connected()
        login.check_open(services.catalog, session.user, vhost, connected, config.connections_max)
        session.vhost = vhost
        session.frame_bytes_max = amqp.frame_bytes_max
        session.channels_max, session.heartbeat_s = amqp.channels_max, amqp.heartbeat_s
        if not session.trusted:
            services.catalog_link.connection_up(session.info(channels=0))
            if config.connections_are_limited or login.has_limits(
                services.catalog, session.user, vhost
            ):
                connection.socket.pause(PAUSE_LOGIN)
                connection.work.start(self._open_within_limits())
                return
        self._be_open()

    async def _open_within_limits(self) -> None:
        """Ask the controller, which knows how many connections all front doors have."""
        session, socket = self._connection.session, self._connection.socket
        services = self._connection.services
        ask = ConnectionOpen(session.vhost, session.user)
        answer = await services.catalog_link.ask(ask, session.owner, session.user)
        if socket.lost:
            return
        if answer.code:
            services.catalog_link.connection_down(session.owner)
            self._connection.fail(login.not_allowed(answer.text), 0)
        else:
            self._be_open()
        socket.gather()
        socket.resume(PAUSE_LOGIN)

    def _be_open(self) -> None:
        self.close()
        self._connection.opened()
        self._connection.socket.send(0, commands.Connection.OpenOk())
