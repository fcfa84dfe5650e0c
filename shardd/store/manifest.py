"""Which message files there are: a list on disk, by which a file that is gone after a crash is missed.

    index.0000000000   0  "SHMQMANI" | u32 FORMAT | u32 crc32c of nothing, begun from FORMAT
                      16  slots: u64 number of a segment | u32 0 | u32 crc32c of these 12 bytes, begun from FORMAT;
                          or 16 zero bytes: the slot is free

No segment has the number 0. A program that does not know this file takes it for the index of a segment that is not
there, and removes it at its start: so no list is left behind that is not kept up to date.

A segment is listed when its name is on stable storage and it has lived for a second or so: those that are soon
settled cost nothing. Nobody waits for a new slot to be on stable storage: a killed process has written it, and the
operating system makes it last in its own time. The slot is cleared before the file gets another name, in place, which
needs no room. It must be clear on stable storage before the renamed file, whose header still tells the number, is
written to or removed: whoever does that asks for `begin_sync` first. So a power cut never leaves a listed number
without a file that tells about it.
A slot that cannot be read is free: the list may know too little, never too much.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shardmq.shardd.store.files import Files, is_full, is_missing
from shardmq.shardd.store.record import crc32c
from shardmq.shardd.store.segment import file_name, refuse_newer

FORMAT = 1
MAGIC = b"SHMQMANI"
# In the place of a segment's number in the name of the file.
NUMBER = 0
NAME = file_name("index", NUMBER)
HEADER = struct.Struct("<8sII")
SLOT = struct.Struct("<QII")
FREE = bytes(SLOT.size)


@dataclass(slots=True, eq=False)
class ManifestSync:
    """What was written to the list so far is to be made last. `run` may be called from any thread."""

    files: Files
    path: str
    written: int

    def run(self) -> None:
        """Block until it is on stable storage; a list that is gone tells nothing untrue. Raises OSError."""
        try:
            handle = self.files.open(self.path)
        except OSError as error:
            if is_missing(error):
                return
            raise
        try:
            self.files.sync(handle)
        finally:
            self.files.close(handle)


class Manifest:
    """The list of one store. Memory: a dict entry for each segment listed."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._path = f"{directory}/{NAME}"
        self._slots: dict[int, int] = {}  # of the segments listed
        self._free: list[int] = []
        self._end = 0  # slots in the file, free ones too
        self._is_there = False
        self._written = 0  # changes so far
        self._synced = 0  # of them, those on stable storage
        self._lasting: dict[int, None] = {}  # to be listed: their names are on stable storage
        self._unsure: dict[int, None] = {}  # so are these, after the next sync of the directory

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    # -- start ---------------------------------------------------------------------------------------------

    def read(self, data: bytes) -> Collection[int]:
        """Return the numbers that the file lists. Raises FormatTooNew."""
        self._is_there = _is_list(data)
        self._slots = {number: at for at, number in _slots(data) if number}
        self._free = [at for at, number in _slots(data) if not number]
        self._end = len(self._slots) + len(self._free)
        self._written = int(
            self._is_there
        )  # by a process that may have been killed before it was synced
        return set(self._slots)

    def recovered(self, numbers: Collection[int], *, clean: bool) -> None:
        """List these segments and no others. After an end that was not `clean` nobody knows which names last."""
        for number in [number for number in self._slots if number not in numbers]:
            self.clear(number)
        new = dict.fromkeys(number for number in numbers if number not in self._slots)
        if clean:
            self._lasting = new
            self.write()
        else:
            self._unsure = new

    def remove(self) -> None:
        """Give the list up: without it nothing is missed."""
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

    # -- segments come and go ------------------------------------------------------------------------------

    def is_lasting(self, number: int) -> None:
        """Note a segment whose name is on stable storage: it is listed with the next `write`."""
        if number not in self._slots:
            self._lasting[number] = None

    def forget(self, number: int) -> bool:
        """Do not list it, if that is not done yet. Return whether its name is known to last."""
        self._unsure.pop(number, None)
        noted = number in self._lasting
        self._lasting.pop(number, None)
        return noted or number in self._slots

    def clear(self, number: int) -> None:
        """The file of this segment is about to get another name, or is told as missing."""
        self.forget(number)
        at = self._slots.pop(number, None)
        if at is None:
            return
        try:
            self._put({at: FREE})
        except OSError as error:
            if not is_full(error):
                raise
            self.remove()  # a file system that needs room for everything
        else:
            self._free.append(at)

    def write(self) -> None:
        """List the segments whose names last. On a full disk they wait."""
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
        """Nothing of what was written for want of room in part may stay: nobody would clear it."""
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

    # -- stable storage ------------------------------------------------------------------------------------

    def begin_sync(self) -> ManifestSync | None:
        """Return what makes the list last, to be ended by `end_sync`; None: it does already."""
        if self._written == self._synced:
            return None
        return ManifestSync(self._files, self._path, self._written)

    def end_sync(self, sync: ManifestSync | None) -> None:
        """After its `run`."""
        if sync is not None:
            self._synced = max(self._synced, sync.written)

    def sync(self) -> None:
        """Make the list last now, in this thread. Without room for that it is given up. Raises OSError."""
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
        """Return the segments that may be noted as lasting after a sync of the directory."""
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
    """(place, number) of each slot; number 0: it is free."""
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
    """(first place, slots) of neighbours, to be written together."""
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
