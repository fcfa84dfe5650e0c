"""Which links of queues take messages, when they stop, and what they write into headers."""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pamqp import base, commands

from shardmq.bridges import queue_link
from shardmq.bridges.connection import COMMANDS, Connection, _frame
from shardmq.bridges.editing import UNCHANGED, VISITS_MAX, editor, received_from
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.process import Bridges
from shardmq.bridges.pump import Pump
from shardmq.bridges.queue_link import QueueLinkRunner
from shardmq.broker.amqp.methods import encode_method
from shardmq.broker.amqp.properties import encode_properties, entries, headers_inside, read
from shardmq.broker.controller.demand import Demand, rest_s
from shardmq.broker.controller.peers.shard_links import ShardSilent
from shardmq.broker.model import amqp_uri, shovels
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, QueuePut, ShardOf, VhostPut
from shardmq.broker.model.federation import QueueLink, Source
from shardmq.broker.shared.bridging import Order, key_of
from shardmq.shardd.wire.messages import ConsumerStats, QueueStats, Stats, StatsReply
from tests.bridges import test_hostile_peers
from tests.bridges.test_hostile_peers import NEVER, Peer, delivery
from tests.reference.relay import frame, short

HISTORIES = 200
FRAME_MAX = 4096


def link(queue: str = "q", uri: str = "amqp://h", **more: Any) -> QueueLink:
    given = {"upstream": "u", "policy": "p", "consumer_tag": "t", "uris": [uri]} | more
    of_source = {name: given.pop(name) for name in Source.__struct_fields__ if name in given}
    given.setdefault("upstream_queue", "there")
    return QueueLink(vhost="/", queue=queue, source=Source(**of_source), **given)


def edited(of: QueueLink, props: dict[str, Any], names: bytes) -> Any:
    return read(
        received_from(of, "amqp://u:secret@h?x=1", FRAME_MAX, print)(
            encode_properties(props), names
        )
    )


def array(*items: bytes) -> bytes:
    inside = b"".join(items)
    return b"A" + struct.pack(">I", len(inside)) + inside


def nested(depth: int) -> bytes:
    """Return a list in a list, and so on."""
    value = array()
    for _ in range(depth - 1):
        value = array(value)
    return value


def headed(name: bytes, value: bytes) -> bytes:
    """Return properties with one header."""
    inside = short(name) + value
    return struct.pack(">HI", 0x2000, len(inside)) + inside


@pytest.mark.row("J11")
def test_the_first_link_notes_where_a_message_was_published() -> None:
    names = b"\1" + short(b"e") + short("k\u00fc".encode())
    given = {"content_type": "a/b", "user_id": "me", "headers": {"x-sequence": 1, "CC": ["k"]}}
    found = edited(link(), given, names)
    entry = {"uri": "amqp://h", "queue": "q", "redelivered": True, "visit-count": 1}
    assert found.headers == {
        "x-received-from": [entry], "x-original-exchange": "e",
        "x-original-routing-key": "k\u00fc", "x-original-cc": ["k"],
    }  # fmt: skip
    assert (found.content_type, found.user_id) == ("a/b", None)
    assert edited(link(trust_user_id=True), given, names).user_id == "me"


@pytest.mark.row("J11")
def test_a_message_that_comes_again_from_a_queue_is_counted_and_others_stay() -> None:
    names = b"\0" + short(b"") + short(b"q")
    other = {"uri": "amqp://other", "queue": "q", "redelivered": False, "visit-count": 9}
    here = {"uri": "amqp://h", "queue": "q", "redelivered": True, "visit-count": 3}
    before = {"x-received-from": [other, here, "no table"], "x-original-exchange": "e"}
    found = edited(link(), {"headers": before}, names)
    assert found.headers == {
        "x-received-from": [here | {"redelivered": False, "visit-count": 4}, other, "no table"],
        "x-original-exchange": "e",
    }


@pytest.mark.row("J11")
def test_what_a_link_does_not_change_stays_byte_for_byte() -> None:
    bad = b"\x04\xff\xfe\x80a"
    for flags in (0x0080, 0x0400):  # message_id and correlation_id
        props = struct.pack(">HI", 0x2010 | flags, 0)
        props += bad + short(b"me")
        found = received_from(link(), "amqp://h", FRAME_MAX, print)(
            props, b"\0" + short(b"\xff") + short(b"q")
        )
        assert found[:2] == struct.pack(">H", 0x2000 | flags) and found.endswith(bad)
        inside = entries(headers_inside(found))
        assert inside[b"x-original-exchange"] == b"S\0\0\0" + short(b"\xff")
    odd = b"\x02\xff\xfeS\0\0\0\x01v"  # a header whose name is not UTF-8
    props = struct.pack(">HI", 0x2000, len(odd)) + odd
    assert odd in received_from(link(), "amqp://h", FRAME_MAX, print)(props, b"\0\0\0")


ODD = {
    "a nested key that is not UTF-8": b"F\0\0\0\x03\x01\xffV",
    "a large mantissa": b"F\0\0\0\x08\x01nD\0\xff\xff\xff\xff",
    "nested deeply": nested(100),
    "nested too deeply": nested(101),
}


@pytest.mark.row("J11")
@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
def test_no_odd_header_stops_a_link_and_odd_entries_stay_byte_for_byte(odd: bytes) -> None:
    edit = received_from(link(), "amqp://h", FRAME_MAX, pytest.fail)
    names = b"\0" + short(b"e") + short(b"q")
    for name, value in ((b"h", odd), (b"x-received-from", array(odd))):
        found = entries(headers_inside(edit(headed(name, value), names)))
        assert odd in found[name]
        assert (
            found[b"x-received-from"][:6].startswith(b"A")
            and b"visit-count" in (found[b"x-received-from"])
        )


@pytest.mark.row("J11")
def test_headers_without_room_for_more_or_of_an_unknown_type_pass_as_they_are() -> None:
    said: list[str] = []
    edit = received_from(link(), "amqp://h", FRAME_MAX, said.append)
    names = b"\0" + short(b"e") + short(b"q")
    full = headed(b"h", b"x" + struct.pack(">I", FRAME_MAX - 100) + bytes(FRAME_MAX - 100))
    for props in (full, headed(b"h", b"?")):
        assert edit(props, names) == props
    assert said == [UNCHANGED] * 2
    known = (1 << 64) - 1  # the largest number that a peer can write
    count = b"\x0bvisit-countT" + struct.pack(">Q", known)
    place = b"\x03uriS\0\0\0\x08amqp://h\x05queueS\0\0\0\x01q"
    entry = b"F" + struct.pack(">I", len(place + count)) + place + count
    edited = edit(headed(b"x-received-from", array(entry)), names)
    assert struct.pack(">q", VISITS_MAX) in edited


@pytest.mark.parametrize("own", [False, True])
def test_what_a_shovel_does_not_change_stays_byte_for_byte(own: bool) -> None:
    long = b"\xff" + b"\x80" * 255  # would have 765 bytes if the bad bytes were replaced
    table = b"\x0ax-sequenceI\0\0\0\x05"
    props = struct.pack(">HI", 0x2080, len(table)) + table + long
    given = {"src-uri": "amqp://", "dest-uri": "amqp://", "src-queue": "s", "dest-queue": "d"}
    for more in (
        {},
        {"dest-add-forward-headers": True},
        {"dest-publish-properties": {"type": "t"}},
    ):
        edit = editor(shovels.read("/", "s", given | more), "amqp://", "amqp://", "c", float, own)
        if edit is None:
            assert not own and not more
            continue
        found = edit(props)
        assert long in found
        assert (table in found) == (not own)


async def test_a_message_that_cannot_be_passed_on_ends_the_try_with_the_reason() -> None:
    connection, failed = Connection(amqp_uri.parse("amqp://h"), "name"), []
    connection.on_failed = failed.append

    def broken(data: bytes, at: int) -> int:
        raise ValueError("bytes must be in range(0, 256)")

    connection.batches = broken
    connection._take(b"x" * 8)
    assert [str(each) for each in failed] == [
        "internal error: ValueError: bytes must be in range(0, 256)"
    ]


async def test_connections_read_into_one_buffer_and_keep_what_is_no_whole_frame() -> None:
    first, second = (Connection(amqp_uri.parse("amqp://h"), name) for name in "ab")
    for connection, data in ((first, b"\x08\0\0"), (second, b"\x01\2\3")):
        buffer = connection.get_buffer(-1)
        buffer[: len(data)] = data
        connection.buffer_updated(len(data))
    assert first.get_buffer(-1) is second.get_buffer(-1)
    assert (first._unread, second._unread) == (b"\x08\0\0", b"\x01\2\3")


async def test_a_peer_that_takes_no_publishes_may_answer_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardmq.bridges.connection.ANSWER_S_MAX", 0.02)
    connection = Connection(amqp_uri.parse("amqp://h"), "name")
    passive = commands.Queue.Declare(queue="q", passive=True)
    connection._take(_frame(0, commands.Connection.Blocked("memory")))
    asking = asyncio.create_task(connection.call(passive, commands.Queue.DeclareOk))
    await asyncio.wait({asking}, timeout=0.1)
    assert not asking.done()
    connection._take(_frame(1, commands.Queue.DeclareOk("q", 3, 0)))
    assert (await asking).message_count == 3
    connection._take(_frame(0, commands.Connection.Unblocked()))
    with pytest.raises(LinkFailed, match="does not answer"):
        await connection.call(passive, commands.Queue.DeclareOk)


class Ends:
    """Both ends of a link, where a test says how long the queue here is."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[base.Frame] = asyncio.Queue()
        self.messages, self.blocked = 0, ""
        self.failure: LinkFailed | None = None

    def send(self, method: base.Frame) -> None:
        self.said.put_nowait(method)

    async def call(self, method: base.Frame, answer: type[base.Frame], channel: int) -> Any:
        assert channel == COMMANDS
        if self.failure is not None:
            raise self.failure
        return commands.Queue.DeclareOk("q", self.messages, 0)


@pytest.mark.row("J11")
async def test_a_link_consumes_while_the_queue_is_empty_and_looks_after_each_prefetch() -> None:
    runner = QueueLinkRunner(Order(link(prefetch=10), 1), list, lambda: None)
    ends, failed = Ends(), []
    connection = cast(Connection, ends)
    pump = cast(Pump, SimpleNamespace(end=failed.append))
    following = asyncio.create_task(runner._follow(connection, connection, pump))

    async def heard() -> base.Frame:
        return await asyncio.wait_for(ends.said.get(), 30)

    try:
        ends.messages = 3
        runner.pull(True)  # the queue is not empty any more
        await asyncio.sleep(0)
        assert ends.said.empty()
        ends.messages = 0
        method = await heard()
        assert isinstance(method, commands.Basic.Consume) and method.nowait
        assert (method.consumer_tag, method.arguments) == ("t", {"x-priority": -1})
        runner._settled(10, 0)
        ends.messages = 4
        assert isinstance(await heard(), commands.Basic.Cancel)
        ends.messages = 0
        assert isinstance(await heard(), commands.Basic.Consume)
        assert runner.state.pulls
        runner.pull(False)
        assert isinstance(await heard(), commands.Basic.Cancel)
        assert not runner.state.pulls
        ends.blocked = "memory"
        runner.pull(True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert ends.said.empty(), "messages would have nowhere to go"
        ends.blocked = ""
        assert isinstance(await heard(), commands.Basic.Consume)
        runner.pull(False)
        assert isinstance(await heard(), commands.Basic.Cancel)
        ends.failure = LinkFailed("gone")
        runner.pull(True)
        await asyncio.wait_for(following, 30)
        assert [str(each) for each in failed] == ["destination: gone"]
    finally:
        following.cancel()


async def test_a_fault_while_a_link_follows_the_queue_ends_the_try() -> None:
    runner = QueueLinkRunner(Order(link(), 1), list, lambda: None)
    failed: list[LinkFailed] = []
    connection = cast(Connection, SimpleNamespace(blocked=""))  # it cannot be asked
    runner.pull(True)
    pump = cast(Pump, SimpleNamespace(end=failed.append))
    await asyncio.wait_for(runner._follow(connection, connection, pump), 30)
    assert [str(each) for each in failed] == ["internal error: AttributeError"]


async def test_a_link_that_comes_back_waits_until_it_is_told_again_to_take_messages() -> None:
    bridges = Bridges(cast(Any, SimpleNamespace(runtime_dir="", doors=0)))
    order = Order(link(reconnect_delay_s=60.0), 1)
    key = key_of(order.bridge)
    try:
        await bridges._run([order], "")
        bridges._pull(frozenset([key]))
        runner = bridges._runners[key]
        assert isinstance(runner, QueueLinkRunner) and runner._pulls
        await bridges._run([], "")
        await bridges._run([order], "")
        runner = bridges._runners[key]
        assert isinstance(runner, QueueLinkRunner) and not runner._pulls
    finally:
        await bridges._run([], "")


@pytest.mark.row("J11")
async def test_an_upstream_without_priorities_of_consumers_is_refused(tmp_path: Path) -> None:
    here, there = Peer(NEVER, b""), Peer(NEVER, b"")
    path = str(tmp_path / "door")
    server = await asyncio.start_unix_server(here._talk, path)
    await there.serve()
    order = Order(link(uri=f"amqp://127.0.0.1:{there.port}", reconnect_delay_s=50.0), 1)
    failed = asyncio.Event()
    runner: QueueLinkRunner | None = None

    def tell() -> None:
        if runner is not None and runner.state.error:
            failed.set()

    runner = QueueLinkRunner(order, lambda: [path], tell)
    running = asyncio.create_task(runner.run())
    try:
        await asyncio.wait_for(failed.wait(), 30)
        assert runner.state.error == "upstream_lacks_consumer_priorities"
        assert 40.0 <= runner.state.retry_in_s <= 60.0
    finally:
        running.cancel()
        server.close()
        there.close()


@pytest.mark.parametrize("ack_mode", ["on-confirm", "on-publish", "no-ack"])
async def test_a_link_hears_of_a_queue_that_is_gone_whatever_its_mode(
    ack_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = commands.Connection.Start(
        server_properties={"capabilities": {queue_link.NEEDED: True}},
        mechanisms="PLAIN",
        locales="en_US",
    )
    monkeypatch.setattr(test_hostile_peers, "START", encode_method(start))
    mandatory = []

    def relay(exchange: bytes, key: bytes, is_mandatory: bool, *more: Any, **names: Any) -> None:
        mandatory.append(is_mandatory)
        raise LinkFailed("seen")

    monkeypatch.setattr(queue_link, "Relay", relay)
    here, there = Peer(NEVER, b""), Peer(NEVER, b"")
    path = str(tmp_path / "door")
    server = await asyncio.start_unix_server(here._talk, path)
    await there.serve()
    order = Order(link(uri=f"amqp://127.0.0.1:{there.port}", ack_mode=ack_mode), 1)
    runner = QueueLinkRunner(order, lambda: [path], lambda: None)
    try:
        with pytest.raises(LinkFailed, match="seen"):
            await asyncio.wait_for(runner._run_once(), 30)
        assert mandatory == [True]
    finally:
        server.close()
        there.close()


@pytest.mark.row("J11")
async def test_a_link_looks_at_its_queue_also_while_a_message_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = commands.Connection.Start(
        server_properties={"capabilities": {queue_link.NEEDED: True}},
        mechanisms="PLAIN",
        locales="en_US",
    )
    monkeypatch.setattr(test_hostile_peers, "START", encode_method(start))
    empty = commands.Queue.DeclareOk("q", 0, 0)
    monkeypatch.setitem(test_hostile_peers.ANSWERS, (50, 10), empty)
    without_body = delivery(2)[: -len(frame(3, 1, b"a"))]
    here, there = Peer(NEVER, b""), Peer((60, 20), b"", delivery(1) + without_body)
    path = str(tmp_path / "door")
    server = await asyncio.start_unix_server(here._talk, path)
    await there.serve()
    given = link(uri=f"amqp://127.0.0.1:{there.port}", ack_mode="no-ack", prefetch=1)
    runner = QueueLinkRunner(Order(given, 1), lambda: [path], lambda: None)
    runner.pull(True)
    running = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(30):
            while sum(isinstance(each, commands.Queue.Declare) for each in here.heard) < 2:
                await asyncio.sleep(0.001)
        published = [kind for kind, channel in here.frames if channel == 1]
        assert published == [1, 1, 2, 3, 1, 2], "channel.open and two messages, one of them cut"
        assert (1, 2) in here.frames
    finally:
        running.cancel()
        server.close()
        there.close()


class Shards:
    """Shards that answer with the numbers a test gave them; a silent one is not ready."""

    def __init__(self, queues: dict[int, QueueStats], consumers: list[ConsumerStats]) -> None:
        self.queues, self.consumers = queues, consumers
        self.shards = [SimpleNamespace(number=number, ready=number < 2) for number in range(3)]
        self.asked: list[int] = []  # how many queues
        self.silent: set[int] = set()
        self.answers: dict[int, asyncio.Future[StatsReply]] = {}

    def request(self, shard: int, message: Any, wait_s: float) -> asyncio.Future[StatsReply]:
        asked: Stats = message(1)
        assert asked.queues is not None and shard < 2
        assert asked.passed, "the numbers of the process are not needed"
        assert shard not in self.answers or self.answers[shard].done(), "one part at a time"
        self.asked.append(len(asked.queues))
        found = [self.queues[id] for id in asked.queues if id in self.queues]
        consumers = [each for each in self.consumers if each.queue in asked.queues]
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[StatsReply] = loop.create_future()
        self.answers[shard] = answer
        if shard in self.silent:
            answer.set_exception(ShardSilent("nothing comes"))
        else:
            loop.call_soon(answer.set_result, StatsReply(1, found, consumers, {}, 0))
        return answer


@pytest.mark.row("J11")
async def test_links_of_empty_queues_with_active_consumers_of_their_own_are_to_take_messages(
    pytestconfig: pytest.Config,
) -> None:
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        catalog = Catalog()
        catalog.apply(VhostPut("/"))
        stats: dict[int, QueueStats] = {}
        consumers: list[ConsumerStats] = []
        links, expected = [], []
        for id in range(1, chance.randrange(2, 6)):
            name, shard = f"q{id}", chance.randrange(3)
            is_paused, exists = chance.random() < 0.2, chance.random() < 0.9
            if exists:
                catalog.apply(QueuePut("/", name, id, shard, paused=is_paused))
            links += [link(name, upstream=each) for each in "ab"]
            ready = chance.choice([0, 0, 1])
            own = [
                ConsumerStats(
                    id, 0, 0, id, f"t{number}", False, False, 0, chance.random() < 0.7, priority,
                    chance.random() < 0.7,
                )
                for number, priority in enumerate(
                    chance.choices([-1, 0, 5], k=chance.randrange(3))
                )
            ]  # fmt: skip
            stats[id] = QueueStats(id, ready)
            consumers += own
            waits = any(each.active and each.priority >= 0 and each.wants for each in own)
            if waits and not ready and shard < 2 and exists and not is_paused:
                expected += [key_of(each) for each in links[-2:]]
        demand = Demand(catalog, cast(Any, Shards(stats, consumers)))
        assert await demand.pulling(links) == expected, history


@pytest.mark.row("J11")
async def test_a_shard_is_asked_about_many_queues_part_by_part_until_it_is_silent() -> None:
    catalog = Catalog()
    catalog.apply(VhostPut("/"))
    links = [link(f"q{id}") for id in range(1, 301)]
    for id, of in enumerate(links, 1):
        catalog.apply(QueuePut("/", of.queue, id, 0))
    stats = {id: QueueStats(id) for id in range(1, 301)}
    consumers = [ConsumerStats(id, 0, 0, id, "t", False, False, 0, True) for id in stats]
    shards = Shards(stats, consumers)
    demand = Demand(catalog, cast(Any, shards))
    assert await demand.pulling(links) == [key_of(each) for each in links]
    assert shards.asked == [128, 128, 44]
    shards.silent.add(0)
    shards.asked.clear()
    assert await demand.pulling(links) == []
    assert shards.asked == [128]
    assert [rest_s(took_s) for took_s in (0.001, 0.1, 60.0)] == [0.2, 2.0, 5.0]


@pytest.mark.row("J11")
async def test_a_consumer_of_a_virtual_queue_that_is_busy_at_one_shard_queue_is_busy() -> None:
    catalog = Catalog()
    catalog.apply(VhostPut("/"))
    catalog.apply(ExchangePut("/", "e", "x-modulus-hash"))
    for id in (1, 2):
        catalog.apply(QueuePut("/", f"e-{id}", id, 0, part=ShardOf("e", id - 1)))
    stats = {id: QueueStats(id) for id in (1, 2)}
    of = link("e", is_virtual=True)

    async def pulls(*wants: bool) -> bool:
        consumers = [
            ConsumerStats(id, 0, 0, 1, "t", False, False, 0, True, 0, each)
            for id, each in zip((1, 2), wants, strict=True)
        ]
        demand = Demand(catalog, cast(Any, Shards(stats, consumers)))
        return await demand.pulling([of]) == [key_of(of)]

    assert await pulls(True, True)
    assert not await pulls(True, False)
