"""Moves queues away from drained nodes, and those that a rebalancing has chosen.

Which nodes are drained is a parameter (`DRAINED_NODES`), so it outlives the controller. What a
rebalancing has still to move does not: whoever wants it asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.cluster_view import ClusterView, KnownNode
from shardmq.broker.controller.moving import mover
from shardmq.broker.controller.moving.spread import (
    Planned,
    counts_of,
    emptiest,
    evened_out,
    spread,
    why_it_stays,
)
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.reading import is_stream
from shardmq.cluster.replicas import Replicas

LOOK_S: Final = 0.2
IDLE_LOOK_S: Final = 1.0
# So many queues move at the same time, and so many streams: all messages go over one network. The
# two are counted apart, because the move of a stream may take hours, and does not end if more is
# published to the stream than can be copied.
AT_ONCE: Final = 2
# A queue whose move was refused is tried again after this time.
REFUSED_S: Final = 10.0

log = logging.getLogger(__name__)


class LeftBehind(NamedTuple):
    """A queue that a drain cannot move, and why."""

    queue: QueuePut
    why: str


class Relocating:
    """The moves that drains and rebalancings ask for."""

    def __init__(
        self, catalog: Catalog, authority: Authority, shards: ShardLinks, cluster: ClusterView
    ) -> None:
        self._catalog = catalog
        self._authority = authority
        self._shards = shards
        self._cluster = cluster
        self._planned: dict[bool, deque[Planned]] = {}  # by whether they are streams
        self._refused: dict[int, tuple[str, float]] = {}  # why, and when, by the id of the queue

    async def run(self) -> None:
        """Begin moves until cancelled."""
        while True:
            busy = False
            try:
                busy = await self._begin_next()
            except Exception:  # the next look tries again
                log.exception("a queue cannot be moved")
            await asyncio.sleep(LOOK_S if busy else IDLE_LOOK_S)

    def places(self) -> Collection[int]:
        """Return the shards that queues are moved to."""
        return self._authority.places.shards

    def on_node(self, node: KnownNode) -> list[QueuePut]:
        """Return the queues that lie on a node, at least with a part of their messages."""
        return self.on_shards(node.shards)

    def on_shards(self, numbers: Collection[int]) -> list[QueuePut]:
        """Return the queues that lie on these shards, at least with a part of their messages."""
        shards = set(numbers)
        return [
            queue
            for queue in self._catalog.index.all()
            if queue.shard in shards or (queue.moving and queue.moving.shard in shards)
        ]

    def left_behind(self, queues: Collection[QueuePut]) -> list[LeftBehind]:
        """Return those of the queues of a drained node that stay there."""
        found = []
        for queue in queues:
            if queue.moving is None:
                refused = self._refused.get(queue.id)
                if why := why_it_stays(queue) or (refused[0] if refused else ""):
                    found.append(LeftBehind(queue, why))
        return found

    def plan(self) -> list[Planned]:
        """Return the moves that even out the numbers of queues on the shards."""
        queues, shards = list(self._catalog.index.all()), self.places()
        if not self._authority.places.replicas.in_sets:
            return evened_out(queues, shards)
        return spread(queues, shards, self._suiting())

    def _suiting(self) -> Callable[[QueuePut], tuple[int, ...]]:
        """Return what says which shards suit a queue by its copies."""
        places = self._authority.places
        found: dict[Replicas, tuple[int, ...]] = {}

        def suiting(queue: QueuePut) -> tuple[int, ...]:
            asks = self._authority.asked(queue)
            if asks not in found:
                found[asks] = places.with_copies(asks).shards
            return found[asks]

        return suiting

    def rebalance(self) -> list[Planned]:
        """Begin the moves of `plan`, in the place of those that an earlier call has left."""
        planned = self.plan()
        self._planned = {
            of_streams: deque(
                each for each in planned if is_stream(each.queue.arguments) is of_streams
            )
            for of_streams in (False, True)
        }
        return planned

    async def _begin_next(self) -> bool:
        """Begin a move of a queue and one of a stream, where there is room for one more.

        Return whether some are under way.
        """
        under_way = Counter(is_stream(each.arguments) for each in self._catalog.index.moving())
        for of_streams in (False, True):
            if under_way[of_streams] < AT_ONCE and (planned := self._next(of_streams)) is not None:
                await self._begin(planned)
                under_way[of_streams] += 1
        return under_way.total() > 0

    async def _begin(self, planned: Planned) -> None:
        queue = planned.queue
        answer = await mover.begin(
            self._catalog, self._authority, self._shards, queue.vhost, queue.name, planned.to
        )
        if answer.code:
            log.warning("%s", answer.text)
            self._refused[queue.id] = answer.text, asyncio.get_running_loop().time()

    def _next(self, of_streams: bool) -> Planned | None:
        planned = self._planned.get(of_streams)
        while planned:
            queue, to = planned.popleft()
            now = self._catalog.queue_by_id(queue.id)
            if now is not None and to in self.places() and not why_it_stays(now):
                return Planned(now, to)
        return self._of_drained(of_streams)

    def _of_drained(self, of_streams: bool) -> Planned | None:
        drained = self._catalog.drained_nodes
        places = self.places()
        since = asyncio.get_running_loop().time() - REFUSED_S
        self._refused = {id: each for id, each in self._refused.items() if each[1] > since}
        leaving = {
            shard
            for node in self._cluster.nodes
            if node.name in drained and node.is_alive
            for shard in node.shards
        }.difference(places)
        if not leaving or not places:
            return None
        for queue in self._catalog.index.all():
            if (
                queue.shard in leaving
                and is_stream(queue.arguments) is of_streams
                and queue.id not in self._refused
                and not why_it_stays(queue)
            ):
                suits = self._suiting()(queue)
                return Planned(queue, emptiest(counts_of(self._catalog.index.all(), suits)))
        return None
