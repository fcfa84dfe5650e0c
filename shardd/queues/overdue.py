"""Who has held what for too long, for queues that do not wait for ever (x-consumer-timeout).

One stamp stands for all that was handed over within a step of time, so that a consumer costs a handful of them however
much it holds. What is overdue is noticed at most a step late, never early.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardmq.shardd.queues.unacked import Getter

if TYPE_CHECKING:
    from shardmq.shardd.queues.consumers import Consumer
    from shardmq.shardd.queues.queue import Queue

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


def handed(consumer: Consumer, now: int, timeout: int) -> Handed:
    """With what it has been given by now."""
    if consumer.handed is None:
        consumer.handed = Handed()
    if not consumer.no_ack:
        consumer.handed.note(consumer.unacked.next_number, now, timeout)
        consumer.handed.forget_before(consumer.unacked.first_number)
    return consumer.handed


def taken_from(
    holder: Consumer | Getter, queue: Queue, now: int, timeout: int
) -> tuple[array[int], int]:
    """What it has held of that queue for longer than that, and the sum of its sizes."""
    if isinstance(holder, Getter):
        return holder.take_overdue(queue, now - timeout)
    return holder.unacked.settle(1, handed(holder, now, timeout).overdue(now, timeout) - 1)


def is_late(holder: Consumer | Getter, queue: Queue, now: int, timeout: int) -> bool:
    """Whether it has held something of that queue for longer than that."""
    if isinstance(holder, Getter):
        since = holder.since(queue)
        return since is not None and since <= now - timeout
    return (
        not holder.no_ack
        and handed(holder, now, timeout).overdue(now, timeout) > holder.unacked.first_number
    )


def due_at(holders: Iterable[Consumer | Getter], queue: Queue, timeout: int) -> int | None:
    """When the first of them will have held something for too long, but for those who were told so."""
    found: list[int] = []
    for holder in holders:
        if holder.told_late:
            continue
        if isinstance(holder, Getter):
            since = holder.since(queue)
            due = None if since is None else since + timeout
        else:
            due = (
                holder.handed.due(timeout)
                if holder.handed is not None and holder.unacked.count
                else None
            )
        if due is not None:
            found.append(due)
    return min(found, default=None)
