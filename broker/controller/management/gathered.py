"""Numbers of shards and front doors, asked together, at most once in STATS_FRESH_S, whoever wants them.

What does not answer in STATS_S_MAX is left out: a listing shows what is known and waits for nobody longer than that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from broker.control import DoorReport
from shardd.wire.messages import ConsumerStats, QueueStats, ReaderStats, StatsReply, StreamsReply, StreamStats

STATS_FRESH_S = 1.0
STATS_S_MAX = 2.0

COUNTERS = ("published", "delivered", "acked", "redelivered", "got", "repeated")

T = TypeVar("T")


class Shards(Protocol):
    async def stats(self) -> dict[int, StatsReply]: ...


class Doors(Protocol):
    async def reports(self) -> list[DoorReport]: ...


@dataclass(slots=True)
class Stats:
    """One look at everything. `before`: the look before, without its own `before`, to make rates of. `delayed`: by
    queue id, of those where exchanges keep messages; they are not among `queues`."""

    at: float = 0.0
    queues: dict[int, QueueStats] = field(default_factory=dict)
    delayed: dict[int, int] = field(default_factory=dict)
    consumers: list[ConsumerStats] = field(default_factory=list)
    streams: dict[int, StreamStats] = field(default_factory=dict)  # by queue
    readers: dict[tuple[int, int, int, int, str], ReaderStats] = field(default_factory=dict)  # by `reader_key`
    shards: dict[int, dict[str, float]] = field(default_factory=dict)
    connections: dict[str, dict[str, Any]] = field(default_factory=dict)
    channels: list[dict[str, Any]] = field(default_factory=list)
    active: dict[int, str] = field(default_factory=dict)  # by queue, the tag of an active consumer
    counters: dict[str, float] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    before: Stats | None = None

    def rate(self, now: int, before: int) -> float:
        """A shard that started anew counts from 0: no rate then, rather than a negative one."""
        if self.before is None or self.at <= self.before.at:
            return 0.0
        return max(0.0, (now - before) / (self.at - self.before.at))


class Gatherer:
    def __init__(
        self,
        shards: Shards,
        doors: Doors,
        clock: Callable[[], float] = time.monotonic,
        delay_queues: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`delay_queues`: ids of those where exchanges keep messages."""
        self._delay_queues = delay_queues
        self._shards = shards
        self._doors = doors
        self._clock = clock
        self._last = Stats()
        self._asking: asyncio.Task[Stats] | None = None

    async def now(self) -> Stats:
        """At most STATS_FRESH_S old."""
        if self._last.at and self._clock() - self._last.at < STATS_FRESH_S:
            return self._last
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        # One who gives up must not take the answer from the others.
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[Stats]) -> None:
        self._asking = None

    async def _ask(self) -> Stats:
        replies, reports = await asyncio.gather(_in_time(self._shards.stats(), {}), _in_time(self._doors.reports(), []))
        before = self._last if self._last.at else None
        if before is not None:
            before.before = None
        self._last = _merged(Stats(at=self._clock(), before=before), replies, reports, self._delay_queues())
        return self._last


async def _in_time(answer: Awaitable[T], otherwise: T) -> T:
    try:
        return await asyncio.wait_for(answer, STATS_S_MAX)
    except TimeoutError:
        return otherwise


def _merged(
    stats: Stats, replies: dict[int, StatsReply], reports: list[DoorReport], delay_queues: Collection[int]
) -> Stats:
    for shard, reply in replies.items():
        stats.queues.update((queue.id, queue) for queue in reply.queues)
        stats.consumers.extend(reply.consumers)
        stats.active.update((consumer.queue, consumer.tag) for consumer in reply.consumers if consumer.active)
        stats.shards[shard] = reply.process
        if isinstance(reply, StreamsReply):
            stats.streams.update((stream.id, stream) for stream in reply.streams)
            stats.readers.update((reader_key(reader), reader) for reader in reply.readers)
    for id in delay_queues:
        if (delaying := stats.queues.pop(id, None)) is not None:
            stats.delayed[id] = delaying.ready
    for report in reports:
        stats.connections.update((row["owner"], row) for row in report.connections)
        stats.channels.extend(report.channels)
        for name, value in report.counters.items():
            stats.counters[name] = stats.counters.get(name, 0) + value
    for name in (*COUNTERS, "ready", "unacked", "ready_bytes", "unacked_bytes"):
        stats.totals[name] = sum(getattr(queue, name) for queue in stats.queues.values())
    return stats


def reader_key(of: ConsumerStats | ReaderStats) -> tuple[int, int, int, int, str]:
    return of.queue, of.door, of.connection, of.channel, of.tag


def lag(stats: Stats, reader: ReaderStats) -> int:
    """Messages it has before it."""
    stream = stats.streams.get(reader.queue)
    return max(stream.next_offset - max(reader.offset, stream.first_offset), 0) if stream is not None else 0


RABBITMQ_COUNTERS = {
    "published": "publish",
    "delivered": "deliver_get",
    "acked": "ack",
    "redelivered": "redeliver",
    "got": "get",
    "repeated": "duplicates",
}


def message_stats(stats: Stats, queue: QueueStats | None) -> dict[str, Any]:
    """Of one queue; None: of all together."""
    last = stats.before
    shown: dict[str, Any] = {}
    for name in COUNTERS:
        if queue is not None:
            earlier = last.queues.get(queue.id) if last else None
            value: int = getattr(queue, name)
            before: int = getattr(earlier, name) if earlier else value
        else:
            value = stats.totals.get(name, 0)
            before = last.totals.get(name, value) if last else value
        shown[RABBITMQ_COUNTERS[name]] = value
        shown[f"{RABBITMQ_COUNTERS[name]}_details"] = {"rate": stats.rate(value, before)}
    return shown
