"""Bytes on their way to one socket, the credit due when they have left, and how a socket is closed after them."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from itertools import islice

from shardmq.broker.front_door.tls import TlsSocket

# Unsent output past which a client is not read any more (deliveries have their own window, see the shard).
OUT_BYTES_MAX = 1 << 20
# Chunks given to one sendmsg; the system's limit is 1024.
SEND_CHUNKS_MAX = 512
# How long a client may take to close its side when ours is closed.
LINGER_S = 1.0
DISCARD_BYTES = 65536

# What bytes go to: plain, or through TLS; decided once, when the connection is made.
Stream = socket.socket | TlsSocket


class Output:
    """In order. `pending`: bytes not yet taken by the kernel; `written`: bytes that were, in all; `due`: credits
    that wait for that."""

    __slots__ = ("_borrows", "_chunks", "_has_room", "due", "pending", "written")

    def __init__(self) -> None:
        self._chunks: deque[bytes | memoryview] = deque()
        self._borrows = False  # some chunks are views of what is not ours
        self.due: deque[tuple[int, int, int, int]] = (
            deque()
        )  # (bytes written by then, shard, its epoch, credit)
        self._has_room: asyncio.Event | None = None  # somebody waits for it
        self.pending = 0
        self.written = 0

    def add(self, data: bytes) -> None:
        self._chunks.append(data)
        self.pending += len(data)

    def add_then_credit(self, data: bytes, shard: int, epoch: int, credit: int) -> None:
        """`credit` is due to `shard` when all that was added so far is written."""
        self._chunks.append(data)
        self.pending += len(data)
        self.due.append((self.written + self.pending, shard, epoch, credit))

    def add_parts_then_credit(
        self, parts: list[bytes | memoryview], shard: int, epoch: int, credit: int
    ) -> None:
        """As one; they are not copied before own()."""
        self._borrows = True
        self._chunks.extend(parts)
        self.pending += sum(map(len, parts))
        self.due.append((self.written + self.pending, shard, epoch, credit))

    def write(self, sock: Stream) -> bool:
        """As much as the kernel takes; whether that was all. Raises OSError when the connection is gone."""
        chunks = self._chunks
        try:
            while chunks:
                if len(chunks) == 1:
                    self._drop(sock.send(chunks[0]))
                else:
                    self._drop(sock.sendmsg([*islice(chunks, SEND_CHUNKS_MAX)]))
        except (BlockingIOError, InterruptedError):
            return False
        return True

    def own(self) -> None:
        """Who lent us the parts wants them back: what is left of them is copied."""
        if self._borrows:
            self._borrows = False
            self._chunks = deque(_owned(chunk) for chunk in self._chunks)

    async def room(self) -> None:
        """Until so much was taken that more may be made for this client."""
        while self.pending > OUT_BYTES_MAX:
            if self._has_room is None:
                self._has_room = asyncio.Event()
            await self._has_room.wait()

    def take_credits(self) -> list[tuple[int, int, int]]:
        """(shard, epoch, credit) that became due."""
        waiting, due = self.due, []
        while waiting and waiting[0][0] <= self.written:
            due.append(waiting.popleft()[1:])
        return due

    def _drop(self, count: int) -> None:
        self.pending -= count
        self.written += count
        if self._has_room is not None and self.pending <= OUT_BYTES_MAX // 2:
            self._has_room.set()
            self._has_room = None
        chunks = self._chunks
        if not self.pending:
            chunks.clear()
            return
        while count:
            head = chunks[0]
            if count < len(head):
                chunks[0] = memoryview(head)[count:]
                return
            count -= len(head)
            chunks.popleft()


def _owned(chunk: bytes | memoryview) -> bytes | memoryview:
    """A rest of bytes is nobody else's."""
    return (
        bytes(chunk)
        if isinstance(chunk, memoryview) and not isinstance(chunk.obj, bytes)
        else chunk
    )


def close_behind_output(loop: asyncio.AbstractEventLoop, sock: Stream, shut: bool) -> None:
    """Close when the client has, or after a while. `shut`: let it see our end at once.

    Closing with bytes of the client's unread would make the kernel send a reset, which takes from the client what it
    has not read yet: our close-ok, or what it did wrong.
    """
    try:
        if shut:
            sock.shutdown(socket.SHUT_WR)
    except OSError:
        sock.close()
        return

    def end() -> None:
        loop.remove_reader(sock.fileno())
        sock.close()

    def discard() -> None:
        try:
            if sock.recv(DISCARD_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        late.cancel()
        end()

    late = loop.call_later(LINGER_S, end)
    loop.add_reader(sock.fileno(), discard)
