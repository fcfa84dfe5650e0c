"""The nodes of the broker, as the HTTP API, the page and the metrics show them.

Without a cluster there is one node, whose name is NODE.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from shardmq.broker.controller.node_facts import NodeFacts
from shardmq.broker.controller.peers.presence import door_of
from shardmq.broker.controller.resharding.shard_sets import NODE
from shardmq.broker.routing.placement import NodeShards
from shardmq.broker.shared.control import node_of
from shardmq.cluster.replicas import ReplicasOfShards


class KnownNode(NamedTuple):
    """A node: its number and name, the shards that it leads, and whether it is alive.

    `homes` is the number of shards that it has claimed; None: those that it leads.
    """

    number: int
    name: str
    shards: Collection[int]
    is_alive: bool
    homes: int | None = None


class Claimed(NamedTuple):
    """The nodes that have a copy of a shard or are to have one, and the term of its leader."""

    members: tuple[str, ...]
    term: int


def places_of(nodes: Iterable[KnownNode]) -> list[NodeShards]:
    """Return what is said of these nodes to those who place queues, by the nodes' numbers."""
    return sorted(
        NodeShards(node.number, node.name, tuple(sorted(node.shards)), node.is_alive, node.homes)
        for node in nodes
    )


class ClusterView:
    """The nodes that are known, and the facts that they have told.

    own: the name of the node of this controller.
    is_listed: etcd has this node among those of the cluster, so that it has not lost its data.
    in_sync: the names of the nodes that have all definitions.
    replicas: how many copies the shards have, by the settings.
    claims: by shard, for shards with copies.
    """

    def __init__(
        self, number: int, own: str, shards: Collection[int], own_facts: Callable[[], NodeFacts]
    ) -> None:
        """Begin with the node of this controller, whose facts `own_facts` returns."""
        self.own = own
        self.is_listed = False
        self.in_sync: Collection[str] = (own,)
        self.replicas = ReplicasOfShards()
        self.claims: Mapping[int, Claimed] = {}
        self._own_number = number
        self._own_facts = own_facts
        self._nodes = {number: KnownNode(number, own, shards, True)}
        self._shards = dict.fromkeys(shards, self._nodes[number])
        self._alive = {own}
        self._copies: Mapping[int, Collection[str]] = {}
        self._told: dict[str, NodeFacts] = {}

    def know(
        self,
        nodes: Collection[KnownNode],
        in_sync: Collection[str] = (),
        copies: Mapping[int, Collection[str]] = MappingProxyType({}),
        replicas: ReplicasOfShards = ReplicasOfShards(),
        claims: Mapping[int, Claimed] = MappingProxyType({}),
    ) -> None:
        """Take all nodes of the cluster. That of this controller is there, and alive.

        in_sync: the names of the nodes that have all definitions.
        copies: the names of the nodes that have all of a shard, for shards with copies.
        """
        self.in_sync, self._copies = in_sync, copies
        self.replicas, self.claims = replicas, claims
        known = {self._own_number: self._nodes[self._own_number]}
        known |= {node.number: node for node in nodes}
        self.is_listed = any(node.number == self._own_number for node in nodes)
        own = known[self._own_number]._replace(is_alive=True)
        self._nodes = known | {self._own_number: own}
        self._shards = {shard: node for node in self._nodes.values() for shard in node.shards}
        self._alive = {node.name for node in self._nodes.values() if node.is_alive}

    def tell(self, node: str, facts: NodeFacts) -> None:
        """Take the present facts of another node."""
        self._told[node] = facts

    def memory_alarm(self, own: str) -> str:
        """Return the alarm of a node that is short of memory; "" if none is.

        `own` is that of the node of this controller.
        """
        return own or next(
            (each.memory_alarm for each in self._others().values() if each.memory_alarm), ""
        )

    @property
    def nodes(self) -> list[KnownNode]:
        """The nodes in the order of their numbers."""
        return [self._nodes[number] for number in sorted(self._nodes)]

    def shard_numbers(self) -> Collection[int]:
        """Return the numbers of the shards of all nodes, those that are down too."""
        return self._shards.keys()

    @property
    def is_cluster(self) -> bool:
        """True if there are, or may be, other nodes."""
        return self.own != NODE

    def of_shard(self, shard: int) -> str:
        """Return the name of the node that has a shard."""
        node = self._shards.get(shard)
        return self.own if node is None else node.name

    def number_of_shard(self, shard: int) -> int:
        """Return the number of the node that has a shard."""
        node = self._shards.get(shard)
        return self._own_number if node is None else node.number

    def in_sync_of(self, shard: int) -> Collection[str]:
        """Return the names of the nodes that have all of a shard."""
        return self._copies.get(shard) or (self.of_shard(shard),)

    def min_in_sync_of(self, shard: int) -> int:
        """Return with how many nodes in sync the leader of a shard confirms now."""
        replicas, claim = self.replicas.of(shard), self.claims.get(shard)
        there = 1 if claim is None else len(claim.members)
        return replicas.min_in_sync or (max(1, min(there, replicas.count)) + 1) // 2

    def online_of(self, shard: int) -> list[str]:
        """Return the names of those of them that live."""
        return [name for name in self.in_sync_of(shard) if name in self._alive]

    def in_sync_at(self, name: str) -> list[int]:
        """Return the shards with copies of which a node has all."""
        return sorted(shard for shard, nodes in self._copies.items() if name in nodes)

    def of_owner(self, owner: str) -> str:
        """Return the name of the node that a connection is at, by the connection's owner."""
        return self.of_door(door_of(owner))

    def of_door(self, door: int) -> str:
        """Return the name of the node that has a front door."""
        node = self._nodes.get(node_of(door))
        return self.own if node is None else node.name

    def named(self, name: str) -> KnownNode | None:
        """Return a node by its name."""
        return next((node for node in self._nodes.values() if node.name == name), None)

    def facts(self, of: str | None = None) -> dict[str, NodeFacts]:
        """Return the facts of a node, or of all, if alive, as they have told them last."""
        own = {self.own: self._own_facts()} if of in (None, self.own) else {}
        others = self._others()
        return own | {name: told for name, told in others.items() if of in (None, name)}

    def _others(self) -> dict[str, NodeFacts]:
        alive = {node.name for node in self.nodes if node.is_alive} - {self.own}
        return {name: facts for name, facts in self._told.items() if name in alive}
