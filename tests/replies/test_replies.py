"""Test direct reply-to: a client is answered without a queue that others know."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pamqp import base
from pamqp.commands import Basic, Channel, Confirm, Queue, Tx

from tests.publishing.test_messages import REPLY_TO
from tests.support.brokers import Api
from tests.support.raw_client import RawClient, declare, delivered, method, publish, with_properties
from tests.support.real_broker import RealBroker, wait_until


def ask_for_replies(client: RawClient, channel: int = 1, tag: str = "replies") -> None:
    client.ask(
        channel, Basic.Consume(queue=REPLY_TO, no_ack=True, consumer_tag=tag), Basic.ConsumeOk
    )


def private_name(client: RawClient, server: RawClient, queue: str, channel: int = 1) -> str:
    """Return the reply-to that a server reads when the client has sent amq.rabbitmq.reply-to."""
    client.send(
        with_properties(channel, "", queue, b"question", reply_to=REPLY_TO, correlation_id="1")
    )
    server.ask(1, Basic.Consume(queue=queue, no_ack=True, consumer_tag="c"), Basic.ConsumeOk)
    server.expect(Basic.Deliver)
    properties, content = server.message()
    server.ask(1, Basic.Cancel(consumer_tag="c"), Basic.CancelOk)
    assert (content, properties.correlation_id) == (b"question", "1")
    return str(properties.reply_to)


def named(verb: Any, private: str, channel: int = 1, **more: Any) -> bytes:
    """Return a method that names a private reply queue.

    The name ends with characters that the client library refuses to write itself.
    """
    assert private.endswith("==")
    return method(channel, verb(queue=private.replace("==", "::"), **more)).replace(b"::", b"==")


@pytest.mark.row("A7.1", "A7.3")
def test_a_reply_finds_the_one_who_asked(client: RawClient, other: RawClient, name: str) -> None:
    declare(client, name, exclusive=False)
    ask_for_replies(client)
    private = private_name(client, other, name)
    assert private.startswith(f"{REPLY_TO}.") and len(private) > len(REPLY_TO) + 16
    other.send(named(Queue.Declare, private, passive=True))
    seen = other.expect(Queue.DeclareOk)
    assert (seen.queue, seen.message_count, seen.consumer_count) == (private, 0, 1)
    other.ask(1, Confirm.Select(), Confirm.SelectOk)
    other.send(publish(1, "", private, b"answer", mandatory=True))
    other.expect(Basic.Ack)  # and no return before it
    said, content = delivered(client)
    assert (said.consumer_tag, said.redelivered, said.exchange, content) == (
        "replies",
        False,
        "",
        b"answer",
    )
    client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)


@pytest.mark.row("A7.1", "A7.3")
def test_nobody_is_there_for_a_reply_when_who_asked_has_left(
    client: RawClient, other: RawClient, name: str
) -> None:
    declare(other, name)
    ask_for_replies(other)
    private = private_name(other, other, name)
    other.ask(1, Basic.Cancel(consumer_tag="replies"), Basic.CancelOk)

    def is_gone() -> bool:
        client.send(named(Queue.Declare, private, 2, passive=True))
        read = client.read()
        assert read is not None
        if isinstance(read[1], Queue.DeclareOk):
            return False
        assert isinstance(read[1], Channel.Close)
        assert (read[1].reply_code, read[1].reply_text) == (
            404,
            f"NOT_FOUND - no queue '{private}' in vhost '/'",
        )
        client.send(method(2, Channel.CloseOk()))
        return True

    wait_until(is_gone, "the reply queue to go")
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    client.send(publish(1, "", private, b"late", mandatory=True))
    assert client.expect(Basic.Return).reply_code == 312
    client.expect(Basic.Ack)
    ask_for_replies(other)  # anew, by another name
    assert private_name(other, other, name) != private


@pytest.mark.row("A7.1")
def test_the_name_that_all_share_is_no_queue_but_always_there(client: RawClient) -> None:
    for passive in (True, False):
        said = client.ask(1, Queue.Declare(queue=REPLY_TO, passive=passive), Queue.DeclareOk)
        assert (said.queue, said.message_count, said.consumer_count) == (REPLY_TO, 0, 1)
    client.send(publish(1, "", REPLY_TO, b"x", mandatory=True))
    assert client.expect(Basic.Return).reply_code == 312


@pytest.mark.row("A7.1")
def test_each_channel_has_replies_of_its_own_and_private_names_pass_unchanged(
    client: RawClient, other: RawClient, name: str
) -> None:
    declare(client, name, exclusive=False)
    names = []
    for channel in (1, 2):
        ask_for_replies(client, channel, f"t{channel}")
        names.append(private_name(client, other, name, channel))
    assert names[0] != names[1]
    other.send(with_properties(1, "", name, b"passed on", reply_to=names[1]))
    client.ask(3, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
    assert client.message()[0].reply_to == names[1]
    other.send(publish(1, "", names[1], b"2") + publish(1, "", names[0], b"1"))
    assert {(said.consumer_tag, content)
            for said, content in (delivered(client), delivered(client))} == {
        ("t1", b"1"), ("t2", b"2"),
    }  # fmt: skip
    client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)


CONSUME_REPLIES = Basic.Consume(queue=REPLY_TO, no_ack=True)


@pytest.mark.row("A7.2")
@pytest.mark.parametrize(
    ("asked", "code", "text"),
    [
        pytest.param(Basic.Consume(queue=REPLY_TO), 406,
                     "PRECONDITION_FAILED - reply consumer cannot acknowledge",
                     id="acknowledge"),
        pytest.param(CONSUME_REPLIES, 406, "PRECONDITION_FAILED - reply consumer already set",
                     id="twice"),
        pytest.param(Queue.Bind(queue=REPLY_TO, exchange="amq.direct"), 403,
                     "ACCESS_REFUSED - cannot bind or unbind to a volatile (direct reply-to) queue",
                     id="bind"),
        pytest.param(Queue.Unbind(queue=f"{REPLY_TO}.x", exchange="amq.direct"), 403,
                     "ACCESS_REFUSED - cannot bind or unbind to a volatile (direct reply-to) queue",
                     id="unbind"),
        pytest.param(Queue.Declare(queue=f"{REPLY_TO}.x"), 404,
                     f"NOT_FOUND - no queue '{REPLY_TO}.x' in vhost '/'", id="declare"),
        pytest.param(Basic.Get(queue=f"{REPLY_TO}.x"), 404,
                     f"NOT_FOUND - no queue '{REPLY_TO}.x' in vhost '/'", id="get"),
    ],
)  # fmt: skip
def test_replies_are_consumed_in_one_way_only(
    client: RawClient, asked: base.Frame, code: int, text: str
) -> None:
    ask_for_replies(client)
    client.send(method(1, asked))
    client.expect_channel_close(1, code, text)


@pytest.mark.row("A7.1")
def test_a_reply_queue_is_in_no_listing(client: RawClient, api: Api) -> None:
    ask_for_replies(client)
    for path in ("queues", "bindings", "consumers"):
        assert REPLY_TO not in json.dumps(api(f"/api/{path}"))


@pytest.mark.row("A7.2")
def test_a_reply_queue_is_hidden_from_who_knows_its_name(
    client: RawClient, other: RawClient, name: str
) -> None:
    declare(other, name)
    ask_for_replies(other)
    private = private_name(other, other, name)
    other.send(named(Queue.Delete, private))
    other.expect(Queue.DeleteOk)
    for verb in (Basic.Get, Basic.Consume, Queue.Purge):
        client.send(named(verb, private))
        client.expect_channel_close(1, 404, f"NOT_FOUND - no queue '{private}' in vhost '/'")
        client.ask(1, Channel.Open(), Channel.OpenOk)
    client.send(publish(1, "", private, b"still there"))
    assert delivered(other)[1] == b"still there"


@pytest.mark.row("A7.1")
def test_replies_of_one_publisher_come_in_order_however_slowly_they_are_taken(
    broker: RealBroker, other: RawClient, name: str
) -> None:
    """Some replies go straight to the consumer, some by its queue.

    Replies with more properties go alone.
    """
    with RawClient(broker.port, receive_bytes=1 << 12).shake_hands() as slow:
        declare(other, name)
        other.ask(1, Confirm.Select(), Confirm.SelectOk)
        ask_for_replies(slow)
        slow.send(with_properties(1, "", name, b"question", reply_to=REPLY_TO, correlation_id="1"))
        other.ask(1, Basic.Consume(queue=name, no_ack=True, consumer_tag="c"), Basic.ConsumeOk)
        other.expect(Basic.Deliver)
        private = str(other.message()[0].reply_to)
        for begin, count in ((0, 5000), (5000, 10), (5010, 3000), (8010, 1)):
            other.send(
                b"".join(_numbered(private, number) for number in range(begin, begin + count))
            )
            for number in range(begin, begin + count):
                said, content = delivered(slow)
                assert (int(content[:8]), said.delivery_tag) == (number, number + 1)
        confirmed = 0
        while confirmed < 8011:
            confirmed = other.expect(Basic.Ack).delivery_tag


def _numbered(key: str, number: int) -> bytes:
    content = b"%08d" % number + b"x" * (number % 1000)
    if number % 100 == 50:
        return with_properties(
            1, "", key, content, headers={"x-producer-id": "p", "x-sequence": number}
        )
    if number % 100 == 70:
        return with_properties(
            1, "", key, content, headers={"CC": [], "BCC": ["nowhere"]}, delivery_mode=2
        )
    return publish(1, "", key, content)


@pytest.mark.row("A7.1")
def test_replies_of_a_transaction_come_when_it_is_committed(
    client: RawClient, other: RawClient, name: str
) -> None:
    declare(other, name)
    ask_for_replies(client)
    client.send(with_properties(1, "", name, b"question", reply_to=REPLY_TO, correlation_id="1"))
    other.ask(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
    private = str(other.message()[0].reply_to)
    other.ask(1, Tx.Select(), Tx.SelectOk)
    other.send(publish(1, "", private, b"taken back"))
    other.ask(1, Tx.Rollback(), Tx.RollbackOk)
    other.send(publish(1, "", private, b"a") + publish(1, "", private, b"b"))
    other.ask(1, Tx.Commit(), Tx.CommitOk)
    assert [delivered(client)[1] for _ in range(2)] == [b"a", b"b"]


@pytest.mark.broker
@pytest.mark.row("A7.1")
def test_replies_cross_front_doors_and_outlive_a_shard(tmp_path: Any, name: str) -> None:
    """Of several connections some come to each of two front doors; each answers all the others."""
    broker = RealBroker(tmp_path / "data", front_doors=2, shards=1)
    clients = [RawClient(broker.port).shake_hands() for _ in range(8)]
    try:
        for client in clients:
            ask_for_replies(client)
        names = []
        for at, client in enumerate(clients):
            declare(client, f"{name}-{at}")
            names.append(private_name(client, client, f"{name}-{at}"))
        _answer_all(clients, names)
        broker.kill("shard")
        # answered by the new process: its front door knows of it
        for at, client in enumerate(clients):
            client.ask(1, Queue.Declare(queue=f"{name}-{at}", passive=True), Queue.DeclareOk)
        _answer_all(clients, names)
    finally:
        for client in clients:
            client.sock.close()
        broker.stop()
        broker.clean_up()


def _answer_all(clients: list[RawClient], names: list[str]) -> None:
    for at, client in enumerate(clients):
        client.send(b"".join(publish(1, "", private, str(at).encode()) for private in names))
    for client in clients:
        assert {delivered(client)[1] for _ in clients} == {
            str(at).encode() for at in range(len(clients))
        }
