"""A queue moves to another shard with all it has, while clients use it, and they see no error."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until

MOVED_S = 30.0


def ask(broker: RealBroker, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{broker.http}/api/queues/%2F/{path}", method=method, data=data
    )
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")


def refused(broker: RealBroker, name: str, body: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(broker, "POST", f"{name}/relocation", body)
    assert error.value.code == 400
    return str(json.loads(error.value.read())["reason"])


def begin(broker: RealBroker, name: str) -> int:
    """Begin to move a queue to the other one of two shards; return that shard."""
    to = 1 - int(ask(broker, "GET", name)["shard"])
    ask(broker, "POST", f"{name}/relocation", {"shard": to})
    return to


def has_moved(broker: RealBroker, name: str, to: int) -> bool:
    row = ask(broker, "GET", name)
    return "moving" not in row and row["shard"] == to


def move(broker: RealBroker, name: str) -> None:
    to = begin(broker, name)
    wait_until(lambda: has_moved(broker, name, to), "the queue to have moved", MOVED_S)


def test_messages_and_what_they_have_come_along_in_order(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name, durable=True, arguments={"x-delivery-limit": 20})
    said = [
        pika.BasicProperties(
            delivery_mode=1 + number % 2,
            priority=number % 3,
            headers={"number": number, "nested": {"a": [1, "x"]}},
            message_id=str(number),
            expiration="3600000" if number % 5 == 0 else None,
        )
        for number in range(1500)
    ]
    for number, properties in enumerate(said):
        channel.basic_publish("", name, b"%d" % number * (1 + number % 7), properties)
    for _ in range(3):  # the first message comes back three times
        method, _, _ = channel.basic_get(name)
        channel.basic_nack(method.delivery_tag)
    move(broker, name)
    for number, properties in enumerate(said):
        method, got, body = channel.basic_get(name, auto_ack=True)
        assert body == b"%d" % number * (1 + number % 7)
        assert method.redelivered == (number == 0)
        if number == 0:
            assert got.headers.pop("x-delivery-count") == 3
        assert got == properties
    assert channel.basic_get(name) == (None, None, None)


def test_clients_go_on_while_a_queue_moves_to_and_fro(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_qos(prefetch_count=50)
    channel.queue_declare(name, durable=True)
    got: list[tuple[int, bool, str]] = []
    stop = threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as mine:
            other = mine.channel()
            other.confirm_delivery()
            while not stop.is_set():
                other.basic_publish("", name, b"%d" % published)
                published += 1

    def take(channel: Any, method: Any, _: Any, body: bytes) -> None:
        got.append((int(body), method.redelivered, method.consumer_tag))
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(name, take, consumer_tag="mine")
    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(3):
            to = begin(broker, name)
            until = time.monotonic() + MOVED_S
            while not has_moved(broker, name, to):
                connection.process_data_events(0.02)
                assert time.monotonic() < until
    finally:
        stop.set()
        publisher.join()

    def all_came() -> bool:
        connection.process_data_events(0.05)
        return len({number for number, _, _ in got}) == published

    wait_until(all_came, "all messages")
    assert {tag for _, _, tag in got} == {"mine"}
    fresh = [number for number, redelivered, _ in got if not redelivered]
    assert fresh == sorted(fresh)
    assert len(fresh) == len(set(fresh))


def test_what_cannot_move_is_refused_with_the_reason(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(f"{name}-2")
    assert "shard 7 takes no queues" in refused(broker, f"{name}-2", {"shard": 7})
    assert "no node 'nobody'" in refused(broker, f"{name}-2", {"node": "nobody"})
    assert "either node or shard" in refused(broker, f"{name}-2", {})
