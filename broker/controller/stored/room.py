"""Files whose room on the disk is set aside before it is needed.

There is a log that grows, and small files that are replaced. Room is set aside behind the end of a
file: the file has more blocks, and its size stays. A replaced file keeps a second file beside it,
`NAME.new`, with blocks for the next content. The two exchange their names, so the blocks and the
inode of the old content serve the next time. On a file system that cannot do one of both, room is
looked for when it is needed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from shardmq.shardd.store.files import (
    Files,
    OsFiles,
    is_full,
    replace_file,
    size_if_there,
)

# How much is set aside behind the end of the log, whenever less than LOG_ROOM_MIN is left.
LOG_ROOM_BYTES: Final = 1 << 20
LOG_ROOM_MIN: Final = 768 << 10
# The part of it for what cannot be refused: removals, and what follows from a decision.
LOG_KEPT_BYTES: Final = 512 << 10
# How much is set aside beyond the present size of a file that is replaced.
FILE_ROOM_BYTES: Final = 64 << 10
# With less than this left on the disk, nothing may be added.
FREE_BYTES_MIN: Final = 1 << 20
# Some of the files have password hashes.
OWNER_ONLY: Final = OsFiles(mode=0o600)
READABLE: Final = OsFiles(mode=0o666)  # by whom the umask says


def write_whole(path: Path, data: bytes, files: Files = READABLE) -> None:
    """Replace a small file, on stable storage: a crash leaves the old one or the new one."""
    replace_file(files, str(path), f"{path}.new", data, sync=True)
    files.sync_directory(str(path.parent))


class GrowingLog:
    """A log that is appended to, and replaced whole now and then; it ends at `size`."""

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self.size = 0
        self._files = files
        self._handle = -1
        self._room_end = 0  # up to where the file has blocks

    @property
    def room(self) -> int:
        return self._room_end - self.size

    def open(self, size: int) -> None:
        """Go on with an existing file whose records end at `size`; what lies behind is cut off."""
        self._handle = self._files.open(str(self.path))
        if self._files.size(self._handle) > size:
            self._files.truncate(self._handle, size)
        self.size = self._room_end = size
        self.set_aside()

    def set_aside(self, wanted: int = 0) -> None:
        """Set room aside for what comes next, `wanted` bytes or more, as far as the disk has it."""
        if self.room >= max(LOG_ROOM_MIN, wanted):
            return
        size = max(LOG_ROOM_BYTES, wanted)
        try:
            self._files.set_aside(self._handle, self.size, size)
            self._room_end = self.size + size
        except OSError as error:
            if not is_full(error):
                raise
            # A former process may have set room aside.
            self._room_end = max(self.size, self._files.room(self._handle))

    def append(self, data: bytes) -> None:
        """Append bytes. After an OSError the next append begins where this one did."""
        self._files.write(self._handle, data, self.size)
        self.size += len(data)
        self._room_end = max(self._room_end, self.size)

    def write_head(self, head: bytes) -> None:
        """Replace the header by one of the same length.

        It lies within one sector, so it is never torn.
        """
        self._files.write(self._handle, head, 0)
        self.sync()

    def sync(self) -> None:
        self._files.sync(self._handle)

    def replace(self, data: bytes) -> None:
        """Replace the whole log, on stable storage, and set room aside behind it.

        After an OSError the log is as it was.
        """
        files, fresh = self._files, f"{self.path}.new"
        handle = files.open(fresh, create=True)
        try:
            files.truncate(handle, 0)
            files.set_aside(handle, 0, len(data) + LOG_ROOM_BYTES)
            files.write(handle, data, 0)
            files.sync(handle)
            files.rename(fresh, str(self.path))
        except OSError:
            files.close(handle)
            with contextlib.suppress(OSError):
                files.remove(fresh)
            raise
        old, self._handle = self._handle, handle
        self.size, self._room_end = len(data), len(data) + LOG_ROOM_BYTES
        if old >= 0:
            files.close(old)
        files.sync_directory(str(self.path.parent))

    def close(self) -> None:
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            try:
                self._files.sync(handle)
            finally:
                self._files.close(handle)


class ReplacedFile:
    """A small file that is replaced whole, and has room for `room` bytes.

    With `erases` set, zeros take the place of the content that was replaced.
    """

    def __init__(self, path: Path, files: Files, *, erases: bool = False) -> None:
        self.path = path
        self.room = 0
        self._erases = erases
        self._files = files
        self._spare = f"{path}.new"

    def set_aside(self, wanted: int = 0) -> None:
        """Set room aside for `wanted` bytes, and for more than the present content.

        `room` says how much the disk had.
        """
        try:
            handle = self._files.open(self._spare, create=True)
        except OSError as error:
            if not is_full(error):
                raise
            self.room = 0
            return
        try:
            wanted = max(wanted, self.size() + FILE_ROOM_BYTES)
            try:
                self._files.set_aside(handle, 0, wanted)
                self.room = wanted
            except OSError as error:
                if not is_full(error):
                    raise
                self.room = self._files.room(handle)
        finally:
            self._files.close(handle)

    @property
    def is_there(self) -> bool:
        return size_if_there(self._files, str(self.path)) is not None

    def size(self) -> int:
        return size_if_there(self._files, str(self.path)) or 0

    def replace(self, data: bytes) -> None:
        """Replace the content, on stable storage. After an OSError the file is as it was."""
        files = self._files
        handle = files.open(self._spare, create=True)
        try:
            files.write(handle, data, 0)
            files.truncate(handle, len(data))
            files.sync(handle)
        finally:
            files.close(handle)
        # The first content has nothing to exchange its name with.
        if not files.exchange(self._spare, str(self.path)):
            files.rename(self._spare, str(self.path))
        files.sync_directory(str(self.path.parent))
        self.erase()
        self.set_aside()

    def erase(self) -> None:
        """Overwrite the content that was replaced, if it is to be erased.

        A start does it again, because a crash may have come before. The zeros are synced: the
        blocks of a file that is made shorter before that would go back as they were.
        """
        if not self._erases:
            return
        if size := size_if_there(self._files, self._spare):
            handle = self._files.open(self._spare)
            try:
                self._files.write(handle, bytes(size), 0)
                self._files.sync(handle)
            except OSError as error:
                if not is_full(error):
                    raise
                self._files.truncate(handle, 0)
            finally:
                self._files.close(handle)
