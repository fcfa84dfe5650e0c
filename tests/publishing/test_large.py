"""The memory of a large body is free as soon as its publish is over, also if it has failed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pamqp import commands

from shardmq.broker.front_door.loop import LARGE_READ_BYTES
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
