"""Exchanges that keep a message until it is due: which ones, for how long, and where it waits.

Such an exchange is of type x-delayed-message (with the type it then routes by in `x-delayed-type`),
or of any type with the argument `x-delayed-exchange` true or a policy's `delayed-message`. The
header `x-delay` of a message says how many ms the message is to wait. It waits in a queue of the
exchange that nobody sees, on a shard, and is then routed as if it had been published without delay.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from shardmq.broker.routing import hidden
from shardmq.broker.routing.matching import Arguments, Matcher, Message, Target

DELAYED_TYPE: Final = "x-delayed-message"
TYPE_ARGUMENT: Final = "x-delayed-type"
FLAG_ARGUMENT: Final = "x-delayed-exchange"
POLICY_KEY: Final = "delayed-message"
HEADER: Final = "x-delay"
# The highest time, ms since the epoch: shards keep 64 bits of it.
DUE_MAX: Final = (1 << 64) - 1
# Priority of the record of a message that waits: none, so that there is room for the time. The
# properties of the message still have its own priority.
NO_PRIORITY: Final = 255
# `delay_of` returns this for a delay that is no number.
NO_DELAY_AT_ALL: Final = -1


def inner_type(type: str, arguments: Arguments) -> str:
    """Return the type by which the exchange routes what is due."""
    return str(arguments.get(TYPE_ARGUMENT, "")) if type == DELAYED_TYPE else type


def is_delayed(type: str, arguments: Arguments) -> bool:
    """Return whether an exchange with these effective arguments delays messages."""
    return type == DELAYED_TYPE or arguments.get(FLAG_ARGUMENT) is True


def queue_name(exchange: str) -> str:
    """Return the name of the queue where the messages of an exchange wait."""
    return hidden.queue_name(hidden.DELAYED, exchange)


def is_delay_queue(name: str) -> bool:
    return name.startswith(hidden.DELAYED)


def delay_of(headers: Mapping[str, Any]) -> int:
    """Return how many ms a message is to wait.

    The result is 0 for a message that is not to wait, as for negative delays in RabbitMQ's plugin,
    and NO_DELAY_AT_ALL for what is no number. Numbers may be written as text or with a fraction.
    """
    said = headers.get(HEADER, 0)
    if isinstance(said, str):
        text = said[1:] if said[:1] in ("-", "+") else said
        said = int(said) if text.isascii() and text.isdigit() and len(text) <= 20 else None
    if isinstance(said, float) and math.isfinite(said):
        said = int(said)
    if isinstance(said, bool) or not isinstance(said, int):
        return NO_DELAY_AT_ALL
    return max(said, 0)


def is_possible(delay_ms: int, now_ms: int) -> bool:
    """Return whether the time when the message is due can be stored."""
    return 0 <= delay_ms <= DUE_MAX - now_ms


class Delayed:
    """Sends a message that is to wait to the queue where it waits.

    All other messages go as the inner matcher says.
    """

    by_key = False

    def __init__(self, queue: str, inner: Matcher) -> None:
        self.inner = inner
        self._waiting: Collection[Target] = (Target("queue", queue),)

    def add(self, key: str, arguments: Arguments, target: Target) -> None:
        self.inner.add(key, arguments, target)

    def remove(self, key: str, arguments: Arguments, target: Target) -> None:
        self.inner.remove(key, arguments, target)

    def match(self, message: Message) -> Collection[Target]:
        return self.waiting(message) or self.inner.match(message)

    def waiting(self, message: Message) -> Collection[Target]:
        return self._waiting if message.delay_ms else ()


def delayed_fault(type: str, arguments: Arguments, types: Collection[str]) -> str | None:
    """Return why there can be no such exchange, as text of an error 406, or None.

    `types` are all exchange types there are.
    """
    if type != DELAYED_TYPE:
        said = arguments.get(FLAG_ARGUMENT)
        if said is None or isinstance(said, bool):
            return None
        return f"Invalid argument, '{FLAG_ARGUMENT}' must be a boolean"
    if TYPE_ARGUMENT not in arguments:
        return f"Missing required argument '{TYPE_ARGUMENT}'"
    inner = arguments[TYPE_ARGUMENT]
    if inner == DELAYED_TYPE:
        return f"Invalid argument, '{DELAYED_TYPE}' can't be used for '{TYPE_ARGUMENT}'"
    if not isinstance(inner, str) or inner not in types:
        return f"Invalid argument, '{TYPE_ARGUMENT}' must be an existing exchange type"
    return None
