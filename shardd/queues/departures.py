"""Keep the messages that left a queue for its dead-letter exchange and are still in the store.

The messages wait, are handed over in batches, and are settled when their copies are safe. A message
that comes back waits again, before the others. It comes back when its front door is gone or a copy
was not taken. No limit of the queue counts these messages: they are neither ready nor held.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

# The most entries of one waiting array. Above it a new array begins, so that taking entries off the
# front copies little.
JOINED_ENTRIES_MAX = 8192


class Batch(NamedTuple):
    """Entries that left the queue for one reason, in their order."""

    reason: str
    entries: array[int]


class Departures:
    __slots__ = ("_handed", "_waiting", "count")

    def __init__(self) -> None:
        self._waiting: deque[Batch] = deque()
        self._handed: dict[int, Batch] = {}
        self.count = 0  # how many messages wait or are handed over

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def add(self, entries: array[int], reason: str) -> None:
        self.count += len(entries)
        last = self._waiting[-1] if self._waiting else None
        if (
            last is not None
            and last.reason == reason
            and len(last.entries) + len(entries) <= JOINED_ENTRIES_MAX
        ):
            last.entries.extend(entries)
        else:
            self._waiting.append(Batch(reason, entries))

    def first(self, most: int) -> Batch:
        """Return the next entries with one reason, at most `most`; the entries stay."""
        reason, entries = self._waiting[0]
        return Batch(reason, entries[:most])

    def hand_over(self, number: int, count: int) -> None:
        """Hand over the first `count` of the next entries as batch `number`."""
        reason, entries = self._waiting[0]
        self._handed[number] = Batch(reason, entries[:count])
        if count == len(entries):
            self._waiting.popleft()
        else:
            self._waiting[0] = Batch(reason, entries[count:])

    def take_off(self, number: int, left: list[tuple[int, int]]) -> array[int]:
        """Take a batch off and return its entries that have arrived.

        `left` has the first and last ordinals of runs of entries that have not arrived. These
        entries wait again.
        """
        reason, entries = self._handed.pop(number)
        arrived: array[int] = array("Q")
        staying: array[int] = array("Q")
        at = 0
        for first, last in sorted(left):
            arrived += entries[at:first]
            staying += entries[max(first, at) : last + 1]
            at = max(at, last + 1)
        arrived += entries[at:]
        self.count -= len(arrived)
        if staying:
            self._waiting.appendleft(Batch(reason, staying))
        return arrived

    def take_back(self) -> None:
        """Make all entries wait again that were handed over, in their order."""
        for number in sorted(self._handed, reverse=True):
            self._waiting.appendleft(self._handed.pop(number))

    def entries(self) -> array[int]:
        found: array[int] = array("Q")
        for _, entries in [*self._handed.values(), *self._waiting]:
            found += entries
        return found
