"""Test producers that send their sequences and repeat, in order, all messages without a confirm.

Each message is stored exactly once and in order, whatever process was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aio_pika
import aiormq
import pytest

from tests.support.brokers import killable_broker
from tests.support.crash_clients import connected, wait_for
from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.crash
broker = killable_broker

MESSAGES = 1500
WINDOW = 200
KILLS = 3


class Producer:
    """A producer with WINDOW messages on their way.

    It begins again from the first message that was not confirmed.
    """

    def __init__(self, broker: RealBroker, name: str, exchange: str, key: str) -> None:
        self.broker, self.name, self.exchange, self.key = broker, name, exchange, key
        self.confirmed = 0
        self.begun_again = 0

    async def run(self) -> None:
        while self.confirmed < MESSAGES:
            with contextlib.suppress(OSError, aiormq.exceptions.AMQPError):
                async with connected(self.broker) as connection:
                    await self._publish(await connection.channel())
            self.begun_again += 1

    async def _publish(self, channel: aio_pika.abc.AbstractChannel) -> None:
        exchange = (
            await channel.get_exchange(self.exchange, ensure=False)
            if self.exchange
            else channel.default_exchange
        )
        while self.confirmed < MESSAGES and not channel.is_closed:
            stop = min(self.confirmed + WINDOW, MESSAGES)
            answers = await asyncio.gather(
                *(
                    exchange.publish(self._message(i), self.key, timeout=60)
                    for i in range(self.confirmed, stop)
                ),
                return_exceptions=True,
            )
            failed = [i for i, answer in enumerate(answers) if isinstance(answer, BaseException)]
            self.confirmed += failed[0] if failed else len(answers)
            self.begun_again += bool(failed)

    def _message(self, number: int) -> aio_pika.Message:
        headers: dict[str, Any] = {"x-producer-id": self.name, "x-sequence": number}
        mode = aio_pika.DeliveryMode.PERSISTENT
        return aio_pika.Message(
            b"%s %d" % (self.name.encode(), number), headers=headers, delivery_mode=mode
        )


async def contents(channel: aio_pika.abc.AbstractChannel, name: str) -> list[bytes]:
    """All bodies, in order."""
    queue = await channel.declare_queue(name, passive=True)
    count = queue.declaration_result.message_count
    bodies: list[bytes] = []
    assert count is not None

    async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        bodies.append(message.body)

    await queue.consume(take, no_ack=True)
    await wait_for(lambda: len(bodies) >= count, f"the {count} messages of {name}")
    return bodies


@pytest.mark.parametrize("kind", ["shard", pytest.param("front-door", marks=pytest.mark.torture)])
async def test_each_message_is_there_once_though_producers_repeat(
    broker: RealBroker, name: str, kind: str
) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        queues = [f"{name}-{n}" for n in range(4)]  # on both shards
        exchange = await channel.declare_exchange(name, aio_pika.ExchangeType.FANOUT)
        for queue in queues:
            declared = await channel.declare_queue(queue, durable=True)
            if queue in queues[:2]:
                await declared.bind(exchange)
    producers = [Producer(broker, f"{name}-p{n}", "", queue) for n, queue in enumerate(queues)]
    producers.append(Producer(broker, f"{name}-all", name, ""))
    running = [asyncio.create_task(producer.run()) for producer in producers]
    for kills in range(KILLS):
        await asyncio.sleep(0.4)
        await asyncio.to_thread(broker.kill, kind, kills % 2)
    await asyncio.wait_for(asyncio.gather(*running), 200)
    assert sum(producer.begun_again for producer in producers) > KILLS, "nothing was on its way"
    async with connected(broker) as connection:
        channel = await connection.channel()
        for n, queue in enumerate(queues):
            found: dict[bytes, list[int]] = {}
            for body in await contents(channel, queue):
                who, _, number = body.partition(b" ")
                found.setdefault(who, []).append(int(number))
            expected = [f"{name}-p{n}"] + ([f"{name}-all"] if n < 2 else [])
            assert sorted(found) == sorted(who.encode() for who in expected)
            for who, numbers in found.items():
                assert numbers == list(range(MESSAGES)), (
                    f"{who!r} in {queue}: {len(numbers)} of {MESSAGES}"
                )
