"""Decides about declares and deletes of queues, and about queues that go by themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from shardmq.broker.controller.decisions.bindings import unbound_exchanges, unbound_first
from shardmq.broker.controller.decisions.decision import BAD_REQUEST, Decision, Inputs
from shardmq.broker.controller.decisions.placing import shard_for
from shardmq.broker.controller.requests import Drained, OwnerGone, Pause, Removal
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import ACTIVE, DRAINING, QueueDelete, QueuePut, other_life
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing import hidden
from shardmq.broker.shared.control import QueueDeclare, QueueRemove


def declare(inputs: Inputs, ask: QueueDeclare, owner: str) -> Decision:
    vhost = inputs.vhost(ask.vhost)
    name = checks.clean_name(ask.name)
    current = vhost.queues.get(name)
    # An exclusive queue goes with its connection, so it is never durable; RabbitMQ does the same.
    durable = ask.durable and not ask.exclusive
    arguments = with_type(ask, vhost.put.default_queue_type, current)
    if current is not None and not hidden.is_of_exchange(name):
        checks.check_same_queue(current, durable, ask.auto_delete, owner, ask.exclusive, arguments)
        return Decision(result=_counts(name), count=current)
    # Only front doors declare such a name, and always for one of their connections.
    is_reply_queue = checks.is_reply_queue(name) and ask.exclusive and owner != ""
    if not name:
        checks.check_nameless(arguments)
        name = checks.with_prefix(inputs.new_name(), arguments)
    elif not is_reply_queue:
        checks.check_new_name("queue", name)
    checks.check_queue_arguments(ask.vhost, name, arguments)
    checks.check_queue_type(ask.vhost, name, ask.durable, ask.auto_delete, ask.exclusive, arguments)
    if not is_reply_queue:
        check_limit(inputs.catalog, vhost)
    put = QueuePut(
        ask.vhost,
        name,
        inputs.new_queue_id(),
        shard_for(inputs, vhost, name, arguments, owner, ask.exclusive),
        durable,
        ask.auto_delete,
        owner if ask.exclusive else "",
        arguments,
    )
    return Decision([put], result=_counts(name), create=[put])


def _counts(name: str) -> dict[str, Any]:
    """Return the result of a declare; the numbers are added as shards answer."""
    return {"name": name, "messages": 0, "consumers": 0}


def with_type(ask: QueueDeclare, default: str, current: QueuePut | None) -> dict[str, Any]:
    """Return the arguments of a declare, with the default queue type of the vhost where it applies.

    It applies to a queue that names no type and could be of that type. A queue that was there
    before the vhost had a default, or that is of the default type, may be declared again without a
    type.
    """
    arguments = ask.arguments
    if default in ("", "classic") or "x-queue-type" in arguments:
        return arguments
    if current is not None:
        type = current.arguments.get("x-queue-type")
        return arguments if type != default else {**arguments, "x-queue-type": type}
    if not ask.name or checks.unfit_for_type(default, ask.durable, ask.auto_delete, ask.exclusive):
        return arguments
    return {**arguments, "x-queue-type": default}


def check_limit(catalog: Catalog, vhost: Vhost, new: int = 1) -> None:
    """Check that the vhost may have `new` more queues. Raises Refusal."""
    most = catalog.vhost_limit(vhost.name, "max-queues")
    if most is not None and new > 0 and most < len(vhost.queues) - vhost.hidden_queues + new:
        raise Refusal(
            checks.PRECONDITION_FAILED,
            f"queue limit in vhost '{vhost.name}' ({most}) is reached",
        )


def remove(inputs: Inputs, ask: QueueRemove, owner: str) -> Decision:
    queue = inputs.vhost(ask.vhost).queues.get(ask.name)
    if queue is None or hidden.is_of_exchange(queue.name):
        return Decision(result={"messages": 0})
    checks.check_owner(queue, owner)
    if ask.if_empty and queue.moving is not None:
        raise Refusal(
            checks.PRECONDITION_FAILED,
            f"queue '{ask.name}' in vhost '{ask.vhost}' moves to another shard: "
            "nobody knows whether it is empty",
        )
    if ask.if_unused or ask.if_empty:
        return Decision(first=queue)
    return removal_of(inputs.catalog, [queue])


def pause(inputs: Inputs, ask: Pause, owner: str) -> Decision:
    queue = inputs.vhost(ask.vhost).queues.get(ask.name)
    if queue is None:
        raise checks.no_queue(ask.vhost, ask.name)
    checks.check_owner(queue, owner)
    if queue.arguments.get("x-queue-type") == "stream":
        raise Refusal(
            BAD_REQUEST,
            f"queue '{ask.name}' in vhost '{ask.vhost}' is a stream: it cannot be paused",
        )
    if queue.paused == ask.paused:
        return Decision(uses=[queue])
    put = msgspec.structs.replace(queue, paused=ask.paused)
    return Decision([put], create=[put])


def gone(inputs: Inputs, ask: Removal, owner: str) -> Decision:
    queues = [queue for queue in map(inputs.catalog.queue_by_id, ask.queues) if queue is not None]
    decision = removal_of(inputs.catalog, queues)
    if ask.at_shard:
        decision.drop = _other_lives(queues)
        decision.result = {"messages": ask.messages}
    return decision


def drained(inputs: Inputs, ask: Drained, owner: str) -> Decision:
    queue = inputs.catalog.queue_by_id(ask.queue)
    drains = queue is not None and queue.part is not None and queue.part.state == DRAINING
    return Decision(first=queue) if drains else Decision()


def owner_gone(inputs: Inputs, ask: OwnerGone, owner: str) -> Decision:
    return removal_of(inputs.catalog, inputs.catalog.queues_of(ask.connection))


def removal_of(catalog: Catalog, queues: list[QueuePut]) -> Decision:
    """Return the decision that deletes these queues, and what goes with them."""
    decision = Decision(result={"messages": 0}, drop=[*queues, *_other_lives(queues)])
    for vhost_name in dict.fromkeys(queue.vhost for queue in queues):
        vhost = catalog.vhosts[vhost_name]
        here = [queue for queue in queues if queue.vhost == vhost_name]
        for queue in here:
            if queue.part is not None and queue.part.state == ACTIVE:
                decision.lost_shards.add((vhost_name, queue.part.exchange))
            decision.changes += unbound_first(vhost.bindings_to("queue", queue.name))
            decision.changes.append(QueueDelete(vhost_name, queue.name))
        lost = [binding for queue in here for binding in vhost.bindings_to("queue", queue.name)]
        decision.changes.extend(unbound_exchanges(vhost, lost, set()))
    return decision


def _other_lives(queues: list[QueuePut]) -> list[QueuePut]:
    return [other_life(queue) for queue in queues if queue.moving is not None]
