"""The catalog as a pure state machine: the same code in the controller and in every front door.

`Catalog.apply` takes one change (`changes.py`) and is total: a change that no longer fits, because
its vhost or exchange is gone, does nothing but count. So two copies that applied the same changes
are equal, whatever the changes were. `controller.authority` decides which changes are made. Where a
message goes is in `Vhost.table`, which is a new table after each change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

import msgspec

from shardmq.broker.model import policies
from shardmq.broker.model.changes import (
    DRAINED_NODES,
    USER_LIMITS,
    VHOST_LIMITS,
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    PermissionDelete,
    PermissionPut,
    QueueDelete,
    QueuePut,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.permissions import Permissions
from shardmq.broker.model.policies import Applied, Policies
from shardmq.broker.model.queue_index import NOTHING_SAID, QueueIndex
from shardmq.broker.routing import delaying, hidden
from shardmq.broker.routing.table import NoTable, RoutingTable

BindingKey = tuple[str, str, str, str, bytes]  # source, kind, destination, routing key, arguments

PREDECLARED: Final = {
    "": ("direct", False),
    "amq.direct": ("direct", False),
    "amq.fanout": ("fanout", False),
    "amq.topic": ("topic", False),
    "amq.headers": ("headers", False),
    "amq.match": ("headers", False),
    "amq.rabbitmq.trace": ("topic", True),
}

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_ends_of = attrgetter("source", "kind", "destination")
_vhost_of = attrgetter("vhost")


def binding_key(binding: BindingPut | BindingDelete) -> BindingKey:
    """Return what tells a binding from others; the order of its arguments does not count."""
    arguments = _encoder.encode(binding.arguments) if binding.arguments else b""
    return (binding.source, binding.kind, binding.destination, binding.routing_key, arguments)


class Vhost:
    """A vhost with its exchanges, queues, bindings and policies.

    Bindings are found from both ends, so that removing a thing costs as much as it has bindings.
    """

    __slots__ = (
        "_from", "_part_orders", "_parts", "_to", "exchanges", "hidden_queues", "name", "policies",
        "put", "queue_changes", "queues", "table",
    )  # fmt: skip

    def __init__(self, name: str, table: RoutingTable) -> None:
        self.name = name
        self.put = VhostPut(name)  # its description, tags and settings
        self.exchanges: dict[str, ExchangePut] = {}
        self.queues: dict[str, QueuePut] = {}
        self.queue_changes = 0  # counts the changes of `queues`
        self.hidden_queues = 0  # how many of `queues` are those of exchanges (routing/hidden.py)
        self.table = table
        self.policies = policies.NO_POLICIES
        self._from: dict[str, dict[BindingKey, BindingPut]] = {}
        self._to: dict[tuple[str, str], dict[BindingKey, BindingPut]] = {}
        # The shard queues of each exchange, with their indexes; the exchange may be gone.
        self._parts: dict[str, dict[str, int]] = {}
        self._part_orders: dict[str, tuple[str, ...]] = {}  # made when they are asked for
        for exchange, (type, internal) in PREDECLARED.items():
            self.put_exchange(ExchangePut(name, exchange, type, internal=internal))

    def bindings(self) -> Iterator[BindingPut]:
        """Return all bindings but those of the default exchange, which the queues imply."""
        for bindings in self._from.values():
            yield from bindings.values()

    def bindings_from(self, exchange: str) -> Collection[BindingPut]:
        return self._from.get(exchange, {}).values()

    def bindings_to(self, kind: str, destination: str) -> Collection[BindingPut]:
        """Return the bindings to a queue or exchange (`kind`)."""
        return self._to.get((kind, destination), {}).values()

    def count_from(self, exchange: str) -> int:
        return len(self._from.get(exchange, ()))

    def bindings_by_key(self, exchange: str) -> Mapping[BindingKey, BindingPut]:
        """Return the bindings from an exchange by what tells them apart."""
        return self._from.get(exchange, {})

    def has_binding(self, binding: BindingPut | BindingDelete) -> bool:
        bindings = self._from.get(binding.source)
        return bindings is not None and binding_key(binding) in bindings

    def destination(self, kind: str, name: str) -> ExchangePut | QueuePut | None:
        """Return the queue or exchange (`kind`) of this name."""
        return self.queues.get(name) if kind == "queue" else self.exchanges.get(name)

    # -- stream exchanges

    def shard_queues(self, exchange: str) -> tuple[str, ...]:
        """Return the names of the shard queues of a stream exchange by index, draining ones too.

        Another exchange, or one that does not exist, has none.
        """
        return self._in_order(exchange) if exchange in self.exchanges else ()

    def parts(self, exchange: str) -> list[QueuePut]:
        """Return the shard queues of an exchange by index, also if the exchange is gone."""
        return [self.queues[name] for name in self._in_order(exchange)]

    def part_exchanges(self) -> list[str]:
        """Return the names of exchanges that have shard queues, also of those that are gone."""
        return list(self._parts)

    def _in_order(self, exchange: str) -> tuple[str, ...]:
        if exchange not in self._parts:
            return ()
        order = self._part_orders.get(exchange)
        if order is None:
            ranked = sorted((index, name) for name, index in self._parts[exchange].items())
            order = self._part_orders[exchange] = tuple(name for _, name in ranked)
        return order

    def _put_part(self, put: QueuePut) -> None:
        if put.part is not None:
            self._parts.setdefault(put.part.exchange, {})[put.name] = put.part.index
            self._part_orders.pop(put.part.exchange, None)

    def _take_part(self, queue: QueuePut) -> None:
        if queue.part is not None:
            exchange = queue.part.exchange
            del self._parts[exchange][queue.name]
            if not self._parts[exchange]:
                del self._parts[exchange]
            self._part_orders.pop(exchange, None)

    # -- policies

    def policies_of(self, thing: ExchangePut | QueuePut) -> Applied:
        """Return which policies apply to a queue or exchange."""
        if not self.policies:
            return policies.NOTHING
        is_exchange = isinstance(thing, ExchangePut)
        kind = policies.EXCHANGE if is_exchange else policies.queue_kind(thing.arguments)
        return self.policies.of(kind, thing.name)

    def queue_arguments(self, queue: QueuePut) -> dict[str, Any]:
        """Return a queue's effective arguments: those of its declare, merged with policies."""
        if not self.policies:
            return queue.arguments
        return policies.queue_arguments(queue.arguments, self.policies_of(queue).definition)

    def exchange_arguments(self, exchange: ExchangePut) -> dict[str, Any]:
        if not self.policies:
            return exchange.arguments
        return policies.exchange_arguments(
            exchange.arguments, self.policies_of(exchange).definition
        )

    def set_policies(self, new: Policies) -> None:
        """Put other policies in force for all that exists, at once.

        Exchanges get their routes anew. Arguments of queues are merged when they are asked for.
        """
        may_differ = new.may_differ(self.policies)
        self.policies = new
        for put in self.exchanges.values():
            if put.name and may_differ(policies.EXCHANGE, put.name):
                self._route_as(put)

    def _route_as(self, put: ExchangePut) -> None:
        arguments = self.exchange_arguments(put)
        delays = delaying.queue_name(put.name) if delaying.is_delayed(put.type, arguments) else ""
        self.table = self.table.with_exchange(put.name, put.type, arguments, put.internal, delays)

    def delays(self, exchange: ExchangePut) -> bool:
        """Return whether the exchange keeps messages until they are due."""
        return delaying.is_delayed(exchange.type, self.exchange_arguments(exchange))

    def delay_queue(self, exchange: str) -> QueuePut | None:
        """Return the queue where messages of the exchange wait, or waited when it delayed them."""
        return self.queues.get(delaying.queue_name(exchange))

    def hidden_queues_of(self, exchange: str) -> list[QueuePut]:
        """Return the queues where the exchange keeps messages."""
        if not self.hidden_queues:
            return []
        names = (hidden.queue_name(prefix, exchange) for prefix in hidden.PREFIXES)
        return [self.queues[name] for name in names if name in self.queues]

    # Each method below changes the records, both indexes and the table together.

    def put_exchange(self, put: ExchangePut) -> None:
        """Add or replace an exchange; its bindings stay, also if it has another type then."""
        self.exchanges[put.name] = put
        self._route_as(put)

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange and all bindings from and to it."""
        if self.exchanges.pop(name, None) is None:
            return
        for key, binding in self._from.pop(name, {}).items():
            _take_out(self._to, (binding.kind, binding.destination), key)
        for key, binding in self._to.pop(("exchange", name), {}).items():
            _take_out(self._from, binding.source, key)
        self.table = self.table.without_exchange(name)

    def put_queue(self, put: QueuePut) -> None:
        """Add or replace a queue; the default exchange does not lead to queues of exchanges."""
        old = self.queues.get(put.name)
        if old is not None:
            self._take_part(old)
        elif hidden.is_of_exchange(put.name):
            self.hidden_queues += 1
        else:
            self.table = self.table.with_queue(put.name)
        self.queues[put.name] = put
        self.queue_changes += 1
        self._put_part(put)

    def delete_queue(self, name: str) -> None:
        """Delete a queue and all bindings to it."""
        gone = self.queues.pop(name, None)
        if gone is None:
            return
        self.queue_changes += 1
        self._take_part(gone)
        for key, binding in self._to.pop(("queue", name), {}).items():
            _take_out(self._from, binding.source, key)
        if hidden.is_of_exchange(name):
            self.hidden_queues -= 1
        self.table = self.table.without_queue(name)

    def put_bindings(self, puts: Iterable[BindingPut]) -> None:
        """Add bindings in order.

        They come by the hundred, so what neighbours have in common is looked up once.
        """
        for (source, kind, destination), run in groupby(puts, _ends_of):
            of_both = ((put.routing_key, put.arguments or NOTHING_SAID) for put in run)
            self._put_run(source, kind, destination, of_both)

    def bind_queue(self, source: str, queue: str, keys: Iterable[str]) -> list[str]:
        """Add bindings of a queue without arguments, and return the keys of those that are new.

        Nothing is added if the exchange or the queue is not there.
        """
        new = self._put_run(source, "queue", queue, ((key, NOTHING_SAID) for key in keys))
        return [key for key, _ in new]

    def _put_run(
        self, source: str, kind: str, destination: str, puts: Iterable[tuple[str, dict[str, Any]]]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Add bindings between two ends by their keys and arguments, with one new table.

        Return these of the bindings that are new.
        """
        exchange, end = self.exchanges.get(source), self.destination(kind, destination)
        if not source or exchange is None or end is None:
            return []
        # Keep the strings of the things themselves: each of many bindings came with its own.
        source, kind, destination = exchange.name, sys.intern(kind), end.name
        bindings, to = (
            self._from.setdefault(source, {}),
            self._to.setdefault((kind, destination), {}),
        )
        new: list[tuple[str, dict[str, Any]]] = []
        for key, arguments in puts:
            identity = (
                source,
                kind,
                destination,
                key,
                _encoder.encode(arguments) if arguments else b"",
            )
            if identity not in bindings:
                bindings[identity] = to[identity] = BindingPut(
                    self.name, source, kind, destination, key, arguments
                )
                new.append((key, arguments))
        self.table = self.table.with_bindings(source, kind, destination, new)
        return new

    def delete_binding(self, gone: BindingDelete) -> None:
        key = binding_key(gone)
        if key not in self._from.get(gone.source, {}):
            return
        _take_out(self._from, gone.source, key)
        _take_out(self._to, (gone.kind, gone.destination), key)
        self.table = self.table.without_binding(
            gone.source, gone.kind, gone.destination, gone.routing_key, gone.arguments
        )


_End = TypeVar("_End")


def _take_out(index: dict[_End, dict[BindingKey, BindingPut]], end: _End, key: BindingKey) -> None:
    bindings = index[end]
    del bindings[key]
    if not bindings:
        del index[end]


class Catalog:
    """The catalog: vhosts, users, permissions and parameters.

    version: the number of changes; a copy begins with that of the snapshot it was made of.
    permissions: who may do what. index: all queues by id, owner and shard.
    drained_nodes: the names of the nodes that parameters say are drained.
    """

    def __init__(self, *, routes: bool = True) -> None:
        """Make an empty catalog; without `routes` vhosts have no routing table.

        The controller routes nothing and does without.
        """
        self.version = 0
        self._routes = routes
        self.vhosts: dict[str, Vhost] = {}
        self.users: dict[str, UserPut] = {}
        self.parameters: dict[tuple[str, str, str], ParameterPut] = {}
        self.drained_nodes: frozenset[str] = frozenset()
        self.permissions = Permissions(self.vhosts)
        self.index = QueueIndex()

    # -- look-ups

    def vhost(self, name: str) -> Vhost | None:
        return self.vhosts.get(name)

    def exchange(self, vhost: str, name: str) -> ExchangePut | None:
        found = self.vhosts.get(vhost)
        return found.exchanges.get(name) if found else None

    def queue(self, vhost: str, name: str) -> QueuePut | None:
        found = self.vhosts.get(vhost)
        return found.queues.get(name) if found else None

    def queue_by_id(self, id: int) -> QueuePut | None:
        return self.index.get(id)

    def queues_of(self, owner: str) -> list[QueuePut]:
        """Return the exclusive queues of one connection."""
        return self.index.of(owner)

    def hidden_queue_ids(self) -> dict[int, str]:
        """Return the names of the queues where exchanges keep messages, by id."""
        return {
            queue.id: queue.name
            for vhost in self.vhosts.values()
            for exchange in (vhost.exchanges if vhost.hidden_queues else ())
            for queue in vhost.hidden_queues_of(exchange)
        }

    def queue_arguments(self, queue: QueuePut) -> dict[str, Any]:
        """Return a queue's effective arguments; those it was declared with if the vhost is gone."""
        vhost = self.vhosts.get(queue.vhost)
        return vhost.queue_arguments(queue) if vhost else queue.arguments

    def limit(self, vhost: str, component: str, name: str, key: str) -> int | None:
        """Return one number of a limits parameter (VHOST_LIMITS, USER_LIMITS).

        None is no limit, and so is a negative number.
        """
        put = self.parameters.get((vhost, component, name))
        value = put.value.get(key) if put and isinstance(put.value, dict) else None
        return value if type(value) is int and value >= 0 else None

    def vhost_limit(self, vhost: str, key: str) -> int | None:
        return self.limit(vhost, VHOST_LIMITS, "limits", key)

    def user_limit(self, user: str, key: str) -> int | None:
        return self.limit("", USER_LIMITS, user, key)

    # -- changes

    def apply(self, change: AnyChange) -> None:
        """Make one change; one that does not fit does nothing but count."""
        self.version += 1
        _APPLY[type(change)](self, change)

    def apply_all(self, changes: Iterable[AnyChange]) -> None:
        """Make changes in order; quicker than one by one where many bindings follow each other."""
        for kind, run in groupby(changes, type):
            if kind is BindingPut:
                self.put_bindings(cast(Iterable[BindingPut], run))
                continue
            for change in run:
                self.apply(change)

    def put_bindings(self, puts: Iterable[BindingPut]) -> None:
        """Add bindings in order."""
        for name, run in groupby(puts, _vhost_of):
            of_vhost = list(run)
            self.version += len(of_vhost)
            if (vhost := self.vhosts.get(name)) is not None:
                vhost.put_bindings(of_vhost)

    def changes(self) -> list[AnyChange]:
        """Return the changes that make an equal catalog of an empty one, in their order."""
        made: list[AnyChange] = [v.put for v in self.vhosts.values()]
        made.extend(self.parameters.values())
        for vhost in self.vhosts.values():
            made.extend(x for x in vhost.exchanges.values() if x.name not in PREDECLARED)
            made.extend(vhost.queues.values())
            made.extend(vhost.bindings())
        made.extend(self.users.values())
        made.extend(self.permissions.puts.values())
        made.extend(self.permissions.topic_puts)
        return made

    def _vhost_put(self, put: VhostPut) -> None:
        vhost = self.vhosts.get(put.name)
        if vhost is None:
            table = RoutingTable.empty() if self._routes else NoTable.empty()
            vhost = self.vhosts[put.name] = Vhost(put.name, table)
        vhost.put = put

    def _vhost_delete(self, gone: VhostDelete) -> None:
        vhost = self.vhosts.pop(gone.name, None)
        if vhost is None:
            return
        for queue in vhost.queues.values():
            self.index.remove(queue)
        self.permissions.forget_vhost(gone.name)
        for parameter in [key for key in self.parameters if key[0] == gone.name]:
            del self.parameters[parameter]

    def _user_put(self, put: UserPut) -> None:
        self.users[put.name] = put

    def _user_delete(self, gone: UserDelete) -> None:
        if self.users.pop(gone.name, None) is not None:
            self.permissions.forget_user(gone.name)
            self.parameters.pop(("", USER_LIMITS, gone.name), None)

    def _queue_put(self, put: QueuePut) -> None:
        vhost = self.vhosts.get(put.vhost)
        if vhost is None:
            return
        put = self.index.lean(put, vhost.name)
        old = vhost.queues.get(put.name)
        if old is not None:
            self.index.remove(old)
        vhost.put_queue(put)
        self.index.add(put)

    def _queue_delete(self, gone: QueueDelete) -> None:
        vhost = self.vhosts.get(gone.vhost)
        queue = vhost.queues.get(gone.name) if vhost else None
        if vhost is not None and queue is not None:
            vhost.delete_queue(gone.name)
            self.index.remove(queue)

    def _parameter_put(self, put: ParameterPut) -> None:
        if not put.vhost or put.vhost in self.vhosts:
            self.parameters[put.vhost, put.component, put.name] = put
            self._parameters_changed(put.vhost, put.component)

    def _parameter_delete(self, gone: ParameterDelete) -> None:
        if self.parameters.pop((gone.vhost, gone.component, gone.name), None) is not None:
            self._parameters_changed(gone.vhost, gone.component)

    def _parameters_changed(self, vhost: str, component: str) -> None:
        if component == DRAINED_NODES:
            self.drained_nodes = frozenset(
                name for _, of, name in self.parameters if of == component
            )
        found = self.vhosts.get(vhost)
        if found is not None and component in policies.COMPONENTS:
            found.set_policies(
                Policies(
                    (put for key, put in self.parameters.items() if key[0] == vhost),
                    before=found.policies,
                )
            )


def _put_exchange(vhost: Vhost, put: ExchangePut) -> None:
    if put.name not in PREDECLARED:
        vhost.put_exchange(put)


def _delete_exchange(vhost: Vhost, gone: ExchangeDelete) -> None:
    if gone.name not in PREDECLARED:
        vhost.delete_exchange(gone.name)


def _put_binding(vhost: Vhost, put: BindingPut) -> None:
    vhost.put_bindings((put,))


def _in_vhost(act: Callable[[Vhost, Any], None]) -> Callable[[Catalog, Any], None]:
    """Make a change that a vhost makes by itself, if the vhost exists."""

    def apply(catalog: Catalog, change: Any) -> None:
        vhost = catalog.vhosts.get(change.vhost)
        if vhost is not None:
            act(vhost, change)

    return apply


_APPLY: Final[dict[type, Callable[[Catalog, Any], None]]] = {
    VhostPut: Catalog._vhost_put,
    VhostDelete: Catalog._vhost_delete,
    UserPut: Catalog._user_put,
    UserDelete: Catalog._user_delete,
    PermissionPut: lambda catalog, put: catalog.permissions.put(put),
    PermissionDelete: lambda catalog, gone: catalog.permissions.delete(gone),
    TopicPermissionPut: lambda catalog, put: catalog.permissions.put_topic(put),
    TopicPermissionDelete: lambda catalog, gone: catalog.permissions.delete_topic(gone),
    ExchangePut: _in_vhost(_put_exchange),
    ExchangeDelete: _in_vhost(_delete_exchange),
    QueuePut: Catalog._queue_put,
    QueueDelete: Catalog._queue_delete,
    BindingPut: _in_vhost(_put_binding),
    BindingDelete: _in_vhost(Vhost.delete_binding),
    ParameterPut: Catalog._parameter_put,
    ParameterDelete: Catalog._parameter_delete,
}
