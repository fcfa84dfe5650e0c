"""/api/virtual-queues: the virtual queues of stream exchanges, their consumers and owners."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from shardmq.broker.controller.groups.groups import Member, Seat, VirtualQueue, VirtualQueueName
from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Call, Route, check
from shardmq.broker.controller.management.resources.connections import channel_name
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.controller.purging import purge as purge_queue
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.shared.control import ConsumeTerms, QueueRemove
from shardmq.broker.shared.rights import Configure, Read

NOBODY = ConsumeTerms()  # of a member that has left and still holds shard queues


def _consumed(call: Call, vhost: Vhost, exchange: str) -> VirtualQueue:
    return call.context.groups.queues.get(VirtualQueueName(vhost.name, exchange)) or VirtualQueue(
        (), begun=True
    )


def _row(call: Call, vhost: Vhost, exchange: str) -> dict[str, Any]:
    queue = _consumed(call, vhost, exchange)
    return {
        "name": exchange,
        "vhost": vhost.name,
        "shards": len(vhost.shard_queues(exchange)),
        "consumers": len(queue.terms()),
        "groups": sorted(queue.groups),
        "moving": sum(moving for _, _, _, moving in _seats(queue)),
    }


async def get_all(call: Call) -> Listing:
    return Listing(
        [
            _row(call, vhost, name)
            for vhost in call.vhosts()
            for name in vhost.exchanges
            if vhost.shard_queues(name)
        ]
    )


async def get(call: Call) -> dict[str, Any]:
    vhost, exchange = call.vhost(), call.part("name")
    if not vhost.shard_queues(exchange):
        raise not_found()
    queue = _consumed(call, vhost, exchange)
    seats = list(_seats(queue))
    shown = _row(call, vhost, exchange)
    shown["shards"] = [_shard(call, vhost, name, seats) for name in vhost.shard_queues(exchange)]
    shown["consumers"] = [
        _consumer(call, member, terms, seats) for member, terms in queue.terms().items()
    ]
    return shown


async def delete(call: Call) -> None:
    """Delete all shard queues with their messages; the exchange gets new ones at once."""
    vhost, shards = _to_change(call, Configure)
    asks = [QueueRemove(vhost.name, shard, False, False) for shard in shards]
    answers = [call.authority.ask(ask) for ask in asks]
    for answer in await asyncio.gather(*answers):
        check(answer)


async def purge(call: Call) -> None:
    vhost, shards = _to_change(call, Read)
    answers = [
        purge_queue(call.catalog, call.context.shards, vhost.name, shard) for shard in shards
    ]
    for answer in await asyncio.gather(*answers):
        check(answer)


def _to_change(call: Call, act: type[Configure | Read]) -> tuple[Vhost, tuple[str, ...]]:
    vhost, exchange = call.vhost_to_change(), call.part("name")
    shards = vhost.shard_queues(exchange)
    if not shards:
        raise not_found()
    call.must(act(vhost.name, exchange))
    return vhost, shards


def _seats(queue: VirtualQueue) -> Iterator[tuple[Seat, Member, ConsumeTerms, bool]]:
    """Yield the owner of each seat, and whether the seat is about to go to another member."""
    for member, (terms, seat) in queue.fixed.items():
        yield seat, member, terms, False
    for group in queue.groups.values():
        for seat, member in group.held.items():
            terms = group.members.get(member, NOBODY)
            yield seat, member, terms, group.assigned.get(seat) != member


def _shard(
    call: Call, vhost: Vhost, name: str, seats: list[tuple[Seat, Member, ConsumeTerms, bool]]
) -> dict[str, Any]:
    put = vhost.queues[name]
    owners = [
        {
            "consumer_tag": terms.tag,
            "channel_details": _channel(call, terms),
            "group": terms.group,
            "assignment": terms.assignment,
            "moving": moving,
        }
        for seat, _, terms, moving in seats
        if seat.queue == put.id
    ]
    return {
        "queue": name,
        "index": put.part.index if put.part is not None else 0,
        "shard": put.shard,
        "state": put.part.state if put.part is not None else "",
        "owner": ", ".join(str(owner["consumer_tag"]) for owner in owners),
        "owners": owners,
    }


def _consumer(
    call: Call,
    member: Member,
    terms: ConsumeTerms,
    seats: list[tuple[Seat, Member, ConsumeTerms, bool]],
) -> dict[str, Any]:
    held = [
        call.catalog.queue_by_id(seat.queue)
        for seat, holder, _, moving in seats
        if holder == member and not moving
    ]
    return {
        "consumer_tag": terms.tag,
        "channel_details": _channel(call, terms),
        "group": terms.group,
        "assignment": terms.assignment,
        "priority": terms.priority,
        "exclusive": terms.exclusive,
        "key_affinity": terms.affinity,
        "shards": [queue.name for queue in held if queue is not None],
    }


def _channel(call: Call, terms: ConsumeTerms) -> dict[str, Any]:
    info = call.context.presence.connection(terms.owner)
    if info is None:
        return {"number": terms.channel}
    name = channel_name(info, terms.channel)
    return {"name": name, "number": terms.channel, "connection_name": info.name, "user": info.user}


ROUTES = [
    Route("GET", "/api/virtual-queues", get_all, is_long=True),
    Route("GET", "/api/virtual-queues/{vhost}", get_all, is_long=True),
    Route("GET", "/api/virtual-queues/{vhost}/{name}", get),
    Route("DELETE", "/api/virtual-queues/{vhost}/{name}", delete),
    Route("DELETE", "/api/virtual-queues/{vhost}/{name}/contents", purge),
]
