"""Compiled passes do what slow ones in Python do, with sockets and rings of the kernel."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.front_door.connection.output import OUT_BYTES_MAX
from shardmq.broker.front_door.connection.socket import PAUSE_ALARM, PAUSE_OUTPUT
from shardmq.broker.front_door.hot_state import Pace
from shardmq.broker.front_door.loop import PassLoop
from shardmq.shardd.wire import envelope
from tests.amqp.bytes_of import method, publish
from tests.connections.door_play import SHARDS
from tests.connections.test_short_way import History, Mismatch
from tests.connections.wired_door import Wired
from tests.reference.watch import Pass
from tests.support.readable import is_readable

pytestmark = pytest.mark.usefixtures("one_second")

SEEDS = range(int(os.environ.get("WATCH_SEEDS", "8")))
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
LOOKS_S = 0.001  # no look begins behind so many seconds of looks (watch.pxi)
PASS_S = 0.0003  # takes a pass that is said to take long


class PassHistory(History):
    """A random history in which several clients and shards have something in the same pass."""

    @property
    def took(self) -> int:
        inlets = [each.socket.inlet for each in self.doors[1].entered]
        return sum(inlet is not None and inlet.published for inlet in inlets)

    def step(self) -> None:
        for _ in range(self.random.choice([1, 1, 3, 6])):
            super().step()


@contextmanager
def playing(seed: int, passes: type[Pass] = Pass) -> Iterator[PassHistory]:
    print(f"seed {seed}")
    history = PassHistory(seed, new_door=partial(Wired, passes=passes))
    try:
        yield history
    finally:
        for door in history.doors:
            door.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_compiled_pass_does_what_a_slow_one_does(seed: int) -> None:
    with playing(seed) as history:
        history.rough, history.is_virtual = min(history.rough, 0.3), seed % 4 == 0
        await history.play()
        lives = [each for each in history.model.clients if not each.is_closed]
        assert history.took or not lives or history.is_virtual, "nothing went the short way"


class ReadsFirst(Pass):
    """Reads the clients before it hears the shards."""

    def run(self, readable: list[int]) -> None:
        bells = [fd for fd in readable if fd in self.inbox._lanes]
        self.loop.end_scheduled = True
        self.read([fd for fd in readable if fd not in bells])
        self.hear(bells)
        self.loop.end_of_pass()


class AnswersLate(Pass):
    """Leaves confirms to the end of the pass, behind the replies to what is read."""

    def answer_publishers(self) -> None:
        pass


class EndsOften(Pass):
    """Ends the pass behind each read."""

    def read(self, sockets: list[int]) -> None:
        for fd in sockets:
            super().read([fd])
            self.loop.end_of_pass()


class ReadsBackwards(Pass):
    """Reads the clients in another order."""

    def read(self, sockets: list[int]) -> None:
        super().read(sockets[::-1])


@pytest.mark.parametrize("broken", [ReadsFirst, AnswersLate, EndsOften, ReadsBackwards])
async def test_a_pass_that_is_broken_is_caught(broken: type[Pass]) -> None:
    with pytest.raises(Mismatch):
        for seed in range(60):
            with playing(seed, broken) as history:
                await history.play()


# -- one door --------------------------------------------------------------------------------------


TRIES = 10


@pytest.fixture
def door() -> Iterator[Wired]:
    made = Wired(short=True)
    yield made
    made.close()


def enter(door: Wired) -> int:
    """Let a client open a channel in confirm mode; return its place."""
    at = door.enter()
    door.read(at, method(1, commands.Channel.Open()) + method(1, commands.Confirm.Select()))
    door.run()
    door.seen()
    return at


def is_watched(door: Wired, at: int) -> bool:
    """Return whether a pass reads the client when it has something."""
    before = door.entered[at].socket.received_bytes
    door.read(at, b"".join(publish(1, "", "a", b"x")))
    door.run()
    return door.entered[at].socket.received_bytes > before


async def test_an_open_connection_leaves_the_event_loop_to_the_watch(door: Wired) -> None:
    at = enter(door)
    fd = door.clients[at].near.fileno()
    assert fd not in door.aio.readers and is_watched(door, at)


async def test_a_client_that_is_held_back_is_not_read_and_its_end_makes_no_noise(
    door: Wired,
) -> None:
    at = enter(door)
    client = door.entered[at].socket
    client.pause(PAUSE_ALARM)
    assert not is_watched(door, at)
    door.clients[at].far.close()
    assert door.loop.watch is not None
    assert door.aio.readable() == [], "an end that is not looked at would wake the loop for ever"
    client.resume(PAUSE_ALARM)
    door.aio.run()
    while not client.lost:
        door.loop.watch.ready()
    assert door.aio.readable() == []


async def test_what_a_full_socket_does_not_take_is_written_later_in_order(door: Wired) -> None:
    at = enter(door)
    client, far = door.entered[at].socket, door.clients[at].far
    said = [bytes([number % 251]) * 1000 for number in range(OUT_BYTES_MAX // 500)]
    for data in said:
        client.write(data)
    door.loop.end_of_pass()
    assert client.is_writing and client.paused == PAUSE_OUTPUT
    client.write(b"last")
    door.loop.end_of_pass()
    got = b""
    while client.is_writing or len(got) < len(b"".join(said)) + 4:
        got += far.recv(1 << 20)
        for fd in door.aio.writable():
            door.aio.writers[fd]()
        door.aio.run()
    assert got == b"".join(said) + b"last" and not client.paused
    assert is_watched(door, at)


async def test_an_error_of_ours_in_a_read_ends_that_client_and_the_pass_goes_on(
    door: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = enter(door), enter(door)
    failing = door.entered[first].socket
    assert is_watched(door, second), "its route is known from here on"

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(failing), "go_on", fails)
    door.read(first, method(1, commands.Basic.Qos()))
    door.read(second, b"".join(publish(1, "", "a", b"x")))
    door.run()
    assert failing.closing and not door.entered[second].socket.closing
    assert door.entered[second].channels.by_number[1].published == 2
    assert b"internal error" in door.clients[first].taken
    monkeypatch.undo()
    door.read(first, method(0, commands.Connection.CloseOk()))
    door.run()
    assert failing.lost


async def test_a_client_that_ends_is_forgotten_and_its_descriptor_may_be_another_ones(
    door: Wired,
) -> None:
    at = enter(door)
    fd = door.clients[at].near.fileno()
    door.clients[at].far.close()
    assert door.loop.watch is not None
    door.loop.watch.ready()
    door.aio.run()
    assert door.entered[at].socket.lost and door.clients[at].is_closed
    again = enter(door)
    assert door.clients[again].near.fileno() == fd and is_watched(door, again)


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        pytest.param([b"".join(publish(1, "", "a", b"x"))], True, id="publishes"),
        pytest.param(
            [method(2, commands.Channel.Open()), method(2, commands.Channel.Close(200, "", 0, 0))],
            False,
            id="answers",
        ),
    ],
)
async def test_passes_keep_a_distance_for_publishes_and_not_for_what_is_answered_here(
    door: Wired, monkeypatch: pytest.MonkeyPatch, said: list[bytes], is_kept: bool
) -> None:
    clients, waits = [enter(door), enter(door)], []
    monkeypatch.setattr(PassLoop, "keep_distance", lambda self, seconds: waits.append(seconds))
    clock, busy = count(1.0, 0.0001), count(1.0, 0.0001)
    door.loop.pace = Pace(0.001, lambda: next(clock), lambda: next(busy))
    for frames in said * 4:
        for at in clients:
            door.read(at, frames)
            door.run()
    assert bool(waits) == is_kept


class Looks:
    """Lets a watch look again, and has something come during the first looks."""

    is_on = True

    def __init__(self, *comes: Callable[[], object]) -> None:
        self.comes = list(comes)
        self.said: list[tuple[bool, bool]] = []  # of each look: clients were read before, it found

    def most_ns(self, now_ns: int, behind: int = 0) -> int:
        if self.comes:
            self.comes.pop(0)()
        return 200_000

    def looked(self, took_ns: int, found: bool, behind: int = 0) -> None:
        self.said.append((bool(behind), found))


def looks_again(door: Wired) -> bool:
    """Have things come during looks, and check them; return False if there was no time to look."""
    at = enter(door)
    for _ in range(2):
        assert is_watched(door, at)
        for shard in range(SHARDS):
            who, batch = door.who(shard), door.links.links[shard].batch
            door.hear(shard, envelope.confirmed(*who, batch))
        door.run()
    link, watch = door.links.links[0], door.loop.watch
    assert watch is not None and link.lane.writes_ring and link.lane.reads_ring
    door.seen()
    said = b"".join(publish(1, "", "a", b"x"))
    looks = door.loop.spin = Looks(
        lambda: door.hear(0, envelope.confirmed(*door.who(0), link.batch)),
        lambda: door.clients[at].far.send(said),
    )
    door.clients[at].far.send(said)
    before = link.batch
    watch.ready()
    wanted = [(True, True), (False, True), (True, False)]
    if looks.said == wanted[: len(looks.said)] and looks.said != wanted:
        return False
    assert looks.said == wanted
    door.clients[at].collect()
    assert door.clients[at].taken.endswith(method(1, commands.Basic.Ack(3)))
    assert link.batch == before + 2 and not door.loop.looks
    door.hear(0, envelope.confirmed(*door.who(0), link.batch))
    looks.is_on = False
    door.run()
    assert door.clients[at].taken.endswith(method(1, commands.Basic.Ack(4))), "the bell rings again"
    return True


async def test_what_comes_while_the_watch_looks_again_is_done_before_the_loop_sleeps() -> None:
    """Looks end after a millisecond, in which a busy machine may do something else."""
    for _ in range(TRIES):
        door = Wired(short=True)
        try:
            if looks_again(door):
                return
        finally:
            door.close()
    raise AssertionError(f"{TRIES} times the watch has not looked as often as it has to")


async def test_a_watch_that_looks_again_and_again_lets_the_loop_have_its_turn(door: Wired) -> None:
    at = enter(door)
    assert door.loop.watch is not None and is_watched(door, at)
    said = b"".join(publish(1, "", "a", b"x"))
    looks = door.loop.spin = Looks(*100 * [lambda: door.clients[at].far.send(said)])
    door.clients[at].far.send(said)
    door.loop.watch.ready()
    assert 1 <= len(looks.said) <= 16, "16 of them, or a millisecond"
    looks.is_on = False


async def test_passes_that_take_long_are_fewer_before_the_loop_has_its_turn(door: Wired) -> None:
    at = enter(door)
    assert door.loop.watch is not None and is_watched(door, at)
    looks = door.loop.spin = Looks(*100 * [lambda: door.clients[at].far.send(HEARTBEAT)])

    def take_long() -> None:
        until = time.perf_counter() + PASS_S
        while time.perf_counter() < until:
            pass

    door.loop.beside = take_long
    door.clients[at].far.send(HEARTBEAT)
    door.loop.watch.ready()
    assert 1 <= len(looks.said) <= LOOKS_S / PASS_S + 1
    looks.is_on = False


@pytest.mark.parametrize("compiled", [True, False])
async def test_a_ring_that_is_never_empty_is_planned_for_once(door: Wired, compiled: bool) -> None:
    at = enter(door)
    link, lane, inbox = door.links.links[0], door._lanes[0], door.links.inbox
    message = envelope.credit(*door.who(0), [(1, 1)])
    door.hear(0, message)  # the lane goes over to its rings
    door.run()
    assert lane is not None and link.lane is not None and door.loop.watch is not None
    assert link.lane.reads_ring

    def fill() -> None:
        while lane.writer.put(message):
            pass
        lane.writer.ring()

    def planned() -> list[Any]:
        return [call for call, _ in door.aio.soon if call == inbox._come_back]

    for _ in range(3):  # turns of the event loop
        door.clients[at].far.send(HEARTBEAT)
        if compiled:
            looks = door.loop.spin = Looks(*8 * [fill])
            fill()
            door.loop.watch.ready()
            looks.is_on = False
        else:
            for _ in range(8):
                fill()
                inbox._hear(link, link.lane)
        assert len(planned()) == 1
        fill()
        turn, door.aio.soon = door.aio.soon, type(door.aio.soon)()
        for call, args in turn:
            call(*args)
        assert len(planned()) == 1


async def test_a_damaged_ring_leaves_the_bells_of_others_alone(
    door: Wired, caplog: pytest.LogCaptureFixture
) -> None:
    at = enter(door)
    assert door.loop.watch is not None and is_watched(door, at)
    for shard in range(SHARDS):
        door.hear(shard, envelope.credit(*door.who(shard), [(shard, 1)]))  # by their rings from now
    door.run()

    def damage() -> None:
        lane, message = door._lanes[0], envelope.credit(*door.who(0), [(0, 77)])
        assert lane is not None
        lane.writer.put(message)
        memory = lane._shared.memory
        memory[memory.rfind(message) - 4] = 99  # the kind of the entry

    looks = door.loop.spin = Looks(damage)
    door.clients[at].far.send(HEARTBEAT)
    door.loop.watch.ready()
    assert "no entry of a ring" in caplog.text
    looks.is_on = False
    door.aio.soon.clear()  # the damaged ring would be looked at for ever
    credits = door.links.links[1].credits
    before = dict(credits)
    door.hear(1, envelope.credit(*door.who(1), [(1, 33)]))
    for fd in door.aio.readable():
        door.aio.readers.get(fd, door.loop.watch.ready)()
    assert credits != before or door.links.links[1].in_flight, "the bell of the other ring rang"


async def test_a_number_that_is_used_again_without_leaving_is_watched(door: Wired) -> None:
    first, second = enter(door), enter(door)
    watch = door.loop.watch
    assert watch is not None
    number, inlet = door.clients[first].near.detach(), door.entered[second].socket.inlet
    near, far = socket.socketpair()
    os.dup2(near.fileno(), number)  # closes what has this number now
    watch.read(number, inlet)
    watch.read(number, inlet)
    far.send(b"x")
    assert is_readable(watch.fd)
    os.close(number)
    near.close()
    far.close()
