"""A producer may repeat its messages, and each queue stores each of them once.

It says its place by x-producer-id and x-sequence.
"""

from __future__ import annotations

import json
import time
import urllib.request
import uuid
from typing import Any

import pika
import pika.exceptions
import pytest

from tests.support.real_broker import RealBroker, wait_until


class Bench:
    def __init__(self, broker: RealBroker, name: str) -> None:
        self.broker, self.name = broker, name
        self.open()

    def open(self) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(self.broker.url))
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()

    def publish(
        self, *numbers: int, exchange: str = "", key: str | None = None, **headers: Any
    ) -> None:
        for number in numbers:
            said = {"x-producer-id": self.name, "x-sequence": number, **headers}
            properties = pika.BasicProperties(headers=said, delivery_mode=2)
            self.channel.basic_publish(
                exchange, self.name if key is None else key, b"%d" % number, properties
            )

    def all(self, queue: str | None = None) -> list[int]:
        found: list[int] = []
        while True:
            method, _, body = self.channel.basic_get(queue or self.name, auto_ack=True)
            if method is None:
                return found
            found.append(int(body))


@pytest.fixture
def bench(broker: RealBroker, name: str) -> Bench:
    made = Bench(broker, f"producer-{name}")
    made.channel.queue_declare(made.name, durable=True)
    return made


def test_a_repetition_is_confirmed_and_not_stored(bench: Bench) -> None:
    bench.publish(0, 1, 2, 1, 2, 3, 0, 7, 5, 8)
    assert bench.all() == [0, 1, 2, 3, 7, 8]
    bench.publish(3, 8)
    assert bench.all() == []


def test_each_queue_decides_for_itself(bench: Bench) -> None:
    exchange, other = f"{bench.name}-x", f"{bench.name}-2"
    bench.channel.exchange_declare(exchange, "fanout")
    bench.channel.queue_bind(bench.name, exchange)
    bench.publish(1, 2, exchange=exchange)
    bench.channel.queue_declare(other, durable=True)
    bench.channel.queue_bind(other, exchange)
    bench.publish(2, 3, exchange=exchange)
    assert (bench.all(), bench.all(other)) == ([1, 2, 3], [2, 3])


@pytest.mark.parametrize("how", ["CC", "headers exchange", "transaction"])
def test_whatever_way_it_takes(bench: Bench, how: str) -> None:
    exchange, more = "", {}
    if how == "CC":
        more = {"CC": ["nowhere"]}
    elif how == "headers exchange":
        exchange = f"{bench.name}-h"
        bench.channel.exchange_declare(exchange, "headers")
        bench.channel.queue_bind(bench.name, exchange, "", {"x": 1})
        more = {"x": 1}
    else:
        bench.channel = bench.connection.channel()
        bench.channel.tx_select()
    bench.publish(1, 2, 1, 3, exchange=exchange, **more)
    if how == "transaction":
        bench.channel.tx_commit()
    assert bench.all() == [1, 2, 3]


def test_producers_do_not_know_of_each_other(bench: Bench) -> None:
    for name in ("a", "b", "a", "c"):
        bench.publish(1, **{"x-producer-id": name})
    assert len(bench.all()) == 3


@pytest.mark.parametrize(
    "headers",
    [
        {"x-producer-id": ""},
        {"x-producer-id": 1},
        {"x-producer-id": "p" * 256},
        {"x-sequence": -1},
        {"x-sequence": "1"},
        {"x-sequence": True},
    ],
    ids=str,
)
def test_a_place_that_means_nothing_is_refused(bench: Bench, headers: dict[str, Any]) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        bench.publish(1, **headers)
    assert refused.value.reply_code == 406 and "x-producer-id must be" in refused.value.reply_text


@pytest.mark.parametrize("left_out", ["x-producer-id", "x-sequence"])
def test_with_one_of_the_headers_alone_it_is_a_message_like_others(
    bench: Bench, left_out: str
) -> None:
    for _ in range(2):
        headers = {"x-producer-id": bench.name, "x-sequence": 1}
        del headers[left_out]
        bench.channel.basic_publish("", bench.name, b"2", pika.BasicProperties(headers=headers))
    assert bench.all() == [2, 2]


def test_a_queue_that_was_full_takes_what_it_refused_and_what_came_behind_only_in_order(
    bench: Bench,
) -> None:
    queue = f"{bench.name}-full"
    bench.channel.queue_declare(
        queue, durable=True, arguments={"x-max-length": 2, "x-overflow": "reject-publish"}
    )
    bench.publish(1, 2, key=queue)
    for number in (3, 4):
        with pytest.raises(pika.exceptions.NackError):
            bench.publish(number, key=queue)
    assert bench.all(queue) == [1, 2]
    with pytest.raises(pika.exceptions.NackError):
        bench.publish(4, key=queue)
    bench.publish(2, 3, 4, key=queue)
    assert bench.all(queue) == [3, 4]


def test_dead_letters_are_no_repetitions(bench: Bench) -> None:
    """They come in the order in which messages die."""
    source = f"{bench.name}-source"
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": bench.name}
    bench.channel.queue_declare(source, durable=True, arguments=arguments)
    bench.publish(1, 2, 3, key=source)
    got = [bench.channel.basic_get(source)[0] for _ in range(3)]
    for method in reversed(got):
        bench.channel.basic_reject(method.delivery_tag, requeue=False)
    wait_until(
        lambda: bench.channel.queue_declare(bench.name, passive=True).method.message_count == 3,
        "deaths",
    )
    assert sorted(bench.all()) == [1, 2, 3]


def test_repetitions_are_counted(bench: Bench) -> None:
    bench.publish(1, 1, 1)
    request = urllib.request.Request(f"http://{bench.broker.http}/api/queues/%2F/{bench.name}")
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")

    def counted() -> bool:
        time.sleep(0.2)
        with urllib.request.urlopen(request) as answer:
            return bool(json.load(answer)["message_stats"]["duplicates"] == 2)

    wait_until(counted, "the count")


@pytest.mark.row("D11")
def test_a_stream_has_it_once_too_also_after_its_shard_was_killed(
    broker: RealBroker, bench: Bench
) -> None:
    stream, exchange = f"{bench.name}-s", f"{bench.name}-x"
    bench.channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    bench.channel.exchange_declare(exchange, "fanout", durable=True)
    bench.channel.queue_bind(stream, exchange)
    bench.publish(0, 1, 2, 1, 2, key=stream)
    bench.channel.queue_bind(bench.name, exchange)
    bench.publish(1, 2, 3, exchange=exchange)
    assert read(bench, stream) == [0, 1, 2, 3]
    broker.kill("shard", shown(broker, stream)["shard"])
    bench.connection.close()
    bench.open()
    bench.publish(2, 3, 4, 5, exchange=exchange)
    assert (read(bench, stream), bench.all()) == ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    wait_until(
        lambda: shown(broker, stream)["message_stats"]["duplicates"] == 2,
        "repetitions to be counted",
    )


def shown(broker: RealBroker, queue: str) -> Any:
    request = urllib.request.Request(f"http://{broker.http}/api/queues/%2F/{queue}")
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    return json.load(urllib.request.urlopen(request))


def read(bench: Bench, stream: str) -> list[int]:
    """All of it, up to a message that nobody else sends."""
    end = uuid.uuid4().bytes
    bench.channel.basic_publish("", stream, end)
    channel, found = bench.connection.channel(), []
    channel.basic_qos(prefetch_count=100)
    for _, _, body in channel.consume(stream, arguments={"x-stream-offset": "first"}):
        if body == end:
            break
        found.append(body)
    channel.close()
    return [int(one) for one in found if len(one) != len(end)]
