"""A TLS socket behaves as a plain non-blocking socket does, also in its readiness."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.connection.output import Output
from shardmq.broker.front_door.tls import RECORD_BYTES_MAX, WRITE_BYTES_MAX, Handshake, TlsSocket
from shardmq.broker.shared.certificates import Certificates
from shardmq.broker.shared.config import Tls
from tests.support.certificates import Authority
from tests.support.readable import is_readable

READ_BYTES = 64 << 10
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def context(authority: Authority) -> ssl.SSLContext:
    path: Path = authority.make("server.pem", "CN=localhost", hosts=("localhost",))
    return Certificates(Tls(cert=str(path))).context


class Pair:
    """Both ends of a connection, shaken hands. The client never blocks either."""

    def __init__(
        self, authority: Authority, context: ssl.SSLContext, version: ssl.TLSVersion
    ) -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        self.raw = ours
        self.server = TlsSocket(ours, context)
        trusting = ssl.create_default_context(cafile=str(authority.ca))
        trusting.maximum_version = version
        self.client = trusting.wrap_socket(
            theirs, server_hostname="localhost", do_handshake_on_connect=False
        )
        self.buffer = memoryview(bytearray(READ_BYTES))
        done = greeted = False
        while not (done and greeted):
            try:
                self.client.do_handshake()
                greeted = True
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            done = done or self.server.shake_hands()
            self.server.flush()

    def close(self) -> None:
        self.client.close()
        self.server.close()

    def read(self) -> bytes:
        """All that the server reads while its descriptor says that there is something."""
        got = b""
        while is_readable(self.raw):
            try:
                count = self.server.recv_into(self.buffer)
            except BlockingIOError:
                continue
            if not count:
                break
            got += self.buffer[:count]
        return got

    def receive(self) -> bytes:
        """All that the client reads."""
        got = b""
        try:
            while more := self.client.recv(READ_BYTES):
                got += more
        except ssl.SSLWantReadError:
            pass
        return got

    def client_sends(self, data: bytes) -> int:
        try:
            return self.client.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0


@pytest.fixture(params=VERSIONS, ids=["tls 1.2", "tls 1.3"])
def pair(
    request: pytest.FixtureRequest, authority: Authority, context: ssl.SSLContext
) -> Iterator[Pair]:
    made = Pair(authority, context, request.param)
    yield made
    made.close()


@given(chunks=st.lists(st.integers(1, 200_000), max_size=8), version=st.sampled_from(VERSIONS))
def test_what_a_client_sends_is_read_as_soon_as_the_descriptor_says_so(
    authority: Authority, context: ssl.SSLContext, chunks: list[int], version: ssl.TLSVersion
) -> None:
    pair = Pair(authority, context, version)
    sent = b"".join(bytes([at % 251]) * size for at, size in enumerate(chunks))
    left, got = sent, b""
    while left:
        count = pair.client_sends(left)
        left = left[count:]
        if not count:
            got += pair.read()
    assert got + pair.read() == sent  # nothing waits inside for a readiness that does not come
    pair.close()


@given(chunks=st.lists(st.integers(1, 200_000), max_size=12), version=st.sampled_from(VERSIONS))
def test_what_an_output_writes_reaches_the_client_in_order_and_is_counted_when_the_kernel_has_it(
    authority: Authority, context: ssl.SSLContext, chunks: list[int], version: ssl.TLSVersion
) -> None:
    pair = Pair(authority, context, version)
    data = [bytes([at % 251]) * size for at, size in enumerate(chunks)]
    output, waiting, got = Output(), deque(data), b""
    while waiting or output.pending:
        if waiting:
            output.add(waiting.popleft())
        if not output.write(pair.server):
            got += pair.receive()
    assert got + pair.receive() == b"".join(data)
    assert output.written == sum(chunks)
    pair.close()


def test_bytes_are_not_said_to_be_sent_while_their_ciphertext_waits(pair: Pair) -> None:
    data = b"x" * WRITE_BYTES_MAX
    with pytest.raises(BlockingIOError):
        pair.server.send(data)
    got = b""
    while len(got) < len(data):
        got += pair.receive()
        try:
            assert pair.server.send(data) == len(data)
            break
        except BlockingIOError:
            continue
    while len(got) < len(data):
        got += pair.receive()
    assert got == data


def test_the_end_of_a_stream_is_read_after_its_last_bytes(pair: Pair) -> None:
    pair.client.send(b"last words")
    pair.client.close()
    assert pair.read() == b"last words"
    assert pair.server.recv_into(pair.buffer) == 0


def test_a_client_that_goes_without_a_farewell_is_a_stream_that_ends(pair: Pair) -> None:
    pair.client.send(b"last words")
    socket.socket(fileno=pair.client.detach()).close()
    assert pair.read() == b"last words"
    assert pair.server.recv_into(pair.buffer) == 0


def test_the_client_hears_that_the_stream_ends_properly(pair: Pair) -> None:
    pair.server.send(b"close-ok")
    pair.server.close()
    assert pair.client.recv(100) == b"close-ok"
    assert pair.client.recv(100) == b""  # SSLEOFError without a close_notify


def test_broken_records_end_the_connection(pair: Pair) -> None:
    plain = socket.socket(fileno=pair.client.detach())
    plain.send(b"\x17\x03\x03\x00\x40" + b"garbage!" * 8)
    with pytest.raises(ssl.SSLError):
        pair.server.recv_into(pair.buffer)
    plain.close()


def test_a_read_leaves_room_for_a_record_that_had_begun_before(pair: Pair) -> None:
    """Otherwise decrypted bytes might stay inside, with nothing to say that they are there."""
    whole = b"y" * (2 * READ_BYTES)
    left, got = whole, b""
    while left:
        left = left[pair.client_sends(left[: 16 << 10]) :]
        if is_readable(pair.raw):
            try:
                got += pair.buffer[: pair.server.recv_into(pair.buffer)]
            except BlockingIOError:
                pass
    assert got + pair.read() == whole
    assert READ_BYTES > 2 * RECORD_BYTES_MAX


# -- before a client is one ------------------------------------------------------------------------


class Entrance:
    """A handshake on one end of a pair; `outcome`: whether it got in."""

    def __init__(self, context: ssl.SSLContext, timeout_s: float = 60.0) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[bool] = loop.create_future()
        self.handshake = Handshake(
            loop,
            ours,
            ("10.0.0.7", 1234),
            context,
            timeout_s=timeout_s,
            entered=lambda _: self.outcome.set_result(True),
            left=lambda _: self.outcome.set_result(False),
        )


@pytest.mark.parametrize(
    "said",
    [
        b"AMQP\x00\x00\x09\x01",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 64,
        b"\xff" * 70_000,
        b"\x16\x03\x01\x00\x05hello",
    ],
    ids=["plain amqp", "http", "zeroes", "ones", "half a hello"],
)
async def test_what_is_no_handshake_is_hung_up_on(context: ssl.SSLContext, said: bytes) -> None:
    entrance = Entrance(context)
    loop = asyncio.get_running_loop()
    entrance.theirs.setblocking(False)
    sending = loop.create_task(loop.sock_sendall(entrance.theirs, said))
    assert not await entrance.outcome
    assert entrance.handshake.sock.fileno() == -1
    sending.cancel()
    entrance.theirs.close()


async def test_who_leaves_or_says_nothing_is_forgotten(context: ssl.SSLContext) -> None:
    leaving, silent = Entrance(context), Entrance(context, timeout_s=0.0)
    leaving.theirs.close()
    assert not await leaving.outcome
    assert not await silent.outcome
    assert silent.theirs.recv(1) == b""
    silent.theirs.close()


async def test_a_client_gets_in_though_its_hello_comes_byte_by_byte(
    authority: Authority, context: ssl.SSLContext
) -> None:
    entrance, loop = Entrance(context), asyncio.get_running_loop()
    entrance.theirs.setblocking(False)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    client = trusting.wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            for byte in outgoing.read():
                await loop.sock_sendall(entrance.theirs, bytes([byte]))
                await asyncio.sleep(0)
            incoming.write(await loop.sock_recv(entrance.theirs, 1 << 16))
    await loop.sock_sendall(entrance.theirs, outgoing.read())
    assert await entrance.outcome
    assert entrance.handshake.sock.version() == "tlsv1.3"
    entrance.handshake.sock.close()
    entrance.theirs.close()
