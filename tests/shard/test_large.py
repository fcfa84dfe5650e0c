"""Large messages are read where they lie: in the ring or in the store's write buffer.

They leave unchanged.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from shardmq.shardd.shard import Shard
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.support.dict_store import NoStreams

EPOCH, DOOR, QUEUE, CONSUMER = 2, 0, 7, 1
BODY_BYTES = 400 << 10


class OneStore(NoStreams):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self, vhost: str) -> SegmentStore:
        return SegmentStore(str(self.directory))

    def remove(self, vhost: str) -> None:
        raise AssertionError("no vhost is dropped here")

    def keep_only(self, vhosts: object) -> None:
        pass

    def recovered(self, vhost: str, store: object) -> None:
        pass

    def progress(self, *how_far: object) -> None:
        pass


class Bench:
    """A shard with one queue, whose one consumer acknowledges nothing."""

    def __init__(self, directory: Path) -> None:
        self.shard = Shard(0, EPOCH, 1, OneStore(directory))
        self.batch = 0
        for peer in (m.CONTROLLER, DOOR):
            self.shard.receive(envelope.control(peer, 5, 0, 0, m.Join(f"peer-{peer}")), 1000)
        self.tell(m.CONTROLLER, m.Assign([m.QueueSpec(QUEUE, "/", "q", False)]))
        self.tell(DOOR, m.Attach(1, QUEUE, CONSUMER, 9, 1, "c", True, False, 0, 0))
        self.shard.turn_end(1000)

    def tell(self, peer: int, what: m.Control) -> None:
        self.shard.receive(envelope.control(peer, 5, EPOCH, 0, what), 1000)

    def publish(self, body: bytes) -> None:
        """Publish from a view that changes as soon as the shard has read it, as a ring's does."""
        packer = codec.Packer(1)
        stored = len(body).to_bytes(4, "little") + bytes(4) + b"\0\1q" + body
        packer.add_stored(0, [QUEUE], stored, 9, 1, 0, 1000, 0xFFFFFFFF, 0xFF, False, False)
        self.batch += 1
        message = packer.take(0, DOOR, 5, EPOCH, self.batch, False)
        assert message is not None
        ring = mmap.mmap(-1, len(message))
        ring[:] = message
        self.shard.receive(memoryview(ring).toreadonly(), 1000)
        ring[:] = bytes(len(ring))

    def delivered(self) -> list[bytes]:
        said = [joined(each.message) for each in self.shard.turn_end(1000)]
        blobs = [
            bytes(section[6])
            for message in said
            if envelope.read(message).kind == m.DELIVER
            for section in codec.read_deliveries(message)
        ]
        for blob in blobs:
            self.shard.receive(envelope.credit(DOOR, 5, EPOCH, 0, [(9, len(blob))]), 1000)
        return [blob[11:] for blob in blobs]


def test_each_is_delivered_as_it_was_published(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(1, 30):
        body = bytes([number]) * (BODY_BYTES + number)
        bench.publish(body)
        assert bench.delivered() == [body], number


def test_what_is_handed_out_early_is_not_what_came_later_in_its_place(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(1, 30):
        first, second = bytes([number]) * BODY_BYTES, bytes([100 + number]) * BODY_BYTES
        bench.publish(first)
        bench.tell(DOOR, m.Count(number, QUEUE))  # all that came before is handed out first
        bench.publish(second)
        assert b"".join(bench.delivered()) == first + second, number
