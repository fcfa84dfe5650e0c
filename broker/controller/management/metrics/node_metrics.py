"""The metrics that RabbitMQ's exporter has of a node: files, memory, disk, syncs.

/metrics has all of them, /metrics/detailed has them by family. Metrics of Erlang are left out.
"""

from __future__ import annotations

from typing import Any, Final

from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.broker.controller.management.resources import processes

# Names and help by family. Counters end in _total.
FAMILIES: Final[dict[str, dict[str, str]]] = {
    "node_coarse_metrics": {
        "process_open_fds": "Open files of all processes",
        "process_open_tcp_sockets": "Connections of clients",
        "process_resident_memory_bytes": "Held by all processes, files apart",
        "disk_space_available_bytes": "Of the file system of the messages",
    },
    "node_metrics": {
        "process_max_fds": "Files that all processes may open",
        "process_max_tcp_sockets": "Connections of clients that are let in",
        "resident_memory_limit_bytes": "Above it publishers are blocked",
        "disk_space_available_limit_bytes": "Below it publishers are blocked",
        "erlang_uptime_seconds": "Time since the broker started",
    },
    "node_persister_metrics": {
        "io_sync_ops_total": "Syncs of message files, since each shard's start",
        "io_sync_time_seconds_total": "How long they took",
    },
}


def values(part: Part, stats: Stats, found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics by name, without those that no shard tells.

    `found`: the rows of the processes.
    """
    facts = part.facts.values()
    sync_count, sync_s = processes.syncs(stats.sizes.values())
    room = processes.disk_room(stats.shards.values())
    disk = {
        "disk_free": "disk_space_available_bytes",
        "disk_free_limit": "disk_space_available_limit_bytes",
    }
    return {
        "process_open_fds": sum(row.get("fd_used") or 0 for row in found),
        "process_max_fds": sum(row.get("fd_total") or 0 for row in found),
        "process_open_tcp_sockets": len(part.connections()),
        "process_max_tcp_sockets": processes.tcp_sockets_max(part.context, found),
        "process_resident_memory_bytes": sum(each.memory_bytes for each in facts),
        "resident_memory_limit_bytes": sum(each.memory_limit_bytes for each in facts),
        "erlang_uptime_seconds": processes.node_uptime_s(found),
        "io_sync_ops_total": sync_count,
        "io_sync_time_seconds_total": sync_s,
        **{disk[key]: value for key, value in room.items()},
    }
