"""Copy the messages of a log to another log, as chunks that keep their offsets and timestamps.

The source says which chunks follow an offset, and the target takes those that begin where it ends.
So either may end at any moment, and the copy goes on where the target is. What a log knows beside
its messages goes over when all messages have.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from shardmq.shardd.store.damage import KnownDamage
from shardmq.shardd.store.errors import Closed, DiskFull
from shardmq.shardd.store.format.chunk import chunk_at
from shardmq.shardd.store.state import StoreState
from shardmq.shardd.store.streams.positions import Positions
from shardmq.shardd.store.streams.producers import StreamProducers
from shardmq.shardd.store.streams.reading import StreamCache, copied, sum_before, sum_of
from shardmq.shardd.store.streams.segment import HEADER_BYTES
from shardmq.shardd.store.streams.segments import StreamSegments, UnderSync

# The sum before the first message where no chunk ends there.
NO_CHUNK = -1
# The place of the flags in a chunk, and the flag that messages name a producer (chunk.pyx).
FLAGS_AT, IN_SEQUENCE = 27, 2


class Copied(NamedTuple):
    """Chunks for another log, whole and sealed for no file.

    first, behind: the offset of their first message, and that behind their last one.
    oldest: the first offset of the log. newest_before: the latest timestamp before that, 0 if there
        was nothing.
    end: the offset behind the last message of the log, whether it is committed or not.
    behind_bytes: the bytes of the chunks that follow.
    before: the checksum of the chunk that ends at `first`, or NO_CHUNK; None if the log has no
        message before `first`, and if there are no chunks until a sync.
    """

    chunks: bytes
    first: int
    behind: int
    oldest: int
    newest_before: int
    end: int
    behind_bytes: int
    before: int | None


class Log(Protocol):
    """The log that is copied; log.py explains all of it."""

    next_offset: int
    committed_offset: int
    positions: Positions
    producers: StreamProducers
    known_damage: KnownDamage

    @property
    def first_offset(self) -> int: ...
    def append_chunks(self, data: bytearray, rows: array[int], next_offset: int) -> None: ...
    def truncate(self, offset: int | None = None, newest_before: int = 0) -> bool: ...


class LogCopies:
    """The copies of one log, and the copy that it is."""

    def __init__(
        self,
        log: Log,
        state: StoreState[UnderSync],
        segments: StreamSegments,
        cache: StreamCache,
    ) -> None:
        self._log = log
        self._state = state
        self._segments = segments
        self._cache = cache
        # The end of the last chunk that was taken, which may not be synced, and its checksum.
        self._last = 0, 0
        self.lacks_room = False  # the last sync had no room for positions or producers

    def copied_from(self, offset: int, bytes_max: int) -> Copied:
        """Return the chunks of committed messages from `offset` on, or from the first offset.

        No more than `bytes_max` bytes are returned, but at least one chunk, if there is one. The
        chunks end at a gap: if there are none, though messages are behind `offset`, messages are
        lost there.
        """
        if self._state.stage != "open":
            raise Closed("the stream is not open")
        offset = first = max(offset, self._log.first_offset)
        limit, segments = self._log.committed_offset, self._segments.all
        found, behind_bytes = bytearray(), 0
        for segment in segments[max(bisect_right(self._segments.firsts, offset) - 1, 0) :]:
            if segment.end <= offset:
                continue
            if offset >= limit or behind_bytes:
                behind_bytes += segment.used - segment.places.get(offset, HEADER_BYTES)
                continue
            before, room = offset, bytes_max - len(found)
            if room > 0:
                more, offset = copied(
                    self._cache, segment, offset, limit, room, self._log.known_damage.report
                )
                # A chunk that is larger than the room is for the next batch.
                if found and len(more) > room:
                    offset, more = before, bytearray()
                found += more
            if offset < segment.end:
                behind_bytes += segment.used - segment.places.get(offset, HEADER_BYTES)
        oldest = self._segments.all[0].newest_before if self._segments.all else 0
        # Nothing is put at the other place while what follows waits for a sync.
        waits = not found and offset == limit < self._log.next_offset
        return Copied(
            bytes(found),
            first,
            offset,
            self._log.first_offset,
            oldest,
            self._log.next_offset,
            behind_bytes,
            None if waits else self._sum_before(first),
        )

    def _sum_before(self, offset: int) -> int | None:
        if offset <= self._log.first_offset:
            return None
        at = bisect_right(self._segments.firsts, offset - 1) - 1
        found = sum_before(
            self._cache, self._segments.all[at], offset, self._log.known_damage.report
        )
        return NO_CHUNK if found is None else found

    def goes_on(self, first: int, before: int | None) -> bool:
        """Return whether messages from `first` on belong behind the last one of this log.

        They do not if the other log has other messages before them than it had when they were
        copied: it has lost some since, and has taken in others. `before` is that of `Copied`.
        """
        if before is None or first != self._log.next_offset or first == self._log.first_offset:
            return True
        end, found = self._last
        return before == (found if end == first else self._sum_before(first))

    def take(self, chunks: bytes, oldest: int, newest_before: int) -> None:
        """Append chunks of another log (`copied_from`), which begin where this log ends.

        `oldest` is the first offset of the other log, and `newest_before` the latest timestamp
        before it. If this log has nothing that is not older, it begins anew there. Raises
        ValueError for chunks that go on elsewhere; then none is appended.
        """
        self._state.check_usable()
        if self._log.first_offset < oldest and self._log.next_offset <= oldest:
            if self._state.job is not None:
                raise ValueError("the log cannot begin anew during a sync")
            # All messages go first: beside the new segment, those that a crash has left would look
            # as if the messages between were lost.
            if not (self._log.truncate() and self._log.truncate(oldest, newest_before)):
                raise DiskFull(f"no room to begin anew in {self._state.directory}")
        if not chunks:
            return
        data, rows, next_offset = bytearray(chunks), array("Q"), self._log.next_offset
        at, is_in_sequence = 0, False
        while at < len(data):
            length, first, count, timestamp = chunk_at(data, 0, len(data), at, 0)
            if not length or first != next_offset:
                raise ValueError(f"no chunk of offset {next_offset} at byte {at}")
            is_in_sequence = is_in_sequence or bool(data[at + FLAGS_AT] & IN_SEQUENCE)
            rows.extend((at, first, timestamp))
            at, next_offset = at + length, first + count
        if is_in_sequence and not self._log.producers.in_use and self._state.job is not None:
            raise ValueError("a sync may be making the file of producers")
        try:
            self._state.make_directory()
            if is_in_sequence:
                self._log.producers.prepare(self._log.committed_offset)
        except Exception as error:
            raise self._state.named(error) from error
        last = next_offset, sum_of(chunks, rows[-3])
        self._log.append_chunks(data, rows, next_offset)
        self._last = last
        for at in rows[::3] if is_in_sequence else ():
            self._log.producers.table.gather_chunk(data, at)

    def take_places(self, positions: Mapping[bytes, int], producers: bytes) -> None:
        """Have these positions, and no others, and know how far these producers have come.

        All is on stable storage after the next sync, unless `lacks_room`. Raises ValueError while
        not all messages are.
        """
        self._state.check_usable()
        if self._log.committed_offset != self._log.next_offset:
            raise ValueError("not all messages are on stable storage")
        try:
            self._state.make_directory()
        except Exception as error:
            raise self._state.named(error) from error
        for name in [name for name in self._log.positions.offsets if name not in positions]:
            self._log.positions.forget(name)
        for name, offset in positions.items():
            self._log.positions.set(name, offset)
        self._log.positions.is_due = True
        if producers:
            self._log.producers.add(producers)
