"""The data directory and the runtime directory with their locks, and files replaced in one step.

The locks are inherited by every child: a supervisor that was killed leaves children that still drain, and a new broker
must not open their files or sockets before they are done.
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

SOCKET_PATH_BYTES_MAX = 100  # sun_path holds 108
SOCKET_NAME_BYTES_MAX = 32
LOCK_POLL_S = 0.1
LOCK_NAME = ".lock"
READER_NAME = "reader.sock"
RUNTIME_NAMES = (
    "control.sock", "controller.sock", "shard-*.sock", "lane-*.sock", "door-*.sock", "shardctl.sock", READER_NAME,
    "board-*", "status.json", "status.json.new", "log-*",
)  # fmt: skip
# Of status.json, boards and sockets, about.
ROOM_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
SICK = (errno.EIO, errno.ENXIO, errno.EROFS, *FULL)  # the disk's fault, which may pass

log = logging.getLogger("supervisor")


class LockedDirectory:
    """Locked from `open` to the end of this process and its children; `undo` leaves no trace of a failed start."""

    setting = ""
    mode = 0o700

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_fd = -1
        self._made: list[Path] = []

    def open(self, wait_s: float = 0) -> None:
        """Raises ConfigError, or OSError where another setting would not help. A lock whose holder is dead is waited
        for: its children drain."""
        try:
            self._make(self.path)
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
        for path in reversed(self._made):
            try:
                path.rmdir() if path.is_dir() else path.unlink()
            except OSError:
                break  # somebody else has put something there
        self._made.clear()
        self.close()

    def close(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def _make(self, path: Path) -> None:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=self.mode)
            self._made.append(folder)
        if not path.is_dir():
            raise ConfigError(f"{self.setting}: {path}: not a directory")
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"{self.setting}: {path}: not writable")

    def _lock(self, deadline: float) -> None:
        lock = self.path / LOCK_NAME
        while True:
            fd = self._open_lock(lock)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                if _alive(holder) or time.monotonic() >= deadline:
                    text = f"{self.setting}: {self.path}: in use by the broker with pid {holder}"
                    raise ConfigError(text) from None
                time.sleep(LOCK_POLL_S)
                continue
            if _same_file(fd, lock):
                break
            os.close(fd)  # the holder gave up and took its lock file away while we opened it
        self.lock_fd = fd
        self._look_inside()
        _write_over(fd, f"{os.getpid()}\n".encode())

    def _look_inside(self) -> None:
        """Called with the lock, before anything is written. Raises ConfigError."""

    def _open_lock(self, lock: Path) -> int:
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        except FileExistsError:
            return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._made.append(lock)
        return fd


class DataDirectory(LockedDirectory):
    """Messages and definitions."""

    setting = "data_dir"
    mode = 0o750

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._said: dict[str, Any] = {}  # by VERSION

    def shards_held(self) -> int:
        return max((number + 1 for number in self._shards()), default=0)

    def _shards(self) -> list[int]:
        names = (path.name.removeprefix("shard-") for path in self.path.glob("shard-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def _look_inside(self) -> None:
        try:
            self._said = formats.check(self.path)
        except formats.FormatError as error:
            raise ConfigError(f"data_dir: {error}") from None
        missing = sorted(set(self._said.get("shards", ())) - set(self._shards()))
        if missing:
            raise ConfigError(
                f"data_dir: {self.path}/shard-{missing[0]:02d} is missing, with all messages in it: put it back, or "
                f"take {missing[0]} out of {self.path}/{formats.NAME} to go on without it"
            )

    def write_version(self) -> None:
        """Note which shards' directories there are, where that is not noted yet. A disk that refuses it is no reason
        not to start: the next start looks at everything again."""
        shards = self._shards()
        if self._said.get("shards") == shards:
            return
        try:
            formats.write_version(self.path, shards)
        except OSError as error:
            log.warning("%s cannot be written in %s: %s", formats.NAME, self.path, error.strerror)
        else:
            self._said = {"version": formats.VERSION, "shards": shards}


class RuntimeDirectory(LockedDirectory):
    """Where the sockets between the processes and status.json live; emptied of these before and after.

    It may be a folder others use as well: nothing but what has a name of ours is taken away.
    """

    setting = "runtime_dir"

    def __init__(self, configured: str, data_dir: Path) -> None:
        given = configured or os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
        super().__init__(Path(given or data_dir / "run").absolute())
        self._given = bool(given)
        self._ours = not given

    def open(self, wait_s: float = 0) -> None:
        fits = _fits(self.path)
        if self._given and not fits:
            raise ConfigError(f"runtime_dir: {self.path}: too long a path for sockets")
        if not fits or not (self._given or _has_room(self.path.parent)):
            self.path = Path(tempfile.mkdtemp(prefix="shardmq-", dir="/tmp"))
        self._ours = self._ours or not self.path.exists()
        super().open(wait_s)
        self._clear()

    def remove(self) -> None:
        """Take away what is ours. What a disk refuses to remove stays, and the next start removes it."""
        try:
            self._clear()
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be emptied: %s", self.path, error.strerror)
        if self._ours:
            try:
                self.path.rmdir()
            except OSError:
                pass  # something that is not ours lies there: left alone
        self.close()

    def _clear(self) -> None:
        for pattern in RUNTIME_NAMES:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)


def _write_over(fd: int, data: bytes) -> None:
    """Replace the content of a small file in the block it has: a full disk has no other. Without any block the file
    stays empty, and is as good a lock."""
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.warning("no room for the process id in %s: %s", LOCK_NAME, error.strerror)


def _has_room(directory: Path) -> bool:
    """Whether sockets and small files can be made there: try it with one."""
    try:
        fd, name = tempfile.mkstemp(dir=directory)
    except OSError as error:
        return error.errno not in FULL  # whatever else is wrong is told by whoever meets it
    try:
        os.posix_fallocate(fd, 0, ROOM_BYTES)
    except OSError as error:
        return error.errno not in FULL
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name)
    return True


def replace_file(path: Path, content: dict[str, Any]) -> None:
    """A reader sees the old file or the new one, never a part."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content) + "\n")
    new.replace(path)


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) + 1 + SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _alive(pid: str) -> bool:
    return not pid.isdigit() or Path(f"/proc/{pid}").exists()
