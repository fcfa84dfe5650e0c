"""/api/channels"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from broker.control import ConnectionInfo
from broker.controller.management.call import NODE, Call, Route, not_found
from broker.controller.management.connections import visible
from broker.controller.management.gathered import Stats
from broker.controller.management.listing import Listing


def channel_name(info: ConnectionInfo, number: int) -> str:
    return f"{info.name} ({number})"


def rows(call: Call, stats: Stats) -> Iterator[dict[str, Any]]:
    seen = {info.owner: info for info in visible(call)}
    for report in stats.channels:
        info = seen.get(report["owner"])
        if info is not None:
            yield {
                "name": channel_name(info, report["number"]),
                "vhost": info.vhost,
                "user": info.user,
                "node": NODE,
                "state": "running",
                "connection_details": {
                    "name": info.name,
                    "peer_host": info.peer_host,
                    "peer_port": info.peer_port,
                },
                **{name: value for name, value in report.items() if name != "owner"},
            }


async def get_all(call: Call) -> Listing:
    return Listing(rows(call, await call.context.stats.now()))


async def of_connection(call: Call) -> Listing:
    name = call.part("connection")
    if call.context.presence.by_name(name) is None:
        raise not_found()
    stats = await call.context.stats.now()
    return Listing(row for row in rows(call, stats) if row["connection_details"]["name"] == name)


async def get(call: Call) -> dict[str, Any]:
    for row in rows(call, await call.context.stats.now()):
        if row["name"] == call.part("channel"):
            return row
    raise not_found()


ROUTES = [
    Route("GET", "/api/channels", get_all),
    Route("GET", "/api/channels/{channel}", get),
    Route("GET", "/api/vhosts/{vhost}/channels", get_all),
    Route("GET", "/api/connections/{connection}/channels", of_connection),
]
