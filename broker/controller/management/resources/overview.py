"""/api/overview: the fields that RabbitMQ's tools read, with a version of RabbitMQ they know."""

from __future__ import annotations

import platform
from typing import Any

from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.metrics import time_range
from shardmq.broker.controller.management.metrics.churn import churn_rates
from shardmq.broker.controller.management.metrics.message_stats import all_message_stats, depths
from shardmq.broker.controller.management.metrics.past import (
    BROKER,
    COARSE_KEPT_S,
    FINE_KEPT_S,
    THE_ONLY,
)
from shardmq.broker.controller.management.metrics.samples import add_row_samples
from shardmq.broker.controller.node_checks import listeners
from shardmq.broker.controller.node_facts import product_version
from shardmq.broker.routing.types import TYPES
from shardmq.broker.shared.cluster_name import RABBITMQ_VERSION, cluster_name


def contexts(listening: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the listeners of the HTTP API as RabbitMQ shows them, too."""
    return [
        {
            "node": one["node"],
            "description": "management",
            "path": "/",
            "ip": one["ip_address"],
            "port": str(one["port"]),
            "protocol": one["protocol"],
            "ssl_opts": [],
        }
        for one in listening
        if one["protocol"] in ("http", "https")
    ]


async def overview(call: Call) -> dict[str, Any]:
    """Show the counts, rates, listeners and versions of the whole broker."""
    context, wanted = call.context, time_range.asked(call.request.query)
    stats, vhosts = await context.stats.now(totals_only=True), call.visible_vhosts()
    facts = context.cluster.facts()
    listening = listeners(facts)
    shown = {
        "product_name": "shardmq",
        "product_version": product_version(),
        "rabbitmq_version": RABBITMQ_VERSION,
        "management_version": RABBITMQ_VERSION,
        "erlang_version": "0",
        "erlang_full_version": f"Python {platform.python_version()}",
        "cluster_name": cluster_name(context.catalog),
        "node": call.via,
        "rates_mode": "basic",
        "statistics_db_event_queue": 0,
        # In RabbitMQ these two are settings. Here each call may choose, by its query.
        "disable_stats": False,
        "enable_queue_totals": False,
        # For how many seconds samples are kept of the broker, nodes and vhosts, and of others.
        "sample_retention_policies": {
            "global": [FINE_KEPT_S, COARSE_KEPT_S],
            "basic": [FINE_KEPT_S],
            "detailed": [],
        },
        "object_totals": {
            "connections": len(context.presence.connections()),
            "channels": int(stats.counters.get("channels", 0)),
            "consumers": len(stats.consumers),
            "exchanges": sum(len(vhost.exchanges) for vhost in vhosts),
            "queues": sum(len(vhost.queues) - vhost.hidden_queues for vhost in vhosts),
        },
        "queue_totals": depths(stats),
        "message_stats": all_message_stats(stats),
        "churn_rates": churn_rates(context, stats),
        "listeners": listening,
        "contexts": contexts(listening),
        "exchange_types": [{"name": name, "description": "", "enabled": True} for name in TYPES],
    }
    if context.cluster.is_cluster:
        shown["alarms"] = [
            {"node": name, "alarm": alarm} for name, told in facts.items() for alarm in told.alarms
        ]
    if wanted is not None:
        add_row_samples(shown, context.past, BROKER, THE_ONLY, stats.at, wanted)
    return shown


async def reset(call: Call) -> None:
    """Let rates begin anew and drop the samples. Counts and messages stay as they are."""
    call.check_node()
    call.context.stats.forget()
    call.context.churn_rates.forget()
    call.context.node_rates.clear()
    call.context.past.forget()


ROUTES = [
    Route("GET", "/api/overview", overview, shows="Overview"),
    Route("DELETE", "/api/reset", reset, "administrator"),
    Route("DELETE", "/api/reset/{node}", reset, "administrator"),
]
