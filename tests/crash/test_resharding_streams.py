"""The number of shards that are streams changes under load, while processes die: who reads them all, from wherever,
gets what is new of each key in order, and in the end everything."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage

from tests.crash.test_resharding import BACKLOG_S, HANDOVER_MS, KEYS, PAUSE_S, UNDER_LOAD_S, Sharded
from tests.crash.test_virtual_queues import Group
from tests.support import virtual_load
from tests.support.real_broker import RealBroker
from tests.support.virtual_load import CONNECT_AGAIN_S, LOST, Ledger, Publisher

STREAM = {"x-queue-type": "stream"}
SLOWLY_S = 0.002  # a message
READ_WITHIN_S = 90.0


class Read(Ledger):
    """What one group has seen. When its connection is lost it goes back, and its positions may lag behind, so what
    comes again need not say so."""

    def delivered(self, who: str, key: str, number: int, redelivered: bool) -> None:
        super().delivered(who, key, number, redelivered=True)

    def has_all_of(self, ledger: Ledger) -> bool:
        return self.seen == ledger.published


class Reader:
    """A consumer of all shards from the first message on; with a name it shares them with others, and goes on behind
    what was settled. Whatever becomes of its connection it comes back."""

    def __init__(self, broker: RealBroker, exchange: str, read: Read, group: str = "", pause_s: float = 0.0) -> None:
        self._broker, self._exchange, self._read, self._pause_s = broker, exchange, read, pause_s
        self._arguments: dict[str, Any] = {"x-stream-offset": "first", "x-handover-timeout": HANDOVER_MS}
        if group:
            self._arguments["x-group"] = group
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(*LOST):
                connection = await aio_pika.connect(self._broker.url)
                lost = asyncio.Event()
                connection.close_callbacks.add(lambda *_, lost=lost: lost.set())
                async with connection:
                    await self._consume(connection, lost)
            await asyncio.sleep(CONNECT_AGAIN_S)

    async def _consume(self, connection: aio_pika.abc.AbstractConnection, lost: asyncio.Event) -> None:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=40)
        got: asyncio.Queue[AbstractIncomingMessage | None] = asyncio.Queue()
        channel.close_callbacks.add(lambda *_: got.put_nowait(None))
        queue = await channel.get_queue(self._exchange, ensure=False)
        await queue.consume(got.put, arguments=self._arguments)
        ended = asyncio.create_task(lost.wait())
        ended.add_done_callback(lambda _: got.put_nowait(None))
        try:
            while (message := await got.get()) is not None:
                key, number = message.body.decode().split()
                self._read.delivered("reader", key, int(number), bool(message.redelivered))
                await asyncio.sleep(self._pause_s)
                await message.ack()
        finally:
            ended.cancel()

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def all_is_read(read: Read, ledger: Ledger) -> None:
    end = asyncio.get_running_loop().time() + READ_WITHIN_S
    while not read.has_all_of(ledger) and asyncio.get_running_loop().time() < end:
        read.check()
        await asyncio.sleep(0.1)
    read.check()
    assert read.seen == ledger.published


@pytest.mark.row("E1.13", "E2.13")
@pytest.mark.parametrize(
    ("kind", "victim"),
    [("x-consistent-hash", victim) for victim in ("nobody", "shard", "front-door", "controller", "everything")]
    + [("x-modulus-hash", "shard")],
)
async def test_streams_are_read_in_order_from_2_to_4_to_3_shards(
    broker: RealBroker,
    name: str,
    request: pytest.FixtureRequest,
    kind: str,
    victim: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_load, "PAUSE_S", PAUSE_S)
    sharded = Sharded(broker, name)
    await sharded.declare(kind, 2, shard_arguments=STREAM)
    group = Group(broker, name, request.config.option.seed)
    publishers = [Publisher(broker, name, f"key-{number}", group.ledger) for number in range(KEYS)]
    slow, again = Read(), Read()
    readers = [Reader(broker, name, slow, "slow", SLOWLY_S)]
    for number in (4, 3):
        await asyncio.sleep(BACKLOG_S)
        await sharded.set(number)
        if victim == "everything":
            await asyncio.to_thread(broker.kill_all)
            await asyncio.to_thread(broker.start)
        elif victim != "nobody":
            await group.kill(victim, 0)
        found = await sharded.reaches(number)
        assert found["keeps_order"]
        readers.append(Reader(broker, name, slow, "slow", SLOWLY_S))
        if victim == "shard":
            await group.kill("shard", 1)
        await asyncio.sleep(UNDER_LOAD_S)
    readers.append(Reader(broker, name, again))
    for publisher in publishers:
        await publisher.finish()
    await all_is_read(again, group.ledger)
    await all_is_read(slow, group.ledger)
    for reader in readers:
        await reader.end()
    assert sum(slow.seen.values()) > 10 * KEYS
