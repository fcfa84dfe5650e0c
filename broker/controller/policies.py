"""Checks parameters before they are set: policies, operator policies, limits and others.

`check_parameter` raises Refusal with status 400, and with RabbitMQ's text where there is one.
`model/arguments.py` says what the values of policy keys may be, `model/policies.py` what policies
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final

from shardmq.broker.model import arguments, copies, federation, patterns, shovels
from shardmq.broker.model.arguments import DEFINITION, NUMBER, SHARD_KEY, PolicyKey
from shardmq.broker.model.changes import DRAINED_NODES, GLOBAL
from shardmq.broker.model.changes import USER_LIMITS as USER_LIMITS
from shardmq.broker.model.changes import VHOST_LIMITS as VHOST_LIMITS
from shardmq.broker.model.checks import Refusal
from shardmq.broker.model.erlang import cut
from shardmq.broker.model.erlang import json_term as term
from shardmq.broker.model.policies import APPLY_TO, OPERATOR_POLICY, POLICY
from shardmq.broker.model.values import NAME_BYTES_MAX, shards_fault
from shardmq.supervisor.nearest import did_you_mean

BAD_REQUEST = 400
LIMITS: Final = {
    VHOST_LIMITS: ("max-connections", "max-queues"),
    USER_LIMITS: ("max-connections", "max-channels"),
}
LIMIT_WORDS: Final = {VHOST_LIMITS: "limits", USER_LIMITS: "user-limits"}
# A refusal shows so many of the names that are unknown, and looks for names near the first few.
TERMS_SHOWN = 10
HINTS_MAX = 3
NAME_CHARS_SHOWN = 100
JSON_DEPTH_MAX = 64

# The component of parameters for settings that stream definitions leave open.
STREAM = "stream"
# The component of parameters that set the number of shard queues of the exchange they name.
SHARDS = "shards"
# A key in their values: the exchange is a stream exchange by this parameter alone.
MERGED = "merged"
# Components whose values the broker does not read. Other tools set them, and definitions have them.
FREE_COMPONENTS: Final = frozenset(("federation", STREAM))


def check_parameter(vhost: str, component: str, name: str, value: Any) -> None:
    if not name:
        raise bad("a parameter needs a name")
    _check_depth(value)
    if component == POLICY:
        check_policy(value, arguments.TABLE.keys)
    elif component == OPERATOR_POLICY:
        check_policy(value, arguments.TABLE.operator_keys)
    elif component in LIMITS:
        check_limits(component, value)
    elif component == DEFINITION:
        check_stream_definition(value)
    elif component == SHARDS:
        _check_shards(value)
    elif component == STREAM and name in STREAM_DEFINITION:
        _check_stream_setting(name, value)
    elif component == shovels.SHOVEL:
        if faults := list(shovels.faults(name, value)):
            raise invalid(*faults)
    elif component in (federation.UPSTREAM, federation.UPSTREAM_SET):
        if faults := list(islice(federation.faults(component, name, value), TERMS_SHOWN)):
            raise invalid(*faults)
    elif component == shovels.PAUSED:
        if value is not True:
            raise invalid(f"{component} should be true, actually was {term(value)}")
    elif component == DRAINED_NODES and not vhost:
        if value is not True:
            raise invalid(f"{DRAINED_NODES} should be true, actually was {term(value)}")
    elif component not in FREE_COMPONENTS and not (component == GLOBAL and not vhost):
        known = (
            POLICY, OPERATOR_POLICY, *LIMITS, DEFINITION, SHARDS, shovels.SHOVEL, shovels.PAUSED,
            federation.UPSTREAM, federation.UPSTREAM_SET, *sorted(FREE_COMPONENTS),
        )  # fmt: skip
        text = f"component {cut(component, NAME_CHARS_SHOWN)} not found"
        raise invalid(text, *meant([component], known))


def check_policy(value: Any, keys: Mapping[str, PolicyKey]) -> None:
    if not isinstance(value, dict):
        raise invalid("a policy is an object with pattern and definition")
    missing = [key for key in ("pattern", "definition") if key not in value]
    if missing:
        raise bad(key_missing(missing))
    priority = value.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int | float):
        raise invalid(f"priority should be a number, actually was {term(priority)}")
    _check_pattern(value["pattern"])
    apply_to = value.get("apply-to", "all")
    if not isinstance(apply_to, str) or apply_to not in APPLY_TO:
        is_text = isinstance(apply_to, str)
        shown = cut(apply_to, NAME_CHARS_SHOWN) if is_text else term(apply_to)
        raise invalid(
            f"apply-to '{shown}' unrecognised; should be one of: 'queues', 'classic_queues', "
            "'quorum_queues', 'streams', 'exchanges', or 'all'"
        )
    definition = value["definition"]
    if not isinstance(definition, dict):
        raise invalid(f"definition should be an object, actually was {term(definition)}")
    if not definition:
        raise invalid("no policy provided")
    unknown = {key: item for key, item in sorted(definition.items()) if key not in keys}
    if unknown:
        raise invalid(
            f"[{terms(unknown)}] are not recognised policy settings", *meant(unknown, keys)
        )
    for key, value in sorted(definition.items()):
        if wrong := keys[key].check(value):
            raise invalid(f"{term(value)} {wrong}")
    if NUMBER in definition and DEFINITION in definition:
        raise invalid(f"{NUMBER} and {DEFINITION} are mutually exclusive")
    faults = [*federation.policy_faults(definition), *copies.policy_faults(definition)]
    if faults:
        raise invalid(*faults)
    if SHARD_KEY in definition and NUMBER not in definition:
        raise invalid(f"{NUMBER} must be specified")
    for key in (NUMBER, SHARD_KEY):
        if key in definition:
            _check_stream_setting(key, definition[key])


def _check_shards(value: Any) -> None:
    fits = isinstance(value, dict) and NUMBER in value and value.keys() <= {NUMBER, MERGED}
    if not fits or not isinstance(value.get(MERGED, True), bool):
        raise invalid(
            f'{SHARDS} should be an object {{"{NUMBER}": ...}}, actually was {term(value)}'
        )
    _check_stream_setting(NUMBER, value[NUMBER])


def check_stream_definition(value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(f"{DEFINITION} should be an object, actually was {term(value)}")
    unknown = {key: item for key, item in sorted(value.items()) if key not in STREAM_DEFINITION}
    if unknown:
        text = f"Unrecognised terms [{terms(unknown)}] in {DEFINITION}"
        raise invalid(text, *meant(unknown, STREAM_DEFINITION))
    for key, item in sorted(value.items()):
        _check_stream_setting(key, item)


def _check_stream_setting(name: str, value: Any) -> None:
    if fault := STREAM_DEFINITION[name](name, value):
        raise invalid(fault)


def text_fault(name: str, value: Any) -> str:
    if not isinstance(value, str):
        return f"{name} should be binary, actually was {term(value)}"
    return (
        f"{name} has at most {NAME_BYTES_MAX} bytes" if len(value.encode()) > NAME_BYTES_MAX else ""
    )


STREAM_DEFINITION: Final[dict[str, Callable[[str, Any], str]]] = {
    NUMBER: shards_fault,
    SHARD_KEY: text_fault,
    "local-username": text_fault,
}


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise invalid(f"pattern should be a binary but was {term(pattern)}")
    try:
        patterns.compiled(pattern)
    except patterns.BadPattern as error:
        text = f'pattern should be regular expression but is invalid: {{"{error.msg}",{error.pos}}}'
        raise invalid(text) from None


def check_limits(component: str, value: Any) -> None:
    """Check limits; [] stands for no limits, because RabbitMQ exports an empty object so."""
    if value == []:
        return
    if not isinstance(value, dict):
        raise invalid(f"limits should be an object, actually was {term(value)}")
    for key, number in value.items():
        check_limit(component, key, number)


def check_limit(component: str, key: str, number: Any) -> None:
    if key not in LIMITS[component]:
        text = f"Unrecognised terms [{terms({key: number})}] in {LIMIT_WORDS[component]}"
        raise invalid(text, *meant([key], LIMITS[component]))
    if type(number) is not int:
        raise invalid(f"{key} should be a number, actually was {term(number)}")


def bad(text: str) -> Refusal:
    return Refusal(BAD_REQUEST, text)


def invalid(*lines: str) -> Refusal:
    """Return the refusal with RabbitMQ's line, and behind it those that only this broker has."""
    return bad("Validation failed\n\n" + "".join(f"{line}\n" for line in lines))


def meant(unknown: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return a line for each of the first unknown names that is near one of the names."""
    known, first = list(names), islice(unknown, HINTS_MAX)
    return [f"{name}{hint}" for name in first if (hint := did_you_mean(name, known))]


def terms(unknown: Mapping[str, Any]) -> str:
    shown = [
        f'{{<<"{cut(key, NAME_CHARS_SHOWN)}">>,{term(item)}}}'
        for key, item in islice(unknown.items(), TERMS_SHOWN)
    ]
    return ",".join(shown if len(unknown) <= TERMS_SHOWN else [*shown, "..."])


def key_missing(keys: list[str]) -> str:
    return f"[{','.join(f'{{key_missing,{key}}}' for key in keys)}]"


def _check_depth(value: Any, depth: int = 0) -> None:
    """Refuse a value that is nested too deep to be sent to front doors."""
    if depth > JSON_DEPTH_MAX:
        raise bad(f"nested deeper than {JSON_DEPTH_MAX}")
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _check_depth(item, depth + 1)
