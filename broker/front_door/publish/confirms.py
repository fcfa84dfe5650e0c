"""Publisher confirms of one channel: numbers, batches waited for, acks and nacks in order.

One `Waiting` stands for all publishes of one channel in one read. It is done when every shard
concerned has confirmed its batch. A channel answers for the longest finished beginning, with one
cumulative ack; what was refused or lost is nacked one by one. Nothing is written here: a channel
with something to say puts itself on the list `due`. At the end of a pass of the event loop the
owner of that list writes `answers`, then ends the channel if there is a `failure`.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Protocol

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.publish.message import PUBLISH

LOST = "a publish with x-sequence may be lost: publish again, in order, what was not confirmed"

_ACK = struct.Struct(">BHIHHQBB")
_REQUEUE = 2  # in the bits of basic.nack
_KNOWN = struct.Struct(">BHIHHQQBB")


def ack_frame(channel: int, tag: int, multiple: bool) -> bytes:
    """Return basic.ack to the publisher."""
    return _ACK.pack(1, channel, 13, 60, 80, tag, multiple, 0xCE)


def nack_frame(channel: int, tag: int) -> bytes:
    """Return basic.nack of one message to its publisher.

    It has the bit `requeue`, which RabbitMQ sends and no publisher reads.
    """
    return _ACK.pack(1, channel, 13, 60, 120, tag, _REQUEUE, 0xCE)


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


class Waiting:
    """Publishes first..last of one channel.

    `shards` counts the batches that must be confirmed before they are.
    """

    __slots__ = ("confirms", "first", "last", "nacked", "shards")

    def __init__(self, confirms: Confirms, first: int, last: int, shards: int) -> None:
        self.confirms = confirms
        self.first = first
        self.last = last
        self.shards = shards
        self.nacked: bool = False

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        """Hear that a shard refused publishes first..last of that channel, which may be another."""
        confirms = self.confirms
        if connection == confirms.client.id and channel == confirms.channel:
            confirms.refused.update(range(max(first, self.first), min(last, self.last) + 1))

    def confirmed(self) -> None:
        self.shards -= 1
        if self.shards == 0:
            self.confirms.finished()

    @property
    def in_sequence(self) -> bool:
        return self.confirms.in_sequence

    def lost(self) -> None:
        self.nacked = True
        self.confirmed()
        self.confirms.publish_lost()


class Confirms:
    """Confirm mode of one channel: numbers given out, what waits, what was refused."""

    def __init__(
        self, client: Answered, channel: int, due: list[Confirms], counts: Counts | None = None
    ) -> None:
        self.client = client
        self.channel = channel
        self.next_seq = 1
        self.waiting: deque[Waiting] = deque()
        self.refused: set[int] = set()
        # The channel is gone: nobody is answered, and the number may be another channel's now.
        self.closed = False
        # Some publish had x-producer-id and x-sequence: its place in the order of its producer.
        self.in_sequence = False
        self.failure: ChannelException | None = None  # ends the channel, once
        self._due = due
        self._is_due = False
        self._counts = counts or Counts()

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

    def wait(self, count: int, shards: int) -> Waiting:
        """Give the next `count` publishes their numbers; so many batches have them."""
        waiting = Waiting(self, self.next_seq, self.next_seq + count - 1, shards)
        self.next_seq += count
        self.waiting.append(waiting)
        if shards == 0:
            self.finished()
        return waiting

    def finished(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._due.append(self)

    def answers(self) -> bytes:
        """Return acks and nacks for the longest finished beginning."""
        self._is_due = False
        if self.closed:
            self.waiting.clear()
            return b""
        out: list[bytes] = []
        first = last = 0  # an ack not yet written
        while self.waiting and self.waiting[0].shards <= 0:
            waiting = self.waiting.popleft()
            if waiting.nacked or self.refused:
                if last:
                    out.append(ack_frame(self.channel, last, last > first))
                    first = last = 0
                out.append(self._one_by_one(waiting))
                continue
            first = first or waiting.first
            last = waiting.last
            self._counts.confirmed += waiting.last - waiting.first + 1
        if last:
            out.append(ack_frame(self.channel, last, last > first))
        return b"".join(out)

    def _one_by_one(self, waiting: Waiting) -> bytes:
        out = []
        for seq in range(waiting.first, waiting.last + 1):
            refused = waiting.nacked or seq in self.refused
            self.refused.discard(seq)
            self._counts.confirmed += not refused
            out.append(
                nack_frame(self.channel, seq) if refused else ack_frame(self.channel, seq, False)
            )
        return b"".join(out)
