"""The queues of a message, grouped by the shards that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import keeping

# Queue ids in one record: their count is a u16.
QUEUES_MAX = 65535


class ShardQueues(NamedTuple):
    """Queues that one record of a shard's batch names. `durable` says that one of them is."""

    shard: int
    queue_ids: list[int]
    durable: bool


def existing(vhost: Vhost, names: Iterable[str]) -> list[QueuePut]:
    """Return the queues of these names that exist, in the same order."""
    return [queue for name in names if (queue := vhost.queues.get(name)) is not None]


def by_shard(queues: Sequence[QueuePut]) -> list[ShardQueues]:
    """Return the queues in groups of one shard, each small enough for one record.

    Streams in which exchanges keep messages are the last of `queues`; their shard is told all
    queues of the message.
    """
    if len(queues) == 1:
        (queue,) = queues
        return [ShardQueues(queue.shard, [queue.id], queue.durable)]
    found: dict[int, ShardQueues] = {}
    for shard, queue in keeping.named(queues):
        group = found.get(shard)
        if group is None:
            found[shard] = ShardQueues(shard, [queue.id], queue.durable)
        else:
            group.queue_ids.append(queue.id)
            if queue.durable and not group.durable:
                found[shard] = group._replace(durable=True)
    if len(queues) <= QUEUES_MAX:
        return [*found.values()]
    return [
        ShardQueues(shard, ids[at : at + QUEUES_MAX], durable)
        for shard, ids, durable in found.values()
        for at in range(0, len(ids), QUEUES_MAX)
    ]
