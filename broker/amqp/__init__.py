"""AMQP 0-9-1 as a library: bytes in, events out; no socket, no clock."""

from shardmq.broker.amqp.connection import Connection, answers, hand_on, start_frame, tune_frame
from shardmq.broker.amqp.errors import ChannelException, ConnectionException
from shardmq.broker.amqp.events import (
    Binds,
    Event,
    Failed,
    Method,
    Nothing,
    Open,
    Opened,
    Publishes,
    Settles,
    StartOk,
    copies_by_channel,
    things_in,
)
from shardmq.broker.amqp.methods import ChannelOpenOk

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
    "Opened",
    "Publishes",
    "Settles",
    "StartOk",
    "answers",
    "copies_by_channel",
    "hand_on",
    "start_frame",
    "things_in",
    "tune_frame",
]
