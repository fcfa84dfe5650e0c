"""Exchanges that keep what is published to them, so that new bindings can have it too.

An exchange of any type with the argument `x-persist-messages` (how many of the newest),
`x-persist-ms` (the highest age) or both keeps every message that comes to it in a stream of its
own, whether the message goes to a queue or not. So does an exchange of type `x-recent-history`,
which keeps the newest `x-recent-history-length` messages (20 if not said) except those with the
header `x-recent-history-no-store`. A binding says what the queue gets first:

    x-head N        the oldest N         -N   all but the newest N
    x-tail N        the newest N         -N   all but the oldest N
    x-from N        that offset and what came later; all, if no offset is so high
    x-from-time T   what came at that time (s since the epoch, or a timestamp) or later

These count all messages that are kept. The queue gets those that the binding lets through. A
binding to x-recent-history gets all that is kept.

The parameter `type` is the type by which an exchange routes: the inner type of an exchange that
delays messages. A delayed message is kept when it is due, as if it had been published then. Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from shardmq.broker.routing import hidden
from shardmq.broker.routing.matching import Arguments

RECENT_HISTORY: Final = "x-recent-history"
MESSAGES: Final = "x-persist-messages"
AGE_MS: Final = "x-persist-ms"
LENGTH: Final = "x-recent-history-length"
NO_STORE: Final = "x-recent-history-no-store"
LENGTH_USUALLY: Final = 20
# Size of a segment of the stream. Whole segments are deleted, so this much more may be kept.
SEGMENT_BYTES: Final = 4 << 20
NUMBER_MAX: Final = (1 << 63) - 1
HEAD, TAIL, FROM, FROM_TIME = "x-head", "x-tail", "x-from", "x-from-time"
WISHES: Final = (HEAD, TAIL, FROM, FROM_TIME)


def keeps(type: str, arguments: Arguments) -> bool:
    return type == RECENT_HISTORY or MESSAGES in arguments or AGE_MS in arguments


def is_kept(type: str, headers: Mapping[str, Any]) -> bool:
    """Return whether an exchange that keeps messages keeps one with these headers."""
    return type != RECENT_HISTORY or headers.get(NO_STORE) is not True


def messages_max(type: str, arguments: Arguments) -> int | None:
    if type == RECENT_HISTORY:
        length = arguments.get(LENGTH, LENGTH_USUALLY)
        return length if isinstance(length, int) else LENGTH_USUALLY
    return arguments.get(MESSAGES)


def queue_name(exchange: str) -> str:
    """Return the name of the stream that the messages of the exchange lie in."""
    return hidden.queue_name(hidden.PERSISTENT, exchange)


def is_keeping_queue(name: str) -> bool:
    return name.startswith(hidden.PERSISTENT)


class Placed(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shard(self) -> int: ...


Q = TypeVar("Q", bound=Placed)


def named(queues: Sequence[Q]) -> list[tuple[int, Q]]:
    """Return (shard, queue) for each queue that the record of a message at each shard names.

    Streams that exchanges keep messages in come last in `queues`. The record at the shard of such a
    stream names all queues, wherever they are: by it the stream knows which message went where.
    """
    found = [(queue.shard, queue) for queue in queues]
    if not queues or not is_keeping_queue(queues[-1].name):
        return found
    keeping_shards = {queue.shard for queue in queues if is_keeping_queue(queue.name)}
    return found + [
        (shard, queue)
        for shard in sorted(keeping_shards)
        for queue in queues
        if queue.shard != shard
    ]


def queue_arguments(type: str, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of the stream of an exchange."""
    made: dict[str, Any] = {
        "x-queue-type": "stream",
        "x-stream-max-segment-size-bytes": SEGMENT_BYTES,
    }
    most = messages_max(type, arguments)
    if most is not None:
        made["x-max-length"] = most
    if AGE_MS in arguments:
        made["x-max-age"] = f"{-(-arguments[AGE_MS] // 1000)}s"
    return made


def exchange_fault(type: str, arguments: Arguments) -> str:
    """Return why there can be no such exchange, or ""."""
    for name in (MESSAGES, AGE_MS, LENGTH) if type == RECENT_HISTORY else (MESSAGES, AGE_MS):
        value = arguments.get(name)
        if name in arguments and (
            not isinstance(value, int) or _is_no_number(value) or not 0 < value <= NUMBER_MAX
        ):
            if name == LENGTH:
                shown = f'<<"{value}">>' if isinstance(value, str) else value
                return f"Invalid argument {shown}, '{name}' must be a positive integer"
            return f"invalid arg '{name}': must be a positive integer"
    return ""


def binding_fault(arguments: Arguments) -> str:
    """Return why an exchange that keeps messages can have no such binding, or ""."""
    said = [name for name in WISHES if name in arguments]
    if len(said) > 1:
        return f"only one of {', '.join(WISHES)} can be asked for"
    for name in said:
        value = arguments[name]
        if name == FROM_TIME and isinstance(value, datetime.datetime):
            continue
        if _is_no_number(value) or abs(value) > NUMBER_MAX:
            return f"invalid arg '{name}': must be an integer"
        if name in (FROM, FROM_TIME) and value < 0:
            return f"invalid arg '{name}': must not be negative"
    return ""


def _is_no_number(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, int)


def wants_history(type: str, arguments: Arguments) -> bool:
    """Return whether a binding with these arguments gets some of the kept messages.

    The exchange keeps messages.
    """
    return type == RECENT_HISTORY or any(name in arguments for name in WISHES)


def from_time_ms(arguments: Arguments) -> int | None:
    value = arguments.get(FROM_TIME)
    if isinstance(value, datetime.datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        return max(int(moment.timestamp() * 1000), 0)
    return min(value * 1000, NUMBER_MAX) if isinstance(value, int) else None


class Kept(NamedTuple):
    """Offsets of a stream.

    `first` is the first message there is, `young` the first that is young enough, `end` the offset
    behind the last message, and `at_time` the first message at FROM_TIME.
    """

    first: int
    young: int
    end: int
    at_time: int


def chosen(arguments: Arguments, most: int | None, kept: Kept) -> tuple[int, int]:
    """Return the offsets [start, stop) of what a new binding gets.

    `most` is the number of messages that the exchange keeps, or None.
    """
    first = max(kept.first, kept.young)
    if most is not None:
        first = max(first, kept.end - most)
    start, stop = first, kept.end
    if HEAD in arguments:
        stop = start + arguments[HEAD] if arguments[HEAD] >= 0 else stop + arguments[HEAD]
    elif TAIL in arguments:
        start = stop - arguments[TAIL] if arguments[TAIL] >= 0 else start - arguments[TAIL]
    elif FROM in arguments:
        start = arguments[FROM] if arguments[FROM] < stop else first
    elif FROM_TIME in arguments:
        start = kept.at_time
    start, stop = max(start, first), min(stop, kept.end)
    return (start, stop) if start < stop else (stop, stop)
