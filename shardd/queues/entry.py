"""Define the entry: the one u64 that memory keeps for each message, in an array('Q').

    segment << 32 | position << 4 | flags

Publish order within one store is the order of `entry & PLACE`. Only some queues need the priority
and the expiry of a message. These are kept by runs in `Facts`, so that a plain queue pays nothing
for them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from shardmq.shardd.queues.state import runs

REDELIVERED = 1
PLACE = ~15
ENDLESS = 1 << 64  # above all entries

# A fact is `priority << 56 | expires_at_ms`; an expiry of 0 is never. In the queue of a delaying
# exchange a fact is the time at which the message is due, in all 64 bits.
EXPIRY = (1 << 56) - 1
# How many runs of facts are kept before it pays to check whether the oldest are still needed.
FACT_RUNS_MIN = 1024
# Flags of a record that a queue remembers for all messages that came to it (Arrival.marks).
HAS_BCC = 4  # The message has a header that no consumer may see.
OWN_LETTERS = 8  # The message names its own dead-letter exchange.
# The kinds of the messages that came to a queue (Arrival.kinds).
TRANSIENT_KIND = 1
LASTING_KIND = 2  # The delivery mode is 2.
# An empty array that all empty objects share. It is never added to.
NOTHING = array("Q")


class Facts:
    """The facts of the messages of a queue: (first entry, fact) for each run with the same fact."""

    __slots__ = ("_facts", "_firsts", "_trim_at")

    def __init__(self) -> None:
        self._firsts = self._facts = NOTHING
        self._trim_at = FACT_RUNS_MIN

    def __len__(self) -> int:
        return len(self._firsts)

    def add_many(self, entries: array[int], facts: array[int]) -> None:
        """Add the facts of `entries`.

        The entries ascend and come after all entries that were added before.
        """
        firsts, kept = runs(entries, facts, self._facts[-1] if self._facts else None)
        if self._facts is NOTHING:
            self._firsts, self._facts = firsts, kept
        else:
            self._firsts.extend(firsts)
            self._facts.extend(kept)

    def of(self, entry: int) -> int:
        at = bisect_right(self._firsts, entry & PLACE) - 1
        return self._facts[at] if at >= 0 else 0

    def old(self, entries: array[int], now: int) -> int:
        """Return how many of `entries` have expired before the first that has not.

        The entries ascend.
        """
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
        """Return the entries of the block before the first expired one, but at least one entry."""
        firsts = self._firsts
        if bisect_right(firsts, block[0] & PLACE) == bisect_right(firsts, block[-1] & PLACE):
            return block  # all entries have the same fact
        old = (i for i, entry in enumerate(block) if self.is_old(entry, now))
        return block[: next(old, len(block)) or 1]

    def crowded(self) -> bool:
        return len(self._firsts) > self._trim_at

    def trim(self, oldest: int) -> None:
        """Forget the facts of messages before `oldest`, the first message still in the queue."""
        at = bisect_right(self._firsts, oldest & PLACE) - 1
        if at > 0:
            del self._firsts[:at], self._facts[:at]
        self._trim_at = max(FACT_RUNS_MIN, 2 * len(self._firsts))
