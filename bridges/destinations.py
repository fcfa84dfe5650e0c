"""The two kinds of destination of a shovel: a broker by AMQP, and an HTTP server.

A destination takes the frames of publishes that a `Relay` makes, in order, and says with `settled`
how many messages are settled: it has them for good, or `take_refused` names them. It says with
`on_room` when the source is to be read no further, and with `on_failed` that it is of no use any
more.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import aiohttp
from pamqp import base, commands

from shardmq.bridges.connection import Connection
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.relay import Settled
from shardmq.broker.amqp import properties
from shardmq.broker.amqp.methods import unchecked
from shardmq.broker.model.amqp_uri import without_credentials
from shardmq.broker.model.shovels import Shovel

BODY_BYTES_MAX: Final = 128 << 20  # of a message for an HTTP server
WAITING_BYTES_MAX: Final = 4 << 20  # of messages that wait for their turn
MESSAGE_BYTES: Final = 1024  # what such a message takes besides its body, about
ANSWER_S_MAX: Final = 30.0
HEADERS_MAX: Final = 64
HEADER_CHARS_MAX: Final = 2048
_HEAD: Final = struct.Struct(">BHI")
_METHOD, _HEADER = 1, 2


class Destination(Protocol):
    """Takes publishes; the head of the file says how."""

    on_settled: Callable[[], None]
    on_failed: Callable[[LinkFailed], None]
    on_room: Callable[[bool], None]

    @property
    def settled(self) -> int: ...

    @property
    def skipped(self) -> int:
        """The number of messages among the settled ones that were dropped."""
        ...

    @property
    def blocked(self) -> str: ...

    @property
    def failure(self) -> LinkFailed | None: ...

    def skip(self, numbers: list[int]) -> None:
        """Take note of messages that were dropped: they are settled without a publish."""
        ...

    def take_refused(self) -> list[int]: ...

    def write(self, frames: bytes, published: int) -> None: ...

    async def finish(self, within_s: float) -> bool:
        """End in order; return whether the other side has taken all that was written."""
        ...

    def close(self) -> None: ...


class AmqpDestination:
    """A broker."""

    def __init__(self, connection: Connection) -> None:
        self.on_settled: Callable[[], None] = lambda: None
        self.connection = connection
        self._settled = Settled()
        self._published = self._dropped = 0
        self._confirms = False
        connection.on_method = self._heard

    @property
    def on_failed(self) -> Callable[[LinkFailed], None]:
        return self.connection.on_failed

    @on_failed.setter
    def on_failed(self, call: Callable[[LinkFailed], None]) -> None:
        self.connection.on_failed = call

    @property
    def on_room(self) -> Callable[[bool], None]:
        return self.connection.on_room

    @on_room.setter
    def on_room(self, call: Callable[[bool], None]) -> None:
        self.connection.on_room = call

    @property
    def settled(self) -> int:
        return self._settled.low if self._confirms else self._published + self._dropped

    @property
    def skipped(self) -> int:
        return self._settled.skipped if self._confirms else self._dropped

    @property
    def blocked(self) -> str:
        return self.connection.blocked

    @property
    def failure(self) -> LinkFailed | None:
        return self.connection.failure

    async def prepare(self, shovel: Shovel) -> None:
        """Declare what messages go to, and ask for confirms. Raises LinkFailed."""
        if shovel.dest_queue:
            await ensure_queue(
                self.connection, shovel.dest_queue, shovel.dest_queue_args, shovel.dest_predeclared
            )
        elif shovel.dest_exchange:
            passive = unchecked(
                commands.Exchange.Declare, exchange=shovel.dest_exchange, passive=True
            )
            await self.connection.call(passive, commands.Exchange.DeclareOk)
        if shovel.ack_mode == "on-confirm":
            await self.confirm()

    async def confirm(self) -> None:
        """Ask for confirms. Raises LinkFailed."""
        await self.connection.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
        self._confirms = True
        self.connection.batches = self._take

    def skip(self, numbers: list[int]) -> None:
        self._dropped += len(numbers)
        if self._confirms:
            for number in numbers:
                self._settled.skip(number)

    def take_refused(self) -> list[int]:
        """Return the numbers of messages that were refused (basic.nack) since the last call."""
        return self._settled.take_refused()

    def write(self, frames: bytes, published: int) -> None:
        self._published = published
        self.connection.write(frames)

    async def finish(self, within_s: float) -> bool:
        """End in order; return whether the broker has read all that was written."""
        return await self.connection.finish(within_s)

    def close(self) -> None:
        self.connection.close()

    def _take(self, data: bytes | memoryview, at: int) -> int:
        before = at
        at = self._settled.feed(data, at, self._published)
        if at != before:
            self.on_settled()
        return at

    def _heard(self, method: base.Frame) -> None:
        if isinstance(method, commands.Basic.Return):
            raise LinkFailed(f"the destination returned a message: {method.reply_text}"[:400])


class _Message(NamedTuple):
    number: int
    headers: dict[str, str]
    body: bytes


class HttpDestination:
    """An HTTP server that gets a POST for each message, one after the other."""

    def __init__(self, url: str, shovel: Shovel) -> None:
        self.on_settled: Callable[[], None] = lambda: None
        self.on_failed: Callable[[LinkFailed], None] = lambda error: None
        self.on_room: Callable[[bool], None] = lambda is_full: None
        self.settled = self.skipped = 0
        self.blocked = ""
        self.failure: LinkFailed | None = None
        self._url, self._shovel = url, shovel
        self._waiting: deque[_Message] = deque()
        self._waiting_bytes = 0
        self._came = asyncio.Event()
        self._number = 0
        self._headers: dict[str, str] = {}
        self._body_bytes = 0
        self._body = bytearray()
        self._is_full = False
        self._is_ending = False  # nothing more comes
        self._task = asyncio.create_task(self._run())

    def skip(self, numbers: list[int]) -> None:
        raise AssertionError("no shovel drops messages")

    def take_refused(self) -> list[int]:
        return []  # what the server refuses ends the try

    def write(self, frames: bytes, published: int) -> None:
        """Take whole frames. Raises LinkFailed."""
        at = 0
        while at < len(frames):
            kind, _, size = _HEAD.unpack_from(frames, at)
            payload = frames[at + _HEAD.size : at + _HEAD.size + size]
            at += _HEAD.size + size + 1
            if kind == _METHOD:
                self._number += 1
                continue
            if kind == _HEADER:
                self._body_bytes = int.from_bytes(payload[4:12], "big")
                if self._body_bytes > BODY_BYTES_MAX:
                    raise LinkFailed(
                        f"message {self._number} has {self._body_bytes} bytes, and an HTTP server "
                        f"gets {BODY_BYTES_MAX} at most"
                    )
                self._headers = http_headers(payload[12:], self._shovel.name)
            else:
                self._body += payload
            if len(self._body) == self._body_bytes:
                self._waiting.append(_Message(self._number, self._headers, bytes(self._body)))
                self._waiting_bytes += len(self._body) + MESSAGE_BYTES
                self._body = bytearray()
                self._came.set()
        self._say_room()

    async def finish(self, within_s: float) -> bool:
        """Send what waits, and end; return whether the server has taken all of it."""
        self._is_ending = True
        self._came.set()
        await asyncio.wait([self._task], timeout=within_s)
        self.close()
        return not self._waiting_bytes

    def close(self) -> None:
        self._task.cancel()

    def _say_room(self) -> None:
        is_full = self._waiting_bytes > WAITING_BYTES_MAX
        if is_full != self._is_full:
            self._is_full = is_full
            self.on_room(is_full)

    async def _run(self) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                while True:
                    while not self._waiting:
                        if self._is_ending:
                            return
                        self._came.clear()
                        await self._came.wait()
                    message = self._waiting.popleft()
                    await self._post(session, message)
                    self._waiting_bytes -= len(message.body) + MESSAGE_BYTES
                    self.settled = message.number
                    self._say_room()
                    self.on_settled()
        except LinkFailed as failed:
            self.on_failed(failed)

    async def _post(self, session: aiohttp.ClientSession, message: _Message) -> None:
        posting = session.post(
            self._url, data=message.body, headers=message.headers, allow_redirects=False
        )
        try:
            async with posting as response:
                if 200 <= response.status < 300:
                    return
                status = response.status
        except TimeoutError:
            raise LinkFailed(f"HTTP: no answer within {ANSWER_S_MAX:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Texts of errors may show the URL, which may hold a password.
            raise LinkFailed(f"HTTP: {type(error).__name__} at {self._shown}") from None
        raise LinkFailed(f"HTTP: status {status} from {self._shown}")

    @property
    def _shown(self) -> str:
        return without_credentials(self._url)[:200]


def http_headers(props: bytes, shovel: str) -> dict[str, str]:
    """Return the headers of the request for a message with these properties (flags and values)."""
    read = properties.read(props)
    found = {"X-Shovel": shovel, "User-Agent": "shardmq"}
    if read.content_type:
        found["Content-Type"] = read.content_type
    if read.content_encoding:
        found["Content-Encoding"] = read.content_encoding
    if read.message_id:
        found["X-Message-Id"] = read.message_id
    for name, value in list((read.headers or {}).items())[:HEADERS_MAX]:
        if name and name.isascii() and all(char.isalnum() or char in "-_" for char in name):
            found[f"X-{name}"] = _text(value)
    return {name: _line(value) for name, value in found.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:HEADER_CHARS_MAX]


async def ensure_queue(
    connection: Connection,
    queue: str,
    arguments: dict[str, Any],
    predeclared: bool,
    durable: bool = True,
    auto_delete: bool = False,
) -> int:
    """Return the number of messages of a queue, which is declared if it is not there.

    Raises LinkFailed, also if it is not there and `predeclared` says that it should be.
    """
    passive = unchecked(commands.Queue.Declare, queue=queue, passive=True)
    if predeclared:
        return int((await connection.call(passive, commands.Queue.DeclareOk)).message_count or 0)
    found = await connection.call_or_reopen(passive, commands.Queue.DeclareOk)
    if found is None:
        declare = unchecked(
            commands.Queue.Declare,
            queue=queue,
            durable=durable,
            auto_delete=auto_delete,
            arguments=arguments,
        )
        found = await connection.call(declare, commands.Queue.DeclareOk)
    return int(found.message_count or 0)
