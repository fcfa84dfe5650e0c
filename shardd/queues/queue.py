"""Hold a queue together: its messages, who gets them, its life and its counters.

Publish path, 4 of 5. Before: shardd/shard.py. After: shardd/store/store.py.

A queue keeps entries (entry.py); the store keeps the bytes. Three objects hold each other from the
top: this file takes publishes in and what comes back; the backlog (backlog.py) has order, expiry
and limits; the dispatch (dispatch.py) decides who gets what. Which rules apply is decided by the
limits (rules.py); which publishes are refused says admission.py.

Two kinds of queue are made of the same parts and take the place of a `Queue` wherever a shard uses
one: a `DelayQueue` orders messages by time, a `StreamQueue` has its messages in a log of its own.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import chain

from shardmq.shardd.queues import overdue
from shardmq.shardd.queues.admission import Admission
from shardmq.shardd.queues.backlog import Backlog, Counters
from shardmq.shardd.queues.consumers import Consumer, Consumers
from shardmq.shardd.queues.dispatch import Dispatch, Outlet
from shardmq.shardd.queues.entry import PLACE, REDELIVERED
from shardmq.shardd.queues.limits import MAXLEN, REFUSED, REJECTED, Limits
from shardmq.shardd.queues.ready import marked, merged
from shardmq.shardd.queues.store import STEP_MESSAGES, Arrival, Store, bytes_of
from shardmq.shardd.queues.unacked import Getter


class Queue:
    """One queue of a shard.

    There may be 100,000 of them, most of them idle: what an idle one does not need is not there.
    """

    __slots__ = (
        "_admission",
        "auto_delete",
        "backlog",
        "closed",
        "consumers",
        "counters",
        "deleted",
        "dispatch",
        "id",
        "last_used",
        "store",
    )
    keeps_in_store = True  # its messages; a stream has a log of its own

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
        self.closed = False  # takes no more consumers: soon deleted
        self.deleted = False
        self.last_used = now
        self._admission: Admission | None = None  # nobody asked about its room

    @property
    def delayed_count(self) -> int:
        """How many messages wait until they are due."""
        return 0

    # -- in ----------------------------------------------------------------------------------------

    def publish(self, arrival: Arrival, now: int, reserved: bool = False) -> list[int] | None:
        """Take messages in; return ordinals within the batch of those refused, if some were.

        `reserved`: room was set aside for the messages, so none is refused.
        """
        backlog = self.backlog
        self.counters.published += len(arrival.entries)
        if not (backlog.takes_all or reserved) and backlog.rules.may_refuse:
            return self._publish_some(arrival, now)
        if backlog.take_in(arrival, now):
            backlog.forget_facts_before(self._held)
        return None

    def _publish_some(self, arrival: Arrival, now: int) -> list[int] | None:
        """Take in the messages that no rule refuses, as `publish`."""
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
        """Take in messages that the store still had."""
        if self.backlog.take_in(arrival, now):
            self.backlog.forget_facts_before(self._held)

    def admission(self) -> Admission:
        """Return what says which publishes are refused, and sets room aside."""
        if self._admission is None:
            self._admission = Admission(self.backlog, self.consumers)
        return self._admission

    # -- out ---------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether serving the queue would find nothing to do, whatever arrived.

        Nobody consumes from it, and nothing in it leaves by itself.
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
        """Hand out at most about `bytes_max`; return whether there is more to hand out now."""
        return self.dispatch.deliver(now, outlet, bytes_max)

    def has_for(self, consumer: Consumer) -> bool:
        """Return whether a message is ready that this consumer, one of its own, may get."""
        return self.backlog.ready_count > 0

    def get(self, getter: Getter | None, now: int) -> tuple[bytes, int, bool, int] | None:
        """Take one message; return (stored, delivery number, redelivered, how often it came back).

        `getter` holds it, or nobody. How often it came back is 0 if that is not counted.
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
        """Forget messages that were consumed. `size`: their body bytes, here and below."""
        self.dispatch.taken_back(entries, size)
        self.counters.acked += len(entries)
        self.backlog.forget(entries)

    def reject(self, entries: array[int], size: int) -> None:
        self.dispatch.taken_back(entries, size)
        self.backlog.let_go(entries, REJECTED)

    def requeue(self, entries: array[int], size: int) -> None:
        """Put messages to their old places, as delivered before; at once, or when they have rested."""
        self.dispatch.taken_back(entries, size)
        self.backlog.send_back(entries, size)

    def give_back(self, entries: array[int], size: int) -> None:
        """Put messages to their old places, as if never handed out."""
        self.dispatch.taken_back(entries, size)
        self.backlog.put_back(array("Q", sorted(entries)), size)

    # -- life --------------------------------------------------------------------------------------

    def next_due(self) -> int | None:
        """Return when `deliver`, `expired_itself` or `take_overdue` will have something to do."""
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
        """Return whether the queue was unused for as long as x-expires says."""
        expires = self.backlog.limits.expires
        if expires is None or self.consumers or self.closed:
            return False
        return now >= self.last_used + expires

    def change(self, limits: Limits, now: int) -> None:
        """Put other arguments in force (policies), or hear that it was declared again."""
        self.last_used = now
        self.backlog.change(limits)
        self.consumers.be_single_active(limits.single_active)
        self.consumers.be_paused(limits.paused)

    def take_overdue(self, now: int) -> bool:
        """Requeue what consumers have held for longer than the queue waits; return whether there was some.

        To be called after each `deliver`.
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
        """Return who has held something for longer than the queue waits, each once.

        Their channels are to be closed for it, if the queue wants that. To be called after each
        `deliver`.
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

    def detach(self, consumer: Consumer, now: int) -> None:
        """Deliver no more to the consumer; what it holds it holds."""
        if consumer.detached:
            return
        self.dispatch.detach(consumer)
        self.last_used = now
        if self.auto_delete and not self.consumers:
            self.closed = True

    def release(self, consumer: Consumer, now: int) -> None:
        """Take back what a consumer held that is gone for good."""
        self.detach(consumer, now)
        entries, size = consumer.unacked.take_all()
        if entries:
            self.requeue(entries, size)
        self.dispatch.holders.pop(consumer, None)

    # -- all of it ---------------------------------------------------------------------------------

    def newest(self) -> int:
        """Return the place of the last message that is ready or held, 0 without one."""
        levels = self.backlog.levels
        lasts = [level.peek(len(level))[-1] for level in levels if len(level)]
        return max([entry & PLACE for entry in (*lasts, *self._held())], default=0)

    def left_until(self, place: int) -> int:
        """Return how many messages up to that place are not settled."""
        last = place | ~PLACE
        ready = sum(
            bisect_right(level.peek(len(level)), last)
            for level in self.backlog.levels
            if len(level) and level.first() <= last
        )
        return ready + sum(entry <= last for entry in self._held())

    def let_go_until(self, place: int, reason: str) -> int:
        """Let go what is not settled up to that place, but for what rests; return how many.

        A late ack of it is no error.
        """
        backlog, last, before = self.backlog, place | ~PLACE, self.counters.let_go
        taken = self.dispatch.take_until(self, last)
        if taken:  # before those that are ready: they are older
            backlog.let_go(array("Q", sorted(chain(*taken))), reason)
        for level in backlog.levels:
            while len(level) and level.first() <= last:
                head = level.peek(STEP_MESSAGES)
                backlog.drop_head(level, head[: bisect_right(head, last)], reason)
        return self.counters.let_go - before

    def _held(self) -> list[int]:
        """Return the entries that were taken out and not settled, and those that rest."""
        resting = self.backlog.resting
        return [*self.dispatch.held_of(self), *(resting.entries() if resting is not None else ())]

    def _own(self) -> array[int]:
        """Return all entries but departing ones, in order."""
        return self.backlog.entries(self._held())

    def live(self) -> array[int]:
        """Return all entries, in order: ready ones as they are, all others as delivered before."""
        departures = self.backlog.departures
        if departures is None or not departures.count:
            return self._own()
        return merged(self._own(), marked(array("Q", sorted(departures.entries()))))

    def purge(self) -> int:
        """Forget what is ready; return how many messages there were."""
        backlog = self.backlog
        count = backlog.ready_count + backlog.kept_back
        for entries in backlog.take_all():
            if entries:
                backlog.forget(entries)
        return count

    def drop(self) -> int:
        """Delete the queue; return how many messages were ready. What departs is on its way all the same."""
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
