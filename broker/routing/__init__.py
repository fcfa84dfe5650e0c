"""Decide which queues a message goes to: pure functions over immutable tables."""

from shardmq.broker.routing.matching import Message
from shardmq.broker.routing.route import (
    Routed,
    goes_always_alike,
    goes_by_key,
    route,
    route_message,
    spread_of,
)
from shardmq.broker.routing.table import NoSuchDestination, NoSuchExchange, RoutingTable

__all__ = [
    "Message",
    "NoSuchDestination",
    "NoSuchExchange",
    "Routed",
    "RoutingTable",
    "goes_always_alike",
    "goes_by_key",
    "route",
    "route_message",
    "spread_of",
]
