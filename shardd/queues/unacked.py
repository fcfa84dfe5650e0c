"""Keep the messages that basic.get took and that are not settled.

The deliveries of a consumer are kept in `Unacked` (state.pyx).
"""

from __future__ import annotations

from array import array
from typing import Any


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
