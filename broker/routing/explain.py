"""Why a message goes where it goes: each exchange on its way and what that does with it. Pure.

Told by the one function that routes. What chance decides is told as all that may be.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmq.broker.routing.hashing import key_hash
from shardmq.broker.routing.matching import Message, Target
from shardmq.broker.routing.route import Step, route_message
from shardmq.broker.routing.spreading import Chance, ConsistentHash, Spread
from shardmq.broker.routing.table import RoutingTable


class Hash(NamedTuple):
    """What a hash exchange looked at. `hashed`: the bytes; `among`: destinations it chose one of."""

    algorithm: str
    by: str  # "routing key", "header NAME", "property NAME"
    hashed: bytes
    hash: int
    among: int


class Hop(NamedTuple):
    """One exchange. `destinations`: of one that decides by chance all that may be; `alternate`: where the message went
    because none matched."""

    exchange: str
    type: str
    destinations: tuple[Target, ...]
    alternate: str | None
    by_chance: bool
    hash: Hash | None


class Share(NamedTuple):
    """A destination of a hash exchange, and which part of all messages it is to expect."""

    target: Target
    weight: int
    share: float


class Explained(NamedTuple):
    """`queues`: where the message goes; with chance on its way, one of the possible outcomes."""

    queues: tuple[str, ...]
    hops: tuple[Hop, ...]


def explain(table: RoutingTable, exchange: str, message: Message) -> Explained:
    """Raises NoSuchExchange."""
    steps: list[Step] = []
    queues = route_message(table, exchange, message, steps).queues
    return Explained(queues, tuple(_hop(step, message) for step in steps))


def _hop(step: Step, message: Message) -> Hop:
    attributes, matcher = step.exchange.attributes, step.exchange.matcher
    if isinstance(matcher, Chance):
        return Hop(
            step.name,
            attributes.type,
            tuple(lot.target for lot in matcher.lots),
            step.alternate,
            True,
            None,
        )
    targets = tuple(sorted(step.targets))
    return Hop(step.name, attributes.type, targets, step.alternate, False, _hash(matcher, message))


def _hash(matcher: object, message: Message) -> Hash | None:
    if not isinstance(matcher, Spread) or not matcher.lots:
        return None
    by = matcher.hashes if isinstance(matcher, ConsistentHash) else "routing key"
    hashed = matcher.hashed_of(message)
    return Hash(matcher.how, by, hashed, key_hash(hashed), len(matcher.lots))


def ring(table: RoutingTable, exchange: str) -> list[Share] | None:
    """Of an exchange that gives each message to one destination; None: it is another one. Raises NoSuchExchange."""
    matcher = table.exchange(exchange).matcher
    if not isinstance(matcher, Spread):
        return None
    return [
        Share(lot.target, lot.weight, share)
        for lot, share in zip(matcher.lots, matcher.shares(), strict=True)
    ]
