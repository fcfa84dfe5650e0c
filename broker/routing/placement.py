"""Choose the shard of a queue by its name; the choice is stable when shards are added."""

from __future__ import annotations

from shardmq.broker.routing.hashing import hash64, jump


def place(vhost: str, queue: str, shards: int) -> int:
    """Return the shard that a queue lives on.

    A new shard takes its part of the queues; no queue moves between old shards.
    """
    return jump(hash64(f"{len(vhost)}:{vhost}{queue}"), shards)
