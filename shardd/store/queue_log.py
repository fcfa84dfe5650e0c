"""A stream as a queue of a shard wants it: takes the records of a PUBLISH, gives deliveries with their offsets.

What a message is to be found by (its filter value) is read from its headers when it is appended; a chunk that holds
none of the values wanted is passed over unread, and of the others only those messages are given that have one.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardd.store import intake
from shardd.store.chunk import expanded
from shardd.store.files import is_missing
from shardd.store.stream import StreamLog, wanted_filters
from shardd.store.stream_reading import COUNT_MAX

_RECORD = struct.Struct("<I16xIH")  # of a record (drawn in record.pyx): length, messages, queues
_RECORD_HEADER = 28


@dataclass(slots=True)
class Batch:
    """`entries`: the offset of each message, + 1. With none and `next_offset` moved on: read on from there."""

    blob: bytes  # u64 offset of each message, then the stored messages back to back
    entries: array[int]
    sizes: array[int]  # body_bytes of each
    next_offset: int


# What a file is called that is about to be removed.
GONE_PREFIX = "gone."


class Remover(Protocol):
    """Removes what nobody needs any more, in that order, whenever it comes to it: a large file takes long."""

    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...


class QueueLog(StreamLog):
    def __init__(self, directory: str, *, remover: Remover | None = None, **more: Any) -> None:
        """`more`: as a StreamLog has it. Without a remover files are removed at once."""
        super().__init__(directory, **more)
        self._remover = remover

    def recover(self) -> None:
        super().recover()
        self._quietly(self._remove_left_behind)

    def _remove_left_behind(self) -> None:
        """What a former process did not come to."""
        for name in self._files.list(self.directory):
            if name.startswith(GONE_PREFIX):
                self._hand_over(f"{self.directory}/{name}")

    def _hand_over(self, path: str) -> None:
        if self._remover is None:
            self._files.remove(path)
        else:
            self._remover.remove(path)

    def _remove(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        if self._remover is None or not name.startswith("log."):
            super()._remove(path)
            return
        try:
            self._files.rename(path, f"{directory}/{GONE_PREFIX}{name}")
        except OSError as error:
            if not is_missing(error):
                raise
        else:
            self._remover.remove(f"{directory}/{GONE_PREFIX}{name}")

    def delete_all(self) -> None:
        self._remove_left_behind()
        if self._remover is not None:
            for name in self._files.list(self.directory):
                if name.startswith("log."):
                    self._remove(f"{self.directory}/{name}")
        super().delete_all()
        if self._remover is not None:
            self._remover.remove_directory(self.directory)

    def append_records(self, records: memoryview, queue_id: int, alone: bool) -> int:
        """Take those of the records that name the queue (`alone`: all do); how many messages."""
        own = records if alone else intake.records_of(records, queue_id)
        before = self.next_offset
        self.append(own, intake.filters_of(own))
        return self.next_offset - before

    def named_in(self, records: memoryview, queue_id: int, other: int) -> list[tuple[int, int]]:
        """Of the messages in the records that name the queue, those whose record names `other`, too: (ordinal of the
        first, count) of each record. To be asked for a short time only: it looks at each record."""
        found: list[tuple[int, int]] = []
        at = ordinal = 0
        while at < len(records):
            length, count, queues = _RECORD.unpack_from(records, at)
            ids = struct.unpack_from(f"<{queues}I", records, at + _RECORD_HEADER)
            if queue_id in ids:
                if other in ids:
                    found.append((ordinal, count))
                ordinal += count
            at += length
        return found

    def filters(self, values: Sequence[str], unfiltered: bool) -> array[int] | None:
        """What `batch` takes as `wanted`; None: everything."""
        return wanted_filters([value.encode() for value in values], unfiltered=unfiltered) if values else None

    def batch(self, offset: int, bytes_max: int, count_max: int = COUNT_MAX, wanted: array[int] | None = None) -> Batch:
        """As `read`, ready to be delivered."""
        found = self.read(offset, bytes_max, wanted, count_max)
        blob, sizes = found.blob, found.sizes
        offsets = expanded(found.runs, 0)
        if wanted is not None and offsets:
            blob, offsets, sizes = intake.select(blob, offsets, sizes, wanted)
            entries = array("Q", [offset + 1 for offset in offsets])
        else:
            entries = expanded(found.runs, 1)
        return Batch(offsets.tobytes() + blob, entries, sizes, found.next_offset)
