"""Whose turn it is among the queues that one virtual consumer has at this shard: in the order of the log they lie in.

All queues of a shard are in one log, and parts of a virtual queue lie in it message beside message. Each of them handed
out at its own pace would have every window of the log read once for each of them, and leave segments behind that are
half settled. So the one whose next message is the oldest goes first, for a stretch of the log; then the next. Nobody
waits for another's backlog: who has waited longest is passed over PASSES_MAX times, and never for what came back.

Only for queues whose one consumer this is: others would wait for turns that do not concern them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shardmq.shardd.queues.entry import ENDLESS

# Bytes of the log in a stretch: about as much as is read of it at once (shardd/store/reading.py).
STRETCH_BYTES = 1 << 20
STRETCH = STRETCH_BYTES << 4  # in entries, which have flags below the position
# So much goes in one pass, more than of other queues: what is left of a stretch would take another.
TURN_BYTES = STRETCH_BYTES // 2
# What is handed out in one piece may go so far beyond it; what is read of the log is kept for about four stretches.
LEEWAY = STRETCH // 4
# One that gets as much more than another stays near it in the log.
PASSES_MAX = 8
# A turn that could end for what was handed out goes on for so long, ms: each change costs as much as a batch.
STAY_MS = 4


class Shared(Protocol):
    """What is asked of the dispatch of such a queue: a `dispatch.Dispatch`."""

    def head(self) -> int:
        """Return the entry that leaves next, ENDLESS if there is none."""

    def waits_for_room(self) -> bool:
        """Return whether the only consumer of the queue tells it when there is room again."""

    def waits_instead_of(self, other: SharingQueue) -> bool:
        """Take the place of `other`, which waits for room; return whether that is possible."""


class SharingQueue(Protocol):
    """A queue whose consumer takes from other queues, too: a `queue.Queue`."""

    @property
    def dispatch(self) -> Shared: ...


class Turns:
    """`wake`: has a queue look what it can hand out. Whoever looks wants a turn until it has had one that ended for
    another reason than want of room. `taken`: deliveries in this turn; `turn_max`: after so many it ends before the
    stretch does, if it has lasted STAY_MS."""

    __slots__ = (
        "_began",
        "_chosen",
        "_current",
        "_passes",
        "_until",
        "_wanting",
        "now",
        "taken",
        "turn_max",
        "wake",
    )

    def __init__(self, wake: Callable[[Any], None]) -> None:
        self.wake = wake
        self.taken = 0
        self.turn_max = ENDLESS
        self._wanting: dict[
            SharingQueue, int
        ] = {}  # with the entry that was next when it looked last
        self._current: SharingQueue | None = None
        self._until = 0
        self.now = self._began = 0  # ms
        self._passes = 0  # in a row, over who has waited longest
        # By who was chosen last, last: what is below that entry was handed out before, and came back.
        self._chosen: dict[SharingQueue, int] = {}

    def look(self, now: int) -> None:
        """A queue does that is not alone with its consumer, and takes no turns."""
        self.now = now

    def begin_turn(self, queue: SharingQueue, now: int) -> int:
        """The entry before which it is to stop; 0 while it is another's turn."""
        self.now = now
        self._wanting[queue] = head = queue.dispatch.head()
        if queue is self._current and not self._is_over(head):
            return self._until
        return self._until if self._whose() is queue else 0

    def is_in_turn(self, queue: SharingQueue) -> bool:
        """Return whether it is the turn of this queue, which has more for it."""
        return queue is self._current and not self._is_over(queue.dispatch.head())

    def end_turn(self, queue: SharingQueue, until: int) -> None:
        """It has looked, and handed out what it could up to that entry."""
        waits, head = queue.dispatch.waits_for_room(), queue.dispatch.head()
        if head == ENDLESS or (head < until and not waits):
            del self._wanting[queue]
        else:
            self._wanting[queue] = head
        if self._wanting:
            alone = (
                len(self._wanting) == 1 and queue in self._wanting
            )  # others may be about to look
            following = queue if alone else self._whose()
            if following is not queue and waits and following.dispatch.waits_instead_of(queue):
                return
            if not following.dispatch.waits_for_room():
                self.wake(following)

    def leave_turns(self, queue: SharingQueue) -> None:
        self._chosen.pop(queue, None)
        if self._current is queue:
            self._current = None
        if queue in self._wanting:
            del self._wanting[queue]
            if self._wanting:
                self.wake(self._whose())

    def _whose(self) -> SharingQueue:
        """Of those that want one, of which there are some."""
        current = self._current
        if (
            current is None
            or current not in self._wanting
            or self._is_over(current.dispatch.head())
        ):
            current = self._current = self._choose()
        return current

    def _is_over(self, head: int) -> bool:
        """The turn of the one it is, which would go on with that entry."""
        if head >= self._until:
            return True
        return (
            self.taken >= self.turn_max and not 0 <= self.now - self._began < STAY_MS
        )  # clocks are set back, too

    def _choose(self) -> SharingQueue:
        """Who waits longest, or one that has some a little older, which did not come back."""
        chosen, wanting, last = self._chosen, self._wanting, self._current
        if (
            last is not None and last in wanting
        ):  # it may have gone on without looking at what is next
            wanting[last] = last.dispatch.head()
        first = next((queue for queue in wanting if queue not in chosen), None)
        if first is None:
            first = next(queue for queue in chosen if queue in wanting)
        found, head = first, first.dispatch.head()
        if self._passes < PASSES_MAX:
            for queue, own in wanting.items():
                if own < head and own >= chosen.get(queue, 0):
                    found, head = queue, own
        self._passes = self._passes + 1 if found is not first else 0
        chosen.pop(found, None)
        chosen[found] = (head | 15) + 1
        self._until = head + STRETCH
        if found is not self._current:
            self._began = self.now
        self.taken = 0
        return found
