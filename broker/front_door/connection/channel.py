"""The state of a channel in the front door."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Final

from pamqp import base

from shardmq.broker.amqp import Binds
from shardmq.broker.front_door.consume.consumers import ConsumingChannel, Receiver, Settle
from shardmq.broker.front_door.counts import OF_CHANNEL
from shardmq.broker.front_door.hot_state import PublishingState
from shardmq.broker.front_door.publish import transactions
from shardmq.broker.front_door.publish.confirms import Confirms
from shardmq.broker.front_door.publish.effects import Decided
from shardmq.broker.front_door.publish.transactions import Transaction
from shardmq.broker.front_door.topology.pipeline import Pipeline

# What a method is answered with: a method, frames that are ready, or nothing.
Reply = base.Frame | bytes | None
# A method of topology, or what to do. Who calls it gets the reply, or a coroutine that gives the
# reply and ends when what follows on the channel may begin.
Outcome = Coroutine[None, None, Reply] | Reply
Work = base.Frame | Binds | Callable[[], Outcome]

NO_WORK: Final[deque[Work]] = deque()  # of channels that have never had to wait
NOTHING_CONSUMED: Final = (0,) * 8


class Channel(PublishingState):
    """A channel of a connection. Publishing and topology use it, consuming has `consuming`.

    Some clients open a channel for each thing they do, so what few channels need is made late.
    """

    __slots__ = (
        "_client", "last_queue", "pipeline", "running", "seen_at_ms", "seen_count", "work",
    )  # fmt: skip

    def __init__(self, client: Receiver, number: int) -> None:
        self.number = number
        self.is_open = True
        self.published = 0  # messages, also those that reached no queue
        self.returned = self.unroutable_dropped = 0  # of these
        # How much was counted when somebody last asked for the counters, and when more than before
        # was seen.
        self.seen_count = -1
        self.seen_at_ms = 0
        self.last_queue = ""  # the queue declared last: what an empty queue name means
        self.confirms: Confirms | None = None
        self.transaction: Transaction[Decided, Settle] | None = None
        self._client = client
        self.consuming_if_any: ConsumingChannel | None = None
        self.work = NO_WORK
        self.running = False  # some of its work waits for an answer
        self.pipeline: Pipeline | None = None  # of its declares, binds and deletes

    @property
    def consuming(self) -> ConsumingChannel:
        if self.consuming_if_any is None:
            self.consuming_if_any = ConsumingChannel(self._client, self.number)
            self.consuming_if_any.is_open = self.is_open
        return self.consuming_if_any

    @property
    def has_consumed(self) -> bool:
        """Return whether there may be consumers, deliveries or settles to release."""
        return self.consuming_if_any is not None

    def queue_work(self, work: Work, *, first: bool = False) -> None:
        """Put work behind all that waits, or before it."""
        if self.work is NO_WORK:
            self.work = deque()
        if first:
            self.work.appendleft(work)
        else:
            self.work.append(work)

    def select_transaction(self) -> None:
        """Make the channel transactional (tx.select). Raises if it is in confirm mode."""
        self.transaction = transactions.select(
            self.transaction, confirming=self.confirms is not None
        )
        self.consuming.transaction = self.transaction  # holds settles, too

    @property
    def reply_to(self) -> str:
        """Return the queue for direct replies to this channel, "" while nobody waits for them."""
        replies = self.consuming_if_any.replies if self.consuming_if_any is not None else None
        return replies.queue_name if replies is not None else ""

    @property
    def busy(self) -> bool:
        return self.running or (self.pipeline is not None and self.pipeline.busy)

    def counted(self) -> tuple[int, ...]:
        """Return the counters of the channel since it was opened, in the order of OF_CHANNEL."""
        confirms, consuming = self.confirms, self.consuming_if_any
        confirmed = (
            confirms.next_seq - 1 - confirms.unconfirmed - confirms.nacked if confirms else 0
        )
        return (
            self.published,
            confirmed,
            self.returned,
            self.unroutable_dropped,
            *(consuming.counted() if consuming is not None else NOTHING_CONSUMED),
        )

    def report(self, owner: str, now_ms: int) -> dict[str, object]:
        """Return the counters of the channel for listings, as of `now_ms` since the epoch."""
        confirms, transaction = self.confirms, self.transaction
        unconfirmed = confirms.unconfirmed if confirms else 0
        counted = self.counted()
        done = sum(counted)
        if done != self.seen_count:
            self.seen_count, self.seen_at_ms = done, now_ms
        return {
            "owner": owner,
            "number": self.number,
            "confirm": confirms is not None,
            "transactional": transaction is not None,
            "messages_unconfirmed": unconfirmed,
            "messages_uncommitted": transaction.publish_count if transaction else 0,
            "acks_uncommitted": transaction.settled_messages if transaction else 0,
            "used_at_ms": self.seen_at_ms,
            **self.consuming.report(),
            **dict(zip(OF_CHANNEL, counted, strict=True)),
        }
