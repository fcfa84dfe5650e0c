"""What the bytes of a client say, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pamqp import base

from broker.amqp.errors import ChannelException, ConnectionException

# Kinds of settling.
ACK = 0
REJECT = 1
REQUEUE = 2


@dataclass(slots=True)
class StartOk:
    """connection.start-ok. The caller says tune() or closes."""

    mechanism: str
    response: bytes
    locale: str
    client_properties: dict[str, Any]


@dataclass(slots=True)
class Open:
    """connection.open. The caller answers with connection.open-ok or closes."""

    vhost: str


@dataclass(slots=True)
class Method:
    """Any other method, but basic.publish, ack, nack and reject."""

    channel: int
    method: base.Frame


@dataclass(slots=True)
class Publishes:
    """Whole publishes, a row of `table` (48 bytes, drawn in frames.pyx) for each. Valid until the next next_event()."""

    buffer: bytes | bytearray | memoryview
    table: bytes
    count: int


@dataclass(slots=True)
class Settles:
    """A run of ack, nack and reject of one channel: (kind, first tag, last tag, multiple).

    Single settles of consecutive tags are one range; a multiple is its own range with first = last = its tag.
    """

    channel: int
    ranges: list[tuple[int, int, int, bool]]


@dataclass(slots=True)
class Failed:
    """What is wrong at this place of the bytes; what was before it has been told before."""

    exception: ChannelException | ConnectionException
    channel: int = 0


Event = StartOk | Open | Method | Publishes | Settles | Failed
