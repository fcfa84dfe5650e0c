"""A short AMQP connection to a front door of this host as one of its users, only to publish with confirms. Blocking.

No password is asked for: only the broker's own user can reach the door's socket, and the HTTP call has proved who its
user is. Written from the client's side of AMQP 0-9-1, as far as it is needed; numbers are big endian.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
HEAD = struct.Struct(">BHI")
CHANNEL = 1
FRAME_BYTES_MAX = 1 << 20
RECEIVE_BYTES = 256 << 10
HANDSHAKE_S_MAX = 5.0

START, START_OK, TUNE, TUNE_OK, OPEN, OPEN_OK, CLOSE = (
    (10, 10),
    (10, 11),
    (10, 30),
    (10, 31),
    (10, 40),
    (10, 41),
    (10, 50),
)
CHANNEL_OPEN, CHANNEL_OPEN_OK, CHANNEL_CLOSE, CHANNEL_CLOSE_OK = (20, 10), (20, 11), (20, 40), (20, 41)
SELECT, SELECT_OK = (85, 10), (85, 11)
ACK, NACK, RETURN = (60, 80), (60, 120), (60, 50)
KNOWN = (85, 20)  # the front door's own (broker/front_door/publish/confirms.py)


class Closed(Exception):
    """By the front door, with what it said; `opened`: before or after anything could be published."""

    def __init__(self, code: int, text: str, opened: bool) -> None:
        super().__init__(code, text)
        self.code, self.text, self.opened = code, text, opened


class Unavailable(Exception):
    """The front door is not there, or does not answer in time."""


@dataclass(slots=True)
class Returned:
    exchange: str
    routing_key: str


@dataclass(slots=True)
class Outcome:
    """What became of the publishes of a call, whose delivery tags count from 1."""

    settled: int = 0  # all up to here are acknowledged or refused
    nacked: list[int] = field(default_factory=list)
    returned: list[Returned] = field(default_factory=list)  # in the order they were published
    # Some queue had them before, of the same producer; the same tag may be there for each queue.
    known: set[int] = field(default_factory=set)
    altered: set[int] = field(default_factory=set)  # of the known ones, those with another body than then


class Session:
    def __init__(self, path: str, user: str, vhost: str) -> None:
        """Raises Closed or Unavailable."""
        self._data = bytearray()
        self._opened = False
        self.frame_bytes_max = FRAME_BYTES_MAX
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(HANDSHAKE_S_MAX)
            self._sock.connect(path)
            self._open(user, vhost)
        except (OSError, EOFError) as error:
            self._sock.close()
            raise Unavailable(f"front door: {error}") from None
        except Closed:
            self._sock.close()
            raise

    def close(self) -> None:
        self._sock.close()

    def _open(self, user: str, vhost: str) -> None:
        self._sock.sendall(b"AMQP\x00\x00\x09\x01")
        self._expect(START)
        self._send(
            0,
            START_OK,
            bytes(4) + _short("EXTERNAL") + struct.pack(">I", len(user.encode())) + user.encode() + _short("en_US"),
        )
        tune = self._expect(TUNE)
        channels, offered, _ = struct.unpack_from(">HIH", tune)
        self.frame_bytes_max = min(offered or FRAME_BYTES_MAX, FRAME_BYTES_MAX)
        self._send(0, TUNE_OK, struct.pack(">HIH", channels, self.frame_bytes_max, 0))
        self._send(0, OPEN, _short(vhost) + b"\x00\x00")
        self._expect(OPEN_OK)
        self._opened = True
        self._send(CHANNEL, CHANNEL_OPEN, b"\x00")
        self._expect(CHANNEL_OPEN_OK)
        self._send(CHANNEL, SELECT, b"\x00")
        self._expect(SELECT_OK)

    def publish(self, count: int, more: Callable[[], bytes | bytearray], answer_s: float) -> Outcome:
        """All that `more` gives until it gives nothing, `count` messages; returns when each is settled. Raises Closed,
        or Unavailable when nothing moves for `answer_s`."""
        outcome, unsent = Outcome(), memoryview(more())
        self._sock.setblocking(False)
        last = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
            try:
                while outcome.settled < count:
                    events = selector.select(answer_s)
                    if not events and time.monotonic() - last >= answer_s:
                        raise Unavailable(f"front door: no confirm within {answer_s:g} s")
                    for _, ready in events:
                        last = time.monotonic()
                        if ready & selectors.EVENT_WRITE:
                            unsent = unsent[self._sock.send(unsent) :] or memoryview(more())
                            if not unsent:
                                selector.modify(self._sock, selectors.EVENT_READ)
                        if ready & selectors.EVENT_READ:
                            self._receive(outcome)
            except (OSError, EOFError) as error:
                raise Unavailable(f"front door: the connection was lost: {error}") from None
        return outcome

    def _receive(self, outcome: Outcome) -> None:
        got = self._sock.recv(RECEIVE_BYTES)
        if not got:
            raise EOFError
        self._data += got
        while (frame := self._next_frame()) is not None:
            kind, payload = frame
            if kind != METHOD:
                continue  # of a message that came back; heartbeats
            method, fields = struct.unpack_from(">HH", payload), payload[4:]
            if method in (ACK, NACK):
                tag, bits = struct.unpack_from(">QB", fields)
                if method == NACK:
                    outcome.nacked += range(outcome.settled + 1 if bits & 1 else tag, tag + 1)
                outcome.settled = max(outcome.settled, tag)
            elif method == KNOWN:
                known_first, known_last, altered = struct.unpack_from(">QQB", fields)
                outcome.known.update(range(known_first, known_last + 1))
                if altered:
                    outcome.altered.update(range(known_first, known_last + 1))
            elif method == RETURN:
                outcome.returned.append(_returned(fields))
            else:
                self._closed(method, fields)

    # -- frames ----------------------------------------------------------------------------------------

    def _send(self, channel: int, method: tuple[int, int], fields: bytes) -> None:
        payload = struct.pack(">HH", *method) + fields
        self._sock.sendall(HEAD.pack(METHOD, channel, len(payload)) + payload + b"\xce")

    def _expect(self, method: tuple[int, int]) -> bytes:
        while True:
            frame = self._next_frame()
            if frame is None:
                got = self._sock.recv(RECEIVE_BYTES)
                if not got:
                    raise EOFError("it closed the connection")
                self._data += got
            elif frame[0] == METHOD:
                found, fields = struct.unpack_from(">HH", frame[1]), frame[1][4:]
                if found == method:
                    return fields
                self._closed(found, fields)

    def _next_frame(self) -> tuple[int, bytes] | None:
        if len(self._data) < HEAD.size:
            return None
        kind, _, length = HEAD.unpack_from(self._data)
        end = HEAD.size + length + 1
        if len(self._data) < end:
            return None
        payload = bytes(self._data[HEAD.size : end - 1])
        del self._data[:end]
        return kind, payload

    def _closed(self, method: tuple[int, int], fields: bytes) -> None:
        """Other methods (connection.blocked) need no answer."""
        if method in (CLOSE, CHANNEL_CLOSE):
            (code,) = struct.unpack_from(">H", fields)
            raise Closed(code, fields[3 : 3 + fields[2]].decode("utf-8", "replace"), self._opened)


def _returned(fields: bytes) -> Returned:
    at, names = 2, []
    for _ in range(3):
        names.append(fields[at + 1 : at + 1 + fields[at]].decode("utf-8", "replace"))
        at += 1 + fields[at]
    return Returned(names[1], names[2])


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data
