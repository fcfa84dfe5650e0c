"""The segments of a store: which there are, when one is let go of, merging of those in which little is left.

Records come and are settled in store.py, which builds on this. Segments are known by number; a merged one by the
numbers of all it replaces. The file of one that nobody needs goes when no job has it in hand.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from shardmq.shardd.store import producers, returns
from shardmq.shardd.store.compaction import (
    Candidates,
    Merged,
    ReclaimJob,
    bytes_max_alone,
    source_of,
)
from shardmq.shardd.store.files import Files, is_full
from shardmq.shardd.store.handles import Handles
from shardmq.shardd.store.reading import Windows
from shardmq.shardd.store.reclaim import Reclaimer
from shardmq.shardd.store.record import segment_runs
from shardmq.shardd.store.recovery import LOSSES, Damage
from shardmq.shardd.store.segment import HEADER_BYTES, Segment
from shardmq.shardd.store.settled import Settled
from shardmq.shardd.store.sync import SyncJob
from shardmq.shardd.store.usable import Usable


@dataclass(slots=True)
class _Counters:
    appended_messages: int = 0
    appended_bytes: int = 0
    written_bytes: int = 0
    syncs: int = 0
    merged_segments: int = 0
    merge_bytes: int = 0
    damage: list[Damage] = field(default_factory=list)


class Segments(Usable):
    def __init__(
        self, directory: str, files: Files, segment_bytes: int, sync: bool, spare_segments: int
    ) -> None:
        super().__init__("store", directory, files)
        self.segment_bytes = segment_bytes
        self.sync = sync
        self._reclaimer = Reclaimer(files, directory, segment_bytes, spare_segments, sync)
        self._windows = Windows(files)
        self._segments: dict[int, Segment] = {}
        self._open: Segment | None = None
        self._in_memory: list[Segment] = []  # sealed, with buffer, oldest first
        self._unsynced: dict[int, Segment] = {}
        self._settled = Settled(files, directory, self._look_at)
        self._index_bytes = 0
        self._handles = Handles(files, self._is_waited_for)
        self._next_number = 1
        self._directory_changed = False
        self._job: SyncJob | None = None
        self._dead: list[Segment] = []  # wait for the end of the job
        self._candidates = Candidates(segment_bytes)
        self._reclaim: ReclaimJob | None = None
        self._replaced: list[Segment] = []  # until the merged one's name lasts
        self._known_ids: array[int] | None = None  # queues there were at the start, ascending
        self._counters = _Counters()
        self._returns = returns.Returns()
        self._producers = producers.Producers(files, directory, sync)

    # -- which there are ---------------------------------------------------------------------------------

    def _enlist(self, segment: Segment) -> None:
        self._segments[segment.number] = segment
        self._candidates.append(segment)

    def _take_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def _distinct(self) -> list[Segment]:
        """A merged one is known by many numbers."""
        return list(dict.fromkeys(self._segments.values()))

    def _on_disk(self, entries: array[int]) -> array[int]:
        """As the next recovery will name them."""
        if all(segment.moves is None for segment in self._segments.values()):
            return entries
        placed: array[int] = array("Q")
        for number, start, stop in segment_runs(entries):
            moves = self._segments[number].moves
            placed += entries[start:stop] if moves is None else moves.find(entries, start, stop)
        return placed

    def _look_at(self, segment: Segment) -> None:
        if segment.sealed and not segment.merging:
            self._candidates.look_at(segment)

    def _retire(self, segment: Segment) -> None:
        """Nobody needs it. Its file may be in the hands of a sync."""
        for number in segment.numbers or [segment.number]:
            del self._segments[number]
        self._candidates.remove(segment)
        self._forget_state(segment)
        if segment in self._in_memory:
            self._in_memory.remove(segment)
        if segment.in_sequence:
            self._reclaimer.take_back_buffer(segment)
        if self._failure or self._in_job(segment) or segment.in_sequence:
            self._dead.append(segment)
        else:
            self._dispose(segment)

    def _dispose(self, segment: Segment) -> None:
        """Nobody needs the file: it gets another name, which is to last as what is settled."""
        if segment.flushed:
            self._settled.names_changed = True
        self._quietly(self._reclaimer.dispose, segment)

    def _forget_state(self, segment: Segment) -> None:
        """What is kept beside the file of one that is gone."""
        self._reclaimer.manifest.forget(segment.number)
        self._unsynced.pop(segment.number, None)
        self._settled.drop(segment)
        self._handles.drop(segment)
        self._windows.forget(segment.number)
        self._forget_index(segment)

    def _forget_index(self, segment: Segment) -> None:
        self._index_bytes -= len(segment.index or b"")
        segment.index = None

    def _distrust(self) -> None:
        """Where one record is damaged others may be. Without indexes a recovery believes none unread."""
        for segment in self._distinct():
            self._forget_index(segment)
            if segment.has_index:
                self._quietly(self._reclaimer.drop_index, segment)

    def _is_waited_for(self, segment: Segment) -> bool:
        return segment.number in self._unsynced or self._in_job(segment)

    def _in_job(self, segment: Segment) -> bool:
        return self._job is not None and any(segment is held for held, _, _ in self._job.segments)

    # -- merge what is nearly empty ----------------------------------------------------------------------

    def compact(self) -> int:
        """One step in this thread: how many fewer segments there are now."""
        job = self.begin_reclaim()
        if job is None:
            return 0
        job.run()
        return self.finish_reclaim(job)

    def begin_reclaim(self) -> ReclaimJob | None:
        """Removes files nobody needs, and merges some neighbouring segments in which little is left. One at a time,
        ended by `finish_reclaim`; all else may go on meanwhile. None: nothing to do. Entries stay good."""
        self._check_usable()
        assert self._reclaim is None, "a reclaim is running"
        doomed = self._reclaimer.take_doomed()
        run = self._candidates.choose(self._is_at_rest)
        if not doomed and not run:
            return None
        sources = [source_of(one, self._known_ids) for one in run]
        manifest = self._reclaimer.manifest.begin_sync() if doomed else None
        self._reclaim = ReclaimJob(self._files, self.directory, doomed, sources, manifest)
        if run:
            self._reclaim.path = self._reclaimer.new_path()
            self._reclaim.salt = self._files.salt()
            self._reclaim.bytes_max = (
                self.segment_bytes if len(run) > 1 else bytes_max_alone(run[0])
            )
            self._reclaim.sync = self.sync
        return self._reclaim

    def finish_reclaim(self, job: ReclaimJob) -> int:
        """After `run`, on the owner's thread: how many fewer segments there are. Wants a sync, for the files to go.
        Raises StoreFailed when a write or sync failed, Corrupt as `read`; with a full disk nothing has changed."""
        assert job is self._reclaim and job.done, "not this job, or it did not run"
        self._give_up_reclaim()
        self._counters.merge_bytes += job.moved_bytes
        if job.error is None:
            self._reclaimer.manifest.end_sync(job.manifest)
        if job.corrupt is not None:
            self._distrust()
            raise job.corrupt
        if job.error is not None and not is_full(job.error):
            raise self._fail(job.error)
        merged, sources = job.merged, [source.segment for source in job.sources]
        if merged is not None and not any(segment.live for segment in sources):
            self._files.close(merged.handle)
            self._reclaimer.doom(job.path, merged.size)
        elif merged is not None and self._take_name(job, merged, sources[-1].path):
            try:
                self._put_in_place(job, merged, sources)
            except Exception as error:
                raise self._fail(error) from error
            return len(sources) - 1
        for segment in sources:
            if segment.live == 0:
                self._retire(segment)
            else:
                self._candidates.look_at(segment)
        return 0

    def _give_up_reclaim(self) -> None:
        """One that is still running does no harm: what it writes is found as a spare by the next recovery."""
        for source in self._reclaim.sources if self._reclaim else ():
            source.segment.merging = False
        self._reclaim = None

    def _is_at_rest(self, segment: Segment) -> bool:
        """On stable storage, and nothing else goes on with it."""
        unsynced = self.sync and segment.number in self._unsynced
        at_rest = segment.buffer is None and not unsynced and not segment.in_sequence
        return at_rest and not segment.merging and not self._in_job(segment)

    def _take_name(self, job: ReclaimJob, merged: Merged, path: str) -> bool:
        """Give the merged file the name of the last source; no room for it: all stays as it was."""
        try:
            self._files.rename(job.path, path)
        except Exception as error:
            self._files.close(merged.handle)
            self._reclaimer.doom(job.path, merged.size)
            if isinstance(error, OSError) and is_full(error):
                return False
            raise self._fail(error) from error
        self._directory_changed = self._settled.names_changed = True
        return True

    def _put_in_place(self, job: ReclaimJob, merged: Merged, sources: list[Segment]) -> None:
        last = sources[-1]
        new = job.new_segment(merged)
        name_lasts = self._reclaimer.manifest.forget(last.number)
        settled, forgotten = job.settled_since()
        for segment in sources:
            self._forget_state(segment)
            for number in segment.numbers or [segment.number]:
                del self._segments[number]
        for number in new.numbers:
            self._segments[number] = new
        self._candidates.replace(sources, new)
        self._handles.keep(new)
        if name_lasts:
            self._reclaimer.manifest.is_lasting(new.number)
        if settled:
            self._settled.note(new, settled)
        if forgotten:
            self._settled.note_forgotten(new, forgotten)
        self._reclaimer.dispose_replaced(last)
        self._replaced += sources[:-1]
        if not self.sync:
            self._dispose_replaced()
        self._counters.merged_segments += len(sources)
        self._candidates.look_at(new)
        self._returns.places_changed()
        self._returns.write(self._files, self.directory, self._on_disk)

    def _dispose_replaced(self) -> None:
        replaced, self._replaced = self._replaced, []
        for segment in replaced:
            self._reclaimer.dispose_merged(segment)

    # -- numbers -----------------------------------------------------------------------------------------

    @property
    def written_bytes(self) -> int:
        """To segments, of what was appended."""
        return self._counters.written_bytes

    @property
    def damage(self) -> list[Damage]:
        """What recovery found broken."""
        return self._counters.damage

    def stats(self) -> dict[str, int]:
        segments = self._distinct()
        used = sum(segment.used - HEADER_BYTES for segment in segments)
        live_bytes = sum(segment.live_bytes() for segment in segments)
        on_disk = sum(segment.capacity for segment in segments if segment.flushed)
        return {
            "segments": len(segments),
            "live_messages": sum(segment.live for segment in segments),
            "live_bytes": live_bytes,
            "dead_bytes": used - live_bytes,
            "disk_bytes": on_disk
            + self._reclaimer.disk_bytes()
            + sum(one.capacity for one in self._replaced),
            "buffered_bytes": sum(
                segment.used - segment.flushed for segment in segments if segment.buffer is not None
            ),
            "unsynced_segments": len(self._unsynced),
            "spare_segments": len(self._reclaimer.spares),
            "appended_messages": self._counters.appended_messages,
            "appended_bytes": self._counters.appended_bytes,
            "written_bytes": self._counters.written_bytes,
            "merged_segments": self._counters.merged_segments,
            "merge_bytes": self._counters.merge_bytes,
            "syncs": self._counters.syncs,
            "producers": len(self._producers.table),
            "damaged": sum(one.what in LOSSES for one in self._counters.damage),
            "torn": sum(one.what == "torn" for one in self._counters.damage),
        }
