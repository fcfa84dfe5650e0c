"""Frames come whole and in order, however the bytes are cut, and a reader can hold them up."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shardmq.cluster.following import FRAMES_WAITING_MAX, Connection
from shardmq.cluster.frame_streams import BUFFER_BYTES, KEPT_BYTES, FrameStream
from shardmq.cluster.frames import FRAME_BYTES_MAX, LENGTH, BadFrame
from shardmq.cluster.operations import PIECE_BYTES
from shardmq.cluster.sending import FRAME_OPERATIONS_BYTES


class Pipe(asyncio.Transport):
    """A transport without a socket, which says whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True
        self.is_closed = False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_closed = True


def arrive(stream: FrameStream, data: bytes) -> int:
    """Put bytes into the stream as a transport does; return how many found room."""
    room = stream.get_buffer(-1)
    part = data[: len(room)]
    room[: len(part)] = part
    stream.buffer_updated(len(part))
    return len(part)


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def some_frame(rng: random.Random) -> bytes:
    sizes = (0, 1, rng.randrange(100), rng.randrange(20_000), rng.randrange(3 * BUFFER_BYTES))
    return rng.randbytes(rng.choices(sizes, (1, 1, 5, 3, 1))[0])


@asynccontextmanager
async def taking(
    take: Callable[[memoryview], None],
) -> AsyncIterator[tuple[FrameStream, Pipe, asyncio.Task[Any]]]:
    stream, pipe = FrameStream(), Pipe()
    stream.connection_made(pipe)
    task = asyncio.create_task(stream.take_all(take))
    await asyncio.sleep(0)
    try:
        yield stream, pipe, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def replay(seed: int) -> None:
    """Send random frames in random pieces, and hold the reader up now and then."""
    rng = random.Random(seed)
    sent = [some_frame(rng) for _ in range(rng.randint(1, 30))]
    data = b"".join(map(framed, sent))
    got: list[bytes] = []

    def take(frame: memoryview) -> None:
        got.append(bytes(frame))
        if rng.random() < 0.1:
            stream.hold()

    async with taking(take) as (stream, pipe, _):
        while data or not pipe.is_read:
            assert not pipe.is_closed
            if not pipe.is_read:
                before = len(got)
                assert arrive(stream, data[:0]) == 0 and len(got) == before
                stream.go_on()
                continue
            size = rng.choice((1, 3, rng.randint(1, 500), rng.randint(1, 600_000)))
            data = data[arrive(stream, data[:size]) :]
            assert len(stream.get_buffer(-1)) > 0 or not pipe.is_read
        assert got == sent


@pytest.mark.parametrize("seed", range(30))
async def test_frames_come_whole_and_in_order_however_they_are_cut(seed: int) -> None:
    await replay(seed)


async def test_a_stream_that_hands_out_what_is_not_whole_is_convicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Eager(FrameStream):
        def _hand_out(self) -> int:
            if (needed := super()._hand_out()) and self._end == len(self._buffer):
                self._end = self._start
                return 0
            return needed

    monkeypatch.setitem(globals(), "FrameStream", Eager)
    with pytest.raises(AssertionError):
        for seed in range(30):
            await replay(seed)


async def test_the_first_frame_is_taken_alone_and_the_next_ones_wait() -> None:
    stream, pipe = FrameStream(), Pipe()
    stream.connection_made(pipe)
    first = asyncio.create_task(stream.first())
    await asyncio.sleep(0)
    arrive(stream, framed(b"hello") + framed(b"one") + framed(b"two"))
    assert await first == b"hello"
    got: list[bytes] = []
    task = asyncio.create_task(stream.take_all(lambda frame: got.append(bytes(frame))))
    await asyncio.sleep(0)
    assert got == [b"one", b"two"]
    stream.connection_lost(None)
    with pytest.raises(EOFError):
        await task


async def test_who_sends_more_than_one_frame_before_it_is_heard_fills_no_memory() -> None:
    stream, pipe = FrameStream(), Pipe()
    stream.connection_made(pipe)
    first = asyncio.create_task(stream.first())
    await asyncio.sleep(0)
    data = framed(b"hello") + framed(bytes(2 * BUFFER_BYTES))
    while pipe.is_read and data:
        data = data[arrive(stream, data) :]
    assert await first == b"hello"
    assert data and not pipe.is_read and len(stream._buffer) == BUFFER_BYTES


async def test_a_stream_that_ends_before_its_first_frame_says_so() -> None:
    stream = FrameStream()
    stream.connection_made(Pipe())
    first = asyncio.create_task(stream.first())
    await asyncio.sleep(0)
    stream.connection_lost(ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError):
        await first


async def test_a_length_that_no_frame_has_ends_the_stream() -> None:
    got: list[bytes] = []
    async with taking(lambda frame: got.append(bytes(frame))) as (stream, pipe, task):
        arrive(stream, LENGTH.pack(FRAME_BYTES_MAX + 1))
        with pytest.raises(BadFrame):
            await task
        assert pipe.is_closed and not got


async def test_what_the_reader_raises_ends_the_stream_and_no_frame_follows() -> None:
    got: list[bytes] = []

    def take(frame: memoryview) -> None:
        got.append(bytes(frame))
        raise BadFrame("on purpose")

    async with taking(take) as (stream, pipe, task):
        arrive(stream, framed(b"one") + framed(b"two"))
        arrive(stream, framed(b"three"))
        with pytest.raises(BadFrame, match="on purpose"):
            await task
        assert pipe.is_closed and got == [b"one"]


async def test_a_buffer_that_grew_for_a_very_long_frame_is_given_back() -> None:
    async with taking(lambda frame: None) as (stream, _, _task):
        data = framed(bytes(KEPT_BYTES))
        while data:
            data = data[arrive(stream, data) :]
        assert len(stream._buffer) == BUFFER_BYTES


async def test_a_writer_waits_for_room_and_hears_of_the_end() -> None:
    stream = FrameStream()
    stream.connection_made(Pipe())
    await stream.drain()
    stream.pause_writing()
    waiting = asyncio.create_task(stream.drain())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.resume_writing()
    await waiting
    stream.pause_writing()
    waiting = asyncio.create_task(stream.drain())
    await asyncio.sleep(0)
    stream.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await waiting


def test_the_buffer_that_is_kept_has_room_for_the_frames_that_are_usual() -> None:
    assert KEPT_BYTES > FRAME_OPERATIONS_BYTES + PIECE_BYTES + (1 << 20)


async def test_a_follower_lets_only_so_many_messages_wait(request: pytest.FixtureRequest) -> None:
    """Take messages slower than they come: the stream is held, and later all of them are there."""
    seed = request.config.option.seed
    print(f"to play it again: --seed {seed}")
    rng = random.Random(seed)
    stream, pipe = FrameStream(), Pipe()
    stream.connection_made(pipe)
    connection, waiting = Connection(stream), deque[bytes]()

    def came(frame: memoryview) -> None:
        waiting.append(bytes(frame))
        connection.came()
        assert len(waiting) <= FRAMES_WAITING_MAX

    task = asyncio.create_task(stream.take_all(came))
    await asyncio.sleep(0)
    sent = [rng.randbytes(rng.choice((10, 5_000, 40_000))) for _ in range(400)]
    coming, taken = b"".join(map(framed, sent)), []
    while coming or waiting:
        if pipe.is_read:
            coming = coming[arrive(stream, coming[: rng.randrange(1, 100_000)]) :]
        if waiting and (not coming or rng.random() < 0.9):
            taken.append(waiting.popleft())
            connection.took()
    assert taken == sent
    task.cancel()
