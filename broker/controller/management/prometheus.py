"""/metrics in the names of RabbitMQ's exporter, and ours for processes. Series per queue: /metrics/per-object alone."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.controller.management import processes
from broker.controller.management.call import NODE, Context
from broker.controller.management.gathered import Stats, lag
from broker.controller.management.overview import RABBITMQ_VERSION, product_version
from shardd.wire.messages import LOW_ON_DISK

CONTENT_TYPE = CONTENT_TYPE_LATEST

TOTALS = {
    "rabbitmq_global_messages_received_total": ("published", "Messages published to queues"),
    "rabbitmq_global_messages_delivered_total": ("delivered", "Messages delivered to consumers and gets"),
    "rabbitmq_global_messages_acknowledged_total": ("acked", "Messages acknowledged"),
    "rabbitmq_global_messages_redelivered_total": ("redelivered", "Messages delivered again"),
    "rabbitmq_global_messages_delivered_get_total": ("got", "Messages fetched by basic.get"),
    "shardmq_messages_duplicates_total": ("repeated", "Publishes not stored: their producer had sent them before"),
}
DEATHS = ("expired", "rejected", "maxlen", "delivery_limit")


class _Once:
    """What generate_latest wants of a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


async def text(context: Context, per_object: bool) -> bytes:
    stats = await context.stats.now()
    metrics = [*_totals(context, stats), *_identity(), *_alarms(context, stats), *_processes(context, stats)]
    metrics.extend(_streams(context, stats))
    if per_object:
        metrics.extend(_queues(context, stats))
    return generate_latest(_Once(metrics))


def _totals(context: Context, stats: Stats) -> Iterator[Metric]:
    ready, unacked = stats.totals["ready"], stats.totals["unacked"]
    for name, what, value in (
        ("rabbitmq_connections", "Connections open", len(context.presence.connections())),
        ("rabbitmq_channels", "Channels open", len(stats.channels)),
        ("rabbitmq_consumers", "Consumers", len(stats.consumers)),
        (
            "rabbitmq_queues",
            "Queues",
            sum(len(v.queues) - v.delay_queues for v in context.catalog.vhosts.values()),
        ),
        ("shardmq_messages_delayed", "Messages that exchanges keep until they are due", sum(stats.delayed.values())),
        ("rabbitmq_queue_messages", "Messages ready and unacknowledged", ready + unacked),
        ("rabbitmq_queue_messages_ready", "Messages ready", ready),
        ("rabbitmq_queue_messages_unacked", "Messages unacknowledged", unacked),
        (
            "rabbitmq_queue_messages_bytes",
            "Bytes of messages",
            stats.totals["ready_bytes"] + stats.totals["unacked_bytes"],
        ),
    ):
        yield GaugeMetricFamily(name, what, value=value)
    for name, (counter, what) in TOTALS.items():
        yield CounterMetricFamily(name, what, value=stats.totals[counter])
    duplicates = stats.counters.get("duplicates", 0)
    yield CounterMetricFamily(
        "shardmq_duplicates_total", "Messages that came to an exchange before, dropped", value=duplicates
    )
    dropped = stats.counters.get("unroutable_dropped", 0)
    yield CounterMetricFamily(
        "rabbitmq_global_messages_unroutable_dropped_total", "Messages without a route, dropped", value=dropped
    )
    for reason in DEATHS:
        yield CounterMetricFamily(
            f"rabbitmq_global_messages_dead_lettered_{reason}_total",
            "Dead letters published again",
            value=stats.counters.get(f"dead_lettered_{reason}", 0),
        )


def _identity() -> Iterator[Metric]:
    identity = GaugeMetricFamily(
        "rabbitmq_identity_info", "Node and cluster", labels=["rabbitmq_node", "rabbitmq_cluster"]
    )
    identity.add_metric([NODE, NODE], 1)
    yield identity
    build = GaugeMetricFamily(
        "rabbitmq_build_info", "Versions", labels=["rabbitmq_version", "product_name", "product_version"]
    )
    build.add_metric([RABBITMQ_VERSION, "shardmq", product_version()], 1)
    yield build


def _alarms(context: Context, stats: Stats) -> Iterator[Metric]:
    alarms = [(shard.number, shard.alarm) for shard in context.shards.shards if shard.alarm]
    low = any(alarm == LOW_ON_DISK for _, alarm in alarms)
    yield GaugeMetricFamily("rabbitmq_alarms_free_disk_space_watermark", "1: publishers are blocked", value=low)
    memory = context.memory.alarm != ""
    yield GaugeMetricFamily("rabbitmq_alarms_memory_used_watermark", "1: publishers are blocked", value=memory)
    most = context.presence.connections_max
    yield GaugeMetricFamily("shardmq_connections_max", "Connections let in at once; 0: no limit", value=most)
    few = bool(processes.short_of_files(context))
    yield GaugeMetricFamily("rabbitmq_alarms_file_descriptor_limit", "1: a process has few left", value=few)
    for key, value in processes.disk_room(stats).items():
        name = {"disk_free": "available", "disk_free_limit": "available_limit"}[key]
        yield GaugeMetricFamily(f"rabbitmq_disk_space_{name}_bytes", "Of the file system of the messages", value=value)
    family = GaugeMetricFamily("shardmq_shard_alarm", "1: in effect", labels=["process", "shard", "alarm"])
    for shard, alarm in alarms:
        family.add_metric([f"shard-{shard}", str(shard), alarm], 1)
    yield family
    warned = GaugeMetricFamily("shardmq_shard_warnings", "What an operator should look at", labels=["process", "shard"])
    for shard, numbers in stats.shards.items():
        warned.add_metric([f"shard-{shard}", str(shard)], len(processes.warnings(numbers)))
    yield warned


def _processes(context: Context, stats: Stats) -> Iterator[Metric]:
    labels = ["process", "shard"]
    rss = GaugeMetricFamily("shardmq_process_resident_memory_bytes", "Resident memory", labels=labels)
    uptime = GaugeMetricFamily("shardmq_process_uptime_seconds", "Time since the process started", labels=labels)
    files = GaugeMetricFamily("shardmq_process_open_fds", "Open files", labels=labels)
    files_max = GaugeMetricFamily("shardmq_process_max_fds", "Files that may be open", labels=labels)
    restarts = CounterMetricFamily("shardmq_restarts", "Restarts by the supervisor", labels=labels)
    found = processes.rows(context)
    for row in found:
        at = [str(row["name"]), str(row["index"]) if row["kind"] == "shard" else ""]
        rss.add_metric(at, row.get("rss_bytes") or 0)
        uptime.add_metric(at, row.get("uptime", 0))
        files.add_metric(at, row.get("fd_used") or 0)
        files_max.add_metric(at, row.get("fd_total") or 0)
        restarts.add_metric(at, row["restarts"] or 0)
    yield from (rss, uptime, restarts, files, files_max)
    used = sum(row.get("fd_used") or 0 for row in found)
    yield GaugeMetricFamily("rabbitmq_process_open_fds", "Open files of all processes", value=used)
    total = sum(row.get("fd_total") or 0 for row in found)
    yield GaugeMetricFamily("rabbitmq_process_max_fds", "Files that all processes may open", value=total)
    memory = context.memory
    yield GaugeMetricFamily(
        "rabbitmq_process_resident_memory_bytes", "Held by all processes, files apart", value=memory.used_bytes
    )
    yield GaugeMetricFamily(
        "rabbitmq_resident_memory_limit_bytes", "Above it publishers are blocked", value=memory.limit_bytes
    )
    names = sorted({name for process in stats.shards.values() for name in process})
    for name in names:
        family = GaugeMetricFamily(f"shardmq_shard_{name}", "As the shard reports it", labels=labels)
        for shard, process in stats.shards.items():
            if name in process:
                family.add_metric([f"shard-{shard}", str(shard)], process[name])
        yield family


def _streams(context: Context, stats: Stats) -> Iterator[Metric]:
    lags: dict[int, int] = {}
    for reader in stats.readers.values():
        lags[reader.queue] = max(lags.get(reader.queue, 0), lag(stats, reader))
    what = "Messages that the slowest consumer has before it"
    yield GaugeMetricFamily("rabbitmq_stream_consumer_max_offset_lag", what, value=max(lags.values(), default=0))
    family = GaugeMetricFamily("rabbitmq_detailed_stream_consumer_max_offset_lag", what, labels=["vhost", "queue"])
    for id, value in lags.items():
        queue = context.catalog.queue_by_id(id)
        if queue is not None:
            family.add_metric([queue.vhost, queue.name], value)
    yield family


def _queues(context: Context, stats: Stats) -> Iterator[Metric]:
    labels = ["vhost", "queue"]
    for name, fields in (
        ("rabbitmq_queue_messages", ("ready", "unacked")),
        ("rabbitmq_queue_messages_ready", ("ready",)),
        ("rabbitmq_queue_messages_unacked", ("unacked",)),
        ("rabbitmq_queue_consumers", ("consumers",)),
    ):
        family = GaugeMetricFamily(f"{name.replace('rabbitmq_queue', 'rabbitmq_detailed_queue')}", name, labels=labels)
        for id, known in stats.queues.items():
            queue = context.catalog.queue_by_id(id)
            if queue is not None:
                family.add_metric([queue.vhost, queue.name], sum(getattr(known, field) for field in fields))
        yield family
