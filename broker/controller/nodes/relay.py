"""A node that does not lead is a relay: it pipes what its clients say to the node that leads.

The relay listens where the controller of a node listens: for front doors, for shardctl, for HTTP
and for metrics. Each connection becomes a stream to the leader, which sees the client and not the
relay. Served here are clients that the leader has sent to the streams of this node
(`own_streams.py`), and checks of this node (`own_checks.py`). While nobody leads, or the leader is
silent, connections wait for LEADER_S_MAX, and probes for PROBE_S_MAX. Then HTTP is answered with
503, and all others are closed; front doors come again. When the record names another leader or
another term, all streams end, also those to a host that has vanished without a word. A call by HTTP
that had no answer yet gets 503, or 502 if it must not be made twice.

When this node begins to lead, its front doors come to its own controller. For other clients the
relay goes on until that controller listens, and calls that came before that are answered by it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management.tls_handshakes import Handshakes, TlsServer
from shardmq.broker.controller.nodes.pipe import PipeEnd
from shardmq.broker.controller.nodes.request_head import OwnService, RequestHead
from shardmq.cluster.streams import (
    CONTROL,
    METRICS,
    Address,
    NoStream,
    Opening,
    open_stream,
)

LEADER_S_MAX: Final = 10.0
# Probes and scrapes do not wait for longer than they usually allow.
PROBE_S_MAX: Final = 3.0
PROBES: Final = (b"GET /api/health", b"HEAD /api/health")
AGAIN_S: Final = 0.1
# The connections that one node relays at the same time, of which front doors have one each.
RELAYED_MAX: Final = 2048
BACKLOG: Final = 128


# Clients may make a call again that is answered so.
AGAIN: Final = b"503 Service Unavailable\r\nRetry-After: 1"
# Clients are to look first whether the call was carried out.
UNKNOWN: Final = b"502 Bad Gateway"


def _response(status: bytes, error: bytes, reason: bytes) -> bytes:
    body = b'{"error":"%b","reason":"%b"}' % (error, reason)
    return (
        b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    )


LOST: Final = (
    b"leader_lost",
    b"the node that leads has ended meanwhile; it may have carried out the call",
)
NO_LEADER: Final = _response(AGAIN, b"no_leader", b"no node of the cluster leads at present")
SILENT: Final = _response(AGAIN, b"no_leader", b"the node that leads does not answer")
CUT_OFF: Final = _response(AGAIN, *LOST)
CUT_OFF_CHANGE: Final = _response(UNKNOWN, *LOST)
# What these do twice is what they do once. But each DELETE with a count purges more messages.
REPEATABLE: Final = re.compile(rb"(GET|HEAD|OPTIONS|PUT) |DELETE (?!\S*[?&]count=)\S* ")


def cut_off(asked: bytes) -> bytes:
    """Return the response to a call whose leader was lost before it has answered.

    asked: the beginning of the call. Nobody knows whether the call was carried out.
    """
    return CUT_OFF if REPEATABLE.match(asked) else CUT_OFF_CHANGE


log = logging.getLogger(__name__)


class Relay:
    """The listening sockets of a node that does not lead, and its streams to the leader.

    leader: waits up to so many seconds for a leader; returns its address, or None.
    opening: makes the opening of a stream, from the service and the two ends of the client.
    own: what this node serves itself to clients who come by HTTP, by the service.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        leader: Callable[[float], Awaitable[Address | None]],
        opening: Callable[[str, Address | None, Address | None], Opening],
        limits: Callable[[], HttpLimits],
        own: Mapping[str, Sequence[OwnService]] = MappingProxyType({}),
    ) -> None:
        self._own = own
        self._tls = tls
        self._leader = leader
        self._opening = opening
        self._limits = limits
        self._servers: list[tuple[str, asyncio.AbstractServer | TlsServer]] = []  # by service
        self._ends: dict[PipeEnd, str] = {}  # with their services
        self._joining: set[asyncio.Task[None]] = set()
        self._logged = ""  # why the last stream could not be opened
        self._lead: tuple[str, int] | None = None  # the leader and the term that streams are of
        self.handshakes = Handshakes()

    async def listen_unix(self, path: Path, service: str, mode: int) -> None:
        path.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_unix_server(
            self._protocol(service), path, backlog=BACKLOG
        )
        os.chmod(path, mode)
        self._servers.append((service, server))

    async def listen(
        self, listening: socket.socket, service: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """Relay what comes to a socket that the supervisor has bound."""
        if tls is None:
            server = await asyncio.get_running_loop().create_server(
                self._protocol(service), sock=listening, backlog=BACKLOG
            )
            self._servers.append((service, server))
            return
        listening.listen(BACKLOG)
        protocol = self._protocol(service)
        serving = TlsServer(listening, tls, protocol, self.handshakes, self._limits)
        self._servers.append((service, serving))

    def lead_begins(self, leader: str, term: int) -> None:
        """Leave the front doors of this node to its own controller, which is about to lead."""
        self._stop_listening([CONTROL])
        self.led_by(leader, term)
        for end, service in list(self._ends.items()):
            if service == CONTROL:
                end.transport.abort()

    def lead_has_begun(self) -> None:
        """Take no more connections, as the controller of this node listens."""
        self._stop_listening({service for service, _ in self._servers})

    def _stop_listening(self, services: Collection[str]) -> None:
        """Stop to listen for these services. TLS handshakes that are under way go on."""
        for service, server in self._servers:
            if service in services:
                server.stop() if isinstance(server, TlsServer) else server.close()
        self._servers = [each for each in self._servers if each[0] not in services]

    async def close(self) -> None:
        self.lead_has_begun()
        self.handshakes.end_all()
        for task in self._joining:
            task.cancel()
        for end in list(self._ends):
            end.transport.abort()
        while self._ends:
            await asyncio.sleep(0)

    def led_by(self, leader: str, term: int) -> None:
        """Take the leader and the term of the record. Streams to any other one end at once."""
        if self._lead == (leader, term):
            return
        if self._lead is not None:
            for end in list(self._ends):
                end.abort_joined()
        self._lead = leader, term

    def _protocol(self, service: str) -> Callable[[], asyncio.Protocol]:
        unanswered = None if service == CONTROL else cut_off
        piped = partial(PipeEnd, partial(self._accepted, service), self._ended, unanswered)
        if service == CONTROL:
            return piped
        return partial(RequestHead, self._own.get(service, ()), piped)

    def _accepted(self, service: str, end: PipeEnd) -> None:
        self._ends[end] = service
        if len(self._ends) > RELAYED_MAX:
            end.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._join(service, end))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _ended(self, end: PipeEnd) -> None:
        del self._ends[end]

    async def _join(self, service: str, end: PipeEnd) -> None:
        """Join a connection with a stream to the leader, if it is found in time."""
        loop = asyncio.get_running_loop()
        is_probe = service == METRICS or end.early.startswith(PROBES)
        until = loop.time() + (PROBE_S_MAX if is_probe else LEADER_S_MAX)
        opening = self._opening(service, *_ends_of(end.transport))
        while not end.is_over:
            address = await self._leader(until - loop.time())
            if end.is_over:
                return
            if address is None:
                self._refuse(service, end, NO_LEADER)
                return
            far, lead = PipeEnd(), self._lead
            try:
                async with asyncio.timeout_at(until):
                    await open_stream(address, self._tls, opening, far)
            except (NoStream, TimeoutError) as error:
                why = str(error) or "no answer in time"
                if why != self._logged:
                    self._logged = why
                    log.warning("no stream to the leader at %s:%d: %s", *address, why)
                if loop.time() >= until:
                    self._refuse(service, end, SILENT)
                    return
                await asyncio.sleep(AGAIN_S)
                continue
            self._logged = ""
            if end.is_over:
                far.transport.abort()
            elif lead != self._lead:  # it was replaced while the stream was opened
                far.transport.abort()
                continue
            else:
                end.join(far)
            return

    def _refuse(self, service: str, end: PipeEnd, response: bytes) -> None:
        if service != CONTROL and not end.is_over:
            end.transport.write(response)
        end.transport.close()


def _ends_of(transport: asyncio.Transport) -> tuple[Address | None, Address | None]:
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    return (
        (peer[0], peer[1]) if isinstance(peer, tuple) else None,
        (own[0], own[1]) if isinstance(own, tuple) else None,
    )
