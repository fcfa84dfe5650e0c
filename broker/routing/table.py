"""RoutingTable: a vhost's exchanges, queues and bindings. A change makes a new table; the old one stays as it was.

A change costs as much as what it changes, however many bindings there are, because all tables of one family share
one `_State`: the newest holds it, an older one holds the steps that lead back from the next newer (Baker's
rerooting). Reading an old table turns the steps around until the old one holds the state; so reading old and new
by turns is right but slow, keeping an old table keeps every step since, and a family belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from broker.routing.matching import Matcher, Target
from broker.routing.types import TYPES

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class NoSuchExchange(KeyError):
    """The exchange is not in the table."""


class NoSuchDestination(KeyError):
    """The queue or exchange a binding should lead to is not in the table."""


class Binding(NamedTuple):
    source: str
    target: Target
    key: str
    arguments: Mapping[str, Any]

    def identity(self) -> tuple[str, Target, str, bytes]:
        """Arguments make another binding, their order does not."""
        return (self.source, self.target, self.key, _encoder.encode(self.arguments) if self.arguments else b"")


class Attributes(NamedTuple):
    """An exchange without its bindings."""

    type: str
    arguments: Mapping[str, Any]
    internal: bool

    @property
    def alternate(self) -> str | None:
        name = self.arguments.get("alternate-exchange")
        return name if isinstance(name, str) else None


class Exchange:
    __slots__ = ("attributes", "bindings", "destination_exchanges", "matcher")

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes
        self.bindings: dict[Any, Binding] = {}
        self.destination_exchanges: dict[str, int] = {}  # with the number of bindings to each
        self.matcher: Matcher = TYPES[attributes.type](attributes.arguments)

    def bind(self, identity: Any, binding: Binding) -> None:
        self.bindings[identity] = binding
        self.matcher.add(binding.key, binding.arguments, binding.target)
        kind, name = binding.target
        if kind == "exchange":
            self.destination_exchanges[name] = self.destination_exchanges.get(name, 0) + 1

    def unbind(self, identity: Any, binding: Binding) -> None:
        del self.bindings[identity]
        self.matcher.remove(binding.key, binding.arguments, binding.target)
        kind, name = binding.target
        if kind == "exchange":
            self.destination_exchanges[name] -= 1
            if not self.destination_exchanges[name]:
                del self.destination_exchanges[name]

    def become(self, attributes: Attributes) -> None:
        if (attributes.type, attributes.arguments) != (self.attributes.type, self.attributes.arguments):
            self.matcher = TYPES[attributes.type](attributes.arguments)
            for one in self.bindings.values():
                self.matcher.add(one.key, one.arguments, one.target)
        self.attributes = attributes


# One step of a change: what a name or a binding shall be from now on. None: nothing.
class SetExchange(NamedTuple):
    name: str
    attributes: Attributes | None


class SetQueue(NamedTuple):
    name: str
    exists: bool


class SetBinding(NamedTuple):
    binding: Binding
    exists: bool


Step = SetExchange | SetQueue | SetBinding


class _State:
    """What the steps change. Bindings are found from both ends."""

    __slots__ = ("exchanges", "into", "queues")

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.queues: set[str] = set()
        self.into: dict[Target, dict[Any, Binding]] = {}

    def apply(self, steps: Iterable[Step]) -> list[Step]:
        """Returns the steps that undo these, in the order to take them."""
        undo = [self._take(step) for step in steps]
        undo.reverse()
        return undo

    def _take(self, step: Step) -> Step:
        if isinstance(step, SetBinding):
            (self._bind if step.exists else self._unbind)(step.binding)
            return SetBinding(step.binding, not step.exists)
        if isinstance(step, SetQueue):
            (self.queues.add if step.exists else self.queues.remove)(step.name)
            return SetQueue(step.name, not step.exists)
        return self._set_exchange(step)

    def _set_exchange(self, step: SetExchange) -> Step:
        old = self.exchanges.get(step.name)
        if step.attributes is None:
            assert old is not None and not old.bindings, "its bindings go first"
            del self.exchanges[step.name]
        elif old is None:
            self.exchanges[step.name] = Exchange(step.attributes)
        else:
            before = old.attributes
            old.become(step.attributes)
            return SetExchange(step.name, before)
        return SetExchange(step.name, old.attributes if old else None)

    def _bind(self, binding: Binding) -> None:
        identity = binding.identity()
        self.exchanges[binding.source].bind(identity, binding)
        self.into.setdefault(binding.target, {})[identity] = binding

    def _unbind(self, binding: Binding) -> None:
        identity = binding.identity()
        self.exchanges[binding.source].unbind(identity, binding)
        into = self.into[binding.target]
        del into[identity]
        if not into:
            del self.into[binding.target]


DEFAULT_EXCHANGE = ""


class RoutingTable:
    """The default exchange is always there; it binds every queue by its name."""

    __slots__ = ("_back", "_newer", "_state")

    def __init__(self, state: _State) -> None:
        self._state: _State | None = state
        self._newer: RoutingTable | None = None
        self._back: list[Step] = []  # taken on _newer's state they lead to this table

    @classmethod
    def empty(cls) -> RoutingTable:
        state = _State()
        state.apply([SetExchange(DEFAULT_EXCHANGE, Attributes("direct", {}, False))])
        return cls(state)

    # -- reading: what these return is valid until another table of the family is read or made

    def exchange(self, name: str) -> Exchange:
        try:
            return self._reached().exchanges[name]
        except KeyError:
            raise NoSuchExchange(name) from None

    def has_exchange(self, name: str) -> bool:
        return name in self._reached().exchanges

    def has_queue(self, name: str) -> bool:
        return name in self._reached().queues

    # -- changing

    def with_exchange(
        self, name: str, type: str, arguments: Mapping[str, Any] | None = None, internal: bool = False
    ) -> RoutingTable:
        """Replaces an existing one, whose bindings stay. The default exchange is never replaced."""
        if type not in TYPES:
            raise ValueError(f"unknown exchange type {type!r}")
        attributes = Attributes(type, dict(arguments or {}), internal)
        old = self._reached().exchanges.get(name)
        if name == DEFAULT_EXCHANGE or (old is not None and old.attributes == attributes):
            return self
        return self._changed([SetExchange(name, attributes)])

    def without_exchange(self, name: str) -> RoutingTable:
        """Its bindings, in both directions, go with it."""
        state = self._reached()
        if name == DEFAULT_EXCHANGE or name not in state.exchanges:
            return self
        gone = state.exchanges[name].bindings | state.into.get(Target("exchange", name), {})
        return self._changed([*_unbound(gone), SetExchange(name, None)])

    def with_queue(self, name: str) -> RoutingTable:
        if name in self._reached().queues:
            return self
        return self._changed([SetQueue(name, True), SetBinding(_default_binding(name), True)])

    def without_queue(self, name: str) -> RoutingTable:
        """Its bindings go with it."""
        state = self._reached()
        if name not in state.queues:
            return self
        return self._changed([*_unbound(state.into[Target("queue", name)]), SetQueue(name, False)])

    def with_binding(
        self, source: str, kind: str, destination: str, key: str, arguments: Mapping[str, Any] | None = None
    ) -> RoutingTable:
        state = self._reached()
        binding = Binding(source, Target(kind, destination), key, dict(arguments or {}))
        if binding.identity() in self.exchange(source).bindings:
            return self
        if destination not in (state.queues if kind == "queue" else state.exchanges):
            raise NoSuchDestination(destination)
        return self._changed([SetBinding(binding, True)])

    def without_binding(
        self, source: str, kind: str, destination: str, key: str, arguments: Mapping[str, Any] | None = None
    ) -> RoutingTable:
        """A missing binding, or exchange, is no error. What the default exchange binds cannot be unbound."""
        exchange = self._reached().exchanges.get(source)
        binding = Binding(source, Target(kind, destination), key, dict(arguments or {}))
        if exchange is None or source == DEFAULT_EXCHANGE or binding.identity() not in exchange.bindings:
            return self
        return self._changed([SetBinding(binding, False)])

    def _changed(self, steps: list[Step]) -> RoutingTable:
        state = self._reached()
        newer = RoutingTable(state)
        self._back = state.apply(steps)
        self._state, self._newer = None, newer
        return newer

    def _reached(self) -> _State:
        """The state, as this table means it."""
        if self._state is not None:
            return self._state
        way = [self]
        while (newer := way[-1]._newer) is not None:
            way.append(newer)
        for older, newer in zip(reversed(way[:-1]), reversed(way), strict=False):
            assert newer._state is not None
            state, newer._state = newer._state, None
            newer._back, newer._newer = state.apply(older._back), older
            older._back, older._newer, older._state = [], None, state
        assert self._state is not None
        return self._state


def _default_binding(queue: str) -> Binding:
    return Binding(DEFAULT_EXCHANGE, Target("queue", queue), queue, {})


def _unbound(bindings: Mapping[Any, Binding]) -> list[Step]:
    return [SetBinding(binding, False) for binding in bindings.values()]
