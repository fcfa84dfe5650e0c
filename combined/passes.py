"""Run the passes of a shard in an event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from shardmq.shardd.server import Server

# The shard counts its timers in whole milliseconds.
CLOCK_S = 0.001


class Passes:
    """The passes of one shard, each in a turn of the event loop of its process.

    A pass runs when a descriptor of the shard reports something, when `soon` was called, and when
    the shard has a timer that is due. `then` is called behind each pass. `failed` is called once if
    a pass raises; then no pass follows.
    """

    def __init__(
        self,
        aio: asyncio.AbstractEventLoop,
        server: Server,
        then: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._aio = aio
        self._server = server
        self._then = then
        self._failed = failed
        self._is_soon = self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # loop time

    def begin(self) -> None:
        """Begin to serve. Raises what the start of a shard may raise."""
        self._server.begin()
        self._aio.add_reader(self._server.links.poll.fileno(), self._heard)
        self.soon()

    def end(self) -> None:
        """Run no pass any more."""
        self._aio.remove_reader(self._server.links.poll.fileno())
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def soon(self) -> None:
        """Run a pass before the event loop waits again."""
        if not self._is_soon:
            self._is_soon = True
            self._aio.call_soon(self.run_if_soon)

    def run_if_soon(self) -> None:
        """Run the pass that is wanted soon, if there is one, at once."""
        if self._is_soon and not self._is_over:
            self._run([])

    def _heard(self) -> None:
        self._run(self._server.links.poll.poll(0))

    def _timer_is_due(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._run([])

    def _run(self, events: list[tuple[int, int]]) -> None:
        self._is_soon = False
        server = self._server
        try:
            server.turn(events)
        except Exception as error:
            self.end()
            self._failed(error)
            return
        self._then()
        wait_ms = server.wait_ms()
        if wait_ms and server.links.may_wait():
            self._run_within(wait_ms / 1000)
        else:
            self.soon()

    def _run_within(self, wait_s: float) -> None:
        """Set the timer, unless it is due earlier anyway: then it finds out what is due."""
        at = self._aio.time() + wait_s
        if at < self._timer_at - CLOCK_S:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._aio.call_at(at, self._timer_is_due), at
