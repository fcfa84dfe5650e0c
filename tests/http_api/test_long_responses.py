"""Long answers are shared, new and bounded; who does not read them is in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management.api_error import ApiError
from shardmq.broker.controller.management.resources import queues
from shardmq.broker.controller.management.responses import compressed_pieces, cpu_budget
from shardmq.broker.controller.management.responses.listing import MADE_ROWS
from shardmq.broker.controller.management.responses.long_responses import (
    LOCAL,
    UNREAD_S_MIN,
    LongResponses,
    Rendering,
    ResponseBody,
    takes_gzip,
)
from tests.http_api.conftest import Api

KEYS = ("queues", "bindings", "metrics")


class FakeRequest:
    """A call, as far as a short answer to it goes; its own transport too."""

    method = "GET"

    def __init__(self, remote: str) -> None:
        self.remote = remote
        self.headers: dict[str, str] = {}
        self.is_gone = False

    @property
    def transport(self) -> Any:
        return self

    def is_closing(self) -> bool:
        return self.is_gone

    def abort(self) -> None:
        self.is_gone = True


async def once(value: bytes) -> AsyncGenerator[bytes]:
    yield value


class History:
    """Calls of some addresses, and answers whose making ends when the history says so."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.answers = LongResponses()
        self.now = 0  # what exists has this version
        self.calls: list[tuple[FakeRequest, int, asyncio.Task[Any]]] = []  # with the version then
        self.making: list[tuple[str, asyncio.Future[None]]] = []  # address of who asked first
        self.served: Counter[int] = Counter()

    def ask(self, address: str, key: str) -> None:
        request: Any = FakeRequest(address)

        async def make() -> ResponseBody:
            seen, go_on = self.now, asyncio.get_running_loop().create_future()
            self.making.append((address, go_on))
            try:
                await go_on
            finally:
                self.making.remove((address, go_on))
            return ResponseBody("text/plain", once(b"%s %d" % (key.encode(), seen)))

        answer = self.answers.answer(request, key, make, self.limits)
        self.calls.append(
            (request, self.now, asyncio.create_task(self._checked(answer, key, self.now)))
        )

    async def _checked(self, answer: Any, key: str, asked_at: int) -> str:
        try:
            response = await answer
        except ApiError as refused:
            if refused.status == 404:
                return "failed"
            assert refused.status in (429, 503) and refused.headers == {"Retry-After": "1"}
            return refused.error
        except ConnectionResetError:
            return "gone"
        said, version = response.body.split()
        assert said.decode() == key
        assert int(version) >= asked_at, "an answer older than the question"
        return "answered"

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)
        waiting = Counter(address for address, _ in self.making)
        assert sum(waiting.values()) <= self.limits.made_max
        assert all(count <= max(1, self.limits.made_max // 2) for count in waiting.values())
        assert self.answers.under_way <= self.limits.answers_max
        of_address = Counter(recipient.address for recipient in self.answers._recipients)
        assert all(count <= self.limits.answers_per_address_max for count in of_address.values())
        # Whoever waits does so because as many as may be are being made.
        for address in self.answers._waiting:
            assert len(self.making) == self.limits.made_max or waiting[address] == max(
                1, self.limits.made_max // 2
            )


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
            st.sampled_from(KEYS),
        ),
        st.tuples(st.sampled_from(["make", "fail", "hang up"]), st.integers(0, 20), st.just("")),
        st.tuples(st.just("change"), st.just(0), st.just("")),
    ),
    max_size=60,
)
small_limits = st.builds(
    HttpLimits,
    answers_max=st.integers(1, 12),
    answers_per_address_max=st.integers(1, 6),
    made_max=st.integers(1, 4),
)


@settings(deadline=None)
@given(small_limits, steps)
def test_whatever_clients_do_answers_are_new_bounded_and_come_to_an_end(
    limits: HttpLimits, history: list[tuple[str, Any, str]]
) -> None:
    async def play() -> None:
        of = History(limits)
        for what, which, key in history:
            if what == "ask":
                of.ask(which, key)
            elif what == "change":
                of.now += 1
            elif what == "hang up" and of.calls:
                of.calls[which % len(of.calls)][0].is_gone = True
            elif of.making and what in ("make", "fail"):
                _, go_on = of.making[which % len(of.making)]
                if what == "make":
                    go_on.set_result(None)
                else:
                    go_on.set_exception(ApiError(404, "Object Not Found", "Not Found"))
            await of.settle()
        while of.making:
            of.making[0][1].set_result(None)
            await of.settle()
        ends = await asyncio.wait_for(asyncio.gather(*(task for _, _, task in of.calls)), 60)
        asked = sum(what == "ask" for what, _, _ in history)
        assert len(ends) == asked
        assert ends.count("busy") == sum(of.answers.refused.values())
        assert of.answers.under_way == of.answers.waiting == of.answers.bytes_held == 0
        assert not of.answers._joinable and not of.answers._making and not of.answers._waiting

    asyncio.run(play())


# -- by sockets ------------------------------------------------------------------------------------

# more than sockets hold
TEXT = b"".join(b"%d and more of it\n" % number for number in range(400_000))
ASK = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """A server of long answers, by a clock of its own."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.now = 0.0
        self.answers = LongResponses(lambda: self.now)
        self.is_read = asyncio.Event()
        self.breaks_off = False
        app = web.Application()
        app.router.add_get("/{name}", self._answer)
        self.server = TestServer(app)
        self._unread: list[socket.socket] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        async def make() -> ResponseBody:
            return ResponseBody("text/plain", self._text())

        try:
            return await self.answers.answer(request, request.path, make, self.limits)
        except ApiError as error:
            return web.Response(status=error.status, text=error.reason, headers=error.headers)

    async def _text(self) -> AsyncGenerator[bytes]:
        for at in range(0, len(TEXT), 1 << 20):
            if self.breaks_off and at:
                await self.is_read.wait()
                raise ValueError("it cannot go on")
            yield TEXT[at : at + (1 << 20)]

    async def ask(self, name: str, headers: str = "") -> tuple[bytes, bytes]:
        """Head and body, as far as it came."""
        recipient, writer = await asyncio.open_connection(self.server.host, self.server.port)
        writer.write(
            f"GET /{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n".encode()
        )
        head, _, body = (await recipient.read()).partition(b"\r\n\r\n")
        writer.close()
        return head, unchunked(body) if b"chunked" in head else body

    async def leave_unread(self, name: str) -> socket.socket:
        """Ask, and wait until all is made and no more can be sent."""
        loop, before = asyncio.get_running_loop(), self.stuck()
        asking = socket.socket()
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.setblocking(False)
        await loop.sock_connect(asking, (self.server.host, self.server.port))
        await loop.sock_sendall(asking, ASK % name.encode())
        self._unread.append(asking)
        while (self.stuck() == before or self.answers._making) and not self.answers.unread:
            await asyncio.sleep(0)
        return asking

    def stuck(self) -> int:
        return sum(recipient.unread_since is not None for recipient in self.answers._recipients)

    async def close(self) -> None:
        for one in self._unread:
            one.close()
        await self.server.close()


def unchunked(body: bytes) -> bytes:
    found, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:end], 16)):
        found.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(found)


@contextlib.asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Served]:
    found = Served(HttpLimits(**limits))
    await found.server.start_server()
    yield found
    await found.close()


async def test_an_answer_is_the_same_packed_or_not() -> None:
    async with served() as here:
        plain, zipped = (
            await here.ask("a"),
            await here.ask("a", "Accept-Encoding: br;q=1.0, gzip;q=0.5\r\n"),
        )
        assert plain[1] == gzip.decompress(zipped[1]) == TEXT
        assert b"Content-Encoding" not in plain[0] and b"Content-Encoding: gzip" in zipped[0]
        assert len(zipped[1]) * 4 < len(TEXT)


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [
        ("", False),
        ("gzip", True),
        ("br, GZIP;q=0.1", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("*", False),
    ],
)
def test_gzip_is_for_those_who_take_it(accepted: str, takes: bool) -> None:
    assert takes_gzip(accepted) is takes


async def test_who_does_not_read_makes_room_for_others_after_a_second_and_not_before() -> None:
    async with served(answers_per_address_max=2) as here:
        first, second = await here.leave_unread("a"), await here.leave_unread("b")
        head, _ = await here.ask("c")
        assert b" 429 " in head and b"Retry-After: 1" in head
        here.now += UNREAD_S_MIN
        assert (await here.ask("c"))[1] == TEXT
        assert here.answers.unread == 1 and here.answers.refused == {"address": 1}
        assert is_cut_off(await drained(first)) and not is_cut_off(await drained(second))


async def test_who_does_not_read_for_long_is_cut_off_and_what_was_kept_for_it_is_let_go() -> None:
    async with served(unread_timeout_s=0.05) as here:
        unread = await here.leave_unread("a")
        while here.answers.under_way:
            await asyncio.sleep(0.001)
        assert is_cut_off(await drained(unread))
        assert here.answers.bytes_held == 0 and here.answers.unread == 1


async def test_an_ended_answer_lets_its_bytes_go_with_its_last_reader_whoever_still_holds_it() -> (
    None
):
    """The coroutine of a recipient that was cut off holds the answer until its write has failed."""
    async with served(answers_per_address_max=1) as here:
        await here.leave_unread("a")
        (rendering,) = here.answers._recipients.values()
        assert rendering is not None and rendering.is_ended
        held = rendering.pieces
        assert held.bytes_held > 0
        here.now += UNREAD_S_MIN
        assert here.answers.cut_off(None)
        assert (held.packed, held.bytes_held) == ([], 0)


async def test_an_answer_that_fails_lets_the_bytes_go_that_its_readers_hold() -> None:
    async def make() -> ResponseBody:
        raise NotImplementedError

    rendering = Rendering("a", LOCAL, make)
    held = rendering.pieces
    held.add(TEXT)
    assert held.bytes_held > 0
    rendering.fail(ValueError("it cannot go on"))
    assert (held.packed, held.bytes_held) == ([], 0)


async def test_who_takes_too_long_for_all_of_it_is_cut_off() -> None:
    async with served(answer_timeout_s=0.2) as here:
        recipient, writer = await asyncio.open_connection(
            here.server.host, here.server.port, limit=4096
        )
        writer.write(ASK % b"a")
        while await recipient.read(4096):
            await asyncio.sleep(0.001)
            if not here.answers.under_way:
                break
        assert here.answers.unread == 1
        writer.close()


async def test_what_nobody_reads_is_let_go_when_there_is_no_room_for_more() -> None:
    async with served() as here:
        await here.ask("a")
        size = (await packed_bytes(here)) + 1
        here.limits = HttpLimits(
            answer_bytes_max=size * 3 // 2, answer_bytes_per_address_max=size * 3 // 2
        )
        await here.leave_unread("a")
        head, body = await here.ask("b")
        assert (b" 503 " in head and b"Retry-After" in head) or body != TEXT
        assert here.answers.refused["bytes"] == 1
        here.now += UNREAD_S_MIN
        assert (await here.ask("b"))[1] == TEXT
        assert here.answers.unread == 1


async def test_all_that_is_kept_never_has_more_bytes_than_it_may() -> None:
    async with served() as here:
        size = await packed_bytes(here)
        here.limits = HttpLimits(answer_bytes_max=2 * size, answer_bytes_per_address_max=2 * size)
        most, each = 0, here.answers._make_room

        def make_room(*arguments: Any) -> None:
            nonlocal most
            each(*arguments)
            most = max(most, here.answers.bytes_held)

        here.answers._make_room = make_room  # type: ignore[method-assign]
        for number in range(6):
            here.now += UNREAD_S_MIN
            await here.leave_unread(f"{number}")
        assert size < most <= 2 * size


async def test_an_answer_that_breaks_off_has_no_end() -> None:
    async with served() as here:
        here.breaks_off = True
        recipient, writer = await asyncio.open_connection(here.server.host, here.server.port)
        writer.write(ASK % b"a")
        assert b" 200 " in await recipient.readuntil(b"\r\n\r\n")
        here.is_read.set()
        rest = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await recipient.read(1 << 20):
                rest += data
        assert is_cut_off(rest)
        assert here.answers.under_way == here.answers.bytes_held == 0
        writer.close()


async def packed_bytes(here: Served) -> int:
    made = compressed_pieces.CompressedPieces()
    made.add(TEXT)
    made.end()
    return made.bytes_held


async def drained(sock: socket.socket) -> bytes:
    """All there is, to the end of the connection or of the answer."""
    loop, found = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionResetError):
        while not found.endswith(b"\r\n0\r\n\r\n") and (
            data := await loop.sock_recv(sock, 1 << 20)
        ):
            found += data
    return found


def is_cut_off(answer: bytes) -> bool:
    return not answer.endswith(b"\r\n0\r\n\r\n")


# -- by the API ------------------------------------------------------------------------------------


async def make_queues(api: Api, count: int) -> None:
    names = [
        {"name": f"q{n}", "vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
        for n in range(count)
    ]
    assert (await api.call("POST", "/api/definitions", {"queues": names}))[0] == 204


@pytest.mark.parametrize(
    "path", ["/api/queues", "/api/bindings", "/api/definitions", "/metrics/per-object", "/metrics"]
)
async def test_who_asks_for_the_same_at_the_same_time_shares_one_answer(
    api: Api, path: str
) -> None:
    await make_queues(api, 200)
    made = api.context.long_responses.made
    found = await asyncio.gather(*(api.call("GET", path) for _ in range(40)))
    assert {status for status, _ in found} == {200}
    assert api.context.long_responses.made - made <= 10
    assert api.context.long_responses.shared >= 30
    if path == "/api/queues":
        assert all(len(rows) == 200 for _, rows in found)


async def test_a_list_asked_for_after_a_change_has_it_though_others_are_under_way(api: Api) -> None:
    await make_queues(api, 100)

    async def others() -> None:
        while True:
            await api.call("GET", "/api/queues")

    asking = [asyncio.create_task(others()) for _ in range(5)]
    for number in range(10):
        assert (await api.call("PUT", f"/api/queues/%2F/new-{number}", {}))[0] == 201
        assert f"new-{number}" in {row["name"] for row in await api.get("/api/queues")}
        assert (await api.call("DELETE", f"/api/queues/%2F/new-{number}"))[0] == 204
        assert f"new-{number}" not in {
            row["name"] for row in await api.get("/api/queues?sort=name")
        }
    for task in asking:
        task.cancel()


async def test_users_do_not_share_what_they_may_not_see(api: Api) -> None:
    await make_queues(api, 5)
    assert (await api.call("PUT", "/api/users/low", {"password": "p", "tags": "management"}))[
        0
    ] == 201

    async def of(login: tuple[str, str]) -> Any:
        mine = Api(api.client, api.authority, api.shards, api.doors, api.context, api.clock, login)
        return [len(await mine.get("/api/queues")) for _ in range(10)]

    counts = await asyncio.gather(*(of(login) for login in [("low", "p"), ("guest", "guest")] * 3))
    assert counts == [[0] * 10, [5] * 10] * 3


async def test_too_many_long_answers_are_refused_and_short_ones_are_not(api: Api) -> None:
    bounds = HttpLimits(answers_per_address_max=1)
    config = msgspec.structs.replace(api.context.config, http=bounds)
    object.__setattr__(api.context, "config_now", lambda: config)
    go_on, real = asyncio.Event(), api.context.stats.now

    async def held(totals_only: bool = False) -> Any:
        await go_on.wait()
        return await real(totals_only)

    object.__setattr__(api.context.stats, "now", held)
    first = asyncio.create_task(api.call("GET", "/api/queues"))
    while not api.context.long_responses.under_way:
        await asyncio.sleep(0)
    status, said = await api.call("GET", "/api/bindings")
    assert (status, said["error"], api.headers["Retry-After"]) == (429, "busy", "1")
    assert (await api.call("GET", "/metrics"))[0] == 429
    assert (await api.call("GET", "/api/whoami"))[0] == 200
    go_on.set()
    assert (await first)[0] == 200
    status, text = await api.call("GET", "/metrics")
    assert 'shardmq_http_answers_refused_total{reason="address"} 2.0' in text


async def test_however_many_lists_are_made_few_rows_are_made_between_two_passes_of_the_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_queues(api, 300)
    made = most = 0
    real = queues.row

    def row(*arguments: Any) -> dict[str, Any]:
        nonlocal made
        made += 1
        return real(*arguments)

    monkeypatch.setattr(queues, "row", row)
    # each slice is as long as it may be, whatever the clock says
    monkeypatch.setattr(cpu_budget, "SLICE_S", 0.0)
    monkeypatch.setattr(cpu_budget.SlicedWork, "budget", cpu_budget.CpuBudget())
    calls = [
        asyncio.create_task(api.call("GET", f"/api/queues?name=q&other={n}")) for n in range(20)
    ]

    async def count() -> None:
        nonlocal made, most
        while True:
            most, made = max(most, made), 0
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    answers = await asyncio.gather(*calls)
    counting.cancel()
    assert all(len(rows) == 300 for _, rows in answers)
    assert 0 < most <= MADE_ROWS


async def test_head_has_no_body(api: Api) -> None:
    await make_queues(api, 300)
    for path in ("/api/queues", "/api/definitions", "/metrics/per-object", "/api/users"):
        assert await api.call("HEAD", path) == (200, "")
