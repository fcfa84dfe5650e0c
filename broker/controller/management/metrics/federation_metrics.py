"""The metrics of federation: how many links are in which state, and what they have moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics.shovel_metrics import SHOWN_MAX
from shardmq.broker.controller.management.resources.federation import ends, status

_ENDS = ("queue", "exchange", "upstream_queue", "upstream_exchange")


def metrics(context: Context) -> Iterator[Metric]:
    """Yield nothing while there are no links."""
    links = [] if context.bridges is None else context.bridges.links()
    if not links:
        return
    by_state = GaugeMetricFamily(
        "rabbitmq_federation_links", "Links of federation, by state", labels=["status"]
    )
    for word, count in sorted(Counter(status(state) for _, state in links).items()):
        by_state.add_metric([word], count)
    yield by_state
    moved = CounterMetricFamily(
        "shardmq_federation_messages",
        "Messages that came by a link",
        labels=["vhost", "upstream", *_ENDS],
    )
    for link, state in links[:SHOWN_MAX]:
        named = ends(link)
        labels = [link.vhost, link.source.upstream, *(named.get(end, "") for end in _ENDS)]
        moved.add_metric(labels, state.moved)
    yield moved
