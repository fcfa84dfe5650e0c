"""Queue logic: order, limits, whose turn it is. No transport, no files; the time is an argument.

`Store` is what a queue needs of where messages lie; shardd.store meets it.
"""

from __future__ import annotations

from shardmq.shardd.queues.backlog import Counters
from shardmq.shardd.queues.consumers import Consumer, Loan, Window
from shardmq.shardd.queues.limits import Limits, limits_of
from shardmq.shardd.queues.queue import Queue
from shardmq.shardd.queues.roster import Kind, Roster
from shardmq.shardd.queues.store import Arrival, Store
from shardmq.shardd.queues.stream import Log, Reader, Stream, StreamQueue, is_stream, retention_of
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
    "Stream",
    "StreamQueue",
    "Window",
    "is_stream",
    "limits_of",
    "retention_of",
]
