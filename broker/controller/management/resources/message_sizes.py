"""/api/message-sizes: how large the messages were that came, from what front doors count for each batch anyway."""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.metrics.internals import MESSAGES
from shardmq.shardd.wire.histogram import SUM, parts_of


async def get(call: Call) -> list[dict[str, Any]]:
    """Classes of powers of two that something fell into, the smallest first; bytes of bodies."""
    stats = await call.context.stats.now(totals_only=True)
    parts = parts_of(stats.counters, MESSAGES.told)
    counts = sorted((int(k), count) for k, count in parts.items() if k != SUM)
    total = sum(count for _, count in counts)
    return [
        {
            "above": 1 << (k - 1) if k else None,  # the first class begins with no byte
            "up_to": 1 << k,
            "messages": int(count),
            "percent": round(100 * count / total, 3),
        }
        for k, count in counts
    ]


ROUTES = [Route("GET", "/api/message-sizes", get, "monitoring")]
