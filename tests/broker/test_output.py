"""What a client is told last reaches it, whatever it was still saying."""

from __future__ import annotations

import asyncio
import socket

import pytest

from broker.output import Output, close_behind_output


@pytest.mark.parametrize("shut", [True, False])
async def test_last_words_are_read_though_the_client_was_still_talking(shut: bool) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
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
