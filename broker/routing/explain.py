"""Why a message goes where it goes: the exchanges on its way and what each does with it.

The function that routes tells the steps. Where chance decides, all possible destinations are told.
Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmq.broker.routing.hashing import key_hash
from shardmq.broker.routing.matching import Message, Target
from shardmq.broker.routing.route import Step, route_message
from shardmq.broker.routing.spreading import Chance, ConsistentHash, Spread
from shardmq.broker.routing.table import RoutingTable


class Hash(NamedTuple):
    """The hash by which an exchange chose a destination.

    `by` is "routing key", "header NAME" or "property NAME", `hashed` the bytes, and `among` the
    number of destinations that it chose one of.
    """

    algorithm: str
    by: str
    hashed: bytes
    hash: int
    among: int


class RouteStep(NamedTuple):
    """A message at one exchange.

    `destinations` are all possible ones if the exchange decides by chance. `alternate` is where the
    message went because no binding matched.
    """

    exchange: str
    type: str
    destinations: tuple[Target, ...]
    alternate: str | None
    by_chance: bool
    hash: Hash | None


class Share(NamedTuple):
    """A destination of a hash exchange, and the part of all messages that it is to expect."""

    target: Target
    weight: int
    share: float


class Explained(NamedTuple):
    """The way of a message.

    `queues` are where the message goes. With chance on its way they are one possible outcome.
    """

    queues: tuple[str, ...]
    hops: tuple[RouteStep, ...]


def explain(table: RoutingTable, exchange: str, message: Message) -> Explained:
    """Explain the way of a message. Raises NoSuchExchange."""
    steps: list[Step] = []
    queues = route_message(table, exchange, message, steps).queues
    return Explained(queues, tuple(_hop(step, message) for step in steps))


def _hop(step: Step, message: Message) -> RouteStep:
    attributes, matcher = step.exchange.attributes, step.exchange.matcher
    if isinstance(matcher, Chance):
        return RouteStep(
            step.name,
            attributes.type,
            tuple(each.target for each in matcher.destinations),
            step.alternate,
            True,
            None,
        )
    targets = tuple(sorted(step.targets))
    return RouteStep(
        step.name, attributes.type, targets, step.alternate, False, _hash(matcher, message)
    )


def _hash(matcher: object, message: Message) -> Hash | None:
    if not isinstance(matcher, Spread) or not matcher.destinations:
        return None
    by = matcher.hashes if isinstance(matcher, ConsistentHash) else "routing key"
    hashed = matcher.hashed_of(message)
    return Hash(matcher.how, by, hashed, key_hash(hashed), len(matcher.destinations))


def ring(table: RoutingTable, exchange: str) -> list[Share] | None:
    """Return the shares of an exchange that gives each message to one destination.

    Return None for another exchange. Raises NoSuchExchange.
    """
    matcher = table.exchange(exchange).matcher
    if not isinstance(matcher, Spread):
        return None
    return [
        Share(each.target, each.weight, share)
        for each, share in zip(matcher.destinations, matcher.shares(), strict=True)
    ]
