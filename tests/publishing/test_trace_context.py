"""A trace context in the headers is handed on as it came, whichever way a message takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pika
import pytest

from tests.reader.test_http import Http, ipc
from tests.support.brokers import Api
from tests.support.real_broker import RealBroker

Channel = pika.adapters.blocking_connection.BlockingChannel
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
# Strings, as most clients write them, and byte arrays.
CONTEXTS = [
    {"traceparent": PARENT, "tracestate": STATE},
    {"traceparent": PARENT.encode(), "tracestate": STATE.encode()},
]
STREAM = {"x-queue-type": "stream"}


def default(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    channel.queue_declare(name, durable=True)
    return "", name


def alternate(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    channel.exchange_declare(f"{name}-other", "fanout")
    channel.exchange_declare(name, "direct", arguments={"alternate-exchange": f"{name}-other"})
    channel.queue_declare(name)
    channel.queue_bind(name, f"{name}-other")
    return name, "nobody"


def exchange_to_exchange(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    for each, kind in ((f"{name}-1", "topic"), (f"{name}-2", "headers")):
        channel.exchange_declare(each, kind)
    channel.exchange_bind(f"{name}-2", f"{name}-1", "a.#")
    channel.queue_declare(name)
    # Both kinds of headers lead to the queue.
    match = {"x-match": "any", "traceparent": PARENT, "other": 1}
    channel.queue_bind(name, f"{name}-2", arguments=match)
    match = {"x-match": "any", "traceparent": PARENT.encode(), "other": 1}
    channel.queue_bind(name, f"{name}-2", arguments=match)
    return f"{name}-1", "a.b"


def dead_letter(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name}
    channel.queue_declare(f"{name}-ttl", arguments={**letters, "x-message-ttl": 1})
    channel.queue_declare(name)
    return "", f"{name}-ttl"


def delayed(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    arguments = {"x-delayed-type": "fanout"}
    channel.exchange_declare(name, "x-delayed-message", arguments=arguments)
    channel.queue_declare(name)
    channel.queue_bind(name, name)
    return name, ""


def stream_exchange(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    channel.exchange_declare(name, "x-modulus-hash", durable=True, arguments={"x-shards": 2})
    return name, "key"


def stream(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    channel.queue_declare(name, durable=True, arguments=STREAM)
    return "", name


def moved(channel: Channel, api: Api, name: str) -> tuple[str, str]:
    channel.queue_declare(f"{name}-from", durable=True)
    channel.queue_declare(name, durable=True)
    return "", f"{name}-from"


WAYS = [
    default, alternate, exchange_to_exchange, dead_letter, delayed, stream_exchange, stream, moved
]  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS, ids=["strings", "bytes"])
@pytest.mark.parametrize("way", WAYS)
def test_a_context_is_handed_on(
    api: Api,
    connection: pika.BlockingConnection,
    name: str,
    way: Callable[[Channel, Api, str], tuple[str, str]],
    context: dict[str, Any],
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    exchange, key = way(channel, api, name)
    headers = {**context, **({"x-delay": 10} if way is delayed else {})}
    said = pika.BasicProperties(headers=headers, delivery_mode=2)
    channel.basic_publish(exchange, key, b"x", said, mandatory=True)
    if way is moved:
        to = {"destination": name}
        assert api(f"/api/queues/%2F/{name}-from/move", method="POST", body=to)["moved"] == 1
    channel.basic_qos(prefetch_count=10)
    first = {"x-stream-offset": "first"} if way is stream else None
    given, got, _ = next(channel.consume(name, arguments=first, inactivity_timeout=60))
    assert given is not None, "no message"
    channel.basic_ack(given.delivery_tag)
    channel.cancel()
    assert {key: got.headers[key] for key in context} == context


@pytest.mark.parametrize("context", CONTEXTS, ids=["strings", "bytes"])
def test_a_context_goes_through_rows_of_arrow(
    broker: RealBroker, connection: pika.BlockingConnection, name: str, context: dict[str, Any]
) -> None:
    """The source and the sink of Spark have the same rows, so a context goes through them too."""
    pytest.importorskip("pyarrow")
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare(name, durable=True, arguments=STREAM)
    channel.queue_declare(f"{name}-copy", durable=True)
    said = pika.BasicProperties(headers=context, delivery_mode=2)
    channel.basic_publish("", name, b"x", said)
    rows = Http(broker).table(name, columns="value,headers,properties")
    path = f"/exchanges/%2F/amq.default/arrow?routing_key={name}-copy"
    assert Http(broker).call(path, "POST", ipc(rows))[0] == 200
    until = time.monotonic() + 60
    got = channel.basic_get(f"{name}-copy", auto_ack=True)
    while got[0] is None and time.monotonic() < until:
        got = channel.basic_get(f"{name}-copy", auto_ack=True)
    assert got[1].headers == context
