"""Whether a parameter may be set: policies, operator policies, limits, with RabbitMQ's words. Pure.

`check_parameter` raises Refusal with status 400 and the text RabbitMQ gives, where it gives one. What policies then do
is in `shardmq.broker.model.policies`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from shardmq.broker.model import patterns
from shardmq.broker.model.changes import GLOBAL
from shardmq.broker.model.changes import USER_LIMITS as USER_LIMITS
from shardmq.broker.model.changes import VHOST_LIMITS as VHOST_LIMITS
from shardmq.broker.model.checks import NAME_BYTES_MAX, Refusal
from shardmq.broker.model.policies import APPLY_TO, OPERATOR_POLICY, POLICY
from shardmq.broker.routing.delaying import POLICY_KEY as DELAYED_MESSAGE

BAD_REQUEST = 400
LIMITS: Final = {VHOST_LIMITS: ("max-connections", "max-queues"), USER_LIMITS: ("max-connections", "max-channels")}
LIMIT_WORDS: Final = {VHOST_LIMITS: "limits", USER_LIMITS: "user-limits"}
PATTERN_CHARS_MAX = 4096
JSON_DEPTH_MAX = 64

# Stream exchanges, by the words of RabbitMQ's sharding plugin and of the one before it.
STREAM, DEFINITION = "stream", "stream-definition"
NUMBER, WHEN_GONE = "shards-per-node", "shards-when-gone"
SHARDS_PER_EXCHANGE_MAX = 1024
WHEN_GONE_WORDS: Final = ("drain", "merge", "keep", "delete")
DEADLINE, AT_DEADLINE = "shards-change-deadline", "shards-change-at-deadline"
AT_DEADLINE_WORDS: Final = ("wait", "break-order", "dead-letter")
SHARDS = "shards"  # the component of parameters, named as exchanges, that say their number of shard queues
MERGED = "merged"  # in such a value: nothing else makes it a stream exchange any more

Check = Callable[[Any], str]


def check_parameter(vhost: str, component: str, name: str, value: Any) -> None:
    if not name:
        raise bad("a parameter needs a name")
    _check_depth(value)
    if component == POLICY:
        check_policy(value, POLICY_KEYS)
    elif component == OPERATOR_POLICY:
        check_policy(value, OPERATOR_KEYS)
    elif component in LIMITS:
        check_limits(component, value)
    elif component == DEFINITION:
        check_stream_definition(value)
    elif component == SHARDS:
        _check_shards(value)
    elif component == STREAM and name in STREAM_DEFINITION:
        _check_stream_setting(name, value)
    elif component not in FREE_COMPONENTS and not (component == GLOBAL and not vhost):
        raise invalid(f"component {component} not found")


def check_policy(value: Any, keys: Mapping[str, Check]) -> None:
    if not isinstance(value, dict):
        raise invalid("a policy is an object with pattern and definition")
    missing = [key for key in ("pattern", "definition") if key not in value]
    if missing:
        raise bad(key_missing(missing))
    _check_priority(value.get("priority", 0))
    _check_pattern(value["pattern"])
    apply_to = value.get("apply-to", "all")
    if not isinstance(apply_to, str) or apply_to not in APPLY_TO:
        shown = apply_to if isinstance(apply_to, str) else term(apply_to)
        raise invalid(
            f"apply-to '{shown}' unrecognised; should be one of: 'queues', 'classic_queues', 'quorum_queues', "
            "'streams', 'exchanges', or 'all'"
        )
    _check_definition(value["definition"], keys)


def _check_definition(definition: Any, keys: Mapping[str, Check]) -> None:
    if not isinstance(definition, dict):
        raise invalid(f"definition should be an object, actually was {term(definition)}")
    if not definition:
        raise invalid("no policy provided")
    unknown = [f'{{<<"{key}">>,{term(value)}}}' for key, value in sorted(definition.items()) if key not in keys]
    if unknown:
        raise invalid(f"[{','.join(unknown)}] are not recognised policy settings")
    for key, value in sorted(definition.items()):
        if wrong := keys[key](value):
            raise invalid(f"{term(value)} {wrong}")
    _check_sharding(definition)


def _check_sharding(definition: Mapping[str, Any]) -> None:
    if NUMBER in definition and DEFINITION in definition:
        raise invalid(f"{NUMBER} and {DEFINITION} are mutually exclusive")
    if "routing-key" in definition and NUMBER not in definition:
        raise invalid(f"{NUMBER} must be specified")
    for key in (NUMBER, "routing-key"):
        if key in definition:
            _check_stream_setting(key, definition[key])


def _check_shards(value: Any) -> None:
    fits = isinstance(value, dict) and NUMBER in value and value.keys() <= {NUMBER, MERGED}
    if not fits or not isinstance(value.get(MERGED, True), bool):
        raise invalid(f'{SHARDS} should be an object {{"{NUMBER}": ...}}, actually was {term(value)}')
    _check_stream_setting(NUMBER, value[NUMBER])


def check_stream_definition(value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(f"{DEFINITION} should be an object, actually was {term(value)}")
    unknown = [f'{{<<"{key}">>,{term(item)}}}' for key, item in sorted(value.items()) if key not in STREAM_DEFINITION]
    if unknown:
        raise invalid(f"Unrecognised terms [{','.join(unknown)}] in {DEFINITION}")
    for key, item in sorted(value.items()):
        _check_stream_setting(key, item)


def _check_stream_setting(name: str, value: Any) -> None:
    if fault := STREAM_DEFINITION[name](name, value):
        raise invalid(fault)


def number_fault(name: str, value: Any) -> str:
    """Why there cannot be so many shard queues of one exchange, or ""."""
    if value == "auto":
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} should be a number, actually was {term(value)}"
    if value <= 0:
        return f"{name} should be greater than 0, actually was {term(value)}"
    if not isinstance(value, int):
        return f"{name} should be a whole number, actually was {term(value)}"
    if value > SHARDS_PER_EXCHANGE_MAX:
        return f"{name} should not exceed {SHARDS_PER_EXCHANGE_MAX}, actually was {term(value)}"
    return ""


def text_fault(name: str, value: Any) -> str:
    if not isinstance(value, str):
        return f"{name} should be binary, actually was {term(value)}"
    return f"{name} has at most {NAME_BYTES_MAX} bytes" if len(value.encode()) > NAME_BYTES_MAX else ""


def when_gone_fault(value: Any) -> str:
    return "" if isinstance(value, str) and value in WHEN_GONE_WORDS else f"is none of {', '.join(WHEN_GONE_WORDS)}"


def deadline_fault(value: Any) -> str:
    return "" if type(value) is int and value >= 0 else "is not a valid number of milliseconds"


def at_deadline_fault(value: Any) -> str:
    fits = isinstance(value, str) and value in AT_DEADLINE_WORDS
    return "" if fits else f"is none of {', '.join(AT_DEADLINE_WORDS)}"


STREAM_DEFINITION: Final[dict[str, Callable[[str, Any], str]]] = {
    NUMBER: number_fault,
    "routing-key": text_fault,
    "local-username": text_fault,
}


def _check_priority(priority: Any) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int | float):
        raise invalid(f"priority should be a number, actually was {term(priority)}")


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise invalid(f"pattern should be a binary but was {term(pattern)}")
    if len(pattern) > PATTERN_CHARS_MAX:
        raise invalid(f"pattern is longer than {PATTERN_CHARS_MAX} characters")
    try:
        patterns.compiled(pattern)
    except patterns.BadPattern as error:
        text = f'pattern should be regular expression but is invalid: {{"{error.msg}",{error.pos}}}'
        raise invalid(text) from None


def check_limits(component: str, value: Any) -> None:
    """An empty list is an empty object to RabbitMQ, and exported as one."""
    if value == []:
        return
    if not isinstance(value, dict):
        raise invalid(f"limits should be an object, actually was {term(value)}")
    for key, number in value.items():
        check_limit(component, key, number)


def check_limit(component: str, key: str, number: Any) -> None:
    if key not in LIMITS[component]:
        raise invalid(f'Unrecognised terms [{{<<"{key}">>,{term(number)}}}] in {LIMIT_WORDS[component]}')
    if type(number) is not int:
        raise invalid(f"{key} should be a number, actually was {term(number)}")


def bad(text: str) -> Refusal:
    return Refusal(BAD_REQUEST, text)


def invalid(text: str) -> Refusal:
    return bad(f"Validation failed\n\n{text}\n")


def key_missing(keys: list[str]) -> str:
    return f"[{','.join(f'{{key_missing,{key}}}' for key in keys)}]"


def term(value: Any) -> str:
    """A JSON value as Erlang prints it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'<<"{value}">>'
    if isinstance(value, list):
        return f"[{','.join(map(term, value))}]"
    if isinstance(value, dict):
        return f"#{{{','.join(f'{term(key)} => {term(item)}' for key, item in value.items())}}}"
    return str(value)


def _check_depth(value: Any, depth: int = 0) -> None:
    """What is nested deeper could not be told to front doors."""
    if depth > JSON_DEPTH_MAX:
        raise bad(f"nested deeper than {JSON_DEPTH_MAX}")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(item, depth + 1)


# -- what each key of a definition may be; "" or what is wrong, behind the value -----------------------------


def _at_least(least: int, name: str) -> Check:
    return lambda value: "" if type(value) is int and value >= least else f"is not a valid {name}"


def _text(name: str) -> Check:
    return lambda value: "" if isinstance(value, str) else f"is not a valid {name}"


def _one_of(words: tuple[Any, ...], name: str) -> Check:
    def check(value: Any) -> str:
        fits = isinstance(value, int | str) and not isinstance(value, bool) and value in words
        return "" if fits else f"is not a valid {name}"

    return check


def _age(value: Any) -> str:
    return "" if isinstance(value, str) and re.fullmatch(r"\d+[YMDhms]", value) else "is not a valid max age"


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "is not a valid boolean"


def _anything(value: Any) -> str:
    return ""


OPERATOR_KEYS: Final[dict[str, Check]] = {
    "expires": _at_least(1, "queue expiry"),
    "message-ttl": _at_least(0, "message TTL"),
    "max-length": _at_least(0, "maximum length"),
    "max-length-bytes": _at_least(0, "maximum length in bytes"),
    "max-in-memory-length": _at_least(0, "maximum memory in bytes"),
    "max-in-memory-bytes": _at_least(0, "maximum memory in bytes"),
    "delivery-limit": _at_least(-1, "delivery limit"),
    "queue-version": _one_of((1, 2), "queue-version value"),
    "overflow": _one_of(("drop-head", "reject-publish", "reject-publish-dlx"), "overflow value"),
}
POLICY_KEYS: Final[dict[str, Check]] = {
    **OPERATOR_KEYS,
    "alternate-exchange": _text("alternate exchange name"),
    DELAYED_MESSAGE: _flag,
    "dead-letter-exchange": _text("dead letter exchange name"),
    "dead-letter-routing-key": _text("dead letter routing key"),
    "dead-letter-strategy": _one_of(("at-most-once", "at-least-once"), "dead letter strategy"),
    "consumer-timeout": _at_least(0, "consumer timeout"),
    "consumer-disconnected-timeout": _at_least(0, "consumer disconnected timeout"),
    "delayed-retry-type": _one_of(("disabled", "all", "failed", "returned"), "delayed retry type"),
    "delayed-retry-min": _at_least(1, "delayed retry time"),
    "delayed-retry-max": _at_least(1, "delayed retry time"),
    "delayed-retry-multiplier": _at_least(1, "delayed retry multiplier"),
    "queue-mode": _one_of(("default", "lazy"), "queue-mode value"),
    "queue-leader-locator": _one_of(
        ("client-local", "balanced", "random", "least-leaders"), "queue leader locator value"
    ),
    "initial-cluster-size": _at_least(0, "cluster size"),
    "max-age": _age,
    "stream-max-segment-size-bytes": _at_least(0, "segment size"),
    "stream-filter-size-bytes": _at_least(0, "filter size"),
    # Kept for what they name elsewhere: files of other brokers carry them.
    **dict.fromkeys(
        (
            "ha-mode", "ha-params", "ha-sync-mode", "ha-sync-batch-size", "ha-promote-on-shutdown",
            "ha-promote-on-failure", "queue-master-locator", "federation-upstream", "federation-upstream-set",
            "federation-upstream-pattern",
        ),
        _anything,
    ),
    DEFINITION: _text("stream definition name"),
    WHEN_GONE: when_gone_fault,
    DEADLINE: deadline_fault,
    AT_DEADLINE: at_deadline_fault,
    **dict.fromkeys((NUMBER, "routing-key"), _anything),  # looked at together: _check_sharding
}  # fmt: skip
# Components whose values nobody here reads, but others' tools set and definitions carry.
FREE_COMPONENTS: Final = frozenset(("shovel", "federation-upstream", "federation-upstream-set", "federation", STREAM))
