"""Scan a stream while another process writes it, and return a range of offsets as columns.

The files are opened read-only. The caller says where to stop, and guarantees that all messages
below are on stable storage: so the bytes that are read here do not change any more. During a scan
the writer may add segments, delete the oldest ones (`Truncated`) and write indexes.

A scan shares no memory with other scans, except `Places`: hints where to begin.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict

from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.files import Files, is_missing, read_file, read_head
from shardmq.shardd.store.format.chunk import Scanner, chunk_at
from shardmq.shardd.store.format.columns import OFFSET, Columns, Filter, Sink
from shardmq.shardd.store.streams.reading import OFFSET_MAX
from shardmq.shardd.store.streams.segment import (
    HEADER_BYTES,
    INDEX_EVERY_BYTES,
    StreamSegment,
    decode_header,
    decode_index,
    file_name,
    last_not_above,
    last_older,
    parse_name,
)

# Each scan has one window of this size.
WINDOW_BYTES = 1 << 20
# Bytes read at once where chunks are not larger: they and the columns fit into the cache of a core.
PIECE_BYTES = 128 << 10
# Bounds of the hints in memory: segments, and places in each (one for each pause of a scan).
HINTED_MAX = 256
HINTS_MAX = 8192
GAPS_MAX = 1000


class Truncated(Exception):
    """The message at `offset` was deleted; `first` is the first offset that is still there."""

    def __init__(self, offset: int, first: int) -> None:
        super().__init__(f"offset {offset} is gone, {first} is the first")
        self.offset, self.first = offset, first


class Places:
    """Positions that scans have reached in segments without an index.

    The next scan of such a segment begins there. Several threads may share one object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hints: OrderedDict[tuple[str, int], tuple[array[int], array[int]]] = OrderedDict()

    def before(self, segment: StreamSegment, offset: int) -> int:
        """Return the position of a chunk before which all offsets are below `offset`."""
        with self._lock:
            offsets, positions = self._hints.get(
                (segment.path, segment.salt), (array("Q"), array("Q"))
            )
            at = bisect_right(offsets, offset) - 1
            return positions[at] if at >= 0 else HEADER_BYTES

    def note(self, segment: StreamSegment, offset: int, position: int) -> None:
        """Note that all messages from `offset` on lie at `position` or behind it."""
        key = (segment.path, segment.salt)
        with self._lock:
            offsets, positions = self._hints.setdefault(key, (array("Q"), array("Q")))
            self._hints.move_to_end(key)
            at = bisect_left(offsets, offset)
            if (at < len(offsets) and offsets[at] == offset) or len(offsets) >= HINTS_MAX:
                return
            offsets.insert(at, offset)
            positions.insert(at, position)
            while len(self._hints) > HINTED_MAX:
                self._hints.popitem(last=False)


class Scan:
    """Reads the offsets [start, stop) of the stream in `directory` into `columns`.

    All messages below `stop` must be on stable storage.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        start: int,
        stop: int,
        columns: Columns,
        places: Places | None = None,
    ) -> None:
        self.offset = start
        self.stop = stop
        self.columns = columns
        self.damaged_bytes = 0
        # The first GAPS_MAX ranges [from, to) of offsets that are lost to damage.
        self.gaps: list[tuple[int, int]] = []
        self._files = files
        self._directory = directory
        self._places = Places() if places is None else places
        self._segment: StreamSegment | None = None
        self._handle = self._descriptor = -1
        # The first offset of the next segment, if there was one when this segment was entered.
        self._end: int | None = None
        self._position = self._checked = 0
        self._window = bytearray(WINDOW_BYTES)
        self._base = self._used = 0

    def close(self) -> None:
        if self._handle >= 0:
            self._files.close(self._handle)
        self._segment, self._handle, self._descriptor = None, -1, -1

    def fill(self, rows_max: int, bytes_max: int, sink: Sink | None = None) -> int:
        """Read the next batch into `columns`; return the number of its rows.

        Without a `sink`, 0 rows mean that the scan is at its end. With a `sink` full batches go to
        the sink until it pauses. Only the last rows are then left in `columns`, and the scan is at
        its end when `offset` is `stop`. Raises Truncated when messages were deleted, and Corrupt
        when the disk cannot be read.
        """
        self.columns.clear()
        try:
            while self.offset < self.stop:
                if self._segment is None:
                    self._enter()
                elif self._position >= self._segment.synced:
                    self._leave()
                elif self._take(self._segment, rows_max, bytes_max, sink):
                    break
        except Truncated:
            # Rows that were read come first; the next call raises this again.
            if not self.columns.rows:
                raise
        except OSError as error:
            raise Corrupt(f"cannot read {self._directory}: {error}") from error
        return self.columns.rows

    # -- within a segment --------------------------------------------------------------------------

    def _take(
        self, segment: StreamSegment, rows_max: int, bytes_max: int, sink: Sink | None
    ) -> bool:
        """Read chunks of the segment; return whether the batch is full or the sink pauses."""
        columns, position = self.columns, self._position
        if not self._base <= position < self._base + self._used:
            self._base, self._used = position, 0
            if self._descriptor < 0:
                self._load(segment, position, 1)
        columns.take(
            self._window, self._base, self._used, position, self._checked, segment.salt,
            self.offset, self.stop, rows_max, bytes_max, self._descriptor, segment.synced,
            PIECE_BYTES, sink,
        )  # fmt: skip
        self._position, self.offset, self._checked = (
            columns.position,
            columns.offset,
            columns.checked,
        )
        self._base, self._used = columns.base, columns.used
        if (columns.need or not self._used) and self._base + self._used < segment.synced:
            self._load(segment, self._position, columns.need)
        elif columns.need or columns.damaged:
            self._skip(segment)
        if not segment.has_index:
            self._places.note(segment, self.offset, self._position)
        return columns.full

    def _load(self, segment: StreamSegment, position: int, least: int) -> None:
        """Move the window to `position`; bytes that are in memory already are not read again.

        The window has WINDOW_BYTES, or `least` bytes if that is more, but it ends with the segment.
        Raises Corrupt when the file ends before `least` bytes, or when nothing more can be read.
        """
        size = min(max(least, WINDOW_BYTES), segment.synced - position)
        within = position - self._base
        kept = min(max(self._used - within, 0), size) if within >= 0 else 0
        source = self._window
        if len(source) < size or len(source) > 2 * max(size, WINDOW_BYTES):
            self._window = bytearray(max(size, WINDOW_BYTES))
        with memoryview(source) as old, memoryview(self._window) as view, view[kept:size] as part:
            view[:kept] = old[within : within + kept]
            got = self._files.read_into(self._handle, part, position + kept)
        self._base, self._used = position, kept + got
        if kept + got < min(max(least, 1), size) or (got == 0 and kept < size):
            raise Corrupt(
                f"{segment.path} ends at byte {position + kept + got}, "
                f"{segment.synced} bytes were there"
            )

    def _skip(self, segment: StreamSegment) -> None:
        """Move to the next intact chunk behind damage, and note the bytes and offsets lost."""
        before = self._position
        scanner = Scanner(segment.salt, before, segment.first, 0, OFFSET_MAX, INDEX_EVERY_BYTES)
        while scanner.cursor < segment.synced and not scanner.holes:
            self._load(segment, scanner.cursor, scanner.need)
            scanner.feed(self._window, self._used, self._base + self._used >= segment.synced)
        self._position = scanner.holes[0][1] if scanner.holes else segment.synced
        self._checked = self._used = 0
        self.damaged_bytes += min(self._position, max(scanner.dirt, before)) - before
        # Without an intact chunk the next segment tells where offsets go on.
        if scanner.holes:
            _, following, _, _ = chunk_at(
                self._window, self._base, self._used, self._position, segment.salt
            )
            self._note_gap(self.offset, following)

    def _note_gap(self, start: int, stop: int) -> None:
        stop = min(stop, self.stop)
        if start < stop and len(self.gaps) < GAPS_MAX:
            self.gaps.append((start, stop))

    # -- from segment to segment -------------------------------------------------------------------

    def _enter(self) -> None:
        """Open the segment whose range of offsets has `offset`. Raises Truncated if it is gone."""
        firsts = segments_of(self._files, self._directory)
        at = bisect_right(firsts, self.offset) - 1
        if at < 0:
            raise Truncated(self.offset, firsts[0] if firsts else self.stop)
        try:
            self._handle, segment = open_segment(self._files, self._directory, firsts[at])
        except FileNotFoundError:
            raise Truncated(
                self.offset, firsts[at + 1] if at + 1 < len(firsts) else self.stop
            ) from None
        self._end = firsts[at + 1] if at + 1 < len(firsts) else None
        self._segment = segment
        self._descriptor = self._files.descriptor(self._handle)
        if segment.entries is not None:
            self._position = last_not_above(segment.entries, self.offset)
        else:
            self._position = self._places.before(segment, self.offset)
        self._checked = self._used = 0

    def _leave(self) -> None:
        segment = self._segment
        assert segment is not None
        self.close()
        before = self.offset
        following = [
            first for first in segments_of(self._files, self._directory) if first > segment.first
        ]
        if self._end is not None:
            self.offset = max(self.offset, self._end)
        elif following:
            # The next segment was begun during the scan. Offsets between here and its first one are
            # lost to damage at the end of this segment.
            self.offset = max(self.offset, min(following[0], self.stop))
        else:
            self.offset = self.stop
        self._note_gap(before, self.offset)


def segments_of(files: Files, directory: str) -> list[int]:
    """Return the first offset of each segment of the stream, ascending."""
    try:
        names = files.list(directory)
    except OSError as error:
        if is_missing(error):
            return []
        raise
    return sorted(
        parsed[1] for parsed in map(parse_name, names) if parsed is not None and parsed[0] == "log"
    )


def open_segment(files: Files, directory: str, first: int) -> tuple[int, StreamSegment]:
    """Open a segment read-only; return its handle and the segment, with its index if it has one.

    A file without a valid header gives an empty segment. Raises FileNotFoundError when the segment
    was deleted.
    """
    path = f"{directory}/{file_name('log', first)}"
    handle = files.open(path, read_only=True)
    try:
        head = read_head(files, handle, HEADER_BYTES)
        size = files.size(handle)
        segment = decode_header(head, path)
        if segment is None or segment.first != first:
            return handle, StreamSegment(first, 0, path, has_index=True, entries=array("Q"))
        segment.synced = size
        data = read_file(files, f"{directory}/{file_name('index', first)}")
        segment.has_index = bool(data) and decode_index(data, segment, size)
    except BaseException:
        files.close(handle)
        raise
    return handle, segment


def find(
    files: Files, directory: str, timestamp: int, stop: int, places: Places | None = None
) -> int:
    """Return the offset of the first message below `stop` in a chunk not older than `timestamp`.

    `timestamp` is in ms. Return `stop` when all chunks are older. Raises Truncated when the segment
    is deleted meanwhile.
    """
    firsts = segments_of(files, directory)

    def newest_before(first: int) -> int:
        handle, segment = open_segment(files, directory, first)
        files.close(handle)
        return segment.newest_before

    try:
        at = bisect_left(firsts, timestamp, key=newest_before) - 1
        if at < 0 and firsts and newest_before(firsts[0]):
            return min(firsts[0], stop)  # a deleted chunk was not older
        start = _begin(files, directory, firsts[max(at, 0)], timestamp) if firsts else stop
    except FileNotFoundError:
        left = segments_of(files, directory)
        raise Truncated(firsts[0], left[0] if left else stop) from None
    scan = Scan(files, directory, start, stop, Columns(OFFSET, Filter(since=timestamp)), places)
    try:
        if not scan.fill(1, 1):
            return stop
        return scan.columns.first_offset
    finally:
        scan.close()


def _begin(files: Files, directory: str, first: int, timestamp: int) -> int:
    """Return an offset in the segment before which all messages are older than `timestamp`."""
    handle, segment = open_segment(files, directory, first)
    files.close(handle)
    if segment.entries is None:
        return first
    position = last_older(segment.entries, timestamp)
    found = [
        segment.entries[i]
        for i in range(0, len(segment.entries), 3)
        if segment.entries[i + 2] == position
    ]
    return found[0] if found else first
