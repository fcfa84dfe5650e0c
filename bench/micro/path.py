"""Measure a message's way through the broker in one process, stage by stage.

    PYTHONPATH=. python bench/micro/path.py [--seconds 0.5] [--data DIR] > table.md

The figures are nanoseconds per message and per byte. The stages are the broker's own code on
batches as a socket read gives them, without sockets, wake-ups and the loops around them. Each turn
takes one read through all stages: a stage works on the result of the stage before, warm in the
cache.

    scan       frames.scan: find the publishes in the read
    pack       Packer.pack and take: route, copy onto the wire with a crc32c
    ring       put into shared memory: publishes one way, deliveries back, which are taken out too
    enqueue    out of the ring, where plain batches are taken in as they lie; Shard.receive: the
               batch into a segment of the store, entries into the queue
    dequeue    Shard.turn_end: the first of the queue into a batch of deliveries; without acks
               the deliveries are also settled
    frames     contents.deliveries: deliveries as AMQP frames
    settle     (with acks) frames.settles and Shard.receive: an ack(multiple) per hundred messages

The last three rows are the model: the cost of a batch whatever is in it (a read of one message,
less that message), the cost that each message adds, and the cost that each byte of its body adds
(one message of 32 KiB per read against one of 16 B).

bench/guard.py counts the instructions of `Path`, too.
"""

from __future__ import annotations

import argparse
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from shardmq.broker.amqp import contents, frames
from shardmq.broker.front_door.consume.deliveries import LARGE_BYTES
from shardmq.shardd.shard import Shard
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import TARGETS, Routes
from shardmq.shardd.wire.shared_memory import CONTROL_BYTES, Reader, Writer

READ_BYTES = 64 << 10
SMALL, LARGE = 16, 32768
# Bytes of a body, and publishes of a read (0: as many as fit).
SIZES = ((SMALL, 1), (SMALL, 0), (256, 0), (1024, 0), (LARGE, 0))
STAGES = ("scan", "pack", "ring", "enqueue", "dequeue", "frames", "settle")
FRAME_BYTES_MAX = 131072
RING_BYTES = 4 << 20
ACK_EVERY = 100
ROUNDS = 5

QUEUE, CONNECTION, CHANNEL, CONSUMER = 1, 9, 1, 1
DOOR, INCARNATION, EPOCH = 0, 5, 7
CONTROLLER_INCARNATION = 3
WHO = (DOOR, INCARNATION, EPOCH, 0)
EXCHANGE, KEY, TAG = b"", b"bench-0", b"c0"
LINE = bytes([len(EXCHANGE)]) + EXCHANGE + bytes([len(KEY)]) + KEY + b"\0"
STATES = bytes([0, frames.CHANNEL_OPEN])


def publish(body_bytes: int) -> bytes:
    """Return the frames of one transient publish without properties.

    A body larger than a frame is in several frames.
    """

    def frame(kind: int, payload: bytes) -> bytes:
        return struct.pack(">BHI", kind, CHANNEL, len(payload)) + payload + b"\xce"

    body = bytes(body_bytes)
    pieces = [
        body[at : at + FRAME_BYTES_MAX - 8] for at in range(0, body_bytes, FRAME_BYTES_MAX - 8)
    ]
    method = frame(1, struct.pack(">HHH", 60, 40, 0) + LINE)
    return (
        method
        + frame(2, struct.pack(">HHQH", 60, 0, body_bytes, 0))
        + b"".join(frame(3, each) for each in pieces)
    )


def _is_deliver(message: envelope.Parts) -> bool:
    return (message if isinstance(message, bytes) else message[0])[0] == wire.DELIVER


class OneStore:
    """A shard's home with one store, opened as the shard's process opens it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def open(self, vhost: str) -> SegmentStore:
        return SegmentStore(self.directory)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


class Ring:
    """A ring in shared memory. With `views` large messages are read in place, as shards do."""

    def __init__(self, views: bool) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        memory = mmap.mmap(-1, mmap.PAGESIZE + RING_BYTES)
        place = (0, mmap.PAGESIZE, RING_BYTES)
        assert place[1] >= CONTROL_BYTES
        self._writer = Writer(memory, *place, self._bell)
        self._reader = Reader(memory, *place, views)

        self.ring = self._writer.ring
        self.offer = self._reader.offer
        self.take = partial(self._reader.take, 1)
        self.let_go = self._reader.let_go

    def put(self, message: envelope.Parts) -> Callable[[], bool]:
        """Return what puts a message into the ring."""
        if isinstance(message, bytes):
            return partial(self._writer.put, message)
        return partial(self._writer.put_parts, message)


class Path:
    """The stages. `turn` takes one read of publishes through all of them.

    `around(stage, act)` runs each stage.
    """

    def __init__(self, directory: str, body_bytes: int, count: int = 0, acks: bool = False) -> None:
        one = publish(body_bytes)
        self.count = count or max(1, READ_BYTES // len(one))
        self.body_bytes = body_bytes
        self._read = memoryview(one * self.count)
        self._acks = acks
        self._routes = Routes(1)
        self._routes.learn(LINE, TARGETS, [(0, [QUEUE])], True)
        self._packer = codec.Packer(1)
        self._out, self._back = Ring(views=True), Ring(views=False)
        # No streams: their part is never asked.
        self._shard = Shard(0, EPOCH, 1, OneStore(directory))  # type: ignore[arg-type]
        self._batch = self._tag = self._acked = 0
        self._prepare()

    def _prepare(self) -> None:
        self._join(wire.CONTROLLER, CONTROLLER_INCARNATION)
        queue = wire.QueueSpec(QUEUE, "/", "bench-0", True, arguments={})
        self._shard.receive(
            envelope.control(
                wire.CONTROLLER, CONTROLLER_INCARNATION, EPOCH, 0, wire.Assign([queue])
            ),
            self._now(),
        )
        self._join(DOOR, INCARNATION)
        attach = wire.Attach(
            1, QUEUE, CONSUMER, CONNECTION, CHANNEL, "c0", not self._acks, False, 0, 0
        )
        self._shard.receive(envelope.control(*WHO, attach), self._now())
        self._shard.turn_end(self._now())

    def _join(self, peer: int, incarnation: int) -> None:
        self._shard.receive(
            envelope.control(peer, incarnation, 0, 0, wire.Join(f"peer-{peer}")), self._now()
        )

    @staticmethod
    def _now() -> int:
        return time.monotonic_ns() // 1_000_000

    # -- stages ------------------------------------------------------------------------------------

    def turn(self, around: Callable[[str, Callable[[], Any]], Any]) -> int:
        """Return how many messages came out at the end."""
        found = around("scan", self._scan)
        batch = around("pack", lambda: self._pack(found))
        assert around("ring", self._out.put(batch))
        now = self._now()  # a shard looks at its clock once in a pass
        if around("enqueue", partial(self._out.offer, self._shard.short_way, 1)):
            around("enqueue", partial(self._enqueue, now))
        messages = around("dequeue", partial(self._shard.turn_end, now))
        came = 0
        for message in [each.message for each in messages if _is_deliver(each.message)]:
            assert around("ring", self._back.put(message))
            around("ring", self._back.ring)
            ((arrived,), _) = around("ring", self._back.take)
            written, taken = around("frames", partial(self._frames, arrived))
            came += written
            self._shard.receive(envelope.credit(*WHO, [(CONNECTION, taken)]), self._now())
        if self._acks:
            acks = self._ack_frames()
            around("settle", lambda: self._settle(acks))
        return came

    def _scan(self) -> list[tuple[bytes, int]]:
        """Return the tables of the read and how many publishes each has."""
        at, found = 0, []
        while at < len(self._read):
            at, table, count, _, _ = frames.scan(
                self._read, at, len(self._read), STATES, FRAME_BYTES_MAX, 1 << 27
            )
            found.append((table, count))
        return found

    def _pack(self, tables: list[tuple[bytes, int]]) -> envelope.Parts:
        now_ms = time.time_ns() // 1_000_000
        for table, count in tables:
            packed, _ = self._packer.pack(self._routes, self._read, table, 0, CONNECTION, 0, now_ms)
            assert packed == count
            self._packer.take_touched()
        self._batch += 1
        message = self._packer.take_parts(0, *WHO[:3], self._batch, False)
        assert message is not None
        return message

    def _enqueue(self, now: int) -> None:
        for message in self._out.take()[0]:
            self._shard.receive(message, now)
        self._out.let_go()

    def _frames(self, message: envelope.Message) -> tuple[int, int]:
        """Return the messages and bytes of the frames."""
        came = taken = 0
        for _, _, _, _, redelivered, count, blob, *_ in codec.read_deliveries(message):
            assert isinstance(blob, memoryview)  # nobody lends bodies here
            to_frames = (
                contents.deliveries if len(blob) < LARGE_BYTES * count else contents.delivery_parts
            )
            data = to_frames(blob, count, CHANNEL, TAG, self._tag + 1, redelivered, FRAME_BYTES_MAX)
            assert len(data) > 0
            self._tag += count
            came += count
            taken += len(blob)
        return came, taken

    def _ack_frames(self) -> bytes:
        tags = [*range(self._acked + ACK_EVERY, self._tag, ACK_EVERY), self._tag]
        return b"".join(
            struct.pack(">BHIHHQBB", 1, CHANNEL, 13, 60, 80, tag, 1, 0xCE) for tag in tags
        )

    def _settle(self, acks: bytes) -> None:
        at = 0
        while at < len(acks):
            at, _, ranges = frames.settles(acks, at, len(acks))
            settled = [
                (CONSUMER, wire.ACK, ranges[i - 1][1] + 1 if i else self._acked + 1, each[1])
                for i, each in enumerate(ranges)
            ]
            self._shard.receive(envelope.settles(*WHO, settled), self._now())
        self._acked = self._tag

    def close(self) -> None:
        for store in self._shard.stores.values():
            store.close()


def measured(
    directory: str, body_bytes: int, count: int, acks: bool, seconds: float
) -> dict[str, float]:
    """Return the nanoseconds per message of each stage in the best round.

    The best round counts because others share the machine.
    """
    with tempfile.TemporaryDirectory(dir=directory) as path:
        way = Path(path, body_bytes, count, acks)
        best: dict[str, float] = {}
        for at in range(ROUNDS + 1):
            spent = dict.fromkeys(STAGES, 0)

            def timed(stage: str, act: Callable[[], Any], spent: dict[str, int] = spent) -> Any:
                since = time.thread_time_ns()
                result = act()
                spent[stage] += time.thread_time_ns() - since
                return result

            messages, until = 0, time.perf_counter() + seconds / ROUNDS
            while time.perf_counter() < until:
                messages += way.turn(timed)
            if at:  # the first round warms up
                best = {
                    stage: min(best.get(stage, 1e18), spent[stage] / messages) for stage in STAGES
                }
        way.close()
        return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="of each row")
    parser.add_argument("--data", default=None, help="directory for the store")
    options = parser.parse_args()
    print(f"Nanoseconds of CPU a message; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(
        f"| body | a read | acks | {' | '.join(STAGES)} | all |\n|{' ---: |' * (len(STAGES) + 4)}"
    )
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for body_bytes, count in SIZES:
        for acks in (False, True) if (body_bytes, count) == (16, 0) else (False,):
            row = measured(
                options.data or tempfile.gettempdir(), body_bytes, count, acks, options.seconds
            )
            publishes = count or max(1, READ_BYTES // len(publish(body_bytes)))
            show(f"{body_bytes} B | {publishes} | {'yes' if acks else ''}", row)
            rows.setdefault((body_bytes, count), row)
    small, single, large = rows[SMALL, 0], rows[SMALL, 1], rows[LARGE, 0]
    show("**a batch** | | ", {stage: single[stage] - small[stage] for stage in STAGES})
    show("**a message** | | ", small)
    show(
        "**a byte** | | ",
        {stage: (large[stage] - single[stage]) / (LARGE - SMALL) for stage in STAGES},
    )


def show(head: str, row: dict[str, float]) -> None:
    cells = [f"{row[stage]:.3g}" for stage in STAGES]
    print(f"| {head} | {' | '.join(cells)} | {sum(row.values()):.3g} |", flush=True)


if __name__ == "__main__":
    main()
