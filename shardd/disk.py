"""Notice a disk that does not answer: a thread that makes no disk calls times those of the stores.

A system call cannot be taken back, so nothing is interrupted here. The watch only reports that a
call takes too long, and later that the call is over. The loop of the shard may be the thread that
hangs, so a receiver of the report must not wait for the loop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import ParamSpec, TypeVar

from shardmq.shardd.config import ShardConfig
from shardmq.shardd.store.files import Files
from shardmq.shardd.wire.messages import DISK_STALLED

log = logging.getLogger("shardmq.shardd.disk")

P = ParamSpec("P")
R = TypeVar("R")

# How late a stall, or its end, may be noticed. It is less if `stall_s` is below four times this.
LOOK_EACH_S = 0.5
MB = 1_000_000


class Calls:
    """The disk calls under way.

    A thread has at most one call under way, so there are at most as many calls as threads that
    write.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[int, tuple[float, str]] = {}

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return the same function, noted as under way while it runs."""
        under_way, clock = self._under_way, self._clock

        def call(*arguments: P.args, **options: P.kwargs) -> R:
            thread = get_ident()
            under_way[thread] = (clock(), name)
            try:
                return function(*arguments, **options)
            finally:
                del under_way[thread]

        return call

    def longest(self) -> tuple[float, str]:
        """Return the seconds since the oldest call began, and its name.

        The result is (0, "") when no call is under way.
        """
        found = min(list(self._under_way.values()), default=None)
        return (0.0, "") if found is None else (self._clock() - found[0], found[1])


class StallWatch:
    """Reports once when a call takes longer than `stall_s`, and once when that is over.

    A report comes again when there is another reason. All come from a thread of the watch. `why`
    returns what does not answer, as an alarm.
    """

    def __init__(
        self,
        calls: Calls,
        stall_s: float,
        stalled: Callable[[str], None],
        over: Callable[[], None],
        why: Callable[[], str] = lambda: DISK_STALLED,
    ) -> None:
        self.why = DISK_STALLED  # of the stall that there is, or was last
        self._look_why = why
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
        """Return whether there is a stall, or was one since the last call of this method.

        So the caller misses no stall, however short.
        """
        unseen, self._unseen = self._unseen, False
        return self.now or unseen

    def check(self) -> None:
        seconds, name = self._calls.longest()
        if seconds > self._stall_s:
            self._longest = (seconds, name)
            before, self.why = self.why, self._look_why()
            if not self.now or self.why != before:
                self.now = self._unseen = True
                log.error(
                    "%s: %s takes %.1f s already; publishers are held back",
                    "the disk does not answer" if self.why == DISK_STALLED else self.why,
                    name,
                    seconds,
                )
                self._stalled(f"{self.why}: {name} takes more than {self._stall_s:g} s")
        elif self.now:
            self.now = False
            log.warning(
                "%s: %s took some %.1f s",
                "the disk answers again" if self.why == DISK_STALLED else "it goes on",
                self._longest[1],
                self._longest[0],
            )
            self._over()

    def _run(self) -> None:
        each_s = min(LOOK_EACH_S, self._stall_s / 4)
        while True:
            time.sleep(each_s)
            self.check()


class DiskRoom:
    """The room on the disk of a shard, with a warning in the log before there is too little."""

    def __init__(self, directory: str, data_directory: str, calls: Calls) -> None:
        self._directory = directory
        self._data_directory = data_directory
        self._statvfs = calls.timed("statvfs", os.statvfs)
        self._warned = False

    def free_bytes(self) -> int:
        try:
            stat = self._statvfs(self._directory)
        except FileNotFoundError:  # the directory could not be made yet, because there was no room
            stat = self._statvfs(self._data_directory)
        return stat.f_bavail * stat.f_frsize

    def is_low(self, config: ShardConfig) -> bool:
        """Return whether publishers must be held back.

        Logs a warning once when the room gets short, and a line when there is enough again.
        """
        free = self.free_bytes()
        warns = free < config.disk_free_warn_bytes
        if warns != self._warned:
            self._warned = warns
            level, word = (
                (logging.WARNING, "low on disk soon")
                if warns
                else (logging.INFO, "enough room again")
            )
            log.log(
                level,
                "%s: %d MB free; publishers are blocked below %d MB",
                word,
                free // MB,
                config.disk_free_min_bytes // MB,
            )
        return free < config.disk_free_min_bytes


class WatchedFiles:
    """`Files` whose calls are noted in `Calls` while they run.

    This costs half a microsecond for each call. A batch makes a few calls.
    """

    def __init__(self, files: Files, calls: Calls) -> None:
        self.make_directory = calls.timed("mkdir", files.make_directory)
        self.remove_directory = calls.timed("rmdir", files.remove_directory)
        self.list = calls.timed("list", files.list)
        self.open = calls.timed("open", files.open)
        self.close = calls.timed("close", files.close)
        self.size = calls.timed("stat", files.size)
        self.read_into = calls.timed("read", files.read_into)
        self.read_pieces = calls.timed("read", files.read_pieces)
        self.write = calls.timed("write", files.write)
        self.allocate = calls.timed("allocate", files.allocate)
        self.set_aside = calls.timed("allocate", files.set_aside)
        self.room = calls.timed("stat", files.room)
        self.has_room = calls.timed("statvfs", files.has_room)
        self.is_linked = calls.timed("stat", files.is_linked)
        self.truncate = calls.timed("truncate", files.truncate)
        self.sync = calls.timed("sync", files.sync)
        self.sync_directory = calls.timed("sync of a directory", files.sync_directory)
        self.rename = calls.timed("rename", files.rename)
        self.exchange = calls.timed("rename", files.exchange)
        self.remove = calls.timed("remove", files.remove)
        self.salt = files.salt

    def descriptor(self, handle: int) -> int:
        """Return -1, for no descriptor, so that no read goes unwatched."""
        return -1
