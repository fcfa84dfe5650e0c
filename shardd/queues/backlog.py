"""What a queue has: its messages in order, what is remembered of each, and how they leave by age, limit or purge.

Most are ready, by priority. Others are held (by consumers, by who got them, or because they rest), kept back until
other queues have settled older ones (behind.py), or departing to where dead letters go. Who gets them: queue.py.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator

from shardmq.shardd.queues.behind import Behind
from shardmq.shardd.queues.consumers import Consumer
from shardmq.shardd.queues.departures import Departures
from shardmq.shardd.queues.entry import EXPIRY, HAS_BCC, OWN_LETTERS, PLACE, Facts
from shardmq.shardd.queues.limits import EXPIRED, MAXLEN, REFUSED, Limits
from shardmq.shardd.queues.ready import Ready, judge, marked, merged, total
from shardmq.shardd.queues.resting import Resting
from shardmq.shardd.queues.store import Arrival, Store
from shardmq.shardd.queues.unacked import Getter

# Entries handed out or let go in one step.
STEP_MESSAGES = 8192
ALL = 1 << 62
# Read at once only to learn sizes.
SIZES_BYTES = 256 << 10


class Counters:
    """Since the start of the process."""

    __slots__ = (
        "acked", "delivered", "delivered_auto", "got", "got_auto", "got_empty", "let_go", "published", "redelivered",
        "repeated",
    )  # fmt: skip

    def __init__(self) -> None:
        self.published = self.delivered = self.acked = self.redelivered = self.got = self.let_go = 0
        # Of `delivered` and `got`: what nobody has to acknowledge. `got_empty`: gets that found nothing.
        self.delivered_auto = self.got_auto = self.got_empty = 0
        self.repeated = 0  # publishes of what a producer had sent before

    def add(self, other: Counters) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Backlog:
    __slots__ = (
        "_behind",
        "_counts_returns",
        "_facts",
        "_holders",
        "_is_bounded",
        "_is_plain",
        "_is_timed",
        "_levels",
        "_resting",
        "counters",
        "departures",
        "durable",
        "hides",
        "id",
        "is_watched",
        "limits",
        "marks",
        "may_refuse",
        "ready_bytes",
        "ready_count",
        "store",
        "unacked_bytes",
        "unacked_count",
    )

    def __init__(self, queue_id: int, store: Store, limits: Limits, durable: bool) -> None:
        self.id = queue_id
        self.store = store
        self.durable = durable
        self.limits = limits
        self.counters = Counters()
        self.departures: Departures | None = None  # there have been none
        self.ready_count = 0
        self.ready_bytes = 0
        self.unacked_count = 0
        self.unacked_bytes = 0
        self.marks = 0  # of all it has had since it was empty
        self.hides = False  # some of its messages may have what no consumer is to see
        self._holders: dict[Consumer | Getter, None] = {}  # an empty set is three times the size
        self._levels = [Ready() for _ in range(limits.max_priority + 1)]
        self._facts: Facts | None = None  # until a message has one
        self._resting: Resting | None = None  # none rests
        self._behind = Behind() if limits.held else None
        self._decide()

    @property
    def delayed_count(self) -> int:
        """Messages that wait until they are due."""
        return 0

    @property
    def kept_back(self) -> int:
        """Messages that are not ready because others, elsewhere, go first."""
        return self._behind.count if self._behind is not None else 0

    # -- in ----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """What its limits ask of each message, once for all messages."""
        limits = self.limits
        self._is_bounded = limits.bounded
        self.may_refuse = limits.reject_publish and limits.bounded
        self._counts_returns = limits.delivery_limit is not None or limits.retry is not None
        self.is_watched = bool(
            limits.dead_letters or limits.consumer_timeout or self.departures or self.letters_differ
        )
        self._is_timed = limits.expires is not None or limits.consumer_timeout is not None
        self._is_plain = (
            limits.message_ttl is None and not limits.max_priority and not self.may_refuse
        )
        self._is_plain = self._is_plain and self._behind is None

    @property
    def letters_differ(self) -> bool:
        """Some of its messages may say themselves where they go when they die."""
        return bool(self.marks & OWN_LETTERS)

    def _mark_as(self, marks: int) -> None:
        is_empty = not (
            self.ready_count or self.unacked_count or (self.departures and self.departures.count)
        )
        self.marks = marks if is_empty else self.marks | marks
        self.hides = bool(self.marks & HAS_BCC)
        self._decide()

    def restore(self, arrival: Arrival, now: int) -> None:
        """What the store still had."""
        if arrival.marks:
            self._mark_as(arrival.marks)
        if self._is_plain and arrival.facts is None and not self._facts:
            self._levels[0].push_many(arrival.entries)
            self.ready_count += len(arrival.entries)
        else:
            self._place(arrival, None, now)
        self._add_bytes(arrival.body_bytes)

    def _place(self, arrival: Arrival, chosen: list[int] | None, now: int) -> None:
        """Put messages on the ready list of their priority, with what is to be remembered of them.

        `chosen`: the ordinals of those to be put there, ascending; None is all. `now`: ms since the epoch.
        """
        limits, behind = self.limits, self._behind
        if behind is not None and self._needs_no_facts(arrival):
            behind.add(0, arrival.entries)
            return
        facts = self._facts
        if facts is None:
            facts = self._facts = Facts()
        entries, said, times = arrival.entries, arrival.facts, arrival.times
        if chosen is not None:
            entries = array("Q", [entries[i] for i in chosen])
            said = said and array("Q", [said[i] for i in chosen])
            times = times and array("Q", [times[i] for i in chosen])
        kept, parts = judge(entries, said, times, now, limits.message_ttl, len(self._levels) - 1)
        facts.add_many(entries, kept)
        for priority, part in parts:
            if behind is not None:
                behind.add(priority, part)
                continue
            self._levels[priority].push_many(part)
            self.ready_count += len(part)
        if facts.crowded():
            facts.trim(self._oldest())

    def _needs_no_facts(self, arrival: Arrival) -> bool:
        limits = self.limits
        plain = limits.message_ttl is None and not limits.max_priority and not self.may_refuse
        return plain and arrival.facts is None and not self._facts

    def _add_bytes(self, size: int) -> None:
        if self._behind is not None:
            self._behind.bytes += size
        else:
            self.ready_bytes += size

    def _hold(self, held: bool) -> None:
        """Keep back what arrives from now on; or no more, and what was kept back is ready behind the rest."""
        behind = self._behind
        if held == (behind is not None):
            return
        self._behind = Behind() if held else None
        if behind is not None:
            for priority, level in behind.levels.items():
                self._levels[min(priority, len(self._levels) - 1)].merge(level.take_all())
            self.ready_count += behind.count
            self.ready_bytes += behind.bytes

    def _put_back(self, entries: array[int], size: int) -> None:
        self.ready_count += len(entries)
        self.ready_bytes += size
        if len(self._levels) == 1:
            self._levels[0].merge(entries)
            return
        parts: dict[int, array[int]] = {}
        for entry in entries:
            priority = min(self._fact(entry) >> 56, len(self._levels) - 1)
            parts.setdefault(priority, array("Q")).append(entry)
        for priority, part in parts.items():
            self._levels[priority].merge(part)

    def _rearrange(self, max_priority: int) -> None:
        """Each to the ready list of its priority as far as it is remembered, else to the lowest."""
        entries = array("Q", sorted(entry for level in self._levels for entry in level.take_all()))
        self._levels = [Ready() for _ in range(max_priority + 1)]
        parts: dict[int, array[int]] = {}
        for entry in entries:
            parts.setdefault(min(self._fact(entry) >> 56, max_priority), array("Q")).append(entry)
        for priority, part in parts.items():
            self._levels[priority].push_many(part)

    # -- what is there -----------------------------------------------------------------------------------

    def _first_level(self) -> Ready:
        return next(level for level in reversed(self._levels) if len(level))

    def _fact(self, entry: int) -> int:
        return self._facts.of(entry) if self._facts else 0

    def _before_old(self, block: array[int], now: int) -> array[int]:
        """Up to the first that is too old, though those before it are not; the first of all is not."""
        assert self._facts is not None
        if self._facts.in_one_run(block[0], block[-1]):
            return block
        return block[
            : next((i for i, entry in enumerate(block) if self._is_old(entry, now)), len(block))
            or 1
        ]

    def _is_old(self, entry: int, now: int) -> bool:
        return 0 < self._fact(entry) & EXPIRY <= now

    def newest(self) -> int:
        """The place of the last message that is ready or held, 0 without one."""
        lasts = [level.peek(len(level))[-1] for level in self._levels if len(level)]
        return max([entry & PLACE for entry in (*lasts, *self._held())], default=0)

    def left_until(self, place: int) -> int:
        """How many up to that place are not settled."""
        last = place | ~PLACE
        ready = sum(
            bisect_right(level.peek(len(level)), last)
            for level in self._levels
            if len(level) and level.first() <= last
        )
        return ready + sum(entry <= last for entry in self._held())

    def _sizes(self, entries: array[int]) -> array[int]:
        sizes = array("I")
        while len(sizes) < len(entries):
            sizes += self.store.read(entries[len(sizes) : len(sizes) + STEP_MESSAGES], SIZES_BYTES)[
                1
            ]
        return sizes

    def _first_bytes(self, count: int) -> int:
        """Of the messages that leave next."""
        found = 0
        for level in reversed(self._levels):
            if count > 0:
                found += self._bytes_of(level.peek(count))
                count -= len(level)
        return found

    def _bytes_of(self, entries: array[int]) -> int:
        return total(self._sizes(entries))

    def live(self) -> array[int]:
        """All entries, in order: ready as they are, held and departing ones as delivered before."""
        if self.departures is None or not self.departures.count:
            return self._own()
        return merged(self._own(), marked(array("Q", sorted(self.departures.entries()))))

    def _own(self) -> array[int]:
        live = marked(array("Q", sorted(self._held())))
        for level in self._levels:
            live = merged(level.peek(len(level)), live)
        for entries in self._behind.entries() if self._behind is not None else ():
            live = merged(entries, live)
        return live

    def _held(self) -> Iterator[int]:
        for holder in self._holders:
            yield from holder.held_of(self) if isinstance(holder, Getter) else holder.unacked.held()
        if self._resting is not None:
            yield from self._resting.entries()

    def _oldest(self) -> int:
        """The first entry this queue still has."""
        heads = [level.first() for level in self._levels if len(level)]
        heads += self._behind.heads() if self._behind is not None else []
        return min(
            [entry & PLACE for entry in (*heads, *self._held())], default=PLACE & ((1 << 64) - 1)
        )

    # -- away --------------------------------------------------------------------------------------------

    def expire(self, now: int, most: int = ALL) -> bool:
        """Let go what is too old, at the head only: behind one that stays, the others stay. Whether that was all: it
        ends after about `most`."""
        facts = self._facts
        for level in self._levels if facts else ():
            while len(level) and self._is_old(level.first(), now):
                if most <= 0:
                    return False
                assert facts is not None
                head = level.peek(STEP_MESSAGES)
                old = facts.old(head, now)
                self._drop_head(level, head[:old], EXPIRED)
                most -= old
        return True

    def enforce(self) -> None:
        """Drop from the head what is above the limits, unless it is publishes that are refused."""
        limits = self.limits
        if limits.reject_publish:
            return
        excess = limits.excess(self.ready_count)
        while excess:
            level = self._first_level()
            head = level.peek(min(excess, STEP_MESSAGES))
            self._drop_head(level, head, MAXLEN)
            excess -= len(head)
        while self.ready_count and limits.too_big(self.ready_bytes):
            level = self._first_level()
            head = level.peek(STEP_MESSAGES)
            _, sizes = self.store.read(head, SIZES_BYTES)
            count = freed = 0
            while count < len(sizes) and limits.too_big(self.ready_bytes - freed):
                freed += sizes[count]
                count += 1
            self._drop_head(level, head[:count], MAXLEN)

    def _drop_head(self, level: Ready, head: array[int], reason: str) -> None:
        self._take_head(level, head)
        self.let_go(head, reason)

    def _take_head(self, level: Ready, head: array[int]) -> None:
        level.drop(len(head))
        self.ready_count -= len(head)
        self.ready_bytes -= self._bytes_of(head) if self.ready_count else self.ready_bytes

    def let_go(self, entries: array[int], reason: str) -> None:
        """These leave without having been consumed; to where dead letters go, if the queue has such a place."""
        self.counters.let_go += len(entries)
        if reason is REFUSED or (self.limits.dead_letters is None and not self.letters_differ):
            self._forget(entries)
            return
        if self.departures is None:
            self.departures = Departures()
        self.departures.add(entries, reason)
        if self._facts:
            self._forget_facts()

    def _forget(self, entries: array[int]) -> None:
        self.store.settle(self.id, entries, self.durable)
        if self._facts:
            self._forget_facts()

    def _forget_facts(self) -> None:
        """When there is no message left to have one."""
        if not self.ready_count and not self.unacked_count and self._behind is None:
            self._facts = None

    def purge(self) -> int:
        """Forget what is ready; how many there were."""
        count = self.ready_count + self.kept_back
        self.ready_count = self.ready_bytes = 0
        kept_back = self._take_behind()
        for entries in [*(level.take_all() for level in self._levels), *kept_back]:
            if entries:
                self._forget(entries)
        return count

    def purge_first(self, count: int) -> int:
        """Forget the `count` messages that are next to be delivered; return how many there were."""
        left = count
        while left and self.ready_count:
            level = self._first_level()
            head = level.peek(min(left, STEP_MESSAGES))
            self._take_head(level, head)
            self._forget(head)
            left -= len(head)
        return count - left

    def _take_behind(self) -> list[array[int]]:
        if self._behind is None:
            return []
        taken = self._behind.entries()
        self._behind = Behind()
        return taken
