"""Test the controller over real sockets, with a front door and a shard."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.peers import links, shard_links
from shardmq.broker.controller.peers.links import PREFIX, encode
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.server import Controller
from shardmq.broker.model import passwords
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.shared.control import (
    Answer,
    Applied,
    Ask,
    Bind,
    Changes,
    DoorHello,
    ExchangeDeclare,
    ExchangeRemove,
    Fence,
    Fenced,
    OtherVersion,
    Outlived,
    QueueDeclare,
    Snapshot,
)
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.session import SessionKeys
from tests.support.catalogs import rebuilt

EPOCH = 77
FROM_CONTROLLER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Snapshot | Changes | Answer | Fence | Outlived | OtherVersion
)


class Shard:
    """Shard 0: answers creations and counts."""

    def __init__(self, runtime_dir: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.pull, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.push.setsockopt(zmq.LINGER, 0)
        self.pull.bind(f"ipc://{runtime_dir}/shard-0.sock")
        self.push.connect(f"ipc://{runtime_dir}/controller.sock")
        self.received: list[Any] = []
        self.incarnation = 0
        self.epoch = EPOCH

    async def run(self) -> None:
        await self.say(wire.Hello(1, ready=False))
        while True:
            data = await self.pull.recv()
            head, message = envelope.read(data), envelope.read_control(data)
            self.incarnation = head.incarnation
            if head.epoch != self.epoch:
                continue
            self.received.append(message)
            match message:
                case wire.Assign():
                    await self.say(wire.Hello(1, ready=True))
                case wire.CreateQueues() | wire.Count() | wire.Release():
                    await self.say(wire.Done(message.request))

    async def say(self, message: Any) -> None:
        await self.push.send(
            envelope.control(wire.CONTROLLER, self.incarnation, self.epoch, 0, message)
        )

    def close(self) -> None:
        self.pull.close()
        self.push.close()
        self.context.term()


class World:
    def __init__(self, directory: Path, doors: int) -> None:
        config = ControllerConfig(
            data_dir=f"{directory}/data",
            runtime_dir=str(directory),
            boot="boot",
            shards=1,
            doors=doors,
        )
        self.directory = directory
        self.controller = Controller(config)
        self.shard = Shard(directory)


@pytest.fixture
def doors() -> int:
    return 1


@pytest_asyncio.fixture
async def world(doors: int) -> AsyncIterator[World]:
    # Not tmp_path: a unix socket's path has room for 107 bytes.
    with tempfile.TemporaryDirectory() as name:
        world, stop = World(Path(name), doors), asyncio.Event()
        running = asyncio.create_task(world.controller.run(stop))
        shard = asyncio.create_task(world.shard.run())
        async with asyncio.timeout(60):
            while not world.controller.shards.shards or not world.controller.shards.shards[0].ready:
                await asyncio.sleep(0.005)
        yield world
        shard.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await shard
        stop.set()
        assert await running == 0
        world.shard.close()


async def read(reader: asyncio.StreamReader) -> Any:
    (count,) = PREFIX.unpack(await asyncio.wait_for(reader.readexactly(PREFIX.size), 60))
    return FROM_CONTROLLER.decode(await reader.readexactly(count))


async def enter(
    world: World, incarnation: int = 1, door: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Catalog]:
    reader, writer = await asyncio.open_unix_connection(world.directory / "control.sock")
    writer.write(encode(DoorHello(wire.WIRE_VERSION, door, incarnation, 123, "", 0)))
    snapshot = await read(reader)
    catalog = rebuilt(snapshot.version, snapshot.changes)
    writer.write(encode(Applied(snapshot.version)))
    return reader, writer, catalog


async def test_the_first_start_has_a_vhost_and_a_guest(world: World) -> None:
    _, writer, catalog = await enter(world)
    assert passwords.matches(catalog.users.get("guest"), "guest")
    assert catalog.permissions.may("guest", "/", "configure", "anything")
    writer.close()


class NoQueues:
    """The authority of a cluster without queues."""

    def queues_of_shard(self, shard: int) -> list[wire.QueueSpec]:
        return []

    def queue_gone(self, id: int, reason: str) -> None: ...


async def test_a_shard_that_speaks_before_it_is_learnt_of_gets_its_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller and a shard that take over on one node hear of each other in any order."""
    key = "k" * 40
    shards = ShardLinks(1, 5, [], SessionKeys(key, key), term=2)
    shards.handler = NoQueues()
    sent: list[Any] = []

    def send(shard: shard_links.Shard, message: Any) -> None:
        if shard.way is not None:
            sent.append(message)

    monkeypatch.setattr(shards, "_send", send)
    hello = wire.Hello(1, ready=False)
    with tempfile.TemporaryDirectory() as directory:
        await shards.start(Path(directory))
        for is_learnt in (False, True):
            if is_learnt:
                shards.learn(0, shard_links.HERE)
                assert isinstance(sent.pop(), wire.Join)
            shards._take(envelope.control(wire.CONTROLLER, 0, EPOCH, 0, hello))
            assert [type(each) for each in sent] == [wire.Join, wire.Assign] * is_learnt
        await shards.stop()


async def test_auto_delete_queues_that_had_a_consumer_are_looked_at_in_a_new_life_of_their_shard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmq.broker.controller.peers.shard_links.ABANDONED_S", 0.01)
    reader, writer, _ = await enter(world)
    for number, auto_delete in ((1, True), (2, True), (3, False)):
        declare = QueueDeclare("/", f"q{number}", False, auto_delete, False, {})
        writer.write(encode(Ask(number, declare, "0.1.9", "guest")))
        changes = await read(reader)
        writer.write(encode(Applied(changes.version)))
        await read(reader)
    ids = {
        name: queue.id
        for name in ("q1", "q2", "q3")
        if (queue := world.controller.authority.catalog.queue("/", name))
    }
    for name in ("q1", "q3"):
        await world.shard.say(wire.FirstConsumer(ids[name]))
    world.shard.epoch += 1
    await world.shard.say(wire.Hello(2, ready=False))
    async with asyncio.timeout(60):
        while not isinstance(assign := world.shard.received[-1], wire.Assign):
            await asyncio.sleep(0.005)
    assert assign.used == [ids["q1"]]
    # a front door that has heard of it has attached its consumers before it says so
    for _ in range(2):
        fence = await read(reader)
        assert isinstance(fence, Fence)
        assert not any(isinstance(message, wire.Attach) for message in world.shard.received)
        writer.write(encode(Fenced(fence.number)))
    async with asyncio.timeout(60):
        while not any(isinstance(message, wire.Release) for message in world.shard.received):
            await asyncio.sleep(0.005)
    assert [
        message.queue for message in world.shard.received if isinstance(message, wire.Attach)
    ] == [ids["q1"]]
    writer.close()


async def test_a_controller_that_ends_does_not_take_the_front_doors_from_the_shards(
    world: World,
) -> None:
    """The controller may end alone when it cannot write definitions.

    The next one has the same front doors.
    """
    _, writer, _ = await enter(world)
    await world.controller.links.stop()
    world.controller.shards.request(0, wire.ListQueues, 60).cancel()
    async with asyncio.timeout(60):
        while not isinstance(world.shard.received[-1], wire.ListQueues):
            await asyncio.sleep(0.005)
    assert not any(isinstance(message, wire.FrontDoorGone) for message in world.shard.received)
    writer.close()


async def test_a_door_is_answered_after_it_applied_the_change(world: World) -> None:
    reader, writer, catalog = await enter(world)
    writer.write(encode(Ask(5, QueueDeclare("/", "q", True, False, True, {}), "0.1.9", "guest")))
    changes = await read(reader)
    assert isinstance(changes, Changes)
    for change in changes.changes:
        catalog.apply(change)
    assert catalog.version == changes.version
    assert catalog.queue("/", "q") is not None
    writer.write(encode(Applied(changes.version)))
    answer = await read(reader)
    assert answer == Answer(5, result={"name": "q", "messages": 0, "consumers": 0})
    assert any(isinstance(message, wire.CreateQueues) for message in world.shard.received)
    writer.close()


async def test_a_door_that_takes_in_all_there_is_may_take_longer_than_for_a_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "APPLY_S_MAX", 0.0)
    reader, writer = await asyncio.open_unix_connection(world.directory / "control.sock")
    writer.write(encode(DoorHello(wire.WIRE_VERSION, 0, 1, 123, "", 0)))
    snapshot = await read(reader)
    world.controller.links._cut_laggards()
    writer.write(encode(Applied(snapshot.version)))
    writer.write(encode(Ask(5, QueueDeclare("/", "q", True, False, True, {}), "0.1.9", "guest")))
    assert isinstance(await read(reader), Changes)
    world.controller.links._cut_laggards()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_front_door_that_was_taken_for_gone_is_told_so_and_the_next_one_comes_in(
    world: World,
) -> None:
    """Shards hear that incarnation no more."""
    _, writer, _ = await enter(world)
    writer.close()
    async with asyncio.timeout(5):
        while not any(isinstance(message, wire.FrontDoorGone) for message in world.shard.received):
            await asyncio.sleep(0.005)
    reader, late = await asyncio.open_unix_connection(world.directory / "control.sock")
    late.write(encode(DoorHello(wire.WIRE_VERSION, 0, 1, 123, "", 0)))
    assert isinstance(await read(reader), Outlived)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    late.close()
    _, writer, _ = await enter(world, incarnation=2)
    writer.close()


async def test_a_newer_front_door_is_asked_to_speak_what_both_understand(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    newer = wire.WIRE_VERSION + 1
    reader, writer = await asyncio.open_unix_connection(world.directory / "control.sock")
    writer.write(encode(DoorHello(newer, 0, 1, 123, "", 0, [], wire.WIRE_VERSION)))
    assert await read(reader) == OtherVersion(wire.WIRE_VERSION)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert world.controller.links.other_versions == {}
    assert "wire version" not in caplog.text
    _, writer, _ = await enter(world)
    writer.close()


@pytest.mark.parametrize("rest", [["boot", 0, []], [], [{"what": "a later version says"}]])
async def test_a_front_door_of_another_wire_version_is_told_so_whatever_else_it_says(
    world: World,
    rest: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hello = msgspec.msgpack.encode(["door-hello", wire.WIRE_VERSION + 1, 0, 9, 123, *rest])
    for _ in range(2):
        reader, writer = await asyncio.open_unix_connection(world.directory / "control.sock")
        writer.write(PREFIX.pack(len(hello)) + hello)
        assert await read(reader) == OtherVersion(wire.WIRE_VERSION)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert [
        record.getMessage() for record in caplog.records if "wire version" in record.getMessage()
    ] == [
        f"front door 0 (pid 123) speaks wire version {wire.WIRE_VERSION + 1}, this process speaks "
        f"{wire.WIRE_VERSION}: restart all of one release"
    ]
    assert world.controller.links.other_versions == {0: wire.WIRE_VERSION + 1}
    with monkeypatch.context() as later:  # it does not come back
        later.setattr("shardmq.broker.controller.peers.links.REFUSED_S_MAX", 0.0)
        assert world.controller.links.other_versions == {}
    _, writer, _ = await enter(world)
    assert world.controller.links.other_versions == {}
    writer.close()


async def test_a_front_door_with_a_new_link_before_the_end_of_the_old_one_was_never_gone(
    world: World,
) -> None:
    old_reader, old, _ = await enter(world)
    reader, writer, _ = await enter(world)
    assert await asyncio.wait_for(old_reader.read(), 5) == b""
    assert [door.incarnation for door in world.controller.links.doors()] == [1]
    writer.write(
        encode(
            Ask(5, ExchangeDeclare("/", "x", "direct", False, False, False, {}), "0.1.9", "guest")
        )
    )
    assert isinstance(await read(reader), Changes)
    assert not any(isinstance(message, wire.FrontDoorGone) for message in world.shard.received)
    for each in (old, writer):
        each.close()


async def test_the_only_front_door_is_answered_right_behind_the_change(world: World) -> None:
    """It handles what it hears in order, and nobody else routes."""
    reader, writer, _ = await enter(world)
    bound = [
        ExchangeDeclare("/", "x", "direct", False, False, False, {}),
        Bind("/", "x", "exchange", "amq.direct", "k", {}),
    ]
    for number, what in enumerate(bound):
        writer.write(encode(Ask(number, what, "0.1.9", "guest")))
        changes = await read(reader)
        assert not changes.waited
        assert await read(reader) == Answer(number)
    writer.write(encode(Ask(7, ExchangeRemove("/", "x", False), "0.1.9", "guest")))
    assert not (await read(reader)).waited
    assert await read(reader) == Answer(7)
    writer.close()


@pytest.mark.parametrize("doors", [2])
async def test_of_two_front_doors_both_have_applied_a_change_before_it_is_answered(
    world: World, doors: int
) -> None:
    reader, writer, _ = await enter(world)
    other_reader, other, _ = await enter(world, door=1)
    writer.write(
        encode(
            Ask(5, ExchangeDeclare("/", "x", "direct", False, False, False, {}), "0.1.9", "guest")
        )
    )
    changes, same = await read(reader), await read(other_reader)
    assert changes == same
    assert changes.waited
    writer.write(encode(Applied(changes.version)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    other.write(encode(Applied(changes.version)))
    assert await read(reader) == Answer(5)
    for each in (writer, other):
        each.close()


@pytest.mark.parametrize("doors", [2])
async def test_a_change_waits_for_the_doors_that_have_not_come_back_yet(
    world: World, doors: int
) -> None:
    """After a restart of the controller, front doors route by their old copies.

    They would not know the queue.
    """
    reader, writer, _ = await enter(world)
    writer.write(encode(Ask(5, QueueDeclare("/", "q", True, False, False, {}), "0.1.9", "guest")))
    changes = await read(reader)
    writer.write(encode(Applied(changes.version)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    _, other, _ = await enter(world, door=1)
    assert isinstance(await read(reader), Answer)
    for each in (writer, other):
        each.close()


async def test_exclusive_queues_go_when_their_doors_stream_ends(world: World) -> None:
    reader, writer, _ = await enter(world)
    writer.write(encode(Ask(1, QueueDeclare("/", "q", True, False, True, {}), "0.1.9", "guest")))
    await read(reader)
    writer.close()
    async with asyncio.timeout(60):
        while world.controller.authority.catalog.queue("/", "q") is not None:
            await asyncio.sleep(0.005)
        while not any(isinstance(message, wire.FrontDoorGone) for message in world.shard.received):
            await asyncio.sleep(0.005)
