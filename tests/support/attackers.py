"""Clients that take all that a broker lets them take, and how long others wait meanwhile.

An attack is a set-up on a connection and bytes that are written again and again, as fast as the
broker takes them, or a way of connecting that is repeated. `waits_under` runs one beside two
ordinary clients: a victim that publishes one persistent message at a time, with a confirm, to a
queue that it consumes, and a newcomer that connects and declares a queue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.queues import Queue

from pamqp import base, commands

from tests.support.raw_client import (
    HEADER,
    RawClient,
    content_header,
    method,
    publish,
    raw_frame,
    with_properties,
)

MIB = 1 << 20
CHANNELS = 50
VICTIM_PERIOD_S = 0.02
NEWCOMER_PERIOD_S = 0.05
BEGIN_S = 1.0  # until the attackers have begun
SEED = 7


@dataclass(frozen=True)
class Attack:
    """An attack over one channel.

    `queue` is the attacker's own; `prepare` gives methods to send first, `data` is sent again and
    again.
    """

    data: Callable[[str, random.Random], bytes]
    durable: bool = False
    arguments: dict[str, object] = field(default_factory=dict)
    prepare: Callable[[str], list[base.Frame]] = lambda queue: []
    consumes: bool = False


def _direct(queue: str, body: bytes, count: int) -> bytes:
    return publish(1, "", queue, body) * count


def _declare_and_delete(queue: str, chance: random.Random) -> bytes:
    names = [f"{queue}.{chance.getrandbits(60)}" for _ in range(500)]
    return b"".join(
        method(1, commands.Queue.Declare(queue=name)) + method(1, commands.Queue.Delete(queue=name))
        for name in names
    )


def _binds(queue: str, chance: random.Random) -> bytes:
    keys = [f"key.{chance.getrandbits(60)}" for _ in range(2000)]
    return b"".join(
        method(1, commands.Queue.Bind(queue=queue, exchange="amq.direct", routing_key=key))
        for key in keys
    )


def _bodies_of_one(queue: str, chance: random.Random) -> bytes:
    head = method(1, commands.Basic.Publish(exchange="", routing_key=queue)) + content_header(
        1, 10_000
    )
    return (head + raw_frame(3, 1, b"x") * 10_000) * 5


def _fan_out(queue: str) -> list[base.Frame]:
    said: list[base.Frame] = [commands.Exchange.Declare(exchange="fan", exchange_type="fanout")]
    for number in range(20):
        said.append(
            commands.Queue.Declare(queue=f"{queue}.{number}", arguments={"x-max-length": 10})
        )
        said.append(commands.Queue.Bind(queue=f"{queue}.{number}", exchange="fan"))
    return said


def _header_bindings(queue: str) -> list[base.Frame]:
    arguments = [{"x-match": "any", "a": number, "z": number} for number in range(20)]
    return [
        commands.Queue.Bind(queue=queue, exchange="amq.headers", arguments=one) for one in arguments
    ]


WRITERS = {
    "tiny messages": Attack(lambda queue, _: _direct(queue, b"x" * 16, 4000), consumes=True),
    "large messages": Attack(lambda queue, _: _direct(queue, bytes(MIB), 4), consumes=True),
    "persistent messages": Attack(
        lambda queue, _: with_properties(1, "", queue, bytes(1000), delivery_mode=2) * 500,
        durable=True,
        consumes=True,
    ),
    "new routing keys": Attack(
        lambda _, chance: b"".join(
            publish(1, "amq.topic", f"a.{chance.random()}", b"x") for _ in range(4000)
        )
    ),
    "fan-out": Attack(lambda _, __: publish(1, "fan", "", b"x" * 16) * 2000, prepare=_fan_out),
    "headers": Attack(
        lambda _, __: (
            with_properties(1, "amq.headers", "", b"x", headers={"a": 1, "b": "c"}) * 2000
        ),
        prepare=_header_bindings,
    ),
    "unroutable": Attack(
        lambda _, __: publish(1, "amq.direct", "nobody", bytes(100), mandatory=True) * 2000
    ),
    "a full queue": Attack(
        lambda queue, _: _direct(queue, b"x" * 16, 4000), arguments={"x-max-length": 1000}
    ),
    "priorities": Attack(
        lambda queue, _: with_properties(1, "", queue, b"x" * 16, priority=3) * 4000,
        arguments={"x-max-priority": 10, "x-max-length": 100_000},
    ),
    "transactions": Attack(
        lambda queue, _: (
            method(1, commands.Tx.Select())
            + (publish(1, "", queue, b"x") * 5 + method(1, commands.Tx.Commit())) * 500
        )
    ),
    "large transactions": Attack(
        lambda queue, _: (
            method(1, commands.Tx.Select())
            + publish(1, "", queue, b"x") * 10_000
            + method(1, commands.Tx.Commit())
        ),
        arguments={"x-max-length": 100_000},
    ),
    "bodies of one byte": Attack(_bodies_of_one),
    "heartbeats": Attack(lambda _, __: raw_frame(8, 0, b"") * 200_000),
    "qos": Attack(
        lambda _, __: (
            b"".join(
                method(channel, commands.Basic.Qos(0, channel)) for channel in range(1, CHANNELS)
            )
            * 200
        )
    ),
    "channels": Attack(
        lambda _, __: (
            (
                method(201, commands.Channel.Open())
                + method(201, commands.Channel.Close(200, "", 0, 0))
            )
            * 5000
        )
    ),
    "gets": Attack(lambda queue, _: method(1, commands.Basic.Get(queue=queue, no_ack=True)) * 5000),
    "consumers": Attack(
        lambda queue, _: (
            (
                method(1, commands.Basic.Consume(queue=queue, consumer_tag="t"))
                + method(1, commands.Basic.Cancel("t"))
            )
            * 1000
        )
    ),
    "declares": Attack(
        lambda queue, _: method(1, commands.Queue.Declare(queue=queue, durable=False)) * 5000
    ),
    "new queues": Attack(_declare_and_delete),
    "binds": Attack(_binds),
}
CONNECTORS = ("connections", "logins", "wrong logins", "noise")
ATTACKS = (*WRITERS, *CONNECTORS)


def _write(port: int, kind: str, number: int, until: float) -> None:
    attack, queue = WRITERS[kind], f"attacker.{number}"
    chance = random.Random(SEED + number)
    while time.monotonic() < until:
        with contextlib.suppress(OSError, AssertionError), RawClient(port) as client:
            client.shake_hands(channels=CHANNELS)
            declare = commands.Queue.Declare(
                queue=queue, durable=attack.durable, arguments=attack.arguments
            )
            client.ask(1, declare, commands.Queue.DeclareOk)
            client.send(b"".join(method(1, each) for each in attack.prepare(queue)))
            if attack.consumes:
                client.send(
                    method(2, commands.Basic.Consume(queue=queue, consumer_tag="t", no_ack=True))
                )
            _write_on(client, memoryview(attack.data(queue, chance)), until)


def _write_on(client: RawClient, data: memoryview, until: float) -> None:
    """Write the data again and again, and take what comes, until the broker hangs up."""
    client.sock.setblocking(False)
    at = 0
    while time.monotonic() < until:
        readable, writable, _ = select.select([client.sock], [client.sock], [], 0.1)
        if readable and not client.sock.recv(MIB):
            return
        if writable:
            at = (at + client.sock.send(data[at : at + MIB])) % len(data)


def _connect(port: int, kind: str, number: int, until: float) -> None:
    chance = random.Random(SEED + number)
    while time.monotonic() < until:
        with contextlib.suppress(OSError, AssertionError, IndexError), RawClient(port) as client:
            client.sock.settimeout(2)
            if kind == "connections":
                client.send(HEADER[: chance.choice([0, 3, 8])])
            elif kind == "logins":
                client.shake_hands(channels=chance.choice([1, 200]))
            elif kind == "wrong logins":
                client.shake_hands(user="nobody", password="wrong")
            else:
                client.shake_hands()
                client.send_what_is_taken(
                    raw_frame(1, 1, chance.randbytes(60)) + chance.randbytes(100_000), 0.5
                )


def _attack(port: int, kind: str, number: int, until: float) -> None:
    (_connect if kind in CONNECTORS else _write)(port, kind, number, until)


def _victim(port: int, until: float, found: Queue[list[float]]) -> None:
    took: list[float] = []
    with RawClient(port) as client:
        client.shake_hands()
        client.ask(
            1, commands.Queue.Declare(queue="victim", durable=True), commands.Queue.DeclareOk
        )
        client.ask(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        client.ask(
            1,
            commands.Basic.Consume(queue="victim", consumer_tag="v", no_ack=True),
            commands.Basic.ConsumeOk,
        )
        message = with_properties(1, "", "victim", b"hello", delivery_mode=2)
        while time.monotonic() < until or not took:
            began = time.monotonic()
            client.send(message)
            expected = {commands.Basic.Ack, commands.Basic.Deliver}
            while expected:
                frame = client.read()
                assert frame is not None, "the broker hung up on the victim"
                expected.discard(type(frame[1]))
            took.append(time.monotonic() - began)
            time.sleep(max(0.0, VICTIM_PERIOD_S - took[-1]))
    found.put(took)


def _newcomer(port: int, until: float, found: Queue[list[float]]) -> None:
    took: list[float] = []
    while time.monotonic() < until or not took:
        began = time.monotonic()
        with RawClient(port) as client:
            client.shake_hands()
            declare = commands.Queue.Declare(queue=f"newcomer.{len(took) % 10}", exclusive=True)
            client.ask(1, declare, commands.Queue.DeclareOk)
        took.append(time.monotonic() - began)
        time.sleep(NEWCOMER_PERIOD_S)
    found.put(took)


@dataclass(frozen=True)
class Waits:
    """Seconds that each round of an ordinary client took."""

    took: list[float]

    def percentile(self, part: float) -> float:
        ordered = sorted(self.took)
        return ordered[min(len(ordered) - 1, int(len(ordered) * part))]

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {self.percentile(part) * 1e3:.0f}"
            for name, part in (("p50", 0.5), ("p99", 0.99))
        )
        return f"{len(self.took)} rounds, {times}, slowest {max(self.took) * 1e3:.0f} ms"


def waits_under(
    kind: str, port: int, *, attackers: int, seconds: float, patience_s: float
) -> tuple[Waits, Waits]:
    """Return how long the victim and the newcomer waited.

    Raises queue.Empty when one of them got nothing done in time.
    """
    until = time.monotonic() + BEGIN_S + seconds
    running = [
        multiprocessing.Process(target=_attack, args=(port, kind, number, until), daemon=True)
        for number in range(attackers)
    ]
    for each in running:
        each.start()
    try:
        time.sleep(BEGIN_S)
        found: list[Queue[list[float]]] = []
        for ordinary in (_victim, _newcomer):
            found.append(multiprocessing.Queue())
            running.append(
                multiprocessing.Process(target=ordinary, args=(port, until, found[-1]), daemon=True)
            )
            running[-1].start()
        victim, newcomer = (
            Waits(each.get(timeout=BEGIN_S + seconds + patience_s)) for each in found
        )
        return victim, newcomer
    finally:
        for each in running:
            each.kill()
            each.join()
