"""Whether what a client asks for agrees with what exists: the rules and their words.

Pure functions that front doors and the controller share. Each returns when all is well and raises Refusal, an AMQP
reply code with RabbitMQ's text (without the "NAME - " in front), since client libraries and test suites match on
those words. Who may do what is `Catalog.may`; this file only knows names, types, arguments and owners.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, QueuePut
from shardmq.broker.routing import delaying, hidden, keeping
from shardmq.broker.routing.spreading import CHECKED_KEYS, exchange_fault, weight_fault
from shardmq.broker.routing.types import TYPES
from shardmq.shardd.wire import messages as wire

NAME_BYTES_MAX = 255  # a shortstr
NAME_PREFIX_BYTES_MAX = 64
EXPIRY_MS_MAX = 315_360_000_000  # ten years, as in RabbitMQ
RECORD_TTL_MS_MAX = 0xFFFFFFFE  # a record has 32 bits for it, one number of which says never
PRIORITY_MAX = 255
DEDUPLICATION_CACHE_MAX = 1_000_000  # ids that one exchange remembers
RESERVED_PREFIX = "amq."
SERVER_NAMED_PREFIX = "amq.gen-"
# Who consumes from this gets a queue of a name of its own; who puts it into reply_to means that queue.
REPLY_TO = "amq.rabbitmq.reply-to"
# Argument of a queue where an exchange keeps messages that are not due: its name. Nobody else's has it at a shard.
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

QUEUE_TYPES: Final = frozenset(("classic", "quorum", "stream"))
LASTING_TYPES: Final = frozenset(("quorum", "stream"))  # whose queues outlive connections and restarts, or are none
# Of the arguments a queue may have, those that only streams have, and those that streams have, too.
ONLY_STREAMS: Final = frozenset(("x-max-age", "x-stream-max-segment-size-bytes", "x-stream-filter-size-bytes"))
STREAMS_TOO: Final = frozenset((
    "x-queue-type", "x-max-length", "x-max-length-bytes", "x-queue-leader-locator", "x-initial-cluster-size",
))  # fmt: skip
SEGMENT_BYTES_MAX: Final = 3_000_000_000
MAX_AGE: Final = re.compile(r"[0-9]+[YMDhms]")
# Those that make another exchange of it.
EXCHANGE_ARGUMENTS: Final = (
    "alternate-exchange", "hash-header", "hash-property", "x-hash-on", "x-algorithm", "x-shards", "x-super-stream",
    "x-shard-arguments", "x-shard-routing-key", "x-shards-when-gone", delaying.TYPE_ARGUMENT, delaying.FLAG_ARGUMENT,
    "x-message-deduplication", "x-cache-size", "x-cache-ttl", "x-deduplication-header",
    keeping.MESSAGES, keeping.AGE_MS, keeping.LENGTH,
)  # fmt: skip
X_MATCHES: Final = frozenset(("all", "any", "all-with-x", "any-with-x"))


class Refusal(Exception):
    """What the client asked for cannot be: the reply code and text it gets."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


# -- names ----------------------------------------------------------------------------------------------


def named(kind: str, name: str, vhost: str) -> str:
    """As RabbitMQ names a thing in its texts."""
    return f"{kind} '{name}' in vhost '{vhost}'"


def topic_refused(right: str, vhost: str, exchange: str, key: str, user: str) -> str:
    return f"{right} access to topic '{key}' in {named('exchange', exchange, vhost)} refused for user '{user}'"


def no_queue(vhost: str, name: str) -> Refusal:
    return Refusal(NOT_FOUND, f"no {named('queue', name, vhost)}")


def not_purged(queue: QueuePut, why: str) -> Refusal:
    """Return what a purge is refused with that found the disk full. `why`: the shard's words."""
    return Refusal(NO_ROOM, f"{named('queue', queue.name, queue.vhost)} is not purged: {why}")


def no_exchange(vhost: str, name: str) -> Refusal:
    return Refusal(NOT_FOUND, f"no {named('exchange', name, vhost)}")


def clean_name(name: str) -> str:
    """Line breaks fall out of names, as in RabbitMQ: they come from files read line by line."""
    if "\n" in name or "\r" in name:
        return name.replace("\n", "").replace("\r", "")
    return name


def check_new_name(kind: str, name: str) -> None:
    if name.startswith(RESERVED_PREFIX):
        raise Refusal(ACCESS_REFUSED, f"{kind} name '{name}' contains reserved prefix 'amq.*'")
    if len(name) > NAME_BYTES_MAX // 4 and len(name.encode()) > NAME_BYTES_MAX:
        raise Refusal(PRECONDITION_FAILED, f"{kind} name is longer than {NAME_BYTES_MAX} bytes")


def is_reply_queue(name: str) -> bool:
    """A direct reply-to queue: there for who publishes to it and who looks whether it is there, for nobody else."""
    return name.startswith(REPLY_TO)


def is_hidden_queue(name: str) -> bool:
    """Nobody's to see, declare, bind or delete: for direct replies, or an exchange's own."""
    return is_reply_queue(name) or hidden.is_of_exchange(name)


def check_not_default(exchange: str) -> None:
    if not exchange:
        raise Refusal(ACCESS_REFUSED, "operation not permitted on the default exchange")


# -- limits ---------------------------------------------------------------------------------------------


def check_connection_limits(
    catalog: Catalog, vhost: str, user: str, of_vhost: int, of_user: int, of_all: int = 0, all_max: int = 0
) -> None:
    """`of_vhost`, `of_user`, `of_all`: connections that are open already. `all_max`: of the broker, 0 for none."""
    if 0 < all_max <= of_all:
        raise Refusal(NOT_ALLOWED, f"connection refused: node connection limit ({all_max}) is reached")
    limit = catalog.vhost_limit(vhost, MAX_CONNECTIONS)
    if limit is not None and limit <= of_vhost:
        text = f"access to vhost '{vhost}' refused for user '{user}': connection limit ({limit}) is reached"
        raise Refusal(NOT_ALLOWED, text)
    limit = catalog.user_limit(user, MAX_CONNECTIONS)
    if limit is not None and limit <= of_user:
        text = f"connection refused for user '{user}': user connection limit ({limit}) is reached"
        raise Refusal(NOT_ALLOWED, text)


def check_channel_limits(catalog: Catalog, user: str, of_user: int, in_all: int, in_all_max: int, node: str) -> None:
    """With the one that is to be opened. `in_all_max` 0: no limit; `node`: how the broker is called."""
    limit = catalog.user_limit(user, MAX_CHANNELS)
    if limit is not None and limit < of_user:
        text = f"number of channels opened for user '{user}' has reached the maximum allowed user limit of ({limit})"
        raise Refusal(NOT_ALLOWED, text)
    if 0 < in_all_max < in_all:
        text = f"number of channels opened on node '{node}' has reached the maximum allowed limit of ({in_all_max})"
        raise Refusal(NOT_ALLOWED, text)


# -- exchanges ------------------------------------------------------------------------------------------


def check_new_exchange(vhost: str, name: str, type: str, arguments: dict[str, Any]) -> None:
    check_new_name("exchange", name)
    check_exchange_type(type)
    _check_exchange_deduplication(vhost, name, arguments)
    fault = delaying.delayed_fault(type, arguments, TYPES)
    inner = delaying.inner_type(type, arguments)
    fault = fault or exchange_fault(inner, arguments) or keeping.exchange_fault(inner, arguments)
    if fault:
        raise Refusal(PRECONDITION_FAILED, fault)
    alternate = arguments.get("alternate-exchange")
    if alternate is not None and not isinstance(alternate, str):
        raise Refusal(
            PRECONDITION_FAILED,
            f"invalid type '{type_name(alternate)}' for arg 'alternate-exchange' in {named('exchange', name, vhost)}",
        )


def _check_exchange_deduplication(vhost: str, name: str, arguments: dict[str, Any]) -> None:
    for key, check in DEDUPLICATION_ARGUMENTS.items():
        wrong = check(arguments[key], arguments) if key in arguments else ""
        if wrong:
            raise Refusal(PRECONDITION_FAILED, f"invalid arg '{key}' for {named('exchange', name, vhost)}: {wrong}")


def check_keeping_bind(exchange_type: str, exchange: dict[str, Any], kind: str, arguments: dict[str, Any]) -> None:
    """A binding from an exchange with these arguments, as far as it keeps messages; the type is that it routes by."""
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
    current: ExchangePut, type: str, durable: bool, auto_delete: bool, internal: bool, arguments: dict[str, Any]
) -> None:
    """A declare of an exchange that exists. Of its arguments those count that mean something; RabbitMQ does so too."""
    thing = named("exchange", current.name, current.vhost)
    _check_same_field(thing, "type", type, current.type)
    _check_same_field(thing, "durable", durable, current.durable)
    _check_same_field(thing, "auto_delete", auto_delete, current.auto_delete)
    _check_same_field(thing, "internal", internal, current.internal)
    if arguments or current.arguments:
        _check_same_arguments(thing, EXCHANGE_ARGUMENTS, arguments, current.arguments)


def check_exchange_delete(vhost: str, name: str, used: bool, if_unused: bool) -> None:
    check_not_default(name)
    if name.startswith(RESERVED_PREFIX):
        raise Refusal(ACCESS_REFUSED, f"deletion of system {named('exchange', name, vhost)} not allowed")
    if if_unused and used:
        raise Refusal(PRECONDITION_FAILED, f"{named('exchange', name, vhost)} in use")


def takes_any_binding(exchange_type: str, arguments: dict[str, Any]) -> bool:
    """Whether `check_binding` refuses none with these arguments, whatever its key."""
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
            f"Invalid x-match field type {type_name(how)} (value {erlang_term(how)}); expected longstr",
        )
    if how not in X_MATCHES:
        raise Refusal(
            PRECONDITION_FAILED,
            f"Invalid x-match field value {erlang_term(how)}; expected all, any, all-with-x, or any-with-x",
        )


def in_record(ttl_ms: int) -> tuple[int, int]:
    """(ms to be added to the time of a message's record, the record's ttl), for together they say when it expires."""
    late_ms = max(ttl_ms - RECORD_TTL_MS_MAX, 0)
    return late_ms, ttl_ms - late_ms


# -- queues ---------------------------------------------------------------------------------------------


def check_consume_arguments(vhost: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Those that any consumer may give."""
    for key, check in CONSUME_ARGUMENTS.items():
        wrong = check(arguments[key], {}) if key in arguments else ""
        if wrong:
            raise Refusal(PRECONDITION_FAILED, f"invalid arg '{key}' for {named('queue', name, vhost)}: {wrong}")


def overdue(channel: int, timeout_ms: int) -> str:
    return (
        f"delivery acknowledgement on channel {channel} timed out. Timeout value used: {timeout_ms} ms. "
        "This timeout value can be configured, see consumers doc guide to learn more"
    )


def check_owner(queue: QueuePut, owner: str) -> None:
    """Any use of an exclusive queue by another connection than its own."""
    if queue.owner and queue.owner != owner:
        raise _locked(queue)


def check_same_queue(
    current: QueuePut, durable: bool, auto_delete: bool, owner: str, exclusive: bool, arguments: dict[str, Any]
) -> None:
    """A declare of a queue that exists: only arguments that mean something are compared. An exclusive one lasts as long
    as its connection, whatever it says of being durable."""
    if current.owner != (owner if exclusive else ""):
        raise _locked(current)
    if exclusive:
        durable = current.durable
    if durable is current.durable and auto_delete is current.auto_delete and arguments == current.arguments == {}:
        return
    thing = named("queue", current.name, current.vhost)
    _check_same_field(thing, "durable", durable, current.durable)
    _check_same_field(thing, "auto_delete", auto_delete, current.auto_delete)
    _check_same_arguments(thing, QUEUE_ARGUMENTS, _with_type(arguments), _with_type(current.arguments))


def check_queue_arguments(vhost: str, name: str, arguments: dict[str, Any]) -> None:
    kind = arguments.get("x-queue-type", "classic")
    if not isinstance(exchange := arguments.get("x-dead-letter-exchange", ""), str):
        wrong = f"invalid type '{type_name(exchange)}' for arg 'x-dead-letter-exchange'"
        raise Refusal(PRECONDITION_FAILED, f"{wrong} in {named('queue', name, vhost)}")
    for key, value in arguments.items():
        if (kind == "stream" and key in QUEUE_ARGUMENTS and key not in ONLY_STREAMS | STREAMS_TOO) or (
            kind != "stream" and key in ONLY_STREAMS
        ):
            thing = named("queue", name, vhost)
            raise Refusal(PRECONDITION_FAILED, f"invalid arg '{key}' for {thing} of queue type rabbit_{kind}_queue")
        check = QUEUE_ARGUMENTS.get(key)
        wrong = check(value, arguments) if check else ""
        if wrong:
            raise Refusal(PRECONDITION_FAILED, f"invalid arg '{key}' for {named('queue', name, vhost)}: {wrong}")


def check_queue_type(
    vhost: str, name: str, durable: bool, auto_delete: bool, exclusive: bool, arguments: dict[str, Any]
) -> None:
    """Of a new queue: whether one of its type can be like that."""
    if unfit := unfit_for_type(arguments.get("x-queue-type"), durable, auto_delete, exclusive):
        raise Refusal(PRECONDITION_FAILED, f"invalid property '{unfit}' for {named('queue', name, vhost)}")


def check_nameless(arguments: dict[str, Any]) -> None:
    """Of a queue that is to be given a name."""
    kind = arguments.get("x-queue-type")
    if kind in LASTING_TYPES:
        raise Refusal(PRECONDITION_FAILED, f"Cannot declare a server-named queue for type rabbit_{kind}_queue")


def unfit_for_type(kind: Any, durable: bool, auto_delete: bool, exclusive: bool) -> str:
    """The property, in RabbitMQ's words, that no queue of this type has; "" if all are well."""
    if kind not in LASTING_TYPES:
        return ""
    return "auto-delete" if auto_delete else "exclusive-owner" if exclusive else "" if durable else "non-durable"


def with_prefix(name: str, arguments: dict[str, Any]) -> str:
    """A name given by the broker, with the beginning that the client wants for it."""
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
        f"cannot obtain exclusive access to locked {named('queue', queue.name, queue.vhost)}. It could be originally "
        "declared on another connection or the exclusive property value does not match that of the original "
        "declaration.",
    )


def _with_type(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments if "x-queue-type" in arguments else {**arguments, "x-queue-type": "classic"}


# Each check gives "" or what is wrong, as an Erlang term.


def _non_negative(value: Any, _: dict[str, Any]) -> str:
    if type(value) is not int:
        return not_integer(value)
    return f"{{value_negative,{value}}}" if value < 0 else ""


def _positive(value: Any, arguments: dict[str, Any]) -> str:
    return _non_negative(value, arguments) or ("{value_zero,0}" if value == 0 else "")


def _ttl(value: Any, arguments: dict[str, Any]) -> str:
    wrong = _non_negative(value, arguments)
    return wrong or (f"{{value_too_large,{value}}}" if value > EXPIRY_MS_MAX else "")


def _expires(value: Any, arguments: dict[str, Any]) -> str:
    return _positive(value, arguments) or _ttl(value, arguments)


def _priority(value: Any, arguments: dict[str, Any]) -> str:
    wrong = _non_negative(value, arguments)
    return wrong or (f"{{max_value_exceeded,{value}}}" if value > PRIORITY_MAX else "")


def _string(value: Any, _: dict[str, Any]) -> str:
    return "" if isinstance(value, str) else _unacceptable(value)


def _dead_letter_key(value: Any, arguments: dict[str, Any]) -> str:
    wrong = _string(value, arguments)
    if not wrong and len(value.encode()) > NAME_BYTES_MAX:
        return f'"a routing key has at most {NAME_BYTES_MAX} bytes"'
    return wrong or ("" if "x-dead-letter-exchange" in arguments else "routing_key_but_no_dlx_defined")


def _max_age(value: Any, arguments: dict[str, Any]) -> str:
    return _string(value, arguments) or ("" if MAX_AGE.fullmatch(value) else "invalid_max_age")


def _segment_bytes(value: Any, arguments: dict[str, Any]) -> str:
    wrong = _positive(value, arguments)
    return wrong or (f"{{max_value_exceeded,{value}}}" if value > SEGMENT_BYTES_MAX else "")


def _boolean(value: Any, _: dict[str, Any]) -> str:
    return "" if isinstance(value, bool) else _unacceptable(value)


def _integer(value: Any, _: dict[str, Any]) -> str:
    return "" if type(value) is int else not_integer(value)


def _any(value: Any, _: dict[str, Any]) -> str:
    return ""


def _one_of(words: frozenset[str], wrong: str) -> Callable[[Any, dict[str, Any]], str]:
    def check(value: Any, _: dict[str, Any]) -> str:
        if not isinstance(value, str):
            return _unacceptable(value)
        return "" if value in words else wrong.format(value)

    return check


def not_integer(value: Any) -> str:
    return f'"expected integer, got {type_name(value)}"'


def _unacceptable(value: Any) -> str:
    return f"{{unacceptable_type,{type_name(value)}}}"


def _cache_size(value: Any, arguments: dict[str, Any]) -> str:
    wrong = _positive(value, arguments)
    return wrong or (f"{{max_value_exceeded,{value}}}" if value > DEDUPLICATION_CACHE_MAX else "")


DEDUPLICATION_ARGUMENTS: Final[dict[str, Callable[[Any, dict[str, Any]], str]]] = {
    "x-message-deduplication": _boolean,
    "x-cache-size": _cache_size,
    "x-cache-ttl": _positive,
    "x-deduplication-header": _string,
}


CONSUME_ARGUMENTS: Final[dict[str, Callable[[Any, dict[str, Any]], str]]] = {
    "x-priority": _integer,
    "x-cancel-on-ha-failover": _boolean,
}

RETRY_TYPES: Final = frozenset(("disabled", "all", "failed", "returned"))

# Also the list of what a redeclare compares. What older brokers knew (queue mode, version, in-memory limits) is taken
# and ignored: definition files still carry it.
QUEUE_ARGUMENTS: Final[dict[str, Callable[[Any, dict[str, Any]], str]]] = {
    **DEDUPLICATION_ARGUMENTS,
    "x-queue-type": _one_of(QUEUE_TYPES, "\"unsupported queue type '{}'\""),
    "x-expires": _expires,
    "x-message-ttl": _ttl,
    "x-dead-letter-exchange": _string,
    "x-dead-letter-routing-key": _dead_letter_key,
    "x-dead-letter-strategy": _one_of(frozenset(("at-most-once", "at-least-once")), "invalid_dlx_strategy"),
    "x-max-length": _non_negative,
    "x-max-length-bytes": _non_negative,
    "x-max-in-memory-length": _non_negative,
    "x-max-in-memory-bytes": _non_negative,
    "x-max-priority": _priority,
    "x-overflow": _one_of(frozenset(("drop-head", "reject-publish", "reject-publish-dlx")), "invalid_overflow"),
    "x-queue-mode": _one_of(frozenset(("default", "lazy")), "\"unsupported queue mode '{}'\""),
    "x-queue-version": _any,
    "x-single-active-consumer": _boolean,
    "x-delivery-limit": _integer,
    "x-consumer-timeout": _non_negative,
    "x-consumer-disconnected-timeout": _non_negative,
    "x-delayed-retry-type": _one_of(RETRY_TYPES, "invalid_delayed_retry_type"),
    "x-delayed-retry-min": _positive,
    "x-delayed-retry-max": _positive,
    "x-delayed-retry-multiplier": _positive,
    "x-max-age": _max_age,
    "x-stream-max-segment-size-bytes": _segment_bytes,
    "x-stream-filter-size-bytes": _non_negative,
    "x-queue-leader-locator": _string,
    "x-initial-cluster-size": _positive,
    "x-quorum-initial-group-size": _positive,
}


# -- equivalence ----------------------------------------------------------------------------------------


def _check_same_field(thing: str, key: str, received: Any, current: Any) -> None:
    if received != current:
        raise _inequivalent(thing, key, _quoted(received), _quoted(current))


def _check_same_arguments(thing: str, keys: Any, received: dict[str, Any], current: dict[str, Any]) -> None:
    for key in keys:
        if key not in received and key not in current:
            continue
        if key not in received or key not in current:
            raise _inequivalent(thing, key, _typed(received, key), _typed(current, key))
        new, old = received[key], current[key]
        # True == 1 == 1.0 here, but not on the wire.
        if new != old or type(new) is not type(old):
            raise _inequivalent(thing, key, _quoted(new), _quoted(old))


def _inequivalent(thing: str, key: str, received: str, current: str) -> Refusal:
    return Refusal(
        PRECONDITION_FAILED, f"inequivalent arg '{key}' for {thing}: received {received} but current is {current}"
    )


def _typed(arguments: dict[str, Any], key: str) -> str:
    if key not in arguments:
        return "none"
    return f"the value {_quoted(arguments[key])} of type '{type_name(arguments[key])}'"


def _quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else f"'{erlang_term(value)}'"


def type_name(value: Any) -> str:
    """The name of a field's type in RabbitMQ's texts. Integers travel as the smallest of I and l that holds them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "signedint" if -(1 << 31) <= value < 1 << 31 else "long"
    for python_type, name in TYPE_NAMES:
        if isinstance(value, python_type):
            return name
    return "void"


TYPE_NAMES: Final[tuple[tuple[type, str], ...]] = (
    (bool, "bool"),
    (str, "longstr"),
    (float, "double"),
    (bytes, "binary"),
    (bytearray, "binary"),
    (list, "array"),
    (dict, "table"),
    (datetime.datetime, "timestamp"),
)


def erlang_term(value: Any) -> str:
    """A value as Erlang prints it."""
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'<<"{value}">>' if value else "<<>>"
    if isinstance(value, bytes | bytearray):
        return f"<<{','.join(str(byte) for byte in value)}>>"
    if isinstance(value, list):
        return f"[{','.join(f'{{{type_name(item)},{erlang_term(item)}}}' for item in value)}]"
    if isinstance(value, dict):
        pairs = (f'{{<<"{key}">>,{type_name(item)},{erlang_term(item)}}}' for key, item in value.items())
        return f"[{','.join(pairs)}]"
    return str(value)
