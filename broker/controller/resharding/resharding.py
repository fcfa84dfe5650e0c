"""Carries reshards through, step by step, by asking front doors and shards how far they are.

The steps are those of `states.py`. Each request to the authority may be repeated, by this process
or by the one after it. A step whose front door or shard is away is tried again later.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.shard_links import ShardLinks, ShardSilent
from shardmq.broker.controller.requests import Closed, CutOff, Restore, Settled
from shardmq.broker.controller.resharding import cuts, shard_sets
from shardmq.broker.controller.resharding.reshard_progress import (
    Question,
    ReshardProgress,
    step_of,
)
from shardmq.broker.controller.resharding.states import (
    Step,
    is_under_way,
    queues_in,
    queues_losing_keys,
)
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import CLOSING, QueuePut
from shardmq.shardd.wire import messages as wire

POLL_S = 0.1  # between two polls of a reshard
# A poll of a queue costs as much as the queue has. The wait before the next poll grows with what is
# left: it is POLL_S, and once more for each so many messages.
POLL_MESSAGES = 100_000
POLL_S_MAX = 5.0
QUIET_S = 0.5  # between two looks whether a reshard begins, while there is none
RESHARDED = "resharded"  # the reason in x-death of messages that a deadline dead-lettered

log = logging.getLogger(__name__)


class ExchangeName(NamedTuple):
    vhost: str
    exchange: str

    def __str__(self) -> str:
        return f"shards of exchange '{self.exchange}' in vhost '{self.vhost}'"


class Resharding:
    """All reshards under way; `progress` is there to be read by others."""

    def __init__(
        self, catalog: Catalog, authority: Authority, shards: ShardLinks, front_doors: DoorLinks
    ) -> None:
        self._catalog = catalog
        self._authority = authority
        self._shards = shards
        self._front_doors = front_doors
        self.progress: dict[tuple[str, str], ReshardProgress] = {}
        self._tasks: dict[ExchangeName, asyncio.Task[None]] = {}
        self._actions = {
            Step.CLOSING: self._hold_back,
            Step.PASSING: self._pass,
            Step.SETTLING: self._settle,
            Step.SETTLED: self._let_go,
        }

    async def run(self) -> None:
        """Carry reshards through until cancelled.

        Each exchange has a task of its own, so one that waits for a shard delays no other.
        """
        try:
            while True:
                self._begin_new()
                await asyncio.sleep(POLL_S if self._tasks else QUIET_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _begin_new(self) -> None:
        for vhost in self._catalog.vhosts.values():
            for exchange in vhost.part_exchanges():
                name = ExchangeName(vhost.name, exchange)
                if name not in self._tasks and is_under_way(vhost.parts(exchange)):
                    self._tasks[name] = asyncio.create_task(self._carry_through(name))

    def _parts(self, name: ExchangeName) -> list[QueuePut]:
        vhost = self._catalog.vhosts.get(name.vhost)
        return vhost.parts(name.exchange) if vhost is not None else []

    async def _carry_through(self, name: ExchangeName) -> None:
        try:
            while is_under_way(self._parts(name)):
                try:
                    await self.step(name)
                except ShardSilent as error:
                    log.warning("%s wait: %s", name, error)
                progress = self.progress.get(name)
                left = progress.left_in_all if progress is not None else 0
                await asyncio.sleep(min(POLL_S_MAX, POLL_S * (1 + left / POLL_MESSAGES)))
        except Exception:  # the next look begins it again
            log.exception("%s", name)
        finally:
            del self._tasks[name]
            self.progress.pop(name, None)

    async def step(self, name: ExchangeName) -> None:
        """Go through the steps of one reshard as far as nothing has to be waited for."""
        for step, action in self._actions.items():
            if step_of(self._parts(name), self.progress.get(name)) is step:
                await action(name)

    async def _hold_back(self, name: ExchangeName) -> None:
        """Have the queues that gain keys hold back what arrives (closing)."""
        self.progress.pop(name, None)  # of a reshard whose gaining queues were deleted
        closing = await self._authority.tell_shards(queues_in(CLOSING, self._parts(name)))
        if any(map(cuts.is_stream, closing)) and not await self._cut_off(name, closing):
            return
        await self._authority.ask(Closed(*name, frozenset(queue.id for queue in closing)))

    async def _cut_off(self, name: ExchangeName, closing: list[QueuePut]) -> bool:
        """Put a cut at the present end of each stream that gains keys.

        A stream does not hold back what arrives. Instead its consumers do not read on beyond the
        cut. Returns whether every stream has a cut and every front door knows the cuts.
        """
        parts = self._parts(name)
        number = cuts.number_of(parts)
        found = await asyncio.gather(
            *[self._stored_end(queue) for queue in cuts.without_cut(parts, closing)]
        )
        if offsets := {id: offset for id, offset in found if offset is not None}:
            await self._authority.ask(CutOff(*name, number, offsets))
        return len(offsets) == len(found) and await self._front_doors.fence()

    async def _stored_end(self, queue: QueuePut) -> tuple[int, int | None]:
        """Return the queue's id and the offset behind what it has on stable storage.

        The offset is None when the shard does not know the queue.
        """
        answer = await self._shards.request(queue.shard, lambda n: wire.CountUnsettled(n, queue.id))
        return queue.id, answer.until - answer.count if isinstance(
            answer, wire.UnsettledCount
        ) else None

    async def _pass(self, name: ExchangeName) -> None:
        """Wait until all that was routed by the old bindings is at its shard (passing)."""
        now = asyncio.get_running_loop().time()
        progress = self.progress.setdefault(name, ReshardProgress(now))
        # The answer says that the front doors have the new bindings, whoever asked for those.
        await self._authority.ask(Restore(*name))
        progress.passed = await self._front_doors.fence()
        if not progress.passed:
            await self._look_at_deadline(name, progress)

    async def _settle(self, name: ExchangeName) -> None:
        """Ask the queues that lose keys how much they have not settled (settling)."""
        progress, losing = self.progress[name], queues_losing_keys(self._parts(name))
        await asyncio.gather(
            *[self._ask(progress, question) for question in progress.questions(losing)]
        )
        if not progress.is_settled(losing):
            await self._look_at_deadline(name, progress)

    async def _let_go(self, name: ExchangeName) -> None:
        """Let go what was held back, and leave cuts in the streams that lost keys (settled)."""
        progress, losing = self.progress[name], queues_losing_keys(self._parts(name))
        if not progress.is_given_up:
            log.info("%s have changed", name)
        ends = progress.ends(queue for queue in losing if cuts.is_stream(queue))
        await self._authority.ask(Settled(*name, ends))
        self.progress.pop(name, None)

    async def _ask(self, progress: ReshardProgress, question: Question) -> None:
        queue = question.queue
        epoch = self._shards.epoch(queue.shard)
        answer = await self._shards.request(
            queue.shard, lambda n: wire.CountUnsettled(n, queue.id, question.until)
        )
        if epoch != self._shards.epoch(queue.shard):
            return  # it is not known which life of the shard has answered
        if isinstance(answer, wire.UnsettledCount):
            progress.answered(question, epoch, answer.until, answer.count)
        else:
            progress.gone(queue)

    async def _look_at_deadline(self, name: ExchangeName, progress: ReshardProgress) -> None:
        """Do what was chosen for the deadline of the reshard, if the deadline is over."""
        vhost = self._catalog.vhosts.get(name.vhost)
        if vhost is None:  # it was deleted while shards were asked
            return
        deadline_ms, choice = shard_sets.deadline(vhost, name.exchange)
        if not progress.is_overdue(asyncio.get_running_loop().time(), deadline_ms):
            return
        losing = queues_losing_keys(self._parts(name))
        if choice == shard_sets.DEAD_LETTER:
            await asyncio.gather(*[self._dead_letter(progress, queue) for queue in losing])
        elif choice == shard_sets.BREAK_ORDER:
            progress.is_given_up = True
            log.warning(
                "%s: %s ms are over, the order of keys is given up; left behind: %s",
                name, deadline_ms, progress.left(losing),
            )  # fmt: skip

    async def _dead_letter(self, progress: ReshardProgress, queue: QueuePut) -> None:
        """Send what the queue had before the mark to its dead-letter exchange.

        Without such an exchange the messages would be lost, so the reshard waits for them.
        """
        epoch = self._shards.epoch(queue.shard)
        until = progress.until(queue, epoch)
        if until is None:
            return
        to = self._catalog.queue_arguments(queue).get("x-dead-letter-exchange")
        vhost = self._catalog.vhosts.get(queue.vhost)
        if to is None or vhost is None or to not in vhost.exchanges:
            if queue.name not in progress.warned:
                progress.warned.add(queue.name)
                log.warning(
                    "shard queue '%s' in vhost '%s' has no dead-letter exchange: "
                    "what it has is waited for",
                    queue.name,
                    queue.vhost,
                )
            return
        answer = await self._shards.request(
            queue.shard, lambda n: wire.DeadLetterUpTo(n, queue.id, until, RESHARDED)
        )
        if isinstance(answer, wire.Done) and answer.messages:
            log.warning(
                "shard queue '%s' in vhost '%s': the deadline is over, "
                "%d messages are dead-lettered",
                queue.name,
                queue.vhost,
                answer.messages,
            )
