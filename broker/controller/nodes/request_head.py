"""The head of the first request of a connection by HTTP to a node that does not lead.

The head decides who has the connection: a service of this node, or the relay to the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from aiohttp import web

# Who sends a request so slowly is handed on to the leader, who has bounds for that.
HEAD_S_MAX: Final = 1.0
HEAD_BYTES_MAX: Final = 16 << 10
HEAD_END: Final = b"\r\n\r\n"


async def close_behind(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Let a connection end with its response: any other request is one for the leader."""
    response.force_close()
    response.headers["Connection"] = "close"


class OwnService(Protocol):
    """A service of this node for some requests by HTTP.

    begins: the bytes with which such requests begin.
    """

    begins: tuple[bytes, ...]

    def serving(self, head: bytes) -> asyncio.Protocol | None:
        """Return the protocol of a connection with this head; None if it is for the leader."""


class RequestHead(asyncio.Protocol):
    """A connection until the head of its first request decides which protocol it gets.

    own: the services of this node; any other request gets `otherwise`.
    """

    def __init__(
        self, own: Sequence[OwnService], otherwise: Callable[[], asyncio.Protocol]
    ) -> None:
        self._own = own
        self._otherwise = otherwise
        self._head = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(HEAD_S_MAX, self._give_on)

    def connection_lost(self, error: Exception | None) -> None:
        self._late.cancel()

    def data_received(self, data: bytes) -> None:
        self._head += data
        may_be_own = any(
            self._head[: len(begin)] == begin[: len(self._head)]
            for each in self._own
            for begin in each.begins
        )
        if not may_be_own or HEAD_END in self._head or len(self._head) > HEAD_BYTES_MAX:
            self._give_on()

    def _give_on(self) -> None:
        self._late.cancel()
        head, protocol = bytes(self._head), None
        if HEAD_END in head:
            found = (each.serving(head) for each in self._own if head.startswith(each.begins))
            protocol = next((each for each in found if each is not None), None)
        protocol = protocol or self._otherwise()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if head:
            protocol.data_received(head)
