"""Long work is done in slices; between two of them everybody else has a turn."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

REST_SHARE = 3.0  # long work rests so many times as long as it worked: it takes a quarter of a processor
RESTS_S_MAX = 4.0  # of one answer: those who scrape wait 10 s


async def others_first() -> None:
    """The controller's other calls, and before them whatever process waits for this processor: shards and front doors
    have messages in hand."""
    os.sched_yield()
    await asyncio.sleep(0)


class Turns:
    """Those of one long answer, which does not keep a processor busy for long at a time: what waits for one is woken on
    an idle one, rather than beside this."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: seconds this thread has worked."""
        self._clock = clock
        self._since = clock()
        self._left_s = RESTS_S_MAX

    def rest_s(self) -> float:
        """For how long to rest now."""
        now = self._clock()
        rest = min(REST_SHARE * (now - self._since), self._left_s)
        self._since = now
        self._left_s -= rest
        return rest

    async def others_first(self) -> None:
        await asyncio.sleep(self.rest_s())
