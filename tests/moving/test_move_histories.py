"""Whatever dies while a queue moves: order holds, nothing is lost, what comes twice is marked."""

from __future__ import annotations

from unittest import mock

import pytest

from shardmq.broker.controller.moving import mover
from shardmq.broker.controller.shard_orders import ShardOrders
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import CALLED_OFF, Moving, QueuePut
from shardmq.shardd import moves
from shardmq.shardd.peers import Peer
from shardmq.shardd.wire import messages as m
from tests.support.moving_world import PromiseBroken, play

SEEDS = range(30)

on_put = moves.Moves.on_put
queues_of = ShardOrders.queues_of


@pytest.mark.parametrize("seed", SEEDS)
def test_order_and_messages_survive_whatever_dies_while_a_queue_moves(seed: int) -> None:
    play(seed)


class WithoutShutting(mover._Move):
    """Lets the new place take messages before the old ones are there."""

    async def _end(self, queue: QueuePut, moving: Moving) -> None:
        await self._step(moving, mover.MOVED)
        while await self._carry_some(queue, moving):
            pass


class WithoutFence(mover._Move):
    """Does not wait for what front doors have routed before."""

    async def _fence(self) -> None:
        pass


class Forgetful(mover._Move):
    """Takes a batch for stored when its answer is late."""

    async def _carry_some(self, queue: QueuePut, moving: Moving) -> int:
        try:
            return await super()._carry_some(queue, moving)
        except mover.ShardSilent:
            if self._letters is not None:
                self._number, self._letters = self._number + 1, None
            raise


@pytest.mark.parametrize("kind", [WithoutShutting, WithoutFence, Forgetful])
def test_the_histories_find_a_move_that_is_wrong(kind: type[mover._Move]) -> None:
    for seed in range(200):
        try:
            play(seed, kind, kills=0.0)
        except PromiseBroken:
            return
    raise AssertionError("not found")


def test_the_histories_find_a_shard_that_stores_a_batch_twice() -> None:
    """Acknowledged messages would come again, as redelivered, though no shard has died."""
    forgetful = mock.patch.object(moves.Moves, "on_put", _put_as_if_new)
    with forgetful, pytest.raises(PromiseBroken, match="comes again after its ack"):
        for seed in range(200):
            play(seed, kills=0.0)


def _put_as_if_new(self: moves.Moves, peer: Peer, put: m.PutLetters, now: int) -> None:
    self._taken.pop(put.queue, None)
    on_put(self, peer, put, now)


class GivesIdsTwice(Definitions):
    """Forgets at a restart which id a move has given to the new life of its queue."""

    def load(self) -> Catalog:
        catalog = super().load()
        self.last_queue_id = max((queue.id for queue in catalog.index.all()), default=0)
        return catalog


def test_the_histories_find_definitions_that_give_an_id_twice() -> None:
    for seed in range(200):
        try:
            play(seed, definitions=GivesIdsTwice)
        except PromiseBroken:
            return
    raise AssertionError("not found")


def _queues_of_without_called_off(self: ShardOrders, shard: int) -> list[m.QueueSpec]:
    gone = [
        queue.moving.id
        for queue in self._catalog.index.moving()
        if queue.moving is not None and queue.moving.step == CALLED_OFF
    ]
    return [spec for spec in queues_of(self, shard) if spec.id not in gone]


def test_the_histories_find_a_place_that_is_forgotten_before_consumers_have_left() -> None:
    """A move is called off, and the shard of the new place dies before front doors hear of it."""
    forgetful = mock.patch.object(ShardOrders, "queues_of", _queues_of_without_called_off)
    with forgetful, pytest.raises(PromiseBroken, match="does not know the queue"):
        for seed in range(200):
            play(seed)
