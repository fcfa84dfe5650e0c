"""Run a shard: its sockets, lanes, clock and threads. This is the only file of a shard that waits.

One pass takes in the messages that have arrived (up to RECEIVE_BURST of each front door), begins a
sync if somebody waits for one, and sends the messages of the shard. Without work the process sleeps
in poll until a message, the end of a sync, a signal, the end of the supervisor, or the next timer.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

import zmq

from shardmq.shardd.config import ShardConfig, read
from shardmq.shardd.directories import shard_directory, stream_directory, vhost_directory
from shardmq.shardd.disk import Calls, DiskRoom, StallWatch, WatchedFiles
from shardmq.shardd.peers import Outgoing
from shardmq.shardd.shard import Shard
from shardmq.shardd.signals import Signals
from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.errors import DiskFull, FormatTooNew, StoreError
from shardmq.shardd.store.files import OsFiles, is_full
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog, QueueRange, Ranges
from shardmq.shardd.store.streams.segment import SEGMENT_BYTES_MIN
from shardmq.shardd.sync_threads import QUICK_SYNC_S, SyncThreads
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.board import Board, path_of
from shardmq.shardd.wire.gaps import Gaps
from shardmq.shardd.wire.gaps import path_of as gaps_path
from shardmq.shardd.wire.lane import ALL, Lane, NoLane, accept, joined, listen
from shardmq.shardd.wire.memory import give_back, keep_warm
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

log = logging.getLogger("shardmq.shardd.server")

# The messages taken in from one front door before syncs and deliveries go on.
RECEIVE_BURST = 32
RECONNECT_MS = 10
# The shortest time between two lines about the progress of a recovery.
PROGRESS_EACH_S = 0.5
# Messages that are unsent at the end may take this long.
LINGER_MS = 500
# How often data is synced that nobody waits for: acks, positions in streams, unconfirmed publishes.
TICK_MS = 1000
# How often the shard forgets producers that were not heard for long.
SWEEP_MS = 60_000
# A pass with few messages: a batch, and the settles that came with it.
FEW_MESSAGES = 2
SWITCH_INTERVAL_S = 0.0005
# The constants of zmq are enums: each `&` with one of them costs as much as a call.
READABLE, AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)
# A drain takes in at most this many messages of each front door, however fast more arrive.
DRAIN_MESSAGES_MAX = 4096
REFUSED = 2
# A sync that is under way when the shard fails may take this long to end.
LAST_SYNC_S = 5.0
# The lines in the log about the damage of one store; `shardctl store verify` shows all damage.
DAMAGE_LOGGED_MAX = 100
DAMAGE_WORDS = {
    "torn": (
        logging.WARNING,
        "torn end, cut off: it was being written when the last run ended and was not confirmed",
    ),
    "corrupt": (
        logging.ERROR,
        "damaged, messages in it are lost; all others are served. Kept beside it as damaged.{}",
    ),
    "mendable": (
        logging.WARNING,
        "the header was damaged and has been written anew from the index; nothing is lost",
    ),
    "stream": (logging.ERROR, "damaged, messages in it are lost; readers pass over them"),
    "missing": (
        logging.ERROR,
        "the file is not there, messages in it are lost: stop the broker and put it back",
    ),
    "header": (
        logging.ERROR,
        "no readable header, messages in it are lost. Kept beside it as lost.{}",
    ),
}
VHOST_DIRECTORY = re.compile(r"[0-9a-f]{40}")
STREAM_DIRECTORY = re.compile(r"stream\.([0-9]+)")  # within the directory of a vhost


class Remover:
    """A thread that removes files.

    The removal of half a gigabyte takes a quarter of a second.
    """

    def __init__(self, files: WatchedFiles) -> None:
        self._files = files
        self._paths: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="remove", daemon=True).start()

    def remove(self, path: str) -> None:
        self._paths.put((path, False))

    def remove_directory(self, path: str) -> None:
        """Remove a directory if it exists and is empty."""
        self._paths.put((path, True))

    def _run(self) -> None:
        while True:
            path, is_directory = self._paths.get()
            try:
                (self._files.remove_directory if is_directory else self._files.remove)(path)
            except FileNotFoundError:
                pass  # the directory has gone with its last file
            except OSError as error:  # nobody needs the file: the next start tries again
                log.warning("%s stays: %s", path, error)


class Stores:
    """The files of a shard: a directory for each vhost, named by the hash of the vhost's name.

    This is the `Home` of stores.py.
    """

    def __init__(
        self, directory: str, config: ShardConfig, calls: Calls, ranges: Ranges | None = None
    ) -> None:
        self._directory = directory
        self._config = config
        self._files = WatchedFiles(OsFiles(), calls)
        self._streams = StreamCache(self._files)
        self._ranges = ranges
        self._remover = Remover(self._files)
        self._next_progress = 0.0
        self._opened_at = 0.0  # when the first store was opened, to be recovered
        self._recovery_s = 0.0
        # by vhost, the bytes and messages that the recovery at the start went through
        self._gone_through: dict[str, tuple[int, int]] = {}

    def _path(self, vhost: str) -> str:
        return vhost_directory(self._directory, vhost)

    def _store(self, path: str) -> SegmentStore:
        durable = self._config.durability == "fsync"
        return SegmentStore(
            path, files=self._files, segment_bytes=self._config.segment_bytes, sync=durable
        )

    def open(self, vhost: str) -> SegmentStore:
        self._opened_at = self._opened_at or time.monotonic()
        return self._store(self._path(vhost))

    def remove(self, vhost: str) -> None:
        self._remove(self._path(vhost))

    def _remove(self, path: str) -> None:
        """Remove the store of a vhost.

        Files that are not of a store stay, and so does their directory.
        """
        if not os.path.isdir(path):
            return
        try:
            self._remove_streams(path, ())
            self._store(path).delete_all()
            if not os.path.isdir(path):
                log.info("removed %s, of a vhost that is gone", path)
        except OSError as error:  # nobody needs the files: the next start tries again
            log.warning("%s, of a vhost that is gone, stays: %s", path, error)

    def keep_only(self, vhosts: Collection[str]) -> None:
        wanted = {self._path(vhost) for vhost in vhosts}
        for name in os.listdir(self._directory) if os.path.isdir(self._directory) else ():
            path = f"{self._directory}/{name}"
            if VHOST_DIRECTORY.fullmatch(name) and path not in wanted:
                self._remove(path)

    def _log_settings(self, segment_bytes: int) -> dict[str, Any]:
        durable = self._config.durability == "fsync"
        return {
            "files": self._files,
            "segment_bytes": segment_bytes,
            "sync": durable,
            "cache": self._streams,
        }

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> QueueLog:
        notify.watchdog()
        path, settings = (
            stream_directory(self._path(vhost), queue_id),
            self._log_settings(segment_bytes),
        )
        published = QueueRange(self._ranges, queue_id) if self._ranges is not None else None
        opened = StreamLog(path, remover=self._remover, published=published, **settings)
        opened.recover()
        self._tell_damage(vhost, opened)
        self._hear_damage(vhost, opened)
        return QueueLog(opened)

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None:
        self._remove_streams(self._path(vhost), queue_ids)

    def _remove_streams(self, path: str, but: Collection[int]) -> None:
        for name in os.listdir(path) if os.path.isdir(path) else ():
            found = STREAM_DIRECTORY.fullmatch(name)
            if found is not None and int(found[1]) not in but:
                StreamLog(f"{path}/{name}", **self._log_settings(SEGMENT_BYTES_MIN)).delete_all()
                log.info("removed %s/%s, of a stream that is gone", path, name)

    def recovered(self, vhost: str, store: SegmentStore) -> None:
        self._recovery_s = time.monotonic() - self._opened_at
        self._tell_damage(vhost, store)

    def recovery(self) -> dict[str, float]:
        """Return how long the recovery took at the start, and how much data it went through."""
        gone_through = self._gone_through.values()
        return {
            "recovery_seconds": self._recovery_s,
            "recovered_bytes": sum(size for size, _ in gone_through),
            "recovered_messages": sum(messages for _, messages in gone_through),
        }

    def _tell_damage(self, vhost: str, store: SegmentStore | StreamLog) -> None:
        """Log the damage that was found: file, bytes, and what became of it."""
        for one in store.damage[:DAMAGE_LOGGED_MAX]:
            self._tell_place(vhost, store.directory, one)
        if len(store.damage) > DAMAGE_LOGGED_MAX:
            log.error(
                "vhost %s: and %d more damaged places", vhost, len(store.damage) - DAMAGE_LOGGED_MAX
            )

    def _tell_place(self, vhost: str, directory: str, one: Damage) -> None:
        level, became = DAMAGE_WORDS[
            "stream" if one.offsets and one.what == "corrupt" else one.what
        ]
        where = f"{directory}/{one.file}"
        if one.stop > one.start:
            where += f", bytes {one.start} to {one.stop} ({one.stop - one.start} bytes)"
        if one.offsets is not None:
            where += f", offsets {one.offsets[0]} to {one.offsets[1] - 1}"
        log.log(level, "vhost %s: %s: %s", vhost, where, became.format(one.file.rpartition(".")[2]))

    def _hear_damage(self, vhost: str, opened: StreamLog) -> None:
        """Log damage that readers of the stream find from now on, as it is found.

        The number of lines is bounded.
        """
        told = len(opened.damage)

        def heard(damage: Damage) -> None:
            nonlocal told
            told += 1
            if told <= DAMAGE_LOGGED_MAX:
                self._tell_place(vhost, opened.directory, damage)
            elif told == DAMAGE_LOGGED_MAX + 1:
                log.error("vhost %s: %s: and more damaged places", vhost, opened.directory)

        opened.known_damage.heard = heard

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        notify.watchdog()
        now = time.monotonic()
        self._gone_through[vhost] = bytes_done, messages
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_EACH_S
            percent = 100 * bytes_done // max(bytes_total, 1)
            line = (
                f"recovering {percent} %: vhost {vhost}, "
                f"{bytes_done / 1e6:.1f} of {bytes_total / 1e6:.1f} MB, {messages:,} messages"
            )
            log.info(line)
            notify.status(line)


class Server:
    def __init__(self, config: ShardConfig) -> None:
        self.config = config
        self._directory = shard_directory(config.data_dir, config.shard)
        self._board = Board(path_of(config.runtime_dir, config.shard))
        self._context = zmq.Context()
        self._inbox = self._socket(zmq.PULL)
        self._inbox_fd = self._inbox.fileno()
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._listener: socket.socket | None = None  # for offers of lanes
        self._lanes: dict[str, Lane] = {}  # by the endpoint of the front door
        # By the number and incarnation of the front door.
        self._lanes_of: dict[tuple[int, int], Lane] = {}
        self._heard: dict[int, Lane] = {}  # by the descriptor of the bell
        self._poll = select.poll()
        self._controller = f"ipc://{config.runtime_dir}/controller.sock"
        self._inbox_told = True  # the inbox may have messages
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
        self._rings_full = 0  # counted by lanes that are closed
        self._stores = Stores(self._directory, config, self._calls, self._board)
        self.shard = Shard(
            config.shard,
            int.from_bytes(os.urandom(4), "little") >> 1 | 1,
            os.getpid(),
            self._stores,
            no_room=(DiskFull,),
            process_stats=self._process_stats,
            consumer_timeout=config.consumer_timeout_ms or None,
            timeout_closes=config.consumer_timeout_action == "close",
        )
        self._threads = SyncThreads(self.shard)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        # The queues of messages are bounded by credit, not by a count.
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        return made

    # -- run ---------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the shard until it is drained or fails; return the exit status.

        The status is 0 after a drain, 1 if the disk or the shard itself failed, and 2 if a later
        version wrote the files.
        """
        keep_warm()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._make_directory()
        self._listener = self._listen_for_lanes()
        self._inbox.bind(f"ipc://{self.config.runtime_dir}/shard-{self.config.shard}.sock")
        self._stall.start()
        signals = Signals()
        self._watch(signals)
        self._send_all([self.shard.greet(self._controller)])
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
        self._leave()
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

    def _listen_for_lanes(self) -> socket.socket | None:
        try:
            return listen(self.config.runtime_dir, self.config.shard)
        except OSError as error:
            log.warning("no lanes, all goes through ZeroMQ: %s", error)
            return None

    def _watch(self, signals: Signals) -> None:
        """Register the descriptors that a pass waits for."""
        self._lifeline = notify.lifeline_fd()
        listener = self._listener.fileno() if self._listener is not None else None
        for fd in (self._inbox_fd, listener, *self._threads.fds, signals.fd, self._lifeline):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)

    def _turn(self, signals: Signals) -> None:
        events = self._wait()
        now = _now()
        if events:
            self._look_at(events, signals, now)
        taken = self._receive(now)
        if now >= self._next_tick:
            self._tick(now)
        if now >= self.shard.upkeep.due:
            self._threads.begin_reclaim(now)
        self._threads.begin_settled_sync()
        if 0 < taken <= FEW_MESSAGES and self._threads.messages.usual_s < QUICK_SYNC_S:
            self._send_all(self.shard.turn_end(now))
            if self.shard.wants_sync:
                self._threads.sync_here()
                self._send_all(self.shard.turn_end(now))
        else:
            if self.shard.wants_sync:
                self._threads.begin_sync()
            self._send_all(self.shard.turn_end(now))
        self._threads.begin_settled_sync()

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for events, unless there is something to take in.

        The descriptor of the inbox reports changes only: a message that is there already does not
        wake the poll. An inbox that was found empty stays empty until the descriptor reports a
        change.
        """
        wait_ms = self._wait_ms()
        if wait_ms and self._inbox_told and self._inbox_speaks():
            wait_ms = 0
        for lane in self._heard.values() if wait_ms else ():
            if not lane.sleep():
                wait_ms = 0
                break
        return self._poll.poll(wait_ms)

    def _inbox_speaks(self) -> bool:
        if self._inbox_told:
            self._inbox_told = bool(self._inbox.get(zmq.EVENTS) & READABLE)  # type: ignore[operator] # the value of this option is an int
        return self._inbox_told

    def _look_at(self, events: list[tuple[int, int]], signals: Signals, now: int) -> None:
        for fd, _ in events:
            lane = self._heard.get(fd)
            if lane is not None:
                if not lane.hear():
                    self._lose_lane(lane, now)
            elif fd == self._inbox_fd:
                self._inbox_told = True
            elif self._threads.ended(fd, now):
                pass
            elif fd == signals.fd:
                if signals.take():
                    self._take_settings()
            elif fd == self._lifeline:
                log.warning("the supervisor is gone")
                self._draining = True
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept_lanes()

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

    def _receive(self, now: int, most: int = RECEIVE_BURST) -> int:
        """Take in messages; return how many were taken in."""
        taken = 0
        for lane in self._heard.values():
            taken += self._receive_near(lane, now, most)
        far = 0
        # To ask first is cheaper than to get an exception from an empty inbox.
        while self._inbox_told and far < most and self._inbox_speaks():
            self._receive_far(self._inbox.recv(AT_ONCE), now)
            far += 1
        return taken + far

    def _receive_far(self, message: bytes, now: int) -> None:
        """Take in a message that came through ZeroMQ.

        Messages that came through the ring before it are taken in first.
        """
        try:
            head = envelope.read(message)
            lane = self._lanes_of.get((head.peer, head.incarnation))
            if lane is not None:
                for before in lane.came_far(head.kind):
                    self.shard.receive(before, now)
                lane.let_go()
            if head.kind != wire.LANE:
                self.shard.receive(message, now)
        except envelope.WireError as error:
            log.error("a message was dropped: %s", error)

    def _receive_near(self, lane: Lane, now: int, most: int) -> int:
        messages = lane.take(most)
        for message in messages:
            try:
                self.shard.receive(message, now)
            except envelope.WireError as error:
                log.error("a message was dropped: %s", error)
        lane.let_go()
        return len(messages)

    # -- lanes -------------------------------------------------------------------------------------

    def _accept_lanes(self) -> None:
        assert self._listener is not None
        while True:
            try:
                offered = accept(self._listener)
            except NoLane as error:
                log.warning("a lane was not made: %s", error)
                continue
            if offered is None:
                return
            offer, bell, memory = offered
            if offer.epoch != self.shard.epoch:
                bell.close()
                continue
            who = (offer.peer, offer.incarnation, offer.epoch, self.shard.number)
            lane = Lane(bell, memory, who, self._outbox(offer.endpoint).send, at_shard=True)
            self._lanes[offer.endpoint] = self._lanes_of[
                offer.peer, offer.incarnation
            ] = self._heard[lane.fd] = lane
            self._poll.register(lane.fd, select.POLLIN)

    def _lose_lane(self, lane: Lane, now: int) -> None:
        """Take in the last messages of a front door that is gone, and forget its lane."""
        self._receive_near(lane, now, ALL)
        self._poll.unregister(lane.fd)
        del self._heard[lane.fd]
        self._rings_full += lane.turned
        for lanes in (self._lanes, self._lanes_of):
            for key in [key for key, value in lanes.items() if value is lane]:
                del lanes[key]  # type: ignore[arg-type] # each dict has keys of one type
        lane.close()

    def _send_all(self, outgoing: list[Outgoing]) -> None:
        for endpoint, message in outgoing:
            lane = self._lanes.get(endpoint)
            if lane is not None:
                lane.send(message)
            else:
                self._outbox(endpoint).send(joined(message), AT_ONCE)

    def _outbox(self, endpoint: str) -> zmq.Socket[bytes]:
        found = self._outboxes.get(endpoint)
        if found is None:
            found = self._outboxes[endpoint] = self._socket(zmq.PUSH)
            found.connect(endpoint)
        return found

    def _tick(self, now: int) -> None:
        """Do the work of each second.

        The shard tells the watchdog that it lives, checks the room on the disk, asks for a sync of
        what nobody waits for, and closes the sockets of peers that left.
        """
        self._next_tick = now + TICK_MS
        notify.watchdog()
        self.shard.set_alarm(self._alarm())
        self.shard.want_sync()
        self._look_at_gaps()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_MS
            self.shard.forget_producers(now - int(self.config.producer_idle_s * 1000))
        in_use = (
            {peer.endpoint for peer in self.shard.peers.values()}
            | {self._controller}
            | self._lanes.keys()
        )
        for endpoint in self._outboxes.keys() - in_use:
            self._outboxes.pop(endpoint).close()

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
        """Tell all peers that the disk does not answer.

        This runs in the thread that watches the disk, because the loop may be the thread that
        hangs. So it uses sockets of its own, and only the parts of a peer that never change.
        """
        notify.status(status)
        for peer in list(self.shard.peers.values()):
            outbox = self._socket(zmq.PUSH)
            outbox.connect(peer.endpoint)
            who = (peer.number, peer.incarnation, self.shard.epoch, self.shard.number)
            outbox.send(envelope.control(*who, wire.Alarm(wire.DISK_STALLED)), zmq.NOBLOCK)
            outbox.close(LINGER_MS)

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
        self._inbox_told = True
        self._receive(_now(), DRAIN_MESSAGES_MAX)
        self.shard.want_sync()
        for _ in range(2):  # the sync under way, then one for messages that came behind it
            self._threads.await_sync()
            self._threads.begin_sync()
        self._threads.await_sync()
        self._send_all(self.shard.answers())
        self.shard.close()
        log.info("drained")

    def _break_off(self, alarm: str, why: str) -> None:
        """Tell all peers and the supervisor that the shard failed, then save what can be saved.

        The report comes first, because the rest may take long or fail again.
        """
        notify.failing(f"{alarm}: {why}")
        self._send_all(self.shard.break_off(alarm))
        try:
            self._threads.await_sync(LAST_SYNC_S)
        except Exception as error:
            log.error("and the sync under way: %r", error)
        for trouble in self.shard.abandon():
            log.error("not closed well: %r", trouble)

    def _leave(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close(LINGER_MS)
        self._inbox.close(0)
        self._context.term()

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
            "ring_bytes": sum(lane.waiting_bytes() for lane in self._heard.values()),
            "ring_full": self._rings_full + sum(lane.turned for lane in self._heard.values()),
            **self._stores.recovery(),
            **self._threads.messages.took_us.report("sync_us"),
        }


def _now() -> int:
    """Return milliseconds since the epoch.

    The front doors use the same clock, because messages expire by it.
    """
    return time.time_ns() // 1_000_000
