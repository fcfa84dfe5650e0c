"""A short AMQP connection of the controller to a front door of this host, as one of its users: publish, get, or move.

What the HTTP API publishes and gets goes the way of every client: rights, routing, limits and confirms are decided
where they always are. The door's socket is in the runtime directory, where only the broker's own user can reach it; the
HTTP call has proved who its user is, so no password is asked there.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pamqp.frame
from pamqp import base, commands

from shardmq.broker.amqp import properties
from shardmq.broker.amqp.properties import PROPERTIES, Properties
from shardmq.broker.controller.peers.method_frames import encode_table

HANDSHAKE_S_MAX = 5.0
ANSWER_S_MAX = 30.0  # a publish waits for its confirm, and for a shard that starts anew
FRAME_BYTES_MAX = 1 << 20  # of what the door offers; longer bodies go in several
GOT_BYTES_MAX = 64 << 20  # of bodies in one answer; what is left stays in the queue

# A stream says nowhere that it ended: with nothing more for so long, this was all.
STREAM_IDLE_S = 0.5
STREAM_LATE_S = 10.0  # while it is known to have more
STREAM_OFFSET = "x-stream-offset"

MOVE_MESSAGES_MAX = 10_000  # in one call ...
MOVE_S_MAX = 15.0  # ... which takes no longer; the next one goes on
MOVE_AT_ONCE_MAX = 100  # taken from one queue and not yet confirmed by the other ...
MOVE_BYTES_MAX = 16 << 20  # ... and of bodies no more than these and one message

PRODUCER_ID = "x-producer-id"

METHOD, HEADER, BODY, END = 1, 2, 3, b"\xce"
CHANNEL = 1

_HEAD = struct.Struct(">BHI")
_CONTENT = struct.Struct(">HHQ")


class Refused(Exception):
    """What the front door closed the channel or connection with, `opened` or before. `text`: "NAME - why"."""

    def __init__(self, code: int, text: str, opened: bool = True) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text
        self.opened = opened


class Rejected(Exception):
    """A queue is full and takes no more, or its shard was lost: the message may be in some of its queues."""


class Unavailable(Exception):
    """No front door answers in time."""


class NotMoved(Exception):
    """Why not all were moved; those that were not are where they were. `moved`: before that."""

    def __init__(self, why: str, moved: int) -> None:
        super().__init__(why, moved)
        self.why = why
        self.moved = moved


class Taken(NamedTuple):
    """One message as it lies in its frames."""

    tag: int
    remaining: int
    header: bytes
    body: bytes


class Got(NamedTuple):
    """One message; `remaining` are ready behind it."""

    exchange: str
    routing_key: str
    redelivered: bool
    remaining: int
    properties: Properties
    body: bytes


def socket_path(runtime_dir: str, door: int) -> str:
    """Where front door `door` listens for this; `shardmq.broker.front_door.server` binds the same."""
    return f"{runtime_dir}/door-{door}.sock"


@asynccontextmanager
async def opened(path: str, user: str, vhost: str) -> AsyncIterator[Session]:
    """A connection and a channel. Raises Refused, or Unavailable."""
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=FRAME_BYTES_MAX)
    except OSError as error:
        raise Unavailable(f"front door: {error}") from None
    session = Session(reader, writer)
    try:
        async with asyncio.timeout(HANDSHAKE_S_MAX):
            await session.open(user, vhost)
        async with asyncio.timeout(ANSWER_S_MAX):
            yield session
            await session.close()
    except TimeoutError:
        raise Unavailable("front door: no answer in time") from None
    except (OSError, asyncio.IncompleteReadError):
        raise Unavailable("front door: the connection was lost") from None
    finally:
        writer.transport.abort()


class Session:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frame_bytes_max = 0
        self._is_open = False

    async def open(self, user: str, vhost: str) -> None:
        self._writer.write(b"AMQP\x00\x00\x09\x01")
        await self._expect(commands.Connection.Start)
        self._send(0, commands.Connection.StartOk({}, "EXTERNAL", user))
        tune = await self._expect(commands.Connection.Tune)
        self._frame_bytes_max = min(tune.frame_max or FRAME_BYTES_MAX, FRAME_BYTES_MAX)
        self._send(0, commands.Connection.TuneOk(tune.channel_max, self._frame_bytes_max, 0))
        self._send(0, _Open(vhost))
        await self._expect(commands.Connection.OpenOk)
        self._is_open = True
        self._send(CHANNEL, commands.Channel.Open())
        await self._expect(commands.Channel.OpenOk)

    async def close(self) -> None:
        """Returns when all that was said before is done."""
        self._send(CHANNEL, commands.Channel.Close(200, "", 0, 0))
        await self._expect(commands.Channel.CloseOk)

    async def publish(self, exchange: str, key: str, given: dict[str, Any], body: bytes) -> bool:
        """Whether it is in at least one queue, on stable storage if that was asked for. Raises Rejected."""
        self._send(CHANNEL, commands.Confirm.Select())
        await self._expect(commands.Confirm.SelectOk)
        self._publish(exchange, key, content_header(given, len(body)), body)
        await self._writer.drain()
        routed = True
        while True:
            method = await self._method()
            if isinstance(method, commands.Basic.Return):
                await self._content()
                routed = False
            elif isinstance(method, commands.Basic.Ack):
                return routed
            elif isinstance(method, commands.Basic.Nack):
                raise Rejected

    async def get(self, queue: str, count: int, requeue: bool, reject: bool) -> list[Got]:
        """Up to `count`, which are then requeued, rejected, or (neither) acknowledged, all at once."""
        messages: list[Got] = []
        size = tag = 0
        while len(messages) < count and size < GOT_BYTES_MAX:
            self._send(CHANNEL, _Get(queue=queue))
            method = await self._method()
            if not isinstance(method, commands.Basic.GetOk):
                break
            read, body = await self._content()
            size, tag = size + len(body), int(method.delivery_tag or 0)
            key, remaining = method.routing_key or "", method.message_count or 0
            messages.append(Got(method.exchange or "", key, bool(method.redelivered), remaining, read, body))
        if messages and (requeue or reject):
            self._send(CHANNEL, commands.Basic.Nack(tag, multiple=True, requeue=requeue))
        elif messages:
            self._send(CHANNEL, commands.Basic.Ack(tag, multiple=True))
        return messages

    async def read(self, queue: str, count: int, offset: int | str, begin: int, end: int) -> list[Got]:
        """Up to `count` (1 to 65,535) messages of a stream. `offset`: of the first one, in any form of consume's
        `x-stream-offset`; `begin`, `end`: as far as the stream is known to reach. What it has past that comes too,
        unless it keeps us waiting."""
        self._send(CHANNEL, commands.Basic.Qos(prefetch_count=count))
        await self._expect(commands.Basic.QosOk)
        self._send(CHANNEL, _Consume(queue=queue, consumer_tag="read", arguments={STREAM_OFFSET: offset}))
        await self._expect(commands.Basic.ConsumeOk)
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            self._send(CHANNEL, commands.Basic.Cancel("read"))

        def wait_s(at: int) -> float:
            return STREAM_LATE_S if at < end else STREAM_IDLE_S

        messages: list[Got] = []
        first = max(begin, offset) if isinstance(offset, int) else begin if offset in ("first", "last") else end
        size, timer = 0, loop.call_later(wait_s(first), cancel)
        try:
            while len(messages) < count and size < GOT_BYTES_MAX:
                method = await self._method()
                if not isinstance(method, commands.Basic.Deliver):  # cancelled, by us or as the stream is gone
                    break
                read, body = await self._content()
                at = int((read.headers or {}).get(STREAM_OFFSET, 0))
                size += len(body)
                place = (method.exchange or "", method.routing_key or "", bool(method.redelivered))
                messages.append(Got(*place, max(0, end - 1 - at), read, body))
                timer.cancel()
                timer = loop.call_later(wait_s(at + 1), cancel)
        finally:
            timer.cancel()
        return messages

    async def move(self, queue: str, to: str, count: int, now: Callable[[], float]) -> tuple[int, int]:
        """How many messages are in queue `to` instead of `queue` now, and how many are ready there still.

        Each is taken away when the other queue has confirmed it: whatever ends in between, a message may be in both,
        never in none. Raises NotMoved. `now`: seconds of any clock.
        """
        self._send(CHANNEL, commands.Confirm.Select())
        await self._expect(commands.Confirm.SelectOk)
        end, moved, left = now() + MOVE_S_MAX, 0, 0
        while moved < count and now() < end:
            batch, odd = await self._take(queue, min(count - moved, MOVE_AT_ONCE_MAX))
            for message in batch:
                self._publish("", to, message.header, message.body)
            refused, why = await self._answers(moved + 1, len(batch))
            for place, message in enumerate(batch, moved + 1):
                if place not in refused:
                    self._send(CHANNEL, commands.Basic.Ack(message.tag))
            moved += len(batch) - len(refused)
            if refused or odd:
                self._send(CHANNEL, commands.Basic.Recover(requeue=True))
                await self._expect(commands.Basic.RecoverOk)
                raise NotMoved(why or odd, moved)
            left = batch[-1].remaining if batch else 0
            if not left:
                break
        return moved, left

    async def _take(self, queue: str, count: int) -> tuple[list[Taken], str]:
        """Some messages, and why the one behind them must stay, or ""."""
        taken: list[Taken] = []
        size = 0
        while len(taken) < count and size < MOVE_BYTES_MAX:
            self._send(CHANNEL, _Get(queue=queue))
            method = await self._method()
            if not isinstance(method, commands.Basic.GetOk):
                break
            header, body = await self._raw_content()
            if PRODUCER_ID in (properties.read(header[_CONTENT.size :]).headers or {}):
                return taken, f"a message with {PRODUCER_ID} stays: the other queue might take it for a repeated one"
            size += len(body)
            taken.append(Taken(int(method.delivery_tag or 0), method.message_count or 0, header, body))
        return taken, ""

    async def _answers(self, first: int, count: int) -> tuple[set[int], str]:
        """Waits for the confirms of `count` publishes: which of them are in no queue, and why."""
        waiting, refused, why = set(range(first, first + count)), set[int](), ""
        await self._writer.drain()
        while waiting:
            method = await self._method()
            if isinstance(method, commands.Basic.Return):
                await self._content()
                # It says not of which: what was routed before went away with the queue.
                refused, why = set(range(first, first + count)), "the other queue is not there any more"
            elif isinstance(method, commands.Basic.Ack | commands.Basic.Nack):
                tag = int(method.delivery_tag or 0)
                answered = {one for one in waiting if one <= tag} if method.multiple else {tag}
                waiting -= answered
                if isinstance(method, commands.Basic.Nack):
                    refused, why = refused | answered, why or "the other queue takes no more"
        return refused, why

    # -- frames ----------------------------------------------------------------------------------------

    def _publish(self, exchange: str, key: str, header: bytes, body: bytes) -> None:
        self._send(CHANNEL, _Publish(exchange=exchange, routing_key=key, mandatory=True))
        self._write(HEADER, header)
        step = self._frame_bytes_max - _HEAD.size - len(END)
        for start in range(0, len(body), step):
            self._write(BODY, body[start : start + step])

    def _send(self, channel: int, method: base.Frame) -> None:
        self._writer.write(pamqp.frame.marshal(method, channel))

    def _write(self, kind: int, payload: bytes) -> None:
        self._writer.write(_HEAD.pack(kind, CHANNEL, len(payload)) + payload + END)

    async def _read(self) -> tuple[int, bytes]:
        head = await self._reader.readexactly(_HEAD.size)
        kind, _, length = _HEAD.unpack(head)
        return kind, head + await self._reader.readexactly(length + len(END))

    async def _method(self) -> Any:
        """The next method. The door says nothing else here but that the connection is blocked, and may be told."""
        while True:
            kind, frame = await self._read()
            if kind != METHOD:
                continue
            method = pamqp.frame.unmarshal(frame)[2]
            if isinstance(method, commands.Connection.Close | commands.Channel.Close):
                raise Refused(method.reply_code or 0, method.reply_text or "", self._is_open)
            return method

    async def _expect(self, kind: type[base.Frame]) -> Any:
        await self._writer.drain()
        while not isinstance(method := await self._method(), kind):
            pass
        return method

    async def _content(self) -> tuple[Properties, bytes]:
        header, body = await self._raw_content()
        return properties.read(header[_CONTENT.size :]), body

    async def _raw_content(self) -> tuple[bytes, bytes]:
        """The header frame's payload, and the body."""
        _, frame = await self._read()
        header = frame[_HEAD.size : -len(END)]
        _, _, body_bytes = _CONTENT.unpack_from(header)
        body = bytearray()
        while len(body) < body_bytes:
            _, frame = await self._read()
            body += frame[_HEAD.size : -len(END)]
        return header, bytes(body)


class _AnyName:
    """pamqp would refuse names that RabbitMQ takes ("ü", "<"), when a method is made and when it is written."""

    def validate(self) -> None:
        return


class _Open(_AnyName, commands.Connection.Open): ...


class _Publish(_AnyName, commands.Basic.Publish): ...


class _Get(_AnyName, commands.Basic.Get): ...


class _Consume(_AnyName, commands.Basic.Consume): ...


def content_header(given: dict[str, Any], body_bytes: int) -> bytes:
    """The payload of a header frame. Values have the types that `PROPERTIES` asks for."""
    flags, parts = 0, []
    for bit, (name, kind) in zip(range(15, 1, -1), PROPERTIES, strict=True):
        value = given.get(name)
        if value is None:
            continue
        flags |= 1 << bit
        match kind:
            case "s":
                data = value.encode()
                parts.append(bytes((len(data),)) + data)
            case "F":
                parts.append(encode_table(value))
            case "B":
                parts.append(bytes((value,)))
            case _:
                parts.append(struct.pack(">Q", value))
    return _CONTENT.pack(60, 0, body_bytes) + struct.pack(">H", flags) + b"".join(parts)
