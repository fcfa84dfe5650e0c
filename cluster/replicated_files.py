"""Files whose changes are numbered, so that other nodes can do them again.

Each call is done on the disk below, and what it changed is appended to the operation log, under one
lock: the log is an order in which the calls could have been made one by one. A sync is numbered
before it begins, so it covers what was done before, and returns when `Confirmations` has its
number.

Names decide, not handles: what is written to a file that has lost its name changes no copy.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from shardmq.cluster.operations import (
    OPERATION_BYTES,
    PIECE_BYTES,
    SYNCS,
    Belongs,
    Kind,
    Operation,
    OperationLog,
    walk,
)
from shardmq.cluster.rules import Position
from shardmq.shardd.store.files import Files

WAITS_EACH_S: Final = 1.0
BELL: Final = os.EFD_NONBLOCK | os.EFD_CLOEXEC


class Deposed(Exception):
    """The process leads no more: nothing is confirmed, and it has to end."""


class Heard(Protocol):
    """The end of a stream of a follower, as threads hear it that wait for its answer."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `hear` has something to do; or -1."""

    def hear(self) -> None:
        """Take in what has come, without waiting."""


class Confirmations:
    """Up to which number syncs are confirmed. Any thread may wait, and tell.

    waits: called each second by a thread that waits.

    heard: what brings answers. A thread that waits hears them itself, because to be woken by
        another thread takes longer.
    """

    def __init__(self, waits: Callable[[], None] = lambda: None) -> None:
        """Begin with nothing confirmed."""
        self.heard: tuple[Heard, ...] = ()
        self._waits = waits
        self._confirmed = 0
        self._deposed = ""
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[int, int]] = {}  # by bell, until which number, and who
        self._bells: list[int] = []  # that nobody uses now; there are as many as threads waited

    def confirm(self, number: int) -> None:
        with self._lock:
            self._confirmed = max(self._confirmed, number)
            self._ring(self._confirmed)

    def depose(self, why: str) -> None:
        with self._lock:
            self._deposed = why or "deposed"
            self._ring(sys.maxsize)
            while self._bells:  # nobody will wait any more
                os.close(self._bells.pop())

    def _ring(self, number: int) -> None:
        own = threading.get_ident()
        for bell, (until, thread) in self._waiting.items():
            if until <= number and thread != own:
                os.eventfd_write(bell, 1)

    def wait(self, number: int, seconds: float = math.inf) -> bool:
        """Return whether this number is confirmed within these seconds. Raises Deposed."""
        with self._lock:
            if self._confirmed >= number:
                return True
            if self._deposed:
                raise Deposed(self._deposed)
            bell = self._bells.pop() if self._bells else os.eventfd(0, BELL)
            self._waiting[bell] = number, threading.get_ident()
        try:
            self._hear_until(number, bell, time.monotonic(), seconds)
        finally:
            with self._lock:
                del self._waiting[bell]
                self._bells.append(bell) if not self._deposed else os.close(bell)
        if self._confirmed < number and self._deposed:
            raise Deposed(self._deposed)
        return self._confirmed >= number

    def _hear_until(self, number: int, bell: int, began: float, seconds: float) -> None:
        """Hear answers until this number is confirmed, or nothing is any more, or time is up."""
        now, until, waits_at = began, began + seconds, began + WAITS_EACH_S
        while self._confirmed < number and not self._deposed and now < until:
            poll = select.poll()
            poll.register(bell, select.POLLIN)
            heard = {fd: each for each in self.heard if (fd := each.fileno()) >= 0}
            for fd in heard:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(min(WAITS_EACH_S, until - now) * 1000):
                if fd in heard:
                    heard[fd].hear()
                else:  # a ring for the wait before may come late
                    os.eventfd_read(bell)
            now = time.monotonic()
            if now >= waits_at:
                waits_at = now + WAITS_EACH_S
                self._waits()


class SyncNews(NamedTuple):
    """The news for the leader's rules from the threads that write; any of them calls.

    appended: there is a new operation in the log, with its bytes; the number is 0 if it is no sync.
    begun: a sync was appended, and its thread may send it; the lock of the files is free.
    done: the own sync of this number is done; or it has failed, so nothing waits for it.
    """

    appended: Callable[[int, int], None]
    begun: Callable[[], None]
    done: Callable[[int], None]


class SnapshotFiles(NamedTuple):
    """The names at one position, each file open for reading. The caller closes the handles."""

    at: Position
    folders: list[str]
    files: list[tuple[str, int]]


class _Named:
    """A file as handles have it open: its path, or None when it has lost its name."""

    def __init__(self, path: str) -> None:
        self.path: str | None = path
        self.handles = 0


class ReplicatedFiles:
    """`Files` below one directory, whose changes go into an operation log.

    files: the disk.
    root: the directory; what lies elsewhere, or does not belong to the copy, is done on the disk
        only.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        log: OperationLog,
        confirmations: Confirmations,
        news: SyncNews,
        belongs: Belongs = lambda path: True,
    ) -> None:
        self._files = files
        self._root = root.rstrip("/")
        self._log = log
        self._confirmations = confirmations
        self._news = news
        self._belongs = belongs
        self._lock = threading.Lock()
        self._own: dict[int, int] = {}  # threads whose syncs wait for nobody, with the last number
        self._open: dict[int, _Named] = {}
        self._named: dict[str, _Named] = {}
        self.list = files.list
        self.size = files.size
        self.descriptor = files.descriptor
        self.read_into = files.read_into
        self.read_pieces = files.read_pieces
        self.set_aside = files.set_aside  # each copy sets room aside when it leads
        self.room = files.room
        self.has_room = files.has_room
        self.is_linked = files.is_linked
        self.salt = files.salt

    # -- names -------------------------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        with self._lock:
            self._files.make_directory(path)
            if (relative := self._relative(path)) is not None:
                self._append(Operation(Kind.MAKE_DIRECTORY, relative))

    def remove_directory(self, path: str) -> None:
        with self._lock:
            self._files.remove_directory(path)
            if (relative := self._relative(path)) is not None:
                self._append(Operation(Kind.REMOVE_DIRECTORY, relative))

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int:
        with self._lock:
            handle = self._files.open(path, create=create, read_only=read_only)
            relative = self._relative(path)
            if relative is None:
                return handle
            named = self._named.setdefault(relative, _Named(relative))
            named.handles += 1
            self._open[handle] = named
            if create:
                self._append(Operation(Kind.CREATE, relative))
            return handle

    def close(self, handle: int) -> None:
        with self._lock:
            named = self._open.pop(handle, None)
            if named is not None:
                named.handles -= 1
                if not named.handles and named.path is not None:
                    del self._named[named.path]
            self._files.close(handle)

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._files.rename(old, new)
            before, after = self._relative(old), self._relative(new)
            if before is None and after is None:
                return
            assert before is not None and after is not None, "a rename into or out of the copy"
            self._take_names(after)
            self._move_names(before, after)
            self._append(Operation(Kind.RENAME, before, other=after))

    def exchange(self, one: str, other: str) -> bool:
        with self._lock:
            if not self._files.exchange(one, other):
                return False
            first, second = self._relative(one), self._relative(other)
            if first is not None or second is not None:
                assert first is not None and second is not None, "a name of the copy, and another"
                a, b = self._named.pop(first, None), self._named.pop(second, None)
                for named, path in ((a, second), (b, first)):
                    if named is not None:
                        named.path, self._named[path] = path, named
                self._append(Operation(Kind.EXCHANGE, first, other=second))
            return True

    def remove(self, path: str) -> None:
        with self._lock:
            self._files.remove(path)
            if (relative := self._relative(path)) is not None:
                self._take_names(relative)
                self._append(Operation(Kind.REMOVE, relative))

    # -- contents ----------------------------------------------------------------------------------

    def write(self, handle: int, data: bytes | bytearray | memoryview, position: int) -> None:
        with self._lock:
            self._files.write(handle, data, position)
            if (path := self._path_of(handle)) is not None:
                for start in range(0, len(data), PIECE_BYTES):
                    piece = bytes(data[start : start + PIECE_BYTES])
                    self._append(Operation(Kind.WRITE, path, position + start, piece))

    def allocate(self, handle: int, size: int) -> None:
        with self._lock:
            self._files.allocate(handle, size)
            if (path := self._path_of(handle)) is not None:
                self._append(Operation(Kind.ALLOCATE, path, size))

    def truncate(self, handle: int, size: int) -> None:
        with self._lock:
            self._files.truncate(handle, size)
            if (path := self._path_of(handle)) is not None:
                self._append(Operation(Kind.TRUNCATE, path, size))

    # -- syncs -------------------------------------------------------------------------------------

    def sync(self, handle: int) -> None:
        """Return when the file is on stable storage of each member. Raises OSError or Deposed."""
        with self._lock:
            path = self._path_of(handle)
            number = 0 if path is None else self._append(Operation(Kind.SYNC, path))
        self._sync(number, lambda: self._files.sync(handle))

    def sync_directory(self, path: str) -> None:
        """Return when the names are on stable storage of each member; as `sync`."""
        relative = "" if path.rstrip("/") == self._root else self._relative(path)
        with self._lock:
            number = 0
            if relative is not None:
                number = self._append(Operation(Kind.SYNC_DIRECTORY, relative))
        self._sync(number, lambda: self._files.sync_directory(path))

    def _sync(self, number: int, sync: Callable[[], None]) -> None:
        if not number:
            sync()
            return
        try:
            self._news.begun()
            sync()
        finally:
            self._news.done(number)
        if (thread := threading.get_ident()) in self._own:
            self._own[thread] = number
        else:
            self._confirmations.wait(number)

    def sync_own(self, act: Callable[[], None]) -> int:
        """Call `act`, whose syncs wait for no other node; return the number to wait for, or 0.

        Each copy does the operations in their order, syncs included. So what follows a sync is on
        no disk that has not done the sync, and only what `act` confirms has to wait.
        """
        thread = threading.get_ident()
        self._own[thread] = 0
        try:
            act()
        finally:
            number = self._own.pop(thread)
        return number

    def is_confirmed(self, number: int, seconds: float = math.inf) -> bool:
        """Return whether a sync is on stable storage of each member within so many seconds.

        Raises Deposed.
        """
        return self._confirmations.wait(number, seconds)

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self) -> SnapshotFiles:
        """Return what there is at one position of the log. Nothing is changed meanwhile.

        Raises OSError, for instance if this process may not open so many files.
        """
        with self._lock:
            folders: list[str] = []
            found: list[tuple[str, int]] = []
            for path, is_directory in walk(self._files, self._root, self._belongs):
                if is_directory:
                    folders.append(path)
                    continue
                try:
                    handle = self._files.open(f"{self._root}/{path}", read_only=True)
                except OSError:
                    for _, opened in found:
                        self._files.close(opened)
                    raise
                found.append((path, handle))
            return SnapshotFiles(self._log.last, folders, found)

    def sync_all_begun(self) -> int:
        """Append the first operation of a term: all copies sync whatever they have."""
        with self._lock:
            return self._append(Operation(Kind.SYNC_ALL))

    def position(self) -> Position:
        """Return the position up to which everything is on the disk and in the log."""
        with self._lock:
            return self._log.last

    def read_snapshot(self, handle: int, size: int, position: int) -> bytes:
        """Return bytes of a file of a snapshot as they are now; fewer where it ends."""
        (data,) = self._files.read_pieces(handle, size, [position])
        return data

    def close_snapshot(self, snapshot: SnapshotFiles) -> None:
        for _, handle in snapshot.files:
            self._files.close(handle)

    # -- bookkeeping -------------------------------------------------------------------------------

    def _append(self, operation: Operation) -> int:
        number = self._log.append(operation)
        size = OPERATION_BYTES + len(operation.data)
        self._news.appended(number if operation.kind in SYNCS else 0, size)
        return number

    def _relative(self, path: str) -> str | None:
        """Return a path as copies have it; None if it is not part of the copy."""
        if not path.startswith(f"{self._root}/"):
            return None
        relative = path[len(self._root) + 1 :]
        return relative if self._belongs(relative) else None

    def _path_of(self, handle: int) -> str | None:
        named = self._open.get(handle)
        return None if named is None else named.path

    def _take_names(self, path: str) -> None:
        if (named := self._named.pop(path, None)) is not None:
            named.path = None

    def _move_names(self, old: str, new: str) -> None:
        """Follow a rename, of a directory with all that is open below it too."""
        for path in [known for known in self._named if f"{known}/".startswith(f"{old}/")]:
            named = self._named.pop(path)
            named.path = new + path[len(old) :]
            self._named[named.path] = named
