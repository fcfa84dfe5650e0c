"""The queues of a message, grouped by the shards that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import HELD, SHUT, QueuePut, taking
from shardmq.broker.routing import keeping

# Queue ids in one record: their count is a u16.
QUEUES_MAX = 65535


class ShardQueues(NamedTuple):
    """Queues that one record of a shard's batch names. `durable` says that one of them is."""

    shard: int
    queue_ids: list[int]
    durable: bool


class QueueShut(Exception):
    """The publishes to a queue have to wait, because it moves to another shard."""


def existing(vhost: Vhost, names: Iterable[str]) -> list[QueuePut]:
    """Return the queues of these names that exist, in the same order.

    A queue that moves is returned as its life that takes messages.
    """
    return [
        queue if queue.moving is None else taking(queue)
        for name in names
        if (queue := vhost.queues.get(name)) is not None
    ]


def is_shut(queue: QueuePut) -> bool:
    """Return whether publishes to the queue have to wait."""
    return queue.moving is not None and queue.moving.step in (SHUT, HELD)


def are_shut(vhost: Vhost, names: Iterable[str]) -> bool:
    """Return whether publishes to one of these queues have to wait."""
    for name in names:
        queue = vhost.queues.get(name)
        if queue is not None and queue.moving is not None and is_shut(queue):
            return True
    return False


def by_shard(queues: Sequence[QueuePut]) -> list[ShardQueues]:
    """Return the queues in groups of one shard, each small enough for one record.

    Streams in which exchanges keep messages are the last of `queues`; their shard is told all
    queues of the message. Raises QueueShut.
    """
    for queue in queues:
        if queue.moving is not None and is_shut(queue):
            raise QueueShut(queue.name)
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
