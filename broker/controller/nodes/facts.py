"""A node that does not lead tells the leader its facts each second, as lines of JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, cast

import msgspec

from shardmq.broker.controller.node_facts import NodeFacts
from shardmq.cluster.streams import Address, NoStream

EACH_S: Final = 1.0
# A node with hundreds of processes takes some 100 KB.
FACTS_BYTES_MAX: Final = 4 << 20

log = logging.getLogger(__name__)


class FactsTold(asyncio.Protocol):
    """The end at the leader; `tell` takes the facts."""

    def __init__(self, tell: Callable[[NodeFacts], None]) -> None:
        self._tell = tell
        self._line = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._line += data
        if b"\n" in data:
            *lines, rest = self._line.split(b"\n")
            self._line = rest
            try:
                self._tell(msgspec.json.decode(lines[-1], type=NodeFacts))
            except msgspec.MsgspecError as error:
                log.warning("facts of a node cannot be read: %s", error)
                self._transport.abort()
        elif len(self._line) > FACTS_BYTES_MAX:
            self._transport.abort()


class _Telling(asyncio.Protocol):
    """The end at the node that tells."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None


async def tell_facts(
    facts: Callable[[], NodeFacts],
    leader: Callable[[float], Awaitable[Address | None]],
    connect: Callable[[Address, asyncio.Protocol], Awaitable[object]],
    lead: Callable[[], tuple[str, int] | None] = lambda: None,
) -> None:
    """Tell the leader the facts of this node until cancelled.

    leader: waits up to so many seconds for a leader; returns its address, or None.
    connect: opens a stream to an address for a protocol. Raises NoStream.
    lead: returns the leader and the term of the record; a stream to any other one ends.
    """
    telling, logged = _Telling(), ""
    told = lead()
    try:
        while True:
            if told != (told := lead()) and telling.transport is not None:
                telling.transport.abort()
                telling = _Telling()
            if telling.transport is None and (address := await leader(EACH_S)) is not None:
                try:
                    await connect(address, telling)
                except NoStream as error:
                    if str(error) != logged:
                        logged = str(error)
                        log.warning("no stream to the leader at %s:%d: %s", *address, error)
            if telling.transport is not None and telling.transport.get_write_buffer_size() == 0:
                telling.transport.write(msgspec.json.encode(facts()) + b"\n")
            await asyncio.sleep(EACH_S)
    finally:
        if telling.transport is not None:
            telling.transport.close()
