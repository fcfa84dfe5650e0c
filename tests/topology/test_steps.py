"""The steps of a method are carried out, and each outcome or failure comes back to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardmq.broker.front_door.publish.stored_runs import NO_TTL
from shardmq.broker.front_door.topology.steps import (
    AskEach,
    AskShard,
    CountQueues,
    Follow,
    Now,
    PurgeQueues,
    SeeCatalog,
    Sleep,
    StepRunner,
    Store,
    Unwatch,
    Watch,
)
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared.control import Answer, QueueRemove
from shardmq.shardd.wire import messages as wire
from tests.support.fake_publishing import Links
from tests.topology.topology_play import FakeController, FakeSession

STREAM, QUEUE, OTHER = QueuePut("/", "s", 9, 0), QueuePut("/", "q", 3, 1), QueuePut("/", "r", 4, 0)
MESSAGE = b"\x01\0\0\0\x02\0\0\0\x00\x01k\0\0x"
RUN = (1, [3], MESSAGE, 77, 0, 0, 0, NO_TTL, 0, False, False, 1, False, 0)


class Shards(Links):
    """Shards that answer when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0

    def flush(self) -> None:
        self.flushes += 1

    async def count_if_there(self, queue: QueuePut) -> tuple[int, int]:
        return queue.id, 1

    async def purge(self, queue: QueuePut) -> int:
        return queue.id


class Bench:
    def __init__(self) -> None:
        self.session = FakeSession(STREAM, QUEUE)
        self.controller: FakeController = self.session.catalog_link
        self.shards = Shards()
        self.runner = StepRunner(self.controller, self.shards)  # type: ignore[arg-type]

    def start(self, steps: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(self.runner.run(steps, self.session))

    def unwatched(self) -> list[wire.Message]:
        return [what for _, what in self.shards.told]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def watching(*queues: QueuePut, then: Any = Sleep(0)) -> Any:
    for queue in queues:
        yield Watch(STREAM, queue)
    try:
        yield then
    finally:
        for queue in queues:
            yield Unwatch(STREAM, queue)


async def test_each_request_has_its_answer() -> None:
    bench = Bench()

    def steps() -> Any:
        answers = yield AskEach([QueueRemove("/", "q", False, False)] * 2)
        counts = yield CountQueues((STREAM, QUEUE))
        purged = yield PurgeQueues((STREAM, QUEUE))
        nothing = yield Sleep(0)
        return answers, counts, purged, nothing, (yield SeeCatalog()), (yield Now())

    answers, counts, purged, nothing, catalog, now_ms = await bench.runner.run(
        steps(), bench.session
    )
    assert answers == [Answer(1, result={"messages": 7})] * 2
    assert (counts, purged, nothing) == ([(9, 1), (3, 1)], 12, None)
    assert catalog is bench.session.catalog and now_ms > 1_700_000_000_000


async def test_a_shard_is_asked_and_a_refusal_is_raised_in_the_steps() -> None:
    bench = Bench()
    bench.controller._do = lambda request: Answer(1, 403, "no")  # type: ignore[method-assign]

    def steps() -> Any:
        looked = yield AskShard(0, lambda request: wire.InspectStream(request, 9, 3, 0, 0))
        try:
            yield AskEach([QueueRemove("/", "q", False, False)])
        except Refusal as refusal:
            return looked, refusal.code

    task = bench.start(steps())
    await settle()
    ((shard, what, answer),) = bench.shards.asked
    assert (shard, what) == (0, wire.InspectStream(1, 9, 3, 0, 0))
    answer.set_result(looked := wire.StreamInspected(1, 0, 0, 0, 0))
    assert await task == (looked, 403)


@pytest.mark.parametrize(
    ("fate", "stored"),
    [
        (lambda waiting: waiting.confirmed(), True),
        (lambda waiting: waiting.lost(), False),
        (lambda waiting: (waiting.refuse(77, 0, 0, 0), waiting.confirmed()), False),
        (lambda waiting: (waiting.refuse(9, 1, 1, 1), waiting.confirmed()), True),
        (lambda waiting: (waiting.lost(), waiting.confirmed()), False),
    ],
    ids=["stored", "lost", "refused", "of another refused", "lost and then found"],
)
async def test_a_run_is_sent_at_once_and_what_becomes_of_it_is_heard(
    fate: Any, stored: bool
) -> None:
    bench = Bench()

    def steps() -> Any:
        return (yield Store("v", RUN))

    task = bench.start(steps())
    await settle()
    assert (bench.shards.vhost, bench.shards.flushes, bench.shards.stored()) == (
        "v",
        1,
        [(1, (3,), MESSAGE)],
    )
    (waiting,) = bench.shards.waiting
    assert not waiting.in_sequence
    fate(waiting)
    assert await task is stored


async def test_the_shard_forgets_a_watch_with_the_last_who_watches() -> None:
    bench = Bench()
    first = bench.start(
        watching(QUEUE, then=AskShard(0, lambda request: wire.InspectStream(request, 9, 3, 0, 0)))
    )
    await settle()
    await bench.start(watching(QUEUE, OTHER))
    assert bench.unwatched() == [wire.Unwatch(9, 4)]
    first.cancel()
    await settle()
    assert first.cancelled()
    assert bench.unwatched() == [wire.Unwatch(9, 4), wire.Unwatch(9, 3)]


async def test_what_follows_goes_on_by_itself_until_the_process_ends() -> None:
    bench = Bench()

    def steps() -> Any:
        yield Follow(watching(QUEUE, then=Sleep(0)))
        yield Follow(watching(OTHER, then=Sleep(60)))
        return "reply"

    assert await bench.start(steps()) == "reply"
    await settle()
    assert bench.unwatched() == [wire.Unwatch(9, 3)]
    (task,) = bench.runner._following
    bench.runner.close()
    await settle()
    assert task.cancelled() and bench.runner._following == set()
    assert bench.unwatched() == [wire.Unwatch(9, 3)], "the links are closed by then"
