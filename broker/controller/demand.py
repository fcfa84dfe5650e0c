"""Says which links of queues are to take messages: those whose queues here have idle consumers.

A federated queue asks its upstreams only while it is empty and has an active consumer that would
take a message now, as in RabbitMQ. The consumers of links themselves have negative priorities and
do not count, nor does a consumer whose prefetch is used up. Otherwise two brokers that federate a
queue from each other would pass messages to and fro for nobody.

The prefetch of a consumer of a virtual queue holds over all its shard queues. If it is used up at
one of them, the consumer counts at none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain
from typing import Final

from shardmq.broker.controller.peers.shard_links import ShardLinks, ShardSilent
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import QueuePut, lives
from shardmq.broker.model.federation import QueueLink
from shardmq.broker.shared.bridging import Key, key_of
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.messages import ConsumerStats, StatsReply

# Shards are asked so often, or less often if it takes longer than one part in REST_SHARE of that.
ASK_S, ASK_S_MAX = 0.2, 5.0
REST_SHARE: Final = 20
ANSWER_S_MAX: Final = 2.0
NO_NUMBERS: Final = 1  # a shard that is asked on leaves out the numbers of its process


def rest_s(took_s: float) -> float:
    """Return how long to wait after an answer of all shards that took so long."""
    return min(max(ASK_S, REST_SHARE * took_s), ASK_S_MAX)


class Demand:
    """Asks the shards which federated queues are to take messages."""

    def __init__(self, catalog: Catalog, shards: ShardLinks) -> None:
        self._catalog = catalog
        self._shards = shards

    async def pulling(self, links: Iterable[QueueLink]) -> list[Key]:
        """Return the links that are to take messages, in their order.

        Queues of a shard that does not answer take none.
        """
        links = list(links)
        ids: dict[tuple[str, str], list[int]] = {}  # of queues that give messages to consumers
        by_shard: dict[int, list[int]] = {}
        for link in links:
            place = link.vhost, link.queue
            vhost = self._catalog.vhosts.get(link.vhost)
            if vhost is None or place in ids:
                continue
            queues = _queues(vhost, link)
            known = [life for queue in queues if not queue.paused for life in lives(queue)]
            ids[place] = [life.id for life in known]
            for life in known:
                by_shard.setdefault(life.shard, []).append(life.id)
        replies = await asyncio.gather(
            *(self._replies(shard, asked) for shard, asked in by_shard.items())
        )
        full: set[int] = set()
        consumers: list[ConsumerStats] = []
        for reply in chain.from_iterable(replies):
            full.update(queue.id for queue in reply.queues if queue.ready)
            consumers += [each for each in reply.consumers if each.active and each.priority >= 0]
        busy = {_name(each) for each in consumers if not each.wants}
        wanted = {each.queue for each in consumers if _name(each) not in busy}
        return [
            key_of(link)
            for link in links
            if (of := ids.get((link.vhost, link.queue))) is not None
            and not wanted.isdisjoint(of)
            and full.isdisjoint(of)
        ]

    async def _replies(self, shard: int, queues: list[int]) -> list[StatsReply]:
        """Ask a shard, one part after the other, until it does not answer."""
        found: list[StatsReply] = []
        for start in range(0, len(queues), wire.STATS_QUEUES_MAX):
            reply = await self._reply(shard, queues[start : start + wire.STATS_QUEUES_MAX])
            if reply is None:
                break
            found.append(reply)
        return found

    async def _reply(self, shard: int, queues: list[int]) -> StatsReply | None:
        ready = any(each.number == shard and each.ready for each in self._shards.shards)
        if not ready:
            return None
        try:
            reply = await self._shards.request(
                shard, lambda number: wire.Stats(number, queues, passed=NO_NUMBERS), ANSWER_S_MAX
            )
        except ShardSilent:
            return None
        return reply if isinstance(reply, StatsReply) else None


def _name(consumer: ConsumerStats) -> tuple[int, int, int, str]:
    """Return what is the same for one consumer of a virtual queue at all its shard queues."""
    return consumer.door, consumer.connection, consumer.channel, consumer.tag


def _queues(vhost: Vhost, link: QueueLink) -> list[QueuePut]:
    """Return the queue of a link, or the shard queues of its virtual queue."""
    if link.is_virtual:
        return vhost.parts(link.queue)
    queue = vhost.queues.get(link.queue)
    return [] if queue is None else [queue]
