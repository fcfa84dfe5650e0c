"""Metrics of the traffic between front doors and shards: batches, syncs, windows and rings.

Most of them have one series for each shard, the others one for all front doors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.shardd.wire.histogram import cumulative, parts_of

LABELS: Final = ("process", "shard")
DOORS: Final = ("front-doors", "")  # the labels of all front doors together


class Histogram(NamedTuple):
    """A histogram that is shown with the classes from 2^first to 2^last, times `scale`."""

    told: str  # its name in the numbers of shards and front doors
    shown: str  # its name in the metrics
    what: str
    first: int
    last: int
    scale: float = 1.0


BATCHES: Final = (
    Histogram("batch_messages", "messages", "Messages in a batch of publishes", 0, 16),
    Histogram("batch_bytes", "bytes", "Bytes of a batch of publishes", 6, 22),
)
# RabbitMQ's metric, of all front doors together.
MESSAGES: Final = Histogram(
    "message_bytes", "rabbitmq_message_size_bytes", "Bodies of messages received", 6, 27
)
SYNCS: Final = Histogram(
    "sync_us", "shardmq_sync_duration_seconds", "How long a sync took", 4, 24, 1e-6
)
# Gauges and counters that front doors have for each shard.
GAUGES: Final = (
    (
        "publish_window_bytes",
        "Publishes sent to the shard that it has not yet taken in; 1 MiB for each front door",
    ),
    ("publishers_waiting", "Connections that are not read until the shard has room"),
    ("ring_bytes", "In the rings to the shard, not yet taken"),
)
COUNTERS: Final = (
    ("publishers_held_back", "How often connections had to wait for the shard"),
    ("ring_full", "How often a ring to the shard had no room and messages took the other way"),
)


def metrics(stats: Stats) -> Iterator[Metric]:
    by_shard = sorted(stats.sizes.items())
    shards = [((f"shard-{shard}", str(shard)), numbers) for shard, numbers in by_shard]
    yield _histogram(SYNCS.shown, SYNCS, shards)
    yield _histogram(MESSAGES.shown, MESSAGES, [((), stats.counters)], labels=())
    for sizes in BATCHES:
        yield _histogram(f"shardmq_batch_{sizes.shown}", sizes, shards)
        yield _histogram(f"shardmq_door_batch_{sizes.shown}", sizes, [(DOORS, stats.counters)])
    yield GaugeMetricFamily(
        "shardmq_door_lent_bytes",
        "Memory of large bodies in use; at most memory.bodies_bytes for each front door",
        stats.counters.get("lent_bytes", 0),
    )
    for name, what in GAUGES:
        gauge = GaugeMetricFamily(f"shardmq_door_{name}", what, labels=["shard"])
        for shard, value in parts_of(stats.counters, name).items():
            gauge.add_metric([shard], value)
        yield gauge
    for name, what in COUNTERS:
        counter = CounterMetricFamily(f"shardmq_door_{name}", what, labels=["shard"])
        for shard, value in parts_of(stats.counters, name).items():
            counter.add_metric([shard], value)
        yield counter


def _histogram(
    name: str,
    sizes: Histogram,
    of: Iterable[tuple[tuple[str, ...], Mapping[str, float]]],
    labels: tuple[str, ...] = LABELS,
) -> Metric:
    family = HistogramMetricFamily(name, sizes.what, labels=labels)
    for values, numbers in of:
        bounds, count, total = cumulative(parts_of(numbers, sizes.told), sizes.first, sizes.last)
        buckets = [(f"{bound * sizes.scale:g}", value) for bound, value in bounds]
        family.add_metric(values, [*buckets, ("+Inf", count)], total * sizes.scale)
    return family
