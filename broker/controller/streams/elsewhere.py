"""The streams that lie on other nodes of a cluster, as the leader reaches them.

Rows go to clients straight from the node that has them: the leader signs a ticket and names that
node (`url`), which may be one that follows (`follower`). The leader itself asks the node where
streams begin and end, and has its reader look for a time, or read for a client who cannot be sent
there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

import msgspec

from shardmq.broker.controller.streams.boards import Wanted, have_gone_on
from shardmq.broker.controller.streams.stream_reader import FarWay, ReaderConnection, ReaderLost
from shardmq.broker.controller.streams.tickets import Tickets
from shardmq.cluster.records import Node
from shardmq.cluster.streams import RANGES, READER, NoStream
from shardmq.shardd.wire.board import Range
from shardmq.shardd.wire.reader_protocol import Scan

ANSWER_S_MAX: Final = 2.0
WAIT_S_MAX: Final = 0.5  # for news of a stream, at the node that has it
# A node that could not be asked is asked again after this.
AGAIN_S: Final = 0.1
# The streams to one node that are kept for the next question.
IDLE_MAX: Final = 4
# The path of a range of rows; a ticket follows.
ROWS_PATH: Final = "/stream-rows/"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

log = logging.getLogger(__name__)


class RangesAsked(msgspec.Struct, frozen=True, array_like=True):
    """A line to a node, which answers with a line: the ranges of these streams by id.

    The node answers when a stream goes on, but not later than after `wait_s` seconds.
    """

    wanted: list[Wanted]
    wait_s: float = 0.0


_ranges = msgspec.json.Decoder(dict[int, Range])


class Copies(Protocol):
    """The copies of shards, of which nodes that follow may read."""

    def in_sync(self, shard: int) -> Collection[str]:
        """Return the names of the nodes that have all of a shard, as far as this node knows."""

    async def own(self, shard: int) -> str:
        """Return the name of the copy of this node; "" unless the copy has all of the shard.

        A name says that the copy has all that was confirmed before the call.
        """

    def reader(self) -> AbstractAsyncContextManager[ReaderConnection]:
        """Connect to the reader of this node. Raises OSError when it is not there."""


class Elsewhere:
    """The nodes that have the streams of a cluster.

    own: the number of this node.
    nodes: the nodes that are alive, and `owners` the number of the node that has a shard; both are
        kept in step by somebody else.
    connect: opens a stream to a node for a service. Raises NoStream.
    copies: those of shards, if nodes that follow may be read.
    """

    def __init__(
        self,
        own: int,
        tickets: Tickets,
        nodes: Mapping[int, Node],
        owners: Mapping[int, int],
        connect: Callable[[Node, str], Awaitable[Connection]],
        copies: Copies | None = None,
    ) -> None:
        self.tickets = tickets
        self.copies = copies
        self._own = own
        self._nodes = nodes
        self._owners = owners
        self._connect = connect
        self._idle: dict[str, list[Connection]] = {}  # by the name of the node
        self._asking: set[asyncio.Task[dict[int, Range]]] = set()
        self._logged: dict[str, str] = {}  # why a node could not be asked at last, by its name

    def is_here(self, shard: int) -> bool:
        return self._owners.get(shard, self._own) == self._own

    def holder(self, shard: int) -> Node | None:
        """Return the node that has a shard; None if it is not alive."""
        return self._nodes.get(self._owners.get(shard, self._own))

    def follower(self, shard: int, scheme: str, queue_id: int, nearest: str) -> Node | None:
        """Return a node that follows in sync and speaks a scheme, to read a stream at.

        That is the node `nearest` if it follows, and else the same one for each call, because the
        pages of the stream are in its memory then.
        """
        if self.copies is None:
            return None
        leader, in_sync = self.holder(shard), self.copies.in_sync(shard)
        found = [
            node
            for _, node in sorted(self._nodes.items())
            if node is not leader and node.name in in_sync and scheme in node.ports
        ]
        if not found:
            return None
        near = (node for node in found if node.name == nearest)
        return next(near, found[queue_id % len(found)])

    # -- for clients -------------------------------------------------------------------------------

    def addresses(self) -> dict[str, list[str]]:
        """Return where the HTTP API of each node that is alive is found, by its name."""
        return {
            node.name: [
                f"{scheme}://{_authority(node, scheme)}"
                for scheme in ("http", "https")
                if scheme in node.ports
            ]
            for _, node in sorted(self._nodes.items())
        }

    def url(self, node: Node, scheme: str, id: str, scan: Scan) -> str | None:
        """Return where a client finds the rows; None if the node does not speak the scheme."""
        if scheme not in node.ports:
            return None
        ticket = self.tickets.text(id, scan, time.time())
        return f"{scheme}://{_authority(node, scheme)}{ROWS_PATH}{ticket}"

    # -- questions to nodes ------------------------------------------------------------------------

    async def ranges(self, wanted: Iterable[Wanted]) -> dict[int, Range]:
        """Return the ranges of streams by id, without those whose node cannot say them now."""
        found: dict[int, Range] = {}
        asked = (self._ask(RangesAsked(of), node) for node, of in self.by_node(wanted))
        for ranges in await asyncio.gather(*asked):
            found |= ranges
        return found

    def by_node(self, wanted: Iterable[Wanted]) -> list[tuple[Node, list[Wanted]]]:
        """Return the nodes that have these streams and are alive, with the streams of each."""
        found: dict[int, list[Wanted]] = {}
        for each in wanted:
            number = self._owners.get(each.shard, self._own)
            if number in self._nodes:
                found.setdefault(number, []).append(each)
        return [(self._nodes[number], of) for number, of in found.items()]

    def begin(self, asked: RangesAsked, node: Node) -> asyncio.Task[dict[int, Range]]:
        """Ask a node, in a task that goes on when nobody waits for it."""
        task = asyncio.create_task(self._ask(asked, node))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _ask(self, asked: RangesAsked, node: Node) -> dict[int, Range]:
        """Return what a node answers; nothing if it does not, which is logged."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(asked.wait_s + ANSWER_S_MAX):
                connection = reader, writer = await self._connected(node)
                writer.write(msgspec.json.encode(asked) + b"\n")
                found = _ranges.decode(await reader.readline())
        except (NoStream, OSError, msgspec.MsgspecError) as error:
            self._tell(node, f"{error or 'no answer in time'}")
            await asyncio.sleep(min(AGAIN_S, asked.wait_s))
            return {}
        else:
            self._logged.pop(node.name, None)
            idle = self._idle.setdefault(node.name, [])
            if len(idle) < IDLE_MAX:
                idle.append(connection)
                connection = None
            return found
        finally:
            if connection is not None:
                connection[1].transport.abort()

    async def _connected(self, node: Node) -> Connection:
        """Return a stream to a node for one question, which may be an older one."""
        idle = self._idle.get(node.name, [])
        while idle:
            reader, writer = idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
        return await self._connect(node, RANGES)

    def _tell(self, node: Node, why: str) -> None:
        if self._logged.get(node.name) != why:
            self._logged[node.name] = why
            log.warning("%s does not say where its streams end: %s", node.name, why)

    @asynccontextmanager
    async def reader(self, shard: int) -> AsyncIterator[ReaderConnection]:
        """Connect to the reader of the node that has a shard. Raises ReaderLost."""
        node = self.holder(shard)
        if node is None:
            raise ReaderLost(f"the node that has shard {shard} is away")
        try:
            reader, writer = await self._connect(node, READER)
        except NoStream as error:
            raise ReaderLost(f"{node.name}: {error}") from None
        try:
            yield ReaderConnection(FarWay(reader, writer))
        except ConnectionError:
            raise ReaderLost(f"{node.name}: the connection was lost") from None
        finally:
            writer.transport.abort()


class Watch:
    """Streams of other nodes that somebody waits for.

    The last questions go on for WAIT_S_MAX when nobody waits any more, so that the streams to the
    nodes can be used again.
    """

    def __init__(self, elsewhere: Elsewhere) -> None:
        self._elsewhere = elsewhere
        self._asked: dict[str, tuple[list[Wanted], asyncio.Task[dict[int, Range]]]] = {}

    def has_news(self, wanted: Iterable[Wanted]) -> bool:
        """Return whether a stream has gone on; ask the nodes that are not being asked."""
        for node, of in self._elsewhere.by_node(wanted):
            known, task = self._asked.get(node.name, ([], None))
            if task is not None and known == of:
                if not task.done():
                    continue
                if have_gone_on(of, task.result()):
                    return True
            self._asked[node.name] = of, self._elsewhere.begin(RangesAsked(of, WAIT_S_MAX), node)
        return False


def _authority(node: Node, scheme: str) -> str:
    host = f"[{node.address}]" if ":" in node.address else node.address
    return f"{host}:{node.ports[scheme]}"
