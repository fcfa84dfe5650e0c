"""One channel's declares, binds and deletes: asked in order, answered in order, overlapping where that is safe.

What each of them means says topology.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from pamqp import base, commands

from shardmq.broker.amqp.events import Binds
from shardmq.broker.front_door.consume import rewinding
from shardmq.broker.front_door.topology import topology
from shardmq.broker.model import checks
from shardmq.broker.routing import delaying, keeping
from shardmq.broker.routing.types import TYPES
from shardmq.broker.shared.control import Answer, BindMany

PIPELINED_MAX = 1024  # methods of one channel that are asked at once
WAITING_MAX = 4096  # methods of one channel behind them; beyond it the client is not read


class _Running(NamedTuple):
    """A method that is on its way: `reply` makes the reply of an Answer, without it `outcome` is the reply."""

    method: base.Frame
    outcome: topology.Reply
    reply: Callable[[Answer], base.Frame] | None

    @property
    def size(self) -> int:
        """How many methods."""
        return 1

    def finish(self, say: Callable[[base.Frame, int], None]) -> None:
        """When it is done. Raises what the channel or connection is to be closed with."""
        reply = self._result()
        if not getattr(self.method, "nowait", False):
            say(reply, 1)

    def _result(self) -> base.Frame:
        if self.reply is None:
            return self.outcome.result()  # type: ignore[no-any-return] # a task of `handle`
        try:
            return self.reply(topology.granted(self.outcome.result()))
        except checks.Refusal as refusal:
            raise topology.failure(self.method, refusal) from None


class _Binding(NamedTuple):
    """Many binds that are on their way as one request."""

    binds: Binds
    outcome: topology.Reply

    @property
    def size(self) -> int:
        return len(self.binds.ends)

    def finish(self, say: Callable[[base.Frame, int], None]) -> None:
        """Those that are done are answered, also when the one behind them was refused."""
        answer = self.outcome.result()
        done = answer.result.get("done", 0) if answer.code else self.size
        if done and not self.binds.nowait:
            say(topology.BIND_OK, done)
        if answer.code:
            raise topology.failure(commands.Queue.Bind, checks.Refusal(answer.code, answer.text))


def _count(work: base.Frame | Binds) -> int:
    return len(work.ends) if isinstance(work, Binds) else 1


def _each(binds: Binds) -> list[commands.Queue.Bind]:
    """One by one. Set field by field: pamqp takes no name it does not like."""
    methods = []
    for source, queue, key in binds.ends:
        method = commands.Queue.Bind()
        method.exchange, method.queue, method.routing_key, method.nowait = (
            source,
            queue,
            key,
            binds.nowait,
        )
        method.arguments = {}
        methods.append(method)
    return methods


class Pipeline:
    """The declares, binds and deletes of one channel: asked in order, answered in order, overlapping where safe.

    A method that comes while others are unanswered is asked at once only if the copy says that neither they nor it can
    fail: what follows a failed method must not happen. While `busy`, the caller holds back whatever else the channel
    says.
    """

    def __init__(
        self,
        session: topology.Session,
        channel: topology.Channel,
        *,
        idle: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`idle`: nothing is unanswered any more. `failed`: close the channel or connection; what came later is
        forgotten. Both are called from the loop, never from within `receive`."""
        self._session, self._channel = session, channel
        self._idle, self._failed = idle, failed
        self._waiting: deque[base.Frame | Binds] = deque()
        self._waiting_count = 0
        self._running: deque[_Running | _Binding] = deque()
        self._running_count = 0
        # Kind and name of what the running ones will have made (True) or deleted (False).
        self._foreseen: dict[tuple[str, str], bool] = {}
        self._barrier = False  # the one running might fail
        self._closed = False

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def full(self) -> bool:
        """Stop reading this client until some are answered."""
        return self._waiting_count >= WAITING_MAX

    def receive(self, method: base.Frame | Binds) -> None:
        if not self._closed:
            self._waiting.append(method)
            self._waiting_count += _count(method)
            self._start()

    def close(self) -> None:
        """Channel or connection gone: what was not asked is forgotten, replies are not sent."""
        self._closed = True
        self._waiting.clear()
        self._waiting_count = 0
        running, self._running = self._running, deque()
        for each in running:
            each.outcome.cancel()

    def _start(self) -> None:
        while self._waiting and self._running_count < PIPELINED_MAX:
            if self._running and self._barrier:
                return
            first = self._waiting[0]
            if isinstance(first, Binds):
                sure = self._all_surely_bound(first)
                if not sure:
                    self._waiting.popleft()
                    self._waiting.extendleft(reversed(_each(first)))
                    continue
            else:
                sure = self._surely_done(first)
            if self._running and not sure:
                return
            self._barrier = not sure
            self._waiting.popleft()
            self._waiting_count -= _count(first)
            running = self._bind(first) if isinstance(first, Binds) else self._run(first, sure)
            self._running.append(running)
            self._running_count += running.size
            running.outcome.add_done_callback(self._done)

    def _bind(self, binds: Binds) -> _Binding:
        session = self._session
        ask = BindMany(session.vhost, binds.ends)
        return _Binding(binds, session.catalog_link.request(ask, session.owner, session.user))

    def _run(self, method: base.Frame, sure: bool) -> _Running:
        """Without a task where there is nothing to wait for but one answer: binds come by the ten thousand."""
        if sure and type(method) in topology.PREPARED:
            try:
                request, reply = topology.prepare(self._session, self._channel, method)
            except checks.Refusal:
                self._barrier = True  # it fails below, by the way that is not from within `receive`
            else:
                asked = self._session.catalog_link.request(
                    request, self._session.owner, self._session.user
                )
                return _Running(method, asked, reply)
        task = asyncio.get_running_loop().create_task(
            topology.handle(self._session, self._channel, method)
        )
        return _Running(method, task, None)

    def _done(self, done: asyncio.Future[Any] | topology.Reply) -> None:
        if self._closed:
            if isinstance(done, asyncio.Future) and not done.cancelled():
                done.exception()  # looked at: nobody is left to be told
            return
        if not self._running:
            return  # replied together with one before it
        while self._running and self._running[0].outcome.done():
            running = self._running.popleft()
            self._running_count -= running.size
            try:
                running.finish(self._say)
            except asyncio.CancelledError:  # not by close(): the whole process ends
                self.close()
                return
            except Exception as error:
                self.close()
                self._failed(error)
                return
        if not self._running:
            self._foreseen.clear()
        if self._running_count <= PIPELINED_MAX // 2:
            self._start()
        if not self._running:
            self._idle()

    def _say(self, reply: base.Frame, count: int) -> None:
        self._session.reply(self._channel.number, reply, count)

    def _all_surely_bound(self, binds: Binds) -> bool:
        """As `_surely_done`, of each. What neighbours have in common is looked at once."""
        session = self._session
        if session.catalog.has_topic_permissions(session.user, session.vhost):
            return False
        return all(
            self._surely_bound(source, queue)
            for (source, queue), _ in groupby(binds.ends, itemgetter(0, 1))
        )

    def _surely_bound(self, source: str, queue: str) -> bool:
        """By any key, without arguments."""
        if not (
            self._is_there("queue", queue)
            and self._is_there("exchange", source)
            and self._takes(source, None)
        ):
            return False
        return not (checks.is_hidden_queue(queue) or topology.shards_of(self._session, queue))

    def _surely_done(self, method: base.Frame) -> bool:
        """Whether nothing here speaks against it: the next may be asked without its answer. Another connection may
        still prove this wrong, as if it had come between the two."""
        if self._session.catalog.has_topic_permissions(self._session.user, self._session.vhost):
            return False
        match method:
            case commands.Queue.Bind() if self._gets_history(method):
                return False
            case commands.Queue.Bind() | commands.Queue.Unbind():
                there = self._is_there("queue", method.queue) and self._is_there(
                    "exchange", method.exchange
                )
                return there and self._takes(method.exchange, method.arguments)
            case commands.Exchange.Bind() | commands.Exchange.Unbind():
                there = self._is_there("exchange", method.source) and self._is_there(
                    "exchange", method.destination
                )
                return there and self._takes(method.source, method.arguments)
            case commands.Queue.Declare(passive=False):
                return not method.arguments and self._will_be("queue", method.queue)
            case commands.Exchange.Declare(passive=False, auto_delete=False):
                known = method.exchange_type in TYPES and checks.takes_any_binding(
                    method.exchange_type, {}
                )
                known = known and method.exchange_type != delaying.DELAYED_TYPE
                return known and not method.arguments and self._will_be("exchange", method.exchange)
            case commands.Queue.Delete(if_unused=False, if_empty=False):
                return not topology.shards_of(self._session, method.queue) and self._will_be_gone(
                    "queue", method.queue
                )
            case commands.Exchange.Delete(if_unused=False):
                return self._will_be_gone("exchange", method.exchange)
        return False

    def _takes(self, exchange: str, arguments: dict[str, Any] | None) -> bool:
        """Whether any binding to it will do. One that is only foreseen takes any key, or would not be foreseen."""
        found = self._session.catalog.exchange(self._session.vhost, exchange)
        if found is None:
            return checks.takes_any_binding("", arguments or {})
        type = delaying.inner_type(found.type, found.arguments)
        return checks.takes_any_binding(type, arguments or {}) and not keeping.keeps(
            type, found.arguments
        )

    def _gets_history(self, bind: commands.Queue.Bind) -> bool:
        vhost = self._session.catalog.vhost(self._session.vhost)
        return rewinding.wants_history(vhost, bind.exchange, bind.arguments or {})

    def _is_there(self, kind: str, name: str) -> bool:
        if not name or not self._has_all_rights(name):
            return False
        foreseen = self._foreseen.get((kind, name))
        return self._in_copy(kind, name) if foreseen is None else foreseen

    def _will_be(self, kind: str, name: str) -> bool:
        """A declare of a name that nobody has: the next methods may count on it."""
        if (
            not self._is_ordinary(name)
            or (kind, name) in self._foreseen
            or self._in_copy(kind, name, owned=False)
        ):
            return False
        self._foreseen[kind, name] = True
        return True

    def _will_be_gone(self, kind: str, name: str) -> bool:
        if not self._is_ordinary(name) or not self._is_there(kind, name):
            return False
        self._foreseen[kind, name] = False
        return True

    def _in_copy(self, kind: str, name: str, owned: bool = True) -> bool:
        """`owned`: there, and to be counted on by this connection."""
        session = self._session
        if kind == "exchange":
            exchange = session.catalog.exchange(session.vhost, name)
            # An auto-delete exchange goes with its last binding: what runs may take it away.
            return exchange is not None and not (owned and exchange.auto_delete)
        queue = session.catalog.queue(session.vhost, name)
        return queue is not None and (not owned or queue.owner in ("", session.owner))

    def _is_ordinary(self, name: str) -> bool:
        """Neither reserved nor empty, nothing to be cleaned, and this user's to deal with."""
        ordinary = name != "" and not name.startswith("amq.") and checks.clean_name(name) == name
        return ordinary and self._has_all_rights(name)

    def _has_all_rights(self, name: str) -> bool:
        session = self._session
        return session.catalog.may_all(session.user, session.vhost, name)
