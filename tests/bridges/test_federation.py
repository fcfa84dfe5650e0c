"""Federated queues take messages of upstream queues while their consumers wait, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pika
import pytest

from shardmq.broker.controller.management.responses.schemas import ROWS
from tests.bridges.moving import call, connected, federate, fill, taken, uri
from tests.support.real_broker import RealBroker, wait_until

pytestmark = [pytest.mark.broker]

MANY = 4000
BODIES = [b"%d" % number for number in range(1500)]


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Return the broker that messages come from."""
    other = RealBroker(tmp_path_factory.mktemp("upstream"), shards=1)
    yield other
    other.stop()


@pytest.fixture
def queue(broker: RealBroker, name: str) -> Iterator[str]:
    """Return the name of a durable queue, whose policy and upstream are deleted at the end."""
    call(broker, "PUT", f"queues/%2F/{name}", {"durable": True})
    yield name
    for path in (f"policies/%2F/{name}", f"parameters/federation-upstream/%2F/{name}"):
        call(broker, "DELETE", path)
    call(broker, "DELETE", f"queues/%2F/{name}")


def links(broker: RealBroker, queue: str, vhost: str = "/") -> list[dict[str, Any]]:
    found = call(broker, "GET", f"federation-links/{quote(vhost, safe='')}")[1]
    return [row for row in found if row.get("queue") == queue]


def wait_for(broker: RealBroker, queue: str, vhost: str = "/", **fields: Any) -> dict[str, Any]:
    """Return the only link of a queue when it has these fields."""
    seen: list[dict[str, Any]] = []

    def has_come() -> bool:
        seen[:] = links(broker, queue, vhost)
        return len(seen) == 1 and all(seen[0].get(key) == item for key, item in fields.items())

    try:
        wait_until(has_come, f"{queue}: {fields}")
    except AssertionError:
        raise AssertionError(f"{fields} not in {seen}") from None
    return seen[0]


def ready(broker: RealBroker, queue: str) -> int:
    with connected(broker) as connection:
        declared = connection.channel().queue_declare(queue, passive=True)
        return int(declared.method.message_count)


def entered(broker: RealBroker, vhost: str) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(f"{uri(broker)}/{quote(vhost, safe='')}"))


def publish(broker: RealBroker, queue: str, vhost: str, body: bytes) -> None:
    """Publish a message, and return when it is in its queue."""
    with entered(broker, vhost) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, body)


@contextmanager
def busy(broker: RealBroker, queue: str, vhost: str) -> Iterator[None]:
    """Have a consumer with a prefetch of 1 that holds a message, and acknowledges it at the end."""
    publish(broker, queue, vhost, b"held")
    with entered(broker, vhost) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        method, _, body = next(channel.consume(queue))
        assert body == b"held"
        yield
        channel.basic_ack(method.delivery_tag)
        channel.cancel()


@contextmanager
def looked_at(broker: RealBroker, queue: str) -> Iterator[None]:
    """Wait until the controller has looked which links are to take messages, and again at the end.

    Another queue with an idle consumer shows that: what a link is to do is told of all at once.
    """
    other = f"{queue}-idle"
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare(other, durable=True)
        tag = channel.basic_consume(other, lambda *delivery: None)
        federate(broker, other, uri="amqp:///%2F", queue=f"{other}-source")
        try:
            wait_for(broker, other, is_pulling=True)
            yield
            channel.basic_cancel(tag)
            wait_for(broker, other, is_pulling=False)
        finally:
            for path in (f"policies/%2F/{other}", f"parameters/federation-upstream/%2F/{other}"):
                call(broker, "DELETE", path)
            for name in (other, f"{other}-source"):
                channel.queue_delete(name)


@pytest.mark.row("J11")
@pytest.mark.parametrize("ack_mode", ["on-confirm", "on-publish", "no-ack"])
def test_messages_come_in_order_while_a_consumer_waits_and_stay_upstream_otherwise(
    broker: RealBroker, upstream: RealBroker, queue: str, ack_mode: str
) -> None:
    fill(upstream, queue, BODIES)
    federate(broker, queue, uri=uri(upstream), ack_mode=ack_mode)
    wait_for(broker, queue, status="running", is_pulling=False)
    wait_until(lambda: "local_channel" in links(broker, queue)[0], "the channel is listed")
    [link] = links(broker, queue)
    fields = {field.partition(":")[0] for field in ROWS["FederationLink"].split()}
    own = {"queue", "upstream_queue", "local_connection", "local_channel"}
    assert fields | own == link.keys()
    assert link["local_channel"]["connection_details"]["name"] == link["local_connection"]
    assert link["local_channel"]["number"] == 1
    assert (link["type"], link["upstream"], link["upstream_queue"]) == ("queue", queue, queue)
    assert link["uri"] == f"amqp://127.0.0.1:{upstream.port}", "no secret is shown"
    assert (ready(upstream, queue), ready(broker, queue)) == (len(BODIES), 0)
    found = taken(broker, queue, len(BODIES))
    bodies = [body for _, body in found]
    [after] = links(broker, queue)
    moved = {"message_count": len(BODIES)}
    if ack_mode == "no-ack" and after["timestamp"] != link["timestamp"]:
        # A try that ends loses what was on its way, and nothing else.
        assert bodies == sorted(set(bodies), key=int), after
        moved = {}
    else:
        left = ready(upstream, queue), ready(broker, queue)
        assert bodies == BODIES, (len(bodies), left, link, after)
    properties = found[0][0]
    assert properties.delivery_mode == 2
    assert properties.headers == {
        "x-received-from": [
            {"uri": link["uri"], "queue": queue, "redelivered": False, "visit-count": 1}
        ],
        "x-original-exchange": "",
        "x-original-routing-key": queue,
    }
    wait_for(broker, queue, is_pulling=False, pending=0, **moved)
    fill(upstream, queue, [b"later"])
    with looked_at(broker, queue):
        pass
    assert (ready(upstream, queue), ready(broker, queue)) == (1, 0)
    assert taken(broker, queue, 1)[0][1] == b"later"
    assert ready(upstream, queue) == 0


@pytest.mark.row("J11")
def test_a_consumer_that_is_busy_leaves_most_messages_upstream(
    broker: RealBroker, upstream: RealBroker, queue: str
) -> None:
    fill(upstream, queue, [b"%d" % number for number in range(MANY)])
    federate(broker, queue, uri=uri(upstream), prefetch_count=10)
    with connected(broker) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        method, _, body = next(channel.consume(queue))
        assert body == b"0"
        seen: list[dict[str, Any]] = []

        def has_stopped() -> bool:
            seen[:] = links(broker, queue)
            link = seen[0]
            left = MANY - link["message_count"]
            return bool(left < MANY and not link["is_pulling"] and ready(upstream, queue) == left)

        wait_until(has_stopped, "the link has stopped")
        assert ready(upstream, queue) > MANY / 2
        channel.basic_ack(method.delivery_tag)
        assert next(channel.consume(queue))[2] == b"1"


@pytest.mark.row("J11")
def test_a_consumer_that_holds_all_it_may_does_not_make_a_link_take_messages(
    broker: RealBroker, upstream: RealBroker, queue: str
) -> None:
    with connected(broker) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        channel.basic_publish("", queue, b"here")
        method, _, body = next(channel.consume(queue))
        assert body == b"here"
        fill(upstream, queue, BODIES[:20])
        federate(broker, queue, uri=uri(upstream))
        wait_for(broker, queue, status="running")
        with looked_at(broker, queue):
            [link] = links(broker, queue)
            assert (link["is_pulling"], link["message_count"]) == (False, 0)
        assert ready(upstream, queue) == 20
        channel.basic_ack(method.delivery_tag)
        assert next(channel.consume(queue))[2] == BODIES[0]


@pytest.mark.row("J11")
def test_the_upstream_queue_is_declared_like_the_queue_here(
    broker: RealBroker, upstream: RealBroker, queue: str
) -> None:
    call(broker, "DELETE", f"queues/%2F/{queue}")
    given = {"durable": True, "auto_delete": False, "arguments": {"x-max-length": 7}}
    call(broker, "PUT", f"queues/%2F/{queue}", given)
    federate(broker, queue, uri=uri(upstream), queue=f"{queue}-there")
    wait_for(broker, queue, status="running", upstream_queue=f"{queue}-there")
    made = call(upstream, "GET", f"queues/%2F/{queue}-there")[1]
    assert {key: made[key] for key in given} == given


@pytest.mark.row("J11")
def test_vhosts_that_federate_from_each_other_pass_nothing_to_and_fro_for_nobody(
    broker: RealBroker, queue: str
) -> None:
    ends, vhosts = ("/", quote(queue)), ("/", queue)
    call(broker, "PUT", f"vhosts/{queue}", {})
    try:
        call(broker, "PUT", f"queues/{queue}/{queue}", {"durable": True})
        federate(broker, queue, "/", uri=f"amqp:///{ends[1]}")
        federate(broker, queue, vhosts[1], uri="amqp:///%2F")
        for vhost in vhosts:
            wait_for(broker, queue, vhost, status="running")
        with busy(broker, queue, "/"), busy(broker, queue, vhosts[1]):
            publish(broker, queue, "/", b"stays")
            with looked_at(broker, queue):
                pass
            for vhost in vhosts:
                [link] = links(broker, queue, vhost)
                assert (link["is_pulling"], link["message_count"]) == (False, 0)
            assert taken(broker, queue, 1)[0][1] == b"stays"
        with connected(broker) as connection:
            channel = connection.channel()
            channel.basic_consume(queue, lambda channel, method, properties, body: None)
            wait_for(broker, queue, "/", is_pulling=True)
            own = [(-1, f"federation-link-{queue}")]

            def listed() -> list[tuple[int, str]]:
                found = call(broker, "GET", f"consumers/{ends[1]}")[1]
                return [(each["priority"], each["consumer_tag"]) for each in found]

            wait_until(lambda: listed() == own, "the link is the only consumer in the listing")
            link = call(broker, "GET", f"federation-links/{ends[1]}")[1][0]
            assert link["is_pulling"] is False and link["message_count"] == 0
    finally:
        call(broker, "DELETE", f"vhosts/{queue}")


@pytest.mark.row("J10", "J11", "G2.5")
def test_a_link_that_fails_says_why_is_listed_as_down_and_ends_with_its_policy(
    broker: RealBroker, upstream: RealBroker, queue: str
) -> None:
    federate(broker, queue, uri=f"amqp://guest:pass-word@127.0.0.1:{upstream.port}")
    wait_for(broker, queue, status="error")
    for path in ("federation-links/state/down", "federation-links/%2F/state/down"):
        [row] = [row for row in call(broker, "GET", path)[1] if row.get("queue") == queue]
        assert "403" in row["error"] and "pass-word" not in str(row)
    federate(broker, queue, uri=["amqp://127.0.0.1:1", uri(upstream)])
    running = wait_for(broker, queue, status="running")
    assert running["id"] == row["id"] and running["error"] == ""
    path = f"federation-links/vhost/%2F/{row['id']}/node/restart"
    assert call(broker, "DELETE", path)[0] == 204
    wait_for(broker, queue, status="running")
    assert call(broker, "DELETE", path.replace(row["id"], "none"))[0] == 404
    call(broker, "DELETE", f"parameters/federation-upstream/%2F/{queue}")
    wait_until(lambda: links(broker, queue) == [], "the link is gone")
    assert call(broker, "DELETE", path)[0] == 404
    federate(broker, queue, uri="amqp://", queue=queue)
    assert "the federated queue itself" in wait_for(broker, queue, status="error")["error"]


@pytest.mark.row("J11")
def test_a_virtual_queue_takes_messages_by_their_routing_keys(
    broker: RealBroker, upstream: RealBroker, queue: str
) -> None:
    call(broker, "DELETE", f"queues/%2F/{queue}")
    sharded = {"type": "x-modulus-hash", "durable": True, "arguments": {"x-shards": 3}}
    assert call(broker, "PUT", f"exchanges/%2F/{queue}", sharded)[0] == 201
    bodies = {b"%d" % number for number in range(60)}
    fill(upstream, queue, [])
    with connected(upstream) as there:
        channel = there.channel()
        channel.queue_bind(queue, "amq.topic", f"{queue}.*")
        channel.tx_select()
        for body in bodies:
            channel.basic_publish("amq.topic", f"{queue}.{body.decode()}", body)
        channel.tx_commit()
    federate(broker, queue, uri=uri(upstream))
    wait_for(broker, queue, status="running", is_pulling=False)
    with connected(broker) as connection:
        channel = connection.channel()
        found = {}
        for method, _, body in channel.consume(queue, inactivity_timeout=30):
            assert method is not None, f"{len(found)} came"
            found[body] = method.routing_key
            channel.basic_ack(method.delivery_tag)
            if len(found) == len(bodies):
                break
    assert found == {body: f"{queue}.{body.decode()}" for body in bodies}
    call(broker, "DELETE", f"exchanges/%2F/{queue}")


@pytest.mark.row("J11")
def test_a_queue_that_comes_later_is_federated_and_one_that_goes_is_not(
    broker: RealBroker, upstream: RealBroker, queue: str
) -> None:
    call(broker, "DELETE", f"queues/%2F/{queue}")
    federate(broker, queue, uri=uri(upstream))
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, auto_delete=True)
        wait_for(broker, queue, status="running")
        fill(upstream, f"{queue}-other", [b"a"])
        with connected(upstream) as there:
            there.channel().basic_publish("", queue, b"a", pika.BasicProperties(user_id="guest"))
        _, properties, body = next(channel.consume(queue))
        assert (body, properties.user_id) == (b"a", None)
        channel.queue_delete(queue)
        wait_until(lambda: links(broker, queue) == [], "the link is gone")
