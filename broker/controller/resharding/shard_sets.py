"""Stream exchanges: which shard queues an exchange is to have, by its settings.

The exchange's own arguments (`x-shards`, `x-super-stream`) decide. Without them the policy decides
that applies to the exchange: `shards-per-node`, or `stream-definition`, which names a parameter.
What neither says is looked up in the parameters of component `stream`, and then in the defaults
here. A parameter of component `shards` with the exchange's name sets the number over all of these.

`reshaping.py` makes the changes that lead to the set. Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.policies import MERGED, SHARDS, STREAM
from shardmq.broker.model import checks
from shardmq.broker.model.arguments import (
    AT_DEADLINE,
    AT_DEADLINE_ARGUMENT,
    DEADLINE,
    DEADLINE_ARGUMENT,
    DEFINITION,
    KEY_ARGUMENT,
    NUMBER,
    NUMBER_ARGUMENT,
    SHARD_ARGUMENTS,
    SHARD_KEY,
    SUPER_STREAM,
    WHEN_GONE,
    WHEN_GONE_ARGUMENT,
    at_deadline_fault,
    deadline_fault,
    when_gone_fault,
)
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import ACTIVE, BindingDelete, ExchangePut, QueuePut
from shardmq.broker.model.checks import PRECONDITION_FAILED, Refusal
from shardmq.broker.model.values import shards_fault
from shardmq.broker.routing.delaying import inner_type
from shardmq.broker.routing.placement import Places
from shardmq.broker.routing.spreading import weight_fault

# The name of the host of a broker without a cluster. It is also in the names of shard queues whose
# number counts for all nodes together.
NODE = "shardmq@localhost"
DEFAULT_SHARDS = 1
DEFAULT_STREAM_KEY = "10000"
# The binding key where an exchange that spreads by weight is to be bound with a key that is none.
DEFAULT_WEIGHT = "1"

# No policy makes these stream exchanges: every queue is bound to the default exchange, and the
# broker itself publishes to the other.
NEVER: Final = frozenset(("", "amq.rabbitmq.trace"))

# The types that give each message to one queue. A set of shards behind an exchange of another type
# is wanted now and then, and often a mistake.
SPREADING: Final = frozenset(("x-consistent-hash", "x-modulus-hash", "x-random"))

# What becomes of the shard queues of an exchange that is no stream exchange any more. MERGE: one
# stays bound, and lets go what is new when the others have given what they had.
DRAIN, MERGE, KEEP, DELETE = "drain", "merge", "keep", "delete"

# What happens at the deadline of a reshard; the default is to wait.
BREAK_ORDER, DEAD_LETTER = "break-order", "dead-letter"


class NodeSet(NamedTuple):
    """The shard queues of an exchange at one node.

    shards: those that new queues are placed on. Without any, the node keeps the queues that it has.
    """

    node: str
    number: int
    shards: tuple[int, ...]


class Wanted(NamedTuple):
    """The shard queues that an exchange is to have.

    prefix: begins the names of the queues, and tells in which way the set was asked for.
    number: how many there are at all nodes together.
    key: the queues are bound with it.
    arguments: the queues are declared with them.
    is_set: the number comes from a parameter of component `shards`.
    nodes: how many there are at each node of a cluster, if the set was asked for by node.
    """

    prefix: str
    number: int
    key: str
    arguments: dict[str, Any]
    is_set: bool = False
    nodes: tuple[NodeSet, ...] = ()

    def name(self, exchange: str, index: int, node: str = NODE) -> str:
        """Return the name of one queue of the set."""
        return f"{self.prefix}: {exchange} - {node} - {index}"

    def names(self, exchange: str) -> set[str]:
        """Return the names of all queues of the set, whose indexes begin with 0."""
        return {
            self.name(exchange, index, node)
            for node, number, _ in self.nodes or (NodeSet(NODE, self.number, ()),)
            for index in range(number)
        }


def wanted(catalog: Catalog, vhost: Vhost, exchange: ExchangePut, places: Places) -> Wanted | None:
    """Return the shard queues an exchange is to have; None if it is no stream exchange."""
    want = by_arguments(catalog, exchange, places) or _by_policy(catalog, vhost, exchange, places)
    put = catalog.parameters.get((vhost.name, SHARDS, exchange.name))
    if put is None:
        return want
    if want is None and put.value.get(MERGED):
        want = as_it_was(vhost, exchange.name)
    return None if want is None else set_to(want, put.value[NUMBER], places)


def set_to(want: Wanted, number: int | str, places: Places) -> Wanted:
    """Return the same with another number of queues at all nodes together.

    "auto" is one for each shard process.
    """
    count = places.shard_count if number == "auto" else int(number)
    return want._replace(number=count, is_set=True, nodes=())


def as_it_was(vhost: Vhost, exchange: str) -> Wanted | None:
    """Return a set of one queue that is like those the exchange has; None if it has none."""
    for queue in vhost.parts(exchange):
        if queue.part is not None and queue.part.state == ACTIVE:
            prefix = queue.name.partition(":")[0]
            return Wanted(prefix, 1, queue.part.key, dict(queue.arguments), is_set=True)
    return None


def is_super_stream_of_rabbitmq(exchange: ExchangePut) -> bool:
    """Return whether RabbitMQ would take the exchange for a super stream.

    Such an exchange has no queues of its own: its streams are declared and bound one by one.
    """
    return exchange.type == "direct" and dict(exchange.arguments) == {SUPER_STREAM: True}


def by_arguments(catalog: Catalog, exchange: ExchangePut, places: Places) -> Wanted | None:
    """Return the set that the arguments of the exchange ask for, if they ask for one."""
    arguments = exchange.arguments
    streams, number = arguments.get(SUPER_STREAM, False), arguments.get(NUMBER_ARGUMENT)
    if streams is False and number is None:
        return None
    if is_super_stream_of_rabbitmq(exchange):
        return None
    if number is None:
        number = "auto" if streams is True else streams
    if streams is False:
        return _wanted(exchange, "sharding", number, arguments.get(KEY_ARGUMENT, ""), places)
    key = arguments.get(KEY_ARGUMENT, _stream_setting(catalog, exchange.vhost, SHARD_KEY))
    return _wanted(exchange, "stream", number, key, places)


def _by_policy(
    catalog: Catalog, vhost: Vhost, exchange: ExchangePut, places: Places
) -> Wanted | None:
    if exchange.name in NEVER:
        return None
    definition = vhost.policies_of(exchange).definition
    if NUMBER in definition:
        number, key = definition[NUMBER], definition.get(SHARD_KEY, "")
        return _by_node(_wanted(exchange, "sharding", number, key, places), number, places)
    if DEFINITION not in definition:
        return None
    put = catalog.parameters.get((vhost.name, DEFINITION, str(definition[DEFINITION])))
    named: Mapping[str, Any] = put.value if put is not None and isinstance(put.value, dict) else {}
    number = named[NUMBER] if NUMBER in named else _stream_setting(catalog, vhost.name, NUMBER)
    key = (
        named[SHARD_KEY] if SHARD_KEY in named else _stream_setting(catalog, vhost.name, SHARD_KEY)
    )
    return _by_node(_wanted(exchange, "stream", number, key, places), number, places)


def _by_node(want: Wanted, number: int | str, places: Places) -> Wanted:
    """Return the set with its number for each node; "auto" is one for each shard of the node."""
    nodes = tuple(
        NodeSet(
            node.name,
            (len(node.shards) if node.homes is None else node.homes)
            if number == "auto"
            else want.number,
            node.shards if node.is_alive else (),
        )
        for node in places.nodes
    )
    return want._replace(number=sum(node.number for node in nodes), nodes=nodes) if nodes else want


def _stream_setting(catalog: Catalog, vhost: str, name: str) -> Any:
    """Return a setting that a stream definition leaves open."""
    put = catalog.parameters.get((vhost, STREAM, name))
    if put is not None:
        return put.value
    return DEFAULT_SHARDS if name == NUMBER else DEFAULT_STREAM_KEY


def _wanted(exchange: ExchangePut, prefix: str, number: Any, key: Any, places: Places) -> Wanted:
    arguments = exchange.arguments.get(SHARD_ARGUMENTS)
    if shards_fault(NUMBER, number):  # the file of parameters was edited by hand
        number = DEFAULT_SHARDS
    if not isinstance(key, str) or weight_fault(exchange.type, key) is not None:
        key = DEFAULT_WEIGHT
    count = places.shard_count if number == "auto" else number
    return Wanted(prefix, count, key, arguments if isinstance(arguments, dict) else {})


def when_gone(arguments: Mapping[str, Any], definition: Mapping[str, Any]) -> str:
    """Return what becomes of the shard queues when the exchange is no stream exchange any more.

    The exchange's arguments decide, else the definition of its policy.
    """
    choice = arguments.get(WHEN_GONE_ARGUMENT, definition.get(WHEN_GONE, DRAIN))
    return DRAIN if when_gone_fault(choice) else str(choice)


def deadline(vhost: Vhost, exchange: str) -> tuple[int | None, str]:
    """Return how long a reshard waits for what is not settled, and what is done then.

    The time is in ms, None if it waits for ever. The exchange's arguments decide, else its policy.
    """
    put = vhost.exchanges.get(exchange)
    if put is None:
        return None, ""
    definition = vhost.policies_of(put).definition
    wait_ms = put.arguments.get(DEADLINE_ARGUMENT, definition.get(DEADLINE))
    choice = put.arguments.get(AT_DEADLINE_ARGUMENT, definition.get(AT_DEADLINE, ""))
    return (None if deadline_fault(wait_ms) else wait_ms), (
        "" if at_deadline_fault(choice) else choice
    )


def check_arguments(put: ExchangePut) -> None:
    """Check what the arguments of a declared exchange say of shard queues. Raises Refusal, 406."""
    arguments, fault = put.arguments, ""
    if NUMBER_ARGUMENT in arguments:
        fault = shards_fault(NUMBER_ARGUMENT, arguments[NUMBER_ARGUMENT])
    if not fault and not isinstance(arguments.get(SUPER_STREAM, True), bool):
        fault = shards_fault(SUPER_STREAM, arguments[SUPER_STREAM])
    if not fault and not isinstance(key := arguments.get(KEY_ARGUMENT, ""), str):
        fault = f"{KEY_ARGUMENT} should be a string, actually was {checks.erlang_term(key)}"
    for name, check in (
        (WHEN_GONE_ARGUMENT, when_gone_fault),
        (DEADLINE_ARGUMENT, deadline_fault),
        (AT_DEADLINE_ARGUMENT, at_deadline_fault),
    ):
        if not fault and name in arguments and (wrong := check(arguments[name])):
            fault = f"{name}: {checks.erlang_term(arguments[name])} {wrong}"
    of_queues = arguments.get(SHARD_ARGUMENTS, {})
    if not fault and not isinstance(of_queues, dict):
        fault = f"{SHARD_ARGUMENTS} should be a table, actually was {checks.erlang_term(of_queues)}"
    if fault:
        raise Refusal(PRECONDITION_FAILED, fault)
    checks.check_queue_arguments(put.vhost, put.name, of_queues)
    checks.check_queue_type(put.vhost, put.name, put.durable, False, False, of_queues)


def keeps_order(vhost: Vhost, exchange: ExchangePut, is_set: bool = True) -> bool:
    """Return whether keys stay in order when the number of shard queues changes.

    They do where keys move only to queues that come and from queues that go: then no queue both
    loses keys and holds some back. With modulus hash this is so where all queues are replaced,
    which is done when the number is set (`is_set`), and not when a policy has another number: that
    adds queues.
    """
    type = inner_type(exchange.type, exchange.arguments)
    if type == "x-consistent-hash" and exchange.arguments.get("x-algorithm") != "jump":
        return True
    alone = vhost.count_from(exchange.name) == own_bindings(vhost, exchange.name)
    return alone and (type == "x-consistent-hash" or (is_set and type == "x-modulus-hash"))


def own_binding(vhost: Vhost, queue: QueuePut) -> list[BindingDelete]:
    """Return the change that deletes the binding which made the queue a shard; [] without one.

    Bindings that were made by hand belong to whoever made them.
    """
    assert queue.part is not None
    gone = BindingDelete(vhost.name, queue.part.exchange, "queue", queue.name, queue.part.key)
    return [gone] if vhost.has_binding(gone) else []


def own_bindings(vhost: Vhost, exchange: str) -> int:
    """Return how many bindings from an exchange the broker made for its shard queues."""
    return sum(1 for queue in vhost.parts(exchange) if own_binding(vhost, queue))


def is_bound(vhost: Vhost, queue: QueuePut) -> bool:
    """Return whether a queue is an active shard, bound as one."""
    return queue.part is not None and queue.part.state == ACTIVE and bool(own_binding(vhost, queue))
