"""Streams between nodes: who gets one, and what a relay hands on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.node_facts import NodeFacts
from shardmq.broker.controller.nodes import facts
from shardmq.broker.controller.nodes import relay as relays
from shardmq.broker.controller.nodes.facts import tell_facts
from shardmq.broker.controller.nodes.relay import CUT_OFF, CUT_OFF_CHANGE, NO_LEADER, SILENT, Relay
from shardmq.cluster.secret import Keys, keys_of, tls_context
from shardmq.cluster.streams import (
    CONTROL,
    FACTS,
    HTTP,
    OPENING_BYTES_MAX,
    UNREAD_S_MAX,
    UNTAKEN_S_MAX,
    Address,
    NoStream,
    Opening,
    OpeningProtocol,
    TooDifferent,
    open_stream,
)
from shardmq.cluster.versions import STREAMS, Range, disagreement, own_versions

KEYS = keys_of("a secret of many words", "coffee")
OTHER_KEYS = keys_of("another secret of many words", "coffee")
PATIENCE_S = 30.0
FACTS_OF_B = NodeFacts([], {}, 1, 2, 3, 4, "", 5, 6, "", [])


class Collected(asyncio.Protocol):
    """A service that keeps what comes, and answers each read when `echoes`."""

    def __init__(self, echoes: bool = False) -> None:
        self.transport: asyncio.Transport
        self.data = bytearray()
        self.peer: object = None
        self.came = asyncio.Event()
        self.over = asyncio.Event()
        self._echoes = echoes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer = transport.get_extra_info("peername")

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.came.set()
        if self._echoes:
            self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set()


def opening(
    service: str = CONTROL, peer: Address | None = None, own: Address | None = None
) -> Opening:
    return Opening(own_versions(), "coffee", "shardmq@b", service, peer, own)


class Leader:
    """The end that is connected to; it takes openings of the present versions for its services."""

    def __init__(self, keys: Keys = KEYS, echoes: bool = False) -> None:
        self.services: list[Collected] = []
        self.openings: list[Opening] = []
        self.taken = asyncio.Event()
        self._keys = keys
        self._echoes = echoes

    def accept(self, opening: Opening) -> asyncio.Protocol:
        if why := disagreement("a", own_versions(), "b", opening.versions):
            raise TooDifferent(why)
        self.openings.append(opening)
        self.services.append(Collected(self._echoes))
        self.taken.set()
        return self.services[-1]

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Address]:
        server = await asyncio.get_running_loop().create_server(
            lambda: OpeningProtocol(self.accept),
            "127.0.0.1",
            0,
            ssl=tls_context(self._keys, server=True),
        )
        yield server.sockets[0].getsockname()[:2]
        server.close()


async def test_an_opening_that_is_given_up_leaves_no_connection() -> None:
    asked, over = asyncio.Event(), asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        with contextlib.suppress(OSError):
            await reader.read()
        over.set()
        writer.close()

    tls = tls_context(KEYS, server=True)
    async with await asyncio.start_server(listen, "127.0.0.1", 0, ssl=tls) as server:
        address = server.sockets[0].getsockname()[:2]
        asking = asyncio.create_task(
            open_stream(address, tls_context(KEYS, server=False), opening(), Collected())
        )
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await over.wait()


async def test_a_service_gets_the_bytes_behind_the_opening_and_sees_the_client() -> None:
    leader, here = Leader(echoes=True), Collected()
    async with leader.listening() as address:
        asked = opening(HTTP, ("192.0.2.1", 4711), ("192.0.2.2", 15672))
        await open_stream(address, tls_context(KEYS, server=False), asked, here)
        here.transport.write(b"hello")
        async with asyncio.timeout(PATIENCE_S):
            await here.came.wait()
        assert (bytes(here.data), leader.openings) == (b"hello", [asked])
        assert leader.services[0].peer == ("192.0.2.1", 4711)
        here.transport.close()
        async with asyncio.timeout(PATIENCE_S):
            await leader.services[0].over.wait()


async def test_a_node_with_another_secret_gets_no_stream_either_way() -> None:
    for of_leader, of_node in ((KEYS, OTHER_KEYS), (OTHER_KEYS, KEYS)):
        leader = Leader(of_leader)
        async with leader.listening() as address:
            with pytest.raises(NoStream, match="another secret"):
                tls = tls_context(of_node, server=False)
                await open_stream(address, tls, opening(), Collected())
            assert leader.openings == []


async def test_a_client_without_the_certificate_gets_no_stream() -> None:
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    leader = Leader()
    async with leader.listening() as address:
        with pytest.raises(NoStream):
            await open_stream(address, stranger, opening(), Collected())
        assert leader.openings == []


async def test_the_reason_of_a_refusal_reaches_the_node() -> None:
    leader = Leader()
    async with leader.listening() as address:
        later = Range(STREAMS.most + 1, STREAMS.most + 2)
        asked = Opening(replace(own_versions(), streams=later), "coffee", "shardmq@b", CONTROL)
        with pytest.raises(TooDifferent, match=f"a understands {STREAMS} of .*, b {later}"):
            await open_stream(address, tls_context(KEYS, server=False), asked, Collected())


async def test_two_releases_speak_the_highest_version_that_both_understand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node that connects is later by one, then by two that it understands, then earlier."""
    monkeypatch.setattr("shardmq.cluster.streams.STREAMS", Range(3, 4))
    leader = Leader()
    for least, most, spoken in ((3, 5, 4), (4, 6, 4), (1, 3, 3)):
        versions = replace(own_versions(), streams=Range(least, most))
        services: list[Collected] = []

        def accept(opening: Opening, services: list[Collected] = services) -> Collected:
            services.append(Collected())
            return services[0]

        leader.accept = accept  # type: ignore[method-assign]
        async with leader.listening() as address:
            asked = Opening(versions, "coffee", "shardmq@b", CONTROL)
            tls = tls_context(KEYS, server=False)
            opened = await open_stream(address, tls, asked, Collected())
            assert opened.version == spoken
            assert services[0].transport.get_extra_info("version") == spoken
            opened.transport.close()
    for least, most in ((5, 6), (1, 2)):
        async with leader.listening() as address:
            versions = replace(own_versions(), streams=Range(least, most))
            asked = Opening(versions, "coffee", "shardmq@b", CONTROL)
            with pytest.raises(TooDifferent, match="understands versions 3 to 4 of the streams"):
                await open_stream(address, tls_context(KEYS, server=False), asked, Collected())


@pytest.mark.parametrize(
    "first",
    [b"no json\n", b"{}\n", b"x" * (OPENING_BYTES_MAX + 1), b'{"version":1}\nand more', b"\xff\n"],
    ids=["no json", "no fields", "too long", "more than a line", "no text"],
)
async def test_garbage_ends_a_stream(first: bytes) -> None:
    leader = Leader()
    async with leader.listening() as address, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(
            *address, ssl=tls_context(KEYS, server=False), server_hostname=""
        )
        writer.write(first)
        answer = await reader.read()
        assert answer == b"" or b'"error":"' in answer
        assert leader.openings == []
        writer.close()


async def test_an_end_that_is_no_node_is_told_from_one() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=tls_context(KEYS, server=True))
    address = server.sockets[0].getsockname()[:2]
    with pytest.raises(NoStream, match="does not speak as a node does"):
        await open_stream(address, tls_context(KEYS, server=False), opening(), Collected())
    server.close()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready, and no TLS at all\r\n")

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    with pytest.raises(NoStream):
        await open_stream(address, tls_context(KEYS, server=False), opening(), Collected())
    server.close()
    with pytest.raises(NoStream, match="refused"):
        await open_stream(address, tls_context(KEYS, server=False), opening(), Collected())


Wait = Callable[[float], Awaitable[Address | None]]


def relay_to(leader: Wait) -> Relay:
    return Relay(tls_context(KEYS, server=False), leader, opening, HttpLimits)


@contextlib.asynccontextmanager
async def relaying(
    leader: Wait, path: Path, relay: Relay | None = None
) -> AsyncIterator[tuple[Path, Address]]:
    """Run a relay; yield its Unix socket, for front doors, and its address for HTTP."""
    relay = relay or relay_to(leader)
    unix = path / "control.sock"
    await relay.listen_unix(unix, CONTROL, 0o700)
    listening = socket.create_server(("127.0.0.1", 0))
    await relay.listen(listening, HTTP)
    yield unix, listening.getsockname()[:2]
    await relay.close()


async def test_a_relay_hands_on_bytes_in_both_directions_and_the_ends(tmp_path: Path) -> None:
    """Some megabytes go both ways while either side reads late: nothing is lost or swapped."""
    leader, seed = Leader(echoes=True), random.randrange(1 << 32)
    print(f"seed {seed}")
    sent = random.Random(seed).randbytes(6 << 20)
    async with leader.listening() as address:

        async def leads(wait_s: float) -> Address:
            return address

        async with relaying(leads, tmp_path) as (unix, _), asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_unix_connection(unix)

            async def send() -> None:
                for start in range(0, len(sent), 100_000):
                    writer.write(sent[start : start + 100_000])
                    await writer.drain()

            sending = asyncio.create_task(send())
            got = await reader.readexactly(len(sent))
            await sending
            assert got == sent
            writer.close()
            await leader.services[0].over.wait()
            # The end of the leader ends the client.
            reader, writer = await asyncio.open_unix_connection(unix)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            leader.services[1].transport.abort()
            assert await reader.read() == b""
            writer.close()


@pytest.mark.row("K5")
async def test_a_client_by_tcp_is_shown_to_the_leader(tmp_path: Path) -> None:
    leader = Leader(echoes=True)
    async with leader.listening() as address:

        async def leads(wait_s: float) -> Address:
            return address

        async with relaying(leads, tmp_path) as (_, http), asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(*http)
            own = writer.get_extra_info("sockname")
            writer.write(b"GET")
            assert await reader.readexactly(3) == b"GET"
            assert (leader.openings[0].service, leader.openings[0].peer) == (HTTP, tuple(own))
            assert leader.openings[0].own == tuple(http)
            writer.close()


async def test_without_a_leader_http_says_so_and_a_front_door_is_closed(tmp_path: Path) -> None:
    async def nobody(wait_s: float) -> None:
        return None

    async with relaying(nobody, tmp_path) as (unix, http), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*http)
        assert await reader.read() == NO_LEADER
        writer.close()
        reader, writer = await asyncio.open_unix_connection(unix)
        assert await reader.read() == b""
        writer.close()


CALL = b"GET /api/overview HTTP/1.1\r\n\r\n"


PURGE = b"DELETE /api/queues/%2F/q/contents"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        pytest.param([b"GET /api/overview "], CUT_OFF, id="get"),
        pytest.param([b"HEAD /api/overview "], CUT_OFF, id="head"),
        pytest.param([b"PUT /api/queues/%2F/q "], CUT_OFF, id="put"),
        pytest.param([b"PU", b"T /api/queues/%2F/q "], CUT_OFF, id="put in two reads"),
        pytest.param([PURGE + b" "], CUT_OFF, id="purge of all"),
        pytest.param([PURGE + b"?count=4 "], CUT_OFF_CHANGE, id="purge of some"),
        pytest.param([PURGE + b"?a=b&count=4 "], CUT_OFF_CHANGE, id="purge of some, by a query"),
        pytest.param([PURGE + b"?" + b"a" * 4096], CUT_OFF_CHANGE, id="endless delete"),
        pytest.param([b"POST /api/queues/%2F/q/get "], CUT_OFF_CHANGE, id="post"),
        pytest.param([b"POST /GET /api "], CUT_OFF_CHANGE, id="post with a strange path"),
    ],
)
@pytest.mark.parametrize("ends", ["the leader is gone", "the record names another one"])
async def test_a_call_without_an_answer_gets_one_when_the_leader_ends(
    tmp_path: Path, ends: str, asked: list[bytes], answer: bytes
) -> None:
    """Only a call that may be carried out twice is to be made again."""
    assert (b"Retry-After" in answer) == answer.startswith(b"HTTP/1.1 503 ")
    leader = Leader()
    async with leader.listening() as address:

        async def leads(wait_s: float) -> Address:
            return address

        relay = relay_to(leads)
        relay.led_by("shardmq@a", 1)
        async with relaying(leads, tmp_path, relay) as (unix, http), asyncio.timeout(PATIENCE_S):
            calling, call = await asyncio.open_connection(*http)
            for part in asked:
                call.write(part)
                await asyncio.sleep(0)
            idle, _ = await asyncio.open_connection(*http)
            door, control = await asyncio.open_unix_connection(unix)
            control.write(b"hello")
            while sum(bool(each.data) for each in leader.services) < 2:
                await asyncio.sleep(0)
            while sum(end._joined is not None for end in relay._ends) < 3:
                await asyncio.sleep(0)
            if ends == "the leader is gone":
                for service in leader.services:
                    service.transport.abort()
            else:
                relay.led_by("shardmq@c", 2)
            assert await calling.read() == answer
            for other in (idle, door):  # no call is under way there
                with contextlib.suppress(ConnectionError):
                    assert await other.read() == b""


async def test_nothing_is_put_behind_a_part_of_an_answer(tmp_path: Path) -> None:
    leader = Leader()
    async with leader.listening() as address:

        async def leads(wait_s: float) -> Address:
            return address

        async with relaying(leads, tmp_path) as (_, http), asyncio.timeout(PATIENCE_S):
            calling, call = await asyncio.open_connection(*http)
            call.write(CALL)
            await leader.taken.wait()
            await leader.services[0].came.wait()
            leader.services[0].transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n[")
            assert (await calling.readexactly(41))[-1:] == b"["
            call.write(CALL)  # what the leader sent may have been the whole answer, or not
            leader.services[0].came.clear()
            await leader.services[0].came.wait()
            leader.services[0].transport.close()
            assert await calling.read() == b""


async def test_calls_that_wait_for_a_leader_are_answered_by_this_node_when_it_leads(
    tmp_path: Path,
) -> None:
    own, is_up = Leader(echoes=True), asyncio.Event()
    async with own.listening() as address:

        async def leads(wait_s: float) -> Address:
            await is_up.wait()
            return address

        relay = relay_to(leads)
        relay.led_by("shardmq@a", 1)
        async with relaying(leads, tmp_path, relay) as (unix, http), asyncio.timeout(PATIENCE_S):
            before, call = await asyncio.open_connection(*http)
            call.write(CALL)
            door, _ = await asyncio.open_unix_connection(unix)
            while len(relay._ends) < 2:
                await asyncio.sleep(0)
            relay.lead_begins("shardmq@b", 2)
            with contextlib.suppress(ConnectionError):
                assert await door.read() == b"", "front doors come to the controller itself"
            with pytest.raises(ConnectionError):
                await asyncio.open_unix_connection(unix)
            while_it_starts, second = await asyncio.open_connection(*http)
            second.write(CALL)
            while len(relay._ends) < 2:
                await asyncio.sleep(0)
            is_up.set()
            relay.lead_has_begun()
            assert await before.readexactly(len(CALL)) == CALL
            assert await while_it_starts.readexactly(len(CALL)) == CALL
            assert [opening.service for opening in own.openings] == [HTTP, HTTP]


async def test_a_leader_that_takes_streams_and_is_silent_is_told_of_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LEADER_S_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as frozen:

        async def leads(wait_s: float) -> Address:
            host, port = frozen.getsockname()
            return host, port

        async with relaying(leads, tmp_path) as (_, http), asyncio.timeout(2.0):
            calling, call = await asyncio.open_connection(*http)
            call.write(CALL)
            assert await calling.read() == SILENT


async def test_a_stream_finds_the_next_leader(tmp_path: Path) -> None:
    """The address of a leader that is gone is given at first, and then that of the next one."""
    leader = Leader(echoes=True)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        before = gone.getsockname()[:2]
    async with leader.listening() as address:
        given = iter([before, before, address])

        async def leads(wait_s: float) -> Address:
            return next(given)

        async with relaying(leads, tmp_path) as (unix, _), asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_unix_connection(unix)
            writer.write(os.urandom(10))
            assert len(await reader.readexactly(10)) == 10
            writer.close()


async def test_streams_leave_a_leader_that_the_record_does_not_name_any_more(
    tmp_path: Path,
) -> None:
    """The leader of before is alive and ends nothing, as when it is cut off from etcd only."""
    before, after = Leader(echoes=True), Leader(echoes=True)
    async with before.listening() as old, after.listening() as new:
        leading = [old]

        async def leads(wait_s: float) -> Address:
            return leading[0]

        relay = relay_to(leads)
        relay.led_by("shardmq@a", 1)
        async with relaying(leads, tmp_path, relay) as (unix, _), asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_unix_connection(unix)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            relay.led_by("shardmq@a", 1)
            writer.write(b"two")
            assert await reader.readexactly(3) == b"two"
            leading[0] = new
            relay.led_by("shardmq@c", 2)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            await before.services[0].over.wait()
            writer.close()
            reader, writer = await asyncio.open_unix_connection(unix)
            writer.write(b"three")
            assert await reader.readexactly(5) == b"three"
            assert (len(before.services), len(after.services)) == (1, 1)
            writer.close()


async def test_a_stream_to_a_leader_that_is_replaced_meanwhile_is_not_joined(
    tmp_path: Path,
) -> None:
    before, after = Leader(echoes=True), Leader(echoes=True)
    async with before.listening() as old, after.listening() as new:
        leading = [old]

        async def leads(wait_s: float) -> Address:
            return leading[0]

        relay = relay_to(leads)
        relay.led_by("shardmq@a", 1)
        accept = before.accept

        def replaced(opening: Opening) -> asyncio.Protocol:
            leading[0] = new
            relay.led_by("shardmq@c", 2)
            return accept(opening)

        before.accept = replaced  # type: ignore[method-assign]
        async with relaying(leads, tmp_path, relay) as (unix, _), asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_unix_connection(unix)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            assert bytes(after.services[0].data) == b"one"
            assert before.services[0].data == b""
            writer.close()


async def test_facts_are_told_to_the_next_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmq.broker.controller.nodes.facts.LOOK_S", 0)
    before, after = Leader(), Leader()
    async with before.listening() as old, after.listening() as new:
        lead, address = [("shardmq@a", 1)], [old]

        async def leads(wait_s: float) -> Address:
            return address[0]

        def connect(address: Address, protocol: asyncio.Protocol) -> Awaitable[object]:
            tls = tls_context(KEYS, server=False)
            return open_stream(address, tls, opening(FACTS), protocol)

        telling = asyncio.create_task(
            tell_facts(lambda: FACTS_OF_B, leads, connect, lambda: lead[0])
        )
        async with asyncio.timeout(PATIENCE_S):
            await before.taken.wait()
            await before.services[0].came.wait()
            lead[0], address[0] = ("shardmq@c", 2), new
            await before.services[0].over.wait()
            await after.taken.wait()
            await after.services[0].came.wait()
        telling.cancel()


async def test_facts_are_told_again_when_there_is_news_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "LOOK_S", 0)
    leader, told, looks, looked = Leader(), list[str](), 0, asyncio.Event()
    async with leader.listening() as address, asyncio.timeout(PATIENCE_S):

        async def leads(wait_s: float) -> Address:
            return address

        def connect(address: Address, protocol: asyncio.Protocol) -> Awaitable[object]:
            tls = tls_context(KEYS, server=False)
            return open_stream(address, tls, opening(FACTS), protocol)

        def facts_now() -> NodeFacts:
            told.append(alarm)
            return FACTS_OF_B

        def news() -> str:
            nonlocal looks
            looks += 1
            looked.set()
            return alarm

        async def look(times: int) -> None:
            until = looks + times
            while looks < until:
                looked.clear()
                await looked.wait()

        alarm = ""
        telling = asyncio.create_task(tell_facts(facts_now, leads, connect, news=news))
        await leader.taken.wait()
        await look(20)
        assert told == [""]
        alarm = "low on memory"
        await look(20)
        assert told == ["", alarm]
        monkeypatch.setattr(facts, "EACH_S", 0)
        alarm = ""  # `EACH_S` counts from the next time on
        await look(20)
        assert told.count("") > 2
        telling.cancel()


@pytest.mark.parametrize("service", [CONTROL, HTTP])
async def test_a_host_that_vanishes_is_noticed_by_both_ends(service: str) -> None:
    """No packet says that a host has lost its power, so the kernel has to ask and to give up."""
    leader, here = Leader(), Collected()
    async with leader.listening() as address, asyncio.timeout(PATIENCE_S):
        tls = tls_context(KEYS, server=False)
        await open_stream(address, tls, opening(service), here)
        inner = leader.services[0].transport._inner  # type: ignore[attr-defined]
        for transport in (here.transport, inner):
            end = transport.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
            untaken = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert untaken == 1000 * (UNTAKEN_S_MAX if service == CONTROL else UNREAD_S_MAX)
        here.transport.close()
