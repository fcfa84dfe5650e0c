"""What one shard is to be told of settled deliveries, and whether that can wait for more of the kind.

An ack is answered by nobody, and while its client holds enough deliveries nobody waits for the room it makes: told one
by one, each would cost the shard a turn and the next deliveries a batch of their own. So the acks of a consumer wait
for each other: until they are half of its prefetch, or ACKS_TOGETHER_MAX, or something else goes to that shard, and for
ACKS_WAIT_S at the most. Rejects and requeues are told at once.

Decides only; the clock is the caller's (shard_link.py).
"""

from __future__ import annotations

from shardd.wire.messages import ACK

# Acks of one consumer that wait for each other: by then a batch costs little more than its messages.
ACKS_TOGETHER_MAX = 256
# Ranges that wait, of all consumers at one shard.
RANGES_MAX = 4096
ACKS_WAIT_S = 0.002

# Consumer number, kind, first and last delivery number.
Settle = tuple[int, int, int, int]


def acks_together(prefetch: int, counts_keys: bool) -> int:
    """How many acks of a consumer may wait. `prefetch`: 0 is none. `counts_keys`: others wait for the keys it holds."""
    if counts_keys:
        return 1
    return min(ACKS_TOGETHER_MAX, max(1, prefetch // 2)) if prefetch else ACKS_TOGETHER_MAX


class Settles:
    """Of one shard, in the order in which they came; neighbouring acks of a consumer are one. `due`: not to wait."""

    __slots__ = ("_acks", "due", "ranges")

    def __init__(self) -> None:
        self.ranges: list[Settle] = []
        self._acks: dict[int, list[int]] = {}  # by consumer: where its last range of acks is, how many acks wait
        self.due = False

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def add(self, consumer: int, kind: int, first: int, last: int) -> None:
        self.ranges.append((consumer, kind, first, last))
        self.due = True

    def ack(self, consumer: int, first: int, last: int, together: int) -> None:
        """`together`: so many of this consumer do not wait for more."""
        waiting = self._acks.get(consumer)
        if waiting is None:
            waiting = self._acks[consumer] = [len(self.ranges), 0]
            self.ranges.append((consumer, ACK, first, last))
        elif self.ranges[waiting[0]][3] + 1 == first:
            self.ranges[waiting[0]] = (consumer, ACK, self.ranges[waiting[0]][2], last)
        else:
            waiting[0] = len(self.ranges)
            self.ranges.append((consumer, ACK, first, last))
        waiting[1] += last + 1 - first
        if waiting[1] >= together or len(self.ranges) >= RANGES_MAX:
            self.due = True

    def take(self) -> list[Settle]:
        """All of them, to be told now."""
        ranges, self.ranges, self._acks, self.due = self.ranges, [], {}, False
        return ranges
