"""/api/queues/quorum/VHOST/NAME/status: the nodes that have a queue.

The copies are those of the shard of the queue, so queues of all types have them.
"""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.cluster_view import ClusterView
from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Call, Route, existing
from shardmq.broker.model.checks import is_hidden_queue

VOTER, PROMOTABLE = "voter", "promotable"


def rows(cluster: ClusterView, shard: int) -> list[dict[str, Any]]:
    """Return a row for each node that has a copy of a shard or is to have one.

    The names are those of `rabbitmq-queues quorum_status`. A promotable member is not in sync: what
    is confirmed may be missing there. Without copies there is one member, and no term.
    """
    leader, claim = cluster.of_shard(shard), cluster.claims.get(shard)
    in_sync = cluster.in_sync_of(shard)
    alive = {node.name for node in cluster.nodes if node.is_alive}
    found = []
    for name in dict.fromkeys((leader, *(claim.members if claim is not None else ()))):
        state = "leader" if name == leader else "follower"
        found.append(
            {
                "Node Name": name,
                "Raft State": state if name in alive else "noproc",
                "Membership": VOTER if name in in_sync else PROMOTABLE,
                "In Sync": name in in_sync,
                "Term": None if claim is None else claim.term,
            }
        )
    return found


async def status(call: Call) -> list[dict[str, Any]]:
    """Show the nodes that have a queue: which of them leads, and which are in sync."""
    queue = existing(call.vhost().queues.get(call.part("queue")))
    if is_hidden_queue(queue.name):
        raise not_found()
    return rows(call.context.cluster, queue.shard)


ROUTES = [
    Route("GET", "/api/queues/quorum/{vhost}/{queue}/status", status),
]
