"""Counts and rates of messages in RabbitMQ's words, of queues, of exchanges and of all together."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any

from shardmq.broker.controller.management.metrics.stats import RATE_S_MAX, Stats, details
from shardmq.shardd.wire.messages import QueueStats

# The counters of a queue, by the names of message_stats.
QUEUE_COUNTERS: dict[str, Callable[[QueueStats], int]] = {
    "publish": attrgetter("published"),
    "deliver": lambda queue: queue.delivered - queue.got - queue.delivered_auto,
    "deliver_no_ack": attrgetter("delivered_auto"),
    "get": lambda queue: queue.got - queue.got_auto,
    "get_no_ack": attrgetter("got_auto"),
    "get_empty": attrgetter("got_empty"),
    "deliver_get": attrgetter("delivered"),
    "redeliver": attrgetter("redelivered"),
    "ack": attrgetter("acked"),
    "duplicates": attrgetter("repeated"),
}
# The names in message_stats of each counter of a queue and of its rate, and the counter.
_QUEUE_FIELDS = [(name, f"{name}_details", count) for name, count in QUEUE_COUNTERS.items()]
# All that QUEUE_COUNTERS reads. Most queues of a long list do nothing, and are told apart by it.
_COUNTED = (
    "published", "delivered", "delivered_auto", "got", "got_auto", "got_empty", "redelivered",
    "acked", "repeated",
)  # fmt: skip
_counted = attrgetter(*_COUNTED)
_AT_REST = {"rate": 0.0}
_DEPTHS_AT_REST = {
    f"{name}_details": _AT_REST
    for name in ("messages", "messages_ready", "messages_unacknowledged")
}
# The counters of front doors that are added up for each name of message_stats.
DOOR_COUNTERS = {
    "publish": ("received",),
    "confirm": ("confirmed",),
    "return_unroutable": ("returned",),
    "drop_unroutable": ("unroutable_dropped",),
    "deliver": ("delivered_manual",),
    "deliver_no_ack": ("delivered_auto",),
    "get": ("got_manual",),
    "get_no_ack": ("got_auto",),
    "get_empty": ("got_empty",),
    "deliver_get": ("delivered_manual", "delivered_auto", "got_manual", "got_auto"),
}
# The counters of a channel, and of all channels of a vhost, by the names of message_stats.
CHANNEL_COUNTERS = {
    "publish": "published",
    "confirm": "confirmed",
    "return_unroutable": "returned",
    "drop_unroutable": "unroutable_dropped",
    "deliver_get": "delivered",
    "deliver": "delivered_manual",
    "deliver_no_ack": "delivered_auto",
    "get": "got_manual",
    "get_no_ack": "got_auto",
    "get_empty": "got_empty",
    "redeliver": "redelivered",
    "ack": "acked",
}
# The counters of a connection, and of all connections of a vhost.
OCTETS = ("recv_oct", "send_oct")
# The counters of shards by their names in message_stats.
SHARD_COUNTERS = {"ack": "acked", "redeliver": "redelivered"}


def message_stats(stats: Stats, queue: QueueStats) -> dict[str, Any]:
    earlier, seconds = stats.earlier(queue), stats.rate_s
    if earlier is None or seconds is None:
        return {name: count(queue) for name, count in QUEUE_COUNTERS.items()}
    counted = _counted(queue)
    if counted == _counted(earlier):
        return dict(_at_rest(counted))
    shown: dict[str, Any] = {}
    for name, rate, count in _QUEUE_FIELDS:
        shown[name] = value = count(queue)
        risen = value - count(earlier)
        if risen >= 0:  # or else the shard was restarted and counts from 0
            shown[rate] = {"rate": risen / seconds}
    return shown


@lru_cache(128)  # queues that were never used have the same counters
def _at_rest(counted: tuple[int, ...]) -> dict[str, Any]:
    """Return the message_stats of a queue whose counters have not changed."""
    queue = QueueStats(0, **dict(zip(_COUNTED, counted, strict=True)))
    return {
        field: value
        for name, rate, count in _QUEUE_FIELDS
        for field, value in ((name, count(queue)), (rate, _AT_REST))
    }


def exchange_stats(stats: Stats, vhost: str, name: str) -> dict[str, Any]:
    """Return the message_stats of an exchange; {} if nothing was published to it."""
    counts = stats.clients.exchanges.get((vhost, name))
    if counts is None:
        return {}
    before = stats.clients_before.exchanges
    shown: dict[str, Any] = {}
    earlier = before.get((vhost, name), (0, 0) if stats.clients_before.is_whole else None)
    for said, now, then in zip(
        ("publish_in", "publish_out"), counts, earlier or counts, strict=True
    ):
        rate = None if earlier is None else stats.rate_of_client(now, then)
        shown |= {said: now} | details(said, rate)
    return shown


def vhost_stats(stats: Stats, vhost: str) -> dict[str, Any]:
    """Return the message_stats and the octets of a vhost, with those of clients that have left."""
    before = stats.before or stats
    counts, earlier = stats.vhosts.get(vhost, {}), before.vhosts.get(vhost, {})
    shown: dict[str, Any] = {}
    for said, name in CHANNEL_COUNTERS.items():
        value = counts.get(name, 0)
        shown |= {said: value} | details(said, stats.rate_of_all(value, earlier.get(name, 0)))
    octets: dict[str, Any] = {}
    for name in OCTETS:
        value = counts.get(name, 0)
        octets |= {name: value} | details(name, stats.rate_of_all(value, earlier.get(name, 0)))
    return {"message_stats": shown, **octets}


def all_message_stats(stats: Stats) -> dict[str, Any]:
    """Return the message_stats of all clients and queues together."""
    before = stats.before or stats
    shown: dict[str, Any] = {}
    for name, parts in DOOR_COUNTERS.items():
        value, earlier = (
            sum(int(at.counters.get(part, 0)) for part in parts) for at in (stats, before)
        )
        shown |= {name: value} | details(name, stats.rate_of_all(value, earlier))
    for name, counter in SHARD_COUNTERS.items():
        value, earlier = stats.totals[counter], before.totals[counter]
        shown |= {name: value} | details(name, stats.rate_of_all(value, earlier))
    return shown


def depths(stats: Stats) -> dict[str, Any]:
    """Return how many messages all queues have together, and rates, which may be negative."""
    ready, unacked = stats.totals["ready"], stats.totals["unacked"]
    shown = {
        "messages": ready + unacked,
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
    }
    before = stats.before
    if before is None or before.shards.keys() != stats.shards.keys():
        return shown  # a shard that came back brought its messages: the queues did not grow
    grown = ready - before.totals["ready"], unacked - before.totals["unacked"]
    return shown | depth_details(*grown, stats.at - before.at)


def depth_rates(stats: Stats, queue: QueueStats) -> dict[str, Any]:
    """Return how fast a queue grows or shrinks, in messages a second."""
    earlier = stats.earlier(queue)
    if stats.before is None or earlier is None:
        return {}
    return depth_details(
        queue.ready - earlier.ready, queue.unacked - earlier.unacked, stats.at - stats.before.at
    )


def depth_details(ready: int, unacked: int, seconds: float) -> dict[str, Any]:
    """Return the rates of queues that grew by so many messages, or {} after too long a time."""
    if not 0 < seconds <= RATE_S_MAX:
        return {}
    if not ready and not unacked:
        return dict(_DEPTHS_AT_REST)
    return {
        "messages_details": {"rate": (ready + unacked) / seconds},
        "messages_ready_details": {"rate": ready / seconds},
        "messages_unacknowledged_details": {"rate": unacked / seconds},
    }
