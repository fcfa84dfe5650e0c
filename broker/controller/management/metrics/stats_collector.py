"""Collects the numbers of shards and front doors when a call wants them, once for all such calls.

A shard tells of a few queues in one reply, so that no message waits for a listing. Collecting the
numbers of all queues is long work that keeps to a share of a processor (`cpu_budget.py`), and is
done only as often as its cost allows (`fresh_s`). The numbers of some queues (`of`) are collected
at once. Shards and front doors that do not reply in STATS_S_MAX are left out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import astuple

from shardmq.broker.controller.cluster_view import ClusterView
from shardmq.broker.controller.management.metrics.stats import (
    COUNTERS,
    SIZES,
    STATS_FRESH_S,
    Clients,
    Stats,
    reader_key,
)
from shardmq.broker.controller.management.responses.cpu_budget import (
    COLLECT_RESTS_S_MAX,
    SlicedWork,
)
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.shard_links import ShardLinks, ShardSilent
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import delaying
from shardmq.broker.shared.control import DoorReport, node_of
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.messages import QueueStats, StatsReply

FRESH_SHARE = 10  # collecting everything takes at most one second of so many
FRESH_S_MAX = 30.0
STATS_S_MAX = 2.0
SLOW_S = 0.05  # collecting everything is slow if it takes longer than this
# Everything is collected this often even if no call wants it: rates compare with these samples.
# Where this takes long there are fewer samples: it has at most one part in SAMPLE_SHARE of a
# processor.
SAMPLE_S = 5.0
SAMPLE_SHARE = 50
SAMPLE_S_MAX = 60.0
ORDER_S_MAX = 60.0  # lists may be sorted by numbers of this age and show fresh ones
SLICE_CONSUMERS = 500  # counted by node before the processor is offered

_QUEUE_FIELDS = QueueStats.__struct_fields__

log = logging.getLogger(__name__)

T = TypeVar("T")


class StatsCollector:
    def __init__(
        self,
        shards: ShardLinks,
        doors: DoorLinks,
        clock: Callable[[], float] = time.monotonic,
        hidden_queues: Callable[[], Mapping[int, str]] = dict,
        cluster: ClusterView | None = None,
    ) -> None:
        """Collect by these links.

        `hidden_queues` returns the ids and names of the queues in which exchanges keep messages.
        The numbers of a `cluster` are also kept node by node.
        """
        self._hidden_queues = hidden_queues
        self._cluster = cluster if cluster is not None and cluster.is_cluster else None
        self._shards = shards
        self._doors = doors
        self._clock = clock
        self._last = Stats()
        self._clients = Clients()  # collected last
        # Those that new ones are compared with: the last that are old enough to make rates of.
        self._clients_before = Clients()
        self._took = 0.0  # seconds of work to collect everything last time
        # Called with each sample. If the call returns an awaitable, the sample ends with it.
        self.noted: list[Callable[[Stats], object]] = []
        self._collecting: asyncio.Task[Stats] | None = None
        self._collecting_totals = False

    @property
    def fresh_s(self) -> float:
        """The age in seconds up to which numbers of everything are not collected again."""
        return min(max(STATS_FRESH_S, FRESH_SHARE * self._took), FRESH_S_MAX)

    async def now(self, totals_only: bool = False) -> Stats:
        """Return the numbers of everything, at most `fresh_s` old.

        With `totals_only` the single connections, channels and exchanges may be missing.
        """
        is_fresh = (
            not self._last.is_sample
            and self._last.at
            and self._clock() - self._last.at < self.fresh_s
        )
        if is_fresh and (totals_only or not self._last.totals_only):
            return self._last
        collecting = self._collecting
        if collecting is None:
            collecting = (
                self._start(self._with_connections(self._last))
                if is_fresh
                else self._begin(totals_only)
            )
        elif self._collecting_totals and not totals_only:
            collecting = self._start(self._with_connections(collecting))
        # A call that is cancelled must not cancel it for the others.
        return await asyncio.shield(collecting)

    def forget(self) -> None:
        """Forget all numbers, so that rates begin anew."""
        self._last, self._clients, self._clients_before = Stats(), Clients(), Clients()

    async def sample(self) -> None:
        """Collect everything, connections and channels too, unless a call has just done so.

        Calls after a sample collect again: what a client did before it calls must be counted.
        """
        before = self._last
        await self.now()
        self._last.is_sample = self._last is not before
        for note in self.noted:
            more = note(self._last)
            if isinstance(more, Awaitable):
                await more

    async def keep_sampling(self) -> None:
        """Sample until cancelled; after an error, too."""
        while True:
            try:
                await self.sample()
            except Exception:
                log.exception("the numbers of shards and front doors cannot be gathered")
            await asyncio.sleep(self.sample_s)

    @property
    def sample_s(self) -> float:
        """The seconds until the next sample."""
        return min(max(SAMPLE_S, SAMPLE_SHARE * self._took), SAMPLE_S_MAX / 2)

    async def anew(self, totals_only: bool = True) -> Stats:
        """Return the numbers of everything, collected from now on."""
        return await self._begin(totals_only=totals_only)

    async def lately(self) -> Stats:
        """Return numbers of everything to sort by, which may be up to ORDER_S_MAX old.

        Where collecting is slow, the caller does not wait for it.
        """
        if self._took < SLOW_S or self._clock() - self._last.at >= ORDER_S_MAX:
            return await self.now(totals_only=True)
        if self._collecting is None and self._clock() - self._last.at >= self.fresh_s:
            self._begin(totals_only=True)
        return self._last

    async def of(self, queues: Iterable[QueuePut]) -> Stats:
        """Return the numbers of these queues and their shards, at most STATS_FRESH_S old."""
        wanted: dict[int, list[int]] = {}
        for queue in queues:
            wanted.setdefault(queue.shard, []).append(queue.id)
        return await self._some(wanted)

    async def of_shards(self) -> Stats:
        """Return the numbers of the processes of all shards, at most STATS_FRESH_S old."""
        return await self._some({shard.number: [] for shard in self._shards.shards})

    # -- everything --------------------------------------------------------------------------------

    def _begin(self, totals_only: bool) -> asyncio.Task[Stats]:
        return self._start(self._collect(totals_only), totals_only)

    def _start(
        self, collect: Coroutine[Any, Any, Stats], totals_only: bool = False
    ) -> asyncio.Task[Stats]:
        collecting = self._collecting = asyncio.create_task(collect)
        self._collecting_totals = totals_only
        collecting.add_done_callback(self._collected)
        return collecting

    def _collected(self, task: asyncio.Task[Stats]) -> None:
        if self._collecting is task:
            self._collecting = None

    async def _collect(self, totals_only: bool) -> Stats:
        begun = self._clock()
        before = self._to_compare_with()
        asked = [shard.number for shard in self._shards.shards if shard.ready]
        work = SlicedWork(COLLECT_RESTS_S_MAX)
        reports, of_shards = await asyncio.gather(
            _in_time(self._doors.reports(totals_only), []),
            asyncio.gather(*(self._of_shard(shard, work) for shard in asked)),
        )
        stats = Stats(at=self._clock(), before=before, totals_only=totals_only)
        _add_parts(stats, of_shards, reports, self._hidden_queues())
        if self._cluster is not None:
            by_shard = dict(zip(asked, of_shards, strict=True))
            await self._add_nodes(self._cluster, stats, by_shard, reports)
        if not totals_only:
            self._add_connections(stats, reports)
        stats.is_whole = stats.shards.keys() >= {shard.number for shard in self._shards.shards}
        stats.has_all = stats.shards.keys() >= set(asked) and self._all_in(reports)
        # Rests are no work, nor is waiting for a silent shard: numbers must not get old for these.
        took = stats.at - begun - work.rested_s / max(1, len(asked))
        self._took = max(0.0, took) if stats.shards.keys() >= set(asked) else 0.0
        self._last = stats
        return stats

    async def _add_nodes(
        self,
        cluster: ClusterView,
        stats: Stats,
        by_shard: Mapping[int, Stats],
        reports: Sequence[DoorReport],
    ) -> None:
        """Add the numbers of each node of the cluster, from those of its shards and front doors."""
        hidden, work = self._hidden_queues(), SlicedWork(COLLECT_RESTS_S_MAX)
        for node in cluster.nodes:
            part = stats.nodes[node.number] = Stats(at=stats.at)
            own = [by_shard[shard] for shard in node.shards if shard in by_shard]
            _add_parts(part, own, _of_node(reports, node.number), hidden)
            part.consumers = []
            await work.yield_to_others()
        for start in range(0, len(stats.consumers), SLICE_CONSUMERS):
            for consumer in stats.consumers[start : start + SLICE_CONSUMERS]:
                if (at := stats.nodes.get(node_of(consumer.door))) is not None:
                    at.consumers.append(consumer)
            await work.yield_to_others()

    def _to_compare_with(self) -> Stats | None:
        """Return the last numbers of everything that are old enough to make rates of.

        At most three are kept: the next, the last, and the one before.
        """
        last = self._last
        if not last.at:
            return None
        if last.before is not None:
            last.before.before = None
            if self._clock() - last.at < STATS_FRESH_S:
                return last.before
        return last

    async def _with_connections(self, totals: Stats | asyncio.Task[Stats]) -> Stats:
        """Add connections and channels to numbers without them; queues are not collected again."""
        stats = totals if isinstance(totals, Stats) else await asyncio.shield(totals)
        reports = await _in_time(self._doors.reports(), [])
        if stats.totals_only:
            self._add_connections(stats, reports)
        return stats

    def _add_connections(self, stats: Stats, reports: Sequence[DoorReport]) -> None:
        clients = stats.clients
        _add_clients(clients, reports)
        for node, part in stats.nodes.items():
            _add_clients(part.clients, _of_node(reports, node))
        stats.totals_only, clients.at = False, self._clock()
        clients.is_whole = self._all_in(reports)
        last = self._clients
        if last.at and clients.at - last.at >= STATS_FRESH_S:
            self._clients_before = last
        stats.clients_before, self._clients = self._clients_before, clients

    def _all_in(self, reports: Sequence[DoorReport]) -> bool:
        """Return whether these are the reports of all front doors."""
        return len(reports) >= len(self._doors.doors())

    async def _of_shard(self, shard: int, work: SlicedWork) -> Stats:
        """Return the numbers of one shard with all its used queues; none if it falls silent."""
        stats, passed, at_a_time = Stats(), 0, 0
        while True:
            work.pause()
            reply = await self._reply(shard, None, passed)
            work.resume()
            if reply is None:
                return Stats()
            _add_reply(stats, shard, reply)
            if not reply.rest:
                return stats
            # The first reply says how many queues this shard tells of at a time, which may differ
            # in another release.
            at_a_time = at_a_time or len(reply.queues) or wire.STATS_QUEUES_MAX
            passed += at_a_time
            await work.yield_to_others()

    # -- some queues -------------------------------------------------------------------------------

    async def _some(self, wanted: dict[int, list[int]]) -> Stats:
        """Return the numbers of these shards, each with the queues of these ids."""
        if self._last.at and self._clock() - self._last.at < STATS_FRESH_S:
            return self._last
        ready = [
            shard.number for shard in self._shards.shards if shard.ready and shard.number in wanted
        ]
        stats = Stats()
        replies = await asyncio.gather(*(self._replies(shard, wanted[shard]) for shard in ready))
        for shard, parts in zip(ready, replies, strict=True):
            for reply in parts:
                _add_reply(stats, shard, reply)
        stats.at, stats.before = self._clock(), self._to_compare_with()
        _set_hidden_apart(stats, self._hidden_queues())
        return stats

    async def _replies(self, shard: int, ids: list[int]) -> list[StatsReply]:
        replies = []
        for start in range(0, len(ids) or 1, wire.STATS_QUEUES_MAX):
            reply = await self._reply(shard, ids[start : start + wire.STATS_QUEUES_MAX])
            if reply is None:
                return []
            replies.append(reply)
        return replies

    async def _reply(
        self, shard: int, queues: list[int] | None, passed: int = 0
    ) -> StatsReply | None:
        asked = self._shards.request(shard, lambda n: wire.Stats(n, queues, passed), STATS_S_MAX)
        try:
            reply = await _in_time(asked, None)
        except ShardSilent:
            return None
        return reply if isinstance(reply, StatsReply) else None


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
        process = reply.process.items()
        stats.shards[shard] = {name: value for name, value in process if "." not in name}
        stats.sizes[shard] = {name: value for name, value in process if "." in name}
    for queue in reply.queues:
        stats.queues[queue.id] = queue
    stats.streams.update((stream.id, stream) for stream in reply.streams)
    stats.readers.update((reader_key(reader), reader) for reader in reply.readers)
    stats.gaps.update(reply.gaps)
    for name, column in zip(
        _QUEUE_FIELDS, zip(*map(astuple, reply.queues), strict=True), strict=False
    ):
        if name in stats.totals:
            stats.totals[name] += sum(column)


def _of_node(reports: Iterable[DoorReport], node: int) -> list[DoorReport]:
    return [report for report in reports if node_of(report.door) == node]


def _add_parts(
    stats: Stats,
    of_shards: Iterable[Stats],
    reports: Iterable[DoorReport],
    hidden_queues: Mapping[int, str],
) -> None:
    """Add the numbers of shards and the counters of front doors."""
    for each in of_shards:
        _add_shard(stats, each)
    for report in reports:
        for name, value in report.counters.items():
            stats.counters[name] = stats.counters.get(name, 0) + value
        for vhost, counts in report.vhosts.items():
            known = stats.vhosts.setdefault(vhost, {})
            for counter, count in counts.items():
                known[counter] = known.get(counter, 0) + count
    _set_hidden_apart(stats, hidden_queues)


def _add_clients(clients: Clients, reports: Iterable[DoorReport]) -> None:
    for report in reports:
        clients.connections.update((row["owner"], row) for row in report.connections)
        clients.channels.update(((row["owner"], row["number"]), row) for row in report.channels)
        for vhost, name, published, routed in report.exchanges:
            known = clients.exchanges.get((vhost, name), (0, 0))
            clients.exchanges[vhost, name] = known[0] + published, known[1] + routed


def _add_shard(stats: Stats, of_shard: Stats) -> None:
    stats.queues.update(of_shard.queues)
    stats.consumers.extend(of_shard.consumers)
    stats.active.update(of_shard.active)
    stats.exclusive.update(of_shard.exclusive)
    stats.shards.update(of_shard.shards)
    stats.sizes.update(of_shard.sizes)
    stats.streams.update(of_shard.streams)
    stats.gaps.update(of_shard.gaps)
    stats.readers.update(of_shard.readers)
    for name, value in of_shard.totals.items():
        stats.totals[name] += value
    for shard, process in of_shard.shards.items():
        stats.loads[shard] = dict(of_shard.totals)
        for name in COUNTERS:
            # Deleted queues have been counted, and totals must not fall.
            gone = int(process.get(f"gone_{name}", 0))
            stats.totals[name] += gone
            stats.loads[shard][name] += gone


def _set_hidden_apart(stats: Stats, hidden_queues: Mapping[int, str]) -> None:
    """Take the queues in which exchanges keep messages out of `queues` and `totals`."""
    for id, name in hidden_queues.items():
        known = stats.queues.pop(id, None)
        if delaying.is_delay_queue(name):
            stats.delayed[id] = known.ready if known is not None else 0
        for counted in (*COUNTERS, *SIZES) if known is not None else ():
            stats.totals[counted] -= getattr(known, counted)
