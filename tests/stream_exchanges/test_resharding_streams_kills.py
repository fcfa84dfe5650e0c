"""Test readers of a stream exchange whose number of shards changes under load, while processes die.

A reader of all shards gets the new messages of each key in order, and all messages in the end, from
whatever offset it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage

from tests.consumer_groups.test_kills import Group
from tests.stream_exchanges.test_resharding_kills import (
    BACKLOG_S,
    HANDOVER_MS,
    KEYS,
    PAUSE_S,
    UNDER_LOAD_S,
    Sharded,
)
from tests.support import virtual_load
from tests.support.brokers import killable_broker
from tests.support.real_broker import RealBroker
from tests.support.virtual_load import CONNECT_AGAIN_S, LOST, Ledger, Publisher

pytestmark = pytest.mark.crash
broker = killable_broker

STREAM = {"x-queue-type": "stream"}
SLOWLY_S = 0.002  # a message
READ_WITHIN_S = 90.0
MANY_KEYS = 60
HAS_WITHIN_S = 15.0


class Read(Ledger):
    """The messages that one group has seen.

    When the connection of the group is lost, reading goes back, and stored positions may lag
    behind. So a message that comes again need not be marked as redelivered.
    """

    def delivered(self, who: str, key: str, number: int, redelivered: bool) -> None:
        super().delivered(who, key, number, redelivered=True)

    def has_all_of(self, ledger: Ledger) -> bool:
        return self.seen == ledger.published


class Reader:
    """A consumer of all shards from the first message on.

    It reconnects whenever its connection is lost.

    With a group it shares the shards with other consumers, and goes on behind the messages that the
    group has settled.
    """

    def __init__(
        self, broker: RealBroker, exchange: str, read: Read, group: str = "", pause_s: float = 0.0
    ) -> None:
        self._broker, self._exchange, self._read, self._pause_s = broker, exchange, read, pause_s
        self._arguments: dict[str, Any] = {
            "x-stream-offset": "first",
            "x-handover-timeout": HANDOVER_MS,
        }
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

    async def _consume(
        self, connection: aio_pika.abc.AbstractConnection, lost: asyncio.Event
    ) -> None:
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
    [
        pytest.param("x-consistent-hash", "nobody", marks=pytest.mark.torture),
        pytest.param("x-consistent-hash", "shard", marks=pytest.mark.torture),
        pytest.param("x-consistent-hash", "front-door", marks=pytest.mark.torture),
        pytest.param("x-consistent-hash", "controller", marks=pytest.mark.torture),
        ("x-consistent-hash", "everything"),
        pytest.param("x-modulus-hash", "shard", marks=pytest.mark.torture),
    ],
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


class Stuck:
    """A consumer that settles nothing before it is told to; what it has got."""

    def __init__(
        self, channel: aio_pika.abc.AbstractChannel, exchange: aio_pika.abc.AbstractExchange
    ) -> None:
        self.channel, self.exchange = channel, exchange
        self.settles = False
        self.got: list[AbstractIncomingMessage] = []

    async def publish(self, what: str) -> None:
        for number in range(MANY_KEYS):
            await self.exchange.publish(aio_pika.Message(what.encode()), f"key-{number}")

    async def consume(self, **arguments: Any) -> None:
        async def got(message: AbstractIncomingMessage) -> None:
            self.got.append(message)
            if self.settles:
                await message.ack()

        queue = await self.channel.get_queue(self.exchange.name, ensure=False)
        await queue.consume(
            got, arguments={f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        )

    def keys(self, what: str) -> set[str | None]:
        return {message.routing_key for message in self.got if message.body == what.encode()}

    async def has(self, what: str) -> None:
        end = asyncio.get_running_loop().time() + HAS_WITHIN_S
        while len(self.keys(what)) < MANY_KEYS and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        assert len(self.keys(what)) == MANY_KEYS


@contextlib.asynccontextmanager
async def stuck(sharded: Sharded) -> AsyncIterator[Stuck]:
    connection = await aio_pika.connect(sharded.broker.url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=1000)
        yield Stuck(channel, await channel.get_exchange(sharded.name, ensure=False))


async def test_what_is_never_acknowledged_holds_up_its_group_and_the_status_says_so(
    broker: RealBroker, name: str
) -> None:
    sharded = Sharded(broker, name)
    await sharded.declare("x-consistent-hash", 2, shard_arguments=STREAM)
    async with stuck(sharded) as slow, stuck(sharded) as late:
        await slow.publish("old")
        await slow.consume(group="slow", stream_offset="first")
        await slow.has("old")
        await sharded.set(3)
        found = await sharded.reaches(3)
        await late.consume(group="late")
        await late.publish("new")
        await late.has("new")  # it began behind the change
        await asyncio.sleep(0.5)
        assert 0 < len(slow.keys("new")) < MANY_KEYS, (
            "keys that moved came before what was there before"
        )
        lost = sorted(queue["name"] for queue in found["queues"])[:2]
        assert (await sharded.ask())["groups"] == [
            {"group": "slow", "changes": 1, "waits_for": lost}
        ]
        for message in slow.got:
            await message.ack()
        await slow.has("new")
        assert (await sharded.ask())["groups"] == []


async def test_what_is_never_acknowledged_may_cost_a_group_the_order_at_the_deadline(
    broker: RealBroker, name: str
) -> None:
    sharded = Sharded(broker, name)
    choice = {"shards_change_deadline": 500, "shards_change_at_deadline": "break-order"}
    await sharded.declare("x-consistent-hash", 2, shard_arguments=STREAM, **choice)
    async with stuck(sharded) as slow:
        await slow.publish("old")
        await slow.consume(group="slow", stream_offset="first")
        await slow.has("old")
        await sharded.set(3)
        await sharded.reaches(3)
        await slow.publish("new")
        await slow.has("new")
        assert "give up the order of keys" in broker.log_tail()


async def test_who_reads_what_comes_next_gets_all_of_shards_that_come(
    broker: RealBroker, name: str
) -> None:
    sharded = Sharded(broker, name)
    await sharded.declare("x-consistent-hash", 2, shard_arguments=STREAM)
    async with stuck(sharded) as reader:
        await reader.publish("old")
        reader.settles = True
        await reader.consume(stream_offset="next")
        for number in (3, 5, 4):
            await sharded.set(number)
            await reader.publish(f"while {number}")
            await sharded.reaches(number)
        for number in (3, 5, 4):
            await reader.has(f"while {number}")
        assert not reader.keys("old")
