"""When a front door lets small reads pile up, and when it stays awake for an answer: two decisions about time.

*Distance.* Clients that write one message at a time would turn each into a wake-up of every process on its way. While
reads are small and come fast, passes keep a distance of a tick, so that many of them make a batch.

*Staying awake.* While messages come rarely, half of the time from publish to delivery is spent in processors that were
asleep and caches that are cold. A front door that has just handed a rare batch to a shard looks again and again for the
answer, for a bounded moment, instead of going to sleep; if that was in vain a few times (nobody consumes, nobody wants
a confirm), only now and then. Erlang's schedulers do the same (+sbwt).

Times are in seconds of one clock, given by the caller.
"""

from __future__ import annotations

# Passes with less than this many ticks between them are no rare ones: the processors are awake anyway.
RARE_TICKS = 2
# So many waits in vain, and only one in VAIN_EACH is tried.
VAIN_MAX = 4
VAIN_EACH = 64


class Pace:
    """`tick_s`: the distance of small passes; `awake_s`: how long to stay awake, 0: never."""

    def __init__(self, tick_s: float, awake_s: float) -> None:
        self._tick_s = tick_s
        self._awake_s = awake_s
        self._last_pass = 0.0
        self._small_reads = False
        self._rare = False
        self._until = 0.0  # awake; 0: not waiting
        self._vain = 0

    def distance(self, now: float) -> float:
        """A pass wants to begin: how long it should sleep first, so that the others' reads join it."""
        since = now - self._last_pass
        self._rare = since >= RARE_TICKS * self._tick_s
        wait = self._tick_s - since if self._small_reads else 0.0
        self._last_pass = now + wait if wait > 0 else now
        self._small_reads = True
        return wait

    def was_large(self) -> None:
        """A read of this pass was worth a pass of its own."""
        self._small_reads = False

    def handed_over(self, now: float) -> bool:
        """A pass gave something to a shard: whether to stay awake now."""
        if not self._rare or not self._awake_s or self._until:
            return False
        self._rare = False
        if self._vain > VAIN_MAX and self._vain % VAIN_EACH:
            self._vain += 1
            return False
        self._until = now + self._awake_s
        return True

    def answered(self) -> None:
        """A shard said something."""
        if self._until:
            self._until = 0.0
            self._vain = 0

    def still_awake(self, now: float) -> bool:
        """Whether to look once more."""
        if not self._until:
            return False
        if now < self._until:
            return True
        self._until = 0.0
        self._vain += 1
        return False
