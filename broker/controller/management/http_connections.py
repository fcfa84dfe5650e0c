"""The HTTP connections: bounds for their number, and closing of idle ones.

Anybody can connect without a login, and each connection takes a file descriptor and some memory of
the controller. So the number of connections is bounded, in all and for one address. At a bound the
connection that has been idle longest is closed for the new one, else one that does not read a long
response. If there is neither, the new connection is closed at once. Other connections with a call
under way are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management.tls_handshakes import Handshakes, TlsServer
from shardmq.broker.shared.logins import source_of

IDLE_S_MAX: Final = 75.0  # between two calls, or before the head of the first one
IDLE_S_MIN: Final = 1.0  # a connection that is idle for less is not closed for a new one
CHECK_EACH_S: Final = 0.5
SEND_BUFFER_BYTES: Final = 128 << 10  # of a connection in the kernel, which takes twice as much
WRITE_BUFFER_BYTES: Final = 16 << 10  # of a connection in this process, before its writer waits
UNREAD_MS_MAX: Final = (
    60_000  # then the kernel closes the connection of a client that reads nothing
)

log = logging.getLogger(__name__)

Connection = web.RequestHandler


def superfluous(
    idle_since: Mapping[Connection, float], connections: int, connections_max: int, now: float
) -> list[Connection]:
    """Return the idle connections to close: those over the maximum, and those idle for too long."""
    longest_first = sorted(idle_since, key=idle_since.__getitem__)
    too_many = max(0, connections - connections_max)
    return longest_first[:too_many] + [
        one for one in longest_first[too_many:] if now - idle_since[one] > IDLE_S_MAX
    ]


def is_our_fault(record: logging.LogRecord) -> bool:
    """Return False for an error about bytes that are no HTTP: these could fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.debug("not HTTP: %s", " ".join(str(error).split()))
    return False


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(is_our_fault)
SERVER: Final[dict[str, Any]] = {
    # aiohttp would unpack bodies before the login is checked, to a thousand times their size.
    "auto_decompress": False,
    "keepalive_timeout": IDLE_S_MAX,
    "logger": _http_log,
}


# Cuts off a client that does not read a long response, at this address or (None) at any. Returns
# False if there is none.
CutOff = Callable[[str | None], bool]


class HttpConnections:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: dict[Connection, str] = {}  # of the connections that are open
        self._calling: set[Connection] = set()
        self._too_many = False
        # The times of the last call, or before the first call of the connecting.
        self._idle_since: dict[Connection, float] = {}
        self.connected = 0
        self.closed = 0  # idle connections that were closed here
        self.refused: Counter[str] = Counter()  # by bound
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

    def admit(self, address: str, limits: HttpLimits, cut_off: CutOff) -> bool:
        """Return whether one more connection may open. At a bound another one is closed first."""
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

    def add(self, connection: Connection, address: str) -> None:
        self._addresses[connection] = address
        self._idle_since[connection] = self._clock()

    def _close_idle(self, among: Iterable[Connection]) -> bool:
        """Close the connection that was idle longest. Return False if none was for IDLE_S_MIN."""
        idle = [one for one in among if one in self._idle_since and one not in self._calling]
        longest = min(idle, key=self._idle_since.__getitem__, default=None)
        if longest is None or self._clock() - self._idle_since[longest] < IDLE_S_MIN:
            return False
        self._close(longest)
        return True

    def _close(self, connection: Connection) -> None:
        """Close a connection at once, although data may not be sent yet."""
        self.closed += 1
        self._addresses.pop(connection, None)
        transport = connection.transport
        connection.force_close()
        if transport is not None:
            transport.abort()

    def close_superfluous(self, connections: Iterable[Connection], limits: HttpLimits) -> None:
        """Close the `superfluous` ones of all connections that there are."""
        now, present = self._clock(), list(connections)
        idle = {one: self._idle_since.get(one, now) for one in present if one not in self._calling}
        self._idle_since = idle
        self.connected = len(present)
        for connection in superfluous(idle, len(present), limits.connections_max, now):
            self._close(connection)
        too_many = len(present) >= limits.connections_max
        if too_many and not self._too_many:
            log.warning(
                "%d connections by HTTP (http.connections_max): those idle longest are closed",
                len(present),
            )
        self._too_many = too_many


class AdmittingProtocol(asyncio.Protocol):
    """The protocol of a new connection: it is replaced by aiohttp's, or closes the connection."""

    def __init__(
        self,
        connections: HttpConnections,
        server: web.Server,
        limits_now: Callable[[], HttpLimits],
        cut_off: CutOff,
    ) -> None:
        self._connections = connections
        self._server = server
        self._limits_now = limits_now
        self._cut_off = cut_off

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, made)  # uvloop's class is no subclass of it
        peer = transport.get_extra_info("peername")
        address = source_of(peer[0]) if peer else ""
        if not self._connections.admit(address, self._limits_now(), self._cut_off):
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        connection = self._server()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        self._connections.add(connection, address)


class LimitedSite(web.SockSite):
    """A listening socket whose connections are admitted by an AdmittingProtocol."""

    def __init__(
        self,
        runner: web.AppRunner,
        listening: socket.socket,
        connections: HttpConnections,
        limits_now: Callable[[], HttpLimits],
        cut_off: CutOff,
        backlog: int,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        # Accepted sockets inherit both options.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS_MAX)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        super().__init__(runner, listening, backlog=backlog, ssl_context=ssl_context)
        server = runner.server
        assert server is not None, "the runner is set up"
        self._protocol = partial(AdmittingProtocol, connections, server, limits_now, cut_off)
        self._handshakes = connections.handshakes
        self._limits_now = limits_now

    async def start(self) -> None:
        await web.BaseSite.start(self)
        if self._ssl_context is None:
            self._server = await asyncio.get_running_loop().create_server(
                self._protocol, sock=self._sock, backlog=self._backlog
            )
            return
        self._sock.listen(self._backlog)
        server = TlsServer(
            self._sock, self._ssl_context, self._protocol, self._handshakes, self._limits_now
        )
        self._server = cast(asyncio.AbstractServer, server)  # the site only closes it
