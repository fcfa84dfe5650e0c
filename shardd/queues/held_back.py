"""Keep back messages until other queues have settled older messages of the same keys.

The messages lie in order, by priority. They are neither ready nor held by a consumer. The shard
makes them ready. After a restart of the shard the earlier order is not known, so the queue keeps
back all messages that the recovery finds.
"""

from __future__ import annotations

from array import array

from shardmq.shardd.queues.state import Ready


class HeldBack:
    __slots__ = ("bytes", "count", "levels")

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.levels: dict[int, Ready] = {}

    def add(self, priority: int, entries: array[int]) -> None:
        self.levels.setdefault(priority, Ready()).push_many(entries)
        self.count += len(entries)

    def entries(self) -> list[array[int]]:
        """Return the entries of all messages, one array for each priority."""
        return [level.peek(len(level)) for level in self.levels.values()]

    def heads(self) -> list[int]:
        return [level.first() for level in self.levels.values() if len(level)]
