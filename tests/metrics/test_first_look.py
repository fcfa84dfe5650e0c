"""The first question shows the rate of the last seconds, for each kind of object."""

from __future__ import annotations

import threading
import time
from typing import Any

import pika
import pytest

from shardmq.broker.controller.management.metrics.stats_collector import SAMPLE_S
from tests.support.real_broker import RealBroker

PER_S = 40
BODY_BYTES = 1000
ASK = "msg_rates_age=60&msg_rates_incr=1&lengths_age=60&lengths_incr=5"


class Load:
    """A client that publishes at a steady rate."""

    def __init__(self, broker: RealBroker, name: str) -> None:
        self._name = name
        parameters = pika.URLParameters(broker.url)
        parameters.client_properties = {"connection_name": name}
        self._connection = pika.BlockingConnection(parameters)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self._times: list[float] = []

    def __enter__(self) -> Load:
        channel = self._channel = self._connection.channel()
        channel.exchange_declare(self._name)
        channel.queue_declare(self._name)
        channel.queue_bind(self._name, self._name, "key")
        self._thread.start()
        return self

    def _publish(self) -> None:
        while not self._over.is_set():
            due = self._times[0] + len(self._times) / PER_S if self._times else 0.0
            self._connection.process_data_events(max(0.0, due - time.monotonic()))
            self._channel.basic_publish(self._name, "key", b"x" * BODY_BYTES)
            self._times.append(time.monotonic())

    def rate(self, seconds: float) -> float:
        """Return how many messages a second were published lately."""
        since = time.monotonic() - seconds
        return len([at for at in self._times if at >= since]) / seconds

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close()


@pytest.mark.row("G4.2")
def test_the_first_look_shows_the_rate_of_each_object(
    broker: RealBroker, api: Any, name: str
) -> None:
    with Load(broker, name) as load:
        time.sleep(2.5 * SAMPLE_S)  # nobody looks
        queue = api(f"/api/queues/%2F/{name}?{ASK}")
        exchange = api(f"/api/exchanges/%2F/{name}?{ASK}")
        (connection,) = [
            row for row in api("/api/connections") if row["user_provided_name"] == name
        ]
        (channel,) = [
            row
            for row in api("/api/channels")
            if row["connection_details"]["name"] == connection["name"]
        ]
        truth = load.rate(2.5 * SAMPLE_S)
    assert truth > PER_S / 2, "the machine is too slow for this test"
    rates = {
        "queue": queue["message_stats"]["publish_details"]["rate"],
        "depth": queue["messages_details"]["rate"],
        "exchange": exchange["message_stats"]["publish_in_details"]["rate"],
        "channel": channel["message_stats"]["publish_details"]["rate"],
    }
    for what, rate in rates.items():
        assert rate == pytest.approx(truth, rel=0.35), (what, rates)
    octets = connection["recv_oct_details"]["rate"]
    assert 0.65 * truth * BODY_BYTES < octets < 1.8 * truth * BODY_BYTES
    for row in (queue, exchange):
        name = "publish" if row is queue else "publish_in"
        samples = row["message_stats"][f"{name}_details"]["samples"]
        assert len(samples) >= 2, "it was sampled before anybody looked"
        assert samples[0]["sample"] > samples[-1]["sample"]
