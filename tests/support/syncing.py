"""A sync from its beginning to its end, as a shard and the thread it has for that do it."""

from __future__ import annotations

from typing import TypeVar

from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamLog

Log = TypeVar("Log", SegmentStore, StreamLog)


def sync(log: Log) -> None:
    job = log.begin_sync()
    if job is not None:
        job.run()
        log.finish_sync(job)
