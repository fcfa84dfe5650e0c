"""The handshake of AMQP: who the client is, and which vhost it may open.

What is decided by the catalog alone is in login.py. A password that takes long to check, and limits
that the controller counts, are waited for. What is to be done is returned, and the connection does
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from enum import Enum

from shardmq.broker.amqp import Connection, ConnectionException, StartOk, hand_on
from shardmq.broker.front_door import login
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import Lesson, Newcomer, Session
from shardmq.broker.model.permissions import DIRECT, INTERNAL_USER
from shardmq.broker.shared.control import ConnectionOpen
from shardmq.broker.shared.logins import TakesLong

log = logging.getLogger("shardmq.broker.front_door.connection.opening")


LESSONS_MAX = 1000  # logins that newcomers may use


class Greeting(Enum):
    """The next thing to do for a client that may go on, or the end of one that is told nothing."""

    TUNE = "tune"
    OPEN_OK = "open-ok"
    HANG_UP = "hang up"


# An exception is the reason to close with.
Greeted = Greeting | ConnectionException
# The client is not read until a coroutine has ended.
Handshake = Greeted | Coroutine[None, None, Greeted]


class Opening:
    """The handshake of one connection, which has a limited time."""

    def __init__(
        self,
        services: Services,
        session: Session,
        amqp: Connection,
        *,
        connected: Callable[[], int],
        disconnect: Callable[[], None],
        newcomer: Newcomer,
    ) -> None:
        """Start the clock of the handshake, which a `newcomer` may have begun before.

        `disconnect` is called when the handshake takes too long. `connected` returns how many open
        connections of clients this front door has.
        """
        self._services = services
        self._session = session
        self._amqp = amqp
        self._connected = connected
        self._disconnect = disconnect
        self._key = newcomer.key
        self._verdict = "" if newcomer.logged_in else None  # it was told so
        timeout_s = services.config.handshake_timeout_s
        self._timer = (
            services.loop.aio.call_later(
                max(0.0, timeout_s - newcomer.age_s), self._too_slow, timeout_s
            )
            if newcomer.open is None
            else None
        )

    def close(self) -> None:
        """Stop the clock: the connection is open, or has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _too_slow(self, timeout_s: float) -> None:
        log.warning("%s: no handshake within %g s", self._session.name, timeout_s)
        self._disconnect()

    def log_in(self, said: StartOk, known: str | None = None) -> Handshake:
        """Check what start-ok says.

        `known` is the verdict on the password, if it took a while.
        """
        if known is None:
            known, self._verdict = self._verdict, None
        services, session, catalog = self._services, self._session, self._services.catalog
        session.client_properties = said.client_properties
        if session.trusted:
            user = said.response.decode()
            if user == INTERNAL_USER or user in catalog.users:
                session.user, session.auth_mechanism = user, said.mechanism
                if said.mechanism == DIRECT:
                    session.become_direct()
                return Greeting.TUNE

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
            return self._log_in_slowly(said, asked)
        except login.LoginRefused as refused:
            services.counts.logins_failed += 1
            services.lessons.clear()  # passwords are looked at, or not looked at, from now on
            if not refused.said:
                log.warning("%s: login refused: %s", session.name, refused.reason)
            return refused.answer if refused.tell else Greeting.HANG_UP
        services.counts.logins_succeeded += 1
        if self._key is not None and known is None:  # what was hashed slowly may be old by now
            if len(services.lessons) >= LESSONS_MAX:
                services.lessons.clear()
            if self._key not in services.lessons:
                services.lessons[self._key] = Lesson(
                    session.user, said.mechanism, said.client_properties, set()
                )
        session.auth_mechanism = said.mechanism
        return Greeting.TUNE

    async def _log_in_slowly(self, said: StartOk, asked: TakesLong) -> Greeted:
        services = self._services
        known = await services.logins.slowly(
            services.catalog.users.get(asked.user),
            asked.user,
            asked.password,
            self._session.peer_host,
            services.loop.aio.time(),
        )
        greeted = self.log_in(said, known)
        assert not isinstance(greeted, Coroutine)
        return greeted

    def open(self, vhost: str) -> Handshake:
        """Check what connection.open says. Raises ConnectionException when the user may not."""
        services, session, amqp = self._services, self._session, self._amqp
        vhost = vhost or "/"
        connections_max = 0 if session.trusted else services.config.connections_max
        connected = self._connected() if connections_max else 0
        login.check_open(services.catalog, session.user, vhost, connected, connections_max)
        session.vhost = vhost
        session.frame_bytes_max = amqp.frame_bytes_max
        session.channels_max, session.heartbeat_s = amqp.channels_max, amqp.heartbeat_s
        if not session.is_hidden:
            services.catalog_link.connection_up(session.owner, session.info)
            if services.config.connections_are_limited or login.has_limits(
                services.catalog, session.user, vhost
            ):
                return self._open_within_limits()
        if (
            self._key is not None
            and self._key in services.lessons  # no login depends on what has changed since
            and not connections_max
            and not services.config.channel_max_per_node
            and not login.has_channel_limit(services.catalog, session.user)
        ):
            services.lessons[self._key].vhosts.add(vhost.encode())
        return Greeting.OPEN_OK

    def hand_on(self, newcomer: Newcomer, lesson: Lesson) -> Greeting:
        """Go on from an open newcomer: it has done all that is decided here."""
        services, session, amqp = self._services, self._session, self._amqp
        hand_on(
            amqp,
            lesson.client_properties,
            newcomer.channels_max,
            newcomer.frame_bytes_max,
            newcomer.heartbeat_s,
            newcomer.channels,
        )
        session.user, session.auth_mechanism = lesson.user, lesson.mechanism
        session.client_properties, session.vhost = lesson.client_properties, newcomer.vhost
        session.frame_bytes_max = newcomer.frame_bytes_max
        session.channels_max, session.heartbeat_s = newcomer.channels_max, newcomer.heartbeat_s
        services.counts.logins_succeeded += 1
        services.counts.channels_opened += newcomer.channels_opened
        services.catalog_link.connection_up(session.owner, session.info)
        return Greeting.OPEN_OK

    async def _open_within_limits(self) -> Greeted:
        """Ask the controller, which knows how many connections all front doors have."""
        session, link = self._session, self._services.catalog_link
        ask = ConnectionOpen(session.vhost, session.user)
        answer = await link.ask(ask, session.owner, session.user)
        if answer.code:
            link.connection_down(session.owner)
            raise login.not_allowed(answer.text)
        return Greeting.OPEN_OK
