"""Keep the segments of a store, and dispose of segments that nobody needs.

A segment is known by its number, a merged segment by the numbers of all segments it replaces. The
file of a segment that nobody needs goes when no job uses it. This file also holds what the objects
of a store share: its files, spares, producers and settled messages.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from shardmq.shardd.store.damage import LOSSES, Damage
from shardmq.shardd.store.format.manifest import ManifestSync
from shardmq.shardd.store.format.producers_file import Cover
from shardmq.shardd.store.format.record import segment_runs
from shardmq.shardd.store.format.segment_file import HEADER_BYTES
from shardmq.shardd.store.open_segment import AppendCounters, SegmentsState
from shardmq.shardd.store.segments.ages import Ages
from shardmq.shardd.store.segments.compaction import Candidates
from shardmq.shardd.store.segments.pending_acks import Settled
from shardmq.shardd.store.segments.producers import Producers
from shardmq.shardd.store.segments.reclaim import Reclaimer, Spare
from shardmq.shardd.store.segments.returns import Returns
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.windows import Handles, Windows
from shardmq.shardd.store.state import StoreState


class Counters(AppendCounters):
    """The counters of a store."""

    __slots__ = ("damage", "merge_bytes", "merged_segments", "syncs", "written_bytes")

    def __init__(self) -> None:
        self.written_bytes = 0
        self.syncs = 0
        self.merged_segments = 0
        self.merge_bytes = 0
        self.damage: list[Damage] = []


@dataclass(slots=True)
class UnderSync:
    """The part of a store that a sync of messages makes last."""

    segments: list[tuple[Segment, int]]  # and the position up to which each was written
    spares: list[Spare]  # their names last after the job
    # Segments that may go after the job: a merged segment has their messages.
    replaced: list[Segment]
    cover: Cover | None
    manifest: ManifestSync | None  # syncs the manifest without the spares


class Segments(SegmentsState):
    """The segments of one store.

    `spare_segments` is how many files of dead segments are kept for new segments.
    """

    def __init__(
        self, state: StoreState[UnderSync], segment_bytes: int, sync: bool, spare_segments: int
    ) -> None:
        files, directory = state.files, state.directory
        self.state = state
        self.files = files
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.sync = sync
        self.by_number: dict[int, Segment] = {}
        self.open: Segment | None = None  # the segment that is written to
        self.in_memory: list[Segment] = []  # sealed segments with a buffer, oldest first
        self.unsynced: dict[int, Segment] = {}
        # Segments that wait for the end of the job or for their cover.
        self.dead: list[Segment] = []
        # Segments that wait until the name of the merged segment lasts.
        self.replaced: list[Segment] = []
        self.next_number = 1
        self.index_bytes = 0  # bytes of the indexes that were made and wait for a sync
        self.directory_changed = False
        self.reclaimer = Reclaimer(files, directory, segment_bytes, spare_segments, sync)
        self.windows = Windows(files)
        self.settled = Settled(files, directory, self.look_at)
        self.handles = Handles(files, self.is_waited_for)
        self.candidates = Candidates(segment_bytes)
        self.producers = Producers(files, directory, sync)
        self.returns = Returns()
        self.returned = self.returns.times
        self.counters = Counters()
        self.ages = Ages()

    # -- which there are ---------------------------------------------------------------------------

    def enlist(self, segment: Segment) -> None:
        self.by_number[segment.number] = segment
        self.candidates.append(segment)

    def take_number(self) -> int:
        number = self.next_number
        self.next_number += 1
        return number

    def distinct(self) -> list[Segment]:
        """Return each segment once, although a merged segment has several numbers."""
        return list(dict.fromkeys(self.by_number.values()))

    def successor(self, segment: Segment) -> Segment | None:
        """Return the segment that has the messages of `segment` now; None if nobody needs any."""
        for number in segment.numbers or [segment.number]:
            if (found := self.by_number.get(number)) is not None:
                return found
        return None

    def has_unwritten_acks(self) -> bool:
        """Return whether a sync of messages must come before the acks until now can last.

        There are messages that were settled before they were written, or segments of which nothing
        is needed whose files a sync of messages still uses.
        """
        if self.dead:
            return True
        unwritten = [*self.in_memory, *([self.open] if self.open else [])]
        return any(one.settled and not one.flushed for one in unwritten)

    def on_disk(self, entries: array[int]) -> array[int]:
        """Return the entries as the next recovery will number them."""
        if all(segment.moves is None for segment in self.by_number.values()):
            return entries
        placed: array[int] = array("Q")
        for number, start, stop in segment_runs(entries):
            moves = self.by_number[number].moves
            placed += entries[start:stop] if moves is None else moves.find(entries, start, stop)
        return placed

    def look_at(self, segment: Segment) -> None:
        if segment.sealed and not segment.merging:
            self.candidates.look_at(segment)

    def is_waited_for(self, segment: Segment) -> bool:
        return segment.number in self.unsynced or self.in_job(segment)

    def in_job(self, segment: Segment) -> bool:
        return self.state.job is not None and any(
            segment is held for held, _ in self.state.job.noted.segments
        )

    def growing(self) -> dict[str, None]:
        """Return the names of the files of segments that are written to again later.

        The other files of segments stay as they are, under the names that a snapshot gives them,
        too. The caller has flushed all, and no job is under way.
        """
        self.reclaimer.linked_below = self.next_number
        growing = [*self.in_memory, *([self.open] if self.open is not None else [])]
        return dict.fromkeys(segment.path.rpartition("/")[2] for segment in growing)

    def note_time(self, now: int) -> None:
        """Note that the messages that are there came until `now`, in ms since the epoch."""
        segment = self.open
        if segment is not None:
            self.ages.note(segment.number << 32 | segment.used << 4, now)
        else:
            self.ages.note(self.next_number << 32, now)

    # -- away --------------------------------------------------------------------------------------

    def retire(self, segment: Segment) -> None:
        """Take away a segment that nobody needs; a sync may still use its file.

        A segment that awaits its cover stays with its acks, since a recovery would find its
        messages. When the segment is covered, this is called again.
        """
        if segment in self.in_memory:
            self.in_memory.remove(segment)
        if segment.in_sequence:
            self.reclaimer.take_back_buffer(segment)
        if segment.awaits_cover:
            self.unsynced.pop(segment.number, None)
            return
        for number in segment.numbers or [segment.number]:
            del self.by_number[number]
        self.candidates.remove(segment)
        self.forget_state(segment)
        if self.state.failure or self.in_job(segment) or segment.in_sequence:
            self.dead.append(segment)
        else:
            self.dispose(segment)

    def dispose(self, segment: Segment) -> None:
        """Let the file go. Its new name is made to last together with the acks."""
        if segment.flushed:
            self.settled.names_changed = True
        self.state.quietly(self._dispose, segment)

    def _dispose(self, segment: Segment) -> None:
        """Dispose of the sources of a merged segment first: alone, they would come back."""
        if segment.first:
            under_sync = self.state.job.noted.replaced if self.state.job is not None else []
            for waiting in (under_sync, self.replaced):
                for source in [each for each in waiting if segment.replaces(each)]:
                    waiting.remove(source)
                    self.reclaimer.dispose_merged(source)
        self.reclaimer.dispose(segment)

    def take_dead(self) -> list[Segment]:
        """Take from `dead` the segments whose files may go.

        No job may use the segments. A segment with records IN_SEQUENCE that was never written stays
        until the file of producers covers it.
        """
        dead = [segment for segment in self.dead if not segment.in_sequence]
        self.dead = [segment for segment in self.dead if segment.in_sequence]
        return dead

    def forget_state(self, segment: Segment) -> None:
        """Forget what is kept for a segment that is gone."""
        self.reclaimer.manifest.forget(segment.number)
        self.unsynced.pop(segment.number, None)
        self.settled.drop(segment)
        self.handles.drop(segment)
        self.windows.forget(segment.number)
        self.forget_index(segment)

    def forget_index(self, segment: Segment) -> None:
        self.index_bytes -= len(segment.index or b"")
        segment.index = None

    def distrust(self) -> None:
        """Drop all indexes, because other records may be damaged, too.

        Without an index a recovery reads every record of a segment.
        """
        for segment in self.distinct():
            self.forget_index(segment)
            if segment.has_index:
                self.state.quietly(self.reclaimer.drop_index, segment)

    def dispose_replaced(self) -> None:
        replaced, self.replaced = self.replaced, []
        for segment in replaced:
            self.reclaimer.dispose_merged(segment)

    def release(self) -> None:
        for segment in [*self.distinct(), *self.dead, *self.replaced]:
            if segment.handle is not None:
                self.files.close(segment.handle)
                segment.handle = None
            segment.take_buffer()
        self.by_number.clear()
        self.candidates.clear()
        self.replaced.clear()
        self.in_memory.clear()
        self.open = None
        self.settled.release()
        self.windows.release()
        self.reclaimer.release()

    # -- numbers -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        segments = self.distinct()
        used = sum(segment.used - HEADER_BYTES for segment in segments)
        live_bytes = sum(segment.live_bytes() for segment in segments)
        on_disk = sum(segment.capacity for segment in segments if segment.flushed)
        return {
            "segments": len(segments),
            "live_messages": sum(segment.live for segment in segments),
            "live_bytes": live_bytes,
            "dead_bytes": used - live_bytes,
            "disk_bytes": on_disk
            + self.reclaimer.disk_bytes()
            + sum(one.capacity for one in self.replaced),
            "buffered_bytes": sum(
                segment.used - segment.flushed for segment in segments if segment.buffer is not None
            ),
            "unsynced_segments": len(self.unsynced),
            "spare_segments": len(self.reclaimer.spares),
            "appended_messages": self.counters.appended_messages,
            "appended_bytes": self.counters.appended_bytes,
            "written_bytes": self.counters.written_bytes,
            "merged_segments": self.counters.merged_segments,
            "merge_bytes": self.counters.merge_bytes,
            "syncs": self.counters.syncs,
            "producers": len(self.producers.table),
            "damaged": sum(one.what in LOSSES for one in self.counters.damage),
            "torn": sum(one.what == "torn" for one in self.counters.damage),
        }
