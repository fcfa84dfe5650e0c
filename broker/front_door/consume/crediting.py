"""Carry out what credit.py decides: open and close allotments, and tell the shards.

An allotment belongs to one consumer on a channel with a limit, or to all assignments of a group
consumer at one shard. The allotments of a group consumer are there without a limit too: a limit of
the channel may come later, and both sides must have counted the same deliveries then.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardmq.broker.front_door.consume.consumers import (
    Assignment,
    Clock,
    Consumer,
    ConsumingChannel,
    GroupConsumer,
)
from shardmq.broker.front_door.consume.credit import Allotment, Limit
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.shardd.wire import messages as wire


class Crediting:
    """The allotments of all consumers of this front door."""

    def __init__(self, links: ShardLinks, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._open: dict[int, dict[int, Allotment]] = {}  # by number, then by shard
        self._waiting: dict[Limit, None] = {}  # whose free credit waits for a batch
        links.on_acks_waited = self._acks_waited
        links.share_freed = self._share_freed

    # -- consumers come and go -------------------------------------------------------------------

    def attach(self, consumer: Consumer) -> None:
        """Open the allotment of a consumer that is about to be attached, if it needs one."""
        consumer.delivered = 0
        group, limits = consumer.group, limits_over(consumer)
        if group is None:
            self.close(consumer)
            if limits:
                consumer.allotment = self._open_one(consumer.number, consumer.shard)
                consumer.allotment.put_under(limits)
        elif (found := self._found(group.number, consumer.shard)) is not None:
            consumer.allotment = found
            self._put_under(found, limits)
        else:
            consumer.allotment = self._open_one(group.number, consumer.shard)
            consumer.allotment.put_under(limits)

    def _open_one(self, number: int, shard: int, used: int = 0) -> Allotment:
        allotment = Allotment(number, shard, used)
        self._open.setdefault(number, {})[shard] = allotment
        return allotment

    def _found(self, number: int, shard: int) -> Allotment | None:
        return self._open.get(number, {}).get(shard)

    def close(self, consumer: Consumer) -> None:
        """Take the credit of a consumer that gets nothing any more.

        The assignments of a group consumer leave it to the others at their shard.
        """
        if consumer.group is None and consumer.allotment is not None:
            self._close(consumer.allotment)
            consumer.allotment = None

    def stopped(self, assignment: Assignment) -> None:
        """Ask again for credit that the queue of this assignment was about to use or give back."""
        allotment = assignment.allotment
        if allotment is not None and allotment.mode == wire.DRAIN and allotment.unused:
            self._tell([allotment])
            self._links.wait_for_acks()  # as in forget_held

    def close_group(self, group: GroupConsumer) -> None:
        """Take the credit of a group consumer that has no assignment any more."""
        for allotment in self._of(group):
            self._links.allot(allotment.shard, allotment.number, 0, wire.CLOSE)
            self._close(allotment)

    def _of(self, group: GroupConsumer) -> list[Allotment]:
        return [*self._open.get(group.number, {}).values()]

    def drop(self, consumer: Consumer) -> None:
        """Take the credit of a consumer whose channel is gone."""
        if consumer.group is None and consumer.allotment is not None:
            self._forget(consumer.allotment)
            consumer.allotment = None

    def _close(self, allotment: Allotment) -> None:
        homes = allotment.limits[-1:]
        self._forget(allotment)
        for home in homes:
            self.share(home)
        self._links.wait_for_acks()  # as in forget_held

    def _forget(self, allotment: Allotment) -> None:
        of_number = self._open.get(allotment.number, {})
        of_number.pop(allotment.shard, None)
        if not of_number:
            self._open.pop(allotment.number, None)
        allotment.put_under(())

    def lose(self, shard: int, consumers: Iterable[Consumer]) -> None:
        """Take the credit of all consumers at a shard whose process is gone.

        Deliveries to assignments will come again, so the unsettled ones count no more.
        """
        homes: dict[Limit, None] = {}
        for allotment in [each[shard] for each in self._open.values() if shard in each]:
            homes |= dict.fromkeys(allotment.limits[-1:])
            self._forget(allotment)
        for consumer in consumers:
            if consumer.shard == shard:
                consumer.allotment = None
                if isinstance(consumer, Assignment):
                    self.forget_held(consumer)
        for home in homes:
            self.share(home)

    def forget_held(self, assignment: Assignment) -> None:
        """Count no more what an assignment holds; its shard has requeued or lost it."""
        assignment.group.limit.unacked -= assignment.counted
        assignment.counted = 0
        self.freed(assignment.group.limit)
        self.freed(assignment.channel.limit)
        # Perhaps no pass of the loop is under way whose end would tell the shards.
        self._links.wait_for_acks()

    def freed(self, limit: Limit) -> None:
        """Give credit that was freed to whoever needs it, at the end of the pass of the loop.

        So all acks of a pass free one piece of credit.
        """
        if limit.most:
            self._links.freed[limit] = None

    def _share_freed(self) -> None:
        limits = list(self._links.freed)
        self._links.freed.clear()
        for limit in limits:
            if limit.free >= limit.waits_for and limit.may_share:
                self.share(limit)

    # -- what a limit gives ----------------------------------------------------------------------

    def delivered(self, allotment: Allotment, count: int, no_ack: bool) -> None:
        """Note deliveries of an allotment. Those without acks are settled at once."""
        if (allotment.use(count) or no_ack) and allotment.limits:
            self.freed(allotment.home)

    def report(self, shard: int, report: wire.CreditReport) -> None:
        """Note what a shard says of an allotment."""
        allotment = self._found(report.allotment, shard)
        if allotment is not None:
            allotment.reported(report.used, report.waits)
            if allotment.limits:
                self.share(allotment.home)

    def share(self, limit: Limit, at_once: bool = False) -> None:
        """Give free credit to whoever needs it."""
        shared = limit.share(self._clock.now, at_once)
        self._tell(shared.told)
        if shared.waits:
            self._waiting[limit] = None
            self._links.wait_for_acks()

    def _acks_waited(self) -> None:
        """Give credit that has waited long enough for a batch."""
        self._share_freed()
        waiting, self._waiting = self._waiting, {}
        for limit in waiting:
            self.share(limit, at_once=True)

    def change_limit(self, channel: ConsumingChannel, most: int) -> None:
        """Set the limit of a channel (basic.qos global)."""
        was, channel.limit.most = channel.limit.most, most
        if bool(was) != bool(most):
            for consumer in channel.consumers.values():
                if isinstance(consumer, Consumer) and consumer.is_in_limit:
                    if consumer.allotment is None:
                        number, shard = consumer.number, consumer.shard
                        consumer.allotment = self._open_one(number, shard, consumer.delivered)
                    self._put_under(consumer.allotment, limits_of(channel))
            for group in channel.groups.values():
                for allotment in self._of(group):
                    self._put_under(allotment, limits_of(channel, group))
        if most:
            self._tell(channel.limit.change(most))
        for limit in (channel.limit, *(group.limit for group in channel.groups.values())):
            self.share(limit)

    def _put_under(self, allotment: Allotment, limits: tuple[Limit, ...]) -> None:
        if allotment.limits != limits and allotment.put_under(limits):
            self._tell([allotment])

    def _tell(self, told: Iterable[Allotment]) -> None:
        for each in told:
            self._links.allot(each.shard, each.number, each.allowed, each.mode)


def limits_of(channel: ConsumingChannel, group: GroupConsumer | None = None) -> tuple[Limit, ...]:
    """Return the limits that consumers share with others, the innermost first."""
    limits = [channel.limit] if group is None else [group.limit, channel.limit]
    return tuple(limit for limit in limits if limit.most)


def limits_over(consumer: Consumer) -> tuple[Limit, ...]:
    """Return the limits that a consumer shares with others."""
    return limits_of(consumer.channel, consumer.group) if consumer.is_in_limit else ()
