"""The samples that rows of queues, exchanges, connections and channels show.

An object of which no samples are kept has two: that of the last time when everything was collected,
and the numbers of now.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardmq.broker.controller.management.metrics.message_stats import (
    CHANNEL_COUNTERS,
    OCTETS,
    QUEUE_COUNTERS,
)
from shardmq.broker.controller.management.metrics.past import (
    CONNECTION,
    EXCHANGE,
    QUEUE,
    VHOST_SAMPLED,
    Kind,
    Numbers,
    Past,
    Points,
    numbers_in,
    with_point,
)
from shardmq.broker.controller.management.metrics.stats import Clients, Stats
from shardmq.broker.controller.management.metrics.time_range import Asked, Row, add_samples

# In each of these functions the numbers are in the order of the columns of the kind of object, and
# None is returned for an object that is not known.


def queue_numbers(stats: Stats, id: int) -> Numbers | None:
    known = stats.queues.get(id)
    if known is None:
        return None
    # Messages that consumers of a stream have not acknowledged are ready, too.
    messages = known.ready if id in stats.streams else known.ready + known.unacked
    counts = [count(known) for count in QUEUE_COUNTERS.values()]
    return (messages, known.ready, known.unacked, *counts)


def vhost_numbers(stats: Stats, vhost: str, ready: int, unacked: int) -> Numbers:
    """Return the numbers of a vhost whose queues have so many messages."""
    counts = stats.vhosts.get(vhost, {})
    names = (*(CHANNEL_COUNTERS[said] for said in VHOST_SAMPLED), *OCTETS)
    return (ready + unacked, ready, unacked, *[counts.get(name, 0) for name in names])


def client_numbers(clients: Clients, kind: Kind, key: Any) -> Numbers | None:
    """Return the numbers of an exchange, a connection or a channel (`kind`)."""
    if kind is EXCHANGE:
        return clients.exchanges.get(key)
    if kind is CONNECTION:
        report = clients.connections.get(key)
        return None if report is None else numbers_in(CONNECTION, report)
    report = clients.channels.get(key)
    return None if report is None else [report.get(name, 0) for name in CHANNEL_COUNTERS.values()]


def add_queue_samples(row: Row, past: Past, stats: Stats, id: int, asked: Asked) -> None:
    before = stats.before
    earlier = None if before is None else (before.at, queue_numbers(before, id))
    _add(row, past, QUEUE, id, earlier, (stats.at, queue_numbers(stats, id)), asked)


def add_client_samples(
    row: Row, past: Past, kind: Kind, stats: Stats, key: Hashable, asked: Asked
) -> None:
    """Add the samples of an exchange, a connection or a channel (`kind`)."""
    earlier, now = (
        (clients.at, client_numbers(clients, kind, key))
        for clients in (stats.clients_before, stats.clients)
    )
    _add(row, past, kind, key, earlier, now, asked)


def add_row_samples(
    row: dict[str, Any], past: Past, kind: Kind, key: Hashable, at: float, asked: Asked
) -> None:
    """Add the samples of an object whose row has the numbers of now."""
    _add(row, past, kind, key, None, (at, numbers_in(kind, row)), asked)


def _add(
    row: Row,
    past: Past,
    kind: Kind,
    key: Hashable,
    earlier: tuple[float, Numbers | None] | None,
    now: tuple[float, Numbers | None],
    asked: Asked,
) -> None:
    points: Points = past.points(kind, key)
    for at, numbers in (now,) if points.times or earlier is None else (earlier, now):
        if numbers is not None:
            points = with_point(points, at, numbers)
    add_samples(row, kind, points, asked)
