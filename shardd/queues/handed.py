"""Note since when a consumer has held its messages, for queues with a consumer timeout.

One stamp stands for all messages that were handed over within a step of time. So a consumer costs
few stamps, however many messages it holds. An overdue message is noticed at most one step late,
never early.
"""

from __future__ import annotations

from collections import deque

# About the number of stamps that a consumer has when it holds one timeout's worth of deliveries.
STEPS = 16


def step_of(timeout_ms: int) -> int:
    return timeout_ms // STEPS + 1


class Handed:
    """The stamps of one consumer. Numbers are its delivery numbers; times are in ms."""

    __slots__ = ("_seen", "_stamps")

    def __init__(self) -> None:
        # Each stamp: the time from which messages were handed over, and the number behind the last.
        self._stamps: deque[tuple[int, int]] = deque()
        self._seen = 1  # the number behind the last that has a stamp

    def note(self, next_number: int, now: int, timeout_ms: int) -> None:
        """Note that all deliveries before `next_number` were handed over by now."""
        if next_number <= self._seen:
            return
        self._seen = next_number
        if self._stamps and now - self._stamps[-1][0] < step_of(timeout_ms):
            self._stamps[-1] = (self._stamps[-1][0], next_number)
        else:
            self._stamps.append((now, next_number))

    def forget_before(self, number: int) -> None:
        """Forget the stamps of deliveries before `number`, which are all settled."""
        while self._stamps and self._stamps[0][1] <= number:
            self._stamps.popleft()

    def due(self, timeout_ms: int) -> int | None:
        """Return when a delivery will be overdue, None if there is no stamp."""
        return self._stamps[0][0] + step_of(timeout_ms) + timeout_ms if self._stamps else None

    def overdue(self, now: int, timeout_ms: int) -> int:
        """Return the number before which all deliveries are overdue, 0 if none is overdue.

        The stamps of overdue deliveries are dropped.
        """
        number = 0
        while self._stamps and (self.due(timeout_ms) or 0) <= now:
            number = self._stamps.popleft()[1]
        return number
