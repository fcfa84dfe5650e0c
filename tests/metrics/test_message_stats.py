"""Counts and rates of a queue, beside a slow reading of its counters."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from shardmq.broker.controller.management.metrics.message_stats import (
    QUEUE_COUNTERS,
    depth_rates,
    message_stats,
)
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.shardd.wire.messages import QueueStats

PASSED_S = 5.0
COUNTERS = (
    "published", "delivered", "acked", "redelivered", "got", "repeated", "delivered_auto",
    "got_auto", "got_empty",
)  # fmt: skip


def stats_of(now: QueueStats, earlier: QueueStats) -> Stats:
    before = Stats(at=100.0, queues={1: earlier})
    return Stats(at=100.0 + PASSED_S, queues={1: now}, before=before)


def slow(now: QueueStats, earlier: QueueStats) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, count in QUEUE_COUNTERS.items():
        shown[name] = count(now)
        if count(now) >= count(earlier):
            shown[f"{name}_details"] = {"rate": (count(now) - count(earlier)) / PASSED_S}
    return shown


def test_counts_and_rates_are_those_of_the_counters() -> None:
    chosen = random.Random(7)
    for _ in range(500):
        earlier = QueueStats(1, **{name: chosen.randrange(3) for name in COUNTERS})
        changed = chosen.sample(COUNTERS, chosen.randrange(3))
        now = msgspec.structs.replace(
            earlier, **{name: chosen.randrange(5) for name in changed}, ready=chosen.randrange(2)
        )
        stats = stats_of(now, earlier)
        assert message_stats(stats, now) == slow(now, earlier)
        assert depth_rates(stats, now)["messages_ready_details"] == {
            "rate": (now.ready - earlier.ready) / PASSED_S
        }


def test_a_row_is_nobody_elses() -> None:
    stats, first = stats_of(QueueStats(1), QueueStats(1)), QueueStats(1)
    message_stats(stats, first)["publish"] = "changed"
    depth_rates(stats, first)["messages_details"] = "changed"
    assert message_stats(stats, first) == slow(first, first)
    assert depth_rates(stats, first)["messages_details"] == {"rate": 0.0}
