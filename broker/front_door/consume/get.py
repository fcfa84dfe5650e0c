"""basic.get: one message of a queue, or of a virtual queue whose shards take turns.

A pseudo consumer for each channel and shard holds what was got until it is settled.
"""

from __future__ import annotations

import asyncio
import time

from pamqp import base, commands

from shardmq.broker.amqp import contents, properties
from shardmq.broker.front_door.consume.attaching import Attaching
from shardmq.broker.front_door.consume.consumers import Clock, ConsumingChannel, Getter
from shardmq.broker.front_door.consume.refusals import GET, refused_by_shard, refused_consume
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.shard_link import is_down
from shardmq.broker.front_door.links.shard_links import ShardLinks, count_if_up
from shardmq.broker.front_door.links.shard_requests import ShardDown, ShardRefused
from shardmq.broker.front_door.publish.spans import Spans
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.model import checks, message_dlx
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared import reading
from shardmq.shardd.wire import messages as wire

# Virtual queues of which it is remembered at which shard the last basic.get began.
CURSORS_MAX = 1024
# Up to this many shards are asked how many messages are left in all. Of more shards, the others are
# asked only when the first has none.
COUNTED_SHARDS_MAX = 64

Answer = tuple[int, wire.Got]  # epoch of the shard, and what it gave


class Gets:
    """All of basic.get of this front door."""

    def __init__(
        self,
        links: ShardLinks,
        attaching: Attaching,
        counts: Counts,
        clock: Clock,
        spans: Spans | None = None,
    ) -> None:
        self._links = links
        self._attaching = attaching
        self._counts = counts
        self._clock = clock
        self._spans = spans
        self._cursors: dict[tuple[str, str], int] = {}  # by vhost and virtual queue
        self.tracing: Tracing | None = None  # None: nothing is traced

    async def get(
        self, channel: ConsumingChannel, queue: QueuePut, no_ack: bool
    ) -> base.Frame | bytes | None:
        """Take one message of a queue.

        Returns frames with the message, or get-empty, or None when the channel was closed
        meanwhile. Raises what the client did wrong.
        """
        _check(channel, queue)
        answer = await self._ask(channel, queue, no_ack)
        return self._answered(channel, queue, answer, no_ack, 0)

    async def get_of_shards(
        self, channel: ConsumingChannel, name: str, shards: tuple[QueuePut, ...], no_ack: bool
    ) -> base.Frame | bytes | None:
        """Take one message of a virtual queue, in the same way as get().

        It comes from the shard whose turn it is, or else from the first one that has some.
        """
        _check(channel, shards[0])
        first = self._next_cursor((channel.client.session.vhost, name), len(shards))
        queue, *others = self._without_down(shards[first:] + shards[:first])
        answer = await self._ask(channel, queue, no_ack)
        ready: list[int] = []
        if len(shards) <= COUNTED_SHARDS_MAX or not answer[1].remaining:
            counts = await asyncio.gather(*(count_if_up(self._links, other) for other in others))
            ready = [messages for messages, _ in counts]
        for at, other in enumerate(others):
            if answer[1].message:
                break
            if ready[at]:
                queue, ready[at] = other, 0
                answer = await self._ask(channel, other, no_ack)
        return self._answered(channel, queue, answer, no_ack, sum(ready))

    def _without_down(self, shards: tuple[QueuePut, ...]) -> tuple[QueuePut, ...]:
        """Return the shards whose nodes are not down; all if there is none."""
        links, now = self._links.links, self._clock.now
        return tuple(each for each in shards if not is_down(links[each.shard], now)) or shards

    def _next_cursor(self, name: tuple[str, str], shards: int) -> int:
        cursor = self._cursors.pop(name, -1) + 1
        while len(self._cursors) >= CURSORS_MAX:
            del self._cursors[next(iter(self._cursors))]
        self._cursors[name] = cursor
        return cursor % shards

    async def _ask(self, channel: ConsumingChannel, queue: QueuePut, no_ack: bool) -> Answer:
        number = 0 if no_ack else self._getter(channel, queue.shard).number
        client = channel.client

        def make(request: int) -> wire.Get:
            return wire.Get(request, queue.id, number, client.id, channel.number, no_ack)

        try:
            epoch, got = await self._links.ask_in_epoch(queue.shard, make)
        except ShardDown:
            refusal = checks.home_is_down(queue, self._links.links[queue.shard].node)
            raise refused_consume(refusal, GET) from None
        except ShardRefused as refused:
            raise refused_by_shard(refused, queue.name, client.session.vhost, GET) from None
        assert isinstance(got, wire.Got)
        return epoch, got

    def _answered(
        self,
        channel: ConsumingChannel,
        queue: QueuePut,
        answer: Answer,
        no_ack: bool,
        ready_at_others: int,
    ) -> base.Frame | bytes | None:
        """Account for what a shard gave. Other shards of the virtual queue have some ready too."""
        epoch, got = answer
        if not channel.is_open:
            return None  # its release, behind this get, requeues the message
        if not got.message:
            self._counts.got_empty += 1
            channel.got_empty += 1
            return commands.Basic.GetEmpty()
        message = bytes(properties.without_header_in_each(got.message, 1, message_dlx.BCC))
        if got.times:
            message = properties.with_delivery_count(message, 1, got.times)
        tag = channel.next_tag
        channel.next_tag += 1
        channel.redelivered += got.redelivered
        if no_ack:
            self._counts.got_auto += 1
            channel.got_auto += 1
        else:
            self._counts.got_manual += 1
            channel.got_manual += 1
            getter = self._getter(channel, queue.shard)
            channel.unacked.add(tag, 1, getter, epoch, got.number, self._clock.now)
            getter.took(tag, queue.id)
        client = channel.client
        if self.tracing is not None:
            fed = self.tracing.delivered(
                client.session, channel.number, queue.name, got.redelivered, 1, message
            )
            client.feeds(fed)
        if self._spans is not None:
            self._spans.delivered(client.session, queue.name, time.time_ns(), 1, message)
        return contents.get_ok(
            message,
            channel.number,
            tag,
            got.redelivered,
            got.remaining + ready_at_others,
            client.session.frame_bytes_max,
        )

    def _getter(self, channel: ConsumingChannel, shard: int) -> Getter:
        getter = channel.getters.get(shard)
        if getter is None:
            getter = Getter(channel, self._attaching.next_number(), shard)
            channel.getters[shard] = self._attaching.consumers[getter.number] = getter
        return getter


def _check(channel: ConsumingChannel, queue: QueuePut) -> None:
    if reading.is_stream(queue.arguments):
        refusal = reading.no_get(channel.client.session.vhost, queue.name)
        raise refused_consume(refusal, GET)
