"""Keep the messages of queues: a log of segments that are removed when all is settled.

README.md draws the files of a store and shows how to use one.
"""

from shardmq.shardd.store.segments.compaction import ReclaimJob
from shardmq.shardd.store.segments.store import SegmentStore

__all__ = ["ReclaimJob", "SegmentStore"]
