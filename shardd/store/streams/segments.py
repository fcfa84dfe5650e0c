"""Keep the segments of a stream: create files, write chunks, seal segments, delete the oldest."""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Protocol

from shardmq.shardd.store.damage import LOSSES, Damage
from shardmq.shardd.store.files import is_full, is_missing
from shardmq.shardd.store.format import chunk
from shardmq.shardd.store.format.producers_file import Cover
from shardmq.shardd.store.state import StoreState
from shardmq.shardd.store.streams import reading as stream_reading
from shardmq.shardd.store.streams import recovery as stream_recovery
from shardmq.shardd.store.streams.positions import Rewrite
from shardmq.shardd.store.streams.reading import StreamCache
from shardmq.shardd.store.streams.segment import (
    HEADER_BYTES,
    StreamSegment,
    encode_header,
    file_name,
    parse_name,
)

# A file is preallocated in steps that grow with it, so that a stream of few messages does not take
# the disk space of a whole segment.
ALLOCATE_BYTES_MIN = 64 << 10
ALLOCATE_BYTES_MAX = 16 << 20
# The name of a file that waits to be deleted begins with this.
GONE_PREFIX = "gone."


@dataclass(slots=True)
class UnderSync:
    """The part of a stream that a sync makes last. The offsets are those when the sync began."""

    segments: list[tuple[StreamSegment, int]]  # and the position up to which each was written
    next_offset: int
    last_chunk: int
    cover: Cover | None
    rewrite: Rewrite | None  # of the positions


class Remover(Protocol):
    """Deletes files in the background, in order, because a large file takes long to delete."""

    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...


@dataclass(slots=True)
class Piece:
    """The bytes [start, stop) of a batch that go to one segment: the chunks [row, row_stop)."""

    start: int
    stop: int
    row: int
    row_stop: int
    fresh: StreamSegment | None = None  # the segment made for them


class StreamSegments:
    """The segments of one stream, oldest first. Without a `remover` files are deleted at once."""

    def __init__(
        self, state: StoreState[UnderSync], cache: StreamCache, sync: bool, remover: Remover | None
    ) -> None:
        self.state = state
        self.files = state.files
        self.directory = state.directory
        self.cache = cache
        self.sync = sync
        self.all: list[StreamSegment] = []
        self.firsts: list[int] = []  # the first offset of each segment
        self.open: StreamSegment | None = None  # the last segment, unless it is sealed
        self.unsynced: list[StreamSegment] = []
        self.directory_changed = False
        self.written_bytes = 0
        # The first offset of the last chunk in the last segment that this process has sealed.
        self._sealed_chunk = 0
        self._sealed_bytes = 0
        self._remover = remover

    @property
    def disk_bytes(self) -> int:
        """The bytes of all segments."""
        return self._sealed_bytes + (self.open.used if self.open is not None else 0)

    def last_chunk(self) -> int:
        """Return the first offset of the last chunk that this process has appended."""
        return self.open.last_chunk if self.open is not None else self._sealed_chunk

    def growing(self) -> dict[str, int]:
        """Return the name of the file that is written to again, with its size, for a snapshot.

        The other segments stay as they are until they are deleted.
        """
        if self.open is None:
            return {}
        return {self.open.path.rpartition("/")[2]: self.open.flushed}

    def in_job(self, segment: StreamSegment) -> bool:
        """Return whether the running sync includes the segment."""
        job = self.state.job
        return job is not None and any(segment is held for held, _ in job.noted.segments)

    def recovered(self, found: list[StreamSegment]) -> StreamSegment | None:
        """Take over recovered segments; return the last one with messages, if there is one."""
        self.all = found
        self.firsts = [segment.first for segment in found]
        self._sealed_bytes = sum(segment.used for segment in found)
        if found and found[-1].used == HEADER_BYTES:
            self.open = found[-1]
            self.open.sealed = False
            self._sealed_bytes -= self.open.used
        for segment in found:
            if segment.entries is not None and segment.sealed:
                self.cache.keep_index(segment)
        filled = next((one for one in reversed(found) if one.used > HEADER_BYTES), None)
        if filled is not None:
            self.cache.index(filled)
        return filled

    # -- append ------------------------------------------------------------------------------------

    def cut(self, size: int, rows: array[int], segment_bytes: int) -> list[Piece]:
        """Divide a batch of chunks of `size` bytes among segments of `segment_bytes`.

        A chunk that is too big for any segment gets a segment of its own.
        """
        starts = [*rows[::3], size]
        used = self.open.used if self.open is not None else segment_bytes + 1
        pieces: list[Piece] = []
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            fits = used + stop - start <= segment_bytes or used == HEADER_BYTES
            if pieces and fits:
                pieces[-1].stop, pieces[-1].row_stop = stop, row + 1
            elif fits:
                pieces.append(Piece(start, stop, row, row + 1))
            else:
                fresh = StreamSegment(rows[3 * row + 1], 0, "")
                pieces.append(Piece(start, stop, row, row + 1, fresh))
                used = HEADER_BYTES
            used += stop - start
        return pieces

    def make_room(self, pieces: list[Piece], segment_bytes: int) -> None:
        """Create files and preallocate space for the pieces, before any of them is placed.

        All that can fail on a full disk fails here, and leaves no new file behind.
        """
        made: list[StreamSegment] = []
        try:
            self.state.make_directory()
            for piece in pieces:
                size = piece.stop - piece.start
                if piece.fresh is None:
                    assert self.open is not None
                    self._allocate(self.open, self.open.used + size, segment_bytes)
                else:
                    made.append(piece.fresh)
                    self._create(piece.fresh, HEADER_BYTES + size, segment_bytes)
        except Exception as error:
            self._unmake(made)
            raise self.state.named(error) from error

    def _create(self, segment: StreamSegment, size: int, segment_bytes: int) -> None:
        segment.salt = self.files.salt()
        segment.path = f"{self.directory}/{file_name('log', segment.first)}"
        segment.entries = array("Q")
        handle = self.files.open(segment.path, create=True)
        self.cache.adopt(segment, handle)
        self.cache.pin(segment)
        self.directory_changed = True
        self._allocate(segment, size, segment_bytes)

    def _unmake(self, made: list[StreamSegment]) -> None:
        """Remove the files of segments that were never begun, the last one first.

        A file that stays keeps those before it: a recovery takes a gap in front of it for loss.
        """
        for segment in reversed(made):
            self.state.quietly(self.cache.forget, segment)
            try:
                self._remove(segment.path)
            except OSError as error:
                self.state.fail(error)
                return

    def _allocate(self, segment: StreamSegment, size: int, segment_bytes: int) -> None:
        if size > segment.allocated:
            step = min(max(segment.allocated, ALLOCATE_BYTES_MIN), ALLOCATE_BYTES_MAX)
            wanted = max(size, min(segment.allocated + step, segment_bytes))
            self.files.allocate(self.cache.handle(segment), wanted)
            segment.allocated = wanted

    def place(self, piece: Piece, chunks: bytearray, rows: array[int], *, alone: bool) -> None:
        """Append the chunks of a piece to its segment, in memory.

        With `alone` the piece is the whole batch, and `chunks` is kept without a copy.
        """
        if piece.fresh is not None:
            self._begin(piece.fresh)
        segment = self.open
        assert segment is not None
        chunk.seal(chunks, piece.start, piece.stop, segment.salt, segment.synced)
        segment.pending.append(chunks if alone else chunks[piece.start : piece.stop])
        for at in range(3 * piece.row, 3 * piece.row_stop, 3):
            segment.note(rows[at + 1], rows[at + 2], segment.used + rows[at] - piece.start)
        segment.used += piece.stop - piece.start

    def _begin(self, segment: StreamSegment) -> None:
        """Seal the open segment and make this one the open segment."""
        before = self.all[-1] if self.all else None
        if self.open is not None:
            self.open.end = segment.first
            self.write_out(self.open)
            self.seal()
        if before is not None:
            segment.newest_before = segment.newest = max(before.newest, segment.newest_before)
            segment.previous = before.timestamp
        segment.end = segment.last_chunk = segment.first
        segment.pending.append(bytearray(encode_header(segment)))
        self.all.append(segment)
        self.firsts.append(segment.first)
        self.open = segment

    def begin_empty(self, next_offset: int, segment_bytes: int, newest_before: int = 0) -> bool:
        """Begin an empty segment, whose file name keeps the next offset.

        `newest_before`: there were messages with timestamps up to this. Return False if the disk
        has no room for the segment.
        """
        segment = StreamSegment(next_offset, 0, "", newest_before, newest=newest_before)
        try:
            self.state.make_directory()
            self._create(segment, HEADER_BYTES, segment_bytes)
        except OSError as error:
            if not is_full(error):
                raise
            self._unmake([segment])
            return False
        self._begin(segment)
        segment.used = HEADER_BYTES
        self.write_out(segment)
        return True

    def write_out(self, segment: StreamSegment) -> None:
        """Hand the pending chunks of a segment to the operating system."""
        if not segment.pending:
            return
        data = segment.pending[0] if len(segment.pending) == 1 else b"".join(segment.pending)
        self.files.write(self.cache.handle(segment), data, segment.flushed)
        segment.pending.clear()
        segment.flushed = segment.used
        self.written_bytes += len(data)
        if segment not in self.unsynced:
            self.cache.pin(segment)
            self.unsynced.append(segment)

    def seal(self) -> None:
        """End the open segment, if there is one, so that it can be deleted later."""
        segment, self.open = self.open, None
        if segment is None:
            return
        self._sealed_chunk = segment.last_chunk
        segment.sealed = True
        self._sealed_bytes += segment.used
        if segment.allocated > segment.used:
            self.files.truncate(self.cache.handle(segment), segment.used)
        segment.allocated = segment.used
        if segment not in self.unsynced and not self.in_job(segment):
            self.lasts(segment, segment.flushed)

    # -- stable storage ----------------------------------------------------------------------------

    def lasts(self, segment: StreamSegment, flushed: int) -> None:
        """Note that the segment is on stable storage up to the position `flushed`."""
        segment.synced = flushed
        if segment in self.unsynced:
            return
        self.cache.unpin(segment)
        if segment.sealed and flushed == segment.used:
            self.state.quietly(stream_recovery.write_index, self.files, segment)
            self.cache.keep_index(segment)

    def sync_now(self) -> None:
        """Sync all written bytes on this thread; with sync=False count them as synced."""
        if self.sync:
            for segment in self.unsynced:
                self.files.sync(self.cache.handle(segment))
            if self.directory_changed:
                self.files.sync_directory(self.directory)
        self.directory_changed = False
        unsynced, self.unsynced = self.unsynced, []
        for segment in unsynced:
            self.lasts(segment, segment.flushed)

    # -- delete ------------------------------------------------------------------------------------

    def let_go(self, segment: StreamSegment) -> bool:
        """Delete the oldest segment; return False if it waits for a sync, or on an error."""
        if self.in_job(segment) or segment in self.unsynced:
            return False
        at = self.all.index(segment)
        del self.all[at], self.firsts[at]
        self._sealed_bytes -= segment.used
        self.cache.forget(segment)
        self.state.quietly(self._remove, segment.path)
        index = f"{self.directory}/{file_name('index', segment.first)}"
        self.state.quietly(self._remove, index)
        self.directory_changed = True
        return not self.state.failure

    def _remove(self, path: str) -> None:
        """Delete a file, if it is there. The remover deletes a log file later, under a new name."""
        directory, _, name = path.rpartition("/")
        gone = f"{directory}/{GONE_PREFIX}{name}"
        remover = self._remover if name.startswith("log.") else None
        try:
            if remover is None:
                self.files.remove(path)
            else:
                self.files.rename(path, gone)
        except OSError as error:
            if not is_missing(error):
                raise
        else:
            if remover is not None:
                remover.remove(gone)

    def remove_left_behind(self) -> None:
        """Delete the renamed files that a former process has not come to delete."""
        for name in self.files.list(self.directory):
            if name.startswith(GONE_PREFIX):
                path = f"{self.directory}/{name}"
                if self._remover is None:
                    self.files.remove(path)
                else:
                    self._remover.remove(path)

    def delete_all(self, other_names: frozenset[str]) -> None:
        """Delete the files of the stream, and the directory if nothing else is in it.

        `other_names` are the files of the stream that do not belong to a segment.
        """
        self.remove_left_behind()
        for name in self.files.list(self.directory):
            path = f"{self.directory}/{name}"
            if self._remover is not None and name.startswith("log."):
                self._remove(path)
            elif parse_name(name) is not None or name in other_names:
                self.files.remove(path)
        if not self.files.list(self.directory):
            self.files.remove_directory(self.directory)
        elif self._remover is not None:
            self._remover.remove_directory(self.directory)

    def release(self) -> None:
        """Forget all segments; their files stay on disk."""
        for segment in self.all:
            self.cache.forget(segment)
        self.all.clear()
        self.firsts.clear()
        self.unsynced.clear()
        self.open = None

    # -- damage ------------------------------------------------------------------------------------

    def with_offsets(self, damage: Damage, next_offset: int) -> Damage:
        """Return damage that recovery found, together with the range of offsets that it costs."""
        parsed = parse_name(damage.file)
        if damage.what not in LOSSES or damage.offsets is not None or parsed is None:
            return damage
        first, at = parsed[1], bisect_left(self.firsts, parsed[1])
        if damage.what == "corrupt" and at < len(self.firsts) and self.firsts[at] == first:
            lost = stream_reading.lost_offsets(self.cache, self.all[at], damage.start, damage.stop)
        else:
            lost = first, self.firsts[at] if at < len(self.firsts) else next_offset
        return replace(damage, offsets=lost)
