"""/api/streams/VHOST/NAME/groups: the positions of named consumers of a stream, and their lag.

Shards keep the positions beside the messages. AMQP consumers set them by acknowledging messages,
HTTP clients set them here. Both share the names: a client may begin by HTTP and go on by AMQP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from shardmq.broker.controller.management.api_error import ApiError, bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route, existing
from shardmq.broker.controller.management.numbers import NUMBER_MAX
from shardmq.broker.controller.management.resources.streams import asked_stream, id_of, ranges_of
from shardmq.broker.controller.peers.shard_links import ShardSilent
from shardmq.broker.controller.streams.stream_ranges import StreamShard
from shardmq.shardd.wire import messages as wire

NAME_BYTES_MAX = 255  # the same as for a consumer tag
STORE_S_MAX = 5.0


class Reached(msgspec.Struct):
    """A position. `next`: the next offset to read. `id`: the id of the stream, to be checked."""

    next: int
    id: str | None = None


class GroupBody(msgspec.Struct):
    """The positions, by the number of the shard queue."""

    shards: dict[str, Reached]


async def get_all(call: Call) -> list[dict[str, Any]]:
    """List the names of consumers of a stream, with their positions and lag."""
    call.knows_only(())
    return await _groups(call)


async def get(call: Call) -> dict[str, Any]:
    """Show the positions and lag of one name."""
    call.knows_only(())
    name = _name(call)
    return existing(next((row for row in await _groups(call) if row["name"] == name), None))


async def put(call: Call) -> None:
    """Store the positions of a name; shards that are not in the body keep theirs."""
    call.knows_only(())
    _, _, parts = asked_stream(call)
    body, name = await call.body(GroupBody), _name(call)
    by_number = {str(part.number): part for part in parts}
    for shard, reached in body.shards.items():
        part = by_number.get(shard)
        if part is None:
            raise bad_request(f"shards: there is no shard '{shard[:20]}'")
        if not 0 <= reached.next <= NUMBER_MAX:
            raise bad_request(f"shards.{shard}.next: not a number from 0 to {NUMBER_MAX}")
        if reached.id is not None and reached.id != id_of(call, part):
            raise ApiError(
                412,
                "precondition_failed",
                f"shards.{shard}.id: the stream has the id {id_of(call, part)}",
            )
    await _store(
        call, name, ((by_number[shard], reached.next) for shard, reached in body.shards.items())
    )


async def delete(call: Call) -> None:
    """Delete the positions of a name: its next consumer begins where that consumer says."""
    call.knows_only(())
    _, _, parts = asked_stream(call)
    await _store(call, _name(call), ((part, None) for part in parts))


async def _groups(call: Call) -> list[dict[str, Any]]:
    _, _, parts = asked_stream(call)
    stats = await call.context.stats.of([part.queue for part in parts])
    ranges = await ranges_of(call, parts)
    found: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        stream = stats.streams.get(part.queue.id)
        known = ranges.get(part.queue.id)
        for name, offset in stream.positions.items() if stream is not None else ():
            lag = 0 if known is None else max(0, known.next - max(offset, known.first))
            found.setdefault(name, []).append({"shard": part.number, "next": offset, "lag": lag})
    return [
        {"name": name, "lag": sum(row["lag"] for row in shards), "shards": shards}
        for name, shards in sorted(found.items())
    ]


async def _store(call: Call, name: str, places: Iterable[tuple[StreamShard, int | None]]) -> None:
    replies = []
    for part, offset in places:
        message = partial(wire.StoreOffset, queue=part.queue.id, name=name, offset=offset)
        replies.append(call.context.shards.request(part.queue.shard, message, STORE_S_MAX))
    for reply in await asyncio.gather(*replies, return_exceptions=True):
        if isinstance(reply, ShardSilent):
            raise ApiError(503, "unavailable", str(reply))
        if isinstance(reply, wire.Refused):
            raise (
                not_found()
                if reply.code == 404
                else ApiError(412, "precondition_failed", reply.text)
            )
        if isinstance(reply, BaseException):
            raise reply


def _name(call: Call) -> str:
    name = call.part("group")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise bad_request(f"the name has more than {NAME_BYTES_MAX} bytes")
    return name


ROUTES = [
    Route("GET", "/api/streams/{vhost}/{name}/groups", get_all, shows=["StreamGroup"]),
    Route("GET", "/api/streams/{vhost}/{name}/groups/{group}", get, shows="StreamGroup"),
    Route("PUT", "/api/streams/{vhost}/{name}/groups/{group}", put, body=GroupBody),
    Route("DELETE", "/api/streams/{vhost}/{name}/groups/{group}", delete),
]
