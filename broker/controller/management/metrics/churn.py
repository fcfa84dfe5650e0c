"""Count the connections, channels and queues that came and went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.stats import Stats, details

_WHAT: Final = {"connections": "connection", "channels": "channel", "queues": "queue"}


def counts(part: Part, stats: Stats) -> dict[str, float]:
    """Return how many connections, channels and queues were opened and closed, or made and deleted.

    Channels count since each front door was started, the others since the controller was. Queues
    count at the node of a cluster that leads. `stats`: the numbers of the part.
    """
    connections, channels = len(part.connections()), stats.counters.get("channels", 0)
    opened, queues = part.connections_opened(), part.context.authority.queue_churn()
    channels_opened = stats.counters.get("channels_opened", 0)
    return {
        "connections_opened": opened,
        "connections_closed": opened - connections,
        "channels_opened": channels_opened,
        "channels_closed": max(0, channels_opened - channels),
        **(queues if part.has_common else dict.fromkeys(queues, 0)),
    }


def by_names_of_api(values: Mapping[str, float]) -> dict[str, int]:
    """Return counts under the names of RabbitMQ's HTTP API, as connection_created."""
    shown = {}
    for name, value in values.items():
        what, _, end = name.partition("_")
        shown[f"{_WHAT[what]}_{end.replace('opened', 'created')}"] = int(value)
    return shown


def churn_rates(context: Context, stats: Stats) -> dict[str, Any]:
    """Return the counts of the whole broker under the names of the HTTP API, with rates."""
    values = by_names_of_api(counts(Part(context, context.cluster.own), stats))
    rates = context.churn_rates.of({name: float(value) for name, value in values.items()})
    shown: dict[str, Any] = {}
    for name, value in values.items():
        shown |= {name: value} | details(name, rates.get(name))
    return shown
