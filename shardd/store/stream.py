"""Keep a stream: append messages under consecutive offsets, read from any of them again and again, let the oldest go.

Blocking and for one thread, but for `StreamSync.run`. A reader is an offset and nothing else here, so any number of
them read while the log is appended to. They see what is committed: on stable storage, so that no power cut takes back
what somebody has read, and no offset ever means two messages (with sync=False: what the operating system has). After
StoreFailed nothing is written any more: only what recovery finds is true.

    first_offset <= offsets to be read < committed_offset <= next_offset

A log is made of its segments (stream_segments.py), the positions of named consumers (positions.py),
how far producers have come (stream_producers.py) and the damage that is known (known_damage.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Protocol

from shardmq.shardd.store import chunk, record, stream_recovery
from shardmq.shardd.store.errors import Closed
from shardmq.shardd.store.files import Files, OsFiles
from shardmq.shardd.store.known_damage import KnownDamage
from shardmq.shardd.store.positions import NAME, NEW_NAME, Positions
from shardmq.shardd.store.producers import NAME as PRODUCERS
from shardmq.shardd.store.recovery import Damage
from shardmq.shardd.store.sequences import Screened
from shardmq.shardd.store.state import StoreState
from shardmq.shardd.store.stream_producers import StreamProducers
from shardmq.shardd.store.stream_reading import (
    COUNT_MAX,
    OFFSET_MAX,
    Messages,
    StreamCache,
    Walk,
    chunk_newer,
    chunks,
)
from shardmq.shardd.store.stream_segment import (
    HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    StreamSegment,
    last_not_above,
)
from shardmq.shardd.store.stream_segments import Remover, StreamSegments, StreamSync
from shardmq.shardd.store.sync import SettledSync

# Appended and not handed to the operating system.
PENDING_BYTES_MAX = 1 << 20
# Files of a stream that are not segments.
OTHER_NAMES = frozenset((NAME, NEW_NAME, PRODUCERS, f"{PRODUCERS}.new"))


class PublishedRange(Protocol):
    """Who is told which offsets of the stream can be read: never more than is on stable storage."""

    def put(self, first: int, next: int) -> None: ...
    def remove(self) -> None: ...


class StreamLog:
    """The messages of one stream, in one directory.

    `cache` is shared by streams with the same `files`. `remover` removes files of segments; without
    one they are removed at once. `published` is told whenever the range of the stream changes.
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
        self._state = StoreState[StreamSync]("stream", directory, files)
        self._cache = StreamCache(files) if cache is None else cache
        self._segments = StreamSegments(self._state, self._cache, sync, remover)
        self._firsts = self._segments.firsts
        self._published = published
        self.positions = Positions(files, directory, sync)  # of named consumers
        self.producers = StreamProducers(files, directory, sync)
        self.known_damage = KnownDamage()
        self.next_offset = 0
        self.committed_offset = 0
        self._committed_chunk = 0  # where the last committed chunk begins, or began
        self._appended_messages = 0
        self._appended_bytes = 0
        self._syncs = 0

    # -- start and stop -------------------------------------------------------------------------------

    def recover(self) -> None:
        """Open the log, once."""
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
        """Learn how far producers have come: from their file, and the chunks behind what it covers."""
        try:
            offset = self.producers.recover()
        except OSError as error:
            raise self._state.named(error) from error
        if offset is None:
            return
        if self.first_offset > offset:
            self._cover()  # from here on all is as it should be
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
        """Write everything to stable storage, so that the next start has nothing to scan."""
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
                    self.positions.close()
        except OSError as error:
            raise state.named(error) from error
        finally:
            state.stage = "closed"
            self._segments.release()
        if clean and self.producers.in_use and self.producers.covered_to < self.next_offset:
            self._cover()

    def delete_all(self) -> None:
        """Remove the stream's files, and the directory if nothing else is in it."""
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

    # -- append ---------------------------------------------------------------------------------------

    def screen(self, records: memoryview, queue_id: int) -> Screened:
        """Return what of a batch of producers is new to the stream.

        If that is not appended, `producers.table.undo` must be called.
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
        """Take a batch of whole records (drawn in record.pyx), whosever they are.

        Return the offset of its first message; the others follow. All of it is taken or, with an
        error, nothing. `filters`: `filter_of` for each message.
        """
        self._state.check_usable()
        segments, first = self._segments, self.next_offset
        packer = self._cache.packer
        data, rows = packer.pack(records, first, filters)
        if not rows:
            return first
        pieces = segments.cut(len(data), rows, self.segment_bytes)
        segments.make_room(pieces, self.segment_bytes)
        try:
            for piece in pieces:
                segments.place(piece, data, rows, alone=len(pieces) == 1)
            self.next_offset = first + packer.messages
            assert segments.open is not None
            segments.open.end = self.next_offset
            if segments.open.used - segments.open.flushed > PENDING_BYTES_MAX:
                segments.write_out(segments.open)
        except Exception as error:
            raise self._state.fail(error) from error
        self._appended_messages += packer.messages
        self._appended_bytes += len(data)
        self.producers.appended(len(records))
        return first

    # -- let go of the oldest -------------------------------------------------------------------------

    def seal(self) -> None:
        """End the open segment: from now on it may be let go of."""
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
        """Let go of the oldest segments while there is more than that; return how many messages went.

        The last segment always stays. A segment is as old as its last message. `now`: ms.
        """
        self._state.check_usable()
        before, segments = self.first_offset, self._segments.all
        # The one that stays must be on stable storage: its name says where offsets go on.
        while len(segments) > 1 and segments[1].synced:
            # The next one's header knows it without an index.
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

    def truncate(self) -> bool:
        """Let go of all messages; offsets go on from where they are. Return whether all went.

        On a disk without room for the file whose name says where that is, the messages stay.
        """
        self._state.check_usable()
        assert self._state.job is None, "a sync is running"
        segments, begun = self._segments, True
        try:
            self._flush()
            if segments.open is None or segments.open.used > HEADER_BYTES:
                segments.seal()
                begun = segments.begin_empty(self.next_offset, self.segment_bytes)
            self._sync_now()
        except Exception as error:
            raise self._state.fail(error) from error
        for segment in segments.all[:-1] if begun else ():
            if not self._let_go(segment):
                break
        self._tell()
        return self.first_offset == self.next_offset

    def _let_go(self, segment: StreamSegment) -> bool:
        """Let go of a segment, but not before something else tells how far its producers have come."""
        if self.producers.in_use and segment.end > self.producers.covered_to:
            if self._state.job is not None or self.committed_offset != self.next_offset:
                return False  # what comes with the next look
            self._cover()
            if segment.end > self.producers.covered_to:
                return False
        return self._segments.let_go(segment)

    # -- read -----------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """The offset of the first message, or of the next one if there is none."""
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
        """Return committed messages from `offset` on, or from the first one that is there.

        As many as fit in `bytes_max`, but at least one; not more than `count_max`, which is at
        least 1; and only messages `below` that offset, an end the log has had. `wanted`: filters;
        chunks without any of them are passed over, others may hold more than these.
        """
        if self._state.stage != "open":
            raise Closed("the stream is not open")
        walk = Walk(
            self._cache, max(offset, self.first_offset), min(self.committed_offset, below), max(bytes_max, 0), wanted,
            self.known_damage.report, [], array("I"), array("Q"), count_max,
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
        """Return the offset of the first committed chunk with a message not older than `timestamp`, ms.

        If all are older it is the offset of the next message.
        """
        if self._state.stage != "open":
            raise Closed("the stream is not open")
        segments = self._segments.all
        at = bisect_left(segments, timestamp, key=lambda segment: segment.newest_before) - 1
        if at < 0 and segments and segments[0].newest_before:
            return self.first_offset  # among those let go of was one as new
        for segment in segments[max(at, 0) :]:
            found = chunk_newer(self._cache, segment, timestamp, self.known_damage.report)
            if found is not None:
                return max(min(found, self.committed_offset), self.first_offset)
        return self.committed_offset

    # -- flush and sync -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand to the operating system what is only in this process's memory."""
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

    def _last_chunk(self) -> int:
        return max(self._segments.last_chunk(), self._committed_chunk)

    def _sync_now(self) -> None:
        """Make all last that is written, on this thread."""
        last_chunk = self._last_chunk()
        self._segments.sync_now()
        self.committed_offset, self._committed_chunk = self.next_offset, last_chunk

    def begin_sync(self) -> StreamSync | None:
        """Flush, and return the job that makes all messages last; None: there is nothing to wait for.

        There is one job at a time, ended by `finish_sync`.
        """
        state, segments = self._state, self._segments
        state.check_usable()
        assert state.job is None, "a sync is running"
        self.flush()
        if not self.sync or not (segments.unsynced or segments.directory_changed):
            if self.producers.is_due:
                self._cover()
            return None
        held = [
            (segment, self._cache.handle(segment), segment.flushed) for segment in segments.unsynced
        ]
        state.job = StreamSync(
            files=state.files,
            directory=self.directory,
            segments=held,
            with_directory=segments.directory_changed,
            next_offset=self.next_offset,
            last_chunk=self._last_chunk(),
        )
        if self.producers.is_due:
            state.job.cover = self.producers.cover(self.next_offset)
        segments.unsynced = []
        segments.directory_changed = False
        self._syncs += 1
        return state.job

    def finish_sync(self, job: StreamSync) -> None:
        """End a job after its `run`, on the owner's thread. Raises StoreFailed if it did not succeed."""
        assert job is self._state.job and job.done, "not this job, or it did not run"
        self._state.job = None
        self._state.check_synced(job)
        for segment, _, flushed in job.segments:
            self._segments.lasts(segment, flushed)
        self.committed_offset, self._committed_chunk = job.next_offset, job.last_chunk
        if job.cover is not None:
            self.producers.covered(job.cover)
        self._tell()

    def begin_settled_sync(self) -> SettledSync | None:
        """Write the positions of named consumers; then the job makes them last.

        None: there is nothing to make last. The job ends with `finish_settled_sync`.
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
        return SettledSync(
            files=self._state.files,
            directory=self.directory,
            with_directory=with_directory,
            paths=paths,
        )

    def finish_settled_sync(self, job: SettledSync) -> None:
        """End a job after its `run`, on the owner's thread. Raises StoreFailed if it did not succeed."""
        self._state.check_synced(job)

    # -- how far producers have come ------------------------------------------------------------------

    def forget_producers(self, heard_before: int) -> int:
        """Forget producers last heard before that, ms since the epoch; return how many."""
        return self.producers.table.sweep(heard_before)

    def _cover(self) -> None:
        """Write at once what producers have sent.

        All that was appended is on stable storage, or nobody asks for that.
        """
        cover = self.producers.cover(self.next_offset)
        try:
            cover.run()
        except Exception as error:  # met by the next append or sync
            self._state.fail(error)
        else:
            self.producers.covered(cover)

    # -- damage and numbers ---------------------------------------------------------------------------

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Offsets whose messages are lost by damage that is known, [from, to) each, ascending."""
        return self.known_damage.gaps()

    @property
    def damage(self) -> list[Damage]:
        """What recovery and readers found broken; the first places of it."""
        return self.known_damage.places

    @property
    def disk_bytes(self) -> int:
        """How many bytes the segments take."""
        return self._segments.disk_bytes

    def stats(self) -> dict[str, int]:
        """Return the numbers of the stream by name."""
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
    """Return what stands for a message's filter value in the `filters` of an append and the `wanted` of a read.

    Now and then it is the same for different values: readers look again.
    """
    crc = record.crc32c(value)
    return crc if crc not in (chunk.UNFILTERED, chunk.ANY) else 1


def wanted_filters(values: Iterable[bytes], *, unfiltered: bool) -> array[int]:
    """Return what `read` takes as `wanted`. `unfiltered`: messages without a value too."""
    return array(
        "I",
        sorted(
            {filter_of(value) for value in values} | ({chunk.UNFILTERED} if unfiltered else set())
        ),
    )
