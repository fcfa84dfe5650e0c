"""Which front doors are waited for, and which are told to begin anew; without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardmq.broker.controller.peers import links
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.model.changes import BindingPut
from shardmq.broker.shared.control import (
    Applied,
    Changes,
    DoorHello,
    Outlived,
    ShardElsewhere,
    ShardsElsewhere,
)
from shardmq.cluster.versions import WIRE

DOOR, OTHER = 0, 256
INCARNATION = 5


class Wire(asyncio.Transport):
    """The connection of a front door that another node relays; it keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"opening": object()})
        self.written = b""
        self.is_over = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.is_over = True


class Handler:
    """A controller without a catalog, which notes the front doors that are gone."""

    def __init__(self) -> None:
        self.version = 0
        self.gone: list[tuple[int, int]] = []

    def snapshot(self) -> tuple[int, list[Any]]:
        return self.version, []

    def door_gone(self, door: int, incarnation: int) -> None:
        self.gone.append((door, incarnation))

    def has_room(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def hello(door: int, incarnation: int = INCARNATION, boot: str = "") -> DoorHello:
    return DoorHello(WIRE.most, door, incarnation, 1, boot, 1 if boot else 0)


def made(*doors: int) -> tuple[DoorLinks, Handler]:
    made, handler = DoorLinks("boot", doors), Handler()
    made.handler = handler  # type: ignore[assignment]
    made._server = object()  # type: ignore[assignment]
    return made, handler


def come(made: DoorLinks, message: DoorHello) -> Wire:
    """Let a front door say its first message; return its connection."""
    wire, stream = Wire(), made.connection()
    stream.connection_made(wire)
    stream.data_received(links.encode(message))  # type: ignore[attr-defined]
    return wire


@pytest.mark.parametrize(("boot", "outlived"), [("boot", True), ("", False)])
async def test_a_door_that_others_were_not_to_wait_for_begins_anew(
    boot: str, outlived: bool
) -> None:
    """A late door routes by an old catalog. A process that has just begun has none."""
    doors, handler = made(DOOR, OTHER)
    come(doors, hello(DOOR, boot="boot"))
    doors._expect_no_more()
    wire = come(doors, hello(OTHER, boot=boot))
    assert (links.encode(Outlived()) in wire.written, wire.is_over) == (outlived, outlived)
    assert handler.gone == ([(OTHER, INCARNATION)] if outlived else [])
    assert {door.number for door in doors.doors()} == ({DOOR} if outlived else {DOOR, OTHER})
    if outlived:
        assert come(doors, hello(OTHER, boot=boot)).is_over
        come(doors, hello(OTHER, INCARNATION + 1))
        assert {door.number for door in doors.doors()} == {DOOR, OTHER}


async def test_without_a_cluster_a_door_that_comes_late_goes_on() -> None:
    doors, handler = made(0, 1)
    come(doors, hello(0, boot="boot"))
    doors._expect_no_more()
    assert not come(doors, hello(1, boot="boot")).is_over
    assert handler.gone == []


async def test_a_door_that_comes_in_time_goes_on() -> None:
    doors, handler = made(DOOR, OTHER)
    for door in (DOOR, OTHER):
        assert not come(doors, hello(door, boot="boot")).is_over
    doors._expect_no_more()
    assert not come(doors, hello(OTHER, boot="boot")).is_over
    assert handler.gone == []


@pytest.mark.parametrize("known", [None, [0, 4, 9]])
async def test_a_door_hears_where_shards_are_led_and_which_there_are(
    known: list[int] | None,
) -> None:
    doors, _ = made(DOOR, OTHER)
    first = come(doors, hello(DOOR))
    there = ShardElsewhere(4, "b", "tcp://b:1")
    doors.learn({0: [ShardElsewhere(0, "a", "tcp://a:1")], 1: [there]}, [DOOR, OTHER], known)
    said = links.encode(ShardsElsewhere([there], [0], known))  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert said in first.written
    later = come(doors, hello(DOOR, INCARNATION + 1))
    await asyncio.sleep(0)
    assert said in later.written


async def test_an_answer_waits_until_a_door_that_was_cut_off_has_the_change() -> None:
    doors, handler = made(DOOR, OTHER)
    for door in (DOOR, OTHER):
        come(doors, hello(door))
        doors.receive(doors._doors[door], Applied(0))
    here, cut_off = doors._doors[DOOR], doors._doors[OTHER]
    doors.leave(cut_off)
    handler.version = 1
    doors.hand_out(1, [])
    answered: list[int] = []
    doors.when_in_force(1, lambda: answered.append(1))
    doors.receive(here, Applied(1))
    assert answered == []
    come(doors, hello(OTHER, boot="boot"))
    assert answered == []
    doors.receive(doors._doors[OTHER], Applied(1))
    assert answered == [1]


async def test_an_answer_does_not_wait_for_a_door_whose_process_has_ended() -> None:
    """The next process has been sent the change; what the one before routed by is gone with it."""
    doors, handler = made(DOOR)
    come(doors, hello(DOOR))
    handler.version = 1
    doors.hand_out(1, [])
    answered: list[int] = []
    doors.when_in_force(1, lambda: answered.append(1))
    come(doors, hello(DOOR, INCARNATION + 1))
    assert handler.gone == [(DOOR, INCARNATION)]
    doors.receive(doors._doors[DOOR], Applied(1))
    assert answered == [1]


async def test_a_fault_in_what_waits_for_a_version_is_not_that_of_the_door_that_applies_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    doors, _ = made(DOOR)
    wire, stream = Wire(), doors.connection()
    stream.connection_made(wire)
    stream.data_received(links.encode(hello(DOOR)))  # type: ignore[attr-defined]
    doors.hand_out(1, [])
    answered: list[int] = []

    def fails() -> None:
        raise RuntimeError("a fault of ours")

    for then in (fails, lambda: answered.append(1)):
        doors.when_in_force(1, then)
    stream.data_received(links.encode(Applied(1)))  # type: ignore[attr-defined]
    assert answered == [1] and not wire.is_over and "a fault of ours" in caplog.text


@pytest.mark.parametrize(
    ("doors", "owners", "is_spared"),
    [
        ((DOOR,), (f"{DOOR}.{INCARNATION}.1", f"{DOOR}.{INCARNATION}.2"), True),
        ((DOOR,), (f"{DOOR}.{INCARNATION - 1}.1", f"{DOOR}.{INCARNATION}.2"), False),
        ((DOOR,), (f"{DOOR}.{INCARNATION}1.1",), False),
        ((DOOR,), (), False),
        ((DOOR, OTHER), (f"{DOOR}.{INCARNATION}.1",), False),
    ],
    ids=["its own", "those of the process before", "another number", "of others", "two doors"],
)
async def test_a_front_door_is_told_of_changes_unless_it_alone_has_made_them(
    doors: tuple[int, ...], owners: tuple[str, ...], is_spared: bool
) -> None:
    links_made, _ = made(*doors)
    wires = [come(links_made, hello(door)) for door in doors]
    for wire in wires:
        wire.written = b""
    change = BindingPut("/", "e", "queue", "q", "k")
    links_made.hand_out(1, [change], waited=False, by=owners)
    for door in links_made.doors():
        door.flush()
    changes = Changes(1, [] if is_spared else [change], False)
    assert [wire.written for wire in wires] == [links.encode(changes)] * len(doors)


@pytest.mark.parametrize("waited", [False, True])
async def test_a_front_door_in_step_is_not_told_of_the_version_that_it_has_made(
    waited: bool,
) -> None:
    links_made, _ = made(DOOR)
    wire = come(links_made, hello(DOOR))
    (door,) = links_made.doors()
    change, owner = BindingPut("/", "e", "queue", "q", "k"), f"{DOOR}.{INCARNATION}.1"
    links_made.receive(door, Applied(0))
    called: list[int] = []
    for version in (1, 2):
        wire.written = b""
        links_made.hand_out(version, [change], waited=waited, by={owner})
        links_made.when_in_force(version, lambda: called.append(1))
        door.flush()
        told = links.encode(Changes(version, [], waited)) if waited else b""
        assert wire.written == told and len(called) == (0 if waited else version)
    links_made.receive(
        door, Applied(1)
    )  # said before it was known that the front door has the second
    assert len(called) == (1 if waited else 2)
    if not waited:
        wire.written = b""
        links_made.hand_out(2, [change], waited=False, by={owner})
        links_made.when_in_force(2, called.clear)
        door.flush()
        assert wire.written == b"" and called == []
        called += [1, 2]
    links_made.receive(door, Applied(2))
    links_made.hand_out(3, [change], waited=False)
    links_made.when_in_force(3, lambda: called.append(1))
    assert len(called) == 2
    links_made.receive(door, Applied(3))
    assert len(called) == 3
