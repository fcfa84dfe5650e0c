"""A channel's pipeline with a controller, shards and a session that keep everything in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pamqp import base, commands

from shardmq.broker.amqp.events import Binds
from shardmq.broker.front_door.links.catalog_requests import Reply
from shardmq.broker.front_door.topology import pipeline
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    PermissionPut,
    QueueDelete,
    QueuePut,
    UserPut,
    VhostPut,
)
from shardmq.broker.shared.control import (
    Answer,
    AnyRequest,
    Bind,
    BindMany,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
)
from shardmq.shardd.wire import messages as wire

Exchange, Queue = commands.Exchange, commands.Queue
EVERYTHING = PermissionPut("/", "u", ".*", ".*", ".*")


class FakeController:
    """Applies requests in order when it is told to.

    It makes no checks but for existence.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.asked: list[AnyRequest] = []
        self.open: list[tuple[AnyRequest, asyncio.Future[Answer] | Reply]] = []
        self.at_once = True
        self.ahead = None  # binds wait for their answers

    def ask(self, request: AnyRequest, owner: str, user: str) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._take(request, future)
        return future

    def request(self, request: AnyRequest, owner: str, user: str) -> Reply:
        reply = Reply()
        self._take(request, reply)
        return reply

    def _take(self, request: AnyRequest, answer: asyncio.Future[Answer] | Reply) -> None:
        self.asked.append(request)
        self.open.append((request, answer))
        if self.at_once:
            self.answer_all()

    def answer_all(self) -> None:
        opened, self.open = self.open, []
        for request, future in opened:
            if not future.done():
                future.set_result(self._do(request))

    def _do(self, request: AnyRequest) -> Answer:
        match request:
            case BindMany():
                for done, (source, queue, key) in enumerate(request.binds):
                    answer = self._do(Bind(request.vhost, source, "queue", queue, key, {}))
                    if answer.code:
                        return Answer(1, answer.code, answer.text, {"done": done})
            case QueueDeclare():
                name = request.name or "amq.gen-made"
                id = self.catalog.version + 1
                self.catalog.apply(
                    QueuePut(request.vhost, name, id, 0, arguments=request.arguments)
                )
                return Answer(1, result={"name": name, "messages": 3, "consumers": 1})
            case ExchangeDeclare():
                self.catalog.apply(ExchangePut(request.vhost, request.name, request.type))
            case Bind():
                if self.catalog.exchange(request.vhost, request.source) is None:
                    return Answer(1, 404, f"no exchange '{request.source}' in vhost '/'")
                if self.catalog.vhosts["/"].destination(request.kind, request.destination) is None:
                    return Answer(1, 404, f"no {request.kind} '{request.destination}' in vhost '/'")
                self.catalog.apply(
                    BindingPut(
                        "/", request.source, request.kind, request.destination, request.routing_key
                    )
                )
            case ExchangeRemove():
                self.catalog.apply(ExchangeDelete(request.vhost, request.name))
            case QueueRemove():
                self.catalog.apply(QueueDelete(request.vhost, request.name))
                return Answer(1, result={"messages": 7})
        return Answer(1)


class FakeShards:
    """Shards whose streams are empty."""

    def __init__(self) -> None:
        self.asked: list[wire.Message] = []
        self.told: list[wire.Message] = []

    async def ask(self, shard: int, make: Callable[[int], wire.Message]) -> wire.Control:
        self.asked.append(make(1))
        return wire.StreamInspected(1, 0, 0, 0, 0)

    def tell(self, shard: int, what: wire.Message) -> None:
        self.told.append(what)

    async def count_if_there(self, queue: QueuePut) -> tuple[int, int] | None:
        return None if queue.name == "leaving" else (5, 2)

    async def purge(self, queue: QueuePut) -> int:
        return 4


class FakeSession:
    """Who asks, and the links to the other processes."""

    user, vhost, owner = "u", "/", "0.1.1"

    def __init__(self, *changes: AnyChange) -> None:
        self.catalog = Catalog()
        for change in (VhostPut("/"), UserPut("u", ""), EVERYTHING, *changes):
            self.catalog.apply(change)
        self.catalog_link = FakeController(self.catalog)
        self.shards: Any = FakeShards()


class FakeChannel:
    def __init__(self, last_queue: str = "") -> None:
        self.last_queue = last_queue


MINE = QueuePut("/", "mine", 1, 0, owner="0.1.1")
THEIRS = QueuePut("/", "theirs", 2, 0, owner="0.1.2")
PLAIN = QueuePut("/", "q", 3, 0)
SOURCE = ExchangePut("/", "e", "direct")


class Driver:
    """One channel's pipeline with what it says, in order."""

    def __init__(
        self, session: FakeSession, channel: FakeChannel | None = None, *, at_once: bool = False
    ) -> None:
        self.session = session
        self.controller = self.session.catalog_link
        self.controller.at_once = at_once
        self.said: list[base.Frame] = []
        self.failures: list[Exception] = []
        self.idle = self.waits = 0
        self.pipeline = pipeline.Pipeline(
            session,
            session.catalog_link,  # type: ignore[arg-type]
            StepRunner(session.catalog_link, session.shards),  # type: ignore[arg-type]
            channel or FakeChannel(),
            say=self._say,
            waits=self._waits,
            idle=self._idle,
            failed=self.failures.append,
        )

    def _say(self, method: base.Frame, count: int) -> None:
        self.said += [method] * count

    def _waits(self) -> None:
        self.waits += 1

    def _idle(self) -> None:
        self.idle += 1

    def receive(self, *methods: base.Frame | Binds) -> None:
        for method in methods:
            self.pipeline.receive(method)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        while self.pipeline.busy:
            await self.settle()
            self.controller.answer_all()
        await self.settle()

    @property
    def replies(self) -> list[str]:
        return [method.name for method in self.said]


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())
