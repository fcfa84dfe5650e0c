"""Take single messages through a front door as it is, one in each pass.

The front door has a client at a socket and a shard at a lane, both in this process. There is no
event loop: each turn calls what the loop would call. So the stages have all that stands around the
work in a real pass: epoll, the pace, the read, the end of the pass, system calls. The client and
the shard are not part of a stage.

    read       Watch.ready: one publish is read, and its batch is in the ring of the shard
    deliver    the same: one delivery is taken out of the ring, and written to the client
    ack        the same for an ack, which waits for others
    take       Inlet.take alone: from the bytes of a publish to the packer
    frames     Outlet alone: from the message of the shard to frames in the output of the client
    bind       Watch.ready: a bind is answered ahead of the controller
    bind-durable   the same for a bind that the controller records, and its answer

bench/guard.py counts the instructions of these stages.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
from micro.path import publish
from pamqp import commands, frame

from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.connections import Connections
from shardmq.broker.front_door.consume.consumers import Consumer
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.events import ShardEvents
from shardmq.broker.front_door.hot_state import BindRun, BindRuns
from shardmq.broker.front_door.links.binds_ahead import BindsAhead
from shardmq.broker.front_door.links.binds_pipe import around_key
from shardmq.broker.front_door.links.catalog_requests import CatalogRequests
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.loop import PassLoop
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.publish.dedup_service import DedupService
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.reservations import Reservations
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import PermissionPut, QueuePut, UserPut, VhostPut
from shardmq.broker.shared.config import BrokerConfig
from shardmq.broker.shared.control import Answer, Ask, BindMany
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import DeliveryWriter
from shardmq.shardd.wire.lane import ALL, MEMORY_BYTES, Lane, Shared

STAGES = ("read", "deliver", "ack", "take", "frames", "bind", "bind-durable")
BODY_BYTES = 16
INCARNATION, EPOCH = 7, 1
READ_BYTES = 65536


class Calls:
    """An event loop that does nothing by itself."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.soon: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def time(self) -> float:
        return 1.0

    def add_reader(self, fd: int, call: Callable[..., None], *args: Any) -> None:
        self.readers[fd] = call

    def remove_reader(self, fd: int) -> bool:
        return self.readers.pop(fd, None) is not None

    def call_soon(self, call: Callable[..., Any], *args: Any) -> None:
        self.soon.append((call, args))

    def call_later(self, seconds: float, call: Callable[..., Any], *args: Any) -> Any:
        return SimpleNamespace(cancel=lambda: None)  # no time passes

    def run(self) -> None:
        while self.soon:
            call, args = self.soon.popleft()
            call(*args)


class Door:
    """A front door with one client and one shard."""

    def __init__(self) -> None:
        self.aio = Calls()
        config = BrokerConfig(runtime_dir="nowhere", door=0, shards=[0], listen_fds=[], boot="1")
        catalog = Catalog()
        for change in (
            VhostPut("/"), UserPut("guest", ""), PermissionPut("/", "guest", ".*", ".*", ".*"),
            QueuePut("/", "bench-0", 1, 0), QueuePut("/", "bound", 2, 0, durable=False),
            QueuePut("/", "kept", 3, 0),
        ):  # fmt: skip
            catalog.apply(change)
        line: Any = SimpleNamespace(
            catalog=catalog, connection_up=lambda *_: None, connection_down=lambda *_: None
        )
        line.ahead = self._binds_ahead(catalog)
        aio: Any = self.aio
        events, counts = ShardEvents(), Counts()
        self.links = links = ShardLinks(config, INCARNATION, events)
        links.use_loop(aio)
        replies = Replies(links, counts)
        publishing = Publishing(
            line, links, Reservations(links), DedupService(links), replies, counts
        )
        self.loop = PassLoop(aio, links, publishing, shards=1, tick_us=0)
        self.services = Services(
            config=config,
            incarnation=INCARNATION,
            loop=self.loop,
            shards=links,
            catalog_link=line,
            counts=counts,
            logins=SimpleNamespace(at_once=lambda *_: ""),  # type: ignore[arg-type] # lets all in
            alarms=Alarms(),
            publishing=publishing,
            consuming=Consuming(links, line, self.loop, counts, replies),
            steps=StepRunner(line, links),
            server_properties={},
        )
        self.services.use_short_way()
        self.services.watch()
        self.connections = Connections(self.services)
        # Nothing dies.
        events.attend(self.services, self.connections, SimpleNamespace())  # type: ignore[arg-type]
        assert self.loop.watch is not None
        self._pass = self.loop.watch.ready
        self._open_lane()
        self._open_client()
        self._publish = publish(BODY_BYTES)
        self._number = self._bound = self._waited = 0

    def _binds_ahead(self, catalog: Catalog) -> BindsAhead:
        """Return the binds ahead of a front door whose pipe to the controller takes all."""
        runs = self._runs = BindRuns()
        runs.pipe = runs.waited_pipe = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        encode = msgspec.msgpack.Encoder().encode

        def send(ask: Ask) -> BindRun:
            assert isinstance(ask.what, BindMany)
            if ask.what.waited:
                self._waited = ask.id
            run = BindRun(runs, ask.what.vhost, ask.what.binds)
            message = partial(around_key, ask, run.source, run.queue)
            run.go_on(lambda: message(lambda each: bytes(4) + encode(each)))
            return run

        requests = self._requests = CatalogRequests(lambda _: None, send, runs)
        requests.up = True
        ahead = BindsAhead(runs, requests, lambda: catalog, lambda _: None)
        for name in ("bound", "kept"):
            ahead.queue_is_there("/", name)
        return ahead

    def _open_lane(self) -> None:
        link = self.link = self.links.links[0]
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (one, other):
            end.setblocking(False)
        ours = Shared.make(one, mmap.mmap(-1, MEMORY_BYTES))
        theirs = Shared(other, ours.memory, os.dup(ours.shard_bell), os.dup(ours.door_bell))
        who = (0, INCARNATION, EPOCH, 0)
        link.begin(EPOCH, 1)
        self.lane = link.lane = Lane(ours, who, lambda _: None, at_shard=False)
        inbox = self.links.inbox
        inbox.loop = self.aio  # type: ignore[assignment]
        inbox.listen(link, self.lane)
        self.shard = Lane(theirs, who, lambda _: None, at_shard=True)
        self._pass()
        self.lane.came_by_zmq(wire.RING)
        self.shard.came_by_zmq(wire.RING)

    def _open_client(self) -> None:
        self.client, sock = socket.socketpair()
        sock.setblocking(False)
        self.connections.enter(sock, Peer("127.0.0.1", 4000))
        (self._connection,) = self.connections.all()
        login = commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")
        for said in (
            b"AMQP\x00\x00\x09\x01",
            frame.marshal(login, 0),
            frame.marshal(commands.Connection.TuneOk(2047, 131072, 60), 0)
            + frame.marshal(commands.Connection.Open("/"), 0),
            frame.marshal(commands.Channel.Open(), 1),
            publish(BODY_BYTES),  # a channel that nobody has used is not made yet
        ):
            self.client.sendall(said)
            self._read()
        channel = self._connection.channels.by_number[1]
        consumer = self._consumer = Consumer(channel.consuming, 1, "c0")
        consumer.queue_id, consumer.queue_name = 1, "bench-0"
        consumer.announced = consumer.attached = True
        channel.consuming.consumers["c0"] = consumer
        self.services.consuming.consumers[1] = consumer
        self.client.recv(READ_BYTES)
        self.shard.take(ALL)
        self.link.in_flight = 0

    # -- stages ------------------------------------------------------------------------------------

    def turn(self, around: Callable[[str, Callable[[], Any]], Any]) -> int:
        """Take one message through the front door and back; return 1."""
        self._number += 1
        self.client.sendall(self._publish)
        self.shard.sleep()
        around("read", self._pass)
        (batch,) = self.shard.take(ALL)
        assert batch[0] == wire.PUBLISH
        self.shard.hear()
        self.link.in_flight = 0  # the shard gives its credit back
        self.lane.sleep()
        self.shard.send(self._delivery())
        around("deliver", self._pass)
        assert len(self.client.recv(READ_BYTES)) > BODY_BYTES
        ack = struct.pack(">BHIHHQBB", 1, 1, 13, 60, 80, self._number, 0, 0xCE)
        self.client.sendall(ack)
        around("ack", self._pass)
        assert not self._consumer.channel.unacked.count
        self.link.settles.take()
        self._plain_turn(around)
        around("nothing", lambda: None)
        return 1

    def bind(self, around: Callable[[str, Callable[[], Any]], Any]) -> int:
        """Take one bind in, and its answer out; return 1."""
        self._bound += 1
        key = f"key.{self._bound}"
        bind = commands.Queue.Bind(0, "bound", "amq.topic", key, False, {})
        self.client.sendall(frame.marshal(bind, 1))
        around("bind", self._pass)
        assert self.client.recv(READ_BYTES) == frame.marshal(commands.Queue.BindOk(), 1)
        return 1

    def bind_durable(self, around: Callable[[str, Callable[[], Any]], Any]) -> int:
        """Take one bind in, the controller's answer, and the answer to the client; return 1."""
        self._bound += 1
        bind = commands.Queue.Bind(0, "kept", "amq.topic", f"key.{self._bound}", False, {})
        self.client.sendall(frame.marshal(bind, 1))
        around("bind-durable", self._pass_and_answer)
        assert self.client.recv(READ_BYTES) == frame.marshal(commands.Queue.BindOk(), 1)
        return 1

    def _pass_and_answer(self) -> None:
        self._pass()
        self.loop.receiving()
        self._requests.answered(Answer(self._waited, result={"binds": 1}))
        self.loop.received()

    def _plain_turn(self, around: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Take one message through the compiled code alone."""
        self._number += 1
        inlet = self._connection.socket.inlet
        assert inlet is not None
        read = memoryview(self._publish)
        assert around("take", lambda: inlet.take(read, len(read))) == len(read)
        self.link.flush()
        assert len(self.shard.take(ALL)) == 1
        self.link.in_flight = 0
        message = self._delivery()
        outlet = self.link.by_kind[wire.DELIVER]
        self.loop.receiving()
        around("frames", lambda: outlet(message))
        self.loop.received()
        self.client.recv(READ_BYTES)
        ack = struct.pack(">BHIHHQBB", 1, 1, 13, 60, 80, self._number, 0, 0xCE)
        inlet.take(memoryview(ack), len(ack))
        self.link.settles.take()

    def _read(self) -> None:
        """Read the client, which may not have gone as far as to be watched."""
        self.aio.readers.get(self._connection.socket.fd, self._pass)()
        self.aio.run()

    def _delivery(self) -> bytes:
        stored = struct.pack("<II", BODY_BYTES, 2) + b"\0\7bench-0" + bytes(2 + BODY_BYTES)
        writer = DeliveryWriter(0, INCARNATION, EPOCH, 0)
        writer.add(self._connection.id, 1, 1, self._number, False, 1, stored)
        message = writer.take()
        assert message is not None
        return message

    def close(self) -> None:
        self.client.close()
        self.shard.close()
        self.lane.close()
        os.close(self._runs.pipe)
