"""Deletes shard queues that are to go once they are empty.

Such a queue is unbound. Before each poll all front doors are asked whether what they had routed has
arrived, however late a front door is. So a queue goes when two polls in a row found nothing in it,
neither ready nor held by a consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.requests import Drained, Restore
from shardmq.broker.controller.streams.ended_streams import EndedStreams
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import DRAINING, QueuePut

POLL_S_FIRST = 2.0
POLL_S_MAX = 20.0  # between polls of queues in which nothing happens

log = logging.getLogger(__name__)


class DrainPolls:
    """The results of the polls so far."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}  # messages by queue id in the last poll
        self.wait_s = POLL_S_FIRST

    def seen(self, queues: list[QueuePut], messages: Mapping[int, int]) -> list[QueuePut]:
        """Take one poll and return the queues that may go.

        `messages` counts the ready messages and those held by consumers, by queue id. Queues whose
        shard did not answer are not in it.
        """
        found = {queue.id: messages[queue.id] for queue in queues if queue.id in messages}
        empty_twice = [
            queue for queue in queues if found.get(queue.id) == self._found.get(queue.id) == 0
        ]
        idle = found == self._found and found
        self.wait_s = min(2 * self.wait_s, POLL_S_MAX) if idle else POLL_S_FIRST
        self._found = {} if empty_twice else found
        return empty_twice


async def run(
    catalog: Catalog,
    shards: ShardLinks,
    front_doors: DoorLinks,
    authority: Authority,
    ended_streams: EndedStreams,
) -> None:
    """Poll the draining queues until cancelled."""
    polls = DrainPolls()
    while True:
        await asyncio.sleep(polls.wait_s)
        queues = [
            queue
            for vhost in catalog.vhosts.values()
            for name in vhost.part_exchanges()
            for queue in vhost.parts(name)
            if queue.part is not None and queue.part.state == DRAINING
        ]
        arrived = bool(queues) and await front_doors.fence()
        messages = await shards.messages(queues) if arrived else {}
        for queue in polls.seen(queues, messages):
            if not await ended_streams.note(queue):
                continue
            await authority.ask(Drained(queue.id))
            assert queue.part is not None  # all queues that drain are shard queues
            await authority.ask(Restore(queue.vhost, queue.part.exchange))
            if catalog.queue_by_id(queue.id) is None:
                log.info(
                    "shard queue '%s' in vhost '%s' is empty and gone", queue.name, queue.vhost
                )
