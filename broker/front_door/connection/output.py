"""Bytes on their way to one socket, and the credit that is due when they have left.

How a socket is closed behind its last bytes is here, too.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from itertools import islice

from shardmq.broker.front_door.tls import TlsSocket
from shardmq.shardd.wire.bodies import Run

# Unsent output past which a client is not read any more. Deliveries have a window of their own,
# which the shard keeps.
OUT_BYTES_MAX = 1 << 20
# Chunks given to one sendmsg; the system's limit is 1024.
SEND_CHUNKS_MAX = 512
# How long a client may take to close its side when ours is closed.
LINGER_S = 1.0
DISCARD_BYTES = 65536

# Where bytes go: plain, or through TLS. Decided once, when the connection is made.
Stream = socket.socket | TlsSocket


class Output:
    """The output of one connection, in order.

    `pending` counts the bytes that the kernel has not taken, `written` those that it has. `due`
    holds credits that wait for bytes to be written: how many bytes are written by then, the shard,
    its epoch, the credit.
    """

    __slots__ = ("_borrows", "_chunks", "_has_room", "due", "pending", "written")

    def __init__(self) -> None:
        self._chunks: deque[bytes | memoryview] = deque()
        self._borrows = False  # some chunks are views of memory that others will change
        self.due: deque[tuple[int, int, int, int]] = deque()
        self._has_room: asyncio.Event | None = None  # some task waits for room
        self.pending = 0
        self.written = 0

    def add(self, data: bytes) -> None:
        self._chunks.append(data)
        self.pending += len(data)

    def add_then_credit(self, data: bytes, shard: int, epoch: int, credit: int) -> None:
        """Add bytes; `credit` is due to `shard` when all that was added so far is written."""
        self._chunks.append(data)
        self.pending += len(data)
        self.due.append((self.written + self.pending, shard, epoch, credit))

    def add_parts_then_credit(
        self, parts: list[bytes | memoryview], shard: int, epoch: int, credit: int
    ) -> None:
        """Add parts of one piece, as add_then_credit(). They are not copied before own()."""
        self._borrows = True
        self._chunks.extend(parts)
        self.pending += sum(map(len, parts))
        self.due.append((self.written + self.pending, shard, epoch, credit))

    def write(self, sock: Stream) -> bool:
        """Write as much as the kernel takes, and return whether that was all.

        Raises OSError when the connection is gone.
        """
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
        """Copy what is left of borrowed parts: their memory is about to change."""
        if self._borrows:
            self._borrows = False
            self._chunks = deque(_owned(chunk) for chunk in self._chunks)

    async def room(self) -> None:
        """Return when so much was taken that more may be made for this client."""
        while self.pending > OUT_BYTES_MAX:
            if self._has_room is None:
                self._has_room = asyncio.Event()
            await self._has_room.wait()

    def take_credits(self) -> list[tuple[int, int, int]]:
        """Take the credits that became due: shard, its epoch, the credit."""
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
    """Return the chunk, copied if others will change its memory.

    Nobody changes a `bytes` object, nor a lent body while some view holds it.
    """
    return (
        bytes(chunk)
        if isinstance(chunk, memoryview) and not isinstance(chunk.obj, bytes | Run)
        else chunk
    )


def close_behind_output(loop: asyncio.AbstractEventLoop, sock: Stream, shut: bool) -> None:
    """Close when the client has closed, or after a while. `shut` lets it see our end at once.

    If bytes of the client were unread at the close, the kernel would send a reset, which takes from
    the client what it has not read yet: our close-ok, or the reason why we close.
    """

    def end() -> None:
        loop.remove_reader(sock.fileno())
        sock.close()

    try:
        if shut:
            sock.shutdown(socket.SHUT_WR)
    except OSError:
        end()
        return

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
