"""HTTP connections: how many there may be, and the end of those of which nothing comes.

Who connects needs no login for that, and each connection is a file and some memory of the
controller: many that are silent, or send a byte now and then, must not keep it from its own files.
There are bounds for all connections and for those of one address. At a bound the one that is idle
longest makes room for the new one, else one that does not read a long answer; if there is neither,
the new one is closed at once. Other connections whose call is under way are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management.tls_handshakes import Handshakes, TlsServer
from shardmq.broker.shared.logins import source_of

IDLE_S_MAX: Final = 75.0  # between two calls, or until the head of the first is there
IDLE_S_MIN: Final = 1.0  # who has just come is about to call
LOOK_EACH_S: Final = 0.5
SEND_BUFFER_BYTES: Final = 128 << 10  # in the kernel, which takes twice as much, of one connection
WRITE_BUFFER_BYTES: Final = 16 << 10  # in this process beside it, before its writer waits
# Of the kernel, for a client that does not read its answer.
UNREAD_MS_MAX: Final = 60_000

log = logging.getLogger(__name__)

Connection = web.RequestHandler


def superfluous(
    idle_since: Mapping[Connection, float], connections: int, connections_max: int, now: float
) -> list[Connection]:
    """Return which of the idle ones of so many connections are to go."""
    longest_first = sorted(idle_since, key=idle_since.__getitem__)
    too_many = max(0, connections - connections_max)
    return longest_first[:too_many] + [
        one for one in longest_first[too_many:] if now - idle_since[one] > IDLE_S_MAX
    ]


def our_fault(record: logging.LogRecord) -> bool:
    """Bytes that are no HTTP are answered with 400; there may come as many as somebody cares to send."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.debug("not HTTP: %s", " ".join(str(error).split()))
    return False


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(our_fault)
SERVER: Final[dict[str, Any]] = {
    # Bodies stay as they are sent: what is compressed grows to a thousand times its size, for who has no login as well.
    "auto_decompress": False,
    "keepalive_timeout": IDLE_S_MAX,
    "logger": _http_log,
}


# Breaks off a long answer that is not read, of an address or (None) of all. False: there is none.
CutOff = Callable[[str | None], bool]


class Callers:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: dict[Connection, str] = {}  # of those let in that have not ended
        self._calling: set[Connection] = set()
        self._too_many = False
        self._idle_since: dict[
            Connection, float
        ] = {}  # of connections that have called, or were there at a look
        self.connected = 0
        self.closed = 0  # by us, since nothing came of them
        self.refused: Counter[str] = Counter()  # by the bound
        self.handshakes = Handshakes(clock)

    def middleware(self) -> Middleware:
        @web.middleware
        async def calling(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._calling.add(request.protocol)
            try:
                return await handler(request)
            finally:
                self._calling.discard(request.protocol)
                self._idle_since[request.protocol] = self._clock()

        return calling

    def let_in(self, address: str, limits: HttpLimits, cut_off: CutOff) -> bool:
        """Return whether one more connection may be, after another one is closed where that helps."""
        self._addresses = {
            one: of for one, of in self._addresses.items() if one.transport is not None
        }
        same = [one for one, of in self._addresses.items() if of == address]
        if len(same) >= limits.connections_per_address_max and not (
            self._close_idle(same) or cut_off(address)
        ):
            self.refused["address"] += 1
            return False
        if len(self._addresses) >= limits.connections_max and not (
            self._close_idle(self._addresses) or cut_off(None)
        ):
            self.refused["connections"] += 1
            return False
        return True

    def here(self, connection: Connection, address: str) -> None:
        """Count one that was let in."""
        self._addresses[connection] = address
        self._idle_since[connection] = self._clock()

    def _close_idle(self, among: Iterable[Connection]) -> bool:
        """Close the one that is idle longest, if any is idle for some time."""
        idle = [one for one in among if one in self._idle_since and one not in self._calling]
        longest = min(idle, key=self._idle_since.__getitem__, default=None)
        if longest is None or self._clock() - self._idle_since[longest] < IDLE_S_MIN:
            return False
        self._close(longest)
        return True

    def _close(self, connection: Connection) -> None:
        """Close it at once, whatever it has not read."""
        self.closed += 1
        self._addresses.pop(connection, None)
        transport = connection.transport
        connection.force_close()
        if transport is not None:
            transport.abort()

    def look(self, connections: Iterable[Connection], limits: HttpLimits) -> None:
        """Close what is superfluous of all there are."""
        now, there = self._clock(), list(connections)
        idle = {one: self._idle_since.get(one, now) for one in there if one not in self._calling}
        self._idle_since = idle
        self.connected = len(there)
        for connection in superfluous(idle, len(there), limits.connections_max, now):
            self._close(connection)
        too_many = len(there) >= limits.connections_max
        if too_many and not self._too_many:
            log.warning(
                "%d connections by HTTP (http.connections_max): those idle longest are closed",
                len(there),
            )
        self._too_many = too_many


class Entrance(asyncio.Protocol):
    """Stands where a connection comes in, and makes way for aiohttp's protocol if it is let in."""

    def __init__(
        self,
        callers: Callers,
        server: web.Server,
        limits_now: Callable[[], HttpLimits],
        cut_off: CutOff,
    ) -> None:
        self._callers = callers
        self._server = server
        self._limits_now = limits_now
        self._cut_off = cut_off

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, made)  # uvloop's is none by its type
        peer = transport.get_extra_info("peername")
        address = source_of(peer[0]) if peer else ""
        if not self._callers.let_in(address, self._limits_now(), self._cut_off):
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        connection = self._server()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        self._callers.here(connection, address)


class GuardedSite(web.SockSite):
    """A listening socket behind an Entrance."""

    def __init__(
        self,
        runner: web.AppRunner,
        listening: socket.socket,
        entrance: Callable[[], Entrance],
        backlog: int,
        limits_now: Callable[[], HttpLimits],
        handshakes: Handshakes,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        # Accepted sockets inherit both. Who reads nothing for long is cut off by the kernel.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS_MAX)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        super().__init__(runner, listening, backlog=backlog, ssl_context=ssl_context)
        self._entrance = entrance
        self._limits_now = limits_now
        self._handshakes = handshakes

    async def start(self) -> None:
        await web.BaseSite.start(self)
        if self._ssl_context is None:
            self._server = await asyncio.get_running_loop().create_server(
                self._entrance, sock=self._sock, backlog=self._backlog
            )
            return
        self._sock.listen(self._backlog)
        server = TlsServer(
            self._sock, self._ssl_context, self._entrance, self._handshakes, self._limits_now
        )
        self._server = cast(asyncio.AbstractServer, server)  # of which the site only closes it
