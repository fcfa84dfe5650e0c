"""/api/exchanges/VHOST/NAME/route says where a message would go and why; .../ring shows shares."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from shardmq.broker.controller.management.api_error import bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.resources.exchanges import exchange_name
from shardmq.broker.controller.resharding.routes import reached, table_of
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.routing import Message
from shardmq.broker.routing.explain import RouteStep, explain, ring
from shardmq.broker.routing.matching import Target

BINDINGS_MAX = 20_000  # a table with more would take too long to make: other calls wait


class MessageBody(msgspec.Struct):
    """The parts of a message that routing uses. Timestamps are seconds."""

    routing_key: str = ""
    headers: dict[str, Any] = {}
    properties: dict[str, str | int] = {}


async def route(call: Call) -> dict[str, Any]:
    """Show to which queues a message would go and why; no message is published."""
    vhost, name = _exchange(call)
    body = await call.body(MessageBody)
    message = Message(body.routing_key, body.headers, body.properties, random.getrandbits(64))
    explained = explain(table_of(vhost, name, body.routing_key), name, message)
    return {
        "exchange": name,
        "vhost": vhost.name,
        "routing_key": body.routing_key,
        "queues": [_destination(vhost, Target("queue", queue)) for queue in explained.queues],
        "hops": [_hop(vhost, hop) for hop in explained.hops],
    }


async def show_ring(call: Call) -> dict[str, Any]:
    """Show which share of the keys each queue of a hash exchange gets."""
    vhost, name = _exchange(call)
    shares = ring(table_of(vhost, name), name)
    if shares is None:
        raise bad_request(
            f"exchange '{name}' of type {vhost.exchanges[name].type} does not spread its messages"
        )
    return {
        "exchange": name,
        "vhost": vhost.name,
        "destinations": [
            {**_destination(vhost, each.target), "weight": each.weight, "share": each.share}
            for each in shares
        ],
    }


def _exchange(call: Call) -> tuple[Vhost, str]:
    vhost, name = call.vhost(), exchange_name(call.part("exchange"))
    if name not in vhost.exchanges:
        raise not_found()
    if sum(map(vhost.count_from, reached(vhost, name))) > BINDINGS_MAX:
        raise bad_request(f"more than {BINDINGS_MAX} bindings lead on from exchange '{name}'")
    return vhost, name


def _hop(vhost: Vhost, hop: RouteStep) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "exchange": hop.exchange,
        "type": hop.type,
        "destinations": [_destination(vhost, target) for target in hop.destinations],
        "alternate": hop.alternate,
        "by_chance": hop.by_chance,
    }
    if hop.hash is not None:
        shown["hash"] = {
            "algorithm": hop.hash.algorithm,
            "of": hop.hash.by,
            "hashed": hop.hash.hashed.decode("utf-8", "replace"),
            "value": f"{hop.hash.hash:016x}",
            "destinations": hop.hash.among,
        }
    return shown


def _destination(vhost: Vhost, target: Target) -> dict[str, Any]:
    """Return a destination; a queue with its shard, a shard queue with its index as well."""
    shown: dict[str, Any] = {"kind": target.kind, "name": target.name}
    queue = vhost.queues.get(target.name) if target.kind == "queue" else None
    if queue is not None:
        shown["shard"] = queue.shard
        if queue.part is not None:
            shown["index"] = queue.part.index
    return shown


ROUTES = [
    Route(
        "POST",
        "/api/exchanges/{vhost}/{exchange}/route",
        route,
        body=MessageBody,
        shows="Explained",
    ),
    Route("GET", "/api/exchanges/{vhost}/{exchange}/ring", show_ring),
]
