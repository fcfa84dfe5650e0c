"""Decide when the stores of a shard remove and merge files, within a budget of I/O.

One step of one store runs at a time, and the stores take turns. The caller runs each step in a
thread of its own. The next step is due when the bytes of the step before are paid for: by time, and
by the bytes that publishes wrote meanwhile. So a shard that is never idle merges as fast as it
fills segments that will soon be nearly empty. This file knows no thread and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

# The rate at which merging may read and write, in addition to as many bytes as publishes wrote. The
# removal of files counts too. The rate was chosen to be small beside the hundreds of MB/s of an
# SSD. Its cost for publishes was not measured under full load.
RECLAIM_BYTES_PER_S = 32 << 20
# The most bytes written by publishes that may be saved up for later steps.
SAVED_BYTES_MAX = 128 << 20
# The wait after a look that found nothing to do, or after a step that failed.
LOOK_EACH_MS = 1000
NOT_DUE = 1 << 62


class Store(Protocol):
    @property
    def written_bytes(self) -> int: ...
    def begin_reclaim(self) -> Any: ...
    def finish_reclaim(self, job: Any) -> int: ...


class Step(Protocol):
    @property
    def cost_bytes(self) -> int: ...
    @property
    def error(self) -> OSError | None: ...
    @property
    def left(self) -> list[str]:
        """Return the files that stay unmerged from now on, with the reason."""

    def run(self) -> None:
        """Carry the step out in any thread; call `Upkeep.end` afterwards."""


class Upkeep:
    def __init__(self) -> None:
        self.due = 0  # ms, on the caller's clock
        self.store: Store | None = None  # the store of the step that is under way
        self._step: Step | None = None
        self._last: Store | None = None
        self._written = 0  # bytes written by all stores, as of the last step
        self._saved = 0  # bytes that publishes paid for and no step has moved yet

    def begin(self, stores: Iterable[Store], now: int) -> Step | None:
        """Return a step to be run, if one is due and some store has something to do.

        The store is the first one with something to do after the store that was served last.
        """
        if now < self.due:
            return None
        waiting = list(stores)
        if self._last in waiting:
            at = waiting.index(self._last) + 1
            waiting = waiting[at:] + waiting[:at]
        for store in waiting:
            step: Step | None = store.begin_reclaim()
            if step is not None:
                self.store = self._last = store
                self._step = step
                self.due = NOT_DUE
                return step
        self.due = now + LOOK_EACH_MS
        return None

    def end(self, stores: Iterable[Store], now: int) -> Store:
        """End a step after its `run`; return the store of the step, which needs a sync.

        Raises what the store raises.
        """
        store, step = self.store, self._step
        assert store is not None and step is not None, "no step is under way"
        self.store = self._step = None
        store.finish_reclaim(step)
        written = sum(each.written_bytes for each in stores)
        self._saved = min(self._saved + max(written - self._written, 0), SAVED_BYTES_MAX)
        self._written = written
        unpaid = max(step.cost_bytes - self._saved, 0)
        self._saved -= step.cost_bytes - unpaid
        self.due = now + unpaid * 1000 // RECLAIM_BYTES_PER_S
        if step.error is not None:
            self.due = max(self.due, now + LOOK_EACH_MS)
        return store
