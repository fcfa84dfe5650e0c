"""Whatever dies while a stream moves: offsets keep their messages, and positions come along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from shardmq.broker.controller.moving import mover, stream_copy
from shardmq.broker.model.changes import ARRIVED, Moving, QueuePut, other_life
from shardmq.shardd.store.damage import Damage
from tests.support.moving_world import PromiseBroken, play
from tests.support.stream_moving_world import StreamWorld


@pytest.mark.parametrize("seed", range(30))
def test_offsets_keep_their_messages_whatever_dies_while_a_stream_moves(seed: int) -> None:
    play(seed, of=StreamWorld)


@pytest.mark.parametrize("seed", range(15))
def test_no_position_is_set_back_if_no_process_dies(seed: int) -> None:
    play(seed, of=StreamWorld, kills=0.0)


class Damaged(StreamWorld):
    """A reader meets damage at the old place when the stream has begun to move."""

    async def move(self, kind: type[mover._Move] = mover._Move) -> None:
        stream = self._stream()
        assert stream is not None
        stream.log.stream.known_damage.report(Damage("log.0", "corrupt", 64, 72, (1000, 1001)))
        await super().move(kind)


def test_the_move_of_a_stream_that_has_lost_messages_is_called_off() -> None:
    for seed in range(5):
        world = play(seed, of=Damaged, kills=0.0)
        assert world.view.shard == 0 and world.view.moving is None


class WithoutRest(mover._Move):
    """Lets the new place be used before the last messages are there."""

    async def _end_copy(self, queue: QueuePut, moving: Moving) -> None:
        await self._copy.copy_places(queue, other_life(queue))
        await self._step(moving, ARRIVED)


class WithoutFence(mover._Move):
    """Does not wait for what front doors have routed before."""

    async def _fence(self) -> None:
        pass


async def nothing(*arguments: Any) -> None:
    pass


def found(kind: type[mover._Move] = mover._Move) -> bool:
    for seed in range(200):
        try:
            play(seed, kind, kills=0.0, of=StreamWorld)
        except PromiseBroken:
            return True
    return False


@pytest.mark.parametrize("kind", [WithoutRest, WithoutFence])
def test_the_histories_find_a_move_of_a_stream_that_is_wrong(kind: type[mover._Move]) -> None:
    assert found(kind)


@pytest.mark.parametrize(
    "what",
    [
        lambda: mock.patch.object(stream_copy.StreamCopy, "copy_last_positions", nothing),
        lambda: mock.patch.object(stream_copy.StreamCopy, "copy_places", nothing),
    ],
    ids=["last positions", "all places"],
)
def test_the_histories_find_positions_that_stay_behind(what: Callable[[], Any]) -> None:
    with what():
        assert found()
