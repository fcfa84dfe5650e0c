"""The publishes of one transaction on their way to the shards, slice by slice.

What a transaction keeps until then: transactions.py. Room that queues set aside for it: reserving.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.message import Message
from shardmq.broker.front_door.publish.once import Asked
from shardmq.broker.front_door.publish.publisher import (
    Committed,
    Held,
    Publisher,
    PublishingChannel,
    Targets,
)
from shardmq.broker.front_door.publish.reserving import Reservation
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.shared.deduplication import Copy

# What leaves together at the most.
COMMIT_BYTES = 8 << 20


class Copies(NamedTuple):
    """Of one message, where each may come once: what it is the first of, and what it came again after."""

    first: list[Copy]
    again: list[Copy]


class Publishing(Protocol):
    """What a commit needs of publishing.py."""

    links: ShardLinks
    tracing: Tracing | None

    def put_asked(
        self,
        client: Publisher,
        channel: PublishingChannel,
        message: Message,
        targets: Targets,
        now_ms: int,
        asked: Asked | None,
    ) -> Copies: ...
    def watch(self, copy: Copy, touched: int) -> None: ...


class Commit:
    def __init__(
        self,
        publishing: Publishing,
        client: Publisher,
        channel: PublishingChannel,
        held: Sequence[Held],
        asked: Asked | None,
        reservation: Reservation | None,
    ) -> None:
        self._publishing = publishing
        self._client = client
        self._channel = channel
        self._held = held
        self._asked = asked
        self._reservation = reservation
        self._committed = Committed(client.id, channel.number)
        self._done = 0

    async def run(self) -> asyncio.Future[bool]:
        """Publish all of the transaction; the future tells whether all shards have all of it."""
        self._channel.published += len(self._held)
        self._client.begin_slice()
        try:
            self._publish_some()
            while self._done < len(self._held):
                if self._reservation is not None:
                    self._reservation.rest()
                await self._client.next_slice()
                self._publish_some()
            self._committed.confirmed()
            return self._committed.future
        finally:
            if self._asked is not None:
                self._asked.release()
            if self._reservation is not None:
                self._reservation.end()

    def _publish_some(self) -> None:
        """Publish what the slice lets, at least one message.

        Nothing else is published while the reservation is redeemed.
        """
        client, publishing, begun = self._client, self._publishing, self._done
        now_ms = time.time_ns() // 1_000_000
        size = 0
        first: list[Copy] = []
        if self._reservation is not None:
            self._reservation.redeem()
        try:
            while self._done < len(self._held):
                message, targets = self._held[self._done]
                copies = publishing.put_asked(
                    client, self._channel, message, targets, now_ms, self._asked
                )
                self._done += 1
                first += copies.first
                self._committed.shards += len(copies.again)
                for copy in copies.again:
                    copy.follow(self._committed)
                size += len(message.stored)
                if size > COMMIT_BYTES or client.slice_is_over():
                    break
        finally:
            self._await(first)
        if publishing.tracing is not None:
            for message, targets in self._held[begun : self._done]:
                without_bcc = message.without_bcc()
                publishing.tracing.published(
                    client, self._channel.number, without_bcc, message.keys, targets
                )

    def _await(self, first: list[Copy]) -> None:
        """Wait for the batches that were just added to, before they leave."""
        links = self._publishing.links
        touched = links.packer.take_touched()
        self._client.feeds(touched)
        self._committed.shards += touched.bit_count()
        links.wait_for(touched, self._committed)
        for copy in first:
            self._publishing.watch(copy, touched)
