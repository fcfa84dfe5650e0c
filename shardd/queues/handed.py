"""Since when one consumer has held what it was given, for queues that do not wait for ever.

One stamp stands for all that was handed over within a step of time, so that a consumer costs a
handful of stamps however much it holds. What is overdue is noticed at most a step late, never early.
"""

from __future__ import annotations

from collections import deque

# Stamps of one consumer, about, with one timeout's worth of deliveries held.
STEPS = 16


def step_of(timeout_ms: int) -> int:
    return timeout_ms // STEPS + 1


class Handed:
    """Of one consumer. Numbers are its delivery numbers, times ms."""

    __slots__ = ("_seen", "_stamps")

    def __init__(self) -> None:
        self._stamps: deque[tuple[int, int]] = (
            deque()
        )  # (handed from then on, the number behind the last)
        self._seen = 1  # the number behind the last stamped

    def note(self, next_number: int, now: int, timeout_ms: int) -> None:
        """All before `next_number` is handed over by now."""
        if next_number <= self._seen:
            return
        self._seen = next_number
        if self._stamps and now - self._stamps[-1][0] < step_of(timeout_ms):
            self._stamps[-1] = (self._stamps[-1][0], next_number)
        else:
            self._stamps.append((now, next_number))

    def forget_before(self, number: int) -> None:
        """All before it is settled."""
        while self._stamps and self._stamps[0][1] <= number:
            self._stamps.popleft()

    def due(self, timeout_ms: int) -> int | None:
        """When something will be overdue."""
        return self._stamps[0][0] + step_of(timeout_ms) + timeout_ms if self._stamps else None

    def overdue(self, now: int, timeout_ms: int) -> int:
        """All before this number is overdue; 0: nothing is."""
        number = 0
        while self._stamps and (self.due(timeout_ms) or 0) <= now:
            number = self._stamps.popleft()[1]
        return number
