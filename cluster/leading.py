"""The leader of copies: it carries out what `rules.Leader` decides.

`LeaderOfCopies` runs in an event loop. The threads that write to its `ReplicatedFiles` must be
others than the thread of this loop, because a sync waits until the loop has heard the followers.
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
from shardmq.cluster.operations import Belongs, OperationLog
from shardmq.cluster.record_store import RecordAway, RecordStore
from shardmq.cluster.replicated_files import Confirmations, ReplicatedFiles, SyncNews
from shardmq.cluster.rules import Effects, Lead, Leader, Position, Record, Settings
from shardmq.cluster.sending import Sender, Session
from shardmq.shardd.store.files import Files

# Operations are sent with the next sync, at the next tick, or when there are so many of them.
UNSENT_BYTES_MAX: Final = 64 << 10
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
    ) -> None:
        self._method = compression
        self.sender = Sender(operations, compression)
        self._clock = clock
        self._settings = settings or Settings()
        self._store = store
        self._operations = operations
        self._rules = Leader(
            node, life, lead.record, lead.revision, lead.base, self._settings, clock()
        )
        operations.begin_term(lead.record.term, lead.base is not None)
        self._confirmations = Confirmations(waits)
        self._news: deque[tuple[int, bool]] = deque()  # number of a sync, and whether it is done
        self._unsent_bytes = 0
        self._answered = 0  # no sync up to this number waits for another node
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._why = ""  # it steps down
        self._ended: asyncio.Future[str] | None = None
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.replicated = ReplicatedFiles(
            files,
            root,
            operations,
            self._confirmations,
            SyncNews(self._appended, self._done),
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
        return max((rules_of.lag_s(node, now) for node in rules_of.members()), default=0.0)

    def waits_for(self) -> rules.Wait | None:
        """Return what the oldest sync that is not confirmed waits for."""
        return self._rules.waits_for()

    # -- the life ----------------------------------------------------------------------------------

    async def run(self) -> str:
        """Lead until this process has to end; return why."""
        if self._rules.has_stepped_down:
            return self._why
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._ended = self._loop.create_future()
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
            self._step()
            self._act(self._rules.tick(self._clock()))

    def recorded(self, record: Record | None, revision: int) -> None:
        """Take the record from a watch; in the thread of the loop."""
        self._act(self._rules.recorded(record, revision, self._clock()))

    def copies_are(self, count: int, min_in_sync: int | None = None) -> None:
        """Take how many nodes have a copy or are to have one; in the thread of the loop.

        min_in_sync: that of the shard; None: that of the settings.
        """
        self._act(self._rules.copies_are(count, self._clock(), min_in_sync))

    async def may_hand_over(self, node: str) -> bool:
        """Return whether a member can lead and confirm at once; in the thread of the loop.

        The record is read for that. While etcd does not answer, a leader that stops has no heir,
        and the shard would be down until etcd is back.
        """
        if not rules.may_leave(self._rules, node, self._clock()):
            return False
        try:
            async with asyncio.timeout(RECORD_S_MAX):
                record, revision = await self._store.read()
        except (RecordAway, TimeoutError) as error:
            log.info("copies: the lead stays here, because the record cannot be read: %s", error)
            return False
        self.recorded(record, revision)
        now, leads = self._clock(), not self._rules.has_stepped_down
        return leads and rules.may_leave(self._rules, node, now)

    def hand_over(self, node: str) -> None:
        """Give the lead to a member; nobody writes any more. Then `run` returns."""
        self._step()
        self._act(self._rules.hand_over(node, self._clock()))

    # -- from the threads that write ---------------------------------------------------------------

    def _appended(self, number: int, size: int) -> None:
        """Wake the loop for a sync, or for many bytes: each turn of it costs the other threads."""
        if threading.get_ident() == self._thread and number:
            raise RuntimeError("a sync in the thread of the copies would wait for itself")
        if number:
            self._news.append((number, False))
        self._unsent_bytes += size
        if number or self._unsent_bytes > UNSENT_BYTES_MAX:
            self._unsent_bytes = 0
            self._wake()

    def _done(self, number: int) -> None:
        """Note the end of an own sync; the loop hears of it at once if nothing else is waited for.

        Otherwise it does when a follower answers, or at its next tick.
        """
        self._news.append((number, True))
        if number <= self._answered:
            self._wake()

    def _wake(self) -> None:
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._step)
            except RuntimeError:
                pass  # the loop has ended, and whoever waits has been told

    def _step(self) -> None:
        """Take the news of the threads that write, and let the sessions send what there is."""
        self._is_woken = False
        self._take_news()
        for session in self._sessions.values():
            self.sender.has_news(session)

    def _take_news(self) -> None:
        now = self._clock()
        while self._news:
            number, is_done = self._news.popleft()
            if is_done:
                if effects := self._rules.sync_done(number):
                    self._act(effects)
            else:
                self._rules.sync_begun(number, now)

    # -- followers ---------------------------------------------------------------------------------

    async def serve(self, stream: FrameStream) -> None:
        """Serve a follower's connection until it ends. The caller has checked who it is."""
        session: Session | None = None
        try:
            async with asyncio.timeout(self._settings.lag_s):
                hello = frames.from_follower(await stream.first())
            if not isinstance(hello, rules.Hello):
                raise frames.BadFrame("no hello")
            known = self._sessions.get(hello.node)
            if self._rules.has_stepped_down or (known and known.number >= hello.session):
                return
            if known is not None:
                known.close()
            method = self._method_for(hello)
            session = Session(hello.node, hello.session, method, stream)
            self._sessions[hello.node] = session
            oldest, last = self._operations.oldest, self._operations.last.number
            self._act(self._rules.greeted(hello, oldest, last, self._clock()))
            await stream.take_all(partial(self._hear, session))
        except (OSError, EOFError, TimeoutError) as error:
            log.info("a follower's connection has ended: %s", error)
        except frames.BadFrame as error:
            log.error("a follower's connection is closed: %s", error)
        finally:
            if session is None:
                stream.close()
            else:
                session.close()
                if self._sessions.get(session.node) is session:
                    del self._sessions[session.node]
                    self._act(self._rules.disconnected(session.node, session.number, self._clock()))

    def _hear(self, session: Session, frame: memoryview) -> None:
        """Take a frame of a follower."""
        message = frames.from_follower(frame)
        if isinstance(message, rules.Ack | rules.Refusal):
            self._take_news()
            self._act(self._rules.heard(session.node, message, self._clock()))
        elif isinstance(message, frames.Want) and not session.wanted.done():
            session.wanted.set_result(message)

    def _method_for(self, hello: rules.Hello) -> str:
        """Return by which method data are compressed for a follower; "none" if they are not."""
        if self._method == PLAIN or self._method in hello.methods:
            return self._method
        log.warning("copies: %s takes nothing compressed by %s", hello.node, self._method)
        return PLAIN

    def _act(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case rules.Send():
                    session = self._sessions.get(effect.node)
                    if session is not None and session.number == effect.message.session:
                        session.send(effect.message)  # type: ignore[arg-type]
                case rules.Confirm():
                    self._confirmations.confirm(effect.number)
                case rules.Propose():
                    self._spawn(self._propose(effect))
                case rules.Read():
                    self._spawn(self._read())
                case rules.Stream():
                    session = self._sessions[effect.node]
                    session.after = effect.after
                    session.tasks.append(asyncio.create_task(self.sender.stream(session)))
                case rules.Snapshot():
                    session = self._sessions[effect.node]
                    session.tasks.append(asyncio.create_task(self._comparing.bring_up(session)))
                case rules.Cut():
                    log.warning("copies: %s is cut off: %s", effect.node, effect.why)
                    if (session := self._sessions.pop(effect.node, None)) is not None:
                        session.close()
                case rules.StepDown():
                    log.warning("copies: this node leads no more: %s", effect.why)
                    self._why = effect.why
                    self._confirmations.depose(effect.why)
                    if self._ended is not None and not self._ended.done():
                        self._ended.set_result(effect.why)
        if (answered := self._rules.answered) != self._answered:
            self._answered = answered
            if self._news:  # the end of a sync may have come while the number was still the old one
                self._wake()

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
        self._act(self._rules.swapped(outcome, self._clock()))

    async def _read(self) -> None:
        try:
            record, revision = await self._store.read()
        except RecordAway:
            return  # the rules ask again
        self.recorded(record, revision)
