"""When a front door lets small reads, or small batches of large ones, pile up.

Clients that write one message at a time would turn each into a wake-up of every process on its way. While reads are
small and come fast, passes keep a distance, so that many of them make a batch: as long as small passes leave most of
the processor to others a short one, up to a tick when they do not. Who sends rarely never waits; nor does who sends one
message and waits for what comes of it, for nothing joins that however long it lies there.

Times are in seconds, given by the caller: `now` of one clock, `busy` is the processor time this thread has had.
"""

from __future__ import annotations

# Then everything leaves, however little it is.
PASSES_HELD_MAX = 4
# The distance, in times of what the pass before it took of the processor: small passes take a third of it at the most,
# unless that needs more than a tick.
TIMES_ITS_WORK = 3.0
# So many that waited, one after the other, and had only one thing to do for it: nothing more comes. So many after them
# do not wait, then one finds out again.
ALONE_PASSES = 4
AT_ONCE_PASSES = 16


class Pace:
    """`tick_s`: the longest distance of small passes."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._last_pass = 0.0
        self._busy_then = 0.0
        self._small_reads = False
        self._waited = False
        self._came = 0  # in this pass so far
        self._alone = 0  # passes that waited for nothing
        self._at_once = 0  # passes that do not wait

    def distance(self, now: float, busy: float) -> float:
        """A pass wants to begin: how long it should sleep first, so that the others' reads join it."""
        wait = 0.0
        if self._waited:
            self._alone = self._alone + 1 if self._came <= 1 else 0
            self._at_once = AT_ONCE_PASSES if self._alone >= ALONE_PASSES else 0
        if self._at_once:
            self._at_once -= 1
        elif self._small_reads:
            wait = (
                self._last_pass + min(self._tick_s, TIMES_ITS_WORK * (busy - self._busy_then)) - now
            )
        self._waited = wait > 0
        self._busy_then = busy
        self._last_pass = now + wait if wait > 0 else now
        self._small_reads = True
        self._came = 0
        return wait

    def came(self, things: int) -> None:
        """With a read of this pass: publishes, acks, methods."""
        self._came += things

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
