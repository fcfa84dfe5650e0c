"""Bytes on their way to one socket, and the credit that is due when they have left.

How a socket is closed behind its last bytes is here, too.
"""

from __future__ import annotations

import asyncio
import socket

from shardmq.broker.front_door.hot_state import OutputState
from shardmq.broker.front_door.tls import TlsSocket
from shardmq.shardd.wire.shared_memory import Run

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


class Output(OutputState):
    """The output of one connection, in order."""

    __slots__ = ("_borrows", "_looked")

    def __init__(self) -> None:
        self._borrows = False  # some chunks are views of memory that others will change
        self._looked = 0  # bytes made for the client before the last own_lent()

    def add_parts_then_credit(
        self, parts: list[bytes | memoryview], shard: int, epoch: int, credit: int
    ) -> None:
        """Add parts of one piece, as add_then_credit(). They are not copied before own()."""
        self._borrows = True
        self.chunks.extend(parts)
        self.pending += sum(map(len, parts))
        self.credit_when_written(shard, epoch, credit)

    def write(self, sock: Stream) -> bool:
        """Write as much as the kernel takes, and return whether that was all.

        Raises OSError when the connection is gone.
        """
        chunks = self.chunks
        try:
            while chunks:
                if len(chunks) == 1:
                    self._drop(sock.send(chunks[0]))
                else:
                    self._drop(sock.sendmsg(chunks[:SEND_CHUNKS_MAX]))
        except (BlockingIOError, InterruptedError):
            return False
        return True

    def was_sent(self, count: int) -> bool:
        """Note that so many bytes were sent before. Return False if there are not so many."""
        if count > self.pending:
            return False
        if count:
            self._drop(count)
        return True

    def own(self) -> None:
        """Copy what is left of borrowed parts: their memory is about to change."""
        if self._borrows:
            self._borrows = False
            self.chunks = [_owned(chunk) for chunk in self.chunks]

    def own_lent(self) -> None:
        """Copy bodies that the client has not taken since the last call.

        Their memory can be lent again. One small body may hold the memory of a whole read, so a
        slow client would cost much more than what waits for it.
        """
        left = self._looked - self.written
        self._looked = self.written + self.pending
        for at, chunk in enumerate(self.chunks):
            if left <= 0:
                return
            left -= len(chunk)
            if isinstance(chunk, memoryview):
                self.chunks[at] = bytes(chunk)

    async def room(self) -> None:
        """Return when so much was taken that more may be made for this client."""
        while self.pending > OUT_BYTES_MAX:
            if self.has_room is None:
                self.has_room = asyncio.Event()
            await self.has_room.wait()

    def _drop(self, count: int) -> None:
        self.pending -= count
        self.written += count
        self.writes += 1
        if self.has_room is not None and self.pending <= OUT_BYTES_MAX // 2:
            self.has_room.set()
            self.has_room = None
        chunks, taken = self.chunks, 0
        if not self.pending:
            chunks.clear()
            return
        while count and count >= len(chunks[taken]):
            count -= len(chunks[taken])
            taken += 1
        del chunks[:taken]
        if count:
            chunks[0] = memoryview(chunks[0])[count:]


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
