"""A disk that does not answer is noticed: each call of the stores is timed by a thread that makes none itself.

A call of the kernel cannot be taken back, so nothing is interrupted here: it is only said that one takes too long, and
when that is over. The loop of the shard may be the one that hangs, so whoever hears it must not wait for the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from shardd.store.files import Files

log = logging.getLogger("shardd.disk")

# How late a stall, or its end, may be noticed; less where `stall_s` is less than four of these.
LOOK_EACH_S = 0.5


class Calls:
    """What is under way: one call per thread at the most, so there are as many as threads that write."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[int, tuple[float, str]] = {}

    def call(self, name: str) -> Call:
        return Call(self, name)

    def begin(self, name: str) -> None:
        self._under_way[threading.get_ident()] = (self._clock(), name)

    def end(self) -> None:
        self._under_way.pop(threading.get_ident(), None)

    def longest(self) -> tuple[float, str]:
        """Seconds since the oldest call began, and its name; (0, "") when there is none."""
        found = min(list(self._under_way.values()), default=None)
        return (0.0, "") if found is None else (self._clock() - found[0], found[1])


class Call:
    """`with calls.call("sync"):`"""

    __slots__ = ("_calls", "_name")

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self._name = name

    def __enter__(self) -> None:
        self._calls.begin(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._calls.end()


class StallWatch:
    """Says once when a call takes longer than `stall_s`, and once when that is over, both in a thread of its own."""

    def __init__(self, calls: Calls, stall_s: float, stalled: Callable[[str], None], over: Callable[[], None]) -> None:
        self._calls = calls
        self._stall_s = stall_s
        self._stalled = stalled
        self._over = over
        self._longest = (0.0, "")
        self.now = False
        self._unseen = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="disk watch", daemon=True).start()

    def seen(self) -> bool:
        """Whether there is a stall, or was one since this was last asked: none passes unseen by the one who asks."""
        unseen, self._unseen = self._unseen, False
        return self.now or unseen

    def look(self) -> None:
        seconds, name = self._calls.longest()
        if seconds > self._stall_s:
            self._longest = (seconds, name)
            if not self.now:
                self.now = self._unseen = True
                log.error("the disk does not answer: %s takes %.1f s already; publishers are held back", name, seconds)
                self._stalled(f"disk does not answer: {name} takes more than {self._stall_s:g} s")
        elif self.now:
            self.now = False
            log.warning("the disk answers again: %s took some %.1f s", self._longest[1], self._longest[0])
            self._over()

    def _run(self) -> None:
        each_s = min(LOOK_EACH_S, self._stall_s / 4)
        while True:
            time.sleep(each_s)
            self.look()


class WatchedFiles:
    """`Files` whose calls are known to `Calls` while they last: a microsecond each, of which a batch makes a few."""

    def __init__(self, files: Files, calls: Calls) -> None:
        self._files = files
        self._call = calls.call

    def make_directory(self, path: str) -> None:
        with self._call("mkdir"):
            self._files.make_directory(path)

    def remove_directory(self, path: str) -> None:
        with self._call("rmdir"):
            self._files.remove_directory(path)

    def list(self, path: str) -> list[str]:
        with self._call("list"):
            return self._files.list(path)

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int:
        with self._call("open"):
            return self._files.open(path, create=create, read_only=read_only)

    def close(self, handle: int) -> None:
        with self._call("close"):
            self._files.close(handle)

    def size(self, handle: int) -> int:
        with self._call("stat"):
            return self._files.size(handle)

    def read_into(self, handle: int, target: memoryview, position: int) -> int:
        with self._call("read"):
            return self._files.read_into(handle, target, position)

    def write(self, handle: int, data: bytes | bytearray | memoryview, position: int) -> None:
        with self._call("write"):
            self._files.write(handle, data, position)

    def allocate(self, handle: int, size: int) -> None:
        with self._call("allocate"):
            self._files.allocate(handle, size)

    def truncate(self, handle: int, size: int) -> None:
        with self._call("truncate"):
            self._files.truncate(handle, size)

    def sync(self, handle: int) -> None:
        with self._call("sync"):
            self._files.sync(handle)

    def sync_directory(self, path: str) -> None:
        with self._call("sync of a directory"):
            self._files.sync_directory(path)

    def rename(self, old: str, new: str) -> None:
        with self._call("rename"):
            self._files.rename(old, new)

    def remove(self, path: str) -> None:
        with self._call("remove"):
            self._files.remove(path)

    def salt(self) -> int:
        return self._files.salt()
