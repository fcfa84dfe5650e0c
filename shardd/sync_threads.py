"""Run the disk work of a shard in threads of its own: syncs, and merging of files.

One job runs at a time in each thread. The loop of the shard polls descriptors to hear that a job
ended, and begins the next one.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shardmq.shardd.disk import Calls
from shardmq.shardd.stores import SyncJob
from shardmq.shardd.syncs import Syncs
from shardmq.shardd.upkeep import Step
from shardmq.shardd.wire.histogram import Histogram

log = logging.getLogger("shardmq.shardd.sync_threads")

# The loop itself may wait for a disk that syncs in less than this, when little else is at hand; and
# for a disk and the nodes that have copies.
QUICK_SYNC_S = 0.001
QUICK_COPIED_S = 0.002
# The loop itself waits so long for the answers of nodes that have copies.
ANSWERED_S_MAX = 0.003
# The number of syncs over which the usual time is averaged.
USUAL_OF = 16


class Syncer:
    """A thread that runs one job at a time; `fd` becomes readable when a job ended."""

    def __init__(self, name: str) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.seconds = 0.0
        self.took_us = Histogram()
        self.usual_s = QUICK_COPIED_S  # running average; a new disk does not count as quick
        # Jobs, with the seconds that each has taken before it came here.
        self._jobs: queue.SimpleQueue[tuple[SyncJob | Step, float]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def start(self, job: SyncJob | Step, took_s: float = 0.0) -> None:
        """Let the thread run the job, or the rest of one that `run` took `took_s` seconds for."""
        self._jobs.put((job, took_s))

    def _run(self) -> None:
        while True:
            job, took_s = self._jobs.get()
            try:
                self.count(took_s + self.run(job))
            finally:  # a thread that ends must not leave the owner waiting
                os.eventfd_write(self.fd, 1)

    def run(self, job: SyncJob | Step) -> float:
        """Run the job in the thread of the caller; return the seconds that it took.

        A job that fails raises nothing here: the owner of the job finds out when it ends the job.
        """
        began = time.monotonic()
        try:
            job.run()
        except Exception:  # the owner of the job finds that the job did not finish
            log.debug("%s failed", threading.current_thread().name, exc_info=True)
        return time.monotonic() - began

    def count(self, took_s: float) -> None:
        """Count a whole job."""
        self.seconds += took_s
        self.took_us.add(int(took_s * 1e6))
        self.usual_s += (took_s - self.usual_s) / USUAL_OF


def has_ended(fd: int, timeout_s: float | None = None) -> bool:
    """Return whether the job of this descriptor ends within so many seconds; None: wait for it."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class Copies(Protocol):
    """The files of a shard with copies on other nodes; `ReplicatedFiles` explains the methods."""

    def sync_own(self, act: Callable[[], None]) -> int: ...
    def is_confirmed(self, number: int, seconds: float = math.inf) -> bool: ...


class WatchedCopies:
    """The wait for nodes that have copies, noted in `Calls` while it lasts."""

    def __init__(self, copies: Copies, calls: Calls) -> None:
        self.sync_own = copies.sync_own
        self.is_confirmed = calls.timed("sync", copies.is_confirmed)


class CopiedSync:
    """A sync that the loop runs, and that a thread ends if the other nodes do not answer soon.

    The first `run` waits for them no longer than ANSWERED_S_MAX, the second one as long as it
    takes. The owner of the sync finds out itself if its own part has failed.
    """

    def __init__(self, sync: SyncJob, copies: Copies) -> None:
        self._sync = sync
        self._copies = copies
        self._number: int | None = None  # None: its own part is not done
        self._is_answered = False
        self._error: BaseException | None = None

    def run(self) -> None:
        seconds = math.inf
        if self._number is None:
            seconds = ANSWERED_S_MAX
            self._number = self._copies.sync_own(self._sync.run)
        try:
            self._is_answered = self._copies.is_confirmed(self._number, seconds)
        except BaseException as error:
            self._error = error
            raise

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing to wait for any more."""
        return self._number is None or self._is_answered or self._error is not None

    def check(self) -> None:
        """Raise if its own part was done, and it is not known that the other nodes have it."""
        if self._number is not None and not self._is_answered:
            raise self._error or RuntimeError("a wait for other nodes did not come to its end")


class SyncThreads:
    """The threads of one shard, and the jobs under way in them.

    copies: the files, if other nodes have copies.
    """

    def __init__(self, syncs: Syncs, copies: Copies | None = None) -> None:
        self._syncs = syncs
        self._copies = copies
        self._quick_s = QUICK_SYNC_S if copies is None else QUICK_COPIED_S
        self._copied: CopiedSync | None = None  # under way in the thread
        self.messages = Syncer("sync")
        self._settled = Syncer("sync of what is settled")
        self._reclaimer = Syncer("reclaim")
        self._syncing = False
        self._settling = False
        self._step: Step | None = None  # the step under way in the reclaimer

    @property
    def has_copies(self) -> bool:
        """Return whether a sync waits for other nodes, too."""
        return self._copies is not None

    @property
    def are_quick(self) -> bool:
        """Return whether the loop itself may wait for a sync of messages."""
        return self.messages.usual_s < self._quick_s

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors that become readable when a job ended: see `ended`."""
        return self.messages.fd, self._settled.fd, self._reclaimer.fd

    def ended(self, fd: int, now: int) -> bool:
        """Take in the end of the job of that descriptor; return False if it is none of `fds`.

        Raises what the store raises when the job failed.
        """
        if fd == self.messages.fd:
            self._end_sync()
        elif fd == self._settled.fd:
            os.eventfd_read(fd)
            self._settling = False
            self._syncs.end_settled()
        elif fd == self._reclaimer.fd:
            os.eventfd_read(fd)
            assert self._step is not None
            for line in self._step.left:
                log.warning("not merged: %s", line)
            self._step = None
            self._syncs.end_reclaim(now)
        else:
            return False
        return True

    def _end_sync(self) -> None:
        os.eventfd_read(self.messages.fd)
        self._syncing = False
        if self._copied is not None:
            copied, self._copied = self._copied, None
            copied.check()
        self._syncs.end()

    def begin_sync(self) -> None:
        """Begin a sync of messages in its thread, if one is wanted and none runs."""
        sync = self._syncs.begin()
        if sync is not None:
            self._syncing = True
            self.messages.start(sync)

    def sync_here(self) -> None:
        """Sync in the thread of the loop.

        With one batch at hand and a quick disk, the two wake-ups of the thread take longer than the
        sync itself. Where other nodes have copies, a thread takes the wait over if they are slow.
        """
        sync = self._syncs.begin()
        if sync is None:
            return
        if self._copies is None:
            self.messages.count(self.messages.run(sync))
            self._syncs.end()
            return
        copied = CopiedSync(sync, self._copies)
        took_s = self.messages.run(copied)
        if copied.is_over:
            self.messages.count(took_s)
            copied.check()
            self._syncs.end()
        else:
            self._syncing, self._copied = True, copied
            self.messages.start(copied, took_s)

    def await_sync(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the sync of messages under way, if there is one."""
        if self._syncing and has_ended(self.messages.fd, timeout_s):
            self._end_sync()

    def begin_settled_sync(self) -> None:
        sync = self._syncs.begin_settled()
        if sync is not None:
            self._settling = True
            self._settled.start(sync)

    def answer_about_acks(self, now: int) -> None:
        """Answer those who wait for acks, before the end of the shard: nobody asks any more.

        The end of a merge is waited for, if it holds some of these acks back.
        """
        while self._syncs.awaits_acks:
            under_way = self._settled if self._settling else None
            if under_way is None and (sync := self._syncs.begin_settled()) is not None:
                self._settling = True
                self._settled.start(sync)
                under_way = self._settled
            elif under_way is None and self._step is not None:
                under_way = self._reclaimer
            if under_way is None:
                return
            has_ended(under_way.fd)
            self.ended(under_way.fd, now)

    def begin_reclaim(self, now: int) -> None:
        step = self._syncs.begin_reclaim(now)
        if step is not None:
            self._step = step
            self._reclaimer.start(step)
