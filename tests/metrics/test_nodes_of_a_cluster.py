"""Each node of a cluster shows its own figures, so that all nodes together count nothing twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import object_metrics, prometheus
from shardmq.broker.controller.management.metrics.detailed_query import Selection
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.shardd.wire import messages as wire
from tests.http_api import conftest
from tests.http_api.conftest import CONNECTION, Api
from tests.http_api.fake_cluster import LEADER, OTHER, in_cluster
from tests.http_api.test_api import make

api = conftest.api

Samples = dict[str, list[tuple[dict[str, str], float]]]
# What each node has, and the whole broker has not more of.
NOT_ADDED_UP = (
    "rabbitmq_identity_info", "rabbitmq_build_info", "rabbitmq_erlang_uptime_seconds",
)  # fmt: skip


@pytest.fixture
async def context(api: Api) -> Context:
    await make(api)
    return await in_cluster(api)


async def scraped(context: Context, node: str, is_whole: bool = False) -> Samples:
    part, found = Part(context, node, is_whole), Samples()
    text = b"".join([piece async for piece in prometheus.text(part)]).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_the_figures_of_all_nodes_add_up_to_those_of_the_cluster(
    context: Context, api: Api
) -> None:
    api.shards.process = {0: {"rss_bytes": 1.0}, 1: {"rss_bytes": 2.0}}
    whole = await scraped(context, OTHER, is_whole=True)
    nodes = [await scraped(context, node) for node in (LEADER, OTHER)]
    for name, samples in whole.items():
        sums = [sum(value for _, value in found.get(name, ())) for found in nodes]
        if name not in NOT_ADDED_UP:
            assert sum(sums) == pytest.approx(sum(value for _, value in samples)), name
    for name, of_each in (
        ("rabbitmq_connections", [1, 1]),
        ("rabbitmq_global_messages_received_total", [7, 5]),
        ("rabbitmq_connections_opened_total", [1, 1]),
        ("rabbitmq_process_resident_memory_bytes", [10, 5]),
        ("shardmq_cluster_leader", [1, 0]), ("shardmq_cluster_etcd_up", [1, 0]),
    ):  # fmt: skip
        assert [found[name][0][1] for found in nodes] == of_each, name
    assert all(found["rabbitmq_queues"][0][1] for found in nodes)


async def test_no_series_of_all_nodes_comes_twice(context: Context) -> None:
    whole = await scraped(context, OTHER, is_whole=True)
    for name, samples in whole.items():
        labels = [tuple(sorted(one.items())) for one, _ in samples]
        assert len(labels) == len(set(labels)), name
    rows = whole["shardmq_restarts_total"]
    assert {labels["node"] for labels, _ in rows} == {LEADER, OTHER}


async def test_each_node_has_its_own_identity(context: Context) -> None:
    for node in (LEADER, OTHER):
        ((labels, value),) = (await scraped(context, node))["rabbitmq_identity_info"]
        assert (labels["rabbitmq_node"], value) == (node, 1)
        assert "node" not in (await scraped(context, node))["shardmq_restarts_total"][0][0]


async def test_single_objects_are_those_of_the_node(context: Context) -> None:
    families = (
        "queue_coarse_metrics", "connection_coarse_metrics", "channel_exchange_metrics",
        "exchange_metrics", "node_coarse_metrics", "connection_churn_metrics",
    )  # fmt: skip
    seen: list[set[str]] = []
    for node in (LEADER, OTHER):
        part = Part(context, node, is_whole=False)
        stats = part.stats(await context.stats.now())
        lines = object_metrics.lines(
            part, stats, Selection(families), object_metrics.DETAILED, SlicedWork()
        )
        text = b"".join([piece async for piece in lines]).decode()
        seen.append({line.split("} ")[0] for line in text.splitlines() if "vhost=" in line})
    assert seen[0] and seen[1]
    shared = {line for line in seen[0] & seen[1] if "exchange=" not in line}
    assert not shared
    name = CONNECTION.replace('"', "")
    assert any(name in line for line in seen[0]) and any('"second"' in line for line in seen[1])


async def test_consumers_count_where_they_are_connected(context: Context, api: Api) -> None:
    queue = context.catalog.vhosts["/"].queues["q"]

    def replied(shard: int, asked: wire.Stats) -> Any:
        future = type(api.shards).stats(api.shards, shard, asked)
        reply = future.result()
        reply.consumers[:] = [
            wire.ConsumerStats(queue.id, door, 1, 1, "tag", False, False, 10, True)
            for door in ((256, 257, 256) if shard == queue.shard else ())
        ]
        return future

    api.shards.stats = replied  # type: ignore[method-assign]
    nodes = [await scraped(context, node) for node in (LEADER, OTHER)]
    assert [found["rabbitmq_consumers"][0][1] for found in nodes] == [0, 3]


async def test_the_alerts_of_a_cluster_ask_for_what_a_node_has(context: Context) -> None:
    alerts = (Path(__file__).parents[2] / "deploy" / "alerts.yaml").read_text()
    asked = set(re.findall(r"\b(?:shardmq_cluster_|rabbitmq_unreachable_)\w+", alerts))
    assert len(asked) > 1 and asked <= (await scraped(context, OTHER)).keys()
