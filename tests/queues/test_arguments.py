"""Test what a queue's arguments promise, through a real client."""

from __future__ import annotations

import time
from typing import Any

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.proving import proving
from tests.support.real_broker import RealBroker, wait_until

WAIT_S = 60.0


class Bench:
    def __init__(self, connection: pika.BlockingConnection, name: str) -> None:
        self.connection, self.name = connection, name
        self.channel: BlockingChannel = connection.channel()
        self.channel.confirm_delivery()

    def declare(self, **arguments: Any) -> None:
        """`_` for `-`."""
        own = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.channel.queue_declare(self.name, arguments=own)

    def publish(self, *bodies: bytes, **properties: Any) -> None:
        for body in bodies:
            self.channel.basic_publish("", self.name, body, pika.BasicProperties(**properties))

    def count(self) -> int:
        found: int = self.channel.queue_declare(self.name, passive=True).method.message_count
        return found

    def all(self) -> list[bytes]:
        found: list[bytes] = []
        while True:
            method, _, body = self.channel.basic_get(self.name, auto_ack=True)
            if method is None:
                return found
            found.append(body)

    def consume(self, got: list[tuple[str, bytes, bool]], **how: Any) -> str:
        """Into `got`: (tag, body, redelivered); never acknowledged."""

        def collect(_: Any, method: Any, __: Any, body: bytes) -> None:
            got.append((method.consumer_tag, body, method.redelivered))

        tag: str = self.channel.basic_consume(self.name, collect, **how)
        return tag

    def until(self, happened: Any, what: str) -> None:
        def look() -> bool:
            self.connection.process_data_events(0)
            return bool(happened())

        wait_until(look, what, WAIT_S)


@pytest.fixture
def bench(connection: pika.BlockingConnection, name: str) -> Bench:
    return Bench(connection, name)


@pytest.mark.row("C1.2")
def test_an_unused_queue_expires_and_one_in_use_does_not(bench: Bench, broker: RealBroker) -> None:
    bench.declare(x_expires=300)
    tag = bench.consume([])
    time.sleep(0.6)
    assert bench.count() == 0  # it is there
    bench.channel.basic_cancel(tag)

    def is_gone() -> bool:
        try:
            # would be a use, were it not for the others' rhythm
            bench.connection.channel().basic_get(bench.name)
        except pika.exceptions.ChannelClosedByBroker as closed:
            return closed.reply_code == 404
        time.sleep(0.5)
        return False

    wait_until(is_gone, "the queue to expire", WAIT_S)


@pytest.mark.row("C1.3", "A5.5")
def test_the_sooner_of_the_queues_ttl_and_the_messages_counts(bench: Bench) -> None:
    bench.declare(x_message_ttl=10_000_000)
    bench.publish(b"own", expiration="20")
    bench.publish(b"stays", expiration="20000000")
    wait_until(lambda: bench.count() == 1, "the message's time to be over", WAIT_S)
    bench.name = f"{bench.name}-brief"
    bench.declare(x_message_ttl=20)
    bench.publish(b"queue's", expiration="10000000")
    wait_until(lambda: bench.count() == 0, "the queue's time to be over", WAIT_S)


@pytest.mark.row("C1.3")
def test_a_ttl_of_zero_reaches_only_who_waits(bench: Bench) -> None:
    bench.declare(x_message_ttl=0)
    bench.publish(b"nobody")
    got: list[tuple[str, bytes, bool]] = []
    bench.consume(got, auto_ack=True)
    bench.publish(b"somebody")
    bench.until(lambda: got, "the message")
    assert [body for _, body, _ in got] == [b"somebody"]


@pytest.mark.row("C1.3")
def test_messages_expire_at_the_head_only(bench: Bench) -> None:
    bench.declare()
    bench.publish(b"stays")
    bench.publish(b"hidden", expiration="20")
    time.sleep(0.1)
    assert bench.count() == 2
    assert bench.all() == [b"stays"]


@pytest.mark.row("C1.4", "C1.5")
@pytest.mark.parametrize(
    ("arguments", "stay"),
    [
        ({"x_max_length": 2}, [b"33", b"44"]),
        ({"x_max_length": 2, "x_overflow": "drop-head"}, [b"33", b"44"]),
        ({"x_max_length_bytes": 5}, [b"33", b"44"]),
        ({"x_max_length": 3, "x_max_length_bytes": 3}, [b"44"]),
        ({"x_max_length": 0}, []),
    ],
)
def test_the_oldest_goes_where_there_are_too_many(
    bench: Bench, arguments: dict[str, Any], stay: list[bytes]
) -> None:
    bench.declare(**arguments)
    bench.publish(b"11", b"22", b"33", b"44")
    assert bench.all() == stay


@pytest.mark.row("C1.4")
def test_what_consumers_hold_does_not_count_against_the_length(bench: Bench) -> None:
    bench.declare(x_max_length=1)
    got: list[tuple[str, bytes, bool]] = []
    bench.channel.basic_qos(prefetch_count=2)
    bench.consume(got)
    bench.publish(b"1", b"2", b"3", b"4")
    bench.until(lambda: len(got) == 2, "two deliveries")
    assert bench.count() == 1


@pytest.mark.row("C1.5")
@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
def test_a_full_queue_refuses_and_keeps_what_it_has(bench: Bench, overflow: str) -> None:
    bench.declare(x_max_length=2, x_overflow=overflow)
    bench.publish(b"1", b"2")
    with pytest.raises(pika.exceptions.NackError):
        bench.publish(b"3")
    assert bench.all() == [b"1", b"2"]
    bench.publish(b"4")


@pytest.mark.row("C1.8")
def test_higher_priorities_leave_first_and_those_above_the_most_are_capped(bench: Bench) -> None:
    bench.declare(x_max_priority=5)
    bench.publish(b"none")
    for priority in (1, 5, 200, 255, 3):
        bench.publish(b"%d" % priority, priority=priority)
    assert bench.all() == [b"5", b"200", b"255", b"3", b"1", b"none"]


@pytest.mark.row("C1.9", "A6.6")
def test_one_consumer_is_active_and_the_next_takes_over(bench: Bench) -> None:
    bench.declare(x_single_active_consumer=True)
    got: list[tuple[str, bytes, bool]] = []
    first = bench.consume(got, consumer_tag="first", auto_ack=True)
    bench.consume(got, consumer_tag="second", auto_ack=True)
    bench.publish(b"1", b"2")
    bench.until(lambda: len(got) == 2, "both messages")
    bench.channel.basic_cancel(first)
    bench.publish(b"3")
    bench.until(lambda: len(got) == 3, "the third")
    assert [(tag, body) for tag, body, _ in got] == [
        ("first", b"1"),
        ("first", b"2"),
        ("second", b"3"),
    ]


@pytest.mark.row("C1.9")
def test_the_next_takes_over_when_the_first_ones_connection_ends(
    bench: Bench, broker: RealBroker
) -> None:
    bench.declare(x_single_active_consumer=True)
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as other:
        first = Bench(other, bench.name)
        held: list[tuple[str, bytes, bool]] = []
        first.consume(held, consumer_tag="first")
        got: list[tuple[str, bytes, bool]] = []
        bench.consume(got, consumer_tag="second")
        bench.publish(b"1")
        first.until(lambda: held, "the message")
        assert not got
    bench.until(lambda: got, "the message again")
    assert got == [("second", b"1", True)]


@pytest.mark.row("C1.9")
def test_nobody_can_be_the_only_consumer_where_one_is_active_at_a_time(bench: Bench) -> None:
    bench.declare(x_single_active_consumer=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
        bench.consume([], exclusive=True)
    text = f"ACCESS_REFUSED - queue '{bench.name}' in vhost '/' in exclusive use"
    assert (closed.value.reply_code, closed.value.reply_text) == (403, text)


@pytest.mark.row("C1.11", "A6.7")
def test_what_a_consumer_does_not_settle_in_time_goes_to_another_and_its_channel_stays_open(
    bench: Bench,
) -> None:
    """Requeued, redelivered; the late ack is no error."""
    bench.declare(x_consumer_timeout=300)
    got: list[tuple[str, bytes, bool]] = []
    slow = bench.connection.channel()
    slow.basic_qos(prefetch_count=1)
    tags: list[int] = []
    slow.basic_consume(bench.name, lambda _, method, __, body: tags.append(method.delivery_tag))
    bench.publish(b"1")
    bench.until(lambda: tags, "the message")
    bench.channel.basic_qos(prefetch_count=5)
    bench.consume(got)
    slow.basic_cancel(next(iter(slow.consumer_tags)))
    bench.until(lambda: got, "the message again")
    assert got[0][1:] == (b"1", True)
    slow.basic_ack(tags[0])
    slow.queue_declare(bench.name, passive=True)
    assert slow.is_open and bench.channel.is_open


@pytest.mark.parametrize(
    "arguments",
    [
        proving("C1.13", "x-queue-mode", {"x-queue-mode": "lazy"}),
        proving("C1.13", "x-queue-version", {"x-queue-version": 2, "x-max-in-memory-length": 10}),
        proving(
            "C1.14",
            "x-queue-leader-locator",
            {"x-queue-leader-locator": "balanced", "x-initial-cluster-size": 3},
        ),
        proving("C1.17", "x-something-else", {"x-something-else": "kept"}),
        proving(
            "C1.7",
            "x-dead-letter-exchange",
            {"x-dead-letter-exchange": "later", "x-dead-letter-strategy": "at-least-once"},
        ),
        proving("C1.10", "x-delivery-limit", {"x-delivery-limit": -1}),
        proving("C1.8", "x-max-priority", {"x-max-priority": 0}),
    ],
)
def test_arguments_without_effect_are_taken(bench: Bench, arguments: dict[str, Any]) -> None:
    bench.channel.queue_declare(bench.name, arguments=arguments)
    bench.channel.queue_declare(bench.name, arguments=arguments)
