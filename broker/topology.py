"""exchange.* and queue.* methods: check what the door can check, ask the controller, answer the client.

The door checks names and rights against its copy; existence, equivalence, exclusivity and limits are the controller's,
so that two doors cannot both be right. Counts and purges go to the queue's shard. A handler gives the method to reply
with; `Pipeline` sends the replies of one channel in the order its methods came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from pamqp import base, commands

from broker import checks
from broker.amqp.errors import ChannelException, ConnectionException
from broker.catalog import Catalog, Right
from broker.changes import QueuePut
from broker.control import (
    Answer,
    AnyRequest,
    Bind,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Unbind,
)
from broker.routing.types import TYPES

PIPELINED_MAX = 1024  # methods of one channel that are asked at once
WAITING_MAX = 4096  # methods of one channel behind them; beyond it the client is not read

ACCESS_REFUSED = 403
NOT_FOUND = 404
HARD_CODES = frozenset((320, 402, 501, 502, 503, 504, 505, 506, 530, 540, 541))  # end the connection
REPLY_TO_PREFIX = "amq.rabbitmq.reply-to"
# The name a server-named queue will have is not known here; rights to it are those to a name of its shape.
SERVER_NAMED = "amq.gen-" + 22 * "A"


class Asking(Protocol):
    def ask(self, request: AnyRequest, owner: str, user: str) -> Awaitable[Answer]: ...


class Counting(Protocol):
    """The door's way to the shards."""

    def count(self, queue: QueuePut) -> Awaitable[tuple[int, int]]:
        """Ready messages and consumers."""

    def purge(self, queue: QueuePut) -> Awaitable[int]: ...


class Session(Protocol):
    """A client's connection, as far as these handlers know it."""

    user: str
    vhost: str
    owner: str  # "door.incarnation.connection"

    @property
    def shards(self) -> Counting: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def catalog_link(self) -> Asking: ...
    def reply(self, channel_number: int, method: base.Frame) -> None: ...
    def reply_to_is_alive(self, name: str) -> bool:
        """Whether a direct reply-to consumer of this name ("amq.rabbitmq.reply-to...") is there."""


class Channel(Protocol):
    number: int
    last_queue: str  # the queue declared last: what an empty queue name means


Handler = Callable[[Session, Channel, Any], Awaitable[base.Frame]]


# -- exchanges ------------------------------------------------------------------------------------------


async def exchange_declare(session: Session, channel: Channel, method: commands.Exchange.Declare) -> base.Frame:
    name = checks.clean_name(method.exchange)
    checks.check_not_default(name)
    if method.passive:  # asks no right, as in RabbitMQ 3
        if session.catalog.exchange(session.vhost, name) is None:
            raise checks.no_exchange(session.vhost, name)
        return commands.Exchange.DeclareOk()
    checks.check_exchange_type(method.exchange_type)
    _check_right(session, "configure", "exchange", name)
    arguments = method.arguments or {}
    alternate = arguments.get("alternate-exchange")
    if isinstance(alternate, str) and session.catalog.exchange(session.vhost, name) is None:
        _check_right(session, "read", "exchange", name)
        _check_right(session, "write", "exchange", alternate)
    await _ask(
        session,
        ExchangeDeclare(
            session.vhost, name, method.exchange_type, method.durable, method.auto_delete, method.internal, arguments
        ),
    )
    return commands.Exchange.DeclareOk()


async def exchange_delete(session: Session, channel: Channel, method: commands.Exchange.Delete) -> base.Frame:
    name = checks.clean_name(method.exchange)
    checks.check_exchange_delete(session.vhost, name, used=False, if_unused=False)  # its name; use is the controller's
    _check_right(session, "configure", "exchange", name)
    await _ask(session, ExchangeRemove(session.vhost, name, method.if_unused))
    return commands.Exchange.DeleteOk()


async def exchange_bind(session: Session, channel: Channel, method: commands.Exchange.Bind) -> base.Frame:
    source, destination = _exchange_ends(session, method)
    arguments = method.arguments or {}
    await _ask(session, Bind(session.vhost, source, "exchange", destination, method.routing_key, arguments))
    return commands.Exchange.BindOk()


async def exchange_unbind(session: Session, channel: Channel, method: commands.Exchange.Unbind) -> base.Frame:
    source, destination = _exchange_ends(session, method)
    arguments = method.arguments or {}
    await _ask(session, Unbind(session.vhost, source, "exchange", destination, method.routing_key, arguments))
    return commands.Exchange.UnbindOk()


def _exchange_ends(session: Session, method: commands.Exchange.Bind | commands.Exchange.Unbind) -> tuple[str, str]:
    source, destination = checks.clean_name(method.source), checks.clean_name(method.destination)
    _check_right(session, "write", "exchange", destination)
    checks.check_not_default(destination)
    checks.check_not_default(source)
    _check_right(session, "read", "exchange", source)
    return source, destination


# -- queues ---------------------------------------------------------------------------------------------


async def queue_declare(session: Session, channel: Channel, method: commands.Queue.Declare) -> base.Frame:
    if method.passive:
        return await _queue_look(session, channel, method)
    name = checks.clean_name(method.queue)
    _check_right(session, "configure", "queue", name or SERVER_NAMED)
    arguments = method.arguments or {}
    dead_letters = arguments.get("x-dead-letter-exchange")
    if isinstance(dead_letters, str) and session.catalog.queue(session.vhost, name) is None:
        _check_right(session, "read", "queue", name or SERVER_NAMED)
        _check_right(session, "write", "exchange", dead_letters)
    answer = await _ask(
        session,
        QueueDeclare(session.vhost, name, method.durable, method.auto_delete, method.exclusive, arguments),
    )
    channel.last_queue = answer.result["name"]
    return commands.Queue.DeclareOk(
        channel.last_queue, answer.result.get("messages", 0), answer.result.get("consumers", 0)
    )


async def _queue_look(session: Session, channel: Channel, method: commands.Queue.Declare) -> base.Frame:
    """queue.declare(passive): is it there, how much is in it."""
    name = _queue_name(channel, method.queue)
    if name.startswith(REPLY_TO_PREFIX):
        return _reply_to_look(session, name)
    queue = _owned_queue(session, name)
    messages, consumers = await session.shards.count(queue)
    channel.last_queue = name
    return commands.Queue.DeclareOk(name, messages, consumers)


def _reply_to_look(session: Session, name: str) -> base.Frame:
    """How a server of requests asks whether the one who waits for the reply is still there."""
    if not session.reply_to_is_alive(name):
        raise checks.no_queue(session.vhost, name)
    return commands.Queue.DeclareOk(name, 0, 1)


async def queue_delete(session: Session, channel: Channel, method: commands.Queue.Delete) -> base.Frame:
    name = _queue_name(channel, method.queue)
    _check_right(session, "configure", "queue", name)
    answer = await _ask(session, QueueRemove(session.vhost, name, method.if_unused, method.if_empty))
    return commands.Queue.DeleteOk(answer.result.get("messages", 0))


async def queue_bind(session: Session, channel: Channel, method: commands.Queue.Bind) -> base.Frame:
    source, queue, key = _queue_ends(session, channel, method)
    await _ask(session, Bind(session.vhost, source, "queue", queue, key, method.arguments or {}))
    return commands.Queue.BindOk()


async def queue_unbind(session: Session, channel: Channel, method: commands.Queue.Unbind) -> base.Frame:
    source, queue, key = _queue_ends(session, channel, method)
    await _ask(session, Unbind(session.vhost, source, "queue", queue, key, method.arguments or {}))
    return commands.Queue.UnbindOk()


async def queue_purge(session: Session, channel: Channel, method: commands.Queue.Purge) -> base.Frame:
    name = _queue_name(channel, method.queue)
    _check_right(session, "read", "queue", name)
    return commands.Queue.PurgeOk(await session.shards.purge(_owned_queue(session, name)))


def readable_queue(session: Session, name: str) -> QueuePut:
    """The queue that a consume or get names, if this connection may have its messages."""
    name = checks.clean_name(name)
    if not name:
        raise checks.Refusal(NOT_FOUND, "no previously declared queue")
    _check_right(session, "read", "queue", name)
    return _owned_queue(session, name)


def _queue_ends(
    session: Session, channel: Channel, method: commands.Queue.Bind | commands.Queue.Unbind
) -> tuple[str, str, str]:
    """Exchange, queue and key. With both left empty the key is the queue's name too."""
    source, queue = checks.clean_name(method.exchange), _queue_name(channel, method.queue)
    if queue.startswith(REPLY_TO_PREFIX):
        raise checks.Refusal(ACCESS_REFUSED, "cannot bind or unbind to a volatile (direct reply-to) queue")
    key = queue if not method.queue and not method.routing_key else method.routing_key
    _check_right(session, "write", "queue", queue)
    checks.check_not_default(source)
    _check_right(session, "read", "exchange", source)
    return source, queue, key


def _queue_name(channel: Channel, name: str) -> str:
    name = checks.clean_name(name) or channel.last_queue
    if not name:
        raise checks.Refusal(NOT_FOUND, "no previously declared queue")
    return name


def _owned_queue(session: Session, name: str) -> QueuePut:
    queue = session.catalog.queue(session.vhost, name)
    if queue is None:
        raise checks.no_queue(session.vhost, name)
    checks.check_owner(queue, session.owner)
    return queue


# -- rights and answers -----------------------------------------------------------------------------------


def _check_right(session: Session, right: Right, kind: str, name: str) -> None:
    if not session.catalog.may(session.user, session.vhost, right, name):
        raise _access_refused(session, right, kind, name)


def _access_refused(session: Session, right: str, kind: str, name: str) -> checks.Refusal:
    shown = name or "amq.default" if kind == "exchange" else name
    thing = checks.named(kind, shown, session.vhost)
    return checks.Refusal(ACCESS_REFUSED, f"{right} access to {thing} refused for user '{session.user}'")


async def _ask(session: Session, request: AnyRequest) -> Answer:
    answer = await session.catalog_link.ask(request, session.owner, session.user)
    if answer.code:
        raise checks.Refusal(answer.code, answer.text)
    return answer


HANDLERS: Final[dict[type[base.Frame], Handler]] = {
    commands.Exchange.Declare: exchange_declare,
    commands.Exchange.Delete: exchange_delete,
    commands.Exchange.Bind: exchange_bind,
    commands.Exchange.Unbind: exchange_unbind,
    commands.Queue.Declare: queue_declare,
    commands.Queue.Delete: queue_delete,
    commands.Queue.Bind: queue_bind,
    commands.Queue.Unbind: queue_unbind,
    commands.Queue.Purge: queue_purge,
}


async def handle(session: Session, channel: Channel, method: base.Frame) -> base.Frame:
    """What to reply. ChannelException or ConnectionException, naming the method, when it cannot be."""
    try:
        return await HANDLERS[type(method)](session, channel, method)
    except checks.Refusal as refusal:
        kind = ConnectionException if refusal.code in HARD_CODES else ChannelException
        raise kind(refusal.code, refusal.text, method.index >> 16, method.index & 0xFFFF) from None


# -- one channel's methods, in order ------------------------------------------------------------------------


class Pipeline:
    """The declares, binds and deletes of one channel: asked in order, answered in order, overlapping where safe.

    A method that comes while others are unanswered is asked at once only if the copy says that neither they nor it can
    fail: what follows a failed method must not happen. While `busy`, the caller holds back whatever else the channel
    says.
    """

    def __init__(
        self,
        session: Session,
        channel: Channel,
        *,
        idle: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`idle`: nothing is unanswered any more. `failed`: close the channel or connection; what came later is
        forgotten. Both are called from the loop, never from within `receive`."""
        self._session, self._channel = session, channel
        self._idle, self._failed = idle, failed
        self._waiting: deque[base.Frame] = deque()
        self._running: deque[tuple[base.Frame, asyncio.Task[base.Frame]]] = deque()
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
        return len(self._waiting) >= WAITING_MAX

    def receive(self, method: base.Frame) -> None:
        if not self._closed:
            self._waiting.append(method)
            self._start()

    def close(self) -> None:
        """Channel or connection gone: what was not asked is forgotten, replies are not sent."""
        self._closed = True
        self._waiting.clear()
        running, self._running = self._running, deque()
        for _, task in running:
            task.cancel()

    def _start(self) -> None:
        while self._waiting and len(self._running) < PIPELINED_MAX:
            if self._running and self._barrier:
                return
            sure = self._surely_done(self._waiting[0])
            if self._running and not sure:
                return
            self._barrier = not sure
            method = self._waiting.popleft()
            task = asyncio.get_running_loop().create_task(handle(self._session, self._channel, method))
            self._running.append((method, task))
            task.add_done_callback(self._done)

    def _done(self, done: asyncio.Task[base.Frame]) -> None:
        if self._closed:
            if not done.cancelled():
                done.exception()  # looked at: nobody is left to be told
            return
        if not self._running:
            return  # replied together with one before it
        while self._running and self._running[0][1].done():
            method, task = self._running.popleft()
            error = None if task.cancelled() else task.exception()
            if error is not None or task.cancelled():  # cancelled, but not by close(): the whole process ends
                self.close()
                if isinstance(error, Exception):
                    self._failed(error)
                return
            if not getattr(method, "nowait", False):
                self._session.reply(self._channel.number, task.result())
        if not self._running:
            self._foreseen.clear()
        if len(self._running) <= PIPELINED_MAX // 2:
            self._start()
        if not self._running:
            self._idle()

    def _surely_done(self, method: base.Frame) -> bool:
        """Whether nothing here speaks against it: the next may be asked without its answer. Another connection may
        still prove this wrong, as if it had come between the two."""
        match method:
            case commands.Queue.Bind() | commands.Queue.Unbind():
                there = self._is_there("queue", method.queue) and self._is_there("exchange", method.exchange)
                return there and "x-match" not in (method.arguments or ())
            case commands.Exchange.Bind() | commands.Exchange.Unbind():
                there = self._is_there("exchange", method.source) and self._is_there("exchange", method.destination)
                return there and "x-match" not in (method.arguments or ())
            case commands.Queue.Declare(passive=False):
                return not method.arguments and self._will_be("queue", method.queue)
            case commands.Exchange.Declare(passive=False, auto_delete=False):
                known = method.exchange_type in TYPES
                return known and not method.arguments and self._will_be("exchange", method.exchange)
            case commands.Queue.Delete(if_unused=False, if_empty=False):
                return self._will_be_gone("queue", method.queue)
            case commands.Exchange.Delete(if_unused=False):
                return self._will_be_gone("exchange", method.exchange)
        return False

    def _is_there(self, kind: str, name: str) -> bool:
        if not name or not self._has_all_rights(name):
            return False
        foreseen = self._foreseen.get((kind, name))
        return self._in_copy(kind, name) if foreseen is None else foreseen

    def _will_be(self, kind: str, name: str) -> bool:
        """A declare of a name that nobody has: the next methods may count on it."""
        if not self._is_ordinary(name) or (kind, name) in self._foreseen or self._in_copy(kind, name, owned=False):
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
        may, user, vhost = self._session.catalog.may, self._session.user, self._session.vhost
        return (
            may(user, vhost, "configure", name) and may(user, vhost, "write", name) and may(user, vhost, "read", name)
        )
