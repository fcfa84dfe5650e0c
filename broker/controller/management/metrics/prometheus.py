"""/metrics with the names of RabbitMQ's exporter, and our own names for the numbers of processes.

Only /metrics/per-object and /metrics/detailed have a series for each queue (`object_metrics.py`).
A node of a cluster shows its own figures (`part.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shardmq.broker.controller.management.cluster_id import cluster_id, identity
from shardmq.broker.controller.management.metrics import (
    churn,
    cluster_metrics,
    federation_metrics,
    http_metrics,
    limit_usage,
    node_metrics,
    object_metrics,
    shard_numbers,
    shard_traffic,
    shovel_metrics,
)
from shardmq.broker.controller.management.metrics.detailed_query import PREFIX, Selection
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.stats import Stats, behind, lag
from shardmq.broker.controller.management.resources import login_attempts, processes
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.node_checks import short_of_files
from shardmq.broker.controller.node_facts import product_version
from shardmq.broker.controller.peers.presence import door_of
from shardmq.broker.shared.cluster_name import RABBITMQ_VERSION, cluster_name
from shardmq.shardd.wire.messages import LOW_ON_DISK

CONTENT_TYPE = CONTENT_TYPE_LATEST

AMQP = {"protocol": "amqp091"}
CLASSIC = {**AMQP, "queue_type": "rabbit_classic_queue"}
LETTERS = {"queue_type": CLASSIC["queue_type"], "dead_letter_strategy": "at_least_once"}
# The help for the counters of front doors (`Stats.counters`) and queues (`Stats.totals`).
HELP = {
    "received": "Messages received",
    "received_confirm": "Messages received on channels that want confirms",
    "returned": "Mandatory messages without a route, returned",
    "unroutable_dropped": "Messages without a route, dropped",
    "confirmed": "Messages confirmed to their publishers",
    "delivered_manual": "Messages given to consumers that acknowledge",
    "delivered_auto": "Messages given to consumers that do not acknowledge",
    "got_manual": "Messages fetched by basic.get, to be acknowledged",
    "got_auto": "Messages fetched by basic.get, not to be acknowledged",
    "got_empty": "Times that basic.get found nothing",
    "published": "Messages put into queues",
    "delivered": "Messages delivered to consumers and gets",
    "redelivered": "Messages delivered again",
    "acked": "Messages acknowledged",
}
# The counters and labels of metrics.
GLOBAL_METRICS = {
    "received": ("received", AMQP),
    "received_confirm": ("received_confirm", AMQP),
    "unroutable_returned": ("returned", AMQP),
    "unroutable_dropped": ("unroutable_dropped", AMQP),
    "confirmed": ("confirmed", AMQP),
    "delivered_consume_manual_ack": ("delivered_manual", CLASSIC),
    "delivered_consume_auto_ack": ("delivered_auto", CLASSIC),
    "delivered_get_manual_ack": ("got_manual", CLASSIC),
    "delivered_get_auto_ack": ("got_auto", CLASSIC),
    "get_empty": ("got_empty", CLASSIC),
    "routed": ("published", AMQP),
    "delivered": ("delivered", CLASSIC),
    "redelivered": ("redelivered", CLASSIC),
    "acknowledged": ("acked", CLASSIC),
}
# Further metrics of the same counters, without labels.
CHANNEL_METRICS = {
    "messages_published": "received",
    "messages_confirmed": "confirmed",
    "messages_unroutable_returned": "returned",
    "messages_unroutable_dropped": "unroutable_dropped",
    "messages_delivered_ack": "delivered_manual",
    "messages_delivered": "delivered_auto",
    "get_ack": "got_manual",
    "get": "got_auto",
    "get_empty": "got_empty",
    "messages_redelivered": "redelivered",
    "messages_acked": "acked",
}
SLICE_METRICS = 8  # written before the processor is offered
# Metrics that /metrics/per-object has for each object under the same name as their sum here. The
# library names counters without _total.
PER_OBJECT_NAMES = {
    f"rabbitmq_{name}".removesuffix("_total")
    for family in object_metrics.PER_OBJECT_FAMILIES
    for name in object_metrics.FAMILIES[family].metrics
}
Rows = list[dict[str, Any]]  # as `processes.rows` returns them
DEATHS = ("expired", "rejected", "maxlen", "delivery_limit")


class _Registry:
    """The part of a registry that generate_latest needs."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


async def text(part: Part) -> AsyncGenerator[bytes]:
    """Yield all metrics that are not of single objects."""
    stats = part.stats(await part.context.stats.now(totals_only=True))
    async for piece in _text(part, stats, "aggregated", SlicedWork()):
        yield piece


async def _text(part: Part, stats: Stats, endpoint: str, work: SlicedWork) -> AsyncGenerator[bytes]:
    found, context = part.rows(), part.context
    metrics = [
        *_totals(part, stats),
        *_identity(part, endpoint),
        *_alarms(part, stats, found),
        *_processes(part, stats, found),
        *_streams(stats),
        *shard_traffic.metrics(stats),
        *cluster_metrics.metrics(part),
    ]
    if part.has_common:
        metrics += [*limit_usage.metrics(context), *http_metrics.metrics(context)]
        metrics += [*shovel_metrics.metrics(context), *federation_metrics.metrics(context)]
    if endpoint == "per-object":
        metrics = [metric for metric in metrics if metric.name not in PER_OBJECT_NAMES]
    for start in range(0, len(metrics), SLICE_METRICS):
        yield generate_latest(_Registry(metrics[start : start + SLICE_METRICS]))
        await work.yield_to_others()


async def per_object(part: Part) -> AsyncGenerator[bytes]:
    stats = part.stats(await part.context.stats.now())
    work, selected = SlicedWork(), Selection(object_metrics.PER_OBJECT_FAMILIES)
    async for piece in _text(part, stats, "per-object", work):
        yield piece
    lines = object_metrics.lines(part, stats, selected, object_metrics.PER_OBJECT, work)
    async for piece in lines:
        yield piece


async def detailed(part: Part, selected: Selection) -> AsyncGenerator[bytes]:
    """Yield the metrics of the objects that a query selects."""
    yield generate_latest(_Registry([*_identity(part, "detailed", selected.prefix)]))
    stats = part.stats(await part.context.stats.now())
    lines = object_metrics.lines(part, stats, selected, object_metrics.DETAILED, SlicedWork())
    async for piece in lines:
        yield piece


def _totals(part: Part, stats: Stats) -> Iterator[Metric]:
    context = part.context
    ready, unacked = stats.totals["ready"], stats.totals["unacked"]
    ready_bytes, unacked_bytes = stats.totals["ready_bytes"], stats.totals["unacked_bytes"]
    channels = stats.counters.get("channels", 0)
    for name, what, value in (
        ("connections", "Connections open", len(part.connections())),
        ("channels", "Channels open", channels),
        ("consumers", "Consumers", len(stats.consumers)),
        ("queues", "Queues", part.queues()),
        ("queue_messages", "Messages ready and unacknowledged", ready + unacked),
        ("queue_messages_ready", "Messages ready", ready),
        ("queue_messages_unacked", "Messages unacknowledged", unacked),
        ("queue_messages_bytes", "Bytes of messages", ready_bytes + unacked_bytes),
        ("queue_messages_ready_bytes", "Bytes of messages ready", ready_bytes),
        ("queue_messages_unacked_bytes", "Bytes of messages unacknowledged", unacked_bytes),
        ("queue_consumers", "Consumers of queues", stats.totals["consumers"]),
        ("channel_consumers", "Consumers of channels", len(stats.consumers)),
        ("channel_messages_unacked", "Deliveries not acknowledged", unacked),
        ("connection_channels", "Channels of connections", channels),
    ):
        yield GaugeMetricFamily(f"rabbitmq_{name}", what, value=value)
    what = "Messages that exchanges keep until they are due"
    yield GaugeMetricFamily("shardmq_messages_delayed", what, value=sum(stats.delayed.values()))
    counters = stats.counters | stats.totals
    for name, (counter, labels) in GLOBAL_METRICS.items():
        count = counters.get(counter, 0)
        yield _labelled(
            CounterMetricFamily, f"global_messages_{name}", HELP[counter], labels, count
        )
    for name, counter in CHANNEL_METRICS.items():
        count = counters.get(counter, 0)
        yield CounterMetricFamily(f"rabbitmq_channel_{name}", HELP[counter], value=count)
    connected = {
        "publishers": stats.counters.get("publishers", 0),
        "consumers": len(stats.consumers),
    }
    for name, count in connected.items():
        yield _labelled(
            GaugeMetricFamily, f"global_{name}", f"{name.capitalize()} connected", AMQP, count
        )
    for name, count in churn.counts(part, stats).items():
        yield CounterMetricFamily(
            f"rabbitmq_{name}", f"{name.replace('_', ' ').capitalize()}", value=count
        )
    spans = context.spans if part.has_common else None
    for name, what, count in (
        (
            "shardmq_messages_duplicates_total",
            "Publishes not stored: their producer had sent them before",
            stats.totals["repeated"],
        ),
        (
            "shardmq_duplicates_total",
            "Messages that came to an exchange before, dropped",
            stats.counters.get("duplicates", 0),
        ),
        (
            "shardmq_tracing_spans_exported_total",
            "Spans that the OpenTelemetry collector has taken",
            spans.exported if spans is not None else 0,
        ),
        (
            "shardmq_tracing_spans_dropped_total",
            "Spans dropped, because the collector or the controller was away, slow or refused them",
            stats.counters.get("spans_dropped", 0) + (spans.dropped if spans is not None else 0),
        ),
    ):
        yield CounterMetricFamily(name, what, value=count)
    yield from _login_attempts(part, stats)
    for reason in DEATHS:
        name, count = (
            f"global_messages_dead_lettered_{reason}",
            stats.counters.get(f"dead_lettered_{reason}", 0),
        )
        yield _labelled(CounterMetricFamily, name, "Dead letters published again", LETTERS, count)


def _login_attempts(part: Part, stats: Stats) -> Iterator[Metric]:
    all_, well, badly = (
        CounterMetricFamily(f"rabbitmq_auth_attempts{which}", f"Logins{what}", labels=["protocol"])
        for which, what in (
            ("", ""),
            ("_succeeded", " that succeeded"),
            ("_failed", " that failed"),
        )
    )
    for protocol, (succeeded, failed) in login_attempts.logins(part, stats).items():
        for family, count in ((all_, succeeded + failed), (well, succeeded), (badly, failed)):
            family.add_metric([protocol], count)
    unseen = CounterMetricFamily(
        "shardmq_logins_refused_unseen",
        "Logins refused without a look at the password, "
        "as too many of the user or the address had failed",
        labels=["protocol"],
    )
    for protocol, count in login_attempts.refused_unseen(part, stats).items():
        unseen.add_metric([protocol], count)
    yield from (all_, well, badly, unseen)


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    what: str,
    labels: dict[str, str],
    value: float,
    prefix: str = PREFIX,
) -> Metric:
    family = kind(f"{prefix}_{name}", what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _identity(part: Part, endpoint: str, prefix: str = PREFIX) -> Iterator[Metric]:
    """Yield the metrics that every panel of RabbitMQ's dashboards joins with."""
    context = part.context
    labels = {
        "rabbitmq_node": part.called,
        "rabbitmq_cluster": cluster_name(context.catalog),
        "rabbitmq_cluster_permanent_id": cluster_id(context.catalog, identity(context.config)),
        "rabbitmq_endpoint": endpoint,
    }
    yield _labelled(GaugeMetricFamily, "identity_info", "Node and cluster", labels, 1, prefix)
    build = {
        "rabbitmq_version": RABBITMQ_VERSION,
        "prometheus_plugin_version": RABBITMQ_VERSION,
        "prometheus_client_version": version("prometheus_client"),
        "erlang_version": "0",
        "product_name": "shardmq",
        "product_version": product_version(),
    }
    yield _labelled(GaugeMetricFamily, "build_info", "Versions", build, 1, prefix)


def _alarms(part: Part, stats: Stats, found: Rows) -> Iterator[Metric]:
    alarms = [(shard.number, shard.alarm) for shard in part.shards() if shard.alarm]
    low, few = any(alarm == LOW_ON_DISK for _, alarm in alarms), short_of_files(found)
    memory = any(facts.memory_alarm for facts in part.facts.values())
    most = part.context.presence.connections_max if part.has_common else None
    for name, what, value in (
        ("rabbitmq_alarms_free_disk_space_watermark", "1: publishers are blocked", low),
        ("rabbitmq_alarms_memory_used_watermark", "1: publishers are blocked", memory),
        ("shardmq_connections_max", "Connections let in at once; 0: no limit", most),
        ("rabbitmq_alarms_file_descriptor_limit", "1: a process has few left", bool(few)),
    ):
        if value is not None:
            yield GaugeMetricFamily(name, what, value=value)
    family = GaugeMetricFamily(
        "shardmq_shard_alarm", "1: in effect", labels=["process", "shard", "alarm"]
    )
    for shard, alarm in alarms:
        family.add_metric([f"shard-{shard}", str(shard), alarm], 1)
    yield family
    warned = GaugeMetricFamily(
        "shardmq_shard_warnings", "What an operator should look at", labels=["process", "shard"]
    )
    for shard, numbers in stats.shards.items():
        warned.add_metric([f"shard-{shard}", str(shard)], len(processes.warnings(numbers)))
    yield warned


def _processes(part: Part, stats: Stats, found: Rows) -> Iterator[Metric]:
    labels = ["process", "shard", *part.labels]
    for kind, name, text, field in (
        (GaugeMetricFamily, "process_resident_memory_bytes", "Resident memory", "rss_bytes"),
        (GaugeMetricFamily, "process_uptime_seconds", "Time since the process started", "uptime"),
        (CounterMetricFamily, "restarts", "Restarts by the supervisor", "restarts"),
        (GaugeMetricFamily, "process_open_fds", "Open files", "fd_used"),
        (GaugeMetricFamily, "process_max_fds", "Files that may be open", "fd_total"),
    ):
        family = kind(f"shardmq_{name}", text, labels=labels)
        for row in found:
            index = str(row["index"]) if row["kind"] == "shard" else ""
            values = [str(row["name"]), index, *part.label_values(row)]
            family.add_metric(values, row.get(field) or 0)
        yield family
    yield _connections_of_front_doors(part, found)
    node = node_metrics.values(part, stats, found)
    for texts in node_metrics.FAMILIES.values():
        for name in [name for name in texts if name in node]:
            of_kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield of_kind(f"rabbitmq_{name}", texts[name], value=node[name])
    yield from shard_numbers.metrics(stats)


def _connections_of_front_doors(part: Part, found: Rows) -> Metric:
    """Return how many connections each front door has, and which process each front door is."""
    here = Counter(door_of(info.owner) for info in part.connections())
    family = GaugeMetricFamily(
        "shardmq_front_door_connections",
        "Connections open at a front door, and its process",
        labels=["process", "front_door", *part.labels],
    )
    for row in found:
        if (door := row["front_door"]) is not None:
            values = [str(row["name"]), str(door), *part.label_values(row)]
            family.add_metric(values, here[door])
    return family


def _streams(stats: Stats) -> Iterator[Metric]:
    # These messages also count as ready, but stay when they are read.
    kept = sum(stats.queues[id].ready for id in stats.streams if id in stats.queues)
    yield GaugeMetricFamily("shardmq_stream_messages", "Messages in streams", value=kept)
    worst = max((lag(stats, reader) for reader in stats.readers.values()), default=0)
    what = "Messages of a stream that its slowest consumer has not read"
    yield GaugeMetricFamily("rabbitmq_stream_consumer_max_offset_lag", what, value=worst)
    waiting = (
        behind(stream, offset)
        for stream in stats.streams.values()
        for offset in stream.positions.values()
    )
    what = "Messages of a stream that the consumers of the slowest name have not read"
    yield GaugeMetricFamily(
        "shardmq_stream_group_max_offset_lag", what, value=max(waiting, default=0)
    )
