"""Make a snapshot of the files of a shard, beside the shard that goes on with them.

1. `Snapshot.prepare`, in a thread, links what the directories of the stores have. This takes long
   if there are many files, and the shard changes them meanwhile.
2. `Snapshot.capture` runs in the loop of the shard while no job is under way, so all files are
   those of one moment, as after a power cut then. It links what is new, drops links that are not to
   the present file of their name, copies the few files that are changed in place, and notes the
   sizes of files that only grow.
3. `Snapshot.finish`, in a thread, puts copies up to these sizes in the place of links to files that
   grow, and returns when everything is on stable storage.

Links are left to sealed segments of stores and of streams only, which are never written to again.
No file with two names becomes a spare (store/segments/reclaim.py). A node that follows puts a copy
in the place of such a file before it does what the leader has done (cluster/operations.py).
Where a link into the target cannot be made (another file system, or another mount of the same one),
links and copies lie in a directory beside the stores, and `finish` copies all of them. So `capture`
waits for no file system but that of the shard.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from shardmq.shardd.store.files import OsFiles, sync_file
from shardmq.shardd.store.format.manifest import NAME as MANIFEST

LINKS: Final = "snapshot.links"  # in the directory of a shard, while a snapshot is made
# Files that a start does not need: spares, and files that wait to be removed or to get a name.
LEFT_OUT: Final = ("spare.", "gone.")
HALF: Final = ".new"
SEALED: Final = ("msgs.", "log.")  # segments, but for those that are said to grow
GROWING: Final = ("acks.", "index.")  # appended to, or written once
COPY_BYTES: Final = 64 << 20  # at once, between two calls of `progress`
NO_LINK: Final = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
NO_COPY_CALL: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class Part(NamedTuple):
    """The directory of a store or of a stream, below that of the shard.

    changing: the segments that are written to again, by name. One that only grows has its size,
        one that is changed in place has None.
    """

    directory: str
    changing: Mapping[str, int | None]


class Snapshot:
    """One snapshot of the shard in the directory `source`, in the directory `target`.

    It fails if the target is removed meanwhile, and does not make it again.
    """

    def __init__(self, source: str, target: str) -> None:
        self._source = source
        self._target = target
        self._progress: Callable[[], None] = _nothing
        self._links = target
        self._is_made = False  # the target
        self._linked: dict[str, int] = {}  # paths below the directories, with the inodes
        self._directories: set[str] = set()  # below the directories
        self._copied: set[str] = set()  # paths of the copies among the links
        self._sizes: dict[str, int] = {}  # of links that are to be replaced by copies

    def prepare(self, directories: Iterable[str]) -> None:
        """Link what there is now; the target must not be there. Raises OSError."""
        os.mkdir(self._target)
        self._is_made = True
        clear_links(self._source)
        if os.path.isdir(self._source):
            links = f"{self._source}/{LINKS}"
            os.mkdir(links)
            if _can_link(links, self._target):
                os.rmdir(links)
            else:
                self._links = links
        for directory in directories:
            try:
                listed = self._listed(directory)
            except FileNotFoundError:  # nothing was written yet, or it is gone since
                continue
            self._make_directory(directory)
            for name, _ in listed:
                if name.startswith((*SEALED, *GROWING)):
                    with contextlib.suppress(FileNotFoundError):  # it is gone since
                        self._link(f"{directory}/{name}")

    def capture(self, parts: Collection[Part], progress: Callable[[], None] = lambda: None) -> None:
        """Make the links those of this moment, and copy what cannot be linked. Raises OSError.

        progress: called now and then, so that whoever watches the loop sees that it is not stuck.
        """
        present: set[str] = set()
        self._progress = progress
        try:
            for part in parts:
                if os.path.isdir(f"{self._source}/{part.directory}"):
                    self._capture(part, present)
            for path in self._linked.keys() - present:
                self._unlink(path)
        finally:
            self._progress = _nothing  # a thread goes on, which says nothing about the loop

    def _capture(self, part: Part, present: set[str]) -> None:
        self._make_directory(part.directory)
        for name, inode in self._listed(part.directory):
            path = f"{part.directory}/{name}"
            size = part.changing.get(name)
            grows = size is not None or (name.startswith(GROWING) and name != MANIFEST)
            if not grows and (name in part.changing or not name.startswith(SEALED)):
                if path in self._linked:
                    self._unlink(path)
                _copy(f"{self._source}/{path}", f"{self._links}/{path}", None, self._progress)
                self._copied.add(path)
                continue
            present.add(path)
            if self._linked.get(path) != inode:
                if path in self._linked:
                    self._unlink(path)
                self._link(path)
            if grows:
                path_size = os.stat(f"{self._source}/{path}").st_size
                self._sizes[path] = path_size if size is None else size

    def _listed(self, directory: str) -> list[tuple[str, int]]:
        """Return the names and inodes of the files of a directory that are part of a snapshot."""
        self._progress()
        with os.scandir(f"{self._source}/{directory}") as entries:
            return [
                (entry.name, entry.inode())
                for entry in entries
                if entry.is_file(follow_symlinks=False)
                and not entry.name.startswith(LEFT_OUT)
                and not entry.name.endswith(HALF)
            ]

    def _make_directory(self, directory: str) -> None:
        self._directories.add(directory)
        _make_below(self._links, directory)

    def _link(self, path: str) -> None:
        self._progress()
        link = f"{self._links}/{path}"
        os.link(f"{self._source}/{path}", link)
        self._linked[path] = os.stat(link).st_ino

    def _unlink(self, path: str) -> None:
        del self._linked[path]
        os.unlink(f"{self._links}/{path}")

    def finish(self) -> None:
        """Copy what is left, and sync everything, in any thread. Raises OSError."""
        sizes: dict[str, int | None] = {**self._sizes}
        if self._links != self._target:
            for directory in self._directories:
                _make_below(self._target, directory)
            sizes = dict.fromkeys((*self._linked, *self._copied)) | sizes
        for path, size in sizes.items():
            place = f"{self._target}/{path}"
            _copy(f"{self._links}/{path}", f"{place}{HALF}", size, _nothing)
            os.replace(f"{place}{HALF}", place)
        clear_links(self._source)
        disk = OsFiles()
        for folder, _, names in os.walk(self._target, onerror=_fail):
            for name in names:
                sync_file(disk, f"{folder}/{name}")
            disk.sync_directory(folder)

    def give_up(self) -> None:
        """Remove what there is of a snapshot that failed, as far as possible."""
        clear_links(self._source)
        if self._is_made:
            shutil.rmtree(self._target, ignore_errors=True)


def clear_links(source: str) -> None:
    """Remove the links that a snapshot of a former process has left beside the stores."""
    shutil.rmtree(f"{source}/{LINKS}", ignore_errors=True)


def _can_link(one: str, other: str) -> bool:
    """Return whether a file of one directory can have a second name in the other, by trial.

    The devices do not tell: no link leads from one mount of a file system to another.
    """
    first, second = f"{one}/trial", f"{other}/trial"
    os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        os.link(first, second)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return False
    finally:
        os.unlink(first)
    os.unlink(second)
    return True


def _make_below(root: str, directory: str) -> None:
    """Make a directory with its parents, but not the root: who has removed that wants no snapshot.

    Raises FileNotFoundError if the root is gone.
    """
    path = root
    for name in directory.split("/"):
        path = f"{path}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)


def _nothing() -> None:
    pass


def _fail(error: OSError) -> None:
    raise error


def _copy(source: str, target: str, size: int | None, progress: Callable[[], None]) -> None:
    """Copy a file, or its first `size` bytes, with its mode. A file that is gone is left out."""
    with contextlib.ExitStack() as opened:
        try:
            reading = opened.enter_context(open(source, "rb", buffering=0))
        except FileNotFoundError:
            return
        status = os.fstat(reading.fileno())
        left = status.st_size if size is None else size
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(target, flags, status.st_mode & 0o777)
        opened.callback(os.close, handle)
        while left > 0:
            done = _copy_some(reading.fileno(), handle, min(left, COPY_BYTES))
            if done == 0:
                raise OSError(errno.EIO, f"{source} has become shorter")
            left -= done
            progress()


def _copy_some(reading: int, writing: int, size: int) -> int:
    """Copy bytes at the offsets of both files; where the file system can, blocks are shared."""
    try:
        return os.copy_file_range(reading, writing, size)
    except OSError as error:
        if error.errno not in NO_COPY_CALL:
            raise
    return os.sendfile(writing, reading, None, size)  # None: its own offset
