"""shardctl status and cluster_status have the keys of rabbitmqctl of RabbitMQ 3.10.8."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from shardmq.supervisor.cli.rabbitmq_json import cluster_document
from tests.support.real_broker import RealBroker

STATUS = {
    "active_plugins": list, "alarms": list, "config_files": list, "crypto_lib_version": str,
    "data_directory": str, "disk_free": int, "disk_free_limit": int, "enabled_plugin_file": str,
    "erlang_version": str, "file_descriptors": dict, "is_under_maintenance": bool,
    "listeners": list, "log_files": list, "memory": dict, "net_ticktime": int, "os": str,
    "pid": int, "processes": dict, "product_name": str, "product_version": str,
    "rabbitmq_version": str, "raft_data_directory": str, "release_series_support_status": str,
    "run_queue": int, "totals": dict, "uptime": int, "vm_memory_calculation_strategy": str,
    "vm_memory_high_watermark_limit": int, "vm_memory_high_watermark_setting": dict,
}  # fmt: skip
CLUSTER = {
    "alarms": list, "cluster_name": str, "disk_nodes": list, "feature_flags": list,
    "listeners": dict, "maintenance_status": dict, "partitions": dict, "ram_nodes": list,
    "running_nodes": list, "versions": dict,
}  # fmt: skip
LISTENER = {"interface", "node", "port", "protocol", "purpose"}


def said(broker: RealBroker, *words: str) -> Any:
    found = CliRunner().invoke(app, [*words, "--data-dir", str(broker.data_dir)])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


@pytest.mark.parametrize("words", [["--json"], ["--formatter", "json"]])
def test_status_has_rabbitmqctls_keys_and_types(broker: RealBroker, words: list[str]) -> None:
    found = said(broker, "status", *words)
    assert {key: type(found.get(key)) for key in STATUS} == STATUS
    assert found.keys() - STATUS.keys() == {"broker_processes", "shards"}
    assert found["file_descriptors"].keys() == {
        "sockets_limit", "sockets_used", "total_limit", "total_used"
    }  # fmt: skip
    assert found["processes"].keys() == {"limit", "used"}
    assert found["totals"].keys() == {"virtual_host_count", "connection_count", "queue_count"}
    assert found["memory"]["total"]["rss"] > 0
    assert found["pid"] == broker.process.pid
    limit = found["vm_memory_high_watermark_limit"]
    assert limit > 0 and found["vm_memory_high_watermark_setting"] == {"absolute": limit}
    assert found["listeners"][0].keys() == LISTENER


@pytest.mark.parametrize("words", [["--json"], ["--formatter", "json"]])
def test_cluster_status_has_rabbitmqctls_keys_and_types(
    broker: RealBroker, words: list[str]
) -> None:
    found = said(broker, "cluster_status", *words)
    assert {key: type(value) for key, value in found.items()} == CLUSTER
    (node,) = found["running_nodes"]
    assert found["disk_nodes"] == [node]
    assert found["versions"][node].keys() == {
        "erlang_version", "rabbitmq_name", "rabbitmq_version"
    }  # fmt: skip
    assert [*found["listeners"]] == [node] and found["listeners"][node][0].keys() == LISTENER


def test_alarms_have_rabbitmqctls_form() -> None:
    node = {"name": "n", "running": True, "mem_alarm": True, "disk_free_alarm": True}
    overview = {"cluster_name": "c", "listeners": []}
    found = cluster_document(overview, [node])
    assert found["alarms"] == [
        {"node": "n", "resource": resource, "type": "resource_limit"}
        for resource in ("memory", "disk")
    ]


def test_a_node_that_is_down_has_neither_versions_nor_listeners() -> None:
    listener = {"protocol": "amqp", "ip_address": "::1", "port": 1}
    overview = {"cluster_name": "c", "listeners": [listener | {"node": name} for name in "ab"]}
    up = {"name": "a", "running": True, "version": "1.2", "etcd_up": False}
    found = cluster_document(overview, [up, {"name": "b", "running": False}])
    assert (found["disk_nodes"], found["running_nodes"]) == (["a", "b"], ["a"])
    assert [*found["versions"]] == [*found["listeners"]] == ["a"]
    assert found["versions"]["a"]["product_version"] == "1.2"
    assert found["maintenance_status"] == {"a": "not under maintenance"}
    assert found["alarms"] == [{"node": "a", "resource": "etcd", "type": "away"}]
