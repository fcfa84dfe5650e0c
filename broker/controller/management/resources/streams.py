"""/api/streams: the streams, their offsets, and their messages as Arrow (see broker/ARROW.md).

In a cluster a client who asks for rows is sent to the node that has them, with a ticket, unless it
has called that node and that node leads.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from shardmq.broker.controller.management.api_error import ApiError, bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.numbers import NUMBER_MAX, number
from shardmq.broker.controller.management.resources.exchanges import exchange_name
from shardmq.broker.controller.management.responses.json_body import json_response
from shardmq.broker.controller.streams.boards import Wanted
from shardmq.broker.controller.streams.scan_responses import failure_of, refused, respond
from shardmq.broker.controller.streams.stream_ranges import (
    StreamShard,
    exchange_of,
    names_of,
    partitions_of,
    parts_of,
)
from shardmq.broker.controller.streams.stream_reader import ReaderConnection, ReaderLost
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.checks import is_hidden_queue
from shardmq.broker.shared.rights import Read
from shardmq.shardd.wire.board import Range
from shardmq.shardd.wire.reader_protocol import (
    BODY_BYTES_MAX,
    COLUMNS,
    LENGTH,
    Answer,
    Find,
    Publish,
    Scan,
)

WAIT_MS_MAX = 30_000
PATTERN_BYTES_MAX = 255
STREAMS_SHOWN = 10  # of a super stream
COLUMNS_DEFAULT = COLUMNS[:7]


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

        def wanted() -> Iterator[Wanted]:
            for part in parts_of(vhost, name):
                yield Wanted(part.queue.shard, part.queue.id, after.get(part.number, -1))

        await call.context.streams.wait_for_more(call.context.config, wanted, wait_ms / 1000)
        parts = parts_of(vhost, name)
        if not parts:
            raise _no_stream(vhost, name)
    there = {id_of(call, part) for part in parts}
    ended = [] if call.context.ended is None else call.context.ended.of(vhost.name, name)
    ranges = await ranges_of(call, parts)
    shown: dict[str, Any] = {
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
            for found in [ranges.get(part.queue.id)]
        ],
        "ended": [shown for shown in ended if shown["id"] not in there],
    }
    if (elsewhere := call.context.streams.elsewhere) is not None:
        shown["nodes"] = elsewhere.addresses()
    return shown


async def offset_for_time(call: Call) -> dict[str, Any]:
    """Show the offsets at which messages of a time begin."""
    call.knows_only(("timestamp",))
    vhost, _, parts = asked_stream(call)
    timestamp = _number(call, "timestamp")
    if timestamp is None:
        raise bad_request("timestamp: missing, milliseconds since 1970")
    shards = {}
    for part in parts:
        async with _reader(call, part.queue.shard) as reader:
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
        return refused(answer, {"id": id})
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
    if (sent_on := await _sent_to_follower(call, scan, id, part)) is not None:
        return sent_on
    if (sent_on := _sent_on(call, scan, id)) is not None:
        return sent_on
    async with _reader(call, scan.shard) as reader:
        return await respond(call.request, reader, scan, id)


async def _sent_to_follower(
    call: Call, scan: Scan, id: str, part: StreamShard
) -> web.Response | None:
    """Return a response that sends the client to a node that follows, for rows that it has.

    None: no such node may be read, or the rows are not all there, which the leader is to answer.
    """
    elsewhere, context = call.context.streams.elsewhere, call.context
    if elsewhere is None or not context.config.streams_from_followers:
        return None
    scheme = call.request.scheme
    node = elsewhere.follower(scan.shard, scheme, scan.queue_id, call.via)
    there = None if node is None else (await ranges_of(call, [part])).get(scan.queue_id)
    if node is None or there is None:
        return None
    start = there.first if scan.start is None else scan.start
    stop = there.next if scan.stop is None else scan.stop
    if not there.first <= start <= stop <= there.next:
        return None
    scan = msgspec.structs.replace(scan, start=start, stop=stop, there=(there.first, there.next))
    url = elsewhere.url(node, scheme, id, scan)
    return None if url is None else _sent_to(url, is_here=node.name == call.via)


def _sent_to(url: str, *, is_here: bool) -> web.Response:
    response = json_response({"location": url}, 307, {"Location": url})
    if is_here:
        response.force_close()  # what comes by this connection is relayed to the leader
    return response


def _sent_on(call: Call, scan: Scan, id: str) -> web.Response | None:
    """Return a response that sends the client to the node of a stream.

    None: the client is there already, the node is not alive, or it does not speak HTTP as the
    client does, who may use TLS.
    """
    elsewhere, context = call.context.streams.elsewhere, call.context
    node = None if elsewhere is None else elsewhere.holder(scan.shard)
    if elsewhere is None or node is None or node.name == call.via == context.cluster.own:
        return None
    url = elsewhere.url(node, call.request.scheme, id, scan)
    return None if url is None else _sent_to(url, is_here=node.name == call.via)


async def post_arrow(call: Call) -> web.StreamResponse:
    """Publish the rows of an Arrow stream to an exchange."""
    call.knows_only(("producer", "seq", "routing_key", "mandatory"))
    vhost = _vhost(call)
    query, doors = call.request.query, call.context.door_paths()
    if not doors:
        raise ApiError(503, "unavailable", "no front door is there")
    producer, sequence = query.get("producer"), _number(call, "seq")
    if (producer is None) != (sequence is None):
        raise bad_request("producer and seq: one makes no sense without the other")
    if query.get("mandatory", "true") not in ("true", "false"):
        raise bad_request("mandatory: true or false")
    asked = Publish(
        call.user.name,
        vhost.name,
        random.choice(doors),
        exchange_name(call.part("exchange")),
        query.get("routing_key", ""),
        query.get("mandatory", "true") == "true",
        producer,
        sequence or 0,
    )
    answer = await _publish(call, asked)
    return json_response(answer.more) if answer.status == 200 else refused(answer, {})


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
async def _reader(call: Call, shard: int | None = None) -> AsyncIterator[ReaderConnection]:
    """Connect to the reader process, and turn its failures into ApiError.

    With a `shard` it is the reader of the node that has the shard.
    """
    try:
        async with call.context.to_reader(shard) as reader:
            yield reader
    except (ReaderLost, OSError) as error:
        answer = failure_of(error)
        raise ApiError(answer.status, answer.error, answer.reason) from None


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
        text = f"exchange '{name}' in vhost '{vhost.name}' has no shards that are streams"
        if streams := partitions_of(vhost, name):
            shown = ", ".join(f"'{each}'" for each in streams[:STREAMS_SHOWN])
            more = len(streams) - STREAMS_SHOWN
            text += f", but is a super stream with the streams {shown}"
            text += f" and {more} more" if more > 0 else ""
        return not_found(text)
    return not_found(f"there is no queue or exchange '{name}' in vhost '{vhost.name}'")


def id_of(call: Call, part: StreamShard) -> str:
    return call.context.streams.id_of(call.context.config, part.queue)


async def ranges_of(call: Call, parts: list[StreamShard]) -> dict[int, Range]:
    """Return where streams begin and end, by queue id, as far as that is known."""
    return await call.context.streams.of(call.context.config, [part.queue for part in parts])


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
