"""What is settled and not in an acks file yet: pairs in memory, by segment, and when they are written.

Two kinds. What recovery should know is written with the next flush. What it will not ask for, since the queue is not
durable or is gone, is kept for merging alone, and written only because memory has an end.

What is written is synced a little later, see `take_unsynced`: a power cut may bring back what was
settled since.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from shardmq.shardd.store import acks
from shardmq.shardd.store.files import Files, is_full
from shardmq.shardd.store.segment import Segment, file_name

# Settled pairs in memory, of segments that are on disk; beyond this each settle writes some.
SETTLED_BYTES_MAX = 1 << 20
# Files written at once while messages wait. A purge may leave something in thousands of segments; most of them are
# merged before their turn comes.
ACKS_FILES_AT_ONCE = 8
# Files that one sync of them takes, and writes first: some milliseconds of the loop.
ACKS_FILES_SYNCED_AT_ONCE = 256
FORGOTTEN_BYTES_MAX = 4 << 20


class Settled:
    def __init__(self, files: Files, directory: str, written: Callable[[Segment], None]) -> None:
        self._files = files
        self._directory = directory
        self._written = written  # its acks file has grown
        self._with_settled: dict[int, Segment] = {}
        self._with_forgotten: dict[int, Segment] = {}
        self.settled_bytes = 0  # those written when it is more than SETTLED_BYTES_MAX
        self._forgotten_bytes = 0
        self._unsynced: dict[int, Segment] = {}  # their acks files may not be on stable storage
        self.names_changed = False  # in the directory, by what is settled

    def note(self, segment: Segment, pairs: bytes) -> None:
        """For recovery."""
        segment.settled += pairs
        self._with_settled[segment.number] = segment
        if segment.flushed:
            self.settled_bytes += len(pairs)

    def note_forgotten(self, segment: Segment, pairs: bytes) -> None:
        """For merging alone."""
        segment.forgotten += pairs
        self._with_forgotten[segment.number] = segment
        self._forgotten_bytes += len(pairs)
        if self._forgotten_bytes > FORGOTTEN_BYTES_MAX:
            self.settle_forgotten()

    def settle_forgotten(self) -> None:
        """Of segments that are on disk: written like the others with the next flush."""
        for segment in [
            one for one in self._with_forgotten.values() if one.flushed and not one.merging
        ]:
            segment.settled += segment.forgotten
            self.settled_bytes += len(segment.forgotten)
            self._with_settled[segment.number] = segment
            self.drop_forgotten(segment)

    def drop_forgotten(self, segment: Segment) -> None:
        if segment.forgotten:
            self._forgotten_bytes -= len(segment.forgotten)
            segment.forgotten = bytearray()
            del self._with_forgotten[segment.number]

    def drop(self, segment: Segment) -> None:
        """It is gone, or starts anew."""
        self._with_settled.pop(segment.number, None)
        self._unsynced.pop(segment.number, None)
        self.drop_forgotten(segment)
        self._drop_settled(segment)

    def _drop_settled(self, segment: Segment) -> None:
        if segment.settled:
            self.settled_bytes = max(self.settled_bytes - len(segment.settled), 0)
            segment.settled = bytearray()

    def flush(self, files_max: int | None = None) -> None:
        """Pairs of segments that are on disk. With a full disk they wait; so do those being merged: the job would not
        see them."""
        waiting = (one for one in self._with_settled.values() if one.flushed and not one.merging)
        for segment in list(islice(waiting, files_max)):
            try:
                self._write(segment)
            except OSError as error:
                if is_full(error):
                    break
                raise
            del self._with_settled[segment.number]
            self._written(segment)
        if not self._with_settled:
            self.settled_bytes = 0  # those told before their segment was on disk were not counted

    def holds_back(self) -> bool:
        """Whether something waits for the end of a merge."""
        return any(one.merging and one.flushed for one in self._with_settled.values())

    def written_before(self, segment: Segment) -> None:
        """Note an acks file of a process that ended without a clean stop."""
        self._unsynced[segment.number] = segment
        self.names_changed = True

    def take_unsynced(self, files_max: int) -> tuple[list[str], bool]:
        """Return acks files to be synced, those longest unsynced first, and whether names changed.

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
        path = self._path(segment.number)
        head = b"" if segment.acks_end else acks.encode_header(segment.number, segment.salt)
        data = head + acks.encode_block(segment.settled, segment.salt)
        handle = self._files.open(path, create=True)
        try:
            self._files.write(handle, data, segment.acks_end)
        finally:
            self._files.close(handle)
        segment.acks_end += len(data)
        self._unsynced[segment.number] = segment
        self.names_changed = self.names_changed or bool(head)
        self._drop_settled(segment)
