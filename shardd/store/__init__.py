"""Stores as a library. `SegmentStore`: append, read, settle, sync; files and formats are drawn in segment.py, acks.py.
`StreamLog`: append, read again and again, retain; they are drawn in stream_segment.py, chunk.pyx, positions.py."""

from shardd.store.compaction import ReclaimJob
from shardd.store.errors import Closed, Corrupt, DiskFull, FormatTooNew, StoreError, StoreFailed
from shardd.store.files import Files, OsFiles
from shardd.store.positions import TooManyNames
from shardd.store.record import Arrival
from shardd.store.recovery import Damage
from shardd.store.sequences import Screened
from shardd.store.store import SegmentStore
from shardd.store.stream import StreamLog, StreamSync, filter_of, wanted_filters
from shardd.store.stream_reading import Messages, StreamCache
from shardd.store.sync import SyncJob

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
