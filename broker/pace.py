"""When a front door lets small reads, or small batches of large ones, pile up.

Clients that write one message at a time would turn each into a wake-up of every process on its way. While reads are
small and come fast, passes keep a distance of a tick, so that many of them make a batch. Who sends rarely never waits.

Times are in seconds of one clock, given by the caller.
"""

from __future__ import annotations

# Then everything leaves, however little it is.
PASSES_HELD_MAX = 4


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


class Reads:
    """Whether what a pass has for a shard may wait for the next pass. A read that filled the buffer says that more is
    at hand; after any other its client may be waiting for an answer."""

    __slots__ = ("full", "held", "short")

    def __init__(self) -> None:
        self.full = self.short = 0  # in this pass
        self.held = 0  # passes that something has waited for

    def may_wait(self) -> bool:
        """A pass ends. `held` is 0 again when nothing had to wait: that is the caller's to say."""
        full, short = self.full, self.short
        self.full = self.short = 0
        if short or self.held == PASSES_HELD_MAX or not (full or self.held):
            return False
        if full:
            self.held += 1
        return True
