"""The streams between the controllers of a cluster.

Both ends show the certificate of the cluster (`shardmq.cluster.secret`). Then the end that has
connected sends an *opening*, one line of JSON that says who asks for which service, and the other
end answers with one line: an empty error and the version to be spoken, or why it refuses. All
versions share these two lines. Everything behind them belongs to the service.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec

from shardmq.cluster.versions import STREAMS, Versions, highest_common

OPENING_BYTES_MAX: Final = 4096
PAIR_BUFFER_BYTES: Final = 1 << 20
# How long an end waits for the connection, for the handshake and for the line of the other end.
OPENING_S_MAX: Final = 5.0
# How long an end waits for the other host: when nothing is said, until the first probe, between
# probes, and for how many; and when something is said that the other end does not take.
PROBE_AFTER_S: Final = 5
PROBE_EACH_S: Final = 2
PROBES: Final = 3
# Linux counts also the time in which the other end lives and does not read. The ends of control
# links and of facts always read; those of the other services may wait for a client or for a disk.
UNTAKEN_S_MAX: Final = 15
UNREAD_S_MAX: Final = 60
# The services of a leader.
CONTROL: Final = "control"  # the control link of a front door
LOCAL: Final = "local"  # HTTP of shardctl, by the socket of its host
LOCAL_SOCKET: Final = "shardctl.sock"  # in the runtime directory
HTTP: Final = "http"
HTTPS: Final = "https"  # HTTP that came by TLS, which ends at the relay
METRICS: Final = "metrics"
COPIES: Final = "copies"  # of the definitions, for nodes that follow
FACTS: Final = "facts"  # what nodes that do not lead tell about themselves

# The services of each node.
RANGES: Final = "ranges"  # where its streams begin and end
READER: Final = "reader"  # its reader of streams
SNAPSHOT: Final = "snapshot"  # its part of a snapshot
# The service of a shard's process that follows, besides that of the copies.
COPY_STATE: Final = "copy-state"  # what its copy is, for an unclean election

Address = tuple[str, int]
Receiving = asyncio.Protocol | asyncio.BufferedProtocol


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of the end that connects.

    versions: those that its node understands.
    node: the name of its node.
    peer: the host and the port of the client whose bytes follow; None if there is no client.
    own: the host and the port that this client has connected to.
    """

    versions: Versions
    cluster: str
    node: str
    service: Annotated[str, msgspec.Meta(max_length=32)]
    peer: Address | None = None
    own: Address | None = None


class Reply(msgspec.Struct, frozen=True):
    """The answer to an opening. The stream ends behind an `error` that is not empty.

    life: with an error, the life of a controller that does not lead; else 0.
    version: that of the stream, the highest that both ends understand; 0 with an error.
    is_too_different: the error is that the nodes have no version of something in common.
    """

    error: str
    life: int = 0
    version: int = 0
    is_too_different: bool = False


class NoStream(Exception):
    """A stream could not be opened. The text says why.

    `life` is that of the other controller, if it was reached and does not lead; else 0.
    """

    def __init__(self, text: str, life: int = 0) -> None:
        super().__init__(text)
        self.life = life


class TooDifferent(NoStream):
    """The nodes have no version of something in common. The text says of what."""


# Takes an opening; returns the protocol of the service, or raises NoStream.
Accept = Callable[[Opening], Receiving]


class OpeningProtocol(asyncio.Protocol):
    """The end that was connected to, until the protocol of the service takes its place."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept
        self._line = bytearray()
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(OPENING_S_MAX, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()

    def data_received(self, data: bytes) -> None:
        self._line += data
        if not self._line.endswith(b"\n"):
            # Nothing may follow the line before it is answered.
            if len(self._line) > OPENING_BYTES_MAX or b"\n" in self._line:
                self._transport.abort()
            return
        assert self._late is not None
        self._late.cancel()
        try:
            opening = msgspec.json.decode(self._line, type=Opening)
            protocol = self._accept(opening)
            version = highest_common((STREAMS, opening.versions.streams))
            if version is None:
                raise TooDifferent(f"this node understands {STREAMS} of the streams between nodes")
        except (NoStream, msgspec.MsgspecError) as error:
            life = error.life if isinstance(error, NoStream) else 0
            reply = Reply(str(error), life, is_too_different=isinstance(error, TooDifferent))
            self._transport.write(msgspec.json.encode(reply) + b"\n")
            self._transport.close()
            return
        self._transport.write(msgspec.json.encode(Reply("", version=version)) + b"\n")
        _bound_waits(self._transport, opening.service)
        transport = StreamTransport(self._transport, opening, version)
        self._transport.set_protocol(protocol)
        protocol.connection_made(transport)


class StreamTransport(asyncio.Transport):
    """The transport of a stream, which says of the client behind it what the opening has said.

    A service thus sees the client and not the node that relays.
    """

    def __init__(self, transport: asyncio.Transport, opening: Opening, version: int) -> None:
        super().__init__()
        self._inner = transport
        self.opening = opening
        self.version = version

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "peername":
                return self.opening.peer or default
            case "sockname":
                return self.opening.own or default
            case "opening":
                return self.opening
            case "version":
                return self.version
            case "sslcontext" if self.opening.service in (HTTP, LOCAL, METRICS):
                return default
            case "ssl_object" | "socket":  # those of the stream, not of the client
                return default
        return self._inner.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._inner.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._inner.get_protocol()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def is_reading(self) -> bool:
        return self._inner.is_reading()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._inner.write(data)

    def write_eof(self) -> None:
        self._inner.write_eof()

    def can_write_eof(self) -> bool:
        return self._inner.can_write_eof()


class _Asking(asyncio.Protocol):
    """The end that connects, until its opening is answered."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._line = bytearray()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(msgspec.json.encode(self._opening) + b"\n")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(NoStream("it closed the stream" if error is None else str(error)))

    def data_received(self, data: bytes) -> None:
        self._line += data
        line, found, rest = bytes(self._line).partition(b"\n")
        if not found:
            if len(line) > OPENING_BYTES_MAX:
                self._end(NoStream("it does not speak as a node does"))
            return
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except msgspec.MsgspecError:
            self._end(NoStream("it does not speak as a node does"))
            return
        if reply.error:
            kind = TooDifferent if reply.is_too_different else NoStream
            self._end(kind(reply.error, reply.life))
            return
        # What the service says is for the protocol that the caller sets.
        self._transport.pause_reading()
        self.rest, self.version = rest, reply.version
        if not self.answered.done():
            self.answered.set_result(None)

    def _end(self, error: NoStream) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
        self._transport.abort()


class Opened(NamedTuple):
    """The end of a stream that has connected, and the version that is spoken there."""

    transport: asyncio.Transport
    version: int


async def open_stream(
    address: Address, tls: ssl.SSLContext, opening: Opening, protocol: Receiving
) -> Opened:
    """Open a stream to the controller at `address`, let `protocol` have it, and return it.

    Raises NoStream.
    """
    loop = asyncio.get_running_loop()
    asking: _Asking | None = None
    try:
        async with asyncio.timeout(OPENING_S_MAX):
            transport, asking = await loop.create_connection(
                lambda: _Asking(opening), *address, ssl=tls, server_hostname=""
            )
            await asking.answered
    except ssl.SSLError as error:
        raise NoStream(f"it has another secret, or is no node ({error.reason})") from None
    except asyncio.CancelledError:
        if asking is not None:
            asking.connection_lost(None)
        raise
    except TimeoutError:
        if asking is not None:
            asking.connection_lost(None)
        raise NoStream(f"no answer within {OPENING_S_MAX:g} s") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise NoStream(reason) from None
    _bound_waits(transport, opening.service)
    transport.set_protocol(protocol)
    transport.resume_reading()
    protocol.connection_made(transport)
    if asking.rest:
        _give(protocol, asking.rest)
    return Opened(transport, asking.version)


def _give(protocol: Receiving, data: bytes) -> None:
    """Give a protocol bytes that came before it was set."""
    if isinstance(protocol, asyncio.Protocol):
        protocol.data_received(data)
        return
    while data:
        room = memoryview(protocol.get_buffer(len(data)))
        if not room:
            raise NoStream("it sends too much before it is asked for anything")
        part, data = data[: len(room)], data[len(room) :]
        room[: len(part)] = part
        protocol.buffer_updated(len(part))


def _bound_waits(transport: asyncio.Transport, service: str) -> None:
    """Let the kernel end a stream whose other host has vanished without a word."""
    end: socket.socket = transport.get_extra_info("socket")
    untaken_s = UNTAKEN_S_MAX if service in (CONTROL, FACTS) else UNREAD_S_MAX
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, PROBE_AFTER_S),
            (socket.TCP_KEEPINTVL, PROBE_EACH_S),
            (socket.TCP_KEEPCNT, PROBES),
            (socket.TCP_USER_TIMEOUT, untaken_s * 1000),
        ):
            end.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:  # it has ended, which its protocol hears
        pass


async def open_pair(
    address: Address, tls: ssl.SSLContext, opening: Opening
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream as `open_stream` does, for a caller that reads and writes."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(PAIR_BUFFER_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    opened = await open_stream(address, tls, opening, protocol)
    return reader, asyncio.StreamWriter(opened.transport, protocol, reader, loop)
