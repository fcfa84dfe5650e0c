"""Merge the segments of a store in which little is left, and remove files nobody needs.

compaction.py decides which segments are merged and what is copied, and its job runs in any thread.
This file begins the jobs and puts the merged segments in the place of their sources.
"""

from __future__ import annotations

from array import array

from shardmq.shardd.store.files import is_full
from shardmq.shardd.store.segments.compaction import Merged, ReclaimJob, bytes_max_alone, source_of
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments


class Merging:
    """Merges the segments of one store, with one job at a time."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._state = segments.state
        self._reclaim: ReclaimJob | None = None
        # Ids of the queues that there were at the start, ascending.
        self.known_ids: array[int] | None = None

    @property
    def is_running(self) -> bool:
        return self._reclaim is not None

    def compact(self) -> int:
        """Do one step in this thread; return how many fewer segments there are now."""
        job = self.begin()
        if job is None:
            return 0
        job.run()
        return self.finish(job)

    def begin(self) -> ReclaimJob | None:
        """Return a job that removes files nobody needs and merges neighbours with little left.

        Returns None when there is nothing to do. There is one job at a time, ended by `finish`. All
        other calls may go on meanwhile, and entries stay good.
        """
        segments = self._segments
        self._state.check_usable()
        assert self._reclaim is None, "a reclaim is running"
        doomed = segments.reclaimer.take_doomed()
        run = segments.candidates.choose(self._is_at_rest)
        if not doomed and not run:
            return None
        sources = [source_of(one, self.known_ids) for one in run]
        manifest = segments.reclaimer.manifest.begin_sync() if doomed else None
        self._reclaim = ReclaimJob(segments.files, segments.directory, doomed, sources, manifest)
        if run:
            self._reclaim.path = segments.reclaimer.new_path()
            self._reclaim.salt = segments.files.salt()
            self._reclaim.bytes_max = (
                segments.segment_bytes if len(run) > 1 else bytes_max_alone(run[0])
            )
            self._reclaim.sync = segments.sync
        return self._reclaim

    def finish(self, job: ReclaimJob) -> int:
        """End a job after its `run`, on the owner's thread.

        Returns how many fewer segments there are. The files of the sources are removed with the
        next sync. Raises StoreFailed when a write or sync failed, and Corrupt when a record was
        damaged. When the disk was full nothing has changed.
        """
        segments = self._segments
        assert job is self._reclaim and job.done, "not this job, or it did not run"
        self.give_up()
        segments.counters.merge_bytes += job.moved_bytes
        if job.error is None:
            segments.reclaimer.manifest.end_sync(job.manifest)
        if job.corrupt is not None:
            segments.distrust()
            raise job.corrupt
        if job.error is not None and not is_full(job.error):
            raise self._state.fail(job.error)
        merged, sources = job.merged, [source.segment for source in job.sources]
        if merged is not None and not any(segment.live for segment in sources):
            segments.files.close(merged.handle)
            segments.reclaimer.doom(job.path, merged.size)
        elif merged is not None and self._take_name(job, merged, sources[-1].path):
            try:
                self._put_in_place(job, merged, sources)
            except Exception as error:
                raise self._state.fail(error) from error
            return len(sources) - 1
        for segment in sources:
            if segment.live == 0:
                segments.retire(segment)
            else:
                segments.candidates.look_at(segment)
        return 0

    def give_up(self) -> None:
        """Forget the job under way.

        A job that still runs does no harm: the next recovery takes the file that it writes for a
        spare.
        """
        for source in self._reclaim.sources if self._reclaim else ():
            source.segment.merging = False
        self._reclaim = None

    def _is_at_rest(self, segment: Segment) -> bool:
        """Return whether the segment is on stable storage and nothing else uses its file."""
        segments = self._segments
        unsynced = segments.sync and segment.number in segments.unsynced
        at_rest = segment.buffer is None and not unsynced and not segment.in_sequence
        return at_rest and not segment.merging and not segments.in_job(segment)

    def _take_name(self, job: ReclaimJob, merged: Merged, path: str) -> bool:
        """Give the merged file the name of the last source; return False when there is no room.

        Without room all stays as it was.
        """
        segments = self._segments
        try:
            segments.files.rename(job.path, path)
        except Exception as error:
            segments.files.close(merged.handle)
            segments.reclaimer.doom(job.path, merged.size)
            if isinstance(error, OSError) and is_full(error):
                return False
            raise self._state.fail(error) from error
        segments.directory_changed = segments.settled.names_changed = True
        return True

    def _put_in_place(self, job: ReclaimJob, merged: Merged, sources: list[Segment]) -> None:
        segments = self._segments
        last = sources[-1]
        new = job.new_segment(merged)
        name_lasts = segments.reclaimer.manifest.forget(last.number)
        settled, forgotten = job.settled_since()
        for segment in sources:
            segments.forget_state(segment)
            for number in segment.numbers or [segment.number]:
                del segments.by_number[number]
        for number in new.numbers:
            segments.by_number[number] = new
        segments.candidates.replace(sources, new)
        segments.handles.keep(new)
        if name_lasts:
            segments.reclaimer.manifest.is_lasting(new.number)
        if settled:
            segments.settled.note(new, settled)
        if forgotten:
            segments.settled.note_forgotten(new, forgotten)
        segments.reclaimer.dispose_replaced(last)
        segments.replaced += sources[:-1]
        if not segments.sync:
            segments.dispose_replaced()
        segments.counters.merged_segments += len(sources)
        segments.candidates.look_at(new)
        segments.returns.places_changed()
        segments.returns.write(segments.files, segments.directory, segments.on_disk)
