"""Work that a client sends at once is done in its order, as if each message came alone."""

from __future__ import annotations

import random
import socket
import time

import pika
import pytest
from pamqp import commands

from tests.amqp import bytes_of
from tests.support.raw_client import RawClient, method, publish
from tests.support.real_broker import RealBroker

Channel = pika.adapters.blocking_connection.BlockingChannel


def bodies(channel: Channel, queue: str, **how: object) -> list[bytes]:
    """Consume into the list that is returned, whenever the connection processes its events."""
    taken: list[bytes] = []
    channel.basic_consume(queue, lambda *delivery: taken.append(delivery[3]), **how)  # type: ignore[arg-type]
    return taken


def work(connection: pika.BlockingConnection, until: object = None, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not (callable(until) and until()):
        connection.process_data_events(time_limit=0.02)


def test_a_get_behind_a_publish_leaves_the_message_to_the_consumer(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name)
    taken = bodies(channel, name, auto_ack=True)
    for i in range(20):
        channel.basic_publish("", name, b"%d" % i)
        assert channel.basic_get(name)[0] is None
    work(connection, lambda: len(taken) == 20)
    assert len(taken) == 20


@pytest.mark.row("A6.8")
def test_messages_published_before_a_cancel_are_the_cancelled_consumers(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    sender = connection.channel()
    sender.queue_declare(name)
    taken: dict[int, list[bytes]] = {}
    tags = {}
    for priority in (1, 0, -1):
        taken[priority] = []
        tags[priority] = sender.basic_consume(
            name,
            lambda *delivery, into=taken[priority]: into.append(delivery[3]),
            auto_ack=True,
            arguments={"x-priority": priority},
        )
    for priority in (1, 0, -1):
        for _ in range(10):
            sender.basic_publish("", name, b"%d" % priority)
        if priority >= 0:
            for delivery in sender.basic_cancel(tags[priority]) or []:
                taken[priority].append(delivery[2])
    work(connection, lambda: len(taken[-1]) == 10)
    assert taken[-1] == [b"-1"] * 10
    assert all(set(got) <= {b"%d" % priority} for priority, got in taken.items())


@pytest.mark.row("A4.1")
def test_behind_the_cancel_of_its_last_consumer_an_auto_delete_queue_is_gone(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    for _ in range(20):
        channel.queue_declare(name, auto_delete=True)
        tag = channel.basic_consume(name, lambda *delivery: None)
        channel.basic_cancel(tag)
        # another one: this would be 405 else
        channel.queue_declare(name, auto_delete=True, exclusive=True)
        channel.queue_delete(name)


@pytest.mark.row("A4.1")
@pytest.mark.parametrize("end", ["channel", "connection"])
def test_behind_the_end_of_its_last_consumers_channel_or_connection_an_auto_delete_queue_is_gone(
    broker: RealBroker, connection: pika.BlockingConnection, name: str, end: str
) -> None:
    other = connection.channel()
    for _ in range(20):
        consuming = pika.BlockingConnection(pika.URLParameters(broker.url))
        for queue in (name, f"{name}-2"):
            channel = consuming.channel()
            channel.queue_declare(queue, auto_delete=True)
            channel.basic_consume(queue, lambda *delivery: None)
            if end == "channel":
                channel.close()
        if end == "connection":
            consuming.close()
        for queue in (name, f"{name}-2"):
            # another one: this would be 405 else
            other.queue_declare(queue, auto_delete=True, exclusive=True)
            other.queue_delete(queue)
        if end == "channel":
            consuming.close()


@pytest.mark.row("A4.1")
def test_who_comes_right_behind_the_last_consumer_of_an_auto_delete_queue_gets_one_to_consume(
    broker: RealBroker, name: str
) -> None:
    for _ in range(50):
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as consuming:
            channel = consuming.channel()
            channel.queue_declare(name, auto_delete=True)
            channel.basic_consume(name, lambda *delivery: None)


@pytest.mark.row("A4.1")
def test_behind_the_end_of_its_connection_an_exclusive_queue_is_gone(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    other = connection.channel()
    for _ in range(20):
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as owner:
            owner.channel().queue_declare(name, exclusive=True)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
            other.queue_declare(name, passive=True)
        assert refused.value.reply_code == 404
        other = connection.channel()


@pytest.mark.row("A6.12")
def test_a_global_prefetch_counts_neither_gets_nor_what_a_transaction_holds(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name)
    for i in range(6):
        channel.basic_publish("", name, b"%d" % i)
    channel.basic_qos(prefetch_count=2, global_qos=True)
    channel.tx_select()
    tags: list[int] = []
    channel.basic_consume(name, lambda _channel, method, *rest: tags.append(method.delivery_tag))
    work(connection, lambda: len(tags) == 2)
    assert channel.basic_get(name)[0] is not None
    channel.basic_ack(tags[-1], multiple=True)
    work(connection, limit_s=0.2)
    assert len(tags) == 2  # not committed
    channel.tx_commit()
    work(connection, lambda: len(tags) == 4)
    work(connection, limit_s=0.1)
    assert len(tags) == 4


@pytest.mark.row("A6.12")
def test_a_consumer_without_acks_waits_for_the_limit_of_its_channel_but_does_not_use_it(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.basic_qos(prefetch_count=1, global_qos=True)
    for queue in (name, f"{name}-2"):
        channel.queue_declare(queue)
    tags: list[int] = []
    channel.basic_consume(name, lambda _channel, method, *rest: tags.append(method.delivery_tag))
    free = bodies(channel, f"{name}-2", auto_ack=True)
    channel.basic_publish("", name, b"held")
    work(connection, lambda: bool(tags))
    for i in range(3):
        channel.basic_publish("", f"{name}-2", b"%d" % i)
    work(connection, limit_s=0.2)
    assert not free
    channel.basic_ack(tags[0])
    work(connection, lambda: len(free) == 3)
    assert free == [b"0", b"1", b"2"]


def test_what_expired_behind_a_message_that_did_not_is_not_delivered(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name)
    channel.confirm_delivery()
    for ttl in (10_000_000, 50):
        channel.basic_publish("", name, b"%d" % ttl, pika.BasicProperties(expiration=str(ttl)))
    time.sleep(0.2)
    taken = bodies(channel, name)
    work(connection, lambda: bool(taken))
    work(connection, limit_s=0.1)
    assert taken == [b"10000000"]


@pytest.mark.parametrize("largest", [50, 3000, 200_000])
def test_what_is_sent_without_a_pause_arrives_whole_and_in_order_wherever_a_read_ends(
    broker: RealBroker, connection: pika.BlockingConnection, name: str, largest: int
) -> None:
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sent: list[bytes] = []
    left = 3_000_000  # a dozen reads, most of them full
    while left > 0:
        sent.append(b"%d:" % len(sent) + bytes([len(sent) % 251]) * dice.randrange(largest))
        left -= len(sent[-1]) + 80
    channel = connection.channel()
    channel.queue_declare(name)
    said = [
        bytes_of.HEADER,
        bytes_of.method(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")),
        bytes_of.method(0, commands.Connection.TuneOk(2047, 131072, 60))
        + bytes_of.method(0, commands.Connection.Open("/")),
        bytes_of.method(1, commands.Channel.Open()),
        *(frame for body in sent for frame in bytes_of.publish(1, "", name, body, part=131064)),
    ]
    with socket.create_connection((broker.host, broker.port)) as sock:
        sock.settimeout(60)
        sock.sendall(b"".join(said))
        taken = bodies(channel, name, auto_ack=True)
        work(connection, lambda: len(taken) >= len(sent))
    assert taken == sent


def test_binds_sent_at_once_are_done_up_to_the_first_that_cannot_be(
    broker: RealBroker, name: str
) -> None:
    Bind = commands.Queue.Bind
    binds = [Bind(queue=name, exchange="amq.direct", routing_key=f"{name}.{n}") for n in range(700)]
    binds[400] = Bind(queue=name, exchange="missing")
    with RawClient(broker.port) as client, RawClient(broker.port) as other:
        client.shake_hands()
        other.shake_hands()
        client.ask(1, commands.Queue.Declare(queue=name), commands.Queue.DeclareOk)
        client.send(b"".join(method(1, bind) for bind in binds))
        for n in range(400):
            client.expect(commands.Queue.BindOk)
            if n % 50 == 0:  # who hears of the answer may count on the binding, whoever it is
                other.send(publish(1, "amq.direct", f"{name}.{n}", b"%d" % n))
        closed = client.expect(commands.Channel.Close)
        assert (closed.reply_code, closed.class_id, closed.method_id) == (404, 50, 20)
        other.send(publish(1, "amq.direct", f"{name}.401", b"lost"))
        # Counted behind what was published on the same channel.
        assert (
            other.ask(
                1, commands.Queue.Declare(queue=name, passive=True), commands.Queue.DeclareOk
            ).message_count
            == 8
        )
        assert (
            other.ask(1, commands.Queue.Delete(queue=name), commands.Queue.DeleteOk).message_count
            == 8
        )


def test_binds_without_answers_are_done_before_what_follows_them(
    broker: RealBroker, name: str
) -> None:
    Bind = commands.Queue.Bind
    binds = [
        Bind(queue=name, exchange="amq.topic", routing_key=f"{name}.{n}", nowait=True)
        for n in range(300)
    ]
    with RawClient(broker.port) as client:
        client.shake_hands()
        declare = method(1, commands.Queue.Declare(queue=name, nowait=True))
        published = publish(1, "amq.topic", f"{name}.299", b"x")
        client.send(declare + b"".join(method(1, bind) for bind in binds) + published)
        assert (
            client.ask(1, commands.Queue.Delete(queue=name), commands.Queue.DeleteOk).message_count
            == 1
        )
