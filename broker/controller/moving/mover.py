"""Moves queues with their messages to other shards, in order, while clients use them.

A move goes on from its step in the catalog (`decisions/moves.py`), in this process or the one after
it:

0. CHOSEN. The shard at the new place makes the queue.
1. BEGUN. Front doors attach the consumers at the new place, where nothing is yet. The old place
   hands out no more. What clients hold is waited for HANDOVER_S at most; the rest comes again, as
   redelivered.
2. PASSING. The messages go to the new place in order, batch by batch (`shardd/moves.py`), while
   new ones are still published to the old place.
3. SHUT. When little is left, publishers to the queue wait. When all front doors have said that what
   they routed has arrived, the rest of the messages goes over.
4. The new place takes what is published, and the old life of the queue is deleted.

So no message overtakes an older one, and no shard has to know where its messages came from.

A stream moves in another way: its messages keep their offsets, which only one place can give.

0. CHOSEN. The messages are copied to the new place (stream_copy.py). The stream is used at the old
   place.
1. HELD. When little is left, publishers to the stream wait. When all front doors have said that
   what they routed has arrived, the rest is copied, with the positions of consumers.
2. ARRIVED. The new place is used. Front doors attach the consumers there, behind what clients have
   settled. When all have left, the old life of the stream is deleted.

If a shard or a front door is away while publishers wait, they are let go again, and the step
before goes on. So it does if the last messages of a stream are not over within HELD_S.

Only the controller moves messages. The shards drop what an earlier process of it, or one that leads
no more, has sent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.moving.stream_copy import NOT_SYNCED_S, CopyRefused, StreamCopy
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.shard_links import ShardLinks, ShardSilent, visit
from shardmq.broker.controller.pending import INTERNAL_ERROR
from shardmq.broker.controller.requests import MOVED, Move, MoveOn
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    ARRIVED,
    BEGUN,
    CALLED_OFF,
    CHOSEN,
    HELD,
    PASSING,
    SHUT,
    Moving,
    QueuePut,
    other_life,
)
from shardmq.broker.model.checks import PRECONDITION_FAILED
from shardmq.broker.shared.control import Answer
from shardmq.broker.shared.reading import is_stream
from shardmq.shardd.wire import messages as wire

LOOK_S: Final = 0.2  # between two looks whether a move begins
AGAIN_S: Final = 0.5  # before a step is tried again whose shard or front door is away
HANDOVER_S: Final = 0.7
HANDOVER_LOOK_S: Final = 0.02
ANSWER_S: Final = 5.0
# Publishers wait for so many messages at the end of a move. A busy queue whose messages do not get
# fewer within SHRINK_S is shut with more.
SHUT_MESSAGES: Final = 2048
SHRINK_S: Final = 5.0
SHRINK_TO: Final = 0.75
# The same of a stream, in bytes that are left. One that does not get shorter is shut with more.
HOLD_BYTES: Final = 1 << 20
HOLD_BYTES_MAX: Final = 16 << 20
# Publishers to a stream wait so long for its last messages, at most.
HELD_S: Final = 5.0
# Publishers that have waited in vain are let go for so many times as long.
FREE_TIMES: Final = 4
# So many moves of queues pass messages at a time, each until little is left. So many batches of
# streams are under way, for which all streams take turns. The two are counted apart, because
# consumers of a queue must not wait for the copy of a stream.
AT_ONCE: Final = 4
LEAVE_LOOK_S: Final = 0.02  # between two looks whether the consumers of a stream have left

# The code of Refused for a queue whose shard knows sequences of producers.
IN_SEQUENCE: Final = 406
IN_SEQUENCE_TEXT: Final = "producers have published in sequence to it (x-producer-id)"

# What MoveProgress says of a stream of which no less is left than SHRINK_S before.
NOT_SHORTER: Final = "what is left does not get less: as much is published as is copied, or more"
NOT_SYNCED: Final = "what is left is not on stable storage at the old place"

STEP_NAMES: Final = {
    CHOSEN: "chosen",
    BEGUN: "begun",
    PASSING: "passing",
    SHUT: "shut",
    HELD: "held",
    ARRIVED: "arrived",
    CALLED_OFF: "called off",
}

# The step before, in which publishers do not wait.
_LET_GO: Final = {SHUT: PASSING, HELD: CHOSEN}

log = logging.getLogger(__name__)


class QueueName(NamedTuple):
    vhost: str
    name: str

    def __str__(self) -> str:
        return f"the move of queue '{self.name}' in vhost '{self.vhost}'"


@dataclass(slots=True)
class MoveProgress:
    """The progress of a move.

    `waits_for` says why it does not go on, or does not come nearer to its end; "" if it does.
    """

    moved: int = 0
    left: int | None = None
    waits_for: str = ""


class _Away(Exception):
    """A move cannot go on now. The text says why."""


class Moves:
    """All moves under way; `progress` is there to be read by others."""

    def __init__(
        self, catalog: Catalog, authority: Authority, shards: ShardLinks, front_doors: DoorLinks
    ) -> None:
        self.progress: dict[tuple[str, str], MoveProgress] = {}
        self._catalog = catalog
        self._make = partial(_Move, catalog, authority, shards, front_doors)
        self._tasks: dict[QueueName, asyncio.Task[None]] = {}
        self._queues = asyncio.Semaphore(AT_ONCE)
        self._streams = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Carry moves through until cancelled. Each queue has a task of its own."""
        known: set[QueueName] = set()
        try:
            while True:
                moving = self._catalog.index.moving()
                for queue in moving:
                    name = QueueName(queue.vhost, queue.name)
                    if name not in self._tasks:
                        is_own = name in known
                        self._tasks[name] = asyncio.create_task(self._carry(name, is_own))
                known = {QueueName(queue.vhost, queue.name) for queue in moving}
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _carry(self, name: QueueName, is_own: bool) -> None:
        progress = self.progress[name] = MoveProgress()
        queue = self._catalog.queue(*name)
        has_offsets = queue is not None and is_stream(queue.arguments)
        some = self._streams if has_offsets else self._queues
        move = self._make(name, progress, is_own, some)
        try:
            await move.run()
        except Exception:  # the next look begins it again
            log.exception("%s", name)
            await asyncio.sleep(AGAIN_S)
        finally:
            del self._tasks[name]
            self.progress.pop(name, None)


class _Move:
    """The move of one queue."""

    def __init__(
        self,
        catalog: Catalog,
        authority: Authority,
        shards: ShardLinks,
        front_doors: DoorLinks,
        name: QueueName,
        progress: MoveProgress,
        is_own: bool,
        some: asyncio.Semaphore,
    ) -> None:
        """Prepare. `is_own` says that this process has begun to carry the move out before."""
        self._catalog = catalog
        self._authority = authority
        self._shards = shards
        self._front_doors = front_doors
        self._name = name
        self._progress = progress
        self._is_own = is_own
        self._goes_on = False  # for another mover, whose last batch may be at the new place
        self._some = some
        self._mover = secrets.randbits(48)
        self._number = 0  # of the last batch that the new place has
        self._is_prepared = False  # the new place knows this mover
        self._is_shut = False  # by this process
        self._free_until = 0.0  # publishers to a stream are not to wait before; loop time
        self._letters: wire.Letters | None = None  # taken, and not known to be at the new place
        self._copy = StreamCopy(lambda shard, make: shards.request(shard, make, ANSWER_S))
        self._steps = {
            CHOSEN: self._choose,
            BEGUN: self._begin,
            PASSING: self._pass,
            SHUT: self._end,
            HELD: self._end_copy,
            ARRIVED: self._leave,
            CALLED_OFF: self._call_off,
        }

    async def run(self) -> None:
        """Go from step to step until the queue moves no more."""
        while (found := self._found()) is not None:
            queue, moving = found
            began = asyncio.get_running_loop().time()
            try:
                await self._steps[moving.step](queue, moving)
                self._progress.waits_for = ""
            except (ShardSilent, CopyRefused, _Away) as error:
                self._waits_for(str(error))
                if moving.step in _LET_GO:  # publishers must not wait for that
                    self._is_shut = False
                    before = _LET_GO[moving.step]
                    await self._authority.ask(MoveOn(*self._name, moving.id, before))
                    now = asyncio.get_running_loop().time()
                    self._free_until = now + FREE_TIMES * (now - began)
                await asyncio.sleep(AGAIN_S)

    def _found(self) -> tuple[QueuePut, Moving] | None:
        queue = self._catalog.queue(*self._name)
        return None if queue is None or queue.moving is None else (queue, queue.moving)

    def _waits_for(self, why: str) -> None:
        """Note why the move does not go on, and log it once; "": it goes on."""
        if why and why != self._progress.waits_for:
            log.warning("%s waits: %s", self._name, why)
        self._progress.waits_for = why

    async def _step(self, moving: Moving, step: int) -> None:
        """Take a step, or say the present one again; return when it is in force everywhere."""
        answer = await self._authority.ask(MoveOn(*self._name, moving.id, step))
        if answer.code:
            raise _Away(answer.text)

    async def _fence(self) -> None:
        if not await self._front_doors.fence():
            raise _Away("a front door is away, or a shard that a front door waits for")

    async def _ask(self, shard: int, message: Callable[[int], wire.Message]) -> Any:
        reply = await self._shards.request(shard, message, ANSWER_S)
        if isinstance(reply, wire.Refused):
            raise _Away(f"shard {shard}: {reply.text}")
        return reply

    # -- the steps -------------------------------------------------------------------------------

    async def _choose(self, queue: QueuePut, moving: Moving) -> None:
        await self._step(moving, CHOSEN)
        if is_stream(queue.arguments):
            await self._copy_stream(queue, moving)
            return
        reply = await self._shards.request(
            queue.shard, lambda n: wire.Recall(n, queue.id), ANSWER_S
        )
        if isinstance(reply, wire.Refused) and reply.code == IN_SEQUENCE:
            log.error("%s is called off: %s", self._name, IN_SEQUENCE_TEXT)
            await self._step(moving, CALLED_OFF)
        elif isinstance(reply, wire.Refused):
            raise _Away(f"shard {queue.shard}: {reply.text}")
        else:
            await self._step(moving, BEGUN)

    async def _begin(self, queue: QueuePut, moving: Moving) -> None:
        await self._step(moving, BEGUN)
        await self._prepare(queue, is_new=True)
        reply = await self._ask(moving.shard, lambda n: wire.Recall(n, moving.id))
        await self._fence()  # clients have all that the old place has handed out
        until = asyncio.get_running_loop().time() + HANDOVER_S
        while reply.messages and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(HANDOVER_LOOK_S)
            reply = await self._ask(moving.shard, lambda n: wire.Recall(n, moving.id))
        await self._step(moving, PASSING)

    async def _prepare(self, queue: QueuePut, is_new: bool = False) -> None:
        """Make this mover known at the new place, or go on where the process before has ended.

        Requests of another task of this process may still arrive, so none goes on for that.
        """
        if self._is_prepared:
            return
        self._goes_on = not is_new
        if not is_new and not self._is_own:
            last = await self._ask(queue.shard, lambda n: wire.AskLetters(n, queue.id))
            if last.mover:
                self._mover, self._number, self._is_prepared = last.mover, last.number, True
                return
        await self._ask(queue.shard, lambda n: wire.PutLetters(n, queue.id, self._mover, 0))
        self._is_prepared = True

    async def _pass(self, queue: QueuePut, moving: Moving) -> None:
        await self._step(moving, PASSING)
        await self._prepare(queue)
        await self._ask(moving.shard, lambda n: wire.Recall(n, moving.id, at_once=True))
        loop = asyncio.get_running_loop()
        async with self._some:
            before, until = None, loop.time() + SHRINK_S
            while not self._refuses(queue):
                left = await self._carry_some(queue, moving)
                if left <= SHUT_MESSAGES:
                    break
                before = before or left
                if loop.time() >= until:
                    if left > before * SHRINK_TO:
                        break
                    before, until = left, loop.time() + SHRINK_S
        await self._fence()  # a front door that does not answer must not hold publishers up
        self._is_shut = True
        await self._step(moving, SHUT)

    def _refuses(self, queue: QueuePut) -> bool:
        """Return whether the queue refuses publishes when it is full.

        Its publishers wait for all of the move: the old place does not know how full the queue is.
        """
        overflow = str(self._catalog.queue_arguments(queue).get("x-overflow", ""))
        return overflow.startswith("reject-publish")

    async def _end(self, queue: QueuePut, moving: Moving) -> None:
        if not self._is_shut:  # by the process before this one
            raise _Away("the controller has restarted")
        await self._fence()
        while await self._carry_some(queue, moving):
            pass
        await self._step(moving, MOVED)
        self._visit(queue, moving)
        log.info("%s from shard %d to %d is done", self._name, moving.shard, queue.shard)

    # -- the steps of a stream -------------------------------------------------------------------

    async def _copy_stream(self, queue: QueuePut, moving: Moving) -> None:
        new, loop = other_life(queue), asyncio.get_running_loop()
        while loop.time() < self._free_until and self._is_at(moving):
            await asyncio.sleep(LOOK_S)
        try:
            before, until, why = None, loop.time() + SHRINK_S, ""
            copied = 0  # within SHRINK_S
            while self._is_at(moving):
                async with self._some:
                    some = await self._copy.copy_some(queue, new)
                copied += some
                self._progress.moved += some
                self._progress.left = self._copy.left
                left = self._copy.left_bytes
                # Publishers must not wait for an old place that does not sync what it has.
                is_synced = some > 0 or not self._copy.left
                if is_synced and left <= HOLD_BYTES:
                    break
                before = before or left
                if loop.time() >= until:
                    if copied and before * SHRINK_TO < left <= HOLD_BYTES_MAX:
                        break
                    why = "" if left < before else NOT_SHORTER if copied else NOT_SYNCED
                    before, until, copied = left, loop.time() + SHRINK_S, 0
                self._waits_for(why)
                if not some:
                    await asyncio.sleep(NOT_SYNCED_S)
        except CopyRefused as refused:
            await self._give_up(moving, refused)
            return
        await self._fence()  # a front door that does not answer must not hold publishers up
        self._is_shut = True
        await self._step(moving, HELD)

    def _is_at(self, moving: Moving) -> bool:
        """Return whether the move has neither been called off nor ended with its stream."""
        found = self._found()
        return found is not None and found[1] == moving

    async def _end_copy(self, queue: QueuePut, moving: Moving) -> None:
        if not self._is_shut:  # by the process before this one
            raise _Away("the controller has restarted")
        new = other_life(queue)
        goes_on = partial(self._is_at, moving)
        try:
            async with asyncio.timeout(HELD_S):
                await self._fence()
                self._progress.moved += await self._copy.copy_rest(queue, new, goes_on)
                if not goes_on():
                    return  # it is called off, or the stream is gone
                self._progress.left = 0
                await self._copy.copy_places(queue, new)
        except TimeoutError:
            raise _Away(f"the last messages are not over within {HELD_S:g} s") from None
        except CopyRefused as refused:
            await self._give_up(moving, refused)
            return
        await self._step(moving, ARRIVED)

    async def _give_up(self, moving: Moving, refused: CopyRefused) -> None:
        """Call the move off if the stream cannot be copied, or raise what may pass."""
        if refused.code not in (wire.GAP, wire.BEYOND):
            raise refused
        log.error("%s is called off: %s", self._name, refused.text)
        await self._step(moving, CALLED_OFF)

    async def _leave(self, queue: QueuePut, moving: Moving) -> None:
        old = other_life(queue)
        await self._step(moving, ARRIVED)
        await self._fence()  # no consumer is on its way to the old place any more
        while (await self._ask(old.shard, lambda n: wire.Count(n, old.id))).consumers:
            await asyncio.sleep(LEAVE_LOOK_S)
        await self._copy.copy_last_positions(old, queue)
        await self._step(moving, MOVED)
        log.info("%s from shard %d to %d is done", self._name, old.shard, queue.shard)

    async def _call_off(self, queue: QueuePut, moving: Moving) -> None:
        await self._step(moving, CALLED_OFF)
        await self._step(moving, MOVED)
        log.info("%s is called off", self._name)

    def _visit(self, queue: QueuePut, moving: Moving) -> None:
        """Let an auto-delete queue go whose last consumer left while it moved."""
        if not queue.auto_delete or moving.id not in self._shards.used(moving.shard):
            return
        number = self._mover & 0xFFFFFFFF
        for ask in (
            partial(visit, queue=queue.id, consumer=number),
            partial(wire.Release, consumers=[number]),
        ):
            self._shards.request(queue.shard, ask).add_done_callback(asyncio.Future.exception)

    # -- messages --------------------------------------------------------------------------------

    async def _carry_some(self, queue: QueuePut, moving: Moving) -> int:
        """Carry one batch over; return how many messages may be left, 0 if there are none."""
        number = self._number + 1
        if self._letters is None:
            letters = await self._ask(
                moving.shard,
                lambda n: wire.TakeLetters(
                    n, moving.id, self._mover, number, queue.id, self._goes_on
                ),
            )
            assert isinstance(letters, wire.Letters)
            self._goes_on = False
            self._progress.left = letters.left
            if not letters.count:
                return 0
            self._letters = letters
        letters = self._letters
        await self._ask(
            queue.shard,
            lambda n: wire.PutLetters(
                n, queue.id, self._mover, number, letters.records, letters.marked, letters.times
            ),
        )
        self._number, self._letters = number, None
        self._progress.moved += letters.count
        return letters.left + 1


async def begin(
    catalog: Catalog, authority: Authority, shards: ShardLinks, vhost: str, name: str, shard: int
) -> Answer:
    """Begin to move a queue to a shard; return when it has begun, or why it is refused."""
    queue = catalog.queue(vhost, name)
    if queue is not None and 0 <= shard != queue.shard:
        for number in (queue.shard, shard):
            if number < shards.count and not shards.shards[number].ready:
                text = f"queue '{name}' in vhost '{vhost}' cannot be moved: shard {number} is down"
                return Answer(0, PRECONDITION_FAILED, text)
        ask: Callable[[int], wire.Message] = partial(wire.Recall, queue=queue.id)
        if is_stream(queue.arguments):
            ask = partial(wire.TakeChunks, queue=queue.id, offset=0)
        try:
            reply = await shards.request(queue.shard, ask, ANSWER_S)
        except ShardSilent as error:
            return Answer(0, INTERNAL_ERROR, str(error))
        if isinstance(reply, wire.Refused) and reply.code in (IN_SEQUENCE, wire.GAP):
            why = IN_SEQUENCE_TEXT if reply.code == IN_SEQUENCE else reply.text
            text = f"queue '{name}' in vhost '{vhost}' cannot be moved: {why}"
            return Answer(0, PRECONDITION_FAILED, text)
    return await authority.ask(Move(vhost, name, shard))
