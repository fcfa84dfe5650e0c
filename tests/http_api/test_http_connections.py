"""HTTP connections are bounded, however little they say.

Calls under way are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import zlib
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management import call, http_connections
from shardmq.broker.controller.management.app import limited_site, metrics_app
from shardmq.broker.controller.management.http_connections import (
    IDLE_S_MAX,
    IDLE_S_MIN,
    HttpConnections,
    superfluous,
)
from tests.http_api.conftest import Api

LIMITS = HttpLimits()
CONNECTIONS_MAX = LIMITS.connections_max
ages = st.lists(st.floats(0, 2 * IDLE_S_MAX), max_size=50)


@given(ages, st.integers(0, 2 * CONNECTIONS_MAX))
def test_the_longest_idle_go_and_no_more_than_must(idle: list[float], calling: int) -> None:
    since: dict[Any, float] = {number: -age for number, age in enumerate(idle)}
    gone = superfluous(since, len(idle) + calling, CONNECTIONS_MAX, 0.0)
    stay = since.keys() - set(gone)
    assert len(gone) == len(set(gone))
    assert all(idle[number] <= IDLE_S_MAX for number in stay)
    assert not stay or len(stay) + calling <= CONNECTIONS_MAX
    needless = [number for number in gone if idle[number] <= IDLE_S_MAX]
    assert not needless or len(stay) + calling == CONNECTIONS_MAX or not stay
    assert (
        not stay
        or not gone
        or max(idle[number] for number in stay) <= min(idle[number] for number in gone)
    )


async def test_who_says_nothing_is_let_go_and_who_is_being_answered_is_not() -> None:
    now, go_on, called = 0.0, asyncio.Event(), asyncio.Event()
    here = HttpConnections(lambda: now)

    async def answer(request: web.Request) -> web.Response:
        called.set()
        await go_on.wait()
        return web.Response(text="at last")

    app = web.Application(middlewares=[here.middleware()])
    app.router.add_get("/", answer)
    server = TestServer(app)
    await server.start_server(**http_connections.SERVER)
    assert server.runner is not None and server.runner.server is not None
    silent, slow, calling = [
        await asyncio.open_connection(server.host, server.port) for _ in range(3)
    ]
    slow[1].write(b"GET / HTTP/1.1\r\nX-")
    calling[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await called.wait()
    while len(server.runner.server.connections) < 3:
        await asyncio.sleep(0)
    here.close_superfluous(server.runner.server.connections, LIMITS)
    now = IDLE_S_MAX + 1
    here.close_superfluous(server.runner.server.connections, LIMITS)
    assert await silent[0].read() == b"" and await slow[0].read() == b""
    go_on.set()
    assert (await calling[0].readline()).startswith(b"HTTP/1.1 200")
    here.close_superfluous(server.runner.server.connections, LIMITS)  # its idle time has just begun
    assert len(server.runner.server.connections) == 1
    for _, writer in (silent, slow, calling):
        writer.close()
    await server.close()


class Line:
    """A connection, as far as it is looked at."""

    def __init__(self) -> None:
        self.transport: Any = self
        self.is_aborted = False

    def force_close(self) -> None:
        self.transport = None

    def abort(self) -> None:
        self.is_aborted = True


limits = st.builds(
    HttpLimits, connections_max=st.integers(1, 8), connections_per_address_max=st.integers(1, 4)
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("comes"), st.sampled_from("abc")),
        st.tuples(st.sampled_from(["calls", "is answered", "goes"]), st.integers(0, 20)),
        st.tuples(st.just("passes"), st.floats(0.1, 2 * IDLE_S_MIN)),
    ),
    max_size=80,
)


@given(limits, events, st.booleans())
def test_connections_stay_within_their_bounds_and_none_is_closed_without_need(
    bounds: HttpLimits, history: list[tuple[str, Any]], reads: bool
) -> None:
    now = 0.0
    here = HttpConnections(lambda: now)
    # address, and idle since when; below 0 while it calls
    open_: dict[Line, tuple[str, float]] = {}

    def cut_off(address: str | None) -> bool:
        """One that calls and does not read makes room."""
        calling = [one for one, (of, since) in open_.items() if since < 0 and address in (None, of)]
        if reads or not calling:
            return False
        calling[0].transport = None
        del open_[calling[0]]
        return True

    for what, which in history:
        lines: list[Any] = list(open_)
        if what == "passes":
            now += which
        elif what == "comes":
            line: Any = Line()
            before = dict(open_)
            is_in = here.admit(which, bounds, cut_off)
            for one in lines:
                if one.transport is None and one in open_:
                    assert one.is_aborted and now - open_.pop(one)[1] >= IDLE_S_MIN
            same = sum(of == which for of, _ in before.values())
            is_full = (
                same >= bounds.connections_per_address_max or len(before) >= bounds.connections_max
            )
            assert is_in or is_full
            assert is_full or open_ == before, "nobody has to make room"
            assert is_in or not any(
                of == which and since >= 0 and now - since >= IDLE_S_MIN
                for of, since in open_.values()
            ), "one of its own address could have made room"
            if is_in:
                here.add(line, which)
                open_[line] = which, now
        elif lines and what == "calls":
            one = lines[which % len(lines)]
            here._calling.add(one)
            open_[one] = open_[one][0], -1.0
        elif lines and what == "is answered":
            one = lines[which % len(lines)]
            here._calling.discard(one)
            here._idle_since[one] = now
            open_[one] = open_[one][0], now
        elif lines:
            one = lines[which % len(lines)]
            one.transport = None
            del open_[one]
        assert len(open_) <= bounds.connections_max
        for address in "abc":
            assert (
                sum(of == address for of, _ in open_.values()) <= bounds.connections_per_address_max
            )


async def test_a_connection_too_many_is_closed_before_anything_is_made_for_it(api: Api) -> None:
    bounds = HttpLimits(connections_max=3, connections_per_address_max=2)
    config = api.context.config
    object.__setattr__(
        api.context, "config_now", lambda: msgspec.structs.replace(config, http=bounds)
    )
    runner = web.AppRunner(metrics_app(api.context), access_log=None, **http_connections.SERVER)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    await limited_site(api.context, runner, listening).start()
    assert runner.server is not None
    first, second = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    while len(runner.server.connections) < 2:
        await asyncio.sleep(0)
    third = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionResetError):
        assert await third[0].read() == b""
    assert len(runner.server.connections) == 2
    assert api.context.http_connections.refused == {"address": 1}
    for reader, writer in (first, second):
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        assert (
            answer.startswith(b"HTTP/1.1 200")
            and b'connections_refused_total{reason="address"} 1.0' in answer
        )
    for _, writer in (first, second, third):
        writer.close()
    await runner.cleanup()


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
async def test_a_body_that_is_compressed_is_read_and_one_that_grows_without_end_is_not(
    api: Api, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = {"Content-Encoding": "gzip" if pack is gzip.compress else "deflate"}
    status, _ = await api.call(
        "PUT", "/api/queues/%2F/z", pack(b'{"durable": true}'), headers=encoding
    )
    assert status == 201
    bomb = pack(b"[" * (call.BODY_BYTES_MAX + 1))
    assert (await api.call("PUT", "/api/queues/%2F/b", bomb, headers=encoding))[0] == 413
    assert (await api.call("PUT", "/api/queues/%2F/b", b"no such thing", headers=encoding))[
        0
    ] == 400
    assert (await api.call("PUT", "/api/queues/%2F/b", pack(b"{}")[:-4], headers=encoding))[
        0
    ] == 400
    assert (await api.call("PUT", "/api/queues/%2F/b", b"{}", headers={"Content-Encoding": "br"}))[
        0
    ] == 415
    assert [row["name"] for row in await api.get("/api/queues")] == ["z"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"AMQP\0\0\x09\x01\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_400_and_fills_no_log(
    api: Api, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(api.client.host, api.client.port)
    writer.write(sent)
    assert b" 400 " in await reader.readline()
    writer.close()
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
