"""The facts about one reshard that the controller has found since the bindings changed.

The states are in the catalog (`states.py`). What is here is found out again after a restart of the
controller: which queues must settle what they had, and how much of it is left. A queue that loses
keys has a mark at the end of what it had. What lies before the mark must be settled; a stream must
have it on stable storage, and the rest is for the consumers of the stream (`cuts.py`).

Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardmq.broker.controller.resharding.states import (
    Step,
    is_under_way,
    queues_in,
    queues_losing_keys,
)
from shardmq.broker.model.changes import SETTLING, QueuePut


class Mark(NamedTuple):
    """The end of what a queue had. The position counts in one life (`epoch`) of its shard only."""

    epoch: int
    until: int


class Question(NamedTuple):
    """Ask a shard how much a queue has left before `until`; 0 sets the mark at its end now."""

    queue: QueuePut
    until: int


class ReshardProgress:
    """The progress of one reshard. The queues that lose keys stay the same, except deleted ones."""

    def __init__(self, now: float) -> None:
        """Begin when the bindings change; `now` is in seconds of a clock that only goes forward."""
        self.since = now
        self.passed = False  # what was routed by the old bindings is at its shard
        self.is_given_up = False  # the order: what is not settled is not waited for
        self.warned: set[str] = set()  # names of queues that were logged for holding the reshard up
        self._marks: dict[int, Mark] = {}  # by queue id, as are the next two
        self._left: dict[int, int] = {}  # messages not settled
        self._most: dict[int, int] = {}  # the largest that `_left` ever was

    def questions(self, losing: Iterable[QueuePut]) -> list[Question]:
        """Return what to ask about the queues that are not known to have settled everything."""
        if not self.passed:
            return []
        return [
            Question(queue, self._marks[queue.id].until if queue.id in self._marks else 0)
            for queue in losing
            if self._left.get(queue.id) != 0
        ]

    def answered(self, asked: Question, epoch: int, until: int, left: int) -> None:
        """Take the answer of a shard in its life `epoch`.

        A shard that restarted does not know the mark of its life before. Then all that it has now
        is waited for, which is more than needed and never less.
        """
        mark = self._marks.get(asked.queue.id)
        if mark is not None and mark.epoch != epoch:
            del self._marks[asked.queue.id]
            self._left.pop(asked.queue.id, None)
            return
        self._marks[asked.queue.id] = Mark(epoch, until)
        self._left[asked.queue.id] = left
        self._most[asked.queue.id] = max(left, self._most.get(asked.queue.id, 0))

    def gone(self, queue: QueuePut) -> None:
        """Note that the shard does not know the queue: what it had is gone with it."""
        self._left[queue.id] = 0

    @property
    def total(self) -> int:
        """Return how many messages were to be settled in all, as far as is known."""
        return sum(self._most.values())

    @property
    def left_in_all(self) -> int:
        """Return how many messages are left to settle, as far as is known."""
        return sum(self._left.values())

    def left(self, losing: Iterable[QueuePut]) -> dict[str, int | None]:
        """Return the messages left by queue name; None where the number is not known yet."""
        return {queue.name: self._left.get(queue.id) for queue in losing}

    def until(self, queue: QueuePut, epoch: int) -> int | None:
        """Return the mark of a queue with something left, if its shard is still in that life."""
        mark = self._marks.get(queue.id)
        if mark is None or mark.epoch != epoch or not self._left.get(queue.id):
            return None
        return mark.until

    def ends(self, losing: Iterable[QueuePut]) -> dict[int, int]:
        """Return the marks, by queue id, of the queues that have settled everything."""
        return {
            queue.id: self._marks[queue.id].until
            for queue in losing
            if queue.id in self._marks and self._left.get(queue.id) == 0
        }

    def is_settled(self, losing: Iterable[QueuePut]) -> bool:
        """Return whether all that came by the old bindings is settled."""
        return self.passed and all(self._left.get(queue.id) == 0 for queue in losing)

    def is_overdue(self, now: float, deadline_ms: int | None) -> bool:
        """Return whether the deadline, counted from the change of the bindings, is over."""
        return deadline_ms is not None and (now - self.since) * 1000 >= deadline_ms


def step_of(parts: list[QueuePut], progress: ReshardProgress | None) -> Step:
    """Return the step that an exchange with these shard queues is at."""
    if not is_under_way(parts):
        return Step.NONE
    if not queues_in(SETTLING, parts):
        return Step.CLOSING
    if progress is None:
        return Step.PASSING
    if progress.is_given_up or progress.is_settled(queues_losing_keys(parts)):
        return Step.SETTLED
    return Step.SETTLING if progress.passed else Step.PASSING
