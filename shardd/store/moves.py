"""Find where the messages of a merged segment lie, by the entries that queues keep."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from shardmq.shardd.store.survivors import moved_entries


@dataclass(slots=True)
class Moves:
    """Pairs of entries in ascending order.

    `known` holds the entries as queues keep them, `placed` the same entries as they are on disk.
    """

    known: array[int] = field(default_factory=lambda: array("Q"))
    placed: array[int] = field(default_factory=lambda: array("Q"))

    def find(self, entries: array[int], start: int, stop: int) -> array[int]:
        return moved_entries(self.known, self.placed, entries, start, stop)

    def add(self, known: array[int], placed: array[int]) -> None:
        self.known += known
        self.placed += placed
