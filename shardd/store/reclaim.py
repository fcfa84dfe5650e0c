"""Where segments come from and go to: files set aside in advance, and write buffers used again while warm.

A file of a dead segment becomes a spare under the name spare.NNNNNNNNNN, up to a bound; another segment takes it and
renames it at its first flush. A segment that dies before that gives it back untouched: no system call at all.

A spare is written to only after its name lasts. Else a power cut could bring back the old name, header and index over
the next life's messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardd.store.files import Files
from shardd.store.segment import Segment, file_name

# Beyond the open segment's: two sealed ones as read cache, one between lives.
BUFFERS_MAX = 1


@dataclass(slots=True)
class Spare:
    path: str
    handle: int
    lasting: bool  # the name is on stable storage, or the file holds nothing old


class Reclaimer:
    def __init__(self, files: Files, directory: str, segment_bytes: int, spares_max: int, recycle: bool) -> None:
        self.files = files
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.spares_max = spares_max
        self.recycle = recycle  # files that were written; without syncs their names would never last
        self.spares: list[Spare] = []
        self.buffers: list[bytearray] = []
        self.next_name = 1

    def set_aside(self, count: int) -> None:
        """At least `count` spares, or OSError with all that were there before."""
        while sum(spare.lasting for spare in self.spares) < count:
            self.spares.append(self.create(self.new_path(), self.segment_bytes))

    def new_path(self) -> str:
        # Counted apart from segments: a spare keeps its name while a segment that has written nothing uses it.
        number = self.next_name
        self.next_name += 1
        return f"{self.directory}/{file_name('spare', number)}"

    def create(self, path: str, size: int) -> Spare:
        handle = self.files.open(path, create=True)
        try:
            self.files.allocate(handle, size)
        except OSError:
            self.files.close(handle)
            self.files.remove(path)
            raise
        return Spare(path, handle, True)

    def adopt(self, number: int) -> None:
        """A spare found at start-up: kept if it is of our size and wanted, else removed."""
        self.next_name = max(self.next_name, number + 1)
        path = f"{self.directory}/{file_name('spare', number)}"
        handle = self.files.open(path)
        if len(self.spares) < self.spares_max and self.files.size(handle) == self.segment_bytes:
            self.spares.append(Spare(path, handle, False))
        else:
            self.files.close(handle)
            self.files.remove(path)

    def unlasting(self) -> list[Spare]:
        """Those that wait for a sync of the directory."""
        return [spare for spare in self.spares if not spare.lasting]

    def new_segment(self, number: int) -> Segment:
        spare = next(spare for spare in self.spares if spare.lasting)
        self.spares.remove(spare)
        buffer = self.buffers.pop() if self.buffers else bytearray(self.segment_bytes)
        return Segment(number, self.files.salt(), self.segment_bytes, spare.path, spare.handle, buffer)

    def give_back_buffer(self, buffer: bytearray) -> None:
        if len(self.buffers) < BUFFERS_MAX and len(buffer) == self.segment_bytes:
            self.buffers.append(buffer)

    def dispose(self, segment: Segment) -> None:
        """Nobody needs anything of it. Messages go before acks: the other way round a crash would bring them back."""
        if segment.buffer is not None:
            self.give_back_buffer(segment.buffer)
            segment.buffer = None
        self._dispose_file(segment)
        self._remove_companions(segment)

    def dispose_replaced(self, segment: Segment) -> None:
        """Another file has its name already."""
        if segment.handle is not None:
            self.files.close(segment.handle)
            segment.handle = None
        self._remove_companions(segment)

    def drop_index(self, segment: Segment) -> None:
        segment.has_index = False
        self.files.remove(f"{self.directory}/{file_name('index', segment.number)}")

    def _remove_companions(self, segment: Segment) -> None:
        for kind, there in (("index", segment.has_index), ("acks", segment.acks_end > 0)):
            if there:
                self.files.remove(f"{self.directory}/{file_name(kind, segment.number)}")

    def _dispose_file(self, segment: Segment) -> None:
        wanted = len(self.spares) < self.spares_max and segment.capacity == self.segment_bytes
        wanted = wanted and (self.recycle or not segment.flushed)
        if not wanted:
            if segment.handle is not None:
                self.files.close(segment.handle)
            self.files.remove(segment.path)
        else:
            handle = self.files.open(segment.path) if segment.handle is None else segment.handle
            path = segment.path
            if segment.flushed:
                path = self.new_path()
                self.files.rename(segment.path, path)
            self.spares.append(Spare(path, handle, not segment.flushed))
        segment.handle = None

    def release(self) -> None:
        """Close what is open; the files stay for the next start."""
        for spare in self.spares:
            self.files.close(spare.handle)
        self.spares.clear()
        self.buffers.clear()
