"""A short AMQP connection of the controller to a front door of this host, as one of its users.

What the HTTP API publishes and gets goes the way of every client: rights, routing, limits and
confirms are decided where they always are. The front door's socket is in the runtime directory,
where only the broker's own user can reach it. The HTTP call has proved who its user is, so no
password is asked there.

A session is an asyncio driver of `supervisor/amqp_client.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from shardmq.broker.amqp import properties
from shardmq.broker.amqp.methods import encode_table
from shardmq.broker.amqp.properties import Properties, encode_properties
from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Broken, Client, Closed, Confirmed, Event, Message

HANDSHAKE_S_MAX = 5.0
ANSWER_S_MAX = 30.0  # a publish waits for its confirm, and for a shard that starts anew
READ_BYTES = 256 << 10
GOT_BYTES_MAX = 64 << 20  # of bodies in one answer; what is left stays in the queue

# A stream says nowhere that it ended: with nothing more for so long, this was all.
STREAM_IDLE_S = 0.5
STREAM_LATE_S = 10.0  # while it is known to have more
STREAM_OFFSET = "x-stream-offset"

MOVE_MESSAGES_MAX = 10_000  # in one call ...
MOVE_S_MAX = 15.0  # ... which takes no longer; the next one goes on
MOVE_AT_ONCE_MAX = 100  # taken from one queue and not yet confirmed by the other ...
MOVE_BYTES_MAX = 16 << 20  # ... and of bodies no more than these and one message

# With this capability the front door says that it blocks publishers, and why.
CAPABILITIES = encode_table({"capabilities": {"connection.blocked": True}})

PRODUCER_ID = "x-producer-id"
KEPT_BACK = f"a message with {PRODUCER_ID} stays: the other queue might take it for a repeated one"


class Refused(Exception):
    """The front door closed the channel or the connection; `opened`: after it had been open.

    `text` is "NAME - why".
    """

    def __init__(self, code: int, text: str, opened: bool = True) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text
        self.opened = opened


class Rejected(Exception):
    """A queue is full, or its shard was lost: the message may be in some of its queues."""


class Unavailable(Exception):
    """No front door answers in time."""


class NotMoved(Exception):
    """Some messages were not moved and are where they were; `moved` counts those before them."""

    def __init__(self, why: str, moved: int) -> None:
        super().__init__(why, moved)
        self.why = why
        self.moved = moved


class FetchedMessage(NamedTuple):
    """A message from a queue in which `remaining` more messages were ready."""

    exchange: str
    routing_key: str
    redelivered: bool
    remaining: int
    properties: Properties
    body: bytes


def socket_path(runtime_dir: str, door: int) -> str:
    """Return where front door `door` listens for the controller; it binds the same path."""
    return f"{runtime_dir}/door-{door}.sock"


@asynccontextmanager
async def opened(path: str, user: str, vhost: str) -> AsyncIterator[Session]:
    """Open a connection and a channel. Raise Refused or Unavailable."""
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=READ_BYTES)
    except OSError as error:
        raise Unavailable(f"front door: {error}") from None
    session = Session(reader, writer, Client(vhost, "EXTERNAL", user, properties=CAPABILITIES))
    try:
        async with asyncio.timeout(HANDSHAKE_S_MAX):
            await session.expect(amqp_client.Opened())
        async with asyncio.timeout(ANSWER_S_MAX):
            yield session
            await session.close()
    except TimeoutError:
        if blocked := session.blocked:
            raise Unavailable(
                f"publishers are blocked: {blocked}; what was published may be stored"
            ) from None
        raise Unavailable("front door: no answer in time") from None
    except (OSError, EOFError):
        raise Unavailable("front door: the connection was lost") from None
    finally:
        writer.transport.abort()


class Session:
    """An open channel."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: Client,
    ) -> None:
        self._reader, self._writer, self._client = reader, writer, client
        self._events: deque[Event] = deque()  # received and not yet looked at

    @property
    def blocked(self) -> str:
        """The alarm for which the front door reads nothing of the session, or ""."""
        return self._client.blocked

    async def close(self) -> None:
        """Return when all that was said before is done.

        A front door that blocks the session would answer after the alarm, so that nothing is waited
        for then. Each publish has been answered by its confirm.
        """
        self._client.close()
        while not self.blocked:
            if not self._events:
                await self._read()
            elif await self._next() == amqp_client.Received(amqp_client.CHANNEL_CLOSE_OK):
                return

    async def publish(self, exchange: str, key: str, given: dict[str, Any], body: bytes) -> bool:
        """Publish a message and return whether it is in at least one queue.

        It is on stable storage then, if that was asked for. Raise Rejected.
        """
        await self._select()
        self._client.publish(exchange, key, encode_properties(given), body, True)
        routed = True
        while True:
            match await self._next():
                case Message():  # it was returned
                    routed = False
                case Confirmed(_, _, stored):
                    if not stored:
                        raise Rejected
                    return routed

    async def get(
        self, queue: str, count: int, requeue: bool, reject: bool
    ) -> list[FetchedMessage]:
        """Return up to `count` messages.

        They are then requeued, rejected, or (neither) acknowledged, all at once.
        """
        messages: list[FetchedMessage] = []
        size = tag = 0
        while len(messages) < count and size < GOT_BYTES_MAX:
            message = await self._get(queue)
            if message is None:
                break
            size, tag = size + len(message.body), message.tag
            read = properties.read(message.properties)
            messages.append(_got(message, message.remaining, read))
        if messages and (requeue or reject):
            self._client.nack(tag, True, requeue)
        elif messages:
            self._client.ack(tag, True)
        return messages

    async def read(
        self,
        queue: str,
        count: int,
        offset: int | str,
        begin: int,
        end: int,
    ) -> list[FetchedMessage]:
        """Return up to `count` (1 to 65,535) messages of a stream.

        `offset` is that of the first one, in any form of consume's `x-stream-offset`. The stream is
        known to reach from `begin` to `end`. What it has past that comes too, unless it keeps us
        waiting.
        """
        self._client.qos(count)
        await self.expect(amqp_client.Received(amqp_client.QOS_OK))
        self._client.consume(queue, "read", False, encode_table({STREAM_OFFSET: offset}))
        await self.expect(amqp_client.Received(amqp_client.CONSUME_OK))
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            self._client.cancel("read")
            self._flush()

        def wait_s(at: int) -> float:
            return STREAM_LATE_S if at < end else STREAM_IDLE_S

        messages: list[FetchedMessage] = []
        if isinstance(offset, int):
            first = max(begin, offset)
        else:
            first = begin if offset in ("first", "last") else end
        size, timer = 0, loop.call_later(wait_s(first), cancel)
        try:
            while len(messages) < count and size < GOT_BYTES_MAX:
                message = await self._next()
                if not isinstance(message, Message):
                    break  # cancelled, by us or as the stream is gone
                read = properties.read(message.properties)
                at = int((read.headers or {}).get(STREAM_OFFSET, 0))
                size += len(message.body)
                messages.append(_got(message, max(0, end - 1 - at), read))
                timer.cancel()
                timer = loop.call_later(wait_s(at + 1), cancel)
        finally:
            timer.cancel()
        return messages

    async def move(
        self,
        queue: str,
        to: str,
        count: int,
        now: Callable[[], float],
    ) -> tuple[int, int]:
        """Return how many messages moved to queue `to`, and how many are still ready in `queue`.

        Each is taken away when the other queue has confirmed it: whatever ends in between, a
        message may be in both, never in none. Raise NotMoved. `now`: seconds of any clock.
        """
        await self._select()
        end, moved, left = now() + MOVE_S_MAX, 0, 0
        while moved < count and now() < end:
            batch, odd = await self._take(queue, min(count - moved, MOVE_AT_ONCE_MAX))
            for message in batch:
                self._client.publish("", to, message.properties, message.body, True)
                self._flush()
            refused, why = await self._confirms(moved + 1, len(batch))
            for place, message in enumerate(batch, moved + 1):
                if place not in refused:
                    self._client.ack(message.tag)
            moved += len(batch) - len(refused)
            if refused or odd:
                self._client.recover()
                await self.expect(amqp_client.Received(amqp_client.RECOVER_OK))
                raise NotMoved(why or odd, moved)
            left = batch[-1].remaining if batch else 0
            if not left:
                break
        return moved, left

    async def _take(self, queue: str, count: int) -> tuple[list[Message], str]:
        """Return some messages, and why the one behind them must stay, or ""."""
        taken: list[Message] = []
        size = 0
        while len(taken) < count and size < MOVE_BYTES_MAX:
            message = await self._get(queue)
            if message is None:
                break
            if PRODUCER_ID in (properties.read(message.properties).headers or {}):
                return taken, KEPT_BACK
            size += len(message.body)
            taken.append(message)
        return taken, ""

    async def _confirms(self, first: int, count: int) -> tuple[set[int], str]:
        """Wait for the confirms of publishes; return which of them are in no queue, and why."""
        waiting, refused, why = set(range(first, first + count)), set[int](), ""
        while waiting:
            match await self._next():
                case Message():
                    # It does not say which: what was routed before went away with the queue.
                    refused = set(range(first, first + count))
                    why = "the other queue is not there any more"
                case Confirmed(tag, multiple, stored):
                    answered = {one for one in waiting if one <= tag} if multiple else {tag}
                    waiting -= answered
                    if not stored:
                        refused, why = refused | answered, why or "the other queue takes no more"
        return refused, why

    async def _select(self) -> None:
        self._client.select()
        await self.expect(amqp_client.Received(amqp_client.SELECT_OK))

    async def _get(self, queue: str) -> Message | None:
        self._client.get(queue)
        answer = await self._next()
        return answer if isinstance(answer, Message) else None

    # -- events --------------------------------------------------------------------------------

    async def expect(self, answer: Event) -> None:
        """Wait for an event; those that come before it are dropped."""
        while await self._next() != answer:
            pass

    async def _next(self) -> Event:
        """Return the next event; while there is none, send what is queued and read."""
        while not self._events:
            await self._read()
        match event := self._events.popleft():
            case Closed(code, text, opened):
                raise Refused(code, text, opened)
            case Broken(why):
                raise Unavailable(f"front door: {why}")
        return event

    async def _read(self) -> None:
        """Send what is queued, and take in what the front door says next."""
        self._flush()
        await self._writer.drain()
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise EOFError
        self._events.extend(self._client.receive_data(data))

    def _flush(self) -> None:
        self._writer.write(self._client.data_to_send())


def _got(message: Message, remaining: int, read: Properties) -> FetchedMessage:
    names = (message.exchange, message.routing_key, message.redelivered)
    return FetchedMessage(*names, remaining, read, message.body)
