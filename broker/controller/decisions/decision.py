"""The decision about one request, and the inputs of decisions."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import AnyChange, QueuePut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing.placement import Placement, Places

NOT_FOUND = 404
BAD_REQUEST = 400


@dataclass(slots=True)
class Decision:
    """The changes of a request, in order, and what else there is to do.

    create: queues of which their shards are told at once, because they are new or changed.
    count: the queue whose shard is asked for the numbers of messages and consumers.
    uses: queues that must exist at their shards before the request is answered.
    first: a queue whose shard says whether it may go; if so a Removal follows.
    drop: queues that their shards delete once no front door knows them.
    lost_shards: stream exchanges, with vhost, that lose a shard queue by the changes.
    next_steps: stream exchanges, with vhost, that take the next step of a reshard.
    drop_vhost: the vhost that every shard deletes.
    policies_of: the vhost whose policies change, so that shards are told new arguments.
    close_vhost, close_user: the connections of this vhost or user are closed.
    refused: why the rest of many was refused; `result` says how many were done.
    notes: sentences for the log.
    """

    changes: list[AnyChange] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    create: list[QueuePut] = field(default_factory=list)
    count: QueuePut | None = None
    uses: list[QueuePut] = field(default_factory=list)
    first: QueuePut | None = None
    drop: list[QueuePut] = field(default_factory=list)
    lost_shards: set[tuple[str, str]] = field(default_factory=set)
    next_steps: set[tuple[str, str]] = field(default_factory=set)
    drop_vhost: str = ""
    policies_of: str = ""
    close_vhost: str = ""
    close_user: str = ""
    refused: Refusal | None = None
    notes: list[str] = field(default_factory=list)


class Inputs(NamedTuple):
    """The inputs of decisions. Decisions only read the catalog.

    new_queue_id: returns an id that no queue had before.
    new_name: returns a name for a queue that was declared without one.
    placement: the shards and nodes that are known.
    leaving: ids of queues whose shard was asked whether they may go, and has not answered.
    asked_at: the name of the node whose HTTP API was asked; "" for none.
    """

    catalog: Catalog
    new_queue_id: Callable[[], int]
    new_name: Callable[[], str]
    placement: Placement
    leaving: Container[int]
    asked_at: str = ""

    @property
    def places(self) -> Places:
        """The shards that new queues are placed on, and the nodes that are to have queues."""
        return self.placement.without(self.catalog.drained_nodes)

    def vhost(self, name: str) -> Vhost:
        """Return a vhost. Raises Refusal if it does not exist."""
        vhost = self.catalog.vhosts.get(name)
        if vhost is None:
            raise Refusal(checks.NOT_ALLOWED, f"vhost {name} not found")
        return vhost
