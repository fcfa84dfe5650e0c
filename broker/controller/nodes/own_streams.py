"""The streams of this node, for the leader and for clients that the leader has sent here.

The leader asks where the streams begin and end, and has the reader of this node as its own. A
client comes with a ticket (`streams/tickets.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from shardmq.broker.controller.management import csrf, http_connections
from shardmq.broker.controller.nodes.pipe import PipeEnd
from shardmq.broker.controller.nodes.request_head import close_behind
from shardmq.broker.controller.streams.boards import Boards, have_gone_on, wait_until
from shardmq.broker.controller.streams.elsewhere import ROWS_PATH, Elsewhere, RangesAsked
from shardmq.broker.controller.streams.scan_responses import add_rows_route
from shardmq.broker.controller.streams.stream_reader import absence, connected
from shardmq.broker.controller.streams.tickets import Tickets
from shardmq.cluster.streams import RANGES, NoStream
from shardmq.shardd.wire.reader_protocol import socket_path

# A question about the thousands of shards of a stream exchange is a long line.
LINE_BYTES_MAX: Final = 1 << 20
REQUEST: Final = b"GET " + ROWS_PATH.encode()
SHUTDOWN_S_MAX: Final = 2.0

log = logging.getLogger(__name__)
_asked = msgspec.json.Decoder(RangesAsked)


class OwnStreams:
    """Serves the streams of this node; `start` comes first.

    has_shard: returns whether a shard is one of this node.
    elsewhere: the nodes that lead the shards of which this node has copies.
    """

    begins: tuple[bytes, ...] = (REQUEST,)

    def __init__(
        self,
        runtime_dir: str,
        tickets: Tickets,
        has_shard: Callable[[int], bool],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._may_read_copies = elsewhere is not None
        self._runtime_dir = runtime_dir
        self._tickets = tickets
        self._has_shard = has_shard
        self._boards = Boards()
        self._tasks: set[asyncio.Task[None]] = set()
        app = web.Application()
        app.on_response_prepare.append(csrf.add_headers)
        app.on_response_prepare.append(close_behind)
        add_rows_route(app, tickets, lambda shard: connected(runtime_dir), elsewhere)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=SHUTDOWN_S_MAX, **http_connections.SERVER
        )

    async def start(self) -> None:
        await self._runner.setup()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- for the leader ----------------------------------------------------------------------------

    def connection(self, service: str) -> asyncio.Protocol:
        """Return the protocol of a stream from the leader. Raises NoStream."""
        if service == RANGES:
            reader = asyncio.StreamReader(LINE_BYTES_MAX)
            return asyncio.StreamReaderProtocol(
                reader, lambda reader, writer: self._begin(self._tell_ranges(reader, writer))
            )
        if not Path(socket_path(self._runtime_dir)).exists():
            raise NoStream(absence()[1])
        return PipeEnd(lambda end: self._begin(self._join(end)))

    async def _tell_ranges(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while line := await reader.readline():
                asked = _asked.decode(line)
                if asked.wait_s:
                    await wait_until(partial(self._have_gone_on, asked), asked.wait_s)
                ranges = self._boards.ranges(self._runtime_dir, asked.wanted)
                writer.write(msgspec.json.encode(ranges) + b"\n")
                await writer.drain()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.debug("a stream about ranges has ended: %r", error)
        finally:
            writer.close()

    def _have_gone_on(self, asked: RangesAsked) -> bool:
        return have_gone_on(asked.wanted, self._boards.ranges(self._runtime_dir, asked.wanted))

    async def _join(self, end: PipeEnd) -> None:
        far = PipeEnd()
        try:
            path = socket_path(self._runtime_dir)
            await asyncio.get_running_loop().create_unix_connection(lambda: far, path)
        except OSError as error:
            log.warning("the reader of streams: %s", error)
            end.transport.abort()
        else:
            end.join(far)

    # -- for clients -------------------------------------------------------------------------------

    def serving(self, head: bytes) -> asyncio.Protocol | None:
        """Return the protocol for a ticket of a stream of this node; None for any other call."""
        text = head.removeprefix(REQUEST).partition(b" ")[0]
        ticket = self._tickets.read(text.decode("ascii", "replace"), time.time())
        if ticket is None:
            return None
        is_of_copy = ticket.scan.there is not None and self._may_read_copies
        if not (is_of_copy or self._has_shard(ticket.scan.shard)):
            return None
        assert self._runner.server is not None, "the runner is set up"
        return self._runner.server()
