"""Limits that several consumers at several shards share: of a channel (basic.qos global), and of a virtual consumer.

Consumers of a channel with a limit get deliveries only for grants, asked for by the shard when it has some, given while
there is room: one question and one grant for each few messages.

The parts of a virtual consumer are lent its prefetch: each has a piece of its own, and what those at one shard have
they use together (shardd/queues/consumers.py), so that nothing is asked or granted while all of them are busy. Where
that is used up one of them asks for more; where nothing is left, the others are told to give back what they do not use,
or what is above the share of their shard. The sum of the pieces never exceeds the limit. On a channel with a limit they
live by grants like the others.

Acks wait at the front door for each other. When they make room for a batch, all of it goes to one shard, in turn, and
the others whose acks are among them are lent as much less (`take_turns`).

Whoever asked first gets first, so that a small limit is shared in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING, Protocol

from shardmq.broker.front_door.consume.consumers import Consumer, Part, Virtual
from shardmq.broker.front_door.consume.settling import acks_together
from shardmq.shardd.wire import messages as wire

if TYPE_CHECKING:
    from shardmq.broker.front_door.connection.channel import Channel
    from shardmq.broker.front_door.links.shard_links import ShardLinks

# How many messages one grant lets through at most, so that no consumer of the channel waits long for its turn; more
# where the limit is large, so that a grant's own cost stays small beside that of its messages.
GRANT_MAX = 64
GRANTS_OF_LIMIT = 4
# Of a virtual consumer each shard that waits for its turn has it within so long: one that goes on has in the caches of
# its processor what it needs, and each that is woken in between fetches all of that again, which takes half a
# millisecond. At the least a turn is a batch of acks.
ROUND_S = 0.08


class Limited(Protocol):
    """A channel or a virtual consumer: together at most `limit` deliveries on their way or unsettled, 0: any number."""

    limit: int
    outstanding: int
    granted: int


class Grants:
    def __init__(self, links: ShardLinks) -> None:
        self._links = links

    def change_limit(self, channel: Channel, limit: int, consumers: Iterable[Consumer]) -> None:
        """basic.qos with global set; `consumers`: all the channel has."""
        was, channel.limit = channel.limit, limit
        if bool(was) != bool(limit):
            for consumer in consumers:
                self.drop(consumer)
                if isinstance(consumer, Part) and consumer.whole.limit:
                    consumer.lent = limit == 0
                    self._hold(consumer)
                    consumer.prefetch = consumer.granted if consumer.lent else consumer.whole.limit
                self._links.tell(
                    consumer.shard,
                    wire.Tune(consumer.number, consumer.prefetch, limit > 0, consumer.lent),
                )
        self.share(channel)

    def begin(self, consumer: Consumer) -> None:
        """Before it is attached: whether it lives by grants (`lent` or the channel has a limit), and its prefetch."""
        self.drop(consumer)
        if isinstance(consumer, Part):
            consumer.lost = consumer.held
        if isinstance(consumer, Part) and consumer.whole.limit:
            whole = consumer.whole
            consumer.lent = not consumer.channel.limit
            if consumer.lent:
                without = sum(
                    1 for part in whole.parts.values() if part.wanted and not part.granted
                )
                room = (
                    max(0, whole.limit - whole.granted) if self._links.is_up(consumer.shard) else 0
                )
                self._lend(consumer, room // max(1, without))
            consumer.prefetch = consumer.granted if consumer.lent else whole.limit

    def ungranted(self, consumer: Consumer, count: int, wants: bool) -> None:
        """Grants given back, or asked for."""
        if isinstance(consumer, Part) and consumer.lent:
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
        """At most those it has: what was on its way when the limit went or came is not of these."""
        used = min(count, consumer.granted)
        consumer.granted -= used
        if not consumer.lent:
            consumer.channel.granted -= used
        if consumer.whole is not None:
            consumer.whole.granted -= used

    def drop(self, consumer: Consumer) -> None:
        """It gets nothing any more, or everything, or begins anew."""
        self.use(consumer, consumer.granted)
        consumer.channel.wanting.pop(consumer, None)
        if isinstance(consumer, Part):
            consumer.recalled = None
            consumer.lowered = 0

    def stopped(self, consumer: Consumer) -> None:
        """It gets nothing any more; of a lent prefetch what it holds stays in use."""
        self.drop(consumer)
        if isinstance(consumer, Part):
            self._hold(consumer)
            self._cover_others(consumer)
        self.share(consumer.channel)

    def gone(self, part: Part) -> None:
        """With its queue; what it holds is nobody's."""
        self._links.tell_settled(part.shard)  # what its acks were to make room for
        self.drop(part)
        self._cover_others(part)

    def away(self, consumer: Consumer) -> None:
        """Its shard is gone, and with it what it was to give. What is unsettled of that will come again."""
        self.drop(consumer)
        if isinstance(consumer, Part):
            consumer.lost = consumer.held
            consumer.whole.turns.pop(consumer.shard, None)
            if consumer.lent:
                consumer.prefetch = 0  # if the next process has to be asked again to attach it

    def settled(self, part: Part, count: int) -> None:
        """Of one that is stopped."""
        if part.lent:
            self.use(part, count)
            self.share(part.channel)

    def take_turns(self, whole: Virtual, now: float) -> None:
        """Acks of it were added to those that wait. When they are worth a batch, the room they make goes to one shard,
        of those that want it to who had it longest ago: few large pieces cost less than many small ones. Until a
        turn is over it goes to who has it, as long as that one wants it."""
        links, number = self._links.links, whole.number
        rooms = [links[shard].settles.room_made(number) for shard in whole.turns]
        if sum(rooms) < acks_together(whole.limit, False):
            if now >= whole.turn_ends and not whole.turn_is_over:
                self._end_turn(whole)
            return
        if (
            now < whole.turn_ends
            and not any(rooms[:-1])
            and self._goes_on(whole.turns[next(reversed(whole.turns))])
        ):
            return
        whose: Part | None = None
        others, moved = False, 0
        for shard in self._in_turn(whole, now):
            settles = links[shard].settles
            room = settles.room_made(number)
            if room > 0 or settles.lowered(number) or self._wants(whole, shard):
                part = self._user(whole, shard)
                if part is not None and whose is None:
                    whose = part
                elif part is not None:
                    others = True
                    moved += self._lower(part, room)
        if whose is not None:
            links[whose.shard].settles.fall_due()
            if others:
                self._take_turn(whose, moved, now)

    def _goes_on(self, part: Part | None) -> bool:
        """All acks are of whose turn it is, which was told how long it lasts; whether it is so."""
        if part is None or not part.takes_turns:
            return False
        self._links.links[part.shard].settles.fall_due()
        return True

    @staticmethod
    def _in_turn(whole: Virtual, now: float) -> list[int]:
        """Its shards; first whose turn is not over, then who had one longest ago."""
        shards = list(whole.turns)
        if now < whole.turn_ends:
            shards.insert(0, shards.pop())
        return shards

    def _take_turn(self, part: Part, moved: int, now: float) -> None:
        """It is its shard's, which gets so much more: first what it was to be lowered by, and was not told of yet."""
        whole, shard = part.whole, part.shard
        whole.turn_is_over = False
        if now >= whole.turn_ends or shard != next(reversed(whole.turns)):
            whole.turn_ends = now + ROUND_S / len(whole.turns)
        settles = self._links.links[shard].settles
        back = settles.raise_again(whole.number, part.number, moved)
        self._add(part, moved)
        settles.lend(part.number, moved - back, ceil((whole.turn_ends - now) * 1000))
        whole.turns[shard] = whole.turns.pop(shard)

    def _end_turn(self, whole: Virtual) -> None:
        """Acks trickle, and no turn follows: those that asked before it are not to wait for what it has got."""
        whole.turn_is_over = True
        if any(each.whole is whole for each in whole.channel.wanting):
            self._recall(whole)

    @staticmethod
    def _wants(whole: Virtual, shard: int) -> bool:
        return any(each.shard == shard and each.whole is whole for each in whole.channel.wanting)

    @staticmethod
    def _user(whole: Virtual, shard: int) -> Part | None:
        """The part by which that shard is lent its turns."""
        part = whole.turns[shard]
        if part is None or not part.takes_turns:
            found = (
                each for each in whole.parts.values() if each.shard == shard and each.takes_turns
            )
            part = whole.turns[shard] = next(found, None)
        return part

    def _lower(self, part: Part, room: int) -> int:
        """What its shard has, by as much as acks that wait there make room for; how much that was."""
        left = room
        for each in (part, *part.whole.parts.values()) if part.granted < room else (part,):
            count = min(each.granted, left)
            if count > 0 and each.shard == part.shard and each.takes_turns:
                left -= count
                each.lowered += count
                self.use(each, count)
                self._links.links[part.shard].settles.lower(part.whole.number, each.number, count)
        return max(0, room) - max(0, left)

    def _make_good(self, part: Part, count: int) -> None:
        """It gave back some, and was lowered by so much of that meanwhile: the others there are lowered instead."""
        settles = self._links.links[part.shard].settles
        for other in part.whole.parts.values():
            some = min(other.granted, count)
            if some > 0 and other is not part and other.shard == part.shard and other.takes_turns:
                count -= some
                other.lowered += some
                self.use(other, some)
                settles.lower(part.whole.number, other.number, some)
                self._add(part, some)
                settles.lend(part.number, some)

    def share(self, channel: Channel) -> None:
        """Give the room there is to the consumers that asked."""
        waiting = len(channel.wanting)
        crowded: dict[Virtual, None] = {}
        for consumer in list(channel.wanting):
            whole = consumer.whole
            if consumer.lent and whole is not None:
                room = (whole.limit - whole.granted) // waiting or min(
                    1, whole.limit - whole.granted
                )
                if room <= 0:
                    crowded[whole] = None
            else:
                room = self._room(consumer, waiting)
            if room > 0:
                del channel.wanting[consumer]
                self._give(consumer, room)
            waiting -= 1
        for whole in crowded:
            self._recall(whole)

    @staticmethod
    def _room(consumer: Consumer, waiting: int) -> int:
        """What one grant may let through now, so that the others that wait get as much."""
        limits: list[Limited] = [consumer.channel]
        if consumer.whole is not None and consumer.whole.limit:
            limits.append(consumer.whole)
        room = min(limit.limit - limit.outstanding - limit.granted for limit in limits)
        most = max(GRANT_MAX, min(limit.limit for limit in limits) // GRANTS_OF_LIMIT)
        return max(1, min(most, room // waiting)) if room > 0 else 0

    def _give(self, consumer: Consumer, count: int) -> None:
        if isinstance(consumer, Part) and consumer.lent:
            self._lend(consumer, count)
        else:
            consumer.granted += count
            consumer.channel.granted += count
            if consumer.whole is not None:
                consumer.whole.granted += count
        self._links.tell(consumer.shard, wire.Grant(consumer.number, count))

    def _recall(self, whole: Virtual) -> None:
        """Nothing is left to lend, and some want: as much may stay at each shard that needs it as is its share by the
        number of its parts, which use it together."""
        shards: dict[int, list[Part]] = {}
        for part in whole.parts.values():
            if part.wanted:
                shards.setdefault(part.shard, []).append(part)
        wanting = whole.channel.wanting
        users = [
            parts
            for parts in shards.values()
            if any(part.granted or part in wanting for part in parts)
        ]
        count = sum(map(len, users))
        # What is over stays where it is, and does not go round for ever.
        all_have = all(any(part.granted for part in parts) for parts in users)
        for parts in users:
            share = whole.limit * len(parts)
            left = -(-share // count) if all_have else share // count
            for part in parts:
                if part.granted:
                    keep = min(part.granted, left)
                    left -= keep
                    if part.recalled != keep:
                        part.recalled = keep
                        self._links.tell(part.shard, wire.Recall(part.number, keep))

    def _lend(self, part: Part, count: int) -> None:
        part.recalled = None
        self._add(part, count)

    @staticmethod
    def _add(part: Part, count: int) -> None:
        part.granted += count
        part.whole.granted += count
        part.whole.turns.setdefault(part.shard, part)

    def _cover_others(self, part: Part) -> None:
        """What the others at its shard use of what it had stays lent to them, also to those that are about to stop."""
        others = [
            each
            for each in part.whole.parts.values()
            if each.shard == part.shard and each is not part
        ]
        used = sum(each.held - each.lost for each in others) - sum(each.granted for each in others)
        users = [each for each in others if each.held > each.lost and each.lent]
        if used > 0 and users:
            user = next((each for each in users if each.wanted), None)
            if user is not None:
                self._give(user, used)
            else:
                self._lend(users[0], used)

    def _hold(self, part: Part) -> None:
        if part.lent:
            self._lend(part, max(0, part.held - part.lost))
