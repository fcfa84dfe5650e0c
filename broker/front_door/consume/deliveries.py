"""Messages of the shards on their way to consumers: delivery tags, counters, frames."""

from __future__ import annotations

import time

from shardmq.broker.amqp import contents, properties
from shardmq.broker.front_door.consume.consumers import Clock, Consumer
from shardmq.broker.front_door.consume.crediting import Crediting
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.spans import Spans
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.model import message_dlx
from shardmq.shardd.wire.messages import Weighed

# Messages of this size, on average of a delivery, are written from where they lie. Smaller ones are
# copied, which costs less than a piece of its own for each.
LARGE_BYTES = 16 << 10


class Deliveries:
    """All deliveries of this front door, those of basic.get excepted (get.py)."""

    def __init__(
        self,
        links: ShardLinks,
        consumers: dict[int, Consumer],
        crediting: Crediting,
        counts: Counts,
        clock: Clock,
        spans: Spans | None = None,
    ) -> None:
        self._links = links
        self._consumers = consumers
        self._crediting = crediting
        self._counts = counts
        self._clock = clock
        self._spans = spans
        self.tracing: Tracing | None = None  # None: nothing is traced

    def deliver(
        self,
        shard: int,
        section: tuple[int, int, int, int, bool, int, memoryview | Weighed, int, bool],
    ) -> None:
        """Hand messages of one consumer to its connection.

        `section` is what the shard sent: connection, channel, number of the consumer, number of the
        first delivery, whether the messages are redelivered, how many there are, the stored
        messages, how often they were delivered before, whether some have headers to be hidden.
        """
        _connection, _channel, number, first_number, redelivered, count, blob, times, hides = (
            section
        )
        consumer = self._consumers.get(number)
        link = self._links.links[shard]
        if consumer is None:
            # The consumer was released, and the shard requeues the messages. Their bytes count for
            # the window of the connection, which other consumers may share.
            weight = blob.weight if isinstance(blob, Weighed) else len(blob)
            self._links.credit(shard, link.epoch, section[0], weight)
            return
        began_ns = time.time_ns() if self._spans is not None else 0
        channel, client = consumer.channel, consumer.client
        if not consumer.announced:
            client.answer(channel.number, consumer.announce())
        weight, messages = len(blob), None
        if isinstance(blob, Weighed):
            weight = blob.weight
            if blob.is_lent:
                messages = self._lent(shard, blob.blob, count)
            blob = blob.blob
            if messages is not None and (hides or times or self.tracing is not None):
                blob, messages = memoryview(_joined(messages)), None
        size = len(blob)
        if hides:
            blob = memoryview(properties.without_header_in_each(blob, count, message_dlx.BCC))
        if consumer.reading is not None:
            blob = _with_offsets(consumer, first_number, count, blob, link.epoch)
        tag = channel.next_tag
        channel.next_tag += count
        if redelivered:
            channel.redelivered += count
        if consumer.no_ack:
            self._counts.delivered_auto += count
            channel.delivered_auto += count
        else:
            self._counts.delivered_manual += count
            channel.unacked.add(tag, count, consumer, link.epoch, first_number, self._clock.now)
            if consumer.is_in_limit:
                channel.limit.unacked += count
            if consumer.group is not None:
                consumer.hold(count)
        consumer.delivered += count
        if consumer.allotment is not None:
            self._crediting.delivered(consumer.allotment, count, consumer.no_ack)
        if self.tracing is not None:
            fed = self.tracing.delivered(
                client.session, channel.number, consumer.queue_name, redelivered, count, blob
            )
            client.feeds(fed)
        data: bytes | list[bytes | memoryview]
        if messages is not None:
            data = contents.framed(
                messages,
                channel.number,
                consumer.tag_bytes,
                tag,
                redelivered,
                client.session.frame_bytes_max,
            )
        else:
            is_small = size < LARGE_BYTES * count
            to_frames = contents.deliveries if is_small else contents.delivery_parts
            data = to_frames(
                properties.with_delivery_count(blob, count, times) if times else blob,
                count,
                channel.number,
                consumer.tag_bytes,
                tag,
                redelivered,
                client.session.frame_bytes_max,
            )
        client.write_delivery(data, shard, weight)
        if self._spans is not None:
            heads = blob if messages is None else [head for head, _ in messages]
            self._spans.delivered(client.session, consumer.queue_name, began_ns, count, heads)

    def _lent(self, shard: int, places: memoryview, count: int) -> list[tuple[bytes, memoryview]]:
        """Return each message without its body, and its body, which stays where it is."""
        bodies = self._links.bodies
        if bodies is None:
            raise ValueError(f"shard {shard} delivers bodies that nobody has lent")
        return bodies.messages(shard, places, count)


def _joined(messages: list[tuple[bytes, memoryview]]) -> bytes:
    return b"".join([part for message in messages for part in message])


def _with_offsets(
    consumer: Consumer, first_number: int, count: int, blob: memoryview, epoch: int
) -> memoryview:
    """Return the messages of a stream with their offsets in a header."""
    reading = consumer.reading
    assert reading is not None
    if reading.crowded:
        first = consumer.channel.first_unsettled(consumer, epoch)
        reading.forget_before(first_number if first is None else first)
    return memoryview(reading.take(first_number, count, blob, epoch))
