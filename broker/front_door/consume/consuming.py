"""Consumers, deliveries out, acks in; which delivery tag is which delivery of which shard is kept by unacked.py.

Prefetch per consumer is kept by the shard; limits that several share by grants.py. Consumers of virtual
queues (virtual.py) have parts that are consumers of shard queues like any other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pamqp import commands

from shardmq.broker.amqp import ChannelException, ConnectionException, contents, properties
from shardmq.broker.front_door.consume.consumers import Consumer, Part, Virtual
from shardmq.broker.front_door.consume.grants import Grants
from shardmq.broker.front_door.consume.settling import ALL_TOGETHER, acks_together
from shardmq.broker.front_door.consume.unacked import Run, UnknownTag, subsumed
from shardmq.broker.front_door.consume.virtual import VirtualConsuming, affinity_of
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.model import checks, own_letters
from shardmq.broker.shared import reading
from shardmq.shardd.wire import messages as wire

if TYPE_CHECKING:
    from shardmq.broker.front_door.connection.channel import Channel
    from shardmq.broker.front_door.connection.client import Client
    from shardmq.broker.front_door.publish.tracing import Tracing
    from shardmq.broker.model.changes import QueuePut
    from shardmq.broker.shared.control import ControlMessage

log = logging.getLogger("shardmq.broker.front_door.consume.consuming")

CONSUME = (60, 20)
GET = (60, 70)
ACK = (60, 80)
NACK = (60, 120)
# Virtual queues of which it is remembered at which shard the last basic.get began.
GET_TURNS_MAX = 1024
# Of up to so many shards basic.get tells how many messages are left in all, else in one that has some.
GET_COUNTS_MAX = 64
# Messages of that size, on average of a delivery, are written from where they lie; smaller ones are sooner copied.
LARGE_BYTES = 16 << 10
# Deliveries that are listed of one queue.
UNACKED_LISTED_MAX = 1_000


class Consuming:
    """All consuming of this front door."""

    def __init__(
        self,
        links: ShardLinks,
        say: Callable[[ControlMessage], None],
        counts: Counts | None = None,
        replies: Replies | None = None,
    ) -> None:
        """`say`: to the controller."""
        self._replies = replies or Replies(links, counts)
        self.links = links
        self._counts = counts or Counts()
        self.grants = Grants(links)
        self.virtual = VirtualConsuming(links, self, self.grants, say)
        self._get_turns: dict[tuple[str, str], int] = {}
        self.consumers: dict[int, Consumer] = {}
        # Consumers of auto-delete queues whose shard has not answered that they left.
        self._leaving: dict[int, Consumer] = {}
        self._last_number = 0
        self.tracing: Tracing | None = None  # nothing is traced

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    # -- consume, cancel -------------------------------------------------------------------------------

    async def consume(
        self, client: Client, channel: Channel, method: commands.Basic.Consume
    ) -> None:
        tag = method.consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
        if method.queue == checks.REPLY_TO:
            _check_reply_consumer(channel, method)
        if tag in channel.consumers:
            raise ConnectionException(530, f"attempt to reuse consumer tag '{tag}'", *CONSUME)
        if 0 < client.door.config.channel_consumers_max <= len(channel.consumers):
            text = f"reached maximum ({client.door.config.channel_consumers_max}) of consumers per channel"
            raise ConnectionException(530, text, *CONSUME)
        if shards := client.shard_queues(channel, method.queue, CONSUME):
            whole = Virtual(client, channel, self.next_number(), tag)
            whole.exchange = client.queue_name(channel, method.queue)
            if reading.is_stream(shards[0].arguments):
                whole.read_from = _read_all(whole, method)
            await self.virtual.consume(whole, method)
            return
        queue = await self._queue_of(client, channel, method)
        if queue is None:
            return
        consumer = Consumer(client, channel, self.next_number(), tag)
        consumer.queue_id, consumer.queue_name, consumer.shard = queue.id, queue.name, queue.shard
        consumer.auto_delete = queue.auto_delete
        consumer.nowait = bool(method.nowait)
        consumer.no_ack, consumer.exclusive = bool(method.no_ack), bool(method.exclusive)
        consumer.priority = _priority(method.arguments or {}, queue.name, client.vhost)
        consumer.affinity = affinity_of(method.arguments or {}, queue.name, client.vhost)
        consumer.prefetch = 0 if consumer.no_ack else channel.prefetch
        if reading.is_stream(queue.arguments):
            consumer.reading = _reading(consumer, method.arguments or {})
        channel.consumers[tag] = consumer
        self.consumers[consumer.number] = consumer
        try:
            self.attached(consumer, await self.attach(consumer, resumed=False))
        except ShardRefused as refused:
            self._forget(consumer)
            raise _refusal(refused, queue.name, client.vhost) from None
        if method.queue == checks.REPLY_TO and consumer.number in self.consumers:
            channel.replies = consumer
            self._replies.add(consumer, queue)
        self._announce(consumer)

    @staticmethod
    async def _queue_of(
        client: Client, channel: Channel, method: commands.Basic.Consume
    ) -> QueuePut | None:
        """The queue it names, or a new one for the replies to this channel; None when the channel is gone by then."""
        if method.queue != checks.REPLY_TO:
            return client.readable_queue(channel, method.queue, CONSUME)
        return await client.reply_queue(channel)

    def _announce(self, consumer: Consumer) -> None:
        """consume-ok, before all else of this consumer: a delivery that came with Attached must not overtake it."""
        if consumer.whole is not None:
            self.virtual.announce(consumer.whole)
        elif not consumer.announced and consumer.number in self.consumers:
            consumer.announced = consumer.attached = True
            if not consumer.nowait:
                consumer.client.send(
                    consumer.channel.number, commands.Basic.ConsumeOk(consumer.tag)
                )

    @staticmethod
    def attached(consumer: Consumer, answer: wire.Control) -> None:
        if consumer.reading is not None and isinstance(answer, wire.AttachedAt):
            consumer.reading.begins(answer.offset)

    def attach(
        self, consumer: Consumer, resumed: bool, leaving: bool = False
    ) -> asyncio.Future[wire.Control]:
        """`leaving`: it gets no message."""
        if not leaving:
            self.grants.begin(consumer)
        read = _read_from(consumer, resumed)

        def make(request: int) -> wire.Attach:
            # Without acks too: its deliveries do not count, but wait for room.
            limited = leaving or (consumer.channel.limit > 0 and _has_part_in_limit(consumer))
            return _attach_as(consumer, read)(
                request=request,
                queue=consumer.queue_id,
                consumer=consumer.number,
                connection=consumer.client.id,
                channel=consumer.channel.number,
                tag=consumer.tag,
                no_ack=consumer.no_ack,
                exclusive=consumer.exclusive,
                priority=consumer.priority,
                prefetch=consumer.prefetch,
                granted=limited,
                resumed=resumed,
                lent=consumer.lent and not leaving,
                affinity=consumer.affinity,
            )

        consumer.attaching = self.links.ask(consumer.shard, make)
        return consumer.attaching

    async def cancel(self, client: Client, channel: Channel, method: commands.Basic.Cancel) -> None:
        """Unacknowledged deliveries stay with the channel; an unknown tag is no error."""
        consumer = channel.consumers.pop(method.consumer_tag or "", None)
        if isinstance(consumer, Virtual):
            await self.virtual.cancel(consumer)
        elif consumer is not None:
            consumer.attached = False
            if consumer is channel.replies:
                self._end_replies(channel)
            channel.cancelled.append(consumer)
            if consumer.auto_delete:
                self._leaving[consumer.number] = consumer
            done = await self.links.ask(
                consumer.shard, lambda request: wire.Detach(request, consumer.number)
            )
            self.grants.stopped(consumer)
            self._let_idle_go(channel)
            if isinstance(done, wire.Done) and done.closed:
                # Behind cancel-ok the queue is gone: a declare of its name makes another.
                await client.catalog_link.removed([consumer.queue_id])
        if not method.nowait and channel.is_open:
            client.send(channel.number, commands.Basic.CancelOk(method.consumer_tag))

    def _end_replies(self, channel: Channel) -> None:
        self._replies.remove(channel.replies)
        channel.replies = None

    def _let_idle_go(self, channel: Channel) -> None:
        """Cancelled consumers that hold nothing: consuming and cancelling all day must not fill the memory."""
        holding = {run.consumer for run in channel.unsettled()}
        idle = [consumer for consumer in channel.cancelled if consumer not in holding]
        channel.cancelled = [consumer for consumer in channel.cancelled if consumer in holding]
        for consumer in idle:
            self.consumers.pop(consumer.number, None)
            self._release(consumer.shard, [consumer])

    def _forget(self, consumer: Consumer) -> None:
        self.consumers.pop(consumer.number, None)
        if consumer.channel.consumers.get(consumer.tag) is consumer:
            del consumer.channel.consumers[consumer.tag]

    def release(self, channel: Channel) -> list[asyncio.Future[wire.Control]]:
        """The channel is gone: what its consumers hold is requeued. The futures end when the shards have done so."""
        by_shard: dict[int, list[Consumer]] = {}
        plain = [each for each in channel.consumers.values() if isinstance(each, Consumer)]
        parts = self.virtual.release(channel)
        for consumer in [*plain, *parts, *channel.cancelled, *channel.getters.values()]:
            self.consumers.pop(consumer.number, None)
            by_shard.setdefault(consumer.shard, []).append(consumer)
        self._end_replies(channel)
        channel.consumers.clear()
        channel.cancelled.clear()
        channel.getters.clear()
        channel.wanting.clear()
        return [self._release(shard, consumers) for shard, consumers in by_shard.items()]

    def _release(self, shard: int, consumers: list[Consumer]) -> asyncio.Future[wire.Control]:
        numbers = [consumer.number for consumer in consumers]
        future = self.links.ask(shard, lambda request: wire.Release(request, numbers))
        leaving = {consumer.number: consumer for consumer in consumers if consumer.auto_delete}
        if leaving:
            self._leaving |= leaving
            future.add_done_callback(
                lambda _: [self._leaving.pop(number, None) for number in leaving]
            )
        parts = [consumer for consumer in consumers if isinstance(consumer, Part)]
        if parts:
            future.add_done_callback(lambda _: self.virtual.released(parts))
        return future

    # -- basic.get -------------------------------------------------------------------------------------------

    async def get(self, client: Client, channel: Channel, method: commands.Basic.Get) -> None:
        async with client.gets:
            await client.output.room()
            if channel.is_open:
                await self._get(client, channel, method)

    async def _get(self, client: Client, channel: Channel, method: commands.Basic.Get) -> None:
        shards = client.shard_queues(channel, method.queue, GET)
        if not shards:
            queue = client.readable_queue(channel, method.queue, GET)
            _check_get(client.vhost, queue)
            got = await self._got(client, channel, queue, bool(method.no_ack))
            self._answer_get(client, channel, queue, got, bool(method.no_ack), 0)
            return
        _check_get(client.vhost, shards[0])
        name = (client.vhost, client.queue_name(channel, method.queue))
        turn = self._next_get_turn(name, len(shards))
        await self._get_of_shards(
            client, channel, shards[turn:] + shards[:turn], bool(method.no_ack)
        )

    async def _get_of_shards(
        self, client: Client, channel: Channel, shards: tuple[QueuePut, ...], no_ack: bool
    ) -> None:
        """From the first, whose turn it is, or else the first that has some."""
        queue, *others = shards
        got = await self._got(client, channel, queue, no_ack)
        ready: list[int] = []
        if len(shards) <= GET_COUNTS_MAX or not got[1].remaining:
            ready = [
                messages for messages, _ in await asyncio.gather(*map(self.links.count, others))
            ]
        for at, other in enumerate(others):
            if got[1].message:
                break
            if ready[at]:
                queue, ready[at] = other, 0
                got = await self._got(client, channel, other, no_ack)
        self._answer_get(client, channel, queue, got, no_ack, sum(ready))

    def _next_get_turn(self, name: tuple[str, str], shards: int) -> int:
        turn = self._get_turns.pop(name, -1) + 1
        while len(self._get_turns) >= GET_TURNS_MAX:
            del self._get_turns[next(iter(self._get_turns))]
        self._get_turns[name] = turn
        return turn % shards

    async def _got(
        self, client: Client, channel: Channel, queue: QueuePut, no_ack: bool
    ) -> tuple[int, wire.Got | wire.GotAgain]:
        """With the epoch of its shard that answered."""
        getter = self._getter(client, channel, queue.shard)

        def make(request: int) -> wire.Get:
            return wire.Get(
                request, queue.id, 0 if no_ack else getter.number, client.id, channel.number, no_ack
            )

        try:
            epoch, got = await self.links.ask_in_epoch(queue.shard, make)
        except ShardRefused as refused:
            raise _refusal(refused, queue.name, client.vhost, GET) from None
        assert isinstance(got, (wire.Got, wire.GotAgain))
        return epoch, got

    def _answer_get(
        self,
        client: Client,
        channel: Channel,
        queue: QueuePut,
        in_epoch: tuple[int, wire.Got | wire.GotAgain],
        no_ack: bool,
        elsewhere: int,
    ) -> None:
        """`elsewhere`: messages ready at other shards of the same virtual queue."""
        epoch, got = in_epoch
        message, redelivered = got.message, True
        if message:
            message = bytes(properties.without_header_in_each(message, 1, own_letters.BCC))
        if isinstance(got, wire.GotAgain):
            message = properties.with_delivery_count(message, 1, got.times)
        else:
            redelivered = got.redelivered
        if not channel.is_open:
            return  # its release, behind this get, requeues the message
        if not message:
            self._counts.got_empty += 1
            channel.got_empty += 1
            client.send(channel.number, commands.Basic.GetEmpty())
            return
        tag = channel.next_tag
        channel.next_tag += 1
        if no_ack:
            self._counts.got_auto += 1
            channel.got_auto += 1
        else:
            self._counts.got_manual += 1
            channel.got_manual += 1
            channel.unacked.add(
                tag,
                1,
                self._getter(client, channel, queue.shard),
                epoch,
                got.number,
                client.door.now,
            )
        if self.tracing is not None:
            self.tracing.delivered(client, channel.number, queue.name, redelivered, 1, message)
        remaining = got.remaining + elsewhere
        data = contents.get_ok(
            message, channel.number, tag, redelivered, remaining, client.frame_bytes_max
        )
        client.write(data)

    def _getter(self, client: Client, channel: Channel, shard: int) -> Consumer:
        """The pseudo consumer that holds what basic.get took from one shard."""
        getter = channel.getters.get(shard)
        if getter is None:
            getter = channel.getters[shard] = Consumer(client, channel, self.next_number(), "")
            getter.shard = shard
            self.consumers[getter.number] = getter
        return getter

    # -- deliveries -----------------------------------------------------------------------------------------

    def delivery(
        self, shard: int, section: tuple[int, int, int, int, bool, int, memoryview, int, bool]
    ) -> None:
        """Messages of one consumer, on their way to its client."""
        _connection, _channel, number, first_number, redelivered, count, blob, times, hides = (
            section
        )
        consumer = self.consumers.get(number)
        if consumer is None:
            # Released, and requeued there; its connection's window is of no interest any more, unless others share it.
            self.links.credit(shard, self.links.links[shard].epoch, section[0], len(blob))
            return
        if not consumer.announced:
            self._announce(consumer)
        channel, client = consumer.channel, consumer.client
        size = len(blob)
        if hides:
            blob = memoryview(properties.without_header_in_each(blob, count, own_letters.BCC))
        if consumer.reading is not None:
            blob = self._numbered(consumer, first_number, count, blob)
        tag = channel.next_tag
        channel.next_tag += count
        if consumer.no_ack:
            self._counts.delivered_auto += count
            channel.delivered_auto += count
        else:
            self._counts.delivered_manual += count
            channel.unacked.add(
                tag, count, consumer, self.links.links[shard].epoch, first_number, client.door.now
            )
            channel.outstanding += count
            if consumer.whole is not None:
                self.virtual.delivered(consumer, count)
        if consumer.granted and not consumer.lent:
            self.grants.use(consumer, count)
            if consumer.no_ack and channel.wanting:  # no ack will tell that there is room again
                self.grants.share(channel)
        if self.tracing is not None:
            self.tracing.delivered(
                client, channel.number, consumer.queue_name, redelivered, count, blob
            )
        to_frames = contents.deliveries if size < LARGE_BYTES * count else contents.delivery_parts
        data = to_frames(
            properties.with_delivery_count(blob, count, times) if times else blob,
            count,
            channel.number,
            consumer.tag_bytes,
            tag,
            redelivered,
            client.amqp.frame_bytes_max,
        )
        client.write_delivery(data, shard, size)

    def _numbered(
        self, consumer: Consumer, first_number: int, count: int, blob: memoryview
    ) -> memoryview:
        """Messages of a stream, with their offsets in a header."""
        assert consumer.reading is not None
        epoch = self.links.links[consumer.shard].epoch
        if consumer.reading.crowded:
            first = consumer.channel.first_unsettled(consumer, epoch)
            consumer.reading.forget_before(first_number if first is None else first)
        return memoryview(consumer.reading.take(first_number, count, blob, epoch))

    def cancelled(self, number: int) -> None:
        """The queue is gone."""
        consumer = self.consumers.get(number)
        if consumer is not None and consumer.whole is not None:
            self.virtual.gone(consumer)
            return
        if consumer is None or consumer.channel.consumers.get(consumer.tag) is not consumer:
            return
        self._announce(consumer)
        consumer.attached = False
        if consumer is consumer.channel.replies:
            self._end_replies(consumer.channel)
        del consumer.channel.consumers[consumer.tag]
        consumer.channel.cancelled.append(consumer)
        self.grants.stopped(consumer)
        consumer.client.notify_cancel(consumer.channel.number, consumer.tag)

    def unacked_of(self, queue_id: int, now: float) -> list[dict[str, Any]]:
        """Deliveries of its consumers that wait for their ack, the first UNACKED_LISTED_MAX; `now`: loop time."""
        listed = (
            {
                "owner": consumer.client.owner,
                "channel": consumer.channel.number,
                "consumer_tag": consumer.tag,
                "delivery_tag": tag,
                "unacked_for": int((now - run.at) * 1000),
            }
            for consumer in self.consumers.values()
            if consumer.queue_id == queue_id
            for run in consumer.channel.unacked.of(consumer)
            for tag in range(run.first_tag, run.last_tag + 1)
        )
        return [*itertools.islice(listed, UNACKED_LISTED_MAX)]

    def away(self, shard: int) -> None:
        """It is gone. What its consumers might still have taken of a limit they share is for those elsewhere, until
        restarted() begins anew."""
        channels: dict[Channel, None] = {}
        for consumer in self.consumers.values():
            if consumer.shard == shard and (consumer.lent or consumer.channel.limit):
                self.grants.away(consumer)
                channels[consumer.channel] = None
        for channel in channels:
            self.grants.share(channel)

    def restarted(self, shard: int) -> None:
        """The shard knows nobody any more: attach all its consumers again."""
        for consumer in self.consumers.values():
            if consumer.shard == shard and _is_attached(consumer):
                self.grants.drop(consumer)
                self.attach(consumer, resumed=True).add_done_callback(
                    partial(self._resumed, consumer.number)
                )
        for consumer in [each for each in self._leaving.values() if each.shard == shard]:
            # For the new process its queue has never had a consumer, and would wait for the last one to leave.
            self.attach(consumer, resumed=True, leaving=True).add_done_callback(
                asyncio.Future.exception
            )
            self._release(shard, [consumer])

    def _resumed(self, number: int, answer: asyncio.Future[wire.Control]) -> None:
        """Attached again after a restart, unless the queue went meanwhile, which its new shard does not know of."""
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            log.info("a consumer was not attached again: %s", error)
            self.cancelled(number)

    # -- acks ----------------------------------------------------------------------------------------------

    def settles(self, channel: Channel, ranges: list[tuple[int, int, int, bool]]) -> None:
        """Acks, rejects and requeues of one channel, in order. Raises for a tag that is not outstanding."""
        for kind, runs in self._taken(channel, ranges):
            if channel.transaction is not None:
                channel.transaction.settle((kind, runs))
            else:
                self.settle_runs(kind, runs)

    @staticmethod
    def _taken(
        channel: Channel, ranges: list[tuple[int, int, int, bool]]
    ) -> Iterator[tuple[int, list[Run]]]:
        unacked = channel.unacked
        try:
            for kind, first, last, multiple in subsumed(ranges, unacked.has):
                if multiple:
                    yield kind, unacked.take_through(first)
                else:
                    for run in unacked.take(first, last):
                        yield kind, [run]
        except UnknownTag as unknown:
            ids = (
                ACK if kind == wire.ACK else NACK
            )  # which of nack and reject it was nobody knows any more
            raise ChannelException(406, f"unknown delivery tag {unknown.tag}", *ids) from None

    def settle_runs(self, kind: int, runs: list[Run], at_once: bool = False) -> None:
        """Of one channel; in a transaction when it is committed, and then `at_once`: acks wait for no others."""
        wholes: dict[Virtual, None] = {}
        for run in runs:
            last = run.first_number + run.last_tag - run.first_tag
            self._tell_settled(kind, run, last, at_once, wholes)
            if (
                kind == wire.REQUEUE
                and run.consumer.reading is not None
                and run.epoch == run.consumer.reading.epoch
            ):
                run.consumer.reading.give_back(run.first_number, last)
            if run.consumer.tag:  # what basic.get took does not count
                run.consumer.channel.outstanding -= run.last_tag - run.first_tag + 1
                if run.consumer.whole is not None:
                    self.virtual.settled(run.consumer, run.last_tag - run.first_tag + 1, run.epoch)
        for whole in wholes:
            self.grants.take_turns(whole, whole.client.door.now)
        if runs and (channel := runs[0].consumer.channel).limit and channel.wanting:
            self.grants.share(channel)

    def _tell_settled(
        self, kind: int, run: Run, last: int, at_once: bool, wholes: dict[Virtual, None]
    ) -> None:
        """Its shard, now or soon. `wholes`: whose acks wait together."""
        consumer = run.consumer
        if kind != wire.ACK or at_once:
            self.links.settle(
                consumer.shard, run.epoch, consumer.number, kind, run.first_number, last
            )
        elif isinstance(consumer, Part) and consumer.takes_turns:
            whole = consumer.whole
            wholes[whole] = None
            number = consumer.number
            self.links.ack(
                consumer.shard,
                run.epoch,
                number,
                run.first_number,
                last,
                ALL_TOGETHER,
                whole.number,
            )
        else:
            prefetch = consumer.granted if consumer.lent else consumer.prefetch
            together = acks_together(prefetch, consumer.affinity)
            self.links.ack(
                consumer.shard, run.epoch, consumer.number, run.first_number, last, together
            )

    def recover(self, channel: Channel) -> None:
        """All unacknowledged deliveries of the channel go back to their queues."""
        self.settle_runs(wire.REQUEUE, channel.unacked.take_through(0))

    # -- the limit of a channel ------------------------------------------------------------------------------

    def limit(self, channel: Channel, limit: int) -> None:
        """basic.qos with global set: `limit` deliveries of all its consumers together, 0 for any number."""
        consumers: list[Consumer] = []
        for each in channel.consumers.values():
            consumers += each.parts.values() if isinstance(each, Virtual) else [each]
        self.grants.change_limit(
            channel, limit, [each for each in consumers if _has_part_in_limit(each)]
        )

    def ungranted(self, number: int, count: int, wants: bool) -> None:
        """Grants given back, or asked for."""
        consumer = self.consumers.get(number)
        if consumer is not None:
            self.grants.ungranted(consumer, count, wants)


def _check_reply_consumer(channel: Channel, method: commands.Basic.Consume) -> None:
    """Refuse what direct reply-to cannot do. RabbitMQ looks at this before the consumer's tag."""
    if not method.no_ack:
        raise ChannelException(406, "reply consumer cannot acknowledge", *CONSUME)
    if channel.replies is not None:
        raise ChannelException(406, "reply consumer already set", *CONSUME)


def _has_part_in_limit(consumer: Consumer) -> bool:
    """Return whether the limit of a channel holds for the consumer.

    For a consumer of a single stream it does not, as in RabbitMQ.
    """
    return consumer.reading is None or consumer.whole is not None


def _is_attached(consumer: Consumer) -> bool:
    """Whether its shard had it, though whoever asked may not have run since the answer."""
    if isinstance(consumer, Part):
        return consumer.wanted and (consumer.attached or _answered(consumer))
    if consumer.channel.consumers.get(consumer.tag) is not consumer:
        return False
    return consumer.attached or _answered(consumer)


def _answered(consumer: Consumer) -> bool:
    answer = consumer.attaching
    return (
        answer is not None
        and answer.done()
        and not answer.cancelled()
        and answer.exception() is None
    )


def _reading(consumer: Consumer, arguments: Mapping[str, object]) -> reading.Reading:
    """Raises what the consumer of a stream did wrong."""
    channel, vhost = consumer.channel, consumer.client.vhost
    try:
        reading.check_consume(
            vhost,
            consumer.queue_name,
            consumer.no_ack,
            consumer.exclusive,
            consumer.prefetch,
            channel.limit,
        )
        return reading.Reading(reading.read_from(arguments, consumer.tag))
    except checks.Refusal as refusal:
        raise _refused(refusal, CONSUME) from None


def _read_all(whole: Virtual, method: commands.Basic.Consume) -> wire.ReadFrom:
    """Of a virtual queue whose shards are streams."""
    channel, vhost = whole.channel, whole.client.vhost
    try:
        reading.check_consume(
            vhost,
            whole.exchange,
            bool(method.no_ack),
            bool(method.exclusive),
            channel.prefetch,
            channel.limit,
        )
        return reading.read_from(method.arguments or {}, whole.tag)
    except checks.Refusal as refusal:
        raise _refused(refusal, CONSUME) from None


def _refused(
    refusal: checks.Refusal, method: tuple[int, int]
) -> ChannelException | ConnectionException:
    kind = ConnectionException if refusal.code == reading.NOT_IMPLEMENTED else ChannelException
    return kind(refusal.code, refusal.text, *method)


def _read_from(consumer: Consumer, resumed: bool) -> wire.ReadFrom | None:
    """None: its queue is no stream."""
    if consumer.reading is None:
        return None
    if not resumed:
        return consumer.reading.asked
    return consumer.reading.resume(
        consumer.channel.first_unsettled(consumer, consumer.reading.epoch)
    )


def _attach_as(consumer: Consumer, read: wire.ReadFrom | None) -> Callable[..., wire.Attach]:
    if read is not None and isinstance(consumer, Part):
        stop, mark = consumer.bounds
        return partial(
            wire.AttachStreamPart, read=read, stop=stop, mark=mark, whole=consumer.whole.number
        )
    if read is not None:
        return partial(wire.AttachReader, read=read)
    return (
        wire.Attach
        if consumer.whole is None
        else partial(wire.AttachPart, whole=consumer.whole.number)
    )


def _check_get(vhost: str, queue: QueuePut) -> None:
    if reading.is_stream(queue.arguments):
        raise _refused(reading.no_get(vhost, queue.name), GET)


def _priority(arguments: Mapping[str, object], queue: str, vhost: str) -> int:
    try:
        checks.check_consume_arguments(vhost, queue, arguments)
    except checks.Refusal as refusal:
        raise _refused(refusal, CONSUME) from None
    value = arguments.get("x-priority", 0)
    return value if isinstance(value, int) else 0


def _refusal(
    refused: ShardRefused, queue: str, vhost: str, method: tuple[int, int] = CONSUME
) -> ChannelException:
    """A shard's Refused in RabbitMQ's words."""
    if refused.code == 404:
        return ChannelException(404, f"no queue '{queue}' in vhost '{vhost}'", *method)
    if refused.code == 403:
        return ChannelException(
            403, f"queue '{queue}' in vhost '{vhost}' in exclusive use", *method
        )
    return ChannelException(refused.code, refused.text, *method)
