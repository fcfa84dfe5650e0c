"""Choose the shard of a queue by its name; the choice is stable when shards are added."""

from __future__ import annotations

from collections.abc import Iterable

from shardmq.broker.routing.hashing import hash64, jump


class Placement:
    """The shards that new queues are placed on, in a cluster those of the nodes that live.

    Queues stay where they are when it changes.
    """

    def __init__(self, shards: Iterable[int]) -> None:
        self.shards = tuple(shards)

    def change(self, shards: Iterable[int]) -> None:
        """Take other shards from now on."""
        self.shards = tuple(shards)

    @property
    def count(self) -> int:
        """Return how many shards there are."""
        return len(self.shards)

    def place(self, vhost: str, queue: str) -> int:
        """Return the shard for a queue."""
        return self.shards[place(vhost, queue, len(self.shards))]


def place(vhost: str, queue: str, shards: int) -> int:
    """Return which of so many shards a queue is placed on.

    A new shard takes its part of the queues; no queue moves between old shards.
    """
    return jump(hash64(f"{len(vhost)}:{vhost}{queue}"), shards)
