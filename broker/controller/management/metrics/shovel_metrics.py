"""The metrics of shovels: how many are in which state, and what they have moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shardmq.broker.controller.management.context import Context

SHOWN_MAX = 1_000  # shovels in the metrics of single ones


def metrics(context: Context) -> Iterator[Metric]:
    """Yield nothing while there are no shovels."""
    bridges = context.bridges
    states = [] if bridges is None else [bridges.state(put) for put in bridges.parameters()]
    if not states:
        return
    by_state = GaugeMetricFamily(
        "rabbitmq_shovel_dynamic", "Shovels that parameters define, by state", labels=["status"]
    )
    for status, count in sorted(Counter(state.state for state in states).items()):
        by_state.add_metric([status], count)
    yield by_state
    names = ["vhost", "shovel"]
    moved = CounterMetricFamily(
        "shardmq_shovel_messages", "Messages that the destination has taken", labels=names
    )
    refused = CounterMetricFamily(
        "shardmq_shovel_refused", "Messages that the destination has refused", labels=names
    )
    failures = GaugeMetricFamily(
        "shardmq_shovel_failures", "Failed tries in a row, 0 if the last one works", labels=names
    )
    pending = GaugeMetricFamily(
        "shardmq_shovel_pending", "Messages that wait for the destination", labels=names
    )
    for state in states[:SHOWN_MAX]:
        of = list(state.key[1:])
        moved.add_metric(of, state.moved)
        refused.add_metric(of, state.refused)
        failures.add_metric(of, 0 if state.state == "running" else state.failures)
        pending.add_metric(of, state.pending)
    yield from (moved, refused, failures, pending)
