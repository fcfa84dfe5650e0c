"""Simulate a disk in memory that loses unsynced bytes, tears writes, is full, breaks, or hangs.

The disk is a `Files` for the tests of the store. Names and contents are kept apart, as on a real
disk. Names last in the order they were changed: some first part of the changes since the last
directory sync survives a power cut. Contents last sector by sector in any combination.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from shardmq.shardd.store.files import Pieces, Positions


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)
    stable: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)  # sectors

    def copy(self) -> Inode:
        return Inode(bytearray(self.data), bytearray(self.stable), set(self.dirty))


class Hang:
    """A call that does not return until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()


class PowerCut(BaseException):
    """The machine is gone in the middle of a call. Not an Exception: nothing may answer it."""


@dataclass
class Fault:
    """Calls of that name raise what `error` makes: `times` of them, after `after` that succeed."""

    call: str
    after: int
    error: Callable[[], Exception]
    times: int


# Every call that may fail.
CALLS = (
    "make_directory", "remove_directory", "list", "open", "close", "read", "write", "allocate",
    "truncate", "sync", "sync_directory", "rename", "remove",
)  # fmt: skip


class FaultyFiles:
    def __init__(self, seed: int = 0, sector_bytes: int = 512) -> None:
        self.random = random.Random(seed)
        self.sector_bytes = sector_bytes
        self.names: dict[str, Inode] = {}
        self.stable_names: dict[str, Inode] = {}
        # names after each change since the last directory sync
        self.changes: list[dict[str, Inode]] = []
        self.handles: dict[int, Inode] = {}
        self.next_handle = 3
        self.calls: list[str] = []
        self.fail: dict[str, tuple[int, int]] = {}  # call: (how many more succeed, errno)
        self.faults: list[Fault] = []
        self.cut_after: int | None = None  # changing calls until the power fails
        self.bytes_max: int | None = None  # room on the disk
        self.no_inodes = False  # nothing that has a name of its own can be made
        self.full_error = errno.ENOSPC  # what is said when there is no room
        self.sync_lies = False
        self.hang: dict[str, Hang] = {}  # the next call of that name

    # -- faults ------------------------------------------------------------------------------------

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hang:
            hang = self.hang.pop(name)
            hang.begun.set()
            hang.over.wait()
        if name in self.fail:
            left, error = self.fail[name]
            if left <= 0:
                raise OSError(error, f"{name} fails on purpose")
            self.fail[name] = (left - 1, error)
        for fault in self.faults:
            if fault.call == name and fault.times > 0:
                fault.after -= 1
                if fault.after < 0:
                    fault.times -= 1
                    raise fault.error()

    def _power(self) -> bool:
        """Whether the power fails during this changing call."""
        if self.cut_after is None:
            return False
        self.cut_after -= 1
        return self.cut_after < 0

    def restarted(self, *, power_cut: bool) -> FaultyFiles:
        """Return the files that the next process finds.

        After a mere crash all bytes are there. After a power cut synced bytes are there, and some
        of the rest.
        """
        after = FaultyFiles(self.random.randrange(1 << 30), self.sector_bytes)
        names = self.names
        if power_cut:
            kept = self.random.randint(0, len(self.changes))
            names = self.changes[kept - 1] if kept else self.stable_names
        for name, inode in names.items():
            data = self._survives(inode) if power_cut else bytearray(inode.data)
            after.names[name] = Inode(data, bytearray(data))
        after.stable_names = dict(after.names)
        return after

    def _survives(self, inode: Inode) -> bytearray:
        size = self.random.choice([len(inode.stable), len(inode.data)])
        data = bytearray(inode.stable[:size].ljust(size, b"\0"))
        odds = self.random.choice([0.0, 0.3, 0.7, 1.0])
        for sector in inode.dirty:
            if self.random.random() < odds:
                at = sector * self.sector_bytes
                part = inode.data[at : min(at + self.sector_bytes, size)]
                data[at : at + len(part)] = part
        return data

    # -- Files -------------------------------------------------------------------------------------

    def _renamed(self) -> None:
        self.changes.append(dict(self.names))
        if self._power():
            raise PowerCut

    def make_directory(self, path: str) -> None:
        self._call("make_directory")
        if self.no_inodes and not any(name.startswith(f"{path}/") for name in self.names):
            raise OSError(self.full_error, "no inode on purpose")

    def remove_directory(self, path: str) -> None:
        self._call("remove_directory")

    def list(self, path: str) -> list[str]:
        self._call("list")
        if path in self.names:
            raise NotADirectoryError(errno.ENOTDIR, path)
        return sorted(name[len(path) + 1 :] for name in self.names if name.startswith(path + "/"))

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int:
        self._call("open")
        if path not in self.names:
            if not create:
                raise FileNotFoundError(errno.ENOENT, path)
            if self.no_inodes:
                raise OSError(self.full_error, "no inode on purpose")
            self.names[path] = Inode()
            self._renamed()
        self.next_handle += 1
        self.handles[self.next_handle] = self.names[path]
        return self.next_handle

    def close(self, handle: int) -> None:
        self._call("close")
        del self.handles[handle]

    def size(self, handle: int) -> int:
        return len(self.handles[handle].data)

    def descriptor(self, handle: int) -> int:
        return -1

    def read_into(self, handle: int, target: memoryview, position: int) -> int:
        self._call("read")
        part = self.handles[handle].data[position : position + len(target)]
        target[: len(part)] = part
        return len(part)

    def read_pieces(self, handle: int, size: int, positions: Positions) -> Pieces:
        self._call("read")
        return [
            bytes(self.handles[handle].data[position : position + size]) for position in positions
        ]

    def write(self, handle: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self._call("write")
        cut = self._power()
        if cut:
            data = bytes(data)[: self.random.randint(0, len(data))]
        inode = self.handles[handle]
        self._grow(inode, position + len(data))
        inode.data[position : position + len(data)] = data
        if len(data):
            first, last = (
                position // self.sector_bytes,
                (position + len(data) - 1) // self.sector_bytes,
            )
            inode.dirty.update(range(first, last + 1))
        if cut:
            raise PowerCut

    def fill(self, error: int = errno.ENOSPC, *, inodes: bool = False) -> None:
        """Something else takes all the room there is."""
        self.full_error = error
        if inodes:
            self.no_inodes = True
        else:
            self.bytes_max = 0

    def free(self) -> None:
        self.no_inodes, self.bytes_max = False, None

    def _grow(self, inode: Inode, size: int) -> None:
        more = size - len(inode.data)
        if more <= 0:
            return
        if self.bytes_max is not None:
            taken = sum(len(known.data) for known in self.names.values())
            if taken + more > self.bytes_max:
                raise OSError(self.full_error, "disk full on purpose")
        inode.data.extend(bytes(more))

    def allocate(self, handle: int, size: int) -> None:
        self._call("allocate")
        self._grow(self.handles[handle], size)

    def set_aside(self, handle: int, start: int, size: int) -> None:
        self._call("allocate")

    def room(self, handle: int) -> int:
        return len(self.handles[handle].data)

    def has_room(self, path: str, size: int) -> bool:
        return self.bytes_max is None and not self.no_inodes

    def truncate(self, handle: int, size: int) -> None:
        self._call("truncate")
        inode = self.handles[handle]
        self._grow(inode, size)
        del inode.data[size:]
        # Kept simple: a cut of the size lasts at once.
        del inode.stable[size:]
        inode.dirty = {sector for sector in inode.dirty if sector * self.sector_bytes < size}

    def sync(self, handle: int) -> None:
        """After one that failed, pages that were not written count as clean, as with a kernel."""
        inode = self.handles[handle]
        try:
            self._call("sync")
        except Exception:
            odds = self.random.choice([0.0, 0.5, 1.0])
            inode.dirty = {sector for sector in inode.dirty if self.random.random() < odds}
            raise
        if self._power():
            raise PowerCut
        if not self.sync_lies:
            dirty, inode.dirty = inode.dirty, set()  # at once: another thread may write meanwhile
            size = len(inode.data)
            del inode.stable[size:]
            inode.stable.extend(bytes(size - len(inode.stable)))
            for sector in dirty:
                at = sector * self.sector_bytes
                part = inode.data[at : min(at + self.sector_bytes, size)]
                inode.stable[at : at + len(part)] = part

    def sync_directory(self, path: str) -> None:
        self._call("sync_directory")
        if self._power():
            raise PowerCut
        if not self.sync_lies:
            self.stable_names = dict(self.names)
            self.changes.clear()

    def rename(self, old: str, new: str) -> None:
        self._call("rename")
        if old not in self.names:
            raise FileNotFoundError(errno.ENOENT, old)
        self.names[new] = self.names.pop(old)
        self._renamed()

    def exchange(self, one: str, other: str) -> bool:
        self._call("rename")
        if one not in self.names or other not in self.names:
            return False
        self.names[one], self.names[other] = self.names[other], self.names[one]
        self._renamed()
        return True

    def remove(self, path: str) -> None:
        self._call("remove")
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, path)
        del self.names[path]
        self._renamed()

    def is_linked(self, handle: int) -> bool:
        inode = self.handles[handle]
        return sum(named is inode for named in self.names.values()) > 1

    def salt(self) -> int:
        return self.random.randrange(1, 1 << 32)
