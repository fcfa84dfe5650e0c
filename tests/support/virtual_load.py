"""A virtual queue under load, with consumers that come, go and die.

Numbers per key go in; the ledger says what must be true.

`Ledger` knows the rules: of one key each number comes for the first time in order, without gaps,
whoever gets it, and of its copies at most one does not say that it comes again (unless its publish
was not confirmed and was done again). At the end nothing lacks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import time
import urllib.request
from collections import Counter
from typing import Any

import aio_pika
import aiormq
from aio_pika.abc import AbstractIncomingMessage

from tests.support.real_broker import RealBroker

LOST = (
    aiormq.exceptions.AMQPError, aiormq.exceptions.ChannelInvalidStateError,
    aio_pika.exceptions.AMQPException, ConnectionError, OSError, TimeoutError,
)  # fmt: skip
PREFETCHES = (0, 1, 5, 50)
PAUSE_S = 0.002  # of a publisher, between two numbers of a key
CONNECT_AGAIN_S = 0.05
CONNECT_S_MAX = 60.0


class Ledger:
    def __init__(self) -> None:
        self.published: dict[str, int] = {}  # the last number of each key that was confirmed
        self.doubtful: set[tuple[str, int]] = set()  # published more than once
        self.seen: dict[str, int] = {}
        self._fresh: set[tuple[str, int]] = set()  # came without saying that they come again
        self.deliveries = self.repeats = 0
        self.wrong: list[str] = []

    def delivered(self, who: str, key: str, number: int, redelivered: bool) -> None:
        self.deliveries += 1
        last = self.seen.get(key, 0)
        if number > last + 1:
            self.wrong.append(f"{who}: {key} {number} came after {last}")
        elif number <= last:
            self.repeats += 1
        if not redelivered:
            # The copy that was sent first may be looked at last: the client of a consumer that was
            # given up is slow.
            if (key, number) in self._fresh and (key, number) not in self.doubtful:
                self.wrong.append(f"{who}: {key} {number} came again, as if for the first time")
            self._fresh.add((key, number))
        self.seen[key] = max(last, number)

    def check(self) -> None:
        assert not self.wrong, self.wrong[:10]

    @property
    def complete(self) -> bool:
        return self.seen == self.published


class Publisher:
    """A publisher of one key.

    It publishes a number when the one before is confirmed; an unconfirmed one is published again.
    """

    def __init__(self, broker: RealBroker, exchange: str, key: str, ledger: Ledger) -> None:
        self._broker, self._exchange, self._key, self._ledger = broker, exchange, key, ledger
        self._going = True
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        number = 1
        while self._going or (self._key, number) in self._ledger.doubtful:
            with contextlib.suppress(*LOST):
                connection = await aio_pika.connect(self._broker.url)
                async with connection:
                    channel = await connection.channel(publisher_confirms=True)
                    exchange = await channel.get_exchange(self._exchange, ensure=False)
                    while self._going or (self._key, number) in self._ledger.doubtful:
                        await self._publish(exchange, number)
                        number += 1
                        await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(CONNECT_AGAIN_S)

    async def _publish(self, exchange: aio_pika.abc.AbstractExchange, number: int) -> None:
        message = aio_pika.Message(
            f"{self._key} {number}".encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT
        )
        try:
            await exchange.publish(message, self._key)
        except BaseException:
            self._ledger.doubtful.add((self._key, number))
            raise
        self._ledger.published[self._key] = number

    async def finish(self) -> None:
        self._going = False
        await asyncio.wait_for(self._task, CONNECT_S_MAX)


class Cable:
    """Between a client and the broker; to be cut."""

    def __init__(self, broker: RealBroker) -> None:
        self._broker = broker
        self._ends: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def url(self) -> str:
        self._server = await asyncio.start_server(self._carry_both, "127.0.0.1", 0)
        return f"amqp://guest:guest@127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._broker.host, self._broker.port)
        self._ends += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for end in self._ends:
            end.transport.abort()


class Member:
    """One consumer on a connection of its own; acks each message, some a little later."""

    def __init__(self, who: str, seed: int, ledger: Ledger) -> None:
        self.who = who
        self._random = random.Random(seed)
        self._ledger = ledger
        self.is_gone = False  # its connection ended
        self._has_left = False
        self._acks: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()

    async def join(
        self, broker: RealBroker, name: str, arguments: dict[str, Any] | None = None
    ) -> None:
        self._cable = Cable(broker)
        self.connection = await aio_pika.connect(await self._cable.url())
        self.connection.close_callbacks.add(self._closed)
        self.channel = await self.connection.channel()
        await self.channel.set_qos(prefetch_count=self._random.choice(PREFETCHES))
        self._queue = await self.channel.get_queue(name, ensure=False)
        self._acking = asyncio.create_task(self._ack())
        self._tag = await self._queue.consume(
            self._receive, consumer_tag=self.who, arguments=arguments
        )

    def _closed(self, *_: object) -> None:
        self.is_gone = True

    async def _receive(self, message: AbstractIncomingMessage) -> None:
        if self._has_left:  # what it had not looked at may have been given to another meanwhile
            return
        key, number = message.body.decode().split()
        self._ledger.delivered(self.who, key, int(number), bool(message.redelivered))
        self._acks.put_nowait(message)

    async def _ack(self) -> None:
        with contextlib.suppress(*LOST, aiormq.exceptions.ChannelInvalidStateError):
            while True:
                message = await self._acks.get()
                if self._random.random() < 0.02:
                    await asyncio.sleep(self._random.random() * 0.02)
                await message.ack()

    async def leave(self, how: str) -> None:
        """Leave by basic.cancel, by closing, or like a cable that is cut.

        After basic.cancel the rest follows when all is acknowledged.
        """
        self._has_left = how != "cancel"
        with contextlib.suppress(*LOST):
            if how == "cancel":
                await self._queue.cancel(self._tag)
                while self._acks.qsize():
                    await asyncio.sleep(0.005)
                await self.channel.close()
            elif how == "channel":
                await self.channel.close()
            elif how == "cut":
                self._cable.cut()
            await self.connection.close()
        self._acking.cancel()
        self._cable.cut()


def owners(broker: RealBroker, name: str) -> tuple[list[int], Counter[str], int]:
    """Return the consumers of each shard, the shards of each consumer, and the moving shards."""
    request = urllib.request.Request(f"http://{broker.http}/api/virtual-queues/%2F/{name}")
    request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    shards = [len(shard["owners"]) for shard in found["shards"]]
    loads = Counter({each["consumer_tag"]: len(each["shards"]) for each in found["consumers"]})
    return shards, loads, found["moving"]


async def balanced(
    broker: RealBroker, name: str, members: set[str], within_s: float, shared: bool = False
) -> float:
    """Wait until each shard has one owner among the members and loads differ by at most one.

    With `shared` there may be more members than shards, and each member has one shard. Return the
    seconds until the request whose answer showed this.
    """
    began = time.monotonic()
    said: Any = None
    while (asked := time.monotonic()) - began < within_s:
        with contextlib.suppress(OSError, ValueError):
            said = shards, loads, moving = await asyncio.to_thread(owners, broker, name)
            even = max(loads.values(), default=0) - min(loads.values(), default=0) <= 1
            owned = max(shards) - min(shards) <= 1 and sum(shards) == max(
                len(shards), len(members) if shared else 0
            )
            if set(loads) == members and not moving and even and (not members or owned):
                return asked - began
        await asyncio.sleep(0.02)
    raise AssertionError(f"after {within_s:g} s: {said}, members {sorted(members)}")
