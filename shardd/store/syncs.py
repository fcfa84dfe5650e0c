"""Begin and end the syncs of a store: of messages, and of acks.

The jobs are in sync.py.
"""

from __future__ import annotations

import contextlib

from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.flushing import Flusher
from shardmq.shardd.store.producers import NAME, Cover
from shardmq.shardd.store.segments import Segments
from shardmq.shardd.store.settled import ACKS_FILES_SYNCED_AT_ONCE
from shardmq.shardd.store.sync import SettledSync, SyncJob


class Syncs:
    """The syncs of one store."""

    def __init__(self, segments: Segments, flusher: Flusher) -> None:
        self._segments = segments
        self._flusher = flusher
        self._state = segments.state
        self.held_back = False  # a merge held acks back when their last sync began

    def begin_sync(self) -> SyncJob | None:
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
        held = [
            (segment, segments.handles.of(segment), segment.flushed)
            for segment in segments.unsynced.values()
        ]
        spares = segments.reclaimer.unlasting()
        cover = segments.producers.begin()
        with_directory = segments.directory_changed or bool(spares) or cover is not None
        manifest = segments.reclaimer.manifest.begin_sync() if spares else None
        self._state.job = SyncJob(
            files=segments.files,
            directory=segments.directory,
            segments=held,
            with_directory=with_directory,
            cover=cover,
            spares=spares,
            replaced=segments.replaced,
            manifest=manifest,
        )
        segments.unsynced = {}
        segments.replaced = []
        segments.directory_changed = False
        segments.counters.syncs += 1
        return self._state.job

    def finish_sync(self, job: SyncJob) -> None:
        """End a job after its `run`, on the owner's thread.

        Raises StoreFailed if the job did not succeed. Raises DiskFull if the disk had no room for
        the sequences of producers: then nothing may be confirmed before the next sync.
        """
        segments = self._segments
        assert job is self._state.job and job.done, "not this job, or it did not run"
        self._state.job = None
        self._state.check_synced(job)
        segments.reclaimer.manifest.end_sync(job.manifest)
        for spare in job.spares:
            spare.lasting = True
        for segment, _, flushed in job.segments:
            if segment.number in segments.by_number:
                segments.reclaimer.manifest.is_lasting(segment.number)
                if segment.sealed and flushed == segment.used:
                    self._state.quietly(self._flusher.write_index_if_made, segment)
        if job.cover is not None:
            self._covered(job.cover)
        dead = segments.take_dead()
        for segment in job.replaced:
            self._state.quietly(segments.reclaimer.dispose_merged, segment)
        for segment in dead:
            segments.dispose(segment)
        self._check_covered(job.cover)

    def begin_settled_sync(self) -> SettledSync | None:
        """Write acks, and return the job that makes them last, or None if there are none.

        The job ends with `finish_settled_sync`; all else goes on meanwhile. The acks of segments
        that are being merged are left for the next job. So is the new name of a settled segment
        that a sync of messages still uses.
        """
        segments = self._segments
        self._state.check_usable()
        if not segments.sync:
            return None
        manifest = segments.reclaimer.manifest
        try:
            segments.settled.flush(ACKS_FILES_SYNCED_AT_ONCE)
            manifest.write()
        except Exception as error:
            raise self._state.named(error) from error
        self.held_back = segments.settled.holds_back()
        paths, with_directory = segments.settled.take_unsynced(ACKS_FILES_SYNCED_AT_ONCE)
        named = manifest.take_unsure()
        if not paths and not with_directory and not named:
            return None
        return SettledSync(
            files=segments.files,
            directory=segments.directory,
            with_directory=with_directory or bool(named),
            named=named,
            paths=paths,
            more=len(paths) == ACKS_FILES_SYNCED_AT_ONCE,
        )

    def finish_settled_sync(self, job: SettledSync) -> None:
        """End a job after its `run`, on the owner's thread.

        Raises StoreFailed if the job did not succeed.
        """
        segments = self._segments
        self._state.check_synced(job)
        for number in job.named:
            if number in segments.by_number and segments.by_number[number].number == number:
                segments.reclaimer.manifest.is_lasting(number)

    def _covered(self, cover: Cover) -> None:
        segments = self._segments
        for segment in segments.producers.end(cover):
            is_whole = segment.flushed == segment.used and not segments.is_waited_for(segment)
            if segment.number in segments.by_number and is_whole:
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
