"""Read segments that are no longer in memory, through a few windows of bytes.

The backlog of a queue is read from front to back, so one read of the disk should serve thousands of
messages. A single message somewhere should not cost a megabyte. So a window begins small, or as
large as the bytes asked for at once, and doubles each time the next window follows it.

The bytes read may not be the bytes written. A crc covers a record of many messages. A read beyond
the checked part of a segment therefore checks all records before it, once. After that any message
of these records is read alone.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.files import Files
from shardmq.shardd.store.format import record
from shardmq.shardd.store.segments.segment import Segment

HANDLES_MAX = 64
POSITION = 0xFFFFFFFF  # the position in an entry, << 4 with its flags
WINDOWS_MAX = 4
WINDOW_BYTES_MIN = 64 << 10
# A little more than a third of a segment. With exactly a third, each segment would need a fourth
# window for the messages at the seams, which are read twice.
WINDOW_BYTES_MAX = (1 << 20) + (64 << 10)
# A message that begins this close behind a window counts as the next in sequence.
SEQUENCE_GAP_BYTES = 256 << 10
# Messages that lie this far from each other, on average, are strays: each is read alone.
STRAY_GAP_BYTES = 32 << 10
STRAY_RUN_MIN = 4
STRAY_BYTES_MAX = 2 << 10
# Bytes that are read of each stray when many are read together: at first, and at the most. A larger
# message is read by itself.
STRAY_BYTES_MIN = 512
STRAYS_BYTES_MAX = 16 << 10
# Strays read by one call, which counts as one call for the stall watchdog.
STRAYS_AT_ONCE = 64


def is_scattered(entries: array[int], start: int, stop: int) -> bool:
    """Return whether a window would hold few of entries[start:stop], all of one segment.

    That is so when the entries are few, or when the gaps between them are wide on average.
    """
    if stop - start < STRAY_RUN_MIN:
        return True
    span = abs((entries[stop - 1] & POSITION) - (entries[start] & POSITION)) >> 4
    return span > STRAY_GAP_BYTES * (stop - start)


def are_scattered(runs: list[tuple[int, int, int]], entries: array[int]) -> bool:
    """Return whether most of the entries are scattered.

    `runs` holds (segment, start, stop) for each run of entries of one segment.
    """
    return 2 * sum(
        stop - start for _, start, stop in runs if is_scattered(entries, start, stop)
    ) > len(entries)


def span(entries: array[int], start: int, stop: int) -> int:
    """Return the bytes from the first to the last of entries[start:stop].

    Returns 0 when the bytes between the messages are not worth reading with them.
    """
    found = ((entries[stop - 1] & POSITION) - (entries[start] & POSITION)) >> 4
    return found if 0 < found <= STRAY_GAP_BYTES * (stop - start) else 0


Place = tuple[Segment, int, int]  # a segment, its handle and a position


@dataclass(slots=True)
class Window:
    number: int
    start: int
    used: int
    data: bytearray
    taken: int = 0  # bytes of the window that were asked for

    def holds(self, number: int, position: int) -> bool:
        if number != self.number or not self.start <= position < self.start + self.used:
            return False
        size = record.message_bytes_at(self.data, position - self.start)
        return 0 < size <= self.start + self.used - position

    @property
    def is_used_up(self) -> bool:
        """True when nearly all bytes of the window were asked for, so that it may be dropped.

        When several queues have messages in a segment, each queue reads its own part, one after the
        other. The window is kept until the last queue has read its part. The bytes that nobody asks
        for are the headers of records.
        """
        return self.taken * 16 >= self.used * 15


class Windows:
    """The bounded cache of windows. The bytes of a window are good until the next call."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.windows: list[Window] = []  # last read last
        self._found: Window | None = None  # the window found last
        self._left = 0  # number of the segment whose windows were forgotten last
        self._spare: list[bytearray] = []  # buffers of dropped windows, as large as a window gets
        self._stray = bytearray(STRAY_BYTES_MAX)
        self._stray_view = memoryview(self._stray)
        self._stray_bytes = STRAY_BYTES_MIN
        self._stray_mean = 0  # mean bytes of a message among the strays read last

    def find(self, segment: Segment, handle: int, position: int, ahead: int = 0) -> Window:
        """Return a window that holds the whole message at `position`.

        About `ahead` bytes behind the position are asked for next.
        """
        for window in reversed(self.windows):
            if window.holds(segment.number, position):
                self._found = window
                return window
        self._found = window = self._load(segment, handle, position, ahead)
        return window

    def took(self, count: int) -> None:
        """Count bytes that were taken from the window found last."""
        if self._found is not None:
            self._found.taken += count

    def _load(self, segment: Segment, handle: int, position: int, ahead: int) -> Window:
        if position >= segment.checked:
            return self._check_up_to(segment, handle, position, ahead)
        window = self._read(segment, handle, position, self._next_bytes(segment, position, ahead))
        size = record.message_bytes_at(window.data, 0)
        if size == 0 or position + size > segment.checked:
            raise Corrupt(f"no message at byte {position} of {segment.path}")
        if size > window.used:
            window = self._read(segment, handle, position, size)
        return self._keep(window)

    def find_stray(
        self, segment: Segment, handle: int, position: int
    ) -> tuple[bytearray, int, int]:
        """Return bytes that hold a whole message whose neighbours will hardly be asked for.

        Returns the bytes, the position at which they begin, and how many they are. The bytes are
        good until the next call.
        """
        known = segment.checked - position
        if known > 0:
            view = self._stray_view if known >= STRAY_BYTES_MAX else self._stray_view[:known]
            try:
                got = self.files.read_into(handle, view, position)
            except OSError as error:
                raise Corrupt(f"cannot read byte {position} of {segment.path}: {error}") from error
            size = record.message_bytes_at(self._stray, 0)
            if 0 < size <= got:
                self._found = None
                return self._stray, position, got
            if 0 < size <= min(WINDOW_BYTES_MIN, known):
                self._found = None
                return self._read(segment, handle, position, size).data, position, size
        window = self.find(segment, handle, position)
        return window.data, window.start, window.used

    def strays_at_once(self, bytes_max: int) -> int:
        """Return how many strays are likely to fit into `bytes_max`."""
        return (
            min(bytes_max // self._stray_mean + 1, STRAYS_AT_ONCE)
            if self._stray_mean
            else STRAYS_AT_ONCE
        )

    def strays(
        self, places: list[Place], bytes_max: int, *, first: bool
    ) -> tuple[bytes, array[int], bool]:
        """Read the messages at these places, up to the first that cannot be read alone.

        There are at most STRAYS_AT_ONCE places. `first`: one message is returned even if it is
        larger than `bytes_max`. Returns the bytes, the body_bytes of each message, and whether
        there was room for the next message.
        """
        pieces = [b""] * len(places)
        of_file: dict[int, list[int]] = {}
        for i, (segment, handle, position) in enumerate(places):
            if position >= segment.checked:
                break
            of_file.setdefault(handle, []).append(i)
        try:
            for handle, asked in of_file.items():
                read = self.files.read_pieces(
                    handle, self._stray_bytes, [places[i][2] for i in asked]
                )
                for i, piece in zip(asked, read, strict=True):
                    pieces[i] = piece
        except OSError:  # a caller that reads the messages one by one finds the bad one
            return b"", array("I"), True
        blob, sizes, fits = record.pieces_out(pieces, bytes_max, first)
        if sizes:
            self._stray_mean = len(blob) // len(sizes)
        if fits and len(sizes) < len(pieces) and pieces[len(sizes)]:
            self._stray_bytes = min(2 * self._stray_bytes, STRAYS_BYTES_MAX)
        elif sizes:
            self._stray_bytes = max(
                STRAY_BYTES_MIN, min(self._stray_bytes, 1 << (2 * self._stray_mean).bit_length())
            )
        self._found = None
        return blob, sizes, fits

    def _check_up_to(self, segment: Segment, handle: int, position: int, ahead: int) -> Window:
        """Return the window with the record that holds `position`.

        All records up to that one are checked on the way.
        """
        while True:
            start = segment.checked
            window = self._read(
                segment, handle, start, self._next_bytes(segment, start, position - start + ahead)
            )
            end, needed = record.sound_until(window.data, 0, window.used, segment.salt)
            if end == 0 and start + needed <= segment.used and needed:
                window = self._read(segment, handle, start, needed)
                end, needed = record.sound_until(window.data, 0, window.used, segment.salt)
            if end == 0:
                raise Corrupt(f"the record at byte {start} of {segment.path} is damaged")
            window.used = end
            segment.checked = start + end
            self._keep(window)
            if position < segment.checked:
                return window

    def _buffer(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes, an old one where possible.

        A new buffer would be filled with zeros first.
        """
        if not WINDOW_BYTES_MAX // 2 < size <= WINDOW_BYTES_MAX:
            return bytearray(size)
        return self._spare.pop() if self._spare else bytearray(WINDOW_BYTES_MAX)

    def _make_room(self) -> None:
        if len(self.windows) >= WINDOWS_MAX:
            used_up = (i for i, window in enumerate(self.windows) if window.is_used_up)
            self._drop(next(used_up, 0))

    def _drop(self, at: int) -> None:
        data = self.windows.pop(at).data
        if len(data) == WINDOW_BYTES_MAX and len(self.windows) + len(self._spare) < WINDOWS_MAX:
            self._spare.append(data)

    def _keep(self, window: Window) -> Window:
        # A huge message is not worth the memory of a window that is kept.
        if len(window.data) <= WINDOW_BYTES_MAX:
            self.windows.append(window)
        return window

    def forget(self, number: int) -> None:
        for at in reversed(range(len(self.windows))):
            if self.windows[at].number == number:
                self._drop(at)
                self._left = number
        self._found = None

    def release(self) -> None:
        self.windows.clear()
        self._spare.clear()
        self._found = None

    def _next_bytes(self, segment: Segment, position: int, ahead: int) -> int:
        """Return how much to read, and make room for one more window."""
        least = min(max(ahead, WINDOW_BYTES_MIN), WINDOW_BYTES_MAX)
        for i in reversed(range(len(self.windows))):
            window = self.windows[i]
            end = window.start + window.used
            if (
                window.number == segment.number
                and window.start <= position <= end + SEQUENCE_GAP_BYTES
            ):
                if window.is_used_up:
                    self._drop(i)
                self._make_room()
                return min(max(2 * window.used, 2 * WINDOW_BYTES_MIN, least), WINDOW_BYTES_MAX)
        self._make_room()
        # The position is near the front of a segment, and the segment before it was just read: the
        # reading in sequence goes on.
        before = segment.number - 1
        walking = self._left == before or any(window.number == before for window in self.windows)
        return WINDOW_BYTES_MAX if walking and position < SEQUENCE_GAP_BYTES else least

    def _read(self, segment: Segment, handle: int, position: int, size: int) -> Window:
        known = segment.checked if position < segment.checked else segment.used
        size = max(min(size, known - position), 0)
        data = self._buffer(size)
        try:
            with memoryview(data) as whole, whole[:size] as view:
                got = self.files.read_into(handle, view, position)
        except OSError as error:
            raise Corrupt(f"cannot read byte {position} of {segment.path}: {error}") from error
        if got != size:
            raise Corrupt(
                f"{segment.path} ends at byte {position + got}, {segment.used} bytes were written"
            )
        return Window(segment.number, position, size, data)


class Handles:
    """Keeps open the files of the segments last used whose bytes are not in memory.

    At most HANDLES_MAX files stay open, apart from those that something still waits for.
    """

    def __init__(self, files: Files, is_busy: Callable[[Segment], bool]) -> None:
        self._files = files
        self._is_busy = is_busy  # tells whether the handle of a segment is still needed
        self._kept: OrderedDict[int, Segment] = OrderedDict()  # by segment number, last used last

    def of(self, segment: Segment) -> int:
        if segment.handle is None:
            segment.handle = self._files.open(segment.path)
            self.keep(segment)
        elif segment.number in self._kept:
            self._kept.move_to_end(segment.number)
        return segment.handle

    def keep(self, segment: Segment) -> None:
        """Remember the segment as the last used, and close the files that were not used for long.

        A segment that is busy keeps its handle.
        """
        self._kept[segment.number] = segment
        excess = len(self._kept) - HANDLES_MAX
        if excess <= 0:
            return
        idle = (one for one in self._kept.values() if one is not segment and not self._is_busy(one))
        for old in list(islice(idle, excess)):
            if old.handle is not None:
                self._files.close(old.handle)
                old.handle = None
                del self._kept[old.number]

    def drop(self, segment: Segment) -> None:
        self._kept.pop(segment.number, None)
