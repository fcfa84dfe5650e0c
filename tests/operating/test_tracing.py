"""Publishes and deliveries of a traced vhost are copied, with body and properties."""

from __future__ import annotations

import datetime
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pika
import pika.spec
import pytest
from pamqp.commands import Basic, Queue

from tests.support.brokers import Api
from tests.support.raw_client import RawClient, content_header, method, raw_frame
from tests.support.real_broker import RealBroker

Channel = pika.adapters.blocking_connection.BlockingChannel
WHEN = datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@pytest.fixture
def vhost(api: Api, name: str) -> Iterator[str]:
    api(f"/api/vhosts/{name}", method="PUT", body={"description": "d"})
    yield name
    api(f"/api/vhosts/{name}", method="DELETE")


@pytest.fixture
def channel(broker: RealBroker, vhost: str) -> Iterator[Channel]:
    parameters = pika.URLParameters(broker.url)
    parameters.virtual_host = vhost
    with pika.BlockingConnection(parameters) as connection:
        yield connection.channel()


def trace(api: Api, vhost: str, on: bool) -> None:
    api(f"/api/vhosts/{vhost}", method="PUT", body={"description": "d", "tracing": on})
    assert api(f"/api/vhosts/{vhost}")["tracing"] is on


def copies(channel: Channel, queue: str, count: int) -> list[tuple[str, dict[str, Any], bytes]]:
    found: list[tuple[str, dict[str, Any], bytes]] = []
    for given, properties, body in channel.consume(queue, auto_ack=True, inactivity_timeout=60):
        assert given is not None, f"{len(found)} copies of {count}"
        found.append((given.routing_key, properties.headers, body))
        if len(found) == count:
            break
    channel.cancel()
    return found


@pytest.mark.row("I19", "N22", "B1.1")
def test_what_is_published_and_delivered_is_copied(api: Api, channel: Channel, vhost: str) -> None:
    for queue, key in (("published", "publish.#"), ("delivered", "deliver.work")):
        channel.queue_declare(queue)
        channel.queue_bind(queue, "amq.rabbitmq.trace", key)
    channel.queue_declare("work")
    channel.queue_bind("work", "amq.topic", "a.*")
    channel.confirm_delivery()
    channel.basic_publish("amq.topic", "a.b", b"not copied")
    trace(api, vhost, True)
    props = pika.BasicProperties(
        headers={"CC": ["a.c"], "n": 1}, content_type="text/plain", delivery_mode=2
    )
    props.timestamp = int(WHEN.timestamp())
    channel.basic_publish("amq.topic", "a.b", b"one", props)
    channel.basic_publish("", "work", b"two")
    channel.basic_publish("amq.topic", "nowhere", b"three")
    got = [channel.basic_get("work", auto_ack=True) for _ in range(3)]
    assert [body for _, _, body in got] == [b"not copied", b"one", b"two"]
    published = copies(channel, "published", 3)
    assert [(key, body) for key, _, body in published] == [
        ("publish.amq.topic", b"one"),
        ("publish.", b"two"),
        ("publish.amq.topic", b"three"),
    ]
    said = published[0][1]
    assert (said["exchange_name"], said["routing_keys"]) == ("amq.topic", ["a.b", "a.c"])
    assert (said["vhost"], said["user"], said["channel"]) == (vhost, "guest", 1)
    assert (said["routed_queues"], published[2][1]["routed_queues"]) == (["work"], [])
    assert said["connection"] in [row["name"] for row in api("/api/connections")]
    properties = said["properties"]
    assert properties.pop("timestamp").replace(tzinfo=datetime.UTC) == WHEN
    assert properties == {
        "content_type": "text/plain",
        "delivery_mode": 2,
        "headers": {"CC": ["a.c"], "n": 1},
    }
    delivered = copies(channel, "delivered", 3)
    assert [(key, said["redelivered"], body) for key, said, body in delivered] == [
        ("deliver.work", 0, b"not copied"),
        ("deliver.work", 0, b"one"),
        ("deliver.work", 0, b"two"),
    ]
    trace(api, vhost, False)
    channel.basic_publish("amq.topic", "a.b", b"four")
    assert channel.basic_get("published")[0] is None


@pytest.mark.row("I19", "N22")
def test_confirms_transactions_and_consumers_go_on_while_traced(
    api: Api, channel: Channel, vhost: str
) -> None:
    channel.queue_declare("all")
    channel.queue_bind("all", "amq.rabbitmq.trace", "#")
    channel.queue_declare("work")
    trace(api, vhost, True)
    other = channel.connection.channel()
    other.tx_select()
    other.basic_publish("", "work", b"tx")
    other.tx_commit()
    other.basic_publish("", "work", b"rolled back")
    other.tx_rollback()
    channel.confirm_delivery()
    for number in range(50):
        channel.basic_publish("", "work", b"%d" % number, mandatory=True)
    seen = []
    for given, _, body in channel.consume("work", inactivity_timeout=60):
        assert given is not None
        channel.basic_ack(given.delivery_tag)
        seen.append(body)
        if len(seen) == 51:
            break
    channel.cancel()
    assert seen == [b"tx", *(b"%d" % number for number in range(50))]
    found = copies(channel, "all", 102)
    for kind in ("publish.", "deliver.work"):
        assert [body for key, _, body in found if key == kind] == seen


@pytest.mark.row("N22")
def test_headers_that_are_none_do_not_stop_it(
    broker: RealBroker, api: Api, channel: Channel, vhost: str
) -> None:
    """A plain publish is stored without a look into its headers.

    Tracing reads them, and passes over those that it cannot read.
    """
    channel.queue_declare("copies")
    channel.queue_bind("copies", "amq.rabbitmq.trace", "deliver.work")
    channel.queue_declare("work")
    broken = b"\x20\x00" + (4).to_bytes(4, "big") + b"\x01aZ?"  # a table whose value is of no type
    with RawClient(broker.port) as client:
        client.shake_hands(vhost=vhost)
        client.send(
            method(1, Basic.Publish(routing_key="work")) + content_header(1, 1, props=broken)
        )
        client.send(raw_frame(3, 1, b"x"))
        client.ask(1, Queue.Declare(queue="work", passive=True), Queue.DeclareOk)
        trace(api, vhost, True)
        client.ask(1, Basic.Get(queue="work", no_ack=True), Basic.GetOk)
        client.read_frame(), client.read_frame()  # pamqp cannot read them either
        ((key, said, body),) = copies(channel, "copies", 1)
        assert (key, said["properties"], body) == ("deliver.work", {}, b"x")


def cluster_names(broker: RealBroker, api: Api) -> dict[str, str]:
    """Return the name of the cluster from each place that shows it."""
    with urllib.request.urlopen(f"http://{broker.metrics}/metrics", timeout=60) as answer:
        in_metrics = re.findall(
            r'rabbitmq_identity_info{.*rabbitmq_cluster="([^"]*)"', answer.read().decode()
        )
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        in_start = connection._impl.server_properties["cluster_name"]
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(queue, "amq.rabbitmq.trace", "publish.#")
        trace(api, "%2F", True)
        channel.basic_publish("amq.topic", "k", b"x")
        [(_, headers, _)] = copies(channel, queue, 1)
        trace(api, "%2F", False)
    return {
        "connection.start": in_start,
        "trace": headers["node"],
        "metrics": in_metrics[0],
        "/api/cluster-name": api("/api/cluster-name")["name"],
        "/api/overview": api("/api/overview")["cluster_name"],
    }


def test_the_cluster_has_one_name_everywhere_and_connections_hear_the_new_one(
    broker: RealBroker, api: Api
) -> None:
    default = f"shardmq@{socket.gethostname()}"
    api("/api/cluster-name", method="PUT", body={"name": "orders"})
    try:
        assert set(cluster_names(broker, api).values()) == {"orders"}
    finally:
        api("/api/global-parameters/cluster_name", method="DELETE")
    assert set(cluster_names(broker, api).values()) == {default}
