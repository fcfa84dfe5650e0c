"""/api/auth/attempts: how many logins succeeded and failed, by protocol.

As in RabbitMQ by default, logins are not counted by address and user: anybody could make up any
number of these.
"""

from __future__ import annotations

from typing import Any, Final

from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.stats import Stats

AMQP: Final = "amqp091"
HTTP: Final = "http"


def logins(part: Part, stats: Stats) -> dict[str, tuple[int, int]]:
    """Return how many logins succeeded and failed, by protocol.

    AMQP counts since each front door was started, HTTP since the controller was. The node of a
    cluster that leads sees all logins by HTTP.
    """
    amqp = (
        int(stats.counters.get("logins_succeeded", 0)),
        int(stats.counters.get("logins_failed", 0)),
    )
    counts = part.context.http_logins
    return {AMQP: amqp, HTTP: (counts.succeeded, counts.failed) if part.has_common else (0, 0)}


def refused_unseen(part: Part, stats: Stats) -> dict[str, int]:
    """Return how many of the failed logins were refused without checking the password."""
    return {
        AMQP: int(stats.counters.get("logins_refused_unseen", 0)),
        HTTP: part.context.logins.refused_unseen if part.has_common else 0,
    }


async def get(call: Call) -> Any:
    """Show how many logins succeeded and failed, for each protocol."""
    part = Part(call.context, call.node(), is_whole=False)
    stats = part.stats(await call.context.stats.now(totals_only=True))
    rows = []
    for protocol, now in logins(part, stats).items():
        before = call.context.http_logins.forgotten.get((part.called, protocol), (0, 0))
        # A front door that was restarted counts from 0.
        succeeded, failed = (
            max(0, value - earlier) for value, earlier in zip(now, before, strict=True)
        )
        rows.append({
            "protocol": protocol,
            "auth_attempts": succeeded + failed,
            "auth_attempts_succeeded": succeeded,
            "auth_attempts_failed": failed,
        })  # fmt: skip
    return rows


async def forget(call: Call) -> None:
    """Count from 0 again here, but not in the metrics, which never fall."""
    part = Part(call.context, call.node(), is_whole=False)
    now = logins(part, part.stats(await call.context.stats.anew()))
    forgotten = {(part.called, protocol): counts for protocol, counts in now.items()}
    call.context.http_logins.forgotten.update(forgotten)


async def sources(call: Call) -> Any:
    """Return an empty list: logins are not counted by address and user."""
    call.check_node()
    return []


ROUTES = [
    Route("GET", "/api/auth/attempts/{node}", get, "monitoring"),
    Route("DELETE", "/api/auth/attempts/{node}", forget, "administrator"),
    Route("GET", "/api/auth/attempts/{node}/source", sources, "monitoring"),
    Route("DELETE", "/api/auth/attempts/{node}/source", forget, "administrator"),
]
