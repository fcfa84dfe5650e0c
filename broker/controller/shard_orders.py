"""The orders and questions to the shards that carry out requests.

The authority decides and changes the catalog. This object knows which queues are on their way to
their shards, and which may be gone there. The links keep the order of the messages to one shard.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.pending import INTERNAL_ERROR, Pending, no_answer
from shardmq.broker.controller.policy_walks import PolicyWalks
from shardmq.broker.controller.requests import Drained, Removal
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    OPEN,
    PASSING,
    SHUT,
    TO_COME,
    QueuePut,
    other_life,
)
from shardmq.broker.model.checks import DELAYS_FOR, home_is_down, no_queue
from shardmq.broker.routing import hidden
from shardmq.broker.shared.control import QueueRemove
from shardmq.shardd.wire import messages as wire


class Creation(NamedTuple):
    """A queue that a request makes."""

    pending: Pending
    queue: QueuePut


Creations = dict[int, list[Creation]]  # by shard


class ShardOrders:
    def __init__(
        self,
        catalog: Catalog,
        shards: ShardLinks,
        put_back: Callable[[Iterable[Pending], bool], None],
        write_log: Callable[[], None],
    ) -> None:
        """Prepare.

        `put_back(requests, first)` puts requests into the authority's inbox again.
        `write_log` writes what was decided so far, so that the next controller knows of it, if the
        disk has room.
        """
        self.policy_walks = PolicyWalks(catalog, shards, self._changed_spec)
        self._catalog = catalog
        self._shards = shards
        self._put_back = put_back
        self._write_log = write_log
        # By queue id: the answer to the creation of a queue, None while that is not sent.
        self._creating: dict[int, Future[Any] | None] = {}
        # By queue id: how often a shard was asked whether the queue may go, without an answer yet.
        self.leaving: Counter[int] = Counter()
        # Queues among them that have changed since. Their shard is told once it has said that they
        # stay; before that it could make anew what it has just deleted.
        self._changed_leaving: set[int] = set()
        # By owner: what a connection asks while its conditional delete is not decided.
        self._held: dict[str, deque[Pending]] = {}

    def holds(self, pending: Pending) -> bool:
        """Hold back a request whose owner waits for a conditional delete, and return True."""
        if pending.owner not in self._held:
            return False
        self._held[pending.owner].append(pending)
        return True

    def hold_of(self, owner: str) -> bool:
        """Return whether requests of an owner are held back."""
        return owner in self._held

    def plan(self, pending: Pending, creations: Creations) -> None:
        """Do what a decision asks of the shards at once; new queues are added to `creations`."""
        decision = pending.decision
        if decision.first is not None:
            self._create_first(decision.first, creations)
            self._ask_whether_to_go(pending, decision.first)
            return
        for queue in decision.create:
            if queue.id in self.leaving:
                self._changed_leaving.add(queue.id)
                continue
            creations.setdefault(queue.shard, []).append(Creation(pending, queue))
            self._creating[queue.id] = None
        if decision.create:
            return
        if decision.count is not None:
            self._create_first(decision.count, creations)
            self._ask_counts(pending, decision.count)
            return
        for queue in decision.uses:
            self._create_first(queue, creations)
            if (creation := self._creating.get(queue.id)) is not None:
                pending.waits += 1
                creation.add_done_callback(pending.shard_came)

    def create(self, shard: int, creations: list[Creation]) -> None:
        """Send one message for all new queues of a batch on one shard.

        The log has their ids before: the next controller would give those that it does not know of
        to other queues, and the shard would take these for the queues that it has. The exception is
        a disk that is full all the same, although there was room when the queues were decided: what
        finds no room waits in memory, and the creation is sent even so.
        """
        self._write_log()
        queues = [creation.queue for creation in creations]
        done = self._shards.request(
            shard, lambda n: wire.CreateQueues(n, [self._spec(queue) for queue in queues])
        )
        for pending, queue in creations:
            self._creating[queue.id] = done
            pending.waits += 1
            done.add_done_callback(pending.shard_came)

        def created(_: Future[Any]) -> None:
            for queue in queues:
                self._creating.pop(queue.id, None)

        done.add_done_callback(created)

    def _create_first(self, queue: QueuePut, creations: Creations) -> None:
        """Send the creation of a queue of this batch, so that a question about it comes behind."""
        if queue.id in self._creating and self._creating[queue.id] is None:
            self.create(queue.shard, creations.pop(queue.shard))

    def _request(
        self, pending: Pending, shard: int, message: Callable[[int], wire.Message]
    ) -> None:
        pending.waits += 1
        self._shards.request(shard, message).add_done_callback(pending.shard_came)

    def _ask_counts(self, pending: Pending, queue: QueuePut) -> None:
        """Ask for the counts of a queue that is declared again.

        The shard may have given the queue up: its last consumer is gone, it has expired, or it was
        deleted on a condition. Then the queue is about to leave the catalog too, and what says so
        came before the refusal and is in the inbox. Behind that the declare is decided again, and
        makes another queue.
        """

        def counted(reply: Future[Any]) -> None:
            refused = reply.exception() is None and isinstance(reply.result(), wire.Refused)
            if refused and pending.missed != queue.id:
                again = Pending(
                    pending.request, pending.owner, pending.answer, queue.id, pending.asked_at
                )
                self._put_back([again], False)
                pending.answer = no_answer
            pending.shard_came(reply)

        if self._shards.is_away(queue.shard):
            refusal = home_is_down(queue)
            pending.refuse(refusal.code, refusal.text)
            return
        pending.waits += 1
        self._shards.request(queue.shard, lambda n: wire.Count(n, queue.id)).add_done_callback(
            counted
        )

    def _ask_whether_to_go(self, pending: Pending, queue: QueuePut) -> None:
        """Ask the shard to delete a queue on a condition: only the shard knows what is in it."""
        ask = pending.request
        assert isinstance(ask, QueueRemove | Drained)
        if self._shards.is_away(queue.shard):
            refusal = home_is_down(queue)
            pending.answer(refusal.code, refusal.text, {})
            return
        if pending.owner:
            self._held[pending.owner] = deque()
        self.leaving[queue.id] += 1
        gone = self._shards.request(
            queue.shard,
            lambda n: wire.DeleteQueue(n, queue.id, if_unused=ask.if_unused, if_empty=ask.if_empty),
        )
        gone.add_done_callback(lambda gone: self._answered(pending, queue, gone))

    def _answered(self, pending: Pending, queue: QueuePut, gone: Future[Any]) -> None:
        """Take the answer to a conditional delete, and go on with what its owner asked after it."""
        held = self._held.pop(pending.owner, deque())
        error, reply = gone.exception(), None if gone.exception() else gone.result()
        refused = (
            reply
            if isinstance(reply, wire.Refused) and reply.code != no_queue("", "").code
            else None
        )
        self._is_decided(queue, stays=error is not None or refused is not None)
        if error is not None:
            pending.answer(INTERNAL_ERROR, str(error), {})
        elif refused is not None:
            text = f"queue '{queue.name}' in vhost '{queue.vhost}' {refused.text}"
            pending.answer(refused.code, text, {})
        else:
            messages = reply.messages if isinstance(reply, wire.Done) else 0
            pending.request = Removal([queue.id], at_shard=True, messages=messages)
            held.appendleft(pending)
        self._put_back(held, True)

    def _is_decided(self, queue: QueuePut, stays: bool) -> None:
        self.leaving[queue.id] -= 1
        if self.leaving[queue.id] > 0 and stays:
            return
        del self.leaving[queue.id]
        changed = queue.id in self._changed_leaving
        self._changed_leaving.discard(queue.id)
        now = self._catalog.queue_by_id(queue.id)
        if changed and stays and now is not None:
            self._shards.request(queue.shard, lambda n: wire.CreateQueues(n, [self._spec(now)]))

    def remove(self, pending: Pending) -> None:
        """Delete at the shards what a decision takes away, once no front door knows it."""
        for queue in pending.decision.drop:
            self._request(pending, queue.shard, lambda n, id=queue.id: wire.DeleteQueue(n, id))  # type: ignore[misc]
        if vhost := pending.decision.drop_vhost:
            for shard in range(self._shards.count):
                self._request(pending, shard, lambda n: wire.DropVhost(n, vhost))

    async def tell(self, queues: list[QueuePut]) -> list[QueuePut]:
        """Tell shards of these queues as they are in the catalog.

        Returns those that their shards know as they are in the catalog now. Raises ShardSilent.
        """
        by_shard: dict[int, list[wire.QueueSpec]] = {}
        for queue in queues:
            if queue.id not in self.leaving and self._catalog.queue_by_id(queue.id) == queue:
                by_shard.setdefault(queue.shard, []).append(self._spec(queue))
        asked = [
            self._shards.request(shard, lambda n, specs=specs: wire.CreateQueues(n, specs))  # type: ignore[misc]
            for shard, specs in by_shard.items()
        ]
        await asyncio.gather(*asked)
        return [
            queue
            for queue in queues
            if queue.id not in self._creating
            and queue.id not in self.leaving
            and self._catalog.queue_by_id(queue.id) == queue
        ]

    def queues_of(self, shard: int) -> list[wire.QueueSpec]:
        """Return what a new process of a shard is told.

        The new life of a queue whose move is called off is among it until the move ends: consumers
        are there until each front door has heard that they go back.
        """
        index = self._catalog.index
        here = [self._spec(queue) for queue in index.all() if queue.shard == shard]
        return here + [
            self._spec(other_life(queue))
            for queue in index.moving()
            if queue.moving is not None and queue.moving.shard == shard
        ]

    def _changed_spec(self, queue: QueuePut) -> wire.QueueSpec | None:
        """Return what the shard of a changed queue is told, None if the queue may just be going."""
        if queue.id in self.leaving:
            self._changed_leaving.add(queue.id)
            return None
        return self._spec(queue)

    def _spec(self, queue: QueuePut) -> wire.QueueSpec:
        """Return a queue as its shard must know it, with its effective arguments.

        The caller tells the shard at once.
        """
        self.policy_walks.seal()
        arguments = self._catalog.queue_arguments(queue)
        if DELAYS_FOR in arguments and not hidden.is_of_exchange(queue.name):
            arguments = {key: value for key, value in arguments.items() if key != DELAYS_FOR}
        exclusive = bool(queue.owner)
        if queue.moving is not None and queue.moving.id == queue.id:
            # Nobody uses it, so it must not go by itself.
            return wire.QueueSpec(
                queue.id,
                queue.vhost,
                queue.name,
                queue.durable,
                exclusive=exclusive,
                arguments={key: value for key, value in arguments.items() if key != "x-expires"},
                paused=True,
                leaving=queue.moving.step in (PASSING, SHUT),
                arriving=queue.moving.step in TO_COME,
            )
        return wire.QueueSpec(
            queue.id,
            queue.vhost,
            queue.name,
            queue.durable,
            queue.auto_delete,
            exclusive,
            arguments,
            queue.paused,
            queue.part is not None and queue.part.held != OPEN,
        )
