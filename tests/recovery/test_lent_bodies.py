"""Large bodies arrive unchanged through a real broker, also while its processes are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.broker

SIZES = (20_000, 32 << 10, 1 << 20, 3_500_000, 5_000_000)
KILLS = 6
PATIENCE_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path / "data", shards=2, front_doors=2)
    yield made
    made.stop()


def connect(broker: RealBroker) -> pika.BlockingConnection:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return pika.BlockingConnection(pika.URLParameters(broker.url))
        except pika.exceptions.AMQPConnectionError:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.mark.parametrize("mode", [pytest.param(1, marks=pytest.mark.torture), 2])
def test_bodies_of_all_sizes_arrive_unchanged(broker: RealBroker, mode: int) -> None:
    connection = connect(broker)
    channel = connection.channel()
    channel.confirm_delivery()
    for size in SIZES:
        queue = f"q{size}"
        channel.queue_declare(queue, durable=True)
        bodies = [random.randbytes(size) for _ in range(5)]
        for body in bodies:
            properties = pika.BasicProperties(delivery_mode=mode, headers={"a": "b"})
            channel.basic_publish("", queue, body, properties)
        # The first consumer takes some back, so that they are delivered twice.
        method, _, body = channel.basic_get(queue)
        assert body == bodies[0]
        channel.basic_nack(method.delivery_tag, requeue=True)
        # The next client may be at the other front door, which does not wait for the nack.
        while channel.queue_declare(queue, passive=True).method.message_count < len(bodies):
            pass
        other = connect(broker)
        got = []
        for method, _, body in other.channel().consume(queue, inactivity_timeout=PATIENCE_S):
            assert method is not None, f"{len(got)} of {len(bodies)} bodies of {size} bytes"
            got.append(body)
            if len(got) == len(bodies):
                break
        assert [bodies.index(body) for body in got] == list(range(len(bodies)))
        other.close()
        channel.queue_delete(queue)
    connection.close()


def test_nothing_confirmed_is_lost_or_changed_when_processes_are_killed(
    broker: RealBroker,
) -> None:
    sent: dict[bytes, bytes] = {}  # the beginning of each confirmed body, and the body
    at = random.Random(5)
    for kill in range(KILLS):
        kind, index = at.choice((("shard", 0), ("shard", 1), ("front-door", 0), ("front-door", 1)))
        connection = connect(broker)
        try:
            channel = connection.channel()
            channel.queue_declare("kept", durable=True)
            channel.confirm_delivery()
            for number in range(6):
                body = random.randbytes(16) + bytes([kill, number]) * at.choice((8192, 500_000))
                properties = pika.BasicProperties(delivery_mode=2)
                if number == 3:
                    os.kill(broker.pid(kind, index), signal.SIGKILL)
                channel.basic_publish("", "kept", body, properties)
                sent[body[:16]] = body
            connection.close()
        except (pika.exceptions.AMQPError, OSError):
            pass
        time.sleep(0.3)
    got: dict[bytes, bytes] = {}
    until = time.monotonic() + PATIENCE_S
    while sent.keys() - got.keys():
        assert time.monotonic() < until, f"{len(sent.keys() - got.keys())} of {len(sent)} lost"
        connection = connect(broker)
        try:
            channel = connection.channel()
            for method, _, body in channel.consume("kept", inactivity_timeout=2):
                if method is None:
                    break
                got[body[:16]] = body
                channel.basic_ack(method.delivery_tag)
            connection.close()
        except (pika.exceptions.AMQPError, OSError):
            pass
    assert {key: got[key] for key in sent} == sent
