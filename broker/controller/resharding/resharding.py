"""Carries changes of the number of shards through, step by step: asks front doors and shards how far they are.

What the steps are is said by `shard_sets` and `settling`; each request here may be made again, by this process or the
one after it. A step whose front door or shard is away is tried again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from shardmq.broker.controller.authority import ShardSilent
from shardmq.broker.controller.requests import Closed, CutOff, Restore, Settled
from shardmq.broker.controller.resharding import cuts, settling, shard_sets
from shardmq.broker.controller.resharding.settling import (
    BREAK_ORDER,
    DEAD_LETTER,
    Question,
    Settling,
)
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import SETTLING, QueuePut
from shardmq.broker.shared.control import Answer
from shardmq.shardd.wire import messages as wire

LOOK_S = 0.1  # between two looks while something changes
# A look at a queue costs as much as it has: of so many messages that are left it takes twice as long to the next.
LOOK_MESSAGES = 100_000
LOOK_S_MAX = 5.0
QUIET_S = 0.5  # and else
RESHARDED = "resharded"  # the reason in x-death of what a deadline let go

log = logging.getLogger(__name__)


class Asked(Protocol):
    """What is needed of the authority."""

    async def ask(self, request: Closed | CutOff | Restore | Settled) -> Answer: ...
    async def told(self, queues: list[QueuePut]) -> list[QueuePut]: ...


class Shards(Protocol):
    def request(
        self, shard: int, message: Callable[[int], wire.Message]
    ) -> asyncio.Future[Any]: ...
    def epoch(self, shard: int) -> int: ...


class Doors(Protocol):
    async def fence(self) -> bool: ...


class Name(NamedTuple):
    vhost: str
    exchange: str


class Resharding:
    """All changes under way. `settling` is there to be looked at."""

    def __init__(self, catalog: Catalog, authority: Asked, shards: Shards, doors: Doors) -> None:
        self._catalog, self._authority, self._shards, self._doors = (
            catalog,
            authority,
            shards,
            doors,
        )
        self.settling: dict[tuple[str, str], Settling] = {}
        self._tasks: dict[Name, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled. Each exchange goes its own way: one that waits for a shard delays no other."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK_S if self._tasks else QUIET_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _look(self) -> None:
        for vhost in self._catalog.vhosts.values():
            for exchange in vhost.part_exchanges():
                name = Name(vhost.name, exchange)
                if name not in self._tasks and settling.under_way(vhost.parts(exchange)):
                    task = self._tasks[name] = asyncio.create_task(self._carry_through(name))
                    task.add_done_callback(lambda task, name=name: self._ended(name, task))  # type: ignore[misc]

    def _ended(self, name: Name, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        self.settling.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "shards of exchange '%s' in vhost '%s'", name.exchange, name.vhost, exc_info=error
            )

    def _parts(self, name: Name) -> list[QueuePut]:
        vhost = self._catalog.vhosts.get(name.vhost)
        return vhost.parts(name.exchange) if vhost is not None else []

    async def _carry_through(self, name: Name) -> None:
        while settling.under_way(self._parts(name)):
            try:
                await self.step(name)
            except ShardSilent as error:
                log.warning(
                    "shards of exchange '%s' in vhost '%s' wait: %s",
                    name.exchange,
                    name.vhost,
                    error,
                )
            change = self.settling.get(name)
            left = change.left_in_all if change is not None else 0
            await asyncio.sleep(min(LOOK_S_MAX, LOOK_S * (1 + left / LOOK_MESSAGES)))

    async def step(self, name: Name) -> None:
        """As far as it goes without waiting for messages."""
        parts = self._parts(name)
        if any(shard_sets.held_of(queue) == SETTLING for queue in parts):
            await self._settle(name, parts)
        elif settling.under_way(parts):
            await self._close(name, parts)

    async def _close(self, name: Name, parts: list[QueuePut]) -> None:
        closing = await self._authority.told(settling.to_close(parts))
        if any(map(cuts.is_stream, closing)) and not await self._cut_off(name, closing):
            return
        await self._authority.ask(Closed(*name, frozenset(queue.id for queue in closing)))

    async def _cut_off(self, name: Name, closing: list[QueuePut]) -> bool:
        """Streams do not keep back what arrives; who reads all shards does not read on there beyond what they have now.
        Whether all who do know that."""
        parts = self._parts(name)
        number = cuts.number_of(parts)
        found = await asyncio.gather(
            *[self._stored(queue) for queue in cuts.without_cut(parts, closing)]
        )
        if offsets := {id: offset for id, offset in found if offset is not None}:
            await self._authority.ask(CutOff(*name, number, offsets))
        return len(offsets) == len(found) and await self._doors.fence()

    async def _stored(self, queue: QueuePut) -> tuple[int, int | None]:
        """Its id, and behind what it has on stable storage; None: its shard does not know it."""
        answer = await self._shards.request(queue.shard, lambda n: wire.Left(n, queue.id))
        return queue.id, answer.until - answer.left if isinstance(answer, wire.Marked) else None

    async def _settle(self, name: Name, parts: list[QueuePut]) -> None:
        change = self.settling.get(name)
        if change is None:
            change = self.settling[name] = Settling(asyncio.get_running_loop().time())
        losing = settling.losers(parts)
        if not change.passed:
            # Answered when the front doors have the new bindings, whoever asked for them.
            await self._authority.ask(Restore(*name))
            change.passed = await self._doors.fence()
        await asyncio.gather(
            *[self._ask(change, question) for question in change.questions(losing)]
        )
        if change.is_settled(losing):
            log.info(
                "shards of exchange '%s' in vhost '%s' have changed", name.exchange, name.vhost
            )
        elif not await self._is_given_up(name, change, losing):
            return
        ends = change.ends([queue for queue in losing if cuts.is_stream(queue)])
        await self._authority.ask(Settled(*name, ends))
        self.settling.pop(name, None)

    async def _ask(self, change: Settling, question: Question) -> None:
        queue = question.queue
        epoch = self._shards.epoch(queue.shard)
        answer = await self._shards.request(
            queue.shard, lambda n: wire.Left(n, queue.id, question.until)
        )
        if epoch != self._shards.epoch(queue.shard):
            return  # which of its lives has answered is not known
        if isinstance(answer, wire.Marked):
            change.answered(question, epoch, answer.until, answer.left)
        else:
            change.gone(queue)

    async def _is_given_up(self, name: Name, change: Settling, losing: list[QueuePut]) -> bool:
        """Whether what is left is waited for no longer; what is chosen for the deadline is done."""
        deadline_ms, choice = shard_sets.deadline(self._catalog.vhosts[name.vhost], name.exchange)
        if not change.is_overdue(asyncio.get_running_loop().time(), deadline_ms):
            return False
        if choice == DEAD_LETTER:
            await asyncio.gather(*[self._let_go(change, queue) for queue in losing])
        if choice != BREAK_ORDER:
            return False
        log.warning(
            "shards of exchange '%s' in vhost '%s': %s ms are over, the order of keys is given up; left behind: %s",
            name.exchange, name.vhost, deadline_ms, change.left(losing),
        )  # fmt: skip
        return True

    async def _let_go(self, change: Settling, queue: QueuePut) -> None:
        """To its dead-letter exchange. Without one it would be lost, so then it is waited for."""
        epoch = self._shards.epoch(queue.shard)
        until = change.until(queue, epoch)
        if until is None:
            return
        to = self._catalog.queue_arguments(queue).get("x-dead-letter-exchange")
        if to is None or to not in self._catalog.vhosts[queue.vhost].exchanges:
            if queue.name not in change.told:
                change.told.add(queue.name)
                log.warning("shard queue '%s' in vhost '%s' has no dead-letter exchange: what it has is waited for",
                            queue.name, queue.vhost)  # fmt: skip
            return
        answer = await self._shards.request(
            queue.shard, lambda n: wire.LetGo(n, queue.id, until, RESHARDED)
        )
        if isinstance(answer, wire.Done) and answer.messages:
            log.warning("shard queue '%s' in vhost '%s': the deadline is over, %d messages are dead-lettered",
                        queue.name, queue.vhost, answer.messages)  # fmt: skip
