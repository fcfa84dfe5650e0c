"""Hold the logic of queues: order, limits, and the choice of the consumer for each message.

This package does no transport and opens no files; the time is an argument. `Store` is the protocol
of the place where messages lie; shardd.store implements it.
"""

from __future__ import annotations

from shardmq.shardd.queues.allotment import Allotment
from shardmq.shardd.queues.consumers import Consumer, Reader
from shardmq.shardd.queues.limits import Limits, limits_of
from shardmq.shardd.queues.log_order import LogOrder
from shardmq.shardd.queues.queue import Queue
from shardmq.shardd.queues.roster import Kind, Roster
from shardmq.shardd.queues.state import Counters, Window
from shardmq.shardd.queues.store import Arrival, Store
from shardmq.shardd.queues.stream import Log, Stream, StreamQueue, is_stream, retention_of
from shardmq.shardd.queues.unacked import Getter

__all__ = [
    "Allotment",
    "Arrival",
    "Consumer",
    "Counters",
    "Getter",
    "Kind",
    "Limits",
    "Log",
    "LogOrder",
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
