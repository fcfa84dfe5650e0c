"""The streams of copies: how a follower reaches the leader, and how the leader takes a follower."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Final

from shardmq.cluster.following import NotLeading
from shardmq.cluster.frame_streams import FrameStream
from shardmq.cluster.leading import LeaderOfCopies
from shardmq.cluster.rules import Record
from shardmq.cluster.streams import (
    Address,
    NoStream,
    Opening,
    TooDifferent,
    open_stream,
)

# A leader that cannot be reached for so long is taken for gone, whatever its lease says.
UNREACHED_S_MAX: Final = 2.0

log = logging.getLogger(__name__)


class CopyStreams:
    """The streams of a follower to the nodes that lead, one after the other.

    tls, opening: what each stream begins with.
    record: returns the record of the copies.
    address: returns where a node is reached; None if it is not alive.
    gone: called with a term whose leader has not been reached for UNREACHED_S_MAX. Whether the
        leader is gone, or only cannot be reached from here, is decided by the record.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        opening: Opening,
        record: Callable[[], Record | None],
        address: Callable[[str], Address | None],
        gone: Callable[[int], None],
    ) -> None:
        self._tls = tls
        self._opening = opening
        self._record = record
        self._address = address
        self._gone = gone
        self._unreached: tuple[int, float] | None = None  # a term, and since when (loop time)
        self._logged = ""  # why no copy was given

    async def connect(self, leader: str) -> FrameStream:
        """Open a stream to a node. Raises OSError, or NotLeading."""
        address, record = self._address(leader), self._record()
        loop = asyncio.get_running_loop()
        try:
            if address is None:
                raise NoStream("it is not alive")
            stream = FrameStream()
            await open_stream(address, self._tls, self._opening, stream)
        except NoStream as error:
            if error.life:
                raise NotLeading(error.life) from None
            if isinstance(error, TooDifferent):  # it leads, but not this node
                if self._logged != str(error):
                    self._logged = str(error)
                    log.error("%s gives no copy to this node: %s", leader, error)
                raise OSError(str(error)) from None
            term = 0 if record is None else record.term
            if self._unreached is None or self._unreached[0] != term:
                self._unreached = term, loop.time()
            elif loop.time() - self._unreached[1] > UNREACHED_S_MAX:
                self._gone(term)
            raise OSError(str(error)) from None
        self._unreached = None
        return stream


def copies_protocol(copies: LeaderOfCopies) -> FrameStream:
    """Return the protocol of the stream of a node that follows."""

    async def serve(stream: FrameStream) -> None:
        # The end of the process cancels it, and asyncio would log that as an error.
        with contextlib.suppress(asyncio.CancelledError):
            await copies.serve(stream)

    return FrameStream(serve)
