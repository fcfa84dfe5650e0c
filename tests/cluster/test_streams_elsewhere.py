"""Streams of other nodes: where they end, their reader, and tickets for clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from shardmq.broker.controller.nodes.own_streams import OwnStreams
from shardmq.broker.controller.nodes.request_head import HEAD_S_MAX, RequestHead
from shardmq.broker.controller.streams import elsewhere as elsewhere_module
from shardmq.broker.controller.streams.boards import Wanted
from shardmq.broker.controller.streams.elsewhere import Connection, Elsewhere, Watch
from shardmq.broker.controller.streams.stream_reader import ReaderConnection, ReaderLost, connected
from shardmq.broker.controller.streams.tickets import VALID_S, Tickets
from shardmq.cluster.records import Node
from shardmq.cluster.secret import keys_of, tls_context
from shardmq.cluster.streams import NoStream, Opening, OpeningProtocol, open_stream
from shardmq.cluster.versions import own_versions
from shardmq.shardd.wire.board import Board, Range, path_of
from shardmq.shardd.wire.reader_protocol import (
    DONE,
    LENGTH,
    NO_COPY,
    Answer,
    Find,
    Scan,
    socket_path,
)

KEYS = keys_of("a secret of many words", "coffee")
TICKETS = Tickets(KEYS.ticket_key)
HERE, THERE = 0, 1  # the numbers of two nodes, which have the shards of the same numbers
SCAN = Scan("/", THERE, 7, "orders", 0, ["offset", "value"], 3, 9, key="\x00é" * 100)
PATIENCE_S = 30.0


# -- tickets -----------------------------------------------------------------------------------


def test_a_ticket_says_what_was_signed_for_a_while() -> None:
    text = TICKETS.text("an id", SCAN, 1000.0)
    ticket = TICKETS.read(text, 1000.0 + VALID_S - 1)
    assert ticket is not None
    assert (ticket.id, ticket.scan) == ("an id", SCAN)
    assert TICKETS.read(text, 1000.0 + VALID_S) is None
    assert Tickets(keys_of("another secret", "coffee").ticket_key).read(text, 1000.0) is None


def test_no_changed_text_is_a_ticket() -> None:
    text, seed = TICKETS.text("an id", SCAN, 1000.0), random.randrange(1 << 32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    for _ in range(300):
        at = chosen.randrange(len(text) - 1)  # the last letter has bits that say nothing
        other = chosen.choice("ABCabc019-_=.é")
        if other != text[at]:
            assert TICKETS.read(text[:at] + other + text[at + 1 :], 1000.0) is None
    for nothing in ("", "A", "é", "A" * 100, text[:-4], text * 40):
        assert TICKETS.read(nothing, 1000.0) is None


# -- two nodes -----------------------------------------------------------------------------------


class Copies:
    """The copies at the node: `name` is that of the one that has all; "" if there is none."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.name = ""
        self.members: list[str] = []

    def in_sync(self, shard: int) -> list[str]:
        return self.members

    async def own(self, shard: int) -> str:
        return self.name

    def reader(self) -> contextlib.AbstractAsyncContextManager[ReaderConnection]:
        return connected(self._directory)


class There:
    """The node that has a stream, and the way to it from another node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.board = Board(path_of(str(directory), THERE))
        self.board.show()
        self.connected = 0
        self.nodes: dict[int, Node] = {}
        self.copies = Copies(str(directory))
        self.owners = {HERE: HERE, THERE: THERE}
        self.elsewhere = Elsewhere(
            HERE, TICKETS, self.nodes, self.owners, self._connect, self.copies
        )
        own = Elsewhere(THERE, TICKETS, self.nodes, self.owners, self._connect, self.copies)
        self.streams = OwnStreams(str(directory), TICKETS, lambda shard: shard == THERE, own)

    async def _connect(self, node: Node, service: str) -> Connection:
        self.connected += 1
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        opening = Opening(own_versions(), "coffee", "shardmq@a", service)
        address = node.address, node.ports["cluster"]
        stream = await open_stream(address, tls_context(KEYS, server=False), opening, protocol)
        writer = asyncio.StreamWriter(
            stream.transport, protocol, reader, asyncio.get_running_loop()
        )
        return reader, writer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.streams.start()
        server = await asyncio.get_running_loop().create_server(
            lambda: OpeningProtocol(lambda opening: self.streams.connection(opening.service)),
            "127.0.0.1",
            0,
            ssl=tls_context(KEYS, server=True),
        )
        ports = {"cluster": server.sockets[0].getsockname()[1], "http": 15672}
        self.nodes[THERE] = Node(THERE, "shardmq@b", "127.0.0.1", ports, "1", 1, 1)
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield
        finally:
            server.close()
            await self.streams.close()


@pytest.fixture
def there(tmp_path: Path) -> There:
    return There(tmp_path)


async def test_the_ranges_of_another_node_are_asked_by_one_stream(there: There) -> None:
    there.board.put(7, 3, 9)
    there.board.put(8, 0, 1)
    async with there.running():
        wanted = [Wanted(THERE, id) for id in (7, 8, 9)]
        for _ in range(3):
            assert await there.elsewhere.ranges(wanted) == {7: Range(3, 9), 8: Range(0, 1)}
        assert there.connected == 1


async def test_a_watch_says_when_a_stream_of_another_node_goes_on(there: There) -> None:
    there.board.put(7, 0, 9)
    async with there.running():
        watch, wanted = Watch(there.elsewhere), [Wanted(THERE, 7, 9)]
        for _ in range(20):
            assert not watch.has_news(wanted)
            await asyncio.sleep(0.01)
        there.board.put(7, 0, 10)
        while not watch.has_news(wanted):
            await asyncio.sleep(0.01)
        assert there.connected == 1
        await asyncio.gather(*there.elsewhere._asking)


async def test_a_node_that_is_gone_has_no_ranges(
    there: There, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.board.put(7, 0, 9)
    wanted = [Wanted(THERE, 7)]
    async with there.running():
        assert await there.elsewhere.ranges(wanted)
    assert await there.elsewhere.ranges(wanted) == {}
    assert await there.elsewhere.ranges(wanted) == {}
    assert caplog.text.count("shardmq@b does not say where its streams end") <= 2
    there.nodes.clear()
    assert await there.elsewhere.ranges(wanted) == {}
    with pytest.raises(ReaderLost, match="shard 1 is away"):
        async with there.elsewhere.reader(THERE):
            pass
    # A node that is stopped says nothing.
    monkeypatch.setattr(elsewhere_module, "ANSWER_S_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = {"cluster": silent.getsockname()[1]}
        there.nodes[THERE] = Node(THERE, "shardmq@b", "127.0.0.1", ports, "1", 1, 2)
        assert await there.elsewhere.ranges(wanted) == {}


async def test_the_reader_of_another_node_answers(there: There) -> None:
    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])
        said = b'{"status":200,"more":{"offset":5}}'
        writer.write(LENGTH.pack(len(said)) + said)
        if await reader.read(1) == b"P":
            for part in (b"some rows", b"x" * 300_000, b""):
                writer.write(LENGTH.pack(len(part)) + part)
        writer.close()

    async with there.running():
        with pytest.raises(ReaderLost, match="reader of streams is not there"):
            async with there.elsewhere.reader(THERE):
                pass
        server = await asyncio.start_unix_server(read, socket_path(str(there.directory)))
        async with there.elsewhere.reader(THERE) as reader:
            answer = await reader.ask(Find("/", THERE, 7, 0))
            assert answer == Answer(200, more={"offset": 5})
            assert not await reader.hand_over(0)  # no descriptor goes to another host
            parts = [part async for part in reader.parts()]
        assert b"".join(parts) == b"some rows" + b"x" * 300_000
        server.close()
    assert DONE not in parts


# -- a client who was sent to the node of a stream -----------------------------------------------


class Relayed(asyncio.Protocol):
    """The leader, behind a relay: it answers each request with its bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(b"by the leader: ")

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)
        self._transport.close()


async def said(there: There, *pieces: bytes) -> bytes:
    """Return what a client gets who sends these pieces, one after the other."""
    server = await asyncio.get_running_loop().create_server(
        lambda: RequestHead((there.streams,), Relayed), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.01)
    answer = await reader.read()
    writer.close()
    server.close()
    return answer


def request(scan: Scan, made_s: float) -> bytes:
    ticket = TICKETS.text("an id", scan, made_s)
    return f"GET /stream-rows/{ticket} HTTP/1.1\r\nHost: b\r\n\r\n".encode()


async def test_a_ticket_is_served_where_the_stream_is(there: There) -> None:
    async with there.running():
        asked = request(SCAN, time.time())
        for pieces in ([asked], [asked[:1], asked[1:20], asked[20:-2], asked[-2:]]):
            answer = await said(there, *pieces)
            # There is no reader here. What a reader says is tested with real nodes.
            assert answer.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 501 "))
            assert b"Connection: close" in answer


@pytest.mark.parametrize("which", ["old", "of another shard", "wrong", "no ticket", "half"])
async def test_the_leader_gets_what_is_not_for_this_node(there: There, which: str) -> None:
    now = time.time()
    asked = {
        "old": request(SCAN, now - VALID_S - 1),
        "of another shard": request(Scan("/", HERE, 7, "orders", 0, []), now),
        "wrong": request(SCAN, now)[:-30] + b"aa HTTP/1.1\r\nHost: b\r\n\r\n",
        "no ticket": b"GET /api/overview HTTP/1.1\r\n",
        "half": request(SCAN, now)[:-2],
    }[which]
    async with there.running():
        began = time.monotonic()
        assert await said(there, asked) == b"by the leader: " + asked
        waited = time.monotonic() - began > HEAD_S_MAX / 2
        assert waited == (which == "half")


OF_COPY = msgspec.structs.replace(SCAN, shard=HERE, there=(0, 9))


@pytest.mark.parametrize("name", ["the copy", ""])
async def test_a_ticket_for_a_copy_leads_to_the_copy_or_to_the_leader(
    there: There, name: str
) -> None:
    """The node follows. Its reader refuses, so the leader of the shard gives the rows."""
    asked: list[Scan] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
        asked.append(msgspec.json.decode(await reader.readexactly(length), type=Scan))
        text = msgspec.json.encode(Answer(NO_COPY, "no_copy", "it is compared anew"))
        writer.write(LENGTH.pack(len(text)) + text)
        writer.close()

    there.copies.name = name
    async with there.running():
        server = await asyncio.start_unix_server(refuse, socket_path(str(there.directory)))
        there.nodes[HERE] = Node(HERE, "shardmq@a", "192.0.2.1", {"http": 80}, "1", 1, 1)
        answer = await said(there, request(OF_COPY, time.time()))
        server.close()
    assert answer.startswith(b"HTTP/1.1 307 ")
    location = answer.partition(b"Location: ")[2].partition(b"\r\n")[0].decode()
    assert location.startswith("http://192.0.2.1:80/stream-rows/")
    ticket = TICKETS.read(location.rpartition("/")[2], time.time())
    assert ticket is not None and ticket.id == "an id"
    assert ticket.scan == msgspec.structs.replace(OF_COPY, there=None)
    wanted = [msgspec.structs.replace(OF_COPY, copy=name)] if name else []
    assert asked == wanted, "a copy that is not in sync is not read"


async def test_the_node_that_is_near_is_read_or_always_the_same_one(there: There) -> None:
    for number, name, ports in (
        (0, "a", {"http": 1}), (1, "b", {"http": 1}), (2, "c", {"http": 1, "https": 2}),
        (3, "d", {"http": 1}),
    ):  # fmt: skip
        there.nodes[number] = Node(number, name, "192.0.2.1", ports, "1", 1, 1)
    there.copies.members = ["a", "b", "c", "gone"]  # d has no copy, and the leader is b
    find = there.elsewhere.follower
    near = [node.name for name in "abcd" if (node := find(THERE, "http", 4, name)) is not None]
    assert near == ["a", "a", "c", "a"]
    spread = [find(THERE, "http", id, "") for id in range(9)]
    assert {node.name for node in spread if node is not None} == {"a", "c"}
    found = find(THERE, "https", 4, "a")
    assert found is not None and found.name == "c"
    there.copies.members = ["b"]
    assert find(THERE, "http", 4, "a") is None
    there.elsewhere.copies = None
    assert find(THERE, "http", 4, "a") is None


async def test_who_says_nothing_is_handed_on(there: There) -> None:
    async with there.running():
        server = await asyncio.get_running_loop().create_server(
            lambda: RequestHead((there.streams,), Relayed), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        assert await reader.readexactly(15) == b"by the leader: "
        writer.close()
        server.close()


async def test_urls_name_the_node_and_its_scheme(there: There) -> None:
    ports = {"http": 15672, "https": 15671}
    there.nodes[THERE] = node = Node(THERE, "shardmq@b", "fd00::1", ports, "1", 1, 1)
    there.nodes[HERE] = other = Node(HERE, "shardmq@a", "192.0.2.1", {"http": 80}, "1", 1, 1)
    urls = there.elsewhere.addresses()
    assert urls == {
        "shardmq@a": ["http://192.0.2.1:80"],
        "shardmq@b": ["http://[fd00::1]:15672", "https://[fd00::1]:15671"],
    }
    url = there.elsewhere.url(node, "https", "an id", SCAN)
    assert url is not None
    assert url.startswith("https://[fd00::1]:15671/stream-rows/")
    assert there.elsewhere.url(other, "https", "an id", SCAN) is None


async def test_a_strange_stream_ends(there: There) -> None:
    async with there.running():
        reader, writer = await there._connect(there.nodes[THERE], "ranges")
        writer.write(b"no json\n")
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(NoStream, match="not there"):
            await there._connect(there.nodes[THERE], "reader")
