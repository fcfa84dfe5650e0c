"""Numbers of shards and front doors, asked when somebody wants them, once for all who want them.

A shard tells of a few queues at a time, so that no message waits for a listing, and a look at all is one of the long
works that share a part of a processor (`turns.py`); of all queues together nobody hears more often than what it costs
allows (`fresh_s`), of a page of them (`of`) at once. What does not answer in STATS_S_MAX
is left out: a listing shows what is known and waits for nobody longer than that.
"""

from __future__ import annotations

import asyncio
import math
import time
from asyncio import Future
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec.structs import astuple

from broker.changes import QueuePut
from broker.control import DoorReport
from broker.controller.authority import ShardSilent
from broker.controller.management.turns import LOOK_RESTS_S_MAX, Turns
from broker.routing import delaying
from shardd.wire import messages as wire
from shardd.wire.messages import (
    ConsumerStats,
    GapsReply,
    Message,
    QueueStats,
    ReaderStats,
    StatsReply,
    StreamsReply,
    StreamStats,
)

STATS_FRESH_S = 1.0
FRESH_SHARE = 10  # looking at everything takes at most one second of so many
FRESH_S_MAX = 30.0
STATS_S_MAX = 2.0
LONG_LOOK_S = 0.05
ORDER_S_MAX = 60.0  # a listing may be in the order of then, with the numbers of now
LOOKED_AT_MAX = 10_000  # queues whose last numbers are remembered, to make rates of
RATE_S_MAX = 60.0  # older ones make no rate of now

COUNTERS = ("published", "delivered", "acked", "redelivered", "got", "repeated")
SIZES = ("ready", "unacked", "ready_bytes", "unacked_bytes", "consumers")

_QUEUE_FIELDS = QueueStats.__struct_fields__

T = TypeVar("T")


class Shard(Protocol):
    number: int
    ready: bool


class Shards(Protocol):
    @property
    def shards(self) -> Sequence[Shard]: ...

    def request(self, shard: int, message: Callable[[int], Message], wait_s: float = ...) -> Future[Any]: ...


class Doors(Protocol):
    async def reports(self, totals_only: bool = False) -> list[DoorReport]: ...


@dataclass(slots=True)
class Stats:
    """One look. `before`: the look before, without its own `before`, to make rates of; `earlier`: the same for single
    queues, and when. `delayed`: by queue id, of those where exchanges keep messages; they are not among `queues`."""

    at: float = 0.0
    queues: dict[int, QueueStats] = field(default_factory=dict)
    delayed: dict[int, int] = field(default_factory=dict)
    consumers: list[ConsumerStats] = field(default_factory=list)
    streams: dict[int, StreamStats] = field(default_factory=dict)  # by queue
    gaps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of damaged streams, by queue
    readers: dict[tuple[int, int, int, int, str], ReaderStats] = field(default_factory=dict)  # by `reader_key`
    shards: dict[int, dict[str, float]] = field(default_factory=dict)
    sizes: dict[int, dict[str, float]] = field(default_factory=dict)  # by shard, what it tells as histograms
    connections: dict[str, dict[str, Any]] = field(default_factory=dict)
    connections_at: float = 0.0  # when they and channels were looked at, which may be later than `at`
    # When single connections were looked at before, and what they said: looks at totals alone may lie in between.
    connections_before: tuple[float, dict[str, dict[str, Any]]] = (0.0, {})
    channels: list[dict[str, Any]] = field(default_factory=list)
    channels_before: tuple[float, dict[tuple[str, int], dict[str, Any]]] = (0.0, {})
    active: dict[int, str] = field(default_factory=dict)  # by queue, the tag of an active consumer
    exclusive: dict[int, str] = field(default_factory=dict)  # by queue, the tag of the one that lets no other in
    counters: dict[str, float] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*COUNTERS, *SIZES), 0))
    before: Stats | None = None
    earlier: dict[int, tuple[float, QueueStats]] = field(default_factory=dict)
    totals_only: bool = False  # nothing of single connections and channels
    loads: dict[int, dict[str, int]] = field(default_factory=dict)  # totals by shard, those of queues gone among them

    def queue(self, queue: QueuePut) -> QueueStats | None:
        """None while its shard is silent."""
        known = self.queues.get(queue.id)
        return QueueStats(queue.id) if known is None and queue.shard in self.shards else known

    def rate(self, now: float, before: float, at: float | None = None) -> float:
        """A shard that started anew counts from 0: no rate then, rather than a negative one. `at`: when it was
        `before`, if not at the look before."""
        if at is None:
            at = self.before.at if self.before is not None else self.at
        return max(0.0, (now - before) / (self.at - at)) if self.at > at else 0.0

    def rate_of_client(self, now: float, before: float, at: float) -> float:
        """Of what is told of a connection or channel; `at`: when it was `before`."""
        return max(0.0, (now - before) / (self.connections_at - at)) if self.connections_at > at else 0.0


class _Look(NamedTuple):
    at: float
    stats: QueueStats
    earlier: tuple[float, QueueStats] | None


class Gatherer:
    def __init__(
        self,
        shards: Shards,
        doors: Doors,
        clock: Callable[[], float] = time.monotonic,
        hidden_queues: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """`hidden_queues`: ids and names of those where exchanges keep messages."""
        self._hidden_queues = hidden_queues
        self._shards = shards
        self._doors = doors
        self._clock = clock
        self._last = Stats()
        self._connections: tuple[float, dict[str, dict[str, Any]]] = (0.0, {})
        self._channels: tuple[float, dict[tuple[str, int], dict[str, Any]]] = (0.0, {})
        self._took = 0.0
        self._asking: asyncio.Task[Stats] | None = None
        self._asking_totals = False
        self._looks: OrderedDict[int, _Look] = OrderedDict()

    @property
    def fresh_s(self) -> float:
        """How old a look at everything may be."""
        return min(max(STATS_FRESH_S, FRESH_SHARE * self._took), FRESH_S_MAX)

    async def now(self, totals_only: bool = False) -> Stats:
        """Of everything, at most `fresh_s` old. `totals_only`: connections and channels need not be told one by one."""
        is_fresh = self._last.at and self._clock() - self._last.at < self.fresh_s
        if is_fresh and (totals_only or not self._last.totals_only):
            return self._last
        asking = self._asking
        if asking is None:
            asking = self._start(self._described(self._last)) if is_fresh else self._begin(totals_only)
        elif self._asking_totals and not totals_only:
            asking = self._start(self._described(asking))
        # One who gives up must not take the answer from the others.
        return await asyncio.shield(asking)

    def forget(self) -> None:
        """What was seen before; rates begin anew."""
        self._last, self._connections, self._channels = Stats(), (0.0, {}), (0.0, {})
        self._looks.clear()

    async def anew(self) -> Stats:
        """Of everything as it is now, for who must not miss what has just come."""
        return await self._begin(totals_only=True)

    async def lately(self) -> Stats:
        """Of everything, to put things in order: where a look takes long, one of a while ago, and the next begins
        while nobody waits for it."""
        if self._took < LONG_LOOK_S or self._clock() - self._last.at >= ORDER_S_MAX:
            return await self.now(totals_only=True)
        if self._asking is None and self._clock() - self._last.at >= self.fresh_s:
            self._begin(totals_only=True)
        return self._last

    def _begin(self, totals_only: bool) -> asyncio.Task[Stats]:
        return self._start(self._ask(totals_only), totals_only)

    def _start(self, ask: Coroutine[Any, Any, Stats], totals_only: bool = False) -> asyncio.Task[Stats]:
        asking = self._asking = asyncio.create_task(ask)
        self._asking_totals = totals_only
        asking.add_done_callback(self._asked)
        return asking

    def _asked(self, task: asyncio.Task[Stats]) -> None:
        if self._asking is task:
            self._asking = None

    async def _ask(self, totals_only: bool) -> Stats:
        begun = self._clock()
        before = self._last if self._last.at else None
        if before is not None:
            before.before = None
        asked = [shard.number for shard in self._shards.shards if shard.ready]
        turns = Turns(LOOK_RESTS_S_MAX)
        looks = [self._look_over(shard, turns) for shard in asked]
        reports, seen = await asyncio.gather(_in_time(self._doors.reports(totals_only), []), asyncio.gather(*looks))
        stats = Stats(at=self._clock(), before=before, totals_only=totals_only)
        for each in seen:
            _add_shard(stats, each)
        for report in reports:
            _add_door(stats, report)
        _set_apart(stats, self._hidden_queues())
        if not totals_only:
            self._describe(stats, reports)
        # To wait for a shard that is silent is no work, nor is a rest; the others' news must not get old for it.
        took = stats.at - begun - turns.rested_s / max(1, len(asked))
        self._took = max(0.0, took) if stats.shards.keys() >= set(asked) else 0.0
        self._last = stats
        return stats

    async def _described(self, look: Stats | asyncio.Task[Stats]) -> Stats:
        """A look at totals, with connections and channels besides: queues need not be looked at again for them."""
        stats = look if isinstance(look, Stats) else await asyncio.shield(look)
        reports = await _in_time(self._doors.reports(), [])
        if stats.totals_only:
            self._describe(stats, reports)
        return stats

    def _describe(self, stats: Stats, reports: Iterable[DoorReport]) -> None:
        for report in reports:
            stats.connections.update((row["owner"], row) for row in report.connections)
            stats.channels.extend(report.channels)
        stats.totals_only, stats.connections_at = False, self._clock()
        at, channels = stats.connections_at, {(report["owner"], report["number"]): report for report in stats.channels}
        stats.connections_before, self._connections = self._connections, (at, stats.connections)
        stats.channels_before, self._channels = self._channels, (at, channels)

    async def _look_over(self, shard: int, turns: Turns) -> Stats:
        """All used queues of one shard, some at a time; nothing of one that falls silent meanwhile."""
        seen, passed, at_a_time = Stats(), 0, 0
        while True:
            turns.pause()
            reply = await self._reply(shard, None, passed)
            turns.go_on()
            if reply is None:
                return Stats()
            _add_reply(seen, shard, reply)
            if not reply.rest:
                return seen
            # A shard of another release may tell of more or fewer; of the first ones none has gone meanwhile.
            at_a_time = at_a_time or len(reply.queues) or wire.STATS_QUEUES_MAX
            passed += at_a_time
            await turns.others_first()

    async def _reply(self, shard: int, queues: list[int] | None, passed: int = 0) -> StatsReply | None:
        asked = self._shards.request(shard, lambda n: wire.Stats(n, queues, passed), STATS_S_MAX)
        try:
            reply = await _in_time(asked, None)
        except ShardSilent:
            return None
        return reply if isinstance(reply, StatsReply) else None

    async def of(self, queues: Iterable[QueuePut]) -> Stats:
        """Of these queues, their consumers and their shards alone; at most STATS_FRESH_S old."""
        if self._last.at and self._clock() - self._last.at < STATS_FRESH_S:
            return self._last
        wanted: dict[int, list[int]] = {}
        for queue in queues:
            wanted.setdefault(queue.shard, []).append(queue.id)
        return await self._of(wanted)

    async def of_shards(self) -> Stats:
        """What shards say of themselves; at most STATS_FRESH_S old."""
        if self._last.at and self._clock() - self._last.at < STATS_FRESH_S:
            return self._last
        return await self._of({shard.number: [] for shard in self._shards.shards})

    async def _of(self, wanted: dict[int, list[int]]) -> Stats:
        ready = [shard.number for shard in self._shards.shards if shard.ready and shard.number in wanted]
        stats = Stats()
        for shard, parts in zip(ready, await asyncio.gather(*(self._some(n, wanted[n]) for n in ready)), strict=True):
            for reply in parts:
                _add_reply(stats, shard, reply)
        stats.at = self._clock()
        _set_apart(stats, self._hidden_queues())
        self._remember(stats)
        return stats

    async def _some(self, shard: int, ids: list[int]) -> list[StatsReply]:
        replies = []
        for start in range(0, len(ids) or 1, wire.STATS_QUEUES_MAX):
            reply = await self._reply(shard, ids[start : start + wire.STATS_QUEUES_MAX])
            if reply is None:
                return []
            replies.append(reply)
        return replies

    def _remember(self, stats: Stats) -> None:
        """Rates are made of two looks at least STATS_FRESH_S apart, whoever looked."""
        for id, queue in stats.queues.items():
            look = self._looks.pop(id, None)
            if look is None or stats.at - look.at > RATE_S_MAX:
                look = _Look(stats.at, queue, None)
            elif stats.at - look.at >= STATS_FRESH_S:
                look = _Look(stats.at, queue, (look.at, look.stats))
            self._looks[id] = look
            if look.earlier is not None:
                stats.earlier[id] = look.earlier
        while len(self._looks) > LOOKED_AT_MAX:
            self._looks.popitem(last=False)


async def _in_time(answer: Awaitable[T], otherwise: T) -> T:
    try:
        return await asyncio.wait_for(answer, STATS_S_MAX)
    except TimeoutError:
        return otherwise


def _add_reply(stats: Stats, shard: int, reply: StatsReply) -> None:
    stats.consumers.extend(reply.consumers)
    stats.active.update((consumer.queue, consumer.tag) for consumer in reply.consumers if consumer.active)
    stats.exclusive.update((consumer.queue, consumer.tag) for consumer in reply.consumers if consumer.exclusive)
    if reply.process or shard not in stats.shards:
        _add_process(stats, shard, reply.process)
    for queue in reply.queues:
        stats.queues[queue.id] = queue
    if isinstance(reply, StreamsReply):
        stats.streams.update((stream.id, stream) for stream in reply.streams)
        stats.readers.update((reader_key(reader), reader) for reader in reply.readers)
    if isinstance(reply, GapsReply):
        stats.gaps.update(reply.gaps)
    for name, column in zip(_QUEUE_FIELDS, zip(*map(astuple, reply.queues), strict=True), strict=False):
        if name in stats.totals:
            stats.totals[name] += sum(column)


def _add_process(stats: Stats, shard: int, process: Mapping[str, float]) -> None:
    stats.shards[shard] = {name: value for name, value in process.items() if "." not in name}
    stats.sizes[shard] = {name: value for name, value in process.items() if "." in name}


def _add_shard(stats: Stats, seen: Stats) -> None:
    stats.queues.update(seen.queues)
    stats.consumers.extend(seen.consumers)
    stats.active.update(seen.active)
    stats.exclusive.update(seen.exclusive)
    stats.shards.update(seen.shards)
    stats.sizes.update(seen.sizes)
    stats.streams.update(seen.streams)
    stats.gaps.update(seen.gaps)
    stats.readers.update(seen.readers)
    for name, value in seen.totals.items():
        stats.totals[name] += value
    for shard, process in seen.shards.items():
        stats.loads[shard] = dict(seen.totals)
        for name in COUNTERS:
            gone = int(process.get(f"gone_{name}", 0))
            stats.totals[name] += gone
            stats.loads[shard][name] += gone


def _set_apart(stats: Stats, hidden_queues: Mapping[int, str]) -> None:
    for id, name in hidden_queues.items():
        known = stats.queues.pop(id, None)
        if delaying.is_delay_queue(name):
            stats.delayed[id] = known.ready if known is not None else 0
        for counted in (*COUNTERS, *SIZES) if known is not None else ():
            stats.totals[counted] -= getattr(known, counted)


def _add_door(stats: Stats, report: DoorReport) -> None:
    for name, value in report.counters.items():
        stats.counters[name] = stats.counters.get(name, 0) + value


def reader_key(of: ConsumerStats | ReaderStats) -> tuple[int, int, int, int, str]:
    return of.queue, of.door, of.connection, of.channel, of.tag


def lag(stats: Stats, reader: ReaderStats) -> int:
    """Messages it has before it."""
    stream = stats.streams.get(reader.queue)
    return behind(stream, reader.offset) if stream is not None else 0


def behind(stream: StreamStats, offset: int) -> int:
    """Messages of a stream from `offset` on."""
    return max(stream.next_offset - max(offset, stream.first_offset), 0)


RABBITMQ_COUNTERS = {
    "published": "publish",
    "delivered": "deliver_get",
    "acked": "ack",
    "redelivered": "redeliver",
    "got": "get",
    "repeated": "duplicates",
}


def depth_rates(stats: Stats, queue: QueueStats) -> dict[str, Any]:
    """How fast one queue grows or shrinks, messages a second."""
    at, before = _before(stats, queue)
    return depth_details(queue.ready - before.ready, queue.unacked - before.unacked, stats.at - at)


def depth_details(ready: int, unacked: int, seconds: float) -> dict[str, Any]:
    """Rates of what has grown by so many messages in so many seconds."""
    grown = {"": ready + unacked, "_ready": ready, "_unacknowledged": unacked}
    return {
        f"messages{which}_details": {"rate": count / seconds if seconds > 0 else 0.0} for which, count in grown.items()
    }


def message_stats(stats: Stats, queue: QueueStats) -> dict[str, Any]:
    """Of one queue."""
    shown: dict[str, Any] = {}
    for name, (value, before, at) in _counted(stats, queue).items():
        shown[RABBITMQ_COUNTERS[name]] = value
        shown[f"{RABBITMQ_COUNTERS[name]}_details"] = {"rate": stats.rate(value, before, at)}
    # What goes by consumers alone is what does not go by basic.get.
    shown["deliver"] = shown["deliver_get"] - shown["get"]
    shown["deliver_details"] = {"rate": max(0.0, shown["deliver_get_details"]["rate"] - shown["get_details"]["rate"])}
    return shown


# RabbitMQ's names of what front doors count.
OF_DOORS = {
    "publish": ("received",),
    "confirm": ("confirmed",),
    "return_unroutable": ("returned",),
    "drop_unroutable": ("unroutable_dropped",),
    "deliver": ("delivered_manual",),
    "deliver_no_ack": ("delivered_auto",),
    "get": ("got_manual",),
    "get_no_ack": ("got_auto",),
    "get_empty": ("got_empty",),
    "deliver_get": ("delivered_manual", "delivered_auto", "got_manual", "got_auto"),
}


def all_message_stats(stats: Stats) -> dict[str, Any]:
    """What clients did with all queues together."""
    before = stats.before or stats
    shown: dict[str, Any] = {}
    for name, parts in OF_DOORS.items():
        value, earlier = (sum(int(look.counters.get(part, 0)) for part in parts) for look in (stats, before))
        shown[name], shown[f"{name}_details"] = value, {"rate": stats.rate(value, earlier)}
    for name, counter in (("ack", "acked"), ("redeliver", "redelivered")):
        value, earlier = stats.totals[counter], before.totals[counter]
        shown[name], shown[f"{name}_details"] = value, {"rate": stats.rate(value, earlier)}
    return shown


def depths(stats: Stats) -> dict[str, Any]:
    """Of all queues together; their rates may well be negative."""
    before = stats.before or stats
    shown: dict[str, Any] = {}
    for name, parts in (("", ("ready", "unacked")), ("_ready", ("ready",)), ("_unacknowledged", ("unacked",))):
        value, earlier = (sum(look.totals[part] for part in parts) for look in (stats, before))
        rate = (value - earlier) / (stats.at - before.at) if stats.at > before.at else 0.0
        shown[f"messages{name}"], shown[f"messages{name}_details"] = value, {"rate": rate}
    return shown


class Rates:
    """Of numbers, from when they are looked at: between two looks at least STATS_FRESH_S apart. Where they only rise,
    one that fell began anew, and has no rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, may_fall: bool = False) -> None:
        self._clock = clock
        self._least = -math.inf if may_fall else 0.0
        self._looks: list[tuple[float, dict[str, float]]] = []

    def forget(self) -> None:
        self._looks.clear()

    def of(self, values: dict[str, float]) -> dict[str, float]:
        now = self._clock()
        if not self._looks or now - self._looks[-1][0] >= STATS_FRESH_S:
            self._looks = [*self._looks[-1:], (now, values)]
        at, before = self._looks[0]
        return {
            name: max(self._least, value - before.get(name, value)) / (now - at) if now > at else 0.0
            for name, value in values.items()
        }


def _counted(stats: Stats, queue: QueueStats) -> dict[str, tuple[int, int, float]]:
    """Each counter's value, its value before, and when that was."""
    at, earlier = _before(stats, queue)
    return {name: (getattr(queue, name), getattr(earlier, name), at) for name in COUNTERS}


def _before(stats: Stats, queue: QueueStats) -> tuple[float, QueueStats]:
    """When the look before was, and what it saw of the queue."""
    last = stats.before
    at, earlier = (last.at, last.queues.get(queue.id)) if last is not None else (stats.at, None)
    if queue.id in stats.earlier:
        at, earlier = stats.earlier[queue.id]
    return at, earlier or queue
