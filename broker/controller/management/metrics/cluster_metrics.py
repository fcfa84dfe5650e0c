"""Metrics that only nodes of a cluster have: whether etcd answers, who leads, who is away."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.node_facts import ETCD_AWAY


def metrics(part: Part) -> Iterator[Metric]:
    """Yield a series for each node of the part that tells; nothing without a cluster."""
    cluster = part.context.cluster
    if not cluster.is_cluster:
        return
    away = sum(not node.is_alive for node in cluster.nodes)
    found = part.facts
    for name, what, values in (
        (
            "shardmq_cluster_etcd_up",
            "0: etcd does not answer; nobody can join or begin to lead",
            {name: ETCD_AWAY not in facts.alarms for name, facts in found.items()},
        ),
        (
            "shardmq_cluster_etcd_silent_seconds",
            "Time since etcd answered, a few seconds if all is well",
            {name: facts.etcd_silent_s or 0.0 for name, facts in found.items()},
        ),
        (
            "shardmq_cluster_leader",
            "1: the node leads",
            {name: name == cluster.own for name in found},
        ),
        (
            "rabbitmq_unreachable_cluster_peers_count",
            "Nodes of the cluster that are down",
            dict.fromkeys(found, away),
        ),
    ):
        family = GaugeMetricFamily(name, what, labels=part.labels)
        for node, value in values.items():
            family.add_metric([node for _ in part.labels], value)
        yield family
