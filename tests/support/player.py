"""A client that sends frames as it is told and waits by counting what comes."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from types import TracebackType

from pamqp import base

from tests.support.raw_client import RawClient, method
from tests.support.seen import (
    ACK,
    BODY,
    CHANNEL_OPEN_OK,
    DELIVER,
    GET_OK,
    HEADER,
    NACK,
    RETURN,
    Kind,
    kind_of,
)


class Player:
    """A connection with some channels open.

    `wait` reads until as many methods of a kind have come as it is told. A message counts when its
    body is whole, and a confirm as often as it has publishes.
    """

    def __init__(self, port: int, *, channels: int = 1, heartbeat: int = 0) -> None:
        self._raw = RawClient(port)
        self._heard: Counter[tuple[int, Kind]] = Counter()
        self._awaited: dict[int, tuple[Kind, int]] = {}  # by channel: a method and bytes to come
        self._confirmed: defaultdict[int, set[int]] = defaultdict(set)
        if channels:
            self._raw.shake_hands(channels=channels, heartbeat=heartbeat)

    def __enter__(self) -> Player:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._raw.sock.close()

    def send(self, *data: bytes) -> None:
        """Send all of it in one write."""
        self._raw.send(b"".join(data))

    def send_in_pieces(self, data: bytes, sizes: list[int]) -> None:
        """Send `data` in writes of these sizes, the rest in the last one."""
        for size in sizes:
            self._raw.send(data[:size])
            data = data[size:]
        if data:
            self._raw.send(data)

    def ask(self, channel: int, what: base.Frame, answer: Kind) -> None:
        before = self.heard(channel, answer)
        self.send(method(channel, what))
        self.wait(channel, answer, before + 1)

    def heard(self, channel: int, kind: Kind) -> int:
        return len(self._confirmed[channel]) if kind == ACK else self._heard[channel, kind]

    def wait(self, channel: int, kind: Kind, count: int = 1) -> None:
        """Read until `count` of this kind have come in all. ACK stands for all confirms."""
        while self.heard(channel, kind) < count:
            assert self._read(), (
                f"the end of the stream, and {self.heard(channel, kind)} of {count} {kind}"
            )

    def wait_for_header(self) -> None:
        """Read the 8 bytes with which a broker names its protocol."""
        said = b""
        while len(said) < 8 and (more := self._raw.sock.recv(8 - len(said))):
            said += more

    def _read(self) -> bool:
        """Take one frame. Return false at the end of the stream."""
        frame = self._raw.read_frame()
        if frame is None:
            return False
        kind, channel, size = struct.unpack_from(">BHI", frame)
        payload = frame[7 : 7 + size]
        if kind == HEADER:
            self._content(channel, int.from_bytes(payload[4:12], "big"))
        elif kind == BODY:
            self._content(channel, -size)
        else:
            self._method(channel, payload)
        return True

    def _method(self, channel: int, payload: bytes) -> None:
        kind = kind_of(payload)
        if kind in (DELIVER, GET_OK, RETURN):
            self._awaited[channel] = (kind, 0)
        elif kind in (ACK, NACK):
            (tag,) = struct.unpack_from(">Q", payload, 4)
            self._confirmed[channel].update(range(1 if payload[12] & 1 else tag, tag + 1))
        else:
            self._heard[channel, kind] += 1
            if kind == CHANNEL_OPEN_OK:
                self._confirmed[channel].clear()

    def _content(self, channel: int, more: int) -> None:
        kind, left = self._awaited[channel]
        self._awaited[channel] = (kind, left + more)
        if not left + more:
            self._heard[channel, kind] += 1
