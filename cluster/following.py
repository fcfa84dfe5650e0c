"""The follower of copies: it carries out what `rules.Follower` decides, until it leads.

All inputs of the rules come from one queue and are carried out one after the other, work on the
disk included. So the position is exact whenever the rules decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from shardmq.cluster import compression, frames, rules
from shardmq.cluster.compression import BadCompression
from shardmq.cluster.frame_streams import FrameStream
from shardmq.cluster.operations import (
    SYNCS,
    CopiedDirectory,
    Kind,
    NoPath,
    Numbered,
    Operation,
    OperationLog,
)
from shardmq.cluster.record_store import RecordAway, RecordStore
from shardmq.cluster.rules import (
    Effects,
    Follower,
    Held,
    Lead,
    Position,
    Record,
    Settings,
    Swap,
)
from shardmq.shardd.store.files import Files, read_if_there, replace_file

FRAMES_WAITING_MAX: Final = 16
# How long a process that ends waits until it can tell that to the leader.
LEAVE_S_MAX: Final = 0.5
# More operations than a sync usually has, and a sync of all files, are left to another thread.
APPLIED_AT_ONCE_MAX: Final = 64
# Each process of a node is a life. Their numbers count quarters of a second since 2025.
LIFE_NS: Final = 250_000_000
LIVES_BEGAN_NS: Final = 1_735_689_600 * 1_000_000_000

R = TypeVar("R")

log = logging.getLogger(__name__)


class NotLeading(Exception):
    """The node that was asked says that it does not lead, and which life it is in.

    If the record has this life, the node is about to lead, or about to end.
    """

    def __init__(self, life: int) -> None:
        super().__init__(f"life {life} does not lead")
        self.life = life


Connect = Callable[[str], Awaitable[FrameStream]]


def is_soon_applied(changes: list[Operation]) -> bool:
    """Return whether these operations may be applied where something else waits meanwhile."""
    is_long = any(change.kind is Kind.SYNC_ALL for change in changes)
    return len(changes) <= APPLIED_AT_ONCE_MAX and not is_long


def new_life() -> int:
    """Return the number of a process that starts now. It is higher than that of the one before."""
    return (time.time_ns() - LIVES_BEGAN_NS) // LIFE_NS


class HeldFile:
    """`Held` in a file beside the copy; the file does not belong to the copy."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path

    def read(self) -> Held:
        """Return it; of a node without a copy, what is empty. Raises OSError or ValueError."""
        data = read_if_there(self._files, self._path)
        return Held() if not data else msgspec.json.decode(data, type=Held)

    def write(self, held: Held) -> None:
        """Return when it is on stable storage."""
        new = f"{self._path}.new"
        replace_file(self._files, self._path, new, msgspec.json.encode(held) + b"\n", sync=True)
        self._files.sync_directory(self._path.rpartition("/")[0])


class Connection:
    """A stream to a leader. `waiting` counts its messages that are not taken yet."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self.waiting = 0
        self.reading: asyncio.Task[None] | None = None

    def came(self) -> None:
        """Count a message that waits; too many of them hold the stream."""
        self.waiting += 1
        if self.waiting >= FRAMES_WAITING_MAX:
            self.stream.hold()

    def took(self) -> None:
        """Count a message that has been taken."""
        self.waiting -= 1
        # Half of them at once: each time that a stream goes on, it moves what its buffer has left.
        if self.waiting == FRAMES_WAITING_MAX // 2:
            self.stream.go_on()

    def close(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
        self.stream.close()


class Recorded(NamedTuple):
    record: Record | None
    revision: int


class Gone(NamedTuple):
    term: int


class Swapped(NamedTuple):
    outcome: int | Swap


class Attempt:
    """A connection to a leader that is being opened by `task`."""

    def __init__(self, leader: str) -> None:
        self.leader = leader
        self.task: asyncio.Task[None] | None = None


class Connected(NamedTuple):
    attempt: Attempt
    connection: Connection | None


class Came(NamedTuple):
    connection: Connection
    message: frames.FromLeader | None  # None: it has ended


class Promised(NamedTuple):
    term: int
    done: asyncio.Future[None]


class Left(NamedTuple):
    done: asyncio.Future[None]


Event = Recorded | Gone | Swapped | Connected | Came | Promised | Left


class FollowerOfCopies:
    """A node that does not lead, and keeps a copy.

    node, life: its name, and the number of its process, which rises.
    held: where it notes what its copy is.
    directory, operations: the copy; the last operations, for those who follow this node later.
    connect: opens a stream to a node; raises OSError, or NotLeading if the node says so.
    founds: the name of a new store, if this node may make the first record; else "".
    is_alone: nothing else needs the thread of the loop while the disk works, so operations are
        applied in this thread. To wake another one for each of them takes longer than the work.
    """

    def __init__(
        self,
        node: str,
        life: int,
        held: HeldFile,
        directory: CopiedDirectory,
        operations: OperationLog,
        store: RecordStore,
        connect: Connect,
        settings: Settings | None = None,
        founds: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        is_alone: bool = False,
    ) -> None:
        self._settings = settings or Settings()
        self._clock = clock
        self._is_alone = is_alone
        self._held = held
        self._directory = directory
        self._operations = operations
        self._store = store
        self._connect = connect
        self._rules = Follower(node, life, held.read(), self._settings, founds)
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()  # None: a tick is due
        self._connection: Connection | None = None
        self._attempt: Attempt | None = None
        self._tried = ""  # the leader of the last attempt, which is tried again at _connect_at
        self._connect_at = 0.0
        self._listed_at: Position | None = None  # of the comparison that is under way
        self._whole_at: int | None = None  # where the copy is whole, after a comparison
        self._lead: Lead | None = None
        self._leaves = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods = compression.methods()
        self._disk = ThreadPoolExecutor(1, "copy")

    @property
    def follower(self) -> Follower:
        """Return the rules, to look at their record, held, position and is_member."""
        return self._rules

    # -- from others in the same loop --------------------------------------------------------------

    def recorded(self, record: Record | None, revision: int) -> None:
        """Take the record from a watch."""
        self._events.put_nowait(Recorded(record, revision))

    def leader_gone(self, term: int) -> None:
        """Take a sign that the leader of this term is gone, such as the end of its lease."""
        self._events.put_nowait(Gone(term))

    async def promise(self, term: int) -> None:
        """Return when no leader of a lower term is listened to any more."""
        done = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Promised(term, done))
        await done

    async def leave(self) -> None:
        """Tell the leader that this process ends, and follow nobody any more.

        A disk that hangs holds that up for LEAVE_S_MAX at most.
        """
        done = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Left(done))
        await asyncio.wait((done,), timeout=LEAVE_S_MAX)

    # -- the life ----------------------------------------------------------------------------------

    async def run(self) -> Lead:
        """Follow until this node leads. Then its files are synced, and nothing else uses them."""
        loop = asyncio.get_running_loop()
        tick_at = read_at = self._clock()
        is_tick_due = False
        ticking: asyncio.Handle = loop.call_soon(self._events.put_nowait, None)
        try:
            while self._lead is None:
                event = await self._events.get()
                now = self._clock()
                if event is None:
                    is_tick_due = True
                else:
                    await self._take(event, now)
                # What has come is heard before anybody is called silent.
                is_late = now >= tick_at + self._settings.lag_s
                if self._lead is None and is_tick_due and (self._events.empty() or is_late):
                    is_tick_due = False
                    # With a connection the leader's pings say most of what there is to know.
                    settings, is_connected = self._settings, self._connection is not None
                    wait_s = (settings.heartbeat_s if is_connected else settings.retry_s) / 2
                    tick_at = now + wait_s
                    ticking = loop.call_later(wait_s, self._events.put_nowait, None)
                    if self._connection is None and now >= read_at:
                        read_at = now + 2 * self._settings.retry_s
                        self._spawn(self._read())
                    await self._act(self._rules.tick(now))
                self._begin_connection(now)
            await self._work(self._directory.sync_all)
            return self._lead
        finally:
            ticking.cancel()
            for task in self._tasks:
                task.cancel()
            self._hang_up()
            await self._work(self._directory.close)
            self._disk.shutdown(wait=False)

    async def _take(self, event: Event, now: float) -> None:
        match event:
            case Recorded():
                await self._act(self._rules.recorded(event.record, event.revision, now))
            case Gone():
                self._rules.leader_gone(event.term, now)
            case Swapped():
                await self._act(self._rules.swapped(event.outcome, now))
            case Promised():
                await self._act(self._rules.promise(event.term))
                if not event.done.done():
                    event.done.set_result(None)
            case Left():
                self._leaves = True
                await self._act(self._rules.leave())
                if not event.done.done():
                    event.done.set_result(None)
            case Connected():
                await self._take_connection(event, now)
            case Came():
                event.connection.took()
                if event.connection is not self._connection:
                    return
                if event.message is None:
                    self._hang_up()
                    self._rules.disconnected()
                    return
                try:
                    await self._take_message(event.message, now)
                except (OSError, NoPath) as error:
                    log.error("copies: an operation cannot be done here: %s", error)
                    await self._act(self._rules.failed(str(error)))

    # -- connections -------------------------------------------------------------------------------

    def _begin_connection(self, now: float) -> None:
        """Connect to the leader, unless that is under way or was tried a moment ago.

        An attempt to reach a former leader is given up at once. Its node may be one that ends: the
        port is still open, and nobody answers.
        """
        leader = "" if self._leaves else self._rules.leader
        if self._attempt is not None and self._attempt.leader != leader:
            assert self._attempt.task is not None
            self._attempt.task.cancel()
            self._attempt = None
        if not leader or self._connection or self._attempt:
            return
        if leader == self._tried and now < self._connect_at:
            return
        self._tried, self._connect_at = leader, now + self._settings.retry_s
        assert self._rules.record is not None
        self._attempt = Attempt(leader)
        self._attempt.task = self._spawn(self._open(self._attempt, self._rules.record))

    async def _open(self, attempt: Attempt, record: Record) -> None:
        connection = None
        try:
            async with asyncio.timeout(self._settings.lag_s):
                connection = Connection(await self._connect(attempt.leader))
        except NotLeading as error:
            if error.life != record.life:
                self.leader_gone(record.term)
        except (OSError, TimeoutError) as error:
            log.info("copies: %s cannot be reached: %s", attempt.leader, error)
        self._events.put_nowait(Connected(attempt, connection))

    async def _take_connection(self, event: Connected, now: float) -> None:
        is_wanted = event.attempt is self._attempt
        if is_wanted:
            self._attempt = None
        if event.connection is None:
            return
        is_wanted = is_wanted and event.attempt.leader == self._rules.leader
        effects = self._rules.connected(now) if is_wanted else []
        if not effects:
            event.connection.close()
            return
        self._connection = event.connection
        event.connection.reading = asyncio.create_task(self._receive(event.connection))
        await self._act(effects)

    async def _receive(self, connection: Connection) -> None:
        try:
            await connection.stream.take_all(partial(self._came, connection))
        except (OSError, EOFError) as error:
            log.info("copies: the connection to the leader has ended: %s", error)
        except frames.BadFrame as error:
            log.error("copies: the connection to the leader is closed: %s", error)
        except BadCompression as error:
            # The leader would send the same again.
            log.error("copies: from now on nothing is to be compressed: %s", error)
            self._methods = []
        self._events.put_nowait(Came(connection, None))

    def _came(self, connection: Connection, frame: memoryview) -> None:
        """Let a message wait for its turn; too many of them hold the stream."""
        message = frames.from_leader(frame)
        if isinstance(message, rules.Ping) and self._rules.is_comparing(message.session):
            # A comparison may take minutes, in which nothing else is answered. Its pings take no
            # place among what waits, or a few of them would hold the stream.
            ack = rules.Ack(message.session, message.term, -1)
            connection.stream.write(frames.encode(ack))
            self._rules.was_busy(self._clock())
            return
        connection.came()
        self._events.put_nowait(Came(connection, message))

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- messages ----------------------------------------------------------------------------------

    async def _take_message(self, message: frames.FromLeader, now: float) -> None:
        match message:
            case rules.Continue() | rules.Compare() | rules.Ping():
                await self._act(self._rules.heard(message, now))
            case frames.Operations():
                await self._take_operations(message, now)
            case frames.Listing() if self._rules.is_comparing(message.session):
                self._listed_at = message.at
                compare = self._directory.compare
                pieces = await self._work(compare, message.folders, message.files)
                self._send(frames.Want(message.session, pieces))
            case frames.Piece() if self._rules.is_comparing(message.session):
                write = self._directory.write_piece
                await self._work(write, message.path, message.position, message.data)
            case frames.Compared():
                await self._end_comparison(message)

    async def _take_operations(self, message: frames.Operations, now: float) -> None:
        known = self._rules.operations(message.session, message.at, len(message.operations), now)
        if not isinstance(known, int):
            await self._act(known)
            return
        changes = message.operations[known:]
        if not changes:
            return
        term, first = message.at.term, message.at.number + known
        if self._is_alone and is_soon_applied(changes):
            self._apply(term, first, changes)
            self._rules.was_busy(self._clock())
        else:
            await self._work(self._apply, term, first, changes)
        await self._act(self._rules.applied(Position(term, first + len(changes) - 1)))
        syncs = [number for number, change in enumerate(changes, first) if change.kind in SYNCS]
        if syncs:
            synced = Position(term, syncs[-1])
            await self._act(self._rules.synced(self._rules.held.copy, synced))
        await self._become_whole()

    def _apply(self, term: int, first: int, changes: list[Operation]) -> None:
        for number, change in enumerate(changes, first):
            self._directory.apply(change)
            self._operations.take(Numbered(Position(term, number), change))

    async def _end_comparison(self, message: frames.Compared) -> None:
        at, self._listed_at = self._listed_at, None
        if at is not None and self._rules.compared(message.session, at, message.whole_at):
            self._operations.begin(at)
            self._whole_at = message.whole_at
            await self._become_whole()

    async def _become_whole(self) -> None:
        """Sync all files when the copy has all that its comparison may have brought."""
        position = self._rules.position
        if self._whole_at is None or position is None or position.number < self._whole_at:
            return
        await self._work(self._directory.sync_all)
        self._whole_at = None
        copy = self._rules.held.copy
        await self._act(self._rules.synced(copy, position, is_of_all=True))

    # -- effects -----------------------------------------------------------------------------------

    async def _act(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case rules.Send():
                    self._send(effect.message)  # type: ignore[arg-type]
                case rules.Keep():
                    await self._work(self._held.write, effect.held)
                case rules.Begin():
                    self._whole_at = self._listed_at = None
                    if effect.aside:
                        await self._work(self._directory.put_aside, effect.aside)
                case rules.Cut():
                    log.info("copies: the session with %s ends: %s", effect.node, effect.why)
                    self._hang_up()
                case rules.Propose():
                    self._spawn(self._propose(effect))
                case rules.Read():
                    self._spawn(self._read())
                case rules.Lead():
                    self._lead = effect

    def _send(self, message: frames.FromFollower) -> None:
        if isinstance(message, rules.Hello):
            message = msgspec.structs.replace(message, methods=self._methods)
        if self._connection is not None and not self._connection.stream.is_closing:
            self._connection.stream.write(frames.encode(message))

    async def _propose(self, effect: rules.Propose) -> None:
        self._events.put_nowait(Swapped(await self._store.swap(effect.record, effect.revision)))

    async def _read(self) -> None:
        try:
            self.recorded(*await self._store.read())
        except RecordAway as error:
            log.info("copies: the record cannot be read: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self, act: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._disk, act, *arguments)
