"""Whose turn it is: round robin among equals, higher priority first; prefetch, grants, exclusive, single active.

A consumer has *room* while its prefetch, its grants and the delivery window of its connection all have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardd.queues.overdue import Handed
from shardd.queues.unacked import Unacked

if TYPE_CHECKING:
    from shardd.queues.queue import Queue

NO_LIMIT = 1 << 30


class Window:
    """Bytes that may still be on their way to the client of one connection. `blocked`: queues that wait for room, in
    the order in which they looked for it; `served`: the one that got some last."""

    __slots__ = ("blocked", "consumers", "full", "room", "served")

    def __init__(self, room: int) -> None:
        self.full = room
        self.room = room
        self.consumers = 0
        self.blocked: dict[Queue, None] = {}
        self.served: Queue | None = None

    def unblocked(self) -> list[Queue]:
        """Those that waited, and wait no more: who got some last comes last, with who looked before it, or the same
        would take all the room there is again and again."""
        waiting = list(self.blocked)
        self.blocked.clear()
        if self.served in waiting[:-1]:
            behind = waiting.index(self.served) + 1
            return waiting[behind:] + waiting[:behind]
        return waiting

    def forget(self, queue: Queue) -> None:
        self.blocked.pop(queue, None)
        if self.served is queue:
            self.served = None

    def free(self, count: int) -> None:
        # The window of a connection that came back starts full, while bytes of its former life are still credited.
        self.room = min(self.full, self.room + count)


class Consumer:
    """One consumer of one queue. `peer` is whatever the caller sends deliveries with."""

    __slots__ = (
        "affinity", "asked", "began", "channel", "connection", "detached", "exclusive", "grants", "handed", "lent",
        "limited", "no_ack", "number", "peer", "prefetch", "priority", "queue", "recalled", "tag", "told_late",
        "unacked", "window",
    )  # fmt: skip

    def __init__(
        self,
        queue: Queue,
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
        self.limited = limited  # deliveries only for grants
        self.grants = 0
        self.asked = False  # for grants, and none came yet
        self.lent = lent  # its prefetch is part of a limit that it shares
        self.affinity = affinity  # messages of one key to one consumer
        self.recalled: int | None = None  # of that: so much may stay
        self.began = 0  # the delivery that was next when it last got some
        if lent:
            self.borrow(prefetch)
        self.detached = False
        self.told_late = False  # its channel is to be closed
        self.unacked = Unacked()
        self.handed: Handed | None = None  # in a queue that does not wait for ever

    def borrow(self, prefetch: int) -> None:
        """All that it has of a shared limit. Of none comes nothing: it is limited to grants, and gets none."""
        self.prefetch = prefetch
        self.limited = prefetch == 0
        self.grants = 0

    @property
    def had_turn(self) -> bool:
        """Whether it has used some of what it got last: what is given back unused would go round for ever."""
        return self.unacked.next_number != self.began

    def give_back(self, floor: int) -> int:
        """What of its prefetch is above `floor` and not in use."""
        back = max(0, self.prefetch - max(self.unacked.count, floor))
        if back:
            self.borrow(self.prefetch - back)
        return back

    def tune(self, prefetch: int, limited: bool, lent: bool = False) -> None:
        """Another prefetch; grants of a former life count for nothing."""
        if lent or self.lent:
            self.lent, self.recalled, self.asked = lent, None, False
            self.limited = not limited  # so that what follows begins anew
        if lent:
            self.borrow(prefetch)
            return
        self.prefetch = 0 if self.no_ack else prefetch
        if limited != self.limited:
            self.limited = limited
            self.grants = 0
            self.asked = False

    def wanted(self) -> int:
        """Messages it may take by its prefetch."""
        return self.prefetch - self.unacked.count if self.prefetch else NO_LIMIT

    def room(self) -> int:
        if self.window.room <= 0:
            self.window.blocked[self.queue] = None
            return 0
        wanted = self.prefetch - self.unacked.count if self.prefetch else NO_LIMIT
        if self.recalled is not None and self.had_turn:
            wanted = min(wanted, self.recalled - self.unacked.count)  # one that is never idle would give nothing back
        return min(wanted, self.grants) if self.limited else wanted


class Consumers:
    """The attached consumers of one queue."""

    __slots__ = ("_levels", "affinity", "all", "paused", "single_active")

    def __init__(self, single_active: bool = False, paused: bool = False) -> None:
        self.affinity = False  # one of them asked for it
        self.single_active = single_active
        self.paused = paused
        self.all: list[Consumer] = []  # by arrival
        self._levels: list[list[Consumer]] = []  # by priority, highest first; each begins with whose turn it is

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self.all)

    def active(self, consumer: Consumer) -> bool:
        return not self.single_active or (bool(self.all) and self.all[0] is consumer)

    def refuses(self, exclusive: bool) -> bool:
        """Whether one more, wishing to be the only one or not, would break exclusive use. Where one is active at a time
        nobody can be the only one."""
        return any(each.exclusive for each in self.all) or (exclusive and (self.single_active or bool(self.all)))

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
        """Who may be given something."""
        self.affinity = any(consumer.affinity for consumer in self.all)
        levels: dict[int, list[Consumer]] = {}
        allowed = [] if self.paused else self.all[:1] if self.single_active else self.all
        for consumer in allowed:
            levels.setdefault(consumer.priority, []).append(consumer)
        self._levels = [levels[priority] for priority in sorted(levels, reverse=True)]

    def takers(self) -> list[Consumer]:
        """Those of the highest level that has some with room, whose turn it is first; good until one is added, removed
        or took something."""
        for level in self._levels:
            if len(level) == 1:
                if level[0].room() > 0:
                    return level
                continue
            found = [consumer for consumer in level if consumer.room() > 0]
            if found:
                return found
        return []

    def took(self, last: Consumer) -> None:
        """`last` got the last message: the one behind it is next."""
        for level in self._levels:
            if len(level) > 1 and level[0].priority == last.priority:
                at = level.index(last) + 1
                level[:] = level[at:] + level[:at]

    def capacity(self) -> int:
        """Messages all of them together could take now."""
        return sum(max(0, consumer.room()) for level in self._levels for consumer in level)
