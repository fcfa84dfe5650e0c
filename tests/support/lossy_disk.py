"""A disk of its own for a host of a test: its power can fail, and it can stand still.

It is an ext4 file system in a file, on a loop device. When its power fails, all that no sync has
brought to the file is gone, as on a real host: pages, sizes, names, and the journal in memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Final

# The ioctls and the flag of linux/fs.h and fs/ext4/ext4.h.
FREEZE: Final = 0xC0045877
THAW: Final = 0xC0045878
SHUTDOWN: Final = 0x8004587D
WITHOUT_JOURNAL: Final = 2
UNMOUNT_S_MAX: Final = 30.0  # killed processes let go of their files when the kernel comes to it
MAKE: Final = (
    "mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0",
)  # fmt: skip


def why_impossible() -> str:
    """Return why no such disk can be had here, or ""."""
    if os.geteuid() != 0:
        return "no disks whose power fails: not root"
    if shutil.which(MAKE[0]) is None:
        return f"no disks whose power fails: there is no {MAKE[0]}"
    if not Path("/dev/loop-control").exists():
        return "no disks whose power fails: no loop devices"
    return ""


class LossyDisk:
    """A file system that is mounted at a directory, as a context manager.

    Args:
        directory: Where it is mounted. Its image is beside it.
        mib: Its size.
    """

    def __init__(self, directory: Path, mib: int) -> None:
        self.directory = directory
        self._image = directory.with_name(f"{directory.name}.image")
        self._mib = mib
        self._frozen = False

    def __enter__(self) -> LossyDisk:
        with self._image.open("wb") as image:
            image.truncate(self._mib << 20)
        _run(*MAKE, str(self._image))
        self.directory.mkdir()
        self._mount()
        (self.directory / "lost+found").rmdir()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.thaw()
        subprocess.run(["umount", "--lazy", str(self.directory)], check=True)
        self._image.unlink()

    def fail_power(self) -> None:
        """Lose what is not synced, and mount what is left. Nobody may have a file open there."""
        self.thaw()
        self._call(SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL))
        self._unmount()
        self._mount()

    def freeze(self) -> None:
        """Let writes and syncs wait until it is thawed."""
        self._frozen = True
        self._call(FREEZE)

    def thaw(self) -> None:
        if self._frozen:
            self._call(THAW)
            self._frozen = False

    def _call(self, request: int, argument: bytes = bytes(4)) -> None:
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, request, argument)
        finally:
            os.close(directory)

    def _mount(self) -> None:
        _run("mount", "-o", "loop,noatime", str(self._image), str(self.directory))

    def _unmount(self) -> None:
        until = time.monotonic() + UNMOUNT_S_MAX
        while (done := _tried("umount", str(self.directory))).returncode:
            assert time.monotonic() < until, f"umount: {done.stderr}"
            time.sleep(0.05)


def _run(*command: str) -> None:
    done = _tried(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _tried(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)
