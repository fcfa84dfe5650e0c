"""An end of a stream serves its loop and several threads at once, and loses and doubles nothing."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shardmq.cluster import shared_ends
from shardmq.cluster.frame_streams import FrameStream
from shardmq.cluster.frames import LENGTH
from shardmq.cluster.secret import keys_of, tls_context
from shardmq.cluster.shared_ends import SharedEnd, SharedServer
from tests.cluster.copies_world import PATIENCE_S, cluster_keys

THREADS = 3


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


class Ends:
    """Both ends of a stream, each with the frames that it has got."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.got: list[bytes] = []
        self.served, self.client = FrameStream(self._serve), FrameStream()
        self.client_got: list[bytes] = []
        self.over: list[BaseException] = []

    async def _serve(self, stream: FrameStream) -> None:
        try:
            await stream.take_all(lambda frame: self.got.append(bytes(frame)))
        except (OSError, EOFError) as error:
            self.over.append(error)

    @property
    def end(self) -> SharedEnd:
        assert self.served.shared is not None
        return self.served.shared


@asynccontextmanager
async def connected() -> AsyncIterator[Ends]:
    ends, (mine, theirs) = Ends(), socket.socketpair()
    end = SharedEnd(theirs, tls_context(cluster_keys(), server=True), ends.served, ends.lock)
    await asyncio.get_running_loop().create_connection(
        lambda: ends.client,
        sock=mine,
        ssl=tls_context(cluster_keys(), server=False),
        server_hostname="",
    )
    take = ends.client.take_all(lambda frame: ends.client_got.append(bytes(frame)))
    taking = asyncio.create_task(take)
    try:
        await until(lambda: ends.served.shared is not None)
        yield ends
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        ends.client.close()
        end.abort()
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def hear_until(end: SharedEnd, condition: Callable[[], Any]) -> None:
    while not condition():
        end.hear()


async def play(seed: int) -> None:
    """Let threads write and hear while the loop hears, or leaves that to them."""
    rng = random.Random(seed)
    sizes = [1, 50, 3_000, 20_000, 700_000]
    sent = [
        [bytes([thread]) + rng.randbytes(rng.choice(sizes)) for _ in range(rng.randint(1, 12))]
        for thread in range(THREADS)
    ]
    answers = [rng.randbytes(rng.choice(sizes)) for _ in range(rng.randint(1, 30))]
    are_heard = threading.Event()
    async with connected() as ends:
        end = ends.end
        end.watch(rng.random() < 0.5)

        def write(frames: list[bytes]) -> None:
            for frame in frames:
                end.write(framed(frame))
                end.hear()
            while not are_heard.wait(0.0005):
                end.hear()

        writing = [asyncio.create_task(asyncio.to_thread(write, frames)) for frames in sent]
        for answer in answers:
            ends.client.write(framed(answer))
            await ends.client.drain()
        try:
            await until(lambda: len(ends.got) == len(answers))
            await until(lambda: len(ends.client_got) == sum(map(len, sent)))
        finally:
            are_heard.set()
            await asyncio.gather(*writing)
        assert ends.got == answers
        for thread, frames in enumerate(sent):
            assert [each for each in ends.client_got if each[0] == thread] == frames


@pytest.mark.parametrize("seed", range(12))
async def test_threads_and_the_loop_write_and_hear_at_once(seed: int) -> None:
    await play(seed)


async def test_bytes_without_room_are_sent_by_the_loop_which_tells_when_there_is_room() -> None:
    async with connected() as ends:
        ends.client.hold()
        frame = framed(bytes(1 << 20))
        while ends.served.is_clear:
            await asyncio.to_thread(ends.end.write, frame)
        drained = asyncio.create_task(ends.served.drain())
        await asyncio.sleep(0)
        assert not drained.done()
        ends.client.go_on()
        await drained
        await until(lambda: ends.served.is_clear)


async def test_an_end_that_is_not_watched_is_heard_by_threads_alone() -> None:
    async with connected() as ends:
        ends.end.watch(False)
        ends.client.write(framed(b"one"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert ends.got == []
        await asyncio.to_thread(hear_until, ends.end, lambda: ends.got)
        assert ends.got == [b"one"]
        ends.end.watch(True)
        ends.client.write(framed(b"two"))
        await until(lambda: ends.got == [b"one", b"two"])


@pytest.mark.parametrize("is_watched", [True, False], ids=["the loop", "a thread"])
async def test_the_end_of_the_other_side_is_noticed_by_who_hears(is_watched: bool) -> None:
    async with connected() as ends:
        ends.end.watch(is_watched)
        ends.client.close()
        if not is_watched:
            await asyncio.to_thread(hear_until, ends.end, ends.end.is_closing)
        await until(lambda: ends.over)
        assert ends.end.is_closing() and ends.end.fileno() == -1
        ends.end.write(framed(b"in vain"))
        ends.end.hear()


async def test_a_frame_that_is_refused_in_a_thread_ends_the_stream() -> None:
    async with connected() as ends:
        ends.end.watch(False)
        ends.client.write(LENGTH.pack(1 << 31))
        await asyncio.to_thread(hear_until, ends.end, ends.end.is_closing)
        assert ends.served.is_closing


async def test_the_other_side_hears_that_a_thread_has_closed_a_stream() -> None:
    async with connected() as ends:
        await asyncio.to_thread(ends.end.close)
        await until(lambda: ends.over)
        with pytest.raises((EOFError, OSError)):
            await ends.client.take_all(lambda frame: None)


async def test_an_end_is_closed_though_the_other_side_is_gone() -> None:
    async with connected() as ends:
        ends.end.get_extra_info("socket").shutdown(socket.SHUT_WR)  # a write fails from now on
        ends.end.close()
        assert ends.end.is_closing() and ends.end.fileno() == -1
        await until(lambda: bool(ends.over))


@pytest.mark.parametrize(
    "says", [b"GET / HTTP/1.1\r\n\r\n" * 20, b""], ids=["something else", "nothing"]
)
async def test_who_does_not_speak_tls_is_let_go(
    says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_ends, "OPENING_S_MAX", 0.05)
    served, (mine, theirs) = FrameStream(), socket.socketpair()
    end = SharedEnd(theirs, tls_context(cluster_keys(), server=True), served, threading.RLock())
    with mine:
        mine.sendall(says)
        await until(end.is_closing)
    assert served.shared is None


async def test_another_secret_is_refused() -> None:
    served, (mine, theirs) = FrameStream(), socket.socketpair()
    end = SharedEnd(theirs, tls_context(cluster_keys(), server=True), served, threading.RLock())
    other = tls_context(keys_of("another secret of tests", "tests"), server=False)
    with pytest.raises(ssl.SSLError):
        await asyncio.get_running_loop().create_connection(
            FrameStream, sock=mine, ssl=other, server_hostname=""
        )
    await until(end.is_closing)
    assert served.shared is None


class Refusing(socket.socket):
    """A listening socket for which the process has no descriptor at first."""

    refusals = 1

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "none on purpose")
        return super().accept()


async def test_a_server_without_a_descriptor_accepts_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_ends, "ACCEPT_AGAIN_S", 0.01)
    listener = Refusing()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    served = FrameStream()
    server = SharedServer(
        listener, tls_context(cluster_keys(), server=True), lambda: served, threading.RLock()
    )
    tls = tls_context(cluster_keys(), server=False)
    transport, _ = await asyncio.get_running_loop().create_connection(
        FrameStream, *listener.getsockname(), ssl=tls, server_hostname=""
    )
    await until(lambda: served.shared is not None)
    server.close()
    transport.close()
    await until(lambda: served.is_closing)
