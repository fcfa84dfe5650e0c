"""Keep the messages of a queue in order, and let messages go by age and limits.

Most messages are ready, by priority. Other messages are kept back until other queues have settled
older ones (held_back.py), rest before they are ready again (resting.py), or depart to a dead-letter
exchange (departures.py). Messages that were taken out are counted until they are settled or put
back. dispatch.py knows which consumer has them.

A message that ends without being acknowledged or purged goes through `let_go`. In a queue with a
dead-letter exchange the message then waits in `departures`. It stays in the store until its copies
are safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from shardmq.shardd.queues.departures import Departures
from shardmq.shardd.queues.entry import ENDLESS, EXPIRY, HAS_BCC, OWN_LETTERS, PLACE, Facts
from shardmq.shardd.queues.held_back import HeldBack
from shardmq.shardd.queues.limits import EXPIRED, MAXLEN, REFUSED, Limits
from shardmq.shardd.queues.resting import Resting
from shardmq.shardd.queues.rules import rules_of
from shardmq.shardd.queues.state import BacklogState, Counters, Ready, judge, marked, merged
from shardmq.shardd.queues.store import SIZES_BYTES, STEP_MESSAGES, Arrival, Store, bytes_of

ALL = 1 << 62


class Backlog(BacklogState):
    """The messages of one queue.

    `durable` says that a recovery of the store must know which messages were settled.
    """

    __slots__ = ("limits", "rules", "takes_all")

    def __init__(self, queue_id: int, store: Store, limits: Limits, durable: bool) -> None:
        self.id = queue_id
        self.store = store
        self.durable = durable
        self.limits = limits
        self.counters = Counters()
        self.departures: Departures | None = None  # None until a message departs
        self.ready_count = 0
        self.ready_bytes = 0
        # Messages that were taken out or rest, and were not settled or put back yet.
        self.unacked_count = 0
        self.unacked_bytes = 0
        self.marks = 0  # the marks of all messages since the queue was empty
        self.kinds = 0
        self.hides = False  # some messages may have a header that no consumer may see
        self.levels = [Ready() for _ in range(limits.max_priority + 1)]
        self.facts: Facts | None = None  # None until a message has a fact
        self.resting: Resting | None = None  # None while no message rests
        self.held_back = HeldBack() if limits.held else None
        self._decide()

    # -- what is there -----------------------------------------------------------------------------

    @property
    def kept_back(self) -> int:
        """Return how many messages wait because other queues must settle older ones first."""
        return self.held_back.count if self.held_back is not None else 0

    @property
    def letters_differ(self) -> bool:
        """Return whether messages may name their own dead-letter exchange."""
        return bool(self.marks & OWN_LETTERS)

    def first_level(self) -> Ready:
        """Return the ready list that messages leave from next. A message must be ready."""
        return next(level for level in reversed(self.levels) if len(level))

    def head(self) -> int:
        """Return the entry that leaves next, ENDLESS if none is ready."""
        if not self.ready_count:
            return ENDLESS
        return self.levels[0].first() if len(self.levels) == 1 else self.first_level().first()

    def first_sizes(self) -> Sequence[int]:
        """Return the body bytes of the first messages of the level that leaves first."""
        return self.store.read(self.first_level().peek(STEP_MESSAGES), SIZES_BYTES)[1]

    # -- rules -------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Decide which rules the limits ask for, once for all messages to come."""
        self.rules = rules_of(self.limits)
        # An arrival without facts is taken in as one piece if no rule needs to look at its
        # messages.
        self.takes_all = self.rules.takes_all and self.held_back is None
        self.has_no_rule = self.rules.is_empty
        self._decide_who_watches()

    def _decide_who_watches(self) -> None:
        """Decide whether the shard checks the queue after each pass.

        The check looks for departing messages and for messages that consumers held for too long.
        """
        limits = self.limits
        self.is_watched = bool(
            limits.dead_letters or limits.consumer_timeout or self.departures or self.letters_differ
        )

    def change(self, limits: Limits) -> None:
        """Put other limits in force, also for the messages that are there."""
        if limits.max_priority != self.limits.max_priority:
            entries = array("Q", sorted(entry for each in self.levels for entry in each.take_all()))
            self.levels = [Ready() for _ in range(limits.max_priority + 1)]
            for priority, part in self._by_priority(entries).items():
                self.levels[priority].push_many(part)
        self.limits = limits
        if limits.leaving:
            self.facts = None  # the records have them
        if limits.held != (self.held_back is not None):
            held_back, self.held_back = self.held_back, HeldBack() if limits.held else None
            # Messages that were kept back become ready, behind the others of their priority.
            if held_back is not None:
                for priority, level in held_back.levels.items():
                    self.levels[min(priority, len(self.levels) - 1)].merge(level.take_all())
                self.ready_count += held_back.count
                self.ready_bytes += held_back.bytes
        self._decide()
        self.enforce()

    # -- in ----------------------------------------------------------------------------------------

    def _mark_as(self, marks: int) -> None:
        """Add the marks of messages that arrive to the marks of the messages that are there."""
        departing = self.departures is not None and self.departures.count
        is_empty = not (self.ready_count or self.unacked_count or self.kept_back or departing)
        self.marks = marks if is_empty else self.marks | marks
        self.hides = bool(self.marks & HAS_BCC)
        self._decide_who_watches()

    def take_in(
        self, arrival: Arrival, now: int, chosen: list[int] | None = None, lost_bytes: int = 0
    ) -> bool:
        """Take messages in, behind all others of their priority.

        `chosen` are the ordinals of the messages to take, ascending; None takes all. `lost_bytes`
        are the body bytes of the messages that are not taken. `now` is in ms since the epoch.
        Return whether the backlog now remembers facts of messages. The caller must then call
        `forget_facts_before`.
        """
        if arrival.marks != self.marks:
            self._mark_as(arrival.marks)
        if arrival.kinds != self.kinds:
            is_empty = not (self.ready_count or self.unacked_count or self.kept_back)
            self.kinds = arrival.kinds if is_empty else self.kinds | arrival.kinds
        facts, held_back = self.facts, self.held_back
        if chosen is None and arrival.facts is None and not facts:
            entries = arrival.entries
            if self.takes_all:
                self.levels[0].push_many(entries)
                self.ready_count += len(entries)
                self.ready_bytes += arrival.body_bytes
                return False
            if held_back is not None and not self.rules.looks_at_each:
                held_back.bytes += arrival.body_bytes
                held_back.add(0, entries)
                return False
        size = arrival.body_bytes - lost_bytes
        if self.limits.leaving:
            self.levels[0].push_many(arrival.entries)
            self.ready_count += len(arrival.entries)
            self.ready_bytes += size
            return False
        if held_back is not None:
            held_back.bytes += size
        else:
            self.ready_bytes += size
        if facts is None:
            facts = self.facts = Facts()
        entries, said, times = arrival.entries, arrival.facts, arrival.times
        if chosen is not None:
            entries = _those(entries, chosen)
            said = said and _those(said, chosen)
            times = times and _those(times, chosen)
        ttl = self.limits.message_ttl
        kept, parts = judge(entries, said, times, now, ttl, len(self.levels) - 1)
        facts.add_many(entries, kept)
        for priority, part in parts:
            if held_back is not None:
                held_back.add(priority, part)
                continue
            self.levels[priority].push_many(part)
            self.ready_count += len(part)
        return True

    def forget_facts_before(self, held: Callable[[], Iterable[int]]) -> None:
        """Forget the facts of messages before the first message that the queue still has.

        `held` returns the entries that were taken out and the entries that rest.
        """
        if self.facts is not None and self.facts.crowded():
            heads = [level.first() for level in self.levels if len(level)]
            heads += self.held_back.heads() if self.held_back is not None else []
            places = [entry & PLACE for entry in (*heads, *held())]
            self.facts.trim(min(places, default=PLACE & ((1 << 64) - 1)))

    # -- out and back ------------------------------------------------------------------------------

    def take_first(self) -> tuple[array[int], bytes, int]:
        """Take the message that leaves next; return its entry, stored bytes and body size."""
        level = self.first_level()
        entries = level.peek(1)
        blob, sizes = self.store.read(entries, 1)
        level.drop(1)
        self.ready_count -= 1
        self.ready_bytes -= sizes[0]
        self.unacked_count += 1
        self.unacked_bytes += sizes[0]
        return entries, blob, sizes[0]

    def taken_back(self, count: int, size: int) -> None:
        """Subtract messages that were taken out and are now settled or put back."""
        self.unacked_count -= count
        self.unacked_bytes -= size

    def put_back(self, entries: array[int], size: int) -> None:
        """Make messages ready again, at their old places. `entries` must ascend."""
        self.ready_count += len(entries)
        self.ready_bytes += size
        if len(self.levels) == 1:
            self.levels[0].merge(entries)
            return
        for priority, part in self._by_priority(entries).items():
            self.levels[priority].merge(part)

    def _by_priority(self, entries: array[int]) -> dict[int, array[int]]:
        """Divide entries by the priority in their facts.

        Entries without a fact have the lowest priority.
        """
        facts, highest = self.facts, len(self.levels) - 1
        parts: dict[int, array[int]] = {}
        for entry in entries:
            priority = min(facts.of(entry) >> 56, highest) if facts else 0
            parts.setdefault(priority, array("Q")).append(entry)
        return parts

    def send_back(self, entries: array[int], size: int) -> None:
        """Take returned messages back: each is ready at once, rests first, or is let go."""
        entries = marked(array("Q", sorted(entries)))
        gone: dict[str, array[int]] = {}
        if self.rules.counts_returns:
            entries, size, gone = self._judge_returns(entries, size)
        self.put_back(entries, size)
        # This comes last: a backlog without messages forgets all facts.
        for reason, part in gone.items():
            self.let_go(part, reason)

    def _judge_returns(
        self, entries: array[int], size: int
    ) -> tuple[array[int], int, dict[str, array[int]]]:
        """Decide which returned messages rest, which are ready at once, and which leave.

        Return the entries that are ready at once, their body bytes, and the entries to let go by
        reason.
        """
        limits, rules = self.limits, self.rules
        kept: dict[int, array[int]] = {}
        gone: dict[str, array[int]] = {}
        all_times = self.store.count_returns(self.id, entries)
        for entry, times in zip(entries, all_times, strict=True):
            found = (
                reason for ask in rules.too_often if (reason := ask(limits, times)) is not None
            )
            reason = next(found, None)
            if reason is not None:
                gone.setdefault(reason, array("Q")).append(entry)
            else:
                rest_ms = max([ask(limits, times) for ask in rules.rests], default=0)
                kept.setdefault(rest_ms, array("Q")).append(entry)
        for part in gone.values():
            size -= bytes_of(self.store, part)
        at_once, at_once_bytes = array("Q"), 0
        for rest_ms, part in kept.items():
            part_bytes = size if len(kept) == 1 else bytes_of(self.store, part)
            if not rest_ms:
                at_once, at_once_bytes = part, part_bytes
                continue
            # Messages that rest are counted as if they were still taken out.
            if self.resting is None:
                self.resting = Resting()
            self.resting.add(part, part_bytes, rest_ms)
            self.unacked_count += len(part)
            self.unacked_bytes += part_bytes
        return at_once, at_once_bytes, gone

    def wake(self, now: int) -> None:
        """Make messages ready that have rested long enough.

        All resting messages become ready if no rule asks for rests any more.
        """
        assert self.resting is not None
        self.resting.begin(now)
        entries, size = self.resting.take_due(now) if self.rules.rests else self.resting.take_all()
        if entries:
            self.taken_back(len(entries), size)
            self.put_back(array("Q", sorted(entries)), size)
        if not self.resting:
            self.resting = None

    # -- away --------------------------------------------------------------------------------------

    def next_due(self) -> list[int]:
        """Return the times at which `expire` or `wake` will have something to do, in ms."""
        due = []
        if self.resting is not None and (rested := self.resting.next_due()) is not None:
            due.append(rested)
        if self.facts:
            firsts = [self.facts.of(level.first()) & EXPIRY for level in self.levels if len(level)]
            due += [expiry for expiry in firsts if expiry]
        return due

    def expire(self, now: int, most: int = ALL) -> bool:
        """Let go of expired messages at the head; return False if some may be left.

        A message that has not expired keeps the messages behind it. `expire` stops after about
        `most` messages.
        """
        facts = self.facts
        for level in self.levels if facts else ():
            assert facts is not None
            while len(level) and facts.is_old(level.first(), now):
                if most <= 0:
                    return False
                head = level.peek(STEP_MESSAGES)
                old = facts.old(head, now)
                self.drop_head(level, head[:old], EXPIRED)
                most -= old
        return True

    def enforce(self) -> None:
        """Drop messages from the head while the rules find the queue above its limits."""
        for excess in self.rules.excess:
            while (count := excess(self)) > 0:
                level = self.first_level()
                self.drop_head(level, level.peek(min(count, STEP_MESSAGES)), MAXLEN)

    def drop_head(self, level: Ready, head: array[int], reason: str) -> None:
        """Let go of the first messages of a ready list, which are `head`."""
        self._take_head(level, head)
        self.let_go(head, reason)

    def _take_head(self, level: Ready, head: array[int]) -> None:
        level.drop(len(head))
        self.ready_count -= len(head)
        self.ready_bytes -= bytes_of(self.store, head) if self.ready_count else self.ready_bytes

    def let_go(self, entries: array[int], reason: str) -> None:
        """Let messages leave that were not consumed.

        They go to the dead-letter exchange if there is one. Otherwise they are settled.
        """
        self.counters.let_go += len(entries)
        if reason is REFUSED or (self.limits.dead_letters is None and not self.letters_differ):
            self.forget(entries)
            return
        if self.departures is None:
            self.departures = Departures()
        self.departures.add(entries, reason)
        if self.facts:
            self.forget_facts()

    def forget(self, entries: array[int]) -> None:
        """Settle messages in the store: no consumer needs them any more."""
        self.store.settle(self.id, entries, self.durable)
        if self.facts:
            self.forget_facts()

    def forget_facts(self) -> None:
        """Forget all facts if the queue holds no message any more."""
        if not self.ready_count and not self.unacked_count and self.held_back is None:
            self.facts = None

    def take_all(self) -> list[array[int]]:
        """Take all messages that are ready or kept back; return their entries."""
        self.ready_count = self.ready_bytes = 0
        kept_back = self.held_back.entries() if self.held_back is not None else []
        if self.held_back is not None:
            self.held_back = HeldBack()
        return [*(level.take_all() for level in self.levels), *kept_back]

    def purge_first(self, count: int) -> int:
        """Forget the `count` messages that leave next; return how many messages were forgotten."""
        left = count
        while left and self.ready_count:
            level = self.first_level()
            head = level.peek(min(left, STEP_MESSAGES))
            self._take_head(level, head)
            self.forget(head)
            left -= len(head)
        return count - left

    def entries(self, held: Iterable[int]) -> array[int]:
        """Return all entries in order. Entries in `held` are marked as delivered before."""
        found = marked(array("Q", sorted(held)))
        kept_back = self.held_back.entries() if self.held_back is not None else []
        for entries in [*(level.peek(len(level)) for level in self.levels), *kept_back]:
            found = merged(entries, found)
        return found


def _those(values: array[int], ordinals: list[int]) -> array[int]:
    # This is a function of its own because a comprehension inside `take_in` would slow every call:
    # the variables that a comprehension uses become cell variables.
    return array("Q", [values[i] for i in ordinals])
