"""A front door's publishing without sockets.

A packer stands for the shards, and the client writes down what it is to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from shardmq.broker.amqp import Connection, Publishes
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.publish.dedup_service import DedupService
from shardmq.broker.front_door.publish.effects import AmqpError, Published
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.reservations import Reservations
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingPut,
    ExchangePut,
    PermissionPut,
    QueuePut,
    UserPut,
    VhostPut,
)
from shardmq.shardd.wire import codec
from shardmq.shardd.wire import messages as wire
from tests.amqp.bytes_of import publish, received, shake_hands
from tests.wire.test_spread import records_of

NOW_MS = 1_700_000_000_000

# Channel, (exchange, key), properties, mandatory.
Message = tuple[int, tuple[str, str], dict[str, Any], bool]


class Links:
    """Two shards: what is packed for them, and what they are told and asked."""

    def __init__(self, shards: int = 2) -> None:
        self.packer = codec.Packer(shards)
        self.vhost = "/"
        self.waiting: list[Any] = []
        self.of_cluster: list[int] | None = None
        self.links = self.known = [
            SimpleNamespace(shard=shard, up=True, epoch=1) for shard in range(shards)
        ]
        self.told: list[tuple[int, wire.Message]] = []
        self.asked: list[tuple[int, Any, asyncio.Future[Any]]] = []

    def use_vhost(self, vhost: str) -> None:
        self.vhost = vhost

    def wait_for(self, shards: int, waiting: Any) -> None:
        self.waiting += [waiting] * shards.bit_count()

    def tell(self, shard: int, what: wire.Message) -> None:
        self.told.append((shard, what))

    def ask(self, shard: int, make: Callable[[int], wire.Message]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((shard, make(len(self.asked) + 1), future))
        return future

    def is_up(self, shard: int) -> bool:
        return True

    def stored(self) -> list[tuple[int, tuple[int, ...], bytes]]:
        """Return (shard, queue ids, message) of all that was packed, in order for each shard."""
        found = []
        for shard in range(len(self.links)):
            message = self.packer.take(shard, 0, 1, 1, 1)
            for queues, messages in (
                records_of(codec.read_publish(message).records) if message else ()
            ):
                found += [(shard, tuple(queues), one) for one in messages]
        return found


class Channel:
    """An open channel."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_open = True
        self.published = self.returned = self.unroutable_dropped = 0
        self.confirms: Any = None
        self.transaction: Any = None
        self.reply_to = ""


class Publisher:
    """A client with three channels that carries out what publishing asks for.

    The second channel wants confirms.
    """

    id = 9
    user = "guest"
    vhost = "/"
    name = "client"
    frame_bytes_max = 131072

    def __init__(self, publishing: Publishing) -> None:
        self.publishing = publishing
        self.route_cache = publishing.route_cache("/", "guest")
        self.said: list[bytes] = []
        self.failed: list[tuple[int, str]] = []
        self.fed = 0
        self.replied: list[tuple[Any, bytes]] = []
        self.channels = {number: Channel(number) for number in (1, 2, 3)}
        self.channels[2].confirms = publishing.confirms(self, 2)
        self.is_over: Callable[[], bool] = lambda: False
        self.slices = 0
        self.between: Callable[[], None] = lambda: None  # what others do before the next slice

    def publish(
        self, event: Publishes, is_over: Callable[[], bool] = lambda: False, now_ms: int = NOW_MS
    ) -> Published:
        """Publish as much of the event as the slice lets."""
        published = self.publishing.publish(
            self, self.route_cache, self.channels, event, now_ms, is_over
        )
        self.carry_out(published)
        return published

    def carry_out(self, published: Published) -> None:
        self.fed |= published.fed
        for frames in published.frames:
            self.write(frames)
        for requester, frames, _ in published.replies:
            requester.unwritten_bytes = 0
            self.replied.append((requester, frames))
        for number, error in published.failed.items():
            self.fail(error, number)

    def answer_confirms(self) -> None:
        """Write what is due at the end of a pass."""
        due, self.publishing.confirms_due[:] = self.publishing.confirms_due[:], []
        for confirms in due:
            self.write(confirms.answers())
            if confirms.failure is not None:
                self.fail(confirms.failure, confirms.channel)

    def begin_slice(self) -> None:
        self.slices += 1

    def slice_is_over(self) -> bool:
        return self.is_over()

    async def next_slice(self) -> None:
        self.between()
        await asyncio.sleep(0)
        self.slices += 1

    def write(self, data: bytes) -> None:
        if data:
            self.said.append(data)

    def fail(self, error: AmqpError, number: int) -> None:
        self.failed.append((number, str(error)))
        channel = self.channels.pop(number, None)
        if channel is not None:
            channel.is_open = False


def publishing_of(
    catalog: Catalog, links: Any, *, replies: Any = None, dedup: Any = None, **more: Any
) -> Publishing:
    """Return the publishing of a front door that has this catalog."""
    counts = Counts()
    return Publishing(
        SimpleNamespace(catalog=catalog),
        links,
        Reservations(links),
        dedup if dedup is not None else DedupService(links),
        replies if replies is not None else Replies(links, counts),
        counts,
        **more,
    )


def catalog(more: Iterable[AnyChange] = ()) -> Catalog:
    """Return a vhost with a direct and a headers exchange, and queue a at shard 0, b at shard 1."""
    made = Catalog()
    for change in (
        VhostPut("/"), UserPut("guest", ""), PermissionPut("/", "guest", ".*", ".*", ".*"),
        ExchangePut("/", "direct", "direct"), ExchangePut("/", "headers", "headers"),
        QueuePut("/", "a", 1, 0, durable=True), QueuePut("/", "b", 2, 1),
        BindingPut("/", "direct", "queue", "a", "k1"),
        BindingPut("/", "direct", "queue", "b", "k1"),
        BindingPut("/", "direct", "queue", "b", "k2"),
        BindingPut("/", "headers", "queue", "a", "", {"x-match": "any", "one": 1}),
        *more,
    ):  # fmt: skip
        made.apply(change)
    return made


def events_of(messages: list[Message]) -> list[Publishes]:
    """Return the events of a read with these messages. Their bodies are their numbers."""
    data = b"".join(
        frame if not (mandatory and at == 0) else frame[:-2] + bytes([frame[-2] | 1]) + frame[-1:]
        for number, (channel, (exchange, key), props, mandatory) in enumerate(messages)
        for at, frame in enumerate(publish(channel, exchange, key, str(number).encode(), **props))
    )
    connection = Connection(server_properties={})
    shake_hands(connection, channels=3)
    events = received(connection, data)
    assert all(isinstance(event, Publishes) for event in events)
    return events  # type: ignore[return-value]
