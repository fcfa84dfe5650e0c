"""/api/vhosts: the virtual hosts, their metadata and the numbers of their messages."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import msgspec

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.call import Call, Route, check, long_list, put_status
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import time_range
from shardmq.broker.controller.management.metrics.message_stats import depth_details, vhost_stats
from shardmq.broker.controller.management.metrics.past import VHOST
from shardmq.broker.controller.management.metrics.samples import add_row_samples
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.broker.controller.management.metrics.time_range import Asked
from shardmq.broker.controller.management.resources.users import get_permissions, tags_of
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.listing import Listing, by_name
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import PermissionPut, VhostDelete, VhostPut
from shardmq.cluster.replicas import REPLICAS_MAX

CLASSIC = "classic"
ReplicasAsked = Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]
SLICE_QUEUES = 128  # counted before the processor is offered


class VhostBody(msgspec.Struct):
    description: str = ""
    tags: list[str] | str = []
    # None for this field and those below: not changed.
    tracing: bool | None = None
    default_queue_type: str | None = None
    protected_from_deletion: bool | None = None
    # On how many nodes queues are to be, and how many must be in sync; 0: as the broker says.
    replicas: ReplicasAsked | None = None
    min_in_sync: ReplicasAsked | None = None


def metadata_of(put: VhostPut) -> dict[str, Any]:
    """Return RabbitMQ's metadata of a vhost."""
    metadata: dict[str, Any] = {
        "description": put.description,
        "tags": put.tags,
        "default_queue_type": put.default_queue_type or CLASSIC,
    }
    if put.is_protected:
        metadata["protected_from_deletion"] = True
    asked = {"replicas": put.replicas, "min_in_sync": put.min_in_sync}
    return metadata | {name: number for name, number in asked.items() if number}


async def row(
    context: Context, vhost: Vhost, stats: Stats, work: SlicedWork, wanted: Asked | None
) -> dict[str, Any]:
    ready = unacked = ready_grown = unacked_grown = 0
    queues = iter(list(vhost.queues.values()))
    while part := list(itertools.islice(queues, SLICE_QUEUES)):
        for known in [stats.queues[q.id] for q in part if q.id in stats.queues]:
            ready += known.ready
            unacked += known.unacked
            # A queue without earlier numbers has not grown: its shard was silent, or it is new.
            earlier = stats.earlier(known) or known
            ready_grown += known.ready - earlier.ready
            unacked_grown += known.unacked - earlier.unacked
        await work.yield_to_others()
    seconds = stats.at - stats.before.at if stats.before is not None else 0.0
    shown = {
        "name": vhost.name,
        **metadata_of(vhost.put),
        "metadata": metadata_of(vhost.put),
        "protected_from_deletion": vhost.put.is_protected,
        "tracing": vhost.put.is_traced,
        "cluster_state": {
            node.name: "running" if node.is_alive else "stopped" for node in context.cluster.nodes
        },
        "messages": ready + unacked,
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
        **depth_details(ready_grown, unacked_grown, seconds),
        **vhost_stats(stats, vhost.name),
    }
    if wanted is not None:
        add_row_samples(shown, context.past, VHOST, vhost.name, stats.at, wanted)
        await work.yield_to_others()
    return shown


async def get_all(call: Call) -> Listing:
    """List the vhosts that the user may see, with the sums of their messages."""
    context, wanted = call.context, time_range.asked(call.request.query)
    stats, work = await context.stats.now(totals_only=True), SlicedWork()
    found = list(call.visible_vhosts())
    if wanted is not None:
        time_range.check_samples(wanted, VHOST, len(found))
    return by_name([await row(context, vhost, stats, work, wanted) for vhost in found])


async def get(call: Call) -> dict[str, Any]:
    """Show a vhost with the sums of its messages."""
    context, wanted = call.context, time_range.asked(call.request.query)
    vhost, stats = call.vhost(), await context.stats.now(totals_only=True)
    context.past.see(VHOST, vhost.name)
    return await row(context, vhost, stats, SlicedWork(), wanted)


async def put(call: Call) -> Any:
    """Make a vhost, or change its description, tags, default queue type, protection and copies."""
    body, name = await call.body(VhostBody), call.part("vhost")
    existed = name in call.catalog.vhosts
    before = call.catalog.vhosts[name].put if existed else VhostPut(name)
    kind, protected = body.default_queue_type, body.protected_from_deletion
    replicas = before.replicas if body.replicas is None else body.replicas
    min_in_sync = before.min_in_sync if body.min_in_sync is None else body.min_in_sync
    if min_in_sync > replicas > 0:
        raise bad_request(f"min_in_sync: {min_in_sync} is more than {replicas} replicas")
    put = VhostPut(
        name,
        body.description,
        tags_of(body.tags),
        before.default_queue_type if kind is None else kind,
        before.is_protected if protected is None else protected,
        before.is_traced if body.tracing is None else body.tracing,
        replicas,
        min_in_sync,
    )
    await call.ask_without_rights(put)
    if not existed and not call.is_local:
        # As in RabbitMQ a user may use the vhosts it makes. shardctl is no user.
        check(await call.authority.ask(PermissionPut(name, call.user.name, ".*", ".*", ".*")))
    return put_status(existed)


async def delete(call: Call) -> None:
    """Delete a vhost with all its queues and messages."""
    check(await call.authority.ask(VhostDelete(call.vhost().name)))


async def _protect(call: Call, wanted: bool) -> None:
    put = msgspec.structs.replace(call.vhost().put, is_protected=wanted)
    check(await call.authority.ask(put))


async def protect(call: Call) -> None:
    """Protect a vhost from deletion."""
    await _protect(call, True)


async def unprotect(call: Call) -> None:
    """Let a vhost be deleted again."""
    await _protect(call, False)


async def start(call: Call) -> None:
    """Do nothing: every vhost runs, and tools that ask go on."""
    call.vhost()
    call.check_node()


PROTECTION = "/api/vhosts/{vhost}/deletion/protection"

ROUTES = [
    Route("POST", "/api/vhosts/{vhost}/start/{node}", start, "administrator"),
    long_list("/api/vhosts", get_all, "Vhost"),
    Route("GET", "/api/vhosts/{vhost}", get, is_long=True, shows="Vhost"),
    Route("PUT", "/api/vhosts/{vhost}", put, "administrator", body=VhostBody),
    Route("DELETE", "/api/vhosts/{vhost}", delete, "administrator"),
    Route("POST", PROTECTION, protect, "administrator"),
    Route("DELETE", PROTECTION, unprotect, "administrator"),
    long_list("/api/vhosts/{vhost}/permissions", get_permissions, "Permission", "administrator"),
]
