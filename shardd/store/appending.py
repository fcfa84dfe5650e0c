"""Put batches of records into the segments of a store.

This file decides which segment takes a record, and when a segment is sealed.
"""

from __future__ import annotations

from shardmq.shardd.store.flushing import Flusher
from shardmq.shardd.store.pieces import Piece, allocate_alone, cut
from shardmq.shardd.store.record import Arrival, Batch
from shardmq.shardd.store.segment import HEADER_BYTES, Segment, encode_header
from shardmq.shardd.store.segments import Segments


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
