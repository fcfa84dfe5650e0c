"""The compiled modules that read what others sent, for the fuzzer.

To add one: write a function that runs it over any bytes and returns what it did in short (counts
and reasons, not contents), one that compares it with its slow twin, and a row of TARGETS with a few
right inputs. If it takes more than bytes, take that from the first bytes of the input. A module
that keeps state is made anew for each input, or after some hundreds of inputs if that takes long:
then a failure is repeated by the seed of its process, not by its input alone.
"""

from __future__ import annotations

from collections.abc import Hashable

from pamqp import commands

from shardmq.broker.amqp import Connection, Failed, contents, frames
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from tests.amqp.bytes_of import method, publish, received, shake_hands
from tests.reference import frames as reference
from tests.support.fuzz_door import Doors, client_bytes, shard_recipes
from tests.support.fuzzing import Target
from tests.support.short_way_history import DOORS, EPOCH, History, Side

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
    _whole(1, "k", b"t", headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}),
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
    return count, why, at == len(data), frames.marked(data, table, [], 1) is None


def compare_scan(data: bytes) -> None:
    *found, needed = frames.scan(data, 0, len(data), STATES, FRAME_MAX, MESSAGE_MAX)
    *expected, expected_needed = reference.scan(data, 0, len(data), STATES, FRAME_MAX, MESSAGE_MAX)
    assert found == expected
    assert found[3] != frames.INCOMPLETE or needed == expected_needed
    assert frames.is_traced(data) == reference.is_traced(data)
    assert frames.marked(data, found[1], [], 1) == reference.marked(data, found[1], [], 1)
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


# -- a shard ---------------------------------------------------------------------------------------

SHARD_INPUTS = 200  # until the two shards are made anew
BATCH_AT, PEER_AT = 16, slice(2, 4)  # in a message to a shard
CONSUMERS = range(1, 7)
# Bits of the first byte of an input: what happens beside the message.
IN_SEQUENCE, TURN, SYNC, WAIT = 1, 2, 4, 8


class Shards:
    """Two shards that receive the same messages, one with the short way and one without.

    What the shards send is compared after each input, their state only by `compare` and before the
    shards are made anew.
    """

    def __init__(self) -> None:
        self._left = 0
        self._history = History(0)

    def receive(self, data: bytes) -> Hashable:
        """Receive a message; raises Differs where the two shards do."""
        if not self._left:
            self._begin()
        self._left -= 1
        if len(data) <= BATCH_AT + 8:
            return None
        history, flags, message = self._history, data[0], bytearray(data[1:])
        peer = history.sides[0].shard.peers.get(int.from_bytes(message[PEER_AT], "little"))
        if flags & IN_SEQUENCE and message[0] == m.PUBLISH and peer and peer.next_batch is not None:
            number = peer.next_batch & (1 << 64) - 1
            message[BATCH_AT : BATCH_AT + 8] = number.to_bytes(8, "little")
        view = bytes(message)
        said = history.act("fuzz", lambda side: side.receive(view, history.now))
        if flags & WAIT:
            history.now += 10
        sent = history.act("turn", lambda side: side.turn(history.now)) if flags & TURN else ()
        if flags & SYNC:
            history.act("begin", Side.begin_sync)
            history.act("end", Side.end_sync)
        return message[0] & 15, said and said[0], tuple(out[0] for _, out in sent[:3])

    def compare(self, data: bytes = b"") -> None:
        """Compare all that the shards hold, whatever the last input was."""
        self._history.compare("fuzz")

    def _begin(self) -> None:
        self.compare()
        self._history.close()
        self._left, self._history = SHARD_INPUTS, History(0)
        self._history.start()
        for number in CONSUMERS:
            attach: m.Attach = m.Attach(
                number, 1 + number % 3, number, 1, 1, "tag", no_ack=number == 4,
                exclusive=False, priority=0, prefetch=3, limited=False, affinity=False,
            )  # fmt: skip
            door = DOORS[number % 2]
            self._history.tell(attach, door, self._history.incarnations[door])


def _shard_messages() -> tuple[bytes, ...]:
    """Return messages of front doors to a shard, as a short history has them."""
    history = History(0)
    who = [(door, history.incarnations[door], EPOCH, 0) for door in DOORS]
    made = [history.published() for _ in range(20)]
    for door in DOORS:
        for number in CONSUMERS:
            ranges = [(number, kind, 1, 3) for kind in (m.ACK, m.ACK, m.REJECT, m.REQUEUE)]
            made += [envelope.settles(*who[door], ranges[:1]), envelope.settles(*who[door], ranges)]
        made.append(envelope.credit(*who[door], [(1, 300), (2, 5)]))
    history.close()
    flags = bytes([IN_SEQUENCE | TURN])
    return tuple(flags + message for message in made if message is not None and len(message) < 2000)


_shards, _doors = Shards(), Doors()
TARGETS = {
    target.name: target
    for target in (
        Target("scan", PUBLISHES, scan, compare_scan),
        Target("settles", SETTLES, settles, compare_settles),
        Target("binds", BINDS, binds, compare_binds),
        Target("shard", _shard_messages(), _shards.receive, _shards.compare),
        Target(
            "door",
            (*client_bytes(), *shard_recipes()),
            _doors.take,
            _doors.compare,
            compared_every=1 << 62,  # it compares by groups
        ),
        Target("client", tuple(b"\x80" + each for each in CLIENT), client),
    )
}
