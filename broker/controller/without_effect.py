"""What is accepted and kept, since definitions of other brokers carry it, and has no effect here. Pure.

Why an argument or a policy key has no effect is in its row of `shardmq.broker.model.arguments`; the
rest is said here. The sentences are told wherever such a name comes in: an import answers and logs
them; a declare that makes something new (AMQP or HTTP), a policy, a parameter and a vhost log them
(`Lines`); the HTTP API answers them in the header `Warning`, which shardctl and the page show. The
page lists them for all that exists (`things`). To give one of these an effect: take its reason away,
or tests/broker/test_without_effect.py fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.policies import STREAM, STREAM_DEFINITION
from shardmq.broker.model import arguments as table
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import GLOBAL, ExchangePut, ParameterPut, QueuePut, VhostPut
from shardmq.broker.model.policies import OPERATOR_POLICY, POLICY
from shardmq.broker.shared.control import ExchangeDeclare, QueueDeclare
from shardmq.broker.shared.failures import Budget

LINES_MAX: Final = 100  # in the log at once for what is declared and set one by one ...
LINE_S: Final = 0.6  # ... and after that one more for each so many seconds

PARAMETER, KEY, ARGUMENT, TYPE = "parameter", "policy key", "argument", "queue type"

# Why a component of parameters, a type of queue or a global parameter has no effect.
PARAMETERS: Final = {
    "shovel": "there are no shovels: no message is moved",
    "federation-upstream": table.NO_FEDERATION,
    "federation-upstream-set": table.NO_FEDERATION,
    "federation": table.NO_FEDERATION,
}
QUEUE_TYPES: Final = {
    table.QUORUM: "the queue is durable and on this host alone: it has no replicas"
}
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
    """What of this request, or of this thing that exists, has no effect."""
    match ask:
        case ParameterPut():
            yield from _in_parameter(ask)
        case QueuePut() if ask.part is not None:
            pass  # its exchange says what its shards have
        case QueueDeclare() | QueuePut():
            yield from _in_queue(ask.arguments, f"queue '{ask.name}' in vhost '{ask.vhost}'")
        case ExchangeDeclare() | ExchangePut():
            shards = ask.arguments.get("x-shard-arguments")
            if isinstance(shards, dict):
                yield from _in_queue(shards, f"exchange '{ask.name}' in vhost '{ask.vhost}'")
        case VhostPut():
            if why := QUEUE_TYPES.get(ask.default_queue_type):
                yield Found(
                    "default queue type", ask.default_queue_type, why, f"vhost '{ask.name}'"
                )


def things(catalog: Catalog) -> Iterator[Any]:
    """All that exists and may meet a row. The catalog may change between two of them."""
    yield from list(catalog.parameters.values())
    for vhost in list(catalog.vhosts.values()):
        yield vhost.put
        yield from [exchange for exchange in vhost.exchanges.values() if exchange.arguments]
        yield from [queue for queue in vhost.queues.values() if queue.arguments]


class Summary:
    """One sentence for each row that anything added meets: no more than there are rows, however much is added."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], Found] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, ask: Any) -> None:
        for found in found_in(ask):
            row = (found.kind, found.name)
            self._first.setdefault(row, found)
            self._counts[row] = self._counts.get(row, 0) + 1

    def sentences(self) -> list[str]:
        return [_sentence(found, self._counts[row]) for row, found in sorted(self._first.items())]


def sentences(asks: Iterable[Any]) -> list[str]:
    """Return one sentence for each row that any of the requests meets."""
    summary = Summary()
    for ask in asks:
        summary.add(ask)
    return summary.sentences()


class Lines:
    """What the log is told of requests that come one by one: all of it, but in a flood no more than LINES_MAX lines."""

    def __init__(self) -> None:
        self._budget = Budget(LINES_MAX, LINE_S, keys_max=1)
        self._left_out = 0

    def of(self, asks: Iterable[Any], now: float) -> list[str]:
        """Return the lines for one request, or for what it made. `now`: seconds of a clock that does not go back."""
        lines = []
        for sentence in sentences(asks):
            if self._budget.left("", now) < 1:
                self._left_out += 1
                continue
            self._budget.charge("", now)
            if self._left_out:
                lines.append(
                    f"{self._left_out} warnings of what is kept without effect were left out"
                )
                self._left_out = 0
            lines.append(sentence)
        return lines


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
        yield Found(PARAMETER, STREAM, "nothing reads it", thing)
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
