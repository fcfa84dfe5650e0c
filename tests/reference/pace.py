"""broker/front_door/pace.pxi in plain Python: how long small reads and small batches pile up.

Times are in seconds and given by the caller. `now` is of one clock, `busy` is the processor time
that the thread has had.
"""

from __future__ import annotations

from shardmq.broker.front_door.hot_state import (
    ALONE_PASSES,
    AT_ONCE_PASSES,
    COMPANY_PASSES,
    MUCH,
    PASSES_HELD_MAX,
    TIMES_ITS_WORK,
)


class Pace:
    """The pace of one front door. `tick_s` is the longest distance of small passes."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._last_pass = 0.0
        self._busy_then: float | None = None
        self._small_reads = False
        self._waited = False
        self._came = 0  # things in this pass so far
        self._alone = 0  # passes in a row that waited for nothing
        self._at_once = 0  # how many of the next passes do not wait
        self._reader = 0  # the client that was read last
        self._company = 0  # in how many of the next passes it has company

    def distance(self, now: float, busy: float | None) -> float:
        """Return how long a pass should sleep before it begins, so that other reads join it.

        To ask the kernel for `busy` takes longer than the rest, so it may be None unless this pass
        is near the one before. A pass does not wait behind a pass whose `busy` was None.
        """
        wait = 0.0
        may_wait = self._company or self._came >= MUCH
        if self._waited:
            self._alone = self._alone + 1 if self._came <= 1 else 0
            self._at_once = AT_ONCE_PASSES if self._alone >= ALONE_PASSES else 0
        if self._at_once:
            self._at_once -= 1
        elif may_wait and self._small_reads and busy is not None and self._busy_then is not None:
            wait = (
                self._last_pass + min(self._tick_s, TIMES_ITS_WORK * (busy - self._busy_then)) - now
            )
        self._company = max(0, self._company - 1)
        self._waited = wait > 0
        self._busy_then = busy
        self._last_pass = now + wait if wait > 0 else now
        self._small_reads = True
        self._came = 0
        return wait

    def read_by(self, client: int) -> None:
        """Note that the client with this number is read in this pass."""
        if client != self._reader:
            self._reader, self._company = client, COMPANY_PASSES

    def came(self, things: int) -> None:
        """Note how many publishes, acks and methods a read of this pass had."""
        self._came += things

    def worth_a_pass(self) -> None:
        """Note that a read of this pass was worth a pass of its own."""
        self._small_reads = False


class Reads:
    """Decides whether what a pass has for a shard may wait for the next pass.

    A read that filled the buffer says that there is more. After any other read its client may be
    waiting for an answer.
    """

    __slots__ = ("full", "held", "short")

    def __init__(self) -> None:
        self.full = self.short = 0  # reads of this pass
        self.held = 0  # passes that some batch has waited for

    def may_wait(self) -> bool:
        """Return, at the end of a pass, whether small batches may wait.

        The caller sets `held` to 0 when nothing had to wait.
        """
        full, short = self.full, self.short
        self.full = self.short = 0
        if short or self.held == PASSES_HELD_MAX or not (full or self.held):
            return False
        if full:
            self.held += 1
        return True
