"""Takes the samples of the past from numbers that were just collected, and shows them in rows.

Looking through all queues for the busiest ones, and adding them up by vhost, is done in slices, and
only if some queue counted anything since the last sample.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeVar

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics.churn import churn_rates
from shardmq.broker.controller.management.metrics.message_stats import all_message_stats, depths
from shardmq.broker.controller.management.metrics.past import (
    BROKER,
    CHANNEL,
    CONNECTION,
    EXCHANGE,
    NODE,
    QUEUE,
    SHARD,
    THE_ONLY,
    VHOST,
    Kind,
    Numbers,
    numbers_in,
)
from shardmq.broker.controller.management.metrics.samples import (
    client_numbers,
    queue_numbers,
    vhost_numbers,
)
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.broker.controller.management.resources import processes, shard_load
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.model.catalog import Vhost
from shardmq.shardd.wire.messages import QueueStats

SLICE_ROWS: Final = 60  # looked at before the processor is offered

T = TypeVar("T")


class Sampler:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._past = context.past
        # As of the last sample in which some queue had counted anything.
        self._totals: dict[str, int] = {}
        self._busiest: list[int] = []
        self._depths: dict[str, tuple[int, int]] = {}  # messages ready and unacked by vhost

    async def take(self, stats: Stats) -> None:
        """Sample what is kept of these numbers."""
        work, clients = SlicedWork(), stats.clients
        churned = churn_rates(self._context, stats)
        if stats.has_all:
            row = {"queue_totals": depths(stats), "message_stats": all_message_stats(stats)}
            self._add(
                BROKER, THE_ONLY, stats.at, numbers_in(BROKER, {**row, "churn_rates": churned})
            )
        node = processes.own_node(self._context, stats)
        self._add(NODE, THE_ONLY, stats.at, numbers_in(NODE, node))
        for shard in stats.shards:
            self._add(SHARD, shard, stats.at, numbers_in(SHARD, shard_load.counts(stats, shard)))
        await self._take_vhosts_and_queues(stats, work)
        before = stats.clients_before
        sampled: tuple[tuple[Kind, Mapping[Any, Any], Mapping[Any, Any], Callable[..., float]], ...]
        sampled = (
            (EXCHANGE, clients.exchanges, before.exchanges, itemgetter(0)),
            (CONNECTION, clients.connections, before.connections, _octets),
            (CHANNEL, clients.channels, before.channels, _messages),
        )
        for kind, now, earlier, count in sampled:
            busiest = await _busiest(kind, now, earlier, count, work)
            numbers = partial(client_numbers, clients, kind)
            await self._take(kind, clients.at, busiest, numbers, work)

    async def _take_vhosts_and_queues(self, stats: Stats, work: SlicedWork) -> None:
        vhosts = self._context.catalog.vhosts
        most_queues = heapq.nlargest(VHOST.busiest, vhosts.values(), key=lambda v: len(v.queues))
        for one in most_queues:
            self._past.see(VHOST, one.name)
        kept = {str(name) for name, _ in self._past.sampled(VHOST)} & vhosts.keys()
        if stats.totals != self._totals or kept != self._depths.keys():
            earlier = stats.before.queues if stats.before is not None else {}
            self._busiest = await _busiest(QUEUE, stats.queues, earlier, _counted, work)
            self._depths = {
                name: await _depth(vhost, stats, work)
                for name in kept
                if (vhost := vhosts.get(name)) is not None
            }
            self._totals = {**stats.totals}
        for name, (ready, unacked) in self._depths.items():
            if stats.has_all:
                self._add(VHOST, name, stats.at, vhost_numbers(stats, name, ready, unacked))
        await self._take(
            QUEUE, stats.at, self._busiest, lambda id: queue_numbers(stats, id), work
        )  # fmt: skip

    def _add(self, kind: Kind, key: Hashable, at: float, numbers: Numbers) -> None:
        self._past.see(kind, key).add(at, numbers)

    async def _take(
        self,
        kind: Kind,
        at: float,
        busiest: list[Any],
        numbers: Callable[[Any], Numbers | None],
        work: SlicedWork,
    ) -> None:
        """Sample the busiest objects of a kind, and those that somebody looked at lately."""
        for key in busiest:
            self._past.see(kind, key)
        rows = iter(self._past.sampled(kind))
        while part := list(itertools.islice(rows, SLICE_ROWS)):
            for key, series in part:
                known = numbers(key)
                if known is not None:
                    series.add(at, known)
            await work.yield_to_others()


async def _busiest(
    kind: Kind,
    now: Mapping[Any, T],
    before: Mapping[Any, T],
    count: Callable[[T], float],
    work: SlicedWork,
) -> list[Any]:
    """Return the keys of the objects whose counts rose most; the busiest come last."""
    if len(now) <= kind.busiest:
        return [*now]
    risen: list[tuple[float, Any]] = []
    rows = iter([*now.items()])
    while part := list(itertools.islice(rows, SLICE_ROWS)):
        for key, known in part:
            earlier = before.get(key)
            risen.append((count(known) - (count(earlier) if earlier is not None else 0), key))
        await work.yield_to_others()
    found = heapq.nlargest(kind.busiest, risen, key=itemgetter(0))
    return [key for _, key in reversed(found)]


def _counted(queue: QueueStats) -> int:
    return queue.published + queue.delivered + queue.acked


def _octets(report: dict[str, Any]) -> int:
    return int(report.get("recv_oct", 0) + report.get("send_oct", 0))


def _messages(report: dict[str, Any]) -> int:
    return int(report.get("published", 0) + report.get("delivered", 0))


async def _depth(vhost: Vhost, stats: Stats, work: SlicedWork) -> tuple[int, int]:
    """Return the messages ready and not acknowledged of all queues of a vhost."""
    ready = unacked = 0
    queues = iter([*vhost.queues.values()])
    while part := list(itertools.islice(queues, SLICE_ROWS)):
        for known in [stats.queues[queue.id] for queue in part if queue.id in stats.queues]:
            ready += known.ready
            unacked += known.unacked
        await work.yield_to_others()
    return ready, unacked
