"""Decides about binds and unbinds, and what the loss of bindings takes along."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from operator import itemgetter

from shardmq.broker.controller.decisions.decision import Decision, Inputs
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import BindingKey, Vhost
from shardmq.broker.model.changes import (
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangeDelete,
    QueuePut,
)
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing import delaying, hidden
from shardmq.broker.shared.control import Bind, BindMany, Unbind

# A queue or exchange with more bindings than this loses them one by one before it is deleted. Front
# doors take changes in slices, with messages between them, but one change is never divided.
BINDINGS_AT_ONCE_MAX = 500


def bind(inputs: Inputs, ask: Bind, owner: str) -> Decision:
    vhost = inputs.vhost(ask.vhost)
    queue = _check_bind(vhost, ask, owner)
    put = BindingPut(
        ask.vhost, ask.source, ask.kind, ask.destination, ask.routing_key, ask.arguments
    )
    return Decision([] if vhost.has_binding(put) else [put], uses=[] if queue is None else [queue])


def bind_many(inputs: Inputs, ask: BindMany, owner: str) -> Decision:
    """Decide about many binds as one by one, up to the first that is refused.

    Of binds in a row between the same exchange and queue only the first is checked in all respects,
    if the exchange takes any key.
    """
    vhost, decision = inputs.vhost(ask.vhost), Decision()
    new: dict[BindingKey, BindingPut] = {}
    done = 0
    try:
        for (source, destination), run in groupby(ask.binds, itemgetter(0, 1)):
            known, queue, any_key = vhost.bindings_by_key(source), None, False
            for _, _, key in run:
                if not any_key:
                    one = Bind(ask.vhost, source, "queue", destination, key, {})
                    queue = _check_bind(vhost, one, owner)
                    exchange = vhost.exchanges[source]
                    type = delaying.inner_type(exchange.type, exchange.arguments)
                    any_key = checks.takes_any_binding(type, {})
                identity = (source, "queue", destination, key, b"")
                if identity not in known:
                    new[identity] = BindingPut(ask.vhost, source, "queue", destination, key)
                done += 1
            decision.uses += [] if queue is None else [queue]
    except Refusal as refusal:
        decision.refused, decision.result = refusal, {"done": done}
    decision.changes.extend(new.values())
    return decision


def unbind(inputs: Inputs, ask: Unbind, owner: str) -> Decision:
    """Decide about an unbind; a binding or an end of it that does not exist is unbound already."""
    vhost = inputs.vhost(ask.vhost)
    checks.check_not_default(ask.source)
    queue = vhost.queues.get(ask.destination) if ask.kind == "queue" else None
    if queue is not None:
        checks.check_owner(queue, owner)
    fields = (ask.vhost, ask.source, ask.kind, ask.destination, ask.routing_key, ask.arguments)
    gone = BindingDelete(*fields)
    if not vhost.has_binding(gone):
        return Decision()
    return Decision([gone, *unbound_exchanges(vhost, [BindingPut(*fields)], set())])


def _check_bind(vhost: Vhost, ask: Bind, owner: str) -> QueuePut | None:
    """Return the queue that is bound, if it is a queue. Raises Refusal."""
    queue = _check_ends(vhost, ask, owner)
    source = vhost.exchanges[ask.source]
    type = delaying.inner_type(source.type, source.arguments)
    checks.check_binding(type, ask.routing_key, ask.arguments)
    checks.check_keeping_bind(type, source.arguments, ask.kind, ask.arguments)
    return queue


def _check_ends(vhost: Vhost, ask: Bind, owner: str) -> QueuePut | None:
    checks.check_not_default(ask.source)
    if ask.source not in vhost.exchanges:
        raise checks.no_exchange(vhost.name, ask.source)
    if ask.kind == "exchange":
        checks.check_not_default(ask.destination)
        if ask.destination not in vhost.exchanges:
            raise checks.no_exchange(vhost.name, ask.destination)
        return None
    queue = vhost.queues.get(ask.destination)
    if queue is None or hidden.is_of_exchange(queue.name):
        raise checks.no_queue(vhost.name, ask.destination)
    checks.check_owner(queue, owner)
    return queue


def unbound_first(bindings: Collection[BindingPut]) -> list[AnyChange]:
    """Return the unbinds that must come before the deletion of a thing with these bindings."""
    if len(bindings) <= BINDINGS_AT_ONCE_MAX:
        return []
    return [
        BindingDelete(b.vhost, b.source, b.kind, b.destination, b.routing_key, b.arguments)
        for b in bindings
    ]


def unbound_exchanges(vhost: Vhost, lost: Iterable[BindingPut], dead: set[str]) -> list[AnyChange]:
    """Return the deletions of auto-delete exchanges that follow from the loss of bindings.

    Such an exchange goes when its last binding *from* it goes, and may take others along. `dead`
    holds the exchanges that go anyway; it is added to.
    """
    gone: dict[str, int] = {}
    changes: list[AnyChange] = []
    todo = list(lost)
    for binding in todo:  # grows while it runs
        source = binding.source
        if source in dead:
            continue
        gone[source] = gone.get(source, 0) + 1
        if vhost.exchanges[source].auto_delete and gone[source] == vhost.count_from(source):
            dead.add(source)
            changes.append(ExchangeDelete(vhost.name, source))
            todo.extend(vhost.bindings_to("exchange", source))
    return changes
