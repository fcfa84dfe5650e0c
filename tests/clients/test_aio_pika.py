"""Test aio-pika: many publishes with confirms, many channels, and many declares at once."""

from __future__ import annotations

import asyncio

import aio_pika
import pytest

from tests.support.real_broker import RealBroker


@pytest.mark.asyncio
async def test_a_thousand_publishes_at_once_are_all_confirmed_and_in_order(
    broker: RealBroker, name: str
) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        queue = await channel.declare_queue(name, durable=True)
        exchange = channel.default_exchange
        await asyncio.gather(
            *(exchange.publish(aio_pika.Message(str(n).encode()), name) for n in range(1000))
        )
        seen: list[int] = []
        async with queue.iterator(timeout=60) as messages:
            async for message in messages:
                async with message.process():
                    seen.append(int(message.body))
                if len(seen) == 1000:
                    break
        assert seen == list(range(1000))
        await queue.delete(if_unused=False, if_empty=False)


@pytest.mark.asyncio
async def test_channels_of_one_connection_do_not_wait_for_one_another(
    broker: RealBroker, name: str
) -> None:
    async with await aio_pika.connect(broker.url) as connection:

        async def one(number: int) -> None:
            channel = await connection.channel()
            queue = await channel.declare_queue(f"{name}-{number}", exclusive=True)
            await queue.bind("amq.topic", f"{name}.{number}")
            exchange = await channel.get_exchange("amq.topic")
            await exchange.publish(aio_pika.Message(b"x"), f"{name}.{number}")
            message = await queue.get(timeout=60)
            assert message is not None
            await message.ack()
            await channel.close()

        await asyncio.gather(*(one(number) for number in range(50)))
