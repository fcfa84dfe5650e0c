"""The memory of a large body is free as soon as its publish is over, also if it has failed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pamqp import commands

from shardmq.broker.amqp.unfinished import BodyPart
from shardmq.broker.front_door.loop import LARGE_READ_BYTES, PassLoop
from tests.amqp.bytes_of import method, publish
from tests.connections.wired_door import Wired

BODIES_BYTES = 16 << 20
BODY = bytes(1 << 20)
PUBLISHES = 24  # more than the memory has room for
# What a front door holds without a body: the memory that it reads into, which may be a large one,
# and the one before.
IDLE_BYTES = 2 * LARGE_READ_BYTES


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("short", [True, False], ids=["short way", "by Python"])
@pytest.mark.parametrize("begin", [None, commands.Tx.Select(), commands.Confirm.Select()])
async def test_a_publish_that_fails_frees_its_body_without_the_collector(
    short: bool, begin: commands.Tx.Select | None
) -> None:
    door = Wired(short=short, bodies_bytes=BODIES_BYTES)
    memory = door.links.bodies
    assert memory is not None
    at = door.enter()
    said = b"".join(publish(1, "nowhere", "key", BODY, 131_064))
    for _ in range(PUBLISHES):
        door.say(at, 1, commands.Channel.Open())
        if begin is not None:
            door.say(at, 1, begin)
        door.read(at, said)
        door.run()
        assert b"no exchange 'nowhere'" in door.clients[at].taken[-200:]
        door.say(at, 1, commands.Channel.CloseOk())
        door.run()
        assert memory.held_bytes <= IDLE_BYTES
    door.close()


async def test_clients_that_announce_bodies_and_send_none_leave_room_for_others() -> None:
    door = Wired(short=True, bodies_bytes=BODIES_BYTES)
    memory = door.links.bodies
    assert memory is not None
    announced = b"".join(publish(1, "", "a", bytes(4 << 20), 131_064)[:2])
    for _ in range(8):  # the bodies of four would fill the memory
        at = door.enter()
        door.read(at, method(1, commands.Channel.Open()) + announced)
        door.run()
    assert memory.held_bytes <= BODIES_BYTES // 2 + IDLE_BYTES
    assert memory.take(BODIES_BYTES // 4) is not None
    door.close()


async def test_a_body_that_trickles_costs_little_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    places_of = BodyPart.places

    def counted(part: BodyPart, expected: int) -> list[memoryview] | None:
        found = places_of(part, expected)
        places.append(len(found or ()))
        return found

    monkeypatch.setattr(BodyPart, "places", counted)
    door = Wired(short=True, bodies_bytes=BODIES_BYTES)
    at = door.enter()
    said = method(1, commands.Channel.Open()) + b"".join(publish(1, "", "a", BODY, 16_384))
    door.read(at, said[:2000])
    door.run()
    large = 0

    def was_large(*_: object) -> None:
        nonlocal large
        large += 1

    monkeypatch.setattr(PassLoop, "read_was_large", was_large)
    for begin in range(2000, 4000, 100):
        door.read(at, said[begin : begin + 100])
        door.run()
    assert places[-19:] == 19 * [1] and not large
    door.read(at, said[4000:])
    door.run()
    assert max(places) > 4, "there are more places when more comes"
    assert door.connections.report()[1][0]["messages_unconfirmed"] == 0
    assert door.counts.report()["received"] == 1
    door.close()
