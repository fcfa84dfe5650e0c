"""The work of each channel of a connection, in the order it arrived.

What can be done at once is done at once. A method that has to ask another process makes its
channel *busy*, and what comes behind it on that channel queues up (`Channel.work`) until the answer
is there. Other channels go on. Declares, binds and deletes may overlap, as topology/pipeline.py
says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from pamqp import base

from shardmq.broker.amqp import Binds, ChannelException, ConnectionException
from shardmq.broker.front_door.connection.channel import NO_WORK, Channel, Outcome, Reply, Work
from shardmq.broker.front_door.connection.socket import PAUSE_CLOSE, PAUSE_WORK, ClientSocket
from shardmq.broker.front_door.hot_state import BindRun
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import Session
from shardmq.broker.front_door.topology.methods import BIND_OK
from shardmq.broker.front_door.topology.pipeline import Pipeline

log = logging.getLogger("shardmq.broker.front_door.connection.work_queue")

# Queued work behind busy channels past which the client is not read any more.
WORK_MAX = 4096
WORK_BYTES_MAX = 4 << 20

# What goes through a channel's Pipeline.
METHODS = (base.Frame, Binds)

INTERNAL_ERROR = 541


class Carrier(Protocol):
    """The connection, which carries out the results of the work."""

    def fail(self, error: ChannelException | ConnectionException, number: int) -> None:
        """Answer what the client did wrong."""

    def answer(self, number: int, reply: Reply) -> None:
        """Send the reply of a method."""


class _Nobody:
    """The carrier of a connection that has ended."""

    def fail(self, error: ChannelException | ConnectionException, number: int) -> None: ...
    def answer(self, number: int, reply: Reply) -> None: ...


_NOBODY = _Nobody()


class WorkQueue:
    """The work of the channels of one connection, and the tasks that it waits for."""

    __slots__ = (
        "_carrier", "_loop", "_queued_bytes", "_queued_work", "_services", "_session", "_socket",
        "_tasks", "_when_idle", "waiting",
    )  # fmt: skip

    def __init__(
        self, services: Services, session: Session, socket: ClientSocket, carrier: Carrier
    ) -> None:
        self._services = services
        self._loop = services.loop
        self._session = session
        self._socket = socket
        self._carrier = carrier
        self.waiting: set[Channel] = set()  # channels with work that is not done
        self._when_idle: Callable[[], None] | None = None
        self._queued_bytes = 0
        self._queued_work = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, channel: Channel, work: Work, size: int = 0) -> None:
        """Do work now if the channel has nothing before it, else in its order.

        `size` is how many bytes the work keeps meanwhile.
        """
        if isinstance(work, METHODS) and not channel.running and not channel.work:
            if isinstance(work, Binds) and (
                run := self.bind_at_once(channel, work.ends, work.nowait)
            ):
                if not work.nowait and run.waits is None:
                    self._socket.send(channel.number, BIND_OK, len(work.ends))
                return
            pipeline = self._pipeline(channel)
            pipeline.receive(work)  # overlaps what it may overlap
            self.waiting.add(channel)
            if pipeline.full:
                self._socket.pause(PAUSE_WORK)
            return
        self._queued_bytes += size
        if channel.busy or channel.work:
            channel.queue_work(work)
            self.waiting.add(channel)
            self._queued_work += 1
            if self._queued_work > WORK_MAX or self._queued_bytes > WORK_BYTES_MAX:
                self._socket.pause(PAUSE_WORK)
            return
        if not self._socket.lost and not isinstance(work, METHODS):
            self._do(channel, work)
        self._rest(channel)

    def bind_at_once(
        self, channel: Channel, ends: list[tuple[str, str, str]], nowait: bool
    ) -> BindRun | None:
        """Put binds of a channel in force before the controller decides.

        Return the run that they begin. Its `waits` answers the client; without it the caller does.
        Return None, and do nothing, if they have to wait, for the controller or for other work.
        """
        if channel.running or channel.work:
            return None
        return self._pipeline(channel).bind_at_once(ends, nowait)

    def do_next(self, channel: Channel, work: Callable[[], None]) -> None:
        """Do work before all that is queued, behind what the channel waits for."""
        channel.queue_work(work, first=True)
        self.waiting.add(channel)

    def go_on(self, channel: Channel) -> None:
        """Do queued work of the channel until some of it has to wait."""
        while channel.work and not self._socket.lost:
            work = channel.work[0]
            if isinstance(work, METHODS):
                if channel.running:
                    return
                self.waiting.add(channel)
                channel.work.popleft()
                if channel.is_open:
                    self._pipeline(channel).receive(work)
                continue
            if channel.busy:
                return
            channel.work.popleft()
            self._do(channel, work)
        self._rest(channel)

    def _do(self, channel: Channel, work: Callable[[], Outcome]) -> None:
        try:
            outcome = work()
            if outcome is None or isinstance(outcome, (bytes, base.Frame)):
                self._carrier.answer(channel.number, outcome)
            else:
                channel.running = True
                self.waiting.add(channel)
                self.start(self._finish(channel, outcome))
        except Exception as error:
            self._failed(channel, error)

    def _rest(self, channel: Channel) -> None:
        """Go on with what waits for the work of this channel, or of all channels, to be done."""
        self._loop.schedule_end_of_pass()
        if not channel.work and not channel.busy:
            self.waiting.discard(channel)
            if not channel.is_open:
                self._socket.resume(PAUSE_CLOSE)
        if not self.waiting:
            self._queued_work = self._queued_bytes = 0
            self._socket.resume(PAUSE_WORK)
            if self._when_idle is not None:
                idle, self._when_idle = self._when_idle, None
                idle()

    def _failed(self, channel: Channel, error: Exception) -> None:
        """Answer what the client did wrong. What we did wrong ends the connection."""
        if isinstance(error, (ChannelException, ConnectionException)):
            self._carrier.fail(error, channel.number)
        else:
            self.fail_internally(error)

    async def _finish(self, channel: Channel, waiting: Coroutine[None, None, Reply]) -> None:
        try:
            reply = await waiting
            if reply is not None:
                self._carrier.answer(channel.number, reply)
        except (ChannelException, ConnectionException) as error:
            if channel.is_open or isinstance(error, ConnectionException):
                self._carrier.fail(error, channel.number)
        finally:
            channel.running = False
        self.go_on(channel)
        self._socket.gather()

    def _pipeline(self, channel: Channel) -> Pipeline:
        if channel.pipeline is None:
            channel.pipeline = Pipeline(
                self._session,
                self._services.catalog_link,
                self._services.steps,
                channel,
                say=partial(self._socket.send, channel.number),
                waits=partial(self.waiting.add, channel),
                idle=lambda: self.go_on(channel),
                failed=lambda error: self._pipeline_failed(channel, error),
            )
        return channel.pipeline

    def _pipeline_failed(self, channel: Channel, error: Exception) -> None:
        self._failed(channel, error)
        self.go_on(channel)

    # -- tasks -----------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for this connection; it is cancelled when the connection ends."""
        task = self._loop.aio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call when all that was said before is done."""
        if self.waiting:
            self._when_idle = call
        else:
            call()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail_internally(error)

    def fail_internally(self, error: BaseException) -> None:
        """Close the connection for an error of ours: it is the smallest thing to be rebuilt."""
        log.error("%s: internal error", self._session.name, exc_info=error)
        self._carrier.fail(ConnectionException(INTERNAL_ERROR, "internal error", 0, 0), 0)

    # -- the end ---------------------------------------------------------------------------------

    def forget(self, channel: Channel) -> None:
        """Forget the work of a channel that has ended.

        What is queued refers to the connection and the channel. Left there, both would live until
        the garbage collector finds them, which looks seldom.
        """
        channel.work = NO_WORK
        if channel.pipeline is not None:
            channel.pipeline.close()
            channel.pipeline = None
        self.waiting.discard(channel)

    def close(self) -> None:
        """Cancel all tasks of a connection that has ended."""
        for task in self._tasks:
            task.cancel()
        self._when_idle = None
        self._carrier = _NOBODY
