"""x-death: the headers that name the queues a message left without being consumed.

The rules are RabbitMQ 3.13's. x-death is an array of tables, newest first: one for each queue and
reason, with a count. A death of a known queue and reason counts its table up and moves it to the
front. The rest of the table (time, exchange, routing keys) stays that of the first such death.
x-first-death-queue, -reason and -exchange are written once, x-last-death-* each time. The
`expiration` property is removed, so that the copy does not expire again; the table keeps it as
original-expiration. All other headers stay as they came, byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from shardmq.broker.amqp.methods import decode_table, skip_value
from shardmq.broker.amqp.properties import entries

REJECTED = "rejected"
# Headers by which a message names exchange and routing key for its own dead letter.
ROUTE_HEADERS: Final = (b"x-dead-letter-exchange", b"x-dead-letter-routing-key")
NAME_BYTES_MAX = 255
_U32 = struct.Struct(">I")
_LONG = struct.Struct(">cq")
_TIMESTAMP = struct.Struct(">cQ")
_FIRST: Final = (b"x-first-death-exchange", b"x-first-death-queue", b"x-first-death-reason")
_LAST: Final = (b"x-last-death-exchange", b"x-last-death-queue", b"x-last-death-reason")


class Death(NamedTuple):
    """A death of a message: where, why and when it died, and how it had been published.

    `time_s` is in seconds since the epoch.
    """

    queue: str
    reason: str
    time_s: int
    exchange: str
    routing_key: str


class Recorded(NamedTuple):
    """The headers of a dead letter.

    `headers` are those of the copy, with their length before them, and `shown` the same without
    BCC. `deaths` are (queue, reason), newest first, with this death. `more_keys` are those of the
    headers CC and BCC.
    """

    headers: bytes
    deaths: list[tuple[str, str]]
    more_keys: list[str]
    shown: bytes


class RequestedRoute(NamedTuple):
    """The exchange and the routing key that a message names for its own dead letter."""

    exchange: str | None
    routing_key: str | None


NOTHING_REQUESTED: Final = RequestedRoute(None, None)


def requested_route(inside: bytes) -> RequestedRoute:
    """Return what the headers say of the dead letter. `inside` has no length before it."""
    if b"x-dead-letter-" not in inside:
        return NOTHING_REQUESTED
    pairs = entries(inside)
    return RequestedRoute(*(_long_string(pairs.get(name, b"")) for name in ROUTE_HEADERS))


def record(inside: bytes, expiration: str | None, death: Death, *, without_cc: bool) -> Recorded:
    """Return the headers of a dead letter.

    `inside` are the message's headers without their length. `without_cc`: the copy goes by another
    key than the message came with, and its headers CC and BCC count no more.
    """
    pairs = entries(inside)
    for name in ROUTE_HEADERS:
        pairs.pop(name, None)
    cc = _texts(pairs.get(b"CC", b""))
    table, old = _death_table(pairs.get(b"x-death", b""), death, cc, expiration)
    first_ever = pairs.get(b"x-death", b"")[:1] != b"A"
    pairs[b"x-death"] = _array([table, *(raw for _, _, raw in old)])
    values = (death.exchange, death.queue, death.reason)
    if first_ever:
        pairs.update(zip(_FIRST, map(_string, values), strict=True))
    pairs.update(zip(_LAST, map(_string, values), strict=True))
    more_keys = [*cc, *_texts(pairs.get(b"BCC", b""))]
    if without_cc:
        pairs.pop(b"CC", None)
        pairs.pop(b"BCC", None)
    deaths = [(death.queue, death.reason), *((queue, reason) for queue, reason, _ in old)]
    headers = shown = _table(pairs)
    if pairs.pop(b"BCC", None) is not None:
        shown = _table(pairs)
    return Recorded(headers, deaths, more_keys, shown)


def is_cycle(queue: str, deaths: Iterable[tuple[str, str]]) -> bool:
    """Return whether a message with these deaths, newest first, went round without a reject.

    It would come back to `queue` by expiry, length and delivery limits alone.
    """
    for name, reason in deaths:
        if reason == REJECTED:
            return False
        if name == queue:
            return True
    return False


def _death_table(
    array: bytes, death: Death, cc: list[str], expiration: str | None
) -> tuple[bytes, list[tuple[str, str, bytes]]]:
    """Return the table of this death, and the others as (queue, reason, value as it came)."""
    others = _grouped(array)
    at = next(
        (
            i
            for i, (queue, reason, _) in enumerate(others)
            if (queue, reason) == (death.queue, death.reason)
        ),
        None,
    )
    count = 0
    if at is not None:
        same = others.pop(at)[2]
        pairs = entries(same[5:])
        pairs.pop(b"count", None)
        count = _count(decode_table(same[1:]).get("count"))
    else:
        pairs = _first_time(death, cc, expiration)
    pairs = {b"count": _LONG.pack(b"l", count + 1), **pairs}
    if array[:1] == b"A":  # RabbitMQ sorts the table of any death but the first of all
        pairs = dict(sorted(pairs.items()))
    return b"F" + _table(pairs), others


def _grouped(array: bytes) -> list[tuple[str, str, bytes]]:
    """Return (queue, reason, value) of an x-death array.

    Brokers that did not count wrote a table for each death. Of the tables of one queue and reason
    the first stays, with their number as its count. RabbitMQ leaves a single table as it came.
    """
    grouped: list[tuple[str, str, bytes]] = []
    first: dict[tuple[str, str], int] = {}
    numbers: dict[int, int] = {}
    for raw in _items(array):
        if raw[:1] != b"F":
            # A client has put there something that is no table: count it as a reject, so that no
            # cycle is found through it.
            grouped.append(("", REJECTED, raw))
            continue
        said = decode_table(raw[1:])
        queue, reason = _text(said.get("queue")), _text(said.get("reason"))
        at = first.setdefault((queue, reason), len(grouped))
        if at == len(grouped):
            grouped.append((queue, reason, raw))
        numbers[at] = numbers.get(at, 0) + 1
    if len(grouped) == 1 and numbers.get(0) == 1:
        return grouped
    for at, number in numbers.items():
        queue, reason, raw = grouped[at]
        pairs = entries(raw[5:])
        if b"count" not in pairs:
            grouped[at] = (
                queue,
                reason,
                b"F" + _table({b"count": _LONG.pack(b"l", number), **pairs}),
            )
    return grouped


def _first_time(death: Death, cc: list[str], expiration: str | None) -> dict[bytes, bytes]:
    pairs = {
        b"reason": _string(death.reason),
        b"queue": _string(death.queue),
        b"time": _TIMESTAMP.pack(b"T", death.time_s),
        b"exchange": _string(death.exchange),
        b"routing-keys": _array([_string(key) for key in (death.routing_key, *cc)]),
    }
    if expiration is not None:
        pairs[b"original-expiration"] = _string(expiration)
    return pairs


def _count(value: Any) -> int:
    """Return a count that a client may have written, else 0.

    64 bits are enough for what we count.
    """
    return value if type(value) is int and 0 < value < 1 << 62 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _long_string(raw: bytes) -> str | None:
    """Return a long string, or None if the value is none or can be no name."""
    if raw[:1] != b"S" or len(raw) - 5 > NAME_BYTES_MAX:
        return None
    try:
        return raw[5:].decode()
    except UnicodeDecodeError:
        return None


def _texts(array: bytes) -> list[str]:
    """Return the values of an array that are long strings."""
    return [raw[5:].decode("utf-8", "replace") for raw in _items(array) if raw[:1] == b"S"]


def _table(pairs: dict[bytes, bytes]) -> bytes:
    inside = b"".join([bytes([len(name)]) + name + value for name, value in pairs.items()])
    return _U32.pack(len(inside)) + inside


def _string(text: str) -> bytes:
    data = text.encode()
    return b"S" + _U32.pack(len(data)) + data


def _array(values: list[bytes]) -> bytes:
    inside = b"".join(values)
    return b"A" + _U32.pack(len(inside)) + inside


def _items(array: bytes) -> list[bytes]:
    """Return the values of an array, each with its type; none if the value is no array."""
    if array[:1] != b"A":
        return []
    found = []
    at = 5
    while at < len(array):
        end = skip_value(array, at)
        found.append(array[at:end])
        at = end
    return found
