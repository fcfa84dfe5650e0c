"""Keep the manifest: a list on disk of the message files that there are.

By this list a recovery notices that a message file is missing.

    index.0000000000   0  "SHMQMANI" | u32 FORMAT | u32 crc32c of nothing, begun from FORMAT
                      16  slots: u64 number of a segment | u32 0
                          | u32 crc32c of these 12 bytes, begun from FORMAT;
                          or 16 zero bytes: the slot is free

No segment has the number 0. A version of the program that does not know the manifest takes this
file for the index of a segment that is not there, and removes it at its start. So that version
leaves no list behind that is out of date.

A segment is listed when its name is on stable storage and the segment has lived for about a
second: segments that are soon settled cost nothing. Nobody waits for a new slot to be on stable
storage: the slot survives the death of the process, and the operating system writes it to the disk
later. A slot is cleared, in place, before the file of the segment gets another name. Clearing a
slot needs no room on the disk. The slot must be clear on stable storage before the renamed file,
whose header still has the number, is written to or removed. Whoever writes to such a file or
removes it calls `begin_sync` first. So after a power cut every listed number has a file that
explains it.

A slot that cannot be read counts as free: the list may name too few segments, never too many.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.files import Files, is_full, is_missing, sync_file
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.format.segment_file import file_name

FORMAT = 1
MAGIC = b"SHMQMANI"
# This number stands in the name of the file where other files have the number of a segment.
NUMBER = 0
NAME = file_name("index", NUMBER)
HEADER = struct.Struct("<8sII")
SLOT = struct.Struct("<QII")
FREE = bytes(SLOT.size)


@dataclass(slots=True, eq=False)
class ManifestSync:
    """Makes what was written to the list so far last.

    `run` may be called from any thread.
    """

    files: Files
    path: str
    written: int

    def run(self) -> None:
        """Block until the list is on stable storage. Raises OSError.

        A list that was removed meanwhile needs no sync, since it says nothing wrong.
        """
        sync_file(self.files, self.path, if_there=True)


class Manifest:
    """The list of one store, with a dict entry in memory for each segment listed."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._path = f"{directory}/{NAME}"
        self._slots: dict[int, int] = {}  # place of each listed segment
        self._free: list[int] = []
        self._end = 0  # number of slots in the file, with the free ones
        self._is_there = False
        self._written = 0  # number of changes so far
        self._synced = 0  # the changes that are on stable storage
        self._lasting: dict[int, None] = {}  # to be listed: their names are on stable storage
        self._unsure: dict[int, None] = {}  # to be listed after the next sync of the directory

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    # -- start -------------------------------------------------------------------------------------

    def read(self, data: bytes) -> Collection[int]:
        """Return the numbers that the file lists. Raises FormatTooNew."""
        self._is_there = _is_list(data)
        self._slots = {number: at for at, number in _slots(data) if number}
        self._free = [at for at, number in _slots(data) if not number]
        self._end = len(self._slots) + len(self._free)
        # The list was written by a process that may have been killed before it was synced.
        self._written = int(self._is_there)
        return set(self._slots)

    def recovered(self, numbers: Collection[int], *, clean: bool) -> None:
        """List these segments and no others.

        After a stop that was not `clean` it is not known which names are on stable storage.
        """
        for number in [number for number in self._slots if number not in numbers]:
            self.clear(number)
        new = dict.fromkeys(number for number in numbers if number not in self._slots)
        if clean:
            self._lasting = new
            self.write()
        else:
            self._unsure = new

    def remove(self) -> None:
        """Remove the list: without a list no file is reported as missing."""
        self._slots.clear()
        self._free.clear()
        self._end = 0
        if self._is_there:
            self._is_there = False
            try:
                self._files.remove(self._path)
            except OSError as error:
                if not is_missing(error):
                    raise

    # -- segments come and go ----------------------------------------------------------------------

    def is_lasting(self, number: int) -> None:
        """Note a segment whose name is on stable storage; the next `write` lists the segment."""
        if number not in self._slots:
            self._lasting[number] = None

    def forget(self, number: int) -> bool:
        """Do not list a segment that waits to be listed.

        Returns whether the name of the segment is known to be on stable storage.
        """
        self._unsure.pop(number, None)
        noted = number in self._lasting
        self._lasting.pop(number, None)
        return noted or number in self._slots

    def clear(self, number: int) -> None:
        """Clear the slot of a segment whose file is renamed next, or is reported as missing."""
        self.forget(number)
        at = self._slots.pop(number, None)
        if at is None:
            return
        try:
            self._put({at: FREE})
        except OSError as error:
            if not is_full(error):
                raise
            self.remove()  # the file system needs room even to overwrite a slot
        else:
            self._free.append(at)

    def write(self) -> None:
        """List the segments whose names are on stable storage. On a full disk they wait."""
        if not self._lasting:
            return
        reused = self._free[: len(self._lasting)]
        more = len(self._lasting) - len(reused)
        places = [*reused, *range(self._end, self._end + more)]
        try:
            self._put({at: _slot(number) for at, number in zip(places, self._lasting, strict=True)})
        except OSError as error:
            if not is_full(error):
                raise
            self._take_back(reused)
            return
        del self._free[: len(reused)]
        self._end += more
        self._slots.update(zip(self._lasting, places, strict=True))
        self._lasting.clear()

    def _take_back(self, reused: list[int]) -> None:
        """Undo a write that was cut short for want of room, since nobody would clear its slots."""
        try:
            if self._is_there:
                self._put(dict.fromkeys(reused, FREE))
                handle = self._files.open(self._path)
                try:
                    self._files.truncate(handle, HEADER.size + self._end * SLOT.size)
                finally:
                    self._files.close(handle)
        except OSError as error:
            if not is_full(error):
                raise
            self.remove()

    def _put(self, slots: dict[int, bytes]) -> None:
        handle = self._files.open(self._path, create=True)
        try:
            if not self._is_there:
                self._files.truncate(handle, 0)
                self._files.write(handle, HEADER.pack(MAGIC, FORMAT, crc32c(b"", FORMAT)), 0)
                self._is_there = True
            for start, data in _runs(slots):
                self._files.write(handle, data, HEADER.size + start * SLOT.size)
        finally:
            self._files.close(handle)
        self._written += 1

    # -- stable storage ----------------------------------------------------------------------------

    def begin_sync(self) -> ManifestSync | None:
        """Return the job that makes the list last, or None when the list lasts already.

        The caller runs the job and then calls `end_sync`.
        """
        if self._written == self._synced:
            return None
        return ManifestSync(self._files, self._path, self._written)

    def end_sync(self, sync: ManifestSync | None) -> None:
        """End a job after its `run`."""
        if sync is not None:
            self._synced = max(self._synced, sync.written)

    def sync(self) -> None:
        """Make the list last now, in this thread. Raises OSError.

        When the disk is too full for the sync, the list is removed.
        """
        sync = self.begin_sync()
        if sync is None:
            return
        try:
            sync.run()
        except OSError as error:
            if not is_full(error):
                raise
            self.remove()
        self.end_sync(sync)

    def take_unsure(self) -> list[int]:
        """Return the segments to be noted as lasting after a sync of the directory."""
        unsure = list(self._unsure)
        self._unsure.clear()
        return unsure


def _is_list(data: bytes) -> bool:
    if len(data) < HEADER.size:
        return False
    magic, version, crc = HEADER.unpack_from(data)
    if magic != MAGIC or crc != crc32c(b"", version):
        return False
    refuse_newer(NAME, version, FORMAT)
    return True


def _slots(data: bytes) -> Iterable[tuple[int, int]]:
    """Return (place, number) of each slot; the number 0 means that the slot is free."""
    if not _is_list(data):
        return
    for at in range((len(data) - HEADER.size) // SLOT.size):
        slot = data[HEADER.size + at * SLOT.size :][: SLOT.size]
        number = int(SLOT.unpack(slot)[0])
        yield at, number if slot == _slot(number) else 0


def _slot(number: int) -> bytes:
    told = SLOT.pack(number, 0, 0)
    return SLOT.pack(number, 0, crc32c(told[:12], FORMAT))


def _runs(slots: dict[int, bytes]) -> Iterable[tuple[int, bytes]]:
    """Return (first place, slots) of neighbouring slots, to be written together."""
    start, data = -1, bytearray()
    for at in sorted(slots):
        if data and at != start + len(data) // SLOT.size:
            yield start, bytes(data)
            data.clear()
        if not data:
            start = at
        data += slots[at]
    if data:
        yield start, bytes(data)
