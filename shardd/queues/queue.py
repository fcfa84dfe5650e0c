"""Hold a queue together: its messages, its consumers, its life and its counters.

Publish path, 4 of 5. Before: shardd/shard.py. After: shardd/store/segments/store.py.

A queue keeps entries (entry.py); the store keeps the bytes. This file takes in publishes and
messages that come back. It holds the backlog and the dispatch. The backlog (backlog.py) has order,
expiry and limits. The dispatch (dispatch.py) decides which consumer gets which message. The limits
decide which rules apply (rules.py). admission.py decides which publishes are refused.

Two kinds of queue are made of the same parts and take the place of a `Queue` wherever a shard uses
one: a `DelayQueue` orders messages by time, a `StreamQueue` has its messages in a log of its own.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import chain

from shardmq.shardd.queues import overdue
from shardmq.shardd.queues.admission import Admission
from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.consumers import Consumer, Consumers
from shardmq.shardd.queues.dispatch import Dispatch, Outlet
from shardmq.shardd.queues.entry import PLACE, REDELIVERED
from shardmq.shardd.queues.heads import Head
from shardmq.shardd.queues.limits import MAXLEN, REFUSED, REJECTED, Limits
from shardmq.shardd.queues.state import Counters, QueueState, marked, merged
from shardmq.shardd.queues.store import STEP_MESSAGES, Arrival, Store, bytes_of
from shardmq.shardd.queues.unacked import Getter


class Queue(QueueState):
    """One queue of a shard.

    A shard may have 100,000 queues, most of them idle. So an idle queue does not create parts that
    it does not need.
    """

    __slots__ = (
        "_admission",
        "auto_delete",
        "closed",
        "consumers",
        "counters",
        "head",
        "last_used",
        "seen_at",
        "seen_count",
        "store",
    )
    # The messages lie in the store; a stream has a log of its own instead.
    keeps_in_store = True

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
        self.id = queue_id
        self.store = store
        self.auto_delete = auto_delete
        self.backlog = Backlog(queue_id, store, limits, durable)
        self.dispatch = Dispatch(self.backlog)
        self.counters: Counters = self.backlog.counters
        self.consumers: Consumers = self.dispatch.consumers
        self.closed = False  # the queue takes no more consumers and is soon deleted
        self.deleted = False
        self.last_used = now  # by a get, a consumer or a declare
        # How much the queue had done when somebody last asked for its counters, and when more than
        # before was seen.
        self.seen_count = 0
        self.seen_at = now
        self.head: Head | None = None  # the first messages, as they were read last
        self._admission: Admission | None = None  # None until admission is asked for

    @property
    def delayed_count(self) -> int:
        """Return how many messages wait until they are due."""
        return 0

    # -- in ----------------------------------------------------------------------------------------

    def publish(self, arrival: Arrival, now: int, reserved: bool = False) -> list[int] | None:
        """Take messages in; return the ordinals of refused messages, None if none is refused.

        Ordinals count within the batch. `reserved` says that room was reserved for the messages, so
        none is refused.
        """
        backlog = self.backlog
        self.counters.published += len(arrival.entries)
        if not (backlog.takes_all or reserved) and backlog.rules.may_refuse:
            return self._publish_some(arrival, now)
        if backlog.take_in(arrival, now):
            backlog.forget_facts_before(self._held)
        return None

    def _publish_some(self, arrival: Arrival, now: int) -> list[int] | None:
        """Take in the messages that no rule refuses; return the same as `publish`."""
        backlog = self.backlog
        ordinals = self.admission().refused_of(arrival)
        if not ordinals:
            self.restore(arrival, now)
            return None
        entries = array("Q", [arrival.entries[i] for i in ordinals])
        lost_bytes = bytes_of(backlog.store, entries)
        refused = set(ordinals)
        chosen = [i for i in range(len(arrival.entries)) if i not in refused]
        backlog.take_in(arrival, now, chosen, lost_bytes)
        backlog.let_go(entries, MAXLEN if backlog.limits.refused_die else REFUSED)
        backlog.forget_facts_before(self._held)
        indexes = arrival.indexes
        return [indexes[i] for i in ordinals] if indexes is not None else ordinals

    def restore(self, arrival: Arrival, now: int) -> None:
        """Take in messages that a recovery found in the store."""
        if self.backlog.take_in(arrival, now):
            self.backlog.forget_facts_before(self._held)

    def admission(self) -> Admission:
        """Return the admission, which refuses publishes and reserves room."""
        if self._admission is None:
            self._admission = Admission(self.backlog, self.consumers)
        return self._admission

    # -- out ---------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Return whether serving the queue would find nothing to do, whatever arrived.

        Nobody consumes from a queue that is asleep, and no message leaves it by itself.
        """
        backlog = self.backlog
        acts = (
            backlog.rules.excess
            or backlog.rules.acts_alone
            or backlog.is_watched
            or backlog.facts
            or backlog.resting is not None
        )
        return not (acts or self.consumers.all)

    def deliver(self, now: int, outlet: Outlet, bytes_max: int) -> bool:
        """Hand out at most about `bytes_max` bytes; return whether there is more to hand out."""
        return self.dispatch.deliver(now, outlet, bytes_max)

    def has_for(self, consumer: Consumer) -> bool:
        """Return whether a message is ready for `consumer`, which is a consumer of this queue."""
        return self.backlog.ready_count > 0

    def get(self, getter: Getter | None, now: int) -> tuple[bytes, int, bool, int] | None:
        """Take one message; return (stored, delivery number, redelivered, how often it came back).

        `getter` holds the message; if it is None, the message is settled at once. How often the
        message came back is 0 if the queue does not count that. Return None if there is no message
        to take.
        """
        backlog = self.backlog
        self.last_used = now
        if backlog.resting is not None:
            backlog.wake(now)
        backlog.expire(now)
        if not backlog.ready_count or self.consumers.paused:
            self.counters.got_empty += 1
            return None
        entries, blob, size = backlog.take_first()
        self.counters.got += 1
        self.counters.delivered += 1
        number = 0
        redelivered = bool(entries[0] & REDELIVERED)
        times = self.dispatch.times_returned(entries[0]) if redelivered else 0
        self.counters.redelivered += redelivered
        if getter is None:
            self.counters.got_auto += 1
            backlog.taken_back(1, size)
            backlog.forget(entries)
        else:
            number = getter.add(self, entries[0], size, now)
            self.dispatch.holders[getter] = None
        return blob, number, redelivered, times

    # -- back --------------------------------------------------------------------------------------

    def ack(self, entries: array[int], size: int) -> None:
        """Forget messages that were consumed.

        `size` is the sum of their body bytes, here and in the methods below.
        """
        self.dispatch.taken_back(entries, size)
        self.counters.acked += len(entries)
        self.backlog.forget(entries)

    def reject(self, entries: array[int], size: int) -> None:
        self.dispatch.taken_back(entries, size)
        self.backlog.let_go(entries, REJECTED)

    def requeue(self, entries: array[int], size: int) -> None:
        """Put messages back to their old places, marked as delivered before.

        A queue with a delivery limit may let messages go instead. In a queue with a delayed retry
        the messages rest first.
        """
        self.dispatch.taken_back(entries, size)
        self.backlog.send_back(entries, size)

    def give_back(self, entries: array[int], size: int) -> None:
        """Put messages back to their old places, as if they had never been handed out."""
        self.dispatch.taken_back(entries, size)
        self.backlog.put_back(array("Q", sorted(entries)), size)

    # -- life --------------------------------------------------------------------------------------

    def next_due(self) -> int | None:
        """Return when `deliver`, `expired_itself` or `take_overdue` will have work, in ms."""
        backlog = self.backlog
        if not backlog.facts and not backlog.rules.acts_alone and backlog.resting is None:
            return None
        limits, due = backlog.limits, backlog.next_due()
        if limits.expires is not None and not self.consumers and not self.closed:
            due.append(self.last_used + limits.expires)
        if limits.consumer_timeout is not None:
            late = overdue.due_at(self.dispatch.holders, self, limits.consumer_timeout)
            if late is not None:
                due.append(late)
        return min(due, default=None)

    def expired_itself(self, now: int) -> bool:
        """Return whether the queue was unused for as long as x-expires allows."""
        expires = self.backlog.limits.expires
        if expires is None or self.consumers or self.closed:
            return False
        return now >= self.last_used + expires

    def change(self, limits: Limits, now: int) -> None:
        """Put other limits in force (a policy), or note that the queue was declared again."""
        self.last_used = now
        self.backlog.change(limits)
        self.consumers.be_single_active(limits.single_active)
        self.consumers.be_paused(limits.paused)

    def take_overdue(self, now: int) -> bool:
        """Requeue messages that were held for too long; return whether there were any.

        The caller calls this after each `deliver`.
        """
        limits = self.backlog.limits
        if limits.consumer_timeout is None or limits.timeout_closes:
            return False
        found = False
        for holder in list(self.dispatch.holders):
            entries, size = overdue.taken_from(holder, self, now, limits.consumer_timeout)
            if entries:
                self.requeue(entries, size)
                found = True
        return found

    def late(self, now: int) -> list[Consumer | Getter]:
        """Return the consumers and getters that have held a message for too long.

        Each is returned once. Their channels must be closed, if the queue asks for that. The caller
        calls this after each `deliver`.
        """
        limits = self.backlog.limits
        if limits.consumer_timeout is None or not limits.timeout_closes:
            return []
        holders = [holder for holder in self.dispatch.holders if not holder.told_late]
        found = [
            holder
            for holder in holders
            if overdue.is_late(holder, self, now, limits.consumer_timeout)
        ]
        for holder in found:
            holder.told_late = True
        return found

    def attach(self, consumer: Consumer) -> None:
        self.dispatch.attach(consumer)

    def detach(self, consumer: Consumer, now: int, more_come: bool = False) -> None:
        """Deliver no more to the consumer. The consumer keeps the messages that it holds.

        `more_come` says that an auto-delete queue is to wait for other consumers.
        """
        if consumer.detached:
            return
        self.dispatch.detach(consumer)
        self.last_used = now
        if self.auto_delete and not self.consumers and not more_come:
            self.closed = True

    def release(self, consumer: Consumer, now: int) -> None:
        """Take back the messages of a consumer that is gone for good."""
        self.detach(consumer, now)
        entries, size = consumer.unacked.take_all()
        if entries:
            self.requeue(entries, size)
        self.dispatch.holders.pop(consumer, None)

    # -- the whole queue ---------------------------------------------------------------------------

    def newest(self) -> int:
        """Return the place of the last message that is ready or held, 0 if there is none."""
        levels = self.backlog.levels
        lasts = [level.peek(len(level))[-1] for level in levels if len(level)]
        return max([entry & PLACE for entry in (*lasts, *self._held())], default=0)

    def count_unsettled_until(self, place: int) -> int:
        """Return how many messages up to that place are not settled."""
        last = place | ~PLACE
        ready = sum(
            bisect_right(level.peek(len(level)), last)
            for level in self.backlog.levels
            if len(level) and level.first() <= last
        )
        return ready + sum(entry <= last for entry in self._held())

    def dead_letter_until(self, place: int, reason: str) -> int:
        """Let go of unsettled messages up to that place, except resting ones; return how many.

        A late ack of such a message is no error.
        """
        backlog, last, before = self.backlog, place | ~PLACE, self.counters.let_go
        taken = self.dispatch.take_until(self, last)
        if taken:  # These go before the ready messages, because they are older.
            backlog.let_go(array("Q", sorted(chain(*taken))), reason)
        for level in backlog.levels:
            while len(level) and level.first() <= last:
                head = level.peek(STEP_MESSAGES)
                backlog.drop_head(level, head[: bisect_right(head, last)], reason)
        return self.counters.let_go - before

    def _held(self) -> list[int]:
        """Return the entries that were taken out and not settled, and the entries that rest."""
        resting = self.backlog.resting
        return [*self.dispatch.held_of(self), *(resting.entries() if resting is not None else ())]

    def _own(self) -> array[int]:
        """Return all entries except departing ones, in order."""
        return self.backlog.entries(self._held())

    def live(self) -> array[int]:
        """Return all entries, in order.

        All entries except ready ones are marked as delivered before.
        """
        departures = self.backlog.departures
        if departures is None or not departures.count:
            return self._own()
        return merged(self._own(), marked(array("Q", sorted(departures.entries()))))

    def purge(self) -> int:
        """Forget all messages that are ready or kept back; return how many there were."""
        backlog = self.backlog
        count = backlog.ready_count + backlog.kept_back
        for entries in backlog.take_all():
            if entries:
                backlog.forget(entries)
        return count

    def drop(self) -> int:
        """Delete the queue; return how many messages were ready or kept back.

        Departing messages still go to their dead-letter exchange.
        """
        backlog = self.backlog
        count = backlog.ready_count + backlog.kept_back
        if backlog.departures is None or not backlog.departures.count:
            self.store.drop_queue(self.id, self._own())
        else:
            self.store.settle(self.id, self._own(), False)
        backlog.take_all()
        backlog.resting = None
        self.dispatch.drop(self)
        self.closed = self.deleted = True
        backlog.unacked_count = backlog.unacked_bytes = 0
        return count
