"""What memory keeps per message: one u64, `segment << 32 | position << 4 | flags`, in array('Q').

Publish order within one store is the order of `entry & PLACE`. What only some queues need to know of a message
(priority, expiry) is kept by runs in `Facts`, so that a plain queue pays nothing for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from shardmq.shardd.queues.ready import runs

REDELIVERED = 1
PLACE = ~15
ENDLESS = 1 << 64  # above all entries

# A fact is `priority << 56 | expires_at_ms`; an expiry of 0 is never. In a queue of an exchange that delays messages
# it is when the message is due, in all 64 bits.
EXPIRY = (1 << 56) - 1
# Runs of facts kept before a look whether the oldest are still needed pays.
FACT_RUNS_MIN = 1024
# Of the flags of a record, what a queue remembers of all that came to it (Arrival.marks).
HAS_BCC = 4  # a header that no consumer is to see
OWN_LETTERS = 8  # it says itself to which exchange it goes when it dies
# Shared by all that hold nothing, and never added to.
NOTHING = array("Q")


class Facts:
    """The fact of each message of a queue: (first entry, fact) for each run of messages that share one."""

    __slots__ = ("_facts", "_firsts", "_trim_at")

    def __init__(self) -> None:
        self._firsts = self._facts = NOTHING
        self._trim_at = FACT_RUNS_MIN

    def __len__(self) -> int:
        return len(self._firsts)

    def add_many(self, entries: array[int], facts: array[int]) -> None:
        """Add the fact of each of `entries`, which ascend and come after all that were added before."""
        firsts, kept = runs(entries, facts, self._facts[-1] if self._facts else None)
        if self._facts is NOTHING:
            self._firsts, self._facts = firsts, kept
        else:
            self._firsts.extend(firsts)
            self._facts.extend(kept)

    def of(self, entry: int) -> int:
        at = bisect_right(self._firsts, entry & PLACE) - 1
        return self._facts[at] if at >= 0 else 0

    def in_one_run(self, first: int, last: int) -> bool:
        return bisect_right(self._firsts, first & PLACE) == bisect_right(self._firsts, last & PLACE)

    def old(self, entries: array[int], now: int) -> int:
        """How many of `entries`, which ascend, are too old, up to the first that is not."""
        at = 0
        while at < len(entries):
            run = bisect_right(self._firsts, entries[at] & PLACE) - 1
            expiry = self._facts[run] & EXPIRY if run >= 0 else 0
            if not 0 < expiry <= now:
                break
            last = run + 1 == len(self._firsts)
            at = len(entries) if last else bisect_left(entries, self._firsts[run + 1], at)
        return at

    def is_old(self, entry: int, now: int) -> bool:
        return 0 < self.of(entry) & EXPIRY <= now

    def before_old(self, block: array[int], now: int) -> array[int]:
        """Return what of the block comes before the first message that is too old; at least one."""
        if self.in_one_run(block[0], block[-1]):
            return block
        old = (i for i, entry in enumerate(block) if self.is_old(entry, now))
        return block[: next(old, len(block)) or 1]

    def crowded(self) -> bool:
        return len(self._firsts) > self._trim_at

    def trim(self, oldest: int) -> None:
        """Forget what is said of messages before `oldest`, the first the queue still has."""
        at = bisect_right(self._firsts, oldest & PLACE) - 1
        if at > 0:
            del self._firsts[:at], self._facts[:at]
        self._trim_at = max(FACT_RUNS_MIN, 2 * len(self._firsts))
