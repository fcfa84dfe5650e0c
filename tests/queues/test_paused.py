"""A paused queue takes messages and gives none until it is resumed, also over a restart."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until

QUIET_S = 0.3


def ask(broker: RealBroker, method: str, path: str) -> Any:
    request = urllib.request.Request(f"http://{broker.http}/api/queues/%2F/{path}", method=method)
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")


@pytest.mark.row("G2.1")
@pytest.mark.row("C1.19")
def test_a_paused_queue_gives_nothing_until_it_is_resumed(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare(name, durable=True)
    got: list[bytes] = []
    channel.basic_consume(name, lambda _, __, ___, body: got.append(body), auto_ack=True)
    ask(broker, "PUT", f"{name}/pause")
    ask(broker, "PUT", f"{name}/pause")  # is paused
    channel.basic_publish("", name, b"1")
    connection.process_data_events(QUIET_S)
    assert got == [] and channel.basic_get(name) == (None, None, None)
    assert ask(broker, "GET", name)["state"] == "paused"
    assert channel.queue_declare(name, passive=True).method.message_count == 1
    ask(broker, "PUT", f"{name}/resume")

    def came() -> bool:
        connection.process_data_events(0)
        return got == [b"1"]

    wait_until(came, "the message")
    assert ask(broker, "GET", name)["state"] == "running"


@pytest.mark.row("C1.19")
def test_a_channel_wide_prefetch_is_not_kept_by_a_paused_queue(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.basic_qos(prefetch_count=1, global_qos=True)
    got: list[bytes] = []
    for queue in (name, f"{name}-2"):
        channel.queue_declare(queue)
        channel.basic_consume(queue, lambda _, __, ___, body: got.append(body))
    ask(broker, "PUT", f"{name}/pause")
    channel.basic_publish("", name, b"paused")
    channel.basic_publish("", f"{name}-2", b"running")

    def came() -> bool:
        connection.process_data_events(0)
        return got == [b"running"]

    wait_until(came, "the message of the other queue")


@pytest.mark.broker
@pytest.mark.row("C1.19")
def test_a_paused_queue_stays_so_when_the_broker_starts_anew(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data")
    try:
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.confirm_delivery()
            channel.basic_publish("", "q", b"1", pika.BasicProperties(delivery_mode=2))
        ask(broker, "PUT", "q/pause")
        broker.stop()
        broker.start()
        for shard in (None, 0, 1):
            if shard is not None:
                broker.kill("shard", shard)
            assert ask(broker, "GET", "q")["state"] in ("paused", "down")
            with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
                assert connection.channel().basic_get("q") == (None, None, None)
        ask(broker, "PUT", "q/resume")
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            wait_until(lambda: channel.basic_get("q", auto_ack=True)[2] == b"1", "the message")
        broker.stop()
    finally:
        broker.clean_up()


def test_a_stream_cannot_be_paused(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(broker, "PUT", f"{name}/pause")
    assert refused.value.code == 400


def test_a_queue_that_is_not_there_cannot_be_paused(broker: RealBroker, name: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(broker, "PUT", f"{name}/pause")
    assert refused.value.code == 404
