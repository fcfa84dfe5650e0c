"""What becomes of a message in its queue: accept or refuse, keep in order, hand to who has room, let go.

Publish path, 4 of 5. Before: shardd/shard.py. After: shardd/store/store.py.

A queue keeps entries (entry.py); the store keeps the bytes. What it has is a backlog (backlog.py: order, age, limits);
this file is who gets it and what comes back. A plain queue (no ttl, limit, priority) does nothing per message in
Python. Every message that ends without being acknowledged or purged goes through `let_go`; of a queue with
a dead-letter exchange it then waits in `departures`, in the store still, until its copies last.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from shardmq.shardd.queues import overdue
from shardmq.shardd.queues.affinity import LOOK_BYTES, Keys, alike, looked_at
from shardmq.shardd.queues.backlog import ALL, STEP_MESSAGES, Backlog
from shardmq.shardd.queues.consumers import Consumer, Consumers, Loan
from shardmq.shardd.queues.entry import EXPIRY, PLACE, REDELIVERED
from shardmq.shardd.queues.limits import DELIVERY_LIMIT, MAXLEN, REFUSED, REJECTED, Limits
from shardmq.shardd.queues.ready import Ready, marked, same_mark, total
from shardmq.shardd.queues.resting import Resting, Retry
from shardmq.shardd.queues.store import Arrival, Store
from shardmq.shardd.queues.turns import ENDLESS, LEEWAY, TURN_BYTES, SharingQueue, Turns
from shardmq.shardd.queues.unacked import Getter

# Messages that expire in one pass: a million at once must not stop the other queues.
EXPIRED_MAX = 16384

Blob = bytes | memoryview


class Reserved(NamedTuple):
    """Room that is set aside for messages that are about to come."""

    messages: int
    body_bytes: int


NOTHING_RESERVED = Reserved(0, 0)


class Outlet(Protocol):
    """Where deliveries go; `blob` may be a view that is good until messages are appended to the store."""

    def deliver(
        self, consumer: Consumer, first_number: int, redelivered: bool, count: int, blob: Blob
    ) -> None: ...
    def deliver_again(
        self, consumer: Consumer, first_number: int, times: int, count: int, blob: Blob
    ) -> None:
        """All of them came back `times` times, to a queue that allows it only so often."""

    def ungranted(self, consumer: Consumer, count: int, wants: bool) -> None: ...
    def passed(self, consumer: Consumer, offset: int) -> None:
        """Of a stream: it has settled all below, which is not below its mark."""


class Queue(Backlog):
    """There may be 100,000 of them, most of them idle: what an idle one does not need is not there."""

    __slots__ = (
        "_keys",
        "auto_delete",
        "closed",
        "consumers",
        "deleted",
        "last_used",
        "reserved",
        "turns",
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
        super().__init__(queue_id, store, limits, durable)
        self.auto_delete = auto_delete
        self.consumers = Consumers(limits.single_active, limits.paused)
        self.closed = False  # takes no more consumers: soon deleted
        self.deleted = False
        self.last_used = now
        self.turns: Turns | None = None  # while its one consumer has others beside it
        self._keys: Keys | None = None  # while a consumer wants each key for one of them
        self.reserved = NOTHING_RESERVED  # for transactions that are about to be committed

    # -- in --------------------------------------------------------------------------------------------

    def publish(self, arrival: Arrival, now: int) -> list[int] | None:
        """Take the messages in; ordinals within the batch of those refused, if some were."""
        entries = arrival.entries
        count = len(entries)
        self.counters.published += count
        if arrival.marks != self.marks:
            self._mark_as(arrival.marks)
        if self._is_plain and arrival.facts is None and not self._facts:
            self._levels[0].push_many(entries)
            self.ready_count += count
            self.ready_bytes += arrival.body_bytes
            return None
        chosen: list[int] | None = None
        refused: list[int] = []
        lost_bytes = 0
        if self.may_refuse:
            chosen, dropped = self._choose(arrival)
            if dropped:
                entries = array("Q", [arrival.entries[i] for i in dropped])
                lost_bytes = self._bytes_of(entries)
                refused = [
                    arrival.indexes[i] if arrival.indexes is not None else i for i in dropped
                ]
                self.let_go(entries, MAXLEN if self.limits.refused_die else REFUSED)
        self._place(arrival, chosen, now)
        self._add_bytes(arrival.body_bytes - lost_bytes)
        return refused or None

    def publish_reserved(self, arrival: Arrival, now: int) -> None:
        """Take in messages that room was set aside for: none is refused."""
        self.counters.published += len(arrival.entries)
        if arrival.marks != self.marks:
            self._mark_as(arrival.marks)
        self._place(arrival, None, now)
        self._add_bytes(arrival.body_bytes)

    def _choose(self, arrival: Arrival) -> tuple[list[int], list[int]]:
        """Which of them fit, and which do not. What consumers can take at once does not count against the limit."""
        sizes = self._sizes(arrival.entries) if self.limits.max_bytes is not None else array("I")
        return self._fitting(len(arrival.entries), sizes)

    def _fitting(self, count: int, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return which of `count` new messages fit, and which do not. `sizes`: body bytes of each; may be empty where
        the queue has no limit of bytes."""
        limits = self.limits
        length, _, held, _ = self.room()
        fit: list[int] = []
        dropped: list[int] = []
        for i in range(count):
            size = sizes[i] if sizes else 0
            full = limits.max_length is not None and length + 1 > limits.max_length
            heavy = limits.max_bytes is not None and held + size > limits.max_bytes
            if length >= 0 and (full or heavy):
                dropped.append(i)
                continue
            fit.append(i)
            length += 1
            held += size if length > 0 else 0
        return fit, dropped

    def room(self) -> tuple[int, int | None, int, int | None]:
        """Messages that count against its limit, how many may, bytes that count, how many may."""
        limits = self.limits
        capacity = self.consumers.capacity()
        reserved = self.reserved
        length = self.ready_count + self.kept_back + reserved.messages - capacity
        held = 0
        if length > 0 and limits.max_bytes is not None:
            held = max(0, self.ready_bytes - self._first_bytes(capacity)) + reserved.body_bytes
        return length, limits.max_length, held, limits.max_bytes

    def reserve(self, sizes: Sequence[int]) -> bool:
        """Set room aside for new messages with so many body bytes each, if all of them fit."""
        if self.may_refuse and self._fitting(len(sizes), sizes)[1]:
            return False
        self._change_reserved(len(sizes), sum(sizes))
        return True

    def unreserve(self, messages: int, body_bytes: int) -> None:
        """Free room that was set aside: the messages have come, or will not."""
        self._change_reserved(-messages, -body_bytes)

    def _change_reserved(self, messages: int, body_bytes: int) -> None:
        now = self.reserved
        self.reserved = Reserved(now.messages + messages, now.body_bytes + body_bytes)

    # -- out -------------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Nobody consumes it, and nothing in it leaves by itself: a turn would find nothing to do, whatever arrived."""
        acts = (
            self._is_bounded
            or self._is_timed
            or self.is_watched
            or self._facts
            or self._resting is not None
        )
        return not (acts or self.consumers.all)

    def deliver(self, now: int, outlet: Outlet, bytes_max: int) -> bool:
        """Hand out at most about `bytes_max`; whether there is more to hand out now."""
        given = 0
        if self._resting is not None:
            self._wake(now)
        consumers = self.consumers
        # What goes this very millisecond (a ttl of 0) may still be handed out directly.
        if self._facts and not self.expire(now - 1, EXPIRED_MAX):
            return True
        turns = self.turns
        until = ENDLESS
        if turns is not None:
            until, bytes_max = turns.begin_turn(self, now), max(bytes_max, TURN_BYTES)
        elif consumers.borrow:
            consumers.look(now)
        while self.ready_count and until:
            if given and turns is not None and self.head() >= until:
                break
            takers = consumers.takers()
            if not takers:
                break
            if given > bytes_max - (
                bytes_max >> 3
            ):  # a message or two more would cost as much as many
                return True
            levels = self._levels
            level = levels[0] if len(levels) == 1 else self._first_level()
            if self._keys is not None:
                dealt = self._deal_by_key(self._keys, takers, level, bytes_max - given, outlet, now)
                if not dealt:
                    break
                given += dealt
            elif len(takers) == 1:
                # What was lent goes in one piece, though the last of it may lie a little behind the end of the turn.
                end = until + LEEWAY if consumers.borrow else until
                given += self._deal_to_one(takers[0], level, bytes_max - given, outlet, now, end)
            else:
                given += self._deal(takers, level, bytes_max - given, outlet, now)
            if self._facts and not self.expire(now - 1, EXPIRED_MAX):
                return True
        if self._facts and not self.expire(now, EXPIRED_MAX):
            return True
        if self._is_bounded:
            self.enforce()
            self.expire(now)  # behind what was dropped
        if turns is not None and turns.goes_on(self):
            return False
        if consumers.borrow:
            self._settle_grants(outlet)
        if turns is not None:
            turns.end_turn(self, until)
        return False

    def _deal_to_one(
        self, taker: Consumer, level: Ready, bytes_max: int, outlet: Outlet, now: int, until: int
    ) -> int:
        """As many as it has room for, of those before that entry; bytes handed out."""
        room = taker.window.room
        if bytes_max < room:
            room = bytes_max
        if self.ready_count == 1:  # who is a taker has room for one
            entries = level.peek(1)
            blob, sizes = self.store.look(entries, room if room > 1 else 1)
            level.drop(1)
            self.ready_count = 0
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
        average = self.ready_bytes // self.ready_count + 1
        block = level.peek(min(STEP_MESSAGES, self.consumers.room, room // average + 1))
        if block[-1] >= until:
            block = block[: bisect_left(block, until)]
        if self._facts:
            block = self._before_old(block, now - 1)
        given = 0
        for entries, sizes, blob in self._read(block, room, whole=False):
            level.drop(len(entries))
            self.ready_count -= len(entries)
            self._hand_over(taker, entries, sizes, blob, outlet)
            given += len(blob)
        return given

    def _deal(
        self, takers: list[Consumer], level: Ready, bytes_max: int, outlet: Outlet, now: int
    ) -> int:
        """One round of equal shares among several, a message to each in turn; bytes handed out.

        It ends before the first message that does not fit with the one whose turn it is: given to another later, it
        would come to that one behind messages published after it.
        """
        count = len(takers)
        average = self.ready_bytes // self.ready_count + 1
        most = min(STEP_MESSAGES, bytes_max // average + 1, len(level))
        rooms = _rooms(takers, bytes_max)
        share = min(
            -(-most // count), min([taker.room() for taker in takers]), min(rooms) // average + 1
        )
        block = level.peek(share * count)
        if self._facts:
            block = self._before_old(block, now - 1)
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
                self.ready_count -= len(
                    entries
                )  # not all before: without messages it forgets what it knows of them
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
        """Each to who has its key, or to the next in turn; those that wait stay in their places. Bytes handed out."""

        def look(most: int) -> tuple[array[int], bytes, array[int]]:
            block = level.peek(most)
            if self._facts:
                block = self._before_old(block, now - 1)
            blob, sizes = self.store.read(block, LOOK_BYTES)
            return block[: len(sizes)], blob, sizes

        looked, dealt = looked_at(look, takers, keys, bytes_max)
        if not dealt.parts:
            return 0
        level.drop(len(looked))
        level.merge(looked.left(dealt))
        given = 0
        for taker, part in dealt.parts.items():
            for run in alike(looked, part, self._mark):
                entries, sizes, blob = looked.pieces(run)
                if not taker.no_ack:
                    keys.take(taker, entries, looked.keys(run))
                self.ready_count -= len(run)
                self._hand_over(taker, entries, sizes, blob, outlet)
                given += len(blob)
        if dealt.last is not None:
            self.consumers.took(dealt.last)
        return given

    def _mark(self, entry: int) -> int:
        return 1 + self._times(entry) if entry & REDELIVERED else 0

    def _read(
        self, entries: array[int], room: int, whole: bool = True
    ) -> list[tuple[array[int], array[int], Blob]]:
        """As many as fit, at least one, in pieces that are all redelivered or all not: (entries, sizes, blob). Not
        `whole`: it may end sooner."""
        if len(entries) == 1:
            blob, sizes = self.store.look(entries, max(room, 1))
            return [(entries, sizes, blob)]
        pieces: list[tuple[array[int], array[int], Blob]] = []
        at = 0
        while at < len(entries) and (room > 0 or not at):
            stop = same_mark(entries, at)
            if entries[at] & REDELIVERED and self._counts_returns:
                stop = self._as_often(entries, at, stop)
            some = entries if stop - at == len(entries) else entries[at:stop]
            blob, sizes = self.store.look(some, max(room, 1), whole)
            pieces.append((some if len(sizes) == len(some) else some[: len(sizes)], sizes, blob))
            room -= len(blob)
            at += len(sizes)
            if at < stop:
                break
        return pieces

    def _hand_over(
        self, taker: Consumer, entries: array[int], sizes: array[int], blob: Blob, outlet: Outlet
    ) -> None:
        count = len(entries)
        body_bytes = total(sizes) if count > 1 else sizes[0]
        unacked, window = taker.unacked, taker.window
        number = unacked.skip(count) if taker.no_ack else unacked.add(entries, sizes)
        if entries[0] & REDELIVERED:
            self._deliver_again(taker, number, entries, blob, outlet)
        else:
            outlet.deliver(taker, number, False, count, blob)
        window.room -= len(blob)
        window.served = self
        if taker.limited:
            taker.grants -= count
        if unacked.loan is not None:
            unacked.loan.take(self, count)
        self.ready_bytes -= body_bytes
        self.counters.delivered += count
        if not taker.no_ack:
            self.unacked_count += count
            self.unacked_bytes += body_bytes
            return
        self.counters.delivered_auto += count
        self.store.settle(self.id, entries, self.durable)
        if self._facts:
            self._forget_facts()

    def _deliver_again(
        self, taker: Consumer, number: int, entries: array[int], blob: Blob, outlet: Outlet
    ) -> None:
        count = len(entries)
        self.counters.redelivered += count
        times = self._times(entries[0])
        if times:
            outlet.deliver_again(taker, number, times, count, blob)
        else:
            outlet.deliver(taker, number, True, count, blob)

    def _times(self, entry: int) -> int:
        """How often one that was delivered before came back, if that is counted here."""
        return self.store.times_returned(self.id, entry) if self._counts_returns else 0

    def _as_often(self, entries: array[int], start: int, stop: int) -> int:
        """Where those that came back as often as the first end."""
        times = self._times(entries[start])
        at = start + 1
        while at < stop and self._times(entries[at]) == times:
            at += 1
        return at

    def has_for(self, consumer: Consumer) -> bool:
        """Return whether a message is ready that this consumer, one of its own, may get."""
        return self.ready_count > 0

    def _settle_grants(self, outlet: Outlet) -> None:
        """Give back grants that wait for nothing; ask for some where a message waits for nothing else."""
        for consumer in self.consumers.all:
            if consumer.lent and consumer.loan is not None:
                self._settle_loan(consumer, consumer.loan, outlet)
                continue
            if not consumer.limited:
                continue
            may = self.consumers.active(consumer) and not self.consumers.paused
            useful = may and self.has_for(consumer) and consumer.wanted() > 0
            if consumer.grants and not useful:
                count, consumer.grants = consumer.grants, 0
                outlet.ungranted(consumer, count, False)
            elif useful and not consumer.grants and not consumer.asked:
                consumer.asked = True
                outlet.ungranted(consumer, 0, True)

    def _settle_loan(self, consumer: Consumer, loan: Loan, outlet: Outlet) -> None:
        """Give back what others want and the loan can spare; ask for more if it is used up."""
        for part, count in loan.give_back(consumer):
            outlet.ungranted(part, count, False)
        useful = (
            self.has_for(consumer) and self.consumers.active(consumer) and not self.consumers.paused
        )
        if useful and loan.lent <= loan.used and not loan.asked:
            loan.asked = True
            outlet.ungranted(consumer, 0, True)
        loan.served(self)

    @staticmethod
    def grant(consumer: Consumer, count: int) -> None:
        if consumer.lent and consumer.loan is not None:
            consumer.loan.grant(consumer, count)
        elif consumer.limited:
            consumer.grants += count
            consumer.asked = False

    def get(self, getter: Getter | None, now: int) -> tuple[bytes, int, bool, int] | None:
        """One message (stored, delivery number, redelivered, how often it came back if that is counted); held by
        `getter`, or by nobody."""
        self.last_used = now
        if self._resting is not None:
            self._wake(now)
        self.expire(now)
        if not self.ready_count or self.consumers.paused:
            self.counters.got_empty += 1
            return None
        level = self._first_level()
        entries = level.peek(1)
        blob, sizes = self.store.read(entries, 1)
        level.drop(1)
        self.ready_count -= 1
        self.ready_bytes -= sizes[0]
        self.counters.got += 1
        self.counters.delivered += 1
        number = 0
        redelivered = bool(entries[0] & REDELIVERED)
        times = self._times(entries[0]) if redelivered else 0
        self.counters.redelivered += redelivered
        if getter is None:
            self.counters.got_auto += 1
            self._forget(entries)
        else:
            number = getter.add(self, entries[0], sizes[0], now)
            self._holders[getter] = None
            self.unacked_count += 1
            self.unacked_bytes += sizes[0]
        return blob, number, redelivered, times

    # -- back ------------------------------------------------------------------------------------------

    def ack(self, entries: array[int], size: int) -> None:
        self._taken_back(entries, size)
        self.counters.acked += len(entries)
        self._forget(entries)

    def reject(self, entries: array[int], size: int) -> None:
        self._taken_back(entries, size)
        self.let_go(entries, REJECTED)

    def requeue(self, entries: array[int], size: int) -> None:
        """To the old place, as delivered before; at once, or when they have rested."""
        self._taken_back(entries, size)
        entries = marked(array("Q", sorted(entries)))
        if self._counts_returns:
            entries, size = self._count_returns(entries, size)
        self._put_back(entries, size)

    def give_back(self, entries: array[int], size: int) -> None:
        """To the old place, as if never handed out."""
        self._taken_back(entries, size)
        self._put_back(array("Q", sorted(entries)), size)

    def _taken_back(self, entries: array[int], size: int) -> None:
        if self._keys is not None:
            self._keys.back(entries)
        self.unacked_count -= len(entries)
        self.unacked_bytes -= size

    def _count_returns(self, entries: array[int], size: int) -> tuple[array[int], int]:
        """Those that go back at once: neither requeued too often, nor to rest first."""
        most = ALL if self.limits.delivery_limit is None else self.limits.delivery_limit
        kept, gone = array("Q"), array("Q")
        all_times = self.store.count_returns(self.id, entries)
        for entry, times in zip(entries, all_times, strict=True):
            (gone if times > most else kept).append(entry)
        if gone:
            size -= self._bytes_of(gone)
            self.let_go(gone, DELIVERY_LIMIT)
        if self.limits.retry is None or not kept:
            return kept, size
        self._rest(kept, [times for times in all_times if times <= most], size, self.limits.retry)
        return array("Q"), 0

    def _rest(self, entries: array[int], all_times: list[int], size: int, retry: Retry) -> None:
        """Held until they are due, as if by a consumer."""
        if self._resting is None:
            self._resting = Resting()
        parts: dict[int, array[int]] = {}
        for entry, times in zip(entries, all_times, strict=True):
            parts.setdefault(retry.rest_ms(times), array("Q")).append(entry)
        for rest_ms, part in parts.items():
            self._resting.add(part, size if len(parts) == 1 else self._bytes_of(part), rest_ms)
        self.unacked_count += len(entries)
        self.unacked_bytes += size

    def _wake(self, now: int) -> None:
        """Those that are due are ready again; all, if none is to rest any more."""
        assert self._resting is not None
        self._resting.begin(now)
        entries, size = (
            self._resting.take_all() if self.limits.retry is None else self._resting.take_due(now)
        )
        if entries:
            self.give_back(entries, size)
        if not self._resting:
            self._resting = None

    # -- limits ----------------------------------------------------------------------------------------

    def next_due(self) -> int | None:
        """When `expire` or `expired_itself` will have something to do."""
        if not self._facts and not self._is_timed and self._resting is None:
            return None
        due = []
        if self._resting is not None and (rested := self._resting.next_due()) is not None:
            due.append(rested)
        if self._facts:
            expiries = [self._fact(level.first()) & EXPIRY for level in self._levels if len(level)]
            due += [expiry for expiry in expiries if expiry]
        if self.limits.expires is not None and not self.consumers and not self.closed:
            due.append(self.last_used + self.limits.expires)
        timeout = self.limits.consumer_timeout
        if (
            timeout is not None
            and (late := overdue.due_at(self._holders, self, timeout)) is not None
        ):
            due.append(late)
        return min(due, default=None)

    def expired_itself(self, now: int) -> bool:
        """Unused for as long as x-expires says."""
        if self.limits.expires is None or self.consumers or self.closed:
            return False
        return now >= self.last_used + self.limits.expires

    def change(self, limits: Limits, now: int) -> None:
        """Other arguments (policies), or declared again."""
        self.last_used = now
        if limits.max_priority != self.limits.max_priority:
            self._rearrange(limits.max_priority)
        self.limits = limits
        self._hold(limits.held)
        self._decide()
        self.consumers.be_single_active(limits.single_active)
        self.consumers.be_paused(limits.paused)
        self.enforce()

    def take_overdue(self, now: int) -> bool:
        """Requeue what consumers have held for longer than the queue waits; whether there was some. To be called after
        each `deliver`."""
        timeout = self.limits.consumer_timeout
        if timeout is None or self.limits.timeout_closes:
            return False
        found = False
        for holder in list(self._holders):
            entries, size = overdue.taken_from(holder, self, now, timeout)
            if entries:
                self.requeue(entries, size)
                found = True
        return found

    def late(self, now: int) -> list[Consumer | Getter]:
        """Who has held something for longer than the queue waits, if their channels are to be closed for it: each once.
        To be called after each `deliver`."""
        timeout = self.limits.consumer_timeout
        if timeout is None or not self.limits.timeout_closes:
            return []
        holders = [holder for holder in self._holders if not holder.told_late]
        found = [holder for holder in holders if overdue.is_late(holder, self, now, timeout)]
        for holder in found:
            holder.told_late = True
        return found

    # -- consumers -------------------------------------------------------------------------------------

    def attach(self, consumer: Consumer) -> None:
        self.consumers.add(consumer)
        self._holders[consumer] = None
        self._keep_keys()
        self._take_turns()
        consumer.window.consumers += 1

    def detach(self, consumer: Consumer, now: int) -> None:
        """No more deliveries; what it holds it holds."""
        if consumer.detached:
            return
        consumer.detached = True
        consumer.window.consumers -= 1
        consumer.stop_sharing()
        self.consumers.remove(consumer)
        self._keep_keys()
        self._take_turns()
        self.last_used = now
        self.let_holder_go(consumer)
        if self.auto_delete and not self.consumers:
            self.closed = True

    def _keep_keys(self) -> None:
        """From the first consumer that asks for it to the last; what is unsettled at the start is looked at once."""
        if not self.consumers.affinity:
            self._keys = None
        elif self._keys is None:
            self._keys = Keys()
            for holder in self._holders:
                if isinstance(holder, Consumer):
                    self._keys.take_held(holder, self.store)

    def _take_turns(self) -> None:
        """With the others of its only consumer."""
        alone = (
            self.consumers.all[0].loan
            if len(self.consumers.all) == 1 and self._keys is None
            else None
        )
        if alone is not self.turns:
            if self.turns is not None:
                self.turns.leave_turns(self)
            self.turns = alone

    def head(self) -> int:
        """The entry that leaves next, ENDLESS if there is none."""
        if not self.ready_count:
            return ENDLESS
        return self._levels[0].first() if len(self._levels) == 1 else self._first_level().first()

    def waits_for_room(self) -> bool:
        """Whether its consumer, the only one, is to tell when it has some."""
        consumer = self.consumers.all[0]
        return self in consumer.window.blocked or (
            consumer.loan is not None and self in consumer.loan.waiting
        )

    def waits_instead_of(self, other: SharingQueue) -> bool:
        """For room of the consumer that has both, if it has none; whether it is so."""
        consumer = self.consumers.all[0]
        window, loan = consumer.window, consumer.loan
        if window.room <= 0:
            window.blocked.pop(other, None)
            window.blocked[self] = None
            return True
        if loan is not None and loan.free <= 0 and other in loan.waiting:
            del loan.waiting[other]
            loan.waiting[self] = None
            return True
        return False

    def let_holder_go(self, consumer: Consumer) -> None:
        if consumer.detached and not consumer.unacked.count:
            self._holders.pop(consumer, None)

    def release(self, consumer: Consumer, now: int) -> None:
        """It is gone for good; what it held goes back."""
        self.detach(consumer, now)
        entries, size = consumer.unacked.take_all()
        if entries:
            self.requeue(entries, size)
        self._holders.pop(consumer, None)

    # -- all of it -------------------------------------------------------------------------------------

    def let_go_until(self, place: int, reason: str) -> int:
        """What is not settled up to that place leaves, but for what rests; how many. A late ack of it is no error."""
        last, before = place | ~PLACE, self.counters.let_go
        gone: list[array[int]] = []
        for holder in list(self._holders):
            if isinstance(holder, Getter):
                entries, size = holder.take_until(self, last)
            else:
                entries, size = holder.unacked.take_until(last)
            if entries:
                self._taken_back(entries, size)
                gone.append(entries)
            if isinstance(holder, Consumer):
                self.let_holder_go(holder)
        if gone:  # before those that are ready: they are older
            self.let_go(array("Q", sorted(chain(*gone))), reason)
        for level in self._levels:
            while len(level) and level.first() <= last:
                head = level.peek(STEP_MESSAGES)
                self._drop_head(level, head[: bisect_right(head, last)], reason)
        return self.counters.let_go - before

    def drop(self) -> int:
        """The queue is deleted; how many messages were ready. What departs is on its way all the same."""
        count = self.ready_count + self.kept_back
        if self.departures is None or not self.departures.count:
            self.store.drop_queue(self.id, self._own())
        else:
            self.store.settle(self.id, self._own(), False)
        for level in self._levels:
            level.take_all()
        self._take_behind()
        for holder in self._holders:
            if isinstance(holder, Getter):
                holder.forget(self)
            else:
                holder.stop_sharing()
                holder.unacked.take_all()
        self._resting = None
        if self.turns is not None:
            self.turns.leave_turns(self)
            self.turns = None
        self.closed = self.deleted = True
        self.ready_count = self.ready_bytes = self.unacked_count = self.unacked_bytes = 0
        return count


def _rooms(takers: list[Consumer], bytes_max: int) -> list[int]:
    """Bytes each may get in one round; those of one connection share its window."""
    windows = [taker.window for taker in takers]
    sharing = Counter(map(id, windows))
    return [min(window.room // sharing[id(window)], bytes_max) for window in windows]
