"""Choose which consumers may be given messages: round robin among consumers of equal priority.

Consumers of a higher priority come first. A consumer has *room* while its prefetch (or its loan),
its grants and the delivery window of its connection all have room. Exclusive consumers, the single
active consumer and paused queues are decided here too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

from shardmq.shardd.queues.entry import ENDLESS
from shardmq.shardd.queues.handed import Handed
from shardmq.shardd.queues.turns import SharingQueue, Turns
from shardmq.shardd.queues.unacked import Unacked

NO_LIMIT = 1 << 30
NO_STOP: Final = 1 << 63  # above any offset


class Window:
    """The bytes that may still be on their way to the client of one connection.

    `blocked` are the queues that wait for room, in the order in which they looked for it. `served`
    is the queue that got room last.
    """

    __slots__ = ("blocked", "consumers", "full", "room", "served")

    def __init__(self, room: int) -> None:
        self.full = room
        self.room = room
        self.consumers = 0
        self.blocked: dict[SharingQueue, None] = {}
        self.served: SharingQueue | None = None

    def unblocked(self) -> list[Any]:
        """Return the queues that waited for room, and let none of them wait any more.

        The queue that got room last comes last, together with the queues that looked before it.
        Otherwise one queue would take all the room again and again.
        """
        waiting = list(self.blocked)
        self.blocked.clear()
        if self.served in waiting[:-1]:
            behind = waiting.index(self.served) + 1
            return waiting[behind:] + waiting[:behind]
        return waiting

    def forget(self, queue: SharingQueue) -> None:
        self.blocked.pop(queue, None)
        if self.served is queue:
            self.served = None

    def free(self, count: int) -> None:
        # The window of a connection that came back starts full, while bytes that were sent before
        # are still credited. So the room is limited to the full window.
        self.room = min(self.full, self.room + count)


class Loan:
    """The share of a virtual consumer's prefetch that its parts at this shard have been lent.

    The parts use the loan together. The queue whose turn it is may take all that is free, so that
    deliveries and acks come in few large pieces. In a queue that has other consumers too, a part
    that waits falls behind these consumers. Without acks nothing is lent, and the loan only
    arranges the turns.

    `used` counts deliveries that are not settled, also those of parts that have left. `waiting` are
    the queues that found no room, or found other queues waiting; the first queue is next.
    """

    __slots__ = (
        "__weakref__", "_turn_began", "_turn_ms", "asked", "given", "has_turns", "keep", "last",
        "lent", "parts", "recalled", "turn_ends", "turns", "used", "waiting", "wake",
    )  # fmt: skip

    def __init__(self, wake: Callable[[Any], None]) -> None:
        self.wake = wake
        self.turns = Turns(wake)  # the turns of the queues of its parts
        self.parts: dict[Consumer, None] = {}
        self.lent = 0
        self.recalled = False  # some part must give credit back to other shards
        self.keep = 0  # messages that may be in use while parts are recalled
        self.used = 0
        self.given = 0  # all deliveries since the start
        # While `given` is below this number, all that was lent may be used.
        self.turn_ends = 0
        # All that was lent may also be used from `_turn_began` for this many ms.
        self._turn_began = self._turn_ms = 0
        # The shards take turns: other shards get the credit of this shard when their turn comes.
        self.has_turns = False
        # The loan asked for more credit and got none yet.
        self.asked = False
        self.waiting: dict[SharingQueue, None] = {}
        self.last: SharingQueue | None = None  # the queue that took messages last

    @property
    def free(self) -> int:
        """Return how many more messages the parts may take now.

        In its turn the shard may use all that it was lent. Otherwise credit that is given back
        unused would go from shard to shard for ever. Outside its turn the shard may use only what
        the parts may keep. Otherwise a shard that is never idle would give nothing back.
        """
        return (self.lent if self.in_turn else self.keep) - self.used

    @property
    def in_turn(self) -> bool:
        """Return whether all that was lent may be used now.

        The time is that of the queue that looked last.
        """
        # The lower bound matters when the clock is set back.
        return self.given < self.turn_ends or 0 <= self.turns.now - self._turn_began < self._turn_ms

    def room(self, queue: SharingQueue) -> int:
        """Return how many messages the queue may take now.

        The queue is added to the waiting queues if no credit is free or other queues wait.
        """
        free, waiting = self.free, self.waiting
        if free > 0 and (not waiting or (len(waiting) == 1 and queue in waiting)):
            return free
        waiting.setdefault(queue)
        return free if free > 0 and self._next() is queue else 0

    def take(self, queue: SharingQueue, count: int) -> None:
        self.used += count
        self.given += count
        self.turns.taken += count
        self.last = queue
        self.waiting.pop(queue, None)

    def settle(self, count: int) -> None:
        self.used -= count
        if self.waiting and self.free > 0:
            self.wake(self._next())
        else:
            self._have_looked_at()

    def _have_looked_at(self) -> None:
        """Wake a queue that can see whether credit must be given back."""
        if (self.recalled or self.has_turns) and self.parts:
            self.wake(next(iter(self.parts)).queue)

    def served(self, queue: SharingQueue) -> None:
        """Note that the queue has handed out all it could.

        If room is left, the queue waits for something else, and the next waiting queue is woken. If
        no room is left, a waiting queue is made to ask for more.
        """
        if not self.waiting:
            return
        if self.free > 0:
            if self._next() is queue:
                del self.waiting[queue]
            self._pass_on()
        elif not self.asked and self.lent <= self.used:
            # The queue has no more to hand out, or it would have asked for more before.
            self.waiting.pop(queue, None)
            self._have_one_ask()

    def _pass_on(self) -> None:
        if self.waiting and self.free > 0:
            self.wake(self._next())

    def _next(self) -> SharingQueue:
        found = next(iter(self.waiting))
        # The queue looked for more before the other queues looked, so it goes to the end.
        if found is self.last and len(self.waiting) > 1:
            del self.waiting[found]
            self.waiting[found] = None
            found = next(iter(self.waiting))
        return found

    def join(self, part: Consumer) -> None:
        self.parts[part] = None
        if part.unacked.loan is None:
            part.unacked.loan = self
            self.used += part.unacked.count
        self._reckon()

    def leave(self, part: Consumer) -> None:
        """Remove a part, with the credit that it was lent.

        Deliveries that the part holds count until they are settled.
        """
        del self.parts[part]
        self.waiting.pop(part.queue, None)
        self.last = None
        self.asked = False  # perhaps it was this part that asked
        self._reckon()
        if self.waiting:  # the first queue takes its turn, or asks again
            self.wake(next(iter(self.waiting)))
        else:
            self._have_looked_at()

    def grant(self, part: Consumer, count: int) -> None:
        part.prefetch += count
        part.recalled = None
        self.asked = self.has_turns = False
        self.turn_ends, self._turn_ms = self.given + 1, 0
        self._reckon()
        self._pass_on()

    def begin_turn_of_shard(self, part: Consumer, count: int, now: int, ms: int) -> None:
        """Begin a turn of this shard.

        The parts may use all free credit, and `count` messages more. For `ms` milliseconds they may
        also use the room that acks free. Credit that is not used is given back.
        """
        if count:
            part.prefetch += count
            self._reckon()
        self.has_turns = True
        self.turn_ends = self.given + max(self.lent - self.used, 1)
        if ms:
            self.turns.now = self._turn_began = now
            self._turn_ms = ms
        self.wake(self._next() if self.waiting else part.queue)

    def lower(self, part: Consumer, count: int) -> None:
        """Lower what the part was lent, by credit that acks freed: another shard has its turn."""
        part.prefetch -= count
        self._turn_ms = 0
        self._reckon()
        self._have_one_ask()

    def recall(self, part: Consumer, keep: int) -> None:
        part.recalled = keep
        self._reckon()

    def give_back(self, looked: Consumer) -> list[tuple[Consumer, int]]:
        """Take back from the parts the credit that other shards want and that the loan can spare.

        The queue of `looked` has just looked for messages that it can hand out. Return the parts,
        with how much credit each gives back. All free credit goes back if no message waits here.
        """
        left = self.lent - self.used
        if left <= 0 or not (self.recalled or self.has_turns):
            return []
        needed = looked.queue.has_for(looked) or any(
            part.queue.has_for(part) for part in self.parts
        )
        if needed and self.in_turn:
            return []
        found: list[tuple[Consumer, int]] = []
        for part in self.parts:
            if part.recalled is not None or (self.has_turns and not needed):
                back = min(
                    part.prefetch - (part.recalled if needed and part.recalled is not None else 0),
                    left,
                )
                if back > 0:
                    part.prefetch -= back
                    left -= back
                    found.append((part, back))
        if found:
            self._reckon()
            self._have_one_ask()
        return found

    def _have_one_ask(self) -> None:
        """Wake a waiting queue to ask for more credit, if all credit is used and none asked yet."""
        if self.waiting and not self.asked and self.lent <= self.used:
            self.wake(next(iter(self.waiting)))

    def goes_on(self, queue: SharingQueue) -> bool:
        """Return whether the queue only waits for acks to go on with its turn.

        The caller then has nothing else to do for the queue.
        """
        if self.used < self.lent or not self.asked:
            return False  # credit may be given back or passed on, or must be asked for
        return queue in self.waiting and self.turns.is_in_turn(queue)

    def _reckon(self) -> None:
        """Compute the sums again after a change of what parts were lent or may keep."""
        self.lent = self.keep = 0
        self.recalled = False
        for part in self.parts:
            self.lent += part.prefetch
            self.keep += (
                part.prefetch if part.recalled is None else min(part.prefetch, part.recalled)
            )
            self.recalled = self.recalled or part.recalled is not None
        # With a small prefetch a whole stretch of the log would take long.
        self.turns.turn_max = max(self.lent, 1) if self.parts else ENDLESS


class Consumer:
    """One consumer of one queue.

    `peer` is the object that the caller sends deliveries with.
    """

    __slots__ = (
        "affinity", "asked", "channel", "connection", "detached", "exclusive", "grants", "handed",
        "lent", "limited", "loan", "no_ack", "number", "peer", "prefetch", "priority", "queue",
        "recalled", "tag", "told_late", "unacked", "window",
    )  # fmt: skip

    def __init__(
        self,
        queue: Any,
        peer: object,
        number: int,
        window: Window,
        *,
        connection: int = 0,
        channel: int = 0,
        tag: str = "",
        no_ack: bool = False,
        exclusive: bool = False,
        priority: int = 0,
        prefetch: int = 0,
        limited: bool = False,
        lent: bool = False,
        loan: Loan | None = None,
        affinity: bool = False,
    ) -> None:
        # A queue.Queue. The type is not named here because queue.py imports this file.
        self.queue = queue
        self.peer = peer
        self.number = number
        self.window = window
        self.connection = connection
        self.channel = channel
        self.tag = tag
        self.no_ack = no_ack
        self.exclusive = exclusive
        self.priority = priority
        self.prefetch = 0 if no_ack else prefetch
        self.limited = limited  # the consumer gets messages only for grants
        self.grants = 0
        self.asked = False  # the consumer asked for grants and got none yet
        # Its prefetch is its share of `loan`, which it uses together with the other parts.
        self.lent = lent
        # The loan of the virtual consumer that this consumer is a part of.
        self.loan = loan
        self.recalled: int | None = None  # how much of its share it may keep; None: all
        self.affinity = affinity  # it gets all messages of a key while it holds one of them
        self.detached = False
        # The channel must be closed, because the consumer held a message for too long.
        self.told_late = False
        self.unacked = Unacked()
        self.handed: Handed | None = None  # None in a queue without a consumer timeout
        if lent:
            assert loan is not None, "only what is a part of something is lent a share"
            loan.join(self)

    def tune(self, prefetch: int, limited: bool, lent: bool = False) -> None:
        """Set another prefetch. Grants from before a change of mode do not count any more."""
        begins_anew = lent or self.lent or limited != self.limited
        if self.lent:
            self.stop_sharing()
        self.prefetch = 0 if self.no_ack else prefetch
        self.limited = limited and not lent
        if begins_anew:
            self.grants, self.asked, self.recalled = 0, False, None
        if limited or lent:
            self.queue.consumers.borrow = True
        if lent and self.loan is not None:
            self.lent = True
            self.loan.asked = False
            self.loan.join(self)

    def grant(self, count: int) -> None:
        """Let the consumer take `count` messages more.

        This has an effect only if the consumer shares a loan or takes messages only for grants.
        """
        if self.lent and self.loan is not None:
            self.loan.grant(self, count)
        elif self.limited:
            self.grants += count
            self.asked = False

    def stop_sharing(self) -> None:
        if self.lent and self.loan is not None:
            self.loan.leave(self)
        self.lent = False

    def wanted(self) -> int:
        """Return how many messages the prefetch leaves room for."""
        return self.prefetch - self.unacked.count if self.prefetch else NO_LIMIT

    def room(self) -> int:
        if self.window.room <= 0:
            self.window.blocked[self.queue] = None
            return 0
        if self.lent and self.loan is not None:
            return self.loan.room(self.queue)
        wanted = self.prefetch - self.unacked.count if self.prefetch else NO_LIMIT
        return min(wanted, self.grants) if self.limited else wanted


class Reader(Consumer):
    """A consumer of a stream, which reads a log and removes nothing.

    `offset` is the next message it gets, apart from those that it gave back.
    """

    __slots__ = ("again", "came_again", "filters", "mark", "name", "offset", "seen_below", "stop")

    offset: int
    name: bytes  # b"": the position of the reader is not kept
    filters: array[int] | None  # None: the reader wants every message
    seen_below: int  # the reader may have seen messages below this offset
    # Offsets that the reader gave back and does not hold, ascending; at most its prefetch.
    again: list[int]
    came_again: set[int]  # offsets delivered a second time and not settled
    stop: int  # the reader gets no new message from this offset on
    mark: int | None  # the shard tells the front door when all messages below are settled

    @property
    def position(self) -> int:
        """The offset of the first message that is not settled."""
        first = self.unacked.first_entry
        position = first - 1 if first else self.offset
        return min([position, *self.again[:1], *self.came_again])

    def begin(
        self, offset: int, name: bytes, filters: array[int] | None, seen_below: int = 0
    ) -> None:
        """Say what to read. Called once, before the reader is attached."""
        self.offset, self.name, self.filters, self.seen_below = offset, name, filters, seen_below
        self.again, self.came_again = [], set()
        self.stop, self.mark = NO_STOP, None

    def bound(self, stop: int | None, mark: int | None) -> None:
        """Set where the reader stops: the end of a log at the time of a resharding."""
        self.stop, self.mark = NO_STOP if stop is None else stop, mark


class Consumers:
    """The attached consumers of one queue."""

    __slots__ = ("_levels", "_only", "affinity", "all", "borrow", "paused", "room", "single_active")

    def __init__(self, single_active: bool = False, paused: bool = False) -> None:
        self.affinity = False  # some consumer asked for key affinity
        self.borrow = False  # some consumer has grants or a loan
        self.single_active = single_active
        self.paused = paused
        self.all: list[Consumer] = []  # in the order of arrival
        # By priority, highest first. Each list begins with the consumer whose turn it is.
        self._levels: list[list[Consumer]] = []
        # The list of the only consumer that may be given messages; None if there are several or
        # none.
        self._only: list[Consumer] | None = None
        self.room = 0  # how many messages the taker found last may take, if it is the only taker

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self.all)

    def active(self, consumer: Consumer) -> bool:
        return not self.single_active or (bool(self.all) and self.all[0] is consumer)

    def refuses(self, exclusive: bool) -> bool:
        """Return whether another consumer would break exclusive use.

        `exclusive` says that the other consumer wants to be the only one. With a single active
        consumer no consumer can be exclusive.
        """
        return any(each.exclusive for each in self.all) or (
            exclusive and (self.single_active or bool(self.all))
        )

    def add(self, consumer: Consumer) -> None:
        self.all.append(consumer)
        self._arrange()

    def remove(self, consumer: Consumer) -> None:
        self.all.remove(consumer)
        self._arrange()

    def be_single_active(self, single_active: bool) -> None:
        if single_active != self.single_active:
            self.single_active = single_active
            self._arrange()

    def be_paused(self, paused: bool) -> None:
        if paused != self.paused:
            self.paused = paused
            self._arrange()

    def _arrange(self) -> None:
        """Decide which consumers may be given messages."""
        self.affinity = any(consumer.affinity for consumer in self.all)
        self.borrow = any(consumer.limited or consumer.lent for consumer in self.all)
        levels: dict[int, list[Consumer]] = {}
        allowed = [] if self.paused else self.all[:1] if self.single_active else self.all
        for consumer in allowed:
            levels.setdefault(consumer.priority, []).append(consumer)
        self._levels = [levels[priority] for priority in sorted(levels, reverse=True)]
        self._only = self._levels[0] if len(allowed) == 1 else None

    def takers(self) -> list[Consumer]:
        """Return the consumers that may take messages now, the next in turn first.

        All of them have the highest priority at which a consumer has room. The list is good until a
        consumer is added, is removed, or takes messages.
        """
        only = self._only
        if only is not None:
            self.room = only[0].room()
            return only if self.room > 0 else []
        for level in self._levels:
            if len(level) == 1:
                self.room = level[0].room()
                if self.room > 0:
                    return level
                continue
            rooms = [consumer.room() for consumer in level]
            found = [consumer for consumer, room in zip(level, rooms, strict=True) if room > 0]
            if found:
                self.room = max(rooms)
                return found
        return []

    def took(self, last: Consumer) -> None:
        """Note that `last` got the last message. The consumer behind it is next."""
        for level in self._levels:
            if len(level) > 1 and level[0].priority == last.priority:
                at = level.index(last) + 1
                level[:] = level[at:] + level[:at]

    def look(self, now: int) -> None:
        """Tell the time to the loans of the consumers, because turns of a shard end by time."""
        for consumer in self.all:
            if consumer.loan is not None:
                consumer.loan.turns.look(now)

    def capacity(self) -> int:
        """Return how many messages all consumers together could take now."""
        return sum(max(0, consumer.room()) for level in self._levels for consumer in level)
