"""Decide exchange.* and queue.* methods: check names and rights here, ask others for the rest.

A front door checks names and rights by its copy of the catalog. The controller decides on
existence, equivalence, exclusivity and limits, so that two front doors cannot both be right. The
queue's shard counts and purges. `decide` returns a step (steps.py) and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pamqp import base, commands

from shardmq.broker.amqp.errors import ChannelException, ConnectionException
from shardmq.broker.amqp.spec import HARD_CODES, INTERNAL_ERROR
from shardmq.broker.front_door.session import Session
from shardmq.broker.front_door.topology import history
from shardmq.broker.front_door.topology.queues import (
    is_far,
    named_queue,
    owned_queue,
    shards_of,
)
from shardmq.broker.front_door.topology.steps import (
    AskController,
    AskEach,
    CountQueues,
    Counts,
    PurgeQueues,
    SeeCatalog,
    SeeInStep,
    Step,
    Steps,
)
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import delaying, hidden
from shardmq.broker.shared import rights
from shardmq.broker.shared.control import (
    Answer,
    Bind,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Unbind,
    VirtualLook,
)

ACCESS_REFUSED = 403
PRECONDITION_FAILED = 406
BIND_OK: Final = commands.Queue.BindOk()


def decide(session: Session, catalog: Catalog, last_queue: str, method: base.Frame) -> Step:
    """Return the reply to a method of METHODS, or the step that leads to the reply.

    `last_queue` is the queue that the channel declared last; an empty queue name means this queue.
    Raises Refusal for names that cannot be and for rights that the user does not have.
    """
    return _DECISIONS[type(method)](session, catalog, last_queue, method)


def failure(method: base.Frame | type[base.Frame], refusal: checks.Refusal) -> Exception:
    """Return the exception that closes the channel or connection after a refused method."""
    return failure_of((method.index >> 16, method.index & 0xFFFF), refusal)


def failure_of(method: tuple[int, int], refusal: checks.Refusal) -> Exception:
    """Return the same for a method that is given by the numbers of its class and itself."""
    code = INTERNAL_ERROR if refusal.code == checks.NO_ROOM else refusal.code
    kind = ConnectionException if code in HARD_CODES else ChannelException
    return kind(code, refusal.text, *method)


def catalog_in_step(session: Session, name: str) -> Steps[Catalog]:
    """Return the copy of the catalog, when it has all that other front doors know already.

    The client may have seen the end of a connection at another front door before this copy had the
    end of the queues of that connection. The answer of the controller comes behind that.
    """
    yield AskEach([VirtualLook(session.vhost, name)])
    catalog: Catalog = yield SeeCatalog()
    return catalog


# -- exchanges ------------------------------------------------------------------------------------


def _declare_exchange(
    session: Session, catalog: Catalog, last_queue: str, method: commands.Exchange.Declare
) -> Step:
    name = checks.clean_name(method.exchange)
    checks.check_not_default(name)
    if method.passive:  # asks for no right, as in RabbitMQ 3
        return _see_exchange(session, name)
    checks.check_exchange_type(method.exchange_type)
    request = ExchangeDeclare(
        session.vhost,
        name,
        method.exchange_type,
        method.durable,
        method.auto_delete,
        method.internal,
        method.arguments or {},
    )
    rights.check(catalog, session.user, request)
    return AskController(request, lambda _: commands.Exchange.DeclareOk())


def _see_exchange(session: Session, name: str) -> Steps[base.Frame]:
    catalog: Catalog = yield SeeInStep(session.vhost, name)
    if catalog.exchange(session.vhost, name) is None:
        raise checks.no_exchange(session.vhost, name)
    return commands.Exchange.DeclareOk()


def _delete_exchange(
    session: Session, catalog: Catalog, last_queue: str, method: commands.Exchange.Delete
) -> Step:
    name = checks.clean_name(method.exchange)
    # Only the name is checked here: the controller knows whether the exchange is used.
    checks.check_exchange_delete(session.vhost, name, used=False, if_unused=False)
    request = ExchangeRemove(session.vhost, name, method.if_unused)
    rights.check(catalog, session.user, request)
    return AskController(request, lambda _: commands.Exchange.DeleteOk())


def _bind_exchange(
    session: Session,
    catalog: Catalog,
    last_queue: str,
    method: commands.Exchange.Bind | commands.Exchange.Unbind,
) -> Step:
    source, destination = checks.clean_name(method.source), checks.clean_name(method.destination)
    is_bind = isinstance(method, commands.Exchange.Bind)
    ends = session.vhost, source, "exchange", destination, method.routing_key
    request = (Bind if is_bind else Unbind)(*ends, method.arguments or {})
    rights.check(catalog, session.user, request)
    reply = commands.Exchange.BindOk() if is_bind else commands.Exchange.UnbindOk()
    return AskController(request, lambda _: reply)


# -- queues ---------------------------------------------------------------------------------------


def _declare_queue(
    session: Session, catalog: Catalog, last_queue: str, method: commands.Queue.Declare
) -> Step:
    name = checks.clean_name(method.queue)
    if checks.is_reply_queue(name):
        # A server of requests asks in this way whether the client still waits for the reply.
        if name != checks.REPLY_TO and catalog.queue(session.vhost, name) is None:
            raise checks.no_queue(session.vhost, name)
        return _declare_ok(name, 0, 1)
    if method.passive:
        return _passive_declare(session, catalog, name)
    request = QueueDeclare(
        session.vhost,
        name,
        method.durable,
        method.auto_delete,
        method.exclusive,
        method.arguments or {},
    )
    rights.check(catalog, session.user, request)
    _check_not_virtual(session, catalog, name, "declare")

    def declared(answer: Answer) -> base.Frame:
        result = answer.result
        return _declare_ok(result["name"], result.get("messages", 0), result.get("consumers", 0))

    return AskController(request, declared)


def _declare_ok(name: str, messages: int, consumers: int) -> base.Frame:
    # The name is set behind the constructor, which refuses names that AMQP allows.
    method = commands.Queue.DeclareOk(None, messages, consumers)
    method.queue = name
    return method


def _passive_declare(session: Session, catalog: Catalog, name: str) -> Step:
    """Return the steps to the counts of a queue. An empty name is no name, not the last queue's."""
    if shards := shards_of(session, catalog, name):
        return _count_shards(session, name, shards)
    if is_far(session, catalog, name):
        return _count_far_queue(session, name)
    if catalog.queue(session.vhost, name) is None:
        return _count_unknown_queue(session, name)
    return _count_queue(session, owned_queue(session, catalog, name))


def _count_far_queue(session: Session, name: str) -> Steps[base.Frame]:
    catalog = yield from catalog_in_step(session, name)
    return (yield from _count_queue(session, owned_queue(session, catalog, name)))


def _count_unknown_queue(session: Session, name: str) -> Steps[base.Frame]:
    catalog = yield SeeInStep(session.vhost, name)
    return (yield from _count_queue(session, owned_queue(session, catalog, name)))


def _count_queue(session: Session, queue: QueuePut) -> Steps[base.Frame]:
    (counts,) = yield CountQueues((queue,))
    if counts is None:
        raise checks.no_queue(session.vhost, queue.name)
    return _declare_ok(queue.name, *counts)


def _delete_queue(
    session: Session, catalog: Catalog, last_queue: str, method: commands.Queue.Delete
) -> Step:
    name = named_queue(method.queue, last_queue)
    if checks.is_hidden_queue(name):
        return commands.Queue.DeleteOk(0)  # such a queue goes with its consumer or its exchange
    request = QueueRemove(session.vhost, name, method.if_unused, method.if_empty)
    rights.check(catalog, session.user, request)
    if shards := shards_of(session, catalog, name):
        return _delete_shards(session, name, shards, method)
    ask = AskController(
        request, lambda answer: commands.Queue.DeleteOk(answer.result.get("messages", 0))
    )
    queue = catalog.queue(session.vhost, name)
    if queue is not None and (method.if_empty or method.if_unused):
        # The shard answers behind what this channel published and consumed. The question of the
        # controller comes another way and could overtake it.
        return _delete_behind(queue, ask)
    return ask


def _delete_behind(queue: QueuePut, ask: AskController) -> Steps[base.Frame]:
    yield CountQueues((queue,))
    (answer,) = yield AskEach([ask.request])
    return ask.then(answer)


def _bind_queue(
    session: Session, catalog: Catalog, last_queue: str, method: commands.Queue.Bind
) -> Step:
    source, name, key = _queue_ends(session, last_queue, method)
    request = Bind(session.vhost, source, "queue", name, key, method.arguments or {})
    rights.check(catalog, session.user, request)
    _check_not_virtual(session, catalog, name, "bind")
    ask = AskController(request, lambda _: BIND_OK)
    vhost = catalog.vhost(session.vhost)
    if vhost is None or not history.wants_history(vhost, source, request.arguments):
        return ask
    owned_queue(session, catalog, name)
    exchange = vhost.exchanges[source]
    type = delaying.inner_type(exchange.type, exchange.arguments)
    checks.check_binding(type, key, request.arguments)
    checks.check_keeping_bind(type, exchange.arguments, "queue", request.arguments)
    return history.bind(vhost, request, ask)


def _unbind_queue(
    session: Session, catalog: Catalog, last_queue: str, method: commands.Queue.Unbind
) -> Step:
    source, name, key = _queue_ends(session, last_queue, method)
    request = Unbind(session.vhost, source, "queue", name, key, method.arguments or {})
    rights.check(catalog, session.user, request)
    _check_not_virtual(session, catalog, name, "unbind")
    return AskController(request, lambda _: commands.Queue.UnbindOk())


def _queue_ends(
    session: Session, last_queue: str, method: commands.Queue.Bind | commands.Queue.Unbind
) -> tuple[str, str, str]:
    """Return exchange, queue and key.

    When the method leaves queue and key empty, the key is the name of the queue declared last.
    """
    source, name = checks.clean_name(method.exchange), named_queue(method.queue, last_queue)
    if checks.is_reply_queue(name):
        raise checks.Refusal(
            ACCESS_REFUSED, "cannot bind or unbind to a volatile (direct reply-to) queue"
        )
    if hidden.is_of_exchange(name):
        raise checks.no_queue(session.vhost, name)
    key = name if not method.queue and not method.routing_key else method.routing_key
    return source, name, key


def _purge_queue(
    session: Session, catalog: Catalog, last_queue: str, method: commands.Queue.Purge
) -> Step:
    name = named_queue(method.queue, last_queue)
    rights.check(catalog, session.user, rights.Read(session.vhost, name))
    if shards := shards_of(session, catalog, name):
        return _purge(shards)
    if is_far(session, catalog, name):
        return _purge_far_queue(session, name)
    return _purge((owned_queue(session, catalog, name),))


def _purge_far_queue(session: Session, name: str) -> Steps[base.Frame]:
    catalog = yield from catalog_in_step(session, name)
    return (yield from _purge((owned_queue(session, catalog, name),)))


def _purge(queues: tuple[QueuePut, ...]) -> Steps[base.Frame]:
    return commands.Queue.PurgeOk((yield PurgeQueues(queues)))


# -- virtual queues -------------------------------------------------------------------------------


def _check_not_virtual(session: Session, catalog: Catalog, name: str, act: str) -> None:
    """Refuse what cannot be done to a virtual queue, in the words of RabbitMQ's sharding plugin.

    Called behind the check of rights: only users who may do this to a queue of the name learn that
    the name is a virtual queue's.
    """
    if shards_of(session, catalog, name):
        raise checks.Refusal(
            PRECONDITION_FAILED, f"Can't {act} sharded queue: {checks.erlang_term(name)}"
        )


def _count_shards(session: Session, name: str, shards: tuple[QueuePut, ...]) -> Steps[base.Frame]:
    """Count the messages and consumers of a virtual queue.

    A consumer of the virtual queue counts once, although it may have one at each shard queue.
    Consumers of single shard queues are counted besides. Shard queues on nodes that are down are
    left out.
    """
    (answer,) = yield AskEach([VirtualLook(session.vhost, name)])
    counts: list[Counts | None] = yield CountQueues(shards, if_up=True)
    messages, consumers = map(sum, zip(*(each or (0, 0) for each in counts), strict=True))
    alone = max(0, consumers - answer.result["seats"])
    return _declare_ok(name, messages, answer.result["consumers"] + alone)


def _delete_shards(
    session: Session, name: str, shards: tuple[QueuePut, ...], method: commands.Queue.Delete
) -> Steps[base.Frame]:
    """Delete all shard queues with their messages, if all of them may go.

    The exchange gets new shard queues at once, and consumers of the virtual queue consume from
    those. To have no shard queues, a client deletes the exchange or what makes it a stream
    exchange.
    """
    if method.if_empty or method.if_unused:
        counts: list[Counts | None] = yield CountQueues(shards)
        known = [each for each in counts if each is not None]
        virtual = checks.named("queue", name, session.vhost)
        if method.if_unused and any(consumers for _, consumers in known):
            raise checks.Refusal(PRECONDITION_FAILED, f"{virtual} in use")
        if method.if_empty and any(messages for messages, _ in known):
            raise checks.Refusal(PRECONDITION_FAILED, f"{virtual} not empty")
    # Each queue is deleted on its condition once more: what came after the count is not lost.
    conditions = method.if_unused, method.if_empty
    answers: list[Answer] = yield AskEach(
        [QueueRemove(session.vhost, each.name, *conditions) for each in shards]
    )
    return commands.Queue.DeleteOk(sum(answer.result.get("messages", 0) for answer in answers))


_DECISIONS: Final[dict[type[base.Frame], Callable[[Session, Catalog, str, Any], Step]]] = {
    commands.Exchange.Declare: _declare_exchange,
    commands.Exchange.Delete: _delete_exchange,
    commands.Exchange.Bind: _bind_exchange,
    commands.Exchange.Unbind: _bind_exchange,
    commands.Queue.Declare: _declare_queue,
    commands.Queue.Delete: _delete_queue,
    commands.Queue.Bind: _bind_queue,
    commands.Queue.Unbind: _unbind_queue,
    commands.Queue.Purge: _purge_queue,
}
METHODS: Final = frozenset(_DECISIONS)
