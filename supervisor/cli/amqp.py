"""The AMQP connections of a load, which count what is confirmed and consumed as it comes.

A connection is an asyncio driver of `supervisor/amqp_client.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pamqp.encode

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Broken, Client, Closed, Confirmed, Event
from shardmq.supervisor.cli.latency import Histogram, UnderWay

FRAME_BYTES_MAX = 131072
READ_BYTES = 256 << 10
# With these capabilities the broker says that a password is wrong and that an alarm blocks
# publishers, instead of only closing or stopping.
CAPABILITIES: Any = {"authentication_failure_close": True, "connection.blocked": True}
PROPERTIES = pamqp.encode.field_table({"product": "shardctl", "capabilities": CAPABILITIES})
DELIVERED = amqp_client.Received(amqp_client.DELIVER)


class Lost(Exception):
    """The broker closed the connection. The text says why."""


@dataclass
class Counts:
    """The counts of all connections of a load together."""

    published: int = 0
    confirmed: int = 0
    refused: int = 0
    consumed: int = 0
    blocked: str = ""  # The alarm for which the broker has blocked a publisher, the last one.
    latency: Histogram = field(default_factory=Histogram)
    confirm_latency: Histogram = field(default_factory=Histogram)
    # The messages of each queue that are published and not consumed.
    sent: defaultdict[str, UnderWay] = field(default_factory=lambda: defaultdict(UnderWay))
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # Each take() sets it for a moment.

    def has_moved(self) -> None:
        """Wake all tasks that wait for confirms or messages."""
        self.moved.set()
        self.moved.clear()


class Connection:
    """A connection with one channel. Every method may raise Lost."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        counts: Counts,
    ) -> None:
        self.client = Client("/", "PLAIN", "")
        self.writer = writer
        self.confirmed = 0  # The highest confirmed tag. All tags below it are confirmed.
        self.last_delivery = 0
        self.unconfirmed = UnderWay()
        self._reader, self._counts = reader, counts
        self._events: list[Event] = []  # Events that are received and not handled yet.

    async def open(self, user: str, password: str, vhost: str) -> None:
        """Open the connection and its channel."""
        self.client = Client(
            vhost,
            "PLAIN",
            f"\0{user}\0{password}",
            properties=PROPERTIES,
            frame_bytes_max=FRAME_BYTES_MAX,
            keeps_content=False,
        )
        await self.expect(amqp_client.Opened())

    def flush(self) -> None:
        """Send what the client has queued."""
        self.writer.write(self.client.data_to_send())

    async def expect(self, answer: Event) -> None:
        """Send what the client has queued and wait for the response. Earlier events are dropped."""
        self._events = []
        while answer not in self._events:
            self.flush()
            self._events = await self._receive()
        del self._events[: self._events.index(answer) + 1]

    async def take(self) -> int:
        """Wait for more, count it, and return how many messages came."""
        events, self._events = self._events or await self._receive(), []
        came = events.count(DELIVERED)
        for event in events:
            if not isinstance(event, Confirmed):
                continue
            # The broker confirms in order: all publishes below the highest tag are confirmed.
            further = event.multiple or event.tag > self.confirmed
            count = event.tag - self.confirmed if further else 0
            self.confirmed = max(self.confirmed, event.tag)
            self.unconfirmed.arrived(count, time.monotonic(), self._counts.confirm_latency)
            if event.stored:
                self._counts.confirmed += count
            else:
                self._counts.refused += count
        self._counts.consumed += came
        self.last_delivery += came
        self._counts.has_moved()
        return came

    async def _receive(self) -> list[Event]:
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise Lost("the connection was closed")
        events = self.client.receive_data(data)
        self._counts.blocked = self.client.blocked or self._counts.blocked
        match events[-1] if events else None:
            case Closed(code, text):
                raise Lost(f"{code} {text}")
            case Broken(why):
                raise Lost(why)
        return events
