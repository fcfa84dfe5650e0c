"""Decides about the shard queues of stream exchanges, and about the steps of a reshard."""

from __future__ import annotations

from typing import Final

from shardmq.broker.controller import policies
from shardmq.broker.controller.decisions.decision import Decision, Inputs
from shardmq.broker.controller.decisions.queues import check_limit, removal_of
from shardmq.broker.controller.requests import Closed, CutOff, NodesChanged, Restore, Settled
from shardmq.broker.controller.resharding import cuts, shard_sets
from shardmq.broker.controller.resharding.reshaping import Reshaping, released
from shardmq.broker.controller.resharding.states import Event, changed_by
from shardmq.broker.model import checks
from shardmq.broker.model.arguments import DEFINITION, NUMBER
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import (
    ExchangeDelete,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    QueuePut,
)
from shardmq.broker.model.policies import COMPONENTS, EXCHANGE, NO_POLICIES, Policies

# Changes that stream exchanges may have to follow, and the components of parameters among them.
RESHAPING: Final = frozenset((ExchangePut, ExchangeDelete, ParameterPut, ParameterDelete))
SHARDING_COMPONENTS: Final = COMPONENTS | {policies.STREAM, DEFINITION, policies.SHARDS}


def check_shard_set(inputs: Inputs, vhost: Vhost, put: ExchangePut) -> None:
    """Check that the shards a declare asks for are possible. Raises Refusal.

    What only a policy asks for is never the client's fault, and not checked here.
    """
    shard_sets.check_arguments(put)
    want = shard_sets.by_arguments(inputs.catalog, put, inputs.places)
    if want is not None:
        longest = want.name(put.name, want.number - 1)
        checks.check_new_name("queue", longest)
        check_limit(inputs.catalog, vhost, len(want.names(put.name) - vhost.queues.keys()))


def follow(inputs: Inputs, decided: Decision, before: Policies) -> Decision:
    """Return what stream exchanges need after a decision whose changes are in the catalog already.

    `before` holds the former policies of the vhost whose policies the decision changes.
    """
    decision = Decision()
    vhosts = inputs.catalog.vhosts
    for in_steps, exchanges in ((False, decided.lost_shards), (True, decided.next_steps)):
        for vhost_name, exchange in sorted(exchanges):
            if (there := vhosts.get(vhost_name)) is not None:
                reshape(inputs, decision, there, exchange, before, in_steps)
    for change in decided.changes:
        vhost = vhosts.get(getattr(change, "vhost", ""))
        if vhost is None:
            continue
        match change:
            case ExchangePut():
                reshape(inputs, decision, vhost, change.name, before)
            case ExchangeDelete():
                release(inputs, decision, vhost, change.name, shard_sets.DRAIN)
            case ParameterPut() | ParameterDelete() if change.component in SHARDING_COMPONENTS:
                for exchange in [*vhost.exchanges]:
                    reshape(inputs, decision, vhost, exchange, before)
    return decision


def reshape_all(inputs: Inputs) -> Decision:
    """Return what is to be done at the start of the controller.

    Missing shard queues are made, and those of exchanges that are no stream exchanges any more are
    released.
    """
    decision = Decision()
    for vhost in inputs.catalog.vhosts.values():
        for exchange in dict.fromkeys([*vhost.exchanges, *vhost.part_exchanges()]):
            reshape(inputs, decision, vhost, exchange, NO_POLICIES)
    return decision


def reshape(
    inputs: Inputs,
    decision: Decision,
    vhost: Vhost,
    name: str,
    before: Policies,
    in_steps: bool = True,
) -> None:
    """Add to the decision what leads an exchange to the shard queues that it is to have."""
    exchange = vhost.exchanges.get(name)
    want = (
        shard_sets.wanted(inputs.catalog, vhost, exchange, inputs.places)
        if exchange is not None
        else None
    )
    if exchange is None or want is None:
        if not vhost.parts(name):
            return
        arguments = exchange.arguments if exchange is not None else {}
        choice = shard_sets.when_gone(arguments, before.of(EXCHANGE, name).definition)
        want = shard_sets.as_it_was(vhost, name) if choice == shard_sets.MERGE else None
        if exchange is None or want is None:
            release(inputs, decision, vhost, name, choice)
            return
        # The catalog keeps the choice, because what asked for it is gone at the next step.
        value = {NUMBER: 1, policies.MERGED: True}
        decision.changes.append(ParameterPut(vhost.name, policies.SHARDS, name, value))
        decision.notes.append(
            f"exchange '{name}' in vhost '{vhost.name}': its shard queues drain into one"
        )
    most = inputs.catalog.vhost_limit(vhost.name, "max-queues")
    new = sum(put.vhost == vhost.name and put.name not in vhost.queues for put in decision.create)
    there = len(vhost.queues) - vhost.hidden_queues + new
    room = want.number if most is None else max(0, most - there)
    reshaping = Reshaping(vhost, exchange, want, inputs.places, inputs.leaving, in_steps)
    done = reshaping.run(inputs.new_queue_id, room)
    decision.changes += done.changes
    decision.create += done.created + done.told
    decision.notes += done.notes


def release(inputs: Inputs, decision: Decision, vhost: Vhost, exchange: str, choice: str) -> None:
    """Add to the decision what becomes of the shards of an exchange that has none any more."""
    done = released(vhost, exchange, choice)
    removal = removal_of(inputs.catalog, done.dropped)
    decision.changes += done.changes + removal.changes
    decision.drop += removal.drop
    decision.create += done.told
    decision.notes += done.notes


def restore(inputs: Inputs, ask: Restore, owner: str) -> Decision:
    decision = Decision()
    vhost = inputs.catalog.vhosts.get(ask.vhost)
    if vhost is not None:
        reshape(inputs, decision, vhost, ask.exchange, NO_POLICIES)
    return decision


def nodes_changed(inputs: Inputs, ask: NodesChanged, owner: str) -> Decision:
    return Decision(next_steps=with_shard_queues(inputs))


def with_shard_queues(inputs: Inputs) -> set[tuple[str, str]]:
    """Return the exchanges that have shard queues, each with its vhost."""
    return {
        (vhost.name, exchange)
        for vhost in inputs.catalog.vhosts.values()
        for exchange in vhost.part_exchanges()
    }


def closed(inputs: Inputs, ask: Closed, owner: str) -> Decision:
    queues = [queue for queue in _parts(inputs, ask) if queue.id in ask.queues]
    changes = changed_by(Event.SHARD_HOLDS_BACK, queues)
    return Decision([*changes], next_steps={(ask.vhost, ask.exchange)})


def settled(inputs: Inputs, ask: Settled, owner: str) -> Decision:
    parts = _parts(inputs, ask)
    opened = changed_by(Event.SETTLED, parts)
    number = cuts.number_under_way(parts)
    lost = [] if number is None else cuts.cut_at(parts, number, ask.offsets, gains=False)
    return Decision([*lost, *opened], create=opened, next_steps={(ask.vhost, ask.exchange)})


def cut_off(inputs: Inputs, ask: CutOff, owner: str) -> Decision:
    return Decision([*cuts.cut_at(_parts(inputs, ask), ask.number, ask.offsets, gains=True)])


def _parts(inputs: Inputs, ask: Closed | CutOff | Settled) -> list[QueuePut]:
    vhost = inputs.catalog.vhosts.get(ask.vhost)
    return vhost.parts(ask.exchange) if vhost is not None else []
