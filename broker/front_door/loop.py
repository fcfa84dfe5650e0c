"""Passes of the front door: what is read together leaves together, and who has to wait.

A *pass* is one turn of the event loop over everything that is readable. What it produced leaves at
its end, together: confirms, one batch per shard, one write per client. While clients send little at
a time, and often, passes keep a distance (`tick_us`): the loop sleeps but for what the shards say,
and what clients have sent meanwhile is done in one go. A client that sends rarely never waits
(pace.py).

Clients that publish to a shard with no room are not read until the shard has taken enough.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from shardmq.broker.amqp import frames
from shardmq.broker.front_door.connection.output import Output
from shardmq.broker.front_door.hot_state import PassState
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.pace import Pace, Reads
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.time_slices import TimeSlices
from shardmq.shardd.wire.bodies import BODY_BYTES_MIN, Run
from shardmq.shardd.wire.spin import Spin

log = logging.getLogger("shardmq.broker.front_door.loop")

# One read takes at most this from a socket. One buffer serves all clients.
READ_BYTES = 256 << 10
# A client whose last read had bodies that were lent is read more at once: lent bodies take no time
# to copy, so that the fixed cost of a pass would be most of it.
LARGE_READ_BYTES = 1 << 20
# While all reads are full, a shard's batch waits until it has this many bytes: the fixed cost of a
# batch is then small beside the cost of its messages. Where a read has something for several
# shards, each waits for more: half of it takes about as long as the smaller batch.
BATCH_BYTES_MIN, SHARED_BATCH_BYTES_MIN = 128 << 10, 192 << 10


class Client(Protocol):
    """The socket of a client (connection/socket.py)."""

    name: str

    def flush(self) -> None: ...
    def give_up(self) -> None:
        """End the connection at once."""

    def pause(self, reason: int) -> None: ...
    def resume(self, reasons: int) -> None: ...


class PassLoop(PassState):
    """The passes of one front door. `now` is the loop time at which the current pass began."""

    # More than Python keeps in an object without a dictionary beside it.
    __slots__ = (
        "_fed", "_feeders", "_held", "_held_back", "_links", "_looks", "_own_buffer", "_pace",
        "_publishing", "_run", "_spin", "aio", "beside", "borrowers", "large_read_buffer", "slices",
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
        # Large bodies that were read are lent to shards from where they are (bodies.pyx). `_run` is
        # the memory that they lie in; None: the bytes of the last read are copied.
        self._own_buffer = self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.large_read_buffer = self.read_buffer  # the same memory, and more behind it
        self._run: Run | None = None
        self.reads = Reads()
        self.slices = TimeSlices(time.perf_counter, aio.call_soon)
        self.dirty: list[Client] = []
        self.borrowers: list[Output] = []  # these lie in part in a ring of a shard
        self._links = links
        self._publishing = publishing
        self.next_read_buffer()
        self._pace = Pace(tick_us / 1e6)
        self._spin = spin or Spin(0)
        self._looks = False  # a look before the loop sleeps is scheduled
        # Does what the shard of this process has to do, if there is one.
        self.beside: Callable[[], None] | None = None
        self.in_pass = False
        self.end_scheduled = False
        # Who published in this pass, and to which shards: bit masks.
        self._feeders: dict[Client, int] = {}
        self._fed = 0  # the union of them
        self._held: list[set[Client]] = [set() for _ in range(shards)]
        self._held_back = [0] * shards  # how often publishers had to wait

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a pass before its first read, after a distance if reads are small and frequent."""
        if self.in_pass:
            return
        pace, now = self._pace, time.perf_counter()
        wait = pace.distance(now, time.thread_time() if pace.is_near(now) else None)
        if wait > 0:
            if self.beside is not None:
                self.beside()
            self._links.hear_for(wait)
        self.in_pass = True
        self.now = self.aio.time()
        self.schedule_end_of_pass()

    def next_read_buffer(self) -> bool:
        """Read next into other memory if bodies were lent from this one; return whether some were.

        The caller calls this behind each read that may have had such a body.
        """
        bodies = self._links.bodies
        if bodies is None or not (self._run is None or self._run.is_shared):
            return False
        lent = self._run is not None
        self._run = bodies.take(LARGE_READ_BYTES)
        large = self._own_buffer if self._run is None else memoryview(self._run)
        self.large_read_buffer, self.read_buffer = large, large[:READ_BYTES]
        return lent

    def room(self, size: int) -> bytearray | memoryview:
        """Return memory for a large message, from which its body can be lent if there is room."""
        bodies = self._links.bodies
        run = None if bodies is None or size < BODY_BYTES_MIN else bodies.take(size)
        return frames.room(size) if run is None else memoryview(run)

    def read_was_large(self, full: bool) -> None:
        """Note a read that is worth a pass; `full` says that there is more where it came from."""
        self._pace.was_large()
        if full:
            self.reads.full += 1
        else:
            self.reads.short += 1

    def work_is_left(self) -> None:
        """Let the next pass come at once: the time slice of a client is over."""
        self._pace.was_large()

    def came(self, things: int) -> None:
        """Note how many publishes, acks and methods a read had."""
        self._pace.came(things)

    def schedule_end_of_pass(self) -> None:
        if not self.end_scheduled:
            self.end_scheduled = True
            self.aio.call_soon(self._scheduled_end)

    def _scheduled_end(self) -> None:
        if self.end_scheduled:
            self.end_of_pass()
            if self.beside is not None:
                self.beside()

    def end_of_pass(self) -> None:
        """Let everything leave that the pass has produced."""
        was_read = self.in_pass
        self.in_pass = self.end_scheduled = False
        if self._publishing.confirms_due:
            self._answer_publishers()
        if self._fed:
            self._hold_feeders()
        if self.dirty:
            self._write_out()
        if self.reads.may_wait() and self._links.flush(BATCH_BYTES_MIN, SHARED_BATCH_BYTES_MIN):
            # The turn of the loop after the next one: by then it has looked at every socket.
            self.aio.call_soon(self.aio.call_soon, self._flush_held, self.reads.held)
        else:
            self.reads.held = 0
            self._links.flush()
        if self._spin.is_on and not self._looks:
            most_ns = self._spin.most_ns(time.perf_counter_ns(), was_read)
            if most_ns:
                self._looks = True
                self.aio.call_soon(self._look_again, most_ns, was_read)

    def _look_again(self, most_ns: int, behind: int) -> None:
        """Look at rings and sockets for a while before the loop sleeps."""
        self._looks = False
        self._spin.looked(*self._links.inbox.look_again(most_ns), behind)

    def _answer_publishers(self) -> None:
        """Write acks and nacks that are due, and end channels that lost a publish in sequence."""
        for confirms in self._publishing.take_confirms_due():
            client = confirms.client
            client.write(confirms.answers())
            if confirms.failure is not None:
                client.fail(confirms.failure, confirms.channel)
                confirms.failure = None  # later the number may be another channel's

    def _flush_held(self, held: int) -> None:
        """Send the batches that wait, unless another pass has begun or ended since."""
        if not self.in_pass and self.reads.held == held:
            self.reads.held = 0
            self._links.flush()

    def _write_out(self) -> None:
        dirty, self.dirty = self.dirty, []
        for client in dirty:
            try:
                client.flush()
            except Exception:
                log.exception("%s: cannot be written to", client.name)
                client.give_up()

    def receiving(self) -> None:
        """Begin to handle messages of shards or the controller; received() ends this pass."""
        self.end_scheduled = True

    received = end_of_pass

    def own_deliveries(self) -> None:
        """Copy deliveries that clients have not taken out of a ring, which is about to change."""
        for output in self.borrowers:
            output.own()
        self.borrowers.clear()

    # -- back pressure ---------------------------------------------------------------------------

    def fed(self, client: Client, shards: int) -> None:
        """Note that a client published to these shards (bit mask) in this pass."""
        self._fed |= shards
        self._feeders[client] = self._feeders.get(client, 0) | shards

    def _hold_feeders(self) -> None:
        fed, self._fed = self._fed, 0
        for shard in self._links.crowded(fed):
            feeders = [client for client, shards in self._feeders.items() if shards >> shard & 1]
            for client in feeders:
                client.pause(1 << shard)
            self._held_back[shard] += len(feeders)
            self._held[shard].update(feeders)
        self._feeders.clear()

    def publish_room(self, shard: int) -> None:
        """Read the clients again that waited for this shard."""
        held, self._held[shard] = self._held[shard], set()
        for client in held:
            client.resume(1 << shard)

    def forget(self, client: Client) -> None:
        """Forget a client that is gone."""
        self._feeders.pop(client, None)
        for held in self._held:
            held.discard(client)
        self.schedule_end_of_pass()

    def numbers(self) -> dict[str, float]:
        """Return how many publishers wait for each shard, and how often publishers had to."""
        told: dict[str, float] = {}
        for shard, held_back in enumerate(self._held_back):
            told[f"publishers_waiting.{shard}"] = len(self._held[shard])
            told[f"publishers_held_back.{shard}"] = held_back
        return told
