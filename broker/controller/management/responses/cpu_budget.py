"""Long work is done in slices, and all long work together keeps to a share of one processor.

All long work does one slice in a pass of the event loop, however many responses are being made. So
a short call, which needs a few passes, waits for a few slices, and not for a few slices of each
response. Messages go first: between two slices the processor is offered to other processes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable

# Rests are this many times as long as the work before them: long work takes a quarter of a
# processor.
REST_SHARE = 3.0
# Seconds of work that need no rest after a time without work: a page, or a call of monitoring.
AT_ONCE_S = 0.1
REST_S_MIN = 0.002  # shorter rests are saved up
REST_S_MAX = 1.0  # the longest single rest, however many responses are being made
# One response rests for this long in all, since Prometheus waits 10 s. Collecting the numbers of
# all queues, which a response may have to wait for, rests for half of it.
RESTS_S_MAX = 4.0
COLLECT_RESTS_S_MAX = RESTS_S_MAX / 2
SLICE_S = 0.001  # of work in one pass of the event loop
# After the processor was offered and taken, work goes on for this share of the time it was away
# before it is offered again. So responses are finished on a busy machine, too.
WAITED_SHARE = 0.05


class CpuBudget:
    """The seconds of work without a rest that all long responses of a thread have left together."""

    def __init__(self) -> None:
        self._left_s = AT_ONCE_S
        self._at = 0.0

    def rest_s(self, worked_s: float, now: float) -> float:
        """Return how many seconds to rest after that many seconds of work."""
        share = 1 / (1 + REST_SHARE)
        earned = self._left_s + share * (now - self._at)
        self._left_s = max(min(earned, AT_ONCE_S) - worked_s, -share * REST_S_MAX)
        self._at = now
        return max(0.0, -self._left_s / share)


class Passes:
    """Lets one slice of long work be done in each pass of the event loop, first come, first served.

    Work waits before each slice and holds nothing after the slice. So work that waits for something
    else, or is cancelled, does not hold up other work.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False  # `_next` runs in the next pass

    async def wait(self) -> None:
        """Wait for the pass in which the caller may do one slice, up to its next await."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._waiting, self._is_due = loop, deque(), False
        granted = loop.create_future()
        self._waiting.append(granted)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._next, loop)
        await granted

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Grant the pass after this one to whoever has waited longest."""
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._is_due = False


class SlicedWork:
    """The work for one long response, done in slices.

    Rests keep long work from occupying a processor for long: the kernel then wakes a waiting
    process on an idle processor rather than beside this thread.
    """

    budget = CpuBudget()  # shared: the controller makes responses in one thread
    passes = Passes()

    def __init__(
        self,
        rests_s_max: float = RESTS_S_MAX,
        worked: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the work.

        `rests_s_max`: seconds that it may rest in all. `worked` returns the seconds of processor
        time that this thread has used.
        """
        self._worked = worked
        self._clock = clock
        self._since = worked()  # the processor time when this work began or went on
        self._spent_s = 0.0  # work before `_since` that was not rested for
        self._offer_at = 0.0  # the processor time from which on the processor is offered again
        self.left_s = rests_s_max  # seconds that it may still rest
        self.rested_s = 0.0
        self._offer()

    def rest_s(self) -> float:
        """Return how many seconds to rest now."""
        self.pause()
        worked_s, self._spent_s = self._spent_s, 0.0
        rest = min(self.budget.rest_s(worked_s, self._clock()), self.left_s)
        if rest < REST_S_MIN:
            return 0.0
        self.left_s -= rest
        self.rested_s += rest
        return rest

    def pause(self) -> None:
        """Stop the clock before this work waits for something."""
        now = self._worked()
        self._spent_s += now - self._since
        self._since = now

    def resume(self) -> None:
        """Start the clock again: what this thread did meanwhile was other work."""
        self._since = self._worked()

    async def yield_to_others(self) -> None:
        """Offer the processor; after SLICE_S of work also rest and wait for the next pass.

        Call this between two pieces of work of some 50 us. A process that waits for this processor
        has messages in hand. When a waiting process wakes here, the kernel sets this thread aside;
        but once a third one has woken and slept again, the kernel may go back to this thread, which
        had less than its share, and looks again only at the next tick. Hence the frequent offers.
        """
        if self._spent_s + self._offer() - self._since >= SLICE_S:
            if rest_s := self.rest_s():
                await asyncio.sleep(rest_s)
            await self.passes.wait()
            self.resume()

    def _offer(self) -> float:
        """Offer the processor if that is due, and return the processor time before."""
        now = self._worked()  # a system call of 0.3 us
        # A thread that yields goes to the end of the queue (Linux 6.18).
        if now >= self._offer_at:
            begun = self._clock()
            os.sched_yield()
            self._offer_at = now + WAITED_SHARE * (self._clock() - begun)
        return now
