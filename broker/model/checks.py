"""Check a client's request against the catalog, with RabbitMQ's rules and words.

Front doors and the controller share these pure functions. Each returns when all is well and raises
Refusal: an AMQP reply code with RabbitMQ's text (without the "NAME - " in front), because client
libraries and test suites match on those words. The functions know names, types, arguments and
owners. What an argument's value may be is a row of `arguments`. Who may do what is
`permissions.Permissions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardmq.broker.model import arguments as table
from shardmq.broker.model import values
from shardmq.broker.model.arguments import QUORUM, STREAM, Argument
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, QueuePut
from shardmq.broker.model.erlang import erlang_term as erlang_term
from shardmq.broker.model.erlang import type_name as type_name
from shardmq.broker.model.policies import HIDDEN_PREFIXES
from shardmq.broker.model.values import EXPIRY_MS_MAX as EXPIRY_MS_MAX
from shardmq.broker.model.values import NAME_BYTES_MAX as NAME_BYTES_MAX
from shardmq.broker.model.values import not_integer as not_integer
from shardmq.broker.routing import delaying, federated, keeping
from shardmq.broker.routing.spreading import CHECKED_KEYS, exchange_fault, weight_fault
from shardmq.broker.routing.types import TYPES
from shardmq.shardd.wire import messages as wire

NAME_PREFIX_BYTES_MAX = 64
RECORD_TTL_MS_MAX = 0xFFFFFFFE  # a record has 32 bits for a ttl; the highest number says never
RESERVED_PREFIX = "amq."
SERVER_NAMED_PREFIX = "amq.gen-"
# A consumer of this name gets a queue of its own; a message that has the name in reply_to means
# that queue.
REPLY_TO = "amq.rabbitmq.reply-to"
# The argument, at the shard, of the queue where an exchange keeps messages that are not due: the
# name of the exchange. The controller takes the argument from every other queue.
DELAYS_FOR: Final = "x-delays-for"

MAX_CONNECTIONS = "max-connections"
MAX_CHANNELS = "max-channels"

ACCESS_REFUSED = 403
NOT_FOUND = 404
RESOURCE_LOCKED = 405
PRECONDITION_FAILED = 406
COMMAND_INVALID = 503
NO_ROOM: Final = wire.NO_ROOM
NOT_ALLOWED = 530

# Queues of these types outlive connections and restarts.
LASTING_TYPES: Final = frozenset((QUORUM, STREAM))
CONSUME_ARGUMENTS: Final[dict[str, values.Check]] = {
    "x-priority": values.integer,
    "x-cancel-on-ha-failover": values.boolean,
}
X_MATCHES: Final = frozenset(("all", "any", "all-with-x", "any-with-x"))


class Refusal(Exception):
    """The request cannot be granted; the client gets this reply code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


# -- names


def named(kind: str, name: str, vhost: str) -> str:
    """Name a thing as RabbitMQ's texts do."""
    return f"{kind} '{name}' in vhost '{vhost}'"


def topic_refused(right: str, vhost: str, exchange: str, key: str, user: str) -> str:
    """Say that the user's topic permissions do not cover the routing key."""
    thing = named("exchange", exchange, vhost)
    return f"{right} access to topic '{key}' in {thing} refused for user '{user}'"


def no_queue(vhost: str, name: str) -> Refusal:
    return Refusal(NOT_FOUND, f"no {named('queue', name, vhost)}")


def home_is_down(queue: QueuePut, node: str = "") -> Refusal:
    """Return what a question about a queue is refused with while its node is away, if known."""
    home = f"home node '{node}'" if node else "home node"
    kind = "durable queue" if queue.durable else "queue"
    thing = named(kind, queue.name, queue.vhost)
    return Refusal(NOT_FOUND, f"{home} of {thing} is down or inaccessible")


def not_purged(queue: QueuePut, why: str) -> Refusal:
    """Return what a purge is refused with that found the disk full. `why`: the shard's words."""
    return Refusal(NO_ROOM, f"{named('queue', queue.name, queue.vhost)} is not purged: {why}")


def no_exchange(vhost: str, name: str) -> Refusal:
    return Refusal(NOT_FOUND, f"no {named('exchange', name, vhost)}")


def clean_name(name: str) -> str:
    """Return the name without line breaks, as RabbitMQ does.

    Line breaks come from programs that read names from files line by line.
    """
    if "\n" in name or "\r" in name:
        return name.replace("\n", "").replace("\r", "")
    return name


def check_new_name(kind: str, name: str) -> None:
    """Refuse a reserved or too long name for a new queue or exchange (`kind`)."""
    if name.startswith(RESERVED_PREFIX):
        raise Refusal(ACCESS_REFUSED, f"{kind} name '{name}' contains reserved prefix 'amq.*'")
    if len(name) > NAME_BYTES_MAX // 4 and len(name.encode()) > NAME_BYTES_MAX:
        raise Refusal(PRECONDITION_FAILED, f"{kind} name is longer than {NAME_BYTES_MAX} bytes")


def is_reply_queue(name: str) -> bool:
    """Return whether the name is that of a direct reply-to queue.

    Clients may publish to such a queue and ask whether the queue exists, nothing else.
    """
    return name.startswith(REPLY_TO)


def is_hidden_queue(name: str) -> bool:
    """Return whether clients may not see, declare, bind or delete the queue of this name.

    Queues of direct replies and the queues that exchanges keep messages in are hidden.
    """
    return name.startswith(HIDDEN_PREFIXES)


def check_not_default(exchange: str) -> None:
    if not exchange:
        raise Refusal(ACCESS_REFUSED, "operation not permitted on the default exchange")


# -- limits


def check_connection_limits(
    catalog: Catalog,
    vhost: str,
    user: str,
    of_vhost: int,
    of_user: int,
    of_all: int = 0,
    all_max: int = 0,
) -> None:
    """Refuse a connection that is one too many for the vhost, the user or the broker.

    `of_vhost`, `of_user` and `of_all` count the connections that are open already. `all_max` is the
    limit of the broker; 0 is no limit.
    """
    if 0 < all_max <= of_all:
        text = f"connection refused: node connection limit ({all_max}) is reached"
        raise Refusal(NOT_ALLOWED, text)
    limit = catalog.vhost_limit(vhost, MAX_CONNECTIONS)
    if limit is not None and limit <= of_vhost:
        text = (
            f"access to vhost '{vhost}' refused for user '{user}': "
            f"connection limit ({limit}) is reached"
        )
        raise Refusal(NOT_ALLOWED, text)
    limit = catalog.user_limit(user, MAX_CONNECTIONS)
    if limit is not None and limit <= of_user:
        text = f"connection refused for user '{user}': user connection limit ({limit}) is reached"
        raise Refusal(NOT_ALLOWED, text)


def check_channel_limits(
    catalog: Catalog, user: str, of_user: int, in_all: int, in_all_max: int, node: str
) -> None:
    """Refuse a channel that is one too many for the user or the broker.

    `of_user` and `in_all` count the channel that is to be opened, too. `in_all_max` is the limit of
    the broker; 0 is no limit. `node` is the broker's name.
    """
    limit = catalog.user_limit(user, MAX_CHANNELS)
    if limit is not None and limit < of_user:
        text = (
            f"number of channels opened for user '{user}' has reached the maximum allowed user "
            f"limit of ({limit})"
        )
        raise Refusal(NOT_ALLOWED, text)
    if 0 < in_all_max < in_all:
        text = (
            f"number of channels opened on node '{node}' has reached the maximum allowed limit of "
            f"({in_all_max})"
        )
        raise Refusal(NOT_ALLOWED, text)


# -- exchanges


def check_new_exchange(vhost: str, name: str, type: str, arguments: dict[str, Any]) -> None:
    check_new_name("exchange", name)
    check_exchange_type(type)
    thing = named("exchange", name, vhost)
    for row in table.TABLE.exchange.values():
        _check_argument(row, arguments, thing)
    fault = delaying.delayed_fault(type, arguments, TYPES)
    inner = delaying.inner_type(type, arguments)
    fault = fault or exchange_fault(inner, arguments) or keeping.exchange_fault(inner, arguments)
    fault = fault or federated.exchange_fault(inner, arguments)
    if fault:
        raise Refusal(PRECONDITION_FAILED, fault)
    alternate = arguments.get("alternate-exchange")
    if alternate is not None and not isinstance(alternate, str):
        wrong = f"invalid type '{type_name(alternate)}' for arg 'alternate-exchange' in {thing}"
        raise Refusal(PRECONDITION_FAILED, wrong)


def _check_argument(row: Argument, arguments: Mapping[str, Any], thing: str) -> None:
    if row.check is None or row.name not in arguments:
        return
    if wrong := row.check(arguments[row.name], arguments):
        raise Refusal(PRECONDITION_FAILED, f"invalid arg '{row.name}' for {thing}: {wrong}")


def check_keeping_bind(
    exchange_type: str, exchange: dict[str, Any], kind: str, arguments: dict[str, Any]
) -> None:
    """Refuse a binding that an exchange that keeps messages cannot have.

    `exchange_type` is the type that the exchange routes by, `exchange` the exchange's arguments,
    `kind` the kind of the destination.
    """
    if not keeping.keeps(exchange_type, exchange):
        return
    if kind == "exchange" and exchange_type != keeping.RECENT_HISTORY:
        raise Refusal(ACCESS_REFUSED, "Not allowed to bind persistent exchange to exchange")
    fault = keeping.binding_fault(arguments)
    if fault:
        raise Refusal(PRECONDITION_FAILED, fault)


def check_exchange_type(type: str) -> None:
    if type not in TYPES:
        raise Refusal(COMMAND_INVALID, f"unknown exchange type '{type}'")


def check_same_exchange(
    current: ExchangePut,
    type: str,
    durable: bool,
    auto_delete: bool,
    internal: bool,
    arguments: dict[str, Any],
) -> None:
    """Refuse a declare of an exchange that exists and is different.

    Only arguments that mean something are compared, as in RabbitMQ.
    """
    thing = named("exchange", current.name, current.vhost)
    _check_same_field(thing, "type", type, current.type)
    _check_same_field(thing, "durable", durable, current.durable)
    _check_same_field(thing, "auto_delete", auto_delete, current.auto_delete)
    _check_same_field(thing, "internal", internal, current.internal)
    if arguments or current.arguments:
        _check_same_arguments(thing, table.TABLE.exchange, arguments, current.arguments)


def check_exchange_delete(vhost: str, name: str, used: bool, if_unused: bool) -> None:
    """Refuse to delete an exchange of the broker, or one that is used and must not be."""
    check_not_default(name)
    if name.startswith(RESERVED_PREFIX):
        text = f"deletion of system {named('exchange', name, vhost)} not allowed"
        raise Refusal(ACCESS_REFUSED, text)
    if if_unused and used:
        raise Refusal(PRECONDITION_FAILED, f"{named('exchange', name, vhost)} in use")


def takes_any_binding(exchange_type: str, arguments: dict[str, Any]) -> bool:
    """Return whether `check_binding` takes every key with these arguments."""
    return exchange_type not in CHECKED_KEYS and "x-match" not in arguments


def check_binding(exchange_type: str, key: str, arguments: dict[str, Any]) -> None:
    fault = weight_fault(exchange_type, key)
    if fault is not None:
        raise Refusal(PRECONDITION_FAILED, fault)
    if exchange_type != "headers" or "x-match" not in arguments:
        return
    how = arguments["x-match"]
    if not isinstance(how, str):
        raise Refusal(
            PRECONDITION_FAILED,
            f"Invalid x-match field type {type_name(how)} (value {erlang_term(how)}); "
            "expected longstr",
        )
    if how not in X_MATCHES:
        raise Refusal(
            PRECONDITION_FAILED,
            f"Invalid x-match field value {erlang_term(how)}; "
            "expected all, any, all-with-x, or any-with-x",
        )


def in_record(ttl_ms: int) -> tuple[int, int]:
    """Split a ttl into what a record's 32 bits hold and the rest.

    Returns the ms to add to the time of the record and the record's ttl; both together say when the
    message expires.
    """
    late_ms = max(ttl_ms - RECORD_TTL_MS_MAX, 0)
    return late_ms, ttl_ms - late_ms


# -- queues


def check_consume_arguments(vhost: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse bad values of arguments that every consumer may give."""
    for key, check in CONSUME_ARGUMENTS.items():
        wrong = check(arguments[key], {}) if key in arguments else ""
        if wrong:
            thing = named("queue", name, vhost)
            raise Refusal(PRECONDITION_FAILED, f"invalid arg '{key}' for {thing}: {wrong}")


def overdue(channel: int, timeout_ms: int) -> str:
    """Say why a channel is closed whose consumer has not acknowledged in time."""
    return (
        f"delivery acknowledgement on channel {channel} timed out. "
        f"Timeout value used: {timeout_ms} ms. "
        "This timeout value can be configured, see consumers doc guide to learn more"
    )


def check_owner(queue: QueuePut, owner: str) -> None:
    """Refuse the use of an exclusive queue by another connection than its own."""
    if queue.owner and queue.owner != owner:
        raise _locked(queue)


def check_same_queue(
    current: QueuePut,
    durable: bool,
    auto_delete: bool,
    owner: str,
    exclusive: bool,
    arguments: dict[str, Any],
) -> None:
    """Refuse a declare of a queue that exists and is different.

    Only arguments that mean something are compared. Whether an exclusive queue is durable is not
    compared, because the queue lasts as long as its connection.
    """
    if current.owner != (owner if exclusive else ""):
        raise _locked(current)
    if exclusive:
        durable = current.durable
    is_same = durable is current.durable and auto_delete is current.auto_delete
    if is_same and arguments == current.arguments == {}:
        return
    thing = named("queue", current.name, current.vhost)
    _check_same_field(thing, "durable", durable, current.durable)
    _check_same_field(thing, "auto_delete", auto_delete, current.auto_delete)
    _check_same_arguments(
        thing, table.TABLE.queue, _with_type(arguments), _with_type(current.arguments)
    )


def check_queue_arguments(vhost: str, name: str, arguments: dict[str, Any]) -> None:
    """Refuse bad values of a queue's arguments, and arguments of another type of queue."""
    thing = named("queue", name, vhost)
    if not isinstance(exchange := arguments.get("x-dead-letter-exchange", ""), str):
        wrong = f"invalid type '{type_name(exchange)}' for arg 'x-dead-letter-exchange'"
        raise Refusal(PRECONDITION_FAILED, f"{wrong} in {thing}")
    kind = arguments.get("x-queue-type", table.CLASSIC)
    # An unknown type is refused by its own row.
    type = kind if isinstance(kind, str) and kind in table.QUEUE_TYPES else table.CLASSIC
    for key in arguments:
        row = table.TABLE.queue.get(key)
        if row is None:
            continue
        if type not in row.types:
            text = f"invalid arg '{key}' for {thing} of queue type rabbit_{kind}_queue"
            raise Refusal(PRECONDITION_FAILED, text)
        _check_argument(row, arguments, thing)


def check_queue_type(
    vhost: str,
    name: str,
    durable: bool,
    auto_delete: bool,
    exclusive: bool,
    arguments: dict[str, Any],
) -> None:
    """Refuse a new queue that its type cannot have, such as an exclusive stream."""
    if unfit := unfit_for_type(arguments.get("x-queue-type"), durable, auto_delete, exclusive):
        text = f"invalid property '{unfit}' for {named('queue', name, vhost)}"
        raise Refusal(PRECONDITION_FAILED, text)


def check_nameless(arguments: dict[str, Any]) -> None:
    """Refuse a queue without a name whose type needs one."""
    kind = arguments.get("x-queue-type")
    if kind in LASTING_TYPES:
        text = f"Cannot declare a server-named queue for type rabbit_{kind}_queue"
        raise Refusal(PRECONDITION_FAILED, text)


def unfit_for_type(kind: Any, durable: bool, auto_delete: bool, exclusive: bool) -> str:
    """Return the property, in RabbitMQ's words, that no queue of this type has, or ""."""
    if kind not in LASTING_TYPES:
        return ""
    if auto_delete:
        return "auto-delete"
    if exclusive:
        return "exclusive-owner"
    return "" if durable else "non-durable"


def with_prefix(name: str, arguments: dict[str, Any]) -> str:
    """Give a name that the broker has made the beginning that the client wants."""
    prefix = arguments.get("x-name-prefix")
    if not isinstance(prefix, str) or not prefix:
        return name
    if len(prefix.encode()) > NAME_PREFIX_BYTES_MAX:
        text = f"Queue name prefix '{prefix}' exceeds the {NAME_PREFIX_BYTES_MAX}-byte limit"
        raise Refusal(PRECONDITION_FAILED, text)
    if prefix.startswith(RESERVED_PREFIX):
        raise Refusal(ACCESS_REFUSED, f"queue name '{prefix}' contains reserved prefix 'amq.*'")
    return f"{prefix}-{name.removeprefix(SERVER_NAMED_PREFIX)}"


def _locked(queue: QueuePut) -> Refusal:
    return Refusal(
        RESOURCE_LOCKED,
        f"cannot obtain exclusive access to locked {named('queue', queue.name, queue.vhost)}. "
        "It could be originally declared on another connection or the exclusive property value "
        "does not match that of the original declaration.",
    )


def _with_type(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments if "x-queue-type" in arguments else {**arguments, "x-queue-type": "classic"}


# -- equivalence


def _check_same_field(thing: str, key: str, received: Any, current: Any) -> None:
    if received != current:
        raise _inequivalent(thing, key, _quoted(received), _quoted(current))


def _check_same_arguments(
    thing: str, rows: Mapping[str, Argument], received: dict[str, Any], current: dict[str, Any]
) -> None:
    for key, row in rows.items():
        if not row.is_compared or (key not in received and key not in current):
            continue
        if key not in received or key not in current:
            raise _inequivalent(thing, key, _typed(received, key), _typed(current, key))
        new, old = received[key], current[key]
        # True == 1 == 1.0 here, but not on the wire.
        if new != old or type(new) is not type(old):
            raise _inequivalent(thing, key, _quoted(new), _quoted(old))


def _inequivalent(thing: str, key: str, received: str, current: str) -> Refusal:
    return Refusal(
        PRECONDITION_FAILED,
        f"inequivalent arg '{key}' for {thing}: received {received} but current is {current}",
    )


def _typed(arguments: dict[str, Any], key: str) -> str:
    if key not in arguments:
        return "none"
    return f"the value {_quoted(arguments[key])} of type '{type_name(arguments[key])}'"


def _quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else f"'{erlang_term(value)}'"
