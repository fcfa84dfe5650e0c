"""The HTTP response to a scan: rows of a stream as Arrow.

The reader process writes rows straight to the client's socket. Only with TLS, HTTP/1.0 or the
reader of another node their bytes pass through this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from shardmq.broker.controller.management.responses.json_body import json_response
from shardmq.broker.controller.streams.elsewhere import ROWS_PATH, Elsewhere
from shardmq.broker.controller.streams.stream_reader import (
    ReaderConnection,
    ReaderLost,
    ToReader,
    absence,
)
from shardmq.broker.controller.streams.tickets import Ticket, Tickets
from shardmq.shardd.wire.reader_protocol import NO_COPY, Answer, Scan

CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
RETRY_AFTER_S: Final = 1
# A client that takes nothing for this long is cut off.
STALLED_S_MAX: Final = 60.0
# The head of the response must have left this process by then, or the reader does not write.
HAND_OVER_S_MAX: Final = 1.0

log = logging.getLogger(__name__)


def add_rows_route(
    app: web.Application, tickets: Tickets, to_reader: ToReader, elsewhere: Elsewhere | None = None
) -> None:
    """Let clients read rows with the tickets that the leader of the cluster has given them.

    elsewhere: the copies of this node, and the nodes that lead the shards of these.
    """

    async def rows(request: web.Request) -> web.StreamResponse:
        ticket = tickets.read(request.match_info["ticket"], time.time())
        if ticket is None:
            reason = "the ticket is too old, or is none: ask for the rows anew"
            return refused(Answer(401, "not_authorised", reason), {})
        try:
            if ticket.scan.there is not None and elsewhere is not None:
                return await _of_copy(request, ticket, elsewhere)
            async with to_reader(ticket.scan.shard) as reader:
                return await respond(request, reader, ticket.scan, ticket.id)
        except (ReaderLost, OSError) as error:
            return refused(failure_of(error), {})

    app.router.add_get(f"{ROWS_PATH}{{ticket}}", rows, allow_head=False)


async def _of_copy(
    request: web.Request, ticket: Ticket, elsewhere: Elsewhere
) -> web.StreamResponse:
    """Send rows of the copy of this node; without one that has all, lead the client to the leader.

    Raises ReaderLost and OSError.
    """
    scan, id = ticket.scan, ticket.id
    if elsewhere.copies is not None and (name := await elsewhere.copies.own(scan.shard)):
        async with elsewhere.copies.reader() as reader:
            answer = await reader.ask(msgspec.structs.replace(scan, copy=name))
            if answer.status != NO_COPY:
                return await _send(request, reader, answer, id)
        log.info("rows of shard %d are read by its leader: %s", scan.shard, answer.reason)
    scan = msgspec.structs.replace(scan, there=None)
    node = elsewhere.holder(scan.shard)
    if node is None:
        raise ReaderLost(f"the node that leads shard {scan.shard} is away")
    is_here = elsewhere.is_here(scan.shard) and elsewhere.copies is not None
    url = None if is_here else elsewhere.url(node, request.scheme, id, scan)
    if url is not None:
        return json_response({"location": url}, 307, {"Location": url})
    here = elsewhere.copies.reader() if elsewhere.copies is not None and is_here else None
    async with here or elsewhere.reader(scan.shard) as reader:
        return await respond(request, reader, scan, id)


async def respond(
    request: web.Request, reader: ReaderConnection, scan: Scan, id: str
) -> web.StreamResponse:
    """Have the reader scan, and send what it gives. Raises ReaderLost and OSError before that."""
    return await _send(request, reader, await reader.ask(scan), id)


async def _send(
    request: web.Request, reader: ReaderConnection, answer: Answer, id: str
) -> web.StreamResponse:
    """Send what a reader gives that has answered a scan. Raises ReaderLost and OSError before."""
    if answer.status != 200:
        return refused(answer, {"id": id})
    headers = {f"Shardmq-{key.title()}": str(value) for key, value in answer.more.items()}
    response = web.StreamResponse(headers={"Shardmq-Stream-Id": id} | headers)
    response.content_type = CONTENT_TYPE
    if request.version >= HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(request)
    transport = request.transport
    try:
        await response.write(answer.begin)
        is_written = (
            transport is not None
            and await _may_hand_over(request, transport)
            and await reader.hand_over(transport.get_extra_info("socket").fileno())
        )
        if not is_written:
            async for data in reader.parts():
                async with asyncio.timeout(STALLED_S_MAX):
                    await response.write(data)
    except (ReaderLost, OSError):
        # Without the last chunk the client sees that the response is not complete.
        if transport is not None:
            transport.abort()
    return response


async def _may_hand_over(request: web.Request, transport: asyncio.Transport) -> bool:
    """Return whether the reader may write the rest to the client's socket.

    It may not with TLS, through another node or without chunks, or while bytes written here have
    not left this process.
    """
    is_plain = transport.get_extra_info("sslcontext") is None
    if not is_plain or transport.get_extra_info("socket") is None:
        return False
    if request.version < HttpVersion11:
        return False
    loop = asyncio.get_running_loop()
    end = loop.time() + HAND_OVER_S_MAX
    while loop.time() < end:
        await asyncio.sleep(0)  # uvloop writes at the end of a pass
        if transport.get_write_buffer_size() == 0:
            return not transport.is_closing()
        await asyncio.sleep(0.001)
    return False


def refused(answer: Answer, more: dict[str, Any]) -> web.Response:
    """Return the response to a call that the reader, or who asked it, has refused."""
    body = {"error": answer.error, "reason": answer.reason, **answer.more, **more}
    headers = {"Retry-After": str(RETRY_AFTER_S)} if answer.status == 503 else None
    return json_response(body, answer.status, headers)


def failure_of(error: ReaderLost | OSError) -> Answer:
    """Return the refusal of a call during which a reader was lost, or not reached."""
    if isinstance(error, ConnectionError | FileNotFoundError):
        status, reason = absence()
        return Answer(status, "not_implemented" if status == 501 else "unavailable", reason)
    return Answer(503, "unavailable", f"the reader of streams: {error or 'it ended'}")
