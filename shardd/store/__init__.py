"""Stores as a library. `SegmentStore`: append, read, settle, sync; files and formats are drawn in segment.py, acks.py.
`StreamLog`: append, read again and again, retain; they are drawn in stream_segment.py, chunk.pyx, positions.py."""

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
