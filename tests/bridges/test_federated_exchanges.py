"""Federated exchanges get the messages of upstream exchanges that their bindings want."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pika
import pytest

from shardmq.broker.controller.management.responses.schemas import MORE, ROWS
from tests.bridges.moving import (
    bind,
    call,
    connected,
    federate_exchange,
    keys_at,
    taken,
    uri,
    wait_for_keys,
)
from tests.support.real_broker import RealBroker, wait_until

pytestmark = [pytest.mark.broker]

MESSAGES = 300


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Return the broker that messages come from."""
    other = RealBroker(tmp_path_factory.mktemp("upstream"), shards=1)
    try:
        made = call(other, "PUT", "cluster-name", {"name": "up"})
        assert made[0] in (201, 204), made
        yield other
    finally:
        other.stop()


@pytest.fixture
def vhosts(broker: RealBroker, name: str) -> Iterator[list[str]]:
    """Return three vhosts of the broker that has the links."""
    made = [f"{name}-{number}" for number in range(3)]
    for vhost in made:
        assert call(broker, "PUT", f"vhosts/{vhost}", {})[0] == 201
    yield made
    for vhost in made:
        call(broker, "DELETE", f"vhosts/{vhost}")


def link_of(broker: RealBroker, vhost: str, exchange: str, **fields: Any) -> dict[str, Any]:
    """Return the link of an exchange when it has these fields."""
    seen: list[dict[str, Any]] = []

    def has_come() -> bool:
        found = call(broker, "GET", f"federation-links/{quote(vhost, safe='')}")[1]
        seen[:] = [row for row in found if row.get("exchange") == exchange]
        return len(seen) == 1 and all(seen[0].get(key) == item for key, item in fields.items())

    try:
        wait_until(has_come, f"{exchange}: {fields}")
    except AssertionError:
        raise AssertionError(f"{fields} not in {seen}") from None
    return seen[0]


def publish(broker: RealBroker, exchange: str, key: str, body: bytes, vhost: str = "/") -> None:
    parameters = pika.URLParameters(f"{uri(broker)}/{quote(vhost, safe='')}")
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        given = pika.BasicProperties(delivery_mode=2)
        channel.basic_publish(exchange, key, body, given)


def bodies_in(broker: RealBroker, vhost: str, queue: str) -> list[bytes]:
    """Take all messages that are in a queue now."""
    parameters = pika.URLParameters(f"{uri(broker)}/{quote(vhost, safe='')}")
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        found = []
        while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
            found.append(got[2])
        return found


def depth(broker: RealBroker, vhost: str, queue: str) -> int:
    parameters = pika.URLParameters(f"{uri(broker)}/{quote(vhost, safe='')}")
    with pika.BlockingConnection(parameters) as connection:
        declared = connection.channel().queue_declare(queue, passive=True)
        return int(declared.method.message_count)


def queued(broker: RealBroker) -> int:
    """Return how many messages the queues of links have, with those that are not acknowledged."""
    rows = call(broker, "GET", "queues/%2F")[1]
    return sum(row["messages"] for row in rows if row["name"].startswith("federation: "))


@pytest.mark.row("J12", "P2")
def test_bindings_go_upstream_and_messages_come_until_the_policy_goes(
    broker: RealBroker, upstream: RealBroker, name: str
) -> None:
    try:
        federate_exchange(broker, "/", name, uri=uri(upstream))
        bind(broker, "/", name, name, "a.*", "b")
        link_of(broker, "/", name, status="running", is_pulling=True)
        wait_until(
            lambda: "local_channel" in link_of(broker, "/", name, status="running"),
            "the channel is listed",
        )
        link = link_of(broker, "/", name, is_pulling=True)
        fields = f"{ROWS['FederationLink']} {MORE['FederationLink']}".split()
        assert {field.partition(":")[0] for field in fields} - {"queue", "upstream_queue"} == (
            link.keys()
        )
        wait_for_keys(upstream, "/", name, {"a.*", "b"})
        with connected(upstream) as there:
            channel = there.channel()
            channel.tx_select()
            for number in range(MESSAGES):
                channel.basic_publish(name, "a.x", b"%d" % number)
                channel.basic_publish(name, "none", b"not wanted")
            channel.tx_commit()
        found = taken(broker, name, MESSAGES)
        assert [body for _, body in found] == [b"%d" % number for number in range(MESSAGES)]
        assert found[0][0].headers == {
            "x-received-from": [
                {"uri": link["uri"], "exchange": name, "redelivered": False, "cluster-name": "up",
                 "vhost": "/"}
            ]
        }  # fmt: skip
        link_of(broker, "/", name, message_count=MESSAGES, pending=0, dropped=0)
        call(broker, "DELETE", f"bindings/%2F/e/{name}/q/{name}/b")
        wait_until(lambda: keys_at(upstream, "/", name) == {"a.*"}, "the binding is gone")
        call(broker, "DELETE", f"policies/%2F/{name}")
        wait_until(lambda: keys_at(upstream, "/", name) == set(), "the link is gone")

        def left() -> list[str]:
            rows = call(upstream, "GET", "queues")[1] + call(upstream, "GET", "exchanges")[1]
            return [row["name"] for row in rows if f"federation: {name}" in row["name"]]

        wait_until(lambda: left() == [], "nothing is left at the upstream")
    finally:
        for path in ("policies", "parameters/federation-upstream", "exchanges", "queues"):
            call(broker, "DELETE", f"{path}/%2F/{name}")


@pytest.mark.row("J12", "P2")
@pytest.mark.parametrize(("size", "max_hops"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 5)])
def test_a_ring_delivers_once_and_as_far_as_max_hops(
    broker: RealBroker, vhosts: list[str], name: str, size: int, max_hops: int
) -> None:
    """Messages go from vhost 0 to 1, perhaps to 2, and back to 0."""
    ring = vhosts[:size]
    for number, vhost in enumerate(ring):
        federate_exchange(broker, vhost, name, uri=f"amqp:///{ring[number - 1]}", max_hops=max_hops)
        bind(broker, vhost, name, "q", f"k.{number}", "all.*")
    for vhost in ring:
        link_of(broker, vhost, name, status="running")
    reach = min(max_hops, size - 1)
    for number, vhost in enumerate(ring):
        downstream = {(number + step) % size for step in range(1, reach + 1)}
        expected = {f"k.{other}" for other in downstream} | {"all.*"}
        wait_for_keys(broker, vhost, name, expected)
    publish(broker, name, "all.x", b"first", ring[0])
    counts = [int(number <= reach) for number in range(size)]
    wait_until(lambda: [depth(broker, vhost, "q") for vhost in ring] == counts, f"{counts} come")
    # Later messages that took the same ways show that no more copies of the first one come.
    publish(broker, name, f"k.{reach}", b"later", ring[0])
    publish(broker, name, "k.0", b"back", ring[-1])
    wait_until(
        lambda: all(depth(broker, vhost, "q") == 2 for vhost in (ring[0], ring[reach])),
        "the later ones come",
    )
    found = [bodies_in(broker, vhost, "q") for vhost in ring]
    assert [each.count(b"first") for each in found] == counts


@pytest.mark.torture
@pytest.mark.row("J12")
def test_messages_wait_upstream_while_the_broker_with_the_link_is_down(
    upstream: RealBroker, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    here = RealBroker(tmp_path_factory.mktemp("down") / "data", shards=1)
    try:
        federate_exchange(here, "/", name, uri=uri(upstream))
        bind(here, "/", name, name, "#")
        link_of(here, "/", name, status="running")
        wait_for_keys(upstream, "/", name, {"#"})
        for is_clean in (False, True):
            if is_clean:
                here.stop()
            else:
                here.kill_all()
            publish(upstream, name, "k", b"%d" % is_clean)
            here.start()
            assert [body for _, body in taken(here, name, 1)] == [b"%d" % is_clean]
            # An ack that the upstream has not read when the link ends lets a message come twice.
            link_of(here, "/", name, pending=0, message_count=1)
            wait_until(lambda: queued(upstream) == 0, "the upstream has read the ack")
    finally:
        here.stop()
        for row in call(upstream, "GET", "queues/%2F")[1]:
            call(upstream, "DELETE", f"queues/%2F/{quote(row['name'], safe='')}")
