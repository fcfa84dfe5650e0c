"""Exchanges that keep what is published to them, so that a new binding can have it too: which ones, and how much.

`type` is that by which an exchange routes: of one that delays messages the inner one. What waits there is kept when it
is due, as if it had been published then.

An exchange of any type with the argument `x-persist-messages` (how many of the newest) or `x-persist-ms` (how old at
the most), or both, keeps every message that comes to it in a stream of its own, whether it goes to a queue or not; so
does one of type `x-recent-history` (the newest `x-recent-history-length`, 20 if not said), but for those with the
header `x-recent-history-no-store`. A binding says what of it the queue gets first:

    x-head N        the oldest N         -N   all but the newest N
    x-tail N        the newest N         -N   all but the oldest N
    x-from N        that offset and what came later; all, if there is none so high
    x-from-time T   what came at that time (s since the epoch, or a timestamp) or later

These count all that is kept; of it, the queue gets what the binding lets through. A binding to x-recent-history gets
all that is kept. Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from shardmq.broker.routing import hidden
from shardmq.broker.routing.matching import Arguments, Fanout

RECENT_HISTORY: Final = "x-recent-history"
MESSAGES: Final = "x-persist-messages"
AGE_MS: Final = "x-persist-ms"
LENGTH: Final = "x-recent-history-length"
NO_STORE: Final = "x-recent-history-no-store"
LENGTH_USUALLY: Final = 20
# Of the stream: whole segments go, so this much may be kept beyond what is asked for.
SEGMENT_BYTES: Final = 4 << 20
NUMBER_MAX: Final = (1 << 63) - 1
HEAD, TAIL, FROM, FROM_TIME = "x-head", "x-tail", "x-from", "x-from-time"
WISHES: Final = (HEAD, TAIL, FROM, FROM_TIME)


class RecentHistory(Fanout):
    """Whether a message is kept is said in its headers."""

    by_key = False


def keeps(type: str, arguments: Arguments) -> bool:
    return type == RECENT_HISTORY or MESSAGES in arguments or AGE_MS in arguments


def is_kept(type: str, headers: Mapping[str, Any]) -> bool:
    """By an exchange that keeps messages."""
    return type != RECENT_HISTORY or headers.get(NO_STORE) is not True


def messages_max(type: str, arguments: Arguments) -> int | None:
    if type == RECENT_HISTORY:
        length = arguments.get(LENGTH, LENGTH_USUALLY)
        return length if isinstance(length, int) else LENGTH_USUALLY
    return arguments.get(MESSAGES)


def queue_name(exchange: str) -> str:
    """The stream where its messages lie."""
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
    """Whom the record of a message at each shard names; streams where exchanges keep it come last in `queues`. At the
    shard of such a stream that is all of them, wherever they are: by that it knows which message went where."""
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
    """Of that stream."""
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
    """Why there can be no such exchange, or ""."""
    for name in (MESSAGES, AGE_MS, LENGTH) if type == RECENT_HISTORY else (MESSAGES, AGE_MS):
        value = arguments.get(name)
        if name in arguments and (
            not isinstance(value, int) or _is_no_number(value) or not 0 < value <= NUMBER_MAX
        ):
            return f"invalid arg '{name}': must be a positive integer"
    return ""


def binding_fault(arguments: Arguments) -> str:
    """Why there can be no such binding from an exchange that keeps messages, or ""."""
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
    """Whether a binding with these arguments, from an exchange of that type that keeps messages, gets some of them."""
    return type == RECENT_HISTORY or any(name in arguments for name in WISHES)


def from_time_ms(arguments: Arguments) -> int | None:
    value = arguments.get(FROM_TIME)
    if isinstance(value, datetime.datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        return max(int(moment.timestamp() * 1000), 0)
    return min(value * 1000, NUMBER_MAX) if isinstance(value, int) else None


class Kept(NamedTuple):
    """Offsets: of the first message there is, of the first young enough, behind the last, of FROM_TIME."""

    first: int
    young: int
    end: int
    at_time: int


def chosen(arguments: Arguments, most: int | None, kept: Kept) -> tuple[int, int]:
    """Offsets [start, stop) of what a new binding gets; `most`: as many are kept."""
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
