"""Thousands of messages die while processes are killed.

All that were confirmed arrive at least once.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue

from tests.support.brokers import killable_broker
from tests.support.crash_clients import (
    Publishing,
    connected,
    connected_to_both_doors,
    got_from,
    wait_for,
)
from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.crash
broker = killable_broker

QUEUES = 4  # on both shards, as are those they dead-letter to
AT_ONCE = 60
MESSAGES = 3000
TTL_MS = 300
ARRIVAL_S = 90.0
LIMIT = 2  # of how often a message comes back; each time everything ends
# Acknowledgements and counts reach the file within a second.
COUNT_LASTS_S = 3.0


class Dying:
    """Queues that dead-letter, publishers to them, and what arrives."""

    def __init__(self, channel: AbstractChannel, name: str, **arguments: Any) -> None:
        self.channel = channel
        self.names = [f"{name}-{number}" for number in range(QUEUES)]
        self.arguments = arguments
        self.publishing: list[Publishing] = []
        self.arrived: dict[str, set[bytes]] = {}

    async def start(self) -> list[AbstractQueue]:
        sources = []
        for name in self.names:
            await self.channel.declare_queue(f"{name}-dead", durable=True)
            own = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}-dead"}
            sources.append(
                await self.channel.declare_queue(name, durable=True, arguments=own | self.arguments)
            )
        self.publishing = [Publishing(self.channel, name, AT_ONCE) for name in self.names]
        return sources

    @property
    def confirmed(self) -> int:
        return sum(len(each.confirmed) for each in self.publishing)

    async def reach(self, count: int) -> None:
        await wait_for(lambda: self.confirmed >= count, f"{count} confirms", 60)

    async def finish(self) -> None:
        for each in self.publishing:
            await each.finish()
        for name in self.names:
            found = self.arrived[name] = set()
            queue = await self.channel.get_queue(f"{name}-dead")
            await queue.consume(_collector(found))

    def missing(self) -> int:
        pairs = zip(self.publishing, self.names, strict=True)
        return sum(len(set(each.confirmed) - self.arrived[name]) for each, name in pairs)


def _collector(found: set[bytes]) -> Any:
    async def collect(message: AbstractIncomingMessage) -> None:
        found.add(message.body.partition(b":")[0])
        await message.ack()

    return collect


async def _reject(message: AbstractIncomingMessage) -> None:
    await message.reject()


@pytest.mark.row("C2.7")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("shard", "expired"),
        pytest.param("shard", "rejected", marks=pytest.mark.torture),
        pytest.param("controller", "expired", marks=pytest.mark.torture),
        ("front-door", "expired"),
    ],
)
async def test_every_confirmed_message_that_dies_arrives(
    broker: RealBroker, name: str, kind: str, how: str
) -> None:
    """The killed front door carries the dead letters; clients are at the other one."""
    arguments = {"x-message-ttl": TTL_MS} if how == "expired" else {}
    async with connected_to_both_doors(broker) as (_, second), connected(broker) as third:
        dying = Dying(
            await (second if kind == "front-door" else third).channel(), name, **arguments
        )
        sources = await dying.start()
        if how == "rejected":
            await dying.channel.set_qos(prefetch_count=200)
            for source in sources:
                await source.consume(_reject)
        for round_number in range(1, 4):
            await dying.reach(round_number * MESSAGES // 5)
            await asyncio.to_thread(broker.kill, kind, round_number % 2 if kind == "shard" else 0)
        await dying.reach(MESSAGES)
        await dying.finish()
        await wait_for(lambda: not dying.missing(), "all dead letters", ARRIVAL_S)


@pytest.mark.row("C2.7")
async def test_dead_letters_on_their_way_outlive_the_end_of_everything(
    broker: RealBroker, name: str
) -> None:
    async with connected(broker) as connection:
        dying = Dying(await connection.channel(), name, **{"x-message-ttl": TTL_MS})
        await dying.start()
        await dying.reach(MESSAGES)
        for each in dying.publishing:
            each.stop()
        await asyncio.to_thread(broker.kill_all)
        confirmed = [set(each.confirmed) for each in dying.publishing]
    broker.restart()
    async with connected(broker) as connection:
        channel = await connection.channel()
        arrived: list[set[bytes]] = [set() for _ in dying.names]
        for queue_name, found in zip(dying.names, arrived, strict=True):
            await (await channel.get_queue(f"{queue_name}-dead")).consume(_collector(found))
        await wait_for(
            lambda: all(a <= b for a, b in zip(confirmed, arrived, strict=True)),
            "all dead letters",
            ARRIVAL_S,
        )


@pytest.mark.row("C1.10")
async def test_how_often_a_message_came_back_is_known_after_the_end_of_everything(
    broker: RealBroker, name: str
) -> None:
    arguments = {
        "x-delivery-limit": LIMIT,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": f"{name}-dead",
    }
    for life in range(LIMIT + 1):
        async with connected(broker) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(name, durable=True, arguments=arguments)
            dead = await channel.declare_queue(f"{name}-dead", durable=True)
            if not life:
                message = aio_pika.Message(b"x", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await channel.default_exchange.publish(message, name)
            found = await queue.get(timeout=60)
            assert found is not None and found.headers.get("x-delivery-count", 0) == life
            await found.reject(requeue=True)
            if life == LIMIT:
                gone = await got_from(dead)
                assert gone.headers["x-first-death-reason"] == "delivery_limit"
            else:
                await asyncio.sleep(COUNT_LASTS_S)
                await asyncio.to_thread(broker.kill_all)
        if life < LIMIT:
            broker.restart()
