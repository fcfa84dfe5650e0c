"""HTTP connections of which nothing comes: closed after a while, or at once where there are too many.

Who connects needs no login for that, and each connection is a file of the controller: many that are silent, or send a
byte now and then, must not keep it from its own files. Those whose call is under way are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

IDLE_S_MAX: Final = 75.0  # between two calls, or until the head of the first is there
CONNECTIONS_MAX: Final = 1_000  # beyond these the ones that are idle longest go
LOOK_EACH_S: Final = 0.5
# Of the kernel, for a client that does not read its answer.
UNREAD_MS_MAX: Final = 60_000

log = logging.getLogger(__name__)

Connection = web.RequestHandler


def superfluous(idle_since: Mapping[Connection, float], connections: int, now: float) -> list[Connection]:
    """Of the idle ones of so many connections those that are to go."""
    longest_first = sorted(idle_since, key=idle_since.__getitem__)
    too_many = max(0, connections - CONNECTIONS_MAX)
    return longest_first[:too_many] + [one for one in longest_first[too_many:] if now - idle_since[one] > IDLE_S_MAX]


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


class Callers:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calling: set[Connection] = set()
        self._too_many = False
        self._idle_since: dict[Connection, float] = {}  # of connections that have called, or were there at a look

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

    def look(self, connections: Iterable[Connection]) -> None:
        """Closes what is superfluous of all there are."""
        now, there = self._clock(), list(connections)
        idle = {one: self._idle_since.get(one, now) for one in there if one not in self._calling}
        self._idle_since = idle
        gone = superfluous(idle, len(there), now)
        for connection in gone:
            connection.force_close()
        if len(there) > CONNECTIONS_MAX and not self._too_many:
            log.warning("more than %d connections by HTTP: those idle longest are closed", CONNECTIONS_MAX)
        self._too_many = len(there) > CONNECTIONS_MAX

    async def watch(self, runners: list[web.AppRunner]) -> None:
        while True:
            await asyncio.sleep(LOOK_EACH_S)
            self.look(one for runner in runners if runner.server is not None for one in runner.server.connections)
