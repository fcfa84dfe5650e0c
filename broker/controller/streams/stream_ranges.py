"""The streams that a name stands for, and where they begin and end.

The shards write the ranges on their boards (`shardd/wire/board.py`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.stored.installation import installation_id
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import hidden
from shardmq.shardd.wire.board import BoardView, Range, path_of

POLL_S = 0.005  # how late `wait_until` returns


class StreamShard(NamedTuple):
    """A stream: a queue, or a shard of a stream exchange.

    number: the index of the shard; 0 for a queue.
    """

    number: int
    queue: QueuePut


class StreamRanges:
    """The ranges of streams, read from the boards of their shards."""

    def __init__(self) -> None:
        self._boards: dict[int, BoardView] = {}
        self._installation: uuid.UUID | None = None

    def range_of(self, config: ControllerConfig, queue: QueuePut) -> Range | None:
        """Return the range of a stream; None if its shard has not said it."""
        board = self._boards.get(queue.shard)
        if board is None:
            board = self._boards[queue.shard] = BoardView(path_of(config.runtime_dir, queue.shard))
        return board.range_of(queue.id)

    def id_of(self, config: ControllerConfig, queue: QueuePut) -> str:
        """Return an id that no other stream ever has: ids of queues are never used again."""
        if self._installation is None:
            self._installation = installation_id(Path(config.data_dir))
        return str(uuid.uuid5(self._installation, str(queue.id)))

    async def wait_until(self, met: Callable[[], bool], wait_s: float) -> None:
        """Wait until `met` returns true, but at most `wait_s` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not met() and loop.time() < end:
            await asyncio.sleep(min(POLL_S, max(end - loop.time(), 0)))


def is_stream(queue: QueuePut) -> bool:
    """Return whether users may read the queue as a stream; hidden queues are not theirs."""
    return queue.arguments.get("x-queue-type") == "stream" and not hidden.is_of_exchange(queue.name)


def exchange_of(vhost: Vhost, queue: QueuePut) -> str | None:
    """Return the stream exchange that the queue is a shard of, if there is one."""
    found = queue.part.exchange if queue.part is not None else None
    return found if found in vhost.exchanges else None


def parts_of(vhost: Vhost, name: str) -> list[StreamShard]:
    """Return the streams that a name stands for, by index; none if it names no stream."""
    queue = vhost.queues.get(name)
    if queue is not None:
        return [StreamShard(0, queue)] if is_stream(queue) else []
    if name not in vhost.exchanges:
        return []
    parts = [
        StreamShard(queue.part.index, queue)
        for queue in vhost.parts(name)
        if queue.part is not None
    ]
    return [part for part in parts if is_stream(part.queue)]


def names_of(vhost: Vhost) -> list[str]:
    queues = [queue.name for queue in vhost.queues.values() if is_stream(queue)]
    exchanges = [
        name
        for name in vhost.part_exchanges()
        if name in vhost.exchanges and name not in vhost.queues
    ]
    return queues + [name for name in exchanges if parts_of(vhost, name)]
