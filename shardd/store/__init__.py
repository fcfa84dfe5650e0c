"""Provide the stores of messages as a library.

`SegmentStore` appends, reads, settles and syncs the messages of queues. Its files and formats are
drawn in segment.py and acks.py.

`StreamLog` appends messages, reads them any number of times and applies retention. Its formats are
drawn in stream_segment.py, chunk.pyx and positions.py.
"""

from shardmq.shardd.store.compaction import ReclaimJob
from shardmq.shardd.store.errors import (
    Closed,
    Corrupt,
    DiskFull,
    FormatTooNew,
    StoreError,
    StoreFailed,
)
from shardmq.shardd.store.files import Files, OsFiles
from shardmq.shardd.store.positions import TooManyNames
from shardmq.shardd.store.record import Arrival
from shardmq.shardd.store.recovery import Damage
from shardmq.shardd.store.sequences import Screened
from shardmq.shardd.store.store import SegmentStore
from shardmq.shardd.store.stream import StreamLog, filter_of, wanted_filters
from shardmq.shardd.store.stream_reading import Messages, StreamCache
from shardmq.shardd.store.stream_segments import StreamSync
from shardmq.shardd.store.sync import SyncJob

__all__ = [
    "Arrival",
    "Closed",
    "Corrupt",
    "Damage",
    "DiskFull",
    "Files",
    "FormatTooNew",
    "Messages",
    "OsFiles",
    "ReclaimJob",
    "Screened",
    "SegmentStore",
    "StoreError",
    "StoreFailed",
    "StreamCache",
    "StreamLog",
    "StreamSync",
    "SyncJob",
    "TooManyNames",
    "filter_of",
    "wanted_filters",
]
