"""exchange.* and queue.* methods: check what the door can check, ask the controller, answer the client.

The door checks names and rights against its copy; existence, equivalence, exclusivity and limits are the controller's,
so that two doors cannot both be right. Counts and purges go to the queue's shard. A handler gives the method to reply
with; `Pipeline` sends the replies of one channel in the order its methods came.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol

from pamqp import base, commands

from broker import checks, rewinding
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
    VirtualLook,
)
from broker.routing import delaying, hidden, keeping
from broker.routing.types import TYPES

PIPELINED_MAX = 1024  # methods of one channel that are asked at once
WAITING_MAX = 4096  # methods of one channel behind them; beyond it the client is not read

ACCESS_REFUSED = 403
NOT_FOUND = 404
PRECONDITION_FAILED = 406
HARD_CODES = frozenset((320, 402, 501, 502, 503, 504, 505, 506, 530, 540, 541))  # end the connection
# The name a server-named queue will have is not known here; rights to it are those to a name of its shape.
SERVER_NAMED = "amq.gen-" + 22 * "A"
REPLY_NAME_BYTES = 16  # at random, of each of two parts


class Asking(Protocol):
    def ask(self, request: AnyRequest, owner: str, user: str) -> asyncio.Future[Answer]: ...


class Counting(Protocol):
    """The door's way to the shards."""

    def count(self, queue: QueuePut) -> Awaitable[tuple[int, int]]:
        """Ready messages and consumers."""

    def look(self, queue: QueuePut) -> Awaitable[tuple[int, int] | None]:
        """The same; None of a queue that is about to go."""

    def purge(self, queue: QueuePut) -> Awaitable[int]: ...


class Session(Protocol):
    """A client's connection, as far as these handlers know it."""

    user: str
    vhost: str
    owner: str  # "door.incarnation.connection"

    @property
    def shards(self) -> Counting: ...
    @property
    def rewinding(self) -> rewinding.Rewinding: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def catalog_link(self) -> Asking: ...
    def reply(self, channel_number: int, method: base.Frame) -> None: ...


class Channel(Protocol):
    number: int
    last_queue: str  # the queue declared last: what an empty queue name means


Handler = Callable[[Session, Channel, Any], Awaitable[base.Frame]]
# What to ask the controller, and what its answer makes us reply; raises Refusal.
Prepared = tuple[AnyRequest, Callable[[Answer], base.Frame]]


# -- exchanges ------------------------------------------------------------------------------------------


def _exchange_look(session: Session, name: str) -> base.Frame:
    """exchange.declare(passive): is it there. Asks no right, as in RabbitMQ 3."""
    if session.catalog.exchange(session.vhost, name) is None:
        raise checks.no_exchange(session.vhost, name)
    return commands.Exchange.DeclareOk()


async def exchange_declare(session: Session, channel: Channel, method: commands.Exchange.Declare) -> base.Frame:
    if method.passive:
        name = checks.clean_name(method.exchange)
        checks.check_not_default(name)
        return _exchange_look(session, name)
    return await _prepared(session, channel, method)


def _prepare_exchange_declare(session: Session, channel: Channel, method: commands.Exchange.Declare) -> Prepared:
    name = checks.clean_name(method.exchange)
    checks.check_not_default(name)
    checks.check_exchange_type(method.exchange_type)
    _check_right(session, "configure", "exchange", name)
    arguments = method.arguments or {}
    alternate = arguments.get("alternate-exchange")
    if isinstance(alternate, str) and session.catalog.exchange(session.vhost, name) is None:
        _check_right(session, "read", "exchange", name)
        _check_right(session, "write", "exchange", alternate)
    ask = ExchangeDeclare(
        session.vhost, name, method.exchange_type, method.durable, method.auto_delete, method.internal, arguments
    )
    return ask, lambda _: commands.Exchange.DeclareOk()


def _prepare_exchange_delete(session: Session, channel: Channel, method: commands.Exchange.Delete) -> Prepared:
    name = checks.clean_name(method.exchange)
    checks.check_exchange_delete(session.vhost, name, used=False, if_unused=False)  # its name; use is the controller's
    _check_right(session, "configure", "exchange", name)
    return ExchangeRemove(session.vhost, name, method.if_unused), lambda _: commands.Exchange.DeleteOk()


def _prepare_exchange_bind(session: Session, channel: Channel, method: commands.Exchange.Bind) -> Prepared:
    source, destination = _exchange_ends(session, method)
    ask = Bind(session.vhost, source, "exchange", destination, method.routing_key, method.arguments or {})
    return ask, lambda _: commands.Exchange.BindOk()


def _prepare_exchange_unbind(session: Session, channel: Channel, method: commands.Exchange.Unbind) -> Prepared:
    source, destination = _exchange_ends(session, method)
    ask = Unbind(session.vhost, source, "exchange", destination, method.routing_key, method.arguments or {})
    return ask, lambda _: commands.Exchange.UnbindOk()


def _exchange_ends(session: Session, method: commands.Exchange.Bind | commands.Exchange.Unbind) -> tuple[str, str]:
    source, destination = checks.clean_name(method.source), checks.clean_name(method.destination)
    _check_right(session, "write", "exchange", destination)
    checks.check_not_default(destination)
    checks.check_not_default(source)
    _check_right(session, "read", "exchange", source)
    _check_topic(session, source, method.routing_key)
    return source, destination


# -- queues ---------------------------------------------------------------------------------------------


async def queue_declare(session: Session, channel: Channel, method: commands.Queue.Declare) -> base.Frame:
    if method.passive:
        return await _queue_look(session, channel, method)
    if checks.is_reply_queue(name := checks.clean_name(method.queue)):
        return _reply_to_look(session, name)
    return await _prepared(session, channel, method)


def _prepare_queue_declare(session: Session, channel: Channel, method: commands.Queue.Declare) -> Prepared:
    name = checks.clean_name(method.queue)
    _check_right(session, "configure", "queue", name or SERVER_NAMED)
    _check_not_virtual(session, name, "declare")
    arguments = method.arguments or {}
    dead_letters = arguments.get("x-dead-letter-exchange")
    if isinstance(dead_letters, str) and session.catalog.queue(session.vhost, name) is None:
        _check_right(session, "read", "queue", name or SERVER_NAMED)
        _check_right(session, "write", "exchange", dead_letters)

    def declared(answer: Answer) -> base.Frame:
        channel.last_queue = answer.result["name"]
        return _declare_ok(channel.last_queue, answer.result.get("messages", 0), answer.result.get("consumers", 0))

    ask = QueueDeclare(session.vhost, name, method.durable, method.auto_delete, method.exclusive, arguments)
    return ask, declared


def _declare_ok(name: str, messages: int, consumers: int) -> base.Frame:
    """Set field by field: pamqp takes no name it does not like, and AMQP's are of any characters."""
    method = commands.Queue.DeclareOk(None, messages, consumers)
    method.queue = name
    return method


async def _queue_look(session: Session, channel: Channel, method: commands.Queue.Declare) -> base.Frame:
    """queue.declare(passive): is it there, how much is in it."""
    name = checks.clean_name(method.queue)  # here no name is no name, not the last queue's
    if checks.is_reply_queue(name):
        return _reply_to_look(session, name)
    if shards := _shards_of(session, name):
        channel.last_queue = name
        return _declare_ok(name, *await _count_shards(session, name, shards))
    queue = _owned_queue(session, name)
    counts = await session.shards.look(queue)
    if counts is None:
        raise checks.no_queue(session.vhost, name)
    channel.last_queue = name
    return _declare_ok(name, *counts)


def _reply_to_look(session: Session, name: str) -> base.Frame:
    """How a server of requests asks whether the one who waits for the reply is still there."""
    if name != checks.REPLY_TO and session.catalog.queue(session.vhost, name) is None:
        raise checks.no_queue(session.vhost, name)
    return _declare_ok(name, 0, 1)


async def queue_delete(session: Session, channel: Channel, method: commands.Queue.Delete) -> base.Frame:
    name = _queue_name(channel, method.queue)
    if checks.is_hidden_queue(name):
        return commands.Queue.DeleteOk(0)  # goes with its consumer, or its exchange
    _check_right(session, "configure", "queue", name)
    if shards := _shards_of(session, name):
        return await _delete_shards(session, name, shards, method)
    queue = session.catalog.queue(session.vhost, name)
    if queue is not None and (method.if_empty or method.if_unused):
        # What this channel published and consumes reaches the shard by another way than the controller's question.
        await session.shards.count(queue)
    return await _prepared(session, channel, method)


def _prepare_queue_delete(session: Session, channel: Channel, method: commands.Queue.Delete) -> Prepared:
    name = _queue_name(channel, method.queue)
    _check_right(session, "configure", "queue", name)
    ask = QueueRemove(session.vhost, name, method.if_unused, method.if_empty)
    return ask, lambda answer: commands.Queue.DeleteOk(answer.result.get("messages", 0))


def _prepare_queue_bind(session: Session, channel: Channel, method: commands.Queue.Bind) -> Prepared:
    source, queue, key = _queue_ends(session, channel, method)
    _check_not_virtual(session, queue, "bind")
    return Bind(session.vhost, source, "queue", queue, key, method.arguments or {}), _bound


async def queue_bind(session: Session, channel: Channel, method: commands.Queue.Bind) -> base.Frame:
    """To an exchange that keeps messages: with what the queue is to have of them."""
    request, reply = _prepare_queue_bind(session, channel, method)
    vhost = session.catalog.vhost(session.vhost)
    assert isinstance(request, Bind)
    if vhost is None or not rewinding.wants_history(vhost, request.source, request.arguments):
        return reply(await _ask(session, request))
    checks.check_owner(_owned_queue(session, request.destination), session.owner)
    exchange = vhost.exchanges[request.source]
    type = delaying.inner_type(exchange.type, exchange.arguments)
    checks.check_binding(type, request.routing_key, request.arguments)
    checks.check_keeping_bind(type, exchange.arguments, "queue", request.arguments)
    wish = rewinding.Wish(session.vhost, request.source, request.destination, request.routing_key, request.arguments)
    return reply(await session.rewinding.bind(vhost, wish, lambda: _ask(session, request)))


def _prepare_queue_unbind(session: Session, channel: Channel, method: commands.Queue.Unbind) -> Prepared:
    source, queue, key = _queue_ends(session, channel, method)
    _check_not_virtual(session, queue, "unbind")
    return Unbind(session.vhost, source, "queue", queue, key, method.arguments or {}), _unbound


def _bound(answer: Answer) -> base.Frame:
    return commands.Queue.BindOk()


def _unbound(answer: Answer) -> base.Frame:
    return commands.Queue.UnbindOk()


async def queue_purge(session: Session, channel: Channel, method: commands.Queue.Purge) -> base.Frame:
    name = _queue_name(channel, method.queue)
    _check_right(session, "read", "queue", name)
    if shards := _shards_of(session, name):
        return commands.Queue.PurgeOk(sum(await asyncio.gather(*map(session.shards.purge, shards))))
    return commands.Queue.PurgeOk(await session.shards.purge(_owned_queue(session, name)))


def readable_queue(session: Session, name: str) -> QueuePut:
    """The queue that a consume or get names, if this connection may have its messages."""
    name = checks.clean_name(name)
    if not name:
        raise checks.Refusal(NOT_FOUND, "no previously declared queue")
    _check_right(session, "read", "queue", name)
    return _owned_queue(session, name)


# -- virtual queues: all shard queues of a stream exchange, by its name ----------------------------------


def _shards_of(session: Session, name: str) -> tuple[QueuePut, ...]:
    """None: the name is not that of a stream exchange. If it is, a queue of the same name cannot be reached."""
    vhost = session.catalog.vhost(session.vhost)
    return () if vhost is None else tuple(vhost.queues[queue] for queue in vhost.shard_queues(name))


def readable_shards(session: Session, name: str) -> tuple[QueuePut, ...]:
    """Of the virtual queue that a consume or get names, if it is one and this user may read it."""
    shards = _shards_of(session, name)
    if shards:
        _check_right(session, "read", "queue", name)
    return shards


def _check_not_virtual(session: Session, name: str, act: str) -> None:
    """Texts of RabbitMQ's sharding plugin, and of the one before it."""
    if _shards_of(session, name):
        raise checks.Refusal(PRECONDITION_FAILED, f"Can't {act} sharded queue: {checks.erlang_term(name)}")


async def _count_shards(session: Session, name: str, shards: tuple[QueuePut, ...]) -> tuple[int, int]:
    """Ready messages, and consumers: each of the virtual queue once, and those of single shards by their own names."""
    look = asyncio.ensure_future(_ask(session, VirtualLook(session.vhost, name)))
    counts = await asyncio.gather(*map(session.shards.count, shards))
    said = (await look).result
    alone = max(0, sum(consumers for _, consumers in counts) - said["seats"])
    return sum(messages for messages, _ in counts), said["consumers"] + alone


async def _delete_shards(
    session: Session, name: str, shards: tuple[QueuePut, ...], method: commands.Queue.Delete
) -> base.Frame:
    """All of them with their messages, if they all may go; the exchange gets new ones at once, and the consumers of the
    virtual queue those. Whoever wants neither deletes the exchange, or what makes it a stream exchange."""
    if method.if_empty or method.if_unused:
        counts = await asyncio.gather(*map(session.shards.count, shards))
        if method.if_unused and any(consumers for _, consumers in counts):
            raise checks.Refusal(PRECONDITION_FAILED, f"{checks.named('queue', name, session.vhost)} in use")
        if method.if_empty and any(messages for messages, _ in counts):
            raise checks.Refusal(PRECONDITION_FAILED, f"{checks.named('queue', name, session.vhost)} not empty")
    # Each again on its condition: what came meanwhile is not lost, and what went meanwhile was empty.
    asked = (QueueRemove(session.vhost, each.name, method.if_unused, method.if_empty) for each in shards)
    answers = await asyncio.gather(*(_ask(session, request) for request in asked))
    return commands.Queue.DeleteOk(sum(answer.result.get("messages", 0) for answer in answers))


def _queue_ends(
    session: Session, channel: Channel, method: commands.Queue.Bind | commands.Queue.Unbind
) -> tuple[str, str, str]:
    """Exchange, queue and key. With both left empty the key is the queue's name too."""
    source, queue = checks.clean_name(method.exchange), _queue_name(channel, method.queue)
    if checks.is_reply_queue(queue):
        raise checks.Refusal(ACCESS_REFUSED, "cannot bind or unbind to a volatile (direct reply-to) queue")
    if hidden.is_of_exchange(queue):
        raise checks.no_queue(session.vhost, queue)
    key = queue if not method.queue and not method.routing_key else method.routing_key
    _check_right(session, "write", "queue", queue)
    checks.check_not_default(source)
    _check_right(session, "read", "exchange", source)
    _check_topic(session, source, key)
    return source, queue, key


def _queue_name(channel: Channel, name: str) -> str:
    name = checks.clean_name(name) or channel.last_queue
    if not name:
        raise checks.Refusal(NOT_FOUND, "no previously declared queue")
    return name


def _owned_queue(session: Session, name: str) -> QueuePut:
    queue = session.catalog.queue(session.vhost, name)
    if queue is None or checks.is_hidden_queue(name):
        raise checks.no_queue(session.vhost, name)
    checks.check_owner(queue, session.owner)
    return queue


async def open_reply_queue(session: Session) -> QueuePut:
    """A queue for the replies to one channel: this connection's, gone with its consumer; nobody guesses its name."""
    who, key = secrets.token_urlsafe(REPLY_NAME_BYTES), secrets.token_bytes(REPLY_NAME_BYTES)
    name = f"{checks.REPLY_TO}.{who}.{base64.urlsafe_b64encode(key).decode()}"  # of the shape RabbitMQ's have
    await _ask(session, QueueDeclare(session.vhost, name, False, True, True, {}))
    queue = session.catalog.queue(session.vhost, name)
    if queue is None:
        raise checks.no_queue(session.vhost, name)
    return queue


async def close_reply_queue(session: Session, name: str) -> None:
    """One that got no consumer, and so would be there as long as its connection."""
    await _ask(session, QueueRemove(session.vhost, name, False, False))


# -- rights and answers -----------------------------------------------------------------------------------


def _check_right(session: Session, right: Right, kind: str, name: str) -> None:
    if not session.catalog.may(session.user, session.vhost, right, name):
        raise _access_refused(session, right, kind, name)


def _check_topic(session: Session, exchange: str, key: str) -> None:
    """Whether this user may have what is published to a topic exchange with keys like this."""
    catalog, user, vhost = session.catalog, session.user, session.vhost
    if not catalog.has_topic_permissions(user, vhost):
        return
    found = catalog.exchange(vhost, exchange)
    if found is None or delaying.inner_type(found.type, found.arguments) != "topic":
        return
    if not catalog.may_topic(user, vhost, "read", exchange, key):
        raise checks.Refusal(ACCESS_REFUSED, checks.topic_refused("read", vhost, exchange, key, user))


def _access_refused(session: Session, right: str, kind: str, name: str) -> checks.Refusal:
    shown = name or "amq.default" if kind == "exchange" else name
    thing = checks.named(kind, shown, session.vhost)
    return checks.Refusal(ACCESS_REFUSED, f"{right} access to {thing} refused for user '{session.user}'")


async def _prepared(session: Session, channel: Channel, method: base.Frame) -> base.Frame:
    request, reply = PREPARE[type(method)](session, channel, method)
    return reply(await _ask(session, request))


async def _ask(session: Session, request: AnyRequest) -> Answer:
    return _granted(await session.catalog_link.ask(request, session.owner, session.user))


def _granted(answer: Answer) -> Answer:
    if answer.code:
        raise checks.Refusal(answer.code, answer.text)
    return answer


# What needs nothing but the controller's answer, when nothing speaks against it (Pipeline._surely_done).
PREPARE: Final[dict[type[base.Frame], Callable[[Session, Channel, Any], Prepared]]] = {
    commands.Exchange.Declare: _prepare_exchange_declare,
    commands.Exchange.Delete: _prepare_exchange_delete,
    commands.Exchange.Bind: _prepare_exchange_bind,
    commands.Exchange.Unbind: _prepare_exchange_unbind,
    commands.Queue.Declare: _prepare_queue_declare,
    commands.Queue.Delete: _prepare_queue_delete,
    commands.Queue.Bind: _prepare_queue_bind,
    commands.Queue.Unbind: _prepare_queue_unbind,
}


HANDLERS: Final[dict[type[base.Frame], Handler]] = {
    commands.Exchange.Declare: exchange_declare,
    commands.Exchange.Delete: _prepared,
    commands.Exchange.Bind: _prepared,
    commands.Exchange.Unbind: _prepared,
    commands.Queue.Declare: queue_declare,
    commands.Queue.Delete: queue_delete,
    commands.Queue.Bind: queue_bind,
    commands.Queue.Unbind: _prepared,
    commands.Queue.Purge: queue_purge,
}


async def handle(session: Session, channel: Channel, method: base.Frame) -> base.Frame:
    """What to reply. ChannelException or ConnectionException, naming the method, when it cannot be."""
    try:
        return await HANDLERS[type(method)](session, channel, method)
    except checks.Refusal as refusal:
        raise _failure(method, refusal) from None


def _failure(method: base.Frame, refusal: checks.Refusal) -> Exception:
    kind = ConnectionException if refusal.code in HARD_CODES else ChannelException
    return kind(refusal.code, refusal.text, method.index >> 16, method.index & 0xFFFF)


class _Running(NamedTuple):
    """A method that is on its way: `reply` makes the reply of an Answer, without it `outcome` is the reply."""

    method: base.Frame
    outcome: asyncio.Future[Any]
    reply: Callable[[Answer], base.Frame] | None

    def result(self) -> base.Frame:
        """When it is done. Raises what the channel or connection is to be closed with."""
        if self.reply is None:
            return self.outcome.result()  # type: ignore[no-any-return] # a task of `handle`
        try:
            return self.reply(_granted(self.outcome.result()))
        except checks.Refusal as refusal:
            raise _failure(self.method, refusal) from None


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
        self._running: deque[_Running] = deque()
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
        for each in running:
            each.outcome.cancel()

    def _start(self) -> None:
        while self._waiting and len(self._running) < PIPELINED_MAX:
            if self._running and self._barrier:
                return
            sure = self._surely_done(self._waiting[0])
            if self._running and not sure:
                return
            self._barrier = not sure
            running = self._run(self._waiting.popleft(), sure)
            self._running.append(running)
            running.outcome.add_done_callback(self._done)

    def _run(self, method: base.Frame, sure: bool) -> _Running:
        """Without a task where there is nothing to wait for but one answer: binds come by the ten thousand."""
        prepare = PREPARE.get(type(method)) if sure else None
        if prepare is not None:
            try:
                request, reply = prepare(self._session, self._channel, method)
            except checks.Refusal:
                self._barrier = True  # it fails below, by the way that is not from within `receive`
            else:
                asked = self._session.catalog_link.ask(request, self._session.owner, self._session.user)
                return _Running(method, asked, reply)
        task = asyncio.get_running_loop().create_task(handle(self._session, self._channel, method))
        return _Running(method, task, None)

    def _done(self, done: asyncio.Future[Any]) -> None:
        if self._closed:
            if not done.cancelled():
                done.exception()  # looked at: nobody is left to be told
            return
        if not self._running:
            return  # replied together with one before it
        while self._running and self._running[0].outcome.done():
            running = self._running.popleft()
            try:
                reply = running.result()
            except asyncio.CancelledError:  # not by close(): the whole process ends
                self.close()
                return
            except Exception as error:
                self.close()
                self._failed(error)
                return
            if not getattr(running.method, "nowait", False):
                self._session.reply(self._channel.number, reply)
        if not self._running:
            self._foreseen.clear()
        if len(self._running) <= PIPELINED_MAX // 2:
            self._start()
        if not self._running:
            self._idle()

    def _surely_done(self, method: base.Frame) -> bool:
        """Whether nothing here speaks against it: the next may be asked without its answer. Another connection may
        still prove this wrong, as if it had come between the two."""
        if self._session.catalog.has_topic_permissions(self._session.user, self._session.vhost):
            return False
        match method:
            case commands.Queue.Bind() if self._gets_history(method):
                return False
            case commands.Queue.Bind() | commands.Queue.Unbind():
                there = self._is_there("queue", method.queue) and self._is_there("exchange", method.exchange)
                return there and self._takes(method.exchange, method.arguments)
            case commands.Exchange.Bind() | commands.Exchange.Unbind():
                there = self._is_there("exchange", method.source) and self._is_there("exchange", method.destination)
                return there and self._takes(method.source, method.arguments)
            case commands.Queue.Declare(passive=False):
                return not method.arguments and self._will_be("queue", method.queue)
            case commands.Exchange.Declare(passive=False, auto_delete=False):
                known = method.exchange_type in TYPES and checks.takes_any_binding(method.exchange_type, {})
                known = known and method.exchange_type != delaying.DELAYED_TYPE
                return known and not method.arguments and self._will_be("exchange", method.exchange)
            case commands.Queue.Delete(if_unused=False, if_empty=False):
                return not _shards_of(self._session, method.queue) and self._will_be_gone("queue", method.queue)
            case commands.Exchange.Delete(if_unused=False):
                return self._will_be_gone("exchange", method.exchange)
        return False

    def _takes(self, exchange: str, arguments: dict[str, Any] | None) -> bool:
        """Whether any binding to it will do. One that is only foreseen takes any key, or would not be foreseen."""
        found = self._session.catalog.exchange(self._session.vhost, exchange)
        if found is None:
            return checks.takes_any_binding("", arguments or {})
        type = delaying.inner_type(found.type, found.arguments)
        return checks.takes_any_binding(type, arguments or {}) and not keeping.keeps(type, found.arguments)

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
        session = self._session
        return session.catalog.may_all(session.user, session.vhost, name)
