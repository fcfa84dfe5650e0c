"""The data directory and the runtime directory with their locks, and files replaced in one step.

The locks are inherited by every child: a supervisor that was killed leaves children that still drain, and a new broker
must not open their files or sockets before they are done.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from supervisor.config import ConfigError

SOCKET_PATH_BYTES_MAX = 100  # sun_path holds 108
SOCKET_NAME_BYTES_MAX = 32
LOCK_POLL_S = 0.1
LOCK_NAME = ".lock"
READER_NAME = "reader.sock"
RUNTIME_NAMES = (
    "control.sock", "controller.sock", "shard-*.sock", "lane-*.sock", "door-*.sock", "shardctl.sock", READER_NAME,
    "board-*", "status.json", "status.json.new",
)  # fmt: skip


class LockedDirectory:
    """Locked from `open` to the end of this process and its children; `undo` leaves no trace of a failed start."""

    setting = ""
    mode = 0o700

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_fd = -1
        self._made: list[Path] = []

    def open(self, wait_s: float = 0) -> None:
        """Raises ConfigError. A lock whose holder is dead is waited for: its children drain."""
        try:
            self._make(self.path)
            self._lock(time.monotonic() + wait_s)
        except OSError as error:
            self.undo()
            raise ConfigError(f"{self.setting}: {self.path}: {error.strerror}") from None
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
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self.lock_fd = fd

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

    def shards_held(self) -> int:
        names = (path.name.removeprefix("shard-") for path in self.path.glob("shard-*"))
        return max((int(name) + 1 for name in names if name.isdigit()), default=0)


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
        if not _fits(self.path):
            if self._given:
                raise ConfigError(f"runtime_dir: {self.path}: too long a path for sockets")
            self.path = Path(tempfile.mkdtemp(prefix="shardmq-", dir="/tmp"))
        self._ours = self._ours or not self.path.exists()
        super().open(wait_s)
        self._clear()

    def remove(self) -> None:
        self._clear()
        (self.path / LOCK_NAME).unlink(missing_ok=True)
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
