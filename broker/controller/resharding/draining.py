"""Shard queues that are to go when they are empty: looked at from time to time, and let go.

Such a queue is unbound. Before each look all front doors are asked whether what they had routed has arrived, however
late a front door is; so it goes when two looks in a row found nothing in it, neither ready nor held by a consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from shardmq.broker.controller.requests import Drained, Restore
from shardmq.broker.controller.resharding.shard_sets import draining
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.control import Answer

LOOK_S_FIRST = 2.0
LOOK_S_MAX = 20.0  # between looks at queues in which nothing happens

log = logging.getLogger(__name__)


class Asked(Protocol):
    """What is needed of the authority."""

    async def ask(self, request: Drained | Restore) -> Answer: ...


class Shards(Protocol):
    async def messages(self, queues: list[QueuePut]) -> dict[int, int]: ...


class Ends(Protocol):
    def note(self, queue: QueuePut) -> bool:
        """Keep what is to be known of a queue that goes; whether it may go."""


class Doors(Protocol):
    async def fence(self) -> bool: ...


class Looks:
    """What was found so far. Pure: `seen` takes one look and says which queues may go."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}  # messages by queue id, as of the last look
        self.wait_s = LOOK_S_FIRST

    def seen(self, queues: list[QueuePut], messages: Mapping[int, int]) -> list[QueuePut]:
        """`messages`: of the queues whose shards answered, ready ones and held ones."""
        found = {queue.id: messages[queue.id] for queue in queues if queue.id in messages}
        empty_twice = [
            queue for queue in queues if found.get(queue.id) == self._found.get(queue.id) == 0
        ]
        idle = found == self._found and found
        self.wait_s = min(2 * self.wait_s, LOOK_S_MAX) if idle else LOOK_S_FIRST
        self._found = {} if empty_twice else found
        return empty_twice


async def run(catalog: Catalog, shards: Shards, doors: Doors, authority: Asked, ends: Ends) -> None:
    """Until cancelled."""
    looks = Looks()
    while True:
        await asyncio.sleep(looks.wait_s)
        queues = [queue for vhost in catalog.vhosts.values() for name in vhost.part_exchanges()
                  for queue in draining(vhost.parts(name))]  # fmt: skip
        arrived = bool(queues) and await doors.fence()
        messages = await shards.messages(queues) if arrived else {}
        for queue in looks.seen(queues, messages):
            if not ends.note(queue):
                continue
            await authority.ask(Drained(queue.id))
            assert queue.part is not None  # of all that drain
            await authority.ask(Restore(queue.vhost, queue.part.exchange))
            if catalog.queue_by_id(queue.id) is None:
                log.info(
                    "shard queue '%s' in vhost '%s' is empty and gone", queue.name, queue.vhost
                )
