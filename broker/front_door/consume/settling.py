"""Decide what to tell a shard of settled deliveries, and whether that can wait.

Nobody waits for the answer to an ack, and a client that holds enough deliveries does not wait for
the credit that the ack frees. Told one by one, each ack would cost the shard a pass and make the
next deliveries a batch of their own. So the acks of a consumer wait for each other: until they are
half of its prefetch, or ACKS_TOGETHER_MAX, or something else goes to that shard, and for
ACKS_WAIT_S at most. Rejects and requeues are told at once.

The acks of a group consumer free credit at the front door, which gives it to any shard
(credit.py). So the shard that is told of these acks has nothing to wait for, and they wait until
something else goes there, and for ACKS_WAIT_S times NO_HURRY_WAITS at most.

This file decides only; the clock is the caller's (links/shard_links.py).
"""

from __future__ import annotations

from shardmq.shardd.wire.messages import ACK, ALLOT

# At most this many acks of a consumer wait for each other. A batch of them costs little more than
# its messages.
ACKS_TOGETHER_MAX = 256
# Said of the acks of a group consumer, in place of how many wait for each other.
NO_HURRY = 1 << 62
# At most this many ranges of all consumers wait at one shard.
RANGES_MAX = 4096
ACKS_WAIT_S = 0.005
NO_HURRY_WAITS = 2

# Consumer number, kind, first and last delivery number. With the kind ALLOT these are the number of
# an allotment, what it is allowed, and what becomes of credit that is not used.
Settle = tuple[int, int, int, int]


def acks_together(prefetch: int, counts_keys: bool) -> int:
    """Return how many acks of a consumer may wait for each other.

    A `prefetch` of 0 is no limit. With `counts_keys`, other consumers wait for the keys it holds.
    """
    if counts_keys:
        return 1
    return min(ACKS_TOGETHER_MAX, max(1, prefetch // 2)) if prefetch else ACKS_TOGETHER_MAX


class Due:
    """The shards (bit mask) that are to be told something at the end of this pass."""

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards = 0


class Settles:
    """The settles to tell one shard, in the order in which they came.

    Neighbouring acks of a consumer are one range. When `due` is set they must not wait.
    """

    __slots__ = (
        "_acks", "_allots", "_due_all", "_hurries", "_last_range", "_shard", "_waited", "due",
        "ranges",
    )  # fmt: skip

    def __init__(self, shard: int = 0, due: Due | None = None) -> None:
        self._shard = 1 << shard
        self._due_all = Due() if due is None else due
        self.ranges: list[Settle] = []
        self._last_range: dict[int, int] = {}  # index of the last range of acks, by consumer
        self._acks: dict[int, int] = {}  # how many acks wait, by consumer
        self._allots: dict[int, tuple[int, int]] = {}  # allowed and mode, by allotment
        self._hurries = False  # some acks are no part of a group consumer's
        self._waited = 0  # in units of ACKS_WAIT_S
        self.due = False

    def __bool__(self) -> bool:
        return bool(self.ranges or self._allots)

    def fall_due(self) -> None:
        self.due = True
        self._due_all.shards |= self._shard

    def add(self, consumer: int, kind: int, first: int, last: int) -> None:
        self.ranges.append((consumer, kind, first, last))
        self.fall_due()

    def ack(self, consumer: int, first: int, last: int, together: int) -> None:
        """Add acks, which wait until there are `together` of this consumer."""
        at = self._last_range.get(consumer)
        if at is not None and self.ranges[at][3] + 1 == first:
            self.ranges[at] = (consumer, ACK, self.ranges[at][2], last)
        else:
            self._last_range[consumer] = len(self.ranges)
            self.ranges.append((consumer, ACK, first, last))
        if together == NO_HURRY:
            if len(self.ranges) >= RANGES_MAX:
                self.fall_due()
            return
        self._hurries = True
        acks = self._acks[consumer] = self._acks.get(consumer, 0) + last + 1 - first
        if acks >= together or len(self.ranges) >= RANGES_MAX:
            self.fall_due()

    def allot(self, allotment: int, allowed: int, mode: int) -> None:
        """Add what an allotment is allowed; the last word counts."""
        self._allots[allotment] = allowed, mode
        self.fall_due()

    def take(self) -> list[Settle]:
        """Take all there is to tell: what is allowed comes behind the acks."""
        ranges, self.ranges, self._last_range, self._acks = self.ranges, [], {}, {}
        if self._allots:
            ranges += [(number, ALLOT, *told) for number, told in self._allots.items()]
            self._allots = {}
        self._hurries = self.due = False
        self._waited = 0
        return ranges

    def may_wait_on(self) -> bool:
        """Return, after each ACKS_WAIT_S, whether there are only acks that free nothing there."""
        self._waited += 1
        return not (self._hurries or self.due) and self._waited < NO_HURRY_WAITS
