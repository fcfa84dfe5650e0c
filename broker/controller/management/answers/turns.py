"""Long work is done in slices; between two of them everybody else has a turn.

All long works together do one slice in a pass of the event loop, however many works there are. So a
short call, which needs a few passes, waits for a few slices, and not for a few slices of each work.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable

REST_SHARE = 3.0  # who works long rests so many times as long as he worked: it takes a quarter of a processor
AT_ONCE_S = 0.05  # of work without a rest, where there was none for some time: a page, or what monitoring asks for
REST_S_MIN = 0.002  # shorter ones are put together
REST_S_MAX = 1.0  # at a time, however many work
RESTS_S_MAX = 4.0  # of one answer, and of the look at all queues it may be made of half as long: who scrapes waits 10 s
LOOK_RESTS_S_MAX = RESTS_S_MAX / 2
LOOP_S = 0.001  # of work in one pass of the event loop; within it the processor alone is offered
# Who had to wait for the processor works on for this share of that time before it is offered again: where processors
# are always wanted a long answer comes to its end, too.
WAITED_SHARE = 0.05


class Budget:
    """Seconds of work that are due without a rest, for all long answers of a thread together."""

    def __init__(self) -> None:
        self._left_s = AT_ONCE_S
        self._at = 0.0

    def rest_s(self, worked_s: float, now: float) -> float:
        """How long to rest after that much work."""
        share = 1 / (1 + REST_SHARE)
        earned = self._left_s + share * (now - self._at)
        self._left_s = max(min(earned, AT_ONCE_S) - worked_s, -share * REST_S_MAX)
        self._at = now
        return max(0.0, -self._left_s / share)


class Passes:
    """Lets one slice of long work be done in each pass of the event loop, first come, first served.

    A work asks before each slice, and holds nothing after the slice: a work that waits for something
    else, or is cancelled, is in nobody's way.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False  # `_next` runs in the next pass

    async def mine(self) -> None:
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


class Turns:
    """Those of one long answer. What long answers do together does not keep a processor busy for long: what waits for
    one is woken on an idle one, rather than beside this."""

    budget = Budget()  # the controller's one thread's
    passes = Passes()

    def __init__(
        self,
        rests_s_max: float = RESTS_S_MAX,
        worked: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worked`: seconds this thread has worked."""
        self._worked = worked
        self._clock = clock
        self._since = worked()
        self._spent_s = 0.0  # before that, and not rested for
        self._offer_at = 0.0  # of `worked`
        self.left_s = rests_s_max  # that it may still rest
        self.rested_s = 0.0
        self._offer()

    def rest_s(self) -> float:
        """For how long to rest now."""
        self.pause()
        worked_s, self._spent_s = self._spent_s, 0.0
        rest = min(self.budget.rest_s(worked_s, self._clock()), self.left_s)
        if rest < REST_S_MIN:
            return 0.0
        self.left_s -= rest
        self.rested_s += rest
        return rest

    def pause(self) -> None:
        """This answer waits for something."""
        now = self._worked()
        self._spent_s += now - self._since
        self._since = now

    def go_on(self) -> None:
        """What others did meanwhile is theirs."""
        self._since = self._worked()

    async def others_first(self) -> None:
        """Between two pieces of some 50 us. Whatever process waits for this processor goes first: shards and front
        doors have messages in hand. Where one of them runs here its waking sets this thread aside; but let a third
        wake and sleep again, and the kernel may go back to this one, which had less than its share, and looks again
        only at the next tick. So it is asked often. Now and then the controller's other calls have their turn."""
        self._offer()
        if self._spent_s + self._worked() - self._since >= LOOP_S:
            if rest_s := self.rest_s():
                await asyncio.sleep(rest_s)
            await self.passes.mine()
            self.go_on()

    def _offer(self) -> None:
        """Who yields loses his place (Linux 6.18)."""
        if self._worked() >= self._offer_at:
            begun = self._clock()
            os.sched_yield()
            self._offer_at = self._worked() + WAITED_SHARE * (self._clock() - begun)
