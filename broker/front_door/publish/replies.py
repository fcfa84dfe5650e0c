"""Direct replies past the shard: who asked and who answers are clients of this front door.

The queue of a direct reply-to consumer lies in a shard like any other and takes what comes from elsewhere. What a
client of this front door publishes to it is written to the consumer at once: nothing of it would outlive this process
anyway.

A consumer that does not take its replies must not fill the memory: past REPLIES_BYTES_MAX of what it has not taken they
go to the queue, and so does all behind them until the queue is known to be empty; so replies of one publisher stay in
order.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from shardmq.broker.amqp import Publishes, contents
from shardmq.broker.front_door.connection.output import OUT_BYTES_MAX
from shardmq.broker.front_door.consume.consumers import Consumer
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.model.changes import QueuePut

if TYPE_CHECKING:
    from shardmq.broker.front_door.publish.tracing import Tracing

# With one read's replies on top a client still has less unsent than would keep it from being read.
REPLIES_BYTES_MAX = OUT_BYTES_MAX // 2
# How often in a row its queue must be found empty: an answer may overtake what was handed out with it, but not what was
# handed out before it was asked for.
FOUND_EMPTY = 2


class Way:
    """Which way one consumer's replies go: near is straight to it, far by its shard. The caller says what happens."""

    __slots__ = ("_found", "_sent", "far")

    def __init__(self) -> None:
        self.far = False
        self._sent = False  # something went far since the queue was first found empty
        self._found = 0  # times in a row

    def choose(self, unsent_bytes: int) -> bool:
        """Whether the next reply goes near."""
        if unsent_bytes > REPLIES_BYTES_MAX:
            self.go_far()
        elif self.far:
            self._sent = True
        return not self.far

    def go_far(self) -> None:
        """The next reply does, and those behind it."""
        self.far = self._sent = True

    def begin_look(self) -> None:
        """The queue is about to be looked at: behind all that was sent far."""
        if self._sent:
            self._sent, self._found = False, 0

    def saw(self, messages: int) -> None:
        """How many there were."""
        self._found = 0 if messages or self._sent else self._found + 1
        if self._found == FOUND_EMPTY:
            self.far, self._found = False, 0


class Queues(Protocol):
    """The door's way to the shards."""

    def is_up(self, shard: int) -> bool: ...
    async def count(self, queue: QueuePut) -> tuple[int, int]:
        """Ready messages and consumers."""


class Requester:
    """A direct reply-to consumer of this front door."""

    __slots__ = ("_looking", "_queue", "_queues", "_way", "consumer")

    def __init__(self, consumer: Consumer, queue: QueuePut, queues: Queues) -> None:
        self.consumer = consumer
        self._queue = queue
        self._queues = queues
        self._way = Way()
        self._looking: asyncio.Task[None] | None = None

    def takes(self, wanted: bool = True) -> bool:
        """Whether the next reply is given to it here. Else, and if that is not `wanted`, it has to go to its queue."""
        unsent_bytes = self.consumer.client.output.pending
        if not wanted:
            self._way.go_far()
        elif self._way.choose(unsent_bytes):
            return True
        # Asked for with half the bytes unsent that make it go far, so that it does not go to and fro.
        if (
            self._looking is None
            and unsent_bytes <= REPLIES_BYTES_MAX // 2
            and self._queues.is_up(self._queue.shard)
        ):
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return False

    async def _look(self) -> None:
        """Before the next one may go near again."""
        try:
            for _ in range(FOUND_EMPTY):
                if not self._queues.is_up(self._queue.shard):
                    return  # what is asked now would overtake what waits for the shard
                self._way.begin_look()
                messages, _ = await self._queues.count(self._queue)
                self._way.saw(messages)
        finally:
            self._looking = None

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()


class Replies:
    """All requesters of this front door, by the id of their queue."""

    def __init__(self, queues: Queues, counts: Counts | None = None) -> None:
        self.here: dict[int, Requester] = {}
        self._queues = queues
        self._counts = counts or Counts()
        self.tracing: Tracing | None = None  # nothing is traced

    def add(self, consumer: Consumer, queue: QueuePut) -> None:
        """consume-ok is said next: before, nobody knows the queue's name."""
        self.here[queue.id] = Requester(consumer, queue, self._queues)

    def remove(self, consumer: Consumer | None) -> None:
        """From here on what still comes for it goes to its queue, which goes too."""
        requester = self.here.pop(consumer.queue_id, None) if consumer is not None else None
        if requester is not None:
            requester.close()

    def hand_over(self, requester: Requester, event: Publishes, first: int, count: int) -> None:
        """These messages of a read, from `first` on."""
        consumer = requester.consumer
        channel, client = consumer.channel, consumer.client
        tag = channel.next_tag
        channel.next_tag += count
        self._counts.delivered_auto += count
        channel.delivered_auto += count
        client.write(
            contents.passed_on(
                event.buffer,
                event.table,
                first,
                count,
                channel.number,
                consumer.tag_bytes,
                tag,
                client.frame_bytes_max,
            )
        )

    def hand_over_one(self, requester: Requester, stored: bytes) -> None:
        """A stored message."""
        consumer = requester.consumer
        channel, client = consumer.channel, consumer.client
        tag = channel.next_tag
        channel.next_tag += 1
        self._counts.delivered_auto += 1
        channel.delivered_auto += 1
        if self.tracing is not None:
            self.tracing.delivered(client, channel.number, consumer.queue_name, False, 1, stored)
        client.write(
            contents.deliveries(
                stored, 1, channel.number, consumer.tag_bytes, tag, False, client.frame_bytes_max
            )
        )
