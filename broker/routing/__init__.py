"""Which queues a message goes to: pure functions over immutable tables."""

from broker.routing.route import Routed, depends_on_headers, route
from broker.routing.table import NoSuchDestination, NoSuchExchange, RoutingTable

__all__ = ["NoSuchDestination", "NoSuchExchange", "Routed", "RoutingTable", "depends_on_headers", "route"]
