"""The socket of one client: when it is read, what is written to it and when, how it falls silent.

Output is gathered during a pass of the loop (loop.py) and written at its end. Who holds the client
back gives the reason with pause() and takes it back with resume(); the socket is read while there
is no reason not to. The bytes go to and come from the AMQP library; what they mean is handled by
connection.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from pamqp import base

from shardmq.broker.amqp import Connection
from shardmq.broker.amqp.unfinished import BodyPart
from shardmq.broker.front_door.connection.output import (
    OUT_BYTES_MAX,
    Output,
    Stream,
    close_behind_output,
)
from shardmq.broker.front_door.hot_state import SocketState
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.loop import READ_BYTES, PassLoop
from shardmq.broker.front_door.short_way import Inlet
from shardmq.shardd.wire.shared_memory import BODY_BYTES_MIN

log = logging.getLogger("shardmq.broker.front_door.connection.socket")

# A read of at least this much is worth a pass of its own: the pass does not wait for more.
FULL_READ_BYTES = 64 << 10
# When a read filled the buffer and left part of a message, the next read goes behind that part, up
# to this size. In one piece of bytes the messages are one event; the parts apart would be two.
AGAIN_BYTES_MAX = 64 << 10
# So much is read behind a part of a body. What is there of the next body is copied.
BEHIND_BODY_BYTES = 4 << 10
# How long a client may take to answer our connection.close.
CLOSE_TIMEOUT_S = 5.0

# Reasons why a client is not read. The lower bits are the shards it feeds that have no room.
PAUSE_SHARDS = (1 << 64) - 1
PAUSE_OUTPUT = 1 << 64  # it does not take what is sent to it
PAUSE_WORK = 1 << 65  # too much of its work is queued
PAUSE_ALARM = 1 << 66
PAUSE_SLICE = 1 << 67  # its time slice is over, and not all that was read is handled
PAUSE_LOGIN = 1 << 68  # its password, or its limits, take long to check
PAUSE_CLOSE = 1 << 69  # it opens a channel whose number is that of one that is being closed


def _nobody() -> None:
    """Stand for the connection when it has ended."""


class ClientSocket(SocketState):
    """The socket of one connection, with its output and the AMQP library between them.

    What is read goes to the library, but for what the `inlet` takes of it (short_way.pyx).
    """

    __slots__ = (
        "_body_bytes", "_lends", "_links", "_on_data", "_on_end", "_room", "_slice_scheduled",
        "amqp", "closing_after_flush", "inlet", "name", "sock",
    )  # fmt: skip

    def __init__(
        self,
        loop: PassLoop,
        links: ShardLinks,
        sock: Stream,
        number: int,
        name: str,
        amqp: Connection,
        *,
        on_data: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Begin to read a socket.

        `on_data` handles what the AMQP library was given. `on_end` is called when the socket is to
        be closed; it calls close().
        """
        self.loop = loop
        self._links = links
        self.link_of = links.links
        self.sock = sock
        self.is_plain = isinstance(sock, socket.socket)
        self.fd = sock.fileno()
        self.id = number
        self.name = name
        self.amqp = amqp
        self._on_data = on_data
        self._on_end = on_end
        self.inlet: Inlet | None = None  # the short way of an open connection
        self.closing = False  # connection.close was said by either side
        self.closing_after_flush = False
        self.lost = False
        self.last_received = self.last_sent = loop.now
        self.received_bytes = 0
        self.paused = 0  # reasons, a bit mask
        self.output: Output = Output()
        self.more_comes = False  # the last read filled the buffer
        self._lends = False  # bodies of the last read were lent
        self._body_bytes = READ_BYTES  # of the last read of a large body
        self._room: asyncio.Event | None = None  # tasks of this client wait for its shards
        self._slice_scheduled = False
        self.is_dirty = False
        self.is_writing = False
        loop.aio.add_reader(self.fd, self.readable)

    # -- in --------------------------------------------------------------------------------------

    def readable(self) -> None:
        """Read once, and have what was read handled."""
        loop = self.loop
        loop.begin_pass()
        if self.lost or self.paused:  # since the loop has seen it readable
            return
        part = self.amqp.part
        if (
            part is not None
            and isinstance(self.sock, socket.socket)
            and (places := part.places(self._body_bytes))
        ):
            self._read_body(self.sock, part, places)
            return
        buffer, begun = loop.large_read_buffer if self._lends else loop.read_buffer, 0
        if self.more_comes and (unread := self.amqp.unread):
            begun = len(unread) if len(unread) <= AGAIN_BYTES_MAX else 0
            buffer[:begun] = unread[:begun]
        try:
            count = self.sock.recv_into(buffer[begun:] if begun else buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        self.came(count, begun, len(buffer))

    def came(self, count: int, begun: int = 0, room: int = READ_BYTES) -> None:
        """Handle `count` bytes that were read into the buffer behind `begun` bytes of before.

        The buffer had room for `room` bytes. None came if the client or the kernel has ended the
        connection.
        """
        if count == 0:
            self._on_end()
            return
        loop, end = self.loop, begun + count
        self.more_comes = end == room
        if count >= FULL_READ_BYTES:
            loop.read_was_large(self.more_comes)
        else:
            loop.reads.short += 1
        loop.pace.read_by(self.id)
        self.received_bytes += count
        self.reads += 1
        self.last_received = loop.now
        if (inlet := self.inlet) is None:
            self.go_on(0, end, begun)
            return
        if begun:
            self.amqp.drop_read()
        taken = inlet.take(loop.large_read_buffer, end)
        if taken:
            loop.pace.came(inlet.things)
            if inlet.fed:
                loop.fed(self, inlet.fed)
        if taken < end:
            self.go_on(taken, end)

    def go_on(self, taken: int, end: int, begun: int = 0) -> None:
        """Have Python handle what is read from `taken` on, which is not plain.

        The first `begun` bytes of it were kept from reads before.
        """
        loop = self.loop
        try:
            self.amqp.receive_data(loop.large_read_buffer[taken:end], begun)
            self._on_data()
        finally:
            self._lends = end - taken >= BODY_BYTES_MIN and loop.next_read_buffer()

    def go_short_way(self, inlet: Inlet) -> None:
        """Let the inlet take what is plain of each read, which it does itself if it can."""
        if not self.paused and not self.lost:
            self._read_no_more()
        self.inlet = inlet
        if not self.paused and not self.lost:
            self._read_on()

    def _read_on(self) -> None:
        """Have the socket read whenever it has something."""
        loop, inlet = self.loop, self.inlet
        if inlet is None:
            loop.aio.add_reader(self.fd, self.readable)
        elif loop.watch is None or not self.is_plain:
            loop.aio.add_reader(self.fd, inlet.readable)
        else:
            loop.watch.read(self.fd, inlet)

    def _read_no_more(self) -> None:
        if self.inlet is None or self.loop.watch is None or not self.is_plain:
            self.loop.aio.remove_reader(self.fd)
        else:
            self.loop.watch.leave(self.fd)

    def _read_body(self, sock: socket.socket, part: BodyPart, places: list[memoryview]) -> None:
        """Read a part of a large body straight to its place, and a little behind it."""
        loop = self.loop
        places.append(loop.read_buffer[:BEHIND_BODY_BYTES])
        try:
            count = sock.recvmsg_into(places)[0]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            self._on_end()
            return
        if count >= FULL_READ_BYTES:
            loop.read_was_large(False)
        else:
            loop.reads.short += 1
        self.more_comes = False
        self._body_bytes = count
        self.received_bytes += count
        self.reads += 1
        self.last_received = loop.now
        rest = self.amqp.unfinished.body_came(part, places, count)
        if rest:
            self.amqp.receive_data(rest)
            self._on_data()

    def pause(self, reason: int) -> None:
        """Do not read the client until resume() takes this reason, and all others, back."""
        if not self.paused and not self.lost:
            self._read_no_more()
        self.paused |= reason

    def resume(self, reasons: int) -> None:
        before, self.paused = self.paused, self.paused & ~reasons
        if self._room is not None and not self.paused & PAUSE_SHARDS:
            self._room.set()
            self._room = None
        if before == self.paused or self.lost:
            return
        if self.paused == PAUSE_SLICE:
            self._schedule_slice()
        elif not self.paused:
            self.last_received = self.loop.aio.time()  # it was not read: its silence was ours
            self._read_on()

    def end_slice(self) -> None:
        """Let the next clients go on; what is left of this read is handled in the next slice.

        The bytes are kept, because the read of the next client will overwrite them.
        """
        self.amqp.keep_unread()
        self.pause(PAUSE_SLICE)
        self.loop.pace.worth_a_pass()
        self._schedule_slice()

    def _schedule_slice(self) -> None:
        """Let the next slice come behind those of the others; one, however often it is wanted."""
        if not self._slice_scheduled:
            self._slice_scheduled = True
            self.loop.aio.call_soon(self._slice)

    def _slice(self) -> None:
        """Go on with what was read, unless there is another reason not to.

        When that reason ends, resume() schedules a slice again.
        """
        self._slice_scheduled = False
        if self.paused == PAUSE_SLICE and not self.lost:
            self.loop.begin_pass()
            if self.paused == PAUSE_SLICE and not self.lost:  # nothing has changed meanwhile
                self._on_data()

    async def next_slice(self) -> None:
        """Let other clients go on and wait for the shards without room; then begin a slice.

        What a task published must be accounted for before: it leaves meanwhile.
        """
        self.loop.schedule_end_of_pass()
        await asyncio.sleep(0)
        while self.paused & PAUSE_SHARDS and not self.lost:
            if self._room is None:
                self._room = asyncio.Event()
            await self._room.wait()
        self.loop.slices.begin()

    def feeds(self, shards: int) -> None:
        """Note that this client just published to these shards (bit mask)."""
        self.loop.fed(self, shards)

    # -- out -------------------------------------------------------------------------------------

    def send(self, channel_number: int, method: base.Frame, count: int = 1) -> None:
        """Send a method, `count` times."""
        self.amqp.send_method(channel_number, method, count)
        self.gather()

    def write_delivery(
        self, data: bytes | list[bytes | memoryview], shard: int, credit: int
    ) -> None:
        """Send deliveries, large ones in parts.

        `credit` bytes go back to the shard when the kernel has them.
        """
        epoch = self._links.links[shard].epoch
        if self.closing or self.lost:
            self._links.credit(shard, epoch, self.id, credit)
            return
        if isinstance(data, bytes):
            self.output.add_then_credit(data, shard, epoch, credit)
        else:
            self.output.add_parts_then_credit(data, shard, epoch, credit)
            self.loop.borrowers.append(self.output)
        self.mark_dirty()

    def gather(self) -> None:
        """Take over what the AMQP library has to send."""
        for data in self.amqp.data_to_send():
            if not self.lost:
                self.output.add(data)
                self.mark_dirty()
        if self.amqp.closed:
            self.flush_then_close()

    def flush_slowly(self) -> None:
        """Do what flush() leaves: much output, TLS, a kernel that takes no more."""
        if not self.is_writing and not self.lost:
            self._write_out()
        elif self.output.pending > OUT_BYTES_MAX:
            self.pause(PAUSE_OUTPUT)

    def _write_out(self) -> None:
        output, loop = self.output, self.loop
        try:
            all_out = output.write(self.sock)
        except OSError:
            self._on_end()
            return
        self.last_sent = loop.now
        if output.due:
            for shard, epoch, credit in output.take_credits():
                self._links.credit(shard, epoch, self.id, credit)
        if all_out:
            return
        if not self.is_writing:
            self.is_writing = True
            loop.aio.add_writer(self.fd, self._writable)
        if output.pending > OUT_BYTES_MAX:
            self.pause(PAUSE_OUTPUT)

    def _writable(self) -> None:
        self._write_out()
        if self.lost:
            return
        if not self.output.pending:
            self.is_writing = False
            self.loop.aio.remove_writer(self.fd)
            if self.closing_after_flush:
                self._on_end()
                return
        if self.output.pending <= OUT_BYTES_MAX // 2:
            self.resume(PAUSE_OUTPUT)
        self.loop.schedule_end_of_pass()

    def tick(self, now: float, heartbeat_s: int) -> None:
        """Send a heartbeat when one is due, and drop a client that fell silent.

        Lent bodies that the client does not take are copied. This is called about once a second,
        so that no lent body waits here for more than two. `now` is loop time.
        """
        if self.is_writing:
            self.output.own_lent()
        if not heartbeat_s:
            return
        if now - self.last_sent >= heartbeat_s / 2 and not self.is_writing:
            self.amqp.send_heartbeat()
            self.gather()
        # While it is not read, a client shows that it lives by taking what is written.
        takes_nothing = self.paused & PAUSE_OUTPUT and now - self.last_sent > 2 * heartbeat_s
        if takes_nothing or (now - self.last_received > 2 * heartbeat_s and not self.paused):
            log.warning("%s: missed heartbeats, timeout: %d s", self.name, heartbeat_s)
            self._on_end()

    # -- the end ---------------------------------------------------------------------------------

    def flush_then_close(self) -> None:
        """Close the socket when what is still to be written has had its chance."""
        self.closing = self.closing_after_flush = True
        self.flush()
        if not self.output.pending:
            self._on_end()
        else:
            self.close_later()

    def close_later(self) -> None:
        """Close the socket after a while, whatever the client does."""
        self.loop.aio.call_later(CLOSE_TIMEOUT_S, self.give_up)

    def give_up(self) -> None:
        """End the connection at once."""
        self.closing_after_flush = False
        self._on_end()

    def close(self, shut: bool) -> None:
        """Close the socket.

        When all was written behind a close, the client may read it first; `shut` then shows it our
        end at once.
        """
        self.lost = True
        self._on_data = self._on_end = _nobody  # or socket and connection would hold each other
        if not self.paused:
            self._read_no_more()
        self.inlet = None
        self.resume(PAUSE_SHARDS)  # a commit that waits for room goes on to its end
        aio = self.loop.aio
        if self.is_writing:
            aio.remove_writer(self.fd)
        if self.closing_after_flush and not self.output.pending:
            # A client that gets close-ok closes. Some clients take an end that comes at once for a
            # broken connection.
            close_behind_output(aio, self.sock, shut)
        else:
            self.sock.close()
