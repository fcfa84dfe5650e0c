"""The client's side of one AMQP 0-9-1 connection, without I/O: bytes in, events out.

The controller, the reader and shardctl each talk to a broker with a `Client` and a driver. The
driver owns the socket and the clock. It passes what it reads to `receive_data()`, acts on the
events that come back, calls methods such as `publish()`, and writes what `data_to_send()` returns.
Nothing here waits, and nothing here raises because of what the broker says.

A client has one channel, number 1, and it opens itself. The protocol header is queued from the
start. Each answer of the broker moves the client to the next state of the table `_NEXT` and queues
the next step of the handshake. The event `Opened` says that the channel is open. From then on the
driver may queue methods in any order. The broker answers them in that order.

A method with content (deliver, get-ok, return) makes a `Message` when its last body frame is here.
A driver that only counts messages switches that off with `keeps_content=False`: the method alone
makes the event then, and the frames of the content are skipped.

The end is one event, always the last one: `Closed` when the broker closed the connection or the
channel, `Broken` when the bytes are not AMQP. Bytes that arrive later are dropped. The driver
notices a lost socket by itself. This side ends with `close()`, which closes the channel and is
answered after all that was asked before, or the driver closes the socket.

A broker that blocks publishers says so and why in a notice, to clients with the capability
`connection.blocked`. It reads nothing from the connection until the alarm is over. A notice is no
event: `Client.blocked` is the reason.

Heartbeats are switched off in the handshake. Those that come all the same are ignored.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import Enum, auto
from typing import Final, NamedTuple

CHANNEL: Final = 1
FRAME_BYTES_MAX: Final = 1 << 20  # the largest frame to agree on, if the driver says no other
FRAME_BYTES_MIN: Final = 4096  # AMQP 0-9-1, section 4.2.3
FRAME_OVERHEAD_BYTES: Final = 8
BODY_BYTES_MAX: Final = 1 << 30  # of one message; the front door takes at most half of it
NO_TABLE: Final = bytes(4)
DECLARED_MAX: Final = 100  # answers to declares whose counts are kept

# Class and method, as they stand at the head of a method frame's payload.
START, START_OK, TUNE, TUNE_OK = (10 << 16 | n for n in (10, 11, 30, 31))
OPEN, OPEN_OK, CLOSE, CLOSE_OK = (10 << 16 | n for n in (40, 41, 50, 51))
BLOCKED, UNBLOCKED = (10 << 16 | n for n in (60, 61))
CHANNEL_OPEN, CHANNEL_OPEN_OK = (20 << 16 | n for n in (10, 11))
CHANNEL_CLOSE, CHANNEL_CLOSE_OK = (20 << 16 | n for n in (40, 41))
DECLARE, DECLARE_OK, DELETE, DELETE_OK = (50 << 16 | n for n in (10, 11, 40, 41))
QOS, QOS_OK, CONSUME, CONSUME_OK = (60 << 16 | n for n in (10, 11, 20, 21))
CANCEL, CANCEL_OK, PUBLISH, RETURN = (60 << 16 | n for n in (30, 31, 40, 50))
DELIVER, GET, GET_OK, GET_EMPTY = (60 << 16 | n for n in (60, 70, 71, 72))
ACK, RECOVER, RECOVER_OK, NACK = (60 << 16 | n for n in (80, 110, 111, 120))
SELECT, SELECT_OK = (85 << 16 | n for n in (10, 11))
# The front door's own method: known_frame() in broker/front_door/publish/confirms.py.
KNOWN = 85 << 16 | 20

_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME, _HEARTBEAT_FRAME = 1, 2, 3, 8
_HEARTBEAT_ONLY: Final = frozenset({_HEARTBEAT_FRAME})
_ALL_BUT_METHODS: Final = frozenset({_HEADER_FRAME, _BODY_FRAME, _HEARTBEAT_FRAME})
_FRAME_END: Final = 0xCE
_HEAD: Final = struct.Struct(">BHI")
_HEAD_BYTES: Final = _HEAD.size
_METHOD: Final = struct.Struct(">I")
_CONTENT: Final = struct.Struct(">HHQ")
_TUNE: Final = struct.Struct(">HIH")
_COUNTS: Final = struct.Struct(">II")


class State(Enum):
    """The state of a connection."""

    AWAITING_START = auto()
    AWAITING_TUNE = auto()
    AWAITING_OPEN_OK = auto()
    AWAITING_CHANNEL = auto()  # the connection is open, the channel is not
    OPEN = auto()
    AWAITING_HEADER = auto()  # of a message
    AWAITING_BODY = auto()
    CLOSED = auto()


# The next state by what arrives. Whatever is not listed breaks the connection.
_NEXT: Final = {
    (State.AWAITING_START, "connection.start"): State.AWAITING_TUNE,
    (State.AWAITING_TUNE, "connection.tune"): State.AWAITING_OPEN_OK,
    (State.AWAITING_OPEN_OK, "connection.open-ok"): State.AWAITING_CHANNEL,
    (State.AWAITING_CHANNEL, "channel.open-ok"): State.OPEN,
    (State.OPEN, "a method"): State.OPEN,
    (State.OPEN, "a method with content"): State.AWAITING_HEADER,
    (State.AWAITING_HEADER, "a content header"): State.AWAITING_BODY,
    (State.AWAITING_HEADER, "a content header without body"): State.OPEN,
    (State.AWAITING_BODY, "a body frame"): State.AWAITING_BODY,
    (State.AWAITING_BODY, "the last body frame"): State.OPEN,
    # The broker says at any time that it blocks publishers, or that it closes.
    **{(state, "a notice"): state for state in State},
    **{(state, "a close"): State.CLOSED for state in State},
}

# The words of the table for methods; every other one is "a method".
_WORDS: Final = {
    START: "connection.start",
    TUNE: "connection.tune",
    OPEN_OK: "connection.open-ok",
    CHANNEL_OPEN_OK: "channel.open-ok",
    RETURN: "a method with content",
    DELIVER: "a method with content",
    GET_OK: "a method with content",
    BLOCKED: "a notice",
    UNBLOCKED: "a notice",
    CLOSE: "a close",
    CHANNEL_CLOSE: "a close",
}
# Asked for with each frame; an enum gives its members slowly.
_OPEN, _CLOSED = State.OPEN, State.CLOSED
_NOT_OPENED: Final = (State.AWAITING_START, State.AWAITING_TUNE, State.AWAITING_OPEN_OK)


class Opened(NamedTuple):
    """The channel is open."""


class Received(NamedTuple):
    """A method of which only the arrival matters: mostly the answer to one of ours."""

    method: int


class Confirmed(NamedTuple):
    """The broker stored or refused the publish `tag`; if `multiple`, all those before it too."""

    tag: int
    multiple: bool
    stored: bool


class Known(NamedTuple):
    """Some queue had the publishes `first` to `last` before; `altered`: with other bodies."""

    first: int
    last: int
    altered: bool


class Message(NamedTuple):
    """A message that was delivered, fetched or returned."""

    method: int
    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    remaining: int  # messages that are ready behind a fetched one
    properties: bytes = b""  # flags and values, as they stand in the header frame
    body: bytes = b""


class Closed(NamedTuple):
    """The broker closed the connection or the channel; `opened`: after connection.open-ok."""

    code: int
    text: str
    opened: bool


class Broken(NamedTuple):
    """The bytes are not those of an AMQP broker."""

    why: str


Event = Opened | Received | Confirmed | Known | Message | Closed | Broken
_DELIVERED: Final = Received(DELIVER)
_DELIVER: Final = _METHOD.pack(DELIVER)


class _NotAmqp(Exception):
    """The text says why."""


class Client:
    """A connection with one channel; the head of the file says how it is used."""

    def __init__(
        self,
        vhost: str,
        mechanism: str,
        response: str,
        *,
        properties: bytes = NO_TABLE,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        keeps_content: bool = True,
    ) -> None:
        """Queue the protocol header.

        `mechanism` and `response` are SASL's. `properties` are the client's, an encoded table.
        `frame_bytes_max` becomes the size both sides agree on.
        """
        self.state = State.AWAITING_START
        self.frame_bytes_max = frame_bytes_max
        self.blocked = ""  # The alarm for which the broker reads nothing, "" if there is none.
        self.server_properties = b""  # The encoded table of connection.start, when it is here.
        # The messages that are ready and the consumers, of the queues that were declared last.
        self.declared: deque[tuple[int, int]] = deque(maxlen=DECLARED_MAX)
        self._start_ok = properties + _short(mechanism) + _long(response) + _short("en_US")
        self._open = _short(vhost) + b"\0\0"
        self._keeps_content = keeps_content
        self._skipped = _HEARTBEAT_ONLY if keeps_content else _ALL_BUT_METHODS
        self._unread = b""
        self._unsent = [b"AMQP\x00\x00\x09\x01"]
        self._message = Message(0, 0, False, "", "", 0)  # the one whose content is awaited
        self._body = bytearray()
        self._body_bytes = 0

    # -- bytes in, events out --------------------------------------------------------------------

    def receive_data(self, data: bytes) -> list[Event]:
        """Return the events of all frames that are whole now."""
        events: list[Event] = []
        if self.state is _CLOSED:
            return events
        data = self._unread + data
        at, size, skipped = 0, len(data), self._skipped
        only_counts = self.state is _OPEN and not self._keeps_content
        try:
            while size - at >= _HEAD_BYTES and self.state is not _CLOSED:
                kind, _, length = _HEAD.unpack_from(data, at)
                start, end = at + _HEAD_BYTES, at + _HEAD_BYTES + length
                if length > self.frame_bytes_max:
                    raise _NotAmqp("the answer is not AMQP")
                if end >= size:
                    break
                if data[end] != _FRAME_END:
                    raise _NotAmqp("a frame has no end")
                at = end + 1
                if kind in skipped:
                    continue
                if only_counts and data.startswith(_DELIVER, start):
                    events.append(_DELIVERED)  # as below, at a third of the time
                    continue
                if kind == _METHOD_FRAME:
                    event = self._receive_method(data[start:end])
                else:
                    event = self._receive_content(kind, data[start:end])
                if event is not None:
                    events.append(event)
        except (_NotAmqp, struct.error, IndexError) as error:
            self.state = _CLOSED
            why = str(error) if isinstance(error, _NotAmqp) else "a frame is cut short"
            events.append(Broken(why))
        self._unread = data[at:]
        return events

    def _receive_method(self, payload: bytes) -> Event | None:
        """Return what the driver hears of a method, after the next step of the handshake."""
        (method,) = _METHOD.unpack_from(payload)
        word = _WORDS.get(method, "a method")
        has_content = word == "a method with content"
        opened = self.state not in _NOT_OPENED
        self._move("a method" if has_content and not self._keeps_content else word)
        if has_content:
            if method == DELIVER and not self._keeps_content:
                return _DELIVERED
            self._message = _message(method, payload)
            return None if self._keeps_content else self._message
        if word == "a notice":
            self.blocked = (_short_at(payload, 4)[0] or "?") if method == BLOCKED else ""
            return None
        if word == "a close":
            self._send(CLOSE_OK if method == CLOSE else CHANNEL_CLOSE_OK)
            return Closed(int.from_bytes(payload[4:6], "big"), _short_at(payload, 6)[0], opened)
        if method in (ACK, NACK):
            tag, bits = struct.unpack_from(">QB", payload, 4)
            return Confirmed(tag, bool(bits & 1), method == ACK)
        if method == KNOWN:
            first, last, altered = struct.unpack_from(">QQB", payload, 4)
            return Known(first, last, bool(altered))
        if method == START:
            self.server_properties = payload[6 : 10 + int.from_bytes(payload[6:10], "big")]
            self._send(START_OK, self._start_ok)
        elif method == TUNE:
            channels, offered, _ = _TUNE.unpack_from(payload, 4)
            self.frame_bytes_max = min(offered or self.frame_bytes_max, self.frame_bytes_max)
            if self.frame_bytes_max < FRAME_BYTES_MIN:
                raise _NotAmqp(f"frames of {offered} bytes are too small")
            self._send(TUNE_OK, _TUNE.pack(channels, self.frame_bytes_max, 0))
            self._send(OPEN, self._open)
        elif method == OPEN_OK:
            self._send(CHANNEL_OPEN, b"\0")
        else:
            if method == DECLARE_OK:
                counts = _COUNTS.unpack_from(payload, _short_at(payload, 4)[1])
                self.declared.append((counts[0], counts[1]))
            return Opened() if method == CHANNEL_OPEN_OK else Received(method)
        return None

    def _receive_content(self, kind: int, payload: bytes) -> Message | None:
        """Return the message if this frame makes it whole."""
        if kind == _HEADER_FRAME:
            self._body_bytes = _CONTENT.unpack_from(payload)[2]
            self._move("a content header" if self._body_bytes else "a content header without body")
            if self._body_bytes > BODY_BYTES_MAX:
                raise _NotAmqp(f"a body of {self._body_bytes} bytes is too large")
            self._message = self._message._replace(properties=payload[_CONTENT.size :])
        elif kind == _BODY_FRAME:
            missing = self._body_bytes - len(self._body) - len(payload)
            self._move("a body frame" if missing else "the last body frame")
            if missing < 0:
                raise _NotAmqp("a body is longer than announced")
            self._body += payload
        else:
            raise _NotAmqp("the answer is not AMQP")
        if self.state is not _OPEN:
            return None
        whole = self._message._replace(body=bytes(self._body))
        self._body.clear()
        return whole

    def _move(self, word: str) -> None:
        following = _NEXT.get((self.state, word))
        if following is None:
            raise _NotAmqp(f"{word} came out of order")
        self.state = following

    # -- methods in, bytes out -------------------------------------------------------------------

    def data_to_send(self) -> bytes:
        """Return what is queued, once."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data

    def publish(self, exchange: str, key: str, props: bytes, body: bytes, mandatory: bool) -> None:
        """Queue a message; `props` are flags and values, as they stand in its header frame."""
        names = bytes(2) + _short(exchange) + _short(key)
        self._send(PUBLISH, names + bytes([mandatory]))
        self._frame(_HEADER_FRAME, _CONTENT.pack(60, 0, len(body)) + props)
        step = self.frame_bytes_max - FRAME_OVERHEAD_BYTES
        for at in range(0, len(body), step):
            self._frame(_BODY_FRAME, body[at : at + step])

    def select(self) -> None:
        """Ask for confirms; `Received(SELECT_OK)` answers."""
        self._send(SELECT, b"\0")

    def declare(self, queue: str, durable: bool) -> None:
        """Make a queue; `Received(DECLARE_OK)` answers."""
        self._send(DECLARE, bytes(2) + _short(queue) + bytes([durable << 1]) + NO_TABLE)

    def look_at(self, queue: str) -> None:
        """Ask for the counts of a queue; `Received(DECLARE_OK)` answers, `declared` has them."""
        self._send(DECLARE, bytes(2) + _short(queue) + b"\1" + NO_TABLE)

    def delete(self, queue: str) -> None:
        """Delete a queue; `Received(DELETE_OK)` answers."""
        self._send(DELETE, bytes(2) + _short(queue) + b"\0")

    def get(self, queue: str) -> None:
        """Fetch a message; it or `Received(GET_EMPTY)` answers."""
        self._send(GET, bytes(2) + _short(queue) + b"\0")

    def qos(self, prefetch: int) -> None:
        """Bound the unacknowledged messages of the next consumers; `Received(QOS_OK)` answers."""
        self._send(QOS, struct.pack(">IHB", 0, prefetch, 0))

    def consume(self, queue: str, tag: str, no_ack: bool, arguments: bytes = NO_TABLE) -> None:
        """Start a consumer; `Received(CONSUME_OK)` answers, then messages come."""
        names = bytes(2) + _short(queue) + _short(tag)
        self._send(CONSUME, names + bytes([no_ack << 1]) + arguments)

    def cancel(self, tag: str) -> None:
        """Stop a consumer; `Received(CANCEL_OK)` answers."""
        self._send(CANCEL, _short(tag) + b"\0")

    def ack(self, tag: int, multiple: bool = False) -> None:
        """Acknowledge a message; nothing answers."""
        self._send(ACK, struct.pack(">QB", tag, multiple))

    def nack(self, tag: int, multiple: bool, requeue: bool) -> None:
        """Requeue or reject a message; nothing answers."""
        self._send(NACK, struct.pack(">QB", tag, multiple | requeue << 1))

    def recover(self) -> None:
        """Requeue all that is not acknowledged; `Received(RECOVER_OK)` answers."""
        self._send(RECOVER, b"\1")

    def close(self) -> None:
        """Close the channel; `Received(CHANNEL_CLOSE_OK)` answers."""
        self._send(CHANNEL_CLOSE, struct.pack(">HBHH", 200, 0, 0, 0))

    def reopen(self) -> None:
        """Open the channel again, after the answer to `close()`; `Opened` answers."""
        self.state = State.AWAITING_CHANNEL
        self._send(CHANNEL_OPEN, b"\0")

    def _send(self, method: int, fields: bytes = b"") -> None:
        channel = 0 if method >> 16 == 10 else CHANNEL
        self._frame(_METHOD_FRAME, _METHOD.pack(method) + fields, channel)

    def _frame(self, kind: int, payload: bytes, channel: int = CHANNEL) -> None:
        self._unsent += (_HEAD.pack(kind, channel, len(payload)), payload, b"\xce")


def _message(method: int, payload: bytes) -> Message:
    """Return the message that a method announces, still without content."""
    tag, redelivered, remaining, at = 0, False, 0, 4
    if method == RETURN:
        at = _short_at(payload, at + 2)[1]  # reply code and text
    else:
        at = _short_at(payload, at)[1] if method == DELIVER else at  # consumer tag
        tag, redelivered = struct.unpack_from(">Q?", payload, at)
        at += 9
    exchange, at = _short_at(payload, at)
    key, at = _short_at(payload, at)
    if method == GET_OK:
        (remaining,) = struct.unpack_from(">I", payload, at)
    return Message(method, tag, redelivered, exchange, key, remaining)


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes([len(data)]) + data


def _long(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">I", len(data)) + data


def _short_at(data: bytes, at: int) -> tuple[str, int]:
    """Return a short string and where it ends."""
    end = at + 1 + data[at]
    if end > len(data):
        raise IndexError
    return data[at + 1 : end].decode("utf-8", "replace"), end
