"""Merge the survivors of neighbouring segments in which little is left.

This file decides which segments are merged, what is copied, and the order of the steps. With this
order every message is found exactly once after a power cut. The owner of the store decides when to
merge.

Every record is checked before it is copied. A damaged record of which something is left ends the
process, as it does when a queue reads the record. Damage in records that nobody needs goes with the
file.

The entries that queues hold stay as they are: `Moves` finds where their messages lie now. The next
recovery gives the queues new entries.

The merged file is written and synced under the name of a spare, in any thread. The owner then gives
the file the name of the last segment that it replaces. The other segments are removed only when
that name is on stable storage. The header of the merged file says from which number on it replaces
segments, so that segments left by a power cut are not read a second time. Only neighbours are
merged, because the order of entries is the publish order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.files import Files, remove_files
from shardmq.shardd.store.format.manifest import ManifestSync
from shardmq.shardd.store.format.record import Survivors, moved_again, moved_pairs, segment_runs
from shardmq.shardd.store.format.segment_file import END_BYTES, HEADER_BYTES, encode_header
from shardmq.shardd.store.segments.recovery import Reader
from shardmq.shardd.store.segments.segment import Moves, Segment

# One job reads no more than this many bytes, unless two segments are larger.
READ_BYTES_MAX = 16 << 20
SEGMENTS_MAX = 64
# Quarters of a usual segment: the most that is left in a segment worth merging, and the most that a
# merged segment may hold. The gap between the two keeps messages from being copied without end.
LEFT_QUARTERS_MAX = 1
MERGED_QUARTERS_MAX = 3
# A segment is rewritten alone when its file is this many times larger than what is left in it. A
# segment is read to measure what is left when half of its references are settled.
SHRINK_TIMES_MIN = 4
# Bytes of the acks file of one segment. Beyond this the segment is rewritten without the settled
# messages, if that makes it smaller.
ACKS_BYTES_MAX = 16 << 20
# Removing this many bytes costs a disk about as much as reading or writing one byte.
REMOVED_PER_MOVED = 16
# Segments examined in one search.
LOOKS_MAX = 64


class Candidates:
    """All segments in publish order, and which of them may have little left."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._last: Segment | None = None
        self._sparse: dict[Segment, None] = {}

    def append(self, segment: Segment) -> None:
        segment.before, self._last = self._last, segment
        if segment.before is not None:
            segment.before.after = segment

    def remove(self, segment: Segment) -> None:
        before, after = segment.before, segment.after
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        else:
            self._last = before
        segment.before = segment.after = None
        self._sparse.pop(segment, None)

    def replace(self, run: list[Segment], new: Segment) -> None:
        """Put `new` in the place of `run`, whose segments are all neighbours."""
        before, after = run[0].before, run[-1].after
        for segment in run:
            segment.before = segment.after = None
            self._sparse.pop(segment, None)
        new.before, new.after = before, after
        if before is not None:
            before.after = new
        if after is not None:
            after.before = new
        else:
            self._last = new

    def clear(self) -> None:
        segment = self._last
        while segment is not None:
            before = segment.before
            segment.before = segment.after = None
            segment = before
        self._last = None
        self._sparse.clear()

    def look_at(self, segment: Segment) -> None:
        """Note a sealed segment that has less left, or a longer acks file, than before."""
        if self._has_little(segment) or _is_worth_measuring(segment) or _has_many_acks(segment):
            self._sparse[segment] = None

    def choose(self, at_rest: Callable[[Segment], bool]) -> list[Segment]:
        """Return neighbours worth merging, or one segment worth rewriting, or an empty list.

        `at_rest` tells whether a segment is on stable storage and nothing else uses its file.
        """
        for _ in range(min(LOOKS_MAX, len(self._sparse))):
            segment = next(iter(self._sparse))
            del self._sparse[segment]
            waits = not at_rest(segment)
            if not waits:
                run = self._around(segment, at_rest)
                if len(run) > 1 or self._is_worth_it_alone(segment):
                    return run
                # A neighbour that is not at rest yet may be merged with this segment later.
                beside = (run[0].before, run[-1].after)
                waits = any(one and self._has_little(one) and not at_rest(one) for one in beside)
            if waits:
                self._sparse[segment] = None
        return []

    def _around(self, segment: Segment, at_rest: Callable[[Segment], bool]) -> list[Segment]:
        run = [segment]
        read, live = _read_bytes(segment), segment.live_bytes()

        def fits(more: Segment | None) -> bool:
            nonlocal read, live
            if more is None or not self._has_little(more) or not at_rest(more):
                return False
            alive = more.live_bytes()
            if len(run) > 1 and (
                read + _read_bytes(more) > READ_BYTES_MAX or len(run) >= SEGMENTS_MAX
            ):
                return False
            if (live + alive) * 4 > self._segment_bytes * MERGED_QUARTERS_MAX:
                return False
            read += _read_bytes(more)
            live += alive
            return True

        if not self._has_little(segment):
            return run
        while (more := run[0].before) is not None and fits(more):
            run.insert(0, more)
        while (more := run[-1].after) is not None and fits(more):
            run.append(more)
        return run

    def _has_little(self, segment: Segment) -> bool:
        little = segment.live_bytes() * 4 <= self._segment_bytes * LEFT_QUARTERS_MAX
        return little and not segment.stays and segment.capacity <= self._segment_bytes

    def _is_worth_it_alone(self, segment: Segment) -> bool:
        if segment.stays:
            return False
        little = segment.live_bytes() * SHRINK_TIMES_MIN + HEADER_BYTES <= segment.capacity
        return little or _is_worth_measuring(segment) or _has_many_acks(segment)


def bytes_max_alone(segment: Segment) -> int:
    """Return the largest size for which rewriting one segment alone pays."""
    return segment.capacity if _has_many_acks(segment) else segment.capacity // SHRINK_TIMES_MIN


def _read_bytes(segment: Segment) -> int:
    """Return a guess of the bytes to read: with an index, only records in use are read."""
    return segment.used // 8 if segment.has_index else segment.used


def _has_many_acks(segment: Segment) -> bool:
    return segment.acks_end > ACKS_BYTES_MAX and _is_news(segment)


def _is_worth_measuring(segment: Segment) -> bool:
    """Return whether the segment must be read to know how many bytes are left in it.

    The count of messages does not tell, since messages may be large or small.
    """
    return segment.live * 2 <= segment.references and _is_news(segment)


def _is_news(segment: Segment) -> bool:
    return not segment.measured_live or segment.live * 2 <= segment.measured_live


@dataclass(slots=True)
class Source:
    """A segment to be merged, as it was when the job was made.

    The segment may lose messages while the job runs, and gains none.
    """

    segment: Segment
    pairs: bytes  # settled pairs that are not in the acks file
    # The lengths of the segment's `settled` and `forgotten` when the job was made.
    settled_bytes: int
    forgotten_bytes: int
    live: int
    queue_ids: array[int] | None
    # The job fills this in.
    moves: Moves = field(default_factory=Moves)


def source_of(segment: Segment, known_ids: array[int] | None) -> Source:
    segment.merging = True
    return Source(
        segment,
        bytes(segment.settled) + bytes(segment.forgotten),
        len(segment.settled),
        len(segment.forgotten),
        segment.live,
        known_ids if segment.recovered else None,
    )


@dataclass(slots=True)
class Merged:
    """The new segment, in a file of its own, on stable storage."""

    handle: int
    size: int
    salt: int
    records: int
    messages: int
    references: int
    # From entries as queues know them to entries in the new segment. For a source that was itself
    # merged, queues know the entries from before that merge.
    moves: Moves
    numbers: list[int]  # segment numbers in the entries of queues of which something is left


@dataclass(slots=True, eq=False)
class ReclaimJob:
    """Removes files and merges segments.

    `run` may be called from any thread, once. Then the owner calls `SegmentStore.finish_reclaim`.
    """

    files: Files
    directory: str
    doomed: list[tuple[str, int]]  # path and size
    sources: list[Source]
    manifest: ManifestSync | None = None  # syncs the manifest that no longer lists the doomed files
    path: str = ""  # the path of the new file
    salt: int = 0
    bytes_max: int = 0
    sync: bool = True
    merged: Merged | None = None
    moved_bytes: int = 0  # bytes read and written
    left: list[str] = field(default_factory=list)  # segments that are not merged any more, and why
    done: bool = False
    error: OSError | None = None
    corrupt: Corrupt | None = None

    def run(self) -> None:
        try:
            if self.manifest is not None:
                self.manifest.run()
            remove_files(self.files, [path for path, _ in self.doomed])
            if self.sources:
                self._merge()
        except OSError as error:
            self.error = error
        except Corrupt as error:
            self.corrupt = error
        except Exception as error:
            # The same error would be met again, whatever it is.
            for source in self.sources:
                self._leave(source.segment, repr(error))
            raise
        finally:
            self.done = True

    def _leave(self, segment: Segment, why: str) -> None:
        segment.stays = True
        self.left.append(f"{segment.path} stays as it is: {why}")

    @property
    def cost_bytes(self) -> int:
        """The work of the disk for this job, in bytes read or written."""
        return self.moved_bytes + sum(size for _, size in self.doomed) // REMOVED_PER_MOVED

    def _merge(self) -> None:
        last = self.sources[-1].segment
        survivors = Survivors(last.number, self.salt, HEADER_BYTES)
        reader = Reader(self.files, self.directory, False)
        for source in self.sources:
            if not self._collect(reader, source, survivors):
                return
        reader.release()
        if survivors.messages:
            self._write(survivors)

    def _collect(self, reader: Reader, source: Source, survivors: Survivors) -> bool:
        """Copy the survivors of one source; return False to give the merge up.

        The merge is given up when the disk does not return the bytes, when the messages found are
        not as many as expected, or when more is left than `bytes_max` allows. The segment remembers
        why. Raises Corrupt.
        """
        segment = source.segment
        try:
            pairs = reader.read_acks(segment.number, segment.salt) + source.pairs
            unwanted = (pairs, segment.dead_until, source.queue_ids)
            abstracts, sound = self._load_some(reader, segment, survivors, unwanted), True
            if abstracts is None:
                abstracts, sound = self._load_whole(reader, segment)
        except OSError as error:
            # The error is no reason to stop the process while nobody asks for these messages.
            self._leave(segment, str(error))
            return False
        size, references = survivors.size, survivors.references
        source.moves = Moves(*survivors.add(reader.buffer, abstracts, segment.number, *unwanted))
        if not self._is_all(source, survivors.references - references, sound):
            return False
        if survivors.size + END_BYTES > self.bytes_max:
            segment.measured_bytes = survivors.size - size
            segment.measured_live = source.live
            return False
        return True

    def _is_all(self, source: Source, found: int, sound: bool) -> bool:
        """Return whether every message that a queue needs was found.

        `found` counts the references left in the good records. Raises Corrupt when messages are
        missing and the segment is damaged.
        """
        segment = source.segment
        if found < source.live and not sound:
            raise Corrupt(
                f"{segment.path} is damaged: "
                f"{source.live - found} of {source.live} messages not found in it"
            )
        if found < source.live or (found > source.live and not sound):
            # Messages that queues will ask for are missing, or it cannot be told that none is.
            self._leave(segment, f"{found} messages found in it, {source.live} expected")
            return False
        return True

    def _load_some(
        self,
        reader: Reader,
        segment: Segment,
        survivors: Survivors,
        unwanted: tuple[bytes, int, array[int] | None],
    ) -> bytes | None:
        """Read the records of which something is left; return their abstracts.

        Returns None when no index says where the records are, or when the segment is not as the
        index says.
        """
        index = reader.read_index(segment) if segment.has_index else None
        if index is None or index[0] != segment.used:
            return None
        self.moved_bytes += len(index[1])
        handle = self.files.open(segment.path, read_only=True)
        abstracts = []
        try:
            for start, stop in survivors.ranges(index[1], segment.used, *unwanted):
                some, sound = reader.read_records(handle, start, stop, segment.salt)
                if not sound:
                    return None
                abstracts.append(some)
                self.moved_bytes += stop - start
        finally:
            self.files.close(handle)
        return b"".join(abstracts)

    def _load_whole(self, reader: Reader, segment: Segment) -> tuple[bytes, bool]:
        """Read all records; return the abstracts of the good ones, and whether all were good.

        The header is not read, because its fields are known.
        """
        self.moved_bytes += segment.used
        handle = self.files.open(segment.path, read_only=True)
        try:
            return reader.read_records(handle, HEADER_BYTES, segment.used, segment.salt)
        finally:
            self.files.close(handle)

    def _write(self, survivors: Survivors) -> None:
        first, last = self.sources[0].segment, self.sources[-1].segment
        data = survivors.take()
        data += bytes(END_BYTES)
        data[:HEADER_BYTES] = encode_header(
            last.number, self.salt, len(data), first.first or first.number
        )
        moves = self._all_moves()
        handle = self.files.open(self.path, create=True)
        try:
            self.files.allocate(handle, len(data))
            self.files.write(handle, data, 0)
            if self.sync:
                self.files.sync(handle)
        except Exception:
            self.files.close(handle)
            self.files.remove(self.path)
            raise
        self.moved_bytes += len(data)
        counts = (survivors.records, survivors.messages, survivors.references)
        numbers = [number for number, _, _ in segment_runs(moves.known)]
        self.merged = Merged(handle, len(data), self.salt, *counts, moves, numbers)

    def _all_moves(self) -> Moves:
        moves = Moves()
        for source in self.sources:
            here, before = source.moves, source.segment.moves
            if before is None:
                moves.add(here.known, here.placed)
            else:
                moves.add(*moved_again(before.known, before.placed, here.known, here.placed))
        return moves

    def new_segment(self, merged: Merged) -> Segment:
        """Return the segment that replaces all sources.

        The caller must still tell it what was settled while the job ran: see `settled_since`.
        """
        first, last = self.sources[0].segment, self.sources[-1].segment
        return Segment(
            last.number,
            merged.salt,
            merged.size,
            last.path,
            merged.handle,
            used=merged.size - END_BYTES,
            flushed=merged.size - END_BYTES,
            records=merged.records,
            messages=merged.messages,
            references=merged.references,
            live=sum(source.segment.live for source in self.sources),
            sealed=True,
            first=first.first or first.number,
            moves=merged.moves,
            numbers=merged.numbers,
        )

    def settled_since(self) -> tuple[bytes, bytes]:
        """Return the pairs settled since the job was made, as they are in the new segment.

        The first are for the acks file, the second are those that only merging needs.
        """
        settled = forgotten = b""
        for source in self.sources:
            segment, moves = source.segment, source.moves
            later = bytes(segment.settled[source.settled_bytes :])
            settled += moved_pairs(moves.known, moves.placed, segment.number, later)
            later = bytes(segment.forgotten[source.forgotten_bytes :])
            forgotten += moved_pairs(moves.known, moves.placed, segment.number, later)
        return settled, forgotten
