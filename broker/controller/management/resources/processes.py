"""/api/processes, /api/shards, /api/nodes: the state of the processes of this broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardmq.broker.controller.cluster_view import KnownNode
from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import churn, time_range
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.past import NODE as NODE_KIND
from shardmq.broker.controller.management.metrics.past import THE_ONLY
from shardmq.broker.controller.management.metrics.samples import add_row_samples
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.broker.controller.management.resources.overview import contexts
from shardmq.broker.controller.node_checks import listeners
from shardmq.broker.controller.node_facts import ETCD_AWAY, NodeFacts
from shardmq.broker.routing.types import TYPES
from shardmq.broker.shared.logins import MECHANISMS
from shardmq.shardd.wire.histogram import SUM, parts_of
from shardmq.shardd.wire.messages import LOW_ON_DISK

DISK_KEYS = {"disk_free_bytes", "disk_free_min_bytes"}
NOT_AVAILABLE = "not_available"


async def get_all(call: Call) -> list[dict[str, Any]]:
    """List the processes of the broker, with memory, files and restarts."""
    return Part(call.context, call.via).rows()


def warnings(numbers: dict[str, float]) -> list[str]:
    """Return what an operator should look at, from the numbers of one shard's process."""
    found = []
    if numbers.get("disk_free_bytes", 0) < numbers.get("disk_free_warn_bytes", 0):
        found.append(f"low on disk soon: {numbers['disk_free_bytes'] / 1e6:.0f} MB free")
    if numbers.get("damaged"):
        found.append(f"{numbers['damaged']:.0f} damaged places found in message files, see the log")
    return found


def node_of_shard(context: Context, shard: int) -> dict[str, Any]:
    """Return the fields that name the nodes of a shard; there are none without a cluster.

    `in_sync` are the nodes that have all of the shard. It is to be on `replicas` nodes, and nothing
    is confirmed while fewer than `min_in_sync` are in sync.
    """
    cluster = context.cluster
    if not cluster.is_cluster:
        return {}
    return {
        "node": cluster.of_shard(shard),
        "in_sync": list(cluster.in_sync_of(shard)),
        "replicas": cluster.replicas.of(shard).count,
        "min_in_sync": cluster.min_in_sync_of(shard),
    }


async def shards(call: Call) -> list[dict[str, Any]]:
    """List the shards, with their state, alarms and numbers."""
    catalog, stats = call.context.catalog, await call.context.stats.of_shards()
    return [
        {
            "shard": shard.number,
            **node_of_shard(call.context, shard.number),
            "pid": shard.pid,
            "ready": shard.ready,
            "alarm": shard.alarm,
            "queues": catalog.index.count_on(shard.number),
            "warnings": warnings(stats.shards.get(shard.number, {})),
            **stats.shards.get(shard.number, {}),
        }
        for shard in call.context.shards.shards
    ]


def disk_room(shards: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return the free bytes on the disk that has least, and its limit; {} if no shard tells.

    Below the limit publishers are blocked. `shards` are the numbers of shards.
    """
    rooms = [
        (row["disk_free_bytes"], row["disk_free_min_bytes"])
        for row in shards
        if row.keys() >= DISK_KEYS
    ]
    free, least = min(rooms, default=(None, None))
    return (
        {}
        if free is None or least is None
        else {"disk_free": int(free), "disk_free_limit": int(least)}
    )


def node_uptime_s(found: Iterable[dict[str, Any]]) -> float:
    return max((row.get("uptime", 0.0) for row in found), default=0.0)


def tcp_sockets_max(context: Context, found: Iterable[dict[str, Any]]) -> int:
    """Return how many connections are admitted: the limit, or the file limit of all front doors."""
    doors = sum(row.get("fd_total") or 0 for row in found if row["front_door"] is not None)
    return min(context.presence.connections_max or doors, doors)


def syncs(sizes: Iterable[dict[str, float]]) -> tuple[int, float]:
    """Return the number of syncs of shards since their starts, and the seconds they took."""
    parts = [parts_of(numbers, "sync_us") for numbers in sizes]
    count = sum(value for each in parts for k, value in each.items() if k != SUM)
    return int(count), sum(each.get(SUM, 0.0) for each in parts) / 1e6


def node(context: Context, stats: Stats, known: KnownNode, facts: NodeFacts) -> dict[str, Any]:
    """Return the row of a node that has told its facts."""
    own = [shard for shard in context.shards.shards if shard.number in known.shards]
    alarms = {shard.alarm for shard in own} | set(facts.alarms)
    children = [row for row in facts.processes if row.get("rss_bytes")]
    sync_count, sync_s = syncs(stats.sizes[n] for n in known.shards if n in stats.sizes)
    room = disk_room(stats.shards[n] for n in known.shards if n in stats.shards)
    if not room and facts.disk_free_bytes >= 0:
        room = {"disk_free": facts.disk_free_bytes}
    churned = _churned(context, stats, known)
    counted = {
        "mem_used": facts.memory_bytes,
        "fd_used": sum(row.get("fd_used") or 0 for row in children),
        "sockets_used": sum(
            context.cluster.of_owner(info.owner) == known.name
            for info in context.presence.connections()
        ),
        "proc_used": len(children),
        **{name: value for name, value in room.items() if name == "disk_free"},
        "io_sync_count": sync_count,
        **churned,
    }
    rates = context.node_rates[known.name].of(
        {name: float(value) for name, value in counted.items()}
    )
    # Counters fall when a process is restarted; the other numbers may have negative rates.
    rates |= {name: max(0.0, rates[name]) for name in rates.keys() & {"io_sync_count", *churned}}
    return {
        "name": known.name,
        "type": "disc",
        "running": True,
        "processors": facts.cores,
        "os_pid": str(facts.pid),
        **counted,
        **{f"{name}_details": {"rate": rate} for name, rate in rates.items()},
        "io_sync_avg_time": 1000 * sync_s / sync_count if sync_count else 0,
        "mem_calculation_strategy": "rss",
        "connections_max": context.presence.connections_max,
        "mem_alarm": facts.memory_alarm != "",
        "mem_limit": facts.memory_limit_bytes,
        "fd_total": sum(row.get("fd_total") or 0 for row in children),
        "disk_free_alarm": LOW_ON_DISK in alarms,
        "alarms": sorted(alarms - {""}),
        **room,
        "partitions": [],
        "cluster_links": [],
        "sockets_total": tcp_sockets_max(context, children),
        "proc_total": facts.pids_max,
        "run_queue": facts.run_queue,
        "enabled_plugins": [],
        "applications": [],
        "exchange_types": [{"name": name, "description": "", "enabled": True} for name in TYPES],
        "auth_mechanisms": [
            {"name": name, "description": "", "enabled": True}
            for name in MECHANISMS.decode().split()
        ],
        "db_dir": facts.data_dir,
        "log_files": facts.log_files,
        "config_files": [],
        "uptime": int(node_uptime_s(children) * 1000),
        "rates_mode": "basic",
        **_in_cluster(context, known),
        **_told_in_cluster(context, known, facts),
    }


def _in_cluster(context: Context, known: KnownNode) -> dict[str, Any]:
    """Return the fields of a node of a cluster, whether it is alive or not."""
    if not context.cluster.is_cluster:
        return {}
    return {
        "shards": list(known.shards),
        "in_sync_shards": context.cluster.in_sync_at(known.name),
        "is_leader": known.name == context.cluster.own,
        "has_definitions": known.name in context.cluster.in_sync,
    }


def _told_in_cluster(context: Context, known: KnownNode, facts: NodeFacts) -> dict[str, Any]:
    """Return the further fields of a node of a cluster that is alive."""
    if not context.cluster.is_cluster:
        return {}
    return {
        "version": facts.version,
        "etcd_up": ETCD_AWAY not in facts.alarms,
        "etcd_silent_s": facts.etcd_silent_s,
        "contexts": contexts(listeners({known.name: facts})),
        "net_ticktime": 0,
        "being_drained": known.name in context.catalog.drained_nodes,
    }


def _churned(context: Context, stats: Stats, known: KnownNode) -> dict[str, int]:
    """Return how much came and went at a node of a cluster; nothing without a cluster."""
    if not context.cluster.is_cluster:
        return {}
    part = Part(context, known.name, is_whole=False)
    return churn.by_names_of_api(churn.counts(part, part.stats(stats)))


def own_node(context: Context, stats: Stats) -> dict[str, Any]:
    """Return the row of the node of this controller."""
    known = next(each for each in context.cluster.nodes if each.name == context.cluster.own)
    return node(context, stats, known, context.cluster.facts(known.name)[known.name])


async def _nodes(call: Call) -> list[dict[str, Any]]:
    """Return the rows of all nodes with the samples that the call asks for."""
    context, wanted = call.context, time_range.asked(call.request.query)
    counters = context.stats.now(totals_only=True) if context.cluster.is_cluster else None
    stats = await (counters or context.stats.of_shards())
    facts, found = context.cluster.facts(), []
    for known in context.cluster.nodes:
        told = facts.get(known.name)
        if told is None:
            found.append({"name": known.name, "type": "disc", "running": known.is_alive})
            found[-1] |= {"cluster_links": [], "alarms": [], **_in_cluster(context, known)}
            continue
        found.append(node(context, stats, known, told))
        if wanted is not None and known.name == context.cluster.own:
            add_row_samples(found[-1], context.past, NODE_KIND, THE_ONLY, stats.at, wanted)
    return found


async def nodes(call: Call) -> list[dict[str, Any]]:
    """List the nodes."""
    return await _nodes(call)


async def one_node(call: Call) -> dict[str, Any]:
    """Show the node."""
    name = call.node()
    return next(row for row in await _nodes(call) if row["name"] == name)


async def memory(call: Call) -> dict[str, Any]:
    """Show how much memory each process has."""
    name = call.node()
    facts = call.context.cluster.facts(name).get(name)
    if facts is None:
        return {"memory": NOT_AVAILABLE}  # as in RabbitMQ
    held = {row["name"]: row["rss_bytes"] for row in facts.processes if row.get("rss_bytes")}
    total = sum(held.values())
    return {
        "memory": {
            **held,
            "strategy": "rss",
            "total": {"rss": total, "allocated": total, "erlang": 0},
        }
    }


async def relative_memory(call: Call) -> dict[str, Any]:
    """Show the memory of each process in percent of all; as in RabbitMQ no figure is below 1."""
    found = (await memory(call))["memory"]
    if found == NOT_AVAILABLE:
        return {"memory": NOT_AVAILABLE}
    total = found.pop("total")["rss"]
    del found["strategy"]
    parts = {name: max(1, round(100 * held / total)) for name, held in found.items()}
    return {"memory": {"total": 100, **parts}}


ROUTES = [
    Route("GET", "/api/nodes/{node}/memory", memory, "monitoring"),
    Route("GET", "/api/nodes/{node}/memory/relative", relative_memory, "monitoring"),
    Route("GET", "/api/processes", get_all, "monitoring", shows=["Process"]),
    Route("GET", "/api/shards", shards, "monitoring", shows=["Shard"]),
    Route("GET", "/api/nodes", nodes, "monitoring", shows=["Node"]),
    Route("GET", "/api/nodes/{node}", one_node, "monitoring", shows="Node"),
]
