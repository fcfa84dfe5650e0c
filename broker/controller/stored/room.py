"""Files whose room on the disk is set aside before it is needed: a log that grows, small files that are replaced.

Room is set aside by fallocate(2) behind the end of a file (FALLOC_FL_KEEP_SIZE): the blocks belong to the file,
its size stays. A replaced file keeps a second file beside it, `NAME.new`, with blocks for the next content;
renameat2(2) exchanges the two, so that the old content's blocks and inode serve the next time. A file system
without one of the calls is used as it is: room there is looked for when it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import Final

# Set aside behind the end of the log, again when less than LOG_ROOM_MIN is left.
LOG_ROOM_BYTES: Final = 1 << 20
LOG_ROOM_MIN: Final = 768 << 10
# Of that, for what cannot be refused: removals, and what follows from a decision.
LOG_KEPT_BYTES: Final = 512 << 10
# Beyond the present size of a file that is replaced.
FILE_ROOM_BYTES: Final = 64 << 10
# A disk with less than this left is full for whoever wants to add something.
FREE_BYTES_MIN: Final = 1 << 20
MODE: Final = 0o600  # password hashes are in some of them

_KEEP_SIZE: Final = 1
_EXCHANGE: Final = 2
_AT_CWD: Final = -100
_UNKNOWN: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_BLOCK_BYTES: Final = 512  # of st_blocks

_libc: Final = ctypes.CDLL(None, use_errno=True)


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_full_disk(directory: Path) -> bool:
    """Whether there is next to nothing left, of bytes or of inodes (a file system without a number of them says 0)."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return free_bytes(found) < FREE_BYTES_MIN or (found.f_files > 0 and found.f_favail == 0)


def free_bytes(found: os.statvfs_result) -> int:
    return found.f_bavail * found.f_frsize


def has_bytes(directory: Path, size: int) -> bool:
    """Whether there seems to be room for a file of that size."""
    try:
        return free_bytes(os.statvfs(directory)) > size
    except OSError:
        return True


def set_aside(fd: int, start: int, size: int) -> None:
    """Give the file blocks for the bytes from `start` on, behind its end too. Raises OSError when there is no room."""
    call = _libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, _KEEP_SIZE, start, size) == 0:
        return
    number = ctypes.get_errno()
    if number not in _UNKNOWN:
        raise OSError(number, os.strerror(number))


def write_at(fd: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, position)
        view, position = view[done:], position + done


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class GrowingLog:
    """Appended to; replaced whole now and then. `size`: where the next record goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._fd = -1
        self._room_end = 0  # up to where the file has blocks

    @property
    def room(self) -> int:
        return self._room_end - self.size

    def open(self, size: int) -> None:
        """Go on with the file that is there, whose records end at `size`. What lies behind is cut off."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)
        self.size = self._room_end = size
        self.set_aside()

    def set_aside(self, wanted: int = 0) -> None:
        """See that there is room for what comes next, at least `wanted` bytes, as far as the disk has some."""
        if self.room >= max(LOG_ROOM_MIN, wanted):
            return
        size = max(LOG_ROOM_BYTES, wanted)
        try:
            set_aside(self._fd, self.size, size)
            self._room_end = self.size + size
        except OSError as error:
            if not is_full(error):
                raise
            # What the file has: a former life may have set it aside.
            self._room_end = max(self.size, os.fstat(self._fd).st_blocks * _BLOCK_BYTES)

    def append(self, data: bytes) -> None:
        """All of it, or OSError: then the next append begins where this one did."""
        write_at(self._fd, data, self.size)
        self.size += len(data)
        self._room_end = max(self._room_end, self.size)

    def write_head(self, head: bytes) -> None:
        """Over the present one, which is as long: within one sector, so it is never torn."""
        write_at(self._fd, head, 0)
        self.sync()

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def replace(self, data: bytes) -> None:
        """The log is this from now on, on stable storage, with room behind it; with OSError it is as it was."""
        fresh = self.path.with_name(self.path.name + ".new")
        fd = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, MODE)
        try:
            set_aside(fd, 0, len(data) + LOG_ROOM_BYTES)
            write_at(fd, data, 0)
            os.fsync(fd)
            os.rename(fresh, self.path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        old, self._fd = self._fd, fd
        self.size, self._room_end = len(data), len(data) + LOG_ROOM_BYTES
        if old >= 0:
            os.close(old)
        sync_directory(self.path.parent)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class ReplacedFile:
    """A small file that is replaced whole, never with less room than `room` bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.room = 0
        self._spare = path.with_name(path.name + ".new")

    def set_aside(self, wanted: int = 0) -> None:
        """See that there is room for `wanted` bytes and for more than the present content, as far as there is."""
        try:
            fd = os.open(self._spare, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, MODE)
        except OSError as error:
            if not is_full(error):
                raise
            self.room = 0
            return
        try:
            wanted = max(wanted, self.size() + FILE_ROOM_BYTES)
            try:
                set_aside(fd, 0, wanted)
                self.room = wanted
            except OSError as error:
                if not is_full(error):
                    raise
                self.room = os.fstat(fd).st_blocks * _BLOCK_BYTES
        finally:
            os.close(fd)

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def replace(self, data: bytes) -> None:
        """The file has this content, whole or not at all, on stable storage. Raises OSError: it is as it was."""
        fd = os.open(self._spare, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, MODE)
        try:
            write_at(fd, data, 0)
            os.ftruncate(fd, len(data))
            os.fsync(fd)
        finally:
            os.close(fd)
        self._put_in_place()
        sync_directory(self.path.parent)
        self.set_aside()

    def _put_in_place(self) -> None:
        call = _libc.renameat2
        call.argtypes = [
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_uint,
        ]
        spare, path = os.fsencode(self._spare), os.fsencode(self.path)
        if call(_AT_CWD, spare, _AT_CWD, path, _EXCHANGE) != 0:
            os.rename(self._spare, self.path)  # there was none before, or no such call
