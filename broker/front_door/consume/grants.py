"""Limits that consumers at several shards share.

There are two: the limit of a channel (basic.qos global), and the prefetch of a group consumer.

Consumers of a channel with a limit get deliveries only for grants. A shard asks for grants when it
has messages, and gets some while there is room: one question and one grant for several messages.

The assignments of a group consumer are lent its prefetch. Each has a piece of its own, and those
at one shard use their pieces together (shardd/queues/consumers.py), so that nothing is asked or
granted while all of them are busy. Where the credit is used up, one of them asks for more. Where
nothing is left, the others are told to give back what they do not use, or what is above the share
of their shard. The sum of the pieces never exceeds the prefetch. On a channel with a limit,
assignments live by grants like other consumers.

Acks wait at the front door for each other. When they free enough credit for a batch, all of it
goes to one shard, in rotation, and the others whose acks are among them are lent as much less
(`rotate`).

Who asked first gets first, so that a small limit is shared in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Protocol

from shardmq.broker.front_door.consume.consumers import (
    Assignment,
    Consumer,
    ConsumingChannel,
    GroupConsumer,
)
from shardmq.broker.front_door.consume.settling import acks_together
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.shardd.wire import messages as wire

# One grant lets this many messages through at most, so that no consumer of the channel waits long
# for its turn. It may be more where the limit is large, so that the cost of a grant stays small
# beside the cost of its messages.
GRANT_MAX = 64
GRANTS_OF_LIMIT = 4
# Each shard that waits for the credit of a group consumer has its turn within this time. A shard
# that goes on has what it needs in the caches of its processor; a shard that is woken in between
# fetches all of it again, which takes half a millisecond. A turn is at least a batch of acks.
ROUND_S = 0.08


class Limited(Protocol):
    """A channel or a group consumer with at most `limit` deliveries on their way or unsettled."""

    limit: int  # 0 is any number
    outstanding: int
    granted: int


class Grants:
    """Give the credit of shared limits to the consumers of this front door."""

    def __init__(self, links: ShardLinks) -> None:
        self._links = links

    def change_limit(
        self, channel: ConsumingChannel, limit: int, consumers: Iterable[Consumer]
    ) -> None:
        """Set the limit of a channel (basic.qos global), which holds for these consumers."""
        was, channel.limit = channel.limit, limit
        if bool(was) != bool(limit):
            for consumer in consumers:
                self.drop(consumer)
                if isinstance(consumer, Assignment) and consumer.group.limit:
                    consumer.lent = limit == 0
                    self._hold(consumer)
                    consumer.prefetch = consumer.granted if consumer.lent else consumer.group.limit
                self._links.tell(
                    consumer.shard,
                    wire.Tune(consumer.number, consumer.prefetch, limit > 0, consumer.lent),
                )
        self.share(channel)

    def begin(self, consumer: Consumer) -> None:
        """Decide, before a consumer is attached, its prefetch and whether it is lent to it."""
        self.drop(consumer)
        if isinstance(consumer, Assignment):
            consumer.lost = consumer.held
        if isinstance(consumer, Assignment) and consumer.group.limit:
            group = consumer.group
            consumer.lent = not consumer.channel.limit
            if consumer.lent:
                without = sum(
                    1
                    for assignment in group.assignments.values()
                    if assignment.wanted and not assignment.granted
                )
                room = (
                    max(0, group.limit - group.granted) if self._links.is_up(consumer.shard) else 0
                )
                self._lend(consumer, room // max(1, without))
            consumer.prefetch = consumer.granted if consumer.lent else group.limit

    def ungranted(self, consumer: Consumer, count: int, wants: bool) -> None:
        """Take grants that a shard gave back, and give some when the shard `wants` any."""
        if isinstance(consumer, Assignment) and consumer.lent:
            short = min(count - consumer.granted, consumer.lowered)
            if short > 0:
                self._make_good(consumer, short)
        if consumer.lent or consumer.channel.limit:
            self.use(consumer, count)
            if wants:
                consumer.channel.wanting[consumer] = None
            self.share(consumer.channel)

    @staticmethod
    def use(consumer: Consumer, count: int) -> None:
        """Use up grants of the consumer, at most as many as it has.

        Deliveries that were on their way when the limit came or went used no grant.
        """
        used = min(count, consumer.granted)
        consumer.granted -= used
        if not consumer.lent:
            consumer.channel.granted -= used
        if consumer.group is not None:
            consumer.group.granted -= used

    def drop(self, consumer: Consumer) -> None:
        """Take all grants from a consumer that gets nothing, gets everything, or begins anew."""
        self.use(consumer, consumer.granted)
        consumer.channel.wanting.pop(consumer, None)
        if isinstance(consumer, Assignment):
            consumer.recalled = None
            consumer.lowered = 0

    def stopped(self, consumer: Consumer) -> None:
        """Take the grants of a consumer that gets nothing any more.

        What an assignment holds stays in use of the lent prefetch.
        """
        self.drop(consumer)
        if isinstance(consumer, Assignment):
            self._hold(consumer)
            self._cover_others(consumer)
        self.share(consumer.channel)

    def gone(self, assignment: Assignment) -> None:
        """Take the credit of an assignment whose queue is gone; what it holds counts no more."""
        self._links.tell_settled(assignment.shard)  # the acks that wait free credit of others
        self.drop(assignment)
        self._cover_others(assignment)

    def away(self, consumer: Consumer) -> None:
        """Take the grants of a consumer whose shard is gone.

        What is unsettled of that shard will come again.
        """
        self.drop(consumer)
        if isinstance(consumer, Assignment):
            consumer.lost = consumer.held
            consumer.group.rotation.pop(consumer.shard, None)
            if consumer.lent:
                consumer.prefetch = 0  # if the next process has to be asked again to attach it

    def settled(self, assignment: Assignment, count: int) -> None:
        """Free the credit of settled deliveries of an assignment that is stopped."""
        if assignment.lent:
            self.use(assignment, count)
            self.share(assignment.channel)

    def rotate(self, group: GroupConsumer, now: float) -> None:
        """Give the credit that acks of this group consumer free to one shard.

        This is called when acks were added to those that wait, and does nothing until they are
        worth a batch: few large pieces cost less than many small ones. Of the shards that want
        credit, the one that had a turn longest ago gets it. Until a turn is over the credit goes to
        the shard whose turn it is, as long as that shard wants it.
        """
        links, number = self._links.links, group.number
        rooms = [links[shard].settles.room_made(number) for shard in group.rotation]
        if sum(rooms) < acks_together(group.limit, False):
            if now >= group.turn_ends and not group.turn_is_over:
                self._end_turn(group)
            return
        if (
            now < group.turn_ends
            and not any(rooms[:-1])
            and self._goes_on(group.rotation[next(reversed(group.rotation))])
        ):
            return
        whose: Assignment | None = None
        others, moved = False, 0
        for shard in self._in_turn(group, now):
            settles = links[shard].settles
            room = settles.room_made(number)
            if room > 0 or settles.lowered(number) or self._wants(group, shard):
                assignment = self._user(group, shard)
                if assignment is not None and whose is None:
                    whose = assignment
                elif assignment is not None:
                    others = True
                    moved += self._lower(assignment, room)
        if whose is not None:
            links[whose.shard].settles.fall_due()
            if others:
                self._take_turn(whose, moved, now)

    def _goes_on(self, assignment: Assignment | None) -> bool:
        """Return whether the turn of this assignment's shard goes on.

        All acks that wait are the shard's own, and it was told how long its turn lasts.
        """
        if assignment is None or not assignment.rotates:
            return False
        self._links.links[assignment.shard].settles.fall_due()
        return True

    @staticmethod
    def _in_turn(group: GroupConsumer, now: float) -> list[int]:
        """Return the shards: first the one whose turn is not over, then by how long ago it was."""
        shards = list(group.rotation)
        if now < group.turn_ends:
            shards.insert(0, shards.pop())
        return shards

    def _take_turn(self, assignment: Assignment, moved: int, now: float) -> None:
        """Give the turn, and `moved` more credit, to the shard of this assignment.

        Reductions that the shard has not been told yet are cancelled first, so that it hears one
        number.
        """
        group, shard = assignment.group, assignment.shard
        group.turn_is_over = False
        if now >= group.turn_ends or shard != next(reversed(group.rotation)):
            group.turn_ends = now + ROUND_S / len(group.rotation)
        settles = self._links.links[shard].settles
        back = settles.raise_again(group.number, assignment.number, moved)
        self._add(assignment, moved)
        settles.lend(assignment.number, moved - back, ceil((group.turn_ends - now) * 1000))
        group.rotation[shard] = group.rotation.pop(shard)

    def _end_turn(self, group: GroupConsumer) -> None:
        """End a turn that no other follows, because acks only trickle.

        Shards that asked before this turn must not wait for the credit that it has got.
        """
        group.turn_is_over = True
        if any(each.group is group for each in group.channel.wanting):
            self._recall(group)

    @staticmethod
    def _wants(group: GroupConsumer, shard: int) -> bool:
        return any(each.shard == shard and each.group is group for each in group.channel.wanting)

    @staticmethod
    def _user(group: GroupConsumer, shard: int) -> Assignment | None:
        """Return the assignment by which that shard is lent credit in the rotation."""
        assignment = group.rotation[shard]
        if assignment is None or not assignment.rotates:
            found = (
                each for each in group.assignments.values() if each.shard == shard and each.rotates
            )
            assignment = group.rotation[shard] = next(found, None)
        return assignment

    def _lower(self, assignment: Assignment, room: int) -> int:
        """Lower the credit of a shard by what the acks that wait there free; return how much."""
        left = room
        for each in (
            (assignment, *assignment.group.assignments.values())
            if assignment.granted < room
            else (assignment,)
        ):
            count = min(each.granted, left)
            if count > 0 and each.shard == assignment.shard and each.rotates:
                left -= count
                each.lowered += count
                self.use(each, count)
                self._links.links[assignment.shard].settles.lower(
                    assignment.group.number, each.number, count
                )
        return max(0, room) - max(0, left)

    def _make_good(self, assignment: Assignment, count: int) -> None:
        """Lower the other assignments of the shard in place of this one.

        This one gave credit back while it was being lowered by that same credit.
        """
        settles = self._links.links[assignment.shard].settles
        for other in assignment.group.assignments.values():
            some = min(other.granted, count)
            if (
                some > 0
                and other is not assignment
                and other.shard == assignment.shard
                and other.rotates
            ):
                count -= some
                other.lowered += some
                self.use(other, some)
                settles.lower(assignment.group.number, other.number, some)
                self._add(assignment, some)
                settles.lend(assignment.number, some)

    def share(self, channel: ConsumingChannel) -> None:
        """Give the room there is to the consumers that asked for grants."""
        waiting = len(channel.wanting)
        crowded: dict[GroupConsumer, None] = {}
        for consumer in list(channel.wanting):
            group = consumer.group
            if consumer.lent and group is not None:
                room = (group.limit - group.granted) // waiting or min(
                    1, group.limit - group.granted
                )
                if room <= 0:
                    crowded[group] = None
            else:
                room = self._room(consumer, waiting)
            if room > 0:
                del channel.wanting[consumer]
                self._give(consumer, room)
            waiting -= 1
        for group in crowded:
            self._recall(group)

    @staticmethod
    def _room(consumer: Consumer, waiting: int) -> int:
        """Return how much one grant may let through, so that others that wait get as much."""
        limits: list[Limited] = [consumer.channel]
        if consumer.group is not None and consumer.group.limit:
            limits.append(consumer.group)
        room = min(limit.limit - limit.outstanding - limit.granted for limit in limits)
        most = max(GRANT_MAX, min(limit.limit for limit in limits) // GRANTS_OF_LIMIT)
        return max(1, min(most, room // waiting)) if room > 0 else 0

    def _give(self, consumer: Consumer, count: int) -> None:
        if isinstance(consumer, Assignment) and consumer.lent:
            self._lend(consumer, count)
        else:
            consumer.granted += count
            consumer.channel.granted += count
            if consumer.group is not None:
                consumer.group.granted += count
        self._links.tell(consumer.shard, wire.Grant(consumer.number, count))

    def _recall(self, group: GroupConsumer) -> None:
        """Recall lent credit, because nothing is left to lend and some assignments want it.

        Each shard that needs credit may keep its share by the number of its assignments, which use
        it together.
        """
        shards: dict[int, list[Assignment]] = {}
        for assignment in group.assignments.values():
            if assignment.wanted:
                shards.setdefault(assignment.shard, []).append(assignment)
        wanting = group.channel.wanting
        users = [
            assignments
            for assignments in shards.values()
            if any(assignment.granted or assignment in wanting for assignment in assignments)
        ]
        count = sum(map(len, users))
        # The remainder stays where it is. It must not go round for ever.
        all_have = all(
            any(assignment.granted for assignment in assignments) for assignments in users
        )
        for assignments in users:
            share = group.limit * len(assignments)
            left = -(-share // count) if all_have else share // count
            for assignment in assignments:
                if assignment.granted:
                    keep = min(assignment.granted, left)
                    left -= keep
                    if assignment.recalled != keep:
                        assignment.recalled = keep
                        self._links.tell(assignment.shard, wire.Recall(assignment.number, keep))

    def _lend(self, assignment: Assignment, count: int) -> None:
        assignment.recalled = None
        self._add(assignment, count)

    @staticmethod
    def _add(assignment: Assignment, count: int) -> None:
        assignment.granted += count
        assignment.group.granted += count
        assignment.group.rotation.setdefault(assignment.shard, assignment)

    def _cover_others(self, assignment: Assignment) -> None:
        """Lend to the others at its shard what they use of the credit that it had.

        This includes others that are about to stop.
        """
        others = [
            each
            for each in assignment.group.assignments.values()
            if each.shard == assignment.shard and each is not assignment
        ]
        used = sum(each.held - each.lost for each in others) - sum(each.granted for each in others)
        users = [each for each in others if each.held > each.lost and each.lent]
        if used > 0 and users:
            user = next((each for each in users if each.wanted), None)
            if user is not None:
                self._give(user, used)
            else:
                self._lend(users[0], used)

    def _hold(self, assignment: Assignment) -> None:
        if assignment.lent:
            self._lend(assignment, max(0, assignment.held - assignment.lost))
