"""RoutingTable: a vhost's exchanges, queues and bindings. A change makes a new table.

An old table stays as it was. A change costs as much as what it changes, however many bindings there
are, because all tables of one family share one `_State`: the newest holds it, an older one holds
the steps that lead back from the next newer (Baker's rerooting). Reading an old table turns the
steps around until the old table holds the state. So reading old and new tables by turns is right
but slow, keeping an old table keeps every step since, and a family belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from shardmq.broker.routing.delaying import inner_type
from shardmq.broker.routing.keeping import keeps
from shardmq.broker.routing.matching import Matcher, QueueNames, Target
from shardmq.broker.routing.types import TYPES, matcher_of

_encoder = msgspec.msgpack.Encoder(order="deterministic")

Identity = tuple[Target, str, bytes]
NO_ARGUMENTS: Mapping[str, Any] = {}


class NoSuchExchange(KeyError):
    """The exchange is not in the table."""


class NoSuchDestination(KeyError):
    """The queue or exchange a binding should lead to is not in the table."""


class Binding(NamedTuple):
    source: str
    target: Target
    key: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(
        cls, source: str, kind: str, destination: str, key: str, arguments: Mapping[str, Any] | None
    ) -> Binding:
        return cls(
            source, Target(kind, destination), key, dict(arguments) if arguments else NO_ARGUMENTS
        )

    def identity(self) -> Identity:
        """Return what tells the binding from others of its exchange.

        Arguments make another binding, their order does not.
        """
        return (self.target, self.key, _encoder.encode(self.arguments) if self.arguments else b"")


class Attributes(NamedTuple):
    """An exchange without its bindings.

    `delays` is the queue where messages wait that are not due.
    """

    type: str
    arguments: Mapping[str, Any]
    internal: bool
    delays: str = ""

    @property
    def alternate(self) -> str | None:
        name = self.arguments.get("alternate-exchange")
        return name if isinstance(name, str) else None


class Exchange:
    __slots__ = ("attributes", "bindings", "destination_exchanges", "keeps", "matcher")

    def __init__(self, attributes: Attributes, matcher: Matcher | None = None) -> None:
        self.attributes = attributes
        self.keeps = _keeps(attributes)  # whether it keeps messages for bindings to come
        self.bindings: dict[Identity, Binding] = {}
        self.destination_exchanges: dict[str, int] = {}  # number of bindings to each exchange
        self.matcher: Matcher = matcher or _matcher(attributes)

    def bind(self, identity: Identity, binding: Binding) -> None:
        self.bindings[identity] = binding
        self.matcher.add(binding.key, binding.arguments, binding.target)
        kind, name = binding.target
        if kind == "exchange":
            self.destination_exchanges[name] = self.destination_exchanges.get(name, 0) + 1

    def unbind(self, identity: Identity, binding: Binding) -> None:
        del self.bindings[identity]
        self.matcher.remove(binding.key, binding.arguments, binding.target)
        kind, name = binding.target
        if kind == "exchange":
            self.destination_exchanges[name] -= 1
            if not self.destination_exchanges[name]:
                del self.destination_exchanges[name]

    def become(self, attributes: Attributes) -> None:
        if attributes._replace(internal=False) != self.attributes._replace(internal=False):
            self.matcher = _matcher(attributes)
            for one in self.bindings.values():
                self.matcher.add(one.key, one.arguments, one.target)
        self.attributes = attributes
        self.keeps = _keeps(attributes)


def _keeps(attributes: Attributes) -> bool:
    return keeps(inner_type(attributes.type, attributes.arguments), attributes.arguments)


def _matcher(attributes: Attributes) -> Matcher:
    return matcher_of(attributes.type, attributes.arguments, attributes.delays)


# One step of a change: what a name or a binding is from now on. None: it is gone.
class SetAttributes(NamedTuple):
    name: str
    attributes: Attributes


class SetExchange(NamedTuple):
    """Put an exchange with the bindings it has as source, or take it away.

    Whole exchanges come and go at the cost of their entries in `into`.
    """

    name: str
    exchange: Exchange | None


class SetQueue(NamedTuple):
    name: str
    exists: bool


class SetBinding(NamedTuple):
    identity: Identity
    binding: Binding
    exists: bool


# The bindings that lead to one target, by source and identity.
Into = dict[tuple[str, Identity], Binding]


class SetInto(NamedTuple):
    """Put all bindings that lead to a target, or take them away, at once.

    There may be tens of thousands, and everybody waits.
    """

    target: Target
    into: Into


Step = SetAttributes | SetExchange | SetQueue | SetBinding | SetInto


class _State:
    """The state that the steps change. Bindings are found from both ends."""

    __slots__ = ("exchanges", "into", "queues")

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.queues: set[str] = set()
        self.into: dict[Target, Into] = {}

    def apply(self, steps: Iterable[Step]) -> list[Step]:
        """Take the steps; return the steps that undo them, in the order to take them."""
        undo = [self._take(step) for step in steps]
        undo.reverse()
        return undo

    def _take(self, step: Step) -> Step:
        if isinstance(step, SetBinding):
            identity, binding, exists = step
            (self.bind if exists else self.unbind)(identity, binding)
            return SetBinding(identity, binding, not exists)
        if isinstance(step, SetInto):
            return self._set_into(step.target, step.into)
        if isinstance(step, SetQueue):
            (self.queues.add if step.exists else self.queues.remove)(step.name)
            return SetQueue(step.name, not step.exists)
        return (
            self._set_attributes(step)
            if isinstance(step, SetAttributes)
            else self._set_exchange(step)
        )

    def _set_attributes(self, step: SetAttributes) -> Step:
        exchange = self.exchanges[step.name]
        before = exchange.attributes
        exchange.become(step.attributes)
        return SetAttributes(step.name, before)

    def _set_exchange(self, step: SetExchange) -> Step:
        name = step.name
        old = self.exchanges.pop(name, None)
        if old is not None:
            for identity, binding in old.bindings.items():
                self._forget(name, identity, binding)
        if step.exchange is not None:
            self.exchanges[name] = step.exchange
            for identity, binding in step.exchange.bindings.items():
                self.into.setdefault(binding.target, {})[name, identity] = binding
        return SetExchange(name, old)

    def _set_into(self, target: Target, into: Into) -> Step:
        """Put all of these bindings where there are none, or take all away."""
        before = self.into.pop(target, {})
        assert not (before and into)
        exchanges = self.exchanges
        for (source, identity), binding in before.items():
            exchanges[source].unbind(identity, binding)
        for (source, identity), binding in into.items():
            exchanges[source].bind(identity, binding)
        if into:
            self.into[target] = into
        return SetInto(target, before)

    def bind(self, identity: Identity, binding: Binding) -> None:
        self.exchanges[binding.source].bind(identity, binding)
        self.into.setdefault(binding.target, {})[binding.source, identity] = binding

    def unbind(self, identity: Identity, binding: Binding) -> None:
        self.exchanges[binding.source].unbind(identity, binding)
        self._forget(binding.source, identity, binding)

    def _forget(self, source: str, identity: Identity, binding: Binding) -> None:
        into = self.into[binding.target]
        del into[source, identity]
        if not into:
            del self.into[binding.target]


DEFAULT_EXCHANGE = ""


class RoutingTable:
    """A vhost's exchanges, queues and bindings. The default exchange binds every queue by name."""

    __slots__ = ("_back", "_newer", "_state")

    def __init__(self, state: _State) -> None:
        self._state: _State | None = state
        self._newer: RoutingTable | None = None
        self._back: list[Step] = []  # steps that lead from _newer's state to this table

    @classmethod
    def empty(cls) -> RoutingTable:
        state = _State()
        default = Exchange(Attributes("direct", NO_ARGUMENTS, False), QueueNames(state.queues))
        state.apply([SetExchange(DEFAULT_EXCHANGE, default)])
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
        self,
        name: str,
        type: str,
        arguments: Mapping[str, Any] | None = None,
        internal: bool = False,
        delays: str = "",
    ) -> RoutingTable:
        """Return the table with an exchange; the bindings of an exchange that it replaces stay.

        The default exchange is never replaced.
        """
        if type not in TYPES:
            raise ValueError(f"unknown exchange type {type!r}")
        attributes = Attributes(type, dict(arguments or {}), internal, delays)
        old = self._reached().exchanges.get(name)
        if name == DEFAULT_EXCHANGE or (old is not None and old.attributes == attributes):
            return self
        if old is not None:
            return self._changed([SetAttributes(name, attributes)])
        return self._changed([SetExchange(name, Exchange(attributes))])

    def without_exchange(self, name: str) -> RoutingTable:
        """Return the table without an exchange and without its bindings in both directions."""
        state = self._reached()
        if name == DEFAULT_EXCHANGE or name not in state.exchanges:
            return self
        return self._changed([SetInto(Target("exchange", name), {}), SetExchange(name, None)])

    def with_queue(self, name: str) -> RoutingTable:
        if name in self._reached().queues:
            return self
        return self._changed([SetQueue(name, True)])

    def without_queue(self, name: str) -> RoutingTable:
        """Return the table without a queue and its bindings."""
        state = self._reached()
        if name not in state.queues:
            return self
        return self._changed([SetInto(Target("queue", name), {}), SetQueue(name, False)])

    def with_binding(
        self,
        source: str,
        kind: str,
        destination: str,
        key: str,
        arguments: Mapping[str, Any] | None = None,
    ) -> RoutingTable:
        """Return the table with a binding. Nothing is bound to the default exchange."""
        return self.with_bindings(source, kind, destination, ((key, arguments),))

    def with_bindings(
        self,
        source: str,
        kind: str,
        destination: str,
        keys: Iterable[tuple[str, Mapping[str, Any] | None]],
    ) -> RoutingTable:
        """Return the table with bindings by these keys and arguments between the same two."""
        assert source != DEFAULT_EXCHANGE
        state = self._reached()
        exchange, target = self.exchange(source), Target(kind, destination)
        is_there = destination in (state.queues if kind == "queue" else state.exchanges)
        back: list[Step] = []
        for key, arguments in keys:
            binding = Binding(source, target, key, dict(arguments) if arguments else NO_ARGUMENTS)
            identity = binding.identity()
            if identity in exchange.bindings:
                continue
            if not is_there:
                raise NoSuchDestination(destination)
            state.bind(identity, binding)
            back.append(SetBinding(identity, binding, False))
        back.reverse()
        return self._followed(state, back) if back else self

    def without_binding(
        self,
        source: str,
        kind: str,
        destination: str,
        key: str,
        arguments: Mapping[str, Any] | None = None,
    ) -> RoutingTable:
        """Return the table without a binding.

        A missing binding or exchange is no error. Bindings of the default exchange cannot be
        removed.
        """
        state = self._reached()
        exchange = state.exchanges.get(source)
        binding = Binding.of(source, kind, destination, key, arguments)
        identity = binding.identity()
        if exchange is None or identity not in exchange.bindings:
            return self
        state.unbind(identity, binding)
        return self._followed(state, [SetBinding(identity, binding, True)])

    def _changed(self, steps: list[Step]) -> RoutingTable:
        state = self._reached()
        return self._followed(state, state.apply(steps))

    def _followed(self, state: _State, back: list[Step]) -> RoutingTable:
        """Return the table that `state` means now; `back` leads from it to this one."""
        newer = RoutingTable(state)
        self._back = back
        self._state, self._newer = None, newer
        return newer

    def _reached(self) -> _State:
        """Return the state as this table means it."""
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


class NoTable(RoutingTable):
    """A table for processes that do not route: always empty, whatever is put in."""

    __slots__ = ()

    def _changed(self, steps: list[Step]) -> RoutingTable:
        return self

    def with_bindings(
        self,
        source: str,
        kind: str,
        destination: str,
        keys: Iterable[tuple[str, Mapping[str, Any] | None]],
    ) -> RoutingTable:
        return self
