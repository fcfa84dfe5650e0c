"""Publish where the streams of a shard begin and end, for other processes of this host.

The board is a file in memory. The shard writes it, and all others read it without asking the shard.

    RUNTIME_DIR/board-N    slots:
        u64 queue id, 0: free | u64 first offset | u64 next offset | u64 1: was used

The next offset is behind the last message on stable storage: messages below it survive the death of
any process. Each number is written at once and only grows while its slot belongs to the queue. So a
reader that comes between two writes finds an older range, but never one that was not true.

A shard that starts again writes another file, and puts it in place when it knows all its streams.
Until then the ranges of its former life stay readable. If other nodes have copies of the shard, the
file goes at the start, because one of them may have led since.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from typing import NamedTuple

# The streams of one shard that the board has room for; further streams are left out. The file has
# holes where no slot was ever used.
STREAMS_MAX = 65_536
SLOT_NUMBERS = 4
# Blocks of the file are allocated one by one, as slots are used.
BLOCK_BYTES = 4096
FULL = (errno.ENOSPC, errno.EDQUOT)
_BYTES = STREAMS_MAX * SLOT_NUMBERS * 8

log = logging.getLogger(__name__)


class Range(NamedTuple):
    first: int
    next: int


def path_of(runtime_dir: str, shard: int) -> str:
    return f"{runtime_dir}/board-{shard}"


class Board:
    """The side of the board that the shard writes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._new = f"{path}.new"
        # The end of the numbers for which the file has blocks. A write into a hole of a full disk
        # would end the process.
        self._room_slots = 0
        try:
            self._fd = os.open(self._new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            os.ftruncate(self._fd, _BYTES)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # The board of the former life stays in place: its ranges are older, but still true.
            log.warning(
                "no room for %s: who reads streams beside the shard goes by what was there before",
                self._new,
            )
            self._fd = -1
        self._numbers = memoryview(mmap.mmap(self._fd, _BYTES)).cast("Q")
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._next_free = 0

    def show(self) -> None:
        """Put the new file in place, for all processes that look from now on."""
        if self._fd >= 0:
            os.replace(self._new, self._path)

    def put(self, queue: int, first: int, next: int) -> None:
        slot = self._slots.get(queue)
        if slot is None:
            slot = self._take_slot()
            if slot is None:
                return
            self._slots[queue] = slot
            self._numbers[slot + 1], self._numbers[slot + 2], self._numbers[slot + 3] = (
                first,
                next,
                1,
            )
            self._numbers[slot] = queue
            return
        self._numbers[slot + 2] = next
        self._numbers[slot + 1] = first

    def _has_room(self) -> bool:
        """Return whether the file has a block for the next slot.

        Without a block the stream waits for the next `put`.
        """
        if self._fd < 0 or self._next_free < self._room_slots:
            return True
        try:
            os.posix_fallocate(self._fd, self._next_free * 8, BLOCK_BYTES)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        self._room_slots = self._next_free + BLOCK_BYTES // 8
        return True

    def remove(self, queue: int) -> None:
        slot = self._slots.pop(queue, None)
        if slot is not None:
            self._numbers[slot] = 0
            self._free.append(slot)

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._next_free == STREAMS_MAX * SLOT_NUMBERS or not self._has_room():
            return None
        self._next_free += SLOT_NUMBERS
        return self._next_free - SLOT_NUMBERS


class BoardView:
    """The side of the board that other processes read.

    A view is not for several threads at once.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = (0, 0)
        self._numbers: memoryview | None = None
        self._slots: dict[int, int] = {}

    def range_of(self, queue: int) -> Range | None:
        """Return the range of a stream, or None if the board does not have the stream."""
        if not self._open():
            return None
        slot = self._slots.get(queue, 0)
        found = self._read(slot, queue)
        if found is None:
            self._find_all()
            slot = self._slots.get(queue, -1)
            found = self._read(slot, queue) if slot >= 0 else None
        return found

    def _read(self, slot: int, queue: int) -> Range | None:
        numbers = self._numbers
        assert numbers is not None
        first, next = numbers[slot + 1], numbers[slot + 2]
        return Range(min(first, next), next) if numbers[slot] == queue else None

    def _open(self) -> bool:
        """Open the file that is in place now. Return False if there is none."""
        try:
            there = os.stat(self._path)
            if (there.st_dev, there.st_ino) == self._file:
                return True
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            opened = os.fstat(fd)
            self._numbers = memoryview(mmap.mmap(fd, _BYTES, prot=mmap.PROT_READ)).cast("Q")
        finally:
            os.close(fd)
        self._file = (opened.st_dev, opened.st_ino)
        self._slots.clear()
        return True

    def _find_all(self) -> None:
        assert self._numbers is not None
        self._slots = {}
        for slot in range(0, STREAMS_MAX * SLOT_NUMBERS, SLOT_NUMBERS):
            queue = self._numbers[slot]
            if queue:
                self._slots[queue] = slot
            elif not self._numbers[slot + 3]:
                return  # no slot behind this one was ever used
