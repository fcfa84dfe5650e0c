"""A node that does not lead tells the leader its facts, as lines of JSON.

To gather them takes some milliseconds of CPU. So they are told each second only as long as there is
news that the leader acts on or that somebody waits for, such as an alarm or a process that ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, cast

import msgspec

from shardmq.broker.controller.node_facts import NodeFacts
from shardmq.cluster.streams import Address, NoStream

LOOK_S: Final = 1.0
# Without news: as often as the leader samples numbers.
EACH_S: Final = 5.0
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
    news: Callable[[], Hashable] = lambda: None,
) -> None:
    """Tell the leader the facts of this node until cancelled.

    leader: waits up to so many seconds for a leader; returns its address, or None.
    connect: opens a stream to an address for a protocol. Raises NoStream.
    lead: returns the leader and the term of the record; a stream to any other one ends.
    news: looks at what must be told soon; facts are told when it returns something else.
    """
    clock, telling, logged = asyncio.get_running_loop().time, _Telling(), ""
    told, due_at, told_news = lead(), 0.0, news()
    try:
        while True:
            if told != (told := lead()) and telling.transport is not None:
                telling.transport.abort()
                telling = _Telling()
            if telling.transport is None and (address := await leader(LOOK_S)) is not None:
                try:
                    await connect(address, telling)
                    due_at = 0.0
                except NoStream as error:
                    if str(error) != logged:
                        logged = str(error)
                        log.warning("no stream to the leader at %s:%d: %s", *address, error)
            if told_news != (told_news := news()):
                due_at = 0.0
            transport, now = telling.transport, clock()
            # Facts that the leader has not taken yet are not told twice.
            if transport is not None and now >= due_at and not transport.get_write_buffer_size():
                transport.write(msgspec.json.encode(facts()) + b"\n")
                due_at = now + EACH_S
            await asyncio.sleep(LOOK_S)
    finally:
        if telling.transport is not None:
            telling.transport.close()
