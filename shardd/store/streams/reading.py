"""Read segments of streams, through caches that all streams of a process share.

`StreamCache` holds open files, windows of bytes and sparse indexes, and bounds each of the three.
`Walk` is one read: it goes from window to window and skips damage. The log decides which offsets
may be read.

A reader is only a position here, so any number of readers can read while the log is appended to.
The windows and places kept for readers are caches: they can be dropped at any time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.files import Files, read_file
from shardmq.shardd.store.format.chunk import Copier, Packer, Scanner, chunk_at, seal
from shardmq.shardd.store.streams.segment import (
    ENTRY_NUMBERS,
    HEADER_BYTES,
    INDEX_EVERY_BYTES,
    StreamSegment,
    decode_index,
    file_name,
    last_not_above,
    last_older,
)

# Open files of all streams, without those whose bytes wait for a sync.
HANDLES_MAX = 64
WINDOWS_MAX = 8
WINDOW_BYTES_MIN = 64 << 10
WINDOW_BYTES_MAX = 1 << 20
# Bytes of the indexes of sealed segments in memory: 24 for each INDEX_EVERY_BYTES of a segment.
INDEXES_BYTES_MAX = 4 << 20
# Bytes that one read may scan in search of messages that pass its filter.
LOOK_BYTES_MAX = 4 << 20
# Damaged places remembered for each segment. Beyond this number all are forgotten and found anew.
HOLES_MAX = 1024
OFFSET_MAX = (1 << 63) - 1
COUNT_MAX = 1 << 62

Report = Callable[[Damage], None]


@dataclass(slots=True, eq=False)
class Window:
    """Bytes of a segment in memory: `used` bytes of `data`, from position `start` on."""

    segment: StreamSegment
    start: int
    used: int
    data: bytearray
    checked: int = 0  # position of the last chunk in the window whose checksum was found right

    def holds(self, segment: StreamSegment, position: int) -> bool:
        return self.segment is segment and self.start <= position < self.start + self.used


@dataclass(slots=True)
class Messages:
    """The messages that one read found.

    `runs` holds (first offset, count) of messages with consecutive offsets. Messages between two
    runs are damaged, or did not pass the filter. The result can be empty although messages follow;
    the next read goes on from `next_offset`.
    """

    blob: bytes  # stored messages back to back
    sizes: array[int]  # the body bytes of each message
    runs: array[int]
    next_offset: int


class StreamCache:
    """Open files, windows, indexes and buffers that the streams of a process share."""

    def __init__(
        self,
        files: Files,
        *,
        handles_max: int = HANDLES_MAX,
        indexes_bytes_max: int = INDEXES_BYTES_MAX,
        read_only: bool = False,
    ) -> None:
        self.files = files
        self.read_only = read_only
        self.handles_max = handles_max
        self.indexes_bytes_max = indexes_bytes_max
        self._handles: OrderedDict[StreamSegment, int] = OrderedDict()  # last used last
        self._pinned: set[StreamSegment] = set()
        self._windows: list[Window] = []  # last used last
        self._indexed: OrderedDict[StreamSegment, int] = OrderedDict()  # bytes of each index
        self._indexes_bytes = 0
        self.copier = Copier()
        self.packer = Packer()

    # -- open files --------------------------------------------------------------------------------

    def handle(self, segment: StreamSegment) -> int:
        handle = self._handles.get(segment)
        if handle is None:
            handle = self.files.open(segment.path, read_only=self.read_only)
            self.adopt(segment, handle)
        else:
            self._handles.move_to_end(segment)
        return handle

    def adopt(self, segment: StreamSegment, handle: int) -> None:
        """Keep the open file of a segment; close the least used files when there are too many.

        Files of pinned segments stay open.
        """
        self._handles[segment] = handle
        excess = len(self._handles) - self.handles_max
        if excess > 0:
            idle = [
                other
                for other in self._handles
                if other not in self._pinned and other is not segment
            ]
            for other in idle[:excess]:
                self.files.close(self._handles.pop(other))

    def pin(self, segment: StreamSegment) -> None:
        """Keep the file of the segment open until `unpin`.

        The operating system reports a failed write-back only to handles that were open at the time.
        """
        self._pinned.add(segment)

    def unpin(self, segment: StreamSegment) -> None:
        self._pinned.discard(segment)

    def forget(self, segment: StreamSegment) -> None:
        """Drop everything cached for a segment that is deleted or whose log is closed."""
        self._pinned.discard(segment)
        handle = self._handles.pop(segment, None)
        self._windows = [window for window in self._windows if window.segment is not segment]
        self._indexes_bytes -= self._indexed.pop(segment, 0)
        if handle is not None:
            self.files.close(handle)

    # -- windows -----------------------------------------------------------------------------------

    def window(self, segment: StreamSegment, position: int, size: int) -> Window:
        """Return a window that holds the byte at `position`.

        If there is none, read `size` bytes from `position` on.
        """
        for i in range(len(self._windows) - 1, -1, -1):
            if self._windows[i].holds(segment, position):
                self._windows.append(self._windows.pop(i))
                return self._windows[-1]
        return self.load(segment, position, size)

    def load(self, segment: StreamSegment, position: int, size: int) -> Window:
        """Read a window of `size` bytes from `position` on, or less at the end of the synced bytes.

        Raises Corrupt when the file cannot be read or is too short.
        """
        size = max(min(size, segment.synced - position), 0)
        data = self._buffer(size)
        try:
            with memoryview(data) as view, view[:size] as part:
                used = self.files.read_into(self.handle(segment), part, position)
        except OSError as error:
            raise Corrupt(f"cannot read byte {position} of {segment.path}: {error}") from error
        if used != size:
            raise Corrupt(
                f"{segment.path} ends at byte {position + used}, "
                f"{segment.synced} bytes were written"
            )
        window = Window(segment, position, used, data)
        # A window with a huge message is not worth the memory.
        if len(data) <= WINDOW_BYTES_MAX:
            self._windows.append(window)
        return window

    def _buffer(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes.

        The buffer of the least recently used window is taken if it is large enough, as its pages
        are warm.
        """
        while len(self._windows) >= WINDOWS_MAX:
            oldest = self._windows.pop(0)
            if len(oldest.data) >= size:
                return oldest.data
        return bytearray(size)

    # -- indexes -----------------------------------------------------------------------------------

    def index(self, segment: StreamSegment) -> array[int]:
        """Return the sparse index of a segment: from memory, from its file or from its chunks.

        Raises Corrupt when the files cannot be read.
        """
        if segment.entries is None:
            self._load_index(segment)
        elif segment in self._indexed:
            self._indexed.move_to_end(segment)
        assert segment.entries is not None
        return segment.entries

    def keep_index(self, segment: StreamSegment) -> None:
        """Keep the index of a sealed segment in memory, until newer ones need the room."""
        assert segment.entries is not None
        size = 8 * len(segment.entries)
        self._indexes_bytes += size - self._indexed.pop(segment, 0)
        self._indexed[segment] = size
        while self._indexes_bytes > self.indexes_bytes_max and len(self._indexed) > 1:
            oldest, size = self._indexed.popitem(last=False)
            self._indexes_bytes -= size
            oldest.entries = None

    def _load_index(self, segment: StreamSegment) -> None:
        try:
            handle = self.handle(segment)
            directory = segment.path.rpartition("/")[0]
            data = read_file(self.files, f"{directory}/{file_name('index', segment.first)}")
            if not decode_index(data, segment, self.files.size(handle)):
                scanner = scan(self.files, handle, segment, segment.used, segment.end)
                segment.entries, segment.last_chunk = scanner.index(), scanner.last_chunk
                # Zeros behind the last chunk are preallocated space that was not given back.
                segment.used = segment.synced = max(scanner.end, scanner.dirt)
        except OSError as error:
            raise Corrupt(f"cannot read {segment.path}: {error}") from error
        self.keep_index(segment)


def scan(files: Files, handle: int, segment: StreamSegment, size: int, limit: int) -> Scanner:
    """Check every chunk in the first `size` bytes of a file; return the scanner with the results.

    A chunk with offsets at or above `limit` counts as damaged.
    """
    scanner = Scanner(
        segment.salt, HEADER_BYTES, segment.first, segment.newest_before, limit, INDEX_EVERY_BYTES
    )
    window = bytearray(min(WINDOW_BYTES_MAX, max(size - HEADER_BYTES, 0)))
    while scanner.cursor < size:
        wanted = max(WINDOW_BYTES_MAX, scanner.need)
        if len(window) < min(wanted, size - scanner.cursor):
            window = bytearray(min(wanted, size - scanner.cursor))
        with memoryview(window) as view:
            used = files.read_into(handle, view, scanner.cursor)
        used = min(used, size - scanner.cursor)
        scanner.feed(window, used, used == 0 or scanner.cursor + used >= size)
        if used == 0:
            break
    return scanner


@dataclass(slots=True)
class Walk:
    """The state of one read: its position, the messages it has, and how many more it may take."""

    cache: StreamCache
    offset: int
    limit: int  # the read ends before this offset
    bytes_max: int
    wanted: array[int] | None
    report: Report
    blobs: list[bytes]
    sizes: array[int]
    runs: array[int]
    count_max: int = COUNT_MAX
    look_bytes: int = LOOK_BYTES_MAX
    full: bool = False

    def through(self, segment: StreamSegment) -> None:
        """Read the wanted messages of one segment.

        Afterwards `offset` is behind the segment or at the limit, or the read is `full`.
        """
        position = segment.places.get(self.offset) or last_not_above(
            self.cache.index(segment), self.offset
        )
        size = min(max(WINDOW_BYTES_MIN, 2 * self.bytes_max), WINDOW_BYTES_MAX)
        copier = self.cache.copier
        while position < segment.synced and not self.full:
            window, before = self.cache.window(segment, position, size), position
            position = self._copy(window, position)
            if copier.need:
                position = self._more(window, position, copier.need)
            elif copier.damaged:
                position = skip(self.cache, segment, position, self.report)
            elif position == before or self.look_bytes <= 0:
                self.full = True
        segment.remember_place(self.offset, position)
        if not self.full:
            self.offset = max(self.offset, min(segment.end, self.limit))

    def _copy(self, window: Window, position: int) -> int:
        copier = self.cache.copier
        blob, sizes, runs = copier.copy(
            window.data, window.start, window.used, position, window.checked, window.segment.salt,
            self.offset, self.limit, self.bytes_max, not self.blobs, self.wanted, self.count_max,
        )  # fmt: skip
        window.checked = copier.checked
        if sizes:
            self.blobs.append(blob)
            self.sizes += sizes
            self._add_runs(runs)
            self.bytes_max = max(self.bytes_max - len(blob), 0)
            self.count_max -= len(sizes)
        self.look_bytes -= copier.position - position
        self.offset = copier.offset
        enough = bool(self.blobs) and (self.bytes_max == 0 or self.count_max == 0)
        self.full = copier.full or self.offset >= self.limit or enough
        return copier.position

    def _add_runs(self, runs: array[int]) -> None:
        if self.runs and self.runs[-2] + self.runs[-1] == runs[0]:
            self.runs[-1] += runs[1]
            runs = runs[2:]
        self.runs += runs

    def _more(self, window: Window, position: int, need: int) -> int:
        """Load a window that begins with a chunk, because the last window ended within the chunk.

        Return the position to go on from. A chunk that would end behind the segment is damage.
        """
        segment = window.segment
        if window.start + window.used >= segment.synced:
            return skip(self.cache, segment, position, self.report)
        if need <= WINDOW_BYTES_MAX:
            self.cache.load(segment, position, max(need, min(2 * self.bytes_max, WINDOW_BYTES_MAX)))
            return position
        after = self._copy(self.cache.load(segment, position, need), position)
        if self.cache.copier.damaged or self.cache.copier.need:
            return skip(self.cache, segment, position, self.report)
        return after


def skip(cache: StreamCache, segment: StreamSegment, position: int, report: Report) -> int:
    """Return the position of the next intact chunk behind damage at `position`.

    The damage is reported when it is found for the first time.
    """
    stop = segment.holes.get(position)
    if stop is None:
        if len(segment.holes) >= HOLES_MAX:
            segment.holes.clear()
        stop = segment.holes[position] = _next_good(cache, segment, position)
        lost = lost_offsets(cache, segment, position, stop)
        report(Damage(segment.path.rpartition("/")[2], "corrupt", position, stop, lost))
    return stop


def lost_offsets(
    cache: StreamCache, segment: StreamSegment, start: int, stop: int
) -> tuple[int, int]:
    """Return the range [from, to) of the offsets whose messages were in the damaged bytes."""
    return _offset_at(cache, segment, start), _offset_from(cache, segment, stop)


def _offset_at(cache: StreamCache, segment: StreamSegment, position: int) -> int:
    """Return the first offset that is lost when the bytes from `position` on are damaged."""
    # Inspection (read_only) trusts no index file.
    entries = (segment.entries or array("Q")) if cache.read_only else cache.index(segment)
    at = (
        bisect_right(
            range(len(entries) // ENTRY_NUMBERS),
            position,
            key=lambda i: entries[ENTRY_NUMBERS * i + 2],
        )
        - 1
    )
    offset, start = segment.first, HEADER_BYTES
    if at >= 0:
        offset, start = entries[ENTRY_NUMBERS * at], entries[ENTRY_NUMBERS * at + 2]
    while start < position:
        known = segment.holes.get(start)
        if known is not None:
            offset, start = _offset_from(cache, segment, known), known
            continue
        length, first, count = _chunk(cache, segment, start)
        if length == 0:
            return offset  # there is damage before this one: the lost offsets begin there
        offset, start = first + count, start + length
    return offset


def _offset_from(cache: StreamCache, segment: StreamSegment, position: int) -> int:
    """Return the first offset that is not lost when damaged bytes end at `position`."""
    if position < segment.synced:
        length, first, _ = _chunk(cache, segment, position)
        if length:
            return first
    return segment.end


def _chunk(cache: StreamCache, segment: StreamSegment, position: int) -> tuple[int, int, int]:
    """Return (length, first offset, count) of the chunk at `position`.

    The length is 0 when there is no intact chunk at that position.
    """
    window = cache.load(segment, position, WINDOW_BYTES_MIN)
    length, first, count, _ = chunk_at(window.data, position, window.used, position, segment.salt)
    if length == 0 and first and window.start + window.used < segment.synced:
        window = cache.load(segment, position, first)
        length, first, count, _ = chunk_at(
            window.data, position, window.used, position, segment.salt
        )
    return length, first, count


def _next_good(cache: StreamCache, segment: StreamSegment, position: int) -> int:
    scanner = Scanner(segment.salt, position, segment.first, 0, OFFSET_MAX, INDEX_EVERY_BYTES)
    while scanner.cursor < segment.synced:
        window = cache.load(segment, scanner.cursor, max(WINDOW_BYTES_MIN, scanner.need))
        scanner.feed(window.data, window.used, window.start + window.used >= segment.synced)
        if scanner.holes:
            return scanner.holes[0][1]
    return segment.synced


def chunks(
    cache: StreamCache, segment: StreamSegment, position: int, report: Report
) -> Iterator[tuple[Window, int, int, int, int]]:
    """Yield (window, position, first offset, count, timestamp) of each chunk from `position` on.

    The window holds the whole chunk. Damaged chunks are reported and skipped.
    """
    while position < segment.synced:
        window = cache.window(segment, position, WINDOW_BYTES_MIN)
        length, first, count, timestamp = chunk_at(
            window.data, window.start, window.used, position, segment.salt
        )
        while length == 0 and first and window.start + window.used < segment.synced:
            window = cache.load(segment, position, first)
            length, first, count, timestamp = chunk_at(
                window.data, position, window.used, position, segment.salt
            )
        if length:
            yield window, position, first, count, timestamp
        position = position + length if length else skip(cache, segment, position, report)


def copied(
    cache: StreamCache,
    segment: StreamSegment,
    offset: int,
    limit: int,
    bytes_max: int,
    report: Report,
) -> tuple[bytearray, int]:
    """Return whole chunks of a segment, and the offset behind their last message.

    The first one begins at `offset`, and each other one where the one before it ends; all end at
    `limit` or below. As many are returned as have `bytes_max` bytes together, but at least one.
    They are sealed for no file: with a salt of 0.
    """
    found = bytearray()
    position = segment.places.get(offset) or last_not_above(cache.index(segment), offset)
    for window, at, first, count, _ in chunks(cache, segment, position, report):
        position = at
        if first + count <= offset:
            continue
        start = at - window.start
        stop = start + int.from_bytes(window.data[start : start + 4], "little")
        is_more = bool(found) and len(found) + stop - start > bytes_max
        if first != offset or first + count > limit or is_more:
            break
        found += window.data[start:stop]
        offset, position = first + count, at + stop - start
    if found:
        segment.remember_place(offset, position)
    seal(found, 0, len(found), 0, 0)
    return found, offset


def sum_before(
    cache: StreamCache, segment: StreamSegment, offset: int, report: Report
) -> int | None:
    """Return the checksum of the chunk that ends at `offset`, as `copied` has it.

    Return None when no intact chunk of the segment ends there.
    """
    position = last_not_above(cache.index(segment), offset - 1)
    for window, at, first, count, _ in chunks(cache, segment, position, report):
        if first + count < offset:
            continue
        if first + count > offset:
            break
        start = at - window.start
        chunk = window.data[
            start : start + int.from_bytes(window.data[start : start + 4], "little")
        ]
        seal(chunk, 0, len(chunk), 0, 0)
        return sum_of(chunk, 0)
    return None


def sum_of(chunks: bytes | bytearray, at: int) -> int:
    """Return the checksum in the chunk at a place."""
    return int.from_bytes(chunks[at + 4 : at + 8], "little")


def chunk_newer(
    cache: StreamCache, segment: StreamSegment, timestamp: int, report: Report
) -> int | None:
    """Return the first offset of the first intact chunk that is not older than `timestamp`, ms.

    Return None when all intact chunks of the segment are older.
    """
    position = last_older(cache.index(segment), timestamp)
    return next(
        (one[2] for one in chunks(cache, segment, position, report) if one[4] >= timestamp), None
    )
