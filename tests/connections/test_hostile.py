"""Hostile clients get RabbitMQ's answer, and nobody else notices.

They break the protocol, flood, or fall silent.

A canary publishes and consumes all the time; no process may grow without bound or log a traceback.
"""

from __future__ import annotations

import itertools
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pika
import pytest
from pamqp import commands

from tests.support.raw_client import HEADER, RawClient, content_header, method, publish, raw_frame
from tests.support.real_broker import RealBroker, wait_until

SETTINGS = """
[front_doors]
handshake_timeout_s = 2
channels_max = 255
message_bytes_max = 33554432
"""
MIB = 1 << 20
# Of all processes together, over what they had before a flood: far less than any of the floods
# sends.
GROWTH_BYTES_MAX = 128 * MIB
# Of the front door, for 1,500 sessions: 8 MiB if the collector has to find them.
CUT_OFF_BYTES_MAX = 4 * MIB
# A publish, its confirm and its delivery, on a machine that does other things too.
CANARY_LATENCY_S_MAX = 15.0


class Canary:
    """A client like any other, while others misbehave."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.rounds = 0
        self.slowest_s = 0.0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
                channel = connection.channel()
                channel.queue_declare("canary", exclusive=True)
                channel.confirm_delivery()
                while not self._over.is_set():
                    self._sing(channel)
                    time.sleep(0.01)
        except Exception as error:
            self.error = error

    def _sing(self, channel: pika.adapters.blocking_connection.BlockingChannel) -> None:
        began = time.monotonic()
        channel.basic_publish("", "canary", str(self.rounds).encode(), mandatory=True)
        while (got := channel.basic_get("canary", auto_ack=True))[0] is None:
            pass
        assert got[2] == str(self.rounds).encode()
        self.rounds += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    directory: Path = tmp_path_factory.mktemp("hostile")
    (directory / "broker.toml").write_text(SETTINGS)
    more = ("--config", str(directory / "broker.toml"))
    made = RealBroker(directory / "data", more=more, forked=False)
    try:
        yield made
        made.stop()
        log = made.log_path.read_text(errors="replace")
        assert "Traceback" not in log, log
        assert "internal error" not in log, log
    finally:
        made.clean_up()


@pytest.fixture(scope="module", autouse=True)
def canary(broker: RealBroker) -> Iterator[Canary]:
    made = Canary(broker.url)
    yield made
    made.stop()
    assert made.error is None
    assert made.rounds > 10


@pytest.fixture(autouse=True)
def undisturbed(canary: Canary) -> Iterator[None]:
    """Each test by itself must leave the canary singing."""
    canary.slowest_s = 0.0
    yield
    before = canary.rounds
    wait_until(lambda: canary.rounds > before or canary.error is not None, "the canary to sing")
    assert canary.error is None
    assert canary.slowest_s < CANARY_LATENCY_S_MAX


@pytest.fixture
def client(broker: RealBroker) -> Iterator[RawClient]:
    """With channel 1 open."""
    with RawClient(broker.port) as made:
        yield made.shake_hands()


def resident_bytes(broker: RealBroker) -> int:
    total = 0
    for child in broker.status()["children"]:
        if not child["pid"]:
            continue
        status = Path(f"/proc/{child['pid']}/status").read_text()
        total += next(
            int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS")
        )
    return total


class Growth:
    """Looks at the processes all the time; `most`: bytes over what they had at the start."""

    def __init__(self, broker: RealBroker) -> None:
        self._broker = broker
        self._before = resident_bytes(broker)
        self.most = 0

    def look(self, seconds: float = 0.0) -> None:
        end = time.monotonic() + seconds
        while True:
            self.most = max(self.most, resident_bytes(self._broker) - self._before)
            if time.monotonic() >= end:
                break
            time.sleep(0.05)

    def check(self, seconds: float = 1.0) -> None:
        self.look(seconds)
        assert self.most < GROWTH_BYTES_MAX, f"{self.most / MIB:.0f} MiB more"


# -- before there is a connection ------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"AMQP\x01\x01\x08\x00",
        b"AMQP\x03\x01\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        bytes(64),
        b"\xff" * 100_000,
    ],
    ids=["http", "amqp-0-8", "amqp-1-0", "tls", "zeroes", "ones"],
)
def test_another_protocol_is_told_ours(broker: RealBroker, said: bytes) -> None:
    with RawClient(broker.port) as client:
        client.send_what_is_taken(said)
        got = b""
        try:
            while more := client.sock.recv(100):
                got += more
        except ConnectionResetError:  # bytes we did not read were on their way
            pass
        assert got in (HEADER, b"")


def test_who_says_nothing_is_sent_away_in_time(broker: RealBroker) -> None:
    silent, slow = RawClient(broker.port), RawClient(broker.port)
    with silent, slow:
        began = time.monotonic()
        slow.send(HEADER)
        slow.expect(commands.Connection.Start)
        silent.expect_end()
        slow.expect_end()
        assert 1.8 < time.monotonic() - began < 30


def test_methods_before_their_time_are_refused(broker: RealBroker) -> None:
    too_early = "CHANNEL_ERROR - unexpected method in connection state starting"
    for early, code, text in (
        (method(0, commands.Connection.Open("/")), 504, too_early),
        (method(0, commands.Connection.TuneOk(10, 131072, 0)), 504, too_early),
        (method(1, commands.Channel.Open()), 503, "COMMAND_INVALID - "),
        (publish(1, "", "q", b"x"), 503, "COMMAND_INVALID - "),
    ):
        with RawClient(broker.port) as client:
            client.send(HEADER)
            client.expect(commands.Connection.Start)
            client.send(early)
            client.expect_close(code, text)
            client.expect_end()


@pytest.mark.parametrize(
    ("mechanism", "response", "code", "text"),
    [
        (
            "PLAIN",
            "\0guest\0wrong",
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. ",
        ),
        ("PLAIN", "guest", 502, "SYNTAX_ERROR - "),
        ("PLAIN", "\0" * 4_000, 502, "SYNTAX_ERROR - "),
        (
            "PLAIN",
            "\0" * 100_000,
            501,
            "FRAME_ERROR - type 1, all octets = <<>>: {frame_too_large,",
        ),
        ("AMQPLAIN", "\xff" * 100, 502, "SYNTAX_ERROR - "),
        ("KERBEROS", "", 503, "COMMAND_INVALID - unknown authentication mechanism 'KERBEROS'"),
    ],
)
def test_a_bad_login_is_refused(
    broker: RealBroker, mechanism: str, response: str, code: int, text: str
) -> None:
    with RawClient(broker.port) as client:
        client.send(HEADER)
        client.expect(commands.Connection.Start)
        properties = {"capabilities": {"authentication_failure_close": True}}
        client.send(
            method(0, commands.Connection.StartOk(properties, mechanism, response, "en_US"))
        )
        client.expect_close(code, text)
        client.expect_end()


@pytest.mark.parametrize(
    ("tuned", "text"),
    [
        ((0, 131072), "negotiated channel_max = 0 is higher than the maximum allowed value (255)"),
        (
            (256, 131072),
            "negotiated channel_max = 256 is higher than the maximum allowed value (255)",
        ),
        ((10, 100), "negotiated frame_max = 100 is lower than the minimum allowed value (4096)"),
        (
            (10, 131073),
            "negotiated frame_max = 131073 is higher than the maximum allowed value (131072)",
        ),
    ],
)
def test_limits_are_not_negotiated_away(
    broker: RealBroker, tuned: tuple[int, int], text: str
) -> None:
    with RawClient(broker.port) as client:
        client.send(HEADER)
        client.expect(commands.Connection.Start)
        client.send(method(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")))
        client.expect(commands.Connection.Tune)
        client.send(method(0, commands.Connection.TuneOk(*tuned, 0)))
        client.expect_close(530, "NOT_ALLOWED - " + text)


# -- broken frames ---------------------------------------------------------------------------------

PUBLISH = method(1, commands.Basic.Publish(exchange="", routing_key="q"))
NESTED = 10_000


def nested_tables() -> bytes:
    deep = b""
    for _ in range(NESTED):
        deep = b"\x01aF" + struct.pack(">I", len(deep)) + deep
    fields = b"\0\0\x01q\0" + struct.pack(">I", len(deep)) + deep
    return raw_frame(1, 1, struct.pack(">HH", 50, 10) + fields)


@pytest.mark.parametrize(
    ("said", "code", "text"),
    [
        (raw_frame(8, 0, b"", b"x"), 501,
         "type 8, all octets = <<>>: {invalid_frame_end_marker,120}"),
        (raw_frame(1, 1, bytes(20), b"x"), 501,
         "type 1, first 16 octets = <<0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0>>: {inv"),
        (raw_frame(9, 0, b"abc"), 501, "type 9, all octets = <<>>: unknown_frame"),
        (b"\xff" * 8, 501, "type 255, all octets = <<>>: unknown_frame"),
        (struct.pack(">BHI", 1, 1, 200_000), 501,
         "type 1, all octets = <<>>: {frame_too_large,200000,131064}"),
        (struct.pack(">BHI", 1, 1, 0xFFFFFFFF), 501,
         "type 1, all octets = <<>>: {frame_too_large,4294967295,131064}"),
        (raw_frame(8, 1, b""), 505, "heartbeat frame must be on channel 0"),
        (raw_frame(1, 1, b""), 501, "type 1, all octets = <<>>: unknown_frame"),
        (raw_frame(1, 1, b"\0\x3c"), 501, "type 1, all octets = <<0,60>>: unknown_frame"),
        (raw_frame(1, 1, b"\0\x3c\0\x28"), 501, ""),
        (raw_frame(1, 1, b"\0\x3c\x03\xe7"), 503, "unimplemented method"),
        (raw_frame(1, 1, b"\x03\xe7\0\x01"), 503, "unimplemented method"),
        (raw_frame(1, 0, b"\0\x0a\x03\xe7"), 503, "unimplemented method"),
        (raw_frame(1, 1, struct.pack(">HHH", 50, 10, 0) + b"\x05ab"), 501, ""),
        (content_header(1, 5), 505, "expected method frame, got non method frame instead"),
        (raw_frame(3, 1, b"x"), 505, "expected method frame, got non method frame instead"),
        (PUBLISH + PUBLISH, 505,
         "expected content header for class 60, got non content header frame instead"),
        (PUBLISH + content_header(1, 5, 50), 505,
         "expected content header for class 60, got one for class 50 instead"),
        (PUBLISH + content_header(1, 5) + PUBLISH, 505,
         "expected content body, got non content body frame instead"),
        (PUBLISH + content_header(1, 5) + raw_frame(3, 1, b"x" * 6), 501, ""),
        (PUBLISH + raw_frame(2, 1, b"\0\x3c"), 502, ""),
        (PUBLISH + content_header(1, 5, props=b"\xff\xff"), 502, ""),
        (method(0, commands.Channel.Open()), 503, ""),
        (method(0, commands.Basic.Get(queue="q")), 503, ""),
        (method(0, commands.Connection.StartOk({}, "PLAIN", "", "en_US")), 504,
         "unexpected method in connection"),
        (method(1, commands.Channel.Open()), 504, "second 'channel.open' seen"),
        (method(2, commands.Basic.Get(queue="q")), 504, "expected 'channel.open'"),
        (method(65535, commands.Basic.Ack(1)), 504, "expected 'channel.open'"),
        (method(1, commands.Basic.Publish(exchange="", routing_key="q", immediate=True)), 540,
         "immediate=true"),
        (method(1, commands.Channel.Flow(False)), 540, "active=false"),
        (method(1, commands.Basic.Qos(prefetch_size=7)), 540, "prefetch_size!=0 (7)"),
        (method(1, commands.Basic.Recover(False)), 540, "requeue=false"),
        (nested_tables(), 502, ""),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_breaks_the_protocol_ends_the_connection(
    client: RawClient, said: bytes, code: int, text: str
) -> None:
    names = {501: "FRAME_ERROR", 502: "SYNTAX_ERROR", 503: "COMMAND_INVALID", 504: "CHANNEL_ERROR",
             505: "UNEXPECTED_FRAME", 530: "NOT_ALLOWED", 540: "NOT_IMPLEMENTED"}  # fmt: skip
    client.send(said)
    client.expect_close(code, f"{names[code]} - {text}")
    if code != 501:  # after a broken frame nobody knows where close-ok begins
        client.expect_end()


@pytest.mark.parametrize(
    ("said", "code", "text"),
    [
        (PUBLISH + content_header(1, 1 << 62), 406,
         "PRECONDITION_FAILED - message size 4611686018427387904 is l"),
        (method(1, commands.Basic.Ack(77)), 406, "PRECONDITION_FAILED - unknown delivery tag 77"),
        (method(1, commands.Basic.Ack(77, True)), 406,
         "PRECONDITION_FAILED - unknown delivery tag 77"),
        (method(1, commands.Basic.Nack(2**63 - 1)), 406,
         "PRECONDITION_FAILED - unknown delivery tag 9223372036"),
        (method(1, commands.Basic.Reject(0)), 406, "PRECONDITION_FAILED - unknown delivery tag 0"),
        (publish(1, "nowhere", "", b"x"), 404, "NOT_FOUND - no exchange 'nowhere' in vhost '/'"),
        (method(1, commands.Basic.Get(queue="nobody")), 404,
         "NOT_FOUND - no queue 'nobody' in vhost '/'"),
        (method(1, commands.Basic.Get(queue="")), 404, "NOT_FOUND - no previously declared queue"),
        (method(1, commands.Queue.Declare(queue="amq.mine")), 403,
         "ACCESS_REFUSED - queue name 'amq.mine' "),
        (method(1, commands.Tx.Commit()), 406,
         "PRECONDITION_FAILED - channel is not transactional"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_is_refused_ends_the_channel_only(
    client: RawClient, said: bytes, code: int, text: str
) -> None:
    client.send(said + publish(1, "", "q", b"late") + method(1, commands.Basic.Ack(5)))
    client.expect_channel_close(1, code, text)
    client.ask(1, commands.Channel.Open(), commands.Channel.OpenOk)
    client.send(
        method(1, commands.Basic.Publish(exchange="", routing_key="nobody")) + content_header(1, 0)
    )
    client.ask(1, commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)


def test_noise_after_the_handshake_never_breaks_more_than_its_connection(
    broker: RealBroker,
) -> None:
    chance = random.Random(7)
    for _ in range(40):
        with RawClient(broker.port) as client:
            client.shake_hands()
            kind, size = chance.choice([1, 1, 1, 2, 3, 8]), chance.randrange(60)
            class_id = chance.choice([10, 20, 40, 50, 60, 85, 90])
            said = struct.pack(
                ">HH", class_id, chance.choice([10, 11, 20, 40, 70, 80])
            ) + chance.randbytes(size)
            client.send_what_is_taken(
                raw_frame(kind, chance.choice([0, 1]), said) + chance.randbytes(50)
            )


# -- too much --------------------------------------------------------------------------------------


def test_bodies_that_never_end_are_bounded_together(broker: RealBroker) -> None:
    growth = Growth(broker)
    with RawClient(broker.port) as client:
        client.shake_hands(channels=20)
        part = raw_frame(3, 0, bytes(131064))
        for channel in range(1, 21):
            head = method(
                channel, commands.Basic.Publish(exchange="", routing_key="q")
            ) + content_header(channel, 32 * MIB)
            one = part[:1] + struct.pack(">H", channel) + part[3:]
            if client.send_what_is_taken(head + one * 200, 5) == 0:
                break
            growth.look()
        # Not answered: on a crowded machine the broker has hung up by now.
        said = client.expect(commands.Connection.Close)
        assert (said.reply_code, said.class_id, said.method_id) == (506, 60, 40)
        assert said.reply_text.startswith("RESOURCE_ERROR - ")
    growth.check(0.2)


def test_many_bodies_that_wait_for_each_other_are_bounded(broker: RealBroker) -> None:
    """Small parts of large messages come on all channels.

    A connection may put together one large message at a time.
    """
    with RawClient(broker.port) as client:
        client.shake_hands(channels=4)
        for channel in (1, 2, 3, 4):
            said = commands.Basic.Publish(exchange="", routing_key="nobody")
            client.send(method(channel, said) + content_header(channel, MIB))
        for _ in range(16):
            client.send(b"".join(raw_frame(3, channel, bytes(65536)) for channel in (1, 2, 3, 4)))
        client.ask(1, commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)


def backlog(broker: RealBroker, name: str, count: int, size: int) -> pika.BlockingConnection:
    made = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = made.channel()
    channel.queue_declare(name)
    channel.confirm_delivery()
    for _ in range(count):
        channel.basic_publish("", name, bytes(size))
    return made


def test_a_consumer_that_never_reads_costs_little(broker: RealBroker) -> None:
    with backlog(broker, "unread", 300, MIB) as owner:
        growth = Growth(broker)
        with RawClient(broker.port, receive_bytes=4096) as client:
            client.shake_hands()
            client.send(
                method(1, commands.Basic.Consume(queue="unread", consumer_tag="t", no_ack=True))
            )
            growth.check(2)
        owner.channel().queue_delete("unread")


def gets() -> bytes:
    return method(1, commands.Basic.Get(queue="asked", no_ack=False)) * 20_000


def gets_on_all_channels() -> bytes:
    return (
        b"".join(method(number, commands.Basic.Get(queue="asked")) for number in range(1, 201)) * 20
    )


def declares() -> bytes:
    return method(1, commands.Queue.Declare(queue="again")) * 30_000


def unroutable() -> bytes:
    return publish(1, "amq.direct", "nobody", bytes(1000), mandatory=True) * 20_000


def qos_on_all_channels() -> bytes:
    return b"".join(method(number, commands.Basic.Qos(0, number)) for number in range(1, 201)) * 200


def publishes_behind_declares() -> bytes:
    declare = method(1, commands.Queue.Declare(queue="again"))
    other = method(2, commands.Basic.Qos(0, 1))
    return (declare * 100 + (publish(1, "amq.fanout", "", b"x" * 10) + other) * 1000) * 10


def channels_opened_and_closed() -> bytes:
    return (
        method(201, commands.Channel.Open()) + method(201, commands.Channel.Close(200, "", 0, 0))
    ) * 20_000


def heartbeats() -> bytes:
    return raw_frame(8, 0, b"") * 200_000


def bindings() -> bytes:
    return (
        method(1, commands.Queue.Bind(queue="again", exchange="amq.direct", routing_key="k"))
        * 20_000
    )


@pytest.mark.parametrize(
    "flood",
    [
        gets, gets_on_all_channels, declares, unroutable, qos_on_all_channels,
        publishes_behind_declares, channels_opened_and_closed, heartbeats, bindings,
    ],
)  # fmt: skip
def test_a_flood_of_questions_whose_answers_are_not_read_is_bounded(
    broker: RealBroker, flood: Callable[[], bytes]
) -> None:
    with backlog(broker, "asked", 100, MIB if "get" in flood.__name__ else 10) as owner:
        owner.channel().queue_declare("again")
        growth = Growth(broker)
        with RawClient(broker.port, receive_bytes=4096) as client:
            client.shake_hands(channels=200)
            client.send_what_is_taken(flood(), 1.5)
            growth.check(0.5)
        owner.channel().queue_delete("asked")


def test_connections_opened_and_dropped_leave_nothing(broker: RealBroker) -> None:
    for said in (b"", HEADER, HEADER[:3]):
        for _ in range(600):
            with RawClient(broker.port) as client:
                client.send(said)
    for _ in range(200):
        with RawClient(broker.port) as client:
            client.shake_hands()
    wait_until(lambda: len(open_sockets(broker)) < 20, "the sockets to be closed")


def front_door_bytes(broker: RealBroker) -> int:
    status = Path(f"/proc/{broker.pid('front-door')}/status").read_text()
    return next(
        int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS")
    )


def test_sessions_cut_off_amid_their_work_leave_no_memory(broker: RealBroker) -> None:
    """Waiting work must go with its session, not when the collector runs the next time."""
    chance = random.Random(3)
    said = b"".join(
        [
            method(1, commands.Queue.Declare(queue="cut off")),
            publish(1, "", "cut off", b"x" * 1000) * 10,
            method(1, commands.Basic.Consume(queue="cut off", consumer_tag="t")),
            method(1, commands.Confirm.Select()),
        ]
    )

    def cut_off(count: int) -> None:
        for _ in range(count):
            with RawClient(broker.port) as client:
                client.shake_hands()
                broken = bytearray(said[: chance.randrange(len(said))])
                for _ in range(chance.randrange(3)):
                    if broken:
                        broken[chance.randrange(len(broken))] = chance.randrange(256)
                client.send_what_is_taken(bytes(broken))

    cut_off(200)
    before = front_door_bytes(broker)
    cut_off(1500)
    assert front_door_bytes(broker) - before < CUT_OFF_BYTES_MAX
    with RawClient(broker.port) as client:
        client.shake_hands().ask(1, commands.Queue.Delete(queue="cut off"), commands.Queue.DeleteOk)


def open_sockets(broker: RealBroker) -> list[Path]:
    directory = Path(f"/proc/{broker.pid('front-door')}/fd")
    mine = f"{broker.port:04X}"
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(":" + mine):
            inodes.add(f"socket:[{fields[9]}]")
    return [fd for fd in directory.iterdir() if fd.is_symlink() and str(fd.readlink()) in inodes]


# -- cut off ---------------------------------------------------------------------------------------


def test_a_publish_cut_anywhere_is_no_publish(broker: RealBroker, client: RawClient) -> None:
    client.ask(1, commands.Queue.Declare(queue="cut"), commands.Queue.DeclareOk)
    whole = publish(1, "", "cut", b"0123456789")
    for at in range(0, len(whole), 3):
        with RawClient(broker.port) as other:
            other.shake_hands()
            other.send(publish(1, "", "cut", b"before") + whole[:at])
    expected = len(range(0, len(whole), 3))

    def count() -> int:
        answer = client.ask(
            1, commands.Queue.Declare(queue="cut", passive=True), commands.Queue.DeclareOk
        )
        return int(answer.message_count)

    wait_until(lambda: count() == expected, "what was whole to arrive")
    client.ask(1, commands.Queue.Delete(queue="cut"), commands.Queue.DeleteOk)


def test_what_a_channel_sends_behind_its_mistake_is_dropped(client: RawClient) -> None:
    client.ask(1, commands.Queue.Declare(queue="race"), commands.Queue.DeclareOk)
    good = publish(1, "", "race", b"x")
    client.send(good * 5 + publish(1, "nowhere", "", b"y") + good * 100)
    client.expect_channel_close(1, 404, "NOT_FOUND - no exchange 'nowhere' in vhost '/'")
    client.ask(1, commands.Channel.Open(), commands.Channel.OpenOk)
    answer = client.ask(
        1, commands.Queue.Declare(queue="race", passive=True), commands.Queue.DeclareOk
    )
    assert answer.message_count == 5
    client.ask(1, commands.Queue.Delete(queue="race"), commands.Queue.DeleteOk)


def test_a_peer_that_falls_silent_is_dropped_and_its_messages_are_back(
    broker: RealBroker, client: RawClient
) -> None:
    client.ask(1, commands.Queue.Declare(queue="half"), commands.Queue.DeclareOk)
    client.send(publish(1, "", "half", b"x"))
    with RawClient(broker.port) as silent:
        silent.shake_hands(heartbeat=1)
        silent.ask(
            1, commands.Basic.Consume(queue="half", consumer_tag="t"), commands.Basic.ConsumeOk
        )
        silent.expect(commands.Basic.Deliver)
        began = time.monotonic()
        silent.expect_end()
        assert time.monotonic() - began < 30
    answer = client.ask(
        1, commands.Queue.Declare(queue="half", passive=True), commands.Queue.DeclareOk
    )
    assert (answer.message_count, answer.consumer_count) == (1, 0)
    client.ask(1, commands.Queue.Delete(queue="half"), commands.Queue.DeleteOk)


def test_a_peer_that_neither_reads_nor_speaks_is_dropped(broker: RealBroker) -> None:
    with backlog(broker, "stuck", 20, MIB) as owner:
        with RawClient(broker.port, receive_bytes=4096) as stuck:
            stuck.shake_hands(heartbeat=1)
            stuck.send(method(1, commands.Basic.Consume(queue="stuck", consumer_tag="t")))
            stuck.send_what_is_taken(method(1, commands.Basic.Qos(0, 0)) * 200_000, 1)
            channel = owner.channel()
            wait_until(
                lambda: channel.queue_declare("stuck", passive=True).method.consumer_count == 0,
                "it to go",
            )
            assert channel.queue_declare("stuck", passive=True).method.message_count == 20
        channel.queue_delete("stuck")


# -- what clients may say, and hardly any does -----------------------------------------------------

EXTREMES = [
    b"t\1", b"b\xff", b"B\xff", b"u\xff\xff", b"s\xff\xff", b"I\xff\xff\xff\xff",
    b"i\xff\xff\xff\xff", b"l" + b"\xff" * 8, b"L" + b"\xff" * 8, b"L" + b"\x7f" + b"\xff" * 7,
    b"f\x7f\xc0\0\0", b"d\x7f\xf8\0\0\0\0\0\0", b"D\xff\xff\xff\xff\xff", b"S\0\0\0\2\xff\xfe",
    b"A\0\0\0\3Vt\0", b"T" + b"\xff" * 8, b"F\0\0\0\0", b"V",
    b"x\0\0\0\1\0",
]  # fmt: skip


def test_values_of_every_type_at_their_extremes_may_be_said_everywhere(
    broker: RealBroker, client: RawClient
) -> None:
    controller = broker.pid("controller")
    fields = b"".join(b"\x02%02d" % number + value for number, value in enumerate(EXTREMES))
    table = struct.pack(">I", len(fields)) + fields
    client.send(raw_frame(1, 1, struct.pack(">HHH", 50, 10, 0) + b"\x08extremes\0" + table))
    client.expect(commands.Queue.DeclareOk)
    client.send(
        raw_frame(1, 1, struct.pack(">HHH", 50, 20, 0) + b"\x08extremes\x0bamq.headers\0\0" + table)
    )
    client.expect(commands.Queue.BindOk)
    content = content_header(1, 1, props=struct.pack(">H", 0x2000) + table) + raw_frame(3, 1, b"x")
    for exchange in ("amq.headers", ""):  # not by the first: what is no number equals nothing
        client.send(
            method(1, commands.Basic.Publish(exchange=exchange, routing_key="extremes")) + content
        )
    client.send(raw_frame(1, 1, struct.pack(">HHH", 60, 20, 0) + b"\x08extremes\x01t\2" + table))
    client.expect(commands.Basic.ConsumeOk)
    client.expect(commands.Basic.Deliver)
    header = client.read_frame()
    assert header is not None and table in header
    assert client.read_frame() == raw_frame(3, 1, b"x")
    client.ask(1, commands.Queue.Delete(queue="extremes"), commands.Queue.DeleteOk)
    assert broker.pid("controller") == controller
