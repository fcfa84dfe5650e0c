"""Merge the parts of a cluster's snapshot into one data directory, for one host.

The parts stay as they are: their files are copied, because a broker goes on with some of them.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from shardmq.cluster.membership import FILE_NAME, Origin, Place
from shardmq.supervisor import formats

INCOMPLETE: Final = ".incomplete"
COPY_BYTES: Final = 1 << 30  # at once
LEFT_OUT: Final = (FILE_NAME, formats.NAME, "lock")
NO_COPY_CALL: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class NotMerged(Exception):
    """The parts cannot be merged. The text says why, for the operator."""


def merge(source: Path, target: Path) -> Origin:
    """Make a data directory of all parts in a directory, and return what snapshot it is.

    Raises NotMerged and OSError; then nothing is left of the target.
    """
    origin, parts = _parts(source)
    fresh = target.with_name(f"{target.name}{INCOMPLETE}")
    for path in (target, fresh):
        if path.is_symlink() or path.exists():
            raise NotMerged(f"{path} is there already")
    fresh.mkdir(mode=0o750)
    try:
        for node, part in sorted(parts.items()):
            for shard in origin.parts[node].shards:
                name = f"shard-{shard:02d}"
                shutil.copytree(part / name, fresh / name, copy_function=_copy)
        for file in next(iter(parts.values())).iterdir():  # the definitions are in each
            if file.is_file() and file.name not in LEFT_OUT:
                _copy(file, fresh / file.name)
        formats.write_version(fresh, sorted(origin.shards))
        for folder, _, names in os.walk(fresh):
            for place in (folder, *(f"{folder}/{name}" for name in names)):
                _sync(place)
        fresh.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return origin


def _parts(source: Path) -> tuple[Origin, dict[str, Path]]:
    """Return the snapshot and the directories of all its parts, by node. Raises NotMerged."""
    found: dict[str, tuple[Path, Place]] = {}
    for path in sorted(source.glob(f"*/{FILE_NAME}")):
        try:
            place = msgspec.json.decode(path.read_bytes(), type=Place)
        except (msgspec.MsgspecError, ValueError) as error:
            raise NotMerged(f"{path}: {error}") from None
        if place.origin is None or path.parent.name.endswith(INCOMPLETE):
            continue
        if place.node in found:
            raise NotMerged(f"{found[place.node][0]} and {path.parent} are of the same node")
        found[place.node] = path.parent, place
    origins = {
        place.origin.snapshot: place.origin
        for _, place in found.values()
        if place.origin is not None
    }
    if len(origins) != 1:
        names = f"parts of several snapshots: {', '.join(origins)}" if origins else "no part of one"
        raise NotMerged(f"{source} is to have the parts of a snapshot, and has {names}")
    (origin,) = origins.values()
    for node, part in origin.parts.items():
        if node not in found:
            raise NotMerged(f"{source} has no part of the node {node}: copy it from its host")
        directory, place = found[node]
        if place.shards != sorted(part.shards) or any(directory.glob("shard-*.copy")):
            raise NotMerged(f"{directory}: a broker was started on it, so it has changed")
        for shard in part.shards:
            if not (directory / f"shard-{shard:02d}").is_dir():
                raise NotMerged(f"{directory}/shard-{shard:02d} is missing")
    return origin, {node: found[node][0] for node in origin.parts}


def _copy(source: str | Path, target: str | Path) -> None:
    """Copy a file with its mode; where the file system can, blocks are shared."""
    with open(source, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
        left = os.fstat(reading.fileno()).st_size
        try:
            while left > 0:
                done = os.copy_file_range(reading.fileno(), writing.fileno(), min(left, COPY_BYTES))
                if done == 0:
                    break
                left -= done
        except OSError as error:
            if error.errno not in NO_COPY_CALL:
                raise
            shutil.copyfileobj(reading, writing)
    shutil.copymode(source, target)


def _sync(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
