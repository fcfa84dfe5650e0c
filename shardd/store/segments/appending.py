"""Put batches of records into the segments of a store.

This file decides which segment takes a record, and when a segment is sealed. Only whole records go
to a segment. A record too big for a usual segment gets a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmq.shardd.lending import Lender
from shardmq.shardd.store.format.record import Arrival, Batch, stored_bytes
from shardmq.shardd.store.format.segment_file import (
    END_BYTES,
    HEADER_BYTES,
    encode_header,
    file_name,
)
from shardmq.shardd.store.open_segment import RENEW_BYTES
from shardmq.shardd.store.segments.reclaim import Reclaimer
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments
from shardmq.shardd.store.segments.syncs import Flusher


@dataclass(slots=True)
class Piece:
    """The records [start, stop) of a batch, which go to one segment.

    A piece that is `alone` is one record too big for a usual segment. A `fresh` piece begins a new
    segment.
    """

    start: int
    stop: int
    fresh: bool = False
    alone: bool = False
    segment: Segment | None = None  # only for a piece that is alone


class Appender:
    """Appends the batches of one store that do not fit into its open segment."""

    def __init__(self, segments: Segments, flusher: Flusher) -> None:
        self._segments = segments
        self._flusher = flusher
        self._state = segments.state
        self.batch = Batch()  # the batch that was planned last

    def append_in_pieces(
        self, records: bytes | bytearray | memoryview, indexes: bool, in_sequence: bool
    ) -> list[Arrival]:
        """Append the planned batch to a new segment, or to more than one."""
        batch = self.batch
        view = memoryview(records).cast("B")
        pieces = self._make_room(view)
        try:
            placed = self._place(pieces, view, in_sequence)
        except Exception as error:
            raise self._state.fail(error) from error
        self._segments.counters.appended_messages += batch.messages
        self._segments.counters.appended_bytes += len(view)
        arrivals = batch.take(placed, indexes)
        batch.facts(records, arrivals)
        return arrivals

    def append_lent(
        self, records: bytes | bytearray | memoryview, lender: Lender, indexes: bool
    ) -> list[Arrival] | None:
        """Append a batch with LENT records, whose bodies stay where they are.

        Returns None, and appends nothing, if the batch is larger than a usual segment.
        """
        batch, counters = self.batch, self._segments.counters
        size = stored_bytes(records, len(lender.memory))
        segment = self._with_room(size)
        if segment is None:
            return None
        buffer, position = segment.buffer, segment.used
        assert buffer is not None
        try:
            segment.lent.lay_out(records, buffer, position, lender)
            with memoryview(buffer) as whole, whole[position : position + size] as laid_out:
                batch.plan(laid_out, True)
                arrivals, counts = batch.put(
                    laid_out,
                    buffer,
                    position,
                    segment.number,
                    segment.salt,
                    indexes,
                    segment.abstracts,
                )
        except Exception:
            segment.lent.forget_from(position)
            raise
        segment.lends = len(segment.lent) > 0
        segment.add(size, counts)
        counters.appended_messages += batch.messages
        counters.appended_bytes += size
        return arrivals

    def _with_room(self, size: int) -> Segment | None:
        """Return the open segment if it has room for so many bytes in one piece, or a new one.

        Returns None if no usual segment has so much room.
        """
        segments = self._segments
        segment = segments.open
        if segment is not None and segment.buffer is not None:
            if segment.is_needless and segment.used > RENEW_BYTES:
                segment = self.renew(segment)
            if size <= segment.room():
                return segment
        if size > segments.segment_bytes - HEADER_BYTES - END_BYTES:
            return None
        try:
            self._state.make_directory()
            self._flusher.write_oldest()
            segments.reclaimer.set_aside(1)
        except Exception as error:
            raise self._state.named(error) from error
        try:
            return self._segment_for(Piece(0, size, fresh=True))
        except Exception as error:
            raise self._state.fail(error) from error

    def _place(
        self, pieces: list[Piece], view: memoryview, in_sequence: bool
    ) -> list[tuple[int, int, int, int]]:
        """Copy the pieces; return (start, stop, segment, position) of each."""
        batch = self.batch
        placed = []
        for piece in pieces:
            segment = self._segment_for(piece)
            placed.append((piece.start, piece.stop, segment.number, segment.used))
            counts = batch.counts(piece.start, piece.stop)
            if in_sequence:
                self._segments.producers.appended(segment)
            if piece.alone:
                self._write_alone(segment, view[piece.start : piece.stop])
            else:
                assert segment.buffer is not None
                batch.copy(
                    view,
                    piece.start,
                    piece.stop,
                    segment.buffer,
                    segment.used,
                    segment.salt,
                    segment.abstracts,
                )
            segment.add(piece.stop - piece.start, counts)
        return placed

    def _make_room(self, view: memoryview) -> list[Piece]:
        """Divide the batch among segments, and do everything first that could still fail."""
        segments = self._segments
        room = segments.open.room() if segments.open else 0
        pieces = cut(self.batch, view, room, segments.segment_bytes)
        if pieces[-1].fresh:
            try:
                self._state.make_directory()
                self._flusher.write_oldest()
                segments.reclaimer.set_aside(
                    sum(piece.fresh and not piece.alone for piece in pieces)
                )
                allocate_alone(
                    segments.reclaimer,
                    [piece for piece in pieces if piece.fresh],
                    segments.next_number,
                )
            except Exception as error:
                raise self._state.named(error) from error
        return pieces

    def _segment_for(self, piece: Piece) -> Segment:
        segments = self._segments
        if piece.fresh:
            self._seal()
            number = segments.take_number()
            if piece.segment is not None:
                assert piece.segment.number == number
                return piece.segment
            self._begin(segments.reclaimer.new_segment(number))
        assert segments.open is not None
        return segments.open

    def renew(self, segment: Segment) -> Segment:
        """Give the open segment, of which no message is needed, a new number.

        The segment keeps its file and memory: entries stay in publish order, and pages stay warm.
        """
        segments = self._segments
        del segments.by_number[segment.number]
        segments.candidates.remove(segment)
        segments.settled.drop(segment)
        renewed = Segment(
            segments.take_number(),
            segments.files.salt(),
            segment.capacity,
            segment.path,
            segment.handle,
            segment.take_buffer(),
        )
        self._begin(renewed)
        return renewed

    def renew_if_needless(self) -> None:
        """Renew an open segment with messages of which none is needed, and none is on disk."""
        segment = self._segments.open
        if segment is not None and segment.used > HEADER_BYTES and segment.is_needless:
            self.renew(segment)

    def _begin(self, segment: Segment) -> None:
        """Write to this segment from now on."""
        segments = self._segments
        segments.open = segment
        segments.enlist(segment)
        if segments.sync:  # without syncs, only the last segments get an index, at a clean stop
            segment.collect_abstracts()

    def _seal(self) -> None:
        segments = self._segments
        segment, segments.open = segments.open, None
        if segment is None:
            return
        segment.sealed = True
        segments.producers.sealed(segment)
        if segment.live == 0:
            segments.retire(segment)
        else:
            segments.in_memory.append(segment)

    def _write_alone(self, segment: Segment, part: memoryview) -> None:
        """Write one record straight to the file: gigabytes must not be held in memory twice."""
        segments = self._segments
        assert segment.handle is not None
        # The header that is written here says that all segments before this one are stored.
        if segment.in_sequence:
            for earlier in segments.in_memory:
                self._flusher.flush_segment(earlier)
        salted = bytearray(part[:8])
        salted[4:8] = (int.from_bytes(part[4:8], "little") ^ segment.salt).to_bytes(4, "little")
        segment.chain = segments.producers.chain_before(segment)
        head = encode_header(segment.number, segment.salt, segment.capacity, chain=segment.chain)
        segments.files.write(segment.handle, head + salted, 0)
        segments.files.write(segment.handle, part[8:], HEADER_BYTES + 8)
        segment.flushed = HEADER_BYTES + len(part)
        segments.enlist(segment)
        segments.producers.sealed(segment)
        segments.unsynced[segment.number] = segment
        segments.directory_changed = True
        segments.counters.written_bytes += len(part)
        segments.handles.keep(segment)


def cut(batch: Batch, view: memoryview, room: int, segment_bytes: int) -> list[Piece]:
    """Divide the records of `batch`, whose bytes are `view`.

    The open segment gets as many records as fit into its `room`, then fresh segments follow.
    """
    room_of_fresh = segment_bytes - HEADER_BYTES - END_BYTES
    pieces = []
    start, fresh = 0, False
    while start < len(view):
        stop = batch.fit(start, room)
        if stop > start:
            pieces.append(Piece(start, stop, fresh))
        elif fresh:
            stop = start + int.from_bytes(view[start : start + 4], "little")
            pieces.append(Piece(start, stop, True, alone=True))
        start, fresh, room = stop, True, room_of_fresh
    return pieces


def allocate_alone(reclaimer: Reclaimer, fresh: list[Piece], first_number: int) -> None:
    """Create the files of the records that are too big for a usual segment.

    Each piece of `fresh` takes one number, from `first_number` on. If one file cannot be created,
    the others are removed and the error is raised.
    """
    files, directory = reclaimer.files, reclaimer.directory
    made: list[Segment] = []
    try:
        for number, piece in enumerate(fresh, first_number):
            if piece.alone:
                size = HEADER_BYTES + piece.stop - piece.start + END_BYTES
                path = f"{directory}/{file_name('msgs', number)}"
                handle = reclaimer.create(path, size).handle
                piece.segment = Segment(number, files.salt(), size, path, handle, sealed=True)
                made.append(piece.segment)
    except Exception:
        for segment in made:
            assert segment.handle is not None
            files.close(segment.handle)
            files.remove(segment.path)
        raise
