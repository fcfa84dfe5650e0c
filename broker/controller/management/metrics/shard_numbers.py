"""The metrics `shardmq_shard_*`: the numbers that the process of each shard tells of itself.

Those of shards that have copies on other nodes are called `shardmq_replica_*`.

Names of counters end in `_total`. Until version 0.2 each counter is also shown under its name of
0.1, which lacks `_total`, as a gauge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shardmq.broker.controller.management.metrics.stats import Stats

PREFIX: Final = "shardmq_shard_"
# The help of each number by its name. Counters rise from 0 on at each start of the process.
COUNTERS: Final = {
    "appended_bytes": "Bytes of messages written to stores",
    "appended_messages": "Messages written to stores",
    "cpu_seconds": "Processor time of the process",
    "gone_acked": "Messages acknowledged at queues that are deleted",
    "gone_delivered": "Messages delivered by queues that are deleted",
    "gone_got": "Messages fetched by basic.get from queues that are deleted",
    "gone_published": "Messages put into queues that are deleted",
    "gone_redelivered": "Messages delivered again by queues that are deleted",
    "gone_repeated": "Repeated publishes not stored in queues that are deleted",
    "merge_bytes": "Bytes copied to free segments with few messages left",
    "merged_segments": "Segments freed by copying the few messages left in them",
    "ring_full": "How often a ring had no room and a message took the other way",
    "sync_seconds": "Time that syncs of message files took",
    "syncs": "Syncs of message files",
    "written_bytes": "Bytes written to message files, with what is copied",
}
GAUGES: Final = {
    "buffered_bytes": "Bytes of messages not yet written to files",
    "damaged": "Damaged places found in message files that cost messages",
    "dead_bytes": "Bytes in segments of messages that are settled",
    "dead_letters_waiting": "Messages on their way to a dead-letter exchange",
    "delivery_window_bytes": "Bytes of deliveries that clients have not yet read",
    "delivery_windows_full": "Windows that deliver nothing until the client has read",
    "disk_bytes": "Bytes of message files on the disk",
    "disk_free_bytes": "Bytes free on the disk of the message files",
    "disk_free_min_bytes": "Below so many free bytes publishers are blocked",
    "disk_free_warn_bytes": "Below so many free bytes there is a warning",
    "live_bytes": "Bytes in segments of messages that are not settled",
    "live_messages": "Messages in segments that are not settled",
    "producers": "Producers whose last sequence is known, to recognise repeated publishes",
    "recovered_bytes": "Bytes of message files that the last recovery went through",
    "recovered_messages": "Messages that the last recovery went through",
    "recovery_seconds": "How long the last recovery took",
    "ring_bytes": "Bytes in the rings to front doors, not yet taken",
    "rss_bytes": "Resident memory of the process",
    "segments": "Segments of message files",
    "spare_segments": "Empty segments kept for the next messages",
    "torn": "Ends of message files that a crash cut off",
    "unsynced_segments": "Segments with messages that are not yet synced",
}
# Of the process that leads a shard with copies; counters rise from 0 on when it begins to lead.
REPLICAS: Final = {
    "replica_in_sync": "Nodes that have all that is confirmed of a shard, the leader among them",
    "replica_lag_seconds": "How long the oldest sync waits for a node that is to have done it",
    "replica_lag_bytes": "Bytes that were written to a shard and that not all of them have synced",
}
REPLICA_COUNTERS: Final = {
    "replica_sent_bytes": "Bytes of changes and files that were sent to nodes with copies",
    "replica_plain_bytes": "The same before they were compressed",
}


def metrics(stats: Stats) -> Iterator[Metric]:
    """Yield a metric for each number, with a series for each shard."""
    by_name: dict[str, dict[int, float]] = {}
    for shard, numbers in stats.shards.items():
        for name, value in numbers.items():
            by_name.setdefault(name, {})[shard] = value
    for name, values in sorted(by_name.items()):
        if name in COUNTERS:
            yield _of_shards(CounterMetricFamily, name, COUNTERS[name], values)
            yield _of_shards(GaugeMetricFamily, name, f"Until 0.2, see {name}_total", values)
        elif name in REPLICA_COUNTERS:
            yield _of_shards(CounterMetricFamily, name, REPLICA_COUNTERS[name], values, "shardmq_")
        elif name in REPLICAS:
            yield _of_shards(GaugeMetricFamily, name, REPLICAS[name], values, "shardmq_")
        else:
            what = GAUGES.get(name, "A number of the process")
            yield _of_shards(GaugeMetricFamily, name, what, values)


def _of_shards(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    what: str,
    values: dict[int, float],
    prefix: str = PREFIX,
) -> Metric:
    family = kind(prefix + name, what, labels=["process", "shard"])
    for shard, value in values.items():
        family.add_metric([f"shard-{shard}", str(shard)], value)
    return family
