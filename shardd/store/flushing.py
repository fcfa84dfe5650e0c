"""Hand to the operating system what is only in memory: records, indexes, acks.

What is in a file may not be on stable storage yet: syncs.py sees to that.
"""

from __future__ import annotations

from shardmq.shardd.store import recovery
from shardmq.shardd.store.files import is_full
from shardmq.shardd.store.segment import Segment, file_name
from shardmq.shardd.store.segments import Segments
from shardmq.shardd.store.settled import ACKS_FILES_AT_ONCE

# Sealed segments whose buffers stay in memory. They serve as a read cache, and their messages may
# still be consumed before they are written.
SEALED_BUFFERS_MAX = 1
# Bytes of indexes that wait for a sync. Beyond this no index is made, and recovery scans the
# segment.
INDEX_BYTES_MAX = 1 << 20
# Written segments that wait for a sync that somebody asks for.
UNSYNCED_MAX = 64


class Flusher:
    """Writes the segments of one store."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._state = segments.state

    def flush_all(self) -> None:
        self.flush_segments()
        self._segments.settled.flush()

    def flush_some(self) -> None:
        """Write all messages, and acks into only a few files, to be quick."""
        try:
            self.flush_segments()
            self._segments.settled.flush(ACKS_FILES_AT_ONCE)
        except Exception as error:
            raise self._state.named(error) from error

    def flush_segments(self) -> None:
        segments = self._segments
        for segment in segments.in_memory:
            self.flush_segment(segment)
        if segments.open is not None:
            self.flush_segment(segments.open)
        segments.returns.write(segments.files, segments.directory, segments.on_disk)

    def flush_segment(self, segment: Segment) -> None:
        segments = self._segments
        if segment.live == 0 and not segment.in_sequence:
            return
        if segment.flushed != segment.used:
            before = segment.flushed
            if before == 0:
                segment.chain = segments.producers.chain_before(segment)
                segment.unnamed = True
            segment.write_out(segments.files)
            segments.counters.written_bytes += segment.flushed - before
            segments.unsynced[segment.number] = segment
        if segment.unnamed:
            # The file gets its name after its header: a file of that name is this segment or holds
            # nothing.
            path = f"{segments.directory}/{file_name('msgs', segment.number)}"
            segments.files.rename(segment.path, path)
            segment.path = path
            segment.unnamed = False
            segments.directory_changed = True

    def write_oldest(self) -> None:
        """Write segments and give up their buffers until one more segment may be sealed."""
        segments = self._segments
        while len(segments.in_memory) >= SEALED_BUFFERS_MAX:
            segment = segments.in_memory[0]
            self.flush_segment(segment)
            if segments.sync and segments.index_bytes < INDEX_BYTES_MAX and not segment.has_index:
                segment.index = segment.make_index()
                segments.index_bytes += len(segment.index or b"")
            segments.reclaimer.take_back_buffer(segment)
            segments.in_memory.pop(0)
            segments.handles.keep(segment)
            segments.candidates.look_at(segment)
            if segment.number not in segments.unsynced and not segments.in_job(segment):
                self.write_index_if_made(segment)
        while len(segments.unsynced) > UNSYNCED_MAX:
            # Nobody asks for a sync, but neither files nor dirty pages may pile up without end.
            oldest = next(iter(segments.unsynced.values()))
            if segments.sync:
                self.sync_or_fail(segments.handles.of(oldest))
            del segments.unsynced[oldest.number]

    def sync_or_fail(self, handle: int) -> None:
        """Sync a file, or raise StoreFailed.

        A failed sync may not be tried again, not even one that failed for want of room: the next
        sync may succeed without having written anything.
        """
        try:
            self._segments.files.sync(handle)
        except Exception as error:
            raise self._state.fail(error) from error

    def write_index_if_made(self, segment: Segment) -> None:
        if segment.index is not None and not segment.in_sequence:
            self._write_index(segment)

    def _write_index(self, segment: Segment) -> None:
        segments = self._segments
        assert segment.index is not None
        path = f"{segments.directory}/{file_name('index', segment.number)}"
        try:
            segment.has_index = True
            recovery.write_file(segments.files, path, segment.index)
        except OSError as error:
            if not is_full(error):
                raise
        segments.forget_index(segment)
