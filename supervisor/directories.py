"""The data directory and the runtime directory, with their locks.

Every child inherits the locks. A supervisor that was killed leaves children behind that still
drain, and a new broker must not open their files or sockets before they have ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from shardmq.supervisor import formats
from shardmq.supervisor.config import ConfigError

SOCKET_PATH_BYTES_MAX = 100  # The field sun_path of the kernel holds 108.
SOCKET_NAME_BYTES_MAX = 32
LOCK_POLL_S = 0.1
LOCK_NAME = ".lock"
READER_NAME = "reader.sock"
BRIDGES_NAME = "bridges.sock"
# Patterns of the files that the broker makes in the runtime directory.
RUNTIME_NAMES = (
    "control.sock", "controller.sock", "shard-*.sock", "lane-*.sock", "door-*.sock",
    "shardctl.sock", READER_NAME, BRIDGES_NAME, "board-*", "status.json", "status.json.new",
    "log-*", "binds-*.pipe",
)  # fmt: skip
ROOM_BYTES = 1 << 20  # The room that status.json, boards and sockets take, about.
FULL = (errno.ENOSPC, errno.EDQUOT)
SICK = (errno.EIO, errno.ENXIO, errno.EROFS, *FULL)  # Errors of the disk, which may pass.

log = logging.getLogger("supervisor")


class LockedDirectory:
    """A directory that is locked from `open` to the end of this process and of its children.

    A subclass names the setting of the directory, its mode and, in `_check_content`, what must hold
    of its files.
    """

    setting = ""
    mode = 0o700

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_fd = -1
        self._made: list[Path] = []

    def open(self, wait_s: float = 0) -> None:
        """Make the directory if it is missing, and lock it. If this fails, nothing is left behind.

        Args:
            wait_s: The seconds to wait for a lock whose holder is dead: its children may still
                drain and hold the lock.

        Raises:
            ConfigError: The directory cannot be used.
            OSError: The disk refuses the directory, so that another setting would not help.
        """
        try:
            missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            for folder in reversed(missing):
                folder.mkdir(mode=self.mode)
                self._made.append(folder)
            if not self.path.is_dir():
                raise ConfigError(f"{self.setting}: {self.path}: not a directory")
            if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
                raise ConfigError(f"{self.setting}: {self.path}: not writable")
            self._lock(time.monotonic() + wait_s)
        except OSError as error:
            self.undo()
            text = f"{self.setting}: {self.path}: {error.strerror}"
            if error.errno in SICK:
                raise OSError(error.errno, text) from None
            raise ConfigError(text) from None
        except ConfigError:
            self.undo()
            raise

    def undo(self) -> None:
        """Release the lock and remove what `open` has made."""
        for path in reversed(self._made):
            try:
                path.rmdir() if path.is_dir() else path.unlink()
            except OSError:
                break  # Another program has put a file there.
        self._made.clear()
        self.close()

    def close(self) -> None:
        """Release the lock in this process. Children that have inherited the lock keep it."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def _lock(self, deadline: float) -> None:
        lock = self.path / LOCK_NAME
        while True:
            try:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
                self._made.append(lock)
            except FileExistsError:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                is_alive = not holder.isdigit() or Path(f"/proc/{holder}").exists()
                if is_alive or time.monotonic() >= deadline:
                    text = f"{self.setting}: {self.path}: in use by the broker with pid {holder}"
                    raise ConfigError(text) from None
                time.sleep(LOCK_POLL_S)
                continue
            if _is_same_file(fd, lock):
                break
            os.close(fd)  # The holder has ended and removed its lock file since it was opened here.
        self.lock_fd = fd
        self._check_content()
        _overwrite(fd, f"{os.getpid()}\n".encode())

    def _check_content(self) -> None:
        """Raise ConfigError if the files in the directory cannot be used.

        The directory is locked and nothing has been written yet.
        """


class DataDirectory(LockedDirectory):
    """The directory of the messages and the definitions."""

    setting = "data_dir"
    mode = 0o750

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._version: dict[str, Any] = {}  # The content of the file VERSION.

    def shards(self) -> list[int]:
        """Return the numbers of the shards that the directory has files of."""
        names = (path.name.removeprefix("shard-") for path in self.path.glob("shard-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def _check_content(self) -> None:
        try:
            self._version = formats.check(self.path)
        except formats.FormatError as error:
            raise ConfigError(f"data_dir: {error}") from None
        missing = sorted(set(self._version.get("shards", ())) - set(self.shards()))
        if missing:
            raise ConfigError(
                f"data_dir: {self.path}/shard-{missing[0]:02d} is missing, with all messages in it:"
                f" put it back, or take {missing[0]} out of {self.path}/{formats.NAME} to go on"
                " without it"
            )

    def write_version(self) -> None:
        """Write the numbers of the shards that have a directory, if they have changed.

        A disk that refuses the file does not stop the broker: the next start looks at every file
        again.
        """
        shards = self.shards()
        if self._version.get("shards") == shards:
            return
        try:
            formats.write_version(self.path, shards)
        except OSError as error:
            log.warning("%s cannot be written in %s: %s", formats.NAME, self.path, error.strerror)
        else:
            self._version = {"version": formats.VERSION, "shards": shards}


class RuntimeDirectory(LockedDirectory):
    """The directory of the sockets between the processes and of status.json.

    The files of the broker are removed before and after its life. Other programs may use the
    directory too: only files whose names match RUNTIME_NAMES are removed.

    Args:
        configured: The setting `runtime_dir`. If it is empty, RUNTIME_DIRECTORY of systemd holds,
            then the folder `run` of the data directory.
        data_dir: The data directory.
    """

    setting = "runtime_dir"

    def __init__(self, configured: str, data_dir: Path) -> None:
        given = configured or os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
        super().__init__(Path(given or data_dir / "run").absolute())
        self._is_given = bool(given)
        self._removes_itself = not given

    def open(self, wait_s: float = 0) -> None:
        """Open the directory as `LockedDirectory.open` does, and remove the files of a former life.

        A directory in /tmp takes the place of the one in the data directory if the data directory
        has no room or its path is too long for the address of a socket.
        """
        longest = len(os.fsencode(self.path)) + 1 + SOCKET_NAME_BYTES_MAX
        is_too_long = longest > SOCKET_PATH_BYTES_MAX
        if self._is_given and is_too_long:
            raise ConfigError(f"runtime_dir: {self.path}: too long a path for sockets")
        if not self._is_given and (is_too_long or not _has_room(self.path.parent)):
            self.path = Path(tempfile.mkdtemp(prefix="shardmq-", dir="/tmp"))
        self._removes_itself = self._removes_itself or not self.path.exists()
        super().open(wait_s)
        self._clear()

    def remove(self) -> None:
        """Remove the files of the broker, and the directory if the broker has made it.

        A file that the disk refuses to remove stays, and the next start removes it.
        """
        try:
            self._clear()
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be emptied: %s", self.path, error.strerror)
        if self._removes_itself:
            try:
                self.path.rmdir()
            except OSError:
                pass  # The directory holds a file of another program.
        self.close()

    def _clear(self) -> None:
        for pattern in RUNTIME_NAMES:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)


def replace_file(path: Path, content: dict[str, Any]) -> None:
    """Replace a file by an object as JSON. A reader sees the old file or the new one, never a part.

    Raises:
        OSError: The file cannot be written.
    """
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content) + "\n")
    new.replace(path)


def _overwrite(fd: int, data: bytes) -> None:
    """Replace the content of a small file in the block that the file has.

    A full disk has no other block. A file without any block stays empty, and locks all the same.
    """
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.warning("no room for the process id in %s: %s", LOCK_NAME, error.strerror)


def _has_room(directory: Path) -> bool:
    """Return whether sockets and small files can be made in a directory, by trying it with a file.

    Only a full disk counts. Any other error is reported by the code that uses the directory.
    """
    try:
        fd, name = tempfile.mkstemp(dir=directory)
    except OSError as error:
        return error.errno not in FULL
    try:
        os.posix_fallocate(fd, 0, ROOM_BYTES)
    except OSError as error:
        return error.errno not in FULL
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name)
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
