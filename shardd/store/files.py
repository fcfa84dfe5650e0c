"""Put every system call of the store behind `Files`, so that tests can use a faulty disk.

Paths are used as the caller gives them. Errors are OSError as the system raises it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

Found = TypeVar("Found")
# These names stand for `list`, which is a method of the classes below.
Positions = list[int]
Pieces = list[bytes]

_KEEP_SIZE: Final = 1
_EXCHANGE: Final = 2
_AT_CWD: Final = -100
_CANNOT: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_BLOCK_BYTES: Final = 512  # the unit of st_blocks

_libc: Final = ctypes.CDLL(None, use_errno=True)
_fallocate: Final = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_renameat2: Final = _libc.renameat2
_renameat2.argtypes = [
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
]


class Files(Protocol):
    def make_directory(self, path: str) -> None:
        """Make a directory with its parents; the directory lasts when this returns."""

    def remove_directory(self, path: str) -> None: ...
    def list(self, path: str) -> list[str]: ...
    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int: ...
    def close(self, handle: int) -> None: ...
    def size(self, handle: int) -> int: ...
    def descriptor(self, handle: int) -> int:
        """Return the descriptor for compiled code that reads the file itself, or -1.

        Compiled code calls `read_into` for the reads that it cannot do. -1 means that there is no
        descriptor.
        """

    def read_into(self, handle: int, target: memoryview, position: int) -> int:
        """Read into `target` from `position`; return how many bytes were read.

        The count is less than the length of `target` only where the file ends.
        """

    def read_pieces(self, handle: int, size: int, positions: Positions) -> Pieces:
        """Return `size` bytes from each of these positions; fewer where the file ends."""

    def write(self, handle: int, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all of `data` at `position`, or raise OSError."""

    def allocate(self, handle: int, size: int) -> None:
        """Make the file at least `size` bytes long, and reserve room for them on the disk."""

    def set_aside(self, handle: int, start: int, size: int) -> None:
        """Reserve room for `size` bytes from `start` on; the size of the file stays.

        Where the file system cannot do this, nothing is done, and nothing is raised.
        """

    def room(self, handle: int) -> int:
        """Return for how many bytes the file has room on the disk."""

    def has_room(self, path: str, size: int) -> bool:
        """Return whether the disk of a directory has more than `size` bytes, and a name, free.

        The answer is True if the system does not say how much is free.
        """

    def is_linked(self, handle: int) -> bool:
        """Return whether a file has another name, too, because a snapshot has it."""

    def truncate(self, handle: int, size: int) -> None: ...
    def sync(self, handle: int) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def exchange(self, one: str, other: str) -> bool:
        """Exchange the names of two files, and return whether that was possible.

        Nothing has changed if it was not: one of them is missing, or the system has no such call.
        """

    def remove(self, path: str) -> None: ...
    def salt(self) -> int:
        """Return 32 random bits, never 0."""


class OsFiles:
    """The real disk. `mode` has the permissions of files that are made."""

    def __init__(self, mode: int = 0o640) -> None:
        self._mode = mode

    def make_directory(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_directory(parent)
        os.mkdir(path)
        self.sync_directory(parent)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int:
        flags = os.O_RDONLY if read_only else os.O_RDWR
        return os.open(path, flags | os.O_CLOEXEC | (os.O_CREAT if create else 0), self._mode)

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def descriptor(self, handle: int) -> int:
        return handle

    def read_into(self, handle: int, target: memoryview, position: int) -> int:
        done = 0
        while done < len(target):
            got = os.preadv(handle, [target[done:]], position + done)
            if got == 0:
                break
            done += got
        return done

    def read_pieces(self, handle: int, size: int, positions: Positions) -> Pieces:
        pread = os.pread
        return [pread(handle, size, position) for position in positions]

    def write(self, handle: int, data: bytes | bytearray | memoryview, position: int) -> None:
        left = memoryview(data)
        while left:
            done = os.pwrite(handle, left, position)
            if done == 0:
                raise OSError(errno.EIO, "pwrite wrote nothing")
            left = left[done:]
            position += done

    def allocate(self, handle: int, size: int) -> None:
        os.posix_fallocate(handle, 0, size)

    def set_aside(self, handle: int, start: int, size: int) -> None:
        if _fallocate(handle, _KEEP_SIZE, start, size) == 0:
            return
        number = ctypes.get_errno()
        if number not in _CANNOT:
            raise OSError(number, os.strerror(number))

    def room(self, handle: int) -> int:
        return os.fstat(handle).st_blocks * _BLOCK_BYTES

    def has_room(self, path: str, size: int) -> bool:
        try:
            found = os.statvfs(path)
        except OSError:
            return True
        # A file system without a fixed number of inodes says that it has 0.
        no_names = found.f_files > 0 and found.f_favail == 0
        return found.f_bavail * found.f_frsize > size and not no_names

    def is_linked(self, handle: int) -> bool:
        return os.fstat(handle).st_nlink > 1

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        os.fdatasync(handle)

    def sync_directory(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> bool:
        names = os.fsencode(one), os.fsencode(other)
        return bool(_renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def salt(self) -> int:
        return int.from_bytes(os.urandom(4), "little") or 1


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_missing(error: OSError) -> bool:
    return error.errno == errno.ENOENT


def remove_files(files: Files, paths: list[str]) -> None:
    for path in paths:
        try:
            files.remove(path)
        except OSError as error:
            if not is_missing(error):
                raise


def read_head(files: Files, handle: int, size: int) -> bytes:
    """Return the first `size` bytes of a file, fewer where it ends before."""
    data = bytearray(size)
    with memoryview(data) as view:
        return bytes(data[: files.read_into(handle, view, 0)])


def read_file(files: Files, path: str) -> bytes:
    """Return all bytes of a file, or b"" when there is no such file."""
    return read_if_there(files, path) or b""


def read_if_there(files: Files, path: str) -> bytes | None:
    """Return all bytes of a file, or None when there is no such file."""
    return _if_there(files, path, lambda handle: read_head(files, handle, files.size(handle)))


def size_if_there(files: Files, path: str) -> int | None:
    """Return the size of a file, or None when there is no such file."""
    return _if_there(files, path, files.size)


def _if_there(files: Files, path: str, look: Callable[[int], Found]) -> Found | None:
    try:
        handle = files.open(path, read_only=True)
    except OSError as error:
        if is_missing(error):
            return None
        raise
    try:
        return look(handle)
    finally:
        files.close(handle)


def write_file(files: Files, path: str, data: bytes, *, sync: bool = False) -> None:
    handle = files.open(path, create=True)
    try:
        files.truncate(handle, 0)
        files.write(handle, data, 0)
        if sync:
            files.sync(handle)
    finally:
        files.close(handle)


def replace_file(files: Files, path: str, new: str, data: bytes, *, sync: bool) -> None:
    """Write `data` to the file `new`, and give it the name `path` of an older file."""
    write_file(files, new, data, sync=sync)
    files.rename(new, path)


def sync_file(files: Files, path: str, *, if_there: bool = False) -> None:
    """Sync a file by its path. `if_there`: a missing file is no error."""
    try:
        handle = files.open(path)
    except OSError as error:
        if if_there and is_missing(error):
            return
        raise
    try:
        files.sync(handle)
    finally:
        files.close(handle)
