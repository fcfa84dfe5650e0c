"""Test what clients may declare, bind and delete, and the texts of refusals."""

from __future__ import annotations

import copy
from typing import Any

import pika
import pytest
from pamqp import base
from pamqp.commands import Basic, Channel, Confirm, Connection, Exchange, Queue

from tests.support.brokers import Api
from tests.support.proving import proving
from tests.support.raw_client import RawClient, method, publish
from tests.support.real_broker import RealBroker, wait_until


def make(client: RawClient, name: str) -> None:
    """Declare queues and an exchange by the channels 1 and 3.

    Channel 1 declares a queue with a consumer, an exchange of the same name, a binding by the key
    "k" and a queue "full-...". Channel 3 publishes a message to "full-...".
    """
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.ask(1, Basic.Consume(queue=name), Basic.ConsumeOk)
    client.ask(1, Exchange.Declare(exchange=name, exchange_type="direct"), Exchange.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=name, routing_key="k"), Queue.BindOk)
    client.ask(1, Queue.Declare(queue=f"full-{name}", exclusive=True), Queue.DeclareOk)
    client.ask(3, Confirm.Select(), Confirm.SelectOk)
    client.send(publish(3, "", f"full-{name}", b"x"))
    client.expect(Basic.Ack)


def count(client: RawClient, queue: str, channel: int = 2) -> int:
    answer = client.ask(channel, Queue.Declare(queue=queue, passive=True), Queue.DeclareOk)
    return int(answer.message_count)


SAME = (
    "PRECONDITION_FAILED - inequivalent arg '{}' for {} in vhost '/': received {} but current is {}"
)
INVALID = "PRECONDITION_FAILED - invalid arg '{}' for queue 'new-NAME' in vhost '/': {}"
RESERVED = "ACCESS_REFUSED - {} name 'amq.x' contains reserved prefix 'amq.*'"
ON_DEFAULT = "ACCESS_REFUSED - operation not permitted on the default exchange"
DIRECT = "exchange 'NAME'"
# What is asked where make() was done ("NAME" is its name), and how the channel ends.
REFUSALS: list[tuple[str, str, base.Frame, int, str]] = [
    ("A3.2", "durable", Exchange.Declare(exchange="NAME", durable=True), 406,
     SAME.format("durable", DIRECT, "'true'", "'false'")),
    ("A3.2", "type", Exchange.Declare(exchange="NAME", exchange_type="fanout"), 406,
     SAME.format("type", DIRECT, "'fanout'", "'direct'")),
    ("A3.2", "argument", Exchange.Declare(exchange="NAME", arguments={"alternate-exchange": "y"}),
     406,
     SAME.format("alternate-exchange", DIRECT, "the value 'y' of type 'longstr'", "none")),
    ("A3.3", "passive", Exchange.Declare(exchange="new-NAME", passive=True), 404,
     "NOT_FOUND - no exchange 'new-NAME' in vhost '/'"),
    ("A3.4", "reserved", Exchange.Declare(exchange="amq.x"), 403, RESERVED.format("exchange")),
    ("A3.5", "declare", Exchange.Declare(exchange=""), 403, ON_DEFAULT),
    ("A3.5", "delete", Exchange.Delete(exchange=""), 403, ON_DEFAULT),
    ("A3.5", "bind", Queue.Bind(queue="NAME", exchange="", routing_key="x"), 403, ON_DEFAULT),
    ("A3.5", "unbind", Queue.Unbind(queue="NAME", exchange="", routing_key="x"), 403, ON_DEFAULT),
    ("A3.6", "in use", Exchange.Delete(exchange="NAME", if_unused=True), 406,
     "PRECONDITION_FAILED - exchange 'NAME' in vhost '/' in use"),
    ("A3.6", "system", Exchange.Delete(exchange="amq.direct"), 403,
     "ACCESS_REFUSED - deletion of system exchange 'amq.direct' in vhost '/' not allowed"),
    ("A3.7", "no source", Exchange.Bind(destination="NAME", source="new-NAME"), 404,
     "NOT_FOUND - no exchange 'new-NAME' in vhost '/'"),
    ("A4.3", "passive", Queue.Declare(queue="new-NAME", passive=True), 404,
     "NOT_FOUND - no queue 'new-NAME' in vhost '/'"),
    ("A4.2", "reserved", Queue.Declare(queue="amq.x"), 403, RESERVED.format("queue")),
    ("A4.5", "auto-delete", Queue.Declare(queue="NAME", auto_delete=True, exclusive=True), 406,
     SAME.format("auto_delete", "queue 'NAME'", "'true'", "'false'")),
    ("A4.5", "argument",
     Queue.Declare(queue="NAME", exclusive=True, arguments={"x-message-ttl": 1}), 406,
     SAME.format("x-message-ttl", "queue 'NAME'", "the value '1' of type 'signedint'", "none")),
    ("A4.6", "negative", Queue.Declare(queue="new-NAME", arguments={"x-message-ttl": -1}), 406,
     INVALID.format("x-message-ttl", "{value_negative,-1}")),
    ("A4.6", "type", Queue.Declare(queue="new-NAME", arguments={"x-max-length": "many"}), 406,
     INVALID.format("x-max-length", '"expected integer, got longstr"')),
    ("A4.6", "zero", Queue.Declare(queue="new-NAME", arguments={"x-expires": 0}), 406,
     INVALID.format("x-expires", "{value_zero,0}")),
    ("A4.3", "passive, no name", Queue.Declare(queue="", passive=True), 404,
     "NOT_FOUND - no queue '' in vhost '/'"),
    ("A4.8", "purge", Queue.Purge(queue=""), 404, "NOT_FOUND - no previously declared queue"),
    ("A4.9", "no queue", Queue.Bind(queue="new-NAME", exchange="NAME"), 404,
     "NOT_FOUND - no queue 'new-NAME' in vhost '/'"),
    ("A4.9", "no exchange", Queue.Bind(queue="NAME", exchange="new-NAME"), 404,
     "NOT_FOUND - no exchange 'new-NAME' in vhost '/'"),
    ("A4.10", "no queue", Queue.Purge(queue="new-NAME"), 404,
     "NOT_FOUND - no queue 'new-NAME' in vhost '/'"),
    ("A4.11", "not empty", Queue.Delete(queue="full-NAME", if_empty=True), 406,
     "PRECONDITION_FAILED - queue 'full-NAME' in vhost '/' not empty"),
    ("A4.11", "in use", Queue.Delete(queue="NAME", if_unused=True), 406,
     "PRECONDITION_FAILED - queue 'NAME' in vhost '/' in use"),
]  # fmt: skip


def _filled(what: base.Frame, name: str) -> base.Frame:
    made = copy.deepcopy(what)
    for field, value in dict(what).items():
        if isinstance(value, str):
            setattr(made, field, value.replace("NAME", name))
    return made


@pytest.mark.parametrize(
    ("asked", "code", "text"),
    [proving(case[0], f"{case[2].name} {case[1]}", *case[2:]) for case in REFUSALS],
)
def test_what_cannot_be_is_refused_in_rabbitmqs_words(
    client: RawClient, name: str, asked: base.Frame, code: int, text: str
) -> None:
    make(client, name)
    client.send(method(2, _filled(asked, name)))
    client.expect_channel_close(2, code, text.replace("NAME", name))
    client.ask(1, Exchange.Delete(exchange=name), Exchange.DeleteOk)


# -- exchanges -------------------------------------------------------------------------------------


@pytest.mark.row("A3.1", "A3.2", "A3.3", "A3.6")
def test_an_exchange_is_declared_again_looked_at_and_deleted_twice(
    client: RawClient, name: str
) -> None:
    how: dict[str, Any] = {
        "exchange_type": "topic",
        "durable": True,
        "auto_delete": True,
        "arguments": {"x": 1},
    }
    client.send(method(1, Exchange.Declare(exchange=name, nowait=True, **how)))  # no answer to this
    client.ask(1, Exchange.Declare(exchange=name, **how), Exchange.DeclareOk)
    client.ask(1, Exchange.Declare(exchange=name, passive=True), Exchange.DeclareOk)
    client.ask(1, Exchange.Delete(exchange=name, if_unused=True), Exchange.DeleteOk)
    client.ask(1, Exchange.Delete(exchange=name), Exchange.DeleteOk)


@pytest.mark.row("A3.1")
def test_an_exchange_of_an_unknown_type_ends_the_connection(client: RawClient, name: str) -> None:
    client.send(method(1, Exchange.Declare(exchange=name, exchange_type="x")))
    client.expect_close(503, "COMMAND_INVALID - unknown exchange type 'x'")


@pytest.mark.row("A3.4")
def test_a_predeclared_exchange_may_be_declared_as_it_is(client: RawClient) -> None:
    client.ask(
        1,
        Exchange.Declare(exchange="amq.direct", exchange_type="direct", durable=True),
        Exchange.DeclareOk,
    )


@pytest.mark.row("A3.7")
def test_exchanges_are_bound_and_unbound_as_queues_are(client: RawClient, name: str) -> None:
    for exchange in (name, f"{name}-2"):
        client.ask(
            1, Exchange.Declare(exchange=exchange, exchange_type="fanout"), Exchange.DeclareOk
        )
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.ask(1, Queue.Bind(queue=name, exchange=f"{name}-2"), Queue.BindOk)
    between = {"destination": f"{name}-2", "source": name, "routing_key": "k"}
    for _ in range(2):
        client.ask(1, Exchange.Bind(**between), Exchange.BindOk)
    client.send(publish(1, name, "any", b"1"))
    for _ in range(2):
        answer = client.ask(1, Exchange.Unbind(**between), Exchange.UnbindOk)
        assert answer.frame_id == 51  # not next to unbind's 40, as others are
    client.send(publish(1, name, "any", b"2"))
    assert count(client, name) == 1
    for exchange in (name, f"{name}-2"):
        client.ask(1, Exchange.Delete(exchange=exchange), Exchange.DeleteOk)


@pytest.mark.row("A3.8")
def test_an_auto_delete_exchange_goes_with_the_last_binding_from_it(
    client: RawClient, name: str
) -> None:
    client.ask(
        1,
        Exchange.Declare(exchange=name, exchange_type="fanout", auto_delete=True),
        Exchange.DeclareOk,
    )
    # it had none yet
    client.ask(1, Exchange.Declare(exchange=name, passive=True), Exchange.DeclareOk)
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    for key in ("a", "b"):
        client.ask(1, Queue.Bind(queue=name, exchange=name, routing_key=key), Queue.BindOk)
    client.ask(1, Queue.Unbind(queue=name, exchange=name, routing_key="a"), Queue.UnbindOk)
    client.ask(1, Exchange.Declare(exchange=name, passive=True), Exchange.DeclareOk)
    client.ask(1, Queue.Unbind(queue=name, exchange=name, routing_key="b"), Queue.UnbindOk)
    client.send(method(1, Exchange.Declare(exchange=name, passive=True)))
    client.expect_channel_close(1, 404, "NOT_FOUND")


@pytest.mark.row("A3.9")
def test_nobody_publishes_to_an_internal_exchange(client: RawClient, name: str) -> None:
    client.ask(1, Exchange.Declare(exchange=name, internal=True), Exchange.DeclareOk)
    client.send(publish(1, name, "k", b"x"))
    text = f"ACCESS_REFUSED - cannot publish to internal exchange '{name}' in vhost '/'"
    client.expect_channel_close(1, 403, text)
    client.ask(2, Exchange.Delete(exchange=name), Exchange.DeleteOk)


@pytest.mark.row("A3.10")
def test_line_breaks_fall_out_of_names(client: RawClient, name: str) -> None:
    def broken(what: base.Frame) -> bytes:
        """Return a method with line breaks in names.

        The client library would not write it itself.
        """
        return method(1, what).replace(b"::", b"\r\n")

    client.send(broken(Queue.Declare(queue=f"{name}::", exclusive=True)))
    assert client.expect(Queue.DeclareOk).queue == name
    client.send(broken(Exchange.Declare(exchange=f"::{name}")))
    client.expect(Exchange.DeclareOk)
    client.send(broken(Queue.Bind(queue=f"{name}::", exchange=f"::{name}", routing_key="k")))
    client.expect(Queue.BindOk)
    client.send(publish(1, name, "k", b"x"))
    assert count(client, name) == 1
    client.ask(1, Exchange.Delete(exchange=name), Exchange.DeleteOk)


# -- queues ----------------------------------------------------------------------------------------


@pytest.mark.row("A4.1", "A4.3")
def test_declare_ok_counts_what_is_ready_and_who_consumes(client: RawClient, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.send(b"".join(publish(1, "", name, b"x") for _ in range(3)))
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    assert count(client, name, 1) == 2
    client.ask(1, Basic.Qos(prefetch_count=1), Basic.QosOk)
    client.ask(1, Basic.Consume(queue=name), Basic.ConsumeOk)
    client.expect(Basic.Deliver)
    client.send(method(2, Queue.Declare(queue=name, exclusive=True, nowait=True)))
    client.send(method(2, Queue.Declare(queue=name, exclusive=True)))
    answer = client.expect(Queue.DeclareOk)
    assert (answer.queue, answer.message_count, answer.consumer_count) == (name, 1, 1)


@pytest.mark.row("A4.2", "A4.8")
def test_the_broker_names_a_queue_and_no_name_means_the_last(client: RawClient, name: str) -> None:
    given = client.ask(1, Queue.Declare(queue="", exclusive=True), Queue.DeclareOk).queue
    assert given.startswith("amq.gen-") and len(given) > 20
    client.ask(1, Exchange.Declare(exchange=name), Exchange.DeclareOk)
    client.ask(1, Queue.Bind(queue="", exchange=name, routing_key=""), Queue.BindOk)
    client.send(publish(1, name, given, b"both empty: the key is the queue's name"))
    assert client.ask(1, Queue.Purge(queue=""), Queue.PurgeOk).message_count == 1
    client.ask(1, Exchange.Delete(exchange=name), Exchange.DeleteOk)
    client.send(method(1, Queue.Declare(queue="", passive=True)))
    # passive: not the last
    assert client.expect(Channel.Close).reply_text == "NOT_FOUND - no queue '' in vhost '/'"


@pytest.mark.row("A4.4")
def test_an_exclusive_queue_is_never_durable(client: RawClient, api: Api, name: str) -> None:
    for durable in (True, False, True):
        client.ask(1, Queue.Declare(queue=name, durable=durable, exclusive=True), Queue.DeclareOk)
    assert api(f"/api/queues/%2F/{name}")["durable"] is False


@pytest.mark.row("A3.1", "A4.1")
@pytest.mark.parametrize(
    "odd", ["a=b", "50%", "<q>", "häß 队列", "a\tb", "{}", "q?*'\"\\", "é" * 120]
)
def test_names_are_of_any_characters(broker: RealBroker, name: str, odd: str) -> None:
    odd = (name + odd).encode()[:255].decode(errors="ignore")
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        assert channel.queue_declare(odd, durable=True).method.queue == odd
        channel.exchange_declare(odd, "topic")
        channel.queue_bind(odd, odd, odd)
        channel.confirm_delivery()
        channel.basic_publish(odd, odd, b"x", mandatory=True)
        assert channel.queue_declare(odd, passive=True).method.message_count == 1
        assert channel.basic_get(odd, auto_ack=True)[0].routing_key == odd
        channel.queue_delete(odd)
        channel.exchange_delete(odd)


LOCKED = (
    "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{}' in vhost '/'. It could "
    "be originally declared on another connection or the exclusive property value does not match "
    "that of the original declaration."
)


@pytest.mark.row("A4.4")
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(what, id=what.name)
        for what in (
            Queue.Declare(queue="NAME", exclusive=True),
            Queue.Declare(queue="NAME", passive=True),
            Queue.Bind(queue="NAME", exchange="amq.direct", routing_key="k"),
            Queue.Purge(queue="NAME"),
            Queue.Delete(queue="NAME"),
            Basic.Consume(queue="NAME"),
            Basic.Get(queue="NAME"),
        )
    ],
)
def test_an_exclusive_queue_is_locked_for_others(
    client: RawClient, other: RawClient, name: str, asked: base.Frame
) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    other.send(method(1, _filled(asked, name)))
    other.expect_channel_close(1, 405, LOCKED.format(name)[:255])


@pytest.mark.row("A4.4")
def test_an_exclusive_queue_goes_with_its_connection(
    client: RawClient, other: RawClient, name: str
) -> None:
    other.ask(1, Queue.Declare(queue=name, exclusive=True, durable=True), Queue.DeclareOk)
    other.ask(0, Connection.Close(200, "", 0, 0), Connection.CloseOk)
    numbers = iter(range(1, 1000))

    def is_gone() -> bool:
        number = next(numbers) + 100
        client.ask(number, Channel.Open(), Channel.OpenOk)
        client.send(method(number, Queue.Declare(queue=name, passive=True)))
        read = client.read()
        assert read is not None and isinstance(read[1], (Queue.DeclareOk, Channel.Close))
        client.send(
            method(number, Channel.CloseOk()) if isinstance(read[1], Channel.Close) else b""
        )
        return isinstance(read[1], Channel.Close) and read[1].reply_code == 404

    wait_until(is_gone, "the queue to go")


@pytest.mark.row("A4.5")
def test_a_queue_is_declared_again_by_what_its_arguments_mean(client: RawClient, name: str) -> None:
    arguments = {"x-message-ttl": 60_000}
    how: dict[str, Any] = {"queue": name, "exclusive": True}
    client.ask(1, Queue.Declare(**how, arguments=arguments), Queue.DeclareOk)
    client.ask(
        1, Queue.Declare(**how, arguments={**arguments, "x-queue-type": "classic"}), Queue.DeclareOk
    )
    client.ask(
        1, Queue.Declare(**how, arguments={**arguments, "of-no-meaning": 1}), Queue.DeclareOk
    )


@pytest.mark.row("A4.7")
def test_a_transient_queue_that_is_not_exclusive_is_a_queue(
    client: RawClient, other: RawClient, name: str
) -> None:
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)
    other.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)


@pytest.mark.row("A4.9")
def test_a_binding_is_one_however_often_it_is_made(client: RawClient, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    binding: dict[str, Any] = {"queue": name, "exchange": "amq.direct", "routing_key": name}
    for _ in range(2):
        client.ask(1, Queue.Bind(**binding), Queue.BindOk)
    client.ask(1, Queue.Bind(**binding, arguments={"a": 1}), Queue.BindOk)
    client.send(publish(1, "amq.direct", name, b"x"))
    assert count(client, name) == 1
    client.ask(1, Queue.Unbind(**binding), Queue.UnbindOk)
    client.ask(1, Queue.Unbind(**binding), Queue.UnbindOk)
    client.send(publish(1, "amq.direct", name, b"by the other binding"))
    assert count(client, name) == 2


@pytest.mark.row("A4.10", "A4.11")
def test_purge_leaves_what_is_unacknowledged_and_delete_counts_what_was_ready(
    client: RawClient, name: str
) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    client.send(b"".join(publish(1, "", name, b"x") for _ in range(3)))
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    assert client.ask(1, Queue.Purge(queue=name), Queue.PurgeOk).message_count == 2
    client.send(method(1, Basic.Reject(1, requeue=True)))
    assert count(client, name, 1) == 1
    assert client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk).message_count == 1
    assert client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk).message_count == 0


@pytest.mark.row("A4.11")
def test_what_a_channel_has_just_published_keeps_its_queue_from_being_empty(
    client: RawClient, name: str
) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    for number in range(20):
        client.send(
            publish(1, "", name, bytes([number]))
            + method(1, Queue.Delete(queue=name, if_empty=True))
        )
        client.expect_channel_close(
            1, 406, f"PRECONDITION_FAILED - queue '{name}' in vhost '/' not empty"
        )
        client.ask(1, Channel.Open(), Channel.OpenOk)


@pytest.mark.row("A4.13")
def test_an_auto_delete_queue_goes_with_its_last_consumer(client: RawClient, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name, auto_delete=True), Queue.DeclareOk)
    assert count(client, name) == 0  # it had none yet
    for tag in ("a", "b"):
        client.ask(1, Basic.Consume(queue=name, consumer_tag=tag), Basic.ConsumeOk)
    client.ask(1, Basic.Cancel(consumer_tag="a"), Basic.CancelOk)
    assert count(client, name) == 0
    client.ask(1, Basic.Cancel(consumer_tag="b"), Basic.CancelOk)
    client.send(method(2, Basic.Consume(queue=name)))
    client.expect_channel_close(2, 404, f"NOT_FOUND - no queue '{name}' in vhost '/'")


@pytest.mark.row("A4.5")
@pytest.mark.parametrize("durable", [True, False])
def test_whether_an_exclusive_queue_is_durable_is_not_compared(
    client: RawClient, name: str, durable: bool
) -> None:
    for said in (durable, not durable):
        client.ask(1, Queue.Declare(queue=name, exclusive=True, durable=said), Queue.DeclareOk)


@pytest.mark.row("A4.5")
def test_whether_a_shared_queue_is_durable_is_compared(client: RawClient, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name, durable=True), Queue.DeclareOk)
    client.send(method(2, Queue.Declare(queue=name)))
    client.expect_channel_close(
        2, 406, SAME.format("durable", f"queue '{name}'", "'false'", "'true'")
    )
    client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)
