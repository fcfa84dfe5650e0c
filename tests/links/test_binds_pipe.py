"""Binds ahead go through a pipe whole and in order, and outlive the front door that wrote them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.peers import binds_pipe
from shardmq.broker.controller.peers.binds_pipe import opened, together
from shardmq.broker.controller.peers.links import (
    DoorLinks,
    ProtocolError,
    binds_in,
    encode,
    take_messages,
)
from shardmq.broker.front_door.links.binds_pipe import BindsPipe
from shardmq.broker.shared.control import (
    Answer,
    Applied,
    Ask,
    Bind,
    BindMany,
    ControlMessage,
    DoorHello,
)
from shardmq.cluster.versions import WIRE

ME = "0.1.1"


@pytest.fixture
def door(tmp_path: Path) -> BindsPipe:
    return BindsPipe(str(tmp_path / "control.sock"), 0, 1)


def ask(number: int, *keys: str, owner: str = ME, queue: str = "q") -> Ask:
    return Ask(number, BindMany("/", [("e", queue, key) for key in keys], True), owner, "guest")


@pytest.mark.parametrize("read_bytes", [64 << 10, 100, 1], ids=["at once", "in parts", "bytes"])
async def test_what_is_written_is_read_whole_and_in_order(
    tmp_path: Path, door: BindsPipe, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binds_pipe, "READ_BYTES", read_bytes)
    came: list[bytes] = []
    assert not door.write(b"early")
    controller = opened(tmp_path, 0, 1, came.append)
    assert controller is not None
    door.answered()
    asks = [ask(number, f"key-{number}") for number in range(50)]
    for each in asks:
        assert door.write(encode(each))
    assert controller.read() and b"".join(came) == b"".join(map(encode, asks))
    assert binds_in(take_messages(bytearray(came[0]))) == asks
    assert controller.read() and len(came) == 1
    door.close()
    assert not controller.read()
    controller.close()


async def test_one_wake_up_reads_what_came_meanwhile(
    tmp_path: Path, door: BindsPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[bytes] = []
    controller = opened(tmp_path, 0, 1, came.append)
    assert controller is not None
    door.answered()
    async with asyncio.timeout(10):
        for turn in range(3):
            assert door.write(b"a")
            while controller._timer is None:
                await asyncio.sleep(0)
            assert door.write(b"b")
            while len(came) == turn:
                await asyncio.sleep(0)
    assert came == [b"ab"] * 3
    door.close()
    controller.close()


async def test_binds_that_a_client_waits_for_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binds_pipe, "WAITS_S", 1000.0)
    came: list[bytes] = []
    door = BindsPipe(str(tmp_path / "control.sock"), 0, 1, waited=True)
    assert opened(tmp_path, 0, 1, came.append) is None  # it is another one
    controller = opened(tmp_path, 0, 1, came.append, waited=True)
    assert controller is not None
    door.answered()
    async with asyncio.timeout(10):
        for turn in range(1, 4):
            assert door.write(b"a")
            while len(came) < turn:
                await asyncio.sleep(0)
        door.close()
        while not controller.is_over:  # the end is seen once
            await asyncio.sleep(0)
    assert came == [b"a"] * 3 and controller._timer is None
    controller.close()


@pytest.mark.parametrize("read_bytes", [64 << 10, 2], ids=["at once", "in parts"])
@pytest.mark.parametrize("is_woken", [False, True], ids=["at its end", "woken"])
async def test_a_front_door_that_dies_is_read_to_its_end(
    tmp_path: Path,
    door: BindsPipe,
    is_woken: bool,
    read_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binds_pipe, "READ_BYTES", read_bytes)
    came: list[bytes] = []
    controller = opened(tmp_path, 0, 1, came.append)
    assert controller is not None
    door.answered()
    assert door.write(b"last")
    os.close(door._fd)
    if is_woken:
        async with asyncio.timeout(10):
            while not came:
                await asyncio.sleep(binds_pipe.WAITS_S)
    controller.close()
    assert came == [b"last"]


async def test_a_controller_that_does_not_open_the_pipe_gets_nothing(
    tmp_path: Path, door: BindsPipe
) -> None:
    door.answered()
    assert not door.write(b"x")
    door.close()
    assert not list(tmp_path.iterdir())
    assert opened(tmp_path, 0, 1, lambda data: None) is None


async def test_what_is_too_long_or_finds_no_room_is_not_written(
    tmp_path: Path, door: BindsPipe
) -> None:
    came: list[bytes] = []
    controller = opened(tmp_path, 0, 1, came.append)
    assert controller is not None
    door.answered()
    assert not door.write(b"x" * 4097)
    count = 0
    while door.write(b"x" * 1000):
        count += 1
    assert count > 10 and controller.read() and b"".join(came) == b"x" * 1000 * count
    assert door.write(b"x")
    door.close()
    controller.close()


class Heard:
    """A controller that notes in which order it hears what."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.answer: tuple[int, str, dict[str, Any]] = 0, "", {}

    def snapshot(self) -> tuple[int, list[Any]]:
        return 0, []

    def asked(self, ask: Ask, answer: Callable[[int, str, dict[str, Any]], None]) -> None:
        self.heard.append(ask)
        answer(*self.answer)

    def door_gone(self, door: int, incarnation: int) -> None:
        self.heard.append("gone")

    def has_room(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Wire(asyncio.Transport):
    """The stream of a front door of this node, which keeps what is written."""

    def __init__(self) -> None:
        super().__init__({})
        self.written = bytearray()
        self.is_over = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_over

    def abort(self) -> None:
        self.is_over = True


class Pair:
    """The links of a controller, and a front door with a pipe, which wakes nobody in time."""

    def __init__(self, tmp_path: Path, door: BindsPipe) -> None:
        self.links, self.controller, self.wire = DoorLinks("boot", [0]), Heard(), Wire()
        self.links.handler = self.controller  # type: ignore[assignment] # what it hears
        self.links._directory = tmp_path
        self.stream = self.links.connection()
        self.stream.connection_made(self.wire)
        self.say(DoorHello(WIRE.most, 0, 1, 1, "", 0))
        door.answered()
        self.wire.written.clear()

    def say(self, message: ControlMessage) -> None:
        self.stream.data_received(encode(message))  # type: ignore[attr-defined]


@pytest.fixture
def pair(tmp_path: Path, door: BindsPipe, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Pair]:
    """Return what makes the two, in the event loop of the test."""
    monkeypatch.setattr(binds_pipe, "WAITS_S", 1000.0)
    return lambda: Pair(tmp_path, door)


async def test_binds_are_heard_before_what_the_front_door_says_then(
    pair: Callable[[], Pair], door: BindsPipe
) -> None:
    made = pair()
    first, second, other = ask(1, "a"), ask(1, "b"), Ask(3, BindMany("/", []), ME, "guest")
    assert door.write(encode(first)) and door.write(encode(second))
    made.say(other)
    joined = ask(1, "a", "b")
    assert made.controller.heard == [joined, other]
    answers = take_messages(made.wire.written)
    assert answers == [Answer(1, result={"binds": 2}), Answer(3)]


async def test_who_waits_hears_how_many_are_done_before_one_is_refused(
    pair: Callable[[], Pair], tmp_path: Path, door: BindsPipe
) -> None:
    waited = BindsPipe(str(tmp_path / "control.sock"), 0, 1, waited=True)
    made = pair()
    waited.answered()
    made.controller.answer = 404, "gone", {"done": 1}
    what = BindMany("/", [("e", "q", key) for key in "abc"], True, True)
    assert waited.write(encode(Ask(1, what, ME, "guest")))
    made.say(Applied(0))
    assert made.controller.heard == [Ask(1, what, ME, "guest")]
    answers = take_messages(made.wire.written)
    assert answers == [Answer(1, 404, "gone", {"binds": 3, "done": 1})]
    waited.close()


async def test_binds_of_a_front_door_that_has_died_are_heard_before_its_end(
    pair: Callable[[], Pair], door: BindsPipe
) -> None:
    made = pair()
    assert door.write(encode(ask(1, "a")))
    os.close(door._fd)
    made.stream.connection_lost(None)
    assert made.controller.heard == [ask(1, "a"), "gone"]


async def test_binds_are_heard_when_the_controller_asks_for_them(
    pair: Callable[[], Pair], door: BindsPipe
) -> None:
    made = pair()
    assert door.write(encode(ask(1, "a")))
    for each in made.links.doors():
        each.read_binds()
    assert made.controller.heard == [ask(1, "a")]


async def test_a_front_door_that_writes_anything_else_loses_its_link(
    pair: Callable[[], Pair], door: BindsPipe
) -> None:
    made = pair()
    assert door.write(encode(Applied(1)))
    for each in made.links.doors():
        each.read_binds()
    assert made.controller.heard == [] and made.wire.is_over


def test_the_parts_of_a_request_that_have_come_are_joined() -> None:
    for seed in range(50):
        dice = random.Random(seed)
        parts = [
            ask(dice.choice([1, 2, 70]), *(f"{at}.{key}" for key in range(dice.randrange(1, 3))))
            for at in range(dice.randrange(1, 20))
        ]
        of_each = {
            number: [end for each in parts if each.id == number for end in each.what.binds]
            for number in dict.fromkeys(each.id for each in parts)
        }
        joined = together(parts)
        assert {each.id: each.what.binds for each, _ in joined} == of_each, seed
        assert [count for _, count in joined] == list(map(len, of_each.values()))
        assert all(each.what.in_force and each.owner == ME for each, _ in joined)


@pytest.mark.parametrize(
    "message",
    [
        Applied(1),
        Ask(1, BindMany("/", [("e", "q", "k")]), ME, "guest"),
        Ask(1, BindMany("/", [], True), ME, "guest"),
        Ask(1, Bind("/", "e", "queue", "q", "k", {}), ME, "guest"),
    ],
    ids=["no request", "waited for", "none", "another request"],
)
def test_nothing_else_belongs_into_the_pipe(message: Applied | Ask) -> None:
    with pytest.raises(ProtocolError):
        binds_in([message])
