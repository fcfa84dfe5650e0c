"""Decides about super streams: an exchange, its partitions and their bindings, all or none.

A client could declare each of these objects alone, but a crash between two declares would leave a
part of the set behind. One decision makes one batch of changes, which is written at once.
"""

from __future__ import annotations

from shardmq.broker.controller.decisions import exchanges, queues
from shardmq.broker.controller.decisions.decision import BAD_REQUEST, Decision, Inputs
from shardmq.broker.controller.requests import SuperStreamDeclare
from shardmq.broker.model import checks
from shardmq.broker.model.changes import BindingPut
from shardmq.broker.model.checks import Refusal


def declare(inputs: Inputs, ask: SuperStreamDeclare, owner: str) -> Decision:
    """Return the changes that make the whole set. Raises Refusal if a part exists or cannot be."""
    vhost = inputs.vhost(ask.vhost)
    exchange, partitions, binds = ask.parts()
    source = checks.clean_name(exchange.name)
    if source in vhost.exchanges:
        raise Refusal(BAD_REQUEST, f"there is already an exchange named {source}")
    names: set[str] = set()
    for partition in partitions:
        name = checks.clean_name(partition.name)
        if name in vhost.queues or name in names:
            raise Refusal(BAD_REQUEST, f"there is already a queue named {name}")
        names.add(name)
    queues.check_limit(inputs.catalog, vhost, len(partitions))
    decision = exchanges.declare(inputs, exchange, owner)
    for partition, bind in zip(partitions, binds, strict=True):
        made = queues.declare(inputs, partition, owner)
        decision.changes += made.changes
        decision.create += made.create
        checks.check_binding(exchange.type, bind.routing_key, bind.arguments)
        (put,) = made.create
        decision.changes.append(
            BindingPut(ask.vhost, source, "queue", put.name, bind.routing_key, bind.arguments)
        )
    return decision
