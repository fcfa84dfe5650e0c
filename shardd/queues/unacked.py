"""Keep the deliveries that are not settled, by consumer and delivery number.

Delivery numbers are consecutive from 1 for each consumer. Any range of them may be settled, in any
order. Entries and sizes lie in two arrays, oldest first. A delivery that is settled in the middle
leaves a zero (no entry is 0) until all deliveries before it are settled too.
"""

from __future__ import annotations

from array import array
from typing import Any

from shardmq.shardd.queues.order import total

# Settled items at the front are cut off when there are more than this many, and when they are more
# than half of all items.
CUT_MIN = 512


class Unacked:
    """The deliveries that one consumer holds."""

    __slots__ = ("_entries", "_first", "_holes", "_sizes", "_start", "count")

    def __init__(self) -> None:
        self._entries = array("Q")
        self._sizes = array("I")
        self._start = 0  # all items before it are settled
        self._first = 1  # the delivery number of _entries[0]
        self._holes = 0  # how many zeros there are from _start on
        self.count = 0

    @property
    def next_number(self) -> int:
        return self._first + len(self._entries)

    @property
    def first_number(self) -> int:
        """Return the number before which all deliveries are settled."""
        return self._first + self._start

    @property
    def first_entry(self) -> int:
        """Return the oldest entry that the consumer holds, 0 if there is none."""
        return self._entries[self._start] if self._start < len(self._entries) else 0

    def add(self, entries: array[int], sizes: array[int]) -> int:
        """Add deliveries; return the delivery number of the first."""
        number = self._first + len(self._entries)
        self._entries += entries
        self._sizes += sizes
        self.count += len(entries)
        return number

    def skip(self, count: int) -> int:
        """Skip the numbers of deliveries that nobody will settle (no_ack); return the first."""
        assert not self._entries
        number = self._first
        self._first += count
        return number

    def settle(self, first: int, last: int) -> tuple[array[int], int]:
        """Settle the deliveries first..last that are still held.

        Return their entries and the sum of their sizes.
        """
        start = max(first - self._first, self._start)
        stop = min(last - self._first + 1, len(self._entries))
        if start >= stop:
            return array("Q"), 0
        taken = self._entries[start:stop]
        taken_bytes = self._sizes[start] if stop - start == 1 else total(self._sizes[start:stop])
        if self._holes:
            before = len(taken)
            taken = array("Q", [entry for entry in taken if entry])
            if start == self._start:
                self._holes -= before - len(taken)
        if start != self._start:
            self._entries[start:stop] = array("Q", bytes(8 * (stop - start)))
            self._sizes[start:stop] = array("I", bytes(4 * (stop - start)))
            self._holes += len(taken)
        else:
            self._start = stop
            if self._holes:
                self._close_holes()
            if self._start > CUT_MIN or self._start == len(self._entries):
                self._cut()
        self.count -= len(taken)
        return taken, taken_bytes

    def _close_holes(self) -> None:
        entries, start = self._entries, self._start
        while self._holes and not entries[start]:
            start += 1
            self._holes -= 1
        self._start = start

    def _cut(self) -> None:
        start = self._start
        if start * 2 > len(self._entries):
            del self._entries[:start], self._sizes[:start]
            self._first += start
            self._start = 0

    def held(self) -> array[int]:
        """Return all entries, oldest first."""
        held = self._entries[self._start :]
        return array("Q", [entry for entry in held if entry]) if self._holes else held

    def take_all(self) -> tuple[array[int], int]:
        return self.settle(self._first, self.next_number - 1)

    def take_until(self, last: int) -> tuple[array[int], int]:
        """Settle the entries that are not above `last`, in whatever order they were delivered.

        Return these entries and the sum of their sizes.
        """
        numbers = [
            self._first + at
            for at, entry in enumerate(self._entries)
            if 0 < entry <= last and at >= self._start
        ]
        taken, size = array("Q"), 0
        for number in numbers:
            entries, entry_bytes = self.settle(number, number)
            taken += entries
            size += entry_bytes
        return taken, size


class Getter:
    """The messages that basic.get took for one channel, from any queue of the shard.

    Their number is bounded only by how often a client asks.
    """

    __slots__ = ("_held", "_last", "channel", "connection", "peer", "told_late")

    def __init__(self, peer: object = None, connection: int = 0, channel: int = 0) -> None:
        self.peer = peer
        self.connection = connection
        self.channel = channel
        self.told_late = False  # the channel must be closed
        # By delivery number: the queue, the entry, its size, and the time since when it is held.
        self._held: dict[int, tuple[Any, int, int, int]] = {}
        self._last = 0

    def add(self, queue: object, entry: int, size: int, now: int = 0) -> int:
        self._last += 1
        self._held[self._last] = (queue, entry, size, now)
        return self._last

    def since(self, queue: object) -> int | None:
        """Return since when the first message of the queue is held, None if none is held."""
        return next((since for owner, _, _, since in self._held.values() if owner is queue), None)

    def take_overdue(self, queue: object, before: int) -> tuple[array[int], int]:
        """Take the messages of the queue that are held since `before` or longer.

        Return their entries and the sum of their sizes.
        """
        numbers = [
            n
            for n, (owner, _, _, since) in self._held.items()
            if owner is queue and since <= before
        ]
        found = [self._held.pop(number) for number in numbers]
        return array("Q", [entry for _, entry, _, _ in found]), sum(size for _, _, size, _ in found)

    def take_until(self, queue: object, last: int) -> tuple[array[int], int]:
        """Take the entries of the queue that are not above `last`.

        Return these entries and the sum of their sizes.
        """
        numbers = [
            n for n, (owner, entry, _, _) in self._held.items() if owner is queue and entry <= last
        ]
        found = [self._held.pop(number) for number in numbers]
        return array("Q", [entry for _, entry, _, _ in found]), sum(size for _, _, size, _ in found)

    def settle(self, first: int, last: int) -> list[tuple[Any, array[int], int]]:
        numbers = range(max(first, 1), min(last, self._last) + 1)
        if len(numbers) > len(self._held):
            numbers = sorted(n for n in self._held if first <= n <= last)  # type: ignore[assignment]
        found = [self._held.pop(number) for number in numbers if number in self._held]
        return [(queue, array("Q", [entry]), size) for queue, entry, size, _ in found]

    def take_all(self) -> list[tuple[Any, array[int], int]]:
        return self.settle(1, self._last)

    def held_of(self, queue: object) -> array[int]:
        return array("Q", [entry for owner, entry, _, _ in self._held.values() if owner is queue])

    def forget(self, queue: object) -> None:
        self._held = {number: held for number, held in self._held.items() if held[0] is not queue}
