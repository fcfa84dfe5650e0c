"""Keep the offsets that named consumers of a stream have stored.

One file beside the segments of the stream holds a name and an offset for each consumer.

    positions    0  "SHMQPOSN" | u32 FORMAT | u32 crc32c of [16, 32)
                16  u32 salt | zeros
                32  changes: u32 crc32c of the rest of it, XOR salt | u8 n | u64 offset | name[n]

The last change of a name counts. The offset GONE means that the name is forgotten. Changes are
appended with each flush of the log and synced a little later (`take_unsynced`). After a power cut
a consumer may therefore read messages a second time, but never skips one. When the file is much
larger than twice its useful content, it is written anew beside the old one and renamed. A sync of
messages does the same in its thread if somebody waits for all positions (`is_due`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.files import Files, is_full, read_file, replace_file, sync_file
from shardmq.shardd.store.format import record

FORMAT = 1
MAGIC = b"SHMQPOSN"
HEADER = struct.Struct("<8sIII12x")
CHANGE = struct.Struct("<IBQ")
NAME = "positions"
NEW_NAME = "positions.new"
GONE = 0xFFFFFFFFFFFFFFFF
NAME_BYTES_MAX = 255
# Names of one stream. A further consumer cannot store its offset.
NAMES_MAX = 100_000
# The file is written anew when it exceeds twice its content by more than this.
REWRITE_BYTES_MIN = 64 << 10


class TooManyNames(ValueError):
    """NAMES_MAX consumers have stored an offset in this stream."""


@dataclass(slots=True, eq=False)
class Rewrite:
    """The file of all positions, which is to take the place of the old one.

    `run` is called in the thread of a sync. `taken` are the changes that are not in the old file.
    """

    files: Files
    directory: str
    sync: bool
    salt: int
    data: bytes
    taken: dict[bytes, int]
    full: bool = False

    def run(self) -> None:
        """Write the file. On a full disk the old one stays."""
        path, new = f"{self.directory}/{NAME}", f"{self.directory}/{NEW_NAME}"
        try:
            replace_file(self.files, path, new, self.data, sync=self.sync)
            if self.sync:
                self.files.sync_directory(self.directory)
        except OSError as error:
            if not is_full(error):
                raise
            self.full = True


class Positions:
    def __init__(self, files: Files, directory: str, sync: bool) -> None:
        self.files = files
        self.sync = sync
        self.directory = directory
        self.path = f"{directory}/{NAME}"
        self.offsets: dict[bytes, int] = {}
        self.changed: dict[bytes, int] = {}  # not in the file yet
        self.salt = 0
        self.end = 0  # size of the file up to the last good change; 0: there is no file
        self.torn = False  # bytes that are no good change follow `end`
        self.live_bytes = 0
        self.is_due = False  # the next sync of messages writes the file anew
        self._rewriting = False  # such a sync has the file in hand
        self._unsynced = False  # bytes of the file may not be on stable storage
        self._renamed = False  # the name of the file may not be on stable storage

    def recover(self) -> list[Damage]:
        """Read the file without changing it; return what is damaged."""
        data = read_file(self.files, self.path)
        if not _is_header(data):
            return [Damage(NAME, "header", 0, len(data))] if any(data) else []
        self.salt = HEADER.unpack_from(data)[3]
        at = HEADER.size
        while (change := _change_at(data, at, self.salt)) is not None:
            name, offset, at = change
            self._set(name, offset)
        self.end = at
        self._unsynced = self._renamed = True  # a process that was killed has not synced the file
        self.torn = at < len(data)
        return [Damage(NAME, "torn", at, len(data))] if self.torn else []

    def get(self, name: bytes) -> int | None:
        return self.offsets.get(name)

    def set(self, name: bytes, offset: int) -> None:
        if len(name) > NAME_BYTES_MAX or not 0 <= offset < GONE:
            raise ValueError(f"a name of {len(name)} bytes, offset {offset}")
        if name not in self.offsets and len(self.offsets) >= NAMES_MAX:
            raise TooManyNames(f"{NAMES_MAX} consumers have a position in {self.directory}")
        if self.offsets.get(name) != offset:
            self._set(name, offset)
            self.changed[name] = offset

    def forget(self, name: bytes) -> None:
        if name in self.offsets:
            self._set(name, GONE)
            self.changed[name] = GONE

    def _set(self, name: bytes, offset: int) -> None:
        size = CHANGE.size + len(name)
        if name in self.offsets:
            self.live_bytes -= size
            del self.offsets[name]
        if offset != GONE:
            self.offsets[name] = offset
            self.live_bytes += size

    def flush(self) -> None:
        """Write the changes to the file. On a full disk, and for a `Rewrite`, the changes wait."""
        if not self.changed or self.is_due or self._rewriting:
            return
        added = b"".join(_encode(name, offset, self.salt) for name, offset in self.changed.items())
        try:
            if (
                self.end == 0
                or self.end + len(added) > 2 * (HEADER.size + self.live_bytes) + REWRITE_BYTES_MIN
            ):
                self._rewrite()
            else:
                self._write(added)
        except OSError as error:
            if not is_full(error):
                raise

    def take_unsynced(self) -> tuple[list[str], bool]:
        """Return the files to be synced, and whether a name changed. The caller sees to both."""
        paths = [self.path] if self._unsynced else []
        renamed = self._renamed
        self._unsynced = self._renamed = False
        return paths, renamed

    def begin_rewrite(self) -> Rewrite:
        """Return the job that writes all positions; `end_rewrite` follows its run."""
        self.is_due, self._rewriting = False, True
        taken, self.changed = self.changed, {}
        salt, data = self._anew()
        return Rewrite(self.files, self.directory, self.sync, salt, data, taken)

    def end_rewrite(self, job: Rewrite) -> None:
        """Note the end of a job. If the disk was full, the next sync tries again."""
        self._rewriting = False
        if job.full:
            self.is_due, self.changed = True, job.taken | self.changed
            return
        self.salt, self.end, self.torn = job.salt, len(job.data), False
        self._unsynced = self._renamed = False

    def save(self) -> None:
        """Write all changes and make them last."""
        self.is_due = False
        self.flush()
        if self.sync and self.end:
            sync_file(self.files, self.path)
            self.files.sync_directory(self.directory)

    def _write(self, added: bytes) -> None:
        handle = self.files.open(self.path)
        try:
            if self.torn:
                # Good changes may follow a torn one. They must not come back to life behind the new
                # changes that are written over the torn one.
                self.files.truncate(handle, self.end)
                self.torn = False
            self.files.write(handle, added, self.end)
        finally:
            self.files.close(handle)
        self.end += len(added)
        self._unsynced = True
        self.changed.clear()

    def _rewrite(self) -> None:
        """Write a new file that holds only the last offset of each name.

        The new file is synced before it replaces the old one, because the old one may be on stable
        storage.
        """
        salt, data = self._anew()
        new = f"{self.directory}/{NEW_NAME}"
        replace_file(self.files, self.path, new, data, sync=self.sync)
        self.salt, self.end, self.torn = salt, len(data), False
        self._unsynced, self._renamed = False, True
        self.changed.clear()

    def _anew(self) -> tuple[int, bytes]:
        """Return the salt and the content of a file that has the last offset of each name."""
        salt = self.files.salt()
        rest = struct.pack("<I12x", salt)
        head = struct.pack("<8sII", MAGIC, FORMAT, record.crc32c(rest, FORMAT)) + rest
        changes = (_encode(name, offset, salt) for name, offset in self.offsets.items())
        return salt, head + b"".join(changes)


def _is_header(data: bytes) -> bool:
    if len(data) < HEADER.size:
        return False
    magic, version, crc, _ = HEADER.unpack_from(data)
    if magic != MAGIC or crc != record.crc32c(data[16 : HEADER.size], version):
        return False
    refuse_newer(NAME, version)
    return True


def _encode(name: bytes, offset: int, salt: int) -> bytes:
    rest = struct.pack("<BQ", len(name), offset) + name
    return struct.pack("<I", record.crc32c(rest) ^ salt) + rest


def _change_at(data: bytes, at: int, salt: int) -> tuple[bytes, int, int] | None:
    """Return (name, offset, end) of the change at `at`, or None when there is no good one."""
    if at + CHANGE.size > len(data):
        return None
    crc, size, offset = CHANGE.unpack_from(data, at)
    stop = at + CHANGE.size + size
    if stop > len(data) or record.crc32c(data[at + 4 : stop]) ^ salt != crc:
        return None
    return data[at + CHANGE.size : stop], offset, stop
