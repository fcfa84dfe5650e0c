"""The client for etcd before servers that are none, or that answer in a way that has no end."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Final

import pytest

from shardmq.cluster import etcd as etcd_module
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.pairs import EtcdAway, EtcdRefused, Listing, Put
from tests.support.etcd import RealEtcd

CALL_S: Final = 0.15
MARGIN_S: Final = 5.0  # of a busy machine
SMALL: Final = 1 << 16  # an answer that is too large, for these tests
GARBAGE: Final = 100  # answers of random bytes

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(
    body: bytes, status: str = "200 OK", headers: str = "Content-Type: application/json\r\n"
) -> Serve:
    """Return a server that answers each request with these bytes, and ends the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    return serve


def raw(data: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)

    return serve


def endless(head: bytes, piece: bytes, wait_s: float) -> Serve:
    """Return a server that sends a piece again and again, for ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(wait_s)

    return serve


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[str]:
    """Serve on a free port, and yield the endpoint."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


@pytest.fixture(autouse=True)
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "ANSWER_BYTES_MAX", SMALL)


CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADER: Final = {"cluster_id": "7", "revision": "5"}
WRONG: Final = "not the answer of an etcd"
NO_BASE64: Final = json.dumps(
    {
        "header": HEADER,
        "kvs": [{"key": "!"}],
        "responses": [{"response_range": {"kvs": [{"key": "!"}]}}],
    }
).encode()
SERVERS: Final = {
    "html": (answering(b"<html>It works!</html>", headers="Content-Type: text/html\r\n"), WRONG),
    "not found": (answering(b"Not Found\n", "404 Not Found"), f"{WRONG} .HTTP status 404"),
    "empty": (answering(b""), WRONG),
    "other json": (answering(b"{}"), WRONG),
    "a list": (answering(b"[1, 2]"), WRONG),
    "half": (answering(b'{"header":{"cluster_id":"7","rev'), WRONG),
    "other types": (answering(b'{"header":{"cluster_id":"x","revision":[]}}'), WRONG),
    "no base64": (answering(NO_BASE64), WRONG),
    "deep": (answering(b"[" * 50_000), WRONG),
    "deep in a field": (answering(b'{"more":' + b"[" * 50_000), WRONG),
    "Latin-1": (answering(b'{"header":{"cluster_id":"caf\xe9"}}'), WRONG),
    "error in Latin-1": (answering(b'{"error":"caf\xe9","code":2}', "502 Bad Gateway"), WRONG),
    "error of another": (answering(b'{"error":"out of order"}', "502 Bad Gateway"), "out of order"),
    "refusal of another": (
        answering(b'{"error":"no route","message":"no route","code":5}', "404 Not Found"),
        "no route",
    ),
    "redirect": (
        answering(b"", "302 Found", "Location: http://127.0.0.1:1/\r\n"),
        f"{WRONG} .HTTP status 302",
    ),
    "packed": (
        answering(gzip.compress(bytes(10 << 20)), headers="Content-Encoding: gzip\r\n"),
        WRONG,
    ),
    "too large": (answering(b"[" + b"1," * SMALL), f"an answer of more than {SMALL} bytes"),
    "no http": (raw(b"220 smtp.example.org ESMTP\r\n"), "Bad status line|Expected HTTP"),
    "header without end": (endless(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n", 0.005), "no answer|400"),
    "drops": (endless(CHUNKED, b"1\r\n{\r\n", 0.005), "no answer in time"),
    "floods": (endless(CHUNKED, b"1000\r\n" + bytes(4096) + b"\r\n", 0), "an answer of more than"),
    "silent": (silent, "no answer in time"),
    "closing": (closing, "Server disconnected|reset by peer|ClientOSError"),
}


@pytest.mark.parametrize("name", SERVERS)
async def test_what_is_no_etcd_is_named_in_time(name: str) -> None:
    serve, says = SERVERS[name]
    async with served(serve) as endpoint, Etcd([endpoint], call_s=CALL_S, attempt_s=0.1) as etcd:
        begun = time.monotonic()
        with pytest.raises(EtcdAway, match=f"no endpoint of etcd answers: {endpoint}: .*({says})"):
            await etcd.get("/a")
        with pytest.raises(EtcdAway) as caught:
            await etcd.transact((), [Put("/a", b"")])
        assert caught.value.unknown  # It may have reached an etcd behind the server.
        assert time.monotonic() - begun < 2 * CALL_S + MARGIN_S


@pytest.mark.parametrize("name", SERVERS)
async def test_another_endpoint_is_asked_instead(name: str, real: RealEtcd, prefix: str) -> None:
    serve, _ = SERVERS[name]
    async with (
        served(serve) as endpoint,
        Etcd([endpoint, *real.endpoints], attempt_s=0.1, call_s=MARGIN_S) as etcd,
    ):
        # The watch begins at the server that is no etcd.
        async with aclosing(etcd.watch(prefix, 1)) as watch:
            waiting = asyncio.create_task(anext(watch))
            assert await etcd.get(prefix) is None
            await etcd.transact((), [Put(prefix, b"1")])
            async with asyncio.timeout(2 * MARGIN_S):
                news = await waiting
        assert not isinstance(news, Listing) and len(news.changes) == 1


async def test_random_bytes_are_no_answer(request: pytest.FixtureRequest) -> None:
    random_ = random.Random(request.config.getoption("--seed"))
    right = json.dumps({"header": HEADER, "kvs": [{"key": "YQ==", "value": "YQ=="}]}).encode()
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(right), right)
    sent = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)

    async with served(serve) as endpoint:
        for _ in range(GARBAGE):
            changed = bytearray(whole)
            for _ in range(random_.randrange(1, 5)):
                changed[random_.randrange(len(changed))] = random_.randrange(256)
            sent = bytes(changed[: random_.choice([None, random_.randrange(len(whole))])])
            async with Etcd([endpoint], call_s=0.01, attempt_s=0.01) as etcd:
                try:
                    await etcd.get("/a")
                except (EtcdAway, EtcdRefused):
                    pass


async def test_a_watch_that_ends_at_once_is_tried_again_in_growing_steps() -> None:
    created = json.dumps({"result": {"header": HEADER, "created": True}}).encode()
    times: list[float] = []
    enough = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        if len(times) == 5:
            enough.set()
        await answering(created + b"\n")(reader, writer)

    async with served(serve) as endpoint, Etcd([endpoint]) as etcd:
        async with aclosing(etcd.watch("/", 1)) as watch:
            waiting = asyncio.create_task(anext(watch))
            async with asyncio.timeout(4 * MARGIN_S):
                await enough.wait()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    assert times[4] - times[0] > 0.05 + 0.1 + 0.2 + 0.4 - 0.02
