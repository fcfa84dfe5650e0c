"""Passes that need no Python do what the passes of links.py and server.py do."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardmq.shardd.short_way import RING, UNPOLLED_MAX, PlainPasses
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from tests.shard.test_short_way import attach, one_for_queue_1
from tests.support.linked_history import LinkedHistory
from tests.support.short_way_history import EPOCH, Differs

HISTORIES = 25
ACTS = 120


def play(seed: int, count: int, directory: Path) -> int:
    """Play histories; return how many messages plain passes took in."""
    taken = 0
    for each in range(seed, seed + count):
        place = directory / str(each)
        place.mkdir()
        history = LinkedHistory(each, place)
        try:
            history.play(ACTS)
        except Differs as error:
            raise AssertionError(f"history {each}: {error}") from error
        taken += history.plain.taken_plain
    return taken


def test_plain_passes_come_to_the_same(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seed = request.config.getoption("--seed") or random.randrange(1 << 32)
    print(f"{HISTORIES} histories from --seed {seed}")
    taken = play(seed, HISTORIES, tmp_path)
    assert taken > HISTORIES * ACTS // 10, "hardly anything was plain"


@pytest.mark.torture
def test_plain_passes_come_to_the_same_for_long(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seed, count = request.config.getoption("--seed"), request.config.getoption("--histories")
    print(f"{count} histories from --seed {seed}")
    play(seed, count, tmp_path)


class Forgets(PlainPasses):
    """Says that a pass has taken in everything, whatever was left for Python."""

    def run(self, wait_ms: int, came: bool, look: Any) -> Any:
        return super().run(wait_ms, came, look) or None


def test_a_broken_way_back_to_python_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmq.shardd.links.PlainPasses", Forgets)
    with pytest.raises((AssertionError, KeyError)):
        play(1, HISTORIES, tmp_path)


@pytest.fixture
def history(tmp_path: Path) -> Any:
    made = LinkedHistory(1, tmp_path)
    made.start()
    yield made
    for side in (made.plain, made.python):
        side.close()


def run(history: LinkedHistory, wait_ms: int = 1000, look: Any = None) -> Any:
    return history.plain.links.plain.run(wait_ms, True, look)


def publish(history: LinkedHistory, body: bytes, *, durably: bool = False) -> None:
    """Publish one message to queue 1 of the shard that has plain passes."""
    stored = struct.pack("<II", len(body), 0) + b"\0\1q" + body
    history.packer.add_stored(
        0, [1], stored, 1, 1, 5 if durably else 0, 1000, 0xFFFFFFFF, 0xFF, durably, durably
    )
    history.batches[0] += 1
    packed = history.packer.take(0, 0, history.incarnations[0], EPOCH, history.batches[0], durably)
    assert packed is not None
    history.plain.doors[0].send(packed)


def quiet(history: LinkedHistory) -> None:
    """Attach a consumer, and have a segment that is open and both rings in use."""
    attach(history, no_ack=True, prefetch=0)
    one_for_queue_1(history, b"first")
    history.turn()


def test_a_plain_message_is_handed_on_inside_and_the_wait_goes_on(history: LinkedHistory) -> None:
    quiet(history)
    publish(history, b"body")
    assert run(history, 20) == []
    door = history.plain.doors[0]
    kinds = [envelope.read(said).kind for said in door.take(10)]
    assert kinds == [m.DELIVER]


def test_a_message_that_wants_a_sync_leaves_the_end_of_the_pass(history: LinkedHistory) -> None:
    quiet(history)
    publish(history, b"body", durably=True)
    assert run(history) is None
    assert history.plain.links.plain.taken == 1
    assert history.plain.shard.syncs.may_begin


def test_what_is_not_plain_stays_in_the_ring_for_python(history: LinkedHistory) -> None:
    quiet(history)
    who = (0, history.incarnations[0], EPOCH, 0)
    history.plain.doors[0].send(envelope.control(*who, m.Get(77, 1, 1000, 1, 1, True)))
    assert run(history) == []
    assert history.plain.links.receive(0) == 1


def test_a_wait_ends_in_time_and_for_a_signal(history: LinkedHistory) -> None:
    quiet(history)
    began = time.monotonic()
    assert run(history, 20) == []
    assert time.monotonic() - began >= 0.019
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        timer = threading.Timer(
            0.02, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        )
        timer.start()
        assert run(history, 60_000) == []
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_descriptor_is_reported(history: LinkedHistory) -> None:
    quiet(history)
    links = history.plain.links
    history.plain.doors[0]._shared.end.close()
    (lane,) = [lane for lane in links._heard.values() if lane.is_over()]
    assert (lane.fd, 0) in [(fd, 0) for fd, _ in run(history)]


def test_looks_are_bounded_and_take_what_they_find(history: LinkedHistory) -> None:
    quiet(history)
    looks: list[int] = []

    def look() -> int:
        looks.append(len(looks))
        if len(looks) < 4:
            publish(history, b"more")
        return RING if len(looks) < 4 else 0

    one_for_queue_1(history, b"body")
    assert run(history, 20, look) == []
    door = history.plain.doors[0]
    assert len(door.take(100)) >= 1
    assert 4 <= len(looks) <= 6, "no more looks where nothing came"


def test_looks_are_bounded_over_passes_that_python_ends(history: LinkedHistory) -> None:
    quiet(history)
    side, bell = history.plain, os.eventfd(1, os.EFD_NONBLOCK)
    side.links.poll.register(bell, select.EPOLLIN)
    who = (0, history.incarnations[0], EPOCH, 0)
    try:
        for number in range(UNPOLLED_MAX + 1):
            side.doors[0].send(envelope.control(*who, m.Get(number, 1, 1000, 1, 1, True)))
            if bell in dict(run(history, look=lambda: RING)):
                return
            side.links.receive(0)
    finally:
        os.close(bell)
    pytest.fail("another descriptor is never asked")


def test_messages_that_a_pass_took_before_python_went_on_are_counted(
    history: LinkedHistory,
) -> None:
    quiet(history)
    publish(history, b"one")
    who = (0, history.incarnations[0], EPOCH, 0)
    history.plain.doors[0].send(envelope.control(*who, m.Get(77, 1, 1000, 1, 1, True)))
    assert history.plain.links.wait(1000) == []
    assert history.plain.links.receive(0) == 2
    assert history.plain.links.receive(0) == 0


def test_a_full_ring_goes_on_by_zeromq_in_order(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("shardmq.shardd.peers.CONNECTION_WINDOW_BYTES", 64 << 20)
    monkeypatch.setattr("tests.support.short_way_history.SEGMENT_BYTES", 8 << 20)
    history: LinkedHistory = request.getfixturevalue("history")
    quiet(history)
    side, plain = history.plain, history.plain.taken_plain
    body = bytes(60 << 10)
    for number in range(60):
        publish(history, b"%d|" % number + body)
        assert run(history, 1) in ([], None)
        side.links.receive(0)
        side.links.send(side.shard.turn_end(0))
    assert side.outboxes["peer-0"].sent, "the ring was never full"
    assert side.taken_plain > plain + 30, "hardly anything was plain"
    said = [bytes(each) for each in side.doors[0].take(1000)]
    said += side._by_zmq(side.doors[0], side.outboxes["peer-0"])
    came = b"".join(said)
    places = [came.find(b"%d|" % number + body[:100]) for number in range(60)]
    assert -1 not in places and places == sorted(places)
