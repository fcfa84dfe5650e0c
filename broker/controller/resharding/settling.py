"""How far the shard queues of one exchange are on their way from one number to another. Pure: time is an argument.

The steps themselves are in the catalog (`changes.ShardOf.held`), so they outlive every process; what is here is found
again after a restart of the controller: which queues must settle what they had, and how much of it is left.

    closing    queues that gain keys are told to keep back what arrives
    passing    the bindings are others; what front doors routed by the old ones is still on its way
    settling   queues that lose keys have a mark at the end of what they had; what is before it is waited for: until it
               is settled, of streams until it is on stable storage (the rest is for those who read them: cuts.py)
    settled    what was kept back may go
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardmq.broker.controller.resharding.shard_sets import held_of
from shardmq.broker.model.changes import CLOSING, KEPT, SETTLING, QueuePut

BREAK_ORDER, DEAD_LETTER = "break-order", "dead-letter"  # else: wait


class Mark(NamedTuple):
    """The end of what a queue had: a place, which means something in one life of its shard."""

    epoch: int
    until: int


class Question(NamedTuple):
    """How much of it is left up to `until`? 0: its end is now."""

    queue: QueuePut
    until: int


def to_close(parts: Iterable[QueuePut]) -> list[QueuePut]:
    return [queue for queue in parts if held_of(queue) == CLOSING]


def under_way(parts: Iterable[QueuePut]) -> bool:
    return any(held_of(queue) for queue in parts)


def losers(parts: Iterable[QueuePut]) -> list[QueuePut]:
    """Queues that may have messages of keys which are elsewhere now; those that gain keys lose none."""
    return [
        queue
        for queue in parts
        if queue.part is not None and queue.part.state != KEPT and not held_of(queue)
    ]


class Settling:
    """One change. Its losers stay the same while it lasts, but for those that are deleted."""

    def __init__(self, now: float) -> None:
        """`now`: seconds, of any clock that only goes forward."""
        self.since = now
        self.told: set[str] = (
            set()
        )  # queues of which an operator has been told that they hold the change up
        self.passed = False  # the fence: whatever was routed by the old bindings is at its shard
        self._marks: dict[int, Mark] = {}
        self._left: dict[int, int] = {}
        self._most: dict[int, int] = {}  # of what was left

    def questions(self, losing: Iterable[QueuePut]) -> list[Question]:
        """What to ask next, of those that are not known to have settled all."""
        if not self.passed:
            return []
        open = [queue for queue in losing if self._left.get(queue.id) != 0]
        return [
            Question(queue, self._marks[queue.id].until if queue.id in self._marks else 0)
            for queue in open
        ]

    def answered(self, asked: Question, epoch: int, until: int, left: int) -> None:
        """Of a shard in its life `epoch`. One that restarted knows places of its new life only: what it has now is
        waited for, which is more than needed, and never less."""
        mark = self._marks.get(asked.queue.id)
        if mark is not None and mark.epoch != epoch:
            del self._marks[asked.queue.id]
            self._left.pop(asked.queue.id, None)
            return
        self._marks[asked.queue.id] = Mark(epoch, until)
        self._left[asked.queue.id] = left
        self._most[asked.queue.id] = max(left, self._most.get(asked.queue.id, 0))

    @property
    def total(self) -> int:
        """Messages that were to be settled in all, as far as is known."""
        return sum(self._most.values())

    @property
    def left_in_all(self) -> int:
        """As far as is known."""
        return sum(self._left.values())

    def until(self, queue: QueuePut, epoch: int) -> int | None:
        """The end of what it had, if that is known of this life of its shard, and something is left."""
        mark = self._marks.get(queue.id)
        return (
            mark.until
            if mark is not None and mark.epoch == epoch and self._left.get(queue.id)
            else None
        )

    def ends(self, losing: Iterable[QueuePut]) -> dict[int, int]:
        """Of those that have settled all they had: where that ended, by queue id."""
        return {
            queue.id: self._marks[queue.id].until
            for queue in losing
            if queue.id in self._marks and self._left.get(queue.id) == 0
        }

    def gone(self, queue: QueuePut) -> None:
        """Its shard does not know it: with what it had."""
        self._left[queue.id] = 0

    def left(self, losing: Iterable[QueuePut]) -> dict[str, int | None]:
        """Messages by queue; None: not known yet."""
        return {queue.name: self._left.get(queue.id) for queue in losing}

    def is_settled(self, losing: Iterable[QueuePut]) -> bool:
        return self.passed and all(self._left.get(queue.id) == 0 for queue in losing)

    def is_overdue(self, now: float, deadline_ms: int | None) -> bool:
        return deadline_ms is not None and (now - self.since) * 1000 >= deadline_ms


def step_of(parts: list[QueuePut], settling: Settling | None) -> str:
    """Its name for people; "" when nothing changes."""
    if not under_way(parts):
        return ""
    if not any(held_of(queue) == SETTLING for queue in parts):
        return "closing"
    if settling is None or not settling.passed:
        return "passing"
    return "settled" if settling.is_settled(losers(parts)) else "settling"
