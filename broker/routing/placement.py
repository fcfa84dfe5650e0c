"""Choose the shard of a new queue: by its name, near a client, or where the fewest queues are.

The choice by name is stable when shards are added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from shardmq.broker.routing.hashing import hash64, jump
from shardmq.cluster.replicas import Replicas, ReplicasOfShards


class NodeShards(NamedTuple):
    """A node of a cluster: its number and name, its shards in order, and whether it is alive.

    `shards` are those that the node leads now. `homes` is the number of those that it has claimed:
    it stays when other nodes lead them for a while. None: the two are the same.
    """

    number: int
    name: str
    shards: tuple[int, ...]
    is_alive: bool = True
    homes: int | None = None


class Places(NamedTuple):
    """The shards that new queues are placed on, and the nodes that are to have queues.

    shards: in order.
    nodes: in the order of their numbers, also those that are down; none without a cluster.
    away: the shards of nodes that are down.
    replicas: how many copies the shards have.
    """

    shards: tuple[int, ...]
    nodes: tuple[NodeShards, ...] = ()
    away: frozenset[int] = frozenset()
    replicas: ReplicasOfShards = ReplicasOfShards()

    @property
    def shard_count(self) -> int:
        """Return how many shards the broker is to use, those of nodes that are down among them."""
        return sum(len(node.shards) for node in self.nodes) if self.nodes else len(self.shards)

    def with_copies(self, asked: Replicas) -> Places:
        """Return the same with only those of the shards that suit a queue best."""
        shards = self.replicas.nearest(asked, self.shards)
        if shards == self.shards:
            return self
        nodes = tuple(
            node._replace(shards=tuple(shard for shard in node.shards if shard in shards))
            for node in self.nodes
        )
        return self._replace(shards=shards, nodes=nodes)

    def by_name(self, vhost: str, queue: str) -> int:
        """Return the shard that the name of a queue stands for."""
        return self.shards[place(vhost, queue, len(self.shards))]

    def at_node(self, node: NodeShards | None, vhost: str, queue: str) -> int:
        """Return the shard for a queue at a node, or anywhere if that node takes no new queues."""
        takes_queues = node is not None and node.is_alive and node.shards
        shards = node.shards if node is not None and takes_queues else self.shards
        return shards[place(vhost, queue, len(shards))]

    def with_fewest(self, queues_on: Callable[[int], int]) -> int:
        """Return the shard with the fewest queues of the node with the fewest.

        `queues_on` counts the queues on a shard. Of equals it is the one with the lowest number.
        """
        live = [node.shards for node in self.nodes if node.is_alive and node.shards]
        shards = min(live or [self.shards], key=lambda shards: sum(map(queues_on, shards)))
        return min(shards, key=queues_on)


class Placement:
    """The shards and nodes of the broker, as far as they are known.

    Queues stay where they are when it changes.

    replicas: how many copies the shards have.
    """

    def __init__(self, shards: Iterable[int], nodes: Iterable[NodeShards] = ()) -> None:
        """Begin with the shards of a broker without a cluster, or with the nodes of a cluster."""
        self._shards = tuple(shards)
        self._nodes = tuple(nodes)
        self.replicas = ReplicasOfShards()
        self._found: tuple[Collection[str], Places] | None = None

    def change(self, nodes: Iterable[NodeShards]) -> bool:
        """Take the nodes of the cluster; return whether they differ from those before."""
        before, self._nodes = self._nodes, tuple(nodes)
        self._found = None
        return self._nodes != before

    def has_copies(self, replicas: ReplicasOfShards) -> None:
        """Take how many copies the shards have."""
        if replicas != self.replicas:
            self.replicas = replicas
            self._found = None

    @property
    def most(self) -> Replicas:
        """The most copies that a shard has, and the most nodes that must be in sync for one."""
        shards = [shard for node in self._nodes for shard in node.shards]
        found = [self.replicas.of(shard) for shard in shards]
        count = min(len(self._nodes), max((each.count for each in found), default=1))
        least = min(count, max((each.least for each in found), default=1))
        return Replicas(max(1, count), max(1, least))

    def without(self, drained: Collection[str]) -> Places:
        """Return the places for queues when the nodes with these names are drained.

        If no other node is alive, no node counts as drained.
        """
        if self._found is None or self._found[0] != drained:
            self._found = drained, self._without(drained)
        return self._found[1]

    def _without(self, drained: Collection[str]) -> Places:
        if not self._nodes:
            return Places(self._shards, replicas=self.replicas)
        nodes = tuple(node for node in self._nodes if node.name not in drained)
        shards = _alive(nodes)
        away = frozenset(
            shard for node in self._nodes if not node.is_alive for shard in node.shards
        )
        if not shards:
            return Places(_alive(self._nodes), self._nodes, away, self.replicas)
        return Places(shards, nodes, away, self.replicas)


def _alive(nodes: Iterable[NodeShards]) -> tuple[int, ...]:
    return tuple(sorted(shard for node in nodes if node.is_alive for shard in node.shards))


def place(vhost: str, queue: str, shards: int) -> int:
    """Return which of so many shards a queue is placed on.

    A new shard takes its part of the queues; no queue moves between old shards.
    """
    return jump(hash64(f"{len(vhost)}:{vhost}{queue}"), shards)
