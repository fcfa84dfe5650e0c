"""What exists, as a pure state machine: the same code in the controller and in every front door.

`Catalog.apply` takes one change (`changes.py`) and is total: a change that no longer fits (its vhost or exchange is
gone) does nothing but count, so that two copies that applied the same changes are equal whatever the changes were.
Who decides which changes are made is `controller.authority`; where a message goes is `Vhost.table`, a new table after
each change.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import msgspec
from shardmq.broker.model import passwords, patterns, policies
from shardmq.broker.model.changes import (
    USER_LIMITS,
    VHOST_LIMITS,
    AnyChange,
    BindingDelete,
    BindingPut,
    Change,
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
from shardmq.broker.model.policies import Applied, Policies
from shardmq.broker.routing import delaying, hidden
from shardmq.broker.routing.table import NoTable, RoutingTable

Right = Literal["configure", "write", "read"]
BindingKey = tuple[str, str, str, str, bytes]  # source, kind, destination, routing key, arguments

DEFAULT_EXCHANGE_RIGHTS_NAME = "amq.default"
ARGUMENTS_SHARED_MAX = 1_000  # different ones of queues, kept to be shared
RIGHTS_REMEMBERED_MAX = 10_000  # names per user and vhost whose regexes were tried

PREDECLARED: Final = {
    "": ("direct", False),
    "amq.direct": ("direct", False),
    "amq.fanout": ("fanout", False),
    "amq.topic": ("topic", False),
    "amq.headers": ("headers", False),
    "amq.match": ("headers", False),
    "amq.rabbitmq.trace": ("topic", True),
}

NOTHING_SAID: Final[dict[str, Any]] = {}  # arguments of most things; never changed

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_ends_of = attrgetter("source", "kind", "destination")
_vhost_of = attrgetter("vhost")


def binding_key(binding: BindingPut | BindingDelete) -> BindingKey:
    """What makes a binding the same one: arguments count, their order does not."""
    arguments = _encoder.encode(binding.arguments) if binding.arguments else b""
    return (binding.source, binding.kind, binding.destination, binding.routing_key, arguments)


class Vhost:
    """One vhost. Bindings are found from both ends, so that removing a thing costs as much as it has bindings."""

    __slots__ = (
        "_from", "_part_orders", "_parts", "_to", "exchanges", "hidden_queues", "name", "policies", "put",
        "queue_changes", "queues", "table",
    )  # fmt: skip

    def __init__(self, name: str, table: RoutingTable) -> None:
        self.name = name
        self.put = VhostPut(name)  # what is said of it
        self.exchanges: dict[str, ExchangePut] = {}
        self.queues: dict[str, QueuePut] = {}
        self.queue_changes = 0  # how often `queues` became others
        self.hidden_queues = 0  # of `queues`, those of exchanges (routing/hidden.py)
        self.table = table
        self.policies = policies.NO_POLICIES
        self._from: dict[str, dict[BindingKey, BindingPut]] = {}
        self._to: dict[tuple[str, str], dict[BindingKey, BindingPut]] = {}
        self._parts: dict[
            str, dict[str, int]
        ] = {}  # shard queues to index, by their exchange, which may be gone
        self._part_orders: dict[str, tuple[str, ...]] = {}  # as they are asked for
        for exchange, (type, internal) in PREDECLARED.items():
            self.put_exchange(ExchangePut(name, exchange, type, internal=internal))

    def bindings(self) -> Iterator[BindingPut]:
        """All but the default exchange's, which are implied by the queues."""
        for bindings in self._from.values():
            yield from bindings.values()

    def bindings_from(self, exchange: str) -> Collection[BindingPut]:
        return self._from.get(exchange, {}).values()

    def bindings_to(self, kind: str, destination: str) -> Collection[BindingPut]:
        return self._to.get((kind, destination), {}).values()

    def count_from(self, exchange: str) -> int:
        return len(self._from.get(exchange, ()))

    def bindings_by_key(self, exchange: str) -> Mapping[BindingKey, BindingPut]:
        return self._from.get(exchange, {})

    def has_binding(self, binding: BindingPut | BindingDelete) -> bool:
        bindings = self._from.get(binding.source)
        return bindings is not None and binding_key(binding) in bindings

    def destination(self, kind: str, name: str) -> ExchangePut | QueuePut | None:
        return self.queues.get(name) if kind == "queue" else self.exchanges.get(name)

    # -- stream exchanges

    def shard_queues(self, exchange: str) -> tuple[str, ...]:
        """The shard queues of a stream exchange by index, draining ones too; of another exchange, or none, nothing."""
        return self._in_order(exchange) if exchange in self.exchanges else ()

    def parts(self, exchange: str) -> list[QueuePut]:
        """The same queues; also those that outlived their exchange."""
        return [self.queues[name] for name in self._in_order(exchange)]

    def part_exchanges(self) -> list[str]:
        """Those with shard queues, whether they exist or not."""
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
        if not self.policies:
            return policies.NOTHING
        kind = (
            policies.EXCHANGE
            if isinstance(thing, ExchangePut)
            else policies.queue_kind(thing.arguments)
        )
        return self.policies.of(kind, thing.name)

    def queue_arguments(self, queue: QueuePut) -> dict[str, Any]:
        """Effective: what the queue was declared with, merged with the policies that apply to it."""
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
        """In force for all that exists, at once: queues' arguments are merged when they are asked for."""
        self.policies = new
        for put in self.exchanges.values():
            if put.name:
                self._route_as(put)

    def _route_as(self, put: ExchangePut) -> None:
        arguments = self.exchange_arguments(put)
        delays = delaying.queue_name(put.name) if delaying.is_delayed(put.type, arguments) else ""
        self.table = self.table.with_exchange(put.name, put.type, arguments, put.internal, delays)

    def delays(self, exchange: ExchangePut) -> bool:
        """Whether it keeps messages until they are due."""
        return delaying.is_delayed(exchange.type, self.exchange_arguments(exchange))

    def delay_queue(self, exchange: str) -> QueuePut | None:
        """Where messages of this exchange wait, or waited when it still delayed them."""
        return self.queues.get(delaying.queue_name(exchange))

    def hidden_queues_of(self, exchange: str) -> list[QueuePut]:
        """Where this exchange keeps messages."""
        if not self.hidden_queues:
            return []
        names = (hidden.queue_name(prefix, exchange) for prefix in hidden.PREFIXES)
        return [self.queues[name] for name in names if name in self.queues]

    # Each act below changes the records, both indexes and the table together.

    def put_exchange(self, put: ExchangePut) -> None:
        """Another type under the same name keeps its bindings."""
        self.exchanges[put.name] = put
        self._route_as(put)

    def delete_exchange(self, name: str) -> None:
        if self.exchanges.pop(name, None) is None:
            return
        for key, binding in self._from.pop(name, {}).items():
            _take_out(self._to, (binding.kind, binding.destination), key)
        for key, binding in self._to.pop(("exchange", name), {}).items():
            _take_out(self._from, binding.source, key)
        self.table = self.table.without_exchange(name)

    def put_queue(self, put: QueuePut) -> None:
        """To those of exchanges the default exchange does not lead."""
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
        """In order. What neighbours have in common is looked up once, for they come by the hundred."""
        for (source, kind, destination), run in groupby(puts, _ends_of):
            self._put_run(source, kind, destination, run)

    def _put_run(
        self, source: str, kind: str, destination: str, puts: Iterable[BindingPut]
    ) -> None:
        """Those between these two, with one new table."""
        exchange, end = self.exchanges.get(source), self.destination(kind, destination)
        if not source or exchange is None or end is None:
            return
        # The names of the things themselves: each of many bindings came with its own.
        source, kind, destination = exchange.name, sys.intern(kind), end.name
        bindings, to = (
            self._from.setdefault(source, {}),
            self._to.setdefault((kind, destination), {}),
        )
        new: list[tuple[str, dict[str, Any]]] = []
        for put in puts:
            key, arguments = put.routing_key, put.arguments or NOTHING_SAID
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


class _Rights:
    """One user's three regexes in one vhost, with what they said so far. A change makes a new one."""

    __slots__ = ("_patterns", "_said", "put")

    def __init__(self, put: PermissionPut) -> None:
        self.put = put
        self._patterns = {
            "configure": pattern_of(put.configure),
            "write": pattern_of(put.write),
            "read": pattern_of(put.read),
        }
        self._said: dict[tuple[str, str], bool] = {}

    def allow(self, right: str, name: str) -> bool:
        said = self._said.get((right, name))
        if said is None:
            if len(self._said) >= RIGHTS_REMEMBERED_MAX:
                self._said.clear()
            said = self._said[right, name] = self._patterns[right].search(name) is not None
        return said

    def allow_all(self, name: str) -> bool:
        said = self._said.get(("all", name))
        if said is None:
            said = all(self.allow(right, name) for right in self._patterns)
            self._said["all", name] = said
        return said


class _TopicRights:
    """One user's two regexes over the keys of one topic exchange."""

    __slots__ = ("_patterns", "put")

    def __init__(self, put: TopicPermissionPut) -> None:
        self.put = put
        self._patterns = {
            "write": pattern_of(_expanded(put.write, put)),
            "read": pattern_of(_expanded(put.read, put)),
        }

    def allow(self, right: str, key: str) -> bool:
        return self._patterns[right].search(key) is not None


def _expanded(regex: str, put: TopicPermissionPut) -> str:
    """{username} and {vhost} stand for the names themselves, whatever characters are in them."""
    return regex.replace("{username}", re.escape(put.user)).replace("{vhost}", re.escape(put.vhost))


NOTHING = re.compile(r"(?!)")


def pattern_of(regex: str) -> patterns.Pattern:
    """Unanchored, as in RabbitMQ; the empty one, and one that is none, match nothing."""
    try:
        return patterns.compiled(regex) if regex else NOTHING
    except patterns.BadPattern:
        return NOTHING


class State(NamedTuple):
    """All that is in a catalog, comparable: for tests and checks."""

    things: dict[Any, Change]


class Catalog:
    """What exists. `version` counts the changes; a copy takes it over from the snapshot it was made of.

    `routes`: whether vhosts keep a routing table; the controller, which routes nothing, does without.
    """

    def __init__(self, *, routes: bool = True) -> None:
        self.version = 0
        self._routes = routes
        self.vhosts: dict[str, Vhost] = {}
        self.users: dict[str, UserPut] = {}
        self.parameters: dict[tuple[str, str, str], ParameterPut] = {}
        self._rights: dict[tuple[str, str], _Rights] = {}
        self._topic_rights: dict[
            tuple[str, str], dict[str, _TopicRights]
        ] = {}  # by vhost and user, then exchange
        self._queues_by_id: dict[int, QueuePut] = {}
        self._queues_by_owner: dict[str, dict[int, QueuePut]] = {}
        self._queues_on: Counter[int] = Counter()  # how many, by shard
        self._arguments: dict[str, dict[str, Any]] = {}  # by what they look like, types told apart

    @classmethod
    def rebuilt(cls, version: int, changes: Iterable[AnyChange]) -> Catalog:
        """The copy that a snapshot describes."""
        catalog = cls()
        for change in changes:
            catalog.apply(change)
        catalog.version = version
        return catalog

    # -- look-ups ------------------------------------------------------------------------------------

    def vhost(self, name: str) -> Vhost | None:
        return self.vhosts.get(name)

    def queue(self, vhost: str, name: str) -> QueuePut | None:
        found = self.vhosts.get(vhost)
        return found.queues.get(name) if found else None

    def queue_by_id(self, id: int) -> QueuePut | None:
        return self._queues_by_id.get(id)

    def queues(self) -> Iterable[QueuePut]:
        return self._queues_by_id.values()

    def queues_on(self, shard: int) -> int:
        """How many live there, those of exchanges among them."""
        return self._queues_on[shard]

    def hidden_queue_ids(self) -> dict[int, str]:
        """Of the queues where exchanges keep messages, with their names."""
        return {
            queue.id: queue.name
            for vhost in self.vhosts.values()
            for exchange in (vhost.exchanges if vhost.hidden_queues else ())
            for queue in vhost.hidden_queues_of(exchange)
        }

    def queues_of(self, owner: str) -> list[QueuePut]:
        """The exclusive queues of one connection."""
        return list(self._queues_by_owner.get(owner, {}).values())

    def owners(self) -> list[str]:
        """Connections that hold exclusive queues."""
        return list(self._queues_by_owner)

    def exchange(self, vhost: str, name: str) -> ExchangePut | None:
        found = self.vhosts.get(vhost)
        return found.exchanges.get(name) if found else None

    @property
    def permissions(self) -> dict[tuple[str, str], PermissionPut]:
        """By vhost and user."""
        return {key: rights.put for key, rights in self._rights.items()}

    def queue_arguments(self, queue: QueuePut) -> dict[str, Any]:
        """Effective: see Vhost. Of a queue whose vhost is gone, its own."""
        vhost = self.vhosts.get(queue.vhost)
        return vhost.queue_arguments(queue) if vhost else queue.arguments

    def limit(self, vhost: str, component: str, name: str, key: str) -> int | None:
        """One number of a limits parameter ("vhost-limits", "user-limits"); a negative one means none."""
        put = self.parameters.get((vhost, component, name))
        value = put.value.get(key) if put and isinstance(put.value, dict) else None
        return value if type(value) is int and value >= 0 else None

    def vhost_limit(self, vhost: str, key: str) -> int | None:
        return self.limit(vhost, VHOST_LIMITS, "limits", key)

    def user_limit(self, user: str, key: str) -> int | None:
        return self.limit("", USER_LIMITS, user, key)

    @property
    def topic_permissions(self) -> list[TopicPermissionPut]:
        return [
            rights.put for of_user in self._topic_rights.values() for rights in of_user.values()
        ]

    def has_topic_permissions(self, user: str, vhost: str) -> bool:
        return (vhost, user) in self._topic_rights

    def may_topic(
        self, user: str, vhost: str, right: Literal["write", "read"], exchange: str, key: str
    ) -> bool:
        """Beside the rights on a topic exchange, which keys; without an entry for the exchange, all."""
        rights = self._topic_rights.get((vhost, user), {}).get(exchange)
        return rights is None or rights.allow(right, key)

    def may_enter(self, user: str, vhost: str) -> bool:
        """Whether the user has any permission entry in the vhost: without one connection.open is refused."""
        return (vhost, user) in self._rights

    def may(self, user: str, vhost: str, right: Right, name: str) -> bool:
        rights = self._rights.get((vhost, user))
        return rights is not None and rights.allow(right, name or DEFAULT_EXCHANGE_RIGHTS_NAME)

    def may_all(self, user: str, vhost: str, name: str) -> bool:
        """Configure, write and read."""
        rights = self._rights.get((vhost, user))
        return rights is not None and rights.allow_all(name or DEFAULT_EXCHANGE_RIGHTS_NAME)

    def password_ok(self, user: str, password: str) -> bool:
        """Takes the same time for an unknown user, a wrong password and a right one, of users hashed alike. May take
        long: who must not wait asks `shardmq.broker.shared.logins`."""
        return passwords.matches(self.users.get(user), password)

    # -- changes -------------------------------------------------------------------------------------

    def apply(self, change: AnyChange) -> None:
        self.version += 1
        _APPLY[type(change)](self, change)

    def apply_all(self, changes: Iterable[AnyChange]) -> None:
        """As one by one, and quicker where many bindings follow one another."""
        for kind, run in groupby(changes, type):
            if kind is BindingPut:
                self.put_bindings(cast(Iterable[BindingPut], run))
                continue
            for change in run:
                self.apply(change)

    def put_bindings(self, puts: Iterable[BindingPut]) -> None:
        for name, run in groupby(puts, _vhost_of):
            of_vhost = list(run)
            self.version += len(of_vhost)
            if (vhost := self.vhosts.get(name)) is not None:
                vhost.put_bindings(of_vhost)

    def changes(self) -> list[AnyChange]:
        """The changes that make an equal catalog of an empty one, in an order that can be applied."""
        made: list[AnyChange] = [v.put for v in self.vhosts.values()]
        made.extend(self.parameters.values())
        for vhost in self.vhosts.values():
            made.extend(x for x in vhost.exchanges.values() if x.name not in PREDECLARED)
            made.extend(vhost.queues.values())
            made.extend(vhost.bindings())
        made.extend(self.users.values())
        made.extend(rights.put for rights in self._rights.values())
        made.extend(self.topic_permissions)
        return made

    def state(self) -> State:
        """Everything, whatever the order it came in."""
        things: dict[Any, Change] = {}
        for change in self.changes():
            identity = binding_key(change) if isinstance(change, BindingPut) else _identity(change)
            things[type(change).__name__, getattr(change, "vhost", ""), identity] = change
        return State(things)

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
            self._unindex(queue)
        for key in [key for key in self._rights if key[0] == gone.name]:
            del self._rights[key]
        for key in [key for key in self._topic_rights if key[0] == gone.name]:
            del self._topic_rights[key]
        for parameter in [key for key in self.parameters if key[0] == gone.name]:
            del self.parameters[parameter]

    def _user_put(self, put: UserPut) -> None:
        self.users[put.name] = put

    def _user_delete(self, gone: UserDelete) -> None:
        if self.users.pop(gone.name, None) is not None:
            for key in [key for key in self._rights if key[1] == gone.name]:
                del self._rights[key]
            for key in [key for key in self._topic_rights if key[1] == gone.name]:
                del self._topic_rights[key]
            self.parameters.pop(("", USER_LIMITS, gone.name), None)

    def _permission_put(self, put: PermissionPut) -> None:
        if put.vhost in self.vhosts:
            self._rights[put.vhost, put.user] = _Rights(put)

    def _permission_delete(self, gone: PermissionDelete) -> None:
        self._rights.pop((gone.vhost, gone.user), None)

    def _topic_permission_put(self, put: TopicPermissionPut) -> None:
        if put.vhost in self.vhosts:
            self._topic_rights.setdefault((put.vhost, put.user), {})[put.exchange] = _TopicRights(
                put
            )

    def _topic_permission_delete(self, gone: TopicPermissionDelete) -> None:
        of_user = self._topic_rights.get((gone.vhost, gone.user), {})
        if gone.exchange is None:
            of_user.clear()
        else:
            of_user.pop(gone.exchange, None)
        if not of_user:
            self._topic_rights.pop((gone.vhost, gone.user), None)

    def _exchange_put(self, put: ExchangePut) -> None:
        vhost = self.vhosts.get(put.vhost)
        if vhost is not None and put.name not in PREDECLARED:
            vhost.put_exchange(put)

    def _exchange_delete(self, gone: ExchangeDelete) -> None:
        vhost = self.vhosts.get(gone.vhost)
        if vhost is not None and gone.name not in PREDECLARED:
            vhost.delete_exchange(gone.name)

    def _queue_put(self, put: QueuePut) -> None:
        vhost = self.vhosts.get(put.vhost)
        if vhost is None:
            return
        put = self._lean(put, vhost.name)
        old = vhost.queues.get(put.name)
        if old is not None:
            self._unindex(old)
        vhost.put_queue(put)
        self._queues_by_id[put.id] = put
        self._queues_on[put.shard] += 1
        if put.owner:
            self._queues_by_owner.setdefault(put.owner, {})[put.id] = put

    def _lean(self, put: QueuePut, vhost: str) -> QueuePut:
        """The same, with what many queues have in common kept once: there may be 100,000, each read from a socket."""
        arguments = put.arguments and self._shared_arguments(put.arguments)
        return msgspec.structs.replace(put, vhost=vhost, arguments=arguments or NOTHING_SAID)

    def _shared_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Never changed in place, so that they may be shared."""
        if len(self._arguments) >= ARGUMENTS_SHARED_MAX:
            self._arguments.clear()
        return self._arguments.setdefault(repr(arguments), arguments)

    def _queue_delete(self, gone: QueueDelete) -> None:
        vhost = self.vhosts.get(gone.vhost)
        queue = vhost.queues.get(gone.name) if vhost else None
        if vhost is not None and queue is not None:
            vhost.delete_queue(gone.name)
            self._unindex(queue)

    def _unindex(self, queue: QueuePut) -> None:
        if self._queues_by_id.get(queue.id) is queue:
            del self._queues_by_id[queue.id]
            self._queues_on[queue.shard] -= 1
        owned = self._queues_by_owner.get(queue.owner)
        if owned is not None:
            owned.pop(queue.id, None)
            if not owned:
                del self._queues_by_owner[queue.owner]

    def _binding_put(self, put: BindingPut) -> None:
        vhost = self.vhosts.get(put.vhost)
        if vhost is not None:
            vhost.put_bindings((put,))

    def _binding_delete(self, gone: BindingDelete) -> None:
        vhost = self.vhosts.get(gone.vhost)
        if vhost is not None:
            vhost.delete_binding(gone)

    def _parameter_put(self, put: ParameterPut) -> None:
        if not put.vhost or put.vhost in self.vhosts:
            self.parameters[put.vhost, put.component, put.name] = put
            self._policies_changed(put.vhost, put.component)

    def _parameter_delete(self, gone: ParameterDelete) -> None:
        if self.parameters.pop((gone.vhost, gone.component, gone.name), None) is not None:
            self._policies_changed(gone.vhost, gone.component)

    def _policies_changed(self, vhost: str, component: str) -> None:
        found = self.vhosts.get(vhost)
        if found is not None and component in policies.COMPONENTS:
            found.set_policies(
                Policies(put for key, put in self.parameters.items() if key[0] == vhost)
            )


_APPLY: Final[dict[type, Any]] = {
    VhostPut: Catalog._vhost_put,
    VhostDelete: Catalog._vhost_delete,
    UserPut: Catalog._user_put,
    UserDelete: Catalog._user_delete,
    PermissionPut: Catalog._permission_put,
    PermissionDelete: Catalog._permission_delete,
    TopicPermissionPut: Catalog._topic_permission_put,
    TopicPermissionDelete: Catalog._topic_permission_delete,
    ExchangePut: Catalog._exchange_put,
    ExchangeDelete: Catalog._exchange_delete,
    QueuePut: Catalog._queue_put,
    QueueDelete: Catalog._queue_delete,
    BindingPut: Catalog._binding_put,
    BindingDelete: Catalog._binding_delete,
    ParameterPut: Catalog._parameter_put,
    ParameterDelete: Catalog._parameter_delete,
}


def _identity(change: AnyChange) -> Any:
    if isinstance(change, PermissionPut):
        return change.user
    if isinstance(change, TopicPermissionPut):
        return (change.user, change.exchange)
    if isinstance(change, ParameterPut):
        return (change.component, change.name)
    return change.name  # type: ignore[union-attr]  # bindings and deletes do not come here
