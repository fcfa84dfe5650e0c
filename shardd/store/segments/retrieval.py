"""Read messages back from the segments of a store, by the entries that queues keep."""

from __future__ import annotations

from array import array

from shardmq.shardd.lending import LentMessages
from shardmq.shardd.store.errors import Closed, Corrupt
from shardmq.shardd.store.format.record import copy_out, look_at, segment_runs
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments
from shardmq.shardd.store.segments.windows import Place, are_scattered, is_scattered, span

# From this many messages read together on, some may be read as strays.
SCATTERED_MIN = 16
# Messages of this many bytes or more are returned alone when the others lie in another place.
# Joining them with the others would copy them again.
PIECE_BYTES_MIN = 128 << 10


class Retrieval:
    """Reads the messages of one store."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._state = segments.state

    def read(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes, array[int]]:
        """Return the stored messages of entries[:n], back to back, and the body bytes of each.

        As many messages are returned as fit in `bytes_max` bytes, but at least one. Without `whole`
        the answer may also end early, after PIECE_BYTES_MIN bytes or more, to avoid joining bytes
        from two places. After Corrupt close the store: the next recovery reads every record and
        leaves out the bad ones.
        """
        if self._state.stage != "open":
            raise Closed("the store is not open")
        runs = segment_runs(entries)
        if len(runs) == 1:
            ((number, start, stop),) = runs
            segment = self._segments.by_number[number]
            if segment.buffer is not None and segment.moves is None:
                segment.fill_lent()
                return copy_out(
                    segment.buffer, 0, segment.used, entries, start, stop, bytes_max, True
                )
        try:
            return self._read(runs, entries, bytes_max, whole)
        except Corrupt:
            self._segments.distrust()
            raise

    def peek(self, entry: int, bytes_max: int) -> bytes:
        """Return the first bytes of a stored message, with the head of its record unchecked.

        Nothing that lies in the windows makes room for the message. No bytes are returned if the
        disk does not give them.
        """
        if self._state.stage != "open":
            return b""
        segments = self._segments
        segment = segments.by_number[entry >> 32]
        if segment.moves is not None:
            (entry,) = segment.moves.find(array("Q", [entry]), 0, 1)
        position = (entry & 0xFFFFFFFF) >> 4
        stop = min(position + bytes_max, segment.used)
        if segment.buffer is not None:
            return bytes(segment.buffer[position:stop])
        found = bytearray(max(0, stop - position))
        try:
            got = segments.files.read_into(
                segments.handles.of(segment), memoryview(found), position
            )
        except OSError:
            return b""
        return bytes(found[:got])

    def look_at_lent(
        self, segment: Segment, entries: array[int], bytes_max: int
    ) -> tuple[bytes | memoryview | LentMessages, array[int]]:
        """Return the first messages of a segment that has lent bodies: all lent, or all not."""
        assert segment.buffer is not None
        found = segment.lent.look(segment.buffer, segment.number, entries, bytes_max)
        if found[0] is None:
            return look_at(segment.buffer, segment.used, entries, 0, found[3], bytes_max)
        lender, places, weight, sizes = found
        return LentMessages(lender, places, weight), sizes

    def _read(
        self, runs: list[tuple[int, int, int]], entries: array[int], bytes_max: int, whole: bool
    ) -> tuple[bytes, array[int]]:
        blobs: list[bytes] = []
        sizes: array[int] = array("I")
        if len(entries) >= SCATTERED_MIN and are_scattered(runs, entries):
            blobs, sizes, fits = self._read_strays(entries, bytes_max)
            if not fits or len(sizes) == len(entries):
                return b"".join(blobs), sizes
            bytes_max -= sum(map(len, blobs))
            entries = entries[len(sizes) :]
            runs = segment_runs(entries)
        for number, start, stop in runs:
            segment = self._segments.by_number[number]
            on_disk = segment.buffer is None and len(entries) >= SCATTERED_MIN
            scattered = on_disk and is_scattered(entries, start, stop)
            wanted = entries
            if segment.moves is not None:
                wanted, start, stop = segment.moves.find(entries, start, stop), 0, stop - start
            while start < stop:
                position = (wanted[start] & 0xFFFFFFFF) >> 4
                source, base, used = self._source(
                    segment, position, span(wanted, start, stop), scattered
                )
                blob, some = copy_out(source, base, used, wanted, start, stop, bytes_max, not blobs)
                if not some:
                    return b"".join(blobs), sizes
                if segment.buffer is None:
                    self._segments.windows.took(len(blob))
                if not blobs and (
                    len(some) == len(entries) or (len(blob) >= PIECE_BYTES_MIN and not whole)
                ):
                    return blob, some
                blobs.append(blob)
                sizes.extend(some)
                bytes_max -= len(blob)
                start += len(some)
        return b"".join(blobs), sizes

    def _read_strays(
        self, entries: array[int], bytes_max: int
    ) -> tuple[list[bytes], array[int], bool]:
        """Read scattered messages, up to the first that is in memory or cannot be read alone.

        Returns their bytes, the body bytes of each, and whether there is room for more.
        """
        segments = self._segments
        blobs: list[bytes] = []
        sizes: array[int] = array("I")
        fits = True
        while fits and len(sizes) < len(entries):
            places: list[Place] = []
            at = len(sizes)
            for i, entry in enumerate(
                entries[at : at + segments.windows.strays_at_once(bytes_max)], at
            ):
                segment = segments.by_number[entry >> 32]
                if segment.buffer is not None:
                    break
                if segment.moves is not None:
                    (entry,) = segment.moves.find(entries, i, i + 1)
                places.append((segment, segments.handles.of(segment), (entry & 0xFFFFFFFF) >> 4))
            blob, some, fits = segments.windows.strays(places, bytes_max, first=not blobs)
            if not some:
                break
            blobs.append(blob)
            sizes.extend(some)
            bytes_max -= len(blob)
        return blobs, sizes, fits

    def _source(
        self, segment: Segment, position: int, ahead: int, scattered: bool
    ) -> tuple[bytearray, int, int]:
        """Return bytes that hold the whole message at `position`.

        Returns the bytes, the position at which they begin, and how many they are. The last message
        that is asked for begins `ahead` bytes behind `position`.
        """
        segments = self._segments
        if segment.buffer is not None:
            segment.fill_lent()
            return segment.buffer, 0, segment.used
        if scattered:
            return segments.windows.find_stray(segment, segments.handles.of(segment), position)
        window = segments.windows.find(segment, segments.handles.of(segment), position, ahead)
        return window.data, window.start, window.used
