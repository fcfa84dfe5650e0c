"""Test what a client sees of its publishes: refusals, returns, confirms and properties."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
from pamqp import base
from pamqp.commands import Basic, Confirm, Exchange, Queue, Tx

from tests.support.proving import proving
from tests.support.raw_client import (
    RawClient,
    content_header,
    declare,
    delivered,
    got,
    is_empty,
    method,
    publish,
    with_properties,
)
from tests.support.real_broker import RealBroker

REPLY_TO = "amq.rabbitmq.reply-to"


# Properties of a publish to the queue NAME, or what is published, and how the channel ends.
REFUSALS: list[tuple[str, str, Any, int, str]] = [
    ("A5.1", "exchange", publish(1, "no-such", "k", b"x"), 404,
     "NOT_FOUND - no exchange 'no-such' in vhost '/'"),
    ("A5.5", "word", {"expiration": "abc"}, 406,
     "PRECONDITION_FAILED - invalid expiration 'abc': no_integer"),
    ("A5.5", "left over", {"expiration": "12ms"}, 406,
     "PRECONDITION_FAILED - invalid expiration '12ms': {leftover_string,\"ms\"}"),
    ("A5.5", "negative", {"expiration": "-1"}, 406,
     "PRECONDITION_FAILED - invalid expiration '-1': {value_negative,-1}"),
    ("A5.5", "large", {"expiration": "315360000001"}, 406,
     "PRECONDITION_FAILED - invalid expiration '315360000001': {value_too_large,315360000001}"),
    ("A5.6", "user id", {"user_id": "nobody"}, 406,
     "PRECONDITION_FAILED - user_id property set to 'nobody' but authenticated user was 'guest'"),
    ("A5.7", "CC", {"headers": {"CC": "k"}}, 406,
     'PRECONDITION_FAILED - invalid message: {unacceptable_type_in_header,"CC",longstr}'),
    ("A5.7", "BCC", {"headers": {"BCC": 1}}, 406,
     'PRECONDITION_FAILED - invalid message: {unacceptable_type_in_header,"BCC",signedint}'),
    ("A7.2", "no consumer", {"reply_to": REPLY_TO}, 406,
     "PRECONDITION_FAILED - fast reply consumer does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "code", "text"), [proving(*case) for case in REFUSALS])
def test_a_publish_that_cannot_be_ends_the_channel_in_rabbitmqs_words(
    client: RawClient, name: str, what: Any, code: int, text: str
) -> None:
    declare(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    data = what if isinstance(what, bytes) else with_properties(1, "", name, b"x", **what)
    client.send(data + publish(1, "", name, b"behind it: dropped, neither acked nor nacked"))
    client.expect_channel_close(1, code, text)
    assert is_empty(client, name, 2)


@pytest.mark.row("A5.2", "A5.8", "A5.11")
def test_an_unroutable_message_is_returned_before_it_is_acknowledged(
    client: RawClient, name: str
) -> None:
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    client.send(
        publish(1, "amq.direct", name, b"silent")
        + publish(1, "amq.direct", name, b"back", mandatory=True)
    )
    said: list[Any] = []
    while not (said and isinstance(said[-1], Basic.Ack) and said[-1].delivery_tag == 2):
        read = client.read()
        assert read is not None
        said.append(read[1])
    assert [type(one) for one in said if isinstance(one, base.Frame)] == [
        Basic.Ack,
        Basic.Return,
        Basic.Ack,
    ]
    returned = next(one for one in said if isinstance(one, Basic.Return))
    assert (returned.reply_code, returned.reply_text) == (312, "NO_ROUTE")
    assert (returned.exchange, returned.routing_key) == ("amq.direct", name)
    assert [one.value for one in said if hasattr(one, "value")] == [b"back"]


@pytest.mark.row("A5.2", "A5.8")
def test_each_ack_comes_behind_the_returns_of_its_messages(client: RawClient, name: str) -> None:
    """Many in one write, every third of them unroutable."""
    declare(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    keys = [name if number % 3 else "nowhere" for number in range(300)]
    client.send(
        b"".join(
            publish(1, "", key, str(at).encode(), mandatory=True) for at, key in enumerate(keys, 1)
        )
    )
    acked, returned = 0, set()
    while acked < 300:
        read = client.read()
        assert read is not None
        if isinstance(read[1], Basic.Return):
            returned.add(int(client.content()))
        elif isinstance(read[1], Basic.Ack):
            tag = read[1].delivery_tag
            through = range(acked + 1, tag + 1) if read[1].multiple else [tag]
            assert {at for at in through if keys[at - 1] == "nowhere"} <= returned
            acked = max(acked, tag)
    assert len(returned) == 100


@pytest.mark.row("A5.3")
def test_immediate_is_not_implemented(client: RawClient, name: str) -> None:
    client.send(method(1, Basic.Publish(routing_key=name, immediate=True)) + content_header(1, 0))
    client.expect_close(540, "NOT_IMPLEMENTED - immediate=true")


@pytest.mark.row("A5.5")
def test_expiration_zero_means_now_or_never(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(with_properties(1, "", name, b"never", expiration="0"))
    assert is_empty(client, name)
    client.ask(1, Basic.Consume(queue=name, no_ack=True), Basic.ConsumeOk)
    client.send(with_properties(1, "", name, b"now", expiration="0"))
    assert delivered(client)[1] == b"now"


@pytest.mark.row("A5.6")
def test_a_user_id_that_is_right_stays(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(with_properties(1, "", name, b"x", user_id="guest"))
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    assert client.message()[0].user_id == "guest"


@pytest.mark.row("A5.7")
def test_cc_and_bcc_name_more_queues_and_bcc_is_not_told(client: RawClient, name: str) -> None:
    queues = [name, f"{name}-cc", f"{name}-bcc"]
    for queue in queues:
        declare(client, queue)
    headers = {"CC": [queues[1], 5, "nowhere"], "BCC": [queues[2], queues[1]], "other": 1}
    client.send(with_properties(1, "", name, b"x", headers=headers))
    for queue in queues:
        client.ask(1, Basic.Get(queue=queue, no_ack=True), Basic.GetOk)
        properties, content = client.message()
        assert content == b"x" and properties.headers == {"CC": headers["CC"], "other": 1}
        assert is_empty(client, queue)


@pytest.mark.row("A5.7")
def test_an_exchange_behind_another_looks_at_cc_and_bcc_too(client: RawClient, name: str) -> None:
    declare(client, name)
    client.ask(1, Exchange.Declare(exchange=f"{name}-a", auto_delete=True), Exchange.DeclareOk)
    client.ask(
        1,
        Exchange.Declare(exchange=f"{name}-b", exchange_type="topic", auto_delete=True),
        Exchange.DeclareOk,
    )
    client.ask(
        1,
        Exchange.Bind(destination=f"{name}-b", source=f"{name}-a", routing_key="cc"),
        Exchange.BindOk,
    )
    client.ask(1, Queue.Bind(queue=name, exchange=f"{name}-b", routing_key="bcc"), Queue.BindOk)
    client.send(
        with_properties(1, f"{name}-a", "none", b"x", headers={"CC": ["cc"], "BCC": ["bcc"]})
    )
    client.ask(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
    assert client.message()[1] == b"x"


@pytest.mark.row("A5.8")
def test_confirms_count_from_the_first_publish_after_select(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(1, "", name, b"before"))
    client.send(method(1, Confirm.Select(nowait=True)))
    client.ask(1, Confirm.Select(), Confirm.SelectOk)  # once more is no error
    client.send(publish(1, "", name, b"x") * 5)
    acked: set[int] = set()
    while acked != {1, 2, 3, 4, 5}:
        said = client.expect(Basic.Ack)
        acked |= set(range(1, said.delivery_tag + 1)) if said.multiple else {said.delivery_tag}


@pytest.mark.row("A5.9")
def test_a_message_that_one_queue_refuses_is_nacked_though_another_took_it(
    client: RawClient, name: str
) -> None:
    declare(client, name)
    declare(client, f"{name}-full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    for queue in (name, f"{name}-full"):
        client.ask(1, Queue.Bind(queue=queue, exchange="amq.fanout"), Queue.BindOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    client.send(publish(1, "amq.fanout", "", b"1"))
    assert client.expect(Basic.Ack).delivery_tag == 1
    client.send(publish(1, "amq.fanout", "", b"2"))
    assert client.expect(Basic.Nack).delivery_tag == 2
    assert [got(client, name, 2), got(client, name, 2), got(client, f"{name}-full", 2)] == [
        b"1",
        b"2",
        b"1",
    ]


@pytest.mark.row("A5.10")
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (Confirm.Select(), Tx.Select(), "cannot switch from confirm to tx mode"),
        (Tx.Select(), Confirm.Select(), "cannot switch from tx to confirm mode"),
    ],
)
def test_a_channel_is_in_one_mode(client: RawClient, first: Any, second: Any, text: str) -> None:
    client.send(method(1, first))
    client.read()
    client.send(method(1, second))
    client.expect_channel_close(1, 406, f"PRECONDITION_FAILED - {text}")


@pytest.mark.row("A5.12")
def test_a_transient_message_is_in_a_durable_queue_until_the_broker_stops(
    client: RawClient, name: str
) -> None:
    declare(client, name, durable=True, exclusive=False)
    for mode in (1, 2):
        client.send(with_properties(1, "", name, bytes([mode]), delivery_mode=mode))
    assert [got(client, name), got(client, name)] == [b"\x01", b"\x02"]
    client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)


@pytest.mark.row("A5.13")
def test_properties_and_headers_of_every_kind_come_back(client: RawClient, name: str) -> None:
    when = datetime.datetime(2026, 11, 21, 6, 19, 21, tzinfo=datetime.UTC)
    headers = {
        "t": True, "I": -5, "l": 1 << 40, "d": 0.5, "S": "text", "x": bytearray(b"\x00\xff"),
        "V": None, "T": when, "A": [1, "two", [3.5, None]], "F": {"deep": {"deeper": [True]}},
    }  # fmt: skip
    said = {
        "content_type": "text/plain", "content_encoding": "utf-8", "headers": headers,
        "delivery_mode": 2, "priority": 7, "correlation_id": "c", "reply_to": "somewhere",
        "expiration": "60000", "message_id": "m", "timestamp": when, "message_type": "t",
        "app_id": "a",
    }  # fmt: skip
    declare(client, name)
    client.send(with_properties(1, "", name, b"x", **said))
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    back = dict(client.message()[0])
    assert {key: back[key] for key in said} == said


@pytest.mark.broker
@pytest.mark.row("A5.14")
def test_a_message_without_a_timestamp_gets_the_time_it_came_where_that_is_wanted(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "broker.toml").write_text("[front_doors]\nset_timestamp = true\n")
    broker = RealBroker(
        tmp_path / "data", shards=1, more=("--config", str(tmp_path / "broker.toml"))
    )
    own = datetime.datetime(2001, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    try:
        with RawClient(broker.port) as made:
            client = made.shake_hands()
            declare(client, name)
            before = int(time.time())
            client.send(
                publish(1, "", name, b"plain") + with_properties(1, "", name, b"own", timestamp=own)
            )
            client.send(with_properties(1, "", name, b"cc", headers={"CC": ["x"]}, app_id="a"))
            client.ask(1, Tx.Select(), Tx.SelectOk)
            client.send(publish(1, "", name, b"tx"))
            client.ask(1, Tx.Commit(), Tx.CommitOk)
            found = {}
            for _ in range(4):
                client.ask(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
                properties, content = client.message()
                assert properties.timestamp is not None
                found[content] = properties.timestamp.timestamp()
        assert found.pop(b"own") == own.timestamp()
        assert set(found) == {b"plain", b"cc", b"tx"}
        assert all(before <= at <= time.time() for at in found.values())
        broker.stop()
    finally:
        broker.clean_up()


@pytest.mark.row("A5.14")
def test_else_it_has_none(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(1, "", name, b"x"))
    client.ask(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
    assert client.message()[0].timestamp is None


@pytest.mark.row("A5.5", "C1.2", "C1.3")
@pytest.mark.parametrize("long", [4294967294, 4294967295, 4294967296, 315_360_000_000])
def test_a_time_of_years_is_a_time(client: RawClient, name: str, long: int) -> None:
    arguments = {"x-message-ttl": long, "x-expires": long}
    client.ask(1, Queue.Declare(queue=name, exclusive=True, arguments=arguments), Queue.DeclareOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    client.send(with_properties(1, "", name, b"x", expiration=str(long)))
    client.expect(Basic.Ack)
    client.ask(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
    properties, body = client.message()
    assert (properties.expiration, body) == (str(long), b"x")
