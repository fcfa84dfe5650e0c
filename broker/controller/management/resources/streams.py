"""/api/streams: the streams, their offsets, and their messages as Arrow (see broker/ARROW.md).

The reader process writes messages straight to the client's socket. Only with TLS or HTTP/1.0 their
bytes pass through this process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import HttpVersion11, web

from shardmq.broker.controller.management.api_error import ApiError, bad_request, not_found
from shardmq.broker.controller.management.call import NUMBER_MAX, Call, Route, number
from shardmq.broker.controller.management.resources.exchanges import exchange_name
from shardmq.broker.controller.management.responses.json_body import json_response
from shardmq.broker.controller.peers import front_door
from shardmq.broker.controller.streams import stream_reader
from shardmq.broker.controller.streams.stream_ranges import (
    StreamShard,
    exchange_of,
    names_of,
    parts_of,
)
from shardmq.broker.controller.streams.stream_reader import ReaderLost, absence, connected
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.checks import is_hidden_queue
from shardmq.broker.shared.rights import Read
from shardmq.shardd.wire.reader_protocol import (
    BODY_BYTES_MAX,
    COLUMNS,
    LENGTH,
    Answer,
    Find,
    Publish,
    Scan,
)

CONTENT_TYPE = "application/vnd.apache.arrow.stream"
WAIT_MS_MAX = 30_000
PATTERN_BYTES_MAX = 255
COLUMNS_DEFAULT = COLUMNS[:7]
RETRY_AFTER_S = 1
# A client that takes nothing for this long is cut off.
STALLED_S_MAX = 60.0
# The head of the response must have left this process by then, or the reader does not write.
HAND_OVER_S_MAX = 1.0


async def get_all(call: Call) -> list[dict[str, Any]]:
    """List streams and exchanges whose shard queues are streams."""
    call.knows_only(())
    found = []
    for vhost in call.vhosts():
        for name in names_of(vhost):
            if call.may(Read(vhost.name, name)):
                queue = vhost.queues.get(name)
                kind = "exchange" if queue is None else "queue"
                shards = len(parts_of(vhost, name))
                shown: dict[str, Any] = {
                    "name": name,
                    "vhost": vhost.name,
                    "kind": kind,
                    "shards": shards,
                }
                if queue is not None and (exchange := exchange_of(vhost, queue)) is not None:
                    shown["exchange"] = exchange
                found.append(shown)
    return found


async def get(call: Call) -> dict[str, Any]:
    """Show the shards of a stream with their offsets; `wait_ms` waits until there is more."""
    call.knows_only(("after", "wait_ms"))
    vhost, name, parts = asked_stream(call)
    wait_ms = _number(call, "wait_ms", WAIT_MS_MAX)
    if wait_ms:
        after = _after(call)

        def gone_on() -> bool:
            ranges = ((part.number, range_of(call, part)) for part in parts_of(vhost, name))
            return any(
                found is not None and found.next > after.get(index, -1) for index, found in ranges
            )

        await call.context.streams.wait_until(gone_on, wait_ms / 1000)
        parts = parts_of(vhost, name)
        if not parts:
            raise _no_stream(vhost, name)
    there = {id_of(call, part) for part in parts}
    ended = [] if call.context.ended is None else call.context.ended.of(vhost.name, name)
    return {
        "name": name,
        "vhost": vhost.name,
        "kind": "queue" if name in vhost.queues else "exchange",
        "id": id_of(call, parts[0]),
        "shards": [
            {
                "shard": part.number,
                "queue": part.queue.name,
                "id": id_of(call, part),
                "first": None if found is None else found.first,
                "next": None if found is None else found.next,
                "state": "down" if found is None else "running",
            }
            for part in parts
            for found in [range_of(call, part)]
        ],
        "ended": [shown for shown in ended if shown["id"] not in there],
    }


async def offset_for_time(call: Call) -> dict[str, Any]:
    """Show the offsets at which messages of a time begin."""
    call.knows_only(("timestamp",))
    vhost, _, parts = asked_stream(call)
    timestamp = _number(call, "timestamp")
    if timestamp is None:
        raise bad_request("timestamp: missing, milliseconds since 1970")
    shards = {}
    for part in parts:
        async with _reader(call) as reader:
            find = Find(vhost.name, part.queue.shard, part.queue.id, timestamp)
            answer = await reader.ask(find)
        if answer.status != 200:
            raise ApiError(answer.status, answer.error, answer.reason)
        shards[str(part.number)] = answer.more["offset"]
    return {"id": id_of(call, parts[0]), "timestamp": timestamp, "shards": shards}


async def get_arrow(call: Call) -> web.StreamResponse:
    """Read messages of a shard of a stream as rows of Arrow."""
    call.knows_only(("from", "to", "columns", "filter", "id"))
    vhost, name, parts = asked_stream(call)
    part = next((part for part in parts if str(part.number) == call.part("shard")), None)
    if part is None:
        raise not_found(f"'{name}' has no shard {call.part('shard')[:20]}, but {len(parts)} shards")
    id = id_of(call, part)
    wanted = call.request.query.get("id")
    if wanted is not None and wanted != id:
        answer = Answer(
            409,
            "conflict",
            f"the stream with the id {wanted} is gone, one with its name has another",
        )
        return _refused(answer, {"id": id})
    scan = Scan(
        vhost.name,
        part.queue.shard,
        part.queue.id,
        name,
        part.number,
        _columns(call),
        _number(call, "from"),
        _number(call, "to"),
        **_filters(call),
    )
    async with _reader(call) as reader:
        answer = await reader.ask(scan)
        if answer.status != 200:
            return _refused(answer, {"id": id})
        return await _send(call, reader, answer, id)


async def post_arrow(call: Call) -> web.StreamResponse:
    """Publish the rows of an Arrow stream to an exchange."""
    call.knows_only(("producer", "seq", "routing_key", "mandatory"))
    vhost = _vhost(call)
    query, doors = call.request.query, call.context.links.doors()
    if not doors:
        raise ApiError(503, "unavailable", "no front door is there")
    door = front_door.socket_path(call.context.config.runtime_dir, random.choice(doors).number)
    producer, sequence = query.get("producer"), _number(call, "seq")
    if (producer is None) != (sequence is None):
        raise bad_request("producer and seq: one makes no sense without the other")
    if query.get("mandatory", "true") not in ("true", "false"):
        raise bad_request("mandatory: true or false")
    asked = Publish(
        call.user.name,
        vhost.name,
        door,
        exchange_name(call.part("exchange")),
        query.get("routing_key", ""),
        query.get("mandatory", "true") == "true",
        producer,
        sequence or 0,
    )
    answer = await _publish(call, asked)
    return json_response(answer.more) if answer.status == 200 else _refused(answer, {})


async def _publish(call: Call, asked: Publish) -> Answer:
    call.must_be_unpacked()
    too_large = ApiError(413, "too_large", f"at most {BODY_BYTES_MAX} bytes of rows in a call")
    if (call.request.content_length or 0) > BODY_BYTES_MAX:
        raise too_large
    async with _reader(call) as reader:
        await reader.send(asked)
        total = 0
        async for data in call.request.content.iter_any():
            total += len(data)
            if total > BODY_BYTES_MAX:
                raise too_large
            if data:
                await reader.write(LENGTH.pack(len(data)) + data)
        await reader.write(LENGTH.pack(0))
        return await reader.answer()


@asynccontextmanager
async def _reader(call: Call) -> AsyncIterator[stream_reader.ReaderConnection]:
    """Connect to the reader process, and turn its failures into ApiError."""
    try:
        async with connected(call.context.config.runtime_dir) as reader:
            yield reader
    except (ConnectionError, FileNotFoundError):
        status, reason = absence()
        error = "not_implemented" if status == 501 else "unavailable"
        raise ApiError(status, error, reason) from None
    except (ReaderLost, TimeoutError, OSError) as failure:
        raise ApiError(
            503, "unavailable", f"the reader of streams: {failure or 'it ended'}"
        ) from None


async def _send(
    call: Call, reader: stream_reader.ReaderConnection, answer: Answer, id: str
) -> web.StreamResponse:
    request = call.request
    headers = {f"Shardmq-{key.title()}": str(value) for key, value in answer.more.items()}
    response = web.StreamResponse(headers={"Shardmq-Stream-Id": id} | headers)
    response.content_type = CONTENT_TYPE
    if request.version >= HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(request)
    transport = request.transport
    try:
        await response.write(answer.begin)
        if transport is not None and await _may_hand_over(request, transport):
            await reader.hand_over(transport.get_extra_info("socket").fileno())
        else:
            async for data in reader.parts():
                async with asyncio.timeout(STALLED_S_MAX):
                    await response.write(data)
    except (ReaderLost, TimeoutError, OSError):
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


def _refused(answer: Answer, more: dict[str, Any]) -> web.Response:
    body = {"error": answer.error, "reason": answer.reason, **answer.more, **more}
    headers = {"Retry-After": str(RETRY_AFTER_S)} if answer.status == 503 else None
    return json_response(body, answer.status, headers)


# -- streams ---------------------------------------------------------------------------------------


def asked_stream(call: Call) -> tuple[Vhost, str, list[StreamShard]]:
    """Return the stream in the path, if this user may read it."""
    vhost, name = _vhost(call), call.part("name")
    call.must(Read(vhost.name, name))
    parts = parts_of(vhost, name)
    if not parts:
        raise _no_stream(vhost, name)
    return vhost, name, parts


def _vhost(call: Call) -> Vhost:
    """Return the vhost in the path, if this user may enter it, or raise an error with its name."""
    if call.catalog.vhost(call.part("vhost")) is None:
        raise not_found(f"there is no vhost '{call.part('vhost')}'")
    return call.vhost_to_change()


def _no_stream(vhost: Vhost, name: str) -> ApiError:
    """Return an error that says why the name is no stream."""
    queue = vhost.queues.get(name)
    if queue is not None and not is_hidden_queue(name):
        kind = queue.arguments.get("x-queue-type", "classic")
        return not_found(f"queue '{name}' in vhost '{vhost.name}' is of type {kind}, not a stream")
    if queue is None and name in vhost.exchanges:
        return not_found(
            f"exchange '{name}' in vhost '{vhost.name}' has no shards that are streams"
        )
    return not_found(f"there is no queue or exchange '{name}' in vhost '{vhost.name}'")


def id_of(call: Call, part: StreamShard) -> str:
    return call.context.streams.id_of(call.context.config, part.queue)


def range_of(call: Call, part: StreamShard) -> Any:
    return call.context.streams.range_of(call.context.config, part.queue)


# -- parameters ------------------------------------------------------------------------------------


def _number(call: Call, name: str, most: int = NUMBER_MAX) -> int | None:
    text = call.request.query.get(name, "")
    if not text:
        return None
    return number(name, text, most=most)


def _after(call: Call) -> dict[int, int]:
    found = {}
    for pair in filter(None, call.request.query.get("after", "").split(",")):
        shard, colon, offset = pair.partition(":")
        if not (
            colon and shard.isdecimal() and offset.isdecimal() and pair.isascii() and len(pair) < 40
        ):
            raise bad_request(f"after: '{pair[:40]}' is not SHARD:OFFSET")
        found[int(shard)] = int(offset)
    return found


def _columns(call: Call) -> list[str]:
    text = call.request.query.get("columns")
    if not text:
        return list(COLUMNS_DEFAULT)
    wanted = {name.strip() for name in text.split(",")}
    for name in wanted:
        if name not in COLUMNS:
            raise bad_request(
                f"columns: there is no '{name[:100]}'; there are {', '.join(COLUMNS)}"
            )
    return [name for name in COLUMNS if name in wanted]


FILTERS = {
    "routing_key": "pattern",
    "key": "key",
    "exchange": "exchange",
    "since": "since",
    "until": "until",
}


def _filters(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in call.request.query.getall("filter", []):
        name, colon, value = text.partition(":")
        if not colon or name not in FILTERS:
            raise bad_request(
                f"filter: '{text[:100]}' is not NAME:VALUE with one of {', '.join(FILTERS)}"
            )
        if FILTERS[name] in found:
            raise bad_request(f"filter: {name} is there twice")
        if name in ("since", "until"):
            found[name] = number(f"filter: {name}", value)
        else:
            if len(value.encode()) > PATTERN_BYTES_MAX:
                raise bad_request(f"filter: {name}: at most {PATTERN_BYTES_MAX} bytes")
            found[FILTERS[name]] = value
    return found


ROUTES = [
    Route("GET", "/api/streams", get_all),
    Route("GET", "/api/streams/{vhost}", get_all),
    Route("GET", "/api/streams/{vhost}/{name}", get),
    Route("GET", "/api/streams/{vhost}/{name}/offset-for-time", offset_for_time),
    Route("GET", "/api/streams/{vhost}/{name}/{shard}/arrow", get_arrow),
    Route("POST", "/api/exchanges/{vhost}/{exchange}/arrow", post_arrow),
]
