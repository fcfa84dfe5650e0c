"""Divide a limit of unacknowledged deliveries among the shards that deliver.

Theory. A *limit* holds over deliveries that come from several shards: basic.qos with `global`
holds over all consumers of a channel, the prefetch of a consumer of a virtual queue over all its
shard queues. The front door keeps the limit, because only the front door sees all acks. A shard
gets an *allotment*: one for each consumer on a channel with a limit, and one for all shard queues
of a group consumer at that shard. A limit is always

    most = free + allotted to shards and not used + delivered and not settled

so the client never holds more than `most`. The prefetch of a consumer of one queue needs none of
this: its shard counts deliveries and acks itself, and the two schemes add up if both hold.

An allotment is two numbers that only grow, as in AMQP 1.0 (link-credit and delivery-count), but
both absolute. `allowed` is the number of the last message that the shard may deliver. `used` is
the number of messages that it has delivered, or has given back undelivered. So messages that
cross on their way do no harm, and the last one that arrives is right. The front door says
`allowed` beside the acks (an ALLOT in a SETTLE). The shard says `used`, and whether messages wait
(CreditReport), only when the front door cannot know: the allotment is used up and messages wait;
no message waits any more; credit was given back. Acks free credit here and nowhere else, so
whoever acknowledges, any shard may have the credit.

The front door knows an allotment in one of these states:

    state     credit  what the shard has done     what the limit does
    idle      none    gave credit back, or never  nothing, until the shard says that messages wait
                      asked for any
    empty     none    used all of it              gives a share ahead, if no allotment is hungry
    hungry    none    said that messages wait     gives credit when the turn comes
    holding   some    may deliver                 nothing; if others are hungry and nothing is free,
                                                  says DRAIN
    draining  some    gives back what it cannot   waits
                      use at once

A hungry allotment that just asked gets its share: the limit divided by the number of allotments.
One that has used up a grant and is still hungry gets all that is free, as soon as that is worth a
batch, half of the limit or 1,000: few large pieces cost less than many small ones, and with less
than half a grant that was once divided would stay divided. Whoever became hungry first is first. It
keeps its turn for ROUND_S divided by the number of the hungry, so that the same caches stay warm,
and goes behind the others then. While it uses what it has, its turn goes on. A grant while others
are hungry says DRAIN at once: what is unused comes back behind the last delivery. STOP takes all
credit back at once: when the first limit comes, and when a limit is lowered below what is out.

What follows. Never too much: credit is only made of `free`. Never idle: while an allotment is
hungry, either nothing is free and nothing is unused elsewhere, or a message that changes this is
on its way, or acks wait ACKS_WAIT_S for a batch. Fair: a hungry allotment waits for one turn of
each other that is hungry, and for the acks of a batch. Cheap: between idle and the first delivery
lie at most four messages (a report, DRAIN to another shard, its report, a grant); from then on a
grant travels with the acks of a batch.

This file decides only. It knows no socket; `now` is loop time in seconds. Compiled code
(hot_state.pyx) notes deliveries and knows the state of an allotment. On the short way it also gives
free credit to the allotment that has the turn and has used all it had (`LimitState.go_on`). `share`
decides all else.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmq.broker.front_door.hot_state import AllotmentState, LimitState, worth_a_grant
from shardmq.shardd.wire.messages import DRAIN, KEEP, STOP, UNLIMITED

# Each hungry allotment of a limit has its turn within this time. A shard that goes on has what it
# needs in the caches of its processor; a shard that is woken in between fetches all of it again,
# which takes half a millisecond. A turn is at least a batch of acks.
ROUND_S = 0.08


class Shared(NamedTuple):
    """The result of sharing: which shards must be told, and whether credit waits for a batch."""

    told: list[Allotment]
    waits: bool


class Limit(LimitState):
    """At most `most` deliveries that are not settled; 0 is any number.

    Allotments are listed by their state at the outermost of their limits, which decides for them.
    """

    __slots__ = ()

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.unacked = 0  # delivered, and not settled or, in a transaction, not committed
        self.allotted = 0  # credit that shards have and have not used
        self.members = 0  # how many allotments are under this limit
        self.nested = 0  # how many of them are under an inner limit too
        self.waits_for = 0  # how much acks must free, at least, before there is something to share
        # The allotments in each state; in `hungry` the one that has waited longest comes first.
        self.hungry: dict[Allotment, None] = {}
        self.empty: dict[Allotment, None] = {}
        self.holding: dict[Allotment, None] = {}
        self.draining: dict[Allotment, None] = {}
        self.turn: Allotment | None = None
        self.turn_ends = 0.0

    @property
    def free(self) -> int:
        return self.most - self.unacked - self.allotted

    @property
    def may_share(self) -> bool:
        """Return whether `share` may find something to give, or to have given back."""
        return bool(
            (self.hungry and (self.holding or self.free > 0)) or (self.empty and self.free > 0)
        )

    def change(self, most: int) -> list[Allotment]:
        """Set another number above 0; return the allotments whose shards must give back."""
        self.most = most
        if self.free >= 0:
            return []
        stopped = [*self.holding, *self.draining]
        for each in stopped:
            each.give_back(STOP)
        return stopped

    def share(self, now: float, at_once: bool = False) -> Shared:
        """Give free credit to the allotments that need it.

        `at_once` says that acks have waited long enough: what is free need not be a batch.
        """
        told: dict[Allotment, None] = {}
        waits = False
        self.waits_for = 0
        turn = self.turn
        has_turn = turn is not None and turn.unused > 0 and now < self.turn_ends
        # A channel may have thousands of consumers: none is looked at when nothing can be given.
        for each in self._by_turn(now) if self.free > 0 else ():
            if self.free <= 0:
                break
            free = each.free
            if free <= 0:
                continue
            hungry = len(self.hungry)
            if not each.used_all:
                free = min(free, max(1, each.share))
            elif has_turn or (free < each.batch and not at_once):
                waits = True
                self.waits_for = 0 if has_turn else each.batch
                break
            elif each is not self.turn or now >= self.turn_ends:
                self.turn, self.turn_ends = each, now + ROUND_S / hungry
            each.allow(free, DRAIN if hungry > 1 else KEEP)
            told[each] = None
        if self.hungry:
            for each in self._needed():
                each.give_back(DRAIN)
                told[each] = None
        elif self._may_give_ahead:
            for each in list(self.empty):
                count = min(each.share, each.free)
                if count > 0 and 2 * count >= each.share:
                    each.allow(count, KEEP)
                    told[each] = None
                    if not self._may_give_ahead:
                        break
        return Shared(list(told), waits)

    def _needed(self) -> list[Allotment]:
        """Return who holds credit that the hungry need, and was not told to give it back."""
        if self.free <= 0:
            return list(self.holding)
        if self.nested:
            return [each for each in self.holding if each is self.turn or each.is_needed]
        return [self.turn] if self.turn is not None and self.turn in self.holding else []

    @property
    def _may_give_ahead(self) -> bool:
        """Return whether there is a share, and half of it is free."""
        return 2 * self.free >= self.most // max(1, self.members) > 0

    def _by_turn(self, now: float) -> list[Allotment]:
        """Return the hungry: first the one whose turn is not over, then who waits longest."""
        hungry, turn = list(self.hungry), self.turn
        if turn in self.hungry and now < self.turn_ends and turn is not None:
            hungry.remove(turn)
            hungry.insert(0, turn)
        return hungry

    def forget(self, allotment: Allotment) -> None:
        """Drop an allotment from the lists."""
        for state in (self.hungry, self.empty, self.holding, self.draining):
            state.pop(allotment, None)
        if self.turn is allotment:
            self.turn = None


class Allotment(AllotmentState):
    """The credit of the consumers at one shard that share `number`, under one or two limits.

    The innermost limit comes first. Without limits the consumers may deliver any number.
    """

    __slots__ = ()

    def __init__(self, number: int, shard: int, used: int = 0) -> None:
        self.number = number
        self.shard = shard
        self.limits: tuple[Limit, ...] = ()
        self.allowed = UNLIMITED
        self.used = used
        self.mode = KEEP  # what the shard is to do with credit that it cannot use
        self.wants = False  # the shard said that messages wait
        self.gave_back = True  # and gets nothing until it asks
        self.used_all = False  # of a grant that it had asked for
        self.state: dict[Allotment, None] | None = None

    @property
    def home(self) -> Limit:
        """Return the limit that decides for this allotment."""
        return self.limits[-1]

    @property
    def unused(self) -> int:
        return max(0, self.allowed - self.used) if self.limits else 0

    @property
    def free(self) -> int:
        return min(limit.free for limit in self.limits)

    @property
    def share(self) -> int:
        return min(limit.most // limit.members for limit in self.limits)

    @property
    def batch(self) -> int:
        """Return how much free credit is worth a grant."""
        return worth_a_grant(min(limit.most for limit in self.limits))

    @property
    def is_needed(self) -> bool:
        """Return whether a limit over this allotment has nothing free."""
        return any(limit.free <= 0 for limit in self.limits)

    def put_under(self, limits: tuple[Limit, ...]) -> bool:
        """Put the allotment under these limits; return whether its shard must be told."""
        unused, was = self.unused, self.limits
        if was:
            self.home.forget(self)
        for limit in was:
            limit.members -= 1
            limit.allotted -= unused
        for limit in was[1:]:
            limit.nested -= 1
        self.limits, self.state = limits, None
        for limit in limits:
            limit.members += 1
            limit.allotted += unused if was else 0
        for limit in limits[1:]:
            limit.nested += 1
        if limits and was:
            self.place()
        elif limits:
            # The shard may have delivered more meanwhile, which is not here yet.
            self.allowed, self.mode = self.used, STOP
            self.wants, self.gave_back = False, True
        else:
            self.allowed, self.mode = UNLIMITED, KEEP
        return bool(limits) != bool(was)

    def allow(self, count: int, mode: int) -> None:
        """Give `count` more."""
        before = self.unused
        self.allowed = max(self.allowed, self.used) + count
        self.mode = mode
        for limit in self.limits:
            limit.allotted += self.unused - before
        self.place()

    def give_back(self, mode: int) -> None:
        """Take back what is not used; the caller tells the shard."""
        self.mode = mode
        self.place()

    def reported(self, used: int, wants: bool) -> None:
        """Note what the shard says: what it has used or given back, and whether messages wait."""
        unused, gave_back = self.unused, used > self.used
        self.used = max(self.used, used)
        self.wants = wants
        if not self.limits:
            return
        for limit in self.limits:
            limit.allotted -= unused - self.unused
        if gave_back:
            self.gave_back, self.used_all, self.mode = True, False, KEEP
        self.place()
