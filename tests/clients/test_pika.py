"""Test pika: confirms, returns, acks, prefetch, transactions, and cancels by the broker."""

from __future__ import annotations

import time
from collections.abc import Callable

import pika
import pika.exceptions
import pytest

from tests.support.real_broker import RealBroker, wait_until

PERSISTENT = pika.BasicProperties(
    delivery_mode=2, content_type="text/plain", headers={"n": 1, "list": ["a", None]}
)


def test_what_is_published_arrives_whole_and_in_order(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    bodies = [b"", b"x", b"y" * 131072, b"z" * 1_000_003] + [str(n).encode() for n in range(100)]
    for body in bodies:
        channel.basic_publish("", name, body, PERSISTENT)
    seen = []
    for method, properties, body in channel.consume(name, inactivity_timeout=60):
        assert method is not None, f"only {len(seen)} arrived"
        assert (method.exchange, method.routing_key, method.redelivered) == ("", name, False)
        assert properties.headers == PERSISTENT.headers
        seen.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(seen) == len(bodies):
            break
    assert seen == bodies
    channel.cancel()
    assert channel.queue_declare(name, passive=True).method.message_count == 0


def test_a_mandatory_message_without_a_queue_comes_back(
    connection: pika.BlockingConnection,
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.UnroutableError) as unroutable:
        channel.basic_publish("amq.direct", "nobody", b"back", mandatory=True)
    (returned,) = unroutable.value.messages
    assert (returned.method.reply_code, returned.method.reply_text) == (312, "NO_ROUTE")
    assert returned.body == b"back"


def test_a_requeued_message_takes_its_old_place_and_is_marked(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name, exclusive=True)
    channel.confirm_delivery()
    for n in range(3):
        channel.basic_publish("", name, str(n).encode())
    first, _, _ = channel.basic_get(name)
    channel.basic_nack(first.delivery_tag, requeue=True)
    order = [channel.basic_get(name, auto_ack=True) for _ in range(3)]
    assert [(got[2], got[0].redelivered) for got in order] == [
        (b"0", True),
        (b"1", False),
        (b"2", False),
    ]


def came(connection: pika.BlockingConnection, happened: Callable[[], bool]) -> None:
    wait_until(
        lambda: connection.process_data_events(0) is not None or happened(), "what the broker sends"
    )


def test_prefetch_bounds_what_is_out(connection: pika.BlockingConnection, name: str) -> None:
    channel = connection.channel()
    channel.queue_declare(name, exclusive=True)
    channel.confirm_delivery()
    for n in range(10):
        channel.basic_publish("", name, str(n).encode())
    tags: list[int] = []
    channel.basic_qos(prefetch_count=3)
    channel.basic_consume(name, lambda _c, method, _p, _b: tags.append(method.delivery_tag))
    for most in (3, 6):
        came(connection, lambda most=most: len(tags) >= most)  # type: ignore[misc]
        connection.process_data_events(0.3)
        assert tags == list(range(1, most + 1))
        channel.basic_ack(most, multiple=True)


def test_a_deleted_queue_cancels_its_consumers(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel, other = connection.channel(), connection.channel()
    channel.queue_declare(name)
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    tag = channel.basic_consume(name, lambda *_: None)
    other.queue_delete(name)
    came(connection, lambda: bool(cancelled))
    assert cancelled == [tag]


def test_a_transaction_shows_nothing_until_commit(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel, other = connection.channel(), connection.channel()
    channel.queue_declare(name, exclusive=True)
    channel.tx_select()
    channel.basic_publish("", name, b"dropped")
    channel.tx_rollback()
    channel.basic_publish("", name, b"kept")
    assert other.queue_declare(name, passive=True).method.message_count == 0
    channel.tx_commit()
    assert other.basic_get(name, auto_ack=True)[2] == b"kept"
    assert other.basic_get(name, auto_ack=True)[2] is None


@pytest.mark.parametrize(
    ("kind", "key", "binding", "arguments", "headers", "arrives"),
    [
        ("direct", "a", "a", {}, {}, True),
        ("direct", "a", "b", {}, {}, False),
        ("fanout", "any", "", {}, {}, True),
        ("topic", "a.b.c", "a.#", {}, {}, True),
        ("topic", "a.b.c", "a.*", {}, {}, False),
        ("headers", "", "", {"x-match": "all", "h": 1}, {"h": 1}, True),
        ("headers", "", "", {"x-match": "all", "h": 1}, {"h": 2}, False),
    ],
)
def test_each_exchange_type_routes_by_its_rule(
    connection: pika.BlockingConnection,
    name: str,
    kind: str,
    key: str,
    binding: str,
    arguments: dict[str, object],
    headers: dict[str, object],
    arrives: bool,
) -> None:
    channel = connection.channel()
    channel.exchange_declare(name, kind)
    channel.queue_declare(name, exclusive=True)
    channel.queue_bind(name, name, binding, arguments)
    channel.confirm_delivery()
    channel.basic_publish(name, key, b"x", pika.BasicProperties(headers=headers))
    assert channel.queue_declare(name, passive=True).method.message_count == arrives


def test_exclusive_queues_go_with_their_connection(broker: RealBroker, name: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as first:
        first.channel().queue_declare(name, exclusive=True)
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as second:
        second.channel().queue_declare(name, exclusive=True)


def test_who_needs_no_acks_leaves_the_room_of_the_channel_to_the_others(
    connection: pika.BlockingConnection, name: str
) -> None:
    """basic.qos with global holds back consumers without acks too.

    But no ack tells that there is room again.
    """
    channel = connection.channel()
    channel.basic_qos(prefetch_count=1, global_qos=True)
    got: list[tuple[str, int]] = []

    def take(
        _channel: object, method: pika.spec.Basic.Deliver, _properties: object, _body: bytes
    ) -> None:
        got.append((method.consumer_tag, method.delivery_tag))

    queues = [f"{name}-{n}" for n in range(8)]  # on both shards; the first with acks
    for queue in queues:
        channel.queue_declare(queue, exclusive=True)
        channel.queue_bind(queue, "amq.fanout")
        channel.basic_consume(queue, take, auto_ack=queue != queues[0], consumer_tag=queue)
    for _ in range(2):
        channel.basic_publish("amq.fanout", "", b"")
    looked = 0
    end = time.monotonic() + 60
    while len(got) < 2 * len(queues) and time.monotonic() < end:
        connection.process_data_events(0.05)
        for queue, tag in got[looked:]:
            if queue == queues[0]:
                channel.basic_ack(tag)
        looked = len(got)
    assert sorted(queue for queue, _ in got) == sorted(2 * queues)
