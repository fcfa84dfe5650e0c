"""What a client is told last reaches it, whatever it was still saying."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.connection.output import Output, close_behind_output
from shardmq.broker.front_door.hot_state import Due, LinkState
from shardmq.shardd.wire.lane import body_memory
from tests.connections.test_socket import Made


@pytest.mark.parametrize("shut", [True, False])
async def test_last_words_are_read_though_the_client_was_still_talking(shut: bool) -> None:
    loop = asyncio.get_running_loop()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        sock, _ = server.accept()
        sock.setblocking(False)
        client.sendall(b"x" * 100_000)  # never read before the close
        output = Output()
        output.add(b"close-ok")
        assert output.write(sock)
        close_behind_output(loop, sock, shut)
        client.setblocking(False)
        assert await loop.sock_recv(client, 100) == b"close-ok"
        await loop.sock_sendall(client, b"y" * 100_000)
        if shut:
            assert await loop.sock_recv(client, 100) == b""
        client.shutdown(socket.SHUT_WR)
        while sock.fileno() >= 0:
            await asyncio.sleep(0)


class Slow:
    """A socket that takes as many bytes as it is told to, then none."""

    def __init__(self) -> None:
        self.taken = b""
        self.room = 0

    def send(self, data: bytes | memoryview) -> int:
        return self.sendmsg([data])

    def sendmsg(self, chunks: list[bytes | memoryview]) -> int:
        some = b"".join(chunks)[: self.room]
        if not some:
            raise BlockingIOError
        self.taken += some
        self.room -= len(some)
        return len(some)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.binary(max_size=9), st.booleans()), min_size=1, max_size=4),
            st.integers(0, 20),
        ),
        max_size=8,
    )
)
def test_what_was_lent_is_written_though_its_lender_changes_it(
    steps: list[tuple[list[tuple[bytes, bool]], int]],
) -> None:
    output, slow, said = Output(), Slow(), b""
    sock: Any = slow
    for parts, room in steps:
        lent = [bytearray(part) for part, is_lent in parts if is_lent]
        views = iter(lent)
        output.add_parts_then_credit(
            [memoryview(next(views)) if is_lent else part for part, is_lent in parts],
            0,
            0,
            len(parts),
        )
        said += b"".join(part for part, _ in parts)
        slow.room = room
        output.write(sock)
        output.own()
        for each in lent:
            each[:] = bytes(len(each))
    slow.room = len(said) + 1
    output.write(sock)
    assert slow.taken == said
    assert sum(credit for _, _, credit in output.take_credits()) == sum(
        len(parts) for parts, _ in steps
    )


def test_lent_bodies_that_a_client_does_not_take_are_copied() -> None:
    memory = body_memory(1 << 20, 1)
    run = memory.take(50_000)
    assert run is not None
    body = memoryview(run)
    body[:] = b"b" * len(body)
    output = Output()
    output.add_parts_then_credit([b"head", body[:20_000], b"next", body[20_000:]], 0, 1, 50_000)
    output.own()  # the memory of a ring changes, that of lent bodies does not
    del run, body
    assert memory.held_bytes
    output.own_lent()
    assert memory.held_bytes, "they came since the last call"
    output.own_lent()
    assert memory.held_bytes == 0
    assert b"".join(output.chunks) == b"head" + b"b" * 20_000 + b"next" + b"b" * 30_000


@pytest.mark.parametrize("seed", range(20))
def test_a_socket_of_the_kernel_gets_the_same_bytes_and_gives_the_credit_back(seed: int) -> None:
    """Play a client that reads slowly, on a socket with little room."""
    rng = random.Random(seed)
    made = Made()
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = made.socket
    client.sock, client.fd, client.is_plain = near, near.fileno(), True
    link = LinkState()
    link.credits, link.due, link.epoch = {}, Due(), 1
    client.link_of = [link]
    said = got = b""
    credit = 0
    for _ in range(200):
        data = rng.randbytes(rng.choice([1, 21, 300, 9000]))
        if rng.random() < 0.5:
            client.write(data)
        else:
            client.output.add_then_credit(data, 0, 1, len(data))
            credit += len(data)
            client.write(b"x")
            data += b"x"
        said += data
        if rng.random() < 0.6:
            made.aio.run()
        if rng.random() < 0.4:
            with suppress(BlockingIOError):
                got += far.recv(rng.choice([10, 5000, 100_000]))
        if client.is_writing and rng.random() < 0.5:
            made.aio.writers[near.fileno()]()
    made.aio.run()
    while len(got) < len(said):
        with suppress(BlockingIOError):
            got += far.recv(100_000)
        if client.is_writing:
            made.aio.writers[near.fileno()]()
    made.aio.run()
    assert got == said
    assert client.output.pending == 0 and client.output.written == len(said)
    back = link.credits.get(client.id, 0) + sum(each[3] for each in made.shards.credits)
    assert back == credit
    near.close()
    made.socket.flush()
    assert made.ends == 0, "there is nothing to write"
    client.write(b"more")
    made.aio.run()
    assert made.ends == 1, "the kernel has no such socket any more"
    far.close()
