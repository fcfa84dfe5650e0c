"""The check of the formats of all files in the data directory, before a file is opened or written.

The file `VERSION` of the data directory is one JSON object: `version`, the version of the
directory as a whole, and `shards`, the numbers of the shards whose directories must be there. A
data directory without the file comes from a version that did not write it: it is accepted and gets
the file. A binary file has its format in its head:

    0  8 bytes that name the kind of file | u32 format | u32 checksum

The checksum starts from the number of the format (shardd/store/format/segment_file.py), so that a
damaged number is not taken for a later format. The checksum of the definitions does not start from
it. Files that no start reads (lost.*, damaged.*) are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardmq.cluster.versions import CATALOG

NAME: Final = "VERSION"
# Raise the version if an older program must not open what this one writes, and no head of a file
# tells that program so.
VERSION: Final = 1
HEAD: Final = struct.Struct("<8sII")
# The levels of directories below the data directory: copies, a shard, a vhost, a stream.
LEVELS_MAX: Final = 4
SHOWN_MAX: Final = 60  # The number of characters of a wrong value in an error text.
NOT_READ: Final = ("lost.", "damaged.", "gone.")
SNAPSHOTS: Final = "snapshots"  # in the data directory: backups, which no start reads
_POLYNOMIAL: Final = 0x82F63B78  # The polynomial of crc32c, reflected.


class FormatError(Exception):
    """The program cannot use the data directory. The text names the file and the reason."""


@dataclass(frozen=True)
class FileKind:
    """A kind of binary file.

    Args:
        latest: The latest format that this program understands.
        checked_to: The checksum covers the bytes from 16 to this offset. 0: no bytes. None: all.
        has_number: Whether the checksum starts from the number of the format.
    """

    latest: int
    checked_to: int | None
    has_number: bool = True


# The kinds by the first 8 bytes of a file. A test compares the numbers with those of the modules
# that write the files.
KINDS: Final[dict[bytes, FileKind]] = {
    b"SHMQMSGS": FileKind(2, 64),
    b"SHMQINDX": FileKind(1, None),
    b"SHMQACKS": FileKind(1, 32),
    b"SHMQSTAT": FileKind(1, None),
    b"SHMQPROD": FileKind(1, 0),
    b"SHMQRETN": FileKind(1, 0),
    b"SHMQMANI": FileKind(1, 0),
    b"SHMQSTRM": FileKind(1, 64),
    b"SHMQSIDX": FileKind(1, None),
    b"SHMQPOSN": FileKind(1, 32),
    b"SHARDDEF": FileKind(CATALOG.most, None, has_number=False),
}


def check(directory: Path) -> dict[str, Any]:
    """Check all files of a data directory and change none.

    Returns:
        The content of VERSION, or {} if there is no such file.

    Raises:
        FormatError: A later version has written a file, or VERSION is wrong.
    """
    said = read_version(directory)
    for path in _files(directory):
        _check_file(path)
    return said


def read_version(directory: Path) -> dict[str, Any]:
    """Return the content of VERSION, or {} if there is no such file.

    Raises:
        FormatError: The file is wrong. The text is one line that names the file and the error.
    """
    path = directory / NAME
    try:
        said = json.loads(path.read_bytes())
        version = said["version"]
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise FormatError(f"{path}: this is not the VERSION file of a data directory") from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    if type(version) is not int or version < 1:
        raise FormatError(f"{path}: version must be a number of a version, not {_shown(version)}")
    if version > VERSION:
        raise FormatError(
            f"{path}: written by a later version (version {version},"
            f" this program knows up to {VERSION})"
        )
    shards = said.get("shards", [])
    if not isinstance(shards, list) or not all(type(n) is int and n >= 0 for n in shards):
        text = f"{path}: shards must be a list of numbers of shards, not {_shown(shards)}"
        raise FormatError(text)
    return dict(said)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def write_version(directory: Path, shards: list[int]) -> None:
    """Write VERSION as a whole or not at all, to stable storage.

    Args:
        directory: The data directory.
        shards: The numbers of the shards whose directories must be there.

    Raises:
        OSError: The file cannot be written.
    """
    new = directory / f"{NAME}.new"
    try:
        with new.open("w") as file:
            json.dump({"version": VERSION, "shards": shards}, file)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(directory / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(directory: Path, level: int = 0) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except (FileNotFoundError, PermissionError):
        return  # The directory is not the broker's, such as lost+found of a volume.
    for entry in entries:
        if entry.is_file(follow_symlinks=False):
            if not entry.name.startswith(NOT_READ):
                yield Path(entry.path)
        elif level < LEVELS_MAX and entry.is_dir() and (level or entry.name != SNAPSHOTS):
            yield from _files(Path(entry.path), level + 1)


def _check_file(path: Path) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(HEAD.size)
            if len(head) < HEAD.size:
                return
            magic, version, crc = HEAD.unpack(head)
            kind = KINDS.get(magic)
            if kind is None or version <= kind.latest:
                return
            if kind.has_number and crc != _checksum(file.read, kind, version):
                return  # The file is damaged. The process that opens the file reports that.
    except OSError as error:
        # The process that needs the file reports an error of the disk. A file may also be removed
        # while it is searched for.
        if error.errno in (errno.EIO, errno.ENOENT, errno.EACCES, errno.EPERM):
            return
        raise
    raise FormatError(
        f"{path}: written by a later version (format {version},"
        f" this program knows up to {kind.latest})"
    )


def _checksum(read: Any, kind: FileKind, version: int) -> int:
    if kind.checked_to == 0:
        return crc32c(b"", version)
    if kind.checked_to is None:
        return crc32c(read(), version)
    return crc32c(read(kind.checked_to - HEAD.size), version)


def crc32c(data: bytes, begun: int = 0) -> int:
    """Return the checksum of shardd.store, computed in Python.

    Only a file with the number of a later format needs it.

    Args:
        data: The bytes.
        begun: The checksum of the bytes before these, or the number to start from.
    """
    crc = begun ^ 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _row(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE: Final = tuple(map(_row, range(256)))
