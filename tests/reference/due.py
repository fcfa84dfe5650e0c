"""The entries of shardd/queues/order.pxi that are due, in plain Python.

Entries come by their times, then in the order of publishing.
"""

from __future__ import annotations

from array import array

PLACE = ~15


class DueOrder:
    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int]] = []  # due, place, entry

    def __len__(self) -> int:
        return len(self._waiting)

    def push_many(self, entries: array[int], facts: array[int] | None) -> None:
        for i, entry in enumerate(entries):
            self._waiting.append((0 if facts is None else facts[i], entry & PLACE, entry))
        self._waiting.sort()

    def first_due(self) -> int | None:
        return self._waiting[0][0] if self._waiting else None

    def pop_due(self, now: int, most: int) -> array[int]:
        due = [item for item in self._waiting if item[0] <= now][:most]
        del self._waiting[: len(due)]
        return array("Q", [entry for _, _, entry in due])

    def entries(self) -> array[int]:
        return array("Q", sorted(entry for _, _, entry in self._waiting))

    def clear(self) -> None:
        self._waiting.clear()
