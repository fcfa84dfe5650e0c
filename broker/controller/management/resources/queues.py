"""/api/queues: the queues, their numbers, and actions on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
from aiohttp import web

from shardmq.broker.controller import purging
from shardmq.broker.controller.management.api_error import bad_request, not_found
from shardmq.broker.controller.management.call import (
    MESSAGES_PURGED,
    Arguments,
    Call,
    Route,
    check,
    long_list,
    put_status,
    table_of,
)
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import time_range
from shardmq.broker.controller.management.metrics.message_stats import depth_rates, message_stats
from shardmq.broker.controller.management.metrics.past import QUEUE
from shardmq.broker.controller.management.metrics.samples import add_queue_samples
from shardmq.broker.controller.management.metrics.stats import Stats, seconds, utc_date
from shardmq.broker.controller.management.numbers import number
from shardmq.broker.controller.management.resources import consumers
from shardmq.broker.controller.management.resources.connections import channel_name
from shardmq.broker.controller.management.responses import queue_sort_keys
from shardmq.broker.controller.management.responses.listing import LazyListing, Listing
from shardmq.broker.controller.moving.mover import STEP_NAMES, MoveProgress, begin
from shardmq.broker.controller.requests import MoveOn, Pause
from shardmq.broker.model.changes import CALLED_OFF, TO_COME, Moving, QueuePut
from shardmq.broker.model.checks import is_hidden_queue
from shardmq.broker.model.copies import asked_by
from shardmq.broker.model.policies import NOTHING, queue_arguments
from shardmq.broker.shared.control import QueueDeclare, QueueRemove
from shardmq.broker.shared.reading import is_stream
from shardmq.broker.shared.rights import Configure, Read
from shardmq.shardd.wire.messages import QueueStats

MIRROR_ACTIONS = frozenset(("sync", "cancel_sync"))


class QueueBody(msgspec.Struct):
    durable: bool = True
    auto_delete: bool = False
    arguments: Arguments = {}


# Columns that are attributes of a QueuePut.
ATTRIBUTES = frozenset(("name", "vhost", "durable", "auto_delete", "shard"))
# The columns of `plain`.
PLAIN = ATTRIBUTES | {
    "exclusive", "arguments", "type", "node", "policy", "operator_policy",
    "effective_policy_definition", "state", "owner_pid_details", "leader", "members", "online",
    "effective_arguments", "moving", "replicas", "min_in_sync", "replicas_wanted",
    "min_in_sync_wanted",
}  # fmt: skip


def plain(queue: QueuePut, context: Context) -> dict[str, Any]:
    """Return a row with what is known without asking the queue's shard."""
    vhost = context.catalog.vhost(queue.vhost)
    applied = vhost.policies_of(queue) if vhost is not None else NOTHING
    node = context.cluster.of_shard(queue.shard)
    shown: dict[str, Any] = {
        "name": queue.name,
        "vhost": queue.vhost,
        "durable": queue.durable,
        "auto_delete": queue.auto_delete,
        "exclusive": bool(queue.owner),
        "arguments": queue.arguments,
        "type": queue.arguments.get("x-queue-type", "classic"),
        "node": node,
        "shard": queue.shard,
        "policy": applied.policy,
        "operator_policy": applied.operator_policy,
        "effective_policy_definition": applied.definition,
        "effective_arguments": queue_arguments(queue.arguments, applied.definition),
        "leader": node,
        "members": list(context.cluster.in_sync_of(queue.shard)),
        "online": context.cluster.online_of(queue.shard),
        **_replicas(queue, context),
        "state": "paused" if queue.paused else "running",
    }
    if queue.part is not None:
        shown |= {
            "exchange": queue.part.exchange,
            "index": queue.part.index,
            "shard_state": queue.part.state,
        }
    if queue.moving is not None:
        shown["moving"] = moving_shown(queue, queue.moving, context)
    if queue.owner and (holder := context.presence.connection(queue.owner)) is not None:
        shown["owner_pid_details"] = {
            "name": holder.name,
            "peer_host": holder.peer_host,
            "peer_port": holder.peer_port,
        }
    return shown


def _replicas(queue: QueuePut, context: Context) -> dict[str, int]:
    """Return the fields of the copies in a cluster: those of the shard, and those asked for."""
    cluster, numbers = context.cluster, context.cluster.replicas
    if not cluster.is_cluster:
        return {}
    wanted = asked_by(queue, context.catalog.vhost(queue.vhost), numbers.others)
    return {
        "replicas": numbers.of(queue.shard).count,
        "min_in_sync": cluster.min_in_sync_of(queue.shard),
        "replicas_wanted": wanted.count,
        "min_in_sync_wanted": wanted.least,
    }


def moving_shown(queue: QueuePut, moving: Moving, context: Context) -> dict[str, Any]:
    """Return how far the move of a queue is. `waits_for` says why it does not go on."""
    progress = context.moves.get((queue.vhost, queue.name)) or MoveProgress()
    old, new = moving.shard, queue.shard
    if moving.step in TO_COME:
        old, new = new, old
    return {
        "step": STEP_NAMES[moving.step],
        "from_shard": old,
        "from_node": context.cluster.of_shard(old),
        "to_shard": new,
        "to_node": context.cluster.of_shard(new),
        "messages_moved": progress.moved,
        "messages_left": progress.left,
        "waits_for": progress.waits_for,
    }


def row(queue: QueuePut, stats: Stats, context: Context) -> dict[str, Any]:
    shown, known = plain(queue, context), stats.queue(queue)
    is_single = queue.arguments.get(consumers.SINGLE_ACTIVE) is True
    shown["single_active_consumer_tag"] = stats.active.get(queue.id, "") if is_single else None
    shown["exclusive_consumer_tag"] = stats.exclusive.get(queue.id)
    if known is None:
        # Unknown numbers are left out, not shown as 0.
        shown["state"] = "down"
        return shown
    shown |= totals(known, queue.id in stats.streams)
    shown |= {
        "consumers": known.consumers,
        "memory": 8 * (known.ready + known.unacked),
        "message_bytes": known.ready_bytes + known.unacked_bytes,
        "message_bytes_ready": known.ready_bytes,
        "message_bytes_unacknowledged": known.unacked_bytes,
        "messages_persistent": known.persistent,
        "message_bytes_persistent": known.persistent_bytes,
        # All messages lie in files, with a part of them in write buffers too.
        "messages_ram": 0,
        "message_bytes_ram": 0,
        "head_message_timestamp": known.head_timestamp,
        "oldest_message_age": seconds(known.oldest_ms),
        "idle_since": utc_date(known.used_at),
        "consumer_utilisation": known.utilisation,
        "consumer_capacity": known.utilisation,
        "message_stats": message_stats(stats, known),
    }
    shown |= depth_rates(stats, known)
    stream = stats.streams.get(queue.id)
    if stream is not None:
        shown.update(
            memory=0,
            message_bytes=known.ready_bytes,
            # A consumer of a stream is late by its lag.
            consumer_utilisation=None,
            consumer_capacity=None,
            first_offset=stream.first_offset,
            last_offset=stream.next_offset - 1
            if stream.next_offset > stream.first_offset
            else None,
            segments=stream.segments,
            stream_positions=stream.positions,
            # Each [first, last]: offsets of messages that are lost by damage on the disk.
            stream_gaps=[[first, behind - 1] for first, behind in stats.gaps.get(queue.id, ())],
        )
    return shown


def totals(known: QueueStats, is_stream: bool) -> dict[str, Any]:
    # Messages that consumers of a stream have not acknowledged are ready, too.
    messages = known.ready if is_stream else known.ready + known.unacked
    return {
        "messages": messages,
        "messages_ready": known.ready,
        "messages_unacknowledged": known.unacked,
    }


def row_with_totals(queue: QueuePut, stats: Stats, context: Context) -> dict[str, Any]:
    known = stats.queue(queue)
    return plain(queue, context) | (
        totals(known, queue.id in stats.streams) if known is not None else {}
    )


def _queue(call: Call) -> QueuePut:
    queue = call.vhost().queues.get(call.part("queue"))
    if queue is None or is_hidden_queue(queue.name):
        raise not_found()
    return queue


class _Current:
    """The queues that exist when an iteration begins."""

    def __init__(self, now: Callable[[], Sequence[QueuePut]]) -> None:
        self._now = now

    def __iter__(self) -> Iterator[QueuePut]:
        return iter(self._now())


async def get_all(call: Call) -> LazyListing[QueuePut]:
    """List queues, of all vhosts or of the one in the path."""
    vhosts, context, wanted = call.vhosts(), call.context, time_range.asked(call.request.query)
    order = attrgetter("name") if len(vhosts) == 1 else attrgetter("vhost", "name")

    async def collect(
        made: Callable[[QueuePut, Stats, Context], dict[str, Any]], queues: list[QueuePut] | None
    ) -> Callable[[QueuePut], dict[str, Any]]:
        stats = await (
            context.stats.now(totals_only=True) if queues is None else context.stats.of(queues)
        )
        return lambda queue: made(queue, stats, context)

    def with_samples(queue: QueuePut, stats: Stats, context: Context) -> dict[str, Any]:
        shown = row(queue, stats, context)
        if wanted is not None:
            add_queue_samples(shown, context.past, stats, queue.id, wanted)
        return shown

    def in_order() -> Sequence[QueuePut]:
        names = [
            context.sorted_queues.of(vhost, context.catalog.vhosts)
            for vhost in sorted(vhosts, key=attrgetter("name"))
        ]
        return names[0] if len(names) == 1 else [queue for of_vhost in names for queue in of_vhost]

    keys = partial(queue_sort_keys.keys, context)
    return LazyListing(
        _Current(in_order),
        lambda queue: plain(queue, context),
        PLAIN,
        ATTRIBUTES,
        partial(collect, row if wanted is None else with_samples),
        order,
        keys,
        in_order,
        partial(collect, row_with_totals),
        None if wanted is None else partial(time_range.check_samples, wanted, QUEUE),
    )


async def get(call: Call) -> dict[str, Any]:
    """Show a queue with its numbers and consumers."""
    queue = _queue(call)
    wanted = time_range.asked(call.request.query)
    call.context.past.see(QUEUE, queue.id)
    stats = await call.context.stats.of([queue])
    shown = row(queue, stats, call.context)
    if wanted is not None:
        add_queue_samples(shown, call.context.past, stats, queue.id, wanted)
    # Not counted for single channels and exchanges: rates_mode is basic.
    shown |= {"incoming": [], "deliveries": []}
    shown["consumer_details"] = [
        one
        for one in consumers.rows(call, stats)
        if one["queue"] == {"name": queue.name, "vhost": queue.vhost}
    ]
    return shown


async def unacked(call: Call) -> Listing:
    """List the unacknowledged messages of a queue, the oldest first; times in milliseconds."""
    return _oldest_first(call, await call.context.links.unacked(_queue(call).id))


async def unacked_of_consumers(call: Call) -> Listing:
    """List who holds unacknowledged messages of a queue: how many, and how long the oldest one."""
    return _oldest_first(call, await call.context.links.holders(_queue(call).id))


def _oldest_first(call: Call, rows: list[dict[str, Any]]) -> Listing:
    owners = {info.owner: info for info in call.context.presence.connections()}
    for row in rows:
        info = owners.get(row.pop("owner"))
        row["connection_name"] = info.name if info is not None else None
        row["channel_name"] = channel_name(info, row["channel"]) if info is not None else None
    return Listing(sorted(rows, key=lambda row: -row["unacked_for"]))


async def put(call: Call) -> Any:
    """Declare a queue."""
    vhost, name, body = call.vhost_to_change(), call.part("queue"), await call.body(QueueBody)
    existed = name in vhost.queues
    arguments = table_of(body.arguments)
    await call.ask(QueueDeclare(vhost.name, name, body.durable, body.auto_delete, False, arguments))
    return put_status(existed)


async def delete(call: Call) -> None:
    """Delete a queue with its messages, if it is unused or empty where the query says so."""
    vhost, queue = call.vhost_to_change(), _queue(call)
    await call.ask(
        QueueRemove(vhost.name, queue.name, call.flag("if-unused"), call.flag("if-empty"))
    )


class ActionBody(msgspec.Struct):
    action: str


async def act(call: Call) -> None:
    """Do nothing: RabbitMQ's actions synchronise mirrors, which no queue has here."""
    _queue(call)
    action = (await call.body(ActionBody)).action
    if action not in MIRROR_ACTIONS:
        raise bad_request(f"unknown action: {action}")


async def restart(call: Call) -> None:
    """Refuse, as LavinMQ does for a queue that is not closed.

    LavinMQ closes a queue whose files it cannot read until this call. Here a shard with such a
    queue is restarted by itself, so no queue is ever closed.
    """
    vhost, queue = call.vhost_to_change(), _queue(call)
    call.must(Configure(vhost.name, queue.name))
    raise bad_request("Queue was not restarted: it is not closed")


async def pause(call: Call) -> None:
    """Have a queue give no messages until it is resumed."""
    await _set_paused(call, True)


async def resume(call: Call) -> None:
    """Have a paused queue give messages again."""
    await _set_paused(call, False)


async def _set_paused(call: Call, paused: bool) -> None:
    vhost, queue = call.vhost_to_change(), _queue(call)
    call.must(Configure(vhost.name, queue.name))
    check(await call.authority.ask(Pause(vhost.name, queue.name, paused)))


class PlaceBody(msgspec.Struct):
    """The place that a queue is moved to: a node, or a shard of any node."""

    node: str | None = None
    shard: int | None = None


async def move(call: Call) -> None:
    """Begin to move a queue with its messages to another shard; its row shows how far it is."""
    vhost, queue = call.vhost_to_change(), _queue(call)
    call.must(Configure(vhost.name, queue.name))
    body = await call.body(PlaceBody)
    if (body.node is None) == (body.shard is None):
        raise bad_request("either node or shard must be given")
    shard = body.shard
    if shard is None:
        shard = _shard_of(call, str(body.node), queue)
    context = call.context
    check(
        await begin(
            context.catalog, context.authority, context.shards, vhost.name, queue.name, shard
        )
    )


def _shard_of(call: Call, name: str, queue: QueuePut) -> int:
    """Return the shard of a node for a queue: its own if it is there, else the emptiest one.

    Only those count that suit the queue best by their copies.
    """
    nodes = call.context.cluster.nodes
    node = next((node for node in nodes if name in (node.name, node.name.partition("@")[2])), None)
    if node is None:
        raise bad_request(f"node: there is no node '{name}'")
    if not node.is_alive:
        raise bad_request(f"node: '{name}' is down")
    index, authority = call.catalog.index, call.authority
    shards = authority.places.replicas.nearest(authority.asked(queue), tuple(node.shards))
    if queue.shard in shards or not shards:
        return queue.shard
    return min(shards, key=lambda shard: (index.count_on(shard), shard))


async def call_off_move(call: Call) -> None:
    """Call off a move of which no message is at the new place yet."""
    vhost, queue = call.vhost_to_change(), _queue(call)
    call.must(Configure(vhost.name, queue.name))
    if queue.moving is None:
        raise bad_request("the queue does not move")
    check(await call.authority.ask(MoveOn(vhost.name, queue.name, queue.moving.id, CALLED_OFF)))


async def purge(call: Call) -> web.Response:
    """Purge all ready messages, or with ?count= so many of a classic queue, the next ones first.

    The header MESSAGES_PURGED of the response has their number; RabbitMQ and LavinMQ send no body.
    """
    vhost, queue = call.vhost_to_change(), _queue(call)
    call.must(Read(vhost.name, queue.name))
    shards, count = call.context.shards, call.request.query.get("count")
    if count is None:
        asked = purging.purge(call.catalog, shards, vhost.name, queue.name)
    elif is_stream(queue.arguments):
        raise bad_request("count: a stream is purged as a whole")
    else:
        wanted = number("count", count, 1)
        asked = purging.purge_first(call.catalog, shards, vhost.name, queue.name, wanted)
    purged = check(await asked).result["messages"]
    return web.Response(status=204, headers={MESSAGES_PURGED: str(purged)})


ROUTES = [
    long_list("/api/queues", get_all, "Queue"),
    long_list("/api/queues/detailed", get_all, "Queue"),
    long_list("/api/queues/{vhost}", get_all, "Queue"),
    Route("GET", "/api/queues/{vhost}/{queue}", get, shows="Queue"),
    Route("GET", "/api/queues/{vhost}/{queue}/unacked", unacked, is_long=True),
    Route(
        "GET", "/api/queues/{vhost}/{queue}/unacked/consumers", unacked_of_consumers, is_long=True
    ),
    Route("PUT", "/api/queues/{vhost}/{queue}", put, body=QueueBody),
    Route("DELETE", "/api/queues/{vhost}/{queue}", delete, query=("if-unused", "if-empty")),
    Route("DELETE", "/api/queues/{vhost}/{queue}/contents", purge, query=("count",)),
    Route("POST", "/api/queues/{vhost}/{queue}/actions", act, "administrator", body=ActionBody),
    Route("PUT", "/api/queues/{vhost}/{queue}/pause", pause),
    Route("PUT", "/api/queues/{vhost}/{queue}/resume", resume),
    Route("PUT", "/api/queues/{vhost}/{queue}/restart", restart),
    Route("POST", "/api/queues/{vhost}/{queue}/relocation", move, "policymaker", body=PlaceBody),
    Route("DELETE", "/api/queues/{vhost}/{queue}/relocation", call_off_move, "policymaker"),
]
