"""The compiled modules that read what others sent, for the fuzzer.

To add one: write a function that runs it over any bytes and returns what it did in short (counts
and reasons, not contents), one that compares it with its slow twin in tests/reference, and a row of
TARGETS with a few right inputs. A module that keeps state is made anew for each input, or brought
into a known state. If it takes more than bytes, take that from the first bytes of the input.
"""

from __future__ import annotations

from collections.abc import Hashable

from pamqp import commands

from shardmq.broker.amqp import Connection, Failed, contents, frames
from tests.amqp.bytes_of import method, publish, received, shake_hands
from tests.reference import frames as reference
from tests.support.fuzzing import Target

FRAME_MAX, MESSAGE_MAX = 400, 300
STATES = b"\1\1\1\0"  # channels 0 to 2 are open


def _whole(channel: int, key: str, body: bytes, part: int = 4088, **props: object) -> bytes:
    return b"".join(publish(channel, "e", key, body, part, **props))


PUBLISHES = (
    _whole(1, "k", b"body"),
    _whole(1, "", b"") * 3,
    _whole(1, "k", b"long" * 70, 100, delivery_mode=2) + _whole(2, "l", b"x"),
    _whole(
        1, "k", b"x" * 16, headers={"CC": ["a"], "x-sequence": 1}, expiration="60000", priority=9,
        reply_to="amq.rabbitmq.reply-to", user_id="guest", correlation_id="c",
    ),
)  # fmt: skip
SETTLES = (
    b"".join(method(1, commands.Basic.Ack(tag)) for tag in range(1, 5)),
    method(1, commands.Basic.Ack(9, True)) + method(1, commands.Basic.Nack(10, True, False)),
    method(1, commands.Basic.Reject(3, True)) + method(2, commands.Basic.Ack(1)),
)
BINDS = tuple(
    b"".join(
        method(1, commands.Queue.Bind(queue=f"q{n}", exchange="e", routing_key="k", nowait=nowait))
        for n in range(3)
    )
    for nowait in (False, True)
)
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
CLIENT = (
    *(one + HEARTBEAT + other for one in PUBLISHES for other in SETTLES),
    *BINDS,
    method(1, commands.Queue.Declare(queue="q", arguments={"a": [1, {"b": None}]})),
    method(1, commands.Basic.Consume(queue="q", consumer_tag="c")) + SETTLES[0],
    method(1, commands.Channel.Close(200, "", 0, 0)) + method(1, commands.Channel.Open()),
)


def scan(data: bytes) -> Hashable:
    at, table, count, why, _ = frames.scan(data, 0, len(data), STATES, FRAME_MAX, MESSAGE_MAX)
    for index in range(count):
        contents.stored(data, table, index)
    return count, why, at == len(data)


def compare_scan(data: bytes) -> None:
    *found, needed = frames.scan(data, 0, len(data), STATES, FRAME_MAX, MESSAGE_MAX)
    *expected, expected_needed = reference.scan(data, 0, len(data), STATES, FRAME_MAX, MESSAGE_MAX)
    assert found == expected
    assert found[3] != frames.INCOMPLETE or needed == expected_needed
    for index in range(found[2]):
        stored = contents.stored(data, found[1], index)
        assert stored == reference.stored(data, found[1], index)
        assert contents.read_stored(stored) == reference.read_stored(stored)


def settles(data: bytes) -> Hashable:
    at, channel, ranges = frames.settles(data, 0, len(data))[:3]
    return at // 21, channel & 3, len(ranges)


def compare_settles(data: bytes) -> None:
    assert tuple(frames.settles(data, 0, len(data))) == reference.settles(data, 0, len(data))


def binds(data: bytes) -> Hashable:
    _, channel, found, nowait = frames.binds(data, 0, len(data), STATES)
    return channel, len(found), nowait


def compare_binds(data: bytes) -> None:
    expected = reference.binds(data, 0, len(data), STATES)
    assert tuple(frames.binds(data, 0, len(data), STATES)) == expected


def client(data: bytes) -> Hashable:
    """Take what a client sends behind its handshake, in two reads that are cut anywhere."""
    made = Connection(server_properties={})
    shake_hands(made, 2, 4096)
    cut = data[0] * len(data) >> 8 if data else 0
    events = [*received(made, data[1:cut]), *received(made, data[max(cut, 1) :])]
    return tuple(
        (type(event).__name__, event.exception.code if isinstance(event, Failed) else 0)
        for event in events
    )


TARGETS = {
    target.name: target
    for target in (
        Target("scan", PUBLISHES, scan, compare_scan),
        Target("settles", SETTLES, settles, compare_settles),
        Target("binds", BINDS, binds, compare_binds),
        Target("client", tuple(b"\x80" + each for each in CLIENT), client),
    )
}
