"""Decides about declares and deletes of exchanges."""

from __future__ import annotations

from shardmq.broker.controller import policies
from shardmq.broker.controller.decisions.bindings import unbound_exchanges, unbound_first
from shardmq.broker.controller.decisions.decision import Decision, Inputs
from shardmq.broker.controller.decisions.hidden_queues import hidden_queues
from shardmq.broker.controller.decisions.stream_exchanges import check_shard_set, release
from shardmq.broker.controller.resharding import shard_sets
from shardmq.broker.model import checks
from shardmq.broker.model.changes import ExchangeDelete, ExchangePut, ParameterDelete
from shardmq.broker.shared.control import ExchangeDeclare, ExchangeRemove


def declare(inputs: Inputs, ask: ExchangeDeclare, owner: str) -> Decision:
    name = checks.clean_name(ask.name)
    checks.check_not_default(name)
    vhost = inputs.vhost(ask.vhost)
    current = vhost.exchanges.get(name)
    if current is not None:
        checks.check_same_exchange(
            current, ask.type, ask.durable, ask.auto_delete, ask.internal, ask.arguments
        )
        return Decision(uses=vhost.hidden_queues_of(name))
    checks.check_new_exchange(ask.vhost, name, ask.type, ask.arguments)
    put = ExchangePut(
        ask.vhost, name, ask.type, ask.durable, ask.auto_delete, ask.internal, ask.arguments
    )
    if ask.arguments:
        check_shard_set(inputs, vhost, put)
    queues = hidden_queues(inputs, vhost, put)
    return Decision([*queues, put], create=queues)


def remove(inputs: Inputs, ask: ExchangeRemove, owner: str) -> Decision:
    vhost, name = inputs.vhost(ask.vhost), ask.name
    used = ask.if_unused and vhost.count_from(name) > shard_sets.own_bindings(vhost, name)
    checks.check_exchange_delete(ask.vhost, name, used, ask.if_unused)
    if name not in vhost.exchanges:
        return Decision()
    decision = Decision()
    definition = vhost.policies_of(vhost.exchanges[name]).definition
    choice = shard_sets.when_gone(vhost.exchanges[name].arguments, definition)
    release(inputs, decision, vhost, name, choice)
    lost = vhost.bindings_to("exchange", name)
    decision.changes += unbound_first([*vhost.bindings_from(name), *lost])
    decision.changes.append(ExchangeDelete(ask.vhost, name))
    decision.changes += unbound_exchanges(vhost, lost, {name})
    if (ask.vhost, policies.SHARDS, name) in inputs.catalog.parameters:
        decision.changes.append(ParameterDelete(ask.vhost, policies.SHARDS, name))
    return decision
