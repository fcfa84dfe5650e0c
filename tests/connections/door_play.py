"""A front door without sockets: lists stand for clients, shards and the controller."""

from __future__ import annotations

import asyncio
import mmap
import random
import struct
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from pamqp import base, commands

from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.connection.connection import ClientConnection
from shardmq.broker.front_door.connections import Connections
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.consume.credit import Allotment
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.events import ShardEvents
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.loop import PassLoop
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.publish.dedup_service import DedupService
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.reservations import Reservations
from shardmq.broker.front_door.publish.spans import Spans
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.time_slices import TimeSlices
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.model.changes import BindingPut, ExchangePut, QueuePut
from shardmq.broker.shared.config import BrokerConfig
from shardmq.broker.shared.control import Span
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.shared_memory import Reader, Writer
from tests.amqp.bytes_of import HEADER, method
from tests.connections.connection_play import Aio, Line, Sock

SHARDS = 2
PLACES = 4  # shard queues of the virtual queue, of which the first has the id 10
INCARNATION = 7
PUBLISH_HEADER, RUN = 40, 24
RING_AT, RING_BYTES = 256, 4 << 20
# What a client says to open its connection, in turns with the front door.
OPENING = (
    HEADER,
    method(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")),
    method(0, commands.Connection.TuneOk(2047, 131072, 60))
    + method(0, commands.Connection.Open("/")),
)


class Tasks(Aio):
    """An event loop that watches nothing and makes the futures and tasks of the one that runs."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()


class Client(Sock):
    """The socket of one client."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.taken = bytearray()  # type: ignore[assignment] # grows at less cost than bytes
        self.fd = fd

    def fileno(self) -> int:
        return self.fd


class Wire:
    """The socket of a link: what the front door sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes, flags: int = 0) -> None:
        self.sent.append(message)


class Door:
    """A front door with two shards, which goes the short way or not."""

    new_loop = Tasks

    def __init__(self, *, short: bool, traced: bool = False, **settings: Any) -> None:
        self.spans: list[Span] = []
        self.aio = self.new_loop()
        config = BrokerConfig(
            runtime_dir="nowhere",
            door=0,
            shards=list(range(SHARDS)),
            listen_fds=[],
            boot="1",
            **settings,
        )
        self.line = Line()
        for change in (
            ExchangePut("/", "fan", "fanout"), ExchangePut("/", "heads", "headers"),
            ExchangePut("/", "logs", "topic"), QueuePut("/", "c", 3, 0, durable=True),
            *(QueuePut("/", f"v{place}", 10 + place, place % SHARDS) for place in range(PLACES)),
            BindingPut("/", "fan", "queue", "a", ""), BindingPut("/", "fan", "queue", "b", ""),
            BindingPut("/", "fan", "queue", "c", ""), BindingPut("/", "logs", "queue", "c", "x.#"),
            BindingPut("/", "direct", "queue", "b", "k"),
        ):  # fmt: skip
            self.line.catalog.apply(change)
        events = ShardEvents()
        self.links = links = ShardLinks(config, INCARNATION, events)
        links.use_loop(self.aio)  # type: ignore[arg-type]
        links.inbox._socket.close(0)  # or the end of its context would wait for it
        self.wires = [Wire() for _ in links.links]
        for link, made in zip(links.links, self.wires, strict=True):
            link.socket.close(0)
            link.socket = made  # type: ignore[assignment]
        links._context.term()
        self.counts = counts = Counts()
        replies = Replies(links, counts)
        spans = Spans(0.0, self._take_spans, lambda *_: None, random.Random(1)) if traced else None
        line: Any = self.line
        self.publishing = publishing = Publishing(
            line, links, Reservations(links), DedupService(links), replies, counts,
            set_timestamp=config.set_timestamp, spans=spans,
        )  # fmt: skip
        self.loop = PassLoop(self.aio, links, publishing, shards=SHARDS, tick_us=0)  # type: ignore[arg-type]
        self.loop.slices = TimeSlices(lambda: 0.0, self.aio.call_soon)  # they never end
        self.consuming = Consuming(links, line, self.loop, counts, replies, spans)
        self.services = Services(
            config=config,
            incarnation=INCARNATION,
            loop=self.loop,
            shards=links,
            catalog_link=line,
            counts=counts,
            logins=SimpleNamespace(at_once=lambda *_: ""),  # type: ignore[arg-type]
            alarms=Alarms(),
            publishing=publishing,
            consuming=self.consuming,
            steps=StepRunner(line, links),
            server_properties={},
            spans=spans,
        )
        if short:
            self.services.use_short_way()
        self.connections = Connections(self.services)
        events.attend(self.services, self.connections, SimpleNamespace())  # type: ignore[arg-type]
        self.tasks: set[asyncio.Task[None]] = set()
        self.clients: list[Any] = []
        self.entered: list[ClientConnection] = []
        memory = mmap.mmap(-1, RING_AT + RING_BYTES)
        self._writer = Writer(memory, 0, RING_AT, RING_BYTES, -1)
        self._reader = Reader(memory, 0, RING_AT, RING_BYTES, True)
        self._seen = [0] * len(self.wires)
        self._read: list[int] = []
        for shard in range(SHARDS):
            self.restart(shard)

    def _take_spans(self, spans: list[Span]) -> bool:
        self.spans += spans
        return True

    # -- clients ---------------------------------------------------------------------------------

    def new_client(self) -> tuple[Any, Any]:
        """Return a client, and the socket that the front door has of it."""
        client = Client(10 + len(self.clients))
        return client, client

    def enter(self, opening: Iterable[bytes] = OPENING) -> int:
        """Let a client connect and open its connection; return its place."""
        client, sock = self.new_client()
        self.clients.append(client)
        self._read.append(0)
        self.connections.enter(sock, Peer("127.0.0.1", 4000))
        self.entered.append(self.connections.all()[-1])
        at = len(self.clients) - 1
        for said in opening:
            self.read(at, said)
            self.run()
        return at

    def read(self, at: int, data: bytes) -> None:
        """Receive bytes of a client; the pass does not end yet."""
        client = self.clients[at]
        client.unread.append(data)
        while client.unread and (reader := self.aio.readers.get(client.fd)) is not None:
            reader()

    def say(self, at: int, channel: int, what: base.Frame) -> None:
        self.read(at, method(channel, what))

    def run(self) -> None:
        """Let all happen that is to happen before time passes."""
        self.aio.run()

    # -- shards ----------------------------------------------------------------------------------

    def restart(self, shard: int) -> None:
        """Let the process of a shard be followed by another one."""
        link = self.links.links[shard]
        if link.epoch:
            link.away_since, link.has_last_words = 0.0, True
            link.ended(link.epoch)
        self.loop.receiving()
        link.begin(link.epoch + 1, 1)
        link.send_aside()
        self.links._requests.ask_again(link)
        if link.epoch > 1:
            self.consuming.restarted(shard, lambda number: None)
        self.loop.publish_room(shard)
        self.loop.received()

    def who(self, shard: int) -> tuple[int, int, int, int]:
        return 0, INCARNATION, self.links.links[shard].epoch, shard

    def hear(self, shard: int, *messages: bytes) -> None:
        """Receive messages of a shard, as its lane gives them.

        The short way may take in each message where it lies in a ring.
        """
        link, inbox = self.links.links[shard], self.links.inbox
        self.loop.receiving()
        for message in messages:
            if link.outlet is not None and self._writer.put(message):
                if self._reader.offer(link.outlet, 1):
                    inbox._take_all(link, self._reader.take(1)[0])
            else:
                inbox._take_all(link, [message])
        self.loop.received()
        self.loop.own_deliveries()
        self._reader.let_go()

    def offer(self, shard: int, message: bytes) -> bool:
        """Offer a message of a shard to the short way alone; return whether it was taken in."""
        link = self.links.links[shard]
        assert link.outlet is not None
        if not self._writer.put(message):
            return False
        self.loop.receiving()
        if is_left := self._reader.offer(link.outlet, 1):
            self._reader.take(1)
        self.loop.received()
        self.loop.own_deliveries()
        self._reader.let_go()
        return not is_left

    def questions(self, shard: int, since: int = 0) -> list[int]:
        """Return the numbers of the questions to this shard, from its message `since` on."""
        whats = (
            envelope.read_control(message)
            for message in self.wires[shard].sent[since:]
            if message[0] == wire.CONTROL
        )
        return [what.request for what in whats if getattr(what, "request", None)]

    # -- what shows of it ------------------------------------------------------------------------

    def seen(self) -> dict[str, Any]:
        """Return what the others got since the last call, and what the front door counts."""
        return {**self.said(), **self.state()}

    def said(self) -> dict[str, Any]:
        """Return what clients and shards got since the last call."""
        sent = []
        for shard, made in enumerate(self.wires):
            sent.append([timeless(message) for message in made.sent[self._seen[shard] :]])
            self._seen[shard] = len(made.sent)
        written = []
        for at, client in enumerate(self.clients):
            written.append((bytes(client.taken[self._read[at] :]), client.is_closed))
            self._read[at] = len(client.taken)
        if self.services.spans is not None:
            self.services.spans.flush()
        spans, self.spans = self.spans, []
        made = [(span.name, span.trace_id, span.error, span.attributes) for span in spans]
        return {"written": written, "sent": sent, "spans": made}

    def state(self) -> dict[str, Any]:
        """Return what the front door counts and remembers."""
        connections, channels = self.connections.report()
        for channel in channels:
            del channel["used_at_ms"]  # by the clock
        return {
            "counts": self.counts.report(),
            "vhosts": self.connections.of_vhosts(),
            "connections": connections,
            "channels": channels,
            "exchanges": sorted(self.publishing.exchange_counts.report()),
            "unroutable": self.publishing.unroutable_dropped,
            "links": [
                (link.in_flight, sorted(link.credits.items()), link.settles.ranges, link.epoch)
                for link in self.links.links
            ],
            "unacked": [
                (each.id, number, run._replace(consumer=run.consumer.number))
                for each in self.connections.all()
                for number, channel in sorted(each.channels.by_number.items())
                for run in channel.consuming.unacked.runs()
            ],
            "limits": [
                (each.id, number, channel.consuming.limit.unacked)
                for each in self.connections.all()
                for number, channel in sorted(each.channels.by_number.items())
            ],
            "consumers": [
                (number, each.delivered, shown(each.allotment))
                for number, each in sorted(self.consuming.consumers.items())
            ],
            "groups": [
                (
                    group.number,
                    group.limit.unacked,
                    group.limit.allotted,
                    group.limit.free,
                    *tuple(
                        (each.number, each.held, each.counted)
                        for each in group.assignments.values()
                    ),
                )
                for each in self.connections.all()
                for _, channel in sorted(each.channels.by_number.items())
                for group in channel.consuming.groups.values()
            ],
            "paused": [each.socket.paused for each in self.connections.all()],
            "timers": len(self.aio.later),
        }


def shown(allotment: Allotment | None) -> tuple[int, ...]:
    if allotment is None:
        return ()
    return allotment.allowed, allotment.used, allotment.mode, allotment.wants


def timeless(message: bytes) -> bytes:
    """Return a message without the times at which its records were packed."""
    if message[0] != wire.PUBLISH:
        return message
    shown = bytearray(message)
    (runs,) = struct.unpack_from("<I", shown, 24)
    at = PUBLISH_HEADER + RUN * runs
    while at < len(shown):
        (length,) = struct.unpack_from("<I", shown, at)
        shown[at + 4 : at + 16] = bytes(12)  # the checksum, and the time
        at += length
    return bytes(shown)
