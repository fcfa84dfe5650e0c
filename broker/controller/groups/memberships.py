"""Carries news of the consumers of virtual queues to `Groups`, and its orders to front doors.

A front door that has ended still counts as the holder of its seats until each shard has put back
what it held there. A question that is asked of the shard behind `FrontDoorGone` is answered then.
After a start of the controller nothing moves until every front door has said what its consumers
hold, or RETURN_S_MAX have passed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from asyncio import Future
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shardmq.broker.controller.groups.groups import Groups, InUse, Member, Name, Order, Seat, Terms
from shardmq.broker.controller.resharding import cuts, shard_sets
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, BindingDelete, BindingPut, QueuePut
from shardmq.broker.shared.control import (
    Ask,
    ConsumerHere,
    ConsumerJoin,
    ConsumerLeave,
    ConsumerNews,
    ConsumersHere,
    ConsumeTerms,
    SeatGivenUp,
    SeatName,
    SeatOrder,
    SeatPassed,
    VirtualLook,
)
from shardmq.shardd.wire import messages as wire

# After a start: how long a front door that has not come back holds up the assignment of shards.
RETURN_S_MAX = 3.0
POLL_S = 0.5  # between two looks whether a deadline is over

log = logging.getLogger(__name__)

ACCESS_REFUSED = 403
NOT_FOUND = 404

AnswerTo = Callable[[int, str, dict[str, Any]], None]


class FrontDoors(Protocol):
    """The methods of the links to the front doors that are used here."""

    def give_orders(self, door: int, incarnation: int, orders: list[SeatOrder]) -> None: ...


class Shards(Protocol):
    """The methods of the links to the shards that are used here."""

    def request(self, shard: int, message: Callable[[int], wire.Message]) -> Future[Any]: ...


class Memberships:
    """The consumers of virtual queues at all front doors."""

    def __init__(self, catalog: Catalog, links: FrontDoors, shards: Shards, doors: int) -> None:
        """Prepare for so many front doors, numbered from 0."""
        self._catalog = catalog
        self._links = links
        self._shards = shards
        self._awaited = set(range(doors))
        # The newest queue that front doors know.
        self._told = max((queue.id for queue in catalog.index.all()), default=0)
        self.groups = Groups(random.randrange)
        self._return: asyncio.TimerHandle | None = None
        self._poll: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._return = loop.call_later(RETURN_S_MAX, self._begin)
        self._poll = loop.call_later(POLL_S, self._look_at_deadlines)

    def stop(self) -> None:
        self._all_are_here()
        if self._poll is not None:
            self._poll.cancel()

    def _all_are_here(self) -> None:
        if self._return is not None:
            self._return.cancel()

    def _begin(self) -> None:
        self._awaited.clear()
        self._carry_out(self.groups.begin())

    # -- what front doors say ------------------------------------------------------------------

    def asked(self, ask: Ask, answer: AnswerTo) -> None:
        """Answer a ConsumerJoin or VirtualLook."""
        what = ask.what
        if isinstance(what, VirtualLook):
            queue = self.groups.queues.get(Name(what.vhost, what.exchange))
            answer(
                0,
                "",
                {
                    "consumers": len(queue.terms()) if queue else 0,
                    "seats": queue.held() if queue else 0,
                },
            )
        elif isinstance(what, ConsumerJoin):
            door, incarnation, _ = ask.owner.split(".")
            self._join(Member(int(door), int(incarnation), what.number), what, answer)

    def _join(self, member: Member, asked: ConsumerJoin, answer: AnswerTo) -> None:
        name = Name(asked.vhost, asked.exchange)
        shards = self._shard_queues(name)
        if not shards:
            answer(NOT_FOUND, f"no queue '{name.exchange}' in vhost '{name.vhost}'", {})
            return
        try:
            orders = self.groups.join(member, name, _terms(asked.terms), shards, self._moves(name))
        except InUse:
            answer(
                ACCESS_REFUSED,
                f"queue '{name.exchange}' in vhost '{name.vhost}' in exclusive use",
                {},
            )
            return
        answer(0, "", {})
        self._carry_out(orders)

    def news(self, door: int, incarnation: int, news: ConsumerNews) -> None:
        match news:
            case ConsumersHere():
                self._here(door, incarnation, news.consumers)
            case ConsumerLeave():
                self._carry_out(self.groups.leave(Member(door, incarnation, news.number)))
            case SeatGivenUp():
                self._carry_out(
                    self.groups.gave_up(Member(door, incarnation, news.number), _seat(news.seat))
                )
            case SeatPassed():
                member = Member(door, incarnation, news.number)
                self._carry_out(self.groups.passed(member, _seat(news.seat), news.offset))

    def _here(self, door: int, incarnation: int, consumers: Iterable[ConsumerHere]) -> None:
        for each in consumers:
            name = Name(each.vhost, each.exchange)
            seats = [_seat(seat) for seat in each.seats]
            member = Member(door, incarnation, each.number)
            shards, moves = self._shard_queues(name), self._moves(name)
            self._carry_out(
                self.groups.restore(
                    member, name, _terms(each.terms), each.left, seats, shards, moves
                )
            )
        if self._awaited:
            self._awaited.discard(door)
            if not self._awaited:
                self._all_are_here()
                self._begin()

    def door_gone(self, door: int, incarnation: int) -> None:
        """Take the seats of a front door that has ended.

        The caller has sent the shards the news of it.
        """
        members = [
            member for member in self.groups.of_door(door) if member.incarnation == incarnation
        ]
        shards = sorted(self._shards_of(members))
        for member in members:
            self._carry_out(self.groups.leave(member))
        if not shards:
            self._carry_out(self.groups.gone(members))
            return
        # The question goes to the shards at which they had seats. Only the answer matters, so it is
        # about a queue that does not exist.
        fences = [self._shards.request(shard, lambda n: wire.Count(n, 0)) for shard in shards]
        waiting = len(fences)

        def passed(fence: Future[Any]) -> None:
            nonlocal waiting
            fence.exception()  # a shard that does not answer is gone, with its consumers
            waiting -= 1
            if not waiting:
                self._carry_out(self.groups.gone(members))

        for fence in fences:
            fence.add_done_callback(passed)

    def _shards_of(self, members: Iterable[Member]) -> set[int]:
        """Return the shard processes at which these members hold seats."""
        wanted, queues = set(members), set()
        for virtual in self.groups.queues.values():
            for group in virtual.groups.values():
                queues |= {seat.queue for seat, holder in group.held.items() if holder in wanted}
        found = (self._catalog.queue_by_id(queue) for queue in queues)
        return {queue.shard for queue in found if queue is not None}

    # -- what exists ---------------------------------------------------------------------------

    def changed(self, changes: list[AnyChange]) -> None:
        """Follow changes of the catalog, when the front doors have been told of them."""
        self._told = max(
            [self._told, *(change.id for change in changes if isinstance(change, QueuePut))]
        )
        if not self.groups.queues or all(
            isinstance(change, BindingPut | BindingDelete) for change in changes
        ):
            return
        for name in self.groups.names():
            self._carry_out(self.groups.reshard(name, self._shard_queues(name)))
            self._carry_out(self.groups.cross(name, self._moves(name)))

    def _shard_queues(self, name: Name) -> tuple[int, ...]:
        """Return the ids of the shard queues that front doors know already.

        A queue that is deleted and declared again has another id; ids rise.
        """
        vhost = self._catalog.vhost(name.vhost)
        if vhost is None:
            return ()
        ids = (vhost.queues[queue].id for queue in vhost.shard_queues(name.exchange))
        return tuple(id for id in ids if id <= self._told)

    def _moves(self, name: Name) -> tuple[cuts.Move, ...]:
        vhost = self._catalog.vhost(name.vhost)
        return cuts.moves(vhost.parts(name.exchange)) if vhost is not None else ()

    def _look_at_deadlines(self) -> None:
        """Have groups that have waited too long to cross a change give up the order of keys."""
        loop = asyncio.get_running_loop()
        self._poll = loop.call_later(POLL_S, self._look_at_deadlines)
        for name in [name for name, queue in self.groups.queues.items() if queue.moves]:
            vhost = self._catalog.vhost(name.vhost)
            wait_ms, choice = (
                shard_sets.deadline(vhost, name.exchange) if vhost is not None else (None, "")
            )
            if wait_ms is None or choice != shard_sets.BREAK_ORDER:
                continue
            given_up, orders = self.groups.overdue(name, loop.time(), wait_ms)
            if given_up:
                log.warning(
                    "shards of exchange '%s' in vhost '%s': %s ms are over, "
                    "groups give up the order of keys: %s",
                    name.exchange,
                    name.vhost,
                    wait_ms,
                    given_up,
                )
            self._carry_out(orders)

    def _carry_out(self, orders: list[Order]) -> None:
        by_door: dict[tuple[int, int], list[SeatOrder]] = {}
        for order in orders:
            said = SeatOrder(
                order.kind, order.member.number, SeatName(*order.seat), *order.bounds, order.fresh
            )
            by_door.setdefault((order.member.door, order.member.incarnation), []).append(said)
        for (door, incarnation), said_there in by_door.items():
            self._links.give_orders(door, incarnation, said_there)


def _terms(said: ConsumeTerms) -> Terms:
    who = (said.owner, said.channel, said.tag)
    return Terms(said.group, said.assignment, said.exclusive, said.priority, said.affinity, *who)


def _seat(said: SeatName) -> Seat:
    return Seat(said.queue, said.place)
