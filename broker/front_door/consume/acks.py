"""Acks, rejects and requeues: which deliveries they settle, and what the shards are told.

Which delivery tag is which delivery of which shard is kept by unacked.py; how long acks wait for
each other before a shard is told is decided by settling.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from shardmq.broker.amqp import ChannelException
from shardmq.broker.front_door.consume.consumers import (
    Assignment,
    Consumer,
    ConsumingChannel,
    Settle,
)
from shardmq.broker.front_door.consume.credit import Limit
from shardmq.broker.front_door.consume.crediting import Crediting
from shardmq.broker.front_door.consume.group_consumer import GroupConsuming
from shardmq.broker.front_door.consume.settling import NO_HURRY, acks_together
from shardmq.broker.front_door.consume.unacked import Run, UnknownTag, subsumed
from shardmq.broker.front_door.links.settled_waits import Waiting
from shardmq.broker.front_door.links.shard_link import ShardLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.model.catalog import Catalog
from shardmq.shardd.wire import messages as wire

ACK = (60, 80)
NACK = (60, 120)
# Deliveries that are listed of one queue.
UNACKED_LISTED_MAX = 1_000

# Kind, first tag, last tag, whether it is cumulative: an event of the AMQP library.
Range = tuple[int, int, int, bool]

# By shard and its epoch: the ids of queues in which something is settled for good.
Kept = dict[tuple[int, int], set[int]]


class Acks:
    """All settling of this front door."""

    def __init__(self, links: ShardLinks, crediting: Crediting, groups: GroupConsuming) -> None:
        self._links = links
        self._crediting = crediting
        self._groups = groups

    def settle(self, channel: ConsumingChannel, ranges: list[Range]) -> None:
        """Settle what a client acknowledged, rejected or requeued, in order.

        In a transaction the settles are held until it is committed. Raises ChannelException for a
        tag that is not outstanding; what was said before it is settled.
        """
        for kind, runs in _taken(channel, ranges):
            if channel.transaction is not None:
                count = sum(run.last_tag - run.first_tag + 1 for run in runs)
                channel.transaction.settle((kind, runs), count)
            else:
                self.settle_runs(kind, runs)

    def settle_runs(self, kind: int, runs: list[Run[Consumer]], at_once: bool = False) -> None:
        """Settle deliveries of one channel.

        `at_once` is said of those of a transaction, when it is committed: acks wait for no others.
        """
        limits: dict[Limit, None] = {}
        for run in runs:
            consumer = run.consumer
            count = run.last_tag - run.first_tag + 1
            last = run.first_number + count - 1
            if kind == wire.ACK:
                consumer.channel.acked += count
            self._tell_shard(kind, run, last, at_once)
            reading = consumer.reading
            if kind == wire.REQUEUE and reading is not None and run.epoch == reading.epoch:
                reading.give_back(run.first_number, last)
            # What basic.get took does not count.
            if consumer.tag and consumer.is_in_limit:
                consumer.channel.limit.unacked -= count
                if consumer.group is not None:
                    assert isinstance(consumer, Assignment)
                    self._groups.settled(consumer, count, run.epoch)
                    limits[consumer.group.limit] = None
        if runs:
            limits[runs[0].consumer.channel.limit] = None
        for limit in limits:
            self._crediting.freed(limit)

    def are_outstanding(self, kept: Kept) -> bool:
        """Return whether the shards still wait for the settles of all these queues.

        A shard that is away, or that has started anew, has requeued what it had delivered.
        """
        return all(self._link(shard, epoch) is not None for shard, epoch in kept)

    def make_last(self, kept: Kept, waiting: Waiting) -> None:
        """Have the shards make last what was settled in these queues.

        `waiting` is told once for each shard: `confirmed`, or `lost` if it may come again.
        """
        for (shard, epoch), queues in kept.items():
            if (link := self._link(shard, epoch)) is None:
                waiting.lost()
            else:
                link.tell(link.settled_waits.ask(sorted(queues), waiting))

    def _link(self, shard: int, epoch: int) -> ShardLink | None:
        """Return the link to a shard, if the process of this epoch is there."""
        link = self._links.links[shard]
        return link if link.up and link.epoch == epoch else None

    def _tell_shard(self, kind: int, run: Run[Consumer], last: int, at_once: bool) -> None:
        """Tell the shard now or soon."""
        consumer, epoch, first = run.consumer, run.epoch, run.first_number
        shard, number = consumer.shard, consumer.number
        if kind != wire.ACK or at_once:
            self._links.settle(shard, epoch, number, kind, first, last)
        elif consumer.group is not None and not consumer.affinity:
            self._links.ack(shard, epoch, number, first, last, NO_HURRY)
        else:
            together = acks_together(consumer.prefetch, consumer.affinity)
            self._links.ack(shard, epoch, number, first, last, together)

    def recover(self, channel: ConsumingChannel) -> None:
        """Requeue all unacknowledged deliveries of the channel (basic.recover)."""
        self.settle_runs(wire.REQUEUE, channel.unacked.take_through(0))


def kept_by(settles: Iterable[Settle], catalog: Catalog) -> Kept:
    """Return the queues in which these settles last: those that are durable, and no streams.

    A message that goes back to its queue needs no more than the queue has already. A queue that the
    catalog does not know by this id may be the former life of one that moves.
    """
    kept: Kept = {}
    for kind, runs in settles:
        for run in runs if kind != wire.REQUEUE else ():
            consumer = run.consumer
            for queue_id in consumer.queues_of(run):
                queue = catalog.queue_by_id(queue_id)
                if consumer.reading is None and (queue is None or queue.durable):
                    kept.setdefault((consumer.shard, run.epoch), set()).add(queue_id)
    return kept


def _taken(
    channel: ConsumingChannel, ranges: list[Range]
) -> Iterator[tuple[int, list[Run[Consumer]]]]:
    unacked = channel.unacked
    try:
        for kind, first, last, multiple in subsumed(ranges, unacked.has):
            if multiple:
                yield kind, unacked.take_through(first)
            else:
                for run in unacked.take(first, last):
                    yield kind, [run]
    except UnknownTag as unknown:
        # Whether it was nack or reject nobody knows any more.
        ids = ACK if kind == wire.ACK else NACK
        raise ChannelException(406, f"unknown delivery tag {unknown.tag}", *ids) from None


def listed(consumers: Iterable[Consumer], queue_id: int, now: float) -> list[dict[str, Any]]:
    """Return the first deliveries of a queue that wait for their ack. `now` is loop time.

    What basic.get took has no consumer tag, here and in `holders`.
    """
    found = (
        {
            "owner": consumer.client.session.owner,
            "channel": consumer.channel.number,
            "consumer_tag": consumer.tag,
            "delivery_tag": tag,
            "unacked_for": int((now - run.at) * 1000),
        }
        for consumer in consumers
        for run in consumer.runs_of(queue_id)
        for tag in range(run.first_tag, run.last_tag + 1)
    )
    return [*itertools.islice(found, UNACKED_LISTED_MAX)]


def holders(consumers: Iterable[Consumer], queue_id: int, now: float) -> list[dict[str, Any]]:
    """Return how many deliveries of a queue each holder has not acknowledged, all counted.

    `now` is loop time; `unacked_for` is the age of the oldest delivery in milliseconds.
    """
    return [
        {
            "owner": consumer.client.session.owner,
            "channel": consumer.channel.number,
            "consumer_tag": consumer.tag,
            "messages_unacknowledged": sum(run.last_tag - run.first_tag + 1 for run in runs),
            "unacked_for": int((now - min(run.at for run in runs)) * 1000),
        }
        for consumer in consumers
        if (runs := [*consumer.runs_of(queue_id)])
    ]
