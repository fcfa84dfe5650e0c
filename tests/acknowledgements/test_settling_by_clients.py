"""Test what a client sees of acks, rejects and basic.recover."""

from __future__ import annotations

import pytest
from pamqp import base
from pamqp.commands import Basic, Queue

from tests.support.brokers import Api
from tests.support.proving import proving
from tests.support.raw_client import RawClient, declare, delivered, got, is_empty, method, publish
from tests.support.real_broker import wait_until


@pytest.mark.parametrize(
    ("settle", "left"),
    [
        proving("A6.10", "one", [Basic.Ack(2)], [b"1", b"3"]),
        proving("A6.10", "multiple", [Basic.Ack(2, multiple=True)], [b"3"]),
        proving("A6.10", "all", [Basic.Ack(0, multiple=True)], []),
        proving(
            "A6.10", "nack without requeue", [Basic.Nack(2, multiple=True, requeue=False)], [b"3"]
        ),
        proving("A6.10", "reject without requeue", [Basic.Reject(3, requeue=False)], [b"1", b"2"]),
        proving(
            "A6.11", "in place", [Basic.Nack(3), Basic.Reject(1), Basic.Nack(2)], [b"1", b"2", b"3"]
        ),
    ],
)
def test_what_is_settled_is_gone_and_the_rest_goes_back_in_order(
    client: RawClient, name: str, settle: list[base.Frame], left: list[bytes]
) -> None:
    declare(client, name)
    client.send(b"".join(publish(1, "", name, body) for body in (b"1", b"2", b"3")))
    for _ in range(3):
        client.ask(2, Basic.Get(queue=name), Basic.GetOk)
    client.send(b"".join(method(2, what) for what in settle))
    client.ask(2, Basic.Recover(requeue=True), Basic.RecoverOk)
    assert [got(client, name) for _ in left] == left
    assert is_empty(client, name)


@pytest.mark.row("A6.10")
@pytest.mark.parametrize(
    "what", [Basic.Ack(7), Basic.Nack(7), Basic.Reject(7), Basic.Ack(7, multiple=True)]
)
def test_an_unknown_tag_ends_the_channel(client: RawClient, what: base.Frame) -> None:
    client.send(method(1, what))
    client.expect_channel_close(1, 406, "PRECONDITION_FAILED - unknown delivery tag 7")


@pytest.mark.row("A6.13")
def test_recover_gives_everything_again_in_order_behind_its_answer(
    client: RawClient, name: str
) -> None:
    declare(client, name)
    client.ask(1, Basic.Consume(queue=name), Basic.ConsumeOk)
    client.send(b"".join(publish(1, "", name, body) for body in (b"1", b"2", b"3")))
    for _ in range(3):
        delivered(client)
    client.ask(1, Basic.Recover(requeue=True), Basic.RecoverOk)
    again = [delivered(client) for _ in range(3)]
    assert [(said.delivery_tag, said.redelivered, content) for said, content in again] == [
        (4, True, b"1"), (5, True, b"2"), (6, True, b"3"),
    ]  # fmt: skip


@pytest.mark.row("A6.13")
def test_what_was_recovered_is_got_by_who_asks_next(client: RawClient, name: str) -> None:
    """A cancel, a recover and a get in one write."""
    declare(client, name)
    client.ask(1, Basic.Consume(queue=name, consumer_tag="t"), Basic.ConsumeOk)
    client.send(publish(1, "", name, b"1") + publish(1, "", name, b"2"))
    for _ in range(2):
        delivered(client)
    client.send(method(1, Basic.Cancel(consumer_tag="t")) + method(1, Basic.Recover(requeue=True)))
    client.send(method(1, Basic.Get(queue=name)))
    client.expect(Basic.CancelOk)
    client.expect(Basic.RecoverOk)
    assert client.expect(Basic.GetOk).redelivered
    assert client.content() == b"1"


@pytest.mark.row("A6.8", "A6.13")
def test_what_an_ack_made_room_for_comes_before_the_cancel_that_follows_it(
    client: RawClient, name: str
) -> None:
    """All in one write: each takes effect in its turn."""
    declare(client, name)
    client.ask(1, Basic.Qos(prefetch_count=2), Basic.QosOk)
    client.send(b"".join(publish(1, "", name, body) for body in (b"1", b"2", b"3", b"4")))
    client.ask(1, Basic.Consume(queue=name, consumer_tag="t"), Basic.ConsumeOk)
    for _ in range(2):
        delivered(client)
    client.send(method(1, Basic.Ack(1)) + method(1, Basic.Cancel(consumer_tag="t")))
    assert delivered(client)[1] == b"3"
    client.expect(Basic.CancelOk)
    client.ask(1, Basic.Recover(requeue=True), Basic.RecoverOk)
    assert [got(client, name) for _ in range(3)] == [b"2", b"3", b"4"]


@pytest.mark.row("A6.13")
def test_recover_without_an_answer_and_recover_to_the_same_consumer(
    client: RawClient, name: str
) -> None:
    declare(client, name)
    client.send(publish(1, "", name, b"x"))
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    client.send(method(1, Basic.RecoverAsync(requeue=True)))
    assert got(client, name) == b"x"
    client.send(method(1, Basic.Recover(requeue=False)))
    client.expect_close(540, "NOT_IMPLEMENTED - requeue=false")


@pytest.mark.row("G2.2")
def test_what_is_not_acknowledged_is_listed_with_who_has_it_and_since_when(
    client: RawClient, other: RawClient, api: Api, name: str
) -> None:
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)
    client.ask(2, Basic.Consume(queue=name, consumer_tag="slow"), Basic.ConsumeOk)
    for number in range(3):
        other.send(publish(1, "", name, bytes([number])))
    tags = [client.expect(Basic.Deliver).delivery_tag for _ in range(3)]
    path = f"/api/queues/%2F/{name}/unacked"
    rows = api(path)
    assert sorted(row["delivery_tag"] for row in rows) == tags == [1, 2, 3]
    assert {(row["channel"], row["consumer_tag"]) for row in rows} == {(2, "slow")}
    assert all(row["channel_name"] == f"{row['connection_name']} (2)" for row in rows)
    assert all(0 <= row["unacked_for"] < 60_000 for row in rows)
    client.send(method(2, Basic.Ack(2)))
    wait_until(lambda: [row["delivery_tag"] for row in api(path)] == [1, 3], "an ack is not seen")
