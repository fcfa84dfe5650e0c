"""An AMQP 0-9-1 connection with one channel to any broker, for asyncio.

`connect` opens the connection and its channel. `call` sends a method and returns its answer, so
what a bridge needs (queues, a consumer, confirms) is made with it step by step. Then `batches` is
set: from then on this function takes what was read, in batches, and the loop of Python sees only
the frames that it leaves.

While messages are published, the channel may be within one at any time, and no method may come
there. Who wants to call one all the same opens the channel `COMMANDS` and calls it there.

Whatever ends the connection makes it `failed`, once, with the reason: the peer closed it, said
nothing for two heartbeats, sent what is not AMQP, or sent a frame that is larger than agreed.
Nothing here grows without a bound. What was read and is no whole frame yet is less than a frame.
What is written waits in the transport, and who writes looks at `is_full` and stops reading at the
other side.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from pamqp import base, commands

from shardmq.bridges.errors import ChannelClosed, ConnectionClosed, LinkFailed, PeerSilent
from shardmq.bridges.relay import Fault
from shardmq.bridges.tls import context_of
from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.amqp.methods import decode_method, encode_method, encode_table, unchecked
from shardmq.broker.amqp.spec import (
    BODY_FRAME,
    FRAME_BYTES_MIN,
    FRAME_END,
    FRAME_OVERHEAD_BYTES,
    HEADER_FRAME,
    HEARTBEAT_FRAME,
    METHOD_FRAME,
    PROTOCOL_HEADER,
)
from shardmq.broker.model.amqp_uri import AmqpUri
from shardmq.broker.model.permissions import DIRECT, INTERNAL_USER

CHANNEL: Final = 1
COMMANDS: Final = 2  # the channel for methods while `CHANNEL` may be within a message
FRAME_BYTES_MAX: Final = 128 << 10
# The peer says nothing for so long: ANSWER_S_MAX for the answer to a method, the timeout of the URI
# for the handshake.
ANSWER_S_MAX: Final = 30.0
# Bytes that wait to be written; above it the other side is not read.
WRITE_BYTES_MAX: Final = 1 << 20
READ_BYTES: Final = 256 << 10
# One for all connections of the process: a transport asks for it, reads and says how much it has
# read in one go. `buffer_updated` takes what it can where that lies, and copies the rest.
_BUFFER: Final = memoryview(bytearray(READ_BYTES))
TEXT_CHARS_MAX: Final = 400  # of a reason that a peer gave

PROPERTIES: Final[dict[str, Any]] = {
    "product": "shardmq",
    "platform": "Python",
    "capabilities": {
        "publisher_confirms": True,
        "basic.nack": True,
        "consumer_cancel_notify": True,
        "connection.blocked": True,
        "authentication_failure_close": True,
    },
}
_HEAD: Final = struct.Struct(">BHI")
# A frame with basic.ack: type, channel, size, class, method, delivery tag, multiple, end.
_ACK: Final = struct.Struct(">BHIHHQBB")
_ACK_BYTES: Final = 13
_HEARTBEAT: Final = _HEAD.pack(HEARTBEAT_FRAME, 0, 0) + bytes([FRAME_END])

log = logging.getLogger("bridges")

T = TypeVar("T", bound=base.Frame)
# Takes the bytes from a position on, and returns the position behind what it has taken. The bytes
# stay only until it returns.
Batches = Callable[[bytes | memoryview, int], int]


class Connection(asyncio.BufferedProtocol):
    """A connection and its channel. `failed` is called once, unless `close` came first."""

    def __init__(self, uri: AmqpUri, name: str) -> None:
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.is_own = False  # the peer is a broker like this one
        self.capabilities: frozenset[str] = frozenset()  # of the peer
        self.cluster_name: str | None = None  # of the peer, if it tells one
        self.listed_as = ""  # the name of the connection in listings of the peer, if it tells one
        self.blocked = ""  # the reason for which the peer takes no publishes
        self.batches: Batches | None = None
        self.keeps_deliveries = False  # `batches` takes those that come before it is asked
        self.on_method: Callable[[base.Frame], None] = lambda method: None
        self.on_failed: Callable[[LinkFailed], None] = lambda error: None
        self.on_room: Callable[[bool], None] = lambda is_full: None
        self.is_full = False
        self.failure: LinkFailed | None = None
        self.uri, self._name = uri, name
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._expected: tuple[type[base.Frame], asyncio.Future[base.Frame]] | None = None
        self._heard_at = self._sent_at = self._unblocked_at = self._loop.time()
        self._heartbeat_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_ending = False  # the peer was told so
        self._is_closed = False

    # -- what a bridge does ------------------------------------------------------------------------

    async def handshake(self, frame_bytes_max: int) -> None:
        """Log in and open the channel."""
        start = await self._wait_for(commands.Connection.Start, PROTOCOL_HEADER)
        told = start.server_properties or {}
        self.is_own = "shardmq_version" in told
        name = told.get("cluster_name")
        self.cluster_name = name if isinstance(name, str) else None
        can = told.get("capabilities")
        self.capabilities = frozenset(
            name for name, does in (can.items() if isinstance(can, dict) else ()) if does is True
        )
        mechanism, response = self._login(str(start.mechanisms or ""))
        tune = await self._wait_for(
            commands.Connection.Tune,
            _frame(
                0,
                commands.Connection.StartOk(
                    client_properties={**PROPERTIES, "connection_name": self._name},
                    mechanism=mechanism,
                    response=response,
                ),
            ),
        )
        most = min(tune.frame_max or frame_bytes_max, frame_bytes_max)
        if most < FRAME_BYTES_MIN:
            raise LinkFailed(f"the peer wants frames of {most} bytes at most")
        offered = [each for each in (tune.heartbeat, self.uri.heartbeat_s) if each]
        heartbeat = min(offered, default=0) if self.uri.heartbeat_s else 0
        channels = min(tune.channel_max or 65_535, self.uri.channel_max or 65_535)
        self._write(
            _frame(0, commands.Connection.TuneOk(max(1, channels), most, heartbeat)),
        )
        self.frame_bytes_max = most
        opening = _frame(0, unchecked(commands.Connection.Open, virtual_host=self.uri.vhost))
        opened = await self._wait_for(commands.Connection.OpenOk, opening)
        self.listed_as = opened.known_hosts or "" if self.uri.is_here else ""
        await self.open_channel()
        self._heartbeat_s = float(heartbeat)
        if heartbeat:
            self._beat()

    async def open_channel(self, channel: int = CHANNEL) -> None:
        await self._wait_for(commands.Channel.OpenOk, _frame(channel, commands.Channel.Open()))

    async def call(self, method: base.Frame, answer: type[T], channel: int = CHANNEL) -> T:
        """Send a method and return its answer. Raises ChannelClosed and LinkFailed."""
        return await self._wait_for(answer, _frame(channel, method))

    async def call_or_reopen(self, method: base.Frame, answer: type[T]) -> T | None:
        """Do the same as `call`, but return None for 404, with the channel open again."""
        try:
            return await self.call(method, answer)
        except ChannelClosed as closed:
            if closed.code != 404:
                raise
        self._write(_frame(CHANNEL, commands.Channel.CloseOk()))
        await self.open_channel()
        return None

    def send(self, method: base.Frame) -> None:
        self._write(_frame(CHANNEL, method))

    def ack_up_to(self, tag: int) -> None:
        """Acknowledge all deliveries up to this one."""
        self._write(_ACK.pack(METHOD_FRAME, CHANNEL, _ACK_BYTES, 60, 80, tag, True, FRAME_END))

    def write(self, data: bytes) -> None:
        """Write frames of the channel."""
        self._write(data)

    def pause(self, is_paused: bool) -> None:
        """Stop reading from the peer, or go on."""
        if self._transport is not None and not self._transport.is_closing():
            if is_paused:
                self._transport.pause_reading()
            else:
                self._heard_at = self._loop.time()
                self._transport.resume_reading()

    def read_again(self) -> None:
        """Look again at bytes that `batches` has left, which it may take now."""
        data, self._unread = self._unread, b""
        self._take(data)

    def fail(self, why: str) -> None:
        """End the connection, for a reason that the bridge has found."""
        self._fail(LinkFailed(why))

    async def finish(self, within_s: float) -> bool:
        """End the connection in order; return whether the peer has read all that was written.

        What still comes from the peer is dropped.
        """
        if self._is_closed:
            return False
        self.batches = None
        self.on_method, self.on_failed = lambda method: None, lambda error: None
        self._is_ending = True
        self.pause(False)
        try:
            async with asyncio.timeout(within_s):
                await self._wait_for(commands.Connection.CloseOk, _GOODBYE)
        except (TimeoutError, LinkFailed):
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """End the connection in order, without waiting for the answer."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None and not self._transport.is_closing():
            if not self._is_ending:
                self._transport.write(_GOODBYE)
            self._transport.close()
            # What waits to be written to a peer that does not read must not wait forever.
            self._loop.call_later(1.0, self._transport.abort)
        self._settle_expected(LinkFailed("the connection is closed"))

    # -- the transport -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_BYTES_MAX)

    def connection_lost(self, error: Exception | None) -> None:
        # EOF and a reset come from the peer's side. Other errors say that it cannot be reached.
        knows = error is None or isinstance(error, ConnectionError)
        kind = LinkFailed if knows else PeerSilent
        self._fail(kind(f"the connection was lost{f': {error}' if error else ''}"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, count: int) -> None:
        self._heard_at = self._loop.time()
        data: bytes | memoryview = _BUFFER[:count]
        if self._unread:
            data, self._unread = self._unread + data, b""
        self._take(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_full = True
        self.on_room(True)

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_room(False)

    # -- frames ------------------------------------------------------------------------------------

    def _take(self, read: bytes | memoryview) -> None:
        at = 0
        try:
            if isinstance(read, bytes):
                data = read
            else:
                first = 0 if self.batches is None else self.batches(read, 0)
                data = read[first:].tobytes()
            while not self._is_closed:
                if self.batches is not None:
                    at = self.batches(data, at)
                found = self._next_frame(data, at)
                if found is None:
                    break
                kind, channel, payload, at = found
                self._receive(kind, channel, payload)
        except Fault as fault:
            self._fail(LinkFailed(f"the peer breaks the protocol: {fault}"))
        except LinkFailed as failed:
            self._fail(failed)
        except ConnectionException as error:
            self._fail(LinkFailed(f"the peer breaks the protocol: {error.text}"))
        except Exception as error:
            log.exception("what %s has sent cannot be passed on", self._name)
            self._fail(LinkFailed(f"internal error: {type(error).__name__}: {error}"[:1000]))
        else:
            self._unread = data[at:] if at else data

    def _next_frame(self, data: bytes, at: int) -> tuple[int, int, bytes, int] | None:
        if len(data) - at < FRAME_OVERHEAD_BYTES:
            return None
        kind, channel, size = _HEAD.unpack_from(data, at)
        if data.startswith(b"AMQP", at):
            raise LinkFailed("the peer speaks another version of AMQP")
        if kind not in (METHOD_FRAME, HEADER_FRAME, BODY_FRAME, HEARTBEAT_FRAME):
            raise LinkFailed("the peer does not speak AMQP 0-9-1")
        if size > self.frame_bytes_max - FRAME_OVERHEAD_BYTES:
            text = f"a frame of {size} bytes, {self.frame_bytes_max} were agreed on"
            raise LinkFailed(f"the peer breaks the protocol: {text}")
        end = at + _HEAD.size + size
        if end >= len(data):
            return None
        if data[end] != FRAME_END:
            raise LinkFailed("the peer breaks the protocol: a frame has no end")
        if self.batches is not None and self._is_left(kind, data, at):
            return None
        return kind, channel, data[at + _HEAD.size : end], end + 1

    def _is_left(self, kind: int, data: bytes, at: int) -> bool:
        """Return whether a frame waits for `batches`, or is of a message that it does not take."""
        is_delivery = kind == METHOD_FRAME and data.startswith(_DELIVER, at + _HEAD.size)
        return (is_delivery or kind == HEADER_FRAME) and self.keeps_deliveries

    def _receive(self, kind: int, channel: int, payload: bytes) -> None:
        if kind == HEARTBEAT_FRAME or (self._is_ending and channel):
            return
        if kind != METHOD_FRAME:
            raise LinkFailed("the peer breaks the protocol: content without a method")
        method = decode_method(payload)
        match method:
            case commands.Connection.Close():
                self._write(_frame(0, commands.Connection.CloseOk()))
                said = _said(method.reply_code, method.reply_text)
                raise ConnectionClosed(int(method.reply_code or 0), said)
            case commands.Connection.Blocked():
                self.blocked = str(method.reason or "?")[:TEXT_CHARS_MAX]
                return
            case commands.Connection.Unblocked():
                self.blocked, self._unblocked_at = "", self._loop.time()
                return
            case commands.Channel.Close():
                closed = ChannelClosed(
                    int(method.reply_code or 0), _said(method.reply_code, method.reply_text)
                )
                if not self._settle_expected(closed):
                    raise closed
                return
        if self._expected is not None and isinstance(method, self._expected[0]):
            expected, self._expected = self._expected, None
            if not expected[1].done():  # or who asked waits no more
                expected[1].set_result(method)
        else:
            self.on_method(method)

    async def _wait_for(self, answer: type[T], request: bytes) -> T:
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[base.Frame] = self._loop.create_future()
        self._expected = answer, future
        self._write(request)
        since = self._loop.time()
        try:
            while not future.done():
                now = self._loop.time()
                # A peer that takes no publishes may read nothing at all.
                since = now if self.blocked else max(since, self._unblocked_at)
                if now - since >= ANSWER_S_MAX:
                    raise LinkFailed(f"the peer does not answer within {ANSWER_S_MAX:g} s")
                await asyncio.wait((future,), timeout=since + ANSWER_S_MAX - now)
            return cast(T, future.result())
        finally:
            future.cancel()

    def _settle_expected(self, error: LinkFailed) -> bool:
        if self._expected is None:
            return False
        expected, self._expected = self._expected, None
        if not expected[1].done():
            expected[1].set_exception(error)
            return True
        return False

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing() and data:
            self._sent_at = self._loop.time()
            self._transport.write(data)

    def _fail(self, error: LinkFailed) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.failure = error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if not self._settle_expected(error):
            self.on_failed(error)

    def _login(self, mechanisms: str) -> tuple[str, str]:
        uri = self.uri
        if uri.is_here:  # it asks no password at the socket that only its own user can reach
            return DIRECT, uri.user or INTERNAL_USER
        mechanism = uri.mechanism.upper()
        if mechanism not in mechanisms.split():
            raise LinkFailed(f"the peer knows {mechanisms[:TEXT_CHARS_MAX]}, not {mechanism}")
        if mechanism == "PLAIN":
            return mechanism, f"\0{uri.user}\0{uri.password}"
        if mechanism == "AMQPLAIN":
            table = encode_table({"LOGIN": uri.user, "PASSWORD": uri.password})[4:]
            return mechanism, cast(str, table)  # bytes are written as they are
        return mechanism, ""

    def _beat(self) -> None:
        """Send a heartbeat if nothing was sent, and end the connection if the peer is silent."""
        now = self._loop.time()
        transport = self._transport
        is_reading = transport is None or transport.is_closing() or transport.is_reading()
        if is_reading and now - self._heard_at > 2 * self._heartbeat_s:
            self._fail(PeerSilent(f"the peer is silent for {2 * self._heartbeat_s:g} s"))
            return
        if now - self._sent_at >= self._heartbeat_s / 2:
            self._write(_HEARTBEAT)
        self._timer = self._loop.call_later(self._heartbeat_s / 2, self._beat)


async def connect(
    uri: AmqpUri, name: str, *, path: str, frame_bytes_max: int = FRAME_BYTES_MAX
) -> Connection:
    """Open a connection and its channel.

    Args:
        uri: The broker. Without a host it is this one, at the socket `path`. It is then entered as
            the user that the URI names, or as the broker itself, which may do everything.
        name: The name of the connection in listings of the broker.
        path: The socket of a front door of this host.
        frame_bytes_max: The largest frame to agree on.

    Raises:
        LinkFailed: With the reason.
    """
    loop = asyncio.get_running_loop()
    connection = Connection(uri, name)
    try:
        async with asyncio.timeout(uri.timeout_ms / 1000 if uri.timeout_ms else None):
            if uri.is_here:
                await loop.create_unix_connection(lambda: connection, path)
            else:
                await loop.create_connection(
                    lambda: connection,
                    uri.host,
                    uri.port,
                    ssl=context_of(uri) if uri.tls else None,
                    server_hostname=(uri.server_name or uri.host) if uri.tls else None,
                )
            await connection.handshake(frame_bytes_max)
    except TimeoutError:
        connection.close()
        raise LinkFailed(f"no connection within {uri.timeout_ms / 1000:g} s") from None
    except OSError as error:
        connection.close()
        raise LinkFailed(f"cannot connect: {error.strerror or error}") from None
    except BaseException:
        connection.close()
        raise
    return connection


_DELIVER: Final = struct.pack(">HH", 60, 60)


def _frame(channel: int, method: base.Frame) -> bytes:
    payload = encode_method(method)
    return _HEAD.pack(METHOD_FRAME, channel, len(payload)) + payload + bytes([FRAME_END])


_GOODBYE: Final = _frame(0, commands.Connection.Close(200, "Goodbye", 0, 0))


def _said(code: Any, text: Any) -> str:
    return f"{code} {text}"[:TEXT_CHARS_MAX]
