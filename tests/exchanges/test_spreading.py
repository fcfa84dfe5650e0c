"""Exchanges that give each message to one of their queues, through a real client."""

from __future__ import annotations

import pika
import pika.exceptions
import pytest

from shardmq.broker.routing.hashing import key_hash, rendezvous_weighted


def counts(
    channel: pika.adapters.blocking_connection.BlockingChannel, queues: list[str]
) -> list[int]:
    return [channel.queue_declare(queue, passive=True).method.message_count for queue in queues]


@pytest.mark.row("B1.6", "E3.1", "E3.12", "E3.13")
@pytest.mark.parametrize("kind", ["x-consistent-hash", "x-modulus-hash", "x-random"])
def test_each_message_goes_to_one_queue(
    connection: pika.BlockingConnection, name: str, kind: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare(name, kind)
    queues = [f"{name}-{i}" for i in range(4)]
    for queue in queues:
        channel.queue_declare(queue)
        channel.queue_bind(queue, name, "1")
    for i in range(200):
        channel.basic_publish(name, f"key-{i}", b"x", mandatory=True)
    found = counts(channel, queues)
    assert sum(found) == 200
    assert min(found) > 20
    channel.queue_delete(queues[0])
    for i in range(200):
        channel.basic_publish(name, f"key-{i}", b"x", mandatory=True)
    assert sum(counts(channel, queues[1:])) == 400 - found[0]


@pytest.mark.row("E3.5")
def test_a_key_goes_where_the_rule_says(connection: pika.BlockingConnection, name: str) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare(name, "x-consistent-hash", durable=True)
    queues = sorted(f"{name}-{i}" for i in range(3))
    for queue, weight in zip(queues, ("1", "2", "3"), strict=True):
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, name, weight)
    lots = [(weight, key_hash(f"queue {queue}".encode())) for weight, queue in enumerate(queues, 1)]
    expected = [0, 0, 0]
    for i in range(100):
        channel.basic_publish(name, f"k{i}", b"x")
        expected[rendezvous_weighted(key_hash(f"k{i}".encode()), lots)] += 1
    assert counts(channel, queues) == expected


@pytest.mark.row("E3.3")
def test_a_header_is_hashed_instead_of_the_key(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare(name, "x-consistent-hash", arguments={"hash-header": "customer"})
    queues = [f"{name}-{i}" for i in range(4)]
    for queue in queues:
        channel.queue_declare(queue)
        channel.queue_bind(queue, name, "1")
    for i in range(50):
        channel.basic_publish(name, f"{i}", b"x", pika.BasicProperties(headers={"customer": "one"}))
    assert sorted(counts(channel, queues)) == [0, 0, 0, 50]
    for i in range(100):
        channel.basic_publish(name, "", b"x", pika.BasicProperties(headers={"customer": f"{i}"}))
    assert min(counts(channel, queues)) > 0


@pytest.mark.row("E3.10")
def test_without_bindings_a_mandatory_message_comes_back(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare(name, "x-random")
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish(name, "k", b"x", mandatory=True)


@pytest.mark.row("E3.2")
def test_a_weight_that_is_no_number_is_refused(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.exchange_declare(name, "x-consistent-hash")
    channel.queue_declare(name)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_bind(name, name, "heavy")
    assert caught.value.reply_code == 406
    assert (
        caught.value.reply_text
        == 'PRECONDITION_FAILED - The binding key must be an integer: <<"heavy">>'
    )


def test_an_exchange_behind_one_by_chance_gets_its_share(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare(name, "x-random")
    channel.exchange_declare(f"{name}-behind", "fanout")
    for queue in (f"{name}-a", f"{name}-b"):
        channel.queue_declare(queue)
    channel.queue_bind(f"{name}-a", name, "")
    channel.exchange_bind(f"{name}-behind", name, "")
    channel.queue_bind(f"{name}-b", f"{name}-behind", "")
    for _ in range(100):
        channel.basic_publish(name, "k", b"x", mandatory=True)
    found = counts(channel, [f"{name}-a", f"{name}-b"])
    assert sum(found) == 100
    assert min(found) > 20
