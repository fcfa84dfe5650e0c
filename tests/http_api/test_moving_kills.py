"""A process is killed while messages are moved by HTTP.

Each message is in at least one of both queues.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections import Counter

import pika
import pytest

from tests.support.brokers import killable_broker
from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.crash
broker = killable_broker

COUNT = 1_500


@pytest.mark.parametrize("kind", ["controller", "front-door", "shard"])
def test_nothing_is_lost_whatever_is_killed_while_messages_are_moved(
    broker: RealBroker, name: str, kind: str
) -> None:
    source, destination = f"{name}-from", f"{name}-to"
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    channel.tx_select()
    for queue in (source, destination):
        channel.queue_declare(queue, durable=True)
    persistent = pika.BasicProperties(delivery_mode=2)
    for number in range(COUNT):
        channel.basic_publish("", source, b"%d" % number, persistent)
    channel.tx_commit()
    connection.close()

    moving = threading.Thread(target=move, args=(broker, source, destination), daemon=True)
    moving.start()
    wait_until(lambda: depth(broker, destination) > 0, "the first to be moved")
    broker.kill(kind)
    moving.join(60)
    wait_until(
        lambda: depth(broker, source) + depth(broker, destination) >= COUNT, "all to be there again"
    )

    found = Counter(taken(broker, source) + taken(broker, destination))
    assert set(found) == {b"%d" % number for number in range(COUNT)}
    assert max(found.values()) <= 2


def move(broker: RealBroker, source: str, destination: str) -> None:
    """To its end, or to what ends it."""
    try:
        call(broker, "POST", f"/api/queues/%2F/{source}/move", {"destination": destination})
    except (OSError, http.client.HTTPException):
        pass


def call(broker: RealBroker, method: str, path: str, body: object = None) -> bytes:
    client = http.client.HTTPConnection(broker.http.replace("0.0.0.0", "127.0.0.1"), timeout=50)
    login = base64.b64encode(b"guest:guest").decode()
    client.request(
        method,
        path,
        None if body is None else json.dumps(body),
        {"Authorization": f"Basic {login}"},
    )
    answer = client.getresponse().read()
    client.close()
    return answer


def depth(broker: RealBroker, queue: str) -> int:
    try:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        count = connection.channel().queue_declare(queue, passive=True).method.message_count
        connection.close()
    except pika.exceptions.AMQPError as error:
        raise OSError("not yet") from error
    return int(count)


def taken(broker: RealBroker, queue: str) -> list[bytes]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel, bodies = connection.channel(), []
    were = -1
    for method, _, body in channel.consume(queue, auto_ack=True, inactivity_timeout=0.5):
        if method is not None:
            bodies.append(body)
        elif len(bodies) == were:
            break
        elif not channel.queue_declare(queue, passive=True).method.message_count:
            were = len(bodies)  # what is left is on its way, if anything
    connection.close()
    return bodies
