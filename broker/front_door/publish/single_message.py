"""Check and route a message that is decided about alone, then pack or return it.

Such is a message that has no learnt route, goes through an exchange that looks at headers, names
more routing keys, is mandatory without a queue, belongs to a transaction, takes part in a trace, or
whose vhost is traced.
"""

from __future__ import annotations

import time

from shardmq.broker.amqp import ChannelException, ConnectionException, Publishes, properties
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish import access
from shardmq.broker.front_door.publish.dedup_service import (
    Copies,
    Copy,
    DedupAnswers,
    DedupId,
    DedupService,
    Thing,
    ids_of,
    rule_of,
)
from shardmq.broker.front_door.publish.effects import (
    Decided,
    Published,
    PublishingChannel,
)
from shardmq.broker.front_door.publish.exchange_counts import ExchangeCounts
from shardmq.broker.front_door.publish.message import Message
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.spans import HEADER, Spans
from shardmq.broker.front_door.publish.targets import by_shard, existing
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.front_door.session import Session
from shardmq.broker.model import message_dlx
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.permissions import INTERNAL_USER
from shardmq.broker.routing import delaying, keeping, route_message
from shardmq.broker.shared.reading import is_stream


class SingleMessages:
    """Decides about messages one by one, and packs them."""

    def __init__(
        self,
        source: CatalogLink,
        batches: ShardLinks,
        counts: Counts,
        exchange_counts: ExchangeCounts,
        replies: Replies,
        dedup: DedupService,
        spans: Spans | None = None,
    ) -> None:
        self._source = source
        self._batches = batches
        self._counts = counts
        self._exchange_counts = exchange_counts
        self._replies = replies
        self._dedup = dedup
        self._spans = spans
        self.tracing: Tracing | None = None  # None: no vhost is traced
        self.dropped = 0  # messages without a queue that were not mandatory

    # -- decide --------------------------------------------------------------------------------

    def decide(
        self,
        session: Session,
        channel: PublishingChannel,
        event: Publishes,
        at: int,
        now_ms: int,
    ) -> Decided:
        """Return the event's message with index `at` and the queues it goes to.

        Raises what the publisher did wrong, as ChannelException or ConnectionException.
        """
        message = Message(event, at)
        if self._spans is None:
            return self._decide(session, channel, message, now_ms)
        span = message.span = self._spans.begin(
            session, event, at, message.properties, message.stored
        )
        if span is None:
            return self._decide(session, channel, message, now_ms)
        began_ns = time.time_ns()
        try:
            decided = self._decide(session, channel, message, now_ms)
        except (ChannelException, ConnectionException) as error:
            span.end(str(error))
            raise
        span.routed(began_ns, len(decided.queues))
        begins = span.header and HEADER not in message.headers
        # A publish in sequence that is repeated must have the bytes that the first one had.
        if begins and decided.queues and not message.in_sequence:
            message.stored = properties.with_header(message.stored, HEADER, span.header)
        return decided

    def _decide(
        self, session: Session, channel: PublishingChannel, message: Message, now_ms: int
    ) -> Decided:
        catalog, user, vhost = self._source.catalog, session.user, session.vhost
        access.check_exchange(catalog, user, vhost, message.exchange, message.keys)
        message.check(user, _may_impersonate(catalog, user))
        if len(message.keys) > 1:  # those of CC and BCC were not known before
            access.check_keys(catalog, user, vhost, message.exchange, message.keys)
        access.check_dead_letter(catalog, user, vhost, message.headers, message.keys)
        message.direct_replies_to(channel.reply_to)
        table = access.vhost_of(catalog, vhost).table
        routed = route_message(table, message.exchange, message.routable())
        if message.delay_ms and any(map(delaying.is_delay_queue, routed.queues)):
            message.check_delay(now_ms)
        return Decided(message, (*routed.queues, *routed.kept) if routed.kept else routed.queues)

    def dedup_ids(self, session: Session, decided: Decided) -> list[DedupId]:
        """Return the ids that shards have to be asked about before the message is sent."""
        message, queues = decided
        if not message.headers:
            return []
        vhost = access.vhost_of(self._source.catalog, session.vhost)
        things: list[Thing] = [queue for queue in existing(vhost, queues) if queue.arguments]
        exchange = vhost.exchanges.get(message.exchange)
        if exchange is not None and exchange.arguments:
            things.insert(0, exchange)
        return ids_of(things, message.headers) if things else []

    # -- send ----------------------------------------------------------------------------------

    def send(
        self,
        session: Session,
        channel: PublishingChannel,
        decided: Decided,
        now_ms: int,
        published: Published,
        answers: DedupAnswers | None = None,
    ) -> None:
        """Pack a message or return it to its publisher, and remember who waits."""
        confirms, message = channel.confirms, decided.message
        copies = self.pack(session, channel, decided, now_ms, published, answers)
        touched = self._batches.packer.take_touched()
        published.fed |= touched
        channel.published += 1
        if message.span is not None:
            message.span.packed()
        for copy in copies.first:
            self.watch(copy, touched)
        if confirms is not None:
            if message.in_sequence:
                confirms.in_sequence = True
            self._counts.received_confirm += 1
            waiting = confirms.wait(1, touched.bit_count() + len(copies.again))
            self._batches.wait_for(touched, waiting)
            for copy in copies.again:
                copy.follow(waiting)
        if self.tracing is not None:
            self.trace(session, channel, decided, published)

    def trace(
        self,
        session: Session,
        channel: PublishingChannel,
        decided: Decided,
        published: Published,
    ) -> None:
        """Copy a message that was packed to the firehose, if its vhost is traced."""
        if self.tracing is not None:
            message, queues = decided
            published.fed |= self.tracing.published(
                session, channel.number, message.without_bcc(), message.keys, queues
            )

    def watch(self, copy: Copy, touched: int) -> None:
        """Have a first copy told when the batches of these shards (bit mask) are stored."""
        copy.shards += touched.bit_count()
        self._batches.wait_for(touched, copy)
        copy.confirmed()

    def pack(
        self,
        session: Session,
        channel: PublishingChannel,
        decided: Decided,
        now_ms: int,
        published: Published,
        answers: DedupAnswers | None,
    ) -> Copies:
        """Pack a message or return it to its publisher.

        The caller sees to who waits for the shards. `answers` are what shards said about the ids of
        this message and others.
        """
        message = decided.message
        vhost = access.vhost_of(self._source.catalog, session.vhost)
        seq = channel.confirms.next_seq if channel.confirms is not None else 0
        copies = Copies([], [])
        came, exchange = self._exchange_counts.of(vhost.name), message.exchange.encode()
        self._batches.use_vhost(vhost.name)

        if answers is not None and self._is_duplicate(
            vhost.exchanges.get(message.exchange), message, answers, copies
        ):
            came.add(exchange, 1, 0)
            return copies
        reached = False
        handed_over = 0
        takers: list[QueuePut] = []
        # Queues may have gone since a transaction's message was decided about.
        for queue in existing(vhost, decided.queues):
            if message.delay_ms and delaying.is_delay_queue(queue.name):
                self._delay(session, channel, message, queue, seq, now_ms)
                reached = True
            elif answers is not None and self._is_duplicate(queue, message, answers, copies):
                reached = True
            elif (requester := self._replies.here.get(queue.id)) is not None and requester.takes(
                wanted=not message.in_sequence
            ):
                published.reply(self._replies.hand_over_one(requester, message.without_bcc()))
                if message.span is not None and self._spans is not None:
                    consumer = requester.consumer
                    self._spans.delivered(
                        consumer.client.session,
                        queue.name,
                        time.time_ns(),
                        1,
                        message.without_bcc(),
                    )
                reached = True
                handed_over += 1
            else:
                takers.append(queue)
        kept = 0
        if takers and keeping.is_keeping_queue(takers[-1].name):
            kept = sum(keeping.is_keeping_queue(queue.name) for queue in takers)
        came.add(exchange, 1, len(takers) - kept + handed_over)
        if not reached and len(takers) == kept:
            self._not_routed(session, channel, message, published)
        self._store(session, channel, message, takers, seq, now_ms)
        for copy in copies.first:
            copy.published(session.id, channel.number, seq)
        return copies

    def _is_duplicate(
        self, thing: Thing | None, message: Message, answers: DedupAnswers, copies: Copies
    ) -> bool:
        """Return whether an exchange or queue had the message before.

        Notes in `copies` what that depends on.
        """
        rule = rule_of(thing)
        id = rule.id_of(message.headers) if rule is not None else None
        if thing is None or id is None:
            return False
        copy, again = answers.take(thing, id)
        if copy is not None:
            (copies.again if again else copies.first).append(copy)
        self._dedup.duplicates += again
        return again

    def _not_routed(
        self,
        session: Session,
        channel: PublishingChannel,
        message: Message,
        published: Published,
    ) -> None:
        """Return a mandatory message, drop any other."""
        if not message.mandatory:
            self.dropped += 1
            channel.unroutable_dropped += 1
            return
        if channel.confirms is not None:
            # Acks that are due come first: later they would be merged with the ack of this message.
            published.write(channel.confirms.answers())
        published.write(message.returned(channel.number, session.frame_bytes_max))
        self._counts.returned += 1
        channel.returned += 1

    def _store(
        self,
        session: Session,
        channel: PublishingChannel,
        message: Message,
        queues: list[QueuePut],
        seq: int,
        now_ms: int,
    ) -> None:
        no_stream = not any(is_stream(queue.arguments) for queue in queues)
        stored = message.stored if no_stream else message.without_bcc()
        marks = message_dlx.marks_of(message.headers, keeps_bcc=no_stream)
        for shard, queue_ids, durable in by_shard(queues):
            self._batches.packer.add_stored(
                shard,
                queue_ids,
                stored,
                session.id,
                channel.number,
                seq,
                # Streams find messages by their time, so that stays as it is.
                now_ms + message.late_ms if no_stream else now_ms,
                message.ttl_ms,
                message.priority,
                message.persistent,
                message.persistent and durable,
                in_sequence=message.in_sequence,
                marks=marks,
            )
            self._watch_store(session, channel, message, shard, seq)

    def _delay(
        self,
        session: Session,
        channel: PublishingChannel,
        message: Message,
        queue: QueuePut,
        seq: int,
        now_ms: int,
    ) -> None:
        """Pack a message for the queue in which it waits.

        The record has the time when the message is due, and a ttl of 0: the message's own ttl
        begins then.
        """
        self._batches.packer.add_stored(
            queue.shard,
            [queue.id],
            message.stored,
            session.id,
            channel.number,
            seq,
            min(now_ms + message.delay_ms, delaying.DUE_MAX),
            0,
            delaying.NO_PRIORITY,
            message.persistent,
            message.persistent and queue.durable,
        )
        self._watch_store(session, channel, message, queue.shard, seq)

    def _watch_store(
        self,
        session: Session,
        channel: PublishingChannel,
        message: Message,
        shard: int,
        seq: int,
    ) -> None:
        """Have the span of the message hear of the shard's answer, if the publisher waits for it.

        Otherwise waiting would make the shard sync sooner.
        """
        if message.span is not None and (seq or channel.transaction is not None):
            store = message.span.store(shard, session.id, channel.number, seq)
            self._batches.wait_for(1 << shard, store)


def _may_impersonate(catalog: Catalog, user: str) -> bool:
    """Return whether the user may publish messages with the user_id of another one.

    This broker itself may: its bridges move the messages of all users.
    """
    known = catalog.users.get(user)
    return user == INTERNAL_USER or (known is not None and "impersonator" in known.tags)
