"""TLS handshakes with the HTTPS ports: bounds for their number, in all and from one address.

A client that connects and sends nothing takes a file descriptor of the controller until the
handshake times out. At a bound the handshake that has lasted longest is cut off for the new one, if
it has lasted for HANDSHAKE_S_MIN; else the new connection is closed at once. After the handshake
the connection counts in `http_connections.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.shared.logins import source_of

HANDSHAKE_S_MAX: Final = 10.0
# An honest client on a slow line needs a few round trips.
HANDSHAKE_S_MIN: Final = 1.0
# The time before the next attempt to accept, when no file descriptor was free.
NO_FILES_S: Final = 1.0
# The shortest time between two lines in the log about too many handshakes.
LOG_EACH_S: Final = 10.0

log = logging.getLogger(__name__)


class _UnderWay(NamedTuple):
    address: str
    since: float
    task: asyncio.Task[None]


class Handshakes:
    """The handshakes under way at all HTTPS ports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[socket.socket, _UnderWay] = {}  # in the order of their begin
        self._logged_at = -LOG_EACH_S
        self.refused: Counter[str] = Counter()  # handshakes that were not begun, by bound
        self.cut_off: Counter[str] = Counter()  # handshakes ended for another one, by bound

    def __len__(self) -> int:
        return len(self._under_way)

    def may_begin(self, address: str, limits: HttpLimits) -> bool:
        """Return whether one more handshake may begin. At a bound another one is cut off first."""
        same = [one for one, known in self._under_way.items() if known.address == address]
        if len(same) >= limits.handshakes_per_address_max and not self._make_room(same, "address"):
            return False
        if len(self._under_way) < limits.handshakes_max:
            return True
        return self._make_room(list(self._under_way), "handshakes")

    def _make_room(self, among: list[socket.socket], bound: str) -> bool:
        now = self._clock()
        if now - self._logged_at >= LOG_EACH_S:
            self._logged_at = now
            log.warning(
                "%d TLS handshakes with the HTTPS port (http.handshakes%s_max): "
                "the longest are cut off",
                len(among),
                "_per_address" if bound == "address" else "",
            )
        if now - self._under_way[among[0]].since < HANDSHAKE_S_MIN:
            self.refused[bound] += 1
            return False
        self.cut_off[bound] += 1
        self._under_way.pop(among[0]).task.cancel()
        return True

    def begin(self, accepted: socket.socket, address: str, task: asyncio.Task[None]) -> None:
        """Count a handshake that may begin, until its task has ended."""
        self._under_way[accepted] = _UnderWay(address, self._clock(), task)
        task.add_done_callback(lambda _: self._under_way.pop(accepted, None))

    def end_all(self) -> None:
        for known in self._under_way.values():
            known.task.cancel()


class TlsServer:
    """Accepts connections and shakes hands with them. Then each gets a `protocol()`."""

    def __init__(
        self,
        listening: socket.socket,
        tls: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        handshakes: Handshakes,
        limits_now: Callable[[], HttpLimits],
    ) -> None:
        self._listening = listening
        self._tls = tls
        self._protocol = protocol
        self._handshakes = handshakes
        self._limits_now = limits_now
        listening.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())
        self._accepting.add_done_callback(lambda _: listening.close())

    def stop(self) -> None:
        """Accept no more connections. Handshakes that are under way go on."""
        self._accepting.cancel()

    def close(self) -> None:
        self.stop()
        self._handshakes.end_all()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._accepting])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._listening)
            except ConnectionError:  # the client has closed it already
                await asyncio.sleep(0)
                continue
            except OSError as error:  # usually no file descriptor is free
                log.warning("no connection is accepted by HTTPS for %g s: %s", NO_FILES_S, error)
                await asyncio.sleep(NO_FILES_S)
                continue
            address = source_of(peer[0])
            if self._handshakes.may_begin(address, self._limits_now()):
                self._handshakes.begin(
                    accepted, address, loop.create_task(self._shake_hands(accepted))
                )
            else:
                accepted.close()

    async def _shake_hands(self, accepted: socket.socket) -> None:
        """Shake hands for HANDSHAKE_S_MAX at the most. The transport owns and closes the socket."""
        with contextlib.suppress(OSError):  # SSLError and TimeoutError are subclasses
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, accepted, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S_MAX
            )
