"""A vhost of a test's own, by the HTTP API and pika.

A file takes the fixtures that it needs: `api, vhost = vhosts.api, vhosts.vhost`.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.real_broker import RealBroker

EXPORT = Path(__file__).parents[1] / "definitions" / "rabbitmq_definitions.json"
Call = Callable[..., Any]


class Api:
    def __init__(self, broker: RealBroker) -> None:
        self._base = f"http://{broker.http.replace('0.0.0.0', '127.0.0.1')}/api/"

    def __call__(self, method: str, path: str, body: Any = None, user: str = "guest:guest") -> Any:
        """Return the decoded answer of a request. Raises HTTPError when the request fails."""
        headers = {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            raw = answer.read()
            return json.loads(raw) if raw else None

    def refused(
        self, method: str, path: str, body: Any = None, user: str = "guest:guest"
    ) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as error:
            self(method, path, body, user)
        return error.value.code, json.loads(error.value.read())["reason"]


@pytest.fixture
def api(broker: RealBroker) -> Api:
    return Api(broker)


@pytest.fixture
def vhost(api: Api, name: str) -> Iterator[str]:
    api("PUT", f"vhosts/{name}", {})
    yield name
    api("DELETE", f"vhosts/{name}")


@pytest.fixture
def user(api: Api, name: str, vhost: str) -> Iterator[str]:
    """Yield a user who may do everything in the vhost, with their own name as password."""
    api("PUT", f"users/{name}", {"password": name, "tags": "management"})
    api("PUT", f"permissions/{vhost}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    yield name
    api("DELETE", f"users/{name}")


def connect(
    broker: RealBroker, vhost: str, user: str = "guest", password: str = ""
) -> pika.BlockingConnection:
    credentials = pika.PlainCredentials(user, password or user)
    return pika.BlockingConnection(
        pika.ConnectionParameters(broker.host, broker.port, vhost, credentials)
    )


@pytest.fixture
def channel(broker: RealBroker, vhost: str) -> Iterator[BlockingChannel]:
    connection = connect(broker, vhost)
    yield connection.channel()
    if connection.is_open:
        connection.close()


def waiting(channel: BlockingChannel, queue: str) -> int:
    count: int = channel.queue_declare(queue, passive=True).method.message_count
    return count


def publish(channel: BlockingChannel, key: str, count: int, exchange: str = "") -> None:
    channel.confirm_delivery()
    for number in range(count):
        channel.basic_publish(exchange, key, str(number).encode())
