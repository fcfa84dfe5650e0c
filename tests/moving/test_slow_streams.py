"""A stream that does not get shorter while it is copied is named, as long as that is so.

Publishers that have waited in vain for its last messages do not wait again at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest

from shardmq.broker.controller.moving import mover
from shardmq.broker.controller.moving.mover import (
    FREE_TIMES,
    HELD_S,
    HOLD_BYTES,
    HOLD_BYTES_MAX,
    NOT_SHORTER,
    SHRINK_S,
    MoveProgress,
)
from shardmq.broker.controller.moving.stream_copy import CopyRefused
from shardmq.broker.controller.requests import MoveOn
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import CALLED_OFF, CHOSEN, HELD, Moving, QueuePut, VhostPut
from shardmq.broker.shared.control import Answer
from shardmq.shardd.wire import messages as wire

STREAM = {"x-queue-type": "stream"}


class Copy:
    """The copy of a stream of which so many bytes are left behind each batch."""

    def __init__(self, lefts: list[int], progress: MoveProgress) -> None:
        self.left = self.left_bytes = 0
        self.told: list[str] = []  # before each batch
        self._lefts: Iterator[int] = iter(lefts)
        self._progress = progress

    async def copy_some(self, old: QueuePut, new: QueuePut) -> int:
        self.told.append(self._progress.waits_for)
        self.left = self.left_bytes = next(self._lefts)
        return 1


def a_move(progress: MoveProgress) -> tuple[mover._Move, QueuePut, mock.AsyncMock]:
    """Return a move of a stream that is copied, the stream, and the authority that it asks."""
    catalog = Catalog(routes=False)
    catalog.apply(VhostPut("/"))
    stream = QueuePut("/", "s", 1, 0, arguments=STREAM, moving=Moving(2, 1, CHOSEN))
    catalog.apply(stream)
    authority, doors = mock.AsyncMock(), mock.AsyncMock()
    authority.ask.return_value.code = 0
    move = mover._Move(
        catalog, authority, mock.Mock(), doors, mover.QueueName("/", "s"), progress, True,
        asyncio.Semaphore(1),
    )  # fmt: skip
    return move, stream, authority


async def copied(monkeypatch: pytest.MonkeyPatch, lefts: list[int]) -> list[str]:
    """Copy a stream until it is held; return what was told before each batch."""
    progress = MoveProgress()
    move, stream, authority = a_move(progress)
    copy = Copy(lefts, progress)
    monkeypatch.setattr(move, "_copy", copy)
    monkeypatch.setattr(mover, "SHRINK_S", 0.0)
    assert stream.moving is not None
    await move._copy_stream(stream, stream.moving)
    assert authority.ask.await_args.args[0].step == HELD
    return copy.told


async def test_a_stream_that_does_not_get_shorter_is_named_until_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    much = 2 * HOLD_BYTES_MAX
    lefts = [much, much - 1, much - 1, much + 5, much + 4, HOLD_BYTES]
    told = await copied(monkeypatch, lefts)
    assert told == ["", NOT_SHORTER, "", NOT_SHORTER, NOT_SHORTER, ""]
    assert sum(NOT_SHORTER in record.message for record in caplog.records) == 2


class EndOfTest(Exception):
    pass


class Clock:
    """asyncio with a clock that only sleeps move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def get_running_loop(self) -> Clock:
        return self

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_publishers_that_have_waited_in_vain_wait_for_a_share_of_the_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, catalog, steps = Clock(), Catalog(routes=False), list[tuple[float, int]]()
    catalog.apply(VhostPut("/"))
    catalog.apply(QueuePut("/", "s", 1, 0, arguments=STREAM, moving=Moving(2, 1, CHOSEN)))

    async def ask(what: MoveOn) -> Answer:
        stream = catalog.queue("/", "s")
        assert stream is not None and stream.moving is not None
        if what.step != stream.moving.step:
            steps.append((clock.now, what.step))
        moving = msgspec.structs.replace(stream.moving, step=what.step)
        catalog.apply(msgspec.structs.replace(stream, moving=moving))
        if len(steps) == 5:
            raise EndOfTest
        return Answer(0)

    async def copy_rest(*_: Any) -> int:
        clock.now += HELD_S
        raise TimeoutError

    progress = MoveProgress()
    move = mover._Move(
        catalog, mock.Mock(ask=ask), mock.Mock(), mock.AsyncMock(), mover.QueueName("/", "s"),
        progress, True, asyncio.Semaphore(1),
    )  # fmt: skip
    copy: Any = Copy([0] * 9, progress)
    copy.copy_rest = copy_rest
    monkeypatch.setattr(move, "_copy", copy)
    monkeypatch.setattr(mover, "asyncio", clock)
    with pytest.raises(EndOfTest):
        await move.run()
    assert [step for _, step in steps] == [HELD, CHOSEN, HELD, CHOSEN, HELD]
    times = [time for time, _ in steps]
    for held, free, again in (times[:3], times[2:]):
        assert free - held == HELD_S and again - free >= FREE_TIMES * HELD_S


@pytest.mark.parametrize("code", [wire.GAP, wire.BEYOND], ids=["a gap", "another history"])
async def test_a_copy_that_cannot_end_is_called_off_though_publishers_wait(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    catalog, steps = Catalog(routes=False), list[int]()
    catalog.apply(VhostPut("/"))
    catalog.apply(QueuePut("/", "s", 1, 0, arguments=STREAM, moving=Moving(2, 1, HELD)))

    async def ask(what: MoveOn) -> Answer:
        steps.append(what.step)
        raise EndOfTest

    async def copy_rest(*_: Any) -> int:
        raise CopyRefused(1, wire.Refused(7, code, "it has other messages"))

    move = mover._Move(
        catalog, mock.Mock(ask=ask), mock.Mock(), mock.AsyncMock(), mover.QueueName("/", "s"),
        MoveProgress(), True, asyncio.Semaphore(1),
    )  # fmt: skip
    monkeypatch.setattr(move, "_copy", mock.Mock(copy_rest=copy_rest))
    monkeypatch.setattr(move, "_is_shut", True)
    with pytest.raises(EndOfTest):
        await move.run()
    assert steps == [CALLED_OFF]


async def test_a_busy_stream_whose_syncs_are_slow_is_held_after_one_look(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, somes = Clock(), itertools.cycle([1, *[0] * 19])
    began = clock.now

    async def copy_some(*_: Any) -> int:
        return next(somes)

    copy = mock.Mock(copy_some=copy_some, left=9, left_bytes=4 * HOLD_BYTES)
    move, stream, authority = a_move(MoveProgress())
    monkeypatch.setattr(move, "_copy", copy)
    monkeypatch.setattr(mover, "asyncio", clock)
    assert stream.moving is not None
    await move._copy_stream(stream, stream.moving)
    assert authority.ask.await_args.args[0].step == HELD
    assert clock.now - began < 2 * SHRINK_S and not caplog.records
