"""Queues, channels, connections and vhosts tell who is slow, with the figures of RabbitMQ.

The same steps were played to RabbitMQ 3.10.8, whose answers are the expected numbers.
"""

from __future__ import annotations

import json
import time
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.exceptions import UnroutableError

from shardmq.broker.controller.management.metrics.message_stats import CHANNEL_COUNTERS, vhost_stats
from shardmq.broker.controller.management.metrics.stats import Stats
from tests.support.real_broker import RealBroker

WITHIN_S = 30.0
STAMPED_S = 1_700_000_000  # the timestamp of the first message
DELIVERED = {"deliver": 4, "deliver_get": 4, "redeliver": 1, "ack": 1}
PUBLISHED = {"publish": 9, "confirm": 9, "return_unroutable": 1, "drop_unroutable": 2}
GOT = {"get": 1, "get_no_ack": 1, "get_empty": 1, "deliver_get": 2}
QUEUE = {
    "messages": 5,
    "messages_ready": 3,
    "messages_unacknowledged": 2,
    "messages_persistent": 3,
    "message_bytes": 65,
    "message_bytes_ready": 42,
    "message_bytes_unacknowledged": 23,
    "message_bytes_persistent": 39,
    "head_message_timestamp": STAMPED_S + 1,
}


class Clients:
    """A connection with channels that publish, consume, get and use a transaction."""

    def __init__(self, broker: RealBroker, name: str, vhost: str = "%2F") -> None:
        self.connection = pika.BlockingConnection(
            pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{broker.port}/{vhost}")
        )
        self.queue, self.other = f"{name}-q", f"{name}-other"
        self.publishing, self.consuming, self.getting, self.transaction = (
            self.connection.channel() for _ in range(4)
        )
        self.publishing.confirm_delivery()
        self.transaction.tx_select()
        for queue in (self.queue, self.other):
            self.publishing.queue_declare(queue, durable=True)

    def publish(self, queue: str, number: int, mode: int) -> None:
        properties = pika.BasicProperties(delivery_mode=mode, timestamp=STAMPED_S + number)
        self.publishing.basic_publish("", queue, b"x" * (10 + number), properties)

    def play(self) -> None:
        for number in range(6):
            self.publish(self.queue, number, 1 + number % 2)
        with pytest.raises(UnroutableError):
            self.publishing.basic_publish("", f"{self.queue}-none", b"x", mandatory=True)
        for exchange in ("", "amq.fanout"):
            self.publishing.basic_publish(exchange, f"{self.queue}-none", b"x")
        tags: list[int] = []
        self.consuming.basic_qos(prefetch_count=2)
        self.consuming.basic_consume(
            self.queue, lambda c, method, p, body: tags.append(method.delivery_tag)
        )
        self._until(lambda: len(tags) == 2)
        self.consuming.basic_ack(tags[0])
        self._until(lambda: len(tags) == 3)
        self.consuming.basic_nack(tags[1], requeue=True)
        self._until(lambda: len(tags) == 4)
        for _ in range(2):
            self.transaction.basic_publish("", self.other, b"y")
        self.transaction.tx_commit()
        rejected = self.getting.basic_get(self.other)[0]
        self.getting.basic_get(self.other, auto_ack=True)
        self.getting.basic_get(self.other)
        self.getting.basic_reject(rejected.delivery_tag, requeue=False)
        self.transaction.basic_publish("", self.other, b"y")

    def _until(self, is_true: Any) -> None:
        until = time.monotonic() + WITHIN_S
        while not is_true():
            assert time.monotonic() < until
            self.connection.process_data_events(0.05)


def counted(stats: dict[str, Any]) -> dict[str, int]:
    """Return the counters of message_stats that are not 0; each must have a rate."""
    names = {name for name in stats if not name.endswith("_details")}
    assert all(stats[f"{name}_details"]["rate"] >= 0 for name in names)
    return {name: stats[name] for name in names if stats[name]}


def eventually(look: Any, wanted: Any) -> None:
    until = time.monotonic() + WITHIN_S
    while (found := look()) != wanted and time.monotonic() < until:
        time.sleep(0.3)
    assert found == wanted


@pytest.mark.row("G4.2")
def test_a_slow_consumer_shows_in_each_list(broker: RealBroker, api: Any, name: str) -> None:
    api(f"/api/vhosts/{name}", method="PUT", body={})
    clients = Clients(broker, name, name)
    begun = time.time()
    clients.play()

    def queue() -> dict[str, Any]:
        return dict(api(f"/api/queues/{name}/{clients.queue}"))

    # A row has no numbers before its shard was asked.
    eventually(lambda: {key: queue().get(key) for key in QUEUE}, QUEUE)
    time.sleep(max(0.0, begun + 4 - time.time()))
    row = queue()
    assert (row["messages_ram"], row["message_bytes_ram"]) == (0, 0)
    assert 2 <= row["oldest_message_age"] <= time.time() - begun + 2
    assert 0 <= row["consumer_utilisation"] == row["consumer_capacity"] < 0.3, "it waits for acks"
    used = datetime.fromisoformat(row["idle_since"])
    assert used.tzinfo is not None and row["idle_since"].endswith("+00:00")
    assert begun - 1 <= used.timestamp() <= time.time() + 1
    listed = api(f"/api/queues/{name}?sort=oldest_message_age&sort_reverse=true")
    assert [one["name"] for one in listed] == [clients.queue, clients.other]

    found = {one["number"]: one for one in api(f"/api/vhosts/{name}/channels")}
    eventually(
        lambda: [
            counted(one["message_stats"])
            for one in sorted(api(f"/api/vhosts/{name}/channels"), key=lambda one: one["number"])
        ],
        [PUBLISHED, DELIVERED, GOT, {"publish": 2}],
    )
    assert set(found[1]["message_stats"]) == {
        each for said in CHANNEL_COUNTERS for each in (said, f"{said}_details")
    }
    for one in found.values():
        assert begun - 1 <= datetime.fromisoformat(one["idle_since"]).timestamp() <= time.time() + 1
    assert [found[4]["messages_uncommitted"], found[4]["acks_uncommitted"]] == [1, 0]
    (connection,) = api(f"/api/vhosts/{name}/connections")
    assert connection["recv_cnt"] > 10 and connection["send_cnt"] > 10
    assert (connection["send_pend"], connection["reductions"]) == (0, 0)

    totals = PUBLISHED | {"publish": 11} | DELIVERED | GOT | {"deliver_get": 6}
    vhost = api(f"/api/vhosts/{name}")
    assert counted(vhost["message_stats"]) == totals
    octets = vhost["recv_oct"], vhost["send_oct"]
    assert min(octets) > 500 and vhost["recv_oct_details"]["rate"] >= 0
    clients.connection.close()
    after = api(f"/api/vhosts/{name}")
    eventually(lambda: counted(api(f"/api/vhosts/{name}")["message_stats"]), totals)
    assert after["recv_oct"] >= octets[0] and after["send_oct"] >= octets[1]
    api(f"/api/vhosts/{name}", method="DELETE")


@pytest.mark.broker
@pytest.mark.crash
@pytest.mark.row("G4.2")
def test_the_figures_of_a_queue_outlive_its_shard(tmp_path: Path, name: str) -> None:
    broker = RealBroker(tmp_path / "data", shards=1)
    try:
        clients = Clients(broker, name)
        for number in range(3):
            clients.publish(clients.queue, number, 2)
        time.sleep(3)

        def row() -> dict[str, Any]:
            request = urllib.request.Request(f"http://{broker.http}/api/queues/%2F/{clients.queue}")
            request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
            return dict(json.loads(urllib.request.urlopen(request, timeout=60).read()))

        before = row()
        assert before["oldest_message_age"] > 1
        broker.kill("shard")
        until = time.monotonic() + WITHIN_S
        # Numbers of less than a second ago are shown again, also those of the shard that is gone.
        while (after := row()).get("oldest_message_age", 0) <= before["oldest_message_age"] + 1:
            assert time.monotonic() < until
            time.sleep(0.2)
        for key in ("messages_persistent", "message_bytes_persistent", "head_message_timestamp"):
            assert after[key] == before[key], key
        assert after["messages"] == 3
        rates = [
            details["rate"]
            for key, details in after["message_stats"].items()
            if key.endswith("_details")
        ]
        assert all(rate >= 0 for rate in rates)
        clients.connection.close()
    finally:
        broker.clean_up()


def test_a_vhost_whose_counters_fell_has_no_rate() -> None:
    """A front door that was restarted counts from 0."""
    before = Stats(at=10.0, has_all=True, vhosts={"/": {"published": 50, "recv_oct": 1000}})
    stats = Stats(at=20.0, has_all=True, before=before, vhosts={"/": {"published": 20}})
    shown = vhost_stats(stats, "/")
    assert shown["message_stats"]["publish"] == 20 and shown["recv_oct"] == 0
    assert "publish_details" not in shown["message_stats"] and "recv_oct_details" not in shown
    assert shown["message_stats"]["ack_details"] == {"rate": 0.0}
    stats.vhosts["/"] = {"published": 150, "recv_oct": 3000}
    shown = vhost_stats(stats, "/")
    assert shown["message_stats"]["publish_details"] == {"rate": 10.0}
    assert shown["recv_oct_details"] == {"rate": 200.0}
