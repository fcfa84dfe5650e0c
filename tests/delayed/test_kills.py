"""Thousands of messages become due while processes are killed.

All of them come, and none is early.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractExchange, AbstractIncomingMessage

from tests.support.brokers import killable_broker
from tests.support.crash_clients import connected, wait_for
from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.crash
broker = killable_broker

MESSAGES = 4000
DELAYS_MS = (2000, 4000)
ARRIVAL_S = 90.0
EARLY_S = 0.002  # clocks count whole milliseconds


async def _publish(exchange: AbstractExchange, due: dict[int, float]) -> None:
    """All confirmed. `due`: by number, when each may come at the earliest."""

    async def one(number: int) -> None:
        low, high = DELAYS_MS
        delay = low + number * 7919 % (high - low)
        message = aio_pika.Message(
            b"%d" % number,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            headers={"x-delay": delay},
        )
        due[number] = time.time() + delay / 1000
        await exchange.publish(message, "")

    for start in range(0, MESSAGES, 500):
        await asyncio.gather(*map(one, range(start, start + 500)))


@pytest.mark.row("B1.10")
@pytest.mark.parametrize("victim", ["shard", "front-door"])
async def test_a_killed_process_costs_no_delayed_message(
    broker: RealBroker, name: str, victim: str
) -> None:
    due: dict[int, float] = {}
    came: dict[int, float] = {}

    async def collect(message: AbstractIncomingMessage) -> None:
        came.setdefault(int(message.body), time.time())
        await message.ack()

    async with connected(broker) as connection:
        channel = await connection.channel()
        arguments: dict[str, Any] = {"x-delayed-type": "fanout"}
        exchange = await channel.declare_exchange(
            name, "x-delayed-message", durable=True, arguments=arguments
        )
        queue = await channel.declare_queue(name, durable=True)
        await queue.bind(exchange)
        await _publish(exchange, due)
    for index in range(2):
        broker.kill(victim, index)
        await asyncio.sleep(1)  # until some of them are due, and on their way
    async with connected(broker) as connection:
        channel = await connection.channel()
        await (await channel.get_queue(name)).consume(collect)
        await wait_for(lambda: len(came) == MESSAGES, f"{MESSAGES} messages", ARRIVAL_S)
        await channel.exchange_delete(name)
        await channel.queue_delete(name)
    early = {number: due[number] - at for number, at in came.items() if at < due[number] - EARLY_S}
    assert not early
