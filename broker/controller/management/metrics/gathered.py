"""Numbers of shards and front doors, asked when somebody wants them, once for all who want them.

A shard tells of a few queues at a time, so that no message waits for a listing, and a look at all is one of the long
works that share a part of a processor (`turns.py`); of all queues together nobody hears more often than what it costs
allows (`fresh_s`), of a page of them (`of`) at once. What does not answer in STATS_S_MAX
is left out: a listing shows what is known and waits for nobody longer than that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from asyncio import Future
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from msgspec.structs import astuple

from shardmq.broker.controller.authority import ShardSilent
from shardmq.broker.controller.management.answers.turns import LOOK_RESTS_S_MAX, Turns
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import delaying
from shardmq.broker.shared.control import DoorReport
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.messages import (
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
# A look at everything is taken so often, whether somebody wants it or not: rates are made of it and of what is seen
# later. Where it takes long it is taken less often, so that it has at most one part in SAMPLE_SHARE of a processor.
SAMPLE_S = 5.0
SAMPLE_SHARE = 50
SAMPLE_S_MAX = 60.0
ORDER_S_MAX = 60.0  # a listing may be in the order of then, with the numbers of now
RATE_S_MAX = 60.0  # what was seen before that makes no rate of now

COUNTERS = ("published", "delivered", "acked", "redelivered", "got", "repeated")
SIZES = ("ready", "unacked", "ready_bytes", "unacked_bytes", "consumers")

_QUEUE_FIELDS = QueueStats.__struct_fields__

log = logging.getLogger(__name__)

T = TypeVar("T")


class Shard(Protocol):
    number: int
    ready: bool


class Shards(Protocol):
    @property
    def shards(self) -> Sequence[Shard]: ...

    def request(
        self, shard: int, message: Callable[[int], Message], wait_s: float = ...
    ) -> Future[Any]: ...


class Doors(Protocol):
    async def reports(self, totals_only: bool = False) -> list[DoorReport]: ...


@dataclass(slots=True)
class Stats:
    """One look. `before`: the look at everything before it, without its own `before`, to make rates of. `delayed`: by
    queue id, of those where exchanges keep messages; they are not among `queues`."""

    at: float = 0.0
    is_sample: bool = False  # nobody had asked for it
    queues: dict[int, QueueStats] = field(default_factory=dict)
    delayed: dict[int, int] = field(default_factory=dict)
    consumers: list[ConsumerStats] = field(default_factory=list)
    streams: dict[int, StreamStats] = field(default_factory=dict)  # by queue
    gaps: dict[int, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # of damaged streams, by queue
    readers: dict[tuple[int, int, int, int, str], ReaderStats] = field(
        default_factory=dict
    )  # by `reader_key`
    shards: dict[int, dict[str, float]] = field(default_factory=dict)
    sizes: dict[int, dict[str, float]] = field(
        default_factory=dict
    )  # by shard, what it tells as histograms
    connections: dict[str, dict[str, Any]] = field(default_factory=dict)
    connections_at: float = (
        0.0  # when they and channels were looked at, which may be later than `at`
    )
    # When single connections were looked at before, and what they said: looks at totals alone may lie in between.
    connections_before: tuple[float, dict[str, dict[str, Any]]] = (0.0, {})
    channels: list[dict[str, Any]] = field(default_factory=list)
    channels_before: tuple[float, dict[tuple[str, int], dict[str, Any]]] = (0.0, {})
    # By vhost and name, messages that came to an exchange and messages that it gave to queues; with them as they were
    # when they were looked at before, as of connections.
    exchanges: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    exchanges_before: tuple[float, dict[tuple[str, str], tuple[int, int]]] = (0.0, {})
    active: dict[int, str] = field(default_factory=dict)  # by queue, the tag of an active consumer
    exclusive: dict[int, str] = field(
        default_factory=dict
    )  # by queue, the tag of the one that lets no other in
    counters: dict[str, float] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*COUNTERS, *SIZES), 0))
    before: Stats | None = None
    is_whole: bool = (
        False  # all shards told of all their queues: what is not among them had done nothing
    )
    totals_only: bool = False  # nothing of single connections and channels
    loads: dict[int, dict[str, int]] = field(
        default_factory=dict
    )  # totals by shard, those of queues gone among them

    def queue(self, queue: QueuePut) -> QueueStats | None:
        """None while its shard is silent."""
        known = self.queues.get(queue.id)
        return QueueStats(queue.id) if known is None and queue.shard in self.shards else known

    def rate(self, now: float, before: float) -> float | None:
        """Return how fast a counter rose since the look before, None if that is not known.

        A shard that started anew counts from 0: nobody knows what it counted before its end.
        """
        return None if self.before is None else _rate(now - before, self.at - self.before.at)

    def rate_of_client(self, now: float, before: float, at: float) -> float | None:
        """Return how fast a counter of a connection or channel rose since `at`, when it was `before`."""
        return _rate(now - before, self.connections_at - at) if at else None

    def earlier(self, queue: QueueStats) -> QueueStats | None:
        """Return what the look before saw of a queue; None if it did not look there."""
        if self.before is None:
            return None
        known = self.before.queues.get(queue.id)
        return QueueStats(queue.id) if known is None and self.before.is_whole else known


def _rate(risen: float, seconds: float) -> float | None:
    return risen / seconds if risen >= 0 and 0 < seconds <= RATE_S_MAX else None


def details(name: str, rate: float | None) -> dict[str, dict[str, float]]:
    """Return a rate as it is shown beside its number; nothing if it is not known, for 0 is a rate, too."""
    return {} if rate is None else {f"{name}_details": {"rate": rate}}


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
        self._exchanges: tuple[float, dict[tuple[str, str], tuple[int, int]]] = (0.0, {})
        self._took = 0.0
        self.noted: list[Callable[[Stats], object]] = []  # called with each sample
        self._asking: asyncio.Task[Stats] | None = None
        self._asking_totals = False

    @property
    def fresh_s(self) -> float:
        """How old a look at everything may be."""
        return min(max(STATS_FRESH_S, FRESH_SHARE * self._took), FRESH_S_MAX)

    async def now(self, totals_only: bool = False) -> Stats:
        """Of everything, at most `fresh_s` old. `totals_only`: connections and channels need not be told one by one."""
        is_fresh = (
            not self._last.is_sample
            and self._last.at
            and self._clock() - self._last.at < self.fresh_s
        )
        if is_fresh and (totals_only or not self._last.totals_only):
            return self._last
        asking = self._asking
        if asking is None:
            asking = (
                self._start(self._described(self._last)) if is_fresh else self._begin(totals_only)
            )
        elif self._asking_totals and not totals_only:
            asking = self._start(self._described(asking))
        # One who gives up must not take the answer from the others.
        return await asyncio.shield(asking)

    def forget(self) -> None:
        """What was seen before; rates begin anew."""
        self._last, self._connections, self._channels = Stats(), (0.0, {}), (0.0, {})
        self._exchanges = (0.0, {})

    async def sample(self) -> None:
        """Look at everything, connections and channels too, unless somebody has just done so.

        Who asks for numbers right afterwards gets a look of their own: what a client did before it asked
        must be in them.
        """
        before = self._last
        await self.now()
        self._last.is_sample = self._last is not before
        for note in self.noted:
            note(self._last)

    async def keep_sampling(self) -> None:
        """Sample until cancelled; what fails once is tried again."""
        while True:
            try:
                await self.sample()
            except Exception:
                log.exception("the numbers of shards and front doors cannot be gathered")
            await asyncio.sleep(self.sample_s)

    @property
    def sample_s(self) -> float:
        """How long to wait for the next sample."""
        return min(max(SAMPLE_S, SAMPLE_SHARE * self._took), SAMPLE_S_MAX / 2)

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

    def _start(
        self, ask: Coroutine[Any, Any, Stats], totals_only: bool = False
    ) -> asyncio.Task[Stats]:
        asking = self._asking = asyncio.create_task(ask)
        self._asking_totals = totals_only
        asking.add_done_callback(self._asked)
        return asking

    def _asked(self, task: asyncio.Task[Stats]) -> None:
        if self._asking is task:
            self._asking = None

    async def _ask(self, totals_only: bool) -> Stats:
        begun = self._clock()
        before = self._to_compare_with()
        asked = [shard.number for shard in self._shards.shards if shard.ready]
        turns = Turns(LOOK_RESTS_S_MAX)
        looks = [self._look_over(shard, turns) for shard in asked]
        reports, seen = await asyncio.gather(
            _in_time(self._doors.reports(totals_only), []), asyncio.gather(*looks)
        )
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
        stats.is_whole = stats.shards.keys() >= {shard.number for shard in self._shards.shards}
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
            for vhost, name, came, left in report.exchanges:
                known = stats.exchanges.get((vhost, name), (0, 0))
                stats.exchanges[vhost, name] = known[0] + came, known[1] + left
        stats.totals_only, stats.connections_at = False, self._clock()
        at, channels = (
            stats.connections_at,
            {(report["owner"], report["number"]): report for report in stats.channels},
        )
        stats.connections_before, self._connections = self._connections, (at, stats.connections)
        stats.channels_before, self._channels = self._channels, (at, channels)
        stats.exchanges_before, self._exchanges = self._exchanges, (at, stats.exchanges)

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

    async def _reply(
        self, shard: int, queues: list[int] | None, passed: int = 0
    ) -> StatsReply | None:
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
        ready = [
            shard.number for shard in self._shards.shards if shard.ready and shard.number in wanted
        ]
        stats = Stats()
        for shard, parts in zip(
            ready, await asyncio.gather(*(self._some(n, wanted[n]) for n in ready)), strict=True
        ):
            for reply in parts:
                _add_reply(stats, shard, reply)
        stats.at, stats.before = self._clock(), self._to_compare_with()
        _set_apart(stats, self._hidden_queues())
        return stats

    def _to_compare_with(self) -> Stats | None:
        """Return the last look at everything that is not too close to make rates of.

        No more than three are kept: the next one, this one, and the one before it.
        """
        last = self._last
        if not last.at:
            return None
        if last.before is not None:
            last.before.before = None
            if self._clock() - last.at < STATS_FRESH_S:
                return last.before
        return last

    async def _some(self, shard: int, ids: list[int]) -> list[StatsReply]:
        replies = []
        for start in range(0, len(ids) or 1, wire.STATS_QUEUES_MAX):
            reply = await self._reply(shard, ids[start : start + wire.STATS_QUEUES_MAX])
            if reply is None:
                return []
            replies.append(reply)
        return replies


async def _in_time(answer: Awaitable[T], otherwise: T) -> T:
    try:
        return await asyncio.wait_for(answer, STATS_S_MAX)
    except TimeoutError:
        return otherwise


def _add_reply(stats: Stats, shard: int, reply: StatsReply) -> None:
    stats.consumers.extend(reply.consumers)
    stats.active.update(
        (consumer.queue, consumer.tag) for consumer in reply.consumers if consumer.active
    )
    stats.exclusive.update(
        (consumer.queue, consumer.tag) for consumer in reply.consumers if consumer.exclusive
    )
    if reply.process or shard not in stats.shards:
        _add_process(stats, shard, reply.process)
    for queue in reply.queues:
        stats.queues[queue.id] = queue
    if isinstance(reply, StreamsReply):
        stats.streams.update((stream.id, stream) for stream in reply.streams)
        stats.readers.update((reader_key(reader), reader) for reader in reply.readers)
    if isinstance(reply, GapsReply):
        stats.gaps.update(reply.gaps)
    for name, column in zip(
        _QUEUE_FIELDS, zip(*map(astuple, reply.queues), strict=True), strict=False
    ):
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


# What a queue counts, by the names of message_stats.
OF_QUEUE: dict[str, Callable[[QueueStats], int]] = {
    "publish": attrgetter("published"),
    "deliver": lambda queue: queue.delivered - queue.got - queue.delivered_auto,
    "deliver_no_ack": attrgetter("delivered_auto"),
    "get": lambda queue: queue.got - queue.got_auto,
    "get_no_ack": attrgetter("got_auto"),
    "get_empty": attrgetter("got_empty"),
    "deliver_get": attrgetter("delivered"),
    "redeliver": attrgetter("redelivered"),
    "ack": attrgetter("acked"),
    "duplicates": attrgetter("repeated"),
}


def depth_rates(stats: Stats, queue: QueueStats) -> dict[str, Any]:
    """How fast one queue grows or shrinks, messages a second."""
    earlier = stats.earlier(queue)
    if stats.before is None or earlier is None:
        return {}
    return depth_details(
        queue.ready - earlier.ready, queue.unacked - earlier.unacked, stats.at - stats.before.at
    )


def depth_details(ready: int, unacked: int, seconds: float) -> dict[str, Any]:
    """Rates of what has grown by so many messages in so many seconds; none if that is too short or too long."""
    grown = {"": ready + unacked, "_ready": ready, "_unacknowledged": unacked}
    if not 0 < seconds <= RATE_S_MAX:
        return {}
    return {f"messages{which}_details": {"rate": count / seconds} for which, count in grown.items()}


def message_stats(stats: Stats, queue: QueueStats) -> dict[str, Any]:
    """Of one queue."""
    shown: dict[str, Any] = {}
    earlier = stats.earlier(queue)
    for name, count in OF_QUEUE.items():
        shown[name] = value = count(queue)
        if earlier is not None:
            shown |= details(name, stats.rate(value, count(earlier)))
    return shown


def exchange_stats(stats: Stats, vhost: str, name: str) -> dict[str, Any]:
    """Return the message_stats of an exchange; {} if nothing was published to it."""
    counts = stats.exchanges.get((vhost, name))
    if counts is None:
        return {}
    at, before = stats.exchanges_before
    shown: dict[str, Any] = {}
    for said, now, earlier in zip(
        ("publish_in", "publish_out"), counts, before.get((vhost, name), (0, 0)), strict=True
    ):
        shown |= {said: now} | details(said, stats.rate_of_client(now, earlier, at))
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
        value, earlier = (
            sum(int(look.counters.get(part, 0)) for part in parts) for look in (stats, before)
        )
        shown |= {name: value} | details(name, stats.rate(value, earlier))
    for name, counter in (("ack", "acked"), ("redeliver", "redelivered")):
        value, earlier = stats.totals[counter], before.totals[counter]
        shown |= {name: value} | details(name, stats.rate(value, earlier))
    return shown


def depths(stats: Stats) -> dict[str, Any]:
    """Of all queues together; their rates may well be negative."""
    ready, unacked = stats.totals["ready"], stats.totals["unacked"]
    shown = {
        "messages": ready + unacked,
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
    }
    before = stats.before
    if before is None:
        return shown
    grown = ready - before.totals["ready"], unacked - before.totals["unacked"]
    return shown | depth_details(*grown, stats.at - before.at)


class Rates:
    """Of numbers, from when they are looked at: between two looks at least STATS_FRESH_S apart. Where they only rise,
    one that fell began anew, and has no rate; nor has one that was not looked at before."""

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
        if not 0 < now - at <= RATE_S_MAX:
            return {}
        known = {name: value - before[name] for name, value in values.items() if name in before}
        return {name: risen / (now - at) for name, risen in known.items() if risen >= self._least}
