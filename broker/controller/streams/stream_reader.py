"""The controller's calls to the reader of streams, with one connection for each.

`shardd/wire/reader_protocol.py` draws the protocol.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


class ReaderConnection:
    """A connection for one call: `ask`, and after status 200 to a scan `hand_over` or `parts`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def ask(self, call: Call) -> Answer:
        """Send a call and return the answer. Raises ReaderLost, OSError or TimeoutError."""
        await self.send(call)
        return await self.answer()

    async def send(self, call: Call) -> None:
        data = _calls.encode(call)
        await self.write(LENGTH.pack(len(data)) + data)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(ANSWER_S_MAX):
            length = await self._length()
            if length > JSON_BYTES_MAX:
                raise ReaderLost
            return _answers.decode(await self._exactly(length))

    async def hand_over(self, client: int) -> None:
        """Have the reader write to the client's socket itself; return when all is written."""
        socket.send_fds(self._sock, [DIRECT], [client])
        if await self._exactly(len(DONE)) != DONE:
            raise ReaderLost

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield what the client is to get, in pieces."""
        await self._loop.sock_sendall(self._sock, PROXY)
        while left := await self._length():
            while left:
                data = await self._loop.sock_recv(self._sock, min(left, PART_BYTES_MAX))
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
            got = await self._loop.sock_recv(self._sock, count - len(data))
            if not got:
                raise ReaderLost
            data += got
        return data


@asynccontextmanager
async def connected(runtime_dir: str) -> AsyncIterator[ReaderConnection]:
    """Connect to the reader. Raises OSError when it is not there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, socket_path(runtime_dir))
        yield ReaderConnection(sock)
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
