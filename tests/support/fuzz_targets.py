"""The compiled modules that read what others sent, for the fuzzer.

To add one: write a function that runs it over any bytes and returns what it did in short (counts
and reasons, not contents), one that compares it with its slow twin in tests/reference, and a row of
TARGETS with a few right inputs. A module that keeps state is made anew for each input, or brought
into a known state. If it takes more than bytes, take that from the first bytes of the input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from functools import cache

from pamqp import commands

from shardmq.broker.amqp import Connection, Failed, contents, frames
from shardmq.broker.front_door.consume.consumers import Consumer
from shardmq.shardd.wire import codec
from tests.amqp.bytes_of import method, publish, received, shake_hands
from tests.connections.door_play import Door
from tests.connections.test_short_way import Counted, History, watched
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


class Plain:
    """The short way of a client with two channels, of which one wants confirms, and of a shard."""

    def __init__(self) -> None:
        self.door = door = Door(short=True)
        door.enter()
        for number in (1, 2):
            door.read(0, method(number, commands.Channel.Open()))
        door.read(0, method(2, commands.Confirm.Select()))
        for number in (1, 2):  # a channel that nobody has used is not made yet
            door.read(0, b"".join(publish(number, "", "a")))
        connection = door.entered[0]
        assert connection.socket.inlet is not None
        self.inlet = connection.socket.inlet
        self.channel = connection.channels.by_number[1].consuming
        self.consumer = Consumer(self.channel, 7, "tag")
        self.consumer.announced = True
        door.consuming.consumers[7] = self.consumer
        self.deliveries = 0
        self.link = door.links.links[0]
        assert door.services.short_way is not None
        self.outlet = door.services.short_way.outlet(
            self.link, codec.read_deliveries, lambda _shard, _section: None
        )

    def begin(self) -> None:
        """Have five deliveries outstanding, and nothing packed."""
        for link in self.door.links.links:
            self.door.links.packer.drop(link.shard)
            link.settles.take()
            link.packing.clear()
        self.channel.unacked.take_through(0)
        self.channel.next_tag = 1
        self.channel.unacked.add(1, 5, self.consumer, self.link.epoch, 1)


@cache
def plain() -> Plain:
    return Plain()


def take(data: bytes) -> Hashable:
    one = plain()
    one.begin()
    taken = one.inlet.take(memoryview(data), len(data))
    assert 0 <= taken <= len(data)
    return taken == len(data), one.inlet.things, one.inlet.fed, one.channel.unacked.count


def compare_take(data: bytes) -> None:
    """Compare the short way of a front door with the way by Python."""

    async def both() -> None:
        history = History(0, watched(Counted))
        history.enter()
        for said in (history.pending[0], data):
            history.both(lambda door, said=said: door.read(0, said), said.hex())
            await history.settle()
            history.compare()

    asyncio.run(both())


def outlet(data: bytes) -> Hashable:
    one = plain()
    one.begin()
    socket = one.door.entered[0].socket
    before = one.consumer.delivered
    try:
        one.outlet(data)
    except ValueError as error:
        return str(error)
    size, socket.output.chunks, socket.output.pending = socket.output.pending, [], 0
    return one.consumer.delivered - before, size.bit_length()


def _deliver(*sections: tuple[int, int, bytes]) -> bytes:
    """Return a DELIVER: consumer, count of messages, messages."""
    writer = codec.DeliveryWriter(0, 7, 1, 0)
    for consumer, count, stored in sections:
        writer.add(1, 1, consumer, 1, False, count, stored)
    message = writer.take()
    assert message is not None
    return message


KNOWN = [b"".join(publish(number, "", "a", b"body" * number)) for number in (1, 2)]
TAKEN = (
    *KNOWN,
    KNOWN[0] * 2 + SETTLES[0] + HEARTBEAT + KNOWN[1],
    method(1, commands.Basic.Ack(3, True)) + KNOWN[1] + method(1, commands.Basic.Ack(5)),
    KNOWN[0] + PUBLISHES[3] + SETTLES[1],
)
STORED = b"\4\0\0\0\2\0\0\0\0\1a\0\0body"
DELIVERS = (
    _deliver((7, 1, STORED)),
    _deliver((7, 3, STORED * 3), (8, 1, STORED), (7, 1, STORED)),
)

TARGETS = {
    target.name: target
    for target in (
        Target("scan", PUBLISHES, scan, compare_scan),
        Target("settles", SETTLES, settles, compare_settles),
        Target("binds", BINDS, binds, compare_binds),
        Target("take", TAKEN, take, compare_take),
        Target("outlet", DELIVERS, outlet),
        Target("client", tuple(b"\x80" + each for each in CLIENT), client),
    )
}
