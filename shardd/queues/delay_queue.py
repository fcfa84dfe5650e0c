"""Keep messages for a delaying exchange until they are due, then let them depart to be routed.

A `DelayQueue` is a kind of `Queue`: a shard makes, serves, closes and deletes it like any other.
Nobody consumes from it.

The expiry of a message is the time at which it is due. The record of the message has that time in
64 bits, a ttl of 0 and no priority, so a recovery knows the time from the records alone. In memory
a waiting message takes 16 bytes, ordered by time (order.pxi); its bytes lie in the store. A due
message goes the way of dead letters, with a reason of its own, and is settled when its copies are
safe. No limit applies.
"""

from __future__ import annotations

from array import array

from shardmq.shardd.queues.departures import Departures
from shardmq.shardd.queues.dispatch import Outlet
from shardmq.shardd.queues.limits import DUE, Limits
from shardmq.shardd.queues.queue import Queue
from shardmq.shardd.queues.state import DueOrder
from shardmq.shardd.queues.store import Arrival, Store

# The most messages that become due in one pass of the queue.
STEP_MESSAGES = 8192
# The most messages on their way to be routed. Other due messages stay in the order of time.
DEPARTING_MAX = 16384


class DelayQueue(Queue):
    """A queue of messages that wait for their time.

    The messages are neither ready nor held, so the queue is empty to all that a Queue counts and
    limits.
    """

    __slots__ = ("_waiting",)

    def __init__(
        self,
        queue_id: int,
        store: Store,
        limits: Limits,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        now: int = 0,
    ) -> None:
        super().__init__(queue_id, store, limits, durable=durable, auto_delete=auto_delete, now=now)
        self._waiting = DueOrder()

    @property
    def delayed_count(self) -> int:
        return len(self._waiting) + (
            self.backlog.departures.count if self.backlog.departures is not None else 0
        )

    def publish(self, arrival: Arrival, now: int, reserved: bool = False) -> list[int] | None:
        self._waiting.push_many(arrival.entries, arrival.facts)
        return None

    def restore(self, arrival: Arrival, now: int) -> None:
        self._waiting.push_many(arrival.entries, arrival.facts)

    @property
    def is_asleep(self) -> bool:
        return False

    def deliver(self, now: int, outlet: Outlet, bytes_max: int) -> bool:
        """Let due messages depart; return whether more messages may depart now."""
        if self.backlog.departures is None:
            self.backlog.departures = Departures()
        room = DEPARTING_MAX - self.backlog.departures.count
        if room <= 0:
            return False
        entries = self._waiting.pop_due(now, min(STEP_MESSAGES, room))
        if entries:
            self.backlog.let_go(entries, DUE)
        due = self._waiting.first_due()
        return due is not None and due <= now and self.backlog.departures.count < DEPARTING_MAX

    def next_due(self) -> int | None:
        """Return when the next message is due, in ms since the epoch.

        Return None while DEPARTING_MAX messages are on their way: the shard calls `deliver` when
        some of them have arrived.
        """
        if self.backlog.departures is not None and self.backlog.departures.count >= DEPARTING_MAX:
            return None
        return self._waiting.first_due()

    def purge(self) -> int:
        count = len(self._waiting)
        self.backlog.forget(self._waiting.entries())
        self._waiting.clear()
        return count

    def _own(self) -> array[int]:
        return array("Q", sorted(self._waiting.entries()))

    def drop(self) -> int:
        super().drop()
        self._waiting.clear()
        return 0
