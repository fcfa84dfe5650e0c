"""Each channel's work in the order it arrived.

What can be done at once is done at once; a method that has to ask another process makes its channel *busy*, and what
comes behind it on that channel queues up (`Channel.work`) until the answer is there; other channels go on. What a
client's work is, and what ends it: client.py, which builds on this.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from pamqp import base

from shardmq.broker.amqp import Binds, ChannelException, Connection, ConnectionException
from shardmq.broker.front_door.connection.channel import Channel, Work
from shardmq.broker.front_door.connection.output import Stream
from shardmq.broker.front_door.connection.transport import PAUSE_WORK, Transport
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.topology.pipeline import Pipeline

if TYPE_CHECKING:
    from shardmq.broker.front_door.server import Door

log = logging.getLogger("shardmq.broker.front_door.connection.client")

# Work queued behind a busy channel past which the client is not read any more.
WORK_MAX = 4096
WORK_BYTES_MAX = 4 << 20

# What goes through a channel's Pipeline.
METHODS = (base.Frame, Binds)


class ChannelWork(Transport):
    __slots__ = ("_close_when_idle", "_queued_bytes", "_queued_work", "_tasks", "_waiting")

    def __init__(self, door: Door, sock: Stream, peer: Peer, number: int, amqp: Connection) -> None:
        super().__init__(door, sock, peer, number, amqp)
        self._close_when_idle = False
        self._waiting: set[Channel] = set()  # those with work that is not done
        self._queued_bytes = 0
        self._queued_work = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def fail(self, error: ChannelException | ConnectionException, number: int) -> None:
        """Answer what the client did wrong."""

    @abstractmethod
    def _pipeline(self, channel: Channel) -> Pipeline:
        """Of the channel's declares, binds and deletes."""

    @abstractmethod
    async def _close_politely(self) -> None:
        """What the client asked for when it had said all else."""

    def _do(self, channel: Channel, work: Work, size: int = 0) -> None:
        """Now, if nothing is before it; else in its turn. `size`: bytes it keeps meanwhile."""
        if isinstance(work, METHODS) and not channel.running and not channel.work:
            pipeline = self._pipeline(channel)
            pipeline.receive(work)  # overlaps what it may overlap
            self._waiting.add(channel)
            if pipeline.full:
                self.pause(PAUSE_WORK)
            return
        channel.work.append(work)
        self._waiting.add(channel)
        self._queued_bytes += size
        if channel.busy or len(channel.work) > 1:
            self._queued_work += 1
            if self._queued_work > WORK_MAX or self._queued_bytes > WORK_BYTES_MAX:
                self.pause(PAUSE_WORK)
            return
        self._go_on(channel)

    def _go_on(self, channel: Channel) -> None:
        """Do queued work until some has to wait."""
        while channel.work and not self.lost:
            work = channel.work[0]
            if isinstance(work, METHODS):
                if channel.running:
                    return
                self._waiting.add(channel)
                channel.work.popleft()
                if channel.is_open:
                    self._pipeline(channel).receive(work)
                continue
            if channel.busy:
                return
            channel.work.popleft()
            waiting = self._tried(channel, work)
            if waiting is not None:
                channel.running = True
                self._start(self._finish(channel, waiting))
        self.door.schedule_end_of_pass()
        if not channel.work and not channel.busy:
            self._waiting.discard(channel)
        if not self._waiting:
            self._queued_work = self._queued_bytes = 0
            self.resume(PAUSE_WORK)
            if self._close_when_idle:
                self._close_when_idle = False
                self._start(self._close_politely())

    def _tried(
        self, channel: Channel, work: Callable[[], Coroutine[None, None, None] | None]
    ) -> Coroutine[None, None, None] | None:
        try:
            return work()
        except (ChannelException, ConnectionException) as error:
            self.fail(error, channel.number)
        except Exception:
            self._fail_internally()
        return None

    async def _finish(self, channel: Channel, waiting: Coroutine[None, None, None]) -> None:
        try:
            await waiting
        except (ChannelException, ConnectionException) as error:
            if channel.is_open or isinstance(error, ConnectionException):
                self.fail(error, channel.number)
        finally:
            channel.running = False
        self._go_on(channel)
        self._gather()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self.door.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: internal error", self.name, exc_info=error)
            self.fail(ConnectionException(541, "internal error", 0, 0), 0)

    def _fail_internally(self) -> None:
        """Our fault: the smallest thing that can be rebuilt is the connection."""
        log.exception("%s: internal error", self.name)
        self.fail(ConnectionException(541, "internal error", 0, 0), 0)
