"""Keep a stream: append messages under consecutive offsets, read from any of them again and again, let the oldest go.

Blocking and for one thread, but for `StreamSync.run`. A reader is an offset and nothing else here, so any number of
them read while the log is appended to. They see what is committed: on stable storage, so that no power cut takes back
what somebody has read, and no offset ever means two messages (with sync=False: what the operating system has). After
StoreFailed nothing is written any more: only what recovery finds is true.

    first_offset <= offsets to be read < committed_offset <= next_offset
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from shardmq.shardd.store import chunk, record, stream_reading, stream_recovery
from shardmq.shardd.store.errors import Closed
from shardmq.shardd.store.files import Files, OsFiles, is_full, is_missing
from shardmq.shardd.store.positions import NAME, NEW_NAME, Positions
from shardmq.shardd.store.producers import NAME as PRODUCERS
from shardmq.shardd.store.recovery import LOSSES, Damage
from shardmq.shardd.store.stream_reading import (
    COUNT_MAX,
    OFFSET_MAX,
    Messages,
    StreamCache,
    Walk,
    chunk_newer,
)
from shardmq.shardd.store.stream_segment import (
    HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    StreamSegment,
    encode_header,
    file_name,
    parse_name,
)
from shardmq.shardd.store.sync import MessageSync, SettledSync
from shardmq.shardd.store.usable import Usable

# Room in the file is set aside in steps that grow with it: a stream of few messages must not take a whole segment.
ALLOCATE_BYTES_MIN = 64 << 10
ALLOCATE_BYTES_MAX = 16 << 20
# Appended and not handed to the operating system.
PENDING_BYTES_MAX = 1 << 20
# Places of damage that are told in full; the others are counted.
DAMAGE_MAX = 100


@dataclass(slots=True, eq=False, kw_only=True)
class StreamSync(MessageSync[StreamSegment]):
    """Makes messages of a stream last."""

    next_offset: int  # of the log when it began
    last_chunk: int


@dataclass(slots=True)
class _Piece:
    """Chunks [start, stop) of a batch, rows [row, row_stop), go to one segment."""

    start: int
    stop: int
    row: int
    row_stop: int
    fresh: StreamSegment | None = None  # the segment made for them


@dataclass(slots=True)
class _Counters:
    appended_messages: int = 0
    appended_bytes: int = 0
    written_bytes: int = 0
    syncs: int = 0
    damaged: int = 0  # places that cost messages
    torn: int = 0
    damage: list[Damage] = field(default_factory=list)


class StreamLog(Usable):
    def __init__(
        self,
        directory: str,
        *,
        files: Files | None = None,
        segment_bytes: int = 500_000_000,
        sync: bool = True,
        cache: StreamCache | None = None,
    ) -> None:
        """`cache`: shared by streams with the same `files`."""
        assert SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX
        super().__init__("stream", directory, OsFiles() if files is None else files)
        self.segment_bytes = segment_bytes
        self.sync = sync
        self._cache = StreamCache(self._files) if cache is None else cache
        self._positions = Positions(self._files, directory, sync)
        self._segments: list[StreamSegment] = []
        self._firsts: list[int] = []  # of each segment
        self._open: StreamSegment | None = None  # the last of them, when it is written to
        self._sealed_chunk = 0  # where the last chunk begins of what was sealed by this process
        self._unsynced: list[StreamSegment] = []
        self._directory_changed = False
        self._job: StreamSync | None = None
        self._disk_bytes = 0  # of sealed segments
        self._counters = _Counters()
        self.damage_heard: Callable[[Damage], None] | None = (
            None  # told of what is found from now on
        )
        self.next_offset = 0
        self.committed_offset = 0
        self._committed_chunk = 0  # where the last committed chunk begins, or began

    # -- start and stop -------------------------------------------------------------------------------

    def recover(self) -> None:
        """Once, first."""
        assert self._state == "new", "recover is called once"
        try:
            self._find_directory()
            torn = self._positions.recover()
            found = stream_recovery.Found()
            if self._has_directory:
                found = stream_recovery.recover(self._files, self.directory, sync=self.sync)
        except OSError as error:
            raise self._named(error) from error
        self._segments = found.segments
        self._firsts = [segment.first for segment in self._segments]
        self._disk_bytes = sum(segment.used for segment in self._segments)
        self.next_offset = self.committed_offset = found.next_offset
        if self._segments and self._segments[-1].used == HEADER_BYTES:
            self._open = self._segments[-1]
            self._open.sealed = False
            self._disk_bytes -= self._open.used
        for segment in self._segments:
            if segment.entries is not None and segment.sealed:
                self._cache.keep_index(segment)
        filled = next((one for one in reversed(self._segments) if one.used > HEADER_BYTES), None)
        if filled is not None:
            self._cache.index(filled)
        self._committed_chunk = filled.last_chunk if filled is not None else self.next_offset
        for damage in found.damage + torn:
            self._report(self._with_offsets(damage))
        self._state = "open"

    def close(self) -> None:
        """Everything to stable storage, so that the next start has nothing to scan."""
        if self._state != "open":
            self._state = "closed"
            return
        assert self._job is None, "a sync is running"
        try:
            if not self._failure:
                self._flush()
                self._seal()
                self._sync_now()
                if self._has_directory:
                    self._positions.close()
        except OSError as error:
            raise self._named(error) from error
        finally:
            self._state = "closed"
            self._release()

    def delete_all(self) -> None:
        """Remove the stream's files, and the directory if nothing else is in it."""
        assert self._job is None, "a sync is running"
        self._state = "closed"
        self._release()
        if not self._has_directory and self._is_missing():
            return
        for name in self._files.list(self.directory):
            if is_ours(name):
                self._files.remove(f"{self.directory}/{name}")
        if not self._files.list(self.directory):
            self._files.remove_directory(self.directory)

    def _sync_now(self) -> None:
        """All that is written, on this thread."""
        last_chunk = self._last_chunk()
        if self.sync:
            for segment in self._unsynced:
                self._files.sync(self._cache.handle(segment))
            if self._directory_changed:
                self._files.sync_directory(self.directory)
        self._directory_changed = False
        unsynced, self._unsynced = self._unsynced, []
        for segment in unsynced:
            self._last(segment, segment.flushed)
        self.committed_offset, self._committed_chunk = self.next_offset, last_chunk

    def _release(self) -> None:
        for segment in self._segments:
            self._cache.forget(segment)
        self._segments.clear()
        self._firsts.clear()
        self._unsynced.clear()
        self._open = None

    # -- append ---------------------------------------------------------------------------------------

    def append(
        self, records: bytes | bytearray | memoryview, filters: array[int] | None = None
    ) -> int:
        """Take a batch of whole records (drawn in record.pyx; whose they are does not matter): the offset of its first
        message, the others follow. All of it or, with an error, nothing. `filters`: `filter_of` for each message."""
        self._check_usable()
        first = self.next_offset
        packer = self._cache.packer
        chunks, rows = packer.pack(records, first, filters)
        if not rows:
            return first
        pieces = self._cut(len(chunks), rows)
        self._make_room(pieces)
        try:
            for piece in pieces:
                self._place(piece, chunks, rows, alone=len(pieces) == 1)
            self.next_offset = first + packer.messages
            assert self._open is not None
            self._open.end = self.next_offset
            if self._open.used - self._open.flushed > PENDING_BYTES_MAX:
                self._write_out(self._open)
        except Exception as error:
            raise self._fail(error) from error
        self._counters.appended_messages += packer.messages
        self._counters.appended_bytes += len(chunks)
        return first

    def _cut(self, size: int, rows: array[int]) -> list[_Piece]:
        """Divide the chunks among segments. One too big for any has a segment of its own."""
        starts = [*rows[::3], size]
        used = self._open.used if self._open is not None else self.segment_bytes + 1
        pieces: list[_Piece] = []
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            fits = used + stop - start <= self.segment_bytes
            if pieces and (fits or used == HEADER_BYTES):
                pieces[-1].stop, pieces[-1].row_stop = stop, row + 1
            elif not pieces and (fits or used == HEADER_BYTES):
                pieces.append(_Piece(start, stop, row, row + 1))
            else:
                pieces.append(
                    _Piece(start, stop, row, row + 1, StreamSegment(rows[3 * row + 1], 0, ""))
                )
                used = HEADER_BYTES
            used += stop - start
        return pieces

    def _make_room(self, pieces: list[_Piece]) -> None:
        """Whatever can fail for want of room, before anything is taken."""
        made: list[StreamSegment] = []
        try:
            self._make_directory()
            for piece in pieces:
                size = piece.stop - piece.start
                if piece.fresh is None:
                    assert self._open is not None
                    self._allocate(self._open, self._open.used + size)
                else:
                    made.append(piece.fresh)
                    self._create(piece.fresh, HEADER_BYTES + size)
        except Exception as error:
            self._unmake(made)
            raise self._named(error) from error

    def _create(self, segment: StreamSegment, size: int) -> None:
        segment.salt = self._files.salt()
        segment.path = f"{self.directory}/{file_name('log', segment.first)}"
        segment.entries = array("Q")
        handle = self._files.open(segment.path, create=True)
        self._cache.adopt(segment, handle)
        self._cache.pin(segment)
        self._directory_changed = True
        self._allocate(segment, size)

    def _unmake(self, made: list[StreamSegment]) -> None:
        for segment in made:
            self._cache.forget(segment)
            self._quietly(self._remove, segment.path)

    def _allocate(self, segment: StreamSegment, size: int) -> None:
        if size > segment.allocated:
            step = min(max(segment.allocated, ALLOCATE_BYTES_MIN), ALLOCATE_BYTES_MAX)
            wanted = max(size, min(segment.allocated + step, self.segment_bytes))
            self._files.allocate(self._cache.handle(segment), wanted)
            segment.allocated = wanted

    def _place(self, piece: _Piece, chunks: bytearray, rows: array[int], *, alone: bool) -> None:
        if piece.fresh is not None:
            self._begin(piece.fresh)
        segment = self._open
        assert segment is not None
        chunk.seal(chunks, piece.start, piece.stop, segment.salt, segment.synced)
        segment.pending.append(chunks if alone else chunks[piece.start : piece.stop])
        for at in range(3 * piece.row, 3 * piece.row_stop, 3):
            segment.note(rows[at + 1], rows[at + 2], segment.used + rows[at] - piece.start)
        segment.used += piece.stop - piece.start

    def _begin(self, segment: StreamSegment) -> None:
        """The open segment from now on."""
        before = self._segments[-1] if self._segments else None
        if self._open is not None:
            self._open.end = segment.first
            self._write_out(self._open)
            self._seal()
        if before is not None:
            segment.newest_before = segment.newest = before.newest
            segment.previous = before.timestamp
        segment.end = segment.last_chunk = segment.first
        segment.pending.append(bytearray(encode_header(segment)))
        self._segments.append(segment)
        self._firsts.append(segment.first)
        self._open = segment

    # -- seal, and let go of the oldest ---------------------------------------------------------------

    def seal(self) -> None:
        """End the open segment: from now on it may be let go of."""
        self.flush()
        try:
            if self._open is not None and self._open.used > HEADER_BYTES:
                self._seal()
        except Exception as error:
            raise self._fail(error) from error

    def _seal(self) -> None:
        segment, self._open = self._open, None
        if segment is None:
            return
        self._sealed_chunk = segment.last_chunk
        segment.sealed = True
        self._disk_bytes += segment.used
        if segment.allocated > segment.used:
            self._files.truncate(self._cache.handle(segment), segment.used)
        segment.allocated = segment.used
        if segment not in self._unsynced and not self._in_job(segment):
            self._last(segment, segment.flushed)

    def retain(
        self,
        now: int,
        *,
        max_bytes: int | None = None,
        max_age_ms: int | None = None,
        max_messages: int | None = None,
    ) -> int:
        """Let go of the oldest segments while there is more than that; the last one always stays. How many messages
        went. A segment is as old as its last message."""
        self._check_usable()
        before = self.first_offset
        # The one that stays must be on stable storage: its name says where offsets go on.
        while len(self._segments) > 1 and self._segments[1].synced:
            # The next one's header knows it without an index.
            age_ms = now - self._segments[1].previous
            too_big = max_bytes is not None and self.disk_bytes > max_bytes
            too_old = max_age_ms is not None and age_ms > max_age_ms
            too_many = (
                max_messages is not None and self.next_offset - self.first_offset > max_messages
            )
            if not (too_big or too_old or too_many) or not self._let_go(self._segments[0]):
                break
        return self.first_offset - before

    def truncate(self) -> bool:
        """Let go of all messages; offsets go on from where they are. Return whether all went.

        On a disk without room for the file whose name says where that is, the messages stay.
        """
        self._check_usable()
        assert self._job is None, "a sync is running"
        begun = True
        try:
            self._flush()
            if self._open is None or self._open.used > HEADER_BYTES:
                self._seal()
                begun = self._begin_empty()
            self._sync_now()
        except Exception as error:
            raise self._fail(error) from error
        if begun:
            for segment in self._segments[:-1]:
                if not self._let_go(segment):
                    break
        return self.first_offset == self.next_offset

    def _begin_empty(self) -> bool:
        """Begin a segment whose file's name says where offsets go on. False: there is no room for it."""
        segment = StreamSegment(self.next_offset, 0, "")
        try:
            self._make_directory()
            self._create(segment, HEADER_BYTES)
        except OSError as error:
            if not is_full(error):
                raise
            self._unmake([segment])
            return False
        self._begin(segment)
        segment.used = HEADER_BYTES
        self._write_out(segment)
        return True

    def _let_go(self, segment: StreamSegment) -> bool:
        if self._in_job(segment) or segment in self._unsynced:
            return False
        self._forget(segment)
        self._quietly(self._remove, segment.path)
        self._quietly(self._remove, f"{self.directory}/{file_name('index', segment.first)}")
        self._directory_changed = True
        return not self._failure

    def _forget(self, segment: StreamSegment) -> None:
        at = self._segments.index(segment)
        del self._segments[at], self._firsts[at]
        self._disk_bytes -= segment.used
        self._cache.forget(segment)

    def _remove(self, path: str) -> None:
        try:
            self._files.remove(path)
        except OSError as error:
            if not is_missing(error):
                raise

    # -- read -----------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        return self._firsts[0] if self._firsts else self.next_offset

    @property
    def last_chunk_offset(self) -> int:
        """Where the last committed chunk begins."""
        return max(self._committed_chunk, self.first_offset)

    def read(
        self,
        offset: int,
        bytes_max: int,
        wanted: array[int] | None = None,
        count_max: int = COUNT_MAX,
        below: int = OFFSET_MAX,
    ) -> Messages:
        """Committed messages from `offset` on, or from the first one that is there, and `below` that offset, an end the
        log has had: as many as fit in `bytes_max`, but at least one, and not more than `count_max`, which is at least
        1. `wanted`: filters; chunks without any of them are passed over, others may hold more than these."""
        if self._state != "open":
            raise Closed("the stream is not open")
        walk = Walk(
            self._cache, max(offset, self.first_offset), min(self.committed_offset, below), max(bytes_max, 0), wanted,
            self._report, [], array("I"), array("Q"), count_max,
        )  # fmt: skip
        while walk.offset < walk.limit and not walk.full:
            at = bisect_right(self._firsts, walk.offset) - 1
            segment = self._segments[at]
            if walk.offset >= segment.end:
                walk.offset = self._firsts[at + 1] if at + 1 < len(self._firsts) else walk.limit
            else:
                walk.through(segment)
        blob = walk.blobs[0] if len(walk.blobs) == 1 else b"".join(walk.blobs)
        return Messages(blob, walk.sizes, walk.runs, max(walk.offset, offset))

    def find(self, timestamp: int) -> int:
        """Offset of the first committed chunk with a message not older than `timestamp`, ms; if all are older, of the
        next message."""
        if self._state != "open":
            raise Closed("the stream is not open")
        at = bisect_left(self._segments, timestamp, key=lambda segment: segment.newest_before) - 1
        if at < 0 and self._segments and self._segments[0].newest_before:
            return self.first_offset  # among those let go of was one as new
        for segment in self._segments[max(at, 0) :]:
            found = chunk_newer(self._cache, segment, timestamp, self._report)
            if found is not None:
                return max(min(found, self.committed_offset), self.first_offset)
        return self.committed_offset

    # -- named consumers ------------------------------------------------------------------------------

    def position(self, name: bytes) -> int | None:
        return self._positions.get(name)

    def store_position(self, name: bytes, offset: int) -> None:
        """Remembered from now on, on disk with the next flush; a power cut may bring back an earlier one."""
        self._positions.set(name, offset)

    def forget_position(self, name: bytes) -> None:
        self._positions.forget(name)

    def positions(self) -> dict[bytes, int]:
        return dict(self._positions.offsets)

    # -- flush and sync -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand to the operating system what is only in this process's memory."""
        self._check_usable()
        try:
            self._flush()
        except Exception as error:
            raise self._named(error) from error

    def begin_sync(self) -> StreamSync | None:
        """Flush; then the job makes it last. One at a time, ended by `finish_sync`. None: nothing to wait for."""
        self._check_usable()
        assert self._job is None, "a sync is running"
        self.flush()
        if not self.sync or not (self._unsynced or self._directory_changed):
            return None
        held = [
            (segment, self._cache.handle(segment), segment.flushed) for segment in self._unsynced
        ]
        self._job = StreamSync(
            files=self._files,
            directory=self.directory,
            segments=held,
            with_directory=self._directory_changed,
            next_offset=self.next_offset,
            last_chunk=self._last_chunk(),
        )
        self._unsynced = []
        self._directory_changed = False
        self._counters.syncs += 1
        return self._job

    def finish_sync(self, job: StreamSync) -> None:
        """After `run`, on the owner's thread. Raises StoreFailed if it did not succeed."""
        assert job is self._job and job.done, "not this job, or it did not run"
        self._job = None
        self._check_synced(job)
        for segment, _, flushed in job.segments:
            self._last(segment, flushed)
        self.committed_offset, self._committed_chunk = job.next_offset, job.last_chunk

    def begin_settled_sync(self) -> SettledSync | None:
        """Write the positions of named consumers; then the job makes them last.

        None: there is nothing to make last. The job ends with `finish_settled_sync`.
        """
        self._check_usable()
        if not self.sync or not self._has_directory:
            return None
        try:
            self._positions.flush()
        except Exception as error:
            raise self._named(error) from error
        paths, with_directory = self._positions.take_unsynced()
        if not paths and not with_directory:
            return None
        return SettledSync(
            files=self._files, directory=self.directory, with_directory=with_directory, paths=paths
        )

    def finish_settled_sync(self, job: SettledSync) -> None:
        """After `run`, on the owner's thread. Raises StoreFailed if the job did not succeed."""
        self._check_synced(job)

    def _last_chunk(self) -> int:
        return max(
            self._open.last_chunk if self._open is not None else self._sealed_chunk,
            self._committed_chunk,
        )

    def _last(self, segment: StreamSegment, flushed: int) -> None:
        """It is on stable storage up to there."""
        segment.synced = flushed
        if segment in self._unsynced:
            return
        self._cache.unpin(segment)
        if segment.sealed and flushed == segment.used:
            self._quietly(stream_recovery.write_index, self._files, segment)
            self._cache.keep_index(segment)

    def _in_job(self, segment: StreamSegment) -> bool:
        return self._job is not None and any(segment is held for held, _, _ in self._job.segments)

    def _flush(self) -> None:
        if self._open is not None:
            self._write_out(self._open)
        if self._has_directory:
            self._positions.flush()
        if not self.sync:
            self._sync_now()

    def _write_out(self, segment: StreamSegment) -> None:
        if not segment.pending:
            return
        data = segment.pending[0] if len(segment.pending) == 1 else b"".join(segment.pending)
        self._files.write(self._cache.handle(segment), data, segment.flushed)
        segment.pending.clear()
        segment.flushed = segment.used
        self._counters.written_bytes += len(data)
        if segment not in self._unsynced:
            self._cache.pin(segment)
            self._unsynced.append(segment)

    # -- damage and numbers ---------------------------------------------------------------------------

    def _report(self, damage: Damage) -> None:
        if damage in self._counters.damage:
            return  # found again by another reader
        if damage.what in LOSSES:
            self._counters.damaged += 1
        else:
            self._counters.torn += 1
        if len(self._counters.damage) < DAMAGE_MAX:
            self._counters.damage.append(damage)
        if self.damage_heard is not None:
            self.damage_heard(damage)

    def _with_offsets(self, damage: Damage) -> Damage:
        """What recovery found, with the offsets that it costs."""
        parsed = parse_name(damage.file)
        if damage.what not in LOSSES or damage.offsets is not None or parsed is None:
            return damage
        first, at = parsed[1], bisect_left(self._firsts, parsed[1])
        if damage.what == "corrupt" and at < len(self._firsts) and self._firsts[at] == first:
            lost = stream_reading.lost_offsets(
                self._cache, self._segments[at], damage.start, damage.stop
            )
        else:
            lost = first, self._firsts[at] if at < len(self._firsts) else self.next_offset
        return replace(damage, offsets=lost)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Offsets whose messages are lost by damage that is known, [from, to) each, ascending."""
        return sorted(one.offsets for one in self._counters.damage if one.offsets is not None)

    @property
    def damage(self) -> list[Damage]:
        """What recovery and readers found broken; the first DAMAGE_MAX."""
        return self._counters.damage

    @property
    def disk_bytes(self) -> int:
        return self._disk_bytes + (self._open.used if self._open is not None else 0)

    def stats(self) -> dict[str, int]:
        return {
            "segments": len(self._segments),
            "messages": self.next_offset - self.first_offset,
            "first_offset": self.first_offset,
            "committed_offset": self.committed_offset,
            "next_offset": self.next_offset,
            "disk_bytes": self.disk_bytes,
            "buffered_bytes": self._open.used - self._open.flushed if self._open is not None else 0,
            "named_positions": len(self._positions.offsets),
            "appended_messages": self._counters.appended_messages,
            "appended_bytes": self._counters.appended_bytes,
            "written_bytes": self._counters.written_bytes,
            "syncs": self._counters.syncs,
            "damaged": self._counters.damaged,
            "torn": self._counters.torn,
        }


def filter_of(value: bytes) -> int:
    """What stands for a message's filter value in the `filters` of an append and the `wanted` of a read. Now and then
    it is the same for different values: readers look again."""
    crc = record.crc32c(value)
    return crc if crc not in (chunk.UNFILTERED, chunk.ANY) else 1


def wanted_filters(values: Iterable[bytes], *, unfiltered: bool) -> array[int]:
    """What `read` takes; `unfiltered`: messages without a value too."""
    return array(
        "I",
        sorted(
            {filter_of(value) for value in values} | ({chunk.UNFILTERED} if unfiltered else set())
        ),
    )


def is_ours(name: str) -> bool:
    return parse_name(name) is not None or name in (NAME, NEW_NAME, PRODUCERS, f"{PRODUCERS}.new")
