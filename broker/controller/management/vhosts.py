"""/api/vhosts"""

from __future__ import annotations

from typing import Any

import msgspec

from broker.catalog import Vhost
from broker.controller.management.call import Call, Route, check, put_status
from broker.controller.management.gathered import Stats
from broker.controller.management.listing import Listing
from broker.controller.management.users import permission_row, tags_of


class VhostBody(msgspec.Struct):
    description: str = ""
    tags: list[str] | str = []
    tracing: bool = False


def row(vhost: Vhost, stats: Stats) -> dict[str, Any]:
    known = [stats.queues[q.id] for q in vhost.queues.values() if q.id in stats.queues]
    ready, unacked = sum(q.ready for q in known), sum(q.unacked for q in known)
    return {
        "name": vhost.name,
        "description": vhost.description,
        "tags": vhost.tags,
        "metadata": {"description": vhost.description, "tags": vhost.tags},
        "default_queue_type": "classic",
        "tracing": False,
        "cluster_state": {"shardmq@localhost": "running"},
        "messages": ready + unacked,
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
    }


async def get_all(call: Call) -> Listing:
    stats = await call.context.stats.now(totals_only=True)
    return Listing(row(vhost, stats) for vhost in call.visible_vhosts())


async def get(call: Call) -> dict[str, Any]:
    return row(call.vhost(), await call.context.stats.now(totals_only=True))


async def put(call: Call) -> Any:
    body, name = await call.body(VhostBody), call.part("vhost")
    existed = name in call.catalog.vhosts
    check(await call.context.authority.put_vhost(name, body.description, tags_of(body.tags)))
    if not existed:
        # As in RabbitMQ: who makes a vhost by the API may use it.
        check(await call.context.authority.put_permission(name, call.user.name, ".*", ".*", ".*"))
    return put_status(existed)


async def delete(call: Call) -> None:
    check(await call.context.authority.delete_vhost(call.vhost().name))


async def permissions(call: Call) -> Listing:
    vhost = call.vhost().name
    return Listing(permission_row(put) for key, put in call.catalog.permissions.items() if key[0] == vhost)


ROUTES = [
    Route("GET", "/api/vhosts", get_all),
    Route("GET", "/api/vhosts/{vhost}", get),
    Route("PUT", "/api/vhosts/{vhost}", put, "administrator"),
    Route("DELETE", "/api/vhosts/{vhost}", delete, "administrator"),
    Route("GET", "/api/vhosts/{vhost}/permissions", permissions, "administrator"),
]
