"""Test what a client sees of its consumers, their prefetch and basic.get."""

from __future__ import annotations

import urllib.error
from typing import Any
from urllib.parse import quote

import pytest
from pamqp.commands import Basic, Queue

from tests.support.brokers import Api
from tests.support.proving import proving
from tests.support.raw_client import RawClient, declare, delivered, got, is_empty, method, publish
from tests.support.real_broker import RealBroker, wait_until


@pytest.mark.row("A6.1", "A6.14")
def test_a_consumer_gets_a_tag_and_deliveries_their_fields(client: RawClient, name: str) -> None:
    declare(client, name)
    tag = client.ask(1, Basic.Consume(queue=name, no_local=True), Basic.ConsumeOk).consumer_tag
    assert tag.startswith("amq.ctag-")
    client.send(
        publish(1, "", name, b"1")
        + publish(1, "amq.direct", "none", b"")
        + publish(1, "", name, b"2")
    )
    for number in (1, 2):
        said, content = delivered(client)
        assert (said.consumer_tag, said.delivery_tag, said.redelivered) == (tag, number, False)
        assert (said.exchange, said.routing_key, content) == ("", name, str(number).encode())


@pytest.mark.row("A6.1")
def test_a_tag_is_used_once(client: RawClient, name: str) -> None:
    declare(client, name)
    client.ask(1, Basic.Consume(queue=name, consumer_tag="t"), Basic.ConsumeOk)
    client.ask(2, Basic.Consume(queue=name, consumer_tag="t"), Basic.ConsumeOk)
    client.send(method(1, Basic.Consume(queue=name, consumer_tag="t")))
    client.expect_close(530, "NOT_ALLOWED - attempt to reuse consumer tag 't'")


@pytest.mark.parametrize(
    "verb", [proving("A6.1", "consume", Basic.Consume), proving("A6.9", "get", Basic.Get)]
)
def test_a_queue_that_is_not_there_is_not_consumed(client: RawClient, name: str, verb: Any) -> None:
    client.send(method(1, verb(queue=name)))
    client.expect_channel_close(1, 404, f"NOT_FOUND - no queue '{name}' in vhost '/'")
    client.send(method(2, verb(queue="")))
    client.expect_channel_close(2, 404, "NOT_FOUND - no previously declared queue")


@pytest.mark.row("A6.2")
@pytest.mark.parametrize("first_is_exclusive", [True, False])
def test_an_exclusive_consumer_is_alone(
    client: RawClient, name: str, first_is_exclusive: bool
) -> None:
    declare(client, name)
    client.ask(1, Basic.Consume(queue=name, exclusive=first_is_exclusive), Basic.ConsumeOk)
    client.send(method(2, Basic.Consume(queue=name, exclusive=not first_is_exclusive)))
    client.expect_channel_close(
        2, 403, f"ACCESS_REFUSED - queue '{name}' in vhost '/' in exclusive use"
    )


@pytest.mark.row("A6.3")
def test_higher_priorities_are_served_first_and_equals_in_turn(
    client: RawClient, name: str
) -> None:
    declare(client, name)
    client.ask(1, Basic.Qos(prefetch_count=2), Basic.QosOk)
    for tag, priority in (("low", -1), ("high-1", 5), ("high-2", 5)):
        consume = Basic.Consume(queue=name, consumer_tag=tag, arguments={"x-priority": priority})
        client.ask(1, consume, Basic.ConsumeOk)
    tags = []
    for number in range(6):
        client.send(publish(2, "", name, str(number).encode()))
        tags.append(delivered(client)[0].consumer_tag)
    assert sorted(tags[:4]) == ["high-1", "high-1", "high-2", "high-2"] and tags[0] != tags[1]
    assert tags[4:] == ["low", "low"]


@pytest.mark.row("A6.4")
@pytest.mark.parametrize("hears_cancels", [True, False])
def test_a_consumer_hears_that_its_queue_is_gone_if_its_client_can(
    broker: RealBroker, other: RawClient, name: str, hears_cancels: bool
) -> None:
    with RawClient(broker.port) as client:
        client.shake_hands(channels=1, hears_cancels=hears_cancels)
        declare(client, name, exclusive=False)
        client.ask(1, Basic.Consume(queue=name, consumer_tag="t"), Basic.ConsumeOk)
        other.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)
        if hears_cancels:
            told = client.expect(Basic.Cancel)
            assert (told.consumer_tag, told.nowait) == ("t", True)
        declare(client, name)  # a cancel would come before this answer or the next
        client.ask(1, Basic.Consume(queue=name, consumer_tag="t"), Basic.ConsumeOk)


@pytest.mark.row("A6.4")
def test_who_deletes_a_queue_it_consumes_hears_of_the_deletion_first(
    client: RawClient, name: str
) -> None:
    for number in range(20):
        queue = f"{name}-{number}"
        declare(client, queue)
        client.ask(1, Basic.Consume(queue=queue, consumer_tag="t"), Basic.ConsumeOk)
        client.ask(1, Queue.Delete(queue=queue), Queue.DeleteOk)
        assert client.expect(Basic.Cancel).consumer_tag == "t"


@pytest.mark.row("A6.6")
def test_a_single_consumer_is_active_and_the_next_takes_over(client: RawClient, name: str) -> None:
    declare(client, name, arguments={"x-single-active-consumer": True})
    for tag in ("a", "b"):
        client.ask(1, Basic.Consume(queue=name, consumer_tag=tag, no_ack=True), Basic.ConsumeOk)
    client.send(publish(2, "", name, b"x") * 3)
    assert [delivered(client)[0].consumer_tag for _ in range(3)] == ["a", "a", "a"]
    client.ask(1, Basic.Cancel(consumer_tag="a"), Basic.CancelOk)
    client.send(publish(2, "", name, b"x"))
    assert delivered(client)[0].consumer_tag == "b"


@pytest.mark.row("A6.6", "G4.5")
def test_the_api_says_which_consumer_is_active(client: RawClient, api: Api, name: str) -> None:
    for queue, arguments in ((name, {"x-single-active-consumer": True}), (f"{name}-all", {})):
        declare(client, queue, arguments=arguments)
        for tag in ("a", "b"):
            tag = f"{queue} {tag}"
            client.ask(1, Basic.Consume(queue=queue, consumer_tag=tag), Basic.ConsumeOk)
    found: dict[str, tuple[bool, str]] = {}

    def are_listed() -> bool:
        rows = [row for row in api("/api/consumers/%2F") if row["consumer_tag"].startswith(name)]
        found.update((row["consumer_tag"], (row["active"], row["activity_status"])) for row in rows)
        return len(found) == 4

    wait_until(are_listed, "the consumers are not listed")
    assert found == {
        f"{name} a": (True, "single_active"),
        f"{name} b": (False, "waiting"),
        f"{name}-all a": (True, "up"),
        f"{name}-all b": (True, "up"),
    }


@pytest.mark.row("A6.15")
def test_a_message_for_a_waiting_consumer_is_never_ready_in_between(
    client: RawClient, name: str
) -> None:
    """Not even expired: it is handed over at once, be its time ever so short."""
    declare(client, name, arguments={"x-message-ttl": 0})
    client.ask(1, Basic.Consume(queue=name, no_ack=True), Basic.ConsumeOk)
    for number in range(50):
        client.send(publish(2, "", name, bytes([number])))
        assert delivered(client)[1] == bytes([number])
    assert (
        client.ask(2, Queue.Declare(queue=name, passive=True), Queue.DeclareOk).message_count == 0
    )


@pytest.mark.row("A6.8")
def test_what_is_unacknowledged_stays_so_after_a_cancel(client: RawClient, name: str) -> None:
    declare(client, name)
    client.ask(1, Basic.Consume(queue=name, consumer_tag="t"), Basic.ConsumeOk)
    client.send(publish(1, "", name, b"x"))
    delivered(client)
    client.ask(1, Basic.Cancel(consumer_tag="t"), Basic.CancelOk)
    client.ask(1, Basic.Cancel(consumer_tag="unknown"), Basic.CancelOk)
    assert is_empty(client, name)
    client.send(method(1, Basic.Nack(1)))
    assert got(client, name) == b"x"


@pytest.mark.row("A6.9")
def test_get_counts_what_is_left(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(1, "", name, b"1") + publish(1, "", name, b"2"))
    said = client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    assert (said.message_count, said.delivery_tag, said.redelivered) == (1, 1, False)
    assert (said.exchange, said.routing_key) == ("", name)


@pytest.mark.row("A6.12")
@pytest.mark.parametrize("whole_channel", [True, False])
def test_prefetch_bounds_what_is_unacknowledged(
    client: RawClient, name: str, whole_channel: bool
) -> None:
    declare(client, name)
    client.ask(1, Basic.Qos(prefetch_count=2, global_=whole_channel), Basic.QosOk)
    for tag in ("a", "b"):
        client.ask(1, Basic.Consume(queue=name, consumer_tag=tag), Basic.ConsumeOk)
    client.send(publish(2, "", name, b"x") * 10)
    for _ in range(2 if whole_channel else 4):
        delivered(client)
    assert client.ask(
        2, Queue.Declare(queue=name, passive=True), Queue.DeclareOk
    ).message_count == (8 if whole_channel else 6)


@pytest.mark.row("A6.12")
def test_a_prefetch_in_bytes_is_not_implemented(client: RawClient) -> None:
    client.send(method(1, Basic.Qos(prefetch_size=9)))
    client.expect_close(540, "NOT_IMPLEMENTED - prefetch_size!=0 (9)")


@pytest.mark.row("A6.3")
def test_what_a_consumer_asks_for_has_a_type(client: RawClient, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    wrong = {"x-priority": ("high", '"expected integer, got longstr"'),
             "x-cancel-on-ha-failover": (1, "{unacceptable_type,signedint}")}  # fmt: skip
    for channel, (argument, (value, said)) in enumerate(wrong.items(), 1):
        client.send(method(channel, Basic.Consume(queue=name, arguments={argument: value})))
        text = (
            f"PRECONDITION_FAILED - invalid arg '{argument}' for queue '{name}' in vhost '/': "
            f"{said}"
        )
        client.expect_channel_close(channel, 406, text)


@pytest.mark.row("A6.1")
def test_large_messages_come_unharmed_to_who_takes_them_slowly(
    broker: RealBroker, client: RawClient, other: RawClient, name: str
) -> None:
    """Messages of others go through the same buffers.

    A slow client must not get bytes of the messages that come next.
    """
    sizes = [1 << 20, 20_000, 300_000, 1 << 20, 40_000, 700_000, 1 << 20, 16_400] * 3
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    with RawClient(broker.port, receive_bytes=1 << 12).shake_hands() as slow:
        for queue, consumer in ((f"{name}-slow", slow), (f"{name}-fast", other)):
            declare(client, queue, exclusive=False, auto_delete=True)
            consumer.ask(
                1, Basic.Consume(queue=queue, no_ack=True, consumer_tag="c"), Basic.ConsumeOk
            )
        for content in bodies:
            client.send(
                publish(1, "", f"{name}-slow", content)
                + publish(1, "", f"{name}-fast", content[::-1])
            )
            assert delivered(other)[1] == content
        assert [delivered(slow)[1] for _ in bodies] == bodies


@pytest.mark.row("G2.6")
def test_a_cancelled_consumer_is_told_and_its_client_goes_on(
    client: RawClient, api: Api, name: str
) -> None:
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)
    client.ask(1, Basic.Consume(queue=name, consumer_tag="worker/1"), Basic.ConsumeOk)
    client.send(publish(1, "", name, b"first"))
    tag = client.expect(Basic.Deliver).delivery_tag
    found: list[dict[str, Any]] = []

    def is_listed() -> bool:
        found[:] = [row for row in api("/api/consumers/%2F") if row["queue"]["name"] == name]
        return bool(found)

    wait_until(is_listed, "the consumer is not listed")
    (consumer,) = found
    connection = quote(consumer["channel_details"]["connection_name"], safe="")
    path = f"/api/consumers/%2F/{connection}/1/{quote('worker/1', safe='')}"
    api(path, method="DELETE")
    assert client.expect(Basic.Cancel).consumer_tag == "worker/1"
    client.send(publish(1, "", name, b"second"))
    client.send(method(1, Basic.Ack(tag)))  # what it was given is still its channel's
    counts = client.ask(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk)
    assert (counts.message_count, counts.consumer_count) == (1, 0)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        api(path, method="DELETE")
