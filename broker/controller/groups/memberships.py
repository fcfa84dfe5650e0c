"""Carries news of the consumers of virtual queues to `Groups`, and its orders to front doors.

A front door that has ended still counts as the holder of its assignments until each shard has put
back what it held there. A question that is asked of the shard behind `FrontDoorGone` is answered
then. After a start of the controller nothing moves until every front door has said what its
consumers hold, or RETURN_S_MAX have passed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from asyncio import Future
from collections.abc import Callable, Iterable
from typing import Any

from shardmq.broker.controller.groups.groups import (
    Assignment,
    GroupConsumer,
    GroupOrder,
    Groups,
    InUse,
    VirtualQueueName,
)
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.resharding import cuts, shard_sets
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, BindingDelete, BindingPut, QueuePut
from shardmq.broker.shared.control import (
    Ask,
    AssignmentGivenUp,
    AssignmentName,
    AssignmentOrder,
    ConsumerHere,
    ConsumerJoin,
    ConsumerLeave,
    ConsumerNews,
    ConsumersHere,
    MarkPassed,
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


class Memberships:
    """The consumers of virtual queues at all front doors."""

    def __init__(
        self,
        catalog: Catalog,
        links: DoorLinks,
        shards: ShardLinks,
        doors: Iterable[int],
        node_of_shard: Callable[[int], int],
    ) -> None:
        """Prepare for the front doors with these numbers.

        `node_of_shard` returns the number of the node that has a shard.
        """
        self._catalog = catalog
        self._node_of_shard = node_of_shard
        self._links = links
        self._shards = shards
        self._awaited = set(doors)
        # The newest queue that front doors know.
        self._told = max((queue.id for queue in catalog.index.all()), default=0)
        self.groups = Groups(random.randrange, self._node_of_queue)
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
            queue = self.groups.queues.get(VirtualQueueName(what.vhost, what.exchange))
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
            self._join(GroupConsumer(int(door), int(incarnation), what.number), what, answer)

    def _join(self, consumer: GroupConsumer, asked: ConsumerJoin, answer: AnswerTo) -> None:
        name = VirtualQueueName(asked.vhost, asked.exchange)
        shards = self._shard_queues(name)
        if not shards:
            answer(NOT_FOUND, f"no queue '{name.exchange}' in vhost '{name.vhost}'", {})
            return
        try:
            orders = self.groups.join(consumer, name, asked.terms, shards, self._moves(name))
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
                self._carry_out(self.groups.leave(GroupConsumer(door, incarnation, news.number)))
            case AssignmentGivenUp():
                self._carry_out(
                    self.groups.gave_up(
                        GroupConsumer(door, incarnation, news.number), _assignment(news.assignment)
                    )
                )
            case MarkPassed():
                consumer = GroupConsumer(door, incarnation, news.number)
                self._carry_out(
                    self.groups.passed(consumer, _assignment(news.assignment), news.offset)
                )

    def _here(self, door: int, incarnation: int, consumers: Iterable[ConsumerHere]) -> None:
        for each in consumers:
            name = VirtualQueueName(each.vhost, each.exchange)
            assignments = [_assignment(assignment) for assignment in each.assignments]
            consumer = GroupConsumer(door, incarnation, each.number)
            shards, moves = self._shard_queues(name), self._moves(name)
            self._carry_out(
                self.groups.restore(
                    consumer, name, each.terms, each.left, assignments, shards, moves
                )
            )
        if self._awaited:
            self._awaited.discard(door)
            if not self._awaited:
                self._all_are_here()
                self._begin()

    def door_gone(self, door: int, incarnation: int) -> None:
        """Take the assignments of a front door that has ended.

        The caller has sent the shards the news of it.
        """
        consumers = [
            consumer
            for consumer in self.groups.of_door(door)
            if consumer.incarnation == incarnation
        ]
        queues: set[int] = set()  # shard queues at which these consumers hold assignments
        for virtual in self.groups.queues.values():
            for group in virtual.groups.values():
                queues |= {
                    assignment.queue
                    for assignment, holder in group.held.items()
                    if holder in consumers
                }
        found = map(self._catalog.queue_by_id, queues)
        shards = sorted({queue.shard for queue in found if queue is not None})
        for consumer in consumers:
            self._carry_out(self.groups.leave(consumer))
        if not shards:
            self._carry_out(self.groups.gone(consumers))
            return
        # The question goes to the shards at which they had assignments. Only the answer matters, so
        # it is about a queue that does not exist.
        fences = [self._shards.request(shard, lambda n: wire.Count(n, 0)) for shard in shards]
        waiting = len(fences)

        def passed(fence: Future[Any]) -> None:
            nonlocal waiting
            fence.exception()  # a shard that does not answer is gone, with its consumers
            waiting -= 1
            if not waiting:
                self._carry_out(self.groups.gone(consumers))

        for fence in fences:
            fence.add_done_callback(passed)

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

    def _shard_queues(self, name: VirtualQueueName) -> tuple[int, ...]:
        """Return the ids of the shard queues that front doors know already.

        A queue that is deleted and declared again has another id; ids rise.
        """
        vhost = self._catalog.vhost(name.vhost)
        if vhost is None:
            return ()
        ids = (vhost.queues[queue].id for queue in vhost.shard_queues(name.exchange))
        return tuple(id for id in ids if id <= self._told)

    def _node_of_queue(self, id: int) -> int:
        queue = self._catalog.queue_by_id(id)
        return 0 if queue is None else self._node_of_shard(queue.shard)

    def _moves(self, name: VirtualQueueName) -> tuple[cuts.Move, ...]:
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

    def _carry_out(self, orders: list[GroupOrder]) -> None:
        by_door: dict[tuple[int, int], list[AssignmentOrder]] = {}
        for order in orders:
            said = AssignmentOrder(
                order.kind,
                order.consumer.number,
                AssignmentName(*order.assignment),
                *order.bounds,
                order.fresh,
            )
            by_door.setdefault((order.consumer.door, order.consumer.incarnation), []).append(said)
        for (door, incarnation), said_there in by_door.items():
            self._links.give_orders(door, incarnation, said_there)


def _assignment(said: AssignmentName) -> Assignment:
    return Assignment(said.queue, said.place)
