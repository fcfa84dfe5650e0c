"""Decide which publishes a queue takes, and reserve room for transactions before they commit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.consumers import Consumers
from shardmq.shardd.queues.rules import Room
from shardmq.shardd.queues.store import Arrival, bytes_of, sizes_of


class Admission:
    """The room of one queue.

    `messages` and `body_bytes` are the room that is reserved.
    """

    __slots__ = ("_backlog", "_consumers", "body_bytes", "messages")

    def __init__(self, backlog: Backlog, consumers: Consumers) -> None:
        self._backlog = backlog
        self._consumers = consumers
        self.messages = 0
        self.body_bytes = 0

    def room(self) -> Room:
        """Return the messages and bytes that count against the limits, and the limits.

        Messages that consumers can take at once do not count. Reserved room counts.
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
        """Return the ordinals of the `count` new messages that are refused, ascending.

        `sizes` are the body bytes of each message. It may be empty if the queue has no limit of
        bytes.
        """
        refused: set[int] = set()
        for refuse in self._backlog.rules.refuse:
            refused.update(refuse(self.room(), count, sizes))
        return sorted(refused)

    def refused_of(self, arrival: Arrival) -> list[int]:
        """Return the ordinals of the messages of an arrival that are refused, ascending."""
        backlog, entries = self._backlog, arrival.entries
        bounded = backlog.limits.max_bytes is not None
        sizes = sizes_of(backlog.store, entries) if bounded else array("I")
        return self.refused(len(entries), sizes)

    def reserve(self, sizes: Sequence[int]) -> bool:
        """Reserve room for new messages of these sizes; return False if not all of them fit.

        `sizes` are the body bytes of each message.
        """
        if self._backlog.rules.may_refuse and self.refused(len(sizes), sizes):
            return False
        self.messages += len(sizes)
        self.body_bytes += sum(sizes)
        return True

    def unreserve(self, messages: int, body_bytes: int) -> None:
        """Free reserved room, because the messages have arrived or will not arrive."""
        self.messages -= messages
        self.body_bytes -= body_bytes
