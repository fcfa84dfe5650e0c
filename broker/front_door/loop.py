"""Passes of the front door: what is read together leaves together, and who has to wait.

A *pass* is one turn of the event loop over everything that is readable. What it produced leaves at
its end, together: confirms, one batch per shard, one write per client. While clients send little at
a time, and often, passes keep a distance (`tick_us`): the loop sleeps but for what the shards say,
and what clients have sent meanwhile is done in one go. pace.pxi decides who waits.

Clients that publish to a shard with no room are not read until the shard has taken enough.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from shardmq.broker.amqp import frames
from shardmq.broker.front_door.connection.output import Output
from shardmq.broker.front_door.hot_state import Pace, PassState
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.short_way import Watch
from shardmq.broker.front_door.time_slices import TimeSlices
from shardmq.shardd.wire.shared_memory import BODY_BYTES_MIN, Run
from shardmq.shardd.wire.spin import Spin

log = logging.getLogger("shardmq.broker.front_door.loop")

# One read takes at most this from a socket. One buffer serves all clients.
READ_BYTES = 256 << 10
# A client whose last read had bodies that were lent is read more at once: lent bodies take no time
# to copy, so that the fixed cost of a pass would be most of it.
LARGE_READ_BYTES = 1 << 20


class Client(Protocol):
    """The socket of a client (connection/socket.py)."""

    name: str
    fed_shards: int

    def give_up(self) -> None:
        """End the connection at once."""

    def pause(self, reason: int) -> None: ...
    def resume(self, reasons: int) -> None: ...


class PassLoop(PassState):
    """The passes of one front door. `now` is the loop time at which the current pass began.

    The base class begins and ends them; what is rare in a pass is here.
    """

    # More than Python keeps in an object without a dictionary beside it.
    __slots__ = (
        "_held_back", "_own_buffer", "_run", "borrowers", "large_read_buffer", "slices", "watch",
    )  # fmt: skip

    def __init__(
        self,
        aio: asyncio.AbstractEventLoop,
        links: ShardLinks,
        publishing: Publishing,
        *,
        shards: int,
        tick_us: int,
        spin: Spin | None = None,
    ) -> None:
        self.aio = aio
        self.now = aio.time()
        # Large bodies that were read are lent to shards from where they are (bodies.pxi). `_run` is
        # the memory that they lie in; None: the bytes of the last read are copied.
        self._own_buffer = self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.large_read_buffer = self.read_buffer  # the same memory, and more behind it
        self._run: Run | None = None
        self.slices = TimeSlices(time.perf_counter, aio.call_soon)
        self.borrowers: list[Output] = []  # these lie in part in a ring of a shard
        self.watch: Watch | None = None  # None: the event loop waits for all sockets
        self.links = links
        self.confirms_due = publishing.confirms_due
        self.pace = Pace(tick_us / 1e6)
        self.spin = spin or Spin(0)
        self.held = [set() for _ in range(shards)]
        self.next_read_buffer()
        self._held_back = [0] * shards  # how often publishers had to wait

    # -- passes ----------------------------------------------------------------------------------

    def keep_distance(self, seconds: float) -> None:
        """Sleep before a pass begins, but for what the shards say."""
        if self.beside is not None:
            self.beside()
        self.links.inbox.hear_for(seconds)

    def next_read_buffer(self) -> bool:
        """Read next into other memory if bodies were lent from this one; return whether some were.

        The caller calls this behind each read that may have had such a body.
        """
        bodies = self.links.bodies
        if bodies is None or not (self._run is None or self._run.is_shared):
            return False
        lent = self._run is not None
        self._run = bodies.take(LARGE_READ_BYTES)
        large = self._own_buffer if self._run is None else memoryview(self._run)
        self.large_read_buffer, self.read_buffer = large, large[:READ_BYTES]
        return lent

    def room(self, size: int) -> bytearray | memoryview:
        """Return memory for a large message, from which its body can be lent if there is room."""
        bodies = self.links.bodies
        run = None
        # Clients that announce bodies and send none must leave room for the others.
        if (
            bodies is not None
            and size >= BODY_BYTES_MIN
            and bodies.held_bytes + size <= len(bodies) // 2
        ):
            run = bodies.take(size)
        return frames.room(size) if run is None else memoryview(run)

    def read_was_large(self, full: bool) -> None:
        """Note a read that is worth a pass; `full` says that there is more where it came from."""
        self.pace.worth_a_pass()
        if full:
            self.reads.full += 1
        else:
            self.reads.short += 1

    def schedule_end_of_pass(self) -> None:
        if not self.end_scheduled:
            self.end_scheduled = True
            self.aio.call_soon(self._scheduled_end)

    def _scheduled_end(self) -> None:
        if self.end_scheduled:
            self.end_of_pass()
            if self.beside is not None:
                self.beside()

    def flush_later(self) -> None:
        """Send the batches that wait in the turn of the loop after the next one.

        By then the loop has looked at every socket.
        """
        self.aio.call_soon(self.aio.call_soon, self._flush_held, self.reads.held)

    def _flush_held(self, held: int) -> None:
        """Send the batches that wait, unless another pass has begun or ended since."""
        if not self.in_pass and self.reads.held == held:
            self.reads.held = 0
            self.links.flush()

    def look_later(self, was_read: bool) -> None:
        """Look at rings and sockets for a while before the loop sleeps, if it is worth it."""
        most_ns = self.spin.most_ns(time.perf_counter_ns(), was_read)
        if most_ns:
            self.looks = True
            self.aio.call_soon(self._look_again, most_ns, was_read)

    def _look_again(self, most_ns: int, behind: int) -> None:
        self.looks = False
        self.spin.looked(*self.links.inbox.look_again(most_ns), behind)

    def cannot_write(self, client: Client, error: Exception) -> None:
        """End a client whose output cannot be written for an error of ours."""
        log.error("%s: cannot be written to", client.name, exc_info=error)
        client.give_up()

    def receiving(self) -> None:
        """Begin to handle messages of shards or the controller; received() ends this pass."""
        self.end_scheduled = True

    received = PassState.end_of_pass

    def write_borrowed(self) -> None:
        """Write deliveries from a ring, which is about to change, as far as clients take them."""
        if self.borrowers:
            self.end_of_pass()

    def own_deliveries(self) -> None:
        """Copy deliveries that clients have not taken out of a ring, which is about to change."""
        for output in self.borrowers:
            output.own()
        self.borrowers.clear()

    # -- back pressure ---------------------------------------------------------------------------

    def hold(self, shard: int, feeders: list[Client]) -> None:
        """Do not read these clients, which fed a shard, until it has room again."""
        for client in feeders:
            client.pause(1 << shard)
        self._held_back[shard] += len(feeders)
        self.held[shard].update(feeders)

    def publish_room(self, shard: int) -> None:
        """Read the clients again that waited for this shard."""
        held, self.held[shard] = self.held[shard], set()
        for client in held:
            client.resume(1 << shard)

    def forget(self, client: Client) -> None:
        """Forget a client that is gone."""
        client.fed_shards = 0
        for held in self.held:
            held.discard(client)
        self.schedule_end_of_pass()

    def numbers(self) -> dict[str, float]:
        """Return how many publishers wait for each shard, and how often publishers had to."""
        told: dict[str, float] = {}
        for shard, held_back in enumerate(self._held_back):
            told[f"publishers_waiting.{shard}"] = len(self.held[shard])
            told[f"publishers_held_back.{shard}"] = held_back
        return told
