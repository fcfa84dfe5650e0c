"""Direct replies past the shard, where both clients are at this front door.

The queue of a direct reply-to consumer lies in a shard like any other, and takes what comes from
other front doors. What a client of this front door publishes to it goes to the consumer at once:
nothing of the queue would outlive this process anyway. A reply comes back as a `Reply`, whose
frames the caller writes.

A consumer that does not take its replies must not fill the memory. While more than
REPLIES_BYTES_MAX of its output is unsent its replies go to the queue, and so do all behind them
until the queue is known to be empty; so the replies of one publisher stay in order.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from shardmq.broker.amqp import Publishes, contents
from shardmq.broker.front_door.connection.output import OUT_BYTES_MAX
from shardmq.broker.front_door.consume.consumers import Consumer
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.checks import Refusal

# With one read's replies on top a client still has less unsent than would keep it from being read.
REPLIES_BYTES_MAX = OUT_BYTES_MAX // 2
# How often in a row the queue must be found empty: an answer may overtake deliveries of the same
# turn of the shard, but not those of the turn before.
FOUND_EMPTY = 2


class ReplyPath:
    """The path of one consumer's replies: near is straight to the consumer, far is by its shard.

    The caller says what happens.
    """

    __slots__ = ("_found", "_sent", "far")

    def __init__(self) -> None:
        self.far = False
        self._sent = False  # something went far since the queue was first found empty
        self._found = 0  # times in a row that the queue was found empty

    def choose(self, unsent_bytes: int) -> bool:
        """Return whether the next reply goes near."""
        if unsent_bytes > REPLIES_BYTES_MAX:
            self.go_far()
        elif self.far:
            self._sent = True
        return not self.far

    def go_far(self) -> None:
        """Send the next reply far, and those behind it."""
        self.far = self._sent = True

    def begin_count(self) -> None:
        """Note that the queue's messages are about to be counted, behind all that was sent far."""
        if self._sent:
            self._sent, self._found = False, 0

    def counted(self, messages: int) -> None:
        """Note how many messages the queue had."""
        self._found = 0 if messages or self._sent else self._found + 1
        if self._found == FOUND_EMPTY:
            self.far, self._found = False, 0


class Reply(NamedTuple):
    """Frames of direct replies, to be written to the consumer's client.

    `fed`: bit mask of the shards that got copies of these for the firehose, on behalf of that
    client.
    """

    requester: Requester
    frames: bytes
    fed: int = 0


class Requester:
    """A direct reply-to consumer of this front door.

    `unwritten_bytes`: replies handed over whose frames are not written yet; who writes them sets it
    to 0.
    """

    __slots__ = ("_counting", "_links", "_path", "_queue", "consumer", "unwritten_bytes")

    def __init__(self, consumer: Consumer, queue: QueuePut, links: ShardLinks) -> None:
        self.consumer = consumer
        self.unwritten_bytes = 0
        self._queue = queue
        self._links = links
        self._path = ReplyPath()
        self._counting: asyncio.Task[None] | None = None

    def takes(self, wanted: bool = True) -> bool:
        """Return whether the next reply is to be handed over.

        It must go to the queue if that is not `wanted`.
        """
        unsent_bytes = self.consumer.client.output.pending + self.unwritten_bytes
        if not wanted:
            self._path.go_far()
        elif self._path.choose(unsent_bytes):
            return True
        # The limit for coming back is half of that for going far, so that replies do not go to and
        # fro.
        if (
            self._counting is None
            and unsent_bytes <= REPLIES_BYTES_MAX // 2
            and self._links.is_up(self._queue.shard)
        ):
            self._counting = asyncio.get_running_loop().create_task(self._count())
        return False

    async def _count(self) -> None:
        """Find out whether the queue is empty, and replies may go near again."""
        try:
            for _ in range(FOUND_EMPTY):
                if not self._links.is_up(self._queue.shard):
                    return  # a question would overtake the replies that wait for the shard
                self._path.begin_count()
                messages, _ = await self._links.count(self._queue)
                self._path.counted(messages)
        except Refusal:
            pass  # its node is down, and replies go far until it is back
        finally:
            self._counting = None

    def close(self) -> None:
        if self._counting is not None:
            self._counting.cancel()


class Replies:
    """All requesters of this front door, by the id of their queue."""

    def __init__(self, links: ShardLinks, counts: Counts | None = None) -> None:
        self.here: dict[int, Requester] = {}
        self._links = links
        self._counts = counts or Counts()
        self.tracing: Tracing | None = None  # None: no vhost is traced

    def add(self, consumer: Consumer, queue: QueuePut) -> None:
        """Hand replies over to a consumer from now on.

        Nobody knows the queue's name before consume-ok.
        """
        self.here[queue.id] = Requester(consumer, queue, self._links)

    def remove(self, consumer: Consumer | None) -> None:
        """Send what still comes for a consumer to its queue, which goes too."""
        requester = self.here.pop(consumer.queue_id, None) if consumer is not None else None
        if requester is not None:
            requester.close()

    def hand_over(self, requester: Requester, event: Publishes, first: int, count: int) -> Reply:
        """Return `count` messages of a read, from the one with index `first` on, as deliveries."""
        consumer = requester.consumer
        channel, client = consumer.channel, consumer.client
        tag = channel.next_tag
        channel.next_tag += count
        self._counts.delivered_auto += count
        channel.delivered_auto += count
        frames = contents.passed_on(
            event.buffer,
            event.table,
            first,
            count,
            channel.number,
            consumer.tag_bytes,
            tag,
            client.session.frame_bytes_max,
        )
        requester.unwritten_bytes += len(frames)
        return Reply(requester, frames)

    def hand_over_one(self, requester: Requester, stored: bytes) -> Reply:
        """Return a stored message as a delivery."""
        consumer = requester.consumer
        channel, client = consumer.channel, consumer.client
        tag = channel.next_tag
        channel.next_tag += 1
        self._counts.delivered_auto += 1
        channel.delivered_auto += 1
        fed = 0
        if self.tracing is not None:
            fed = self.tracing.delivered(
                client.session, channel.number, consumer.queue_name, False, 1, stored
            )
        frames = contents.deliveries(
            stored,
            1,
            channel.number,
            consumer.tag_bytes,
            tag,
            False,
            client.session.frame_bytes_max,
        )
        requester.unwritten_bytes += len(frames)
        return Reply(requester, frames, fed)
