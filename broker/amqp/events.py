"""Events: what the bytes of a client say, in order."""

from __future__ import annotations

import struct
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from pamqp import base

from shardmq.broker.amqp.errors import ChannelException, ConnectionException
from shardmq.broker.amqp.spec import FRAME_OVERHEAD_BYTES

# Kinds of settles.
ACK = 0
REJECT = 1
REQUEUE = 2

# A row of Publishes.table: see octets.pxd.
_ROW = struct.Struct("<IHHIIIIQI4BQ")


@dataclass(slots=True)
class StartOk:
    """connection.start-ok. The caller calls tune() or closes."""

    mechanism: str
    response: bytes
    locale: str
    client_properties: dict[str, Any]


@dataclass(slots=True)
class Open:
    """connection.open. The caller answers with connection.open-ok or closes."""

    vhost: str


@dataclass(slots=True)
class Opened:
    """A channel is used for the first time: its channel.open was answered without an event."""

    channel: int


@dataclass(slots=True)
class Method:
    """Any other method.

    basic.publish, ack, nack, reject and most of queue.bind have events of their own.
    """

    channel: int
    method: base.Frame


@dataclass(slots=True)
class Publishes:
    """Whole publishes: `table` has a row of 48 bytes, drawn in octets.pxd, for each of them.

    An event is valid until the next call of next_event(). One that is `lasting` is valid as long as
    it is held, for nobody else has its bytes. `done` counts the messages, from the first on, that
    were handled; those of the channels `without` were taken out of the event before the rest of it
    was handled. `counted` says that the messages are in the counters of the front door already.
    """

    buffer: bytes | bytearray | memoryview
    table: bytes
    count: int
    lasting: bool = False
    done: int = 0
    without: AbstractSet[int] = frozenset()
    counted: bool = False

    def keep(self) -> None:
        """Make the event lasting: copy its bytes, unless nobody else has them."""
        if not self.lasting:
            self.buffer = bytes(self.buffer)
            self.lasting = True


@dataclass(slots=True)
class Settles:
    """A run of ack, nack and reject of one channel: (kind, first tag, last tag, multiple).

    Single settles of consecutive tags are one range; a multiple is its own range with first = last
    = its tag.
    """

    channel: int
    ranges: list[tuple[int, int, int, bool]]


@dataclass(slots=True)
class Binds:
    """A run of queue.bind of one channel without arguments.

    `ends` are (exchange, queue, routing key) of each; equal names of neighbours are one object.
    `nowait`: none of the binds wants an answer; otherwise all do.
    """

    channel: int
    ends: list[tuple[str, str, str]]
    nowait: bool


@dataclass(slots=True)
class Failed:
    """The bytes are wrong at this place; what was before has been told before.

    The exception has no traceback: its frames would hold this very event, and the connection with
    it.
    """

    exception: ChannelException | ConnectionException
    channel: int = 0


@dataclass(slots=True)
class Nothing:
    """Many frames without an event came; there may be more.

    A caller may let others have their turn.
    """


def copies_by_channel(
    event: Publishes, channels: AbstractSet[int], first: int = 0
) -> dict[int, Publishes]:
    """Return the publishes of each of these channels as events that are kept.

    Publishes before the `first` of the event are left out. Only their own bytes are copied. A copy
    of messages that were counted is counted.
    """
    found: dict[int, tuple[bytearray, bytearray]] = {}
    for row in _ROW.iter_unpack(memoryview(event.table)[first * _ROW.size :]):
        line, line_len, number, props, props_len, body, body_frames, body_len, *rest = row
        if number not in channels:
            continue
        end = (
            body + body_len + body_frames * FRAME_OVERHEAD_BYTES if body_len else props + props_len
        )
        if number not in found:
            found[number] = bytearray(), bytearray()
        data, table = found[number]
        moved = len(data) - line
        data += event.buffer[line:end]
        if props >= end:  # they were put in behind all that was read (frames.stamped)
            props_moved = len(data)
            data += event.buffer[props : props + props_len]
        else:
            props_moved = props + moved
        body = body + moved if body_len else 0
        table += _ROW.pack(
            line + moved,
            line_len,
            number,
            props_moved,
            props_len,
            body,
            body_frames,
            body_len,
            *rest,
        )
    return {
        number: Publishes(data, bytes(table), len(table) // _ROW.size, counted=event.counted)
        for number, (data, table) in found.items()
    }


Event = StartOk | Open | Opened | Method | Publishes | Settles | Binds | Failed | Nothing


def things_in(event: Event) -> int:
    """Return how many things a client said with an event.

    Publishes, settles (a multiple is one) and binds count each; other events are one thing.
    """
    if isinstance(event, Publishes):
        return event.count
    if isinstance(event, Settles):
        return sum(last - first + 1 for _, first, last, _ in event.ranges)
    if isinstance(event, Binds):
        return len(event.ends)
    return 1
