"""/api/message-sizes: how large published messages were, as front doors count them by batch."""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.metrics.shard_traffic import MESSAGES
from shardmq.shardd.wire.histogram import SUM, parts_of


async def get(call: Call) -> list[dict[str, Any]]:
    """List the sizes of bodies in bytes, in classes of powers of two, the smallest first."""
    stats = await call.context.stats.now(totals_only=True)
    parts = parts_of(stats.counters, MESSAGES.told)
    counts = sorted((int(k), count) for k, count in parts.items() if k != SUM)
    total = sum(count for _, count in counts)
    return [
        {
            "above": 1 << (k - 1) if k else None,  # the first class has empty bodies, too
            "up_to": 1 << k,
            "messages": int(count),
            "percent": round(100 * count / total, 3),
        }
        for k, count in counts
    ]


ROUTES = [Route("GET", "/api/message-sizes", get, "monitoring")]
