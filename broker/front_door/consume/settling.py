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

from shardmq.broker.front_door.hot_state import (
    ACKS_TOGETHER_MAX,
    NO_HURRY,
    RANGES_MAX,
    Due,
    SettlesState,
    acks_together,
)
from shardmq.shardd.wire.messages import ALLOT

__all__ = [
    "ACKS_TOGETHER_MAX", "ACKS_WAIT_S", "NO_HURRY", "NO_HURRY_WAITS", "RANGES_MAX", "Due",
    "Settles", "acks_together",
]  # fmt: skip

ACKS_WAIT_S = 0.005
NO_HURRY_WAITS = 2

# Consumer number, kind, first and last delivery number. With the kind ALLOT these are the number of
# an allotment, what it is allowed, and what becomes of credit that is not used.
Settle = tuple[int, int, int, int]


class Settles(SettlesState):
    """The settles to tell one shard, in the order in which they came."""

    __slots__ = ("_waited",)

    def __init__(self, shard: int = 0, due: Due | None = None) -> None:
        self.shard = 1 << shard
        self.due_all = Due() if due is None else due
        self._waited = 0  # in units of ACKS_WAIT_S

    def add(self, consumer: int, kind: int, first: int, last: int) -> None:
        self.ranges.append((consumer, kind, first, last))
        self.fall_due()

    def allot(self, allotment: int, allowed: int, mode: int) -> None:
        """Add what an allotment is allowed; the last word counts."""
        self.allots[allotment] = allowed, mode
        self.fall_due()

    def take(self) -> list[Settle]:
        """Take all there is to tell: what is allowed comes behind the acks."""
        ranges, self.ranges, self.last_range, self.acks = self.ranges, [], {}, {}
        if self.allots:
            ranges += [(number, ALLOT, *told) for number, told in self.allots.items()]
            self.allots = {}
        self.hurries = self.due = False
        self._waited = 0
        return ranges

    def may_wait_on(self) -> bool:
        """Return, after each ACKS_WAIT_S, whether there are only acks that free nothing there."""
        self._waited += 1
        return not (self.hurries or self.due) and self._waited < NO_HURRY_WAITS
