"""TLS handshakes with the HTTPS port are bounded, and do not hold up others."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management.http_connections import (
    SERVER,
    HttpConnections,
    LimitedSite,
)
from shardmq.broker.controller.management.tls_handshakes import HANDSHAKE_S_MIN, Handshakes
from tests.support.certificates import Authority

PATIENCE_S = 60.0


class Task:
    """Stands for the task of a handshake."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.done: Callable[[Any], object] = lambda _: None

    def cancel(self) -> None:
        self.is_cancelled = True

    def add_done_callback(self, done: Callable[[Any], object]) -> None:
        self.done = done


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("comes"), st.sampled_from("abc")),
        st.tuples(st.just("ends"), st.integers(0, 20)),
        st.tuples(st.just("passes"), st.floats(0.1, 2 * HANDSHAKE_S_MIN)),
    ),
    max_size=80,
)


@given(
    st.builds(
        HttpLimits, handshakes_max=st.integers(1, 8), handshakes_per_address_max=st.integers(1, 4)
    ),
    EVENTS,
)
def test_handshakes_stay_within_their_bounds_and_none_is_cut_off_without_need(
    limits: HttpLimits, history: list[tuple[str, Any]]
) -> None:
    now, number = 0.0, 0
    handshakes = Handshakes(lambda: now)
    there: dict[Any, tuple[str, float, Task]] = {}
    for what, which in history:
        if what == "passes":
            now += which
        elif what == "ends" and there:
            there.pop(list(there)[which % len(there)])[2].done(None)
        elif what == "comes":
            same = [since for address, since, _ in there.values() if address == which]
            is_full = (
                len(same) >= limits.handshakes_per_address_max
                or len(there) >= limits.handshakes_max
            )
            may = handshakes.may_begin(which, limits)
            gone = [one for one, (_, _, task) in there.items() if task.is_cancelled]
            assert may or is_full
            assert not gone or is_full, "nobody has to make room"
            assert all(now - there[one][1] >= HANDSHAKE_S_MIN for one in gone)
            for one in gone:
                there.pop(one)[2].done(None)
            if may:
                number += 1
                task: Any = Task()
                accepted: Any = number
                handshakes.begin(accepted, which, task)
                there[accepted] = which, now, task
        assert len(handshakes) == len(there) <= limits.handshakes_max
        for address in "abc":
            held = sum(of == address for of, _, _ in there.values())
            assert held <= limits.handshakes_per_address_max


class Port:
    """An HTTPS port with a clock of its own that answers "here" to everybody."""

    def __init__(self, directory: Path, limits: HttpLimits) -> None:
        authority = Authority(directory)
        self.now = 0.0
        self.callers = HttpConnections(lambda: self.now)
        self.handshakes = self.callers.handshakes
        self._limits = limits
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(
            authority.make("server.pem", "CN=localhost", hosts=("localhost",))
        )
        self._trusting = ssl.create_default_context(cafile=str(authority.ca))

    async def open(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=f"here by {request.scheme}")

        app = web.Application()
        app.router.add_get("/", answer)
        self.runner = web.AppRunner(app, access_log=None, **SERVER)
        await self.runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        await LimitedSite(
            self.runner,
            listening,
            self.callers,
            lambda: self._limits,
            lambda address: False,
            10,
            self._tls,
        ).start()

    async def silent(self) -> asyncio.StreamReader:
        """Connect, and say nothing."""
        before = len(self.handshakes)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers = [*getattr(self, "writers", []), writer]
        while len(self.handshakes) == before:
            await asyncio.sleep(0)
        return reader

    async def call(self) -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self._trusting, server_hostname="localhost"
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def close(self) -> None:
        await self.runner.cleanup()
        for writer in self.writers:
            writer.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("limits", "bound"),
    [
        (HttpLimits(handshakes_per_address_max=3), "address"),
        (HttpLimits(handshakes_max=3), "handshakes"),
    ],
)
def test_a_client_gets_in_beside_those_who_never_finish(
    tmp_path: Path,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    limits: HttpLimits,
    bound: str,
) -> None:
    async def play() -> None:
        port = Port(tmp_path, limits)
        await port.open()
        silent = [await port.silent() for _ in range(3)]
        # All have just come: nobody has to make room, and the new one is closed.
        with pytest.raises(OSError):
            await port.call()
        assert port.handshakes.refused == {bound: 1} and not port.handshakes.cut_off
        assert len(port.handshakes) == 3
        port.now += HANDSHAKE_S_MIN
        for number in range(3):
            assert b"here by https" in await port.call()
            if number == 0:
                assert await silent[0].read() == b""
        assert port.handshakes.cut_off == {bound: 1}
        assert len(port.handshakes) == 2
        assert not silent[1].at_eof()
        await port.close()
        assert await silent[1].read() == b""
        while len(port.handshakes):
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(play(), PATIENCE_S))
