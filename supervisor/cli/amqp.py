"""As much of an AMQP client as a load takes: methods one at a time; deliveries and confirms counted as they come."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pamqp.frame
from pamqp import base, commands

HEADER = b"AMQP\x00\x00\x09\x01"
FRAME_BYTES_MAX = 131072
READ_BYTES = 256 << 10
METHOD, DELIVER, ACK, NACK = 1, (60, 60), (60, 80), (60, 120)
CLOSES = ((10, 50), (20, 40))
# A wrong password is told, instead of the connection only closed.
PROPERTIES: dict[str, Any] = {"product": "shardctl", "capabilities": {"authentication_failure_close": True}}
HEAD, IDS, TAG = struct.Struct(">BHI"), struct.Struct(">HH"), struct.Struct(">Q?")
Method = TypeVar("Method", bound=base.Frame)

FRAME_END = b"\xce"


class Lost(Exception):
    """The broker closed the connection; the text says why."""


@dataclass
class Counts:
    published: int = 0
    confirmed: int = 0
    refused: int = 0
    consumed: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # something was confirmed or consumed

    def has_moved(self) -> None:
        self.moved.set()
        self.moved.clear()


class Connection:
    """One connection with one channel. `take` counts what comes; `call` waits for a method."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: Counts) -> None:
        self._reader, self.writer, self._counts = reader, writer, counts
        self._unread = b""
        self.confirmed = 0  # highest tag; what is below it too
        self.last_delivery = 0

    async def open(self, user: str, password: str, vhost: str) -> None:
        self.writer.write(HEADER)
        await self.expect(commands.Connection.Start)
        self.send(0, commands.Connection.StartOk(PROPERTIES, "PLAIN", f"\0{user}\0{password}", "en_US"))
        tune = await self.expect(commands.Connection.Tune)
        self.send(0, commands.Connection.TuneOk(tune.channel_max, min(tune.frame_max, FRAME_BYTES_MAX), 0))
        opening = commands.Connection.Open()
        opening.virtual_host = vhost
        self.send(0, opening)
        await self.expect(commands.Connection.OpenOk)
        await self.call(commands.Channel.Open(), commands.Channel.OpenOk)

    def send(self, channel: int, method: base.Frame) -> None:
        self.writer.write(pamqp.frame.marshal(method, channel))

    async def call(self, method: base.Frame, answer: type[Method]) -> Method:
        self.send(1, method)
        return await self.expect(answer)

    async def expect(self, kind: type[Method]) -> Method:
        while True:
            for found in self._whole_frames():
                read = pamqp.frame.unmarshal(found)[2]
                if isinstance(read, kind):
                    return read
                if isinstance(read, commands.Connection.Close | commands.Channel.Close):
                    raise Lost(f"{read.reply_code} {read.reply_text}")
            await self._read()

    async def take(self) -> int:
        """Waits for more; how many messages came."""
        await self._read()
        data, at, end, came = self._unread, 0, len(self._unread), 0
        while end - at >= HEAD.size:
            kind, _, size = HEAD.unpack_from(data, at)
            if end - at < HEAD.size + size + len(FRAME_END):
                break
            if kind == METHOD:
                came += self._take_method(data, at + HEAD.size, size)
            at += HEAD.size + size + len(FRAME_END)
        self._unread = data[at:]
        self._counts.consumed += came
        self.last_delivery += came
        self._counts.has_moved()
        return came

    def _take_method(self, data: bytes, at: int, size: int) -> int:
        method = IDS.unpack_from(data, at)
        if method == DELIVER:
            return 1
        if method in (ACK, NACK):
            tag, multiple = TAG.unpack_from(data, at + IDS.size)
            self._settled(tag, bool(multiple), method == ACK)
        elif method in CLOSES:
            code = int.from_bytes(data[at + 4 : at + 6], "big")
            raise Lost(f"{code} {data[at + 7 : at + 7 + data[at + 6]].decode(errors='replace')}")
        return 0

    def _settled(self, tag: int, multiple: bool, stored: bool) -> None:
        # The broker confirms in order, so what is below the highest tag is confirmed.
        count = tag - self.confirmed if multiple or tag > self.confirmed else 0
        self.confirmed = max(self.confirmed, tag)
        if stored:
            self._counts.confirmed += count
        else:
            self._counts.refused += count

    def _whole_frames(self) -> list[bytes]:
        """At most one, so that what comes behind an answer is there for the next to ask."""
        if len(self._unread) < HEAD.size:
            return []
        size = HEAD.size + HEAD.unpack_from(self._unread)[2] + len(FRAME_END)
        if len(self._unread) < size:
            return []
        found, self._unread = self._unread[:size], self._unread[size:]
        return [found]

    async def _read(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise Lost("the connection was closed")
        self._unread += data
