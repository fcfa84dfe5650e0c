"""The consumers of one channel and their deliveries, as the front door knows them.

A `Consumer` takes messages of one queue of one shard. A `GroupConsumer` is a consumer of a virtual
queue, as its client sees it; it has an `Assignment`, which is such a `Consumer`, for each shard
queue that the controller gives it. `ConsumingChannel` holds what the consumers of one channel
share: delivery tags, unacknowledged deliveries, the limit of the channel, counters.

This file holds data. The other files of the folder change it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from pamqp import base, commands

from shardmq.broker.front_door.connection.output import Output
from shardmq.broker.front_door.consume.credit import Allotment, Limit
from shardmq.broker.front_door.consume.unacked import Run, Unacked
from shardmq.broker.front_door.hot_state import ConsumerState, ConsumingState
from shardmq.broker.front_door.publish.transactions import Transaction
from shardmq.broker.front_door.session import Session
from shardmq.broker.model import checks
from shardmq.broker.shared.control import Answer, AssignmentName, ConsumeTerms
from shardmq.broker.shared.reading import Reading
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.messages import ReadFrom

# For an assignment of a stream: the offset before which it ends, and the offset below which the
# shard reports that all is settled. Each may be None.
Bounds = tuple[int | None, int | None]
TAGS_REMEMBERED = 64  # of deliveries by basic.get that are settled, before they are forgotten
FREE: Final[Bounds] = (None, None)

# Settled deliveries of one channel: ACK, REJECT or REQUEUE of the wire, and which ones.
Settle = tuple[int, "list[Run[Consumer]]"]


class Clock(Protocol):
    """The time of the current pass, in seconds of the event loop."""

    now: float


class Receiver(Protocol):
    """The connection as consuming sees it: its session, and the output for deliveries."""

    id: int
    session: Session

    @property
    def output(self) -> Output: ...

    def feeds(self, shards: int) -> None:
        """Note that these shards (bit mask) got bytes on behalf of this client."""

    def answer(self, number: int, reply: base.Frame | bytes | None) -> None:
        """Send the reply of a method of this channel: a method, frames that are ready, or none."""

    def write(self, data: bytes) -> None:
        """Send frames that are ready."""

    def write_delivery(
        self, data: bytes | list[bytes | memoryview], shard: int, credit: int
    ) -> None:
        """Send deliveries, then give `credit` bytes back to the shard."""

    def consumer_ended(self, ended: EndedConsumer) -> None:
        """Tell the client that a consumer was cancelled, if the client wants to know."""


class EndedConsumer(NamedTuple):
    """A consumer that was cancelled, though not by its client.

    Its client is told by `client.consumer_ended`: first `consume_ok`, if there is one.
    """

    client: Receiver
    channel: int
    tag: str
    consume_ok: commands.Basic.ConsumeOk | None


class ConsumingChannel(ConsumingState):
    """The consuming half of one channel: its consumers, its deliveries and its limit."""

    __slots__ = (
        "cancelled", "consumers", "getters", "got_auto", "got_empty", "got_manual", "groups",
        "is_open", "prefetch", "replies", "transaction",
    )  # fmt: skip

    def __init__(self, client: Receiver, number: int) -> None:
        self.client = client
        self.number = number
        self.is_open = True
        self.prefetch = 0  # for new consumers
        self.limit = Limit()  # basic.qos with global set
        self.next_tag = 1
        # Deliveries that nobody settles, and those of basic.get. All other deliveries went to
        # consumers that acknowledge.
        self.delivered_auto = self.got_auto = self.got_manual = self.got_empty = 0
        self.acked = self.redelivered = 0
        self.unacked: Unacked[Consumer] = Unacked()
        self.transaction: Transaction[Any, Settle] | None = None
        self.consumers: dict[str, Consumer | GroupConsumer] = {}  # by tag
        # Group consumers by number, cancelled ones too while they hold something.
        self.groups: dict[int, GroupConsumer] = {}
        self.cancelled: list[Consumer] = []
        self.getters: dict[int, Getter] = {}  # hold what basic.get took, by shard
        self.replies: Consumer | None = None  # the consumer of direct reply-to

    def unsettled(self) -> Iterator[Run[Consumer]]:
        """Return the deliveries whose settles no shard was told of.

        Those of a transaction are among them: a rollback makes them outstanding again.
        """
        yield from self.unacked.runs()
        if self.transaction is not None:
            for _, runs in self.transaction.settles:
                yield from runs

    def first_unsettled(self, consumer: Consumer, epoch: int) -> int | None:
        """Return the lowest number of the consumer's unsettled deliveries in that epoch."""
        own = (
            run.first_number
            for run in self.unsettled()
            if run.consumer is consumer and run.epoch == epoch
        )
        return min(own, default=None)

    def put_back(self, settles: Iterable[Settle]) -> None:
        """Make the deliveries of these settles unacknowledged again."""
        for _, runs in settles:
            for run in runs:
                self.unacked.put_back(run)

    def report(self) -> dict[str, int]:
        """Return the limits of the channel, and what it has now, for listings."""
        return {
            "prefetch_count": self.prefetch,
            "global_prefetch_count": self.limit.most,
            "messages_unacknowledged": self.unacked.count,
            "consumer_count": len(self.consumers),
        }

    def counted(self) -> tuple[int, ...]:
        """Return the counters of the channel, from `acked` on in the order of OF_CHANNEL."""
        delivered, got = self.next_tag - 1, self.got_auto + self.got_manual
        return (
            self.acked,
            self.redelivered,
            delivered,
            delivered - self.delivered_auto - got,
            self.delivered_auto,
            self.got_manual,
            self.got_auto,
            self.got_empty,
        )


class Consumer(ConsumerState):
    """A consumer of one queue. `number` is used once in the life of this front door."""

    __slots__ = (
        "attached", "attaching", "auto_delete", "exclusive", "nowait", "priority", "queue_id",
    )  # fmt: skip

    def __init__(self, channel: ConsumingChannel, number: int, tag: str) -> None:
        self.channel = channel
        self.client = channel.client
        self.number = number
        self.tag = tag
        self.tag_bytes = tag.encode()
        self.group: GroupConsumer | None = None  # whose assignment this is
        self.attached = False  # is attached again when its shard restarts
        self.attaching: asyncio.Future[wire.Control] | None = None
        self.announced = False  # consume-ok was sent, or is being sent
        self.auto_delete = False  # the queue is deleted with its last consumer
        self.nowait = False
        self.allotment: Allotment | None = None  # None: no shared limit holds, nor has ever held
        self.delivered = 0  # all deliveries of this process of its shard
        self.queue_id = 0
        self.queue_name = ""
        self.shard = 0
        self.affinity = False  # messages of one key go to one consumer
        self.no_ack = False
        self.exclusive = False
        self.priority = 0
        self.prefetch = 0
        self.reading: Reading | None = None  # where a consumer of a stream is

    def runs_of(self, queue_id: int) -> Iterator[Run[Consumer]]:
        """Return its deliveries of a queue that wait for their ack."""
        return self.channel.unacked.of(self) if queue_id == self.queue_id else iter(())

    def queues_of(self, run: Run[Consumer]) -> Iterable[int]:
        """Return the ids of the queues of these deliveries, which are in `unsettled`."""
        return (self.queue_id,)

    @property
    def is_in_limit(self) -> bool:
        """Return whether the limit of a channel holds for the consumer and what it holds.

        For a consumer of a single stream it does not, as in RabbitMQ, nor for direct replies: who
        holds as many messages as he may could wait for the reply that he needs to settle them.
        """
        return self.group is not None or (
            self.reading is None and not checks.is_reply_queue(self.queue_name)
        )

    @property
    def is_wanted(self) -> bool:
        return self.channel.consumers.get(self.tag) is self

    @property
    def is_attached(self) -> bool:
        """Return whether its shard had it, though who asked may not have run since the answer."""
        return self.is_wanted and (self.attached or self.is_answered)

    @property
    def is_answered(self) -> bool:
        answer = self.attaching
        return (
            answer is not None
            and answer.done()
            and not answer.cancelled()
            and answer.exception() is None
        )

    def announce(self) -> commands.Basic.ConsumeOk | None:
        """Return consume-ok, once; None if the client waits for none.

        It is sent before all else of the consumer. A delivery that came with the shard's answer
        must not overtake it.
        """
        if self.group is not None:
            return self.group.announce()
        if self.announced:
            return None
        self.announced = self.attached = True
        return None if self.nowait else commands.Basic.ConsumeOk(self.tag)


class Getter(Consumer):
    """The pseudo consumer of a channel at one shard, which holds what basic.get took there."""

    __slots__ = ("_queues", "_queues_max")

    def __init__(self, channel: ConsumingChannel, number: int, shard: int) -> None:
        super().__init__(channel, number, "")
        self.shard = shard
        self._queues: dict[int, int] = {}  # the id of the queue by tag, of settled ones too
        self._queues_max = TAGS_REMEMBERED

    def took(self, tag: int, queue_id: int) -> None:
        """Remember the queue of a delivery; forget those that were settled, now and then."""
        self._queues[tag] = queue_id
        if len(self._queues) > self._queues_max:
            self._queues = {
                tag: self._queues[tag]
                for run in self.channel.unsettled()
                if run.consumer is self
                for tag in range(run.first_tag, run.last_tag + 1)
            }
            self._queues_max = TAGS_REMEMBERED + 2 * len(self._queues)

    def runs_of(self, queue_id: int) -> Iterator[Run[Consumer]]:
        for run in self.channel.unacked.of(self):
            for tag in range(run.first_tag, run.last_tag + 1):
                if self._queues[tag] == queue_id:
                    yield run._replace(first_tag=tag, last_tag=tag)

    def queues_of(self, run: Run[Consumer]) -> Iterable[int]:
        return {self._queues[tag] for tag in range(run.first_tag, run.last_tag + 1)}


class GroupConsumer:
    """A consumer of a virtual queue. `limit` is the prefetch of all its assignments together."""

    def __init__(self, channel: ConsumingChannel, number: int, tag: str) -> None:
        self.channel = channel
        self.client = channel.client
        self.number = number
        self.tag = tag
        self.exchange = ""
        self.terms = ConsumeTerms("", "", False, 0, False, "", 0, "")
        self.handover_s = 0.0  # how long unsettled deliveries of a shard that moves are waited for
        self.read_from: ReadFrom | None = None  # where to begin, if its shard queues are streams
        self.joining: asyncio.Future[Answer] | None = None
        self.announced = False
        self.nowait = False
        self.no_ack = False
        self.left = False  # was cancelled, or its channel is gone
        self.assignments: dict[AssignmentName, Assignment] = {}
        self.limit = Limit()

    @property
    def is_let_in(self) -> bool:
        """Return whether the controller has let it in."""
        joining = self.joining
        return (
            joining is not None
            and joining.done()
            and not joining.cancelled()
            and not joining.result().code
        )

    def announce(self) -> commands.Basic.ConsumeOk | None:
        """Return consume-ok, as Consumer does."""
        if self.announced:
            return None
        self.announced = True
        for assignment in self.assignments.values():
            assignment.announced = True
        return None if self.nowait else commands.Basic.ConsumeOk(self.tag)


class Assignment(Consumer):
    """The share that a group consumer has of one shard queue."""

    __slots__ = ("bounds", "leaving", "name", "settled", "wanted")

    def __init__(self, group: GroupConsumer, number: int, name: AssignmentName) -> None:
        super().__init__(group.channel, number, group.tag)
        self.group: GroupConsumer = group
        self.name = name
        self.bounds: Bounds = FREE
        self.announced = group.announced
        self.no_ack = group.no_ack
        self.priority = group.terms.priority
        self.affinity = group.terms.affinity
        self.prefetch = group.limit.most
        self.group_limit = group.limit
        self.wanted = True  # is to be attached
        self.leaving = False  # is about to be given up
        self.held = self.counted = 0
        self.settled = asyncio.Event()  # it holds nothing, while it is leaving

    @property
    def is_wanted(self) -> bool:
        return self.wanted
