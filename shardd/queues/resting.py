"""Let returned messages rest for a while before they are handed out again (x-delayed-retry-min).

The queue counts resting messages as if a consumer still held them. Messages that are due at about
the same time rest together, so that the memory besides the entries does not grow with their number.
There is no clock here: the time is an argument, in ms since the epoch.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import NamedTuple

# A message may rest longer than its time by this part of it. So the number of different due times
# is about the same for each length of rest.
STEPS = 16
REST_MS_MAX = 0xFFFFFFFF


class Retry(NamedTuple):
    """The rule for how long a message rests.

    If `multiplier` is None, the time grows in proportion to the number of returns.
    """

    least_ms: int
    most_ms: int = REST_MS_MAX
    multiplier: int | None = None

    def rest_ms(self, times: int) -> int:
        if self.multiplier is None:
            return min(self.least_ms * times, self.most_ms)
        if self.multiplier == 1:
            return min(self.least_ms, self.most_ms)
        # After 32 doublings any time is above the maximum.
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
        # Each item: how long messages rest from the next `begin` on, their entries, their size.
        self._new: list[tuple[int, array[int], int]] = []
        self._parts: dict[int, _Part] = {}  # by due time
        self._dues: list[int] = []  # a heap of the due times

    def __bool__(self) -> bool:
        return bool(self._new or self._parts)

    def add(self, entries: array[int], size: int, rest_ms: int) -> None:
        self._new.append((rest_ms, entries, size))

    def begin(self, now: int) -> None:
        """Let the messages that were added since the last call rest from now on."""
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
        """Take the messages that have rested long enough.

        Return their entries, in no order, and the sum of their sizes.
        """
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
