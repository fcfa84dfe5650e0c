"""Test exchanges and queues that let each message pass once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pamqp.commands import Basic, Confirm, Exchange, Queue, Tx

from tests.support.raw_client import RawClient, method, with_properties

ID = "x-deduplication-header"


def exchange(client: RawClient, name: str, **arguments: Any) -> None:
    """With a queue of the same name; channel 1 hears confirms."""
    given = {
        "x-message-deduplication": True,
        **{key.replace("_", "-"): value for key, value in arguments.items()},
    }
    client.ask(
        1,
        Exchange.Declare(exchange=name, exchange_type="fanout", arguments=given),
        Exchange.DeclareOk,
    )
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=name), Queue.BindOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)


def publish(client: RawClient, exchange: str, body: bytes, **headers: Any) -> None:
    """Publish a message and wait for its confirm."""
    client.send(
        with_properties(
            1, exchange, "k", body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
    )
    client.expect(Basic.Ack)


def held(client: RawClient, queue: str) -> list[bytes]:
    found = []
    count = client.ask(1, Queue.Declare(queue=queue, passive=True), Queue.DeclareOk).message_count
    for _ in range(count or 0):
        client.ask(1, Basic.Get(queue=queue, no_ack=True), Basic.GetOk)
        found.append(client.content())
    return found


@pytest.mark.row("B1.13")
def test_the_first_of_each_id_passes_and_all_are_confirmed(client: RawClient, name: str) -> None:
    exchange(client, name)
    for body, id in ((b"1", "a"), (b"2", "a"), (b"3", "b"), (b"4", 1), (b"5", "1"), (b"6", 1),
                     (b"7", "x" * 999),
                     (b"8", "x" * 999), (b"9", "x" * 998 + "y")):  # fmt: skip
        publish(client, name, body, **{ID: id})
    publish(client, name, b"without")
    publish(client, name, b"without")
    assert held(client, name) == [b"1", b"3", b"4", b"5", b"7", b"9", b"without", b"without"]


@pytest.mark.row("B1.13")
def test_only_the_last_ids_are_remembered_first_in_first_out(client: RawClient, name: str) -> None:
    exchange(client, name, x_cache_size=2)
    for id in ("a", "b", "a", "c", "a", "c"):
        publish(client, name, id.encode(), **{ID: id})
    assert held(client, name) == [b"a", b"b", b"c", b"a"]


@pytest.mark.row("B1.13")
def test_ids_are_remembered_for_a_time_of_the_exchange_or_of_the_message(
    client: RawClient, name: str
) -> None:
    exchange(client, name, x_cache_ttl=100)
    publish(client, name, b"short", **{ID: "a"})
    publish(client, name, b"long", **{ID: "b", "x_cache_ttl": 600_000})
    time.sleep(0.2)
    publish(client, name, b"short again", **{ID: "a"})
    publish(client, name, b"long again", **{ID: "b"})
    assert held(client, name) == [b"short", b"long", b"short again"]


@pytest.mark.row("B1.13")
def test_the_header_may_have_another_name(client: RawClient, name: str) -> None:
    exchange(client, name, x_deduplication_header="x-id")
    for body in (b"1", b"2"):
        publish(client, name, body, x_id="a")
        publish(client, name, body, **{ID: "b"})
    assert held(client, name) == [b"1", b"1", b"2"]


@pytest.mark.row("B1.13")
def test_what_a_transaction_takes_back_was_never_there(client: RawClient, name: str) -> None:
    exchange(client, name)
    client.ask(2, Tx.Select(), Tx.SelectOk)
    for end, kind in (
        (Tx.Rollback(), Tx.RollbackOk),
        (Tx.Commit(), Tx.CommitOk),
        (Tx.Commit(), Tx.CommitOk),
    ):
        for _ in range(2):
            client.send(with_properties(2, name, "k", kind.__name__.encode(), headers={ID: "a"}))
        client.ask(2, end, kind)
    assert held(client, name) == [b"CommitOk"]


@pytest.mark.row("B1.13")
def test_what_a_full_queue_refused_may_come_again(client: RawClient, name: str) -> None:
    given = {"x-message-deduplication": True}
    client.ask(
        1,
        Exchange.Declare(exchange=name, exchange_type="fanout", arguments=given),
        Exchange.DeclareOk,
    )
    limits = {"x-max-length": 1, "x-overflow": "reject-publish"}
    client.ask(1, Queue.Declare(queue=name, exclusive=True, arguments=limits), Queue.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=name), Queue.BindOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    publish(client, name, b"full", **{ID: "a"})
    client.send(with_properties(1, name, "k", b"b", headers={ID: "b"}))
    client.expect(Basic.Nack)
    assert held(client, name) == [b"full"]
    publish(client, name, b"b", **{ID: "b"})
    assert held(client, name) == [b"b"]


@pytest.mark.row("B1.13")
@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("x-message-deduplication", "yes", "{unacceptable_type,longstr}"),
        ("x-cache-size", 0, "{value_zero,0}"),
        ("x-cache-size", 1_000_001, "{max_value_exceeded,1000001}"),
        ("x-cache-ttl", "1", '"expected integer, got longstr"'),
        ("x-deduplication-header", 1, "{unacceptable_type,signedint}"),
    ],
)
def test_arguments_must_make_sense(
    client: RawClient, name: str, argument: str, value: Any, said: str
) -> None:
    client.send(
        method(
            1, Exchange.Declare(exchange=name, exchange_type="fanout", arguments={argument: value})
        )
    )
    client.expect_channel_close(
        1,
        406,
        f"PRECONDITION_FAILED - invalid arg '{argument}' for exchange '{name}' in vhost '/': "
        f"{said}",
    )


@pytest.mark.row("C1.12")
def test_a_queue_takes_each_id_once_and_others_take_them_all(client: RawClient, name: str) -> None:
    other = f"{name}-other"
    for queue, arguments in (
        (name, {"x-message-deduplication": True, "x-cache-size": 2}),
        (other, {}),
    ):
        client.ask(
            1, Queue.Declare(queue=queue, exclusive=True, arguments=arguments), Queue.DeclareOk
        )
        client.ask(1, Queue.Bind(queue=queue, exchange="amq.topic", routing_key=name), Queue.BindOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    for id in ("a", "a", "b", "c", "b", "a"):
        client.send(with_properties(1, "amq.topic", name, id.encode(), headers={ID: id}))
        client.expect(Basic.Ack)
    assert held(client, name) == [b"a", b"b", b"c", b"a"]
    assert held(client, other) == [b"a", b"a", b"b", b"c", b"b", b"a"]
    # By the default exchange too, and consumed or not.
    publish(client, "", b"none", **{ID: "a"})
    client.send(with_properties(1, "", name, b"again", headers={ID: "a"}))
    client.expect(Basic.Ack)
    client.send(with_properties(1, "", name, b"new", headers={ID: "d"}))
    client.expect(Basic.Ack)
    assert held(client, name) == [b"new"]


@pytest.mark.row("C1.12")
def test_a_queues_arguments_must_make_sense(client: RawClient, name: str) -> None:
    client.send(method(1, Queue.Declare(queue=name, arguments={"x-cache-size": "big"})))
    said = (
        f"invalid arg 'x-cache-size' for queue '{name}' in vhost '/': \"expected integer, got "
        'longstr"'
    )
    client.expect_channel_close(1, 406, f"PRECONDITION_FAILED - {said}")


@pytest.mark.row("C1.12")
def test_a_spread_over_queues_that_take_each_id_once(client: RawClient, name: str) -> None:
    client.ask(1, Exchange.Declare(exchange=name, exchange_type="x-random"), Exchange.DeclareOk)
    arguments = {"x-message-deduplication": True}
    client.ask(1, Queue.Declare(queue=name, exclusive=True, arguments=arguments), Queue.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=name), Queue.BindOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    publish(client, name, b"1", **{ID: "a"})
    publish(client, name, b"2", **{ID: "a"})
    assert held(client, name) == [b"1"]
