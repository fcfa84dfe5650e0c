"""What is accepted and kept, since definitions of other brokers carry it, and has no effect here. Pure.

Why an argument or a policy key has no effect is in its row of `shardmq.broker.model.arguments`; the rest is said here.
Imports answer and log these sentences for what they find; a policy or a parameter that is set logs them. To give one of
these an effect: take its reason away, or tests/broker/test_without_effect.py fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.policies import STREAM, STREAM_DEFINITION
from shardmq.broker.model import arguments as table
from shardmq.broker.model.changes import GLOBAL, ParameterPut, VhostPut
from shardmq.broker.model.policies import OPERATOR_POLICY, POLICY
from shardmq.broker.shared.control import ExchangeDeclare, QueueDeclare

PARAMETER, KEY, ARGUMENT, TYPE = "parameter", "policy key", "argument", "queue type"

# Why a component of parameters, a type of queue or a global parameter has no effect.
PARAMETERS: Final = {
    "shovel": "there are no shovels: no message is moved",
    "federation-upstream": table.NO_FEDERATION,
    "federation-upstream-set": table.NO_FEDERATION,
    "federation": table.NO_FEDERATION,
}
QUEUE_TYPES: Final = {table.QUORUM: "the queue is durable and on this host alone: it has no replicas"}
GLOBAL_PARAMETERS: Final = {
    "mqtt_port_to_vhost_mapping": "there is no MQTT",
    "mqtt_default_vhosts": "there is no MQTT",
}


class Found(NamedTuple):
    """One row of a table that something asked for meets. `thing`: the object that carries the name."""

    kind: str
    name: str
    why: str
    thing: str


def found_in(ask: Any) -> Iterator[Found]:
    """What of this request has no effect."""
    match ask:
        case ParameterPut():
            yield from _in_parameter(ask)
        case QueueDeclare():
            yield from _in_queue(ask.arguments, f"queue '{ask.name}' in vhost '{ask.vhost}'")
        case ExchangeDeclare():
            shards = ask.arguments.get("x-shard-arguments")
            if isinstance(shards, dict):
                yield from _in_queue(shards, f"exchange '{ask.name}' in vhost '{ask.vhost}'")
        case VhostPut():
            if why := QUEUE_TYPES.get(ask.default_queue_type):
                yield Found("default queue type", ask.default_queue_type, why, f"vhost '{ask.name}'")


def sentences(asks: Iterable[Any]) -> list[str]:
    """One sentence for each row that any of the requests meets: no more than there are rows, however long the list."""
    first: dict[tuple[str, str], Found] = {}
    counts: dict[tuple[str, str], int] = {}
    for ask in asks:
        for found in found_in(ask):
            row = (found.kind, found.name)
            first.setdefault(row, found)
            counts[row] = counts.get(row, 0) + 1
    return [_sentence(found, counts[row]) for row, found in sorted(first.items())]


def _sentence(found: Found, count: int) -> str:
    more = f" and {count - 1} more" if count > 1 else ""
    return f"{found.kind} {found.name} of {found.thing}{more} is kept without effect: {found.why}"


def _in_parameter(put: ParameterPut) -> Iterator[Found]:
    thing = f"'{put.name}' in vhost '{put.vhost}'"
    if put.component in (POLICY, OPERATOR_POLICY):
        definition = put.value.get("definition") if isinstance(put.value, dict) else None
        for key in definition if isinstance(definition, dict) else ():
            if why := table.TABLE.keys_without_effect.get(key):
                yield Found(KEY, key, why, f"{put.component.replace('_', ' ')} {thing}")
    elif why := PARAMETERS.get(put.component):
        yield Found(PARAMETER, put.component, why, thing)
    elif put.component == STREAM and put.name not in STREAM_DEFINITION:
        yield Found(PARAMETER, f"{STREAM}/{put.name}", "nothing reads it", thing)
    elif put.component == GLOBAL and not put.vhost and (why := GLOBAL_PARAMETERS.get(put.name)):
        yield Found("global parameter", put.name, why, "the broker")


def _in_queue(arguments: dict[str, Any], thing: str) -> Iterator[Found]:
    kind = arguments.get("x-queue-type")
    if isinstance(kind, str) and (why := QUEUE_TYPES.get(kind)):
        yield Found(TYPE, kind, why, thing)
    for name in arguments:
        row = table.TABLE.queue.get(name)
        if row is not None and row.no_effect:
            yield Found(ARGUMENT, name, row.no_effect, thing)
