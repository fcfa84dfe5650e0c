"""Test exchanges that keep a message until it is due."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pamqp.commands import Basic, Confirm, Exchange, Queue, Tx

from tests.support.brokers import Api
from tests.support.raw_client import RawClient, method, with_properties
from tests.support.real_broker import RealBroker, wait_until

SOON_MS = 200
A_WHILE_MS = 2000  # longer than what is done meanwhile takes
WITHIN_S = 60.0
NEVER_MS = 10_000_000
NOT_DELIVERED_S = 0.3
EARLY_S = 0.002  # clocks count whole milliseconds


def exchange(client: RawClient, name: str, type: str = "fanout", **arguments: Any) -> None:
    """Declare a delayed exchange of an inner type and a queue, bound by the key k."""
    given = {"x-delayed-type": type, **arguments}
    client.ask(
        1,
        Exchange.Declare(exchange=name, exchange_type="x-delayed-message", arguments=given),
        Exchange.DeclareOk,
    )
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=name, routing_key="k"), Queue.BindOk)


def delayed_by(exchange: str, body: bytes, delay: Any, key: str = "k", **more: Any) -> bytes:
    headers = {**more.pop("headers", {}), "x-delay": delay}
    return with_properties(1, exchange, key, body, headers=headers, **more)


def publish(
    client: RawClient, exchange: str, body: bytes, delay: Any, key: str = "k", **more: Any
) -> None:
    client.send(delayed_by(exchange, body, delay, key, **more))


def wait_for(client: RawClient, queue: str) -> tuple[Basic.GetOk, Basic.Properties, bytes]:
    """Return the next message of the queue, as soon as it is there."""
    give_up = time.monotonic() + WITHIN_S
    while time.monotonic() < give_up:
        client.send(method(1, Basic.Get(queue=queue, no_ack=True)))
        found = client.read()
        assert found is not None
        if isinstance(found[1], Basic.GetOk):
            return found[1], *client.message()
        time.sleep(0.02)
    raise AssertionError(f"nothing came to {queue}")


def is_empty(client: RawClient, queue: str) -> bool:
    return bool(client.ask(1, Basic.Get(queue=queue, no_ack=True), Basic.GetEmpty))


def delayed(api: Api, name: str) -> int:
    """How many wait; -1 as long as that is not known of a new exchange."""
    return int(api(f"/api/exchanges/%2F/{name}").get("messages_delayed", -1))


@pytest.mark.row("B1.10")
def test_messages_come_when_they_are_due_in_order_of_time_and_say_how_long_they_waited(
    client: RawClient, name: str
) -> None:
    exchange(client, name)
    began = time.monotonic()
    said_at_once = (
        (b"late", 3 * SOON_MS),
        (b"soon", SOON_MS),
        (b"text", str(2 * SOON_MS)),
        (b"now", 0),
    )
    client.send(b"".join(delayed_by(name, body, delay) for body, delay in said_at_once))
    for body, delay, said in (
        (b"now", 0, 0),
        (b"soon", SOON_MS, -SOON_MS),
        (b"text", 2 * SOON_MS, "000"),
        (b"late", 3 * SOON_MS, -3 * SOON_MS),
    ):
        _, properties, found = wait_for(client, name)
        assert (found, properties.headers) == (body, {"x-delay": said})
        assert time.monotonic() - began + EARLY_S >= delay / 1000


@pytest.mark.row("B1.10")
@pytest.mark.parametrize("delay", [-1, -(1 << 40), "-5", 0.5])
def test_what_is_not_to_wait_does_not(client: RawClient, name: str, delay: Any) -> None:
    exchange(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    publish(client, name, b"now", delay)
    client.expect(Basic.Ack)
    assert wait_for(client, name)[2] == b"now"


@pytest.mark.row("B1.10")
@pytest.mark.parametrize(
    ("delay", "said"),
    [
        (str((1 << 64) - 1), "{value_too_big,18446744073709551615}"),
        ("9" * 20, "{value_too_big,99999999999999999999}"),
        ("soon", '<<"soon">> is no number of milliseconds'),
        (True, "true is no number of milliseconds"),
        (None, "undefined is no number of milliseconds"),
    ],
)
def test_a_time_that_cannot_be_is_refused_not_fired_early(
    client: RawClient, name: str, delay: Any, said: str
) -> None:
    exchange(client, name)
    publish(client, name, b"never", delay)
    client.expect_channel_close(1, 406, f"PRECONDITION_FAILED - invalid header 'x-delay': {said}")


@pytest.mark.row("B1.10")
@pytest.mark.parametrize(
    "delay", [1 << 32, 100 * 365 * 86_400_000, 1 << 56, (1 << 63) - 1, "18000000000000000000"]
)
def test_a_far_time_is_kept(client: RawClient, api: Api, name: str, delay: int | str) -> None:
    exchange(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    publish(client, name, b"far", delay)
    client.expect(Basic.Ack)
    time.sleep(NOT_DELIVERED_S)
    assert is_empty(client, name)
    wait_until(lambda: delayed(api, name) == 1, "one delayed message is counted", WITHIN_S)


@pytest.mark.row("B1.10")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "Missing required argument 'x-delayed-type'"),
        (
            {"x-delayed-type": "nope"},
            "Invalid argument, 'x-delayed-type' must be an existing exchange type",
        ),
        (
            {"x-delayed-type": "x-delayed-message"},
            "Invalid argument, 'x-delayed-message' can't be used for 'x-delayed-type'",
        ),
    ],
)
def test_it_needs_a_type_to_route_by(
    client: RawClient, name: str, arguments: dict[str, Any], said: str
) -> None:
    client.send(
        method(
            1,
            Exchange.Declare(exchange=name, exchange_type="x-delayed-message", arguments=arguments),
        )
    )
    client.expect_channel_close(1, 406, f"PRECONDITION_FAILED - {said}")


@pytest.mark.row("B1.10")
def test_declared_again_it_must_be_the_same_and_keeps_what_waits(
    client: RawClient, name: str
) -> None:
    exchange(client, name, "topic")
    publish(client, name, b"x", SOON_MS)
    exchange(client, name, "topic")
    assert wait_for(client, name)[2] == b"x"
    arguments = {"x-delayed-type": "direct"}
    client.send(
        method(
            1,
            Exchange.Declare(exchange=name, exchange_type="x-delayed-message", arguments=arguments),
        )
    )
    client.expect_channel_close(
        1,
        406,
        f"PRECONDITION_FAILED - inequivalent arg 'x-delayed-type' for exchange '{name}' in vhost "
        f"'/': received 'direct' but current is 'topic'",
    )


@pytest.mark.row("B1.10")
def test_what_waits_goes_with_its_exchange(client: RawClient, name: str) -> None:
    exchange(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    publish(client, name, b"gone", A_WHILE_MS)
    client.expect(Basic.Ack)
    client.ask(1, Exchange.Delete(exchange=name), Exchange.DeleteOk)
    exchange(client, name)
    publish(client, name, b"new", A_WHILE_MS + 3 * SOON_MS)
    client.expect(Basic.Ack)
    assert wait_for(client, name)[2] == b"new"
    assert is_empty(client, name)


@pytest.mark.row("B1.10")
def test_it_routes_as_its_inner_type_when_the_message_is_due(client: RawClient, name: str) -> None:
    """By bindings that were not there when it was published."""
    types = ("direct", "topic", "headers", "x-consistent-hash")
    for type in types:
        queue, given = f"{name}-{type}", {"x-delayed-type": type}
        declare = Exchange.Declare(
            exchange=queue, exchange_type="x-delayed-message", arguments=given
        )
        client.ask(1, declare, Exchange.DeclareOk)
        client.ask(1, Queue.Declare(queue=queue, exclusive=True), Queue.DeclareOk)
        publish(client, queue, b"early", A_WHILE_MS, "k.1", headers={"colour": "red"})
        publish(client, queue, b"elsewhere", A_WHILE_MS, "l", headers={"colour": "blue"})
    for type in types:
        key = {"topic": "k.#", "x-consistent-hash": "3"}.get(type, "k.1")
        arguments = {"x-match": "all", "colour": "red"} if type == "headers" else {}
        bind = Queue.Bind(
            queue=f"{name}-{type}", exchange=f"{name}-{type}", routing_key=key, arguments=arguments
        )
        client.ask(1, bind, Queue.BindOk)
    for type in types:
        queue = f"{name}-{type}"
        found, properties, body = wait_for(client, queue)
        assert (found.exchange, found.routing_key, body) == (queue, "k.1", b"early")
        assert properties.headers == {"colour": "red", "x-delay": -A_WHILE_MS}
    assert wait_for(client, f"{name}-x-consistent-hash")[2] == b"elsewhere"
    time.sleep(NOT_DELIVERED_S)
    assert all(is_empty(client, f"{name}-{type}") for type in types)


@pytest.mark.row("B1.10")
def test_more_keys_are_kept_for_when_it_is_due_and_bcc_is_seen_by_nobody(
    client: RawClient, name: str
) -> None:
    exchange(client, name, "direct")
    for body, header in ((b"cc", "CC"), (b"bcc", "BCC")):
        publish(client, name, body, SOON_MS, "nowhere", headers={header: ["k"]})
    _, properties, body = wait_for(client, name)
    assert (body, properties.headers) == (b"cc", {"CC": ["k"], "x-delay": -SOON_MS})
    _, properties, body = wait_for(client, name)
    assert (body, properties.headers) == (b"bcc", {"x-delay": -SOON_MS})


@pytest.mark.row("B1.10")
def test_its_own_ttl_begins_when_it_is_due(client: RawClient, name: str) -> None:
    exchange(client, name)
    publish(client, name, b"short", 2 * SOON_MS, expiration=str(SOON_MS // 2))
    publish(client, name, b"long", 2 * SOON_MS, expiration="600000")
    time.sleep(NOT_DELIVERED_S)
    wait_until(
        lambda: wait_for(client, name)[2] == b"long", "the one that lives longer comes", WITHIN_S
    )


@pytest.mark.row("B1.10")
def test_through_other_exchanges_it_waits_once(client: RawClient, name: str) -> None:
    exchange(client, name)
    before, after = f"{name}-before", f"{name}-after"
    client.ask(1, Exchange.Declare(exchange=before, exchange_type="fanout"), Exchange.DeclareOk)
    exchange(client, after)
    client.ask(1, Exchange.Bind(source=before, destination=name), Exchange.BindOk)
    client.ask(1, Exchange.Bind(source=name, destination=after), Exchange.BindOk)
    began = time.monotonic()
    publish(client, before, b"x", SOON_MS)
    assert wait_for(client, name)[2] == b"x"
    assert wait_for(client, after)[0].exchange == before
    assert time.monotonic() - began + EARLY_S >= SOON_MS / 1000


@pytest.mark.row("B1.10")
def test_dead_letters_wait_there_too(client: RawClient, name: str) -> None:
    """The usual way to try again later."""
    exchange(client, name)
    source = f"{name}-source"
    arguments = {"x-dead-letter-exchange": name}
    client.ask(1, Queue.Declare(queue=source, exclusive=True, arguments=arguments), Queue.DeclareOk)
    began = time.monotonic()
    publish(client, "", b"again", SOON_MS, source)
    client.ask(1, Basic.Get(queue=source), Basic.GetOk)
    client.content()
    client.send(method(1, Basic.Reject(delivery_tag=1, requeue=False)))
    _, properties, body = wait_for(client, name)
    assert time.monotonic() - began + EARLY_S >= SOON_MS / 1000
    assert body == b"again"
    assert properties.headers is not None
    assert properties.headers["x-delay"] == -SOON_MS
    assert properties.headers["x-death"][0]["queue"] == source


@pytest.mark.row("B1.10")
def test_a_transaction_delays_when_it_is_committed(client: RawClient, api: Api, name: str) -> None:
    exchange(client, name)
    client.ask(2, Tx.Select(), Tx.SelectOk)
    for end, kind in ((Tx.Rollback(), Tx.RollbackOk), (Tx.Commit(), Tx.CommitOk)):
        client.send(
            with_properties(2, name, "k", kind.__name__.encode(), headers={"x-delay": SOON_MS})
        )
        client.ask(2, end, kind)
    assert wait_for(client, name)[2] == b"CommitOk"
    assert is_empty(client, name)


@pytest.mark.row("B1.10")
def test_mandatory_is_not_asked_of_what_waits(client: RawClient, name: str) -> None:
    """The queues of a message are known when it is due.

    Nobody waits for a return then.
    """
    arguments = {"x-delayed-type": "direct"}
    declare = Exchange.Declare(
        exchange=name, exchange_type="x-delayed-message", arguments=arguments
    )
    client.ask(1, declare, Exchange.DeclareOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    line = struct.pack(">HHH", 60, 40, 0) + bytes([len(name)]) + name.encode() + b"\1k" + b"\1"
    sent = with_properties(1, name, "k", b"x", headers={"x-delay": SOON_MS})
    size = struct.unpack_from(">I", sent, 3)[0]
    client.send(struct.pack(">BHI", 1, 1, len(line)) + line + b"\xce" + sent[8 + size :])
    client.expect(Basic.Ack)


@pytest.mark.row("B1.10")
def test_its_queue_is_nobodys(client: RawClient, api: Api, name: str) -> None:
    exchange(client, name)
    publish(client, name, b"x", NEVER_MS)
    hidden = f"amq.delayed.{name}"
    missing = f"NOT_FOUND - no queue '{hidden}' in vhost '/'"
    reserved = f"ACCESS_REFUSED - queue name '{hidden}' contains reserved prefix 'amq.*'"
    for what, code, said in (
        (Queue.Declare(queue=hidden, passive=True), 404, missing),
        (Queue.Declare(queue=hidden), 403, reserved),
        (Basic.Get(queue=hidden), 404, missing),
        (Basic.Consume(queue=hidden), 404, missing),
        (Queue.Purge(queue=hidden), 404, missing),
        (Queue.Bind(queue=hidden, exchange=name, routing_key="k"), 404, missing),
    ):
        with RawClient(client_port(client)) as each:
            each.shake_hands(channels=1)
            each.send(method(1, what))
            each.expect_channel_close(1, code, said)
    client.ask(1, Queue.Delete(queue=hidden), Queue.DeleteOk)
    wait_until(lambda: delayed(api, name) == 1, "it is counted at the exchange", WITHIN_S)
    assert hidden not in {queue["name"] for queue in api("/api/queues")}
    assert hidden not in {queue["name"] for queue in api("/api/definitions")["queues"]}
    assert hidden not in {binding["destination"] for binding in api("/api/bindings")}
    # Nor does the default exchange send there.
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    publish(client, "", b"y", 0, hidden)
    client.expect(Basic.Ack)
    assert delayed(api, name) == 1


def client_port(client: RawClient) -> int:
    return int(client.sock.getpeername()[1])


@pytest.mark.row("B1.10")
def test_a_queue_with_its_argument_is_a_queue(client: RawClient, name: str) -> None:
    arguments = {"x-delays-for": ""}
    client.ask(1, Queue.Declare(queue=name, exclusive=True, arguments=arguments), Queue.DeclareOk)
    publish(client, "", b"x", NEVER_MS, name)
    assert wait_for(client, name)[2] == b"x"


@pytest.mark.row("B1.10")
def test_an_argument_makes_any_exchange_delay(client: RawClient, name: str) -> None:
    declare = Exchange.Declare(
        exchange=name, exchange_type="topic", arguments={"x-delayed-exchange": True}
    )
    client.ask(1, declare, Exchange.DeclareOk)
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=name, routing_key="#"), Queue.BindOk)
    began = time.monotonic()
    publish(client, name, b"x", SOON_MS)
    assert wait_for(client, name)[2] == b"x"
    assert time.monotonic() - began + EARLY_S >= SOON_MS / 1000


@pytest.fixture
def policy(api: Api, name: str) -> Iterator[Callable[..., None]]:
    path = f"/api/policies/%2F/{name}"

    def put(**definition: Any) -> None:
        body = {"pattern": f"^{name}$", "apply-to": "exchanges", "definition": definition}
        api(path, method="PUT", body=body, headers={"Content-Type": "application/json"})

    yield put
    api(path, method="DELETE")


@pytest.mark.row("B1.10")
def test_a_policy_makes_an_exchange_delay_and_what_waits_stays_without_it(
    client: RawClient, name: str, policy: Callable[..., None]
) -> None:
    client.ask(1, Exchange.Declare(exchange=name, exchange_type="fanout"), Exchange.DeclareOk)
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=name), Queue.BindOk)
    publish(client, name, b"at once", NEVER_MS)
    assert wait_for(client, name)[2] == b"at once"
    policy(**{"delayed-message": True})
    began = time.monotonic()
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    publish(client, name, b"waits", A_WHILE_MS)
    client.expect(Basic.Ack)
    policy(**{"alternate-exchange": "amq.fanout"})
    publish(client, name, b"no more", NEVER_MS)
    client.expect(Basic.Ack)
    assert {wait_for(client, name)[2], wait_for(client, name)[2]} == {b"no more", b"waits"}
    assert time.monotonic() - began + EARLY_S >= A_WHILE_MS / 1000


@pytest.mark.row("B1.10")
def test_it_outlives_kill_and_restart(broker: RealBroker, tmp_path: Any) -> None:
    """No persistent message of a durable exchange is lost or early.

    The time counts from the publish.
    """
    own = RealBroker(tmp_path / "data")
    try:
        with RawClient(own.port) as client:
            client.shake_hands(channels=1)
            durable = Exchange.Declare(
                exchange="x",
                exchange_type="x-delayed-message",
                durable=True,
                arguments={"x-delayed-type": "fanout"},
            )
            client.ask(1, durable, Exchange.DeclareOk)
            client.ask(1, Queue.Declare(queue="q", durable=True), Queue.DeclareOk)
            client.ask(1, Queue.Bind(queue="q", exchange="x"), Queue.BindOk)
            client.ask(1, Confirm.Select(), Confirm.SelectOk)
            began = time.time()
            sent = [b"%d" % i for i in range(50)]
            for body in sent:
                publish(client, "x", body, 6000, delivery_mode=2)
                client.expect(Basic.Ack)
        own.kill_all()
        own.restart()
        own.stop()
        own.start()
        with RawClient(own.port) as client:
            client.shake_hands(channels=1)
            # on a slow machine one is just released at the stop, and comes twice
            found: dict[bytes, None] = {}
            while len(found) < len(sent):
                found[wait_for(client, "q")[2]] = None
            assert time.time() - began >= 6
            assert list(found) == sent
    finally:
        own.clean_up()
