"""Serve a shard pass by pass, with its files, links, threads and clock.

One pass takes in the messages that have arrived (up to RECEIVE_BURST of each front door), begins a
sync if somebody waits for one, and sends the messages of the shard. The owner of the server says
when a pass is due: process.py is a process that does nothing else. links.py carries the messages,
disk_home.py opens the files, and sync_threads.py has the threads.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import time
from collections.abc import Callable
from typing import Protocol

from shardmq.shardd.config import ShardConfig
from shardmq.shardd.directories import shard_directory
from shardmq.shardd.disk import Calls, DiskRoom, StallWatch
from shardmq.shardd.disk_home import DiskHome
from shardmq.shardd.links import Links
from shardmq.shardd.shard import Shard
from shardmq.shardd.snapshotting import Snapshotting
from shardmq.shardd.store.errors import DiskFull, FormatTooNew, StoreError
from shardmq.shardd.store.files import Files, is_full
from shardmq.shardd.sync_threads import Copies, SyncThreads, WatchedCopies
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire import short_ways
from shardmq.shardd.wire.board import Board, path_of
from shardmq.shardd.wire.gaps import Gaps
from shardmq.shardd.wire.gaps import path_of as gaps_path
from shardmq.shardd.wire.memory import BURST_BYTES, AfterBursts, give_back
from shardmq.shardd.wire.spin import Spin
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

log = logging.getLogger("shardmq.shardd.server")

# How often data is synced that nobody waits for: acks, positions in streams, unconfirmed publishes.
TICK_MS = 1000
# How often the shard forgets producers that were not heard for long.
SWEEP_MS = 60_000
# A pass with few messages: a batch, and the settles that came with it.
FEW_MESSAGES = 2
# A drain takes in at most this many messages of each front door, however fast more arrive.
DRAIN_MESSAGES_MAX = 4096
# A shard that is handed over waits so long until its front doors send nothing more.
PAUSE_S_MAX = 0.5
# Threads of disk work take turns with the loop at this interval.
SWITCH_INTERVAL_S = 0.0005
# The value of `serves` with which a shard is ready. One that has a copy is ready without.
SERVES = "yes"
# Exit statuses of a process whose shard failed.
FAILED, REFUSED = 1, 2
# A sync that is under way when the shard fails may take this long to end.
LAST_SYNC_S = 5.0


class CopiedFiles(Files, Copies, Protocol):
    """The files of a shard with copies on other nodes."""


class Copied(Protocol):
    """The seat of a shard with copies on other nodes; `seat.Seat` explains the members."""

    fd: int
    is_settled: bool
    heir: str
    over: str
    failure: BaseException | None

    @property
    def files(self) -> CopiedFiles | None: ...
    @property
    def waits_for(self) -> str: ...
    def look(self) -> None: ...
    def hand_over(self) -> None: ...
    def leave_within(self, seconds: float) -> None: ...
    def stop(self) -> None: ...
    def is_deposed(self, error: BaseException | None) -> bool: ...
    def numbers(self) -> dict[str, float]: ...


class Server:
    """A shard with its files, links and threads.

    The owner calls `begin`, then `turn` again and again, at the latest `wait_ms` after the last
    one. In the end it calls `drain`, or `break_off` if some call raised, and `close`.

    `on_ready` is called when all queues are known, with the messages that they still have. `alone`
    says that nobody else uses the thread of the loop, so that it may wait for a quick disk. `seat`
    leads, if other nodes have copies of the shard.
    """

    def __init__(
        self,
        config: ShardConfig,
        on_ready: Callable[[], None],
        *,
        alone: bool = True,
        seat: Copied | None = None,
    ) -> None:
        self.config = config
        self._alone = alone
        self._seat = seat
        self._on_ready = on_ready
        self._is_ready = False
        self._directory = shard_directory(config.data_dir, config.shard)
        self._board = Board(path_of(config.runtime_dir, config.shard))
        self._next_tick = 0
        self._next_sweep = 0
        self._calls = Calls()
        self._room = DiskRoom(self._directory, config.data_dir, self._calls)
        self._stall = StallWatch(
            self._calls, config.disk_stall_s, self._tell_stall, self._tell_status, self._why_stalled
        )
        self._status = "starting"
        self._told_alarm = ""  # to the supervisor
        self._gaps = Gaps(gaps_path(config.runtime_dir, config.shard))
        files = None if seat is None else seat.files
        self._home = DiskHome(self._directory, config, self._calls, self._board, files)
        self.shard = Shard(
            config.shard,
            int.from_bytes(os.urandom(4), "little") >> 1 | 1,
            os.getpid(),
            self._home,
            no_room=(DiskFull,),
            process_stats=self._process_stats,
            consumer_timeout=config.consumer_timeout_ms or None,
            timeout_closes=config.consumer_timeout_action == "close",
            short_way=short_ways.are_on(),
        )
        self._threads = SyncThreads(
            self.shard.syncs, None if files is None else WatchedCopies(files, self._calls)
        )
        self._snapshots = Snapshotting(self.shard, self._directory, self.watch)
        self._spin = Spin(config.spin_us)
        self._memory = AfterBursts(BURST_BYTES)
        self.links = Links(
            config.runtime_dir, self.shard, self._spin, config.session_fd, config.session_keys
        )
        self._others: dict[int, Callable[[], None]] = {}  # descriptors of the owner

    # -- start -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to serve: the controller is told that the shard is there."""
        self._make_directory()
        self._snapshots.begin()
        self._stall.start()
        for fd in self._threads.fds:
            self.links.poll.register(fd, select.EPOLLIN)
        self.links.send([self.shard.membership.first_words(self.links.controller)])

    def watch(self, fd: int, then: Callable[[], None]) -> None:
        """Call `then` in each pass in which this descriptor is readable."""
        self._others[fd] = then
        self.links.poll.register(fd, select.EPOLLIN)

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

    def _become_ready(self) -> None:
        self._is_ready = True
        self._board.show()
        self._on_ready()
        give_back()
        self._status = "serving"
        self._tell_status()
        log.info("ready: %d queues", len(self.shard.queues))

    def take_settings(self, config: ShardConfig) -> None:
        """Take in new settings: the limits of the disk, the log level, and how long to spin."""
        self.config = config
        set_level(config.log_level)
        self._spin.change(config.spin_us)

    # -- passes ------------------------------------------------------------------------------------

    def turn(self, events: list[tuple[int, int]] | None) -> None:
        """Run one pass.

        `events` are the descriptors that `links.poll` reports, or None if `links.wait` has taken in
        the messages of this pass.
        """
        now = _now()
        if events is None:
            taken, self.links.plain.taken = self.links.plain.taken, 0
        else:
            if events:
                self._look_at(events, now)
            taken = self.links.receive(now)
        if now >= self._next_tick or self._next_tick > now + TICK_MS:  # the clock was set back
            self._tick(now)
        if self.shard.snapshots.asked is not None:
            self._snapshots.turn()
        if now >= self.shard.upkeep.due:
            self._threads.begin_reclaim(now)
        self._threads.begin_settled_sync()
        is_quick = 0 < taken <= FEW_MESSAGES and self._alone and self._threads.are_quick
        if is_quick and not self._threads.has_copies:
            self.links.send(self.shard.turn_end(now))  # consumers work while the disk does
            if self.shard.syncs.may_begin:
                self._threads.sync_here()
                self.links.send(self.shard.turn_end(now))
        else:
            if self.shard.syncs.may_begin:
                if is_quick:
                    # Deliveries leave with the confirms, so that the front door wakes up once.
                    self._threads.sync_here()
                else:
                    self._threads.begin_sync()
            self.links.send(self.shard.turn_end(now))
        self._threads.begin_settled_sync()
        if self.shard.syncs.has_answered:
            self.shard.syncs.has_answered = False
            self.links.send(self.shard.answers())
        if not self._is_ready and self.shard.ready:
            self._become_ready()

    def _look_at(self, events: list[tuple[int, int]], now: int) -> None:
        for fd, _ in events:
            if self.links.hear(fd, now) or self._threads.ended(fd, now):
                continue
            if (then := self._others.get(fd)) is not None:
                then()

    def wait_ms(self) -> int:
        """Return how long the next pass may wait if no descriptor reports anything."""
        shard, at = self.shard, self._next_tick
        if shard.has_work:
            return 0
        if shard.upkeep.due < at and not shard.syncs.merges_are_held:
            at = shard.upkeep.due
        due = shard.next_due()
        if due is not None and due < at:
            at = due
        left_ms = at - _now()
        return 0 if left_ms < 0 else left_ms if left_ms < TICK_MS else TICK_MS

    def _tick(self, now: int) -> None:
        """Do the work of each second.

        The shard tells the watchdog that it lives, checks the room on the disk, asks for a sync of
        what nobody waits for, copies lent bodies that stay, gives free memory back, closes the
        sockets of peers that left, and accepts lanes again.
        """
        self._next_tick = now + TICK_MS
        notify.watchdog()
        self._spin.tick()
        self.shard.set_alarm(self._alarm())
        self._tell_alarm(self.shard.registry.alarm)
        self.shard.syncs.want()
        self.shard.registry.note_time(now)
        self.shard.own_lent()
        self._memory.give_back_if_over(self.shard.written_bytes)
        self._look_at_gaps()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_MS
            self.shard.forget_producers(now - int(self.config.producer_idle_s * 1000))
        self.links.close_unused()
        self.links.listen()

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
            return self._stall.why
        return wire.LOW_ON_DISK if self._room.is_low(self.config) else ""

    def _tell_stall(self, status: str) -> None:
        """Tell the supervisor and all peers that the disk, or another node, does not answer.

        This runs in the thread that watches the disk, because the loop may be the thread that
        hangs.
        """
        notify.status(status)
        self._tell_alarm(self._stall.why)
        self.links.alarm_from_thread(self._stall.why)

    def _tell_alarm(self, reason: str) -> None:
        """Tell the supervisor the alarm, if it is another one than before."""
        if reason != self._told_alarm:
            self._told_alarm = reason
            notify.alarm(reason)

    def _why_stalled(self) -> str:
        """Return why a sync does not end: because of the disk, or of other nodes."""
        return (self._seat.waits_for if self._seat is not None else "") or wire.DISK_STALLED

    def _tell_status(self) -> None:
        """Tell the supervisor the present status."""
        notify.status(self._status)

    # -- the end -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask the front doors to send nothing more, and take in and confirm what they have sent.

        So nothing of theirs is lost when another process serves the shard next. A front door that
        does not answer within PAUSE_S_MAX has what it sends later nacked.
        """
        for fd in self._others:
            self.links.poll.unregister(fd)  # the owner has heard, and would hear again and again
        self._others.clear()
        membership, until = self.shard.membership, time.monotonic() + PAUSE_S_MAX
        membership.ask_to_pause()
        self.links.send(self.shard.answers())
        while not membership.are_paused and (left_s := until - time.monotonic()) > 0:
            wait_s = left_s if self.links.may_wait() else 0
            now, events = _now(), self.links.poll.poll(wait_s)
            self._look_at(events, now)
            self.links.receive(now)
            self._threads.begin_sync()
            self.links.send(self.shard.answers())

    def drain(self) -> None:
        """Take in the messages that have arrived, make them durable, confirm them, and close.

        Nothing more is handed out. Waiting messages stay as they are. Messages that were handed out
        come back as redelivered.
        """
        self.shard.syncs.are_held = False  # no snapshot is made any more
        self.links.receive_last(_now(), DRAIN_MESSAGES_MAX)
        self.shard.syncs.want()
        for _ in range(2):  # the sync under way, then one for messages that came behind it
            self._threads.await_sync()
            self._threads.begin_sync()
        self._threads.await_sync()
        self._threads.answer_about_acks(_now())
        self.links.send(self.shard.answers())
        self.shard.close()
        log.info("drained")

    def break_off(self, error: Exception) -> int:
        """Tell all peers and the supervisor that the shard failed, then save what can be saved.

        The report comes first, because the rest may take long or fail again. Returns the exit
        status of the process: FAILED, or REFUSED if a later version wrote the files.
        """
        if isinstance(error, FormatTooNew):
            log.critical("refuses what a later version wrote: %s", error)
            alarm, why = "refused", str(error)
        elif isinstance(error, StoreError):
            log.critical("stops, for recovery to decide: %s", error)
            alarm, why = "disk failed", str(error)
        else:
            log.error("stops, for recovery to decide", exc_info=error)
            alarm, why = "shard failed", repr(error)
        notify.failing(f"{alarm}: {why}")
        self.links.send(self.shard.break_off(alarm))
        try:
            self._threads.await_sync(LAST_SYNC_S)
        except Exception as error_of_sync:
            log.error("and the sync under way: %r", error_of_sync)
        for trouble in self.shard.abandon():
            log.error("not closed well: %r", trouble)
        return REFUSED if isinstance(error, FormatTooNew) else FAILED

    def close(self) -> None:
        """Close the links. What is unsent may still take a moment."""
        self.links.close()

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
            **self.links.stats(),
            **self._home.recovery(),
            **self._threads.messages.took_us.report("sync_us"),
            **(self._seat.numbers() if self._seat is not None else {}),
        }


def _now() -> int:
    """Return milliseconds since the epoch.

    The front doors use the same clock, because messages expire by it.
    """
    return time.time_ns() // 1_000_000
