"""Find the policies of a queue or exchange and merge them with its arguments. Pure.

Of the policies of a vhost exactly one applies to an object, and so does one of the operator
policies: the one of the highest priority whose pattern and `apply-to` match. Of several with that
priority it is the one whose name is first, which RabbitMQ leaves open. An operator policy limits
what the policy says. Both are then merged with the arguments that the object was declared with. The
table of arguments says which value holds. Policies are checked by `controller.policies` before they
come here; a malformed one, from a file that was edited by hand, applies to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from shardmq.broker.model import arguments as table
from shardmq.broker.model import patterns
from shardmq.broker.model.arguments import (
    CLASSIC,
    NOT_STREAMS,
    QUEUE_TYPES,
    QUORUM,
    STREAM,
    STREAMS,
    Argument,
    Merge,
)
from shardmq.broker.model.changes import ParameterPut
from shardmq.broker.routing import hidden

POLICY = "policy"
OPERATOR_POLICY = "operator_policy"
COMPONENTS: Final = frozenset((POLICY, OPERATOR_POLICY))

EXCHANGE = "exchange"  # beside the queue types, what a policy may apply to
# In the order in which the page offers them.
APPLY_TO: Final[dict[str, frozenset[str]]] = {
    "queues": QUEUE_TYPES,
    "exchanges": frozenset((EXCHANGE,)),
    "all": QUEUE_TYPES | {EXCHANGE},
    "classic_queues": frozenset((CLASSIC,)),
    "quorum_queues": frozenset((QUORUM,)),
    "streams": frozenset((STREAM,)),
}
NAMES_REMEMBERED_MAX = 10_000  # of a vhost, with what applies to them
# Queues that stand for a client's own, or an exchange's: no policy applies to them.
HIDDEN_PREFIXES = ("amq.rabbitmq.reply-to", *hidden.PREFIXES)


class Applied(NamedTuple):
    """The policies of one object: their names or None, and the merged definition by policy keys."""

    policy: str | None = None
    operator_policy: str | None = None
    definition: Mapping[str, Any] = {}


NOTHING: Final = Applied()


class _Policy(NamedTuple):
    put: ParameterPut
    pattern: patterns.Pattern
    kinds: frozenset[str]  # EXCHANGE and queue types
    priority: float
    definition: dict[str, Any]

    @property
    def name(self) -> str:
        return self.put.name

    def matches(self, kind: str, name: str) -> bool:
        return kind in self.kinds and self.pattern.search(name) is not None


class Policies:
    """All policies and operator policies of one vhost. Never changed: a change makes another."""

    __slots__ = ("_found", "_merged", "_operator", "_user")

    def __init__(self, puts: Iterable[ParameterPut] = (), before: Policies | None = None) -> None:
        """Sort out the parameters of a vhost; those that are no policies are passed over.

        What `before` has of them is taken over, so a change compiles one pattern and not all.
        """
        puts = list(puts)
        known = {} if before is None else before._by_name()
        self._user = _in_order((put for put in puts if put.component == POLICY), known)
        self._operator = _in_order((put for put in puts if put.component == OPERATOR_POLICY), known)
        # By kind and name: what applies. Lists ask for the same names again and again.
        self._found: dict[tuple[str, str], Applied] = {}
        # By the names of a policy and an operator policy: what both say.
        self._merged: dict[tuple[str | None, str | None], Applied] = {}

    def __bool__(self) -> bool:
        return bool(self._user or self._operator)

    def of(self, kind: str, name: str) -> Applied:
        """Return what applies to an object; `kind` is EXCHANGE or the type of the queue."""
        applied = self._found.get((kind, name))
        if applied is None:
            if len(self._found) >= NAMES_REMEMBERED_MAX:
                self._found.clear()
            applied = self._found[kind, name] = self._of(kind, name)
        return applied

    def _of(self, kind: str, name: str) -> Applied:
        if kind != EXCHANGE and name.startswith(HIDDEN_PREFIXES):
            return NOTHING
        policy = _first(self._user, kind, name)
        operator = _first(self._operator, kind, name)
        if policy is None and operator is None:
            return NOTHING
        names = (policy.name if policy else None, operator.name if operator else None)
        applied = self._merged.get(names)
        if applied is None:
            own = policy.definition if policy else {}
            applied = Applied(*names, merged(own, operator.definition if operator else {}))
            self._merged[names] = applied
        return applied

    def _by_name(self) -> dict[tuple[str, str], _Policy]:
        return {
            (policy.put.component, policy.name): policy for policy in (*self._user, *self._operator)
        }

    def may_differ(self, other: Policies) -> Callable[[str, str], bool]:
        """Return whether something else may apply to a kind and name than under `other`.

        The answer may be true for nothing. It tells 100,000 queues apart fast.
        """
        own, others = self._by_name(), other._by_name()
        changed = [policy for key, policy in own.items() if not _is_in(others, key, policy)]
        changed += [policy for key, policy in others.items() if not _is_in(own, key, policy)]
        return lambda kind, name: any(policy.matches(kind, name) for policy in changed)


def queue_kind(arguments: Mapping[str, Any]) -> str:
    kind = arguments.get("x-queue-type", CLASSIC)
    return kind if isinstance(kind, str) else CLASSIC


def merged(definition: Mapping[str, Any], operator: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the definitions of a policy and of an operator policy."""
    both = {**definition, **operator}
    for name in definition.keys() & operator.keys() & table.TABLE.keys.keys():
        both[name] = _held(table.TABLE.keys[name].merge, definition[name], operator[name])
    return both


def queue_arguments(arguments: dict[str, Any], definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return a queue's effective arguments: its own, merged with a definition."""
    return _effective(arguments, definition, table.TABLE.queue_merges)


def exchange_arguments(arguments: dict[str, Any], definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return an exchange's effective arguments: its own, merged with a definition."""
    return _effective(arguments, definition, table.TABLE.exchange_merges)


def _effective(
    arguments: dict[str, Any], definition: Mapping[str, Any], rows: Mapping[str, Argument]
) -> dict[str, Any]:
    """Merge; return `arguments` itself where nothing changes. `rows` are by policy key."""
    found = [(rows[key], value) for key, value in definition.items() if key in rows]
    if not found:
        return arguments
    made = {row.name: value for row, value in found} | arguments
    for row, value in found:
        if row.policy is not None and row.name in arguments:
            made[row.name] = _held(row.policy.merge, value, arguments[row.name])
    return made


def _held(merge: Merge, value: Any, stronger: Any) -> Any:
    """Return the value that holds; `stronger` is the one that holds if both are no limits."""
    if merge is not Merge.LOWER and merge is not Merge.LOWER_NOT_NEGATIVE:
        return stronger
    if not _is_number(value) or not _is_number(stronger):
        return stronger
    if merge is Merge.LOWER_NOT_NEGATIVE and min(value, stronger) < 0:
        return max(value, stronger)
    return min(value, stronger)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first(policies: tuple[_Policy, ...], kind: str, name: str) -> _Policy | None:
    for policy in policies:
        if policy.matches(kind, name):
            return policy
    return None


def _is_in(policies: dict[tuple[str, str], _Policy], key: tuple[str, str], policy: _Policy) -> bool:
    found = policies.get(key)
    return found is policy or (found is not None and found.put == policy.put)


def _in_order(
    puts: Iterable[ParameterPut], known: Mapping[tuple[str, str], _Policy]
) -> tuple[_Policy, ...]:
    found = []
    for put in puts:
        policy = known.get((put.component, put.name))
        if policy is None or policy.put is not put:
            policy = _policy_of(put)
        if policy is not None:
            found.append(policy)
    return tuple(sorted(found, key=lambda policy: (-policy.priority, policy.name)))


def _policy_of(put: ParameterPut) -> _Policy | None:
    """Read a policy; None for a malformed one.

    A policy with a key that only streams have does not apply to other queues at all, as in
    RabbitMQ.
    """
    if not isinstance(put.value, dict):
        return None
    pattern, definition = put.value.get("pattern"), put.value.get("definition")
    kinds = APPLY_TO.get(str(put.value.get("apply-to", "all")))
    priority = put.value.get("priority", 0)
    if not isinstance(pattern, str) or not isinstance(definition, dict):
        return None
    if kinds is None or not _is_number(priority):
        return None
    rows = table.TABLE.queue_merges
    if any(key in rows and rows[key].types == STREAMS for key in definition):
        kinds -= NOT_STREAMS
    try:
        return _Policy(put, patterns.compiled(pattern), kinds, priority, definition)
    except patterns.BadPattern:
        return None


NO_POLICIES: Final = Policies()
