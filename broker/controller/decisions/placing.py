"""Decides on which shard a new queue is placed: by its copies, its locator and its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmq.broker.controller.decisions.decision import Inputs
from shardmq.broker.controller.peers.presence import door_of
from shardmq.broker.model.arguments import CLIENT_LOCAL, FEWEST_QUEUES
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.copies import asked
from shardmq.broker.model.policies import Policies, queue_arguments, queue_kind
from shardmq.broker.routing.placement import NodeShards, Places
from shardmq.broker.shared.control import node_of


def shard_for(
    inputs: Inputs,
    vhost: Vhost,
    name: str,
    arguments: dict[str, Any],
    owner: str,
    is_exclusive: bool = False,
) -> int:
    """Return the shard for a new queue that a connection declares; `owner` is "" for none.

    The copies that the queue asks for come first: its locator chooses among the shards that suit
    it. An exclusive queue is always at the node of its connection, as in RabbitMQ. It goes with its
    connection, so no copy would be of use.
    """
    locator = _locator(vhost, name, arguments) if arguments or vhost.policies else None
    places = inputs.places if is_exclusive else suiting(inputs.places, vhost, name, arguments)
    if locator == CLIENT_LOCAL or is_exclusive:
        return places.at_node(_node_of_client(inputs, places, owner), vhost.name, name)
    if locator in FEWEST_QUEUES:
        return places.with_fewest(inputs.catalog.index.count_on)
    return places.by_name(vhost.name, name)


def suiting(
    places: Places,
    vhost: Vhost,
    name: str,
    arguments: Mapping[str, Any],
    exchange: str = "",
    policies: Policies | None = None,
) -> Places:
    """Return the places with the shards that suit a queue best by their copies.

    The arguments are those of `asked`.
    """
    others = places.replicas.others
    if not places.replicas.in_sets:
        return places
    return places.with_copies(asked(vhost, name, arguments, others, exchange, policies))


def _locator(vhost: Vhost, name: str, arguments: dict[str, Any]) -> Any:
    """Return the locator that is in force: the argument's, or that of the policy for the name."""
    definition = vhost.policies.of(queue_kind(arguments), name).definition
    found: Mapping[str, Any] = queue_arguments(arguments, definition)
    older = found.get("x-queue-master-locator")
    # A random shard is what the name chooses, too. The newer argument has another meaning for it.
    return found.get("x-queue-leader-locator", None if older == "random" else older)


def _node_of_client(inputs: Inputs, places: Places, owner: str) -> NodeShards | None:
    number = node_of(door_of(owner)) if owner else None
    for node in places.nodes:
        if node.number == number or (number is None and node.name == inputs.asked_at):
            return node
    return None
