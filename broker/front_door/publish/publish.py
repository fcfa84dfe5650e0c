"""Give each published message to its shards, and say what the connection has to do.

Publish path, 2 of 5. Before: broker/front_door/connection/connection.py. After: shardd/shard.py.

Compiled code packs a read's publishes as long as their routes are known (route_cache.py). It stops
at a message that needs a decision; that message is decided about here or in single_message.py, and
packing goes on behind it. What the connection has to do comes back as a `Published` (effects.py).
Who waits for the confirm is in confirms.py.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from shardmq.broker.amqp import (
    ChannelException,
    ConnectionException,
    Publishes,
    copies_by_channel,
    frames,
)
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish import access
from shardmq.broker.front_door.publish.commit import Commit
from shardmq.broker.front_door.publish.confirms import Answered, Confirms
from shardmq.broker.front_door.publish.dedup_service import DedupAnswers, DedupId, DedupService
from shardmq.broker.front_door.publish.effects import (
    AmqpError,
    Decided,
    Published,
    PublishingChannel,
    SlicedTask,
)
from shardmq.broker.front_door.publish.message import FACTS, ROW, line_of
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.reservations import Reservation, Reservations, needs_of
from shardmq.broker.front_door.publish.route_cache import RouteCache, RouteCaches
from shardmq.broker.front_door.publish.single_message import SingleMessages
from shardmq.broker.front_door.publish.spans import Spans
from shardmq.broker.front_door.publish.targets import are_shut
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.front_door.session import Session
from shardmq.broker.model.catalog import Catalog
from shardmq.shardd.wire.codec import ASK, DONE, FULL, NEAR, UNKNOWN, UNROUTABLE

# What a message held by a transaction takes beside its bytes.
HELD_MESSAGE_BYTES = 1024

_CHANNEL_OF = struct.Struct("<6xH")

Channels = Mapping[int, PublishingChannel]


def _never() -> bool:
    return False


class Publishing:
    """All publishing of this front door."""

    def __init__(
        self,
        source: CatalogLink,
        batches: ShardLinks,
        reservations: Reservations,
        dedup: DedupService,
        replies: Replies,
        counts: Counts,
        *,
        set_timestamp: bool = False,
        spans: Spans | None = None,
    ) -> None:
        """`set_timestamp` has each message stamped with the time at which it came."""
        self._source = source
        self._batches = batches
        self._reservations = reservations
        self._replies = replies
        self._counts = counts
        self._set_timestamp = set_timestamp
        self._spans = spans
        self.dedup = dedup
        self._caches = RouteCaches()
        self.exchange_counts = self._caches.exchange_counts
        self._messages = SingleMessages(
            source, batches, counts, self.exchange_counts, replies, dedup, spans
        )
        self._changed: asyncio.Future[None] | None = (
            None  # ends with the next change of the catalog
        )
        # Channels with acks, nacks or a failure; the end of a pass empties the list.
        self.confirms_due: list[Confirms] = []
        self._commits: set[asyncio.Task[asyncio.Future[bool]]] = set()

    @property
    def catalog(self) -> Catalog:
        return self._source.catalog

    @property
    def unroutable_dropped(self) -> int:
        """Return how many messages had no queue to go to and were not mandatory."""
        return self._messages.dropped + self._batches.packer.unroutable

    def route_cache(self, vhost: str, user: str) -> RouteCache:
        """Return the routes that connections of this user to this vhost share."""
        return self._caches.of(vhost, user)

    def confirms(self, client: Answered, channel: int) -> Confirms:
        """Return what puts a channel of a client in confirm mode."""
        return Confirms(client, channel, self.confirms_due, self._counts)

    def catalog_changed(self, something_went: bool = True) -> None:
        """Have every route looked up anew.

        `something_went` is False when all changes only added things.
        """
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
        self._caches.catalog_changed(self.catalog, something_went)
        self.dedup.catalog_changed(self.catalog)

    def trace(self, tracing: Tracing | None) -> None:
        """Copy what is published in traced vhosts; None when there are none."""
        self._messages.tracing = tracing

    # -- a read's publishes -----------------------------------------------------------------------

    def publish(
        self,
        session: Session,
        cache: RouteCache | None,
        channels: Channels,
        event: Publishes,
        now_ms: int,
        is_over: Callable[[], bool] = _never,
    ) -> Published:
        """Route and pack the event's messages in order.

        An error ends its channel, and what that channel sent behind is dropped. Messages of the
        channels `event.without` are left out. The call asks `is_over` behind each message that
        needed a decision. If the slice is over, or if what goes to many queues was enough for one
        time slice, `event.done` says how far the call came, and the next call goes on there.
        """
        published, counts = Published(), self._counts
        batches = self._batches
        assert cache is not None  # a vhost is open
        if cache.vhost != batches.vhost:
            batches.use_vhost(cache.vhost)
        if not event.counted:
            event.counted = True
            counts.received += event.count
            counts.sizes.add(event.table)
            if self._set_timestamp:
                _set_timestamps(event, now_ms // 1000)
            if self._spans is not None:
                self._spans.mark(event, time.time_ns())
        at = event.done
        far_queue = 0  # a direct reply goes to this queue next, though its consumer is here
        while at < event.count:
            number = _CHANNEL_OF.unpack_from(event.table, at * ROW)[0]
            channel = channels.get(number)
            if (
                channel is None
                or not channel.is_open
                or number in event.without
                or number in published.failed
            ):
                at += 1
                continue
            why = DONE
            try:
                if channel.transaction is not None:
                    self._hold(session, channel, event, at, now_ms)
                    at += 1
                else:
                    confirms = channel.confirms
                    dropped = batches.packer.unroutable
                    packed, why = batches.packer.pack(
                        cache.routes,
                        event.buffer,
                        event.table,
                        at,
                        session.id,
                        confirms.next_seq if confirms is not None else 0,
                        now_ms,
                        event.lasting,
                        far_queue,
                    )
                    far_queue = 0
                    channel.unroutable_dropped += batches.packer.unroutable - dropped
                    if packed > at:
                        if confirms is not None and batches.packer.in_sequence:
                            confirms.in_sequence = True
                        touched = batches.packer.take_touched()
                        published.fed |= touched
                        channel.published += packed - at
                        if confirms is not None:
                            counts.received_confirm += packed - at
                            waiting = confirms.wait(packed - at, touched.bit_count())
                            batches.wait_for(touched, waiting)
                        at = packed
                    if why == DONE:
                        break
                    if why == UNKNOWN:
                        cache.learn(line_of(event, at), self.catalog, self._replies.here)
                    elif why == NEAR:
                        count = self._reply(session, channel, event, at, now_ms, published)
                        at += count
                        far_queue = 0 if count else batches.packer.near_queue
                    elif why == ASK and channel.reply_to and _asks_for_replies(event, at):
                        _name_repliers(channels, event)
                    elif why in (ASK, UNROUTABLE):
                        self._send_one(session, channel, event, at, now_ms, published)
                        at += 1
            except ChannelException as error:
                published.fail(number, error)
                at += 1
            except ConnectionException as error:
                published.fail(number, error)
                at = event.count
            # `far_queue` holds for the very next message: what others publish must not come
            # between.
            may_stop = event.done < at < event.count and not far_queue
            if may_stop and (why == FULL or is_over()):
                break
        event.done = at
        return published

    def _reply(
        self,
        session: Session,
        channel: PublishingChannel,
        event: Publishes,
        at: int,
        now_ms: int,
        published: Published,
    ) -> int:
        """Hand messages over to a direct reply-to consumer of this front door.

        Return how many messages are done with, 0 when the next one has to go by the queue.
        """
        queue_id, count = self._batches.packer.near_queue, self._batches.packer.near_count
        requester = self._replies.here.get(queue_id)
        if requester is None:  # the consumer left
            self._send_one(session, channel, event, at, now_ms, published)
            return 1
        if not requester.takes(wanted=count > 0):
            return 0
        published.reply(self._replies.hand_over(requester, event, at, count))
        self.exchange_counts.of(self._batches.vhost).add(b"", count, count)
        channel.published += count
        if channel.confirms is not None:
            self._counts.received_confirm += count
            channel.confirms.wait(count, 0)  # no shard has any of them
        return count

    def _hold(
        self,
        session: Session,
        channel: PublishingChannel,
        event: Publishes,
        at: int,
        now_ms: int,
    ) -> None:
        """Decide about a message of a transaction, which is sent with the commit."""
        assert channel.transaction is not None
        decided = self._messages.decide(session, channel, event, at, now_ms)
        channel.transaction.publish(decided, len(decided.message.stored) + HELD_MESSAGE_BYTES)

    def _send_one(
        self,
        session: Session,
        channel: PublishingChannel,
        event: Publishes,
        at: int,
        now_ms: int,
        published: Published,
    ) -> None:
        """Decide about a message and send it, or defer all of its channel from it on."""
        decided = self._messages.decide(session, channel, event, at, now_ms)
        waits = self._are_shut(session, decided)
        if not waits and not self._messages.dedup_ids(session, decided):
            self._messages.send(session, channel, decided, now_ms, published)
            return
        for number, rest in copies_by_channel(event, {channel.number}, at).items():
            published.defer(number, rest)
        event.without = {*event.without, channel.number}

    # -- publishes that wait for other processes -----------------------------------------------

    def _are_shut(self, session: Session, decided: Decided) -> bool:
        if not self.catalog.index.has_moving:
            return False
        vhost = self.catalog.vhost(session.vhost)
        return vhost is not None and are_shut(vhost, decided.queues)

    async def opened(self, session: Session, held: Iterable[Decided]) -> None:
        """Wait until no queue of these messages is shut, because it moves to another shard."""
        for decided in held if self.catalog.index.has_moving else ():
            while self._are_shut(session, decided):
                if self._changed is None:
                    self._changed = asyncio.get_running_loop().create_future()
                await asyncio.shield(self._changed)

    async def publish_deferred(
        self,
        session: Session,
        channels: Channels,
        channel: PublishingChannel,
        event: Publishes,
        task: SlicedTask,
    ) -> None:
        """Publish deferred messages when shards have said which are the first of their ids.

        Messages for a queue that moves wait until it takes messages again. Nothing else of the
        channel may be done meanwhile. Raises what the publisher did wrong, as ChannelException or
        ConnectionException, when the messages before it are published.
        """
        now_ms = time.time_ns() // 1_000_000
        held: list[Decided] = []
        failed: AmqpError | None = None
        try:
            task.begin_slice()
            for at in range(event.count):
                held.append(self._messages.decide(session, channel, event, at, now_ms))
                if task.slice_is_over():
                    await task.next_slice()
        except (ChannelException, ConnectionException) as error:
            failed = error.with_traceback(None)  # or it and this frame would hold each other
        answers = await self.ask_duplicates(session, held, task)
        try:
            task.begin_slice()
            for decided in held:
                if channels.get(channel.number) is not channel or not channel.is_open:
                    return
                if self._are_shut(session, decided):
                    await self.opened(session, (decided,))
                    task.begin_slice()
                    if channels.get(channel.number) is not channel or not channel.is_open:
                        return
                published = Published()
                self._messages.send(session, channel, decided, now_ms, published, answers)
                task.carry_out(published)
                if task.slice_is_over():
                    await task.next_slice()
        finally:
            if answers is not None:
                answers.release()
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # the traceback has this frame, and so all that was held

    async def ask_duplicates(
        self, session: Session, held: Sequence[Decided], task: SlicedTask
    ) -> DedupAnswers | None:
        """Ask shards which messages are the first of their ids; None when no message has one."""
        ids: list[DedupId] = []
        task.begin_slice()
        for decided in held:
            ids += self._messages.dedup_ids(session, decided)
            if task.slice_is_over():
                await task.next_slice()
        return await self.dedup.ask(ids) if ids else None

    async def reserve(self, session: Session, held: Sequence[Decided]) -> Reservation | None:
        """Set room aside for a transaction, None if no queue may refuse it.

        Raises ChannelException when a queue refuses, or a shard does not answer.
        """
        await self.opened(session, held)
        needs = needs_of(access.vhost_of(self.catalog, session.vhost), held)
        return await self._reservations.reserve(needs) if needs else None

    async def commit(
        self,
        session: Session,
        channel: PublishingChannel,
        held: Sequence[Decided],
        answers: DedupAnswers | None,
        reservation: Reservation | None,
        task: SlicedTask,
    ) -> asyncio.Future[bool]:
        """Publish all of a transaction; the future tells whether all shards have all of it.

        Once begun the commit goes on to its end, also when whoever waits for it is cancelled: the
        client of half a transaction that has left would never send the other half. It ends the
        reservation.
        """
        commit = Commit(
            self._messages,
            self._batches,
            session,
            channel,
            held,
            answers,
            reservation,
            self.opened,
        )
        running = asyncio.get_running_loop().create_task(commit.run(task))
        self._commits.add(running)
        running.add_done_callback(self._commits.discard)
        return await asyncio.shield(running)


def _set_timestamps(event: Publishes, now_s: int) -> None:
    """Stamp messages without a timestamp with the time at which they came."""
    if (stamped := frames.stamped(event.buffer, event.table, now_s)) is not None:
        event.buffer, event.table = stamped


def _asks_for_replies(event: Publishes, at: int) -> bool:
    """Return whether a message asks for direct replies and its properties can be rewritten."""
    flags = FACTS.unpack_from(event.table, at * ROW)[3]
    return bool(flags & frames.DIRECT_REPLY_TO) and not flags & frames.BAD_PROPERTIES


def _name_repliers(channels: Channels, event: Publishes) -> None:
    """Write the queue of their channel into all messages of a read that ask for direct replies."""
    names = {}
    for number in frames.asking(event.table):
        channel = channels.get(number)
        if channel is not None and channel.is_open and channel.reply_to:
            names[number] = channel.reply_to.encode()
    event.buffer, event.table = frames.with_replies(event.buffer, event.table, names)
