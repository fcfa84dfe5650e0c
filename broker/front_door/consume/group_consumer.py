"""Consumers of virtual queues, which have an assignment at each shard queue they are given.

The controller decides who has which shard (`controller/groups`). Here assignments begin and end as
it says. A shard moves in four steps, so that messages of one key are never handled by two consumers
at once and never overtake each other:

1. The assignment that has the shard is detached and gets no more messages.
2. What it holds is waited for, for `handover_s` at most.
3. What it still holds then is requeued, in place and marked as redelivered. An ack that comes later
   is no error and has no effect.
4. The controller is told, and gives the shard to the next consumer.

An assignment whose client cancelled stops at step 1 and keeps what it holds. It goes on when that
is settled, or when another consumer is to have the shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final

import msgspec
from pamqp import commands

from shardmq.broker.amqp import ChannelException
from shardmq.broker.front_door.consume.attaching import Attaching, attached
from shardmq.broker.front_door.consume.consumers import (
    Assignment,
    ConsumingChannel,
    EndedConsumer,
    GroupConsumer,
)
from shardmq.broker.front_door.consume.crediting import Crediting
from shardmq.broker.front_door.consume.refusals import CONSUME
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.control import (
    AssignmentGivenUp,
    AssignmentOrder,
    ConsumerHere,
    ConsumerJoin,
    ConsumerLeave,
    MarkPassed,
)
from shardmq.broker.shared.reading import Reading
from shardmq.shardd.wire import messages as wire

log = logging.getLogger("shardmq.broker.front_door.consume.group_consumer")

# A shard queue may be made but not known to its shard yet, or in exclusive use by a client that
# consumes it by its own name.
ATTACH_AGAIN_S: Final = 0.05
ATTACH_AGAIN_S_MAX: Final = 0.5
GIVE, TAKE, BOUND, CLOSE = "give", "take", "bound", "close"


class GroupConsuming:
    """All consumers of virtual queues at this front door."""

    def __init__(
        self, links: ShardLinks, attaching: Attaching, crediting: Crediting, controller: CatalogLink
    ) -> None:
        self._links = links
        self._attaching = attaching
        self._crediting = crediting
        self._controller = controller
        self._all: dict[int, GroupConsumer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what clients ask ------------------------------------------------------------------------

    async def consume(self, group: GroupConsumer) -> commands.Basic.ConsumeOk | None:
        """Begin a consumer whose fields and terms are set; return the answer when it is let in.

        Raises ChannelException when the controller refuses it.
        """
        channel, session = group.channel, group.client.session
        if group.read_from is not None:
            _read_streams(group, group.read_from)
        channel.consumers[group.tag] = group
        channel.groups[group.number] = group
        self._all[group.number] = group
        join = ConsumerJoin(session.vhost, group.exchange, group.number, group.terms)
        group.joining = self._controller.ask(join, session.owner, session.user)
        answer = await group.joining
        if answer.code:
            group.left = True
            self._forget(group)
            raise ChannelException(answer.code, answer.text, *CONSUME)
        return None if group.left else group.announce()

    async def cancel(self, group: GroupConsumer) -> None:
        """End a consumer that its client cancels; return behind its last delivery.

        The client may still settle what the consumer holds.
        """
        self._controller.say(ConsumerLeave(group.number))
        await self._end(group)

    async def _end(self, group: GroupConsumer) -> None:
        group.left = True
        assignments = list(group.assignments.values())
        await asyncio.gather(*(self._stop(assignment) for assignment in assignments))
        for assignment in assignments:
            if not assignment.held:
                self._hand_over_soon(assignment)
        self._forget(group)

    def release(self, channel: ConsumingChannel) -> list[Assignment]:
        """End all consumers of a channel that is gone; return their assignments.

        The caller releases the assignments at their shards and then calls released().
        """
        assignments: list[Assignment] = []
        for group in list(channel.groups.values()):
            if not group.left:
                group.left = True
                self._controller.say(ConsumerLeave(group.number))
            for assignment in group.assignments.values():
                assignment.wanted = assignment.attached = False
                assignment.settled.set()  # nobody settles any more: do not wait for that
                assignments.append(assignment)
            self._forget(group)
        return assignments

    def released(self, assignments: Iterable[Assignment]) -> None:
        """Give up assignments that their shards have released."""
        for assignment in assignments:
            self._gave_up(assignment)

    def settled(self, assignment: Assignment, count: int, epoch: int) -> None:
        """Account for settled deliveries that came from this epoch of the shard."""
        if assignment.let_go(count, epoch == self._links.links[assignment.shard].epoch):
            self.emptied(assignment)

    def emptied(self, assignment: Assignment) -> None:
        """Go on with what waits until an assignment holds nothing."""
        if assignment.leaving:
            assignment.settled.set()
        elif assignment.group.left and not assignment.wanted:
            self._hand_over_soon(assignment)

    # -- what the controller and the shards say --------------------------------------------------

    def here(self) -> list[ConsumerHere]:
        """Return all consumers that were let in, for a controller that does not know them."""
        return [
            ConsumerHere(
                each.number,
                each.client.session.vhost,
                each.exchange,
                each.terms,
                each.left,
                list(each.assignments),
            )
            for each in self._all.values()
            if each.is_let_in
        ]

    def obey(self, orders: Iterable[AssignmentOrder], catalog: Catalog) -> list[EndedConsumer]:
        """Begin and end assignments as the controller says; return the consumers that it ends."""
        ended: list[EndedConsumer] = []
        for order in orders:
            group = self._all.get(order.number)
            assignment = group.assignments.get(order.assignment) if group is not None else None
            if order.kind == GIVE:
                queue = catalog.queue_by_id(order.assignment.queue)
                if group is None or group.left or queue is None:
                    self._controller.say(AssignmentGivenUp(order.number, order.assignment))
                elif assignment is None:
                    self._begin(group, order, queue)
            elif order.kind == TAKE:
                if assignment is None:
                    self._controller.say(AssignmentGivenUp(order.number, order.assignment))
                else:
                    self._hand_over_soon(assignment)
            elif order.kind == BOUND:
                if assignment is not None:
                    assignment.bounds = (order.stop, order.mark)
                    self._tell_bounds(assignment)
            elif group is not None and not group.left:
                ended += self._close(group)
        return ended

    def gone(self, assignment: Assignment) -> None:
        """End an assignment whose queue is deleted."""
        assignment.wanted = assignment.attached = False
        self._crediting.stopped(assignment)
        self._gave_up(assignment)

    def passed(self, number: int, offset: int) -> None:
        """Tell the controller that all before the mark of this assignment is settled."""
        assignment = self._attaching.consumers.get(number)
        if isinstance(assignment, Assignment):
            said = MarkPassed(assignment.group.number, assignment.name, offset)
            self._controller.say(said)

    def _tell_bounds(self, assignment: Assignment) -> None:
        self._links.tell(assignment.shard, wire.SetBounds(assignment.number, *assignment.bounds))

    def _close(self, group: GroupConsumer) -> list[EndedConsumer]:
        """Cancel a consumer whose virtual queue is deleted."""
        self._start(self._end(group))
        if group.channel.consumers.get(group.tag) is not group:
            return []
        del group.channel.consumers[group.tag]
        return [EndedConsumer(group.client, group.channel.number, group.tag, group.announce())]

    # -- the life of an assignment ---------------------------------------------------------------

    def _begin(self, group: GroupConsumer, order: AssignmentOrder, queue: QueuePut) -> None:
        assignment = Assignment(group, self._attaching.next_number(), order.assignment)
        group.assignments[order.assignment] = assignment
        assignment.queue_id, assignment.queue_name = queue.id, queue.name
        assignment.shard = queue.shard
        assignment.auto_delete = queue.auto_delete
        assignment.bounds = (order.stop, order.mark)
        asked = group.read_from
        if asked is not None:
            if order.fresh:
                asked = msgspec.structs.replace(asked, start="first")
            assignment.reading = Reading(asked)
        self._attaching.consumers[assignment.number] = assignment
        self._start(self._attach(assignment))

    async def _attach(self, assignment: Assignment) -> None:
        wait_s = ATTACH_AGAIN_S
        while assignment.wanted:
            bounds = assignment.bounds
            try:
                attached(assignment, await self._attaching.attach(assignment, resumed=False))
            except ShardRefused as refused:
                log.info("queue '%s': %s; trying again", assignment.queue_name, refused)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, ATTACH_AGAIN_S_MAX)
            else:
                assignment.attached = assignment.wanted
                if assignment.bounds != bounds:
                    # The shard may have heard of the new bounds before the consumer was attached.
                    self._tell_bounds(assignment)
                return

    async def _stop(self, assignment: Assignment) -> None:
        """Detach an assignment; return behind its last delivery, or when its shard is away."""
        assignment.wanted = assignment.attached = False
        number, shard = assignment.number, assignment.shard
        detached = self._links.ask(shard, lambda request: wire.Detach(request, number))
        await self._links.unless_away(shard, detached)
        self._crediting.stopped(assignment)

    def _hand_over_soon(self, assignment: Assignment) -> None:
        if not assignment.leaving:
            assignment.leaving = True
            self._start(self._hand_over(assignment))

    async def _hand_over(self, assignment: Assignment) -> None:
        await self._stop(assignment)
        if assignment.held > 0:
            try:
                await asyncio.wait_for(assignment.settled.wait(), assignment.group.handover_s)
            except TimeoutError:
                log.info(
                    "queue '%s' moves on: %d deliveries are requeued",
                    assignment.queue_name,
                    assignment.held,
                )
        numbers = [assignment.number]
        await self._links.ask(assignment.shard, lambda request: wire.Release(request, numbers))
        self._gave_up(assignment)

    def _gave_up(self, assignment: Assignment) -> None:
        group = assignment.group
        if group.assignments.get(assignment.name) is assignment:
            del group.assignments[assignment.name]
            self._crediting.forget_held(assignment)
            self._attaching.consumers.pop(assignment.number, None)
            self._controller.say(AssignmentGivenUp(group.number, assignment.name))
            self._forget(group)

    def _forget(self, group: GroupConsumer) -> None:
        """Forget a consumer that has left; its number, when no assignment is left."""
        if group.left and not group.assignments:
            self._all.pop(group.number, None)
            group.channel.groups.pop(group.number, None)
            self._crediting.close_group(group)
        if group.left and group.channel.consumers.get(group.tag) is group:
            del group.channel.consumers[group.tag]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a consumer of a virtual queue: internal error", exc_info=error)


def _read_streams(group: GroupConsumer, asked: wire.ReadFrom) -> None:
    """Decide which streams a consumer reads, and under which name positions are kept.

    A consumer that names a group shares the streams with it, and the position of the group in each
    stream is kept under its name. A consumer that names no group reads all of them.
    """
    if group.terms.group:
        group.read_from = msgspec.structs.replace(asked, name=group.terms.group)
    else:
        alone = f"{group.client.session.owner} {group.number}"
        group.terms = msgspec.structs.replace(group.terms, group=alone)
