"""The socket of one client: when it is read, what is written to it and when, how it falls silent.

Output is gathered during a pass of the loop and written at its end. Whoever holds the client back says why (`pause`)
and when it is over (`resume`); it is read while nobody does. What is read, and what that means: client.py, which builds
on this.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pamqp import base, commands

from shardmq.broker.amqp import Connection
from shardmq.broker.front_door.connection.output import OUT_BYTES_MAX, Output, Stream
from shardmq.broker.front_door.proxy import Peer

if TYPE_CHECKING:
    from shardmq.broker.front_door.server import Door

log = logging.getLogger("shardmq.broker.front_door.connection.client")

# How long a client may take to answer our connection.close.
CLOSE_TIMEOUT_S = 5.0

# Why a client is not read: shards that it feeds have no room, or something of the bits above those.
PAUSE_SHARDS = (1 << 64) - 1
PAUSE_OUTPUT = 1 << 64
PAUSE_WORK = 1 << 65
PAUSE_ALARM = 1 << 66
PAUSE_SLICE = 1 << 67  # its time slice is over, and not all that was read is handled
PAUSE_LOGIN = 1 << 68  # its password takes long to check


class Transport(ABC):
    # With those of Client more than Python keeps in an object without a dictionary beside it.
    __slots__ = (
        "_is_dirty", "_paused", "_room", "_slice_scheduled", "_writing", "amqp", "blocked", "closing",
        "closing_after_flush", "door", "fd", "host", "id", "is_open", "last_received", "last_sent",
        "lost", "output", "peer_host", "peer_port", "port", "published", "sock",
    )  # fmt: skip

    def __init__(self, door: Door, sock: Stream, peer: Peer, number: int, amqp: Connection) -> None:
        self.door = door
        self.id = number
        self.sock = sock
        self.fd = sock.fileno()
        self.peer_host, self.peer_port = peer.host, peer.port
        name = sock.getsockname()
        self.host, self.port = name[:2] if isinstance(name, tuple) else (name, 0)
        self.amqp = amqp
        self.is_open = False  # connection.open-ok was sent
        self.closing = False
        self.closing_after_flush = False
        self.lost = False
        self.last_received = self.last_sent = door.now
        self.published = False
        self.blocked = False  # was told of an alarm
        self._paused = 0
        self._room: asyncio.Event | None = None  # its tasks wait for the shards that it feeds
        self._slice_scheduled = False
        self.output = Output()
        self._is_dirty = False
        self._writing = False

    @property
    def frame_bytes_max(self) -> int:
        return self.amqp.frame_bytes_max

    @property
    def name(self) -> str:
        return f"{self.peer_host}:{self.peer_port} -> {self.host}:{self.port}"

    @abstractmethod
    def _readable(self) -> None:
        """There are bytes to be read, or the end."""

    @abstractmethod
    def _next_slice(self) -> None:
        """Go on with what was read."""

    @abstractmethod
    def disconnect(self, politely: bool = False) -> None:
        """The socket's end, for whatever reason. `politely`: what was written last is to be read."""

    # -- held back ------------------------------------------------------------------------------------------

    def pause(self, reason: int) -> None:
        if not self._paused and not self.lost:
            self.door.loop.remove_reader(self.fd)
        self._paused |= reason

    def resume(self, reasons: int) -> None:
        before, self._paused = self._paused, self._paused & ~reasons
        if self._room is not None and not self._paused & PAUSE_SHARDS:
            self._room.set()
            self._room = None
        if before == self._paused or self.lost:
            return
        if self._paused == PAUSE_SLICE:
            self._schedule_slice()
        elif not self._paused:
            self.last_received = self.door.loop.time()  # its silence was ours
            self.door.loop.add_reader(self.fd, self._readable)

    def begin_slice(self) -> None:
        """Begin a time slice of what a task does for this client."""
        self.door.slices.begin()

    def slice_is_over(self) -> bool:
        return self.door.slices.is_over()

    async def next_slice(self) -> None:
        """Let others have their turn, then wait for the shards that have no room; then begin the next slice.

        What was published must be accounted for before: it leaves meanwhile.
        """
        self.door.schedule_end_of_pass()
        await asyncio.sleep(0)
        while self._paused & PAUSE_SHARDS and not self.lost:
            if self._room is None:
                self._room = asyncio.Event()
            await self._room.wait()
        self.begin_slice()

    def _schedule_slice(self) -> None:
        """Let the next slice come behind those of the others, and only one of them however often it is asked for."""
        if not self._slice_scheduled:
            self._slice_scheduled = True
            self.door.loop.call_soon(self._next_slice)

    def _block(self) -> None:
        """A publisher during an alarm: told why, and not read until it is over."""
        if not self.blocked:
            self.blocked = True
            if self._can("connection.blocked"):
                self.send(0, commands.Connection.Blocked(self.door.alarm))
            self.pause(PAUSE_ALARM)

    def alarm_changed(self) -> None:
        if self.door.alarm and self.published:
            self._block()
        elif self.blocked and not self.door.alarm:
            self.blocked = False
            if self._can("connection.blocked"):
                self.send(0, commands.Connection.Unblocked())
            self.resume(PAUSE_ALARM)

    def _can(self, capability: str) -> bool:
        """What the client said of itself in start-ok."""
        capabilities = self.amqp.client_properties.get("capabilities")
        return isinstance(capabilities, dict) and capabilities.get(capability) is True

    # -- out ------------------------------------------------------------------------------------------------

    def send(self, channel: int, method: base.Frame, count: int = 1) -> None:
        """So often."""
        self.amqp.send_method(channel, method, count)
        self._gather()

    def write(self, data: bytes) -> None:
        """Ready-made frames."""
        if data and not self.lost and not self.closing:
            self.output.add(data)
            self._mark_dirty()

    def _put_out(self, data: bytes) -> None:
        if not self.lost:
            self.output.add(data)
            self._mark_dirty()

    def write_delivery(
        self, data: bytes | list[bytes | memoryview], shard: int, credit: int
    ) -> None:
        """Deliveries, large ones in parts; `credit` goes back to the shard once they are with the kernel."""
        epoch = self.door.links.links[shard].epoch
        if self.closing or self.lost:
            self.door.links.credit(shard, epoch, self.id, credit)
            return
        if isinstance(data, bytes):
            self.output.add_then_credit(data, shard, epoch, credit)
        else:
            self.output.add_parts_then_credit(data, shard, epoch, credit)
            self.door.borrowers.append(self)
        self._mark_dirty()

    def _gather(self) -> None:
        """Take over what the AMQP library has to send."""
        for data in self.amqp.data_to_send():
            self._put_out(data)
        if self.amqp.closed:
            self._flush_then_disconnect()

    def _mark_dirty(self) -> None:
        if not self._is_dirty:
            self._is_dirty = True
            self.door.dirty.append(self)
            self.door.schedule_end_of_pass()

    def flush(self) -> None:
        """Write as much as the kernel takes."""
        self._is_dirty = False
        if not self._writing and not self.lost:
            self._write_out()
        elif self.output.pending > OUT_BYTES_MAX:
            self.pause(PAUSE_OUTPUT)

    def _write_out(self) -> None:
        output, door = self.output, self.door
        try:
            all_out = output.write(self.sock)
        except OSError:
            self.disconnect()
            return
        self.last_sent = door.now
        if output.due:
            for shard, epoch, credit in output.take_credits():
                door.links.credit(shard, epoch, self.id, credit)
        if all_out:
            return
        if not self._writing:
            self._writing = True
            door.loop.add_writer(self.fd, self._writable)
        if output.pending > OUT_BYTES_MAX:
            self.pause(PAUSE_OUTPUT)

    def _writable(self) -> None:
        self._write_out()
        if self.lost:
            return
        if not self.output.pending:
            self._writing = False
            self.door.loop.remove_writer(self.fd)
            if self.closing_after_flush:
                self.disconnect(politely=True)
                return
        if self.output.pending <= OUT_BYTES_MAX // 2:
            self.resume(PAUSE_OUTPUT)
        self.door.schedule_end_of_pass()

    def _flush_then_disconnect(self) -> None:
        """Nothing more comes; what is still to be written gets its chance."""
        self.closing = self.closing_after_flush = True
        self.flush()
        if not self.output.pending:
            self.disconnect(politely=True)
        else:
            self.door.loop.call_later(CLOSE_TIMEOUT_S, self.disconnect)

    # -- time -----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """About once a second: heartbeats out, and a peer that fell silent is dropped."""
        interval = self.amqp.heartbeat_s
        if not interval or not self.is_open:
            return
        if now - self.last_sent >= interval / 2 and not self._writing:
            self.amqp.send_heartbeat()
            self._gather()
        # While we do not read it, it shows that it lives by taking what we write.
        takes_nothing = self._paused & PAUSE_OUTPUT and now - self.last_sent > 2 * interval
        if takes_nothing or (now - self.last_received > 2 * interval and not self._paused):
            log.warning("%s: missed heartbeats, timeout: %d s", self.name, interval)
            self.disconnect()
