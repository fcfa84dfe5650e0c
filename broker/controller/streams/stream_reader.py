"""The controller's calls to a reader of streams, with one connection for each.

`shardd/wire/reader_protocol.py` draws the protocol. The reader of another node is reached by a
stream between the nodes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import msgspec

from shardmq.shardd.wire.reader_protocol import (
    DIRECT,
    DONE,
    JSON_BYTES_MAX,
    LENGTH,
    PROXY,
    Answer,
    Call,
    socket_path,
)

# A call may wait until it is its turn, and a publish for its confirms.
ANSWER_S_MAX = 90.0
PART_BYTES_MAX = 256 << 10
NO_ARROW = (
    "pyarrow is not installed where the broker runs: pip install pyarrow, then restart the broker"
)

_answers = msgspec.json.Decoder(Answer)
_calls = msgspec.json.Encoder()


class ReaderLost(Exception):
    """The reader ended before its answer was complete."""


class Way(Protocol):
    """The bytes to and from a reader. All methods raise OSError."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self, count: int) -> bytes:
        """Return 1 to `count` bytes; none at the end."""

    def lend(self, client: int) -> bool:
        """Send DIRECT with the descriptor of a client's socket. Return False if that cannot be."""


class LocalWay:
    """The way to the reader of this node."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def receive(self, count: int) -> bytes:
        return await self._loop.sock_recv(self._sock, count)

    def lend(self, client: int) -> bool:
        socket.send_fds(self._sock, [DIRECT], [client])
        return True


class FarWay:
    """The way to the reader of another node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self, count: int) -> bytes:
        return await self._reader.read(count)

    def lend(self, client: int) -> bool:
        return False


class ReaderConnection:
    """A connection for one call: `ask`, and after status 200 to a scan `hand_over` or `parts`."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def ask(self, call: Call) -> Answer:
        """Send a call and return the answer. Raises ReaderLost, OSError or TimeoutError."""
        await self.send(call)
        return await self.answer()

    async def send(self, call: Call) -> None:
        data = _calls.encode(call)
        await self.write(LENGTH.pack(len(data)) + data)

    async def write(self, data: bytes) -> None:
        await self._way.send(data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(ANSWER_S_MAX):
            length = await self._length()
            if length > JSON_BYTES_MAX:
                raise ReaderLost
            return _answers.decode(await self._exactly(length))

    async def hand_over(self, client: int) -> bool:
        """Have the reader write to the client's socket itself; return when all is written.

        Returns False at once if the reader is on another node.
        """
        if not self._way.lend(client):
            return False
        if await self._exactly(len(DONE)) != DONE:
            raise ReaderLost
        return True

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield what the client is to get, in pieces."""
        await self._way.send(PROXY)
        while left := await self._length():
            while left:
                data = await self._way.receive(min(left, PART_BYTES_MAX))
                if not data:
                    raise ReaderLost
                left -= len(data)
                yield data

    async def _length(self) -> int:
        (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        return int(length)

    async def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            got = await self._way.receive(count - len(data))
            if not got:
                raise ReaderLost
            data += got
        return data


# Connects to the reader of a shard. Raises OSError when it is not there.
ToReader = Callable[[int], AbstractAsyncContextManager[ReaderConnection]]


@asynccontextmanager
async def connected(runtime_dir: str) -> AsyncIterator[ReaderConnection]:
    """Connect to the reader of this node. Raises OSError when it is not there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, socket_path(runtime_dir))
        yield ReaderConnection(LocalWay(sock))
    finally:
        sock.close()


def absence() -> tuple[int, str]:
    """Return HTTP status and reason for calls while the reader is not there."""
    if importlib.util.find_spec("pyarrow") is None:
        return 501, NO_ARROW
    return (
        503,
        "the reader of streams is not there: it starts, or the setting reader.enabled is false",
    )
