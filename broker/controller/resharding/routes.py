"""For the controller, which routes nothing: a routing table of what can be reached from one exchange. Pure."""

from __future__ import annotations

from shardmq.broker.model.catalog import Vhost
from shardmq.broker.routing import hidden
from shardmq.broker.routing.table import RoutingTable


def table_of(vhost: Vhost, exchange: str, key: str = "") -> RoutingTable:
    """With all that a message published to `exchange` can come to. Of the default exchange, the queue named `key`."""
    table = RoutingTable.empty()
    if not exchange:
        return (
            table.with_queue(key)
            if key in vhost.queues and not hidden.is_of_exchange(key)
            else table
        )
    there = reached(vhost, exchange)
    for name in there:
        put = vhost.exchanges[name]
        table = table.with_exchange(name, put.type, vhost.exchange_arguments(put), put.internal)
    for name in there:
        for binding in vhost.bindings_from(name):
            if binding.kind == "queue":
                table = table.with_queue(binding.destination)
            table = table.with_binding(
                name, binding.kind, binding.destination, binding.routing_key, binding.arguments
            )
    return table


def reached(vhost: Vhost, exchange: str) -> list[str]:
    """Over bindings and alternates; nearest first."""
    there = [exchange] if exchange in vhost.exchanges else []
    for name in there:  # grows while it runs
        put = vhost.exchanges[name]
        alternate = vhost.exchange_arguments(put).get("alternate-exchange")
        following = [
            each.destination for each in vhost.bindings_from(name) if each.kind == "exchange"
        ]
        for next in [*following, alternate] if isinstance(alternate, str) else following:
            if next in vhost.exchanges and next not in there:
                there.append(next)
    return there
