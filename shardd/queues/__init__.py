"""Queue logic: order, limits, whose turn it is. No transport, no files; the time is an argument.

`Store` is what a queue needs of where messages lie; shardd.store meets it.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from shardmq.shardd.queues.backlog import Counters
from shardmq.shardd.queues.consumers import Consumer, Loan, Window
from shardmq.shardd.queues.limits import Limits, limits_of
from shardmq.shardd.queues.queue import Queue
from shardmq.shardd.queues.roster import Kind, Roster
from shardmq.shardd.queues.stream import Log, Reader, StreamQueue, is_stream, retention_of
from shardmq.shardd.queues.unacked import Getter

__all__ = [
    "Arrival",
    "Consumer",
    "Counters",
    "Getter",
    "Kind",
    "Limits",
    "Loan",
    "Log",
    "Queue",
    "Reader",
    "Roster",
    "Store",
    "StreamQueue",
    "Window",
    "is_stream",
    "limits_of",
    "retention_of",
]


class Arrival(Protocol):
    """Messages that reached one queue, in publish order; what stands beside them has one item for each."""

    @property
    def queue_id(self) -> int: ...
    @property
    def entries(self) -> array[int]: ...
    @property
    def body_bytes(self) -> int: ...
    @property
    def facts(self) -> array[int] | None: ...
    @property
    def indexes(self) -> array[int] | None: ...
    @property
    def times(self) -> array[int] | None: ...
    @property
    def marks(self) -> int: ...


class Store(Protocol):
    """Where messages lie."""

    def read(self, entries: array[int], bytes_max: int) -> tuple[bytes, array[int]]: ...
    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes | memoryview, array[int]]:
        """As read(); a view is good until messages are appended. Not `whole`: it may end sooner."""

    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None: ...
    def count_returns(self, queue_id: int, entries: array[int]) -> list[int]: ...
    def times_returned(self, queue_id: int, entry: int) -> int: ...
    def drop_queue(self, queue_id: int, entries: array[int]) -> None: ...
