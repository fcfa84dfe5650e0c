"""Messages that came back and are to be given out again only after a while (x-delayed-retry-min): when each is due.

They are the queue's as if a consumer still held them. Those that are due at about the same time rest together, so that
what is kept besides the entries does not grow with their number. Pure: the time is an argument, in ms since the epoch.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import NamedTuple

# One that rests for a time may rest for this part of it longer: then there are about as many dues for each length.
STEPS = 16
REST_MS_MAX = 0xFFFFFFFF


class Retry(NamedTuple):
    """How long a message rests that came back `times` times; `multiplier` None: in proportion to that."""

    least_ms: int
    most_ms: int = REST_MS_MAX
    multiplier: int | None = None

    def rest_ms(self, times: int) -> int:
        if self.multiplier is None:
            return min(self.least_ms * times, self.most_ms)
        if self.multiplier == 1:
            return min(self.least_ms, self.most_ms)
        # Beyond 32 doublings any time is above the most.
        grown: int = self.least_ms * self.multiplier ** min(times - 1, 32)
        return min(grown, self.most_ms)


class _Part:
    """Messages that are due together, and the sum of their sizes."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries = array("Q")
        self.size = 0


class Resting:
    __slots__ = ("_dues", "_new", "_parts")

    def __init__(self) -> None:
        self._new: list[
            tuple[int, array[int], int]
        ] = []  # how long they are to rest, from the next `begin` on
        self._parts: dict[int, _Part] = {}  # by when they are due
        self._dues: list[int] = []  # a heap of the same

    def __bool__(self) -> bool:
        return bool(self._new or self._parts)

    def add(self, entries: array[int], size: int, rest_ms: int) -> None:
        self._new.append((rest_ms, entries, size))

    def begin(self, now: int) -> None:
        """What was added since the last time rests from now on."""
        new, self._new = self._new, []
        for rest_ms, entries, size in new:
            step = rest_ms // STEPS + 1
            due = -(-(now + rest_ms) // step) * step
            part = self._parts.get(due)
            if part is None:
                part = self._parts[due] = _Part()
                heappush(self._dues, due)
            part.entries += entries
            part.size += size

    def take_due(self, now: int) -> tuple[array[int], int]:
        """Those that have rested long enough, in no order, and the sum of their sizes."""
        entries, size = array("Q"), 0
        while self._dues and self._dues[0] <= now:
            part = self._parts.pop(heappop(self._dues))
            entries += part.entries
            size += part.size
        return entries, size

    def take_all(self) -> tuple[array[int], int]:
        self.begin(0)
        return self.take_due(max(self._dues, default=0))

    def next_due(self) -> int | None:
        return self._dues[0] if self._dues else None

    def entries(self) -> array[int]:
        found = array("Q")
        for _, entries, _ in self._new:
            found += entries
        for part in self._parts.values():
            found += part.entries
        return found
