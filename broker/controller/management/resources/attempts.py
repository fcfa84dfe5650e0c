"""/api/auth/attempts: how many logins succeeded and failed, by protocol. By address and user nobody counts, as with
RabbitMQ unless it is told to: there would be as many as somebody cares to try."""

from __future__ import annotations

from typing import Any, Final

from shardmq.broker.controller.management.call import NODE, Call, Context, Route, not_found
from shardmq.broker.controller.management.metrics.gathered import Stats

AMQP: Final = "amqp091"
HTTP: Final = "http"


def logins(context: Context, stats: Stats) -> dict[str, tuple[int, int]]:
    """Succeeded and failed, by protocol: of AMQP since each front door's start, of HTTP since the controller's."""
    amqp = (
        int(stats.counters.get("logins_succeeded", 0)),
        int(stats.counters.get("logins_failed", 0)),
    )
    return {AMQP: amqp, HTTP: (context.calls.succeeded, context.calls.failed)}


def refused_unseen(context: Context, stats: Stats) -> dict[str, int]:
    """Of those that failed, by protocol, the ones whose password nobody looked at: there were too many before."""
    return {
        AMQP: int(stats.counters.get("logins_refused_unseen", 0)),
        HTTP: context.logins.refused_unseen,
    }


async def get(call: Call) -> Any:
    _check_node(call)
    stats = await call.context.stats.now(totals_only=True)
    rows = []
    for protocol, now in logins(call.context, stats).items():
        before = call.context.calls.forgotten.get(protocol, (0, 0))
        # A front door that started anew counts from 0.
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
    """Counts from now on. The metrics go on: they never fall."""
    _check_node(call)
    call.context.calls.forgotten = logins(call.context, await call.context.stats.anew())


async def sources(call: Call) -> Any:
    _check_node(call)
    return []


def _check_node(call: Call) -> None:
    if call.part("node") != NODE:
        raise not_found()


ROUTES = [
    Route("GET", "/api/auth/attempts/{node}", get, "monitoring"),
    Route("DELETE", "/api/auth/attempts/{node}", forget, "administrator"),
    Route("GET", "/api/auth/attempts/{node}/source", sources, "monitoring"),
]
