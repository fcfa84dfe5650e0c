"""Divide a batch among segments.

Only whole records go to a segment. A record too big for a usual segment gets a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmq.shardd.store.reclaim import Reclaimer
from shardmq.shardd.store.record import Batch
from shardmq.shardd.store.segment import END_BYTES, HEADER_BYTES, Segment, file_name


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
