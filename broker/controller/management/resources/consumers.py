"""/api/consumers: the consumers that the shards know, and cancelling one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Call, Route, long_list
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics.stats import Stats, lag, reader_key
from shardmq.broker.controller.management.numbers import number
from shardmq.broker.controller.management.resources.connections import channel_name
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.checks import is_hidden_queue
from shardmq.broker.model.permissions import shown_user
from shardmq.broker.shared.control import ConnectionInfo
from shardmq.shardd.wire.messages import ConsumerStats

CHANNEL_MAX = 65535
# The columns in which ?name= is searched for: a consumer has no name.
SEARCHED = ("consumer_tag", "queue.name", "channel_details.name")

SINGLE_ACTIVE = "x-single-active-consumer"

log = logging.getLogger(__name__)


def end_of(owner: str) -> tuple[int, int]:
    """Return the front door and connection of an owner, "door.incarnation.connection"."""
    door, _, connection = owner.split(".")
    return int(door), int(connection)


def rows(
    call: Call, stats: Stats, of: Callable[[ConsumerStats], bool] = lambda consumer: True
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the consumers for which `of` returns True, in vhosts the user may see."""
    seen = {vhost.name for vhost in call.vhosts()}
    by_end: dict[tuple[int, int], ConnectionInfo] = {
        end_of(info.owner): info for info in call.context.presence.connections()
    }
    for consumer in filter(of, stats.consumers):
        queue = call.catalog.queue_by_id(consumer.queue)
        if queue is None or queue.vhost not in seen or is_hidden_queue(queue.name):
            continue
        info = by_end.get((consumer.door, consumer.connection))
        reader = stats.readers.get(reader_key(consumer))
        yield {
            "consumer_tag": consumer.tag,
            "queue": {"name": queue.name, "vhost": queue.vhost},
            "channel_details": _channel(call.context, info, consumer.channel),
            "ack_required": not consumer.no_ack,
            "exclusive": consumer.exclusive,
            "prefetch_count": consumer.prefetch,
            "active": consumer.active,
            "activity_status": _activity(queue, consumer),
            "priority": consumer.priority,
            # Other arguments are not kept: only the priority matters to other consumers.
            "arguments": {"x-priority": consumer.priority} if consumer.priority else {},
            **(
                {}
                if reader is None
                else {"offset": reader.offset, "offset_lag": lag(stats, reader)}
            ),
        }


def _activity(queue: QueuePut, consumer: ConsumerStats) -> str:
    """Return RabbitMQ's word for whether a consumer may be given messages."""
    if not consumer.active:
        return "waiting"
    return "single_active" if queue.arguments.get(SINGLE_ACTIVE) is True else "up"


def _channel(context: Context, info: ConnectionInfo | None, number: int) -> dict[str, Any]:
    if info is None:
        return {"number": number}
    return {
        "name": channel_name(info, number),
        "number": number,
        "node": context.cluster.of_owner(info.owner),
        "user": shown_user(info.user),
        "connection_name": info.name,
        "peer_host": info.peer_host,
        "peer_port": info.peer_port,
    }


async def get_all(call: Call) -> Listing:
    """List consumers, of all vhosts or of the one in the path."""
    return Listing(rows(call, await call.context.stats.now(totals_only=True)), SEARCHED)


async def delete(call: Call) -> None:
    """Cancel one consumer. Its client is sent basic.cancel if it can take that."""
    vhost, tag = call.vhost(), call.part("tag")
    channel = number("channel", call.part("channel"), most=CHANNEL_MAX)
    info = call.context.presence.by_name(call.part("connection"))
    if info is None or (info.user != call.user.name and not call.has("administrator")):
        raise not_found()
    found = rows(call, await call.context.stats.anew())
    wanted = _channel(call.context, info, channel), tag
    if all((row["channel_details"], row["consumer_tag"]) != wanted for row in found):
        raise not_found()
    log.info(
        "consumer '%s' of %s in vhost '%s' is cancelled by '%s'",
        tag,
        info.name,
        vhost.name,
        call.user.name,
    )
    call.context.links.cancel_consumer(info.owner, channel, tag)


ROUTES = [
    Route("DELETE", "/api/consumers/{vhost}/{connection}/{channel}/{tag}", delete),
    long_list("/api/consumers", get_all, "Consumer"),
    long_list("/api/consumers/{vhost}", get_all, "Consumer"),
]
