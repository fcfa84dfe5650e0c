"""The short way and the way by Python do the same with the same bytes, wherever these are cut."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.amqp import properties
from shardmq.broker.front_door.consume.consumers import Consumer, GroupConsumer
from shardmq.broker.shared.control import AssignmentName, AssignmentOrder, ConsumeTerms
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import DeliveryWriter
from tests.amqp.bytes_of import method, publish
from tests.connections.door_play import OPENING, PLACES, SHARDS, Door
from tests.support.fake_binds_ahead import FakeBindsAhead
from tests.support.readable import is_readable

pytestmark = pytest.mark.usefixtures("one_second")

TOGETHER = 10  # histories of one test
SEEDS = range(0, int(os.environ.get("SHORT_WAY_SEEDS", "20")), TOGETHER)
STEPS = 60
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
EXCHANGES = [("", "a"), ("", "b"), ("", "c"), ("direct", "k"), ("fan", ""), ("logs", "x.y")]
RARE = [("", "nowhere"), ("heads", ""), ("gone", "k"), ("logs", "z"), ("direct", "none")]


class Mismatch(AssertionError):
    pass


def differing(one: Any, other: Any) -> str:
    """Return the first places of two values that differ."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
        return differing(*pairs[0]) if pairs else "nothing"
    if isinstance(one, dict):
        return str([(key, one[key], other[key]) for key in one if one[key] != other[key]])
    return f"{one!s:.1500}\n{other!s:.1500}"


class History:
    """The same random history for two doors, of which the first never goes the short way."""

    def __init__(
        self,
        seed: int,
        change: Callable[[Door], None] = lambda door: None,
        new_door: Callable[..., Door] = Door,
        traced: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        # How much of what is rare, or wrong, comes in this history.
        self.rough = self.random.choice([0.0, 0.1, 0.3, 1.0])
        self.is_virtual = self.random.random() < 0.5  # consumers of the virtual queue are busy
        stamps = self.rarely(0.05)
        self.traced, self.traces = traced, random.Random(seed)
        self.doors = [
            new_door(short=short, traced=self.traced, set_timestamp=stamps)
            for short in (False, True)
        ]
        change(self.doors[1])
        self.log: list[str] = []
        self.plan: list[Callable[[], None]] = []  # the next steps
        self.pending: dict[int, bytes] = {}  # what a client has said and nobody has read
        self.channels: dict[int, set[int]] = {}
        self.tags = 0
        self.answered: list[set[int]] = [set() for _ in range(SHARDS)]
        self.numbers: dict[tuple[int, int], int] = {}  # deliveries by epoch and consumer

    def rarely(self, chance: float) -> bool:
        return self.random.random() < chance * self.rough

    @property
    def model(self) -> Door:
        return self.doors[0]

    def both(self, act: Callable[[Door], Any], name: str) -> None:
        self.log.append(name)
        for door in self.doors:
            act(door)

    async def play(self) -> int:
        """Play to the end; return how many things went the short way."""
        for _ in range(self.random.randint(1, 2)):
            self.enter()
        for _ in range(STEPS):
            self.step()
            await self.settle()
            self.compare()
        return self.took

    async def settle(self) -> None:
        """End the pass of both, and let tasks go on until they wait for others."""
        for _ in range(4):
            for door in self.doors:
                door.run()
                while door.line.asked:
                    door.line.answer()
            await asyncio.sleep(0)
        for door in self.doors:
            door.run()

    def compare(self) -> None:
        plain, short = (door.seen() for door in self.doors)
        for key, value in plain.items():
            if value != short[key]:
                raise Mismatch(
                    f"seed {self.seed}, {key}:\n{differing(value, short[key])}\n"
                    + "\n".join(each[:400] for each in self.log[-8:])
                )

    @property
    def took(self) -> int:
        return self.doors[1].taken  # type: ignore[attr-defined, no-any-return]

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        if self.plan:
            self.plan.pop(0)()
            return
        chance = self.random.random()
        alive = [at for at in self.channels if not self.model.clients[at].is_closed]
        if not alive or (chance < 0.02 and len(alive) < 4):
            self.enter()
        elif self.is_virtual and self.random.random() < 0.4:
            self.consume_virtual_queue(self.random.choice(alive))
        elif chance < 0.60:
            for _ in range(self.random.randint(1, 3)):
                self.speak(self.random.choice(alive))
        elif chance < 0.80:
            self.deliver(self.random.randrange(SHARDS))
        elif chance < 0.90:
            self.confirm(self.random.randrange(SHARDS))
        elif chance < 0.92:
            shard = self.random.randrange(SHARDS)
            self.both(lambda door: door.restart(shard), f"shard {shard} starts anew")
        elif chance < 0.94:
            self.both(lambda door: door.publishing.catalog_changed(), "catalog changed")
        elif chance < 0.97:
            self.both(lambda door: door.aio.pass_time(0.01), "time passes")
        else:
            text = "disk" if self.rarely(0.5) else ""
            self.both(lambda door: set_alarm(door, text), f"alarm {text}")
        for shard in range(SHARDS):
            self.answer(shard)

    def enter(self) -> None:
        places: list[int] = []
        self.both(lambda door: places.append(door.enter()), "enter")
        at = places[0]
        self.pending[at], self.channels[at] = b"", {1, 2}
        for number in (1, 2):
            self.pending[at] += method(number, commands.Channel.Open())
        if self.random.random() < 0.7:
            self.pending[at] += method(2, commands.Confirm.Select())

    def consume_virtual_queue(self, at: int) -> None:
        """Let something happen to a consumer of the virtual queue; begin one if there is none."""
        rng = self.random
        groups = [
            (place, group)
            for place, connection in enumerate(self.model.entered)
            for channel in connection.channels.by_number.values()
            for group in channel.consuming.groups.values()
        ]
        if not groups or rng.random() < 0.05:
            self.begin_group(at)
            return
        at, group = rng.choice(groups)
        chance = rng.random()
        if not group.assignments or chance < 0.12:
            kind = "give" if not group.assignments or rng.random() < 0.4 else "take"
            orders = [
                AssignmentOrder(kind, group.number, AssignmentName(10 + place, 0))
                for place in range(PLACES)
                if rng.random() < 0.8
            ]
            self.both(
                lambda door: door.consuming.groups.obey(orders, door.line.catalog),
                f"the controller orders {orders}",
            )
        elif chance < 0.35:
            self.deliver(rng.randrange(SHARDS), only=group.number)
        elif chance < 0.5:
            self.say(at, self.settles(at, group.channel.number))
        elif chance < 0.6:
            if runs := list(group.channel.unacked.runs()):
                ack = commands.Basic.Ack(runs[-1].last_tag, multiple=True)
                self.say(at, method(group.channel.number, ack))
        elif chance < 0.7:
            used, waits = rng.choice([0, 0, 3, 30]), rng.random() < 0.8
            self.report(rng.randrange(SHARDS), group, used, waits)
        else:
            for shard in range(SHARDS):
                self.report(shard, group, 0, True)
            busy = [lambda: self.use_credit(group), lambda: self.ack_all(at, group)]
            self.plan = busy * rng.randint(2, 4)

    def report(self, shard: int, group: GroupConsumer, used: int, waits: bool) -> None:
        report = wire.CreditReport(group.number, used, waits)
        self.both(
            lambda door: door.hear(shard, envelope.control(*door.who(shard), report)),
            f"shard {shard} says {report}",
        )

    def use_credit(self, group: GroupConsumer) -> None:
        """Let the shards of a consumer of the virtual queue deliver all that they may."""
        for consumer in list(group.assignments.values()):
            if consumer.allotment is None or not consumer.allotment.unused:
                continue
            shard, count = consumer.shard, consumer.allotment.unused
            epoch = self.model.links.links[shard].epoch
            first = self.numbers.get((epoch, consumer.number), 1)
            self.numbers[epoch, consumer.number] = first + count
            writer = DeliveryWriter(*self.model.who(shard))
            stored = properties.stored_with(b"", b"a", {}, b"body") * count
            who = (group.client.id, group.channel.number, consumer.number)
            writer.add(*who, first, False, count, stored)
            message = writer.take()
            assert message is not None
            self.both(
                lambda door, shard=shard, message=message: door.hear(shard, message),  # type: ignore[misc]
                f"shard {shard} delivers all that it may",
            )

    def ack_all(self, at: int, group: GroupConsumer) -> None:
        runs = list(group.channel.unacked.runs())
        if runs and not self.pending[at]:
            said = method(
                group.channel.number, commands.Basic.Ack(runs[-1].last_tag, multiple=True)
            )
            self.both(lambda door: door.read(at, said), f"client {at} acknowledges all")

    def begin_group(self, at: int) -> None:
        rng = self.random
        numbers = [*self.model.entered[at].channels.by_number]
        if not numbers:
            return
        self.tags += 1
        number, tag = rng.choice(numbers), f"t{self.tags}"
        most, no_ack, affinity = rng.choice([0, 5, 50]), rng.random() < 0.2, rng.random() < 0.2
        group = 1000 + self.tags
        self.both(
            lambda door: begin_group(door, at, number, tag, group, most, no_ack, affinity),
            f"client {at} consumes the virtual queue",
        )

    def speak(self, at: int) -> None:
        """Let a client say some frames, of which a piece arrives."""
        said = b"".join(self.frames(at) for _ in range(self.random.randint(1, 8)))
        if said and self.rarely(0.03):
            place = self.random.randrange(len(said))
            said = said[:place] + bytes([self.random.randrange(256)]) + said[place + 1 :]
        self.say(at, said)

    def say(self, at: int, said: bytes) -> None:
        self.pending[at] += said
        cut = len(self.pending[at])
        if self.random.random() < 0.3:
            cut = self.random.randint(0, cut)
        data, self.pending[at] = self.pending[at][:cut], self.pending[at][cut:]
        if data:
            self.both(lambda door: door.read(at, data), f"client {at} says {data.hex()}")

    def frames(self, at: int) -> bytes:
        rng = self.random
        number = rng.choice([*self.channels[at]]) if not self.rarely(0.03) else rng.randint(0, 5)
        chance = rng.random()
        if chance < 0.5:
            return self.publishes(number)
        if chance < 0.85:
            return self.settles(at, number)
        if chance < 0.90:
            return HEARTBEAT if not self.rarely(0.1) else b"\x08\0\x01" + HEARTBEAT[3:]
        if chance < 0.93:
            self.tags += 1
            queue, no_ack = rng.choice(["a", "b", "c"]), rng.random() < 0.3
            return method(
                number,
                commands.Basic.Consume(
                    queue=queue, consumer_tag=f"t{self.tags}", no_ack=no_ack,
                    nowait=rng.random() < 0.3,
                ),
            )  # fmt: skip
        if chance < 0.94:
            return method(number, commands.Basic.Cancel(f"t{rng.randint(0, self.tags)}"))
        if chance < 0.95:
            most, shared = rng.randint(0, 9), self.rarely(0.2)
            return method(number, commands.Basic.Qos(prefetch_count=most, global_=shared))
        if chance < 0.96:
            return method(number, commands.Basic.Recover(True))
        if chance < 0.97:
            new = max(self.channels[at]) + 1
            self.channels[at].add(new)
            select = commands.Confirm.Select() if not self.rarely(0.5) else commands.Tx.Select()
            return method(new, commands.Channel.Open()) + method(new, select)
        if chance < 0.99 and len(self.channels[at]) > 1:
            self.channels[at].discard(number)
            return method(number, commands.Channel.Close(200, "bye", 0, 0))
        return method(number, commands.Channel.CloseOk()) if self.rarely(0.5) else HEARTBEAT

    def publishes(self, number: int) -> bytes:
        rng = self.random
        said = b""
        exchange, key = rng.choice(RARE if self.rarely(0.04) else EXCHANGES)
        props: dict[str, Any] = {}
        if rng.random() < 0.4:
            props["delivery_mode"] = rng.choice([1, 2])
        if rng.random() < 0.1:
            props["priority"] = rng.randint(0, 255)
        if rng.random() < 0.1:
            props["expiration"] = "soon" if self.rarely(0.3) else rng.choice(["1000", "0"])
        if self.rarely(0.06):
            props["headers"] = rng.choice(
                [{"CC": ["a"]}, {"one": 1}, {"BCC": ["b"]}, {"x-producer-id": "p", "x-sequence": 1}]
            )
        if self.traced and self.traces.random() < 0.1:
            props["headers"] = {**props.get("headers", {}), **context(self.traces)}
        if self.rarely(0.03):
            props["reply_to"] = "amq.rabbitmq.reply-to"
        if self.rarely(0.02):
            props["user_id"] = rng.choice(["guest", "other"])
        for _ in range(rng.choice([1, 1, 1, 3, 20])):
            size = rng.choice([0, 1, 16, 16, 300, 5000, 70_000 if self.rarely(0.05) else 8])
            pieces = publish(
                number, exchange, key, rng.randbytes(size), rng.choice([4088, 7]), **props
            )
            if self.rarely(0.03):
                pieces[0] = pieces[0][:-2] + bytes([rng.choice([1, 1, 2])]) + b"\xce"
            if self.rarely(0.02):
                pieces.pop(rng.randrange(len(pieces)))
            if self.rarely(0.03):  # of two channels in turns
                pieces[1:1] = publish(rng.choice([1, 2]), "", "a", b"between")
            said += b"".join(pieces)
        return said

    def settles(self, at: int, number: int) -> bytes:
        rng = self.random
        channel = self.model.entered[at].channels.by_number.get(number)
        last = channel.consuming.next_tag - 1 if channel is not None else 0
        runs = list(channel.consuming.unacked.runs()) if channel is not None else []
        said = b""
        first = runs[0].first_tag if runs else 1
        for _ in range(rng.choice([1, 1, 2, 5])):
            if self.rarely(0.02) or not runs:
                if not runs and not self.rarely(0.1):
                    return said
                tag = rng.choice([0, last + 5, 1, first])
            elif rng.random() < 0.8:
                tag, first = min(first, last), first + 1
            else:
                run = rng.choice(runs)
                tag = rng.randint(run.first_tag, run.last_tag)
            what = rng.random()
            if what < 0.9:
                multiple = rng.random() < 0.3
                if multiple:
                    first = max(first, tag + 1)
                said += method(number, commands.Basic.Ack(tag, multiple))
            elif what < 0.95:
                said += method(number, commands.Basic.Nack(tag, rng.random() < 0.5, True))
            else:
                said += method(number, commands.Basic.Reject(tag, rng.random() < 0.5))
        return said

    # -- the shards ------------------------------------------------------------------------------

    def answer(self, shard: int) -> None:
        """Answer most of the questions that are open."""
        for request in self.model.questions(shard):
            if request not in self.answered[shard] and self.random.random() < 0.8:
                self.answered[shard].add(request)
                self.both(
                    lambda door, request=request: door.hear(
                        shard, envelope.control(*door.who(shard), wire.Done(request))
                    ),
                    f"shard {shard} answers {request}",
                )

    def deliver(self, shard: int, only: int | None = None) -> None:
        """Let a shard send what its consumers get, and some that are gone.

        `only` is the number of a consumer of the virtual queue that gets nearly all.
        """
        rng = self.random
        known = [
            each for each in self.model.consuming.consumers.values()
            if each.shard == shard and each.tag
            and (only is None or (each.group is not None and each.group.number == only))
        ]  # fmt: skip
        writer = DeliveryWriter(*self.model.who(shard))
        for _ in range(rng.randint(1, 3)):
            if known and rng.random() < 0.97:
                consumer = rng.choice(known)
                connection, channel, number = (
                    consumer.client.id, consumer.channel.number, consumer.number
                )  # fmt: skip
            else:
                connection, channel, number = 1, 1, 9999
            epoch = self.model.links.links[shard].epoch
            first = self.numbers.get((epoch, number), 1)
            count = rng.choice([1, 1, 2, 30])
            self.numbers[epoch, number] = first + count
            size = rng.choice([0, 16, 16, 500, 20_000 if rng.random() < 0.1 else 16])
            in_trace = self.traced and self.traces.random() < 0.3
            headers = context(self.traces) if in_trace else {}
            stored = properties.stored_with(b"", b"a", headers, rng.randbytes(size))
            writer.add(
                connection, channel, number, first, rng.random() < 0.2, count, stored * count,
                2 if rng.random() < 0.05 else 0, rng.random() < 0.03,
            )  # fmt: skip
        message = writer.take()
        assert message is not None
        if rng.random() < 0.02:
            message = message[: rng.randrange(16, len(message))]
        self.both(lambda door: door.hear(shard, message), f"shard {shard} delivers")

    def confirm(self, shard: int) -> None:
        rng = self.random
        link = self.model.links.links[shard]
        batch = rng.randint(max(1, link.batch - 3), link.batch + 1)
        refused = []
        if rng.random() < 0.2:
            first = rng.randint(1, 9)
            refused = [(rng.randint(1, 2), rng.randint(1, 3), first, first + rng.randint(0, 5))]
        who = self.model.who(shard)
        freed = max(0, link.in_flight) * rng.randint(0, 2) // 2
        messages = [envelope.confirmed(*who, batch, refused), envelope.credit(*who, [(0, freed)])]
        self.both(lambda door: door.hear(shard, *messages), f"shard {shard} confirms {batch}")


def context(rng: random.Random) -> dict[str, Any]:
    """Return a header of a trace, which may be sampled, or be none."""
    flags = rng.choice(["00", "01", "01", "03", "ff", "0g"])
    said = f"00-{rng.randbytes(16).hex()}-{rng.randbytes(8).hex()}-{flags}"
    return {"traceparent": rng.choice([said, said, bytearray(said.encode()), said[:-1], 7])}


def begin_group(
    door: Door, at: int, number: int, tag: str, group_number: int, most: int, no_ack: bool,
    affinity: bool,
) -> None:  # fmt: skip
    """Let a channel consume the virtual queue, as Consuming does when the client asks for it."""
    group = GroupConsumer(door.entered[at].channels.by_number[number].consuming, group_number, tag)
    group.no_ack, group.limit.most = no_ack, 0 if no_ack else most
    group.terms = ConsumeTerms(affinity=affinity, tag=tag)
    group.handover_s = 1000.0
    door.tasks.add(asyncio.get_running_loop().create_task(consumed(door, group)))


async def consumed(door: Door, group: GroupConsumer) -> None:
    answer = await door.consuming.groups.consume(group)
    group.client.answer(group.channel.number, answer)


def set_alarm(door: Door, text: str) -> None:
    if door.services.alarms.set(0, text):
        door.connections.alarm_changed()


class Counted:
    """The short way of a client, and how much it took."""

    def __init__(self, door: Any, inlet: Any) -> None:
        self.door, self.inlet = door, inlet

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inlet, name)

    def take(self, buffer: memoryview, end: int) -> int:
        taken = int(self.inlet.take(buffer, end))
        self.door.taken += self.inlet.things
        return taken


class Greedy(Counted):
    """Takes a frame that is not plain, too."""

    def take(self, buffer: memoryview, end: int) -> int:
        taken = super().take(buffer, end)
        size = int.from_bytes(buffer[taken + 3 : taken + 7], "big") + 8
        return taken + size if taken and taken + size <= end else taken


class Miscounts(Counted):
    """Forgets that shards were fed."""

    def take(self, buffer: memoryview, end: int) -> int:
        taken = super().take(buffer, end)
        self.door.counts.received -= self.inlet.fed > 0
        return taken


def watched(kind: type[Counted]) -> Callable[[Door], None]:
    """Return what puts this kind in place of each short way of a door."""

    def change(door: Any) -> None:
        door.taken = 0
        enter = door.enter

        def watched_enter() -> int:
            at: int = enter()
            socket = door.entered[at].socket
            socket.go_short_way(kind(door, socket.inlet))
            return at

        door.enter = watched_enter

    return change


@pytest.mark.parametrize("first", SEEDS)
async def test_both_ways_do_the_same(first: int) -> None:
    took = 0
    for seed in range(first, first + TOGETHER):
        print(f"seed {seed}")
        took += await History(seed, watched(Counted), traced=seed % 3 == 0).play()
    assert took > 100, "hardly anything went the short way"


@pytest.mark.parametrize("broken", [Greedy, Miscounts])
async def test_a_short_way_that_is_broken_is_caught(broken: type[Counted]) -> None:
    with pytest.raises(Mismatch):
        for seed in range(40):
            await History(seed, watched(broken)).play()


@pytest.mark.parametrize(
    ("at", "forgotten"),
    [
        (1, ("links.share_freed", "links.on_acks_waited")),
        (0, ("consuming.crediting.delivered",)),  # on the short way compiled code does this
        (1, ("consuming.groups.emptied",)),
    ],
)
async def test_credit_of_a_virtual_queue_that_is_forgotten_by_one_door_is_caught(
    at: int, forgotten: tuple[str, ...]
) -> None:
    def forget(door: Door) -> None:
        for call in forgotten:
            part, name = call.rsplit(".", 1)
            setattr(attrgetter(part)(door), name, lambda *_: None)

    with pytest.raises(Mismatch):
        for seed in range(40):
            history = History(seed, watched(Counted))
            forget(history.doors[at])
            await history.play()


@pytest.mark.parametrize("first", SEEDS)
async def test_bytes_that_mean_little_do_the_same_both_ways(first: int) -> None:
    for seed in range(first, first + TOGETHER):
        print(f"seed {seed}")
        history = History(seed, watched(Counted))
        history.enter()
        history.both(lambda door, history=history: door.read(0, history.pending[0]), "opens")
        said = fuzzed(history.random)
        at = 0
        while at < len(said):
            size = history.random.choice([1, 7, 20, 300, len(said)])
            piece = said[at : at + size]
            at += size
            history.both(lambda door, piece=piece: door.read(0, piece), piece.hex())
            await history.settle()
            history.compare()


@pytest.mark.parametrize("seed", range(5))
async def test_a_socket_of_the_kernel_is_read_and_written_the_same_way(seed: int) -> None:
    print(f"seed {seed}")
    history = History(seed)
    history.rough = 0.0
    history.enter()
    model, real = history.doors
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    client = real.entered[0].socket
    client.sock, client.fd, client.is_plain = near, near.fileno(), True
    assert client.inlet is not None
    client.go_short_way(client.inlet)
    said, got = history.pending[0], b""
    for _ in range(60):
        said += b"".join(history.frames(0) for _ in range(3))
        cut = history.random.randint(0, len(said))
        if cut:
            model.read(0, said[:cut])
            far.sendall(said[:cut])
            while is_readable(near) and client.fd in real.aio.readers:
                real.aio.readers[client.fd]()
        said = said[cut:]
        await history.settle()
        history.deliver(history.random.randrange(SHARDS))
        for shard in range(SHARDS):
            history.confirm(shard)
            history.answer(shard)
        await history.settle()
        with suppress(BlockingIOError):
            got += far.recv(1 << 20)
        one, other = (door.seen() for door in history.doors)
        assert one["sent"] == other["sent"] and one["counts"] == other["counts"]
        assert one["unacked"] == other["unacked"] and one["links"] == other["links"]
    assert got == model.clients[0].taken[-len(got) :] and len(got) > 1000
    far.close()
    real.aio.readers[client.fd]()
    assert client.lost, "the client has closed"
    near.close()


@pytest.mark.parametrize("channels_max", [1, 2, 3])
async def test_channels_are_counted_the_same_both_ways(channels_max: int) -> None:
    refused = 0
    for seed in range(40):
        print(f"seed {seed}")
        rng = random.Random(seed)
        doors = [Door(short=short) for short in (False, True)]
        tune = commands.Connection.TuneOk(channels_max, 131072, 60)
        opening = *OPENING[:2], method(0, tune) + method(0, commands.Connection.Open("/"))
        for door in doors:
            door.enter(opening)
        here: set[int] = set()
        for _ in range(30):
            number = rng.randint(1, 4)
            if number in here:
                said = method(number, commands.Channel.Close(200, "", 0, 0))
            else:
                said = method(number, commands.Channel.Open())
            here ^= {number}
            if rng.random() < 0.2:
                said += method(number, commands.Basic.Qos(prefetch_count=1))
            for door in doors:
                door.read(0, said)
                door.run()
            one, other = (door.seen() for door in doors)
            assert one["written"] == other["written"] and one["counts"] == other["counts"]
            assert one["channels"] == other["channels"]
            refused += b"has reached the negotiated" in one["written"][0][0]
    assert refused > 3


def bind_frames(rng: random.Random) -> bytes:
    """Return binds of a channel, and now and then something else."""
    number = 3 if rng.random() < 0.003 else rng.choice([1, 1, 1, 2])
    if rng.random() < 0.2:
        return b"".join(publish(number, "", "a", b"x"))
    if rng.random() < 0.003:
        return method(number, commands.Channel.Open())
    source, queue = rng.choice(["direct", "logs", "fan"]), rng.choice(["a", "a", "a", "b"])
    if rng.random() < 0.003:
        source = "gone"
    said = b""
    for _ in range(rng.choice([1, 1, 1, 3])):
        key = rng.choice(["k", "j", "l", "\u00e9"]) if rng.random() < 0.5 else "k"
        arguments = {"x": 1} if rng.random() < 0.05 else {}
        nowait = rng.random() < 0.1
        said += method(number, commands.Queue.Bind(0, queue, source, key, nowait, arguments))
    return said


async def test_binds_ahead_are_answered_the_same_both_ways() -> None:
    bound = answered = recorded = runs = 0
    for seed in range(60):
        print(f"seed {seed}")
        rng = random.Random(seed)
        doors = [Door(short=short) for short in (False, True)]
        aheads = [FakeBindsAhead(door.line) for door in doors]
        for door in doors:
            door.enter()
            for number in (1, 2):
                door.read(0, method(number, commands.Channel.Open()))
        for _ in range(25):
            said = b"".join(bind_frames(rng) for _ in range(rng.choice([1, 1, 4])))
            cut = rng.choice([len(said), rng.randrange(len(said))])
            has_room = rng.random() < 0.9
            for door, ahead in zip(doors, aheads, strict=True):
                ahead.has_room(has_room)
                for piece in (said[:cut], said[cut:]):
                    if piece:
                        door.read(0, piece)
                door.run()
            if rng.random() < 0.5:
                done, code = rng.randrange(3), rng.choice([0] * 9 + [404])
                recorded += len(aheads[0].waited)
                for ahead in aheads:
                    ahead.record(done, code)
            for _ in range(rng.randrange(4)):
                for door in doors:
                    asked = door.line.asked
                    if asked and asked[0][1].cancelled():  # its channel has ended
                        asked.pop(0)
                    elif asked:
                        answered += 1
                        door.line.answer()
            await asyncio.sleep(0)
            for door in doors:
                door.run()
            one, other = (door.seen() for door in doors)
            assert one["written"] == other["written"] and one["counts"] == other["counts"]
            assert one["sent"] == other["sent"] and one["channels"] == other["channels"]
            asked = [[request for request, _ in door.line.asked] for door in doors]
            assert asked[0] == asked[1] and aheads[0].bound == aheads[1].bound
            assert sorted(aheads[0].recorded) == sorted(aheads[1].recorded)
        bound += len(aheads[0].bound)
        runs += len(aheads[1].all)
        assert all(end[1] == "a" for _, end in aheads[0].bound)
    assert bound > 200 and answered > 100 and recorded > 80 and runs < bound + recorded


@pytest.mark.parametrize("goes_on", [False, True], ids=["begun", "gone on"])
async def test_what_is_read_with_a_bind_waits_for_its_answer_both_ways(goes_on: bool) -> None:
    seen = []
    for short in (False, True):
        door = Door(short=short)
        ahead = FakeBindsAhead(door.line)
        door.enter()
        behind = b"".join(publish(1, "", "a", b"x"))
        door.read(0, method(1, commands.Channel.Open()) + behind)  # its route is known then
        door.run()
        if goes_on:
            door.read(0, method(1, commands.Queue.Bind(0, "a", "logs", "first")))
            ahead.record(0, 0)
        door.run()
        await asyncio.sleep(0)
        door.seen()
        bind = method(1, commands.Queue.Bind(0, "a", "logs", "k"))
        for at in range(3):
            door.read(0, bind + behind + behind)
            door.run()
            await asyncio.sleep(0)
            door.run()
            before = door.seen()
            assert not any(before["sent"]) and before["written"][0][0] == b"", at
            ahead.record(0, 0)
            await asyncio.sleep(0)
            door.run()
            after = door.seen()
            assert any(after["sent"]) and b"\0\x32\0\x15" in after["written"][0][0]
            seen.append((short, at, before, after))
    assert [each[1:] for each in seen[:3]] == [each[1:] for each in seen[3:]]


@pytest.mark.parametrize("parts", [1, 2, 3], ids=["method", "header", "body"])
async def test_a_bind_within_a_message_is_refused_both_ways(parts: int) -> None:
    message = [*publish(1, "", "a", b"x" * 100_000)]
    message[1] = message[1].replace((100_000).to_bytes(8), (200_000).to_bytes(8))
    seen = []
    for short in (False, True):
        door = Door(short=short)
        ahead = FakeBindsAhead(door.line)
        door.enter()
        said = [method(1, commands.Channel.Open())]
        said += [method(1, commands.Queue.Bind(0, "a", "direct", key)) for key in "jkl"]
        for piece in (*said, *message[:parts], said[-1]):
            door.read(0, piece)
            door.run()
        assert len(ahead.bound) == 3 and len(ahead.all) == (2 if short else 3)
        seen.append(door.seen()["written"])
    assert seen[0] == seen[1] and b"UNEXPECTED_FRAME" in seen[0][0][0]


@pytest.mark.parametrize("through_kernel", [False, True])
async def test_an_error_that_nobody_foresaw_ends_its_connection_and_no_other(
    through_kernel: bool,
) -> None:
    doors = [Door(short=short) for short in (False, True)]
    heard = []
    for door in doors:
        clients = [door.enter(), door.enter()]
        for at in clients:
            door.read(at, method(1, commands.Channel.Open()) + b"".join(publish(1, "", "a", b"x")))
            number = at + 1
            consumer = Consumer(door.entered[at].channels.by_number[1].consuming, number, "t")
            consumer.queue_id, consumer.queue_name = 1, "a"
            consumer.announced = consumer.attached = True
            door.consuming.consumers[number] = consumer
            stored = properties.stored_with(b"", b"a", {}, b"body")
            writer = DeliveryWriter(*door.who(0))
            writer.add(door.entered[at].id, 1, number, 1, False, 1, stored, 0, False)
            message = writer.take()
            assert message is not None
            door.hear(0, message)
        door.aio.run()
        door.seen()
        near, far = socket.socketpair()
        if through_kernel and door is doors[1]:
            near.setblocking(False)
            client = door.entered[0].socket
            client.fd, client.is_plain = near.fileno(), True
            assert client.inlet is not None
            client.go_short_way(client.inlet)
        wait_for_acks, publish_one = door.links.wait_for_acks, b"".join(publish(1, "", "b", b"y"))

        def no_memory() -> None:
            raise MemoryError

        door.links.wait_for_acks = no_memory  # type: ignore[method-assign]
        said = publish_one + method(1, commands.Basic.Ack(1)) + publish_one + HEARTBEAT[:3]
        if through_kernel and door is doors[1]:
            far.sendall(said)
            door.aio.readers[near.fileno()]()
            client.is_plain = False
        else:
            door.read(0, said)
        door.links.wait_for_acks = wait_for_acks  # type: ignore[method-assign]
        door.read(1, publish_one + method(1, commands.Basic.Ack(1)))
        door.aio.run()
        shown = door.seen()
        heard.append([shown["written"], shown["sent"], shown["counts"], shown["unacked"][:1]])
        assert door.entered[0].socket.closing and not door.entered[1].socket.closing
        door.entered[0].socket.is_plain = False
        door.read(0, HEARTBEAT[3:] + method(0, commands.Connection.CloseOk()))
        assert door.entered[0].socket.lost, "it is in step: its answer is found"
        near.close()
        far.close()
    assert heard[0][1:] == heard[1][1:]
    if not through_kernel:
        assert heard[0] == heard[1]
    assert b"internal error" in heard[0][0][0][0]


def fuzzed(rng: random.Random) -> bytes:
    """Return frames, of which some bytes are others or missing, and noise."""
    frames = [
        HEARTBEAT,
        method(1, commands.Basic.Ack(1, False)),
        method(2, commands.Basic.Ack(0, True)),
        *publish(1, "", "a", b"body"),
        *publish(2, "fan", "", b""),
        *publish(1, "direct", "k", rng.randbytes(99), delivery_mode=2),
    ]
    said = bytearray()
    for _ in range(rng.randint(1, 30)):
        if rng.random() < 0.8:
            said += b"".join(
                publish(rng.choice([1, 2]), "", "a", rng.randbytes(rng.randint(0, 40)))
            )
        else:
            said += rng.choice(frames)
    for _ in range(rng.randint(0, 3)):
        place = rng.randrange(len(said))
        what = rng.randrange(4)
        if what == 0:
            said[place] = rng.randrange(256)
        elif what == 1:
            del said[place : place + rng.randint(1, 9)]
        elif what == 2:
            said[place:place] = rng.randbytes(rng.randint(1, 9))
        else:
            said[place] ^= 1 << rng.randrange(8)
    return bytes(said)
