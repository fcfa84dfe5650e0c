"""What one shard is to be told of settled deliveries, and whether that can wait for more of the kind.

An ack is answered by nobody, and while its client holds enough deliveries nobody waits for the room it makes: told one
by one, each would cost the shard a turn and the next deliveries a batch of their own. So the acks of a consumer wait
for each other: until they are half of its prefetch, or ACKS_TOGETHER_MAX, or something else goes to that shard, and for
ACKS_WAIT_S at the most. Rejects and requeues are told at once.

The acks of a virtual consumer wait together, at all shards: the room they make goes to one shard as a whole, in turn
(grants.py). One whose acks wait behind that is told with them that the room is another's.

Decides only; the clock is the caller's (shard_link.py).
"""

from __future__ import annotations

from shardmq.shardd.wire.messages import ACK, LENT, LOWERED

# Acks of one consumer that wait for each other: by then a batch costs little more than its messages.
ACKS_TOGETHER_MAX = 256
# Of those of a virtual consumer somebody else decides.
ALL_TOGETHER = 1 << 62
# Ranges that wait, of all consumers at one shard.
RANGES_MAX = 4096
ACKS_WAIT_S = 0.002
# Those whose room another shard has got wait so many times as long, for the turn of their own.
TURN_WAITS_MAX = 5

# Consumer number, kind, first and last delivery number, or what that kind has there.
Settle = tuple[int, int, int, int]


def acks_together(prefetch: int, counts_keys: bool) -> int:
    """How many acks of a consumer may wait. `prefetch`: 0 is none. `counts_keys`: others wait for the keys it holds."""
    if counts_keys:
        return 1
    return min(ACKS_TOGETHER_MAX, max(1, prefetch // 2)) if prefetch else ACKS_TOGETHER_MAX


class Due:
    """Which shards (bit mask) are to be told something at the end of this pass, settles or else."""

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards = 0


class Settles:
    """Of one shard, in the order in which they came; neighbouring acks of a consumer are one. `due`: not to wait."""

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
        self._last_range: dict[int, int] = {}  # of acks, by consumer
        self._room: dict[
            int, int
        ] = {}  # that acks make, by consumer or by the virtual consumer it is a part of
        self._lowered: dict[int, dict[int, int]] = {}  # by virtual consumer and part
        self._lent: dict[
            int, tuple[int, int]
        ] = {}  # by part; and for how long it is its shard's turn, ms
        self._waited = 0  # times ACKS_WAIT_S
        self.due = False

    def __bool__(self) -> bool:
        return bool(self.ranges or self._lent or self._lowered)

    def fall_due(self) -> None:
        self.due = True
        self._due_all.shards |= self._shard

    def add(self, consumer: int, kind: int, first: int, last: int) -> None:
        self.ranges.append((consumer, kind, first, last))
        self.fall_due()

    def ack(self, consumer: int, first: int, last: int, together: int, whole: int = 0) -> None:
        """`together`: so many do not wait for more; of this consumer, or of all parts of `whole`."""
        at = self._last_range.get(consumer)
        if at is not None and self.ranges[at][3] + 1 == first:
            self.ranges[at] = (consumer, ACK, self.ranges[at][2], last)
        else:
            self._last_range[consumer] = len(self.ranges)
            self.ranges.append((consumer, ACK, first, last))
        who = whole or consumer
        room = self._room[who] = self._room.get(who, 0) + last + 1 - first
        if room >= together or len(self.ranges) >= RANGES_MAX:
            self.fall_due()

    def take(self) -> list[Settle]:
        """All there is to tell, now."""
        ranges, self.ranges, self._last_range, self._room, self.due = self.ranges, [], {}, {}, False
        if self._lent or self._lowered:
            lowered = [
                (part, LOWERED, count, 0)
                for parts in self._lowered.values()
                for part, count in parts.items()
            ]
            ranges = [
                *lowered,
                *ranges,
                *((part, LENT, count, ms) for part, (count, ms) in self._lent.items()),
            ]
            self._lent, self._lowered = {}, {}
        self._waited = 0
        return ranges

    def may_wait_on(self) -> bool:
        """After ACKS_WAIT_S: there are only acks whose room is another's. Counts how often it was so."""
        self._waited += 1
        if not self._lowered or self._waited >= TURN_WAITS_MAX:
            return False
        return all(room <= 0 for room in self._room.values())

    # -- the room that acks of a virtual consumer make (grants.py) -----------------------------------------------

    def room_made(self, whole: int) -> int:
        """By acks that wait, and not given to another yet."""
        return self._room.get(whole, 0)

    def lowered(self, whole: int) -> bool:
        """Whether some was given to another."""
        return whole in self._lowered

    def lower(self, whole: int, part: int, count: int) -> None:
        """With those acks it is told that they make no room."""
        self._room[whole] = self._room.get(whole, 0) - count
        parts = self._lowered.setdefault(whole, {})
        parts[part] = parts.get(part, 0) + count

    def raise_again(self, whole: int, part: int, most: int) -> int:
        """They do make it, up to so much; by how much the part is not lowered any more."""
        parts = self._lowered.get(whole)
        count = min(parts.get(part, 0), most) if parts else 0
        if parts and count:
            self._room[whole] += count
            parts[part] -= count
            if not parts[part]:
                del parts[part]
                if not parts:
                    del self._lowered[whole]
        return count

    def lend(self, part: int, count: int, turn_ms: int = 0) -> None:
        """`turn_ms`: so long it is its shard's turn."""
        before, ms = self._lent.get(part, (0, 0))
        self._lent[part] = before + count, max(ms, turn_ms)
        self.fall_due()
