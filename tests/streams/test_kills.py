"""Test a stream whose shard is killed while the stream is written to and read.

No confirmed message is lost, nobody reads a message that is lost later, and readers go on where
they were.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aio_pika
import aiormq
import pytest
from aio_pika.abc import AbstractIncomingMessage

from tests.support.brokers import killable_broker
from tests.support.crash_clients import Publishing, connected, wait_for
from tests.support.real_broker import PATIENCE_S, RealBroker

pytestmark = pytest.mark.crash
broker = killable_broker

STREAM = {"x-queue-type": "stream"}
SHARDS = 2
KILLS = 4


class Reader:
    """A reader that keeps (offset, body, redelivered) in order.

    It leaves every `keep`-th message unacknowledged for a while.
    """

    def __init__(self, lag: int = 0) -> None:
        self.got: list[tuple[int, bytes, bool]] = []
        self._waiting: list[AbstractIncomingMessage] = []
        self._lag = lag

    async def take(self, message: AbstractIncomingMessage) -> None:
        self.got.append(
            (int(str(message.headers["x-stream-offset"])), message.body, bool(message.redelivered))
        )
        self._waiting.append(message)
        if len(self._waiting) > self._lag:
            await self._waiting.pop(0).ack()

    def check(self, confirmed: list[bytes], times: int = KILLS) -> None:
        """Check what the reader has got.

        No offset stands for two messages, and offsets have no gap. Only messages that were
        outstanding at a kill, or at something else of which there were so many `times`, come again,
        marked as redelivered. All confirmed messages were read.
        """
        bodies: dict[int, bytes] = {}
        high = -1
        for offset, body, redelivered in self.got:
            assert bodies.setdefault(offset, body) == body
            assert offset == high + 1 or (offset <= high and redelivered), (
                offset,
                high,
                redelivered,
            )
            high = max(high, offset)
        assert set(confirmed) <= {body.partition(b":")[0] for body in bodies.values()}
        again = len(self.got) - len(bodies)
        assert again <= times * (self._lag + 100), "more came again than can have been on its way"


@pytest.mark.row("D2")
async def test_readers_go_on_where_they_were_when_the_shard_of_a_stream_dies(
    broker: RealBroker, name: str
) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=100)
        queues = [
            await channel.declare_queue(f"{name}-{n}", durable=True, arguments=STREAM)
            for n in range(6)
        ]
        readers = [Reader(lag=at * 7) for at in range(len(queues))]
        for queue, reader in zip(queues, readers, strict=True):
            await queue.consume(reader.take, arguments={"x-stream-offset": "first"})
        publishing = [Publishing(await connection.channel(), queue.name, 20) for queue in queues]
        for kill in range(KILLS):
            await asyncio.sleep(0.4)
            await asyncio.to_thread(broker.kill, "shard", kill % SHARDS)
        await wait_for(lambda: all(len(each.confirmed) > 50 for each in publishing), "confirms")
        for each in publishing:
            await each.finish()
        # A last one behind all, so that it is known when the readers have everything.
        for queue in queues:
            await channel.default_exchange.publish(aio_pika.Message(b"end"), queue.name)
        await wait_for(
            lambda: all(b"end" in [body for _, body, _ in each.got[-50:]] for each in readers),
            "the end",
        )
        for each, reader in zip(publishing, readers, strict=True):
            reader.check(each.confirmed)


@pytest.mark.row("D5")
async def test_a_named_reader_goes_on_though_the_shard_was_killed_and_the_reader_too(
    broker: RealBroker, name: str
) -> None:
    """Its position is on the disk within about a second.

    No message is left out, a few may come again.
    """
    async with connected(broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(name, durable=True, arguments=STREAM)
        for number in range(300):
            await channel.default_exchange.publish(aio_pika.Message(b"%d" % number), name)
    seen: list[int] = []
    for round in range(3):
        async with connected(broker) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=20)
            queue = await channel.declare_queue(name, durable=True, arguments=STREAM)
            more = {"x-stream-automatic-offset-tracking": True, "x-stream-offset": "first"}
            reader = Reader()
            stop = 100 * (round + 1)
            tag = await queue.consume(reader.take, consumer_tag="auditor", arguments=more)
            await wait_for(
                lambda: reader.got[-1:] and reader.got[-1][0] >= stop - 1,  # noqa: B023
                "a hundred more",
            )
            await queue.cancel(tag)
            offsets = [offset for offset, _, _ in reader.got]
            assert offsets == list(range(offsets[0], offsets[-1] + 1))
            assert offsets[0] <= len(set(seen)), "some were left out"
            seen += offsets
        await asyncio.sleep(2.5)
        for shard in range(SHARDS):
            await asyncio.to_thread(broker.kill, "shard", shard)
    assert set(seen) >= set(range(300))
    assert len(seen) < 100 + 200 + 300, "positions were forgotten"


def _into(found: set[bytes]) -> Any:
    async def collect(message: AbstractIncomingMessage) -> None:
        found.add(message.body)

    return collect


@pytest.mark.row("B2.2")
async def test_a_binding_that_asks_for_what_was_kept_gets_it_though_shards_die_meanwhile(
    broker: RealBroker, name: str
) -> None:
    """No confirmed message is missing in a queue, whenever shards died.

    Some may come twice.
    """
    async with connected(broker) as connection:
        channel = await connection.channel()
        arguments = {"x-persist-messages": 1_000_000}
        exchange = await channel.declare_exchange(name, "fanout", durable=True, arguments=arguments)
        own = await connection.channel()
        confirmed: list[bytes] = []
        going = True

        async def publish(who: int) -> None:
            target, number = await own.get_exchange(name), 0
            while going:
                number += 1
                body = b"%d.%d" % (who, number)
                message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                with contextlib.suppress(aiormq.exceptions.DeliveryError):
                    await target.publish(message, "k", mandatory=False)
                    confirmed.append(body)

        publishers = [asyncio.create_task(publish(who)) for who in range(10)]
        await asyncio.sleep(0.5)
        queues = []
        for number in range(KILLS):
            killing = asyncio.create_task(asyncio.to_thread(broker.kill, "shard", number % SHARDS))
            queue = await channel.declare_queue(f"{name}-{number}", durable=True)
            await asyncio.wait_for(queue.bind(exchange, "", arguments={"x-from": 0}), PATIENCE_S)
            queues.append(queue)
            await killing
            await asyncio.sleep(0.3)
        going = False
        await asyncio.wait_for(asyncio.gather(*publishers), PATIENCE_S)
        assert len(confirmed) > 100
        for queue in queues:
            found: set[bytes] = set()
            await queue.consume(_into(found), no_ack=True)
            await wait_for(
                lambda: set(confirmed) <= found,  # noqa: B023
                f"all that was confirmed in {queue.name}",
            )
