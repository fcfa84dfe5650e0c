"""The JSON of `status` and `cluster_status` with the keys of rabbitmqctl.

Scripts and checks for RabbitMQ read these keys. A key that makes no sense for this broker has an
empty value or 0, so that it is there. What RabbitMQ does not have stands under keys of its own.
"""

from __future__ import annotations

import platform
from typing import Any

from shardmq.supervisor.cli.api import Api

PURPOSES = {
    "amqp": "AMQP 0-9-1",
    "amqp/ssl": "AMQP 0-9-1 over TLS",
    "http": "HTTP API",
    "https": "HTTP API over TLS",
    "http/prometheus": "Prometheus exporter API over HTTP",
    "clustering": "inter-node communication",
}
IN_SERVICE = "not under maintenance"


def status_document(
    api: Api, processes: list[dict[str, Any]], shards: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the JSON of `status`, with the figures of the node that was asked.

    Args:
        api: The broker.
        processes: The rows of /api/processes, which become `broker_processes`.
        shards: The rows of /api/shards.
    """
    overview, nodes = api.get("overview"), api.get("nodes")
    named = (row for row in nodes if row["name"] == overview.get("node"))
    node = next(named, nodes[0])
    totals = overview["object_totals"]
    resident = sum(row.get("rss_bytes") or 0 for row in processes)
    supervisor = next((row for row in processes if row.get("kind") == "supervisor"), {})
    limit, memory = node.get("mem_limit", 0), _memory(processes)
    memory |= {
        "strategy": node.get("mem_calculation_strategy", "rss"),
        "total": {"erlang": resident, "rss": resident, "allocated": resident},
    }
    return {
        "active_plugins": [],
        "alarms": _alarms(node),
        "broker_processes": processes,
        "config_files": node.get("config_files", []),
        "crypto_lib_version": "",
        "data_directory": node.get("db_dir", ""),
        "disk_free": node.get("disk_free", 0),
        "disk_free_limit": node.get("disk_free_limit", 0),
        "enabled_plugin_file": "",
        "erlang_version": overview.get("erlang_full_version", ""),
        "file_descriptors": {
            "sockets_limit": node.get("sockets_total", 0),
            "sockets_used": node.get("sockets_used", 0),
            "total_limit": node.get("fd_total", 0),
            "total_used": node.get("fd_used", 0),
        },
        "is_under_maintenance": False,
        "listeners": _listeners(overview),
        "log_files": node.get("log_files", []),
        "memory": memory,
        "net_ticktime": 0,
        "os": platform.system(),
        "pid": supervisor.get("pid") or 0,
        "processes": {"limit": node.get("proc_total", 0), "used": node.get("proc_used", 0)},
        "product_name": overview.get("product_name", ""),
        "product_version": overview["product_version"],
        "rabbitmq_version": overview.get("rabbitmq_version", ""),
        "raft_data_directory": "",
        "release_series_support_status": "supported",
        "run_queue": node.get("run_queue", 0),
        "shards": shards,
        "totals": {
            "virtual_host_count": len(api.get("vhosts")),
            "connection_count": totals["connections"],
            "queue_count": totals["queues"],
        },
        "uptime": node.get("uptime", 0) // 1000,
        "vm_memory_calculation_strategy": node.get("mem_calculation_strategy", "rss"),
        "vm_memory_high_watermark_limit": limit,
        "vm_memory_high_watermark_setting": {"absolute": limit},
    }


def cluster_document(overview: dict[str, Any], nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON of `cluster_status`, from what the broker says of itself and its nodes.

    As in RabbitMQ only running nodes have more than a name.
    """
    names = [node["name"] for node in nodes]
    running = [node for node in nodes if node["running"]]
    return {
        "alarms": [alarm for node in nodes for alarm in _alarms(node)],
        "cluster_name": overview["cluster_name"],
        "disk_nodes": names,
        "feature_flags": [],
        "listeners": {node["name"]: _listeners(overview, node["name"]) for node in running},
        "maintenance_status": {node["name"]: IN_SERVICE for node in running},
        "partitions": {},
        "ram_nodes": [],
        "running_nodes": [node["name"] for node in running],
        "versions": {node["name"]: _versions(overview, node) for node in running},
    }


def _versions(overview: dict[str, Any], node: dict[str, Any]) -> dict[str, str]:
    found = {
        "erlang_version": overview.get("erlang_full_version", ""),
        "rabbitmq_name": overview.get("product_name", ""),
        "rabbitmq_version": overview.get("rabbitmq_version", ""),
    }
    # Nodes of a cluster say their versions, which may differ during an upgrade.
    return found | ({"product_version": node["version"]} if "version" in node else {})


def _alarms(node: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = (("memory", "mem_alarm"), ("disk", "disk_free_alarm"))
    found = [
        {"node": node["name"], "resource": resource, "type": "resource_limit"}
        for resource, key in kinds
        if node.get(key)
    ]
    if not node.get("etcd_up", True):
        found.append({"node": node["name"], "resource": "etcd", "type": "away"})
    return found


def _listeners(overview: dict[str, Any], name: str | None = None) -> list[dict[str, Any]]:
    return [
        {
            "interface": f"[{row['ip_address']}]"
            if ":" in row["ip_address"]
            else row["ip_address"],
            "node": name or row.get("node", ""),
            "port": row["port"],
            "protocol": row["protocol"],
            "purpose": PURPOSES.get(row["protocol"], ""),
        }
        for row in overview["listeners"]
        if name is None or row.get("node", name) == name
    ]


def _memory(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the resident bytes by the kind of process."""
    found: dict[str, Any] = {}
    for row in processes:
        kind = str(row.get("kind", "other")).replace("-", "_")
        found[kind] = found.get(kind, 0) + (row.get("rss_bytes") or 0)
    return found
