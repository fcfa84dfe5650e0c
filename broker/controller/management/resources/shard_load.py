"""/api/shards/load and /api/shards/N/queues: the load of each shard, and the queues on it."""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Call, Route, long_list
from shardmq.broker.controller.management.metrics import time_range
from shardmq.broker.controller.management.metrics.past import SHARD
from shardmq.broker.controller.management.metrics.samples import add_row_samples
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.broker.controller.management.resources import queues
from shardmq.broker.controller.management.resources.processes import node_of_shard
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.listing import LazyListing

# Counters of a shard, with the names of their rates.
PER_SECOND = {"published": "publish_per_s", "delivered": "deliver_per_s", "acked": "ack_per_s"}
OF_PROCESS = ("rss_bytes", "cpu_seconds", "syncs")


def counts(stats: Stats, shard: int) -> dict[str, Any]:
    """Return the numbers of a shard of which samples are kept; {} while the shard is silent."""
    held, process = stats.loads.get(shard), stats.shards.get(shard)
    if held is None or process is None:
        return {}
    return {
        "messages": held["ready"] + held["unacked"],
        "message_bytes": held["ready_bytes"] + held["unacked_bytes"],
        **{name: held[name] for name in PER_SECOND},
        **{name: process[name] for name in OF_PROCESS if name in process},
    }


def load(stats: Stats, shard: int) -> dict[str, Any]:
    """Return the load of a shard; {} while it is silent. `cpu` is a share of one core, 0 to 1."""
    held, process = stats.loads.get(shard), stats.shards.get(shard)
    if held is None or process is None:
        return {}
    shown: dict[str, Any] = {
        **counts(stats, shard),
        "messages_ready": held["ready"],
        "messages_unacknowledged": held["unacked"],
        "consumers": held["consumers"],
        "rss_bytes": process.get("rss_bytes"),
    }
    earlier = stats.before
    if earlier is not None and shard in earlier.loads:
        before = earlier.loads[shard]
        rates = {said: stats.rate(held[name], before[name]) for name, said in PER_SECOND.items()}
        for name, said in (("cpu_seconds", "cpu"), ("syncs", "syncs_per_s")):
            rates[said] = stats.rate(process.get(name, 0.0), earlier.shards[shard].get(name, 0.0))
        shown |= {said: rate for said, rate in rates.items() if rate is not None}
    return shown


async def get_all(call: Call) -> list[dict[str, Any]]:
    """List the shards with the load that each of them bears."""
    context, wanted = call.context, time_range.asked(call.request.query)
    stats = await context.stats.now(totals_only=True)
    shards, rows, work = list(context.shards.shards), [], SlicedWork()
    if wanted is not None:
        time_range.check_samples(wanted, SHARD, len(shards))
    for shard in shards:
        row = {
            "shard": shard.number,
            **node_of_shard(context, shard.number),
            "ready": shard.ready,
            "alarm": shard.alarm,
            "queues": context.catalog.index.count_on(shard.number),
            **load(stats, shard.number),
        }
        if wanted is not None:
            add_row_samples(row, context.past, SHARD, shard.number, stats.at, wanted)
            await work.yield_to_others()
        rows.append(row)
    return rows


async def queues_of(call: Call) -> LazyListing[Any]:
    """List the queues that are placed on one shard."""
    number = call.part("shard")
    if all(str(shard.number) != number for shard in call.context.shards.shards):
        raise not_found()
    found = await queues.get_all(call)
    found.in_order = None
    found.things = (queue for queue in found.things if str(queue.shard) == number)
    return found


ROUTES = [
    Route("GET", "/api/shards/load", get_all, "monitoring", shows=["Load"]),
    long_list("/api/shards/{shard}/queues", queues_of, "Queue", "monitoring"),
]
