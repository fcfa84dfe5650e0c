"""Carry out the snapshots that the controller asks a shard for, one at a time.

A thread prepares the snapshot. Then new jobs of the stores are held back, and when none is under
way any more, the loop captures the files. A thread does the rest. A shard that starts again is
asked again for what its former process has not answered, so a target that is there is refused.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from shardmq.shardd.queues import Stream
from shardmq.shardd.shard import Shard
from shardmq.shardd.snapshot import Part, Snapshot, clear_links
from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.stores import Store
from shardmq.shardd.wire import messages as m
from shardmq.supervisor import notify

SNAPSHOT_FAILED: Final = 541

log = logging.getLogger(__name__)


class Snapshotting:
    """The snapshots of one shard.

    directory: that of the shard.
    watch: has a function called whenever a descriptor is readable.
    """

    def __init__(
        self, shard: Shard, directory: str, watch: Callable[[int, Callable[[], None]], None]
    ) -> None:
        self._shard = shard
        self._directory = directory
        self._watch = watch
        self._fd = -1  # readable when the thread has ended
        self._snapshot: Snapshot | None = None  # prepared, and not captured
        self._is_running = False
        self._error: Exception | None = None

    def begin(self) -> None:
        """Remove what a former process may have left."""
        clear_links(self._directory)

    def turn(self) -> None:
        """Begin the snapshot that the shard is asked for, or capture the files when it is time."""
        if self._shard.snapshots.asked is None or self._is_running:
            return
        if self._snapshot is None:
            _, asked = self._shard.snapshots.asked
            self._snapshot = snapshot = Snapshot(self._directory, asked.directory)
            directories = [directory for directory, _ in self._keepers()]
            self._run(snapshot, lambda: snapshot.prepare(directories))
            return
        syncs = self._shard.syncs
        syncs.are_held = True
        if not syncs.are_idle:
            return
        snapshot, self._snapshot = self._snapshot, None
        try:
            snapshot.capture(self._parts(), notify.watchdog)
        except (OSError, DiskFull) as error:
            self._run(snapshot, partial(_fail, error))  # what there is of it goes in the thread
        else:
            self._run(snapshot, snapshot.finish)
        finally:
            syncs.are_held = False

    def _keepers(self) -> list[tuple[str, Store | Stream]]:
        """Return all stores and streams, with their directories below that of the shard."""
        streams = self._shard.streams.queues.values()
        keepers: list[Store | Stream] = [*self._shard.stores.values()]
        keepers += [queue.log.stream for queue in streams]
        return [(each.directory[len(self._directory) + 1 :], each) for each in keepers]

    def _parts(self) -> list[Part]:
        """Write all to the files, and return which of them go on changing, and how."""
        keepers = self._keepers()
        for _, keeper in keepers:
            keeper.flush()
        return [Part(directory, keeper.growing()) for directory, keeper in keepers]

    def _run(self, snapshot: Snapshot, work: Callable[[], None]) -> None:
        """Do work for a snapshot in a thread; then the loop hears of its end."""
        if self._fd < 0:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watch(self._fd, self._ended)
        self._is_running, self._error = True, None

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error
                snapshot.give_up()
            finally:
                os.eventfd_write(self._fd, 1)

        threading.Thread(target=run, name="snapshot", daemon=True).start()

    def _ended(self) -> None:
        os.eventfd_read(self._fd)
        self._is_running = False
        if self._error is None and self._snapshot is not None:
            return  # prepared: the next turn captures
        self._snapshot = None
        self._end(self._error)

    def _end(self, error: Exception | None) -> None:
        """Answer the request."""
        requests = self._shard.snapshots
        assert requests.asked is not None
        (peer, asked), requests.asked = requests.asked, None
        if error is None:
            log.info("a snapshot is in %s", asked.directory)
            peer.tell(m.Done(asked.request))
        else:
            log.error("no snapshot in %s: %s", asked.directory, error)
            peer.tell(m.Refused(asked.request, SNAPSHOT_FAILED, str(error)))


def _fail(error: Exception) -> None:
    raise error
