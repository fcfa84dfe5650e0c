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
from collections.abc import Callable, Collection, Iterable, Set
from itertools import chain, islice

from shardmq.shardd.store.files import Files, is_full
from shardmq.shardd.store.format import acks
from shardmq.shardd.store.format.record import queues_of_pairs
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
        # Segments whose acks files may not be on stable storage, by number, and the queues of
        # these acks.
        self._unsynced: dict[int, tuple[Segment, set[int]]] = {}
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

    def flush(
        self,
        files_max: int | None = None,
        asked: Collection[Segment] = (),
        *,
        only_asked: bool = False,
    ) -> bool:
        """Write the settled pairs of segments that are on disk, at most `files_max` files.

        The segments `asked` come first. On a full disk the pairs wait, and the result is False. The
        pairs of segments that are being merged wait as well, because the job would not see them.
        """
        segments: Iterable[Segment] = self.with_settled.values()
        if only_asked:
            segments = asked
        elif asked:
            segments = dict.fromkeys(chain(asked, segments))
        waiting = (one for one in segments if one.settled and one.flushed and not one.merging)
        has_room = True
        for segment in list(islice(waiting, files_max)):
            try:
                self._write(segment)
            except OSError as error:
                if is_full(error):
                    has_room = False
                    break
                raise
            del self.with_settled[segment.number]
            self._written(segment)
        if not self.with_settled:
            # Pairs that came before their segment was on disk were not counted.
            self.settled_bytes = 0
        return has_room

    def holds_back(self) -> bool:
        """Return whether pairs wait for the end of a merge."""
        return any(one.merging and one.flushed for one in self.with_settled.values())

    def written_before(self, segment: Segment) -> None:
        """Note the acks file of a process that ended without a clean stop."""
        self._unsynced[segment.number] = segment, set()  # nobody asks for these acks
        self.names_changed = True

    def by_queue(self, wanted: Set[int]) -> dict[int, list[Segment]]:
        """Return the segments on disk with acks of these queues that are not on stable storage.

        A segment may come twice for a queue.
        """
        found: dict[int, list[Segment]] = {}
        for segment, queue_ids in self._unsynced.values():
            # A segment may have acks of thousands of queues: `&` looks at the smaller set.
            for queue_id in wanted & queue_ids:
                found.setdefault(queue_id, []).append(segment)
        for segment in self.with_settled.values():
            if segment.flushed:
                for queue_id in wanted & queues_of_pairs(segment.settled):
                    found.setdefault(queue_id, []).append(segment)
        return found

    def are_left(self, segment: Segment) -> bool:
        """Return whether acks of the segment are not on stable storage."""
        return bool(segment.settled) or segment.number in self._unsynced

    def take_unsynced(
        self, files_max: int, asked: Collection[Segment] = (), *, only_asked: bool = False
    ) -> tuple[list[Segment], bool]:
        """Return the segments whose acks files are to be synced, and whether names changed.

        The segments `asked` come first, then those that are unsynced for longest. The caller sees
        to both.
        """
        numbers: Iterable[int] = self._unsynced
        if asked or only_asked:
            first = [each.number for each in asked if each.number in self._unsynced]
            numbers = first if only_asked else dict.fromkeys(chain(first, self._unsynced))
        taken = [self._unsynced.pop(number)[0] for number in list(islice(numbers, files_max))]
        names_changed, self.names_changed = self.names_changed, False
        return taken, names_changed

    def path_of(self, segment: Segment) -> str:
        """Return the path of the acks file of a segment."""
        return self._path(segment.number)

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
        _, queue_ids = self._unsynced.setdefault(segment.number, (segment, set()))
        queue_ids |= queues_of_pairs(segment.settled)
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
