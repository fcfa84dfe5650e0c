"""Decide what to tell a shard of settled deliveries, and whether that can wait.

Nobody waits for the answer to an ack, and a client that holds enough deliveries does not wait for
the credit that the ack frees. Told one by one, each ack would cost the shard a pass and make the
next deliveries a batch of their own. So the acks of a consumer wait for each other: until they are
half of its prefetch, or ACKS_TOGETHER_MAX, or something else goes to that shard, and for
ACKS_WAIT_S at most. Rejects and requeues are told at once.

The acks of a group consumer wait together, at all shards: the credit that they free goes to one
shard as a whole, in rotation (grants.py). A shard whose acks wait behind that is told with them
that the credit is another's.

This file decides only; the clock is the caller's (links/shard_links.py).
"""

from __future__ import annotations

from shardmq.shardd.wire.messages import ACK, LENT, LOWERED

# At most this many acks of a consumer wait for each other. A batch of them costs little more than
# its messages.
ACKS_TOGETHER_MAX = 256
# Said of the acks of a group consumer: grants.py decides when they are told.
ALL_TOGETHER = 1 << 62
# At most this many ranges of all consumers wait at one shard.
RANGES_MAX = 4096
ACKS_WAIT_S = 0.002
# Acks whose credit another shard has got wait this many times as long for their own shard's turn.
TURN_WAITS_MAX = 5

# Consumer number, kind, first and last delivery number. The kinds LENT and LOWERED have other
# numbers there.
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
        "_due_all",
        "_last_range",
        "_lent",
        "_lowered",
        "_room",
        "_shard",
        "_waited",
        "due",
        "ranges",
    )

    def __init__(self, shard: int = 0, due: Due | None = None) -> None:
        self._shard = 1 << shard
        self._due_all = Due() if due is None else due
        self.ranges: list[Settle] = []
        self._last_range: dict[int, int] = {}  # index of the last range of acks, by consumer
        # Credit that acks free, by consumer or by the group consumer whose assignment it is.
        self._room: dict[int, int] = {}
        self._lowered: dict[int, dict[int, int]] = {}  # by group consumer and assignment
        # Lent credit by assignment, and for how many milliseconds it is its shard's turn.
        self._lent: dict[int, tuple[int, int]] = {}
        self._waited = 0  # in units of ACKS_WAIT_S
        self.due = False

    def __bool__(self) -> bool:
        return bool(self.ranges or self._lent or self._lowered)

    def fall_due(self) -> None:
        self.due = True
        self._due_all.shards |= self._shard

    def add(self, consumer: int, kind: int, first: int, last: int) -> None:
        self.ranges.append((consumer, kind, first, last))
        self.fall_due()

    def ack(self, consumer: int, first: int, last: int, together: int, group: int = 0) -> None:
        """Add acks, which wait until there are `together` of them.

        They are counted by consumer, or over all assignments of the group consumer `group`.
        """
        at = self._last_range.get(consumer)
        if at is not None and self.ranges[at][3] + 1 == first:
            self.ranges[at] = (consumer, ACK, self.ranges[at][2], last)
        else:
            self._last_range[consumer] = len(self.ranges)
            self.ranges.append((consumer, ACK, first, last))
        who = group or consumer
        room = self._room[who] = self._room.get(who, 0) + last + 1 - first
        if room >= together or len(self.ranges) >= RANGES_MAX:
            self.fall_due()

    def take(self) -> list[Settle]:
        """Take all there is to tell."""
        ranges, self.ranges, self._last_range, self._room, self.due = self.ranges, [], {}, {}, False
        if self._lent or self._lowered:
            lowered = [
                (assignment, LOWERED, count, 0)
                for assignments in self._lowered.values()
                for assignment, count in assignments.items()
            ]
            ranges = [
                *lowered,
                *ranges,
                *((number, LENT, count, ms) for number, (count, ms) in self._lent.items()),
            ]
            self._lent, self._lowered = {}, {}
        self._waited = 0
        return ranges

    def may_wait_on(self) -> bool:
        """Return, after each ACKS_WAIT_S, whether there are only acks whose credit is another's."""
        self._waited += 1
        if not self._lowered or self._waited >= TURN_WAITS_MAX:
            return False
        return all(room <= 0 for room in self._room.values())

    # -- the credit that acks of a group consumer free (grants.py) -------------------------------

    def room_made(self, group: int) -> int:
        """Return the credit that acks which wait free, and that no other shard has got yet."""
        return self._room.get(group, 0)

    def lowered(self, group: int) -> bool:
        """Return whether credit of these acks went to another shard."""
        return group in self._lowered

    def lower(self, group: int, assignment: int, count: int) -> None:
        """Tell the shard with those acks that `count` of the credit they free is another's."""
        self._room[group] = self._room.get(group, 0) - count
        assignments = self._lowered.setdefault(group, {})
        assignments[assignment] = assignments.get(assignment, 0) + count

    def raise_again(self, group: int, assignment: int, most: int) -> int:
        """Cancel up to `most` of what the assignment was lowered by; return how much."""
        assignments = self._lowered.get(group)
        count = min(assignments.get(assignment, 0), most) if assignments else 0
        if assignments and count:
            self._room[group] += count
            assignments[assignment] -= count
            if not assignments[assignment]:
                del assignments[assignment]
                if not assignments:
                    del self._lowered[group]
        return count

    def lend(self, assignment: int, count: int, turn_ms: int = 0) -> None:
        """Lend credit to an assignment, whose shard has a turn of `turn_ms`."""
        before, ms = self._lent.get(assignment, (0, 0))
        self._lent[assignment] = before + count, max(ms, turn_ms)
        self.fall_due()
