"""Let the queues of one group consumer at this shard take turns, in the order of the log.

All queues of a shard lie in one log, and the queues of a virtual queue lie in it message beside
message. If each queue handed out at its own pace, each window of the log would be read once per
queue, and segments would stay behind half settled. So the queue with the oldest next message goes
first, for a stretch of the log. Then the next queue goes. No queue waits for the whole backlog of
another queue: the queue that has waited longest is passed over at most PASSES_MAX times in a row,
and never in favour of messages that came back.

Streams, and queues with other consumers too, take turns with the rest, but in no order of the log.

The queue whose turn it is, `current`, looks for messages or waits for room. Whoever makes another
queue the current one wakes it.
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
# With each piece of credit another queue could have the turn. A turn lasts at least this many ms,
# because each change costs as much as a batch.
STAY_MS = 4


class Heads(Protocol):
    """The dispatch of a queue: a `dispatch.Dispatch`."""

    def head(self) -> int:
        """Return the entry that leaves next, ENDLESS if there is none, 0 if order is no matter."""


class OrderedQueue(Protocol):
    """A queue whose consumer takes messages from other queues too: a `queue.Queue`."""

    @property
    def dispatch(self) -> Heads: ...


class LogOrder:
    """The turns of the queues of one group consumer.

    `wake` makes a queue look for messages that it can hand out.
    """

    __slots__ = ("_began", "_chosen", "_passes", "_until", "_wanting", "current", "now", "wake")

    def __init__(self, wake: Callable[[Any], None]) -> None:
        self.wake = wake
        self.current: OrderedQueue | None = None
        # The queues that want a turn, each with the entry that was next when the queue looked last.
        self._wanting: dict[OrderedQueue, int] = {}
        self._until = 0
        self.now = self._began = 0  # times in ms
        self._passes = 0  # how often in a row the queue that has waited longest was passed over
        # In the order in which queues were chosen. Entries below the number were handed out before,
        # and came back.
        self._chosen: dict[OrderedQueue, int] = {}

    @property
    def is_idle(self) -> bool:
        return not self._wanting

    def begin(self, queue: OrderedQueue, now: int) -> int:
        """Return the entry before which the queue must stop, 0 if another queue has the turn."""
        self.now = now
        self._wanting[queue] = head = queue.dispatch.head()
        current = self.current
        if queue is current and head < self._until:
            return self._until
        if current is None or queue is current:
            self._choose()
            if self.current is queue:
                return self._until
            self.wake(self.current)
        return 0

    def end(self, queue: OrderedQueue, wants: bool, waits: bool) -> None:
        """End the pass of a queue. `waits` says that it wants to go on and waits for room."""
        if not wants:
            self.leave(queue, for_good=False)
        elif queue is self.current and not waits:
            self._wanting[queue] = queue.dispatch.head()
            if len(self._wanting) > 1:  # else others may be about to look
                self._choose()
            self.wake(self.current)

    def go_on(self, now: int) -> None:
        """Wake the queue that uses new credit."""
        self.now = now
        current = self.current
        if current is None:
            return
        # The lower bound matters when the clock is set back.
        is_over = not 0 <= now - self._began < STAY_MS or current.dispatch.head() >= self._until
        if is_over and len(self._wanting) > 1:
            self._choose()
        self.wake(self.current)

    def leave(self, queue: OrderedQueue, for_good: bool = True) -> None:
        """Take the queue out of the order; it has no more messages, or no consumer."""
        if for_good:
            self._chosen.pop(queue, None)
        self._wanting.pop(queue, None)
        if self.current is queue:
            self.current = None
            if self._wanting:
                self._choose()
                self.wake(self.current)

    def _choose(self) -> None:
        """Begin the turn of another queue; at least one queue must want a turn.

        It is the queue that has waited longest, or a queue with an older entry that did not come
        back.
        """
        chosen, wanting, last = self._chosen, self._wanting, self.current
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
        chosen[found] = (head | 15) + 1 if head < ENDLESS else 0
        self._until = min(head + STRETCH, ENDLESS)
        if found is not last:
            self._began = self.now
        self.current = found
