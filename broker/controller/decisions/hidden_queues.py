"""Decides about the queues in which an exchange keeps messages: delayed ones, and the last ones.

Such a queue comes with its exchange, lasts as long, and goes with it.
"""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.decisions.decision import Decision, Inputs
from shardmq.broker.controller.decisions.placing import suiting
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import ExchangeDelete, ExchangePut, QueueDelete, QueuePut
from shardmq.broker.model.policies import Policies
from shardmq.broker.routing import delaying, keeping


def hidden_queues(inputs: Inputs, vhost: Vhost, exchange: ExchangePut) -> list[QueuePut]:
    """Return the hidden queues that a new exchange needs."""
    found = [delay_queue(inputs, vhost, exchange)] if vhost.delays(exchange) else []
    type = delaying.inner_type(exchange.type, exchange.arguments)
    if keeping.keeps(type, exchange.arguments):
        arguments = keeping.queue_arguments(type, exchange.arguments)
        name = keeping.queue_name(exchange.name)
        found.append(_hidden_queue(inputs, vhost, exchange, name, arguments))
    return found


def delay_queue(
    inputs: Inputs, vhost: Vhost, exchange: ExchangePut, policies: Policies | None = None
) -> QueuePut:
    """Return the queue in which an exchange keeps messages until they are due.

    policies: those that will be in force; None: those of the vhost.
    """
    arguments = {checks.DELAYS_FOR: exchange.name}
    name = delaying.queue_name(exchange.name)
    return _hidden_queue(inputs, vhost, exchange, name, arguments, policies)


def _hidden_queue(
    inputs: Inputs,
    vhost: Vhost,
    exchange: ExchangePut,
    name: str,
    arguments: dict[str, Any],
    policies: Policies | None = None,
) -> QueuePut:
    places = suiting(inputs.places, vhost, name, {}, exchange.name, policies)
    id, shard = inputs.new_queue_id(), places.by_name(exchange.vhost, name)
    return QueuePut(exchange.vhost, name, id, shard, exchange.durable, arguments=arguments)


def with_hidden_queues_gone(inputs: Inputs, decision: Decision) -> Decision:
    """Add the deletions of hidden queues whose exchanges the decision deletes."""
    for gone in [change for change in decision.changes if isinstance(change, ExchangeDelete)]:
        vhost = inputs.catalog.vhosts.get(gone.vhost)
        for queue in vhost.hidden_queues_of(gone.name) if vhost is not None else ():
            decision.changes.append(QueueDelete(gone.vhost, queue.name))
            decision.drop = [*decision.drop, queue]
    return decision
