"""Send operations of a leader to its followers as they come, and pieces of files."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from shardmq.cluster import frames
from shardmq.cluster.compression import PLAIN
from shardmq.cluster.frame_streams import FrameStream
from shardmq.cluster.operations import OPERATION_BYTES, Numbered, OperationLog
from shardmq.cluster.rules import Position

FRAME_OPERATIONS_BYTES: Final = 1 << 20
# What is longer is compressed in a thread of its own, so that answers are heard meanwhile.
COMPRESSED_AT_ONCE_BYTES_MAX: Final = 64 << 10

log = logging.getLogger(__name__)


class Session:
    """A follower's connection. `after` is up to where operations were sent.

    method: by which data are compressed for this follower; "none" if they are not.
    """

    def __init__(self, node: str, number: int, method: str, stream: FrameStream) -> None:
        self.node = node
        self.number = number
        self.method = method
        self.stream = stream
        self.after = Position(0, 0)
        self.more = asyncio.Event()  # `has_more` sets it
        self.has_all = False  # what is new can be sent at once, and `more` is waited for
        self.wanted: asyncio.Future[frames.Want] = asyncio.get_running_loop().create_future()
        self._work: asyncio.Task[None] | None = None

    @property
    def is_clear(self) -> bool:
        """Return whether nothing waits to be written to the socket."""
        return self.stream.is_clear

    def send(self, message: frames.FromLeader | frames.Compressed) -> int:
        """Send a message, and return the bytes of its frame."""
        if self.stream.is_closing:
            return 0
        frame = frames.encode(message)
        self.stream.write(frame)
        return len(frame)

    def has_more(self) -> None:
        """Let the task that sends go on."""
        if self.stream.shared is not None:
            self.stream.shared.in_loop(self.more.set)
        else:
            self.more.set()

    def wants(self, message: frames.Want) -> None:
        """Take which pieces the follower wants."""
        if not self.wanted.done():
            self.wanted.set_result(message)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Work for the follower until the session ends; it ends with work that fails.

        Else the follower would wait for ever: its pings are answered, and nothing else comes.
        """
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("copies: the work for %s has failed", self.node, exc_info=error)
            self.stream.close()

    def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
        self.stream.close()


class Compressing:
    """Compresses operations for the followers: those at the same place get the same bytes."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._batch: tuple[Position, int] | None = None  # the first of the last ones, their number
        self._compressed: asyncio.Task[frames.Compressed | None]
        self._thread = ThreadPoolExecutor(1, "compression")

    async def compressed(self, operations: list[Numbered]) -> frames.Compressed | None:
        """Return a message with these operations, of no session; None if that does not pay."""
        batch = operations[0].at, len(operations)
        if self._batch != batch:
            self._batch = batch
            self._compressed = asyncio.create_task(self._compress(operations))
        # A session that ends ends only its own waiting.
        return await asyncio.shield(self._compressed)

    async def _compress(self, operations: list[Numbered]) -> frames.Compressed | None:
        message = operations_of(0, operations)
        size = sum(OPERATION_BYTES + len(each.data) for each in message.operations)
        if size <= COMPRESSED_AT_ONCE_BYTES_MAX:
            return frames.compressed(message, self._method)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, frames.compressed, message, self._method)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def operations_of(session: int, operations: list[Numbered]) -> frames.Operations:
    changes = [numbered.operation for numbered in operations]
    return frames.Operations(session, operations[0].at, changes)


class Sender:
    """Sends operations and pieces of files over the sessions of a leader.

    compression: the method for followers that understand it.
    lock: held by the caller of `has_news`.

    sent_bytes, plain_bytes: of what was sent, over all followers, and what they would be if nothing
        was compressed.
    """

    def __init__(self, operations: OperationLog, compression: str, lock: threading.RLock) -> None:
        self.sent_bytes = self.plain_bytes = 0
        self._lock = lock
        self._operations = operations
        self._compressing = Compressing(compression)

    def close(self) -> None:
        self._compressing.close()

    def has_news(self, session: Session) -> None:
        """Send what is new, at once if nothing waits to be sent and nothing is compressed."""
        if session.has_all and session.is_clear and session.method == PLAIN:
            self._send_operations(session)  # without a turn of the task
            if session.has_all:
                return
        session.has_more()

    async def stream(self, session: Session) -> None:
        """Send operations as they come."""
        try:
            while True:
                session.more.clear()
                if session.method != PLAIN:
                    await self._send_compressed(session)
                else:
                    with self._lock:
                        self._send_operations(session)
                await session.stream.drain()
                if session.has_all:
                    await session.more.wait()
        except OSError:
            session.stream.close()

    def _send_operations(self, session: Session) -> None:
        """Send the next operations as they are; `has_all` says whether these were the last."""
        if found := self._next(session):
            self.send_data(session, operations_of(session.number, found))
            session.after = found[-1].at

    async def _send_compressed(self, session: Session) -> None:
        """Send the next operations compressed, if that pays."""
        if found := self._next(session):
            compressed = await self._compressing.compressed(found)
            self.send_data(session, compressed or operations_of(session.number, found))
            session.after = found[-1].at

    def _next(self, session: Session) -> list[Numbered]:
        """Return the operations to be sent next; end the session if they are gone."""
        found = self._operations.after(session.after, FRAME_OPERATIONS_BYTES)
        if found is None:
            log.warning("copies: %s is too far behind, and is compared", session.node)
            session.stream.close()
        last = found[-1].at if found else session.after
        session.has_all = found is None or last == self._operations.last
        return found or []

    def send_data(self, session: Session, message: frames.Data | frames.Compressed) -> None:
        """Send data, and count their bytes. Compressed ones may be of no session yet."""
        if isinstance(message, frames.Compressed):
            sent = session.send(msgspec.structs.replace(message, session=session.number))
            self.plain_bytes += message.size
        else:
            sent = session.send(message)
            self.plain_bytes += sent
        self.sent_bytes += sent
