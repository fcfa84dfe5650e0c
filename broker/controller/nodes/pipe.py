"""Two connections of which each sends what the other one receives.

An end that cannot be written to makes the other one stop reading, so a pipe holds no more than the
buffers of two transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

# Enough for the first line of a request with two long names.
ASKED_BYTES_MAX: Final = 2 << 10


class PipeEnd(asyncio.Protocol):
    """One of the two ends; it does not read before `join`.

    on_made: called with the end when its connection is there.
    on_end: called with the end when its connection is gone.
    unanswered: returns what is sent to this end if it has asked something, and the other end is
        lost before it has sent anything. It gets the first ASKED_BYTES_MAX bytes of what this end
        has asked. What comes behind a first answer may be the rest of it, so nothing is put behind
        that.
    """

    def __init__(
        self,
        on_made: Callable[[PipeEnd], None] = lambda end: None,
        on_end: Callable[[PipeEnd], None] = lambda end: None,
        unanswered: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._on_made = on_made
        self._on_end = on_end
        self._unanswered = unanswered
        self._joined: PipeEnd | None = None
        self._has_sent = False
        self._asked = b""  # only for `unanswered`
        self.early = b""  # came in the same read as what was before the pipe
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it
        self.transport.pause_reading()
        self._on_made(self)

    def join(self, other: PipeEnd) -> None:
        """Let the two ends have each other's bytes. Both have their connections."""
        self._joined, other._joined = other, self
        for end, far in ((self, other), (other, self)):
            if far.is_over:
                end._lost_other()
                return
            if end.early:
                far.transport.write(end.early)
                end.early = b""
        self.transport.resume_reading()
        other.transport.resume_reading()

    def abort_joined(self) -> None:
        """End the connections of both ends at once, if this end is joined."""
        if self._joined is not None:
            self._joined.transport.abort()
            if not self._answer_for_other():
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._has_sent = True
        if self._unanswered is not None and len(self._asked) < ASKED_BYTES_MAX:
            self._asked += data[: ASKED_BYTES_MAX - len(self._asked)]
        if self._joined is None:
            self.early += data
        elif not self._joined.transport.is_closing():
            self._joined.transport.write(data)

    def eof_received(self) -> None:
        """Let the transport close: TLS cannot say that one direction alone has ended."""

    def pause_writing(self) -> None:
        if self._joined is not None and not self._joined.transport.is_closing():
            self._joined.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._joined is not None and not self._joined.transport.is_closing():
            self._joined.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        if self._joined is not None:
            self._joined._lost_other()
        self._on_end(self)

    def _lost_other(self) -> None:
        if not self._answer_for_other():
            self.transport.close()

    def _answer_for_other(self) -> bool:
        """Answer in place of the other end, if that is due, and close; return whether it was."""
        other = self._joined
        if (
            self._unanswered is None
            or not self._has_sent
            or (other is not None and other._has_sent)
            or self.transport.is_closing()
        ):
            return False
        self.transport.write(self._unanswered(self._asked))
        self.transport.close()
        return True
