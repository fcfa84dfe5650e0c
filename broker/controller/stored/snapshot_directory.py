"""The directory of a snapshot: it has another name until everything in it is on stable storage.

So a snapshot that fails, or is cut off, is never taken for a whole one. The functions wait for the
disk, so they run in a thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from shardmq.broker.controller.stored.room import READABLE
from shardmq.shardd.store.files import sync_file

# The name of a snapshot until it is whole ends with this.
INCOMPLETE: Final = ".incomplete"
# The file by which the supervisor knows the shards of a data directory.
VERSION_NAME: Final = "VERSION"
# Inside the data directory snapshots lie in this folder only, which no start looks at.
INSIDE: Final = "snapshots"
DIRECTORY_MODE: Final = 0o750


class NoSnapshot(Exception):
    """A snapshot cannot be made. The text says why, for the operator."""


def begin(target: Path, data_dir: Path, made: list[Path]) -> None:
    """Make the directory of a snapshot, and add it to `made`. Raises NoSnapshot or OSError."""
    check(target, data_dir)
    if os.path.ismount(target):
        raise NoSnapshot(f"{target} is a mount point, which keeps its name: take a name below it")
    fresh = target.with_name(f"{target.name}{INCOMPLETE}")
    if fresh.is_symlink() or fresh.exists():
        raise NoSnapshot(f"{fresh} is there, of a snapshot that was cut off: remove it")
    fresh.mkdir(mode=DIRECTORY_MODE)
    made.append(fresh)


def begin_part(target: Path, name: str, made: list[Path]) -> None:
    """Make the directory of a node's part in the target of a cluster, and add it to `made`.

    Other nodes may share the target. Each has looked before that nothing was there. Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        target.mkdir(mode=DIRECTORY_MODE)
    fresh = target / f"{name}{INCOMPLETE}"
    fresh.mkdir(mode=DIRECTORY_MODE)
    made.append(fresh)


def check(target: Path, data_dir: Path) -> None:
    """Look whether a snapshot can be made at a target. Raises NoSnapshot or OSError."""
    if not target.is_absolute() or ".." in target.parts:
        raise NoSnapshot(f"{target} is no absolute path")
    if target == Path(target.anchor):
        raise NoSnapshot(f"{target} is not empty")
    parent, data = target.parent.resolve(), data_dir.resolve()
    if parent == data / INSIDE:
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=DIRECTORY_MODE)
            READABLE.sync_directory(str(data))
    elif parent.is_relative_to(data):
        raise NoSnapshot(f"{target} is in the data directory: take a name in {data / INSIDE}")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise NoSnapshot(f"{target} is no directory")
    if target.is_dir():
        for there in target.iterdir():
            if there.name.endswith(INCOMPLETE):
                raise NoSnapshot(f"{there} is there, of a snapshot that was cut off: remove it")
            raise NoSnapshot(f"{target} is not empty")


def copy_small(data_dir: Path, fresh: Path, *names: str) -> None:
    """Copy these files of the data directory that there are. Raises OSError."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(data_dir / name, fresh / name)


def give_name(fresh: Path, target: Path) -> None:
    """Sync what lies in the directory itself, then give it its name. Raises OSError."""
    sync(fresh)
    fresh.rename(target)  # over an empty directory, if there is one
    READABLE.sync_directory(str(target.parent))


def sync(fresh: Path) -> None:
    """Sync what lies in the directory itself. Raises OSError."""
    for path in fresh.iterdir():
        if path.is_file():
            sync_file(READABLE, str(path))
    READABLE.sync_directory(str(fresh))


def sync_names(target: Path) -> None:
    """Sync the names in a directory, and its own. Raises OSError."""
    READABLE.sync_directory(str(target))
    READABLE.sync_directory(str(target.parent))


def remove(fresh: Path) -> None:
    """Remove a directory that is not whole, as far as possible."""
    shutil.rmtree(fresh, ignore_errors=True)
