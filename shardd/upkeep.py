"""When the stores of a shard remove and merge files: one step of one store at a time, in turn, within a budget of I/O.

Knows no thread and no clock: the caller runs each step, in a thread of its own. The next is due as soon as the bytes of
the one before are paid for: by time, and by what publishes wrote meanwhile, so that a shard that is never idle also
merges as fast as it fills segments that will be nearly empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

# Read and written by merging, besides as many bytes as publishes wrote; removing files counts too. Chosen to
# be little beside the hundreds of MB/s of an SSD: what publishes lose by it was not measured under full load.
RECLAIM_BYTES_PER_S = 32 << 20
# Of what publishes wrote, this much may be saved up.
SAVED_BYTES_MAX = 128 << 20
# After a look that found nothing to do, or a disk too full to do it.
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
        """What stays as it is from now on, and why."""

    def run(self) -> None:
        """In any thread; then `Upkeep.end`."""


class Upkeep:
    def __init__(self) -> None:
        self.due = 0  # ms, on the caller's clock
        self.store: Store | None = None  # has a step under way
        self._step: Step | None = None
        self._last: Store | None = None
        self._written = 0  # by all stores, as of the last step
        self._saved = 0  # bytes that publishes paid for and no step has moved yet

    def begin(self, stores: Iterable[Store], now: int) -> Step | None:
        """To be run, if one is due and some store has something to do: the first of them after the last served."""
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
        """After `Step.run`: the store that had it, which wants a sync. Raises what the store raises."""
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
