"""Choose which consumers may be given messages: round robin among consumers of equal priority.

Consumers of a higher priority come first. A consumer has *room* while its prefetch, its allotment
of a limit (allotment.py) and the delivery window of its connection all have room. Exclusive
consumers, the single active consumer and paused queues are decided here too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final

from shardmq.shardd.queues.allotment import Allotment
from shardmq.shardd.queues.handed import Handed
from shardmq.shardd.queues.state import ConsumersState, ConsumerState, Unacked, Window

NO_LIMIT = 1 << 30
NO_STOP: Final = 1 << 63  # above any offset


class Consumer(ConsumerState):
    """One consumer of one queue.

    `peer` is the object that the caller sends deliveries with. `allotment` is None while no limit
    holds that consumers at other shards share.
    """

    __slots__ = ("affinity", "exclusive", "handed", "tag", "told_late")

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
        allotment: Allotment | None = None,
        affinity: bool = False,
    ) -> None:
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
        self.allotment: Allotment | None = allotment
        self.affinity = affinity  # it gets all messages of a key while it holds one of them
        self.detached = False
        # The channel must be closed, because the consumer held a message for too long.
        self.told_late = False
        self.unacked = Unacked()
        self.handed: Handed | None = None  # None in a queue without a consumer timeout

    @property
    def listed_prefetch(self) -> int:
        return self.prefetch or (self.allotment.prefetch if self.allotment is not None else 0)

    @property
    def delivered(self) -> int:
        """Return how many messages the consumer was given in all."""
        return self.unacked.next_number - 1

    def wanted(self) -> int:
        """Return how many messages the prefetch leaves room for."""
        return self.prefetch - self.unacked.count if self.prefetch else NO_LIMIT

    def room(self) -> int:
        """Return how many messages the consumer may take now.

        If there is no room, the queue is woken when there is some.
        """
        if self.window.room <= 0:
            self.window.blocked[self.queue] = None
            return 0
        wanted = self.prefetch - self.unacked.count if self.prefetch else NO_LIMIT
        allotment = self.allotment
        if allotment is None:
            return wanted
        order = allotment.order
        if (
            order is not None
            and allotment.is_limited
            and order.current is not self.queue
            and not order.begin(self.queue, order.now)
        ):
            return 0
        return min(wanted, allotment.left)

    def room_now(self) -> int:
        """Return how many messages the consumer could take, without waiting for room."""
        if self.window.room <= 0:
            return 0
        return self.wanted() if self.allotment is None else min(self.wanted(), self.allotment.left)

    @property
    def is_busy(self) -> bool:
        """Return whether the consumer takes no other message before an ack or a read of its client.

        An allotment that has nothing left gets more when a message comes, unless the limit is used
        up. The front door knows that. Here a consumer that holds messages then counts as busy.
        """
        if self.window.room <= 0 or self.wanted() <= 0:
            return True
        return self.allotment is not None and self.allotment.left <= 0 < self.unacked.count


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


class Consumers(ConsumersState):
    """The attached consumers of one queue."""

    __slots__ = ("affinity", "paused", "single_active")

    def __init__(self, single_active: bool = False, paused: bool = False) -> None:
        self.affinity = False  # some consumer asked for key affinity
        self.has_allotments = False  # some consumer has one
        self.single_active = single_active
        self.paused = paused
        self.all: list[Consumer] = []  # in the order of arrival
        # By priority, highest first. Each list begins with the consumer whose turn it is.
        self.levels: list[list[Consumer]] = []
        # The list of the only consumer that may be given messages; None if there are several or
        # none.
        self.only: list[Consumer] | None = None
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
        self.has_allotments = any(consumer.allotment is not None for consumer in self.all)
        levels: dict[int, list[Consumer]] = {}
        allowed = [] if self.paused else self.all[:1] if self.single_active else self.all
        for consumer in allowed:
            levels.setdefault(consumer.priority, []).append(consumer)
        self.levels = [levels[priority] for priority in sorted(levels, reverse=True)]
        self.only = self.levels[0] if len(allowed) == 1 else None

    def takers(self) -> list[Consumer]:
        """Return the consumers that may take messages now, the next in turn first.

        All of them have the highest priority at which a consumer has room. The list is good until a
        consumer is added, is removed, or takes messages.
        """
        only = self.only
        if only is not None:
            self.room = only[0].room()
            return only if self.room > 0 else []
        for level in self.levels:
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
        for level in self.levels:
            if len(level) > 1 and level[0].priority == last.priority:
                at = level.index(last) + 1
                level[:] = level[at:] + level[:at]

    def capacity(self) -> int:
        """Return how many messages all consumers together could take now."""
        return sum(max(0, consumer.room_now()) for level in self.levels for consumer in level)
