"""Carry out a channel's declares, binds and deletes in order, overlapping where that is safe.

methods.py says what each method needs, steps.py gets it from other processes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from pamqp import base, commands

from shardmq.broker.amqp.events import Binds
from shardmq.broker.front_door.hot_state import BindRun
from shardmq.broker.front_door.links.binds_ahead import BindsAhead
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.session import Session
from shardmq.broker.front_door.topology import methods
from shardmq.broker.front_door.topology.foresight import Foresight
from shardmq.broker.front_door.topology.steps import (
    AskController,
    PendingAnswer,
    StepRunner,
    granted,
)
from shardmq.broker.model import checks
from shardmq.broker.shared.control import Answer, BindMany

PIPELINED_MAX = 1024  # methods of one channel that are asked at once
WAITING_MAX = 4096  # methods of one channel behind them; beyond it the client is not read

Say = Callable[[base.Frame, int], None]


class DeclaringChannel(Protocol):
    """The state of a channel that declares change."""

    last_queue: str  # the queue declared last, which an empty queue name means


class _Running(NamedTuple):
    """A method that is on its way.

    `outcome` is the reply if `then` is None, else the answer that `then` makes the reply of.
    """

    method: base.Frame
    outcome: PendingAnswer
    then: Callable[[Answer], base.Frame] | None

    @property
    def size(self) -> int:
        return 1

    def finish(self, channel: DeclaringChannel, say: Say) -> None:
        """Answer the client. Raises what the channel or the connection is to be closed with."""
        try:
            reply = self.outcome.result()
            if self.then is not None:
                reply = self.then(granted(reply))
        except checks.Refusal as refusal:
            # Its frames hold `outcome`, which holds the refusal, and the connection with it.
            refusal.__traceback__ = None
            raise methods.failure(self.method, refusal) from None
        # To ask for a reply queue does not make it the queue declared last, as in RabbitMQ.
        if isinstance(reply, commands.Queue.DeclareOk):
            name = reply.queue or ""
            if not checks.is_reply_queue(name):
                channel.last_queue = name
        if not getattr(self.method, "nowait", False):
            say(reply, 1)

    def queues_there(self, channel: DeclaringChannel) -> Iterable[str]:
        """Return the queues that are at their shards, now that the method is answered."""
        match self.method:
            case commands.Queue.Declare(passive=False):
                return (channel.last_queue,)
            case commands.Queue.Bind():
                return (self.method.queue,)
        return ()


class _RunningBinds(NamedTuple):
    """Many binds that are on their way as one request."""

    binds: Binds
    outcome: PendingAnswer

    @property
    def size(self) -> int:
        return len(self.binds.ends)

    def finish(self, channel: DeclaringChannel, say: Say) -> None:
        """Answer the binds that are done, also when the one behind them was refused."""
        answer = self.outcome.result()
        done = answer.result.get("done", 0) if answer.code else self.size
        if done and not self.binds.nowait:
            say(methods.BIND_OK, done)
        if answer.code:
            refusal = checks.Refusal(answer.code, answer.text)
            raise methods.failure(commands.Queue.Bind, refusal)

    def queues_there(self, channel: DeclaringChannel) -> Iterable[str]:
        """Return the queues that are at their shards, now that the binds are answered."""
        return {name for _, name, _ in self.binds.ends}


class _RunningRun:
    """Binds of a run that are on their way (links/binds_ahead.py). It is its own outcome."""

    size = 1

    def __init__(self) -> None:
        self._bound = 0
        self._refusal: checks.Refusal | None = None
        self._is_done = False

    @property
    def outcome(self) -> _RunningRun:
        return self

    def done(self) -> bool:
        return self._is_done

    def cancel(self) -> None: ...

    def came(self, bound: int, code: int, text: str, is_all: bool) -> None:
        """Note that so many more binds are recorded, and a refusal of those behind them."""
        self._bound += bound
        if code and self._refusal is None:
            self._refusal = checks.Refusal(code, text)
        self._is_done = is_all or bool(code)

    def finish(self, channel: DeclaringChannel, say: Say) -> None:
        """Answer the binds that are recorded, also when the one behind them was refused."""
        if self._bound:
            say(methods.BIND_OK, self._bound)
        if self._refusal is not None:
            raise methods.failure(commands.Queue.Bind, self._refusal)

    def queues_there(self, channel: DeclaringChannel) -> Iterable[str]:
        return ()


def _count(work: base.Frame | Binds) -> int:
    return len(work.ends) if isinstance(work, Binds) else 1


def _one_by_one(binds: Binds) -> list[commands.Queue.Bind]:
    """Return the binds as methods.

    They are set field by field because the constructor of pamqp refuses names that AMQP allows.
    """
    found = []
    for source, queue, key in binds.ends:
        method = commands.Queue.Bind()
        method.exchange, method.queue, method.routing_key = source, queue, key
        method.nowait, method.arguments = binds.nowait, {}
        found.append(method)
    return found


class Pipeline:
    """The declares, binds and deletes of one channel.

    A method that comes while others are unanswered is asked at once only if neither they nor the
    method can fail (foresight.py): what follows a failed method must not happen. While the pipeline
    is `busy`, the caller holds back whatever else the channel says.
    """

    def __init__(
        self,
        session: Session,
        controller: CatalogLink,
        steps: StepRunner,
        channel: DeclaringChannel,
        *,
        say: Say,
        waits: Callable[[], None],
        idle: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Make a pipeline that has nothing to do.

        `say(reply, count)` sends a reply that many times. `waits()`: the pipeline is busy, without
        a call of `receive`. `idle()`: nothing is unanswered any more.
        `failed(error)`: the channel or connection is to be closed, and all methods behind the
        failed one are forgotten. None of them is called from within `receive`.
        """
        self._session, self._channel = session, channel
        self._controller, self._steps = controller, steps
        self._say, self._waits, self._idle, self._failed = say, waits, idle, failed
        self._foresight = Foresight(session, controller)
        self._waiting: deque[base.Frame | Binds] = deque()
        self._waiting_count = 0
        self._running: deque[_Running | _RunningBinds | _RunningRun] = deque()
        self._running_count = 0
        self._barrier = False  # the method that runs may fail
        self._closed = False
        # The epoch in which binds between this exchange and this queue were found to be sure, and
        # whether they outlive the broker.
        self._judged = -1, "", ""
        self._outlive = False
        self._run_if_any: BindRun | None = None  # the last run that the client waits for

    @property
    def busy(self) -> bool:
        """Return whether a method is unanswered."""
        return bool(self._running)

    @property
    def full(self) -> bool:
        """Return whether the client is not to be read until some methods are answered."""
        return self._waiting_count >= WAITING_MAX

    def receive(self, method: base.Frame | Binds) -> None:
        """Take a method of the channel, behind those before it."""
        if not self._closed:
            self._waiting.append(method)
            self._waiting_count += _count(method)
            self._start()

    def bind_at_once(self, ends: list[tuple[str, str, str]], nowait: bool) -> BindRun | None:
        """Put binds in force before the controller decides.

        Return the run that they begin. If the run has `waits`, this pipeline is busy until it has
        replied to the client. Otherwise the caller replies. Return None, and do nothing, if the
        binds have to wait for the controller.
        """
        ahead, session = self._controller.ahead, self._session
        if ahead is None or self._closed or self._running or self._waiting:
            return None
        source, queue, _ = ends[0]
        if self._judged != (ahead.epoch, source, queue) and not self._judge(ahead, source, queue):
            return None
        if len(ends) > 1 and any(end[0] != source or end[1] != queue for end in ends):
            return None
        if not self._outlive:
            return ahead.bind(session.vhost, ends, session.owner, session.user)
        if nowait:
            return None
        run = ahead.bind(session.vhost, ends, session.owner, session.user, self)
        if run is not None:
            self._end_run()
            self.begun(run)
        return run

    def begun(self, run: BindRun) -> None:
        """Note that binds of a run have gone, and that the client waits for the answer."""
        self._run_if_any = run
        self._running.append(_RunningRun())
        self._running_count += 1
        self._waits()

    def came(self, bound: int, code: int, text: str) -> None:
        """Take the answer to the first binds of the run."""
        run, running = self._run_if_any, self._running
        if self._closed or run is None or not running or not isinstance(running[0], _RunningRun):
            return
        running[0].came(bound, code, text, not run.ends)
        self._done(running[0])

    def _end_run(self) -> None:
        """Let no more binds come to the last run: nobody would hear of them."""
        if self._run_if_any is not None:
            self._run_if_any.end()
            self._run_if_any = None

    def _judge(self, ahead: BindsAhead, source: str, queue: str) -> bool:
        """Return whether binds between these two are sure, and need not wait for the controller.

        Clients bind one key after the other, so the answer is kept for as long as it holds.
        """
        if not (
            ahead.may_bind(self._session.vhost, source, queue)
            and self._foresight.can_bind_any_key(source, queue)
        ):
            return False
        self._judged = ahead.epoch, source, queue
        self._outlive = ahead.outlive(self._session.vhost, source, queue)
        return True

    def close(self) -> None:
        """Forget what was not asked and send no more replies: channel or connection are gone."""
        self._closed = True
        self._waiting.clear()
        self._waiting_count = 0
        self._end_run()
        running, self._running = self._running, deque()
        for each in running:
            each.outcome.cancel()

    def _start(self) -> None:
        while self._waiting and self._running_count < PIPELINED_MAX:
            if self._running and self._barrier:
                return
            first = self._waiting[0]
            sure = self._foresight.is_sure(first)
            if isinstance(first, Binds) and not sure:
                self._waiting.popleft()
                self._waiting.extendleft(reversed(_one_by_one(first)))
                continue
            if self._running and not sure:
                return
            self._barrier = not sure
            self._waiting.popleft()
            self._waiting_count -= _count(first)
            running = self._bind(first) if isinstance(first, Binds) else self._run(first)
            self._running.append(running)
            self._running_count += running.size
            running.outcome.add_done_callback(self._done)

    def _bind(self, binds: Binds) -> _RunningBinds:
        session = self._session
        request = BindMany(session.vhost, binds.ends)
        asked = self._controller.request(request, session.owner, session.user)
        return _RunningBinds(binds, asked)

    def _run(self, method: base.Frame) -> _Running:
        """Ask for a method. A single question needs no task: declares come by the thousand."""
        session, controller = self._session, self._controller
        loop = asyncio.get_running_loop()
        try:
            step = methods.decide(session, controller.catalog, self._channel.last_queue, method)
        except Exception as error:
            self._barrier = True
            refused: asyncio.Future[base.Frame] = loop.create_future()
            refused.set_exception(error)  # raised in the turn of this method by `finish`
            return _Running(method, refused, None)
        if isinstance(step, AskController):
            asked = controller.request(step.request, session.owner, session.user)
            return _Running(method, asked, step.then)
        if isinstance(step, base.Frame):
            reply: asyncio.Future[base.Frame] = loop.create_future()
            reply.set_result(step)
            return _Running(method, reply, None)
        return _Running(method, loop.create_task(self._steps.run(step, session)), None)

    def _done(self, done: Any) -> None:
        if self._closed:
            if isinstance(done, asyncio.Future) and not done.cancelled():
                done.exception()  # nobody is left to be told; asyncio would log it
            return
        if not self._running:
            return  # replied together with one before it
        while self._running and self._running[0].outcome.done():
            running = self._running.popleft()
            self._running_count -= running.size
            try:
                running.finish(self._channel, self._say)
                if (ahead := self._controller.ahead) is not None:
                    for name in running.queues_there(self._channel):
                        ahead.queue_is_there(self._session.vhost, name)
            except asyncio.CancelledError:  # not by close(): the whole process ends
                self.close()
                return
            except Exception as error:
                self.close()
                self._failed(error)
                return
        if not self._running:
            self._foresight.forget()
        if self._running_count <= PIPELINED_MAX // 2:
            self._start()
        if not self._running:
            self._idle()
