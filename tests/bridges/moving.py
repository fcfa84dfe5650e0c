"""Helpers of the tests of bridges: parameters, queues that are filled and emptied, states."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from base64 import b64encode
from typing import Any
from urllib.parse import quote

import pika

from tests.support.real_broker import PATIENCE_S, RealBroker, wait_until


def call(
    broker: RealBroker, method: str, path: str, body: Any = None, user: str = "guest"
) -> tuple[int, Any]:
    """Call the HTTP API of a broker; return the status and the JSON of the answer."""
    request = urllib.request.Request(
        f"http://{broker.http}/api/{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Basic {b64encode(f'{user}:{user}'.encode()).decode()}"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text = response.read()
            return response.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        text = error.read()
        return error.code, json.loads(text) if text else None


def uri(broker: RealBroker, user: str = "guest") -> str:
    return f"amqp://{user}:{user}@127.0.0.1:{broker.port}"


def set_shovel(broker: RealBroker, name: str, **value: Any) -> None:
    """Set a shovel; `_` in the names of keys stands for `-`."""
    value = {"src-uri": "amqp://", "dest-uri": "amqp://", "reconnect-delay": 0.2} | {
        key.replace("_", "-"): item for key, item in value.items()
    }
    status, said = call(broker, "PUT", f"parameters/shovel/%2F/{quote(name)}", {"value": value})
    assert status in (201, 204), said


def delete_shovel(broker: RealBroker, name: str) -> None:
    call(broker, "DELETE", f"shovels/vhost/%2F/{quote(name)}")


def shovel(broker: RealBroker, name: str) -> dict[str, Any]:
    """Return the status of a shovel, {} if it is gone."""
    status, said = call(broker, "GET", f"shovels/vhost/%2F/{quote(name)}")
    return said if status == 200 else {}


def wait_for_state(broker: RealBroker, name: str, state: str) -> dict[str, Any]:
    wait_until(lambda: shovel(broker, name).get("state") == state, f"{name} {state}")
    return shovel(broker, name)


def wait_for_error(broker: RealBroker, name: str, text: str) -> dict[str, Any]:
    def happened() -> bool:
        return text in shovel(broker, name).get("error", "")

    try:
        wait_until(happened, f"{name}: {text}", 20)
    except AssertionError:
        raise AssertionError(f"{text!r} not in {shovel(broker, name)}") from None
    return shovel(broker, name)


def federate(broker: RealBroker, name: str, vhost: str = "/", /, **value: Any) -> None:
    """Set an upstream and a policy named as their queue; `_` in names of keys stands for `-`."""
    value = {"reconnect-delay": 0.2} | {key.replace("_", "-"): item for key, item in value.items()}
    place = f"{quote(vhost, safe='')}/{quote(name, safe='')}"
    policy = {
        "pattern": f"^{name}$",
        "definition": {"federation-upstream": name},
        "apply-to": "queues",
    }
    for path, body in (
        (f"parameters/federation-upstream/{place}", {"value": value}),
        (f"policies/{place}", policy),
    ):
        status, said = call(broker, "PUT", path, body)
        assert status in (201, 204), said


def federate_exchange(broker: RealBroker, vhost: str, exchange: str, /, **value: Any) -> None:
    """Federate an exchange; `_` in names of keys stands for `-`."""
    value = {"reconnect-delay": 0.2} | {key.replace("_", "-"): item for key, item in value.items()}
    place = f"{quote(vhost, safe='')}/{exchange}"
    policy = {
        "pattern": f"^{exchange}$",
        "definition": {"federation-upstream": exchange},
        "apply-to": "exchanges",
    }
    for path, body in (
        (f"exchanges/{place}", {"type": "topic", "durable": True}),
        (f"parameters/federation-upstream/{place}", {"value": value}),
        (f"policies/{place}", policy),
    ):
        status, said = call(broker, "PUT", path, body)
        assert status in (201, 204), said


def bind(broker: RealBroker, vhost: str, exchange: str, queue: str, *keys: str) -> None:
    """Declare a queue, and bind it to an exchange with these keys."""
    place = quote(vhost, safe="")
    call(broker, "PUT", f"queues/{place}/{queue}", {"durable": True})
    for key in keys:
        body = {"routing_key": key, "arguments": {}}
        status, said = call(broker, "POST", f"bindings/{place}/e/{exchange}/q/{queue}", body)
        assert status == 201, said


def wait_for_keys(broker: RealBroker, vhost: str, exchange: str, keys: set[str]) -> None:
    """Wait until links have bound an exchange with exactly these keys, and publishes follow them.

    The listing shows a binding before the front doors route by it. They follow changes in order, so
    they do when another change is answered.
    """
    wait_until(lambda: keys_at(broker, vhost, exchange) == keys, f"{exchange} is bound with {keys}")
    other = f"queues/{quote(vhost, safe='')}/{exchange}-routed"
    assert call(broker, "PUT", other, {})[0] == 201
    assert call(broker, "DELETE", other)[0] == 204


def keys_at(broker: RealBroker, vhost: str, exchange: str) -> set[str]:
    """Return the keys of the bindings from an exchange to internal ones."""
    place = quote(vhost, safe="")
    found = call(broker, "GET", f"exchanges/{place}/{exchange}/bindings/source")[1]
    rows = found if isinstance(found, list) else []
    return {row["routing_key"] for row in rows if row["destination"].startswith("federation: ")}


def connected(broker: RealBroker, user: str = "guest") -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(uri(broker, user)))


def fill(broker: RealBroker, queue: str, bodies: list[bytes], **properties: Any) -> None:
    """Publish persistent messages to a durable queue, and return when they are on disk."""
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.tx_select()
        given = pika.BasicProperties(delivery_mode=2, **properties)
        for body in bodies:
            channel.basic_publish("", queue, body, given)
        channel.tx_commit()


def taken(
    broker: RealBroker, queue: str, count: int, within_s: float = PATIENCE_S
) -> list[tuple[pika.BasicProperties, bytes]]:
    """Take `count` messages out of a queue, or as many as come in time."""
    found: list[tuple[pika.BasicProperties, bytes]] = []
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        for method, properties, body in channel.consume(queue, inactivity_timeout=within_s):
            if method is None:
                break
            found.append((properties, body))
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                break
    return found
