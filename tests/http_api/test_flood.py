"""A flood of lists and scrapes that nobody reads takes little memory and holds up no short call."""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.real_broker import RealBroker, wait_until

QUEUES = 3_000
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"guest:guest").decode()}
UNREAD_SCRAPES = 380
# Twice what it takes; where each client has an answer of its own it is 180 MiB.
GROWTH_BYTES_MAX = 64 << 20
LEFT_BYTES_MAX = 32 << 20
UNREAD_LISTS = 200
READERS = 30
WARM_UP_S = 3.0
LOOKED_AT_S = 6.0
# It is a tenth of that. Where each list does a slice in each pass of the loop it is over a second.
MEAN_S_MAX = 0.2


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    started = RealBroker(tmp_path_factory.mktemp("flood") / "data", shards=1, forked=False)
    try:
        queue = {"vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
        document = {"queues": [{"name": f"queue-{number:05}", **queue} for number in range(QUEUES)]}
        assert call(started.http, "/api/definitions", "POST", json.dumps(document))[0] == 204
        yield started
        started.stop()
    finally:
        started.clean_up()


def call(
    address: str, path: str, method: str = "GET", body: str | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*parts(address), timeout=60)
    try:
        connection.request(method, path, body, {**LOGIN, "Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def resident_bytes(broker: RealBroker) -> int:
    text = Path(f"/proc/{broker.pid('controller')}/status").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


def values(broker: RealBroker) -> dict[str, float]:
    status, text = call(broker.metrics, "/metrics")
    assert status == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


@contextlib.contextmanager
def unread(address: str, path: str, count: int) -> Iterator[list[socket.socket]]:
    """Yield `count` clients that send a request and read nothing."""
    asking = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {LOGIN['Authorization']}\r\n\r\n"
    ).encode()
    clients = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(parts(address))
            client.sendall(asking)
            clients.append(client)
        yield clients
    finally:
        for client in clients:
            client.close()


def test_unread_scrapes_take_little_memory_and_it_comes_back(broker: RealBroker) -> None:
    before = resident_bytes(broker)
    most = 0
    with unread(broker.metrics, "/metrics/per-object", UNREAD_SCRAPES):
        end = time.monotonic() + 8
        while time.monotonic() < end:
            most = max(most, resident_bytes(broker))
            assert call(broker.http, "/api/whoami")[0] == 200
            time.sleep(0.05)
        told = values(broker)
        assert told["shardmq_http_answers"] <= 128
        assert told["shardmq_http_answer_bytes"] < 4 << 20
        saved = (
            told["shardmq_http_answers_shared_total"] + told["shardmq_http_answers_refused_total"]
        )
        assert saved > UNREAD_SCRAPES / 2
    assert most - before < GROWTH_BYTES_MAX
    wait_until(lambda: resident_bytes(broker) - before < LEFT_BYTES_MAX, "memory to come back")
    assert call(broker.metrics, "/metrics/per-object")[0] == 200


def test_who_does_not_read_is_cut_off_in_bounded_time(broker: RealBroker) -> None:
    before = values(broker)["shardmq_http_answers_unread_total"]
    with unread(broker.http, "/api/queues", 5) as clients:
        wait_until(
            lambda: values(broker)["shardmq_http_answers_unread_total"] - before >= 5,
            "the end of unread ones",
        )
        for client in clients:
            client.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 20):
                    pass
    assert call(broker.http, "/api/queues")[0] == 200


def test_short_calls_and_declares_do_not_wait_for_long_lists(broker: RealBroker) -> None:
    stop, read = threading.Event(), []

    def lists() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                read.append(call(broker.http, "/api/queues")[0])

    threads = [threading.Thread(target=lists, daemon=True) for _ in range(READERS)]
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    looks: dict[str, Callable[[int], Any]] = {
        "whoami": lambda _: call(broker.http, "/api/whoami"),
        "health check": lambda _: call(broker.http, "/api/health/checks/alarms"),
        "declare": lambda number: channel.queue_declare(f"declared-{number}", durable=False),
    }
    took: dict[str, list[float]] = {name: [] for name in looks}
    with unread(broker.http, "/api/queues", UNREAD_LISTS):
        for thread in threads:
            thread.start()
        time.sleep(WARM_UP_S)
        end = time.monotonic() + LOOKED_AT_S
        for number in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
            time.sleep(0.1)
            for name, look in looks.items():
                begun = time.monotonic()
                look(number)
                took[name].append(time.monotonic() - begun)
        stop.set()
    for thread in threads:
        thread.join(60)
    connection.close()
    assert read.count(200) >= READERS, "who reads is answered meanwhile"
    means = {name: statistics.mean(times) for name, times in took.items()}
    assert max(means.values()) <= MEAN_S_MAX, means
