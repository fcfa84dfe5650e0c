"""Publisher confirms of one channel: numbers, batches waited for, acks and nacks in order.

One `Waiting` stands for all publishes of one channel in one read. It is done when every shard
concerned has confirmed its batch. A channel answers for the longest finished beginning, with one
cumulative ack; what was refused or lost is nacked one by one. Nothing is written here: a channel
with something to say puts itself on the list `due`. At the end of a pass of the event loop the
owner of that list writes `answers`, then ends the channel if there is a `failure`.
"""

from __future__ import annotations

import struct
from typing import Protocol

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.hot_state import (
    ConfirmsState,
    MessageCounts,
    Waiting,
    ack_frame,
    nack_frame,
)
from shardmq.broker.front_door.publish.message import PUBLISH

__all__ = ["LOST", "Answered", "Confirms", "Waiting", "ack_frame", "known_frame", "nack_frame"]

LOST = "a publish with x-sequence may be lost: publish again, in order, what was not confirmed"

_KNOWN = struct.Struct(">BHIHHQQBB")


def known_frame(channel: int, first: int, last: int, altered: bool) -> bytes:
    """Return the frame that says that publishes repeat what a queue had of their producer.

    It comes before the ack. `altered` says that their bodies are others. A method of our own, in
    the class of confirms: u64 first, u64 last, u8 altered. Only the reader of streams gets it,
    which publishes what comes by HTTP.
    """
    return _KNOWN.pack(1, channel, 21, 85, 20, first, last, altered, 0xCE)


class Answered(Protocol):
    """The connection that the answers go to."""

    id: int

    def write(self, data: bytes) -> None: ...
    def fail(self, error: ChannelException | ConnectionException, number: int) -> None: ...


class Confirms(ConfirmsState):
    """Confirm mode of one channel."""

    __slots__ = ()

    def __init__(
        self,
        client: Answered,
        channel: int,
        due: list[Confirms],
        counts: MessageCounts | None = None,
    ) -> None:
        self.client = client
        self.channel = channel
        self.due = due
        self.counts = counts or MessageCounts()

    def publish_lost(self) -> None:
        """Hear that a publish was lost, or may be.

        What is stored behind a missing publish would make that one look like a repetition. So a
        channel whose publishes are in sequence ends, without another answer: the next channel
        begins with what was not confirmed.
        """
        if self.in_sequence and not self.closed:
            self.closed = True
            self.failure = ChannelException(406, LOST, *PUBLISH)
            self.finished()
