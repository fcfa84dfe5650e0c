"""The front door's copy of what exists, and its one line to the controller.

Snapshot first, then changes in order; each is in force here (caches emptied by the callbacks) before Applied says so.
The copy stays in use while the controller is away: messages flow, requests wait. A request that was on its way when the
line broke is asked again: declares, deletes and binds mean the same said twice, and a delete of what is gone is no
error.

Every request gets an Answer, never an exception: code 0, or a reply code with its text. Answers to the requests of one
connection come in the order of asking.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, is_only_more
from shardmq.broker.shared.control import (
    CONTROL_BYTES_MAX,
    Alarmed,
    Answer,
    AnyControl,
    AnyRequest,
    Applied,
    Ask,
    CancelConsumer,
    Changes,
    CloseConnection,
    ConnectionDown,
    ConnectionInfo,
    ConnectionUp,
    ConsumerHere,
    ConsumersHere,
    ControlMessage,
    DoorHello,
    DoorReport,
    Fence,
    Outlived,
    Query,
    SeatOrder,
    SeatOrders,
    Snapshot,
    SnapshotPart,
    things_asked,
)

log = logging.getLogger(__name__)

# Requests on their way at once. Who asks for the first thing waits behind so many of the others, some 0.1 ms each.
SENT_MAX = 1024
WAITING_MAX = 262_144  # requests behind them, and while the controller is away
MESSAGES_MAX = 100  # of the controller, taken in between two looks at the sockets: a read holds thousands of small ones
# A read of no more is handled in the turn of the loop that has it.
FEW_BYTES = 16 << 10
# Of changes nobody waits for: how long it may take until the controller knows that they are in force here.
APPLIED_WAITS_S = 0.005
SLICE = 500  # changes applied between two looks at the sockets: a listing of 100,000 queues delays no message
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = (
    0.2  # a look at a socket on the same host; a controller that is back is missed by all doors
)
REMOVED_S_MAX = 2.0  # how long the end of a consumer, channel or connection waits for the queues that go with it
HEAD_BYTES = 4

# Who is asked something that ends it would end again and again: whatever it is, it is asked so often and not more.
DEATHS_MAX = 4

RESOURCE_ERROR = 506
INTERNAL_ERROR = 541


class Listener(Protocol):
    """What the front door does when something is said to it. None of these may wait."""

    def receiving(self) -> None:
        """Some messages are about to be handled; what answers to clients come of them may leave together."""

    def received(self) -> None:
        """They are handled."""

    def catalog_changed(self, changes: list[AnyChange] | None) -> None:
        """In force now: forget what was routed by the old catalog. None: a snapshot replaced everything."""

    def close_connection(self, owner: str, code: int, text: str) -> None: ...

    def cancel_consumer(self, owner: str, channel: int, tag: str) -> None: ...

    def totals(self) -> dict[str, float]: ...

    def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        """Deliveries of its consumers that wait for their ack, as DoorReport wants them."""

    def alarmed(self, reason: str) -> None:
        """Of the whole broker; "": over."""

    def outlived(self) -> None:
        """The controller and the shards take this process for gone, and go on without it."""

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
        """Connections, channels and counters, as DoorReport wants them."""

    def published(self) -> list[tuple[str, str, int, int]]:
        """Return what came to exchanges, as DoorReport wants it."""

    def consumers_here(self) -> list[ConsumerHere]:
        """All consumers of virtual queues that the controller let in."""

    def seat_orders(self, orders: list[SeatOrder]) -> None: ...

    def fence(self, number: int) -> None:
        """To be answered by Fenced, some time later."""


class Reply:
    """The answer to a request, when it is there. Has of a Future what a callback needs, and calls it in the turn of the
    loop that has the answer."""

    __slots__ = ("_answer", "_cancelled", "_then")

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._cancelled = False
        self._then: Callable[[Reply], None] | None = None

    def done(self) -> bool:
        return self._answer is not None or self._cancelled

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._cancelled, self._then = True, None

    def set_result(self, answer: Answer) -> None:
        self._answer = answer
        if self._then is not None:
            self._then(self)

    def result(self) -> Answer:
        assert self._answer is not None
        return self._answer

    def add_done_callback(self, then: Callable[[Reply], None]) -> None:
        """Only one; never called from here."""
        if self.done():
            asyncio.get_running_loop().call_soon(then, self)
        else:
            self._then = then


class _Asked(NamedTuple):
    ask: Ask
    answer: asyncio.Future[Answer] | Reply
    deaths: int = 0  # controllers that went while they were asked this


class _Stream(asyncio.Protocol):
    """The bytes of the controller. `take`: handles what is unread, called where few came; more is for who waits for
    `heard`, who is the only one to handle anything until it calls `go_on`."""

    def __init__(self, take: Callable[[_Stream], None]) -> None:
        self._take = take
        self.unread = bytearray()
        self._error: Exception | None = None
        self._much = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(
            asyncio.Transport, transport
        )  # uvloop's have its methods, not its class

    def data_received(self, data: bytes) -> None:
        self.unread += data
        if self._much.is_set() or len(self.unread) > FEW_BYTES:
            self.transport.pause_reading()
            self._much.set()
            return
        try:
            self._take(self)
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError("end of stream"))

    def _end(self, error: Exception) -> None:
        self._error = self._error or error
        self._much.set()

    async def heard(self) -> None:
        """Until there is much to be handled. Raises what ended the stream."""
        await self._much.wait()
        if self._error is not None:
            raise self._error

    def go_on(self) -> None:
        """It is handled."""
        if self._error is None:
            self._much.clear()
            self.transport.resume_reading()


class CatalogLink:
    """`catalog` is replaced by a snapshot: look it up here each time, do not keep it."""

    def __init__(
        self, path: str, *, door: int, incarnation: int, pid: int, listener: Listener
    ) -> None:
        self.catalog = Catalog()
        self._coming = Catalog()
        self.up = False  # the controller is there and the catalog is in step
        self._path = path
        self._door, self._incarnation, self._pid = door, incarnation, pid
        self._listener = listener
        self._boot = ""
        self._version = 0
        self._synced = asyncio.Event()
        self._leaving: dict[
            asyncio.Future[None], set[int]
        ] = {}  # ids of queues somebody waits for to go
        self._connections: dict[str, ConnectionInfo] = {}
        self._next_id = 1
        self._sent: dict[int, _Asked] = {}  # in the order of asking
        self._sent_things = self._waiting_things = 0
        self._waiting: dict[
            str, deque[_Asked]
        ] = {}  # by connection, the next one that is served first
        self._stream: _Stream | None = None
        self._told: set[str] = set()  # connections the last hello named
        self._out: list[bytes] = []
        self._flush_planned = False
        self._applied_unsaid = self._applied_planned = False
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_rest)
        self._decoder = msgspec.msgpack.Decoder(AnyControl)

    # -- for the front door ------------------------------------------------------------------------------

    def ask(self, request: AnyRequest, owner: str, user: str) -> asyncio.Future[Answer]:
        """Ask the controller; for one connection the order of asking is the order of doing.

        Connections take turns when more is asked than may be on its way at once. Cancelling the future
        takes back what has not been sent; what was sent is done, its answer is lost.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._ask(request, owner, user, answer)
        return answer

    def request(self, request: AnyRequest, owner: str, user: str) -> Reply:
        """The same for who does not wait, but is called."""
        answer = Reply()
        self._ask(request, owner, user, answer)
        return answer

    def _ask(
        self, request: AnyRequest, owner: str, user: str, answer: asyncio.Future[Answer] | Reply
    ) -> None:
        asked = _Asked(Ask(self._next_id, request, owner, user), answer)
        self._next_id += 1
        if self.up and not self._waiting and self._sent_things < SENT_MAX:
            self._send_asked(asked)
        elif self._waiting_things < WAITING_MAX:
            self._waiting.setdefault(owner, deque()).append(asked)
            self._waiting_things += things_asked(request)
        else:
            answer.set_result(
                Answer(asked.ask.id, RESOURCE_ERROR, "too many requests wait for the controller")
            )

    def connection_up(self, info: ConnectionInfo) -> None:
        self._connections[info.owner] = info
        if self.up:
            self._send(ConnectionUp(info))

    def connection_down(self, owner: str) -> None:
        """Its exclusive queues go. The caller has cancelled what it still asked: nothing may be declared after this."""
        if self._connections.pop(owner, None) is not None and self.up:
            self._send(ConnectionDown(owner))

    def say(self, message: ControlMessage) -> None:
        """Of the consumers of virtual queues. What is said while the controller is away is in ConsumersHere then."""
        if self.up:
            self._send(message)

    async def removed(self, queue_ids: Iterable[int]) -> None:
        """Returns when the copy has none of these queues any more, or after REMOVED_S_MAX; while the controller is away
        at once: a declare waits for it too, behind what it then hears of them."""
        left = {
            queue_id for queue_id in queue_ids if self.catalog.queue_by_id(queue_id) is not None
        }
        if not left or not self.up:
            return
        gone = asyncio.get_running_loop().create_future()
        self._leaving[gone] = left
        try:
            await asyncio.wait((gone,), timeout=REMOVED_S_MAX)
        finally:
            del self._leaving[gone]

    async def synced(self) -> None:
        """Wait for the first snapshot: before it this door knows of no vhost."""
        await self._synced.wait()

    async def run(self) -> None:
        """Connect, stay connected, connect again; until cancelled."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                _, stream = await asyncio.get_running_loop().create_unix_connection(
                    self._new_stream, self._path
                )
            except OSError:
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            else:
                if await self._outlive(stream):
                    backoff_s = BACKOFF_FIRST_S
                else:  # it took the hello and never answered: it is not well
                    backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            await asyncio.sleep(backoff_s)

    def _new_stream(self) -> _Stream:
        return _Stream(self._take_few)

    async def _outlive(self, stream: _Stream) -> bool:
        """Serve one stream to its end; was it ever of use?"""
        try:
            await self._serve(stream)
        except OSError as error:
            log.warning(
                "the controller is gone (%s); serving from the copy of version %d",
                error,
                self._version,
            )
        except msgspec.DecodeError:
            log.exception("what the controller says cannot be read; connecting again")
        finally:
            useful = self.up
            self.up = False
            self._stream = None
            self._out.clear()
            stream.transport.close()
        return useful

    # -- one stream's life ---------------------------------------------------------------------------------

    async def _serve(self, stream: _Stream) -> None:
        self._stream = stream
        self._coming = Catalog()
        hello = DoorHello(
            self._door,
            self._incarnation,
            self._pid,
            self._boot,
            self._version,
            list(self._connections.values()),
        )
        # Who is connected while the hello is answered is told in _in_step: the hello is a picture of now.
        self._told = set(self._connections)
        self._send(hello)
        while True:
            await stream.heard()
            for at, message in enumerate(self._split(stream.unread), 1):
                if at % MESSAGES_MAX == 0:
                    await asyncio.sleep(0)
                for _ in self._handle(message):
                    await asyncio.sleep(0)
            stream.go_on()

    def _take_few(self, stream: _Stream) -> None:
        """All that came, answered in one write."""
        if stream is not self._stream:
            return  # its end is known already: what it asked is asked again
        self._flush_planned = True
        self._listener.receiving()
        try:
            for message in self._split(stream.unread):
                if type(message) is Answer:
                    self._answered(message)
                    continue
                for _ in self._handle(message):
                    pass
        finally:
            self._flush()
            self._listener.received()

    def _handle(self, message: AnyControl) -> Iterator[None]:
        """Comes back from what takes long where others may have their turn."""
        match message:
            case Answer():
                self._answered(message)
            case Changes():
                yield from self._apply(message)
                self._in_step()
            case SnapshotPart():
                yield from self._take_in(message.changes)
            case Snapshot():
                yield from self._replace(message)
                self._in_step()
            case Query() if message.unacked_of:
                self._send(
                    DoorReport(
                        message.query, [], [], {}, self._listener.unacked(message.unacked_of)
                    )
                )
            case Query() if message.totals_only:
                self._send(DoorReport(message.query, [], [], self._listener.totals()))
            case Query():
                self._send(
                    DoorReport(
                        message.query,
                        *self._listener.report(),
                        exchanges=self._listener.published(),
                    )
                )
            case Fence():
                self._listener.fence(message.number)
            case SeatOrders():
                self._listener.seat_orders(message.orders)
            case CloseConnection():
                self._listener.close_connection(message.owner, message.code, message.text)
            case CancelConsumer():
                self._listener.cancel_consumer(message.owner, message.channel, message.consumer_tag)
            case Alarmed():
                self._listener.alarmed(message.reason)
            case Outlived():
                self._listener.outlived()
            case _:
                raise msgspec.DecodeError(f"{type(message).__name__} is nothing a controller says")

    def _split(self, buffer: bytearray) -> Iterator[AnyControl]:
        """The complete messages at the buffer's front, which are taken off it at the end."""
        at = 0
        while len(buffer) - at >= HEAD_BYTES:
            length = int.from_bytes(buffer[at : at + HEAD_BYTES], "little")
            if length > CONTROL_BYTES_MAX:
                raise msgspec.DecodeError(
                    f"a message of {length} bytes, at most {CONTROL_BYTES_MAX} agreed"
                )
            end = at + HEAD_BYTES + length
            if end > len(buffer):
                break
            yield self._decoder.decode(bytes(buffer[at + HEAD_BYTES : end]))
            at = end
        del buffer[:at]

    # -- the catalog ---------------------------------------------------------------------------------------

    def _apply(self, message: Changes) -> Iterator[None]:
        for start in range(0, len(message.changes), SLICE):
            part = message.changes[start : start + SLICE]
            self.catalog.apply_all(part)
            # The callbacks come with each slice: what a slice changed must not be routed by an old memory.
            self._has_changed(part)
            if start + SLICE < len(message.changes):
                yield
        self._version = message.version
        if message.waited:
            self._send(Applied(message.version))
        else:
            self._say_applied_later()

    def _say_applied_later(self) -> None:
        """Soon: once for many, since each such word takes both sides as long as a part of what it is about."""
        self._applied_unsaid = True
        if not self._applied_planned:
            self._applied_planned = True
            asyncio.get_running_loop().call_later(APPLIED_WAITS_S, self._say_applied)

    def _say_applied(self) -> None:
        self._applied_planned = False
        if self._applied_unsaid:
            self._send(Applied(self._version))

    def _take_in(self, changes: list[AnyChange]) -> Iterator[None]:
        """Of the catalog that the next snapshot completes."""
        for at, change in enumerate(changes, 1):
            self._coming.apply(change)
            if at % SLICE == 0:
                yield

    def _replace(self, message: Snapshot) -> Iterator[None]:
        yield from self._take_in(message.changes)
        self.catalog, self._coming = self._coming, Catalog()
        self.catalog.version = message.version
        self._boot, self._version = message.boot, message.version
        self._has_changed(None)
        self._send(Applied(message.version))

    def _has_changed(self, changes: list[AnyChange] | None) -> None:
        self._listener.catalog_changed(changes)
        if is_only_more(changes):
            return
        for gone, left in self._leaving.items():
            left.intersection_update(
                [queue_id for queue_id in left if self.catalog.queue_by_id(queue_id) is not None]
            )
            if not left and not gone.done():
                gone.set_result(None)

    def _in_step(self) -> None:
        """The first word after a hello: say who came and went meanwhile, then ask (again) all that is unanswered."""
        if self.up:
            return
        self.up = True
        self._synced.set()
        for owner in self._told - self._connections.keys():
            self._send(ConnectionDown(owner))
        for owner in self._connections.keys() - self._told:
            self._send(ConnectionUp(self._connections[owner]))
        self._send(ConsumersHere(self._listener.consumers_here()))
        self._sent = {
            number: _outlived(asked)
            for number, asked in self._sent.items()
            if not asked.answer.done()
        }
        self._sent_things = sum(things_asked(asked.ask.what) for asked in self._sent.values())
        for asked in list(self._sent.values()):
            if asked.deaths >= DEATHS_MAX:
                self._answered(
                    Answer(
                        asked.ask.id,
                        INTERNAL_ERROR,
                        f"{DEATHS_MAX} controllers went while asked this",
                    )
                )
            else:
                self._send(asked.ask)
        self._send_waiting()

    # -- requests --------------------------------------------------------------------------------------------

    def _answered(self, answer: Answer) -> None:
        asked = self._sent.pop(answer.id, None)
        if asked is None:
            log.warning("the controller answers %d, which nobody asked", answer.id)
        else:
            self._sent_things -= things_asked(asked.ask.what)
            if not asked.answer.done():
                try:
                    asked.answer.set_result(answer)
                except Exception:  # of one connection; the others' answers come the same way
                    log.exception(
                        "who asked %s could not take the answer", type(asked.ask.what).__name__
                    )
        if self._waiting:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what waits, one request of each connection after the other."""
        while self._waiting and self._sent_things < SENT_MAX:
            owner = next(iter(self._waiting))
            its = self._waiting.pop(owner)
            asked = its.popleft()
            if its:
                self._waiting[owner] = its
            self._waiting_things -= things_asked(asked.ask.what)
            if not asked.answer.done():
                self._send_asked(asked)

    def _send_asked(self, asked: _Asked) -> None:
        self._sent[asked.ask.id] = asked
        self._sent_things += things_asked(asked.ask.what)
        self._send(asked.ask)

    # -- bytes out -------------------------------------------------------------------------------------------

    def _send(self, message: ControlMessage) -> None:
        """Leaves with everything else said in this turn of the loop, in one write."""
        if self._stream is None:
            return  # said again, or made needless, by the next hello
        if type(message) is Applied:
            self._applied_unsaid = False
        self._out.append(self._encode(message))
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _encode(self, message: ControlMessage) -> bytes:
        payload = self._encoder.encode(message)
        if len(payload) > CONTROL_BYTES_MAX:
            raise ValueError(f"{type(message).__name__} of {len(payload)} bytes")
        return len(payload).to_bytes(HEAD_BYTES, "little") + payload

    def _flush(self) -> None:
        self._flush_planned = False
        if self._stream is not None and self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._stream.transport.write(
                data
            )  # the reading side learns of an end and connects again


def _outlived(asked: _Asked) -> _Asked:
    return asked._replace(deaths=asked.deaths + 1)


def _encode_rest(value: Any) -> Any:
    """Values of AMQP tables that msgpack has no word for (Decimal has: msgspec writes it as str)."""
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return str(value)
