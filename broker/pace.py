"""When a front door lets small reads pile up: a decision about time.

Clients that write one message at a time would turn each into a wake-up of every process on its way. While reads are
small and come fast, passes keep a distance of a tick, so that many of them make a batch. Who sends rarely never waits.

Times are in seconds of one clock, given by the caller.
"""

from __future__ import annotations


class Pace:
    """`tick_s`: the distance of small passes."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._last_pass = 0.0
        self._small_reads = False

    def distance(self, now: float) -> float:
        """A pass wants to begin: how long it should sleep first, so that the others' reads join it."""
        wait = self._last_pass + self._tick_s - now if self._small_reads else 0.0
        self._last_pass = now + wait if wait > 0 else now
        self._small_reads = True
        return wait

    def was_large(self) -> None:
        """A read of this pass was worth a pass of its own."""
        self._small_reads = False
