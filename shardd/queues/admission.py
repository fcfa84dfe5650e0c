"""Say which publishes a queue takes, and set room aside for transactions that are about to be committed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.consumers import Consumers
from shardmq.shardd.queues.rules import Room
from shardmq.shardd.queues.store import Arrival, bytes_of, sizes_of


class Admission:
    """The room of one queue. `messages`, `body_bytes`: the room that is set aside."""

    __slots__ = ("_backlog", "_consumers", "body_bytes", "messages")

    def __init__(self, backlog: Backlog, consumers: Consumers) -> None:
        self._backlog = backlog
        self._consumers = consumers
        self.messages = 0
        self.body_bytes = 0

    def room(self) -> Room:
        """Return what counts against the limits, and the limits.

        What consumers can take at once does not count; room that is set aside does.
        """
        backlog, limits = self._backlog, self._backlog.limits
        capacity = self._consumers.capacity()
        length = backlog.ready_count + backlog.kept_back + self.messages - capacity
        held = 0
        if length > 0 and limits.max_bytes is not None:
            held = max(0, backlog.ready_bytes - self._first_bytes(capacity)) + self.body_bytes
        return length, limits.max_length, held, limits.max_bytes

    def _first_bytes(self, count: int) -> int:
        """Return the body bytes of the `count` messages that leave next."""
        found = 0
        for level in reversed(self._backlog.levels):
            if count > 0:
                found += bytes_of(self._backlog.store, level.peek(count))
                count -= len(level)
        return found

    def refused(self, count: int, sizes: Sequence[int]) -> list[int]:
        """Return which of `count` new messages are not taken, ascending.

        `sizes`: the body bytes of each; may be empty if the queue has no limit of bytes.
        """
        refused: set[int] = set()
        for refuse in self._backlog.rules.refuse:
            refused.update(refuse(self.room(), count, sizes))
        return sorted(refused)

    def refused_of(self, arrival: Arrival) -> list[int]:
        """Return which messages of an arrival are not taken, ascending."""
        backlog, entries = self._backlog, arrival.entries
        bounded = backlog.limits.max_bytes is not None
        sizes = sizes_of(backlog.store, entries) if bounded else array("I")
        return self.refused(len(entries), sizes)

    def reserve(self, sizes: Sequence[int]) -> bool:
        """Set room aside for new messages with so many body bytes each, if all of them fit."""
        if self._backlog.rules.may_refuse and self.refused(len(sizes), sizes):
            return False
        self.messages += len(sizes)
        self.body_bytes += sum(sizes)
        return True

    def unreserve(self, messages: int, body_bytes: int) -> None:
        """Free room that was set aside: the messages have come, or will not."""
        self.messages -= messages
        self.body_bytes -= body_bytes
