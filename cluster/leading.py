"""The leader of copies: it carries out what `rules.Leader` decides.

`LeaderOfCopies` runs in an event loop. The threads that write to its `ReplicatedFiles` must be
others than the thread of this loop, because a sync may wait for what only the loop does.

A thread that syncs sends what there is to the followers itself, and hears their answers, where the
end of their stream is shared with threads (shared_ends.py). The loop does the same for all others,
and for the rest: it connects, compares, proposes, and looks at the time. Whoever asks the rules,
writes to a shared end or hears it, holds the lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from shardmq.cluster import frames, rules
from shardmq.cluster.comparing import CATCH_UP_BYTES_S, Comparing
from shardmq.cluster.compression import PLAIN
from shardmq.cluster.frame_streams import FrameStream
from shardmq.cluster.loop_thread import LoopThread
from shardmq.cluster.operations import Belongs, OperationLog
from shardmq.cluster.record_store import RecordAway, RecordStore
from shardmq.cluster.replicated_files import Confirmations, ReplicatedFiles, SyncNews
from shardmq.cluster.rules import Effects, Lead, Leader, Position, Record, Settings
from shardmq.cluster.sending import Sender, Session
from shardmq.cluster.shared_ends import SharedEnd
from shardmq.shardd.store.files import Files

# Operations are sent with the next sync, at the next tick, or when there are so many of them.
UNSENT_BYTES_MAX: Final = 2 << 20
# An orderly hand-over is begun only if the record can be read within this time.
RECORD_S_MAX: Final = 1.0

log = logging.getLogger(__name__)


class LeaderOfCopies:
    """A node that leads, from `rules.Lead` until it steps down.

    node, life: as the follower had them that became this leader.
    lead: the effect with which the follower ended.
    operations: the operations that the follower had.
    files, root, belongs: the disk, the directory of the copy, and which paths are part of it.
    waits: called each second by a thread whose sync waits for other nodes.
    catch_up_bytes_s: how fast pieces of files are sent to a follower that is compared.
    compression: the method for followers that understand it.
    lock: that of the shared ends of the streams.

    replicated: the `Files` to write to, from other threads.
    sender: has how much was sent.
    """

    def __init__(
        self,
        node: str,
        life: int,
        lead: Lead,
        operations: OperationLog,
        store: RecordStore,
        files: Files,
        root: str,
        belongs: Belongs = lambda path: True,
        settings: Settings | None = None,
        catch_up_bytes_s: int = CATCH_UP_BYTES_S,
        waits: Callable[[], None] = lambda: None,
        compression: str = PLAIN,
        clock: Callable[[], float] = time.monotonic,
        lock: threading.RLock | None = None,
    ) -> None:
        self.lock = lock or threading.RLock()
        self._method = compression
        self.sender = Sender(operations, compression, self.lock)
        self._clock = clock
        self._settings = settings or Settings()
        self._store = store
        self._operations = operations
        self._rules = Leader(
            node, life, lead.record, lead.revision, lead.base, self._settings, clock()
        )
        operations.begin_term(lead.record.term, lead.base is not None)
        self._confirmations = Confirmations(waits)
        self._news: deque[int] = deque()  # syncs that have begun
        self._unsent_bytes = 0
        self._is_woken = False
        self._is_busy = False  # threads sync, and hear what comes
        self._loop: LoopThread | None = None  # None: before `run`
        self._why = ""  # it steps down
        self._ended: asyncio.Future[str] | None = None
        self._sessions: dict[str, Session] = {}
        self._ends: tuple[SharedEnd, ...] = ()  # of the sessions
        self._tasks: set[asyncio.Task[None]] = set()
        self.replicated = ReplicatedFiles(
            files,
            root,
            operations,
            self._confirmations,
            SyncNews(self._appended, self._begun, self._done),
            belongs,
        )
        self._comparing = Comparing(files, self.replicated, self.sender, catch_up_bytes_s)
        self._done(self.replicated.sync_all_begun())  # the follower has synced all files

    @property
    def record(self) -> Record:
        """Return the record as this node knows it."""
        return self._rules.record

    @property
    def confirmed(self) -> int:
        return self._rules.confirmed

    def lag(self) -> int:
        """Return how many bytes the in-sync nodes have at most not answered yet."""
        return self._operations.bytes_after(Position(self._rules.term, self._rules.confirmed))

    def lag_s(self) -> float:
        """Return for how long the slowest of the in-sync nodes has had a sync to answer."""
        now, rules_of = self._clock(), self._rules
        with self.lock:
            return max((rules_of.lag_s(node, now) for node in rules_of.members()), default=0.0)

    def waits_for(self) -> rules.Wait | None:
        """Return what the oldest sync that is not confirmed waits for."""
        with self.lock:
            return self._rules.waits_for()

    # -- the life ----------------------------------------------------------------------------------

    async def run(self) -> str:
        """Lead until this process has to end; return why."""
        if self._rules.has_stepped_down:
            return self._why
        self._loop = LoopThread()
        self._ended = asyncio.get_running_loop().create_future()
        self._is_woken = True
        self._step()
        ticking = asyncio.create_task(self._tick())
        ticking.add_done_callback(self._worked)
        try:
            return await self._ended
        finally:
            ticking.cancel()
            self._confirmations.depose("this node leads no more")
            for task in self._tasks:
                task.cancel()
            for session in list(self._sessions.values()):
                session.close()
            self._comparing.close()
            self.sender.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s / 2)  # late ones are missed soon
            with self.lock:
                self._step()
                is_busy, self._is_busy = self._is_busy, False
                for end in self._ends:
                    end.hear()
                    end.watch(not is_busy)
                self._act(self._rules.tick(self._clock()))

    def recorded(self, record: Record | None, revision: int) -> None:
        """Take the record from a watch; in the thread of the loop."""
        with self.lock:
            self._act(self._rules.recorded(record, revision, self._clock()))

    def copies_are(self, count: int, min_in_sync: int | None = None) -> None:
        """Take how many nodes have a copy or are to have one; in the thread of the loop.

        min_in_sync: that of the shard; None: that of the settings.
        """
        with self.lock:
            self._act(self._rules.copies_are(count, self._clock(), min_in_sync))

    async def may_hand_over(self, node: str) -> bool:
        """Return whether a member can lead and confirm at once; in the thread of the loop.

        The record is read for that. While etcd does not answer, a leader that stops has no heir,
        and the shard would be down until etcd is back.
        """
        with self.lock:
            if not rules.may_leave(self._rules, node, self._clock()):
                return False
        try:
            async with asyncio.timeout(RECORD_S_MAX):
                record, revision = await self._store.read()
        except (RecordAway, TimeoutError) as error:
            log.info("copies: the lead stays here, because the record cannot be read: %s", error)
            return False
        self.recorded(record, revision)
        with self.lock:
            leads = not self._rules.has_stepped_down
            return leads and rules.may_leave(self._rules, node, self._clock())

    def hand_over(self, node: str) -> None:
        """Give the lead to a member; nobody writes any more. Then `run` returns."""
        with self.lock:
            self._step()
            self._act(self._rules.hand_over(node, self._clock()))

    # -- from the threads that write ---------------------------------------------------------------

    def _appended(self, number: int, size: int) -> None:
        """Note an operation; wake the loop for many bytes that no sync sends."""
        if number and self._loop is not None and self._loop.is_present:
            raise RuntimeError("a sync in the thread of the copies would wait for itself")
        if number:
            self._news.append(number)
        self._unsent_bytes += size
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self._unsent_bytes = 0
            self._wake()

    def _begun(self) -> None:
        """Send what there is, in the thread of a sync."""
        self._unsent_bytes = 0
        with self.lock:
            self._take_news()
            for session in self._sessions.values():
                if session.stream.shared is not None:
                    self.sender.has_news(session)
                else:
                    self._wake()

    def _done(self, number: int) -> None:
        """Note the end of an own sync."""
        with self.lock:
            self._is_busy = True
            self._take_news()
            if effects := self._rules.sync_done(number):
                self._act(effects)

    def _wake(self) -> None:
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            self._loop.call_soon(self._step)  # if it has ended, whoever waits has been told

    def _step(self) -> None:
        """Take the news of the threads that write, and let the sessions send what there is."""
        with self.lock:
            self._is_woken = False
            self._take_news()
            for session in self._sessions.values():
                self.sender.has_news(session)

    def _take_news(self) -> None:
        while self._news:
            self._rules.sync_begun(self._news.popleft(), self._clock())

    # -- followers ---------------------------------------------------------------------------------

    async def serve(self, stream: FrameStream) -> None:
        """Serve a follower's connection until it ends. The caller has checked who it is."""
        session: Session | None = None
        try:
            async with asyncio.timeout(self._settings.lag_s):
                hello = frames.from_follower(await stream.first())
            if not isinstance(hello, rules.Hello):
                raise frames.BadFrame("no hello")
            with self.lock:
                session = self._greet(hello, stream)
            if session is not None:
                await stream.take_all(partial(self._hear, session))
        except (OSError, EOFError, TimeoutError) as error:
            log.info("a follower's connection has ended: %s", error)
        except frames.BadFrame as error:
            log.error("a follower's connection is closed: %s", error)
        finally:
            with self.lock:
                if session is None:
                    stream.close()
                else:
                    session.close()
                    if self._sessions.get(session.node) is session:
                        del self._sessions[session.node]
                        self._sessions_changed()
                        now = self._clock()
                        self._act(self._rules.disconnected(session.node, session.number, now))

    def _greet(self, hello: rules.Hello, stream: FrameStream) -> Session | None:
        """Begin a session; None if there is a newer one."""
        known = self._sessions.get(hello.node)
        if self._rules.has_stepped_down or (known and known.number >= hello.session):
            return None
        if known is not None:
            known.close()
        session = Session(hello.node, hello.session, self._method_for(hello), stream)
        self._sessions[hello.node] = session
        self._sessions_changed()
        oldest, last = self._operations.oldest, self._operations.last.number
        self._act(self._rules.greeted(hello, oldest, last, self._clock()))
        return session

    def _sessions_changed(self) -> None:
        ends = [session.stream.shared for session in self._sessions.values()]
        self._confirmations.heard = self._ends = tuple(end for end in ends if end is not None)

    def _hear(self, session: Session, frame: memoryview) -> None:
        """Take a frame of a follower, in any thread."""
        message = frames.from_follower(frame)
        if isinstance(message, rules.Ack | rules.Refusal | rules.Leaving):
            with self.lock:
                self._take_news()
                self._act(self._rules.heard(session.node, message, self._clock()))
        elif isinstance(message, frames.Want):
            self._in_loop(session.wants, message)

    def _method_for(self, hello: rules.Hello) -> str:
        """Return by which method data are compressed for a follower; "none" if they are not."""
        if self._method == PLAIN or self._method in hello.methods:
            return self._method
        log.warning("copies: %s takes nothing compressed by %s", hello.node, self._method)
        return PLAIN

    def _act(self, effects: Effects) -> None:
        """Carry out what the rules have decided. Only the thread of the loop does all of it."""
        for effect in effects:
            if isinstance(effect, rules.Confirm):
                self._confirmations.confirm(effect.number)
            else:
                self._in_loop(self._carry_out, effect)

    def _in_loop(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call this in the thread of the loop, at once if it is the present one."""
        if self._loop is None:
            act(*arguments)
        else:
            self._loop.call(act, *arguments)

    def _carry_out(self, effect: rules.Effect) -> None:
        with self.lock:
            match effect:
                case rules.Send():
                    session = self._sessions.get(effect.node)
                    if session is not None and session.number == effect.message.session:
                        session.send(effect.message)  # type: ignore[arg-type]
                case rules.Propose():
                    self._spawn(self._propose(effect))
                case rules.Read():
                    self._spawn(self._read())
                case rules.Stream() | rules.Snapshot():
                    session = self._sessions.get(effect.node)
                    if session is None or session.number != effect.session:
                        return  # it has ended before the loop came to this
                    if isinstance(effect, rules.Stream):
                        session.after = effect.after
                        work = self.sender.stream(session)
                    else:
                        work = self._comparing.bring_up(session)
                    session.begin(work)
                case rules.Cut():
                    log.warning("copies: %s is cut off: %s", effect.node, effect.why)
                    if (session := self._sessions.pop(effect.node, None)) is not None:
                        session.close()
                        self._sessions_changed()
                case rules.StepDown():
                    log.warning("copies: this node leads no more: %s", effect.why)
                    self._why = effect.why
                    self._confirmations.depose(effect.why)
                    if self._ended is not None and not self._ended.done():
                        self._ended.set_result(effect.why)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        """End the lead with a task that failed: the rules would wait for its outcome for ever."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._confirmations.depose(f"a task has failed: {error}")
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _propose(self, effect: rules.Propose) -> None:
        outcome = await self._store.swap(effect.record, effect.revision)
        with self.lock:
            self._act(self._rules.swapped(outcome, self._clock()))

    async def _read(self) -> None:
        try:
            record, revision = await self._store.read()
        except RecordAway:
            return  # the rules ask again
        self.recorded(record, revision)
