from typing import Any

from shardmq.shardd.store.format.record import Abstracts

RENEW_BYTES: int
SETTLED_BYTES_MAX: int
FORGOTTEN_BYTES_MAX: int

class StageState:
    stage: str
    failure: str

class SegmentState:
    number: int
    salt: int
    capacity: int
    used: int
    flushed: int
    records: int
    messages: int
    references: int
    live: int
    dead_until: int
    buffer: bytearray | None
    settled: bytearray
    forgotten: bytearray
    abstracts: Abstracts | None
    in_sequence: bool
    lends: bool
    merging: bool
    sealed: bool

class AppendCounters:
    appended_messages: int
    appended_bytes: int

class PendingState:
    with_settled: dict[int, Any]
    with_forgotten: dict[int, Any]
    settled_bytes: int
    forgotten_bytes: int

class SegmentsState: ...
class SegmentStoreState: ...
