"""Purges queues for the HTTP API, by asking their shards; the catalog does not change."""

from __future__ import annotations

from functools import partial

from shardmq.broker.controller.peers.shard_links import ShardLinks, ShardSilent
from shardmq.broker.controller.pending import INTERNAL_ERROR
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import counted, lives
from shardmq.broker.model.checks import NO_ROOM, Refusal, check_owner, no_queue, not_purged
from shardmq.broker.shared.control import Answer
from shardmq.shardd.wire import messages as wire

STEP_MESSAGES = 10_000  # purged by one request to the shard, when not the whole queue is


async def purge(catalog: Catalog, shards: ShardLinks, vhost: str, name: str) -> Answer:
    """Purge all ready messages of a queue; the result of the answer counts them as "messages"."""
    queue = catalog.queue(vhost, name)
    try:
        if queue is None:
            raise no_queue(vhost, name)
        check_owner(queue, "")
        messages = 0
        for life in lives(queue):
            reply = await shards.request(life.shard, partial(wire.Purge, queue=life.id))
            if isinstance(reply, wire.Refused) and reply.code == NO_ROOM:
                raise not_purged(queue, reply.text)
            if isinstance(reply, wire.Done) and life in counted(queue):
                messages += reply.messages
    except Refusal as refusal:
        return Answer(0, refusal.code, refusal.text)
    except ShardSilent as error:
        return Answer(0, INTERNAL_ERROR, str(error))
    return Answer(0, result={"messages": messages})


async def purge_first(
    catalog: Catalog, shards: ShardLinks, vhost: str, name: str, count: int
) -> Answer:
    """Purge at most `count` messages of a classic queue, those that would be delivered next.

    The result of the answer counts them as "messages". They go in steps, so that no other message
    waits long for it.
    """
    queue, gone = catalog.queue(vhost, name), 0
    while queue is not None and gone < count:
        step = min(count - gone, STEP_MESSAGES)
        try:
            ask = partial(wire.Purge, queue=queue.id, count=step)
            reply = await shards.request(queue.shard, ask)
        except ShardSilent as error:
            return Answer(0, INTERNAL_ERROR, str(error))
        purged = reply.messages if isinstance(reply, wire.Done) else 0
        gone += purged
        if purged < step:
            return Answer(0, result={"messages": gone})
        queue = catalog.queue(vhost, name)
    if queue is None and not gone:
        missing = no_queue(vhost, name)
        return Answer(0, missing.code, missing.text)
    return Answer(0, result={"messages": gone})
