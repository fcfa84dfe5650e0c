"""A routing table of what can be reached from one exchange.

The controller routes nothing, so its catalog has no routing tables; this makes one when asked.
"""

from __future__ import annotations

from shardmq.broker.model.catalog import Vhost
from shardmq.broker.routing import hidden
from shardmq.broker.routing.table import RoutingTable


def table_of(vhost: Vhost, exchange: str, key: str = "") -> RoutingTable:
    """Return a table with all that a message published to `exchange` can come to.

    For the default exchange this is the queue named `key`.
    """
    table = RoutingTable.empty()
    if not exchange:
        if key in vhost.queues and not hidden.is_of_exchange(key):
            table = table.with_queue(key)
        return table
    names = reached(vhost, exchange)
    for name in names:
        put = vhost.exchanges[name]
        table = table.with_exchange(name, put.type, vhost.exchange_arguments(put), put.internal)
    for name in names:
        for binding in vhost.bindings_from(name):
            if binding.kind == "queue":
                table = table.with_queue(binding.destination)
            table = table.with_binding(
                name, binding.kind, binding.destination, binding.routing_key, binding.arguments
            )
    return table


def reached(vhost: Vhost, exchange: str) -> list[str]:
    """Return the exchanges reached over bindings and alternate exchanges, the nearest first."""
    names = [exchange] if exchange in vhost.exchanges else []
    for name in names:  # grows while it runs
        put = vhost.exchanges[name]
        alternate = vhost.exchange_arguments(put).get("alternate-exchange")
        following = [
            each.destination for each in vhost.bindings_from(name) if each.kind == "exchange"
        ]
        for next in [*following, alternate] if isinstance(alternate, str) else following:
            if next in vhost.exchanges and next not in names:
                names.append(next)
    return names
