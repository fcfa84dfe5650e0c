"""/api/virtual-queues: the virtual queues of stream exchanges, their consumers and owners."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from shardmq.broker.controller.groups.groups import (
    Assignment,
    GroupConsumer,
    VirtualQueue,
    VirtualQueueName,
)
from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Call, Route, check
from shardmq.broker.controller.management.resources.connections import channel_name
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.controller.purging import purge as purge_queue
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.permissions import shown_user
from shardmq.broker.shared.control import ConsumeTerms, QueueRemove
from shardmq.broker.shared.rights import Configure, Read

NOBODY = ConsumeTerms()  # of a consumer that has left and still holds shard queues


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
        "moving": sum(moving for _, _, _, moving in _assignments(queue)),
    }


async def get_all(call: Call) -> Listing:
    """List virtual queues: exchanges that are consumed as one queue through their shard queues."""
    return Listing(
        [
            _row(call, vhost, name)
            for vhost in call.vhosts()
            for name in vhost.exchanges
            if vhost.shard_queues(name)
        ]
    )


async def get(call: Call) -> dict[str, Any]:
    """Show a virtual queue with its shard queues and consumers."""
    vhost, exchange = call.vhost(), call.part("name")
    if not vhost.shard_queues(exchange):
        raise not_found()
    queue = _consumed(call, vhost, exchange)
    assignments = list(_assignments(queue))
    shown = _row(call, vhost, exchange)
    shown["shards"] = [
        _shard(call, vhost, name, assignments) for name in vhost.shard_queues(exchange)
    ]
    shown["consumers"] = [
        _consumer(call, consumer, terms, assignments) for consumer, terms in queue.terms().items()
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
    """Purge the ready messages of all shard queues of a virtual queue."""
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


def _assignments(
    queue: VirtualQueue,
) -> Iterator[tuple[Assignment, GroupConsumer, ConsumeTerms, bool]]:
    """Yield the owner of each assignment, and whether another consumer is about to get it."""
    for consumer, (terms, assignment) in queue.fixed.items():
        yield assignment, consumer, terms, False
    for group in queue.groups.values():
        for assignment, consumer in group.held.items():
            terms = group.consumers.get(consumer, NOBODY)
            yield assignment, consumer, terms, group.assigned.get(assignment) != consumer


def _shard(
    call: Call,
    vhost: Vhost,
    name: str,
    assignments: list[tuple[Assignment, GroupConsumer, ConsumeTerms, bool]],
) -> dict[str, Any]:
    put = vhost.queues[name]
    owners = [
        {
            "consumer_tag": terms.tag,
            "channel_details": _channel(call, terms),
            "node": call.context.cluster.of_door(consumer.door),
            "group": terms.group,
            "assignment": terms.assignment,
            "moving": moving,
        }
        for assignment, consumer, terms, moving in assignments
        if assignment.queue == put.id
    ]
    return {
        "queue": name,
        "index": put.part.index if put.part is not None else 0,
        "shard": put.shard,
        "node": call.context.cluster.of_shard(put.shard),
        "state": put.part.state if put.part is not None else "",
        "owner": ", ".join(str(owner["consumer_tag"]) for owner in owners),
        "owners": owners,
    }


def _consumer(
    call: Call,
    consumer: GroupConsumer,
    terms: ConsumeTerms,
    assignments: list[tuple[Assignment, GroupConsumer, ConsumeTerms, bool]],
) -> dict[str, Any]:
    held = [
        call.catalog.queue_by_id(assignment.queue)
        for assignment, holder, _, moving in assignments
        if holder == consumer and not moving
    ]
    return {
        "consumer_tag": terms.tag,
        "channel_details": _channel(call, terms),
        "node": call.context.cluster.of_door(consumer.door),
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
    user = shown_user(info.user)
    return {"name": name, "number": terms.channel, "connection_name": info.name, "user": user}


ROUTES = [
    Route("GET", "/api/virtual-queues", get_all, is_long=True),
    Route("GET", "/api/virtual-queues/{vhost}", get_all, is_long=True),
    Route("GET", "/api/virtual-queues/{vhost}/{name}", get),
    Route("DELETE", "/api/virtual-queues/{vhost}/{name}", delete),
    Route("DELETE", "/api/virtual-queues/{vhost}/{name}/contents", purge),
]
