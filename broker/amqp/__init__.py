"""AMQP 0-9-1 as a library: bytes in, events out; no socket, no clock."""

from broker.amqp.connection import Connection
from broker.amqp.errors import ChannelException, ConnectionException
from broker.amqp.events import (
    Binds,
    Event,
    Failed,
    Method,
    Nothing,
    Open,
    Publishes,
    Settles,
    StartOk,
    copies_by_channel,
    things_in,
)
from broker.amqp.methods import ChannelOpenOk

__all__ = [
    "Binds",
    "ChannelException",
    "ChannelOpenOk",
    "Connection",
    "ConnectionException",
    "Event",
    "Failed",
    "Method",
    "Nothing",
    "Open",
    "Publishes",
    "Settles",
    "StartOk",
    "copies_by_channel",
    "things_in",
]
