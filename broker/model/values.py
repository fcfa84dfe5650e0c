"""The checks of the values of arguments and policy keys. Pure.

A check of an argument takes the value and all arguments beside it. A check of a policy key takes
the value alone. Both return "" for a good value, else what is wrong with the value, in RabbitMQ's
words: those of an argument are an Erlang term, those of a policy key follow the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from shardmq.broker.model.erlang import json_term, type_name
from shardmq.supervisor.nearest import did_you_mean

Check = Callable[[Any, Mapping[str, Any]], str]
KeyCheck = Callable[[Any], str]

NAME_BYTES_MAX = 255  # a shortstr
EXPIRY_MS_MAX = 315_360_000_000  # ten years, as in RabbitMQ
PRIORITY_MAX = 255
DEDUPLICATION_CACHE_MAX = 1_000_000  # ids that one exchange remembers
SEGMENT_BYTES_MAX: Final = 3_000_000_000
SHARDS_PER_EXCHANGE_MAX = 1024
AGE: Final = re.compile(r"[0-9]+[YMDhms]")

# -- of arguments


def anything(value: Any, _: Mapping[str, Any]) -> str:
    return ""


def boolean(value: Any, _: Mapping[str, Any]) -> str:
    return "" if isinstance(value, bool) else unacceptable(value)


def string(value: Any, _: Mapping[str, Any]) -> str:
    return "" if isinstance(value, str) else unacceptable(value)


def whole(
    least: int | None = None, most: int | None = None, over: str = "max_value_exceeded"
) -> Check:
    """Make a check that accepts an integer from `least` (0 or 1; None: any) to `most`.

    `over` is RabbitMQ's word for a number above `most`.
    """

    def check(value: Any, _: Mapping[str, Any]) -> str:
        if type(value) is not int:
            return not_integer(value)
        if least is not None and value < 0:
            return f"{{value_negative,{value}}}"
        if least == 1 and value == 0:
            return "{value_zero,0}"
        return f"{{{over},{value}}}" if most is not None and value > most else ""

    return check


integer: Final = whole()
non_negative: Final = whole(0)
positive: Final = whole(1)
duration: Final = whole(0, EXPIRY_MS_MAX, "value_too_large")
expiry: Final = whole(1, EXPIRY_MS_MAX, "value_too_large")
priority: Final = whole(0, PRIORITY_MAX)


def word(words: Iterable[str], wrong: str) -> Check:
    """Make a check that accepts one of `words`; `wrong` may show the value as `{}`."""
    known = frozenset(words)

    def check(value: Any, _: Mapping[str, Any]) -> str:
        if not isinstance(value, str):
            return unacceptable(value)
        return "" if value in known else wrong.format(value)

    return check


def dead_letter_key(value: Any, arguments: Mapping[str, Any]) -> str:
    """Accept a routing key beside an exchange that dead letters go to."""
    wrong = string(value, arguments)
    if not wrong and len(value.encode()) > NAME_BYTES_MAX:
        return f'"a routing key has at most {NAME_BYTES_MAX} bytes"'
    has_exchange = "x-dead-letter-exchange" in arguments
    return wrong or ("" if has_exchange else "routing_key_but_no_dlx_defined")


def max_age(value: Any, arguments: Mapping[str, Any]) -> str:
    """Accept an age such as 7D."""
    return string(value, arguments) or ("" if AGE.fullmatch(value) else "invalid_max_age")


def not_integer(value: Any) -> str:
    return f'"expected integer, got {type_name(value)}"'


def unacceptable(value: Any) -> str:
    return f"{{unacceptable_type,{type_name(value)}}}"


# -- of policy keys


def any_setting(value: Any) -> str:
    return ""


def flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "is not a valid boolean"


def at_least(least: int, name: str) -> KeyCheck:
    """Make a check that accepts an integer from `least` on; `name` is what the number means."""
    return lambda value: "" if type(value) is int and value >= least else f"is not a valid {name}"


def between(least: int, most: int, name: str) -> KeyCheck:
    """Make a check that accepts an integer of a range; `name` is what the number means."""

    def check(value: Any) -> str:
        fits = type(value) is int and least <= value <= most
        return "" if fits else f"is not a valid {name}: expected {least} to {most}"

    return check


def text(name: str) -> KeyCheck:
    """Make a check that accepts a string; `name` is what the string means."""
    return lambda value: "" if isinstance(value, str) else f"is not a valid {name}"


def one_of(settings: tuple[str | int, ...], name: str, wrong: str = "is not a valid") -> KeyCheck:
    """Make a check that accepts one of `settings`; `name` is what they are together.

    `wrong` comes before the name in what is said of a wrong value.
    """

    def check(value: Any) -> str:
        fits = isinstance(value, int | str) and not isinstance(value, bool) and value in settings
        if fits:
            return ""
        # The text of a list or an object may have megabytes.
        hint = did_you_mean(str(value), map(str, settings)) if isinstance(value, int | str) else ""
        return f"{wrong} {name}{hint}"

    return check


def listed(words: tuple[str, ...]) -> KeyCheck:
    """Make a check that accepts one of `words` and names all of them where it does not."""
    return lambda value: (
        "" if isinstance(value, str) and value in words else f"is none of {', '.join(words)}"
    )


def age(value: Any) -> str:
    """Accept an age such as 7D."""
    return "" if isinstance(value, str) and AGE.fullmatch(value) else "is not a valid max age"


def shards_fault(name: str, value: Any) -> str:
    """Return why one exchange cannot have so many shard queues, or "".

    `name` is the argument or the key that says the number. The text is complete: it shows the
    value.
    """
    if value == "auto":
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} should be a number, actually was {json_term(value)}"
    if value <= 0:
        return f"{name} should be greater than 0, actually was {json_term(value)}"
    if not isinstance(value, int):
        return f"{name} should be a whole number, actually was {json_term(value)}"
    if value > SHARDS_PER_EXCHANGE_MAX:
        return (
            f"{name} should not exceed {SHARDS_PER_EXCHANGE_MAX}, actually was {json_term(value)}"
        )
    return ""
