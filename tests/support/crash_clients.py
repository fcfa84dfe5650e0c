"""Clients for the crash tests.

A publisher never waits with its next publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aio_pika
import aiormq
import pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue

from tests.support.real_broker import PATIENCE_S, RealBroker

STUCK_S = 0.3


class Publishing:
    """A publisher of numbers, with `at_once` publishes on their way at any time.

    Each publish is answered; the longest wait is kept.
    """

    def __init__(
        self, channel: AbstractChannel, queue: str, at_once: int = 50, padding: int = 0
    ) -> None:
        self.confirmed: list[bytes] = []
        self.nacked = 0
        self.slowest_s = 0.0
        self._answered_at = time.monotonic()
        self._exchange, self._queue = channel.default_exchange, queue
        self._padding = b":" + b"x" * padding
        self._going = True
        self._number = 0
        self._tasks = [asyncio.create_task(self._publish()) for _ in range(at_once)]

    async def _publish(self) -> None:
        while self._going:
            self._number += 1
            body = b"%d" % self._number
            message = aio_pika.Message(
                body + self._padding, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            began = time.monotonic()
            try:
                await self._exchange.publish(message, self._queue)
            except aiormq.exceptions.DeliveryError:
                self.nacked += 1
            else:
                self.confirmed.append(body)
            self._answered_at = time.monotonic()
            self.slowest_s = max(self.slowest_s, self._answered_at - began)

    def is_stuck(self) -> bool:
        """Nothing was answered for a while: all publishes are on their way."""
        return time.monotonic() - self._answered_at > STUCK_S

    def stop(self) -> None:
        """No more; what is on its way may end as it will."""
        self._going = False
        for task in self._tasks:
            task.cancel()

    async def finish(self) -> None:
        """Stop publishing; raise any error of a publish except a nack.

        A publish without an answer is a TimeoutError.
        """
        self._going = False
        await asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE_S)


class Listener:
    """A publisher that hears whether it is blocked, and why."""

    def __init__(self, broker: RealBroker) -> None:
        self.reasons: list[str] = []
        self.blocked = False
        self._going = True
        self._connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        self._connection.add_on_connection_blocked_callback(self._on_blocked)
        self._connection.add_on_connection_unblocked_callback(self._on_unblocked)
        self._connection.channel().basic_publish("", "nowhere", b"")
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _on_blocked(
        self, connection: object, method: pika.frame.Method[pika.spec.Connection.Blocked]
    ) -> None:
        self.reasons.append(method.method.reason)
        self.blocked = True

    def _on_unblocked(self, connection: object, method: object) -> None:
        self.blocked = False

    def _listen(self) -> None:
        while self._going:
            self._connection.process_data_events(0.05)
        self._connection.close()

    def stop(self) -> None:
        self._going = False
        self._thread.join(5)


@contextlib.asynccontextmanager
async def connected(broker: RealBroker) -> AsyncIterator[AbstractConnection]:
    """Not one that comes back by itself: an error of the connection is the test's."""
    connection = await aio_pika.connect(broker.url)
    try:
        yield connection
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(connection.close(), 5)


@contextlib.asynccontextmanager
async def connected_to_both_doors(
    broker: RealBroker,
) -> AsyncIterator[tuple[AbstractConnection, AbstractConnection]]:
    """One connection to each of two front doors, in their order."""
    found: dict[int, AbstractConnection] = {}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(100):
            known = {door: set(_ports_served(broker, door)) for door in (0, 1)}
            connection = await stack.enter_async_context(connected(broker))
            for door in (0, 1):
                if set(_ports_served(broker, door)) - known[door]:
                    found.setdefault(door, connection)
            if len(found) == 2:
                break
        yield found[0], found[1]


def _ports_served(broker: RealBroker, door: int) -> list[int]:
    """Client ports of the connections one front door has open."""
    pid = broker.pid("front-door", door)
    inodes: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes[str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")] += 1
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        if local == broker.port and remote and fields[9] in inodes:
            ports.append(remote)
    return ports


async def wait_for(happened: object, what: str, within_s: float = PATIENCE_S) -> None:
    """Until `happened()` is true."""
    end = time.monotonic() + within_s
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {within_s:g} s for {what}"
        await asyncio.sleep(0.01)


async def got_from(queue: AbstractQueue) -> AbstractIncomingMessage:
    """Return the next message, as soon as it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while (message := await queue.get(no_ack=True, fail=False)) is None:
            await asyncio.sleep(0.02)
    return message


async def drained(channel: AbstractChannel, queue: str) -> list[bytes]:
    """All bodies of a queue, in order, without their padding."""
    bodies = []
    found = await channel.get_queue(queue)
    while (message := await found.get(fail=False, no_ack=True)) is not None:
        bodies.append(message.body.partition(b":")[0])
    return bodies
