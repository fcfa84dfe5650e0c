"""exchange.* and queue.* methods: check what the door can check, ask the controller, answer the client.

The door checks names and rights against its copy; existence, equivalence, exclusivity and limits are the controller's,
so that two doors cannot both be right. Counts and purges go to the queue's shard. A handler gives the method to reply
with; pipeline.py sends the replies of one channel in the order its methods came.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from pamqp import base, commands

from shardmq.broker.amqp.errors import ChannelException, ConnectionException
from shardmq.broker.amqp.spec import HARD_CODES, INTERNAL_ERROR
from shardmq.broker.front_door.consume import rewinding
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import delaying, hidden
from shardmq.broker.shared import rights
from shardmq.broker.shared.control import (
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

ACCESS_REFUSED = 403
NOT_FOUND = 404
PRECONDITION_FAILED = 406
REPLY_NAME_BYTES = 16  # at random, of each of two parts
BIND_OK: Final = commands.Queue.BindOk()


class Reply(Protocol):
    """See catalog_link."""

    def done(self) -> bool: ...
    def cancel(self) -> Any: ...
    def result(self) -> Any: ...
    def add_done_callback(self, then: Callable[[Any], None], /) -> None: ...


class Asking(Protocol):
    def request(self, request: AnyRequest, owner: str, user: str) -> Reply: ...
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
    def reply(self, channel_number: int, method: base.Frame, count: int = 1) -> None:
        """So often."""


class Channel(Protocol):
    number: int
    last_queue: str  # the queue declared last: what an empty queue name means


Handler = Callable[[Session, Channel, Any], Awaitable[base.Frame]]
# What to ask the controller, and what its answer makes us reply. Whoever makes it raises Refusal for names that cannot
# be; rights are looked at behind it, alike for every method.
Prepared = tuple[AnyRequest, Callable[[Answer], base.Frame]]


# -- exchanges ------------------------------------------------------------------------------------------


def _exchange_look(session: Session, name: str) -> base.Frame:
    """exchange.declare(passive): is it there. Asks no right, as in RabbitMQ 3."""
    if session.catalog.exchange(session.vhost, name) is None:
        raise checks.no_exchange(session.vhost, name)
    return commands.Exchange.DeclareOk()


async def exchange_declare(
    session: Session, channel: Channel, method: commands.Exchange.Declare
) -> base.Frame:
    if method.passive:
        name = checks.clean_name(method.exchange)
        checks.check_not_default(name)
        return _exchange_look(session, name)
    return await _prepared(session, channel, method)


def _prepare_exchange_declare(
    session: Session, channel: Channel, method: commands.Exchange.Declare
) -> Prepared:
    name = checks.clean_name(method.exchange)
    checks.check_not_default(name)
    checks.check_exchange_type(method.exchange_type)
    arguments = method.arguments or {}
    ask = ExchangeDeclare(
        session.vhost,
        name,
        method.exchange_type,
        method.durable,
        method.auto_delete,
        method.internal,
        arguments,
    )
    return ask, lambda _: commands.Exchange.DeclareOk()


def _prepare_exchange_delete(
    session: Session, channel: Channel, method: commands.Exchange.Delete
) -> Prepared:
    name = checks.clean_name(method.exchange)
    checks.check_exchange_delete(
        session.vhost, name, used=False, if_unused=False
    )  # its name; use is the controller's
    return ExchangeRemove(
        session.vhost, name, method.if_unused
    ), lambda _: commands.Exchange.DeleteOk()


def _prepare_exchange_bind(
    session: Session, channel: Channel, method: commands.Exchange.Bind
) -> Prepared:
    source, destination = checks.clean_name(method.source), checks.clean_name(method.destination)
    ask = Bind(
        session.vhost, source, "exchange", destination, method.routing_key, method.arguments or {}
    )
    return ask, lambda _: commands.Exchange.BindOk()


def _prepare_exchange_unbind(
    session: Session, channel: Channel, method: commands.Exchange.Unbind
) -> Prepared:
    source, destination = checks.clean_name(method.source), checks.clean_name(method.destination)
    ask = Unbind(
        session.vhost, source, "exchange", destination, method.routing_key, method.arguments or {}
    )
    return ask, lambda _: commands.Exchange.UnbindOk()


# -- queues ---------------------------------------------------------------------------------------------


async def queue_declare(
    session: Session, channel: Channel, method: commands.Queue.Declare
) -> base.Frame:
    if method.passive:
        return await _queue_look(session, channel, method)
    if checks.is_reply_queue(name := checks.clean_name(method.queue)):
        return _reply_to_look(session, name)
    return await _prepared(session, channel, method)


def _prepare_queue_declare(
    session: Session, channel: Channel, method: commands.Queue.Declare
) -> Prepared:
    name = checks.clean_name(method.queue)
    arguments = method.arguments or {}

    def declared(answer: Answer) -> base.Frame:
        channel.last_queue = answer.result["name"]
        return _declare_ok(
            channel.last_queue, answer.result.get("messages", 0), answer.result.get("consumers", 0)
        )

    ask = QueueDeclare(
        session.vhost, name, method.durable, method.auto_delete, method.exclusive, arguments
    )
    return ask, declared


def _declare_ok(name: str, messages: int, consumers: int) -> base.Frame:
    """Set field by field: pamqp takes no name it does not like, and AMQP's are of any characters."""
    method = commands.Queue.DeclareOk(None, messages, consumers)
    method.queue = name
    return method


async def _queue_look(
    session: Session, channel: Channel, method: commands.Queue.Declare
) -> base.Frame:
    """queue.declare(passive): is it there, how much is in it."""
    name = checks.clean_name(method.queue)  # here no name is no name, not the last queue's
    if checks.is_reply_queue(name):
        return _reply_to_look(session, name)
    if shards := shards_of(session, name):
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


async def queue_delete(
    session: Session, channel: Channel, method: commands.Queue.Delete
) -> base.Frame:
    name = _queue_name(channel, method.queue)
    if checks.is_hidden_queue(name):
        return commands.Queue.DeleteOk(0)  # goes with its consumer, or its exchange
    rights.check(
        session.catalog,
        session.user,
        QueueRemove(session.vhost, name, method.if_unused, method.if_empty),
    )
    if shards := shards_of(session, name):
        return await _delete_shards(session, name, shards, method)
    queue = session.catalog.queue(session.vhost, name)
    if queue is not None and (method.if_empty or method.if_unused):
        # What this channel published and consumes reaches the shard by another way than the controller's question.
        await session.shards.count(queue)
    return await _prepared(session, channel, method)


def _prepare_queue_delete(
    session: Session, channel: Channel, method: commands.Queue.Delete
) -> Prepared:
    name = _queue_name(channel, method.queue)
    ask = QueueRemove(session.vhost, name, method.if_unused, method.if_empty)
    return ask, lambda answer: commands.Queue.DeleteOk(answer.result.get("messages", 0))


def _prepare_queue_bind(
    session: Session, channel: Channel, method: commands.Queue.Bind
) -> Prepared:
    source, queue, key = _queue_ends(session, channel, method)
    return Bind(session.vhost, source, "queue", queue, key, method.arguments or {}), _bound


async def queue_bind(session: Session, channel: Channel, method: commands.Queue.Bind) -> base.Frame:
    """To an exchange that keeps messages: with what the queue is to have of them."""
    request, reply = prepare(session, channel, method)
    vhost = session.catalog.vhost(session.vhost)
    assert isinstance(request, Bind)
    if vhost is None or not rewinding.wants_history(vhost, request.source, request.arguments):
        return reply(await _ask(session, request))
    checks.check_owner(_owned_queue(session, request.destination), session.owner)
    exchange = vhost.exchanges[request.source]
    type = delaying.inner_type(exchange.type, exchange.arguments)
    checks.check_binding(type, request.routing_key, request.arguments)
    checks.check_keeping_bind(type, exchange.arguments, "queue", request.arguments)
    wish = rewinding.Wish(
        session.vhost, request.source, request.destination, request.routing_key, request.arguments
    )
    return reply(await session.rewinding.bind(vhost, wish, lambda: _ask(session, request)))


def _prepare_queue_unbind(
    session: Session, channel: Channel, method: commands.Queue.Unbind
) -> Prepared:
    source, queue, key = _queue_ends(session, channel, method)
    return Unbind(session.vhost, source, "queue", queue, key, method.arguments or {}), _unbound


def _bound(answer: Answer) -> base.Frame:
    return BIND_OK


def _unbound(answer: Answer) -> base.Frame:
    return commands.Queue.UnbindOk()


async def queue_purge(
    session: Session, channel: Channel, method: commands.Queue.Purge
) -> base.Frame:
    name = _queue_name(channel, method.queue)
    rights.check(session.catalog, session.user, rights.Read(session.vhost, name))
    if shards := shards_of(session, name):
        return commands.Queue.PurgeOk(sum(await asyncio.gather(*map(session.shards.purge, shards))))
    return commands.Queue.PurgeOk(await session.shards.purge(_owned_queue(session, name)))


def readable_queue(session: Session, name: str) -> QueuePut:
    """The queue that a consume or get names, if this connection may have its messages."""
    name = checks.clean_name(name)
    if not name:
        raise checks.Refusal(NOT_FOUND, "no previously declared queue")
    rights.check(session.catalog, session.user, rights.Read(session.vhost, name))
    return _owned_queue(session, name)


# -- virtual queues: all shard queues of a stream exchange, by its name ----------------------------------


def shards_of(session: Session, name: str) -> tuple[QueuePut, ...]:
    """None: the name is not that of a stream exchange. If it is, a queue of the same name cannot be reached."""
    vhost = session.catalog.vhost(session.vhost)
    return () if vhost is None else tuple(vhost.queues[queue] for queue in vhost.shard_queues(name))


def readable_shards(session: Session, name: str) -> tuple[QueuePut, ...]:
    """Of the virtual queue that a consume or get names, if it is one and this user may read it."""
    shards = shards_of(session, name)
    if shards:
        rights.check(session.catalog, session.user, rights.Read(session.vhost, name))
    return shards


def _check_not_virtual(session: Session, name: str, act: str) -> None:
    """Texts of RabbitMQ's sharding plugin, and of the one before it."""
    if shards_of(session, name):
        raise checks.Refusal(
            PRECONDITION_FAILED, f"Can't {act} sharded queue: {checks.erlang_term(name)}"
        )


async def _count_shards(
    session: Session, name: str, shards: tuple[QueuePut, ...]
) -> tuple[int, int]:
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
            raise checks.Refusal(
                PRECONDITION_FAILED, f"{checks.named('queue', name, session.vhost)} in use"
            )
        if method.if_empty and any(messages for messages, _ in counts):
            raise checks.Refusal(
                PRECONDITION_FAILED, f"{checks.named('queue', name, session.vhost)} not empty"
            )
    # Each again on its condition: what came meanwhile is not lost, and what went meanwhile was empty.
    asked = (
        QueueRemove(session.vhost, each.name, method.if_unused, method.if_empty) for each in shards
    )
    answers = await asyncio.gather(*(_ask(session, request) for request in asked))
    return commands.Queue.DeleteOk(sum(answer.result.get("messages", 0) for answer in answers))


def _queue_ends(
    session: Session, channel: Channel, method: commands.Queue.Bind | commands.Queue.Unbind
) -> tuple[str, str, str]:
    """Exchange, queue and key. With both left empty the key is the queue's name too."""
    source, queue = checks.clean_name(method.exchange), _queue_name(channel, method.queue)
    if checks.is_reply_queue(queue):
        raise checks.Refusal(
            ACCESS_REFUSED, "cannot bind or unbind to a volatile (direct reply-to) queue"
        )
    if hidden.is_of_exchange(queue):
        raise checks.no_queue(session.vhost, queue)
    key = queue if not method.queue and not method.routing_key else method.routing_key
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


def prepare(session: Session, channel: Channel, method: base.Frame) -> Prepared:
    """Return what to ask of the controller for a method of PREPARED, if this user has the rights that it needs.

    Raises Refusal. Whether a name is a virtual queue's is told only to who may do this to a queue of the name.
    """
    request, reply = _PREPARE[type(method)](session, channel, method)
    rights.check(session.catalog, session.user, request)
    if isinstance(request, QueueDeclare):
        _check_not_virtual(session, request.name, "declare")
    elif isinstance(request, Bind | Unbind) and request.kind == "queue":
        _check_not_virtual(
            session, request.destination, "bind" if isinstance(request, Bind) else "unbind"
        )
    return request, reply


async def _prepared(session: Session, channel: Channel, method: base.Frame) -> base.Frame:
    request, reply = prepare(session, channel, method)
    return reply(await _ask(session, request))


async def _ask(session: Session, request: AnyRequest) -> Answer:
    return granted(await session.catalog_link.ask(request, session.owner, session.user))


def granted(answer: Answer) -> Answer:
    if answer.code:
        raise checks.Refusal(answer.code, answer.text)
    return answer


_PREPARE: Final[dict[type[base.Frame], Callable[[Session, Channel, Any], Prepared]]] = {
    commands.Exchange.Declare: _prepare_exchange_declare,
    commands.Exchange.Delete: _prepare_exchange_delete,
    commands.Exchange.Bind: _prepare_exchange_bind,
    commands.Exchange.Unbind: _prepare_exchange_unbind,
    commands.Queue.Declare: _prepare_queue_declare,
    commands.Queue.Delete: _prepare_queue_delete,
    commands.Queue.Bind: _prepare_queue_bind,
    commands.Queue.Unbind: _prepare_queue_unbind,
}
# What needs nothing but the controller's answer, when nothing speaks against it (pipeline.Pipeline).
PREPARED: Final = frozenset(_PREPARE)


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
        raise failure(method, refusal) from None


def failure(method: base.Frame | type[base.Frame], refusal: checks.Refusal) -> Exception:
    code = INTERNAL_ERROR if refusal.code == checks.NO_ROOM else refusal.code
    kind = ConnectionException if code in HARD_CODES else ChannelException
    return kind(code, refusal.text, method.index >> 16, method.index & 0xFFFF)
