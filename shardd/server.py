"""Run the loop of a shard, with its clock, signals and threads.

One pass takes in the messages that have arrived (up to RECEIVE_BURST of each front door), begins a
sync if somebody waits for one, and sends the messages of the shard. Without work the process sleeps
in poll until a message, the end of a sync, a signal, the end of the supervisor, or the next timer.
links.py carries the messages, disk_home.py opens the files, and sync_threads.py has the threads.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import sys
import time

from shardmq.shardd.config import ShardConfig, read
from shardmq.shardd.directories import shard_directory
from shardmq.shardd.disk import Calls, DiskRoom, StallWatch
from shardmq.shardd.disk_home import DiskHome
from shardmq.shardd.links import Links
from shardmq.shardd.shard import Shard
from shardmq.shardd.signals import Signals
from shardmq.shardd.store.errors import DiskFull, FormatTooNew, StoreError
from shardmq.shardd.store.files import is_full
from shardmq.shardd.sync_threads import QUICK_SYNC_S, SyncThreads
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.board import Board, path_of
from shardmq.shardd.wire.gaps import Gaps
from shardmq.shardd.wire.gaps import path_of as gaps_path
from shardmq.shardd.wire.memory import give_back, keep_warm
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

log = logging.getLogger("shardmq.shardd.server")

# The messages taken in from one front door before syncs and deliveries go on.
RECEIVE_BURST = 32
# How often data is synced that nobody waits for: acks, positions in streams, unconfirmed publishes.
TICK_MS = 1000
# How often the shard forgets producers that were not heard for long.
SWEEP_MS = 60_000
# A pass with few messages: a batch, and the settles that came with it.
FEW_MESSAGES = 2
SWITCH_INTERVAL_S = 0.0005
# A drain takes in at most this many messages of each front door, however fast more arrive.
DRAIN_MESSAGES_MAX = 4096
REFUSED = 2
# A sync that is under way when the shard fails may take this long to end.
LAST_SYNC_S = 5.0


class Server:
    def __init__(self, config: ShardConfig) -> None:
        self.config = config
        self._directory = shard_directory(config.data_dir, config.shard)
        self._board = Board(path_of(config.runtime_dir, config.shard))
        self._draining = False
        self._next_tick = 0
        self._next_sweep = 0
        self._calls = Calls()
        self._room = DiskRoom(self._directory, config.data_dir, self._calls)
        self._stall = StallWatch(
            self._calls, config.disk_stall_s, self._tell_stall, self._tell_status
        )
        self._status = "starting"
        self._gaps = Gaps(gaps_path(config.runtime_dir, config.shard))
        self._home = DiskHome(self._directory, config, self._calls, self._board)
        self.shard = Shard(
            config.shard,
            int.from_bytes(os.urandom(4), "little") >> 1 | 1,
            os.getpid(),
            self._home,
            no_room=(DiskFull,),
            process_stats=self._process_stats,
            consumer_timeout=config.consumer_timeout_ms or None,
            timeout_closes=config.consumer_timeout_action == "close",
        )
        self._threads = SyncThreads(self.shard.syncs)
        self._links = Links(config.runtime_dir, self.shard)
        self._lifeline = notify.lifeline_fd()

    # -- run ---------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the shard until it is drained or fails; return the exit status.

        The status is 0 after a drain, 1 if the disk or the shard itself failed, and 2 if a later
        version wrote the files.
        """
        keep_warm()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._make_directory()
        self._stall.start()
        signals = Signals()
        for fd in (*self._threads.fds, signals.fd, self._lifeline):
            if fd is not None:
                self._links.poll.register(fd, select.POLLIN)
        self._links.send([self.shard.membership.first_words(self._links.controller)])
        status = 1
        try:
            self._serve(signals)
            self._drain()
            status = 0
        except FormatTooNew as error:
            log.critical("refuses what a later version wrote: %s", error)
            self._break_off("refused", str(error))
            status = REFUSED
        except StoreError as error:
            log.critical("stops, for recovery to decide: %s", error)
            self._break_off("disk failed", str(error))
        except Exception as error:
            log.exception("stops, for recovery to decide")
            self._break_off("shard failed", repr(error))
        self._links.close()
        return status

    def _make_directory(self) -> None:
        """Make the directory of the shard.

        A full disk may have no room for a directory. Then the first message that finds room makes
        it.
        """
        try:
            os.makedirs(self._directory, exist_ok=True)
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("no room for %s: nothing can be stored before there is", self._directory)

    def _serve(self, signals: Signals) -> None:
        ready = False
        while not self._draining and not signals.stop:
            self._turn(signals)
            if not ready and self.shard.ready:
                ready = True
                self._board.show()
                notify.ready()
                give_back()
                self._status = "serving"
                self._tell_status()
                log.info("ready: %d queues", len(self.shard.queues))

    def _take_settings(self) -> None:
        """Take in new settings: the limits of the disk, and the log level."""
        section = notify.new_section()
        if section is not None:
            self.config = read(section)
            set_level(self.config.log_level)

    def _turn(self, signals: Signals) -> None:
        events = self._links.wait(self._wait_ms())
        now = _now()
        if events:
            self._look_at(events, signals, now)
        taken = self._links.receive(now, RECEIVE_BURST)
        if now >= self._next_tick:
            self._tick(now)
        if now >= self.shard.upkeep.due:
            self._threads.begin_reclaim(now)
        self._threads.begin_settled_sync()
        if 0 < taken <= FEW_MESSAGES and self._threads.messages.usual_s < QUICK_SYNC_S:
            self._links.send(self.shard.turn_end(now))
            if self.shard.syncs.may_begin:
                self._threads.sync_here()
                self._links.send(self.shard.turn_end(now))
        else:
            if self.shard.syncs.may_begin:
                self._threads.begin_sync()
            self._links.send(self.shard.turn_end(now))
        self._threads.begin_settled_sync()

    def _look_at(self, events: list[tuple[int, int]], signals: Signals, now: int) -> None:
        for fd, _ in events:
            if self._links.hear(fd, now) or self._threads.ended(fd, now):
                continue
            if fd == signals.fd:
                if signals.take():
                    self._take_settings()
            elif fd == self._lifeline:
                log.warning("the supervisor is gone")
                self._draining = True

    def _wait_ms(self) -> int:
        shard, at = self.shard, self._next_tick
        if shard.has_work:
            return 0
        if shard.upkeep.due < at:
            at = shard.upkeep.due
        due = shard.next_due()
        if due is not None and due < at:
            at = due
        left_ms = at - _now()
        return 0 if left_ms < 0 else left_ms if left_ms < TICK_MS else TICK_MS

    def _tick(self, now: int) -> None:
        """Do the work of each second.

        The shard tells the watchdog that it lives, checks the room on the disk, asks for a sync of
        what nobody waits for, and closes the sockets of peers that left.
        """
        self._next_tick = now + TICK_MS
        notify.watchdog()
        self.shard.set_alarm(self._alarm())
        self.shard.syncs.want()
        self.shard.own_lent()
        self._look_at_gaps()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_MS
            self.shard.forget_producers(now - int(self.config.producer_idle_s * 1000))
        self._links.close_unused()

    def _look_at_gaps(self) -> None:
        """Read where the reader of streams has met damage, so that the shard counts the damage."""
        try:
            for queue_id, offset in self._gaps.due() if self.shard.ready else ():
                self.shard.streams.look_at(queue_id, offset)
        except OSError as error:
            log.warning("damage that the reader has met is not looked at: %s", error)

    def _alarm(self) -> str:
        # A stall that ended since the last tick is reported too, and its end with the next tick.
        # The front doors have heard of the stall from another thread, on another connection.
        if self._stall.seen():
            return wire.DISK_STALLED
        return wire.LOW_ON_DISK if self._room.is_low(self.config) else ""

    def _tell_stall(self, status: str) -> None:
        """Tell the supervisor and all peers that the disk does not answer.

        This runs in the thread that watches the disk, because the loop may be the thread that
        hangs.
        """
        notify.status(status)
        self._links.alarm_from_thread(wire.DISK_STALLED)

    def _tell_status(self) -> None:
        """Tell the supervisor the present status."""
        notify.status(self._status)

    # -- sync, stop --------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take in the messages that have arrived, make them durable, confirm them, and close.

        Nothing more is handed out. Waiting messages stay as they are. Messages that were handed out
        come back as redelivered.
        """
        notify.stopping()
        self._links.receive_last(_now(), DRAIN_MESSAGES_MAX)
        self.shard.syncs.want()
        for _ in range(2):  # the sync under way, then one for messages that came behind it
            self._threads.await_sync()
            self._threads.begin_sync()
        self._threads.await_sync()
        self._links.send(self.shard.answers())
        self.shard.close()
        log.info("drained")

    def _break_off(self, alarm: str, why: str) -> None:
        """Tell all peers and the supervisor that the shard failed, then save what can be saved.

        The report comes first, because the rest may take long or fail again.
        """
        notify.failing(f"{alarm}: {why}")
        self._links.send(self.shard.break_off(alarm))
        try:
            self._threads.await_sync(LAST_SYNC_S)
        except Exception as error:
            log.error("and the sync under way: %r", error)
        for trouble in self.shard.abandon():
            log.error("not closed well: %r", trouble)

    def _process_stats(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        with open("/proc/self/statm") as file:
            rss_pages = int(file.read().split()[1])
        return {
            "rss_bytes": rss_pages * resource.getpagesize(),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "disk_free_bytes": self._room.free_bytes(),
            "disk_free_min_bytes": self.config.disk_free_min_bytes,
            "disk_free_warn_bytes": self.config.disk_free_warn_bytes,
            "sync_seconds": self._threads.messages.seconds,
            **self._links.stats(),
            **self._home.recovery(),
            **self._threads.messages.took_us.report("sync_us"),
        }


def _now() -> int:
    """Return milliseconds since the epoch.

    The front doors use the same clock, because messages expire by it.
    """
    return time.time_ns() // 1_000_000
