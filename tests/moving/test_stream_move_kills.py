"""Shards and the controller are killed while streams move to and fro under load."""

from __future__ import annotations

import asyncio
import contextlib
import random

import aio_pika
import pytest

from tests.moving.test_moves import ask
from tests.streams.test_kills import STREAM, Reader
from tests.support.brokers import killable_broker
from tests.support.crash_clients import Publishing, connected, wait_for
from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.crash
broker = killable_broker

STREAMS = 4
KILLS = 6


class Moving:
    """Moves streams to and fro in a task of its own. Requests may fail while processes are away."""

    def __init__(self, broker: RealBroker, names: list[str], seed: int) -> None:
        self.begun = 0
        self._broker, self._names = broker, names
        self._random = random.Random(seed)
        self._ends = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._ends:
            name = self._random.choice(self._names)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._begin, name)
            await asyncio.sleep(0.05)

    def _begin(self, name: str) -> None:
        row = ask(self._broker, "GET", name)
        if "moving" not in row:
            ask(self._broker, "POST", f"{name}/relocation", {"shard": 1 - row["shard"]})
            self.begun += 1

    async def finish(self) -> None:
        self._ends = True
        await self._task

        def are_still() -> bool:
            with contextlib.suppress(OSError):
                return not any("moving" in ask(self._broker, "GET", name) for name in self._names)
            return False

        while not await asyncio.to_thread(are_still):
            await asyncio.sleep(0.1)


@pytest.mark.timeout(300)
async def test_offsets_keep_their_messages_though_processes_die_while_streams_move(
    broker: RealBroker, name: str, request: pytest.FixtureRequest
) -> None:
    pick = random.Random(request.config.option.seed)
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=100)
        names = [f"{name}-{number}" for number in range(STREAMS)]
        queues = [
            await channel.declare_queue(each, durable=True, arguments=STREAM) for each in names
        ]
        readers = [Reader(lag=at * 7) for at in range(STREAMS)]
        for queue, reader in zip(queues, readers, strict=True):
            await queue.consume(reader.take, arguments={"x-stream-offset": "first"})
        publishing = [Publishing(await connection.channel(), each, 20) for each in names]
        moving = Moving(broker, names, request.config.option.seed)
        for _ in range(KILLS):
            await asyncio.sleep(pick.uniform(0.1, 1.5))
            victim = pick.choice([("shard", 0), ("shard", 1), ("controller", 0)])
            await asyncio.to_thread(broker.kill, *victim)
        await wait_for(lambda: all(len(each.confirmed) > 50 for each in publishing), "confirms")
        await moving.finish()
        for each in publishing:
            await each.finish()
        for each in names:
            await channel.default_exchange.publish(aio_pika.Message(b"end"), each)
        await wait_for(
            lambda: all(b"end" in [body for _, body, _ in each.got[-50:]] for each in readers),
            "the end",
        )
        assert moving.begun > STREAMS
        for each, reader in zip(publishing, readers, strict=True):
            reader.check(each.confirmed, KILLS + moving.begun)
