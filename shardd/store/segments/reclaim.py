"""Provide segments with files and write buffers, and dispose of dead segments.

Files are set aside in advance, and write buffers are used again while their pages are warm.

The file of a dead segment becomes a spare under the name spare.NNNNNNNNNN, up to a bound. A new
segment takes the spare and renames it at its first flush. A segment that dies before its first
flush gives the file back untouched, without any system call. Files beyond the bound get such a name
too, and are doomed: they wait until a job has time to remove them, because removing a file may take
a millisecond. A recovery does not take spares for segments.

The file of a segment that a snapshot has linked is not used again: the snapshot would get what is
written to the file.

A spare is written to only after its name is on stable storage. Otherwise a power cut could bring
back the old name, header and index together with messages of the next segment. A spare is written
to or removed only after the manifest that no longer lists it is on stable storage
(format/manifest.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmq.shardd.store.files import Files, is_full, is_missing, read_head, remove_files
from shardmq.shardd.store.format.manifest import Manifest
from shardmq.shardd.store.format.record import segment_buffer
from shardmq.shardd.store.format.segment_file import HEADER_BYTES, decode_header, file_name
from shardmq.shardd.store.segments.segment import Segment

# Buffers kept beyond those of the open segment and of the sealed segment that serves as read cache.
BUFFERS_MAX = 1
# Files of dead segments that one job, or a clean stop, removes.
DOOMED_MAX = 64
# Doomed files that may wait. Beyond this nobody has had time to remove them for very long, so this
# thread removes some.
DOOMED_WAITING_MAX = 1 << 16


@dataclass(slots=True)
class Spare:
    path: str
    handle: int
    lasting: bool  # the name is on stable storage, or the file holds no old messages


class Reclaimer:
    def __init__(
        self, files: Files, directory: str, segment_bytes: int, spares_max: int, recycle: bool
    ) -> None:
        self.files = files
        self.manifest = Manifest(files, directory)
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.spares_max = spares_max
        # True: files with records become spares. Without syncs their new names would never last.
        self.recycle = recycle
        self.spares: list[Spare] = []
        self.doomed: list[tuple[str, int]] = []  # path and size, to be removed in this order
        self.buffers: list[bytearray] = []
        self.next_name = 1
        self.linked_below = 0  # segments with lower numbers may be in a snapshot

    def set_aside(self, count: int) -> None:
        """Make sure of at least `count` spares whose names last.

        Raises OSError; the spares that were there before stay.
        """
        while sum(spare.lasting for spare in self.spares) < count:
            self.spares.append(self.create(self.new_path(), self.segment_bytes))

    def new_path(self) -> str:
        # Spares are counted apart from segments: a segment that has written nothing still uses the
        # name of its spare.
        number = self.next_name
        self.next_name += 1
        return f"{self.directory}/{file_name('spare', number)}"

    def create(self, path: str, size: int) -> Spare:
        try:
            return self._create(path, size)
        except OSError as error:
            if not self.doomed or not is_full(error):
                raise
        self.remove_doomed(len(self.doomed))
        return self._create(path, size)

    def _create(self, path: str, size: int) -> Spare:
        handle = self.files.open(path, create=True)
        try:
            self.files.allocate(handle, size)
        except Exception:
            self.files.close(handle)
            self.files.remove(path)
            raise
        return Spare(path, handle, True)

    def take_doomed(self, most: int = DOOMED_MAX) -> list[tuple[str, int]]:
        """Return the path and size of doomed files, which the caller removes.

        The caller first makes the manifest last.
        """
        taken = self.doomed[:most]
        del self.doomed[:most]
        return taken

    def remove_doomed(self, most: int = DOOMED_MAX) -> None:
        if self.doomed:
            self.manifest.sync()
        remove_files(self.files, [path for path, _ in self.take_doomed(most)])

    def doom(self, path: str, size: int) -> None:
        self.doomed.append((path, size))
        if len(self.doomed) > DOOMED_WAITING_MAX:
            self.remove_doomed()

    def disk_bytes(self) -> int:
        """Return the bytes of all spares and doomed files."""
        return len(self.spares) * self.segment_bytes + sum(size for _, size in self.doomed)

    def adopt(self, number: int) -> int:
        """Keep a spare that was found at the start, or doom it.

        A spare is kept if it has the size of a segment and more spares are wanted. Returns the
        number of the segment that a kept spare was, or 0. No later segment may have that number: a
        power cut could take its header and leave its name, and the old messages would come back.
        """
        self.next_name = max(self.next_name, number + 1)
        path = f"{self.directory}/{file_name('spare', number)}"
        handle = self.files.open(path)
        is_whole = self.files.size(handle) == self.segment_bytes
        if len(self.spares) < self.spares_max and is_whole and not self.files.is_linked(handle):
            self.spares.append(Spare(path, handle, False))
            return self._numbers_in(handle)[1]
        self.doom(path, self.files.size(handle))
        self.files.close(handle)
        return 0

    def numbers_of(self, number: int) -> tuple[int, int]:
        """Return the first and the last number of the segments that the spare was.

        A merged segment has several numbers. Returns 0 and 0 if the spare was no segment.
        """
        handle = self.files.open(f"{self.directory}/{file_name('spare', number)}", read_only=True)
        try:
            return self._numbers_in(handle)
        finally:
            self.files.close(handle)

    def _numbers_in(self, handle: int) -> tuple[int, int]:
        header = decode_header(read_head(self.files, handle, HEADER_BYTES))
        return (header[3] or header[0], header[0]) if header else (0, 0)

    def unlasting(self) -> list[Spare]:
        """Return the spares that wait for a sync of the directory."""
        return [spare for spare in self.spares if not spare.lasting]

    def new_segment(self, number: int) -> Segment:
        spare = next(spare for spare in self.spares if spare.lasting)
        self.spares.remove(spare)
        buffer = self.buffers.pop() if self.buffers else segment_buffer(self.segment_bytes)
        return Segment(
            number, self.files.salt(), self.segment_bytes, spare.path, spare.handle, buffer
        )

    def take_back_buffer(self, segment: Segment) -> None:
        buffer = segment.take_buffer()
        if (
            buffer is not None
            and len(self.buffers) < BUFFERS_MAX
            and len(buffer) == self.segment_bytes
        ):
            self.buffers.append(buffer)

    def dispose(self, segment: Segment) -> None:
        """Dispose of a segment of which nobody needs anything.

        The messages are disposed of before the acks: without its acks a segment would bring settled
        messages back after a crash.
        """
        self.take_back_buffer(segment)
        self._dispose_file(segment)
        for path in self._companions(segment):
            self.doom(path, 0)

    def dispose_merged(self, segment: Segment) -> None:
        """Doom the files of a segment whose messages are in a merged segment.

        The file gets the name of a spare. Without that a recovery would read its messages again if
        the merged segment was disposed of before this file.
        """
        if segment.handle is not None:
            self.files.close(segment.handle)
            segment.handle = None
        self.doom(self._spare_name(segment), segment.capacity)
        for path in self._companions(segment):
            self.doom(path, 0)

    def dispose_replaced(self, segment: Segment) -> None:
        """Doom the companions of a segment whose name a merged file already has."""
        if segment.handle is not None:
            self.files.close(segment.handle)
            segment.handle = None
        for old in self._companions(segment):
            path = self.new_path()
            try:
                self.files.rename(old, path)
            except OSError as error:
                if not is_missing(error):  # the index may not exist, for want of room
                    raise
            else:
                self.doom(path, 0)

    def drop_index(self, segment: Segment) -> None:
        segment.has_index = False
        remove_files(self.files, [f"{self.directory}/{file_name('index', segment.number)}"])

    def _companions(self, segment: Segment) -> list[str]:
        kinds = (("index", segment.has_index), ("acks", segment.acks_end > 0))
        return [
            f"{self.directory}/{file_name(kind, segment.number)}" for kind, there in kinds if there
        ]

    def _dispose_file(self, segment: Segment) -> None:
        wanted = len(self.spares) < self.spares_max and segment.capacity == self.segment_bytes
        wanted = wanted and (self.recycle or not segment.flushed)
        if not wanted or self._is_linked(segment):
            if segment.handle is not None:
                self.files.close(segment.handle)
            self.doom(self._spare_name(segment), segment.capacity)
        else:
            handle = self.files.open(segment.path) if segment.handle is None else segment.handle
            self.spares.append(Spare(self._spare_name(segment), handle, not segment.flushed))
        segment.handle = None

    def _is_linked(self, segment: Segment) -> bool:
        """Return whether a snapshot has the file; the system is asked only where one may have it.

        The file stays open for whoever disposes of the segment.
        """
        if segment.number >= self.linked_below or not segment.flushed:
            return False
        if segment.handle is None:
            segment.handle = self.files.open(segment.path)
        return self.files.is_linked(segment.handle)

    def _spare_name(self, segment: Segment) -> str:
        if not segment.flushed:
            return segment.path
        path = self.new_path()
        self.manifest.clear(segment.number)
        self.files.rename(segment.path, path)
        return path

    def release(self) -> None:
        """Close the open files, which stay on the disk for the next start."""
        for spare in self.spares:
            self.files.close(spare.handle)
        self.spares.clear()
        self.doomed.clear()
        self.buffers.clear()
