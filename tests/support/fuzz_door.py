"""Two front doors that get the same bytes of a fuzzer: one with the short way, one without."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import Context, copy_context
from typing import Any

from pamqp import commands

from shardmq.broker.amqp import properties
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import DeliveryWriter
from tests.amqp.bytes_of import method, publish
from tests.connections import door_play
from tests.connections.door_play import SHARDS, Door
from tests.support.seen import METHOD, frames, kind_of

INPUTS = 200  # until the two front doors are made anew
CLIENTS_MAX = 20
TURNS_MAX = 4  # of the event loop, for what an input makes due
DELIVERED = 8  # messages of each consumer, to be acknowledged
# The first byte of an input: from whom the bytes come, and where they are cut in two.
FROM_SHARD, SHARD, CUT = 0x80, 0x40, 0x3F
# What else follows 0x80: a kind of message, how many deliveries, bytes of each, then changes.
KINDS = (wire.DELIVER, wire.DELIVER, wire.CONFIRMED, wire.CREDIT)
CHANGE_BYTES = 3  # u16 place | u8 bits to flip; with no bits the message ends there
CLOSES = (b"\0\x0a\0\x32", b"\0\x14\0\x28")  # of the connection, of a channel
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
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
    """Two front doors with a client whose channels publish and consume.

    What clients and shards get is compared after each input, all that the front doors remember only
    by `compare`. The front doors are also compared before they are made anew.
    """

    def __init__(self) -> None:
        self._left = 0
        self._loop = Due()
        self._doors: list[Door] = []
        self._client = 0
        self._is_over = False

    def take(self, data: bytes) -> Hashable:
        """Receive bytes of a client or of a shard; raises Differs where the two front doors do."""
        if not data:
            return None
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            return self._take(data)
        finally:
            asyncio._set_running_loop(outer)

    def compare(self, data: bytes = b"") -> None:
        """Compare all that the front doors remember, whatever the last input was."""
        if self._doors:
            self._compare(*(door.state() for door in self._doors))

    def _take(self, data: bytes) -> Hashable:
        if not self._left or len(self._doors[0].clients) > CLIENTS_MAX:
            self._begin()
        elif self._is_over:
            self._enter()
        self._left -= 1
        flags, rest = data[0], data[1:]
        if flags & FROM_SHARD:
            shard = int(flags & SHARD > 0)
            message = self._message(shard, rest)
            failed = self._both(lambda door: door.hear(shard, message))
        else:
            cut = (flags & CUT) * len(rest) // CUT
            failed = self._read(rest[:cut])
            self._settle()
            failed = failed or self._read(rest[cut:])
        self._settle()
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

    def _answer(self) -> None:
        """Let the shards confirm and give room, or clients are read no longer."""
        for shard, link in enumerate(self._doors[0].links.links):
            who = self._doors[0].who(shard)
            said = [envelope.confirmed(*who, link.batch, [])]
            if link.in_flight > 0:
                said.append(envelope.credit(*who, [(0, link.in_flight)]))
            for door in self._doors:
                door.hear(shard, *said)

    def _message(self, shard: int, recipe: bytes) -> bytes:
        """Return the message that a recipe stands for: right but for its changes."""
        kind, count, size = (recipe + bytes(3))[:3]
        door = self._doors[0]
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

    def _settle(self) -> None:
        for _ in range(TURNS_MAX):
            for door in self._doors:
                door.aio.run()
            if not self._loop.due:
                return
            self._loop.turn()

    def _compare(self, plain: dict[str, Any], short: dict[str, Any]) -> dict[str, Any]:
        for name, value in plain.items():
            if value != short[name]:
                raise Differs(f"{name}: {value!s:.800} by Python, {short[name]!s:.800}")
        return plain

    def _begin(self) -> None:
        self.compare()
        self._left = INPUTS
        self._doors = [Door(short=short, traced=True) for short in (False, True)]
        self._enter()

    def _enter(self) -> None:
        """Let a client connect, with consumers that have something to acknowledge."""
        self._is_over = False
        wires = self._doors[0].wires
        before = [len(each.sent) for each in wires]
        for door in self._doors:
            self._client = door.enter([OPENING])
        for _ in range(4):
            self._settle()
            for shard in range(SHARDS):
                asked = self._doors[0].questions(shard, before[shard])
                before[shard] = len(wires[shard].sent)
                who = self._doors[0].who(shard)
                done = [envelope.control(*who, wire.Done(request)) for request in asked]
                for door in self._doors if done else ():
                    door.hear(shard, *done)
        for shard in range(SHARDS):
            if message := deliveries(self._doors[0], shard, DELIVERED):
                for door in self._doors:
                    door.hear(shard, message)
        self._settle()
        self._compare(*(door.said() for door in self._doors))


def deliveries(door: Door, shard: int, count: int, size: int = 16) -> bytes | None:
    """Return a DELIVER with messages for all consumers of a shard."""
    writer = DeliveryWriter(*door.who(shard))
    stored = properties.stored_with(b"", b"a", {}, b"x" * size)
    for each in door.consuming.consumers.values():
        if each.shard == shard:
            first = each.delivered + 1
            writer.add(
                each.client.id, each.channel.number, each.number, first, False, count,
                stored * count, 0, False,
            )  # fmt: skip
    return writer.take()


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
