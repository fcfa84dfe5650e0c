"""/api/exchanges. The default exchange is called amq.default in a path, "" in a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap
from operator import attrgetter
from typing import Any

import msgspec

from shardmq.broker.controller.management.call import (
    Arguments,
    Call,
    Route,
    existing,
    long_list,
    put_status,
    table_of,
)
from shardmq.broker.controller.management.metrics import time_range
from shardmq.broker.controller.management.metrics.message_stats import exchange_stats
from shardmq.broker.controller.management.metrics.past import EXCHANGE
from shardmq.broker.controller.management.metrics.samples import add_client_samples
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model.catalog import PREDECLARED, Vhost
from shardmq.broker.model.changes import ExchangePut
from shardmq.broker.model.permissions import DEFAULT_EXCHANGE_RIGHTS_NAME
from shardmq.broker.shared.control import ExchangeDeclare, ExchangeRemove

# RabbitMQ's words for users: of its own exchanges, and of those whose user it has not stored. The
# catalog stores no users of exchanges.
INTERNAL_USER, UNKNOWN_USER = "rmq-internal", "unknown"
BY_NAME = attrgetter("name")


class ExchangeBody(msgspec.Struct):
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Arguments = {}


def exchange_name(part: str) -> str:
    return "" if part == DEFAULT_EXCHANGE_RIGHTS_NAME else part


def row(exchange: ExchangePut, vhost: Vhost) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": exchange.name,
        "vhost": exchange.vhost,
        "type": exchange.type,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": exchange.arguments,
        "policy": vhost.policies_of(exchange).policy,
        "user_who_performed_action": (
            INTERNAL_USER if exchange.name in PREDECLARED else UNKNOWN_USER
        ),
    }
    if queues := vhost.shard_queues(exchange.name):
        shown["shard_queues"] = list(queues)
    return shown


async def _rows(call: Call, found: list[tuple[Vhost, ExchangePut]]) -> Iterator[dict[str, Any]]:
    """Return rows with the numbers of messages published, routed and delayed, and samples."""
    wanted = time_range.asked(call.request.query)
    if wanted is not None:
        time_range.check_samples(wanted, EXCHANGE, len(found))
    stats = await call.context.stats.now()

    def with_numbers(vhost: Vhost, exchange: ExchangePut) -> dict[str, Any]:
        shown = row(exchange, vhost)
        if counted := exchange_stats(stats, vhost.name, exchange.name):
            shown["message_stats"] = counted
            if wanted is not None:
                key = (vhost.name, exchange.name)
                add_client_samples(shown, call.context.past, EXCHANGE, stats, key, wanted)
        queue = vhost.delay_queue(exchange.name) if vhost.hidden_queues else None
        if queue is not None and queue.id in stats.delayed:
            shown["messages_delayed"] = stats.delayed[queue.id]
        return shown

    return starmap(with_numbers, found)


def _exchange(call: Call) -> ExchangePut:
    return existing(call.vhost().exchanges.get(exchange_name(call.part("exchange"))))


async def get_all(call: Call) -> Listing:
    """List exchanges, of all vhosts or of the one in the path."""
    found = [
        (vhost, exchange)
        for vhost in sorted(call.vhosts(), key=BY_NAME)
        for exchange in sorted(vhost.exchanges.values(), key=BY_NAME)
    ]
    return Listing(await _rows(call, found))


async def get(call: Call) -> dict[str, Any]:
    """Show an exchange with its numbers."""
    vhost, exchange = call.vhost(), _exchange(call)
    call.context.past.see(EXCHANGE, (vhost.name, exchange.name))
    shown = next(await _rows(call, [(vhost, exchange)]))
    return {**shown, "incoming": [], "outgoing": []}  # as with RabbitMQ where rates_mode is basic


async def put(call: Call) -> Any:
    """Declare an exchange."""
    vhost, body = call.vhost_to_change(), await call.body(ExchangeBody)
    name = exchange_name(call.part("exchange"))
    existed = name in vhost.exchanges
    arguments = table_of(body.arguments)
    await call.ask(
        ExchangeDeclare(
            vhost.name, name, body.type, body.durable, body.auto_delete, body.internal, arguments
        )
    )
    return put_status(existed)


async def delete(call: Call) -> None:
    """Delete an exchange, if it is unused where the query says so."""
    vhost, exchange = call.vhost_to_change(), _exchange(call)
    await call.ask(ExchangeRemove(vhost.name, exchange.name, call.flag("if-unused")))


ROUTES = [
    long_list("/api/exchanges", get_all, "Exchange"),
    long_list("/api/exchanges/{vhost}", get_all, "Exchange"),
    Route("GET", "/api/exchanges/{vhost}/{exchange}", get, shows="Exchange"),
    Route("PUT", "/api/exchanges/{vhost}/{exchange}", put, body=ExchangeBody),
    Route("DELETE", "/api/exchanges/{vhost}/{exchange}", delete, query=("if-unused",)),
]
