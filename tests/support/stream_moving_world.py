"""A stream moves between two shards. Processes die, and requests are lost or come twice.

The world is that of moving_world.py, with a stream in the place of the queue. The consumer has a
name, and goes on where the front door knows that it was. Whatever happens, an offset has one
message and a message one offset; the offsets that the consumer sees for the first time follow each
other, apart from what retention has removed; what comes twice is marked; what was confirmed is
there. Another name has a position that a client sets now and then. It is never one that was not
set, and the last one if no shard dies.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.shardd.queues import StreamQueue
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from shardmq.shardd.stores import StoreHome
from shardmq.shardd.wire import messages as m
from tests.reference.record import split_messages
from tests.support.faulty_files import FaultyFiles
from tests.support.moving_world import (
    CHANNEL,
    CONNECTION,
    PREFETCH,
    SEGMENT_BYTES,
    Home,
    PromiseBroken,
    ShardLife,
    World,
    number_in,
)

NAME, IDLE = "name", "idle"


class HomeOfStreams(Home):
    """A home whose streams lie beside its store, in `stream.ID`."""

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> QueueLog:
        log = self._log(f"stream.{queue_id}")
        log.recover()
        return QueueLog(log)

    def _log(self, path: str) -> StreamLog:
        cache = StreamCache(self.files)
        return StreamLog(path, files=self.files, segment_bytes=SEGMENT_BYTES, cache=cache)

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None:
        paths = {name.partition("/")[0] for name in self.files.names}
        for path in paths:
            kind, _, number = path.partition(".")
            if kind == "stream" and int(number) not in queue_ids:
                self._log(path).delete_all()


class _Acknowledged(set[int]):
    """The offsets that were acknowledged, which the consumer does not hold any more."""

    def __init__(self, held: set[int]) -> None:
        self._held = held

    def add(self, offset: int) -> None:
        self._held.discard(offset)
        super().add(offset)


class StreamWorld(World):
    arguments = {
        "x-queue-type": "stream",
        "x-max-length-bytes": 3 * SEGMENT_BYTES,
        "x-stream-max-segment-size-bytes": SEGMENT_BYTES,
    }
    calls_off = 0.005  # the move of a stream takes many moments

    def __init__(
        self,
        seed: int,
        faults: float = 0.1,
        kills: float = 0.02,
        definitions: type[Definitions] = Definitions,
    ) -> None:
        self.next = 0  # the offset behind the last delivery
        self.unsettled: set[int] = set()
        self.meaning: dict[int, int] = {}  # the message of each offset
        self.offset_of: dict[int, int] = {}
        self.gaps: set[int] = set()  # offsets that retention removed unseen, and that behind them
        self.idle: list[int] = []  # positions that were set
        super().__init__(seed, faults, kills, definitions)
        self.may_set_back = kills > 0
        self.acknowledged = _Acknowledged(self.unsettled)

    def home(self, files: FaultyFiles) -> StoreHome:
        return HomeOfStreams(files)  # type: ignore[return-value] # as in moving_world.py

    def delivered(
        self, shard: ShardLife, count: int, blob: bytes, redelivered: bool
    ) -> Sequence[int]:
        offsets = array("Q", blob[: 8 * count])
        for offset, stored in zip(offsets, split_messages(blob[8 * count :]), strict=True):
            self._seen_at(shard, offset, number_in(stored), redelivered)
        self.unsettled.update(offsets)
        return offsets

    def _seen_at(self, shard: ShardLife, offset: int, message: int, redelivered: bool) -> None:
        if self.meaning.setdefault(offset, message) != message:
            raise PromiseBroken(f"offset {offset} is {self.meaning[offset]} and {message}")
        if self.offset_of.setdefault(message, offset) != offset:
            raise PromiseBroken(f"{message} is at {self.offset_of[message]} and at {offset}")
        if offset < self.next:
            if not redelivered:
                raise PromiseBroken(f"offset {offset} comes twice, and is not marked")
            return
        if offset > self.next:
            firsts = [each.log.stream.first_offset for each in shard.shard.streams.queues.values()]
            if max(firsts, default=0) < offset:
                raise PromiseBroken(f"offset {offset} comes behind {self.next - 1}")
            self.gaps.update(range(self.next, offset + 1))
        self.next = offset + 1

    def _send_attach(self, shard: ShardLife) -> None:
        at = min([self.next, *self.unsettled])
        self.unsettled.clear()
        shard.tell(
            m.AttachReader(
                0, self.view.id, self.consumer, CONNECTION, CHANNEL, "tag", False, False, 0,
                PREFETCH, resumed=True, read=m.ReadFrom("at", at, NAME, seen_below=self.next),
            )
        )  # fmt: skip

    def churn(self) -> None:
        """Set the position of the other name, or do what other clients do."""
        stream = self._stream()
        if stream is None or self.random.random() < 0.5:
            super().churn()
            return
        offset = self.random.randint(0, stream.log.stream.committed_offset)
        if offset in self.idle:
            return  # nobody could tell which of two is the last one
        self.request_number += 1
        shard, number = self.shards[self.view.shard], self.request_number
        self.idle.append(offset)
        shard.tell(m.StoreOffset(number, self.view.id, IDLE, offset))
        shard.turn()
        if not isinstance(shard.replies.pop(number, None), m.Done):
            raise PromiseBroken("a position cannot be set")

    def _stream(self) -> StreamQueue | None:
        return self.shards[self.view.shard].shard.streams.queues.get(self.view.id)

    def check_all(self) -> None:
        super().check_all()
        self.check_positions()

    def check_missing(self) -> None:
        stream = self._stream()
        assert stream is not None
        if self.next != stream.log.stream.next_offset:
            raise PromiseBroken(f"the consumer is at {self.next}, not at the end")
        before = 0
        for offset in sorted(self.meaning):
            message = self.meaning[offset]
            lost = [each for each in range(before + 1, message) if each in self.confirmed]
            if lost and offset not in self.gaps:
                raise PromiseBroken(f"never came: {lost[:10]}")
            before = message
        if self.confirmed and max(self.confirmed) > before:
            raise PromiseBroken(f"never came: {max(self.confirmed)}")

    def check_positions(self) -> None:
        stream = self._stream()
        assert stream is not None
        positions = stream.log.stream.positions
        if positions.get(NAME.encode()) != self.next:
            raise PromiseBroken(f"the name is at {positions.get(NAME.encode())}, not {self.next}")
        idle = positions.get(IDLE.encode())
        allowed: list[int | None] = [*self.idle[-1:]]
        if self.may_set_back or not self.idle:
            allowed = [None, *self.idle]
        if idle not in allowed:
            raise PromiseBroken(f"the other name is at {idle}, which is not of {allowed}")
