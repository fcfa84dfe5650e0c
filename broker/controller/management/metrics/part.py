"""The part of the broker that a call asks about: one node of a cluster, or all of the broker.

Each node of a cluster answers for itself, so that Prometheus, which scrapes all of them, counts
nothing twice. What is of no single node is shown by the node that leads.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from shardmq.broker.controller.cluster_view import KnownNode
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.broker.controller.node_checks import NodeState
from shardmq.broker.controller.node_facts import NodeFacts
from shardmq.broker.controller.peers.links import FrontDoorLink
from shardmq.broker.controller.peers.presence import door_of
from shardmq.broker.controller.peers.shard_links import Shard
from shardmq.broker.shared.control import ConnectionInfo, node_of

NODE_LABEL = "node"


class Part:
    """A node of a cluster, or the whole broker.

    called: the name of the node, or of the one that was called for the whole broker.
    labels: the names of the labels that rows of processes and nodes have here besides their own.
    """

    def __init__(self, context: Context, called: str, is_whole: bool = True) -> None:
        """Take a node, or the whole broker. Without a cluster both are the same."""
        cluster = context.cluster
        self.context = context
        self.called = called
        self._node: KnownNode | None = None
        if cluster.is_cluster and not is_whole:
            self._node = cluster.named(called)
        # Processes of different nodes have the same names.
        self.labels = (NODE_LABEL,) if cluster.is_cluster and self._node is None else ()

    @property
    def has_common(self) -> bool:
        """True if what is of no single node belongs to this part."""
        return self._node is None or self._node.name == self.context.cluster.own

    def stats(self, stats: Stats) -> Stats:
        """Return the numbers of this part."""
        return stats if self._node is None else stats.nodes.get(self._node.number, Stats(stats.at))

    @cached_property
    def facts(self) -> dict[str, NodeFacts]:
        """The facts of the nodes of this part that tell, as of the first look."""
        return self.context.cluster.facts(None if self._node is None else self._node.name)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the processes of the nodes that tell."""
        shown, context = [], self.context
        for name, facts in self.facts.items():
            for row in facts.processes:
                shown.append(row | {NODE_LABEL: name} if context.cluster.is_cluster else dict(row))
                if row["kind"] == "shard":
                    shown[-1]["queues"] = context.catalog.index.count_on(row["index"])
        return shown

    def label_values(self, row: dict[str, Any]) -> list[str]:
        """Return the values of `labels` for the row of a process."""
        return [str(row[NODE_LABEL]) for _ in self.labels]

    @property
    def is_alive(self) -> bool:
        """Return whether the node is alive, or this is the whole broker."""
        return self._node is None or self._node.is_alive

    def doors(self) -> list[FrontDoorLink]:
        doors, node = self.context.links.doors(), self._node
        return [one for one in doors if node is None or node_of(one.number) == node.number]

    def other_versions(self) -> list[int]:
        """Return the numbers of the front doors that are refused for their wire version."""
        doors, node = self.context.links.other_versions, self._node
        return [door for door in doors if node is None or node_of(door) == node.number]

    def state(self) -> NodeState:
        """Return what health checks of this part look at."""
        name = self.called if self.context.cluster.is_cluster else ""
        facts = list(self.facts.values())
        shards, doors = self.shards(), len(self.doors())
        return NodeState(
            name, self.is_alive, facts, self.rows(), shards, doors, self.other_versions()
        )

    def shards(self) -> list[Shard]:
        shards = self.context.shards.shards
        return [one for one in shards if self._node is None or one.number in self._node.shards]

    def connections(self) -> list[ConnectionInfo]:
        connections, node = self.context.presence.connections(), self._node
        if node is None:
            return connections
        return [one for one in connections if node_of(door_of(one.owner)) == node.number]

    def connections_opened(self) -> int:
        opened = self.context.presence.opened
        return opened.total() if self._node is None else opened[self._node.number]

    def queues(self) -> int:
        """Return the number of queues, without those of exchanges."""
        catalog = self.context.catalog
        if self._node is None:
            return sum(len(vhost.queues) - vhost.hidden_queues for vhost in catalog.vhosts.values())
        hidden = map(catalog.index.get, catalog.hidden_queue_ids())
        shards = self._node.shards
        return sum(map(catalog.index.count_on, shards)) - sum(
            queue is not None and queue.shard in shards for queue in hidden
        )
