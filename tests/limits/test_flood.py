"""Consumers keep up beside a publisher that does not stop."""

from __future__ import annotations

import multiprocessing
import struct
from multiprocessing.synchronize import Event

import pytest
from pamqp.commands import Basic, Queue

from shardmq.shardd.holding import BEHIND_MESSAGES
from tests.support.raw_client import RawClient, declare, publish
from tests.support.real_broker import RealBroker, wait_until

PREFETCH = 100
# Publishers are held until the queue is half as long as one that is behind. Behind a trial
# in vain publishers go on for up to REST_MS_MAX. Without a hold, the queue only grows.
SHORT_MESSAGES = BEHIND_MESSAGES * 3 // 4
TIMES = 2
RECEIVE_BYTES = 1 << 20


@pytest.mark.torture  # beside other tests, trials are in vain: others have the processor
def test_a_queue_gets_short_while_its_consumer_acknowledges_each_message_of_a_flood(
    broker: RealBroker, client: RawClient, name: str
) -> None:
    declare(client, name, exclusive=False)
    passive = Queue.Declare(queue=name, passive=True)
    spawn = multiprocessing.get_context("spawn")
    over = spawn.Event()
    both = [
        spawn.Process(target=flood, args=(broker.port, name, over)),
        spawn.Process(target=consume, args=(broker.port, name, over)),
    ]
    for process in both:
        process.start()

    def length() -> int:
        return client.ask(1, passive, Queue.DeclareOk).message_count

    try:
        for time in range(TIMES):
            wait_until(lambda: length() > BEHIND_MESSAGES, f"a queue that is behind, {time}")
            wait_until(lambda: length() < SHORT_MESSAGES, f"a queue that is short again, {time}")
        assert all(process.is_alive() for process in both)
    finally:
        over.set()
        for process in both:
            process.join(10)
            process.kill()
        client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)


def flood(port: int, name: str, over: Event) -> None:
    """Publish without a pause."""
    with RawClient(port).shake_hands() as client:
        data = publish(1, "", name, b"b" * 16) * 1000
        while not over.is_set():
            client.send(data)


def consume(port: int, name: str, over: Event) -> None:
    """Consume with a prefetch, and acknowledge each message. All deliveries are of one size."""
    with RawClient(port).shake_hands() as client:
        client.ask(1, Basic.Qos(prefetch_count=PREFETCH), Basic.QosOk)
        client.ask(1, Basic.Consume(queue=name, consumer_tag="c"), Basic.ConsumeOk)
        # Frames of the method, the header and the body; the name is the routing key.
        size = (7 + 4 + 2 + 8 + 1 + 1 + 1 + len(name) + 1) + (7 + 14 + 1) + (7 + 16 + 1)
        received, acked = len(client._buffer), 0
        ack = struct.Struct(">BHIHHQBB")
        while not over.is_set():
            tags = range(acked + 1, received // size + 1)
            client.send(b"".join([ack.pack(1, 1, 13, 60, 80, tag, 0, 0xCE) for tag in tags]))
            acked += len(tags)
            received += len(client.sock.recv(RECEIVE_BYTES))
