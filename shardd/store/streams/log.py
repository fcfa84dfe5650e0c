"""Keep the log of a stream: append messages, read them from any offset, delete the oldest.

Messages get consecutive offsets. All calls block and belong to one thread, except
`SyncJob.run`. A reader is only an offset here, so any number of readers can read while messages
are appended.

Readers see committed messages only: those on stable storage. A power cut therefore never takes
back a message that somebody has read, and no offset ever stands for two messages. With sync=False
a message is committed as soon as the operating system has it. After StoreFailed nothing is written
any more: the next recovery decides what the stream holds.

    first_offset <= readable offsets < committed_offset <= next_offset

A log holds its segments (segments.py), the positions of named consumers (positions.py), the
last sequence of each producer (producers.py) and the known damage (store/damage.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Protocol

from shardmq.shardd.store.damage import Damage, KnownDamage
from shardmq.shardd.store.errors import Closed
from shardmq.shardd.store.files import Files, OsFiles
from shardmq.shardd.store.format import chunk, record
from shardmq.shardd.store.format.producers_file import NAME as PRODUCERS
from shardmq.shardd.store.format.sequences import Screened
from shardmq.shardd.store.state import StoreState
from shardmq.shardd.store.streams import recovery as stream_recovery
from shardmq.shardd.store.streams.copies import LogCopies
from shardmq.shardd.store.streams.positions import NAME, NEW_NAME, Positions
from shardmq.shardd.store.streams.producers import StreamProducers
from shardmq.shardd.store.streams.reading import (
    COUNT_MAX,
    OFFSET_MAX,
    Messages,
    StreamCache,
    Walk,
    chunk_newer,
    chunks,
)
from shardmq.shardd.store.streams.segment import (
    HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    StreamSegment,
    last_not_above,
)
from shardmq.shardd.store.streams.segments import Remover, StreamSegments, UnderSync
from shardmq.shardd.store.sync import SyncJob

# Upper bound of the bytes that are appended but not yet handed to the operating system.
PENDING_BYTES_MAX = 1 << 20
# The files of a stream that do not belong to a segment.
OTHER_NAMES = frozenset((NAME, NEW_NAME, PRODUCERS, f"{PRODUCERS}.new"))


class PublishedRange(Protocol):
    """Publishes the range of committed offsets to readers outside of this process."""

    def put(self, first: int, next: int) -> None: ...
    def remove(self) -> None: ...


class StreamLog:
    """The messages of one stream, in one directory.

    `cache` may be shared by streams with the same `files`. `remover` deletes the files of segments;
    without a remover they are deleted at once. `published` gets the range of committed offsets
    whenever it may have changed.
    """

    def __init__(
        self,
        directory: str,
        *,
        files: Files | None = None,
        segment_bytes: int = 500_000_000,
        sync: bool = True,
        cache: StreamCache | None = None,
        remover: Remover | None = None,
        published: PublishedRange | None = None,
    ) -> None:
        assert SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX
        files = OsFiles() if files is None else files
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.sync = sync
        self._state = StoreState[UnderSync]("stream", directory, files)
        self._cache = StreamCache(files) if cache is None else cache
        self._segments = StreamSegments(self._state, self._cache, sync, remover)
        self._firsts = self._segments.firsts
        self.growing = self._segments.growing
        self._published = published
        self.positions = Positions(files, directory, sync)
        self.producers = StreamProducers(files, directory, sync)
        self.known_damage = KnownDamage()
        self.copies = LogCopies(self, self._state, self._segments, self._cache)
        self.next_offset = 0
        self.committed_offset = 0
        # The first offset of the last committed chunk, which may have been deleted since.
        self._committed_chunk = 0
        self._appended_messages = 0
        self._appended_bytes = 0
        self._syncs = 0

    # -- start and stop ----------------------------------------------------------------------------

    def recover(self) -> None:
        """Open the log with what its files hold. Call this once, before anything else.

        Raises StoreFailed or DiskFull when a file cannot be read or repaired.
        """
        assert self._state.stage == "new", "recover is called once"
        segments = self._segments
        try:
            self._state.find_directory()
            torn = self.positions.recover()
            found = stream_recovery.Found()
            if self._state.has_directory:
                found = stream_recovery.recover(self._state.files, self.directory, sync=self.sync)
        except OSError as error:
            raise self._state.named(error) from error
        filled = segments.recovered(found.segments)
        self._firsts = segments.firsts
        self.next_offset = self.committed_offset = found.next_offset
        self._committed_chunk = filled.last_chunk if filled is not None else self.next_offset
        for damage in found.damage + torn:
            self.known_damage.report(segments.with_offsets(damage, self.next_offset))
        self._state.stage = "open"
        if self._state.has_directory:
            self._recover_producers()
            self._state.quietly(segments.remove_left_behind)
        self._tell()

    def _recover_producers(self) -> None:
        """Load the producers' sequences from their file and from chunks that it does not cover."""
        try:
            offset = self.producers.recover()
        except OSError as error:
            raise self._state.named(error) from error
        if offset is None:
            return
        if self.first_offset > offset:
            # No message below the first offset is left to read: write a file that covers all.
            self.cover()
            return
        for segment in self._segments.all:
            if segment.end <= offset:
                continue
            position = last_not_above(self._cache.index(segment), offset)
            report = self.known_damage.report
            for window, at, first, count, _ in chunks(self._cache, segment, position, report):
                if first + count > offset:
                    self.producers.found(window.data, at - window.start)

    def close(self) -> None:
        """Sync everything and close the log, so that the next start has nothing to scan.

        After a failure, or when the log is not open, nothing is written.
        """
        state = self._state
        if state.stage != "open":
            state.stage = "closed"
            return
        assert state.job is None, "a sync is running"
        clean = not state.failure
        try:
            if clean:
                self._flush()
                self._segments.seal()
                self._sync_now()
                if state.has_directory:
                    self.positions.save()
        except OSError as error:
            raise state.named(error) from error
        finally:
            state.stage = "closed"
            self._segments.release()
        if clean and self.producers.in_use and self.producers.covered_to < self.next_offset:
            self.cover()

    def delete_all(self) -> None:
        """Delete the files of the stream, and the directory if nothing else is in it."""
        assert self._state.job is None, "a sync is running"
        if self._published is not None:
            self._published.remove()
        self._state.stage = "closed"
        self._segments.release()
        if self._state.has_directory or not self._state.is_missing():
            self._segments.delete_all(OTHER_NAMES)

    def _tell(self) -> None:
        if self._published is not None:
            self._published.put(self.first_offset, self.committed_offset)

    # -- append ------------------------------------------------------------------------------------

    def screen(self, records: memoryview, queue_id: int) -> Screened:
        """Return the records of a batch without the messages that the stream has already.

        The messages carry producers and sequences; records that do not name the queue are left
        out. When the caller does not append the result, it must call `producers.table.undo`.
        """
        self._state.check_usable()
        try:
            self._state.make_directory()
            return self.producers.screen(records, queue_id, self.committed_offset)
        except Exception as error:
            raise self._state.named(error) from error

    def append(
        self, records: bytes | bytearray | memoryview, filters: array[int] | None = None
    ) -> int:
        """Append the messages of a batch of whole records (drawn in record.pyx).

        The queues that the records name are not looked at. `filters` holds the `filter_of` of each
        message. Return the offset of the first message; the others follow it. When an error is
        raised, no message of the batch was appended.
        """
        self._state.check_usable()
        first, packer = self.next_offset, self._cache.packer
        data, rows = packer.pack(records, first, filters)
        if rows:
            self.append_chunks(data, rows, first + packer.messages)
        return first

    def append_chunks(self, data: bytearray, rows: array[int], next_offset: int) -> None:
        """Append chunks as `Packer.pack` returns them, with the messages up to `next_offset`.

        When an error is raised, no message of them was appended.
        """
        segments = self._segments
        pieces = segments.cut(len(data), rows, self.segment_bytes)
        segments.make_room(pieces, self.segment_bytes)
        try:
            for piece in pieces:
                segments.place(piece, data, rows, alone=len(pieces) == 1)
            self._appended_messages += next_offset - self.next_offset
            self.next_offset = next_offset
            assert segments.open is not None
            segments.open.end = next_offset
            if segments.open.used - segments.open.flushed > PENDING_BYTES_MAX:
                segments.write_out(segments.open)
        except Exception as error:
            raise self._state.fail(error) from error
        self._appended_bytes += len(data)
        self.producers.appended(len(data))

    # -- retention ---------------------------------------------------------------------------------

    def seal(self) -> None:
        """Flush and end the open segment, so that retention can delete it."""
        self.flush()
        try:
            if self._segments.open is not None and self._segments.open.used > HEADER_BYTES:
                self._segments.seal()
        except Exception as error:
            raise self._state.fail(error) from error

    def retain(
        self,
        now: int,
        *,
        max_bytes: int | None = None,
        max_age_ms: int | None = None,
        max_messages: int | None = None,
    ) -> int:
        """Delete the oldest segments while the stream exceeds a limit.

        `now` is in ms since the epoch. A segment is as old as its last message. The last segment
        always stays. Return how many offsets the stream has lost at its beginning.
        """
        self._state.check_usable()
        before, segments = self.first_offset, self._segments.all
        # The segment that stays must be on stable storage: its name says where offsets go on.
        while len(segments) > 1 and segments[1].synced:
            # The header of the next segment has the last timestamp: no index has to be loaded.
            age_ms = now - segments[1].previous
            too_big = max_bytes is not None and self.disk_bytes > max_bytes
            too_old = max_age_ms is not None and age_ms > max_age_ms
            too_many = (
                max_messages is not None and self.next_offset - self.first_offset > max_messages
            )
            if not (too_big or too_old or too_many) or not self._let_go(segments[0]):
                break
        gone = self.first_offset - before
        if gone:
            self._tell()
        return gone

    def truncate(self, offset: int | None = None, newest_before: int = 0) -> bool:
        """Delete all messages; offsets go on from `next_offset`. Return whether all were deleted.

        The name of a new, empty segment keeps the next offset. When the disk has no room for that
        segment, the messages stay. With an `offset`, which is not below `next_offset`, offsets go
        on there, behind messages with timestamps up to `newest_before`.
        """
        offset = self.next_offset if offset is None else offset
        self._state.check_usable()
        assert self._state.job is None, "a sync is running"
        segments, begun = self._segments, True
        try:
            self._flush()
            last = segments.open
            if last is None or last.used > HEADER_BYTES or last.first != offset:
                segments.seal()
                begun = segments.begin_empty(offset, self.segment_bytes, newest_before)
                self.next_offset = offset if begun else self.next_offset
            self._sync_now()
        except Exception as error:
            raise self._state.fail(error) from error
        for segment in segments.all[:-1] if begun else ():
            if not self._let_go(segment):
                break
        self._tell()
        return self.first_offset == self.next_offset == offset

    def _let_go(self, segment: StreamSegment) -> bool:
        """Delete a segment if the producers file covers it; return whether it was deleted."""
        if self.producers.in_use and segment.end > self.producers.covered_to:
            if self._state.job is not None or self.committed_offset != self.next_offset:
                return False  # the next call of `retain` tries again
            self.cover()
            if segment.end > self.producers.covered_to:
                return False
        return self._segments.let_go(segment)

    # -- read --------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """The offset of the first message, or the next offset if there is no message."""
        return self._firsts[0] if self._firsts else self.next_offset

    @property
    def last_chunk_offset(self) -> int:
        """The first offset of the last committed chunk."""
        return max(self._committed_chunk, self.first_offset)

    def read(
        self,
        offset: int,
        bytes_max: int,
        wanted: array[int] | None = None,
        count_max: int = COUNT_MAX,
        below: int = OFFSET_MAX,
    ) -> Messages:
        """Return committed messages from `offset` on, or from the first offset if that is later.

        The result has at most `bytes_max` bytes, but at least one message if there is one to read;
        at most `count_max` messages (at least 1); and only messages with an offset under `below`,
        which must be a former end of the log. `wanted` holds filter values: chunks without any of
        them are skipped, but the chunks that are read may also hold messages with other values.
        Raises Closed when the log is not open and Corrupt when a segment cannot be read.
        """
        if self._state.stage != "open":
            raise Closed("the stream is not open")
        walk = Walk(
            self._cache, max(offset, self.first_offset), min(self.committed_offset, below),
            max(bytes_max, 0), wanted, self.known_damage.report, [], array("I"), array("Q"),
            count_max,
        )  # fmt: skip
        firsts = self._firsts
        while walk.offset < walk.limit and not walk.full:
            at = bisect_right(firsts, walk.offset) - 1
            segment = self._segments.all[at]
            if walk.offset >= segment.end:
                walk.offset = firsts[at + 1] if at + 1 < len(firsts) else walk.limit
            else:
                walk.through(segment)
        blob = walk.blobs[0] if len(walk.blobs) == 1 else b"".join(walk.blobs)
        return Messages(blob, walk.sizes, walk.runs, max(walk.offset, offset))

    def find(self, timestamp: int) -> int:
        """Return the first offset of the first committed chunk that is not older than `timestamp`.

        `timestamp` is in ms. When all committed chunks are older, return `committed_offset`.
        """
        if self._state.stage != "open":
            raise Closed("the stream is not open")
        segments = self._segments.all
        at = bisect_left(segments, timestamp, key=lambda segment: segment.newest_before) - 1
        if at < 0 and segments and segments[0].newest_before:
            return self.first_offset  # a deleted chunk was not older
        for segment in segments[max(at, 0) :]:
            found = chunk_newer(self._cache, segment, timestamp, self.known_damage.report)
            if found is not None:
                return max(min(found, self.committed_offset), self.first_offset)
        return self.committed_offset

    # -- flush and sync ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand everything that is only in memory of this process to the operating system."""
        self._state.check_usable()
        try:
            self._flush()
        except Exception as error:
            raise self._state.named(error) from error
        self._tell()

    def _flush(self) -> None:
        if self._segments.open is not None:
            self._segments.write_out(self._segments.open)
        if self._state.has_directory:
            self.positions.flush()
        if not self.sync:
            self._sync_now()

    def _sync_now(self) -> None:
        """Sync on this thread; everything appended is committed then."""
        last_chunk = max(self._segments.last_chunk(), self._committed_chunk)
        self._segments.sync_now()
        self.committed_offset, self._committed_chunk = self.next_offset, last_chunk

    def begin_sync(self) -> SyncJob[UnderSync] | None:
        """Flush, and return the job that syncs all messages, or None if there is nothing to sync.

        Positions and sequences of `LogCopies.take_places` are synced, too. The caller runs the job,
        on any thread, and then calls `finish_sync`. There is one job at a time.
        """
        state, segments = self._state, self._segments
        state.check_usable()
        assert state.job is None, "a sync is running"
        self.positions.is_due = self.positions.is_due and self.sync  # else the flush is enough
        self.flush()
        has_unsynced = segments.unsynced or segments.directory_changed
        if not self.sync or not (has_unsynced or self.positions.is_due):
            if self.producers.is_due:
                self.cover()
            self.copies.lacks_room = bool(self.positions.changed) or self.producers.is_due
            return None
        handles = [self._cache.handle(segment) for segment in segments.unsynced]
        held = [(segment, segment.flushed) for segment in segments.unsynced]
        cover = self.producers.cover(self.next_offset) if self.producers.is_due else None
        rewrite = self.positions.begin_rewrite() if self.positions.is_due else None
        last_chunk = max(segments.last_chunk(), self._committed_chunk)
        state.job = SyncJob(
            files=state.files,
            directory=self.directory,
            with_directory=segments.directory_changed,
            handles=handles,
            last_steps=[step for step in (rewrite, cover) if step is not None],
            noted=UnderSync(held, self.next_offset, last_chunk, cover, rewrite),
        )
        segments.unsynced = []
        segments.directory_changed = False
        self._syncs += 1
        return state.job

    def finish_sync(self, job: SyncJob[UnderSync]) -> None:
        """Commit what a job has synced, after its `run`, on the thread that owns the log.

        Raises StoreFailed if the job failed.
        """
        assert job is self._state.job and job.done, "not this job, or it did not run"
        self._state.job = None
        self._state.check_synced(job)
        noted = job.noted
        for segment, flushed in noted.segments:
            self._segments.lasts(segment, flushed)
        self.committed_offset, self._committed_chunk = noted.next_offset, noted.last_chunk
        if noted.cover is not None:
            self.producers.covered(noted.cover)
        if noted.rewrite is not None:
            self.positions.end_rewrite(noted.rewrite)
        self.copies.lacks_room = any(step.full for step in (noted.cover, noted.rewrite) if step)
        self._tell()

    def begin_settled_sync(self) -> SyncJob[None] | None:
        """Write the positions of named consumers; return the job that syncs them.

        Return None if there is nothing to sync. `finish_settled_sync` ends the job.
        """
        self._state.check_usable()
        if not self.sync or not self._state.has_directory:
            return None
        try:
            self.positions.flush()
        except Exception as error:
            raise self._state.named(error) from error
        paths, with_directory = self.positions.take_unsynced()
        if not paths and not with_directory:
            return None
        return SyncJob(
            files=self._state.files,
            directory=self.directory,
            with_directory=with_directory,
            paths=paths,
            noted=None,
        )

    def finish_settled_sync(self, job: SyncJob[None]) -> None:
        """End a job after its `run`, on the thread that owns the log.

        Raises StoreFailed if the job failed.
        """
        self._state.check_synced(job)

    # -- producers ---------------------------------------------------------------------------------

    def forget_producers(self, heard_before: int) -> int:
        """Forget the producers last heard before `heard_before`, ms; return how many they were."""
        return self.producers.table.sweep(heard_before)

    def cover(self) -> None:
        """Write the sequences of all producers to their file now, on this thread.

        Call this only when everything appended is on stable storage, or with sync=False.
        """
        cover = self.producers.cover(self.next_offset)
        try:
            cover.run()
        except Exception as error:  # the next append or sync raises it
            self._state.fail(error)
        else:
            self.producers.covered(cover)

    # -- damage and numbers ------------------------------------------------------------------------

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The ranges [from, to) of offsets whose messages known damage has cost, ascending."""
        return self.known_damage.gaps()

    @property
    def damage(self) -> list[Damage]:
        """The damage that recovery and readers have found; only the first places are kept."""
        return self.known_damage.places

    @property
    def disk_bytes(self) -> int:
        """The bytes of all segments."""
        return self._segments.disk_bytes

    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of the stream by name."""
        segments = self._segments
        return {
            "segments": len(segments.all),
            "messages": self.next_offset - self.first_offset,
            "first_offset": self.first_offset,
            "committed_offset": self.committed_offset,
            "next_offset": self.next_offset,
            "disk_bytes": self.disk_bytes,
            "buffered_bytes": segments.open.used - segments.open.flushed if segments.open else 0,
            "named_positions": len(self.positions.offsets),
            "appended_messages": self._appended_messages,
            "appended_bytes": self._appended_bytes,
            "written_bytes": segments.written_bytes,
            "syncs": self._syncs,
            "damaged": self.known_damage.lossy,
            "torn": self.known_damage.torn,
        }


def filter_of(value: bytes) -> int:
    """Return the hash of a message's filter value.

    `append` takes such hashes as `filters`, `read` as `wanted`. Different values can have the same
    hash, so readers must compare the values themselves.
    """
    crc = record.crc32c(value)
    return crc if crc not in (chunk.UNFILTERED, chunk.ANY) else 1


def wanted_filters(values: Iterable[bytes], *, unfiltered: bool) -> array[int]:
    """Return the sorted hashes that `read` takes as `wanted`.

    With `unfiltered` messages without a filter value are wanted too.
    """
    return array(
        "I",
        sorted(
            {filter_of(value) for value in values} | ({chunk.UNFILTERED} if unfiltered else set())
        ),
    )
