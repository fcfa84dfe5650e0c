"""The steps of a method on exchanges and queues: what is asked of other processes, and how.

methods.py decides and returns a `Step`: the reply itself, one question to the controller, or a
generator that yields requests and is sent their answers until it returns the reply. What fails is
raised in the generator, as what it asked for. `StepRunner` is the one place that does what steps
say.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from pamqp import base

from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks, count_if_up
from shardmq.broker.front_door.links.shard_requests import Make
from shardmq.broker.front_door.publish.stored_runs import StoredRun, pack
from shardmq.broker.front_door.session import Session
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.control import Answer, AnyRequest, VirtualLook
from shardmq.shardd.wire import messages as wire

T = TypeVar("T")
Counts = tuple[int, int]  # ready messages and consumers of a queue


class AskController(NamedTuple):
    """Ask the controller. The answer makes the reply; a refusal ends the method."""

    request: AnyRequest
    then: Callable[[Answer], base.Frame]


# -- requests, each with its answer ----------------------------------------------------------------


class AskEach(NamedTuple):
    """Ask the controller these at once: list[Answer]. The first refusal is raised."""

    requests: list[AnyRequest]


class CountQueues(NamedTuple):
    """Ask the shards for the counts of these queues: list[Counts | None].

    None means that a queue is about to go. A queue whose node is down is refused, or counts as
    empty if `if_up` is set.
    """

    queues: tuple[QueuePut, ...]
    if_up: bool = False


class PurgeQueues(NamedTuple):
    """Drop the ready messages of these queues: int, how many there were."""

    queues: tuple[QueuePut, ...]


class AskShard(NamedTuple):
    """Ask a shard: wire.Control. `make` makes the message from the number of the request."""

    shard: int
    make: Make


class Store(NamedTuple):
    """Publish a run of a virtual host: bool, whether it is on stable storage."""

    vhost: str
    run: StoredRun


class Watch(NamedTuple):
    """Begin to count a watch of what goes from a stream to a queue. AskShard begins the watch."""

    stream: QueuePut
    queue: QueuePut


class Unwatch(NamedTuple):
    """End what Watch began. The last one has the shard forget the watch."""

    stream: QueuePut
    queue: QueuePut


class Now(NamedTuple):
    """Read the clock: int, ms since the epoch."""


class Clock(NamedTuple):
    """Read the clock of the loop, which never jumps: float, s."""


class SeeCatalog(NamedTuple):
    """Look at the copy of the catalog that is in force: Catalog."""


class SeeInStep(NamedTuple):
    """Look at the copy of the catalog, when it has all that other nodes know already: Catalog.

    Only in a cluster it can lack something: while a node is cut off, others go on without it.
    """

    vhost: str
    name: str


class Sleep(NamedTuple):
    """Wait for some time."""

    seconds: float


class Follow(NamedTuple):
    """Let these steps go on by themselves, whatever becomes of the connection."""

    steps: Generator[Any, Any, None]


Request = (
    AskEach
    | CountQueues
    | PurgeQueues
    | AskShard
    | Store
    | Watch
    | Unwatch
    | Now
    | Clock
    | SeeCatalog
    | SeeInStep
    | Sleep
    | Follow
)
Steps = Generator[Request, Any, T]
Step = base.Frame | AskController | Steps[base.Frame]


class PendingAnswer(Protocol):
    """The answer of the controller, once it is there (catalog_requests.Reply)."""

    def done(self) -> bool: ...
    def cancel(self) -> Any: ...
    def result(self) -> Any: ...
    def add_done_callback(self, then: Callable[[Any], None], /) -> None: ...


class _Stored:
    """Hears what becomes of a run. The future tells whether it is on stable storage."""

    in_sequence = False  # no producer waits for it

    def __init__(self, connection: int) -> None:
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._refused = False

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        self._refused = self._refused or connection == self._connection

    def confirmed(self) -> None:
        self._end(not self._refused)

    def lost(self) -> None:
        self._end(False)

    def _end(self, stored: bool) -> None:
        if not self.future.done():
            self.future.set_result(stored)


class StepRunner:
    """Does what the steps of all connections of a front door say.

    in_cluster: whether there may be front doors of other nodes.
    """

    def __init__(
        self, controller: CatalogLink, shards: ShardLinks, *, in_cluster: bool = False
    ) -> None:
        self.in_cluster = in_cluster
        self._controller = controller
        self._shards = shards
        # How many binds watch what goes from a stream to a queue, by their ids.
        self._watches: Counter[tuple[int, int]] = Counter()
        self._following: set[asyncio.Task[None]] = set()
        self._closed = False

    def close(self) -> None:
        """Stop: the process ends, and the shards will watch nothing more for it."""
        self._closed = True
        for task in self._following:
            task.cancel()

    async def run(self, steps: Steps[T], session: Session) -> T:
        """Do the steps for a session, and return what they return.

        Raises Refusal when the controller or a shard refuses.
        """
        go_on: Callable[[Any], Request] = steps.send
        answer: Any = None
        try:
            while True:
                try:
                    request = go_on(answer)
                except StopIteration as end:
                    reply: T = end.value
                    return reply
                try:
                    go_on, answer = steps.send, await self._do(request, session)
                except BaseException as error:  # also when the task is cancelled: steps clean up
                    go_on, answer = steps.throw, error
        finally:
            del answer  # an error has this frame in its traceback: they would hold each other

    async def _do(self, request: Request, session: Session) -> Any:
        match request:
            case AskEach(requests):
                return await asyncio.gather(*(self._ask(each, session) for each in requests))
            case CountQueues(queues, if_up):
                if if_up:
                    return await asyncio.gather(*(count_if_up(self._shards, q) for q in queues))
                return await asyncio.gather(*map(self._shards.count_if_there, queues))
            case PurgeQueues(queues):
                return sum(await asyncio.gather(*map(self._shards.purge, queues)))
            case AskShard(shard, make):
                return await self._shards.ask(shard, make)
            case Store(vhost, run):
                stored = _Stored(connection=run[3])
                self._shards.wait_for(pack(self._shards, vhost, [run]), stored)
                self._shards.flush()
                return await stored.future
            case Watch(stream, queue):
                self._watches[stream.id, queue.id] += 1
            case Unwatch(stream, queue):
                self._watches[stream.id, queue.id] -= 1
                if not self._watches[stream.id, queue.id]:
                    del self._watches[stream.id, queue.id]
                    if not self._closed:
                        self._shards.tell(stream.shard, wire.Unwatch(stream.id, queue.id))
            case Now():
                return time.time_ns() // 1_000_000
            case Clock():
                return asyncio.get_running_loop().time()
            case SeeCatalog():
                return self._controller.catalog
            case SeeInStep(vhost, name):
                if self.in_cluster:
                    await self._ask(VirtualLook(vhost, name), session)
                return self._controller.catalog
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case Follow(steps):
                task = asyncio.get_running_loop().create_task(self.run(steps, session))
                self._following.add(task)
                task.add_done_callback(self._following.discard)

    async def _ask(self, request: AnyRequest, session: Session) -> Answer:
        return granted(await self._controller.ask(request, session.owner, session.user))


def granted(answer: Answer) -> Answer:
    """Return the answer. Raises Refusal if the controller refused."""
    if answer.code:
        raise checks.Refusal(answer.code, answer.text)
    return answer
