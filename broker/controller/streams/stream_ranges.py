"""The streams that a name stands for, and where they begin and end.

The shards write the ranges on their boards (`shardd/wire/board.py`). Those of other nodes are asked
for.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.requests import PARTITION_ORDER
from shardmq.broker.controller.stored.installation import installation_id
from shardmq.broker.controller.streams.boards import Boards, Wanted, have_gone_on, wait_until
from shardmq.broker.controller.streams.elsewhere import Elsewhere, Watch
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import hidden
from shardmq.shardd.wire.board import Range


class StreamShard(NamedTuple):
    """A stream: a queue, or a shard of a stream exchange.

    number: the index of the shard; 0 for a queue.
    """

    number: int
    queue: QueuePut


class StreamRanges:
    """The ranges of streams, read from the boards of the shards of this node.

    elsewhere: the other nodes; None without a cluster.
    """

    def __init__(self, elsewhere: Elsewhere | None = None) -> None:
        self.elsewhere = elsewhere
        self._boards = Boards()
        self._installation: uuid.UUID | None = None

    async def of(self, config: ControllerConfig, queues: Iterable[QueuePut]) -> dict[int, Range]:
        """Return the ranges of streams by queue id, without those that their shard has not said."""
        here, far = self._divided(Wanted(queue.shard, queue.id) for queue in queues)
        found = self._boards.ranges(config.runtime_dir, here)
        if self.elsewhere is not None and far:
            found |= await self.elsewhere.ranges(far)
        return found

    async def wait_for_more(
        self, config: ControllerConfig, wanted: Callable[[], Iterable[Wanted]], wait_s: float
    ) -> None:
        """Wait until a stream has more than `wanted` says, but at most `wait_s` seconds.

        `wanted` is called again and again, because there may be other streams meanwhile.
        """
        watch = None if self.elsewhere is None else Watch(self.elsewhere)

        def gone_on() -> bool:
            here, far = self._divided(wanted())
            if have_gone_on(here, self._boards.ranges(config.runtime_dir, here)):
                return True
            return watch is not None and watch.has_news(far)

        await wait_until(gone_on, wait_s)

    def _divided(self, wanted: Iterable[Wanted]) -> tuple[list[Wanted], list[Wanted]]:
        """Return the streams of this node, and those of others."""
        if (elsewhere := self.elsewhere) is None:
            return list(wanted), []
        here: list[Wanted] = []
        far: list[Wanted] = []
        for each in wanted:
            (here if elsewhere.is_here(each.shard) else far).append(each)
        return here, far

    def id_of(self, config: ControllerConfig, queue: QueuePut) -> str:
        """Return an id that no other stream ever has: ids of queues are never used again."""
        if self._installation is None:
            self._installation = installation_id(Path(config.data_dir))
        return str(uuid.uuid5(self._installation, str(queue.stream_id)))


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


def partitions_of(vhost: Vhost, exchange: str) -> list[str]:
    """Return the streams of RabbitMQ's kind of super stream in their order; none if it is none."""
    bound = [
        (order, binding.destination)
        for binding in vhost.bindings_from(exchange)
        if type(order := binding.arguments.get(PARTITION_ORDER)) is int
    ]
    return [stream for _, stream in sorted(bound)]


def names_of(vhost: Vhost) -> list[str]:
    queues = [queue.name for queue in vhost.queues.values() if is_stream(queue)]
    exchanges = [
        name
        for name in vhost.part_exchanges()
        if name in vhost.exchanges and name not in vhost.queues
    ]
    return queues + [name for name in exchanges if parts_of(vhost, name)]
