"""Look at the messages of a queue when somebody asks for its numbers.

The queue keeps no property of any message. So the first messages are read again, without their
bodies, and only if they are others than at the last look.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.dispatch import Dispatch
from shardmq.shardd.queues.entry import ENDLESS, LASTING_KIND, PLACE, TRANSIENT_KIND
from shardmq.shardd.queues.store import Store

# The bytes of a message that are read at first, and at the most: its head and its properties.
PEEK_BYTES: Final = 512
PEEK_BYTES_MAX: Final = 64 << 10
# The persistent messages of a queue with messages of both kinds are counted one by one up to here.
MIXED_MAX: Final = 64

_SIZES = struct.Struct("<II")
_HEAD_BYTES: Final = 10  # of a stored message, without the names of exchange and routing key
_TABLE: Final = 0x2000
_DELIVERY_MODE: Final = 0x1000
_TIMESTAMP: Final = 0x0040
# The properties of basic before the timestamp, by their flags. A short string has its length in the
# first byte.
_SHORT_STRINGS: Final = (0x0400, 0x0200, 0x0100, 0x0080)
_PRIORITY: Final = 0x0800


class Head(NamedTuple):
    """The first messages of a queue: the one that leaves next, and the first that is held.

    Each is ENDLESS if there is none. `timestamp` is the earlier of their timestamps, in seconds.
    """

    ready: int
    held: int
    timestamp: int | None


def look(known: Head | None, backlog: Backlog, dispatch: Dispatch, queue: object) -> Head:
    """Return the first messages of a queue, `known` if they are still the same."""
    ready = backlog.head()
    if ready != ENDLESS:
        ready &= PLACE
    held = _first_held(backlog, dispatch, queue)
    if known is not None and known[:2] == (ready, held):
        return known
    found = (_properties(backlog.store, entry)[1] for entry in (ready, held) if entry != ENDLESS)
    return Head(ready, held, min((each for each in found if each is not None), default=None))


def oldest(head: Head, backlog: Backlog) -> int:
    """Return the entry of the message that came first of those that are there."""
    firsts = [level.first() & PLACE for level in backlog.levels if len(level)]
    if backlog.held_back is not None:
        firsts += [entry & PLACE for entry in backlog.held_back.heads()]
    return min([*firsts, head.held])


def persistent_in(
    backlog: Backlog, dispatch: Dispatch, queue: object
) -> tuple[int | None, int | None]:
    """Return how many messages are persistent, and their bytes; None if there are too many to tell.

    As in RabbitMQ no message is in a queue that is not durable.
    """
    count = backlog.ready_count + backlog.unacked_count + backlog.kept_back
    if not backlog.durable or not backlog.kinds & LASTING_KIND:
        return 0, 0
    held_back = backlog.held_back.bytes if backlog.held_back is not None else 0
    if not backlog.kinds & TRANSIENT_KIND:
        return count, backlog.ready_bytes + backlog.unacked_bytes + held_back
    if count > MIXED_MAX:
        return None, None
    messages = size = 0
    for entry in backlog.entries(_held(backlog, dispatch, queue)):
        is_persistent, _, body_bytes = _properties(backlog.store, entry)
        messages += is_persistent
        size += body_bytes if is_persistent else 0
    return messages, size


def _held(backlog: Backlog, dispatch: Dispatch, queue: object) -> Iterator[int]:
    """Yield the entries that were taken out and not settled, and the entries that rest."""
    yield from dispatch.held_of(queue)
    if backlog.resting is not None:
        yield from backlog.resting.entries()


def _first_held(backlog: Backlog, dispatch: Dispatch, queue: object) -> int:
    if not backlog.unacked_count:
        return ENDLESS
    firsts = dispatch.first_held_of(queue)
    if backlog.resting is not None:
        firsts = [*firsts, *backlog.resting.entries()]
    return min((entry & PLACE for entry in firsts), default=ENDLESS)


def _properties(store: Store, entry: int) -> tuple[bool, int | None, int]:
    """Return whether a message is persistent, its timestamp in seconds, and its body bytes.

    A message that cannot be read is not persistent and has no timestamp.
    """
    data = store.peek(entry, PEEK_BYTES)
    try:
        body_bytes, props_bytes = _SIZES.unpack_from(data)
        start = _HEAD_BYTES + data[8] + data[9 + data[8]]
        if PEEK_BYTES < start + props_bytes <= PEEK_BYTES_MAX:
            data = store.peek(entry, start + props_bytes)
        return *_parsed(data, start, start + props_bytes), body_bytes
    except (IndexError, struct.error):
        return False, None, 0


def _parsed(data: bytes, at: int, stop: int) -> tuple[bool, int | None]:
    """Return the delivery mode and the timestamp of properties as basic has them in AMQP."""
    if at == stop:
        return False, None
    flags = int.from_bytes(data[at : at + 2], "big")
    at += 2
    for flag in (0x8000, 0x4000):  # the content type and the content encoding
        at += 1 + data[at] if flags & flag else 0
    if flags & _TABLE:
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    is_persistent = bool(flags & _DELIVERY_MODE) and data[at] == 2
    at += bool(flags & _DELIVERY_MODE) + bool(flags & _PRIORITY)
    for flag in _SHORT_STRINGS:
        at += 1 + data[at] if flags & flag else 0
    if not flags & _TIMESTAMP or at + 8 > len(data):
        return is_persistent, None
    return is_persistent, int.from_bytes(data[at : at + 8], "big")
