"""Survivors of neighbouring segments in which little is left, together in one: which segments, what is copied, and in
which order of steps a power cut finds every message exactly once. When is the owner's to say.

Every record that is copied was found good first. One that is damaged, and of which something is left, ends the process
as when a queue reads it; damage of which nothing is needed goes with its file.

Entries that queues hold stay as they are: `Moves` finds where their messages lie now. The next recovery gives new ones.

The merged file is written and synced under a spare's name, in any thread. The owner gives it the name of the last
segment it replaces; only when that lasts the others go. Its header says from which number on it replaces, so that what
a power cut left of them is not taken for messages twice. Neighbours only: publish order is the order of entries.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.files import Files, remove_files
from shardmq.shardd.store.manifest import ManifestSync
from shardmq.shardd.store.moves import Moves
from shardmq.shardd.store.record import segment_runs
from shardmq.shardd.store.recovery import Reader
from shardmq.shardd.store.segment import END_BYTES, HEADER_BYTES, Segment, encode_header
from shardmq.shardd.store.survivors import Survivors, moved_again, moved_pairs

# One job reads no more than this, or two segments.
READ_BYTES_MAX = 16 << 20
SEGMENTS_MAX = 64
# Quarters of a usual segment: what is left in one worth merging, and in what comes of it. The gap is why no message is
# copied without end.
LEFT_QUARTERS_MAX = 1
MERGED_QUARTERS_MAX = 3
# One alone is written anew when its file is so many times what is left in it; read to see, when half is gone by count.
SHRINK_TIMES_MIN = 4
# Settled positions of one segment; beyond this it is written anew without them, if that is shorter.
ACKS_BYTES_MAX = 16 << 20
# Removing so many bytes costs a disk about as much as to read or write one.
REMOVED_PER_MOVED = 16
# Segments looked at in one search.
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
        """`new` takes the place of `run`, neighbours all."""
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
        """It is sealed, and has less left, or a longer list of what is settled, than before."""
        if self._has_little(segment) or _is_worth_measuring(segment) or _has_many_acks(segment):
            self._sparse[segment] = None

    def choose(self, at_rest: Callable[[Segment], bool]) -> list[Segment]:
        """A run of neighbours worth merging, or one worth writing anew; or none. `at_rest`: it is on stable storage
        and nothing else has its file in hand."""
        for _ in range(min(LOOKS_MAX, len(self._sparse))):
            segment = next(iter(self._sparse))
            del self._sparse[segment]
            waits = not at_rest(segment)
            if not waits:
                run = self._around(segment, at_rest)
                if len(run) > 1 or self._is_worth_it_alone(segment):
                    return run
                # Its neighbour may still be joined with it, once that one is written.
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
    """What may come of it for the writing to be worth while."""
    return segment.capacity if _has_many_acks(segment) else segment.capacity // SHRINK_TIMES_MIN


def _read_bytes(segment: Segment) -> int:
    """A guess: with an index, only records of which something is left are read."""
    return segment.used // 8 if segment.has_index else segment.used


def _has_many_acks(segment: Segment) -> bool:
    return segment.acks_end > ACKS_BYTES_MAX and _is_news(segment)


def _is_worth_measuring(segment: Segment) -> bool:
    """What is left by count may be large and small messages: to know, it must be read."""
    return segment.live * 2 <= segment.references and _is_news(segment)


def _is_news(segment: Segment) -> bool:
    return not segment.measured_live or segment.live * 2 <= segment.measured_live


@dataclass(slots=True)
class Source:
    """A segment to be merged, as it was when the job was made. It may lose messages meanwhile, and wins none."""

    segment: Segment
    pairs: bytes  # settled, as far as they are not in its acks file
    settled_bytes: int  # of them, of each kind
    forgotten_bytes: int
    live: int
    queue_ids: array[int] | None
    # What the job finds.
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
    """The new segment: in a file of its own, on stable storage."""

    handle: int
    size: int
    salt: int
    records: int
    messages: int
    references: int
    moves: Moves  # from what queues know: of a source that was itself merged, entries of before
    numbers: list[int]  # of segments, as queues know them, of which something is left


@dataclass(slots=True, eq=False)
class ReclaimJob:
    """Files to remove, and segments to merge. `run` may be called from any thread, once; then
    `SegmentStore.finish_reclaim`."""

    files: Files
    directory: str
    doomed: list[tuple[str, int]]  # path and size
    sources: list[Source]
    manifest: ManifestSync | None = None  # the doomed are no longer listed in it
    path: str = ""  # of the new file
    salt: int = 0
    bytes_max: int = 0
    sync: bool = True
    merged: Merged | None = None
    moved_bytes: int = 0  # read and written
    left: list[str] = field(default_factory=list)  # what stays as it is from now on, and why
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
            # Whatever it is, it will be so again.
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
        """What the disk had to do for it, in bytes read or written."""
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
        """Not when the disk does not give it, or it is more than was thought; the segment knows now. Raises Corrupt."""
        segment = source.segment
        try:
            pairs = reader.read_acks(segment.number, segment.salt) + source.pairs
            unwanted = (pairs, segment.dead_until, source.queue_ids)
            abstracts, sound = self._load_some(reader, segment, survivors, unwanted), True
            if abstracts is None:
                abstracts, sound = self._load_whole(reader, segment)
        except OSError as error:
            # No reason to stop for, while nobody asks for what is in it.
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
        """Whether nothing that a queue needs is missing. `found`: references left in what is good of the segment."""
        segment = source.segment
        if found < source.live and not sound:
            raise Corrupt(
                f"{segment.path} is damaged: {source.live - found} of {source.live} messages not found in it"
            )
        if found < source.live or (found > source.live and not sound):
            # Somebody would look for what is not there; or that cannot be told.
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
        """Abstracts of the records of which something is left, and only their bytes; None when no index says where they
        are, or anything is not as it says."""
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
        """Abstracts of all good records, and whether there is nothing else. The header is not asked: what it says is
        known."""
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
        """In the place of all sources; what was settled meanwhile is still to be told."""
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
        """Pairs that came after the job was made, to remember and to forget, as they are in the new segment."""
        settled = forgotten = b""
        for source in self.sources:
            segment, moves = source.segment, source.moves
            later = bytes(segment.settled[source.settled_bytes :])
            settled += moved_pairs(moves.known, moves.placed, segment.number, later)
            later = bytes(segment.forgotten[source.forgotten_bytes :])
            forgotten += moved_pairs(moves.known, moves.placed, segment.number, later)
        return settled, forgotten
