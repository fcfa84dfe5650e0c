"""A shard queue that is too much goes when it is surely empty, and never before."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.requests import Drained, Restore
from shardmq.broker.controller.resharding import draining
from shardmq.broker.controller.resharding.draining import POLL_S_FIRST, POLL_S_MAX, DrainPolls
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import DRAINING, QueuePut, ShardOf, VhostPut
from shardmq.broker.shared.control import Answer

QUEUES = [QueuePut("/", f"q{i}", i, 0, part=ShardOf("e", i, "", DRAINING)) for i in range(3)]


@given(st.lists(st.dictionaries(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_what_goes_was_seen_empty_twice_in_a_row(history: list[dict[int, int]]) -> None:
    looks, before = DrainPolls(), dict[int, int]()
    for found in history:
        for queue in looks.seen(QUEUES, found):
            assert found[queue.id] == before[queue.id] == 0
        before = found


def test_an_empty_queue_goes_at_the_second_look_and_a_full_one_stays() -> None:
    looks = DrainPolls()
    assert looks.seen(QUEUES, {0: 0, 1: 5}) == []
    assert looks.seen(QUEUES, {0: 0, 1: 5}) == [QUEUES[0]]
    assert looks.seen(QUEUES[1:], {1: 0}) == []
    assert looks.seen(QUEUES[1:], {1: 0}) == [QUEUES[1]]


def test_where_nothing_happens_looks_become_rare() -> None:
    looks = DrainPolls()
    waits = []
    for _ in range(10):
        looks.seen(QUEUES, {1: 5})
        waits.append(looks.wait_s)
    assert waits[0] == POLL_S_FIRST
    assert waits[-1] == POLL_S_MAX
    looks.seen(QUEUES, {1: 4})
    assert looks.wait_s == POLL_S_FIRST
    for _ in range(3):
        looks.seen([], {})
    assert looks.wait_s == POLL_S_FIRST  # to look at nothing costs nothing


class World:
    """One empty draining queue, and front doors.

    The front doors say in turn whether their routed messages have arrived.
    """

    def __init__(self, arrived: list[bool]) -> None:
        self.catalog = Catalog()
        self.catalog.apply(VhostPut("/"))
        self.catalog.apply(QUEUES[1])
        self.said = iter(arrived)
        self.looks = 0
        self.through = asyncio.Event()
        self.gone: list[int] = []
        self.noted: list[QueuePut] = []
        self.may_go = True

    async def note(self, queue: QueuePut) -> bool:
        self.noted.append(queue)
        if not self.may_go and len(self.noted) == 2:
            self.through.set()
        return self.may_go

    async def fence(self) -> bool:
        arrived = next(self.said, None)
        if arrived is None:
            self.through.set()
        return bool(arrived)

    async def messages(self, queues: list[QueuePut]) -> dict[int, int]:
        self.looks += 1
        return {queue.id: 0 for queue in queues}

    async def ask(self, request: Drained | Restore) -> Answer:
        if isinstance(request, Drained):
            assert [queue.id for queue in self.noted] == [request.queue]
            self.gone.append(self.looks)
            self.through.set()
        return Answer(0)


@pytest.mark.parametrize(
    ("arrived", "gone"),
    [([True, True], [2]), ([True, False, True, False], []), ([False, True, True], [2]), ([], [])],
)
async def test_a_queue_goes_only_when_what_front_doors_had_routed_has_arrived(
    arrived: list[bool], gone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "POLL_S_FIRST", 0)
    monkeypatch.setattr(draining, "POLL_S_MAX", 0)
    world = World(arrived)
    running = asyncio.create_task(draining.run(world.catalog, world, world, world, world))
    await asyncio.wait_for(world.through.wait(), 60)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert world.gone == gone


async def test_a_queue_of_which_nothing_can_be_kept_stays_and_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "POLL_S_FIRST", 0)
    monkeypatch.setattr(draining, "POLL_S_MAX", 0)
    world = World([True] * 10)
    world.may_go = False
    running = asyncio.create_task(draining.run(world.catalog, world, world, world, world))
    await asyncio.wait_for(world.through.wait(), 60)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert world.gone == [] and len(world.noted) >= 2
