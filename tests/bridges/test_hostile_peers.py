"""A peer that breaks the protocol, or says nothing, is the reason of a failed try and no harm.

One that refuses messages gets the others.
"""

from __future__ import annotations

import asyncio
import errno
import random
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import base, commands

from shardmq.bridges import pump, shovel, tries
from shardmq.bridges.connection import FRAME_BYTES_MAX, Connection, connect
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.relay import Relay
from shardmq.bridges.shovel import ShovelRunner
from shardmq.broker.amqp.methods import decode_method, encode_method
from shardmq.broker.model import amqp_uri, shovels
from shardmq.broker.shared.bridging import Order
from tests.reference.relay import frame, relayed, short

Say = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
START = encode_method(
    commands.Connection.Start(server_properties={}, mechanisms="PLAIN", locales="en_US")
)
PUBLISH, CLOSE = (60, 40), (10, 50)
ANSWERS: dict[tuple[int, int], Any] = {
    (10, 11): commands.Connection.Tune(2047, 131072, 0),
    (10, 40): commands.Connection.OpenOk(),
    (20, 10): commands.Channel.OpenOk(),
    (50, 10): commands.Queue.DeclareOk(queue="q", message_count=5, consumer_count=0),
    (85, 10): commands.Confirm.SelectOk(),
    (60, 10): commands.Basic.QosOk(),
    (60, 20): commands.Basic.ConsumeOk(consumer_tag="shovel"),
}


class Peer:
    """A broker that says the right things up to a method, and then what a test gives it."""

    def __init__(self, at: tuple[int, int], instead: bytes | None, more: bytes = b"") -> None:
        self.at, self.instead, self.more = at, instead, more
        self.port = 0
        self.heard: list[base.Frame] = []
        self.frames: list[tuple[int, int]] = []  # type and channel of each
        self.ended = asyncio.Event()  # a connection has ended
        self.reads = asyncio.Event()  # publishes; cleared, it does not
        self.reads.set()
        self._server: asyncio.Server | None = None

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(8)
            if self.at == (0, 0):
                await self._say_instead(writer)
            writer.write(frame(1, 0, START))
            while True:
                kind, channel, size = struct.unpack(">BHI", await reader.readexactly(7))
                payload = await reader.readexactly(size)
                await reader.readexactly(1)
                self.frames.append((kind, channel))
                if kind != 1:
                    continue
                ids = struct.unpack_from(">HH", payload)
                if ids == PUBLISH:
                    await self.reads.wait()
                self.heard.append(decode_method(payload))
                if ids == self.at:
                    if ids in ANSWERS and self.more:
                        writer.write(frame(1, channel, encode_method(ANSWERS[ids])) + self.more)
                        continue
                    await self._say_instead(writer)
                elif ids == CLOSE:
                    writer.write(frame(1, 0, encode_method(commands.Connection.CloseOk())))
                elif ids in ANSWERS:
                    writer.write(frame(1, channel, encode_method(ANSWERS[ids])))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.ended.set()
            writer.close()

    async def _say_instead(self, writer: asyncio.StreamWriter) -> None:
        if self.instead is None:
            raise ConnectionResetError
        writer.write(self.instead)
        await asyncio.Event().wait()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


@pytest.fixture
async def peers() -> AsyncIterator[Callable[..., Awaitable[Peer]]]:
    made: list[Peer] = []

    async def peer(*given: Any, **more: Any) -> Peer:
        made.append(Peer(*given, **more))
        await made[-1].serve()
        return made[-1]

    yield peer
    for each in made:
        each.close()


NEVER = (99, 99)
LARGE_FRAME = struct.pack(">BHI", 3, 1, 100 << 20) + b"x" * 100


def delivery(tag: int, props: bytes = b"\0\0", body: bytes = b"a") -> bytes:
    names = short(b"shovel") + struct.pack(">QB", tag, 0) + b"\0\0"
    return (
        frame(1, 1, struct.pack(">HH", 60, 60) + names)
        + frame(2, 1, struct.pack(">HHQ", 60, 0, len(body)) + props)
        + frame(3, 1, body)
    )


DELIVERY = delivery(1)


async def test_what_is_read_in_any_pieces_is_relayed_whole(pytestconfig: pytest.Config) -> None:
    chance = random.Random(pytestconfig.option.seed)
    sizes = [chance.randrange(1, 2000) for _ in range(100)]
    data = b"".join(delivery(tag, body=bytes(size)) for tag, size in enumerate(sizes, 1))
    connection, made = Connection(amqp_uri.parse("amqp://"), "c"), []
    relay = Relay(None, None, False, None, FRAME_BYTES_MAX)

    def take(read: bytes | memoryview, at: int) -> int:
        at, frames = relay.feed(read, at)
        made.append(frames)
        return at

    connection.batches, connection.keeps_deliveries = take, True
    left = data
    while left:
        piece, left = left[: (size := chance.choice([1, 7, 3000, 20_000]))], left[size:]
        buffer = connection.get_buffer(-1)
        buffer[: len(piece)] = piece
        connection.buffer_updated(len(piece))
        buffer[: len(piece)] = b"\xff" * len(piece)  # the next read, of any connection
    assert connection.failure is None
    assert b"".join(made) == relayed(data, None, None, False, None)[1]


@pytest.mark.parametrize(
    ("at", "instead", "why"),
    [
        ((0, 0), b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak AMQP"),
        ((0, 0), b"AMQP\x00\x01\x00\x00", "another version of AMQP"),
        ((0, 0), None, "lost"),
        ((10, 11), None, "lost"),
        ((10, 11), LARGE_FRAME, "104857600 bytes"),
        (
            (10, 40),
            frame(1, 0, encode_method(commands.Connection.Close(530, "no", 0, 0))),
            "530 no",
        ),
        ((20, 10), frame(3, 1, b"a"), "content without a method"),
        ((20, 10), frame(1, 1, b"\0\1\0\1"), "breaks the protocol"),
        ((20, 10), frame(1, 1, b"a"), "breaks the protocol"),
        ((10, 11), frame(1, 0, encode_method(commands.Connection.Tune(1, 100, 0))), "100 bytes"),
        ((10, 40), b"", "within 0.3 s"),
    ],
)
async def test_a_handshake_that_fails_says_why(
    peers: Callable[..., Awaitable[Peer]], at: tuple[int, int], instead: bytes | None, why: str
) -> None:
    peer = await peers(at, instead)
    timeout = 300 if instead == b"" else 20_000
    uri = amqp_uri.parse(f"amqp://127.0.0.1:{peer.port}?connection_timeout={timeout}")
    with pytest.raises(LinkFailed, match=why):
        await connect(uri, "test", path="")


@pytest.mark.parametrize(
    ("source", "destination", "why"),
    [
        (((60, 20), b"", LARGE_FRAME), (NEVER, b"", b""), "source: .*104857600 bytes"),
        (((60, 20), b"", frame(1, 1, b"\0\x3c\0\x3c" + b"\xff" * 20)), (NEVER, b"", b""),
         "source: .*cut short"),
        (((60, 20), b"", frame(1, 1, encode_method(commands.Basic.Cancel("shovel", True)))),
         (NEVER, b"", b""), "source: the consumer was cancelled"),
        (((60, 20), b"", DELIVERY), (NEVER, b"", b""), "confirms nothing for 0.5 s"),
        (((60, 20), b"", DELIVERY), ((60, 40), None, b""), "destination: the connection was lost"),
        (((60, 20), b"", DELIVERY),
         ((60, 40), frame(1, 1, encode_method(commands.Basic.Ack(9))), b""), "of publish 9"),
        (((60, 20), b"", DELIVERY),
         ((60, 40), frame(1, 1, encode_method(commands.Basic.Return(312, "NO_ROUTE", "", "q"))),
          b""), "returned a message: NO_ROUTE"),
        (((60, 20), b"", DELIVERY), ((60, 40), b"\xff" * 100, b""), "destination: .*AMQP"),
        (((60, 20), b"", DELIVERY), ((60, 40), DELIVERY, b""), "destination: .*without a method"),
    ],
)  # fmt: skip
async def test_a_peer_that_misbehaves_ends_the_try_with_the_reason(
    peers: Callable[..., Awaitable[Peer]],
    source: tuple[tuple[int, int], bytes, bytes],
    destination: tuple[tuple[int, int], bytes | None, bytes],
    why: str,
) -> None:
    ends = [await peers(at, instead, more=more) for at, instead, more in (source, destination)]
    value = {
        "src-uri": f"amqp://127.0.0.1:{ends[0].port}", "src-queue": "a",
        "dest-uri": f"amqp://127.0.0.1:{ends[1].port}", "dest-queue": "b", "reconnect-delay": 0,
    }  # fmt: skip
    order = Order(shovels.read("/", "s", value), 1)
    runner = ShovelRunner(order, "c", list, lambda: None, confirm_s_max=0.5)
    await asyncio.wait_for(runner.run(), 30)
    assert runner.state.state == "terminated" and runner.state.moved == 0
    assert re.search(why, runner.state.error), runner.state.error


@pytest.mark.parametrize(
    ("confirmed", "refused", "rests"),
    [
        (0, 2, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),
        (1, 2, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),  # full, with a slow consumer
        (2, 1, [0.05, 0.05, 0.05]),
    ],
)
async def test_a_source_is_read_after_pauses_while_its_destination_refuses(
    confirmed: int, refused: int, rests: list[float]
) -> None:
    value = {"src-uri": "amqp://", "src-queue": "a", "dest-uri": "amqp://", "dest-queue": "b"}
    read = shovels.read("/", "s", value)
    runner = ShovelRunner(Order(read, 1), "c", list, lambda: None)
    paused: list[bool] = []
    given_back: list[int] = []
    source = SimpleNamespace(
        pause=paused.append, send=lambda method: None, ack_up_to=lambda tag: None
    )
    destination = SimpleNamespace(settled=0, skipped=0, take_refused=lambda: given_back)
    attempt = pump.Pump(
        source,
        destination,
        runner.state,
        runner.settled,
        1.0,  # type: ignore[arg-type]
    )

    def settle(is_refused: bool) -> None:
        destination.settled += 1
        given_back[:] = [destination.settled] if is_refused else []
        attempt._settle()

    def round_of_messages(confirmed: int, refused: int) -> float:
        for _ in range(confirmed):
            settle(False)
        for _ in range(refused):
            settle(True)
        assert attempt._resting is not None and paused[-1]
        attempt._resting.cancel()
        attempt._rested()
        assert not paused[-1]
        return attempt._rest_s

    assert [round_of_messages(confirmed, refused) for _ in rests] == rests
    assert len(paused) == 2 * len(rests)
    assert runner.state.error == tries.REFUSED
    longest = attempt._rest_s
    assert round_of_messages(9, 1) == max(longest / 2, pump.REFUSED_S)
    settle(False)
    assert runner.state.error == "" and not paused[-1]
    rounds = len(rests)
    assert runner.state.moved == confirmed * rounds + 10
    assert runner.state.refused == refused * rounds + 1


@pytest.mark.parametrize(
    ("ack_mode", "end"),
    [
        ("on-publish", "all is moved"), ("on-publish", "stopped"), ("no-ack", "stopped"),
        ("on-publish", "stopped, and nothing is read"),
    ],
)  # fmt: skip
async def test_what_was_acknowledged_when_it_was_written_is_read_before_the_end(
    peers: Callable[..., Awaitable[Peer]], monkeypatch: pytest.MonkeyPatch, ack_mode: str, end: str
) -> None:
    monkeypatch.setattr(shovel, "FLUSH_S_AT_STOP", 0.1 if "nothing" in end else 30.0)
    source = await peers((60, 20), b"", more=delivery(1) + delivery(2))
    destination = await peers(NEVER, b"")
    destination.reads.clear()
    value = {
        "src-uri": f"amqp://127.0.0.1:{source.port}", "src-queue": "a", "ack-mode": ack_mode,
        "dest-uri": f"amqp://127.0.0.1:{destination.port}", "dest-queue": "b",
        "src-delete-after": 2 if end == "all is moved" else "never",
    }  # fmt: skip
    runner = ShovelRunner(Order(shovels.read("/", "s", value), 1), "c", list, lambda: None)
    moved = asyncio.Event()

    def settled(messages: int, refused: int) -> bool:
        is_last = ShovelRunner.settled(runner, messages, refused)
        if runner.state.moved == 2:
            moved.set()
        return is_last

    monkeypatch.setattr(runner, "settled", settled)
    running = asyncio.create_task(runner.run())
    await asyncio.wait_for(moved.wait(), 30)
    if end != "all is moved":
        running.cancel()
    if "nothing" not in end:
        assert (await asyncio.wait([running], timeout=0.05))[1], "it has not waited"
        destination.reads.set()
    await asyncio.wait([running], timeout=30)
    assert running.done()
    if "nothing" not in end:
        heard = [each.name for each in destination.heard[-3:]]
        assert heard == ["Basic.Publish", "Basic.Publish", "Connection.Close"]


async def test_a_shovel_whose_destination_breaks_before_it_has_read_all_is_not_done(
    peers: Callable[..., Awaitable[Peer]], caplog: pytest.LogCaptureFixture
) -> None:
    source = await peers((60, 20), b"", more=DELIVERY)
    destination = await peers((60, 40), None)
    value = {
        "src-uri": f"amqp://127.0.0.1:{source.port}", "src-queue": "a", "src-delete-after": 1,
        "dest-uri": f"amqp://127.0.0.1:{destination.port}", "dest-queue": "b",
        "ack-mode": "on-publish",
    }  # fmt: skip
    runner = ShovelRunner(Order(shovels.read("/", "s", value), 1), "c", list, lambda: None)
    await asyncio.wait_for(runner.run(), 30)
    state = runner.state
    assert (state.state, state.is_done, state.failures) == ("terminated", False, 1)
    assert "has not read all: the connection was lost" in state.error
    assert "it is not tried again" in caplog.text


@pytest.mark.parametrize(("is_silent", "left"), [(True, 5), (False, 0)])
async def test_what_a_silent_source_holds_still_counts_for_the_length_of_its_queue(
    peers: Callable[..., Awaitable[Peer]],
    monkeypatch: pytest.MonkeyPatch,
    is_silent: bool,
    left: int,
) -> None:
    source = await peers((60, 20), None)  # it ends the connection once it is asked for messages
    destination = await peers(NEVER, b"")
    if is_silent:
        lost = Connection.connection_lost
        unreachable = OSError(errno.EHOSTUNREACH, "No route to host")
        monkeypatch.setattr(
            Connection, "connection_lost", lambda connection, _: lost(connection, unreachable)
        )
    value = {
        "src-uri": f"amqp://127.0.0.1:{source.port}", "src-queue": "a",
        "src-delete-after": "queue-length", "reconnect-delay": 0,
        "dest-uri": f"amqp://127.0.0.1:{destination.port}", "dest-queue": "b",
    }  # fmt: skip
    runner = ShovelRunner(Order(shovels.read("/", "s", value), 1), "c", list, lambda: None)
    await asyncio.wait_for(runner.run(), 30)
    assert "the connection was lost" in runner.state.error
    assert runner.left == 5
    runner.begin(0, "a")  # nothing is ready
    assert runner.left == left
    runner.begin(0, "a")  # the connection before has ended in order
    assert runner.left == 0


class HttpServer:
    """Answers the POST of each message once it may."""

    def __init__(self) -> None:
        self.port = self.asked = self.answered = 0
        self.came, self.may_answer = asyncio.Event(), asyncio.Event()
        self._server: asyncio.Server | None = None

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                self.asked += 1
                self.came.set()
                await self.may_answer.wait()
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
                self.answered += 1
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


@pytest.mark.parametrize(
    ("ack_mode", "answers", "warning"),
    [
        ("no-ack", True, ""),
        ("no-ack", False, "the destination has not read all, up to 3 messages are lost"),
        ("on-publish", False, ""),  # they are not acknowledged
    ],
)
async def test_what_waits_for_an_http_server_when_a_shovel_stops_is_sent_or_told(
    peers: Callable[..., Awaitable[Peer]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, ack_mode: str, answers: bool, warning: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(shovel, "FLUSH_S_AT_STOP", 30.0 if answers else 0.1)
    source = await peers((60, 20), b"", more=delivery(1) + delivery(2) + delivery(3))
    server = HttpServer()
    await server.serve()
    value = {
        "src-uri": f"amqp://127.0.0.1:{source.port}", "src-queue": "a", "ack-mode": ack_mode,
        "dest-uri": f"http://127.0.0.1:{server.port}/",
    }  # fmt: skip
    runner = ShovelRunner(Order(shovels.read("/", "s", value), 1), "c", list, lambda: None)
    running = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(30):
            await server.came.wait()
            while runner.state.pending < 3:
                await asyncio.sleep(0)
                runner.update()
            running.cancel()
            if answers:
                assert (await asyncio.wait([running], timeout=0.05))[1], "it has not waited"
                server.may_answer.set()
            await asyncio.wait([running])
    finally:
        running.cancel()
        server.may_answer.set()
        server.close()
    assert server.asked == (3 if answers else 1)
    said = [record.getMessage() for record in caplog.records]
    assert (warning in said[0] and len(said) == 1) if warning else not said
    assert runner.state.moved == (3 if answers else 0)


ACK, NACK = commands.Basic.Ack, commands.Basic.Nack


@pytest.mark.row("J8")
@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ([ACK(1), NACK(2)], [(NACK, 2), (ACK, 1)]),
        ([NACK(1), ACK(2)], [(NACK, 1), (ACK, 2)]),
        ([NACK(2), ACK(1)], [(NACK, 2), (ACK, 1)]),
        ([NACK(2, multiple=True)], [(NACK, 1), (NACK, 2)]),
        ([NACK(1), NACK(2)], [(NACK, 1), (NACK, 2)]),
    ],
)
async def test_what_a_destination_refuses_goes_back_into_the_source_and_ends_nothing(
    peers: Callable[..., Awaitable[Peer]],
    said: list[base.Frame],
    heard: list[tuple[type[base.Frame], int]],
) -> None:
    source = await peers((60, 20), b"", more=delivery(1) + delivery(2))
    answer = b"".join(frame(1, 1, encode_method(each)) for each in said)
    destination = await peers((60, 40), answer)
    value = {
        "src-uri": f"amqp://127.0.0.1:{source.port}", "src-queue": "a", "src-delete-after": 2,
        "dest-uri": f"amqp://127.0.0.1:{destination.port}", "dest-queue": "b",
    }  # fmt: skip
    runner = ShovelRunner(Order(shovels.read("/", "s", value), 1), "c", list, lambda: None)
    await asyncio.wait_for(runner.run(), 30)
    await asyncio.wait_for(source.ended.wait(), 30)
    answers = [each for each in source.heard if isinstance(each, ACK | NACK)]
    assert [(type(each), each.delivery_tag) for each in answers] == heard
    assert all(each.requeue and not each.multiple for each in answers if isinstance(each, NACK))
    refused = sum(kind is NACK for kind, _ in heard)
    state = runner.state
    assert (state.moved, state.refused, state.failures) == (2 - refused, refused, 0)
    assert state.is_done


@pytest.mark.row("J8")
async def test_a_message_that_fits_into_no_frame_is_the_reason_once_those_before_it_are_moved(
    peers: Callable[..., Awaitable[Peer]],
) -> None:
    headers = short(b"h") + b"S" + struct.pack(">I", 131_000) + bytes(131_000)
    large = b"\x20\0" + struct.pack(">I", len(headers)) + headers
    source = await peers((60, 20), b"", more=delivery(1) + delivery(2, large) + delivery(3))
    destination = await peers((60, 40), frame(1, 1, encode_method(ACK(1))))
    value = {
        "src-uri": f"amqp://127.0.0.1:{source.port}", "src-queue": "a", "reconnect-delay": 0,
        "dest-uri": f"amqp://127.0.0.1:{destination.port}", "dest-queue": "b",
        "dest-add-forward-headers": True,
    }  # fmt: skip
    runner = ShovelRunner(Order(shovels.read("/", "s", value), 1), "c", list, lambda: None)
    await asyncio.wait_for(runner.run(), 30)
    await asyncio.wait_for(source.ended.wait(), 30)
    assert runner.state.error.startswith("message 2 with the routing key '' and 1 bytes does not")
    assert runner.state.error.endswith(f"a frame has room for {131_072 - 20}")
    assert runner.state.moved == 1
    answers = [each for each in source.heard if isinstance(each, ACK | NACK)]
    assert [(type(each), each.delivery_tag) for each in answers] == [(ACK, 1)]


@pytest.mark.row("J8")
@pytest.mark.parametrize(
    ("code", "said", "named"),
    [
        (406, "message size 3 is larger than configured max size 2", 3),
        (406, "message size 5 is larger than configured max size 2", None),
        (406, "unknown delivery tag 3", None),
        (404, "message size 3", None),
    ],
)
async def test_a_message_that_is_too_large_for_the_destination_is_named(
    peers: Callable[..., Awaitable[Peer]], code: int, said: str, named: int | None
) -> None:
    bodies = b"a", b"bb", b"ccc", b"ddd", b"e"
    more = b"".join(delivery(tag, body=body) for tag, body in enumerate(bodies, 1))
    source = await peers((60, 20), b"", more=more)
    closing = commands.Channel.Close(code, f"PRECONDITION_FAILED - {said}", 60, 40)
    destination = await peers((60, 40), frame(1, 1, encode_method(closing)))
    value = {
        "src-uri": f"amqp://127.0.0.1:{source.port}", "src-queue": "a", "reconnect-delay": 0,
        "dest-uri": f"amqp://127.0.0.1:{destination.port}", "dest-queue": "b",
    }  # fmt: skip
    runner = ShovelRunner(Order(shovels.read("/", "s", value), 1), "c", list, lambda: None)
    await asyncio.wait_for(runner.run(), 30)
    expected = f"destination: {code} PRECONDITION_FAILED - {said}"
    if named is not None:
        expected += f" (message {named} with the routing key '' and 3 bytes)"
    assert runner.state.error == expected
