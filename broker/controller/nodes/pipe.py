"""Two connections of which each sends what the other one receives.

An end that cannot be written to makes the other one stop reading, so a pipe holds no more than the
buffers of two transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class PipeEnd(asyncio.Protocol):
    """One of the two ends; it does not read before `join`.

    on_made: called with the end when its connection is there.
    on_end: called with the end when its connection is gone.
    """

    def __init__(
        self,
        on_made: Callable[[PipeEnd], None] = lambda end: None,
        on_end: Callable[[PipeEnd], None] = lambda end: None,
    ) -> None:
        self._on_made = on_made
        self._on_end = on_end
        self._other: asyncio.Transport | None = None
        self._early = b""  # came in the same read as what was before the pipe
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it
        self.transport.pause_reading()
        self._on_made(self)

    def join(self, other: PipeEnd) -> None:
        """Let the two ends have each other's bytes. Both have their connections."""
        for end, far in ((self, other), (other, self)):
            end._other = far.transport
            if far.is_over:
                end.transport.close()
                return
            if end._early:
                far.transport.write(end._early)
                end._early = b""
        self.transport.resume_reading()
        other.transport.resume_reading()

    def abort_joined(self) -> None:
        """End the connections of both ends at once, if this end is joined."""
        if self._other is not None:
            self._other.abort()
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
        elif not self._other.is_closing():
            self._other.write(data)

    def eof_received(self) -> None:
        """Let the transport close: TLS cannot say that one direction alone has ended."""

    def pause_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        if self._other is not None:
            self._other.close()
        self._on_end(self)
