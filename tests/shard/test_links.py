"""The links of a shard: messages of another wire version are dropped, and lanes are no must."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shardmq.shardd.links import Links
from shardmq.shardd.shard import Shard
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.lane import Offer, offer
from shardmq.shardd.wire.shared_memory import wait_for_any
from shardmq.shardd.wire.spin import Spin
from tests.support.dict_store import DictHome
from tests.support.lanes import no_descriptor_left

NEXT_VERSION = wire.WIRE_VERSION + 1
DOOR = (3, 5, 0, 0)  # number and incarnation of a front door, no epoch, shard 0
NOBODY_KNOWS = bytes([*b"\x92", 0xA0 | 7, *b"strange", 1])  # a tag that this version does not have


@pytest.fixture
def links(tmp_path: Path) -> Iterator[Links]:
    made = Links(str(tmp_path), Shard(0, 7, 1, DictHome()), Spin(0))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def door(links: Links, tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{tmp_path}/shard-0.sock")
        yield socket


def of_next_version(message: bytes) -> bytes:
    return message[:1] + bytes([NEXT_VERSION]) + message[2:]


def test_a_message_of_another_version_that_nobody_can_read_is_dropped_and_logged_once(
    links: Links, door: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        door.send(of_next_version(envelope.header(wire.CONTROL, *DOOR) + NOBODY_KNOWS))
    taken, until = 0, time.monotonic() + 10
    while taken < 3 and time.monotonic() < until:
        for fd, _ in links.wait(100):
            links.hear(fd, 0)
        taken += links.receive(0, 32)
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(said) == 1
    assert f"is of wire version {NEXT_VERSION}" in said[0]


def test_a_shard_that_looks_again_takes_a_message_without_a_bell(
    links: Links, tmp_path: Path
) -> None:
    who = 3, 5, 7, 0
    what = Offer(peer=3, incarnation=5, epoch=7, endpoint=f"ipc://{tmp_path}/door.sock")
    by_zmq: list[bytes] = []
    door = offer(tmp_path, 0, what, by_zmq.append)
    assert hear(links, 10_000)
    door.hear()
    links._spin.change(1000)
    message = envelope.control(*who, wire.Join(what.endpoint))
    door.send(message)
    (lane,) = links._heard.values()
    assert lane.came_by_zmq(envelope.read(by_zmq.pop()).kind) == [message]
    links._came = True  # as behind that message
    for _ in range(20):
        door.send(message)
        hear(links, 10_000)
        assert links.receive(0, 32) == 1
    assert wait_for_any([lane.bell], 0) == []
    assert links.receive(0, 32) == 0
    assert not hear(links, 1)
    door.send(message)
    assert hear(links, 10_000), "who sleeps is rung for"
    door.close()


def test_the_end_of_a_shard_does_not_wait_for_a_front_door_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_s = 30
    monkeypatch.setattr("shardmq.shardd.links.LINGER_MS", linger_s * 1000)
    links = Links(str(tmp_path), Shard(0, 7, 1, DictHome()), Spin(0))
    endpoint = f"ipc://{tmp_path}/door.sock"
    door = offer(tmp_path, 0, Offer(peer=3, incarnation=5, epoch=7, endpoint=endpoint), print)
    assert hear(links, 10_000)
    door.close()
    assert hear(links, 10_000)
    links.send([(endpoint, envelope.control(3, 5, 7, 0, wire.Alarm("last words")))])
    began = time.monotonic()
    links.close()
    assert time.monotonic() - began < linger_s


def hear(links: Links, wait_ms: int) -> int:
    events = links.wait(wait_ms)
    for fd, _ in events:
        assert links.hear(fd, 0)
    return len(events)


def test_a_shard_that_can_open_nothing_goes_on_and_makes_the_lane_later(
    links: Links, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    what = Offer(peer=3, incarnation=5, epoch=7, endpoint=f"ipc://{tmp_path}/door.sock")
    door = offer(tmp_path, 0, what, print)
    with no_descriptor_left():
        assert hear(links, 10_000)
        assert not hear(links, 1), "the offer that waits wakes the loop again"
    assert "Too many open files" in caplog.text
    links.listen()
    links.listen()
    assert hear(links, 10_000)
    assert wait_for_any([door.bell], 10) == [door.bell]
    door.close()
    assert hear(links, 10_000)
    assert not hear(links, 1)
