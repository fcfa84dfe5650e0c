"""The fuzzer of the front door finds a short way that does something wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from shardmq.broker.front_door.connection.socket import ClientSocket
from tests.connections.door_play import Door
from tests.support import fuzz_door
from tests.support.fuzz_door import ACK, Differs, Doors, client_bytes, shard_recipes
from tests.support.fuzzing import Target, fuzz

INPUTS = 5000  # the wrong ways below are found within some hundreds
HEAD, END = 7, 1  # bytes of a frame around its payload

Take = Callable[[Any, bytes, int], int]  # of an inlet: what it is given, and how much of it counts


class WrongInlet:
    """An inlet of which `take` is another one."""

    def __init__(self, inlet: Any, take: Take) -> None:
        self._inlet, self._take = inlet, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inlet, name)

    def take(self, buffer: Any, end: int) -> int:
        return self._take(self._inlet, buffer, end)


def right(inlet: Any, buffer: Any, end: int) -> int:
    return int(inlet.take(buffer, end))


def one_more(inlet: Any, buffer: Any, end: int) -> int:
    """Take a method that is not plain without doing it."""
    at = right(inlet, buffer, end)
    if end - at < HEAD or buffer[at] != 1:
        return at
    behind = at + HEAD + int.from_bytes(buffer[at + 3 : at + 7], "big") + END
    return behind if behind <= end and buffer[behind - 1] == 0xCE else at


def no_acks(inlet: Any, buffer: Any, end: int) -> int:
    """Take acks without settling them, where a read begins with them."""
    at = 0
    while bytes(buffer[at + HEAD : at + HEAD + 4]) == ACK and at + 21 <= end:
        at += 21
    return at or right(inlet, buffer, end)


def twice(inlet: Any, buffer: Any, end: int) -> int:
    """Publish each message twice."""
    right(inlet, buffer, end)
    return right(inlet, buffer, end)


def beyond(inlet: Any, buffer: Any, end: int) -> int:
    """Tell of one octet more than was taken."""
    at = right(inlet, buffer, end)
    return at + (at > 0)


def fails(inlet: Any, buffer: Any, end: int) -> int:
    """Raise an error in a read that has an ack behind a publish."""
    if right(inlet, buffer, end) > 60 and ACK in bytes(buffer[:end]):
        raise MemoryError
    return end


def seen_wrong(monkeypatch: pytest.MonkeyPatch, *, alone: bool) -> None:
    """Run the fuzzer over front doors Alone, or over a Pair."""
    doors = Doors()
    monkeypatch.setattr(fuzz_door, "ROUND", 1 << 62)
    monkeypatch.setattr(doors, "_groups", int(alone))
    monkeypatch.setattr(fuzz_door, "PAIR_INPUTS", INPUTS)
    seeds = (*client_bytes(), *shard_recipes())
    fuzz(Target("door", seeds, doors.take, doors.compare, 1 << 62), INPUTS, 1)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "pair"])
@pytest.mark.parametrize(
    "take", [one_more, no_acks, twice, beyond, fails], ids=lambda take: take.__name__
)
def test_an_inlet_that_does_wrong_is_found(
    take: Take, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = ClientSocket.go_short_way
    monkeypatch.setattr(
        ClientSocket, "go_short_way", lambda self, inlet: go(self, WrongInlet(inlet, take))
    )
    with pytest.raises((Differs, MemoryError)):
        seen_wrong(monkeypatch, alone=alone)


def test_an_outlet_that_drops_a_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    offer, offered = Door.offer, count(1)

    def drop(door: Door, shard: int, message: bytes) -> bool:
        return next(offered) % 50 == 0 or offer(door, shard, message)

    monkeypatch.setattr(Door, "offer", drop)
    with pytest.raises(Differs):
        seen_wrong(monkeypatch, alone=True)
