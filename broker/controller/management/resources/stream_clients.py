"""/api/stream: the clients of RabbitMQ's stream protocol, and the tracking of a stream.

This broker does not speak the stream protocol. So lists of its connections, publishers and
consumers are empty, and no such client is found, as in RabbitMQ while nobody is connected.
"""

from __future__ import annotations

from typing import Any, Final

from shardmq.broker.controller.management.api_error import ApiError, bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route, existing, long_list
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.checks import is_hidden_queue
from shardmq.broker.shared.reading import is_stream
from shardmq.broker.shared.rights import Read

OFFSETS, WRITERS = "offsets", "writers"
# What the parameter `type` picks. As in RabbitMQ any other type shows both.
TRACKED: Final = {"offset": (OFFSETS,), "writer": (WRITERS,)}


async def none(call: Call) -> Listing:
    """List the clients of the stream protocol, of which there are none."""
    call.vhosts()  # raises 404 for an unknown vhost
    if "queue" in call.request.match_info:
        _queue(call)
    return Listing([])


async def unknown(call: Call) -> None:
    """Find no client of the stream protocol, as there are none."""
    call.vhost()
    raise not_found()


async def tracking(call: Call) -> dict[str, Any]:
    """Show the last offset that each named consumer of a stream has acknowledged.

    `writers` is empty: no client publishes by the stream protocol.
    """
    queue = _queue(call)
    if not is_stream(queue.arguments):
        raise bad_request(f"queue '{queue.name}' in vhost '{queue.vhost}' is not a stream")
    call.must(Read(queue.vhost, queue.name))
    stats = await call.context.stats.of([queue])
    if queue.shard not in stats.shards:
        raise ApiError(503, "unavailable", "The stream leader is not available")
    stream = stats.streams.get(queue.id)
    positions = {} if stream is None else stream.positions
    # A position is the offset of the next message.
    offsets = {name: following - 1 for name, following in positions.items() if following}
    shown = TRACKED.get(call.request.query.get("type", ""), (OFFSETS, WRITERS))
    return {key: found for key, found in ((OFFSETS, offsets), (WRITERS, {})) if key in shown}


def _queue(call: Call) -> QueuePut:
    queue = existing(call.vhost().queues.get(call.part("queue")))
    if is_hidden_queue(queue.name):
        raise not_found()
    return queue


CONNECTION = "/api/stream/connections/{vhost}/{connection}"

ROUTES = [
    long_list("/api/stream/connections", none, "Connection"),
    long_list("/api/stream/connections/{vhost}", none, "Connection"),
    Route("GET", CONNECTION, unknown, shows="Connection"),
    Route("DELETE", CONNECTION, unknown),
    Route("GET", f"{CONNECTION}/consumers", unknown),
    Route("GET", f"{CONNECTION}/publishers", unknown),
    long_list("/api/stream/consumers", none, "Consumer"),
    long_list("/api/stream/consumers/{vhost}", none, "Consumer"),
    long_list("/api/stream/publishers", none, "StreamPublisher"),
    long_list("/api/stream/publishers/{vhost}", none, "StreamPublisher"),
    long_list("/api/stream/publishers/{vhost}/{queue}", none, "StreamPublisher"),
    Route("GET", "/api/stream/{vhost}/{queue}/tracking", tracking, shows="StreamTracking"),
]
