"""The data directory and its lock, the runtime directory, and files replaced in one step.

The lock is inherited by every child: a supervisor that was killed leaves children that still drain, and a new broker
must not open their files before they are done.
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


class DataDirectory:
    """Locked from `open` to the end of this process and its children; `undo` leaves no trace of a failed start."""

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
            raise ConfigError(f"data_dir: {self.path}: {error.strerror}") from None
        except ConfigError:
            self.undo()
            raise

    def shards_held(self) -> int:
        names = (path.name.removeprefix("shard-") for path in self.path.glob("shard-*"))
        return max((int(name) + 1 for name in names if name.isdigit()), default=0)

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
            folder.mkdir(mode=0o750)
            self._made.append(folder)
        if not path.is_dir():
            raise ConfigError(f"data_dir: {path}: not a directory")
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"data_dir: {path}: not writable")

    def _lock(self, deadline: float) -> None:
        lock = self.path / ".lock"
        while True:
            fd = self._open_lock(lock)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                if _alive(holder) or time.monotonic() >= deadline:
                    raise ConfigError(f"data_dir: {self.path}: in use by the broker with pid {holder}") from None
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


class RuntimeDirectory:
    """Where the sockets between the processes and status.json live; emptied of these before and after."""

    def __init__(self, configured: str, data_dir: Path) -> None:
        self._ours = False
        try:
            self.path = self._choose(configured, data_dir)
        except OSError as error:
            raise ConfigError(f"runtime_dir: {configured or data_dir / 'run'}: {error.strerror}") from None
        self._clear()

    def remove(self) -> None:
        self._clear()
        if self._ours:
            try:
                self.path.rmdir()
            except OSError:
                pass  # something that is not ours lies there: left alone

    def _choose(self, configured: str, data_dir: Path) -> Path:
        given = configured or os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
        if given:
            path = Path(given).absolute()
            if not _fits(path):
                raise ConfigError(f"runtime_dir: {path}: too long a path for sockets")
            if not path.exists():
                path.mkdir(mode=0o700, parents=True)
                self._ours = True
            return path
        self._ours = True
        path = (data_dir / "run").absolute()
        if _fits(path):
            path.mkdir(mode=0o700, exist_ok=True)
            return path
        return Path(tempfile.mkdtemp(prefix="shardmq-", dir="/tmp"))

    def _clear(self) -> None:
        for path in (*self.path.glob("*.sock"), self.path / "status.json", self.path / "status.json.new"):
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
