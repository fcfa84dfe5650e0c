"""The publishes of one transaction on their way to the shards, slice by slice.

What a transaction keeps until then: transactions.py. Room that queues set aside for it:
reservations.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.dedup_service import Copy, DedupAnswers
from shardmq.broker.front_door.publish.effects import (
    Decided,
    Published,
    PublishingChannel,
    SlicedTask,
)
from shardmq.broker.front_door.publish.reservations import Reservation
from shardmq.broker.front_door.publish.single_message import SingleMessages
from shardmq.broker.front_door.session import Session
from shardmq.shardd.wire.messages import PARTLY_REFUSED

# Waits until the queues of messages of a client take publishes.
Opened = Callable[[Session, Iterable[Decided]], Awaitable[None]]
# Publishes that leave together at the most, in bytes of stored messages.
COMMIT_BYTES = 8 << 20
# A commit waits so long for shards to say that its settles last. An older one does not answer.
SETTLED_S_MAX = 60.0


class Committed:
    """Hears what becomes of a transaction's publishes, or of its settles.

    `future` tells whether all are on stable storage.
    """

    # The commit is answered: a client that hears that it failed has sent nothing behind it.
    in_sequence = False

    def __init__(self, connection: int, channel: int, shards: int = 0) -> None:
        """Wait for so many answers; the caller ends the wait by one call of `confirmed` more."""
        self.connection = connection
        self.channel = channel
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.shards = shards + 1  # answers to wait for, and the commit itself while it is packed
        self._stored = True

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        """Hear that a shard had no room for publishes of that channel.

        `first` is 0 for those without confirm.
        """
        if (connection, channel & ~PARTLY_REFUSED, first) == (self.connection, self.channel, 0):
            self._stored = False

    def confirmed(self) -> None:
        self.shards -= 1
        if not self.shards and not self.future.done():
            self.future.set_result(self._stored)

    def lost(self) -> None:
        self._stored = False
        self.confirmed()

    async def within(self, seconds: float) -> bool:
        """Return whether it is known within this time that all are on stable storage."""
        if not self.future.done():
            await asyncio.wait([self.future], timeout=seconds)
        return self.future.done() and self.future.result()


class Commit:
    """A commit. The needs of its messages were decided when the messages were published."""

    def __init__(
        self,
        messages: SingleMessages,
        batches: ShardLinks,
        session: Session,
        channel: PublishingChannel,
        held: Sequence[Decided],
        answers: DedupAnswers | None,
        reservation: Reservation | None,
        opened: Opened,
    ) -> None:
        """Begin with `answers`, what shards said about ids. The commit ends the reservation."""
        self._opened = opened
        self._messages = messages
        self._batches = batches
        self._session = session
        self._channel = channel
        self._held = held
        self._answers = answers
        self._reservation = reservation
        self._committed = Committed(session.id, channel.number)
        self._done = 0

    async def run(self, task: SlicedTask) -> asyncio.Future[bool]:
        """Publish all of the transaction; the future tells whether all shards have all of it."""
        self._channel.published += len(self._held)
        try:
            await self._opened(self._session, self._held)
            task.begin_slice()
            task.carry_out(self.step(time.time_ns() // 1_000_000, task.slice_is_over))
            while self._done < len(self._held):
                if self._reservation is not None:
                    self._reservation.rest()
                await task.next_slice()
                await self._opened(self._session, islice(self._held, self._done, None))
                task.carry_out(self.step(time.time_ns() // 1_000_000, task.slice_is_over))
            self._committed.confirmed()
            return self._committed.future
        finally:
            if self._answers is not None:
                self._answers.release()
            if self._reservation is not None:
                self._reservation.end()

    def step(self, now_ms: int, is_over: Callable[[], bool]) -> Published:
        """Pack messages until the time slice is over or enough leave together, at least one.

        While the reservation is redeemed nothing else may be packed.
        """
        begun, size = self._done, 0
        published = Published()
        first: list[Copy] = []
        if self._reservation is not None:
            self._reservation.redeem()
        try:
            while self._done < len(self._held):
                decided = self._held[self._done]
                copies = self._messages.pack(
                    self._session, self._channel, decided, now_ms, published, self._answers
                )
                self._done += 1
                if decided.message.span is not None:
                    decided.message.span.packed()
                first += copies.first
                self._committed.shards += len(copies.again)
                for copy in copies.again:
                    copy.follow(self._committed)
                size += len(decided.message.stored)
                if size > COMMIT_BYTES or is_over():
                    break
        finally:  # also of what was packed before something went wrong
            touched = self._batches.packer.take_touched()
            published.fed |= touched
            self._committed.shards += touched.bit_count()
            self._batches.wait_for(touched, self._committed)
            for copy in first:
                self._messages.watch(copy, touched)
        for decided in self._held[begun : self._done]:
            self._messages.trace(self._session, self._channel, decided, published)
        return published
