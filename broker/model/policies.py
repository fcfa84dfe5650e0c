"""Which policies apply to a queue or exchange, and what they make of its arguments: pure, the same code everywhere.

Of the policies of a vhost exactly one applies to an object, of the operator policies too: the one of the highest
priority whose pattern and `apply-to` match; of several the one whose name is first (RabbitMQ leaves that open). An
operator policy limits what the policy says: the lower number wins. `effective` then merges both with the arguments
the object was declared with: of two numbers the lower, else the argument wins. Whether a definition is one at all is
checked by `controller.policies`, before it comes here; what is malformed nevertheless applies to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from shardmq.broker.model import patterns
from shardmq.broker.model.changes import ParameterPut
from shardmq.broker.routing import delaying, hidden

POLICY = "policy"
OPERATOR_POLICY = "operator_policy"
COMPONENTS: Final = frozenset((POLICY, OPERATOR_POLICY))

# Of a policy and an argument, and of a policy and an operator policy, the lower number wins.
LOWER_WINS: Final = frozenset((
    "message-ttl", "expires", "max-length", "max-length-bytes", "max-in-memory-length", "max-in-memory-bytes",
    "delivery-limit", "consumer-timeout",
))  # fmt: skip
STREAM_KEYS: Final = frozenset(("max-age", "stream-max-segment-size-bytes", "stream-filter-size-bytes"))
QUEUE_KEYS: Final = frozenset((
    *LOWER_WINS, *STREAM_KEYS, "overflow", "dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy",
    "queue-mode", "queue-version", "queue-leader-locator", "initial-cluster-size",
    "delayed-retry-type", "delayed-retry-min", "delayed-retry-max", "delayed-retry-multiplier",
))  # fmt: skip
EXCHANGE_KEYS: Final = frozenset(("alternate-exchange",))
# Keys whose argument has another name.
EXCHANGE_ARGUMENTS: Final = {delaying.POLICY_KEY: delaying.FLAG_ARGUMENT}
# A policy with one of these does not apply at all to queues of other types, as in RabbitMQ.
ONLY_FOR_STREAMS: Final = STREAM_KEYS
APPLY_TO: Final[dict[str, frozenset[str]]] = {
    "all": frozenset(("exchange", "classic", "quorum", "stream")),
    "exchanges": frozenset(("exchange",)),
    "queues": frozenset(("classic", "quorum", "stream")),
    "classic_queues": frozenset(("classic",)),
    "quorum_queues": frozenset(("quorum",)),
    "streams": frozenset(("stream",)),
}
# Queues that stand for a client's own, or an exchange's: nobody's policy is about them.
HIDDEN_PREFIXES = ("amq.rabbitmq.reply-to", *hidden.PREFIXES)
EXCHANGE = "exchange"  # beside the queue types, what a policy may apply to


class Applied(NamedTuple):
    """What applies to one object: names, or None, and the merged definition with the keys of policies."""

    policy: str | None = None
    operator_policy: str | None = None
    definition: Mapping[str, Any] = {}


NOTHING: Final = Applied()


class _Policy(NamedTuple):
    name: str
    pattern: patterns.Pattern
    kinds: frozenset[str]  # "exchange" and queue types
    priority: float
    definition: dict[str, Any]

    def matches(self, kind: str, name: str) -> bool:
        return kind in self.kinds and self.pattern.search(name) is not None


class Policies:
    """All of one vhost. Never changed in place: a change makes another."""

    __slots__ = ("_operator", "_user")

    def __init__(self, puts: Iterable[ParameterPut] = ()) -> None:
        """`puts`: parameters of the vhost; others than policies are passed over."""
        puts = list(puts)
        self._user = _in_order(put for put in puts if put.component == POLICY)
        self._operator = _in_order(put for put in puts if put.component == OPERATOR_POLICY)

    def __bool__(self) -> bool:
        return bool(self._user or self._operator)

    def of(self, kind: str, name: str) -> Applied:
        """`kind`: "exchange", or the type of the queue."""
        if kind != EXCHANGE and name.startswith(HIDDEN_PREFIXES):
            return NOTHING
        policy = _first(self._user, kind, name)
        operator = _first(self._operator, kind, name)
        if policy is None and operator is None:
            return NOTHING
        return Applied(
            policy.name if policy else None,
            operator.name if operator else None,
            merged(policy.definition if policy else {}, operator.definition if operator else {}),
        )

    def may_differ(self, other: Policies) -> Callable[[str, str], bool]:
        """Of kind and name: whether something else may apply than under `other`. To tell 100,000 queues apart fast."""
        own = [*((True, each) for each in self._user), *((False, each) for each in self._operator)]
        others = [*((True, each) for each in other._user), *((False, each) for each in other._operator)]
        changed = [each for each in own if each not in others] + [each for each in others if each not in own]
        return lambda kind, name: any(policy.matches(kind, name) for _, policy in changed)


def queue_kind(arguments: Mapping[str, Any]) -> str:
    kind = arguments.get("x-queue-type", "classic")
    return kind if isinstance(kind, str) else "classic"


def merged(definition: Mapping[str, Any], operator: Mapping[str, Any]) -> dict[str, Any]:
    """A policy under an operator policy: the lower number, else what the operator says."""
    both = {**definition, **operator}
    for key in definition.keys() & operator.keys() & LOWER_WINS:
        both[key] = lower(key, definition[key], operator[key])
    return both


def queue_arguments(arguments: dict[str, Any], definition: Mapping[str, Any]) -> dict[str, Any]:
    """A queue's effective arguments: its own, and what a merged definition adds to them or lowers."""
    return effective(arguments, definition, QUEUE_KEYS, "x-")


def exchange_arguments(arguments: dict[str, Any], definition: Mapping[str, Any]) -> dict[str, Any]:
    made = effective(arguments, definition, EXCHANGE_KEYS, "")
    said = {name: definition[key] for key, name in EXCHANGE_ARGUMENTS.items() if key in definition}
    return {**said, **made} if said else made


def effective(
    arguments: dict[str, Any], definition: Mapping[str, Any], keys: frozenset[str], prefix: str
) -> dict[str, Any]:
    """`arguments` itself where nothing changes. `prefix`: what an argument's name has before the policy's key."""
    found = {key: value for key, value in definition.items() if key in keys}
    if not found:
        return arguments
    made = {prefix + key: value for key, value in found.items()} | arguments
    for key in found.keys() & LOWER_WINS:
        if prefix + key in arguments:
            made[prefix + key] = lower(key, found[key], arguments[prefix + key])
    return made


def lower(key: str, one: Any, other: Any) -> Any:
    """The stricter of two limits. A delivery limit below 0 is none: then the other one holds."""
    if not _is_number(one) or not _is_number(other):
        return other
    if key == "delivery-limit" and min(one, other) < 0:
        return max(one, other)
    return min(one, other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first(policies: tuple[_Policy, ...], kind: str, name: str) -> _Policy | None:
    for policy in policies:
        if policy.matches(kind, name):
            return policy
    return None


def _in_order(puts: Iterable[ParameterPut]) -> tuple[_Policy, ...]:
    found = [policy for put in puts if (policy := _policy_of(put)) is not None]
    return tuple(sorted(found, key=lambda policy: (-policy.priority, policy.name)))


def _policy_of(put: ParameterPut) -> _Policy | None:
    """None for what is none: parameters.json may be edited by hand while the broker is down."""
    if not isinstance(put.value, dict):
        return None
    pattern, definition = put.value.get("pattern"), put.value.get("definition")
    kinds = APPLY_TO.get(str(put.value.get("apply-to", "all")))
    priority = put.value.get("priority", 0)
    if not isinstance(pattern, str) or not isinstance(definition, dict) or kinds is None or not _is_number(priority):
        return None
    if not ONLY_FOR_STREAMS.isdisjoint(definition):
        kinds -= {"classic", "quorum"}
    try:
        return _Policy(put.name, patterns.compiled(pattern), kinds, priority, definition)
    except patterns.BadPattern:
        return None


NO_POLICIES: Final = Policies()
