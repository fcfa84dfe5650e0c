"""Disks that are full.

They are small file systems, or calls that are refused where none can be mounted.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmq.shardd.store.files import OsFiles


@contextlib.contextmanager
def small_disk(directory: Path, *, mib: int = 64, inodes: int = 0) -> Iterator[Path]:
    """Mount a file system of that size, or skip the test where none can be mounted.

    With `inodes` 0 the file system has as many inodes as usual.
    """
    directory.mkdir()
    options = f"size={mib}m" + (f",nr_inodes={inodes}" if inodes else "")
    mount = ["mount", "-t", "tmpfs", "-o", options, "shardmq-test", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True) if os.geteuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(
            f"no file system can be mounted here: {done.stderr.strip() if done else 'not root'}"
        )
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def take_all_bytes(directory: Path) -> Callable[[], None]:
    """Fill the disk as another program does, to the last block. Returns what frees it again."""
    filled = directory / "filled"
    with contextlib.suppress(OSError), filled.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return filled.unlink


def take_all_inodes(directory: Path) -> Callable[[], None]:
    """Use up all inodes with empty files; return the function that frees them."""
    folder = directory / "many"
    folder.mkdir()
    with contextlib.suppress(OSError):
        for number in range(1 << 30):
            (folder / str(number)).touch()

    def free() -> None:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    return free


class RefusingDisk:
    """A disk whose calls that take room fail while `error` is an errno.

    The blocks that a file has stay.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.refused: set[str] = set()
        self._patch(monkeypatch, OsFiles, "set_aside", lambda files, handle, start, size: True)
        self._patch(
            monkeypatch,
            os,
            "open",
            lambda path, flags, *_: flags & os.O_CREAT and not os.path.exists(path),
        )
        self._patch(monkeypatch, os, "pwrite", self._takes_blocks)
        statvfs = os.statvfs

        def full(path: Any) -> Any:
            found = list(statvfs(path))
            if self.error:
                found[3] = found[4] = 0  # blocks that are free
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "statvfs", full)

    def _takes_blocks(self, fd: int, data: Any, position: int) -> bool:
        return position + len(data) > os.fstat(fd).st_blocks * 512

    def _patch(
        self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, takes_room: Callable[..., Any]
    ) -> None:
        real = getattr(where, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self.error and takes_room(*arguments):
                self.refused.add(name)
                raise OSError(self.error, os.strerror(self.error))
            return real(*arguments, **options)

        monkeypatch.setattr(where, name, call)
