"""The segment store as a library: append, read, settle, sync. Files and formats are drawn in segment.py and acks.py."""

from shardd.store.compaction import ReclaimJob
from shardd.store.errors import Closed, Corrupt, DiskFull, FormatTooNew, StoreError, StoreFailed
from shardd.store.files import Files, OsFiles
from shardd.store.record import Arrival
from shardd.store.recovery import Damage
from shardd.store.store import SegmentStore, SyncJob

__all__ = [
    "Arrival",
    "Closed",
    "Corrupt",
    "Damage",
    "DiskFull",
    "Files",
    "FormatTooNew",
    "OsFiles",
    "ReclaimJob",
    "SegmentStore",
    "StoreError",
    "StoreFailed",
    "SyncJob",
]
