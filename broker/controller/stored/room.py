"""Files whose room on the disk is set aside before it is needed.

There is a log that grows, and small files that are replaced. Room is set aside by fallocate(2)
behind the end of a file (FALLOC_FL_KEEP_SIZE): the file has more blocks, and its size stays. A
replaced file keeps a second file beside it, `NAME.new`, with blocks for the next content.
renameat2(2) exchanges the two, so the blocks and the inode of the old content serve the next time.
On a file system without one of the calls, room is looked for when it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import Final

# How much is set aside behind the end of the log, whenever less than LOG_ROOM_MIN is left.
LOG_ROOM_BYTES: Final = 1 << 20
LOG_ROOM_MIN: Final = 768 << 10
# The part of it for what cannot be refused: removals, and what follows from a decision.
LOG_KEPT_BYTES: Final = 512 << 10
# How much is set aside beyond the present size of a file that is replaced.
FILE_ROOM_BYTES: Final = 64 << 10
# With less than this left on the disk, nothing may be added.
FREE_BYTES_MIN: Final = 1 << 20
MODE: Final = 0o600  # some of the files have password hashes

_KEEP_SIZE: Final = 1
_EXCHANGE: Final = 2
_AT_CWD: Final = -100
_UNKNOWN: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_BLOCK_BYTES: Final = 512  # the unit of st_blocks

_libc: Final = ctypes.CDLL(None, use_errno=True)


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_full_disk(directory: Path) -> bool:
    """Return whether next to no bytes or no inodes are left.

    A file system without a fixed number of inodes says that it has 0.
    """
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return free_bytes(found) < FREE_BYTES_MIN or (found.f_files > 0 and found.f_favail == 0)


def free_bytes(found: os.statvfs_result) -> int:
    return found.f_bavail * found.f_frsize


def has_bytes(directory: Path, size: int) -> bool:
    try:
        return free_bytes(os.statvfs(directory)) > size
    except OSError:
        return True


def set_aside(fd: int, start: int, size: int) -> None:
    """Give the file blocks for `size` bytes from `start` on, behind its end too.

    Raises OSError when there is no room.
    """
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


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file, on stable storage: a crash leaves the old one or the new one."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(path.parent)


class GrowingLog:
    """A log that is appended to, and replaced whole now and then; it ends at `size`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._fd = -1
        self._room_end = 0  # up to where the file has blocks

    @property
    def room(self) -> int:
        return self._room_end - self.size

    def open(self, size: int) -> None:
        """Go on with an existing file whose records end at `size`; what lies behind is cut off."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)
        self.size = self._room_end = size
        self.set_aside()

    def set_aside(self, wanted: int = 0) -> None:
        """Set room aside for what comes next, `wanted` bytes or more, as far as the disk has it."""
        if self.room >= max(LOG_ROOM_MIN, wanted):
            return
        size = max(LOG_ROOM_BYTES, wanted)
        try:
            set_aside(self._fd, self.size, size)
            self._room_end = self.size + size
        except OSError as error:
            if not is_full(error):
                raise
            # A former process may have set room aside.
            self._room_end = max(self.size, os.fstat(self._fd).st_blocks * _BLOCK_BYTES)

    def append(self, data: bytes) -> None:
        """Append bytes. After an OSError the next append begins where this one did."""
        write_at(self._fd, data, self.size)
        self.size += len(data)
        self._room_end = max(self._room_end, self.size)

    def write_head(self, head: bytes) -> None:
        """Replace the header by one of the same length.

        It lies within one sector, so it is never torn.
        """
        write_at(self._fd, head, 0)
        self.sync()

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def replace(self, data: bytes) -> None:
        """Replace the whole log, on stable storage, and set room aside behind it.

        After an OSError the log is as it was.
        """
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
    """A small file that is replaced whole, and has room for `room` bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.room = 0
        self._spare = path.with_name(path.name + ".new")

    def set_aside(self, wanted: int = 0) -> None:
        """Set room aside for `wanted` bytes, and for more than the present content.

        `room` says how much the disk had.
        """
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
        """Replace the content, on stable storage. After an OSError the file is as it was."""
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
            os.rename(self._spare, self.path)  # the first content, or a system without the call
