"""Exchange types that give each message to one destination: by hash, by remainder or by chance.

Which destination a hash leads to depends on nothing but the set of bindings: not on their order,
and not on earlier bindings. So it is the same at every front door and after every restart. Without
one of n destinations only the messages of that destination go elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import msgspec

from shardmq.broker.routing.hashing import jump_weighted, key_hash, modulus, rendezvous_weighted
from shardmq.broker.routing.matching import NOTHING, Arguments, Message, Target

WEIGHT_MAX = 10000  # RabbitMQ's
# Types that do not take every key of a binding.
CHECKED_KEYS = frozenset(("x-consistent-hash", "x-local-random"))
HASH_PROPERTIES = ("message_id", "correlation_id", "timestamp")
# LavinMQ's words. "ring" is done without points on a ring, so shares are not uneven.
ALGORITHMS = ("ring", "jump")

_encoder = msgspec.msgpack.Encoder(order="deterministic", enc_hook=repr)

How = Literal["rendezvous", "jump", "modulus", "chance"]


class Destination(NamedTuple):
    """A destination that may be chosen.

    `seed`: 64 bits made of kind and name.
    """

    target: Target
    weight: int
    seed: int


class Spread(ABC):
    """Destinations in the order of their names.

    Two bindings to one destination are one, with the larger weight.
    """

    how: How
    by_key = True

    def __init__(self, arguments: Arguments = NOTHING) -> None:
        self._weights: dict[Target, list[int]] = {}
        self._destinations: tuple[Destination, ...] | None = ()

    def add(self, key: str, arguments: Arguments, target: Target) -> None:
        self._weights.setdefault(target, []).append(self._weight(key))
        self._destinations = None

    def remove(self, key: str, arguments: Arguments, target: Target) -> None:
        weights = self._weights[target]
        weights.remove(self._weight(key))
        if not weights:
            del self._weights[target]
        self._destinations = None

    @property
    def destinations(self) -> tuple[Destination, ...]:
        if self._destinations is None:
            found = sorted(self._weights, key=self._rank)
            self._destinations = tuple(
                Destination(target, max(self._weights[target]), _seed(target)) for target in found
            )
        return self._destinations

    def shares(self) -> list[float]:
        """Return the part of all messages that each of `destinations` is to expect."""
        whole = sum(each.weight for each in self.destinations)
        return [each.weight / whole for each in self.destinations]

    def hashed_of(self, message: Message) -> bytes:
        """Return the bytes of a message that decide."""
        return message.key.encode()

    def _rank(self, target: Target) -> tuple[str | int, ...]:
        return target

    def match(self, message: Message) -> Collection[Target]:
        destinations = self.destinations
        return (destinations[self._choose(message, destinations)].target,) if destinations else ()

    def _weight(self, key: str) -> int:
        return 1

    @abstractmethod
    def _choose(self, message: Message, destinations: tuple[Destination, ...]) -> int:
        """Return the index of the destination that gets the message; there is at least one."""


class ConsistentHash(Spread):
    """Hashes the routing key, a header or a property. Binding keys are weights.

    The hash chooses by rendezvous, or by jump hash over buckets that are numbered by the length of
    the names first, so that ...-10 comes behind ...-9.
    """

    def __init__(self, arguments: Arguments = NOTHING) -> None:
        super().__init__(arguments)
        self._header = _text(arguments.get("hash-header")) or _text(arguments.get("x-hash-on"))
        self._property = _text(arguments.get("hash-property"))
        self.by_key = not self._header and not self._property
        self.how = "jump" if arguments.get("x-algorithm") == "jump" else "rendezvous"

    def _weight(self, key: str) -> int:
        return int(key) if key.isascii() and key.isdigit() else 1

    def _choose(self, message: Message, destinations: tuple[Destination, ...]) -> int:
        hashed = key_hash(self.hashed_of(message))
        if self.how == "jump":
            return jump_weighted(hashed, [each.weight for each in destinations])
        return rendezvous_weighted(hashed, [(each.weight, each.seed) for each in destinations])

    def _rank(self, target: Target) -> tuple[str | int, ...]:
        return (target.kind, len(target.name), target.name) if self.how == "jump" else target

    @property
    def hashes(self) -> str:
        """Return in words what is hashed."""
        if self._header:
            return f"header {self._header}"
        return f"property {self._property}" if self._property else "routing key"

    def hashed_of(self, message: Message) -> bytes:
        """Return the bytes that are hashed.

        A message without the header or property goes where one with an empty one would.
        """
        if self._header:
            return _bytes_of(message.headers.get(self._header))
        if self._property:
            return _bytes_of(message.properties.get(self._property))
        return message.key.encode()


class ModulusHash(Spread):
    how: How = "modulus"

    def _choose(self, message: Message, destinations: tuple[Destination, ...]) -> int:
        return modulus(key_hash(message.key.encode()), len(destinations))


class Chance(Spread):
    """x-random and x-local-random: any destination, with equal chances.

    The queues of all nodes count as local: front doors reach them alike.
    """

    how: How = "chance"
    by_key = False

    def _choose(self, message: Message, destinations: tuple[Destination, ...]) -> int:
        return modulus(message.draw, len(destinations))


def exchange_fault(type: str, arguments: Arguments) -> str | None:
    """Return why there can be no exchange of this type with these arguments, or None.

    The text is RabbitMQ's, for code 406.
    """
    if type != "x-consistent-hash":
        return None
    by_header = "hash-header" in arguments or "x-hash-on" in arguments
    if by_header and "hash-property" in arguments:
        return "hash-header and hash-property are mutually exclusive"
    if (
        "hash-header" in arguments
        and arguments.get("x-hash-on", arguments["hash-header"]) != arguments["hash-header"]
    ):
        return "hash-header and x-hash-on are mutually exclusive"
    algorithm = arguments.get("x-algorithm")
    if algorithm is not None and algorithm not in ALGORITHMS:
        return f"Unsupported x-algorithm: {algorithm}"
    said = arguments.get("hash-property")
    if said is not None and said not in HASH_PROPERTIES:
        return f"Unsupported property: {said}"
    return None


def hash_facts(properties: Any) -> dict[str, Any]:
    """Return those of a message's properties that a hash may be of, by name, if they are set."""
    return {
        name: value for name in HASH_PROPERTIES if (value := getattr(properties, name)) is not None
    }


def weight_fault(type: str, key: str) -> str | None:
    """Return why a binding to an exchange of this type cannot have this key, or None.

    The text is RabbitMQ's, for code 406.
    """
    if type == "x-local-random" and key:
        return f"Non empty binding '{key}' key not permitted"
    if type != "x-consistent-hash":
        return None
    digits = key[1:] if key[:1] in ("-", "+") else key
    if not (digits.isascii() and digits.isdigit()):
        binary = f'<<"{key}">>' if key else "<<>>"  # as Erlang prints it
        return f"The binding key must be an integer: {binary}"
    if int(key) < 1:
        return "The binding key must be greater than 0"
    if int(key) > WEIGHT_MAX:
        return f"The binding key must not exceed {WEIGHT_MAX}"
    return None


def _seed(target: Target) -> int:
    return key_hash(f"{target.kind} {target.name}".encode())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _bytes_of(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else _encoder.encode(value)
