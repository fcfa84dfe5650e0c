"""Decide which consumers get the messages of a queue, hand messages over, and note who holds them.

A dispatch takes messages from the backlog of its queue (backlog.py) and gives them to consumers
(consumers.py) in round-robin order, as far as the consumers have room. For a plain queue the
dispatch does no work per message in Python.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import Protocol

from shardmq.shardd.lending import LentMessages
from shardmq.shardd.queues.affinity import LOOK_BYTES, Keys, alike, deal_from_head
from shardmq.shardd.queues.allotment import Allotment
from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.consumers import Consumer, Consumers
from shardmq.shardd.queues.entry import ENDLESS, REDELIVERED
from shardmq.shardd.queues.log_order import LEEWAY, TURN_BYTES, LogOrder, OrderedQueue
from shardmq.shardd.queues.state import DispatchState, Ready, same_mark, total
from shardmq.shardd.queues.store import STEP_MESSAGES
from shardmq.shardd.queues.unacked import Getter

# The most messages that expire in one pass: a million at once must not stop the other queues.
EXPIRED_MAX = 16384

Blob = bytes | memoryview | LentMessages


class Outlet(Protocol):
    """The receiver of deliveries.

    `blob` may be a view that is good until messages are appended to the store.
    """

    def deliver(
        self, consumer: Consumer, first_number: int, redelivered: bool, count: int, blob: Blob
    ) -> None: ...
    def deliver_again(
        self, consumer: Consumer, first_number: int, times: int, count: int, blob: Blob
    ) -> None:
        """Deliver messages that each came back `times` times, from a queue that counts returns."""

    def report(self, allotment: Allotment) -> None:
        """Tell the front door what the allotment has used, and whether messages wait."""

    def passed(self, consumer: Consumer, offset: int) -> None:
        """Hear that a reader has settled all messages below `offset`.

        The offset is at or above the mark of the reader.
        """


class Dispatch(DispatchState):
    """The consumers of one backlog, and what each of them holds.

    `holders` are all attached consumers, and all consumers and getters that hold unsettled
    messages. `order` is that of the only consumer, if the queue takes turns in the order of the log
    with other queues of a group consumer.
    """

    __slots__ = ()

    backlog: Backlog
    consumers: Consumers

    def __init__(self, backlog: Backlog) -> None:
        limits = backlog.limits
        self.backlog = backlog
        self.consumers = Consumers(limits.single_active, limits.paused)
        # A dict with unused values, because an empty set is three times the size.
        self.holders: dict[Consumer | Getter, None] = {}
        self.order: LogOrder | None = None
        self.keys: Keys | None = None  # None unless a consumer asked for key affinity

    # -- out ---------------------------------------------------------------------------------------

    def deliver(self, now: int, outlet: Outlet, bytes_max: int) -> bool:
        """Hand out at most about `bytes_max` bytes; return whether there is more to hand out."""
        backlog, consumers = self.backlog, self.consumers
        given = 0
        served = inf
        is_stuck = False
        if backlog.resting is not None:
            backlog.wake(now)
        # A message that expires in this very millisecond (a ttl of 0) may still be handed out
        # directly.
        if backlog.facts and not backlog.expire(now - 1, EXPIRED_MAX):
            return True
        order = self.order
        until = ENDLESS
        if order is not None and backlog.ready_count:
            until = order.begin(consumers.all[0].queue, now)
            bytes_max = max(bytes_max, TURN_BYTES)
        while backlog.ready_count and until:
            if given and order is not None and backlog.head() >= until:
                break
            takers = consumers.takers()
            if not takers:
                is_stuck = True
                break
            # To hand out one or two messages more would cost as much as many messages.
            if given > bytes_max - (bytes_max >> 3):
                if self.is_stuck:
                    self.note_stuck(False, now)
                return True
            served = takers[0].priority
            levels = backlog.levels
            level = levels[0] if len(levels) == 1 else backlog.first_level()
            if self.keys is not None:
                dealt = self._deal_by_key(self.keys, takers, level, bytes_max - given, outlet, now)
                if not dealt:
                    is_stuck = True
                    break
                given += dealt
            elif len(takers) == 1:
                # Credit is used in one piece, although the last message of the piece may lie a
                # little behind the end of the turn.
                end = until
                if order is not None and not takers[0].no_ack:
                    end += LEEWAY
                given += self._deal_to_one(takers[0], level, bytes_max - given, outlet, now, end)
            else:
                given += self._deal(takers, level, bytes_max - given, outlet, now)
            if backlog.facts and not backlog.expire(now - 1, EXPIRED_MAX):
                return True
        if backlog.facts and not backlog.expire(now, EXPIRED_MAX):
            return True
        if backlog.rules.excess:
            backlog.enforce()
            # The messages behind the dropped ones may have expired.
            backlog.expire(now)
        is_stuck = is_stuck and backlog.ready_count > 0
        if is_stuck != self.is_stuck and consumers.all:
            self.note_stuck(is_stuck, now)
        if consumers.has_allotments:
            self.end_pass(outlet, until, served)
        return False

    def _deal_to_one(
        self, taker: Consumer, level: Ready, bytes_max: int, outlet: Outlet, now: int, until: int
    ) -> int:
        """Give one consumer as many messages as it has room for; return their bytes.

        Only messages before the entry `until` are given.
        """
        backlog = self.backlog
        room = taker.window.room
        if bytes_max < room:
            room = bytes_max
        # A taker has room for one message.
        if backlog.ready_count == 1:
            entries = level.peek(1)
            blob, sizes = backlog.store.look(entries, room if room > 1 else 1)
            level.drop(1)
            backlog.ready_count = 0
            self._hand_over(taker, entries, sizes, blob, outlet)
            given = len(blob)
        else:
            given = self._deal_block(taker, level, room, outlet, now, until)
        if len(self.consumers.all) > 1:
            self.consumers.took(taker)
        return given

    def _deal_block(
        self, taker: Consumer, level: Ready, room: int, outlet: Outlet, now: int, until: int
    ) -> int:
        backlog = self.backlog
        average = backlog.ready_bytes // backlog.ready_count + 1
        block = level.peek(min(STEP_MESSAGES, self.consumers.room, room // average + 1))
        if block[-1] >= until:
            block = block[: bisect_left(block, until)]
        if backlog.facts:
            block = backlog.facts.before_old(block, now - 1)
        given = 0
        for entries, sizes, blob in self._read(block, room, whole=False):
            level.drop(len(entries))
            backlog.ready_count -= len(entries)
            self._hand_over(taker, entries, sizes, blob, outlet)
            given += len(blob)
        return given

    def _deal(
        self, takers: list[Consumer], level: Ready, bytes_max: int, outlet: Outlet, now: int
    ) -> int:
        """Give each taker an equal share, one message to each in turn; return the bytes handed out.

        The round ends before the first message that does not fit its taker. If another taker got
        this message later, it would come to that taker behind messages that were published after
        it.
        """
        backlog = self.backlog
        count = len(takers)
        average = backlog.ready_bytes // backlog.ready_count + 1
        most = min(STEP_MESSAGES, bytes_max // average + 1, len(level))
        rooms = _rooms(takers, bytes_max)
        share = min(
            -(-most // count), min([taker.room() for taker in takers]), min(rooms) // average + 1
        )
        block = level.peek(share * count)
        if backlog.facts:
            block = backlog.facts.before_old(block, now - 1)
        parts = [block[i::count] for i in range(count)]
        found = [self._read(part, room) for part, room in zip(parts, rooms, strict=True)]
        fits = [sum([len(sizes) for _, sizes, _ in pieces]) for pieces in found]
        stop = min(
            [i + count * fit for i, fit in enumerate(fits) if fit < len(parts[i])],
            default=len(block),
        )
        level.drop(stop)
        given = 0
        for i, taker in enumerate(takers[:stop]):
            own = len(range(i, stop, count))
            pieces = found[i] if own == fits[i] else self._read(parts[i][:own], rooms[i])
            for entries, sizes, blob in pieces:
                # The count goes down piece by piece: a backlog that seems to be empty forgets all
                # facts.
                backlog.ready_count -= len(entries)
                self._hand_over(taker, entries, sizes, blob, outlet)
                given += len(blob)
        self.consumers.took(takers[(stop - 1) % count])
        return given

    def _deal_by_key(
        self,
        keys: Keys,
        takers: list[Consumer],
        level: Ready,
        bytes_max: int,
        outlet: Outlet,
        now: int,
    ) -> int:
        """Give each message to the consumer that has its key; return the bytes handed out.

        A message with a key that no consumer has goes to the next taker. Messages that wait stay in
        their places.
        """
        backlog = self.backlog

        def peek(most: int) -> tuple[array[int], bytes, array[int]]:
            block = level.peek(most)
            if backlog.facts:
                block = backlog.facts.before_old(block, now - 1)
            blob, sizes = backlog.store.read(block, LOOK_BYTES)
            return block[: len(sizes)], blob, sizes

        head, dealt = deal_from_head(peek, takers, keys, bytes_max)
        if not dealt.parts:
            return 0
        level.drop(len(head))
        level.merge(head.left(dealt))
        given = 0
        for taker, part in dealt.parts.items():
            for run in alike(head, part, self._mark):
                entries, sizes, blob = head.pieces(run)
                if not taker.no_ack:
                    keys.take(taker, entries, head.keys(run))
                backlog.ready_count -= len(run)
                self._hand_over(taker, entries, sizes, blob, outlet)
                given += len(blob)
        if dealt.last is not None:
            self.consumers.took(dealt.last)
        return given

    def _mark(self, entry: int) -> int:
        return 1 + self.times_returned(entry) if entry & REDELIVERED else 0

    def _read(
        self, entries: array[int], room: int, whole: bool = True
    ) -> list[tuple[array[int], array[int], Blob]]:
        """Read as many messages as fit, at least one; return (entries, sizes, blob) of each piece.

        The messages of a piece are all redelivered or all not. If `whole` is False, the answer may
        end sooner.
        """
        backlog = self.backlog
        if len(entries) == 1:
            blob, sizes = backlog.store.look(entries, max(room, 1))
            return [(entries, sizes, blob)]
        pieces: list[tuple[array[int], array[int], Blob]] = []
        at = 0
        while at < len(entries) and (room > 0 or not at):
            stop = same_mark(entries, at)
            if entries[at] & REDELIVERED and backlog.rules.counts_returns:
                stop = self._as_often(entries, at, stop)
            some = entries if stop - at == len(entries) else entries[at:stop]
            blob, sizes = backlog.store.look(some, max(room, 1), whole)
            pieces.append((some if len(sizes) == len(some) else some[: len(sizes)], sizes, blob))
            room -= len(blob)
            at += len(sizes)
            if at < stop:
                break
        return pieces

    def _hand_over(
        self, taker: Consumer, entries: array[int], sizes: array[int], blob: Blob, outlet: Outlet
    ) -> None:
        backlog = self.backlog
        count = len(entries)
        body_bytes = total(sizes) if count > 1 else sizes[0]
        unacked, window = taker.unacked, taker.window
        number = unacked.skip(count) if taker.no_ack else unacked.add(entries, sizes)
        if entries[0] & REDELIVERED:
            self._deliver_again(taker, number, entries, blob, outlet)
        else:
            outlet.deliver(taker, number, False, count, blob)
        window.room -= len(blob)
        window.served = taker.queue
        if taker.allotment is not None:
            taker.allotment.used += count
        backlog.ready_bytes -= body_bytes
        backlog.counters.delivered += count
        if not taker.no_ack:
            backlog.unacked_count += count
            backlog.unacked_bytes += body_bytes
            return
        backlog.counters.delivered_auto += count
        backlog.store.settle(backlog.id, entries, backlog.durable)
        if backlog.facts:
            backlog.forget_facts()

    def _deliver_again(
        self, taker: Consumer, number: int, entries: array[int], blob: Blob, outlet: Outlet
    ) -> None:
        count = len(entries)
        self.backlog.counters.redelivered += count
        times = self.times_returned(entries[0])
        if times:
            outlet.deliver_again(taker, number, times, count, blob)
        else:
            outlet.deliver(taker, number, True, count, blob)

    def times_returned(self, entry: int) -> int:
        """Return how often a message came back that was delivered before.

        Return 0 if the queue does not count returns.
        """
        backlog = self.backlog
        return (
            backlog.store.times_returned(backlog.id, entry) if backlog.rules.counts_returns else 0
        )

    def _as_often(self, entries: array[int], start: int, stop: int) -> int:
        """Return where the run of messages ends that came back as often as the first."""
        times = self.times_returned(entries[start])
        at = start + 1
        while at < stop and self.times_returned(entries[at]) == times:
            at += 1
        return at

    # -- allotments --------------------------------------------------------------------------------

    def end_pass(self, outlet: Outlet, until: int = ENDLESS, served: float = inf) -> None:
        """End the turns of this queue, and tell front doors what they must know of allotments.

        `until` is the entry before which the queue had to stop, 0 if it was not its turn. `served`
        is the lowest priority of consumers that were given messages, infinite if none was. A
        consumer without credit would have got some of them, and must say so: beside consumers that
        always have room it would never get any. It says so once until it has credit, because many
        consumers may be busy while others of the queue are not.
        """
        if not until:
            return
        consumers = self.consumers.all
        has_rivals = len(consumers) > 1 and consumers[0].queue.keeps_in_store
        # A message may be ready for nobody who has room, because another consumer has its key. Who
        # gave credit back for that asks again when something has changed: not for ever in turns.
        state = None
        if self.keys is not None:
            backlog = self.backlog
            state = backlog.id, backlog.ready_count, len(self.keys), backlog.counters.delivered
        for consumer in consumers:
            allotment, queue = consumer.allotment, consumer.queue
            if allotment is None:
                continue
            blocked = consumer.window.room <= 0
            can = self._may_take(consumer)
            may = can and queue.has_for(consumer)
            if allotment.left <= 0:
                missed = consumer.priority >= served or allotment.is_asleep
                waits = may or (can and has_rivals and missed)
                waits = waits and (state is None or allotment.useless_at != state)
            else:
                # A queue that stopped at the end of its stretch has not looked for room.
                waits = may and queue in consumer.window.blocked
            if waits and allotment.is_asleep:
                continue
            still_waits = waits
            if allotment.order is not None:
                order = allotment.order
                wants = waits or (may and (order.current is not queue or self.head() >= until))
                order.end(queue, wants, waits)
                still_waits = not order.is_idle
            had_credit = allotment.left > 0
            if allotment.ended(still_waits, blocked):
                if had_credit and may and not blocked:
                    allotment.useless_at = state
                outlet.report(allotment)

    def _may_take(self, consumer: Consumer) -> bool:
        consumers = self.consumers
        return consumers.active(consumer) and not consumers.paused and consumer.wanted() > 0

    # -- consumers ---------------------------------------------------------------------------------

    def attach(self, consumer: Consumer) -> None:
        if not self.consumers.all:
            self.is_stuck, self.share = False, 1.0
        self.consumers.add(consumer)
        self.holders[consumer] = None
        self._consumers_changed()
        consumer.window.consumers += 1

    def detach(self, consumer: Consumer) -> None:
        """Deliver no more to the consumer. The consumer keeps the messages that it holds."""
        consumer.detached = True
        consumer.window.consumers -= 1
        queue = consumer.queue
        self.consumers.remove(consumer)
        self.forget_order(consumer)
        self._consumers_changed(queue)
        self.let_holder_go(consumer)

    def _consumers_changed(self, queue: OrderedQueue | None = None) -> None:
        """Begin or end what depends on the attached consumers.

        Keys are kept while any consumer asks for key affinity. Unsettled messages are read once at
        the start. A queue with one consumer takes turns in the order of the log, if that consumer
        has an order. A stream has a log of its own. `queue` is the queue of this dispatch, given if
        its last consumer may have gone.
        """
        consumers = self.consumers
        if not consumers.affinity:
            self.keys = None
        elif self.keys is None:
            self.keys = Keys()
            for holder in self.holders:
                if isinstance(holder, Consumer):
                    self.keys.take_held(holder, self.backlog.store)
        order = None
        if len(consumers.all) == 1 and self.keys is None and consumers.all[0].queue.keeps_in_store:
            allotment = consumers.all[0].allotment
            order = None if allotment is None else allotment.order
        if order is not self.order:
            self.leave_order(consumers.all[0].queue if queue is None else queue)
            self.order = order

    def leave_order(self, queue: OrderedQueue) -> None:
        """Stop taking turns with other queues. `queue` is the queue of this dispatch."""
        if self.order is not None:
            self.order.leave(queue)
            self.order = None

    @staticmethod
    def forget_order(consumer: Consumer) -> None:
        """Take the queue of a consumer that gets no more messages out of the order."""
        allotment = consumer.allotment
        if allotment is not None and allotment.order is not None:
            allotment.order.leave(consumer.queue)

    def head(self) -> int:
        """Return the entry that leaves next, ENDLESS if there is none.

        The entry is 0 if the queue does not take turns in the order of the log.
        """
        return 0 if self.order is None else self.backlog.head()

    # -- held messages -----------------------------------------------------------------------------

    def held_of(self, queue: object) -> Iterator[int]:
        """Yield the entries that consumers and getters of the queue of this dispatch hold."""
        for holder in self.holders:
            if isinstance(holder, Getter):
                yield from holder.held_of(queue)
            else:
                yield from holder.unacked.held()

    def first_held_of(self, queue: object) -> list[int]:
        """Return of each consumer and getter the entry that was published first of those held."""
        firsts = [
            min(holder.held_of(queue), default=0)
            if isinstance(holder, Getter)
            else holder.unacked.lowest
            for holder in self.holders
        ]
        return [entry for entry in firsts if entry]

    def taken_back(self, entries: array[int], size: int) -> None:
        """Note that no consumer holds these messages any more."""
        if self.keys is not None:
            self.keys.back(entries)
        self.backlog.taken_back(len(entries), size)

    def take_until(self, queue: object, last: int) -> list[array[int]]:
        """Take messages from the consumers and getters that hold them.

        Messages are taken whose entry is not above `last`. Return their entries, an array for each
        holder.
        """
        taken: list[array[int]] = []
        for holder in list(self.holders):
            if isinstance(holder, Getter):
                entries, size = holder.take_until(queue, last)
            else:
                entries, size = holder.unacked.take_until(last)
                self.let_holder_go(holder)
            if entries:
                self.taken_back(entries, size)
                taken.append(entries)
        return taken

    def let_holder_go(self, consumer: Consumer) -> None:
        """Forget a detached consumer if it holds nothing any more."""
        if consumer.detached and not consumer.unacked.count:
            self.holders.pop(consumer, None)

    def drop(self, queue: OrderedQueue) -> None:
        """Forget which messages are held, because the queue is deleted."""
        for holder in self.holders:
            if isinstance(holder, Getter):
                holder.forget(queue)
            else:
                self.forget_order(holder)
                holder.unacked.take_all()
        self.order = None


def _rooms(takers: list[Consumer], bytes_max: int) -> list[int]:
    """Return the bytes that each taker may get in one round.

    Takers of one connection share its window.
    """
    windows = [taker.window for taker in takers]
    sharing = Counter(map(id, windows))
    return [min(window.room // sharing[id(window)], bytes_max) for window in windows]
