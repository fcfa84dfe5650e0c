"""Consume and cancel, and what shards say of consumers.

The parts of consuming are objects of their own: deliveries.py, acks.py, get.py, crediting.py,
group_consumer.py, attaching.py. They know a connection only as `consumers.Receiver`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from functools import partial

from pamqp import commands

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.consume.acks import Acks
from shardmq.broker.front_door.consume.arguments import (
    affinity_of,
    handover_s_of,
    priority_of,
    terms_of,
)
from shardmq.broker.front_door.consume.attaching import Attaching, attached
from shardmq.broker.front_door.consume.consumers import (
    Assignment,
    Clock,
    Consumer,
    ConsumingChannel,
    EndedConsumer,
    GroupConsumer,
)
from shardmq.broker.front_door.consume.crediting import Crediting
from shardmq.broker.front_door.consume.deliveries import Deliveries
from shardmq.broker.front_door.consume.get import Gets
from shardmq.broker.front_door.consume.group_consumer import GroupConsuming
from shardmq.broker.front_door.consume.refusals import CONSUME, refused_by_shard, refused_consume
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.links.shard_requests import ShardDown, ShardRefused
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.spans import Spans
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared import reading
from shardmq.shardd.wire import messages as wire

log = logging.getLogger("shardmq.broker.front_door.consume.consuming")

# A consumer that is being attached while its queue moves follows when its client has been told.
FOLLOW_AGAIN_S = 0.02
# What the client of a stream's consumer holds when its stream has moved is waited for so long.
HANDOVER_S = 0.7


class Consuming:
    """All consuming of this front door."""

    def __init__(
        self,
        links: ShardLinks,
        controller: CatalogLink,
        clock: Clock,
        counts: Counts | None = None,
        replies: Replies | None = None,
        spans: Spans | None = None,
    ) -> None:
        counts = counts or Counts()
        self._controller = controller
        self._links = links
        self._replies = replies or Replies(links, counts)
        self.crediting = Crediting(links, clock)
        self._attaching = Attaching(links, self.crediting)
        self.consumers = self._attaching.consumers  # by number
        self.groups = GroupConsuming(links, self._attaching, self.crediting, controller)
        self.deliveries = Deliveries(links, self.consumers, self.crediting, counts, clock, spans)
        self.acks = Acks(links, self.crediting, self.groups)
        self.gets = Gets(links, self._attaching, counts, clock, spans)

    def trace(self, tracing: Tracing | None) -> None:
        """Copy what clients are given from now on; None: nothing is traced."""
        self.deliveries.tracing = self.gets.tracing = tracing

    # -- consume ---------------------------------------------------------------------------------

    async def consume(
        self, channel: ConsumingChannel, method: commands.Basic.Consume, queue: QueuePut
    ) -> commands.Basic.ConsumeOk | None:
        """Begin a consumer of one queue; return the answer when the shard has it.

        There is none if the client wants none or a delivery was quicker, which then sent it. Raises
        what the client did wrong.
        """
        arguments, vhost = method.arguments or {}, channel.client.session.vhost
        consumer = Consumer(channel, self._attaching.next_number(), tag_of(method))
        consumer.queue_id, consumer.queue_name, consumer.shard = queue.id, queue.name, queue.shard
        consumer.auto_delete = queue.auto_delete
        consumer.nowait = bool(method.nowait)
        consumer.no_ack, consumer.exclusive = bool(method.no_ack), bool(method.exclusive)
        consumer.priority = priority_of(arguments, queue.name, vhost)
        consumer.affinity = affinity_of(arguments, queue.name, vhost)
        consumer.prefetch = 0 if consumer.no_ack else channel.prefetch
        if reading.is_stream(queue.arguments):
            asked = _read_from(channel, method, queue.name, consumer.tag)
            consumer.reading = reading.Reading(asked)
        channel.consumers[consumer.tag] = self.consumers[consumer.number] = consumer
        try:
            attached(consumer, await self._attaching.attach(consumer, resumed=False))
        except ShardRefused as refused:
            self._forget(consumer)
            raise refused_by_shard(refused, queue.name, vhost) from None
        except ShardDown as down:
            self._forget(consumer)
            if down.was_sent and consumer.auto_delete:
                # The shard may have attached the consumer, and keep its queue until it comes back.
                self._attaching.release([consumer])
            node = self._links.links[queue.shard].node
            raise refused_consume(checks.home_is_down(queue, node)) from None
        if consumer.number not in self.consumers:
            return None  # cancelled meanwhile
        if method.queue == checks.REPLY_TO:
            channel.replies = consumer
            self._replies.add(consumer, queue)
        return consumer.announce()

    def _forget(self, consumer: Consumer) -> None:
        """Forget a consumer that was refused."""
        consumer.attaching = None  # it holds the refusal, whose frames hold the consumer
        self.crediting.close(consumer)
        self.consumers.pop(consumer.number, None)
        if consumer.channel.consumers.get(consumer.tag) is consumer:
            del consumer.channel.consumers[consumer.tag]

    async def consume_shards(
        self,
        channel: ConsumingChannel,
        method: commands.Basic.Consume,
        name: str,
        shards: tuple[QueuePut, ...],
    ) -> commands.Basic.ConsumeOk | None:
        """Begin a consumer of a virtual queue, in the same way as consume()."""
        arguments, session = method.arguments or {}, channel.client.session
        group = GroupConsumer(channel, self._attaching.next_number(), tag_of(method))
        group.exchange = name
        if reading.is_stream(shards[0].arguments):
            group.read_from = _read_from(channel, method, name, group.tag)
        group.nowait, group.no_ack = bool(method.nowait), bool(method.no_ack)
        group.limit.most = 0 if group.no_ack else channel.prefetch
        group.terms = terms_of(
            arguments,
            name,
            session.vhost,
            exclusive=bool(method.exclusive),
            owner=session.owner,
            channel=channel.number,
            tag=group.tag,
        )
        group.handover_s = handover_s_of(arguments, name, session.vhost)
        return await self.groups.consume(group)

    # -- cancel, the end of a channel ------------------------------------------------------------

    async def cancel(self, channel: ConsumingChannel, tag: str) -> list[int]:
        """Cancel a consumer; return the ids of queues that are deleted with it.

        Unacknowledged deliveries stay with the channel. An unknown tag is no error.
        """
        consumer = channel.consumers.pop(tag, None)
        if isinstance(consumer, GroupConsumer):
            await self.groups.cancel(consumer)
        elif consumer is not None:
            self._stop(consumer)
            detached = self._attaching.detach(consumer)
            done = await self._links.unless_away(consumer.shard, detached)
            self.crediting.close(consumer)
            self._release_idle(channel)
            if isinstance(done, wire.Done):
                return done.closed
        return []

    def _stop(self, consumer: Consumer) -> None:
        consumer.attached = False
        if consumer is consumer.channel.replies:
            self._end_replies(consumer.channel)
        consumer.channel.cancelled.append(consumer)

    def _end_replies(self, channel: ConsumingChannel) -> None:
        self._replies.remove(channel.replies)
        channel.replies = None

    def _release_idle(self, channel: ConsumingChannel) -> None:
        """Release cancelled consumers that hold nothing.

        A client that consumes and cancels all day must not fill the memory.
        """
        holding = {run.consumer for run in channel.unsettled()}
        idle = [consumer for consumer in channel.cancelled if consumer not in holding]
        channel.cancelled = [consumer for consumer in channel.cancelled if consumer in holding]
        for consumer in idle:
            self._attaching.release([consumer])

    def release(self, channel: ConsumingChannel) -> list[asyncio.Future[wire.Control]]:
        """End all consumers of a channel that is gone, and have what they hold requeued.

        The futures end when the shards have done so, or are away.
        """
        channel.is_open = False
        single = [each for each in channel.consumers.values() if isinstance(each, Consumer)]
        for consumer in single:
            self.crediting.drop(consumer)
        assignments = self.groups.release(channel)
        released = self._attaching.release(
            [*single, *assignments, *channel.cancelled, *channel.getters.values()]
        )
        for shard, future in released.items():
            if here := [each for each in assignments if each.shard == shard]:
                future.add_done_callback(partial(self._released, here))
        self._end_replies(channel)
        channel.consumers.clear()
        channel.cancelled.clear()
        channel.getters.clear()
        # What is unsettled refers to consumers and they to the channel: both, and the connection,
        # would live until the garbage collector finds them, which looks seldom.
        channel.unacked.take_through(0)
        channel.transaction = None
        return [self._links.unless_away(shard, future) for shard, future in released.items()]

    def _released(
        self, assignments: list[Assignment], _answer: asyncio.Future[wire.Control]
    ) -> None:
        self.groups.released(assignments)

    # -- what shards say -------------------------------------------------------------------------

    def cancelled(self, number: int) -> list[EndedConsumer]:
        """End a consumer whose queue is deleted. Return the consumer if its client is to hear."""
        consumer = self.consumers.get(number)
        if isinstance(consumer, Assignment):
            self.groups.gone(consumer)
            return []
        if consumer is None or consumer.channel.consumers.get(consumer.tag) is not consumer:
            return []
        consume_ok = consumer.announce()
        self._stop(consumer)
        del consumer.channel.consumers[consumer.tag]
        self.crediting.close(consumer)
        number = consumer.channel.number
        return [EndedConsumer(consumer.client, number, consumer.tag, consume_ok)]

    def away(self, shard: int) -> None:
        """Take the credit of a shard that is gone, for consumers at other shards."""
        self.crediting.lose(shard, self.consumers.values())

    def restarted(self, shard: int, lost: Callable[[int], None]) -> None:
        """Attach all consumers of a shard again, whose new process knows none of them.

        `lost` is called with the number of each whose queue went while the shard was away: its new
        process says so.
        """
        self.crediting.lose(shard, self.consumers.values())
        for consumer in self.consumers.values():
            # One that was taken away meanwhile is asked for too: its shard opens an allotment.
            asked = consumer.attaching is not None and not consumer.attaching.done()
            if consumer.shard == shard and (consumer.is_wanted or (asked and consumer.group)):
                self.crediting.attach(consumer)
        self._attaching.attach_again(
            shard, lambda number, answer: _attached_again(number, lost, answer)
        )

    # -- queues that move to another shard -------------------------------------------------------

    def follow(self, queues: Iterable[QueuePut], lost: Callable[[int], None]) -> None:
        """Attach the consumers of these queues where the queues are now, under the same tags.

        What they hold stays with the shard that gave it, until it is settled or the shard has taken
        it back. `lost` is called with the number of each whose queue went meanwhile.
        """
        moved = {(queue.vhost, queue.name) for queue in queues}
        for consumer in [*self.consumers.values()] if moved else ():
            if (consumer.client.session.vhost, consumer.queue_name) in moved:
                self._follow(consumer, lost)

    def _follow(self, consumer: Consumer, lost: Callable[[int], None]) -> None:
        channel = consumer.channel
        vhost = channel.client.session.vhost
        queue = self._controller.catalog.queue(vhost, consumer.queue_name)
        is_there = queue is None or queue.id == consumer.queue_id
        if is_there or channel.consumers.get(consumer.tag) is not consumer:
            return
        assert queue is not None
        if not consumer.attached:  # who asked has not been told yet
            asyncio.get_running_loop().call_later(FOLLOW_AGAIN_S, self._follow, consumer, lost)
            return
        moved = Consumer(channel, self._attaching.next_number(), consumer.tag)
        moved.queue_id, moved.queue_name, moved.shard = queue.id, queue.name, queue.shard
        moved.auto_delete, moved.nowait = consumer.auto_delete, consumer.nowait
        moved.no_ack, moved.exclusive = consumer.no_ack, consumer.exclusive
        moved.priority, moved.affinity = consumer.priority, consumer.affinity
        moved.prefetch = consumer.prefetch
        moved.announced = True
        channel.consumers[moved.tag] = self.consumers[moved.number] = moved
        consumer.attached = consumer.auto_delete = False
        channel.cancelled.append(consumer)
        detached = self._attaching.detach(consumer)
        detached.add_done_callback(partial(self._left, consumer))
        if consumer.reading is None:
            moved.attached = True
            self._attach_moved(moved, lost)
            return
        # The new place gives what the client has not settled, and the old place may still give.
        loop = asyncio.get_running_loop()

        def has_left(answer: asyncio.Future[wire.Control]) -> None:
            if not answer.cancelled():
                answer.exception()
                self._read_on(consumer, moved, loop.time() + HANDOVER_S, lost)

        self._links.unless_away(consumer.shard, detached).add_done_callback(has_left)

    def _read_on(
        self, consumer: Consumer, moved: Consumer, until: float, lost: Callable[[int], None]
    ) -> None:
        """Attach a consumer of a stream where the stream is now, behind what its client settled.

        What the client holds is waited for until then, because it comes again.
        """
        loop, place = asyncio.get_running_loop(), consumer.reading
        if place is None or not moved.is_wanted:
            return
        unsettled = consumer.channel.first_unsettled(consumer, place.epoch)
        if unsettled is not None and loop.time() < until:
            loop.call_later(FOLLOW_AGAIN_S, self._read_on, consumer, moved, until, lost)
            return
        queue = self._controller.catalog.queue(moved.client.session.vhost, moved.queue_name)
        if queue is not None:  # which may have moved again
            moved.queue_id, moved.shard = queue.id, queue.shard
        place.resume(unsettled)
        consumer.reading, moved.reading, moved.attached = None, place, True
        self._attach_moved(moved, lost)

    def _attach_moved(self, consumer: Consumer, lost: Callable[[int], None]) -> None:
        def attached_again(answer: asyncio.Future[wire.Control]) -> None:
            is_refused = not answer.cancelled() and isinstance(answer.exception(), ShardRefused)
            if is_refused and self._controller.catalog.queue_by_id(consumer.queue_id) is not None:
                # A shard that has just started may not have been told of the queue.
                asyncio.get_running_loop().call_later(
                    FOLLOW_AGAIN_S, self._attach_moved, consumer, lost
                )
            else:
                _attached_again(consumer.number, lost, answer)

        if consumer.is_wanted and consumer.number in self.consumers:
            self._attaching.attach(consumer, resumed=True).add_done_callback(attached_again)

    def _left(self, consumer: Consumer, answer: asyncio.Future[wire.Control]) -> None:
        """Forget a consumer that went on at another shard, unless it holds something."""
        if not answer.cancelled():
            answer.exception()
        self.crediting.close(consumer)
        if consumer.channel.is_open:
            self._release_idle(consumer.channel)

    # -- the limit of a channel ------------------------------------------------------------------

    def limit(self, channel: ConsumingChannel, limit: int) -> None:
        """Let the consumers of a channel hold `limit` deliveries together; 0 is any number.

        This is basic.qos with global set.
        """
        self.crediting.change_limit(channel, limit)


def _attached_again(
    number: int, lost: Callable[[int], None], answer: asyncio.Future[wire.Control]
) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("a consumer was not attached again: %s", error)
        lost(number)


def check_consume(
    channel: ConsumingChannel, method: commands.Basic.Consume, consumers_max: int
) -> None:
    """Raise what a client must not ask for, before its queue is looked at.

    `consumers_max` is the most consumers a channel may have, 0 any number. RabbitMQ checks direct
    reply-to before the tag of the consumer.
    """
    if method.queue == checks.REPLY_TO:
        if not method.no_ack:
            raise ChannelException(406, "reply consumer cannot acknowledge", *CONSUME)
        if channel.replies is not None:
            raise ChannelException(406, "reply consumer already set", *CONSUME)
    if method.consumer_tag in channel.consumers:
        text = f"attempt to reuse consumer tag '{method.consumer_tag}'"
        raise ConnectionException(530, text, *CONSUME)
    if 0 < consumers_max <= len(channel.consumers):
        text = f"reached maximum ({consumers_max}) of consumers per channel"
        raise ConnectionException(530, text, *CONSUME)


def tag_of(method: commands.Basic.Consume) -> str:
    """Return the consumer's tag, a new one if the client gave none."""
    return method.consumer_tag or f"{reading.SERVER_TAG_PREFIX}{secrets.token_urlsafe(16)}"


def _read_from(
    channel: ConsumingChannel, method: commands.Basic.Consume, name: str, tag: str
) -> wire.ReadFrom:
    """Return where a consumer of streams begins. Raises what the client did wrong."""
    try:
        reading.check_consume(
            channel.client.session.vhost,
            name,
            bool(method.no_ack),
            bool(method.exclusive),
            0 if method.no_ack else channel.prefetch,
            channel.limit.most,
        )
        return reading.read_from(method.arguments or {}, tag)
    except checks.Refusal as refusal:
        raise refused_consume(refusal) from None
