"""Whatever dies while a stream moves: offsets keep their messages, and positions come along."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from shardmq.broker.controller.moving import mover, stream_copy
from shardmq.broker.model.changes import ARRIVED, CHOSEN, HELD, Moving, QueuePut, other_life
from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.streams.copies import LogCopies
from shardmq.shardd.wire.messages import PutChunks, TakeChunks
from tests.reference.record import split_messages
from tests.support.faulty_files import FaultyFiles
from tests.support.moving_world import PromiseBroken, ShardLife, number_in, play
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


class Stuck(StreamWorld):
    """The disk of the old place does not answer while publishers wait, until they are let go."""

    calls_off = 0.0

    def __init__(self, *arguments: Any) -> None:
        self.let_go = self.waits = 0
        super().__init__(*arguments)

    @property
    def is_held(self) -> bool:
        return self.view.moving is not None and self.view.moving.step == HELD

    def may_sync(self, shard: ShardLife) -> bool:
        return self.let_go == 2 or not self.is_held or shard.number != self.view.shard

    def happen(self) -> None:
        super().happen()
        self.waits = self.waits + 1 if self.is_held else 0
        if self.waits > 50:
            self.pass_deadlines()
        if self.waits > 5000:
            raise PromiseBroken("publishers wait for ever")

    def apply(self) -> None:
        was_held = self.is_held
        super().apply()
        moving = self.view.moving
        self.let_go += was_held and moving is not None and moving.step == CHOSEN


def test_publishers_do_not_wait_for_a_place_that_does_not_sync() -> None:
    worlds = [play(seed, kills=0.0, of=Stuck) for seed in range(10)]
    assert any(isinstance(world, Stuck) and world.let_go == 2 for world in worlds)


class WithoutDeadline(Stuck):
    @contextlib.asynccontextmanager
    async def deadline(self, seconds: float) -> AsyncIterator[None]:
        yield


def test_the_histories_find_publishers_that_wait_without_a_limit() -> None:
    assert found(of=WithoutDeadline)


class Sparing(StreamWorld):
    """Nothing is put at the new place while there is nothing new."""

    copied = 0

    def request(self, number: int, make: Any, wait_s: float = 0) -> Any:
        message, moving = make(0), self.view.moving
        if isinstance(message, PutChunks) and moving is not None and moving.step == CHOSEN:
            self.copied += 1
            if not message.chunks:
                raise PromiseBroken("nothing is put at the new place")
        return super().request(number, make, wait_s)


def test_only_messages_are_put_at_the_new_place_while_a_stream_is_copied() -> None:
    worlds = [play(seed, of=Sparing) for seed in range(5)]
    assert all(isinstance(world, Sparing) and world.copied for world in worlds)


class Elected(StreamWorld):
    """Once, a copy leads the old place that lacks the last messages, and takes in others."""

    behind: FaultyFiles | None = None
    takes = 0

    def __init__(self, *arguments: Any) -> None:
        self.lost: set[int] = set()
        super().__init__(*arguments)

    def _numbers(self) -> set[int]:
        """Return the messages that lie where the stream is used."""
        stream = self._stream()
        assert stream is not None
        return set(numbers_of(stream.log.stream))

    async def move(self, kind: type[mover._Move] = mover._Move) -> None:
        if self.behind is None:
            self.shards[self.view.shard].sync()
            self.behind = self.shards[self.view.shard].files.restarted(power_cut=False)
        await super().move(kind)
        self.check_all()

    def request(self, number: int, make: Any, wait_s: float = 0) -> Any:
        moving = self.view.moving
        if moving is not None and moving.step == CHOSEN and isinstance(make(0), TakeChunks):
            self.takes += 1
            if self.takes == 3:
                self._elect()
        return super().request(number, make, wait_s)

    def _elect(self) -> None:
        shard, before = self.shards[self.view.shard], self._numbers()
        assert self.behind is not None
        shard.files = self.behind
        shard.start()
        self.lost = before - self._numbers()
        for _ in range(len(self.lost) + 10):
            self.last += 1
            self.reasons_before.append(self.reasons)
            shard.publish(self.view.id, self.last)
        shard.sync()

    def delivered(
        self, shard: ShardLife, count: int, blob: bytes, redelivered: bool
    ) -> Sequence[int]:
        return array("Q", blob[: 8 * count])  # a consumer sees that messages are lost

    def check_all(self) -> None:
        """Look for messages that the old place has lost, and for the last that it had."""
        found = self._numbers()
        if self.lost & found:
            raise PromiseBroken(f"of another history: {sorted(self.lost & found)}")
        if self.confirmed and max(self.confirmed) not in found:
            raise PromiseBroken(f"never came: {max(self.confirmed)}")


def numbers_of(log: Any) -> Iterator[int]:
    offset = log.first_offset
    while offset < log.committed_offset:
        read = log.read(offset, 100_000)
        yield from map(number_in, split_messages(read.blob))
        offset = read.next_offset


def test_the_new_place_has_no_messages_that_the_old_one_lost_by_an_unclean_election() -> None:
    worlds = [play(seed, kills=0.0, of=Elected) for seed in range(30)]
    assert any(isinstance(world, Elected) and world.lost for world in worlds)


def test_the_histories_find_a_new_place_that_takes_messages_of_two_histories() -> None:
    with mock.patch.object(LogCopies, "goes_on", lambda *_: True):
        assert found(of=Elected)


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


def found(kind: type[mover._Move] = mover._Move, of: type[StreamWorld] = StreamWorld) -> bool:
    for seed in range(200):
        try:
            play(seed, kind, kills=0.0, of=of)
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
