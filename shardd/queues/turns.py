"""Let the queues of one virtual consumer at this shard take turns, in the order of the log.

All queues of a shard lie in one log, and the parts of a virtual queue lie in it message beside
message. If each part handed out at its own pace, each window of the log would be read once per
part, and segments would stay behind half settled. So the queue with the oldest next message goes
first, for a stretch of the log. Then the next queue goes. No queue waits for the whole backlog of
another queue: the queue that has waited longest is passed over at most PASSES_MAX times in a row,
and never in favour of messages that came back.

A queue takes turns only if the virtual consumer is its one consumer. Other consumers would wait for
turns that do not concern them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shardmq.shardd.queues.entry import ENDLESS

# Bytes of the log in a stretch: about as much as is read of the log at once
# (shardd/store/segments/windows.py).
STRETCH_BYTES = 1 << 20
STRETCH = STRETCH_BYTES << 4  # the same in entries, which have flags below the position
# Bytes that a queue with a turn may hand out in one pass. Other queues may hand out fewer, but the
# rest of a stretch would cost another pass.
TURN_BYTES = STRETCH_BYTES // 2
# A piece may go this far beyond the end of its stretch. The bytes that were read of the log are
# kept for about four stretches.
LEEWAY = STRETCH // 4
# How often in a row the queue that has waited longest may be passed over. A queue that gets this
# many times as many messages as another queue stays near it in the log.
PASSES_MAX = 8
# A turn that could end because of its number of deliveries goes on for this many ms, because each
# change of turn costs as much as a batch.
STAY_MS = 4


class Shared(Protocol):
    """The dispatch of such a queue: a `dispatch.Dispatch`."""

    def head(self) -> int:
        """Return the entry that leaves next, ENDLESS if there is none."""

    def waits_for_room(self) -> bool:
        """Return whether the only consumer wakes the queue when there is room again."""

    def waits_instead_of(self, other: SharingQueue) -> bool:
        """Wait for room in the place of `other`; return False if there is room."""


class SharingQueue(Protocol):
    """A queue whose consumer takes messages from other queues too: a `queue.Queue`."""

    @property
    def dispatch(self) -> Shared: ...


class Turns:
    """The turns of the queues of one virtual consumer.

    `wake` makes a queue look for messages that it can hand out. A queue that looks wants a turn,
    until no message is ready or it stops within its stretch for another reason than lack of room.
    `taken` counts the deliveries in this turn. After `turn_max` deliveries the turn ends before the
    stretch does, if the turn has lasted STAY_MS.
    """

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
        # The queues that want a turn, each with the entry that was next when the queue looked last.
        self._wanting: dict[SharingQueue, int] = {}
        self._current: SharingQueue | None = None
        self._until = 0
        self.now = self._began = 0  # times in ms
        self._passes = 0  # how often in a row the queue that has waited longest was passed over
        # In the order in which queues were chosen. Entries below the number were handed out before,
        # and came back.
        self._chosen: dict[SharingQueue, int] = {}

    def look(self, now: int) -> None:
        """Note the time, for a queue that takes no turns because it has other consumers."""
        self.now = now

    def begin_turn(self, queue: SharingQueue, now: int) -> int:
        """Return the entry before which the queue must stop, 0 if another queue has the turn."""
        self.now = now
        self._wanting[queue] = head = queue.dispatch.head()
        if queue is self._current and not self._is_over(head):
            return self._until
        return self._until if self._whose() is queue else 0

    def is_in_turn(self, queue: SharingQueue) -> bool:
        """Return whether this queue has the turn, and the turn is not over for its next entry."""
        return queue is self._current and not self._is_over(queue.dispatch.head())

    def end_turn(self, queue: SharingQueue, until: int) -> None:
        """End the pass of a queue that has handed out what it could up to the entry `until`."""
        waits, head = queue.dispatch.waits_for_room(), queue.dispatch.head()
        if head == ENDLESS or (head < until and not waits):
            del self._wanting[queue]
        else:
            self._wanting[queue] = head
        if self._wanting:
            # The other queues may be about to look.
            alone = len(self._wanting) == 1 and queue in self._wanting
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
        """Return the queue that has the turn; at least one queue must want a turn."""
        current = self._current
        if (
            current is None
            or current not in self._wanting
            or self._is_over(current.dispatch.head())
        ):
            current = self._current = self._choose()
        return current

    def _is_over(self, head: int) -> bool:
        """Return whether the turn is over for a queue that would go on with the entry `head`."""
        if head >= self._until:
            return True
        # The lower bound matters when the clock is set back.
        return self.taken >= self.turn_max and not 0 <= self.now - self._began < STAY_MS

    def _choose(self) -> SharingQueue:
        """Choose the queue that gets the next turn, and begin its turn.

        It is the queue that has waited longest, or a queue with an older entry that did not come
        back.
        """
        chosen, wanting, last = self._chosen, self._wanting, self._current
        # The queue may have gone on without a look at its next entry.
        if last is not None and last in wanting:
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
