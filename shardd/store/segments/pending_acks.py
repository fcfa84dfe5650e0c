"""Keep the pairs of settled messages in memory, by segment, and write them to acks files.

There are two kinds of pairs. The settled pairs are for recovery, and are written with the next
flush. The forgotten pairs belong to queues that are not durable or are gone, so recovery does not
ask for them. They are kept for merging, and are written only when they take too much memory.

Acks files are synced a little after they are written (`take_unsynced`). A power cut may bring back
the messages settled since the last sync.

The files that were written last stay open, because most syncs of messages write to one of them
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from shardmq.shardd.store.files import Files, is_full
from shardmq.shardd.store.format import acks
from shardmq.shardd.store.format.segment_file import file_name
from shardmq.shardd.store.open_segment import FORGOTTEN_BYTES_MAX, PendingState
from shardmq.shardd.store.segments.segment import Segment

# Acks files written at once while messages wait. A purge may leave pairs in thousands of segments,
# but most of these segments are merged before their acks are written.
ACKS_FILES_AT_ONCE = 8
# Acks files that one sync writes and syncs. Writing them takes the loop some milliseconds.
ACKS_FILES_SYNCED_AT_ONCE = 256
# Acks files of a store that stay open.
ACKS_HANDLES_MAX = 8


class Settled(PendingState):
    def __init__(self, files: Files, directory: str, written: Callable[[Segment], None]) -> None:
        self._files = files
        self._directory = directory
        self._written = written  # called with a segment whose acks file has grown
        self.with_settled: dict[int, Segment] = {}
        self.with_forgotten: dict[int, Segment] = {}
        self.settled_bytes = 0  # pairs are written when this exceeds SETTLED_BYTES_MAX
        self.forgotten_bytes = 0
        # Segments whose acks files may not be on stable storage.
        self._unsynced: dict[int, Segment] = {}
        self._handles: OrderedDict[int, int] = OrderedDict()  # by segment number, last used last
        self.names_changed = False  # names in the directory changed and were not synced

    def note(self, segment: Segment, pairs: bytes) -> None:
        """Remember pairs that recovery needs."""
        segment.settled += pairs
        self.with_settled[segment.number] = segment
        if segment.flushed:
            self.settled_bytes += len(pairs)

    def note_forgotten(self, segment: Segment, pairs: bytes) -> None:
        """Remember pairs that only merging needs."""
        segment.forgotten += pairs
        self.with_forgotten[segment.number] = segment
        self.forgotten_bytes += len(pairs)
        if self.forgotten_bytes > FORGOTTEN_BYTES_MAX:
            self.settle_forgotten()

    def settle_forgotten(self) -> None:
        """Let the next flush write the forgotten pairs of segments that are on disk, too."""
        for segment in [
            one for one in self.with_forgotten.values() if one.flushed and not one.merging
        ]:
            segment.settled += segment.forgotten
            self.settled_bytes += len(segment.forgotten)
            self.with_settled[segment.number] = segment
            self.drop_forgotten(segment)

    def drop_forgotten(self, segment: Segment) -> None:
        if segment.forgotten:
            self.forgotten_bytes -= len(segment.forgotten)
            segment.forgotten = bytearray()
            del self.with_forgotten[segment.number]

    def drop(self, segment: Segment) -> None:
        """Drop the pairs of a segment that is gone or starts anew, and close its acks file."""
        self._close(segment.number)
        self.with_settled.pop(segment.number, None)
        self._unsynced.pop(segment.number, None)
        self.drop_forgotten(segment)
        self._drop_settled(segment)

    def _drop_settled(self, segment: Segment) -> None:
        if segment.settled:
            self.settled_bytes = max(self.settled_bytes - len(segment.settled), 0)
            segment.settled = bytearray()

    def flush(self, files_max: int | None = None) -> None:
        """Write the settled pairs of segments that are on disk, at most `files_max` files.

        On a full disk the pairs wait. The pairs of segments that are being merged wait as well,
        because the job would not see them.
        """
        waiting = (one for one in self.with_settled.values() if one.flushed and not one.merging)
        for segment in list(islice(waiting, files_max)):
            try:
                self._write(segment)
            except OSError as error:
                if is_full(error):
                    break
                raise
            del self.with_settled[segment.number]
            self._written(segment)
        if not self.with_settled:
            # Pairs that came before their segment was on disk were not counted.
            self.settled_bytes = 0

    def holds_back(self) -> bool:
        """Return whether pairs wait for the end of a merge."""
        return any(one.merging and one.flushed for one in self.with_settled.values())

    def written_before(self, segment: Segment) -> None:
        """Note the acks file of a process that ended without a clean stop."""
        self._unsynced[segment.number] = segment
        self.names_changed = True

    def take_unsynced(self, files_max: int) -> tuple[list[str], bool]:
        """Return the acks files to be synced, longest unsynced first, and whether names changed.

        The caller sees to both.
        """
        numbers = list(islice(self._unsynced, files_max))
        for number in numbers:
            del self._unsynced[number]
        names_changed, self.names_changed = self.names_changed, False
        return [self._path(number) for number in numbers], names_changed

    def _path(self, number: int) -> str:
        return f"{self._directory}/{file_name('acks', number)}"

    def _write(self, segment: Segment) -> None:
        head = b"" if segment.acks_end else acks.encode_header(segment.number, segment.salt)
        data = head + acks.encode_block(segment.settled, segment.salt)
        try:
            self._files.write(self._handle(segment.number), data, segment.acks_end)
        except Exception:
            self._close(segment.number)
            raise
        segment.acks_end += len(data)
        self._unsynced[segment.number] = segment
        self.names_changed = self.names_changed or bool(head)
        self._drop_settled(segment)

    # -- open files --------------------------------------------------------------------------------

    def _handle(self, number: int) -> int:
        """Return the acks file of a segment, open, and close those that were not used for long."""
        handles = self._handles
        if number not in handles:
            while len(handles) >= ACKS_HANDLES_MAX:
                self._close(next(iter(handles)))
            handles[number] = self._files.open(self._path(number), create=True)
        handles.move_to_end(number)
        return handles[number]

    def _close(self, number: int) -> None:
        if (handle := self._handles.pop(number, None)) is not None:
            self._files.close(handle)

    def release(self) -> None:
        """Close the files, which stay on the disk for the next start."""
        for number in list(self._handles):
            self._close(number)
