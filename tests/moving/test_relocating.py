"""A drain and a rebalancing go on, though moves of streams do not end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shardmq.broker.controller.cluster_view import KnownNode, places_of
from shardmq.broker.controller.moving import mover
from shardmq.broker.controller.moving.relocating import AT_ONCE, Relocating
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    CHOSEN,
    DRAINED_NODES,
    Moving,
    ParameterPut,
    QueuePut,
    VhostPut,
)
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import Answer
from shardmq.broker.shared.reading import is_stream
from shardmq.cluster.replicas import Replicas

STREAM = {"x-queue-type": "stream"}
NODES = [KnownNode(0, "n0", (0,), True), KnownNode(1, "n1", (1,), True)]


class World:
    """Two nodes with a shard each. Shard 0 has all queues and streams, and streams come first."""

    def __init__(self, patch: pytest.MonkeyPatch, queues: int, streams: int) -> None:
        self.catalog = Catalog(routes=False)
        self.catalog.apply(VhostPut("/"))
        kinds = [("stream", number, STREAM) for number in range(streams)]
        kinds += [("queue", number, {}) for number in range(queues)]
        for id, (kind, number, arguments) in enumerate(kinds, 1):
            self.catalog.apply(QueuePut("/", f"{number}-{kind}", id, 0, arguments=arguments))
        self.begun: list[str] = []
        placement = Placement([], places_of(NODES))
        authority: Any = SimpleNamespace(
            places=placement.without(frozenset()), asked=lambda queue: Replicas(1, 1)
        )
        self._authority, self._placement = authority, placement
        shards: Any = None
        view: Any = SimpleNamespace(nodes=NODES)
        self.relocating = Relocating(self.catalog, authority, shards, view)
        patch.setattr(mover, "begin", self._begin)

    def drain(self) -> None:
        self.catalog.apply(ParameterPut("", DRAINED_NODES, "n0", True))
        self._authority.places = self._placement.without({"n0"})

    async def _begin(self, catalog: Any, authority: Any, shards: Any, *what: Any) -> Answer:
        vhost, name, shard = what
        queue = catalog.queue(vhost, name)
        self.begun.append(name)
        moving = Moving(1000 + queue.id, shard, CHOSEN)
        catalog.apply(msgspec.structs.replace(queue, moving=moving))
        return Answer(0)

    def moving(self, of_streams: bool) -> list[QueuePut]:
        found = self.catalog.index.moving()
        return [queue for queue in found if is_stream(queue.arguments) is of_streams]

    def end(self, queues: list[QueuePut]) -> None:
        for queue in queues:
            assert queue.moving is not None
            self.catalog.apply(
                msgspec.structs.replace(queue, shard=queue.moving.shard, moving=None)
            )

    async def let_queues_move(self, times: int) -> None:
        for _ in range(times):
            assert await self.relocating._begin_next()
            for of_streams in (False, True):
                assert len(self.moving(of_streams)) <= AT_ONCE
            self.end(self.moving(of_streams=False))


@pytest.mark.parametrize("how", ["drain", "rebalance"])
async def test_queues_move_though_no_move_of_a_stream_ends(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    world = World(monkeypatch, queues=8, streams=8)
    if how == "drain":
        world.drain()
        expected = {f"{number}-queue" for number in range(8)}
    else:
        world.relocating.rebalance()
        plan = {each.queue.name for each in world.relocating.plan()}
        expected = {name for name in plan if name.endswith("queue")}
    await world.let_queues_move(10)
    moved = {name for name in world.begun if name.endswith("queue")}
    assert moved == expected and moved
    assert len(world.moving(of_streams=True)) == AT_ONCE


async def test_streams_move_one_after_the_other_beside_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, queues=3, streams=5)
    world.drain()
    assert await world.relocating._begin_next()
    assert [name.partition("-")[2] for name in world.begun] == ["queue", "stream"]
    for _ in range(8):
        world.end([*world.moving(of_streams=False), *world.moving(of_streams=True)])
        await world.relocating._begin_next()
    assert {queue.shard for queue in world.catalog.index.all()} == {1}
    assert not await world.relocating._begin_next()
