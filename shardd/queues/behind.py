"""What a queue keeps back: messages that came while other queues still had to settle older ones of the same keys.

In order, by priority; neither ready nor held by a consumer. They become ready when the queue is told so. After a
restart of the shard nobody knows what had come before: all that is found is kept back then.
"""

from __future__ import annotations

from array import array

from shardmq.shardd.queues.ready import Ready


class Behind:
    __slots__ = ("bytes", "count", "levels")

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.levels: dict[int, Ready] = {}

    def add(self, priority: int, entries: array[int]) -> None:
        self.levels.setdefault(priority, Ready()).push_many(entries)
        self.count += len(entries)

    def entries(self) -> list[array[int]]:
        """All, an array for each priority."""
        return [level.peek(len(level)) for level in self.levels.values()]

    def heads(self) -> list[int]:
        return [level.first() for level in self.levels.values() if len(level)]
