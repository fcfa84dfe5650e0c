"""Operations: what changes files, as a leader notes it and its followers do it again.

An `OperationLog` has the last operations in memory, each with its term and number. A
`CopiedDirectory` applies operations to a directory, and only inside it.

Paths are relative to the directory, with "/" between names. "" is the directory itself.
"""

from __future__ import annotations

import enum
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from shardmq.cluster.rules import Position
from shardmq.shardd.store.files import Files, remove_files

# How much of the last operations is kept. A follower that is further behind is compared anew.
LOG_BYTES_MAX: Final = 64 << 20
OPERATION_BYTES: Final = 64  # what one takes in memory besides its data, about
PIECE_BYTES: Final = 1 << 20  # of files that are compared, and of long writes
DIGEST_BYTES: Final = 16  # of BLAKE2b: equal pieces are taken for the same without more ado
HANDLES_MAX: Final = 64
PATH_CHARS_MAX: Final = 1024
ASIDE: Final = "aside"  # where files of another store are put, beside those of the copy
# A file that is to take the place of one that a snapshot has, until it has its name.
REPLACEMENT: Final = "replacement.new"


class NoPath(Exception):
    """A path leads out of the directory, or an operation is none."""


class Kind(enum.IntEnum):
    CREATE = 1
    WRITE = 2
    ALLOCATE = 3
    TRUNCATE = 4
    RENAME = 5
    EXCHANGE = 6
    REMOVE = 7
    MAKE_DIRECTORY = 8
    REMOVE_DIRECTORY = 9
    SYNC = 10
    SYNC_DIRECTORY = 11
    SYNC_ALL = 12  # each file and directory there is


SYNCS: Final = frozenset((Kind.SYNC, Kind.SYNC_DIRECTORY, Kind.SYNC_ALL))


class Operation(msgspec.Struct, array_like=True, frozen=True):
    """One change. `at` is a position of bytes or a size, `other` the second path of a rename."""

    kind: Kind
    path: str = ""
    at: int = 0
    data: bytes = b""
    other: str = ""


class FileSums(msgspec.Struct, array_like=True, frozen=True):
    """A file as a comparison lists it: its size, and a digest of each piece."""

    path: str
    size: int
    digests: list[bytes]


class Numbered(NamedTuple):
    at: Position
    operation: Operation


DROPPED: Final = Operation(Kind.SYNC_ALL)  # in place of an operation that is not kept

Belongs = Callable[[str], bool]


class OperationLog:
    """The last operations, numbered without a gap within a term. Any thread may use it.

    oldest: all operations after this position are there.
    last: the position of the last operation.
    """

    def __init__(self, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.oldest = self.last = Position(0, 0)
        self._bytes_max = bytes_max
        self._bytes = 0
        self._operations: list[Numbered] = []
        self._first = 0  # those before are dropped, and have no operation any more
        self._lock = threading.Lock()

    def begin(self, at: Position) -> None:
        """Drop everything: the next operation comes after this position."""
        with self._lock:
            self._operations, self._first, self._bytes = [], 0, 0
            self.oldest = self.last = at

    def begin_term(self, term: int, knows_base: bool) -> None:
        """Begin again at 1. The operations before stay if it is known what came before."""
        if not knows_base:
            self.begin(Position(term, 0))
        self.last = Position(term, 0)

    def append(self, operation: Operation) -> int:
        """Append the next operation of the term, and return its number."""
        term, number = self.last
        self.take(Numbered(Position(term, number + 1), operation))
        return number + 1

    def take(self, numbered: Numbered) -> None:
        """Append an operation that has its number."""
        with self._lock:
            self._operations.append(numbered)
            self.last = numbered.at
            self._bytes += OPERATION_BYTES + len(numbered.operation.data)
            while self._bytes > self._bytes_max and self._first < len(self._operations):
                dropped = self._operations[self._first]
                self.oldest = dropped.at
                self._bytes -= OPERATION_BYTES + len(dropped.operation.data)
                self._operations[self._first] = Numbered(dropped.at, DROPPED)
                self._first += 1
            if self._first > 1000 and self._first * 2 > len(self._operations):
                del self._operations[: self._first]
                self._first = 0

    def after(self, position: Position, bytes_max: int) -> list[Numbered] | None:
        """Return the next operations, of one term and about `bytes_max`; None: they are gone."""
        with self._lock:
            if position < self.oldest:
                return None
            found: list[Numbered] = []
            size = 0
            for index in range(self._place_after(position), len(self._operations)):
                numbered = self._operations[index]
                if found and (size >= bytes_max or numbered.at.term != found[0].at.term):
                    break
                found.append(numbered)
                size += OPERATION_BYTES + len(numbered.operation.data)
            return found

    def bytes_after(self, position: Position) -> int:
        """Return the size of the operations after a position, as far as they are there."""
        with self._lock:
            start = self._place_after(position)
            return sum(len(each.operation.data) for each in self._operations[start:])

    def _place_after(self, position: Position) -> int:
        """Return the index of the first operation after a position."""
        operations, last = self._operations, self.last
        if position.term == last.term:  # as nearly always; there is no gap within a term
            back = last.number - position.number
            return max(len(operations) - back, self._first)
        return bisect_right(operations, position, self._first, key=lambda numbered: numbered.at)


def walk(files: Files, root: str, belongs: Belongs) -> Iterator[tuple[str, bool]]:
    """Yield each path below a directory that belongs to the copy, and whether it is a directory.

    A directory comes before what it holds.
    """
    left = [""]
    while left:
        folder = left.pop()
        for name in files.list(f"{root}/{folder}" if folder else root):
            path = f"{folder}/{name}" if folder else name
            if not belongs(path):
                continue
            try:
                files.list(f"{root}/{path}")
            except NotADirectoryError:
                yield path, False
            else:
                yield path, True
                left.append(path)


def digests_of(files: Files, handle: int, size: int) -> list[bytes]:
    """Return the digest of each piece of a file up to `size`; a piece that is cut short has b""."""
    found = []
    buffer = bytearray(PIECE_BYTES)
    with memoryview(buffer) as view:
        for start in range(0, size, PIECE_BYTES):
            wanted = min(PIECE_BYTES, size - start)
            got = files.read_into(handle, view[:wanted], start)
            digest = (
                blake2b(view[:got], digest_size=DIGEST_BYTES).digest() if got == wanted else b""
            )
            found.append(digest)
    return found


def copy_bytes(files: Files, source: int, target: int) -> None:
    """Write all bytes of an open file to another, which is empty, piece by piece."""
    size = files.size(source)
    with memoryview(bytearray(min(PIECE_BYTES, size))) as view:
        for start in range(0, size, PIECE_BYTES):
            got = files.read_into(source, view[: min(PIECE_BYTES, size - start)], start)
            files.write(target, view[:got], start)


def checked(path: str) -> str:
    """Return the path if it can only lead to something inside the directory. Raises NoPath."""
    names = path.split("/")
    if len(path) > PATH_CHARS_MAX or "\0" in path or any(name in ("", ".", "..") for name in names):
        raise NoPath(f"{path!r} is no path inside the directory")
    return path


class CopiedDirectory:
    """A directory to which operations of a leader are applied, by one thread at a time.

    A file that has another name, too, is never changed: a snapshot has it, from when this node led.
    A copy of the file takes its place before the first change. Snapshots make links only while this
    node leads, and then this object is closed. So a file is looked at once while it is open.

    root: its path; the directory is made if it is not there.
    belongs: which paths are part of the copy; others are refused, and stay as they are.
    """

    def __init__(self, files: Files, root: str, belongs: Belongs = lambda path: True) -> None:
        self.root = root
        self._files = files
        self._belongs: Belongs = lambda path: (
            path.split("/")[0] not in (ASIDE, REPLACEMENT) and belongs(path)
        )
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._unlinked: set[str] = set()  # open files that are known to have no other name
        files.make_directory(root)
        remove_files(files, [f"{root}/{REPLACEMENT}"])

    # -- operations --------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Do an operation. Raises NoPath or OSError; then the state is not known any more."""
        files, path = self._files, operation.path
        match operation.kind:
            case Kind.SYNC_ALL:
                self.sync_all()
            case Kind.SYNC_DIRECTORY:
                files.sync_directory(self._place(path) if path else self.root)
            case Kind.CREATE:
                self._handle(path, create=True)
            case Kind.WRITE:
                files.write(self._unlinked_handle(path), operation.data, operation.at)
            case Kind.ALLOCATE:
                files.allocate(self._unlinked_handle(path), operation.at)
            case Kind.TRUNCATE:
                files.truncate(self._unlinked_handle(path), operation.at)
            case Kind.SYNC:
                files.sync(self._handle(path))
            case Kind.RENAME:
                old, new = self._place(path), self._place(operation.other)
                self._close(operation.other)
                self._close(path)
                files.rename(old, new)
            case Kind.EXCHANGE:
                one, other = self._place(path), self._place(operation.other)
                self._close(operation.other)
                self._close(path)
                if not files.exchange(one, other):
                    raise OSError(f"{one} and {other} cannot exchange their names")
            case Kind.REMOVE:
                place = self._place(path)
                self._close(path)
                files.remove(place)
            case Kind.MAKE_DIRECTORY:
                files.make_directory(self._place(path))
            case Kind.REMOVE_DIRECTORY:
                files.remove_directory(self._place(path))

    def sync_all(self) -> None:
        """Sync each file and each directory of the copy."""
        folders = [self.root]
        for path, is_directory in walk(self._files, self.root, self._belongs):
            if is_directory:
                folders.append(self._place(path))
            else:
                self._files.sync(self._handle(path))
        for folder in folders:
            self._files.sync_directory(folder)

    def close(self) -> None:
        for path in list(self._handles):
            self._close(path)

    # -- comparison --------------------------------------------------------------------------------

    def put_aside(self, name: str) -> None:
        """Move all files of the copy, which are of another store, into a folder of that name."""
        self.close()
        paths = [path for path, is_directory in self._tree() if not is_directory]
        if not paths:
            return
        folder = f"{self.root}/{ASIDE}/{name}"
        self._files.make_directory(folder)
        for path in paths:
            if "/" in path:
                self._files.make_directory(f"{folder}/{path.rpartition('/')[0]}")
            self._files.rename(f"{self.root}/{path}", f"{folder}/{path}")
        self._files.sync_directory(folder)
        self._files.sync_directory(self.root)

    def compare(self, folders: list[str], listed: list[FileSums]) -> list[tuple[str, list[int]]]:
        """Remove what is not listed, and return by path which pieces must come from the leader."""
        self.close()
        wanted_files = {checked(file.path) for file in listed}
        wanted_folders = {checked(path) for path in folders}
        tree = self._tree()
        for path, is_directory in reversed(tree):
            if not is_directory and path not in wanted_files:
                remove_files(self._files, [self._place(path)])
            elif is_directory and path not in wanted_folders:
                self._files.remove_directory(self._place(path))
        for path in sorted(wanted_folders):
            self._files.make_directory(self._place(path))
        return [(file.path, pieces) for file in listed if (pieces := self._differing(file))]

    def write_piece(self, path: str, position: int, data: bytes) -> None:
        self._files.write(self._unlinked_handle(path), data, position)

    def _differing(self, file: FileSums) -> list[int]:
        handle = self._handle(file.path, create=True)
        size = self._files.size(handle)
        if size != file.size:
            handle = self._unlinked_handle(file.path)
            self._files.truncate(handle, file.size)
        mine = digests_of(self._files, handle, min(size, file.size))
        return [
            number
            for number, digest in enumerate(file.digests)
            if not digest or number >= len(mine) or mine[number] != digest
        ]

    def _tree(self) -> list[tuple[str, bool]]:
        return list(walk(self._files, self.root, self._belongs))

    # -- paths and handles -------------------------------------------------------------------------

    def _place(self, path: str) -> str:
        """Return the path on the disk. Raises NoPath if it could lie outside."""
        if not self._belongs(checked(path)):
            raise NoPath(f"{path!r} is not part of the copy")
        place = self.root
        for name in path.split("/"):
            place = f"{place}/{name}"
            if os.path.islink(place):
                raise NoPath(f"{place} is a link")
        return place

    def _handle(self, path: str, *, create: bool = False) -> int:
        if path in self._handles:
            self._handles.move_to_end(path)
            return self._handles[path]
        handle = self._files.open(self._place(path), create=create)
        self._handles[path] = handle
        if len(self._handles) > HANDLES_MAX:
            self._close(next(iter(self._handles)))
        return handle

    def _unlinked_handle(self, path: str) -> int:
        """Return the open file of a path for a change: no snapshot has the file."""
        handle = self._handle(path)
        if path not in self._unlinked:
            if self._files.is_linked(handle):
                handle = self._replaced(path, handle)
            self._unlinked.add(path)
        return handle

    def _replaced(self, path: str, handle: int) -> int:
        """Put a copy in the place of an open file, and return the copy, open.

        What was synced of the file is there after a power cut at any moment. The directory is
        synced because the leader, which has changed no name, syncs only the file later.
        """
        files, place, new = self._files, self._place(path), f"{self.root}/{REPLACEMENT}"
        remove_files(files, [new])
        copy = files.open(new, create=True)
        try:
            copy_bytes(files, handle, copy)
            files.sync(copy)
            files.rename(new, place)
        except OSError:
            files.close(copy)
            remove_files(files, [new])
            raise
        self._close(path)
        self._handles[path] = copy
        files.sync_directory(os.path.dirname(place))
        return copy

    def _close(self, path: str) -> None:
        """Close the file of a path, and what lies below it."""
        for known in [path, *(each for each in self._handles if each.startswith(f"{path}/"))]:
            self._unlinked.discard(known)
            if (handle := self._handles.pop(known, None)) is not None:
                self._files.close(handle)
