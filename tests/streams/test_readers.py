"""Test readers of streams as clients see them.

A reader that comes again goes on at the first message that it has not acknowledged. It never has
more messages at a time than its prefetch, however many streams are behind the name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.real_broker import RealBroker

WITHIN_S = 60.0
STILL_S = 0.3  # nothing more comes
STREAM = {"x-queue-type": "stream"}
FIRST = {"x-stream-offset": "first"}
TAG = "auditor"


class Reader:
    """One consumer of a connection of its own, which acknowledges nothing by itself."""

    def __init__(
        self, broker: RealBroker, queue: str, prefetch: int, tag: str, **arguments: Any
    ) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        self.channel = self.connection.channel()
        self.channel.basic_qos(prefetch_count=prefetch)
        self.got: list[tuple[int, int]] = []  # tag, offset
        self.bodies: list[bytes] = []
        self.channel.basic_consume(queue, self._receive, consumer_tag=tag, arguments=arguments)

    def _receive(self, channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        self.got.append((method.delivery_tag, properties.headers["x-stream-offset"]))
        self.bodies.append(body)

    @property
    def offsets(self) -> list[int]:
        return [offset for _, offset in self.got]

    def gets(self, count: int) -> None:
        """So many in all, and no more."""
        end = time.monotonic() + WITHIN_S
        while len(self.got) < count:
            assert time.monotonic() < end, f"{len(self.got)} of {count}"
            self.connection.process_data_events(0.05)
        end = time.monotonic() + STILL_S
        while (left := end - time.monotonic()) > 0:
            self.connection.process_data_events(left)
        assert len(self.got) == count


@pytest.fixture
def stream(connection: pika.BlockingConnection, name: str) -> Iterator[str]:
    """Yield the name of a new stream."""
    channel = connection.channel()
    channel.queue_declare(name, durable=True, arguments=STREAM)
    yield name
    channel.queue_delete(name)


@pytest.fixture
def exchange(
    connection: pika.BlockingConnection, name: str
) -> Iterator[Callable[[int], BlockingChannel]]:
    """Yield a function that declares the stream exchange with a number of streams.

    Its channel is for publishing.
    """
    channel = connection.channel()
    channel.confirm_delivery()

    def declare(shards: int) -> BlockingChannel:
        arguments = {"x-shards": shards, "x-shard-arguments": STREAM}
        channel.exchange_declare(name, "x-modulus-hash", durable=True, arguments=arguments)
        return channel

    yield declare
    channel.exchange_delete(name)


def give_back(reader: Reader, tag: str, how: str) -> None:
    """Cancel, and what it holds goes back behind that."""
    held = [delivery for delivery, _ in reader.got[5:]]
    reader.channel.basic_cancel(tag)
    if how == "nack all":
        reader.channel.basic_nack(held[-1], multiple=True, requeue=True)
    for delivery in held if how != "nack all" else ():
        if how == "nack":
            reader.channel.basic_nack(delivery, requeue=True)
        elif how == "reject":
            reader.channel.basic_reject(delivery, requeue=True)
    if how == "recover":
        reader.channel.basic_recover(requeue=True)


HOW = ["reject", "nack", "nack all", "recover", "close"]


@pytest.mark.row("D5")
@pytest.mark.parametrize("how", HOW)
def test_a_name_goes_on_at_what_was_given_back_behind_its_cancel(
    broker: RealBroker, connection: pika.BlockingConnection, stream: str, how: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    tracked = {"x-stream-offset": "first", "x-stream-automatic-offset-tracking": True}
    for number in range(20):
        channel.basic_publish("", stream, b"%d" % number)
    reader = Reader(broker, stream, 5, TAG, **tracked)
    reader.gets(5)
    for delivery, _ in reader.got[:5]:
        reader.channel.basic_ack(delivery)
    reader.gets(10)
    give_back(reader, TAG, how)
    reader.connection.close()
    later = Reader(broker, stream, 5, TAG, **tracked)
    later.gets(5)
    assert (reader.offsets, later.offsets) == ([*range(10)], [*range(5, 10)])
    later.connection.close()


@pytest.mark.row("D5")
def test_a_group_goes_on_at_what_a_member_gave_back_behind_its_cancel(
    broker: RealBroker, exchange: Callable[[int], BlockingChannel], name: str
) -> None:
    channel = exchange(4)
    for number in range(20):
        channel.basic_publish(name, "one key", b"%d" % number)
    for how in HOW:
        group = {**FIRST, "x-group": how}
        reader = Reader(broker, name, 5, TAG, **group)
        reader.gets(5)
        for delivery, _ in reader.got[:5]:
            reader.channel.basic_ack(delivery)
        reader.gets(10)
        give_back(reader, TAG, how)
        reader.connection.close()
        later = Reader(broker, name, 5, TAG, **group)
        later.gets(5)
        assert (reader.offsets, later.offsets) == ([*range(10)], [*range(5, 10)]), how
        later.connection.close()


@pytest.mark.row("D5")
def test_what_the_client_puts_back_by_itself_when_it_cancels_comes_again(
    broker: RealBroker, connection: pika.BlockingConnection, stream: str
) -> None:
    """pika's iterator rejects messages that it has not handed out.

    It rejects messages that arrive during the cancel too.
    """
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(40):
        channel.basic_publish("", stream, b"%d" % number)
    tracked = {"x-stream-offset": "first", "x-stream-automatic-offset-tracking": True}
    seen: list[int] = []
    while len(seen) < 40:
        reader = Reader(broker, stream, 10, TAG, **tracked)
        before = time.monotonic()
        while len(reader.got) < 4:
            assert time.monotonic() < before + WITHIN_S
            reader.connection.process_data_events(0.05)
        handed = reader.got[:4]
        for delivery, offset in handed:
            seen.append(offset)
            reader.channel.basic_ack(delivery)
        for delivery, _ in reader.got[4:]:
            reader.channel.basic_reject(delivery, requeue=True)
        reader.channel.basic_cancel(TAG)  # what came again meanwhile is rejected by pika
        reader.connection.close()
    assert seen == [*range(40)]


@pytest.mark.row("D5")
def test_an_ack_behind_one_that_is_missing_leaves_the_position_where_it_was(
    broker: RealBroker, connection: pika.BlockingConnection, stream: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(10):
        channel.basic_publish("", stream, b"%d" % number)
    tracked = {"x-stream-offset": "first", "x-stream-automatic-offset-tracking": True}
    reader = Reader(broker, stream, 10, TAG, **tracked)
    reader.gets(10)
    for delivery, offset in reader.got:
        if offset not in (5, 9):
            reader.channel.basic_ack(delivery)
    reader.connection.close()
    later = Reader(broker, stream, 10, TAG, **tracked)
    later.gets(5)
    assert later.offsets == [5, 6, 7, 8, 9]
    later.connection.close()


def test_eight_streams_and_a_prefetch_of_one_are_one_message_at_a_time(
    broker: RealBroker, exchange: Callable[[int], BlockingChannel], name: str
) -> None:
    channel = exchange(8)
    for number in range(40):
        channel.basic_publish(name, f"key-{number}", b"%d" % number)
    reader = Reader(broker, name, 1, TAG, **FIRST)
    for count in range(1, 41):
        reader.gets(count) if count < 6 else _comes(reader, count)
        reader.channel.basic_ack(reader.got[-1][0])
    assert sorted(map(int, reader.bodies)) == [*range(40)]
    reader.connection.close()


def _comes(reader: Reader, count: int) -> None:
    end = time.monotonic() + WITHIN_S
    while len(reader.got) < count:
        assert time.monotonic() < end
        reader.connection.process_data_events(0.05)
    assert len(reader.got) == count


def test_one_busy_stream_of_four_has_the_whole_prefetch(
    broker: RealBroker, exchange: Callable[[int], BlockingChannel], name: str
) -> None:
    """A client that acknowledges in tens comes to the end."""
    channel = exchange(4)
    for number in range(50):
        channel.basic_publish(name, "one key", b"%d" % number)
    reader = Reader(broker, name, 10, TAG, **FIRST)
    for tens in range(1, 6):
        reader.gets(10 * tens)
        reader.channel.basic_ack(reader.got[-1][0], multiple=True)
    assert [*map(int, reader.bodies)] == [*range(50)]
    reader.connection.close()


def test_the_limit_of_a_channel_set_later_holds_for_streams_together(
    broker: RealBroker, exchange: Callable[[int], BlockingChannel], name: str
) -> None:
    channel = exchange(4)
    for number in range(60):
        channel.basic_publish(name, f"key-{number}", b"%d" % number)
    reader = Reader(broker, name, 7, TAG, **FIRST)
    reader.gets(7)
    reader.channel.basic_qos(prefetch_count=3, global_qos=True)
    reader.channel.basic_ack(reader.got[4][0], multiple=True)
    reader.gets(8)  # two of the seven, and one more
    reader.channel.basic_qos(prefetch_count=0, global_qos=True)
    reader.gets(5 + 7)
    reader.connection.close()


async def test_each_member_of_a_group_of_streams_has_a_prefetch_of_its_own(
    broker: RealBroker, exchange: Callable[[int], BlockingChannel], name: str
) -> None:
    channel = exchange(4)
    for number in range(100):
        channel.basic_publish(name, f"key-{number}", b"%d" % number)
    connection = await aio_pika.connect(broker.url)
    async with connection:
        got: list[list[aio_pika.abc.AbstractIncomingMessage]] = [[], []]

        async def receive(number: int, message: aio_pika.abc.AbstractIncomingMessage) -> None:
            got[number].append(message)

        for number in range(2):
            made = await connection.channel()
            await made.set_qos(prefetch_count=6)
            queue = await made.get_queue(name, ensure=False)
            arguments = {**FIRST, "x-group": "g"}

            async def mine(
                message: aio_pika.abc.AbstractIncomingMessage, number: int = number
            ) -> None:
                await receive(number, message)

            await queue.consume(mine, arguments=arguments)
        end = time.monotonic() + WITHIN_S
        seen: set[bytes] = set()
        while len(seen) < 100:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
            for messages in got:
                assert len(messages) <= 6
                for message in messages:
                    seen.add(message.body)
                    await message.ack()
                messages.clear()
