"""Streams of frames between a leader and a follower: what comes is taken from one buffer.

A frame is handed out as a view of the buffer into which TLS has decrypted it, so that its bytes are
copied only once, by whoever keeps them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

from shardmq.cluster.frames import FRAME_BYTES_MAX, LENGTH, BadFrame
from shardmq.cluster.shared_ends import SharedEnd

BUFFER_BYTES: Final = 256 << 10
# A buffer that has grown for a longer frame is kept up to this size. The longest frames of
# operations, and all pieces, are shorter.
KEPT_BYTES: Final = 4 << 20

log = logging.getLogger(__name__)

Take = Callable[[memoryview], None]
Serve = Callable[["FrameStream"], Coroutine[Any, Any, None]]


class FrameStream(asyncio.BufferedProtocol):
    """One end of a stream of frames. Nothing is taken from it before `first` or `take_all`.

    serve: begun with this stream when it is connected; None if the caller has connected it.

    shared: its end, if threads may write and hear, too. Then a frame is taken in such a thread.
    """

    def __init__(self, serve: Serve | None = None) -> None:
        self._serve = serve
        self._serving: asyncio.Task[None] | None = None
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0  # of the bytes that are not taken yet
        self._take: Take | None = None
        self._is_held = False  # nothing is read, because somebody has too much, or nobody takes
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_lost = False
        self.shared: SharedEnd | None = None
        self._lock: AbstractContextManager[object] = nullcontext()  # that of a shared end
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- for the two ends --------------------------------------------------------------------------

    async def first(self) -> bytes:
        """Return the bytes of the next frame. Raises what `take_all` raises."""
        found: list[bytes] = []
        came = asyncio.Event()

        def take(frame: memoryview) -> None:
            found.append(bytes(frame))
            self._take = None
            came.set()

        self._ended.add_done_callback(lambda _: came.set())
        self._begin(take)
        await came.wait()
        if not found:
            self._ended.result()
        return found[0]

    async def take_all(self, take: Take) -> None:
        """Call `take` with each frame until the stream ends. A view is valid during its call only.

        Frames that came while the stream was held are dropped if it ends meanwhile. Raises EOFError
        or OSError at the end of the stream, BadFrame, and what `take` raises.
        """
        self._begin(take)
        await self._ended

    def hold(self) -> None:
        """Read nothing more, and hand out no frame, until `go_on`."""
        self._is_held = True
        self._transport.pause_reading()

    def go_on(self) -> None:
        with self._lock:
            self._is_held = False
            self._look()
            if not self._is_held and not self._is_lost:
                self._transport.resume_reading()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def is_clear(self) -> bool:
        """Return whether nothing waits to be written."""
        return not self._transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray) -> None:
        """Write a frame. Nobody may change its bytes any more."""
        self._transport.write(data)

    async def drain(self) -> None:
        """Return when there is room for more to be written. Raises ConnectionResetError."""
        await self._has_room.wait()
        if self._is_lost:
            raise ConnectionResetError("the stream has ended")

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # -- asyncio.BufferedProtocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it
        self.shared = transport.get_extra_info("shared end")
        if self.shared is not None:
            self._transport, self._lock = self.shared, self.shared.lock
        if self._serve is not None:
            self._serving = asyncio.get_running_loop().create_task(self._serve(self))
            self._serving.add_done_callback(_log_failure)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._has_room.set()
        self._fail(error or EOFError("the other end has closed it"))

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._look()

    # -- frames ------------------------------------------------------------------------------------

    def _begin(self, take: Take) -> None:
        with self._lock:
            self._take = take
            self.go_on()

    def _look(self) -> None:
        """Hand out the frames that are whole, and make room for the next bytes."""
        try:
            needed = self._hand_out()
        except Exception as error:
            if self.shared is not None:
                self.shared.in_loop(self._fail, error)
            else:
                self._fail(error)
            self._transport.close()
            return
        waiting = self._end - self._start
        size = len(self._buffer)
        if needed > size or (size > KEPT_BYTES and not waiting):
            grown = memoryview(bytearray(max(needed, BUFFER_BYTES)))
            grown[:waiting] = self._buffer[self._start : self._end]
            self._buffer = grown
        elif waiting and self._start:
            self._buffer[:waiting] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, waiting
        if waiting == len(self._buffer):  # frames that nobody takes at present
            self.hold()

    def _hand_out(self) -> int:
        """Hand out the frames that are whole; return how long the next one is, 0 if unknown."""
        while (
            self._take is not None
            and not self._ended.done()
            and not self._is_held
            and self._end - self._start >= LENGTH.size
        ):
            (length,) = LENGTH.unpack_from(self._buffer, self._start)
            if length > FRAME_BYTES_MAX:
                raise BadFrame(f"a frame of {length} bytes")
            begin = self._start + LENGTH.size
            if begin + length > self._end:
                return int(LENGTH.size + length)
            self._start = begin + length
            with self._buffer[begin : self._start] as frame:
                self._take(frame)
        return 0

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # nobody may be waiting


def _log_failure(serving: asyncio.Task[None]) -> None:
    """Log at once what has ended a stream's service; nobody waits for the task."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log.error("a stream of copies has failed", exc_info=error)
