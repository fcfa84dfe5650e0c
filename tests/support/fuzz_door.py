"""Front doors that get the bytes of a fuzzer, and twins without the short way that judge them."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import Context, copy_context
from functools import cache
from typing import Any

from pamqp import commands

from shardmq.broker.amqp import properties
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import DeliveryWriter
from tests.amqp.bytes_of import method, publish
from tests.connections import door_play
from tests.connections.door_play import SHARDS, Door
from tests.support.fake_binds_ahead import FakeBindsAhead
from tests.support.seen import METHOD, frames, kind_of

ROUND = 21  # groups; the first of them is for a Pair
PAIR_INPUTS, ALONE_INPUTS = 500, 1500  # of a group
JUDGED_EVERY = 10  # groups of one front door alone
ANSWERED_EVERY = 16  # inputs of a front door alone
UNACKED_MIN = 8  # deliveries, or the shards deliver more
THINGS_MAX = 8  # in an outcome
CLIENTS_MAX = 20
TURNS_MAX = 4  # of the event loop, for what an input makes due
DELIVERED = 8  # messages of each consumer, to be acknowledged
# The first byte of an input: from whom the bytes come, and where they are cut in two.
FROM_SHARD, SHARD, CUT = 0x80, 0x40, 0x3F
# What else follows 0x80: a kind of message, how many deliveries, bytes of each, then changes.
KINDS = (wire.DELIVER, wire.DELIVER, wire.CONFIRMED, wire.CREDIT)
CHANGE_BYTES = 3  # u16 place | u8 bits to flip; with no bits the message ends there
CLOSES = (b"\0\x0a\0\x32", b"\0\x14\0\x28")  # of the connection, of a channel
ENDS_PASS = 1  # after an input for a front door alone
FRAME_END = 0xCE
ACK = b"\0\x3c\0\x50"  # class and method of basic.ack
# Methods at which the short way stopped, by class and method.
LEFT = {
    struct.pack(">HH", *kind): kind
    for kind in ((10, 50), (20, 10), (20, 40), (60, 20), (60, 30), (60, 40), (60, 80), (60, 120))
}
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"


def bind(channel: int, key: str, nowait: bool = False, exchange: str = "direct") -> bytes:
    """Return the bind of a queue that is put in force ahead of the controller.

    The client waits for those of the exchange "logs" until they are recorded.
    """
    return method(channel, commands.Queue.Bind(0, "a", exchange, key, nowait, {}))


# Publishes whose routes Python finds, and a bind that others go on with; then the short way knows
# them.
PUBLISHED = (
    bind(1, "first"),
    *publish(2, "", "a", b"body"), *publish(1, "direct", "k", b"x"), *publish(2, "fan", "", b""),
    *publish(1, "", "b", b"body"), *publish(2, "logs", "x.y", b"body"), *publish(1, "fan", "", b""),
)  # fmt: skip
OPENING = b"".join(
    (
        *door_play.OPENING,
        *(method(number, commands.Channel.Open()) for number in (1, 2, 3)),
        method(2, commands.Confirm.Select()),
        method(3, commands.Tx.Select()),
        method(1, commands.Basic.Consume(queue="a", consumer_tag="acks")),
        method(1, commands.Basic.Consume(queue="b", consumer_tag="none", no_ack=True)),
        method(2, commands.Basic.Consume(queue="c", consumer_tag="other")),
    )
)


class Differs(AssertionError):
    """The two front doors did not do the same."""


class Due(asyncio.BaseEventLoop):
    """An event loop that waits for nothing: what is due runs in `turn`, timers never do."""

    def __init__(self) -> None:
        super().__init__()
        self.due: deque[tuple[Context, Callable[..., object], tuple[Any, ...]]] = deque()

    def call_soon(  # type: ignore[override] # nobody cancels what it returns
        self, call: Callable[..., object], *args: Any, context: Context | None = None
    ) -> None:
        self.due.append((context or copy_context(), call, args))

    def turn(self) -> None:
        """Run what is due, but not what that makes due."""
        for _ in range(len(self.due)):
            context, call, args = self.due.popleft()
            context.run(call, *args)


class Doors:
    """Front doors that get inputs in groups; each group has front doors of its own.

    The first group of each round is for a Pair, the others are for one front door Alone. Of these,
    some are compared with their twin.
    """

    def __init__(self) -> None:
        self._loop = Due()
        self._left = 0
        self._groups = 0
        self._group: Pair | Alone | None = None

    def take(self, data: bytes) -> Hashable:
        """Receive bytes of a client or of a shard; raises Differs where something is wrong."""
        if not data:
            return None
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            if not self._left or self._group is None:
                self._begin()
            self._left -= 1
            return self._group.take(data)  # type: ignore[union-attr] # _begin made it
        finally:
            asyncio._set_running_loop(outer)

    def compare(self, data: bytes = b"") -> None:
        """Compare all that the front doors of this group remember with their twin."""
        if self._group is None:
            return
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            self._group.compare()
        finally:
            asyncio._set_running_loop(outer)

    def _begin(self) -> None:
        if self._group is not None:
            self._group.end()
        of_round, self._groups = self._groups % ROUND, self._groups + 1
        self._loop.due.clear()
        if of_round == 0:
            self._left, self._group = PAIR_INPUTS, Pair(self._loop)
        else:
            is_judged = of_round % JUDGED_EVERY == 0
            self._left, self._group = ALONE_INPUTS, Alone(self._loop, is_judged=is_judged)


class Pair:
    """Two front doors with a client whose channels publish and consume.

    Both do all that follows from an input. What clients and shards get is compared after each
    input, all that the front doors remember only by `compare` and at the end. Publishes may be
    traced.
    """

    def __init__(self, loop: Due) -> None:
        self._loop = loop
        self._doors: list[Door] = []
        self._ahead: list[FakeBindsAhead] = []
        self._client = 0
        self._is_over = False
        self._begin()

    def take(self, data: bytes) -> Hashable:
        """Receive bytes of a client or of a shard; raises Differs where the two front doors do."""
        if len(self._doors[0].clients) > CLIENTS_MAX:
            self.compare()
            self._begin()
        elif self._is_over:
            self._enter()
        flags, rest = data[0], data[1:]
        if flags & FROM_SHARD:
            shard = int(flags & SHARD > 0)
            message = message_of(self._doors[0], shard, rest)
            failed = self._both(lambda door: door.hear(shard, message))
        else:
            cut = (flags & CUT) * len(rest) // CUT
            failed = self._read(rest[:cut])
            settle(self._loop, *self._doors)
            failed = failed or self._read(rest[cut:])
        settle(self._loop, *self._doors)
        said = self._compare(*(door.said() for door in self._doors))
        written, is_closed = said["written"][self._client]
        methods = [
            kind_of(each.payload)
            for each in frames(written, may_be_cut=True)
            if each.kind == METHOD
        ]
        self._is_over = is_closed or any(close in written for close in CLOSES)
        self._answer()
        return failed, is_closed, tuple(methods[:3]), tuple(map(len, said["sent"]))

    def compare(self) -> None:
        """Compare all that the front doors remember, whatever the last input was."""
        self._compare(*(door.state() for door in self._doors))
        compare_bound(*self._ahead)

    end = compare

    def _answer(self) -> None:
        """Let the shards confirm and give room, or clients are read no longer."""
        for shard in range(SHARDS):
            said = answers(self._doors[0], shard)
            for door in self._doors:
                door.hear(shard, *said)
        for door in self._doors:
            record(door)

    def _read(self, data: bytes) -> str | None:
        return self._both(lambda door: door.read(self._client, data)) if data else None

    def _both(self, act: Callable[[Door], Any]) -> str | None:
        """Do something with both; return the name of the error that it raised."""
        raised: list[str | None] = []
        for door in self._doors:
            try:
                act(door)
                raised.append(None)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
        if raised[0] != raised[1]:
            raise Differs(f"{raised[0]} by Python, {raised[1]} on the short way")
        return raised[0] and raised[0].partition(":")[0]

    def _compare(self, plain: dict[str, Any], short: dict[str, Any]) -> dict[str, Any]:
        for name, value in plain.items():
            if value != short[name]:
                raise Differs(f"{name}: {value!s:.800} by Python, {short[name]!s:.800}")
        return plain

    def _begin(self) -> None:
        self._doors = [Door(short=short, traced=True) for short in (False, True)]
        self._ahead = [FakeBindsAhead(door.line) for door in self._doors]
        self._enter()

    def _enter(self) -> None:
        self._is_over = False
        for door in self._doors:
            self._client = enter(door, self._loop)
        self._compare(*(door.said() for door in self._doors))


# What an Alone has done with its front door, for the twin: the function and what it is given.
Act = tuple[Callable[..., None], tuple[Any, ...]]


class Alone:
    """A front door with the short way, whose clients and shards say only what is plain.

    The short way is given each input, and what it does not take is dropped: Python would end most
    connections for it. The front door without the short way is made when it is needed. It gets what
    the short way took, with the same ends of passes between, and must do the same.
    """

    def __init__(self, loop: Due, *, is_judged: bool) -> None:
        """Begin with a client. With `is_judged` the twin judges all inputs at the end."""
        self._loop = loop
        self._is_judged = is_judged
        self._door = Door(short=True)
        self._ahead = [FakeBindsAhead(self._door.line)]
        self._twin: Door | None = None
        self._acts: list[Act] = []  # that the twin has not done
        self._taken = 0  # inputs
        self._client = enter(self._door, loop)
        connection = self._door.entered[self._client]
        self._socket = connection.socket
        for data in PUBLISHED:
            self._do(Door.read, self._client, data)
            self._do(end_pass)
        for shard in range(SHARDS):
            self._do(Door.hear, shard, *answers(self._door, shard))
        self._unacked = connection.channels.by_number[1].consuming.unacked

    def take(self, data: bytes) -> Hashable:
        """Receive bytes of a client or of a shard; raises Differs if they end the connection."""
        flags = data[0]
        if flags & FROM_SHARD:
            found = self._hear(int(flags & SHARD > 0), data[1:])
        else:
            found = self._read(data[1:])
        self._taken += 1
        if not self._taken % ANSWERED_EVERY:
            self._answer()
        elif flags & ENDS_PASS:
            self._do(end_pass)
        return found

    def compare(self) -> None:
        """Have the twin do what the front door has done, and compare all that shows of both."""
        if self._twin is None:
            self._twin = Door(short=False)
            self._ahead.append(FakeBindsAhead(self._twin.line))
            enter(self._twin, self._loop)
        for act, what in self._acts:
            act(self._twin, *what)
        self._acts.clear()
        self._do(end_pass)
        end_pass(self._twin)
        self._acts.clear()
        plain, short = self._twin.seen(), self._door.seen()
        for name, value in plain.items():
            if value != short[name]:
                raise Differs(f"{name}: {value!s:.800} by Python, {short[name]!s:.800}")
        compare_bound(*self._ahead)

    def end(self) -> None:
        """See that the client got whole frames, and compare if the twin is to judge."""
        self._do(end_pass)
        for _ in frames(bytes(self._door.clients[self._client].taken), may_be_cut=False):
            pass
        if self._is_judged or self._twin is not None:
            self.compare()

    def _do(self, act: Callable[..., None], *what: Any) -> None:
        self._acts.append((act, what))
        act(self._door, *what)

    def _read(self, data: bytes) -> Hashable:
        """Give bytes of the client to its inlet, which takes what is plain of them."""
        socket = self._socket
        if not data or socket.paused:
            return None
        data = with_tags(data, self._unacked)
        loop, inlet = self._door.loop, socket.inlet
        assert inlet is not None
        loop.begin_pass()
        taken = inlet.take(data, len(data))
        if socket.closing or socket.lost:
            raise Differs("the short way has ended a connection")
        if taken > len(data) or (taken and data[taken - 1] != FRAME_END):
            raise Differs(f"{taken} of {len(data)} bytes are taken, which are not whole frames")
        things, fed = inlet.things, inlet.fed
        if taken:
            loop.reads.short += 1
            loop.pace.read_by(socket.id)
            socket.received_bytes += taken
            socket.reads += 1
            loop.pace.came(things)
            if fed:
                loop.fed(socket, fed)
            self._acts.append((Door.read, (self._client, data[:taken])))
        elif things:
            raise Differs(f"{things} things in no bytes")
        else:
            return 0
        return min(things, THINGS_MAX), fed, LEFT.get(data[taken + 7 : taken + 11])

    def _hear(self, shard: int, recipe: bytes) -> Hashable:
        message, link = message_of(self._door, shard, recipe), self._door.links.links[shard]
        if not message:
            return None
        was_taken = self._door.offer(shard, message)
        self._acts.append((Door.hear, (shard, message) if was_taken else (shard,)))
        return was_taken and (message[0], min(len(link.sent), THINGS_MAX), link.in_flight > 0)

    def _answer(self) -> None:
        """Let the shards confirm, give room and deliver, and the controller record."""
        self._do(end_pass)
        self._do(record)
        for shard in range(SHARDS):
            self._do(Door.hear, shard, *answers(self._door, shard))
            if self._unacked.count < UNACKED_MIN and (
                message := deliveries(self._door, shard, DELIVERED)
            ):
                self._do(Door.hear, shard, message)
        self._do(end_pass)


def compare_bound(one: FakeBindsAhead, other: FakeBindsAhead) -> None:
    """Compare what was bound ahead. Raises Differs."""
    if one.bound != other.bound:
        raise Differs(f"bound: {one.bound!s:.800}, {other.bound!s:.800}")


def record(door: Door) -> None:
    """Answer the binds that the client waits for."""
    door.line.ahead.record(0, 0)


def end_pass(door: Door) -> None:
    """Let all happen that is due when a pass ends."""
    door.aio.run()


def with_tags(data: bytes, unacked: Any) -> bytes:
    """Return bytes of a client whose acks count tags from the oldest that is outstanding."""
    at = data.find(ACK)
    if at < 0 or not (runs := unacked.all_runs()):
        return data
    made, behind = bytearray(data), runs[0][0] - 1
    while at >= 0:
        tag = made[at + 4 : at + 12]
        if len(tag) == 8 and any(tag):
            number = int.from_bytes(tag, "big") + behind & (1 << 64) - 1
            made[at + 4 : at + 12] = number.to_bytes(8, "big")
        at = made.find(ACK, at + 12)
    return bytes(made)


def settle(loop: Due, *doors: Door) -> None:
    """Let happen what an input makes due."""
    for _ in range(TURNS_MAX):
        for door in doors:
            door.aio.run()
        if not loop.due:
            return
        loop.turn()


def answers(door: Door, shard: int) -> list[bytes]:
    """Return what a shard says that has taken in and stored all it was sent."""
    link, who = door.links.links[shard], door.who(shard)
    said = [envelope.confirmed(*who, link.batch, [])]
    if link.in_flight > 0:
        said.append(envelope.credit(*who, [(0, link.in_flight)]))
    return said


def message_of(door: Door, shard: int, recipe: bytes) -> bytes:
    """Return the message of a shard that a recipe stands for: right but for its changes."""
    kind, count, size = (recipe + bytes(3))[:3]
    who, made = door.who(shard), b""
    match KINDS[kind % len(KINDS)]:
        case wire.DELIVER:
            made = deliveries(door, shard, 1 + count % 8, size) or b""
        case wire.CONFIRMED:
            batch = door.links.links[shard].batch
            made = envelope.confirmed(*who, batch, [(1, 2, size, size + 1)] * (count & 1))
        case wire.CREDIT:
            made = envelope.credit(*who, [(0, size)])
    message = bytearray(made)
    for at in range(3, len(recipe) - CHANGE_BYTES + 1, CHANGE_BYTES):
        place = int.from_bytes(recipe[at : at + 2], "little")
        if not message:
            break
        if bits := recipe[at + 2]:
            message[place % len(message)] ^= bits
        else:
            del message[place % len(message) :]
    return bytes(message)


def enter(door: Door, loop: Due) -> int:
    """Let a client connect, with consumers that have something to acknowledge."""
    before = [len(each.sent) for each in door.wires]
    client = door.enter([OPENING])
    for _ in range(4):
        settle(loop, door)
        for shard in range(SHARDS):
            asked = door.questions(shard, before[shard])
            before[shard] = len(door.wires[shard].sent)
            who = door.who(shard)
            if done := [envelope.control(*who, wire.Done(request)) for request in asked]:
                door.hear(shard, *done)
    for shard in range(SHARDS):
        if message := deliveries(door, shard, DELIVERED):
            door.hear(shard, message)
    settle(loop, door)
    return client


def deliveries(door: Door, shard: int, count: int, size: int = 16) -> bytes | None:
    """Return a DELIVER with messages for all consumers of a shard."""
    writer = DeliveryWriter(*door.who(shard))
    stored = stored_of(size)
    for each in door.consuming.consumers.values():
        if each.shard == shard:
            first = each.delivered + 1
            writer.add(
                each.client.id, each.channel.number, each.number, first, False, count,
                stored * count, 0, False,
            )  # fmt: skip
    return writer.take()


@cache
def stored_of(size: int) -> bytes:
    """Return a stored message with a body of this size."""
    return properties.stored_with(b"", b"a", {}, b"x" * size)


def client_bytes() -> list[bytes]:
    """Return what right clients say, each behind a flag."""
    acks = [method(1, commands.Basic.Ack(tag)) for tag in range(1, 4)]
    said = [
        b"".join(publish(2, "", "a", b"body")),
        b"".join(publish(1, "direct", "k", b"x" * 99, delivery_mode=2)) * 2,
        b"".join([*publish(2, "fan", "", b""), HEARTBEAT, *publish(3, "", "c", b"in a tx")]),
        b"".join(publish(1, "logs", "x.y", b"y" * 60, 20, priority=3, expiration="60000")),
        b"".join(acks),
        acks[0] + method(1, commands.Basic.Ack(3, True)) + method(2, commands.Basic.Ack(0, True)),
        method(1, commands.Basic.Nack(2, True, False)) + method(2, commands.Basic.Reject(1, True)),
        b"".join(publish(2, "", "a", b"body")) + acks[0] + HEARTBEAT,
        bind(1, "k"),
        bind(1, "k") + bind(1, "j") + bind(2, "k"),
        bind(3, "x" * 40) + bind(3, "", nowait=True),
        bind(1, "k", exchange="logs"),
        bind(2, "k", exchange="logs") + bind(2, "j", exchange="logs") + bind(2, "k"),
        method(1, commands.Basic.Cancel("acks")) + method(1, commands.Channel.Close(200, "", 0, 0)),
    ]
    return [bytes([cut]) + each for each in said for cut in (0, 20)]


def shard_recipes() -> list[bytes]:
    """Return recipes of what right shards say, each behind a flag."""
    return [
        bytes([FROM_SHARD | shard * SHARD, kind, count, 16])
        for shard in range(SHARDS)
        for kind in range(len(KINDS))
        for count in (0, 3)
    ]
