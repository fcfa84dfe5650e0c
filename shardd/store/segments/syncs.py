"""Write what is only in memory (records, indexes, acks), and begin and end the syncs of a store.

What is written may not be on stable storage before a sync. The jobs are in sync.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.files import is_full, write_file
from shardmq.shardd.store.format.producers_file import NAME, Cover
from shardmq.shardd.store.format.segment_file import file_name
from shardmq.shardd.store.segments.ack_waits import AckWait
from shardmq.shardd.store.segments.pending_acks import ACKS_FILES_AT_ONCE, ACKS_FILES_SYNCED_AT_ONCE
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments, UnderSync
from shardmq.shardd.store.sync import SyncJob

# Sealed segments whose buffers stay in memory. They serve as a read cache, and their messages may
# still be consumed before they are written.
SEALED_BUFFERS_MAX = 1
# Bytes of indexes that wait for a sync. Beyond this no index is made, and recovery scans the
# segment.
INDEX_BYTES_MAX = 1 << 20
# Written segments that wait for a sync that somebody asks for.
UNSYNCED_MAX = 64


@dataclass(slots=True)
class UnderSettledSync:
    """The part of a store that a sync of acks makes last."""

    named: list[int]  # numbers of segments whose names last after the job
    segments: list[Segment]  # those whose acks files are synced and have all acks until then
    waits: Collection[AckWait]


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

    def write_oldest(self, more: int = 1) -> None:
        """Write segments and give up their buffers until so many more segments may be sealed.

        Segments of which most bytes are lent stay, too: to write them, the bodies would have to be
        copied. The memory that front doors lend is bounded, and so are these.
        """
        segments = self._segments
        lent = sum([2 * segment.lent.held_bytes > segment.used for segment in segments.in_memory])
        most = SEALED_BUFFERS_MAX + lent
        while len(segments.in_memory) + more > most:
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
            write_file(segments.files, path, segment.index)
        except OSError as error:
            if not is_full(error):
                raise
        segments.forget_index(segment)


class Syncs:
    """The syncs of one store."""

    def __init__(self, segments: Segments, flusher: Flusher) -> None:
        self._segments = segments
        self._flusher = flusher
        self._state = segments.state
        self.held_back = False  # a merge held acks back when their last sync began

    def begin_sync(self) -> SyncJob[UnderSync] | None:
        """Flush, and return the job that makes all messages last, or None.

        None means that there is nothing to wait for. There is one job at a time, ended by
        `finish_sync`.
        """
        segments = self._segments
        self._state.check_usable()
        assert self._state.job is None, "a sync is running"
        self._flusher.flush_some()
        if not segments.sync:
            self.cover_all()
        if not segments.sync or not (
            segments.unsynced or segments.directory_changed or segments.producers.uncovered
        ):
            return None
        held = list(segments.unsynced.values())
        spares = segments.reclaimer.unlasting()
        cover = segments.producers.begin()
        with_directory = segments.directory_changed or bool(spares) or cover is not None
        manifest = segments.reclaimer.manifest.begin_sync() if spares else None
        self._state.job = SyncJob(
            files=segments.files,
            directory=segments.directory,
            with_directory=with_directory,
            handles=[segments.handles.of(segment) for segment in held],
            last_steps=[step for step in (cover, manifest) if step is not None],
            noted=UnderSync(
                [(segment, segment.flushed) for segment in held],
                spares,
                segments.replaced,
                cover,
                manifest,
            ),
        )
        segments.unsynced = {}
        segments.replaced = []
        segments.directory_changed = False
        segments.counters.syncs += 1
        return self._state.job

    def finish_sync(self, job: SyncJob[UnderSync]) -> None:
        """End a job after its `run`, on the owner's thread.

        Raises StoreFailed if the job did not succeed. Raises DiskFull if the disk had no room for
        the sequences of producers: then nothing may be confirmed before the next sync.
        """
        segments = self._segments
        assert job is self._state.job and job.done, "not this job, or it did not run"
        self._state.job = None
        self._state.check_synced(job)
        noted = job.noted
        segments.reclaimer.manifest.end_sync(noted.manifest)
        for spare in noted.spares:
            spare.lasting = True
        for segment, flushed in noted.segments:
            if segment.number in segments.by_number:
                segments.reclaimer.manifest.is_lasting(segment.number)
                if segment.sealed and flushed == segment.used:
                    self._state.quietly(self._flusher.write_index_if_made, segment)
        if noted.cover is not None:
            self._covered(noted.cover)
        dead = segments.take_dead()
        for segment in noted.replaced:
            self._state.quietly(segments.reclaimer.dispose_merged, segment)
        for segment in dead:
            segments.dispose(segment)
        self._check_covered(noted.cover)

    def begin_settled_sync(
        self, waits: Collection[AckWait] = (), everything: bool = True
    ) -> SyncJob[UnderSettledSync] | None:
        """Write acks, and return the job that makes them last, or None if there are none.

        The acks that somebody `waits` for come first, and are the only ones without `everything`.
        The job ends with `finish_settled_sync`; all else goes on meanwhile. The acks of segments
        that are being merged are left for the next job. So is the new name of a settled segment
        that a sync of messages still uses.
        """
        segments, settled = self._segments, self._segments.settled
        self._state.check_usable()
        if not segments.sync:
            for wait in waits:
                wait.is_over = True
            return None
        asked: dict[Segment, None] = {}
        new = [wait.queue_ids for wait in waits if wait.segments is None]
        by_queue = settled.by_queue(frozenset().union(*new)) if new else {}
        for wait in waits:
            asked |= wait.look(segments, by_queue)
        only_asked = not everything
        manifest = segments.reclaimer.manifest
        try:
            has_room = settled.flush(ACKS_FILES_SYNCED_AT_ONCE, asked, only_asked=only_asked)
            if everything:
                manifest.write()
        except Exception as error:
            raise self._state.named(error) from error
        for wait in waits:
            wait.written(has_room)
        if everything:
            self.held_back = settled.holds_back()
        taken, with_directory = settled.take_unsynced(
            ACKS_FILES_SYNCED_AT_ONCE, asked, only_asked=only_asked
        )
        named = manifest.take_unsure() if everything else []
        if not taken and not with_directory and not named:
            for wait in waits:
                wait.synced(())
            return None
        return SyncJob(
            files=segments.files,
            directory=segments.directory,
            with_directory=with_directory or bool(named),
            # What a merge holds back of a segment is not in its acks file.
            noted=UnderSettledSync(named, [one for one in taken if not one.settled], waits),
            paths=[settled.path_of(segment) for segment in taken],
            more=len(taken) == ACKS_FILES_SYNCED_AT_ONCE,
        )

    def finish_settled_sync(self, job: SyncJob[UnderSettledSync]) -> None:
        """End a job after its `run`, on the owner's thread.

        Raises StoreFailed if the job did not succeed.
        """
        segments = self._segments
        self._state.check_synced(job)
        for number in job.noted.named:
            if number in segments.by_number and segments.by_number[number].number == number:
                segments.reclaimer.manifest.is_lasting(number)
        # If a segment has gone or was merged meanwhile, the job may not have found its acks file.
        # Then the names that took its place must last, which the next job sees to.
        stayed = [each for each in job.noted.segments if segments.successor(each) is each]
        for wait in job.noted.waits:
            wait.synced(stayed)

    def _covered(self, cover: Cover) -> None:
        segments = self._segments
        for segment in segments.producers.end(cover):
            if segment.number not in segments.by_number:
                continue
            is_whole = segment.flushed == segment.used and not segments.is_waited_for(segment)
            if segment.sealed and segment.live == 0:
                segments.retire(segment)
            elif is_whole:
                self._state.quietly(self._flusher.write_index_if_made, segment)

    def cover_all(self) -> None:
        """Write the sequences of producers at once, in this thread.

        The caller has synced all written segments, or the store does not sync. Raises DiskFull.
        """
        segments = self._segments
        cover = segments.producers.begin()
        if cover is not None:
            cover.run()
            self._covered(cover)
            for segment in segments.take_dead():
                segments.dispose(segment)
            self._check_covered(cover)

    def _check_covered(self, cover: Cover | None) -> None:
        if cover is not None and cover.full:
            raise DiskFull(f"no room for {NAME} in {self._segments.directory}")

    def cover_now(self) -> None:
        """Sync although nobody asks, so that segments that are not covered do not pile up."""
        if self._state.job is None:
            with contextlib.suppress(DiskFull):
                job = self.begin_sync()
                if job is not None:
                    job.run()
                    self.finish_sync(job)
