"""HTTP connections are bounded, whoever opens them and however little they say; calls under way are left alone."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from broker.controller.management import call, callers
from broker.controller.management.callers import CONNECTIONS_MAX, IDLE_S_MAX, Callers, superfluous
from tests.management.conftest import Api

ages = st.lists(st.floats(0, 2 * IDLE_S_MAX), max_size=50)


@given(ages, st.integers(0, 2 * CONNECTIONS_MAX))
def test_the_longest_idle_go_and_no_more_than_must(idle: list[float], calling: int) -> None:
    since: dict[Any, float] = {number: -age for number, age in enumerate(idle)}
    gone = superfluous(since, len(idle) + calling, 0.0)
    stay = since.keys() - set(gone)
    assert len(gone) == len(set(gone))
    assert all(idle[number] <= IDLE_S_MAX for number in stay)
    assert not stay or len(stay) + calling <= CONNECTIONS_MAX
    needless = [number for number in gone if idle[number] <= IDLE_S_MAX]
    assert not needless or len(stay) + calling == CONNECTIONS_MAX or not stay
    assert not stay or not gone or max(idle[number] for number in stay) <= min(idle[number] for number in gone)


async def test_who_says_nothing_is_let_go_and_who_is_being_answered_is_not() -> None:
    now, go_on, called = 0.0, asyncio.Event(), asyncio.Event()
    here = Callers(lambda: now)

    async def answer(request: web.Request) -> web.Response:
        called.set()
        await go_on.wait()
        return web.Response(text="at last")

    app = web.Application(middlewares=[here.middleware()])
    app.router.add_get("/", answer)
    server = TestServer(app)
    await server.start_server(**callers.SERVER)
    assert server.runner is not None and server.runner.server is not None
    silent, slow, calling = [await asyncio.open_connection(server.host, server.port) for _ in range(3)]
    slow[1].write(b"GET / HTTP/1.1\r\nX-")
    calling[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await called.wait()
    while len(server.runner.server.connections) < 3:
        await asyncio.sleep(0)
    here.look(server.runner.server.connections)
    now = IDLE_S_MAX + 1
    here.look(server.runner.server.connections)
    assert await silent[0].read() == b"" and await slow[0].read() == b""
    go_on.set()
    assert (await calling[0].readline()).startswith(b"HTTP/1.1 200")
    here.look(server.runner.server.connections)  # its idle time has just begun
    assert len(server.runner.server.connections) == 1
    for _, writer in (silent, slow, calling):
        writer.close()
    await server.close()


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
async def test_a_body_that_is_compressed_is_read_and_one_that_grows_without_end_is_not(
    api: Api, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = {"Content-Encoding": "gzip" if pack is gzip.compress else "deflate"}
    status, _ = await api.call("PUT", "/api/queues/%2F/z", pack(b'{"durable": true}'), headers=encoding)
    assert status == 201
    bomb = pack(b"[" * (call.BODY_BYTES_MAX + 1))
    assert (await api.call("PUT", "/api/queues/%2F/b", bomb, headers=encoding))[0] == 413
    assert (await api.call("PUT", "/api/queues/%2F/b", b"no such thing", headers=encoding))[0] == 400
    assert (await api.call("PUT", "/api/queues/%2F/b", pack(b"{}")[:-4], headers=encoding))[0] == 400
    assert (await api.call("PUT", "/api/queues/%2F/b", b"{}", headers={"Content-Encoding": "br"}))[0] == 415
    assert [row["name"] for row in await api.get("/api/queues")] == ["z"]


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"AMQP\0\0\x09\x01\r\n\r\n"]
)
async def test_what_is_no_http_gets_400_and_fills_no_log(
    api: Api, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(api.client.host, api.client.port)
    writer.write(sent)
    assert b" 400 " in await reader.readline()
    writer.close()
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
