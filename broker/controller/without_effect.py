"""Names that are accepted and kept, because definitions of other brokers have them, without effect.

The row of an argument or a policy key in `model/arguments.py` says why it has no effect. The
reasons of other names are here. Wherever such a name comes in, a sentence about it is shown. An
import answers and logs them. A declare that makes something new (AMQP or HTTP), a policy, a
parameter and a vhost log them (`EffectWarnings`). The HTTP API answers them in the header
`Warning`, which shardctl and the page show. The page lists them for all that exists (`things`).
Whoever gives a name an effect takes its reason away, or tests/policies/test_without_effect.py
fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.policies import STREAM, STREAM_DEFINITION
from shardmq.broker.model import arguments as table
from shardmq.broker.model import copies
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import GLOBAL, ExchangePut, ParameterPut, QueuePut, VhostPut
from shardmq.broker.model.federation import POLICY_KEYS, UPSTREAM, UPSTREAM_SET
from shardmq.broker.model.policies import OPERATOR_POLICY, POLICY
from shardmq.broker.model.shovels import NO_AMQP10, SHOVEL, is_amqp10
from shardmq.broker.shared.control import ExchangeDeclare, QueueDeclare
from shardmq.broker.shared.failures import Budget
from shardmq.cluster.replicas import Replicas

# So many lines are logged at once, and after that one more each LINE_S seconds.
LINES_MAX: Final = 100
LINE_S: Final = 0.6

PARAMETER, KEY, ARGUMENT, TYPE = "parameter", "policy key", "argument", "queue type"

# Why a component of parameters, a type of queue or a global parameter has no effect.
PARAMETERS: Final = {
    "federation": "nothing reads it: each upstream is a parameter federation-upstream",
}
# By what a policy applies to, why a key of federation has no effect, or none for some.
UNFEDERATED: Final = {"streams": "streams are not federated"}
# Why a key of an upstream has no effect.
UPSTREAM_KEYS: Final = {
    "bind-nowait": "a link has one answer for each hundred bindings",
    "channel-use-mode": "a link of an exchange has a connection of its own for bindings",
}
# The arguments and policy keys that ask for copies.
COPIES_ASKED: Final = frozenset((*copies.SIZES, *copies.KEYS, table.MIN_IN_SYNC))
# Of a broker in which no shard has copies.
NO_COPIES: Final = Replicas(1)
ALONE: Final = {table.QUORUM: "no shard of this broker has copies on other nodes"}
GLOBAL_PARAMETERS: Final = {
    "mqtt_port_to_vhost_mapping": "there is no MQTT",
    "mqtt_default_vhosts": "there is no MQTT",
}


class KeptWithoutEffect(NamedTuple):
    """A name without effect in a request or an object; `thing` is the object that has it."""

    kind: str
    name: str
    why: str
    thing: str


def found_in(ask: Any, most: Replicas = NO_COPIES) -> Iterator[KeptWithoutEffect]:
    """Yield the names without effect in a request, or in an object that exists.

    most: the most copies that a shard has, and the most nodes that must be in sync for one.
    """
    match ask:
        case ParameterPut():
            yield from _in_parameter(ask, most)
        case QueuePut() if ask.part is not None:
            pass  # the exchange has the arguments of its shards
        case QueueDeclare() | QueuePut():
            thing = f"queue '{ask.name}' in vhost '{ask.vhost}'"
            yield from _in_queue(ask.arguments, thing, most)
        case ExchangeDeclare() | ExchangePut():
            shards = ask.arguments.get("x-shard-arguments")
            if isinstance(shards, dict):
                thing = f"exchange '{ask.name}' in vhost '{ask.vhost}'"
                yield from _in_queue(shards, thing, most)
        case VhostPut():
            thing, kind = f"vhost '{ask.name}'", ask.default_queue_type
            if most.count == 1 and (why := ALONE.get(kind)):
                yield KeptWithoutEffect("default queue type", kind, why, thing)
            if why := too_many(table.REPLICAS, ask.replicas, most):
                yield KeptWithoutEffect("setting", "replicas", why, thing)
            if why := too_many(table.MIN_IN_SYNC, ask.min_in_sync, most):
                yield KeptWithoutEffect("setting", "min_in_sync", why, thing)


def too_many(name: str, asked: Any, most: Replicas) -> str:
    """Return why so many copies, or nodes in sync, are not there; "" if they may be.

    name: of the policy key or the argument that asks.
    """
    if type(asked) is not int or name not in COPIES_ASKED:
        return ""
    has = most.least if name == table.MIN_IN_SYNC else most.count
    if asked <= has:
        return ""
    words = "nodes in sync for a confirm" if name == table.MIN_IN_SYNC else "copies"
    return f"{asked} {words} are asked for, and no shard has more than {has}"


def things(catalog: Catalog) -> Iterator[Any]:
    """Yield all objects that may have such names; the catalog may change in between."""
    yield from list(catalog.parameters.values())
    for vhost in list(catalog.vhosts.values()):
        yield vhost.put
        yield from [exchange for exchange in vhost.exchanges.values() if exchange.arguments]
        yield from [queue for queue in vhost.queues.values() if queue.arguments]


class Summary:
    """A summary with one sentence for each name without effect, for any number of requests."""

    def __init__(self, most: Replicas = NO_COPIES) -> None:
        """Begin; `most` is that of `found_in`."""
        self._most = most
        self._first: dict[tuple[str, str], KeptWithoutEffect] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, ask: Any) -> None:
        for found in found_in(ask, self._most):
            row = (found.kind, found.name)
            self._first.setdefault(row, found)
            self._counts[row] = self._counts.get(row, 0) + 1

    def sentences(self) -> list[str]:
        said = []
        for row, found in sorted(self._first.items()):
            more = f" and {self._counts[row] - 1} more" if self._counts[row] > 1 else ""
            said.append(
                f"{found.kind} {found.name} of {found.thing}{more} is kept without effect: "
                f"{found.why}"
            )
        return said


def sentences(asks: Iterable[Any], most: Replicas = NO_COPIES) -> list[str]:
    """Return one sentence for each name without effect in any of the requests.

    `most` is that of `found_in`.
    """
    summary = Summary(most)
    for ask in asks:
        summary.add(ask)
    return summary.sentences()


class EffectWarnings:
    """The lines for the log about requests that come one by one, bounded in a flood of them."""

    def __init__(self) -> None:
        self._budget = Budget(LINES_MAX, LINE_S, keys_max=1)
        self._left_out = 0

    def of(self, asks: Iterable[Any], now: float, most: Replicas = NO_COPIES) -> list[str]:
        """Return the lines for one request, or for what it made.

        `now` is in seconds of a clock that only goes forward; `most` is that of `found_in`.
        """
        lines = []
        for sentence in sentences(asks, most):
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


def _in_parameter(put: ParameterPut, most: Replicas) -> Iterator[KeptWithoutEffect]:
    thing = f"'{put.name}' in vhost '{put.vhost}'"
    why: str | None
    if put.component in (POLICY, OPERATOR_POLICY):
        definition = put.value.get("definition") if isinstance(put.value, dict) else None
        for key, value in definition.items() if isinstance(definition, dict) else ():
            why = table.TABLE.keys_without_effect.get(key) or too_many(key, value, most)
            if key in POLICY_KEYS:
                why = UNFEDERATED.get(str(put.value.get("apply-to", "all")), "")
            if why:
                yield KeptWithoutEffect(KEY, key, why, f"{put.component.replace('_', ' ')} {thing}")
    elif put.component in (UPSTREAM, UPSTREAM_SET):
        elements = put.value if isinstance(put.value, list) else [put.value]
        given = {key for each in elements if isinstance(each, dict) for key in each}
        for key in sorted(given & UPSTREAM_KEYS.keys()):
            yield KeptWithoutEffect("key", key, UPSTREAM_KEYS[key], f"{put.component} {thing}")
    elif put.component == SHOVEL:
        if is_amqp10(put.value):
            yield KeptWithoutEffect(PARAMETER, SHOVEL, NO_AMQP10, thing)
    elif why := PARAMETERS.get(put.component):
        yield KeptWithoutEffect(PARAMETER, put.component, why, thing)
    elif put.component == STREAM and put.name not in STREAM_DEFINITION:
        yield KeptWithoutEffect(PARAMETER, STREAM, "nothing reads it", thing)
    elif put.component == GLOBAL and not put.vhost and (why := GLOBAL_PARAMETERS.get(put.name)):
        yield KeptWithoutEffect("global parameter", put.name, why, "the broker")


def _in_queue(arguments: dict[str, Any], thing: str, most: Replicas) -> Iterator[KeptWithoutEffect]:
    kind = arguments.get("x-queue-type")
    if isinstance(kind, str) and most.count == 1 and (why := ALONE.get(kind)):
        yield KeptWithoutEffect(TYPE, kind, why, thing)
    for name, value in arguments.items():
        row = table.TABLE.queue.get(name)
        if row is not None and (why := row.no_effect or too_many(name, value, most)):
            yield KeptWithoutEffect(ARGUMENT, name, why, thing)
