"""Newcomers are answered as connections are, byte by byte, wherever their bytes are cut."""

from __future__ import annotations

import os
import random
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.short_way import HANDSHAKE_S, OPEN_S
from shardmq.broker.model.changes import ParameterPut, UserPut
from shardmq.broker.shared.logins import TakesLong
from tests.amqp.bytes_of import HEADER, method, publish
from tests.connections.door_play import Door
from tests.support.readable import readable

SEEDS = range(int(os.environ.get("ANTEROOM_SEEDS", "60")))
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
TURNS = 4
ACCEPTED_MAX = 64  # in one turn of the event loop
INFO = (
    "user", "vhost", "peer_host", "host", "protocol", "auth_mechanism", "tls", "frame_max",
    "channel_max", "heartbeat_s", "client_properties",
)  # fmt: skip


class Side:
    """A front door that listens on a real socket, with or without an anteroom."""

    def __init__(self, *, short: bool) -> None:
        self.door = Door(short=short)
        self.door.services.logins.at_once = self._judge  # type: ignore[method-assign]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = self.listener.getsockname()
        self.anteroom = self.door.connections.anteroom
        if self.anteroom is not None:
            self.anteroom.listen(self.listener.fileno())
        self.ups: list[str] = []
        line: Any = self.door.line
        line.connection_up = lambda owner, info: self.ups.append(info().name)
        line.connection_down = lambda owner: None
        line.connection_passed = lambda: self.ups.append("passed")

    @staticmethod
    def _judge(put: Any, user: str, password: str, host: str, now: float) -> str:
        return "" if password == "guest" else "wrong password"

    def facts(self) -> list[Any]:
        """Return what is known of each connection, but for its ports, number and time."""
        found = []
        for each in self.door.connections.all():
            amqp = each.socket.amqp
            info = each.session.info()
            found.append(
                (
                    {name: getattr(info, name) for name in INFO},
                    each.report() | {"owner": ""},
                    [one.report("", 0) for one in each.channels.all(each)],
                    amqp.state,
                    bytes(amqp.channels).rstrip(b"\0"),
                    amqp.received_frame_bytes_max,
                    amqp.client_properties,
                    amqp.answers_channels,
                    each.socket.last_sent > 0,
                )
            )
        return found

    def close(self) -> None:
        if self.anteroom is not None:
            self.anteroom.close()
        self.listener.close()
        for each in self.door.connections.all():
            each.disconnect()
        self.door.aio.run()

    def run(self) -> None:
        """Accept, read and answer until nothing is left to do."""
        for _ in range(TURNS):
            if self.anteroom is not None:
                self.door.connections.newcomers_ready()
            else:
                with suppress(BlockingIOError):
                    sock, peer = self.listener.accept()
                    sock.setblocking(False)
                    self.door.connections.enter(sock, Peer(*peer))
            readers = self.door.aio.readers
            for fd in readable(readers):
                if fd in readers:
                    readers[fd]()
            self.door.aio.run()


class Client:
    def __init__(self, side: Side) -> None:
        self.side = side
        self.got = b""
        self.ended = False
        self.sock = socket.create_connection(side.address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        side.run()

    def say(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.sock.sendall(data)
        self.side.run()
        self.sock.setblocking(False)
        try:
            while data := self.sock.recv(1 << 16):
                self.got += data
            self.ended = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended = True
        self.sock.setblocking(True)

    def close(self) -> None:
        self.sock.close()
        self.side.run()


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    with ExitStack() as stack:
        made = [Side(short=False), Side(short=True)]
        for side in made:
            stack.callback(side.close)
        yield made


def start_ok(password: str = "guest", user: str = "guest", **properties: Any) -> bytes:
    response = f"\0{user}\0{password}"
    return method(0, commands.Connection.StartOk(properties, "PLAIN", response, "en_US"))


TUNE_OK = method(0, commands.Connection.TuneOk(2047, 131072, 60))
OPEN = method(0, commands.Connection.Open("/"))
CHANNEL_OPEN_OK = b"\1\0\1\0\0\0\x08\0\x14\0\x0b\0\0\0\0\xce"
CLOSE = method(0, commands.Connection.Close(200, "bye", 0, 0))
HANDSHAKE = [HEADER, start_ok(), TUNE_OK + OPEN]


def on_channel(at: int, what: int) -> bytes:
    return method(at, (commands.Channel.Open(), commands.Channel.Close(200, "done", 0, 0))[what])


def conversation(dice: random.Random) -> list[bytes]:
    """Return what a client says, mostly as clients do."""
    rough = dice.choice([0.0, 0.0, 0.05, 0.3])

    def odd() -> bool:
        return dice.random() < rough

    header = b"AMQP\0\0\x08\0" if odd() else HEADER
    password = "wrong" if odd() else "guest"
    tune = method(
        0, commands.Connection.TuneOk(dice.choice([0, 1, 3, 2047]), dice.choice([4095, 4096, 0]), 0)
    )
    said = [header, start_ok(password, "nobody" if odd() else "guest", product=dice.choice("ab"))]
    said.append(tune if odd() else TUNE_OK)
    said.append(method(0, commands.Connection.Open("other")) if odd() else OPEN)
    for _ in range(dice.randrange(6)):
        number = dice.choice([1, 1, 2, 3, 63, 64, 2047])
        said.append(on_channel(number, 0))
        if odd():
            said.append(on_channel(number, dice.randrange(2)))
        if dice.random() < 0.2:
            said += publish(number, "", "a", b"x")
        if dice.random() < 0.8:
            said.append(on_channel(number, 1))
        if odd():
            said.append(dice.choice([HEARTBEAT, HEADER, b"\x01\0\0", b"\1\0\0\0\0\0\4abcd\xce"]))
        if odd():
            said.append(method(number, commands.Channel.Close(200, "schön", 0, 0)))
    if dice.random() < 0.8:
        said.append(CLOSE)
    if odd():
        at = dice.randrange(len(said))
        said[at] = dice.choice([HEARTBEAT, b"", bytes(8), said[at][:-1] + b"\0", said[at] * 2])
    return said


def cut(dice: random.Random, said: list[bytes]) -> list[bytes]:
    """Return the same bytes, cut as a client may send them."""
    way = dice.random()
    if way < 0.5:
        return said
    whole = b"".join(said)
    if way < 0.6:
        return [whole]
    places = sorted(dice.randrange(len(whole) + 1) for _ in range(dice.randrange(1, 8)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_newcomer_gets_the_bytes_that_a_connection_gets(
    sides: list[Side], seed: int
) -> None:
    dice = random.Random(seed)
    for each in range(12):
        said = cut(dice, conversation(dice)) if each else [*HANDSHAKE, CLOSE]
        clients = [Client(side) for side in sides]
        for data in said:
            for client in clients:
                client.say(data)
            if dice.random() < 0.1:
                sides[1].door.connections.all()  # whoever looks at all meets newcomers
                for client in clients:
                    client.say(b"")
            one, other = clients
            assert one.got == other.got, (seed, each, said)
            if dice.random() < 0.1:
                assert sides[0].facts() == sides[1].facts(), (seed, each, said)
            assert one.ended == other.ended, (seed, each, said)
        for client in clients:
            client.close()
        one_side, other_side = sides
        assert one_side.door.counts.report() == other_side.door.counts.report(), (seed, each)
        assert len(one_side.ups) == len(other_side.ups), (seed, each)


def shake(client: Client) -> None:
    for data in HANDSHAKE:
        client.say(data)


async def test_only_a_login_that_was_right_before_is_answered_without_python(
    sides: list[Side],
) -> None:
    side = sides[1]
    first = Client(side)
    shake(first)
    assert len(side.door.connections.by_number) == 1
    second = Client(side)
    shake(second)
    assert len(side.door.connections.by_number) == 1
    assert second.got == first.got
    wrong = Client(side)
    wrong.say(HEADER)
    wrong.say(start_ok("wrong"))
    assert wrong.ended
    assert side.door.counts.logins_failed == 1
    third = Client(side)  # a login was refused meanwhile: each is looked at by Python again
    third.say(HEADER)
    third.say(start_ok())
    assert len(side.door.connections.by_number) == 2
    for client in (first, second, third):
        client.close()


async def test_what_logins_depend_on_does_not_change_under_a_newcomer(sides: list[Side]) -> None:
    side = sides[1]
    clients = [Client(side) for _ in range(2)]
    for client in clients:
        shake(client)
    assert len(side.door.connections.by_number) == 1
    side.door.connections.renew()
    side.door.line.catalog.apply(UserPut("guest", "another"))
    side.door.line.catalog.apply(ParameterPut("", "user-limits", "guest", {"max-channels": 1}))
    assert len(side.door.connections.by_number) == 2
    assert not side.door.services.lessons


async def test_a_login_of_before_a_change_teaches_nothing(sides: list[Side]) -> None:
    side = sides[1]
    client = Client(side)
    client.say(HEADER)
    client.say(start_ok())
    side.door.connections.renew()  # say, the password changes
    client.say(TUNE_OK + OPEN)
    assert client.got.endswith(method(0, commands.Connection.OpenOk()))
    assert not side.door.services.lessons
    client.close()


async def test_newcomers_that_stay_become_connections(sides: list[Side]) -> None:
    side = sides[1]
    assert side.anteroom is not None
    first = Client(side)
    shake(first)
    staying, silent = Client(side), Client(side)
    shake(staying)
    silent.say(HEADER)
    assert len(side.anteroom) == 2
    select.select([], [], [], 2 * OPEN_S)
    side.anteroom.settle()
    assert len(side.anteroom) == 1
    assert len(side.ups) == 2
    staying.say(on_channel(1, 0))
    assert staying.got.endswith(CHANNEL_OPEN_OK)
    select.select([], [], [], 1.5 * HANDSHAKE_S)
    side.anteroom.settle()
    assert not len(side.anteroom)
    silent.say(start_ok())
    silent.say(TUNE_OK + OPEN)
    assert silent.got == first.got
    assert side.door.counts.logins_succeeded == 3


async def test_a_reset_ends_a_newcomer(sides: list[Side]) -> None:
    side = sides[1]
    assert side.anteroom is not None
    shake(Client(side))
    client = Client(side)
    shake(client)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    assert not len(side.anteroom)
    assert side.ups[-1] == "passed"


# -- turns of the event loop, and errors -----------------------------------------------------------


async def test_a_turn_accepts_some_newcomers_and_the_next_one_the_others(sides: list[Side]) -> None:
    side = sides[1]
    assert side.anteroom is not None
    with ExitStack() as stack:
        for _ in range(ACCEPTED_MAX + 6):
            stack.enter_context(socket.create_connection(side.address))
        side.door.connections.newcomers_ready()
        assert len(side.anteroom) == ACCEPTED_MAX
        side.door.connections.newcomers_ready()
        assert len(side.anteroom) == ACCEPTED_MAX + 6


def takes_long(put: Any, user: str, password: str, host: str, now: float) -> str:
    raise TakesLong(user, password)


def refuses(put: Any, user: str, password: str, host: str, now: float) -> str:
    return "too many wrong passwords"


@pytest.mark.parametrize("judge", [takes_long, refuses])
async def test_a_newcomer_that_was_let_in_is_not_judged_again(
    sides: list[Side], judge: Any
) -> None:
    side = sides[1]
    first, client = Client(side), Client(side)
    shake(first)
    client.say(HEADER)
    client.say(start_ok())
    assert len(side.door.connections.by_number) == 1, "it is still a newcomer, and told of tune"
    side.door.services.logins.at_once = judge  # type: ignore[method-assign]
    client.say(TUNE_OK[:5])  # part of a frame: Python does all again
    assert len(side.door.connections.by_number) == 2
    client.say(TUNE_OK[5:] + OPEN)
    assert client.got.endswith(method(0, commands.Connection.OpenOk()))
    assert side.door.counts.logins_failed == 0


async def test_an_error_of_ours_does_not_end_the_looks_at_newcomers(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = sides[1]
    connections = side.door.connections
    assert side.anteroom is not None

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(24, "too many open files")

    first, second = Client(side), Client(side)
    select.select([], [], [], 1.5 * HANDSHAKE_S)
    monkeypatch.setattr(connections, "enter", fails)
    with pytest.raises(OSError, match="too many"):
        side.door.aio.pass_time(1)
    monkeypatch.undo()
    side.door.aio.pass_time(1)
    assert not len(side.anteroom), "another look was planned"
    assert len(connections.by_number) == 1
    for client in (first, second):
        client.close()


async def test_lessons_are_forgotten_though_a_newcomer_cannot_be_met(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = sides[1]
    first, client = Client(side), Client(side)
    shake(first)
    client.say(HEADER)
    assert side.door.services.lessons

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(side.door.connections, "enter", fails)
    with pytest.raises(OSError, match="too many"):
        side.door.connections.renew()
    assert not side.door.services.lessons
    client.close()
