"""Test what a client sees of its messages: publish, confirm, consume, acknowledge, recover, commit."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pamqp import base
from pamqp.commands import Basic, Channel, Confirm, Exchange, Queue, Tx

from tests.support.brokers import Api
from tests.support.proving import proving
from tests.support.raw_client import RawClient, content_header, method, publish, with_properties
from tests.support.real_broker import RealBroker, wait_until

REPLY_TO = "amq.rabbitmq.reply-to"


def declare(client: RawClient, name: str, **how: Any) -> None:
    client.ask(1, Queue.Declare(queue=name, **{"exclusive": True, **how}), Queue.DeclareOk)


def got(client: RawClient, queue: str, channel: int = 1) -> bytes:
    """Return the body of the next message, which counts as acknowledged at once."""
    client.ask(channel, Basic.Get(queue=queue, no_ack=True), Basic.GetOk)
    return client.content()


def is_empty(client: RawClient, queue: str, channel: int = 1) -> bool:
    return bool(client.ask(channel, Basic.Get(queue=queue, no_ack=True), Basic.GetEmpty))


def delivered(client: RawClient) -> tuple[Basic.Deliver, bytes]:
    return client.expect(Basic.Deliver), client.content()


# -- publish --------------------------------------------------------------------------------------------

# Properties of a publish to the queue NAME, or what is published, and how the channel ends.
REFUSALS: list[tuple[str, str, Any, int, str]] = [
    ("A5.1", "exchange", publish(1, "no-such", "k", b"x"), 404, "NOT_FOUND - no exchange 'no-such' in vhost '/'"),
    ("A5.5", "word", {"expiration": "abc"}, 406, "PRECONDITION_FAILED - invalid expiration 'abc': no_integer"),
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
    ("A7.2", "no consumer", {"reply_to": REPLY_TO}, 406, "PRECONDITION_FAILED - fast reply consumer does not exist"),
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
def test_an_unroutable_message_is_returned_before_it_is_acknowledged(client: RawClient, name: str) -> None:
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    client.send(publish(1, "amq.direct", name, b"silent") + publish(1, "amq.direct", name, b"back", mandatory=True))
    said: list[Any] = []
    while not (said and isinstance(said[-1], Basic.Ack) and said[-1].delivery_tag == 2):
        read = client.read()
        assert read is not None
        said.append(read[1])
    assert [type(one) for one in said if isinstance(one, base.Frame)] == [Basic.Ack, Basic.Return, Basic.Ack]
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
    client.send(b"".join(publish(1, "", key, str(at).encode(), mandatory=True) for at, key in enumerate(keys, 1)))
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
    client.ask(1, Exchange.Declare(exchange=f"{name}-b", exchange_type="topic", auto_delete=True), Exchange.DeclareOk)
    client.ask(1, Exchange.Bind(destination=f"{name}-b", source=f"{name}-a", routing_key="cc"), Exchange.BindOk)
    client.ask(1, Queue.Bind(queue=name, exchange=f"{name}-b", routing_key="bcc"), Queue.BindOk)
    client.send(with_properties(1, f"{name}-a", "none", b"x", headers={"CC": ["cc"], "BCC": ["bcc"]}))
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
def test_a_message_that_one_queue_refuses_is_nacked_though_another_took_it(client: RawClient, name: str) -> None:
    declare(client, name)
    declare(client, f"{name}-full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    for queue in (name, f"{name}-full"):
        client.ask(1, Queue.Bind(queue=queue, exchange="amq.fanout"), Queue.BindOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    client.send(publish(1, "amq.fanout", "", b"1"))
    assert client.expect(Basic.Ack).delivery_tag == 1
    client.send(publish(1, "amq.fanout", "", b"2"))
    assert client.expect(Basic.Nack).delivery_tag == 2
    assert [got(client, name, 2), got(client, name, 2), got(client, f"{name}-full", 2)] == [b"1", b"2", b"1"]


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
def test_a_transient_message_is_in_a_durable_queue_until_the_broker_stops(client: RawClient, name: str) -> None:
    declare(client, name, durable=True, exclusive=False)
    for mode in (1, 2):
        client.send(with_properties(1, "", name, bytes([mode]), delivery_mode=mode))
    assert [got(client, name), got(client, name)] == [b"\x01", b"\x02"]
    client.ask(1, Queue.Delete(queue=name), Queue.DeleteOk)


@pytest.mark.row("A5.13")
def test_properties_and_headers_of_every_kind_come_back(client: RawClient, name: str) -> None:
    when = datetime.datetime(2026, 11, 21, 6, 19, 21, tzinfo=datetime.UTC)
    headers = {
        "t": True, "I": -5, "l": 1 << 40, "d": 0.5, "S": "text", "x": bytearray(b"\x00\xff"), "V": None, "T": when,
        "A": [1, "two", [3.5, None]], "F": {"deep": {"deeper": [True]}},
    }  # fmt: skip
    said = {
        "content_type": "text/plain", "content_encoding": "utf-8", "headers": headers, "delivery_mode": 2,
        "priority": 7, "correlation_id": "c", "reply_to": "somewhere", "expiration": "60000", "message_id": "m",
        "timestamp": when, "message_type": "t", "app_id": "a",
    }  # fmt: skip
    declare(client, name)
    client.send(with_properties(1, "", name, b"x", **said))
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    back = dict(client.message()[0])
    assert {key: back[key] for key in said} == said


# -- consume --------------------------------------------------------------------------------------------


@pytest.mark.row("A6.1", "A6.14")
def test_a_consumer_gets_a_tag_and_deliveries_their_fields(client: RawClient, name: str) -> None:
    declare(client, name)
    tag = client.ask(1, Basic.Consume(queue=name, no_local=True), Basic.ConsumeOk).consumer_tag
    assert tag.startswith("amq.ctag-")
    client.send(publish(1, "", name, b"1") + publish(1, "amq.direct", "none", b"") + publish(1, "", name, b"2"))
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


@pytest.mark.parametrize("verb", [proving("A6.1", "consume", Basic.Consume), proving("A6.9", "get", Basic.Get)])
def test_a_queue_that_is_not_there_is_not_consumed(client: RawClient, name: str, verb: Any) -> None:
    client.send(method(1, verb(queue=name)))
    client.expect_channel_close(1, 404, f"NOT_FOUND - no queue '{name}' in vhost '/'")
    client.send(method(2, verb(queue="")))
    client.expect_channel_close(2, 404, "NOT_FOUND - no previously declared queue")


@pytest.mark.row("A6.2")
@pytest.mark.parametrize("first_is_exclusive", [True, False])
def test_an_exclusive_consumer_is_alone(client: RawClient, name: str, first_is_exclusive: bool) -> None:
    declare(client, name)
    client.ask(1, Basic.Consume(queue=name, exclusive=first_is_exclusive), Basic.ConsumeOk)
    client.send(method(2, Basic.Consume(queue=name, exclusive=not first_is_exclusive)))
    client.expect_channel_close(2, 403, f"ACCESS_REFUSED - queue '{name}' in vhost '/' in exclusive use")


@pytest.mark.row("A6.3")
def test_higher_priorities_are_served_first_and_equals_in_turn(client: RawClient, name: str) -> None:
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
def test_who_deletes_a_queue_it_consumes_hears_of_the_deletion_first(client: RawClient, name: str) -> None:
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


@pytest.mark.row("A6.15")
def test_a_message_for_a_waiting_consumer_is_never_ready_in_between(client: RawClient, name: str) -> None:
    """Not even expired: it is handed over at once, be its time ever so short."""
    declare(client, name, arguments={"x-message-ttl": 0})
    client.ask(1, Basic.Consume(queue=name, no_ack=True), Basic.ConsumeOk)
    for number in range(50):
        client.send(publish(2, "", name, bytes([number])))
        assert delivered(client)[1] == bytes([number])
    assert client.ask(2, Queue.Declare(queue=name, passive=True), Queue.DeclareOk).message_count == 0


@pytest.mark.row("A6.16", "N15")
def test_a_publisher_is_held_back_while_a_shard_is_behind_and_nothing_is_lost(
    broker: RealBroker, client: RawClient, name: str, api: Api
) -> None:
    """The shard sleeps; what it is given is bounded, so the client's writes come to a stop and its state is flow."""
    declare(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    port = client.sock.getsockname()[1]
    flood = publish(1, "", name, bytes(50_000)) * 1000
    sending = threading.Thread(target=client.send, args=(flood,), daemon=True)
    shards = [broker.pid("shard", index) for index in range(2)]
    for pid in shards:
        os.kill(pid, signal.SIGSTOP)
    try:
        sending.start()
        wait_until(lambda: _state(api, port) == "flow", "the publisher to be held back")
        assert sending.is_alive()
    finally:
        for pid in shards:
            os.kill(pid, signal.SIGCONT)
    acked = 0
    while acked < 1000:
        acked = client.expect(Basic.Ack).delivery_tag
    sending.join()
    assert client.ask(1, Queue.Purge(queue=name), Queue.PurgeOk).message_count == 1000


def _state(api: Api, port: int) -> str:
    """Nothing while the list is older than the connection."""
    return next((str(one["state"]) for one in api("/api/connections") if one["peer_port"] == port), "")


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


@pytest.mark.parametrize(
    ("settle", "left"),
    [
        proving("A6.10", "one", [Basic.Ack(2)], [b"1", b"3"]),
        proving("A6.10", "multiple", [Basic.Ack(2, multiple=True)], [b"3"]),
        proving("A6.10", "all", [Basic.Ack(0, multiple=True)], []),
        proving("A6.10", "nack without requeue", [Basic.Nack(2, multiple=True, requeue=False)], [b"3"]),
        proving("A6.10", "reject without requeue", [Basic.Reject(3, requeue=False)], [b"1", b"2"]),
        proving("A6.11", "in place", [Basic.Nack(3), Basic.Reject(1), Basic.Nack(2)], [b"1", b"2", b"3"]),
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
@pytest.mark.parametrize("what", [Basic.Ack(7), Basic.Nack(7), Basic.Reject(7), Basic.Ack(7, multiple=True)])
def test_an_unknown_tag_ends_the_channel(client: RawClient, what: base.Frame) -> None:
    client.send(method(1, what))
    client.expect_channel_close(1, 406, "PRECONDITION_FAILED - unknown delivery tag 7")


@pytest.mark.row("A6.12")
@pytest.mark.parametrize("whole_channel", [True, False])
def test_prefetch_bounds_what_is_unacknowledged(client: RawClient, name: str, whole_channel: bool) -> None:
    declare(client, name)
    client.ask(1, Basic.Qos(prefetch_count=2, global_=whole_channel), Basic.QosOk)
    for tag in ("a", "b"):
        client.ask(1, Basic.Consume(queue=name, consumer_tag=tag), Basic.ConsumeOk)
    client.send(publish(2, "", name, b"x") * 10)
    for _ in range(2 if whole_channel else 4):
        delivered(client)
    assert client.ask(2, Queue.Declare(queue=name, passive=True), Queue.DeclareOk).message_count == (
        8 if whole_channel else 6
    )


@pytest.mark.row("A6.12")
def test_a_prefetch_in_bytes_is_not_implemented(client: RawClient) -> None:
    client.send(method(1, Basic.Qos(prefetch_size=9)))
    client.expect_close(540, "NOT_IMPLEMENTED - prefetch_size!=0 (9)")


@pytest.mark.row("A6.13")
def test_recover_gives_everything_again_in_order_behind_its_answer(client: RawClient, name: str) -> None:
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
def test_what_an_ack_made_room_for_comes_before_the_cancel_that_follows_it(client: RawClient, name: str) -> None:
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
def test_recover_without_an_answer_and_recover_to_the_same_consumer(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(1, "", name, b"x"))
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    client.send(method(1, Basic.RecoverAsync(requeue=True)))
    assert got(client, name) == b"x"
    client.send(method(1, Basic.Recover(requeue=False)))
    client.expect_close(540, "NOT_IMPLEMENTED - requeue=false")


# -- transactions ---------------------------------------------------------------------------------------


@pytest.mark.row("A7.4")
def test_a_committed_publish_whose_queue_is_gone_is_returned(client: RawClient, name: str) -> None:
    declare(client, name)
    declare(client, f"{name}-again")
    client.ask(1, Tx.Select(), Tx.SelectOk)
    client.send(publish(1, "", name, b"gone", mandatory=True))
    client.send(publish(1, "", f"{name}-again", b"new"))
    for queue in (name, f"{name}-again"):
        client.ask(1, Queue.Delete(queue=queue), Queue.DeleteOk)
    declare(client, f"{name}-again")
    client.send(method(1, Tx.Commit()))
    assert client.expect(Basic.Return).reply_code == 312
    assert client.message()[1] == b"gone"
    client.expect(Tx.CommitOk)
    client.ask(1, Basic.Get(queue=f"{name}-again", no_ack=True), Basic.GetOk)
    assert client.message()[1] == b"new"


@pytest.mark.row("A7.4")
@pytest.mark.parametrize("what", [Tx.Commit(), Tx.Rollback()])
def test_what_is_not_begun_cannot_end(client: RawClient, what: base.Frame) -> None:
    client.send(method(1, what))
    client.expect_channel_close(1, 406, "PRECONDITION_FAILED - channel is not transactional")


@pytest.mark.row("A7.4")
def test_nothing_of_a_transaction_is_seen_before_its_commit(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(2, "", name, b"old"))
    client.ask(2, Basic.Qos(), Basic.QosOk)
    client.ask(1, Tx.Select(), Tx.SelectOk)
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    client.send(method(1, Basic.Ack(1)) + publish(1, "", name, b"new"))
    client.ask(1, Basic.Qos(), Basic.QosOk)
    assert is_empty(client, name, 2)
    client.ask(1, Tx.Commit(), Tx.CommitOk)
    assert got(client, name, 2) == b"new"
    client.ask(1, Channel.Close(200, "", 0, 0), Channel.CloseOk)
    assert is_empty(client, name, 2)


@pytest.mark.row("A7.5")
def test_a_rollback_drops_publishes_and_takes_acks_back(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(2, "", name, b"old"))
    client.ask(2, Basic.Qos(), Basic.QosOk)
    client.ask(1, Tx.Select(), Tx.SelectOk)
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    client.send(method(1, Basic.Ack(1)) + publish(1, "", name, b"new"))
    client.ask(1, Tx.Rollback(), Tx.RollbackOk)
    assert is_empty(client, name, 2)  # unacknowledged again, not requeued
    client.send(method(1, Basic.Ack(1)))
    client.ask(1, Tx.Commit(), Tx.CommitOk)
    client.ask(1, Channel.Close(200, "", 0, 0), Channel.CloseOk)
    assert is_empty(client, name, 2)


@pytest.mark.broker
@pytest.mark.row("A5.14")
def test_a_message_without_a_timestamp_gets_the_time_it_came_where_that_is_wanted(tmp_path: Path, name: str) -> None:
    (tmp_path / "broker.toml").write_text("[front_doors]\nset_timestamp = true\n")
    broker = RealBroker(tmp_path / "data", shards=1, more=("--config", str(tmp_path / "broker.toml")))
    own = datetime.datetime(2001, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    try:
        with RawClient(broker.port) as made:
            client = made.shake_hands()
            declare(client, name)
            before = int(time.time())
            client.send(publish(1, "", name, b"plain") + with_properties(1, "", name, b"own", timestamp=own))
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


@pytest.mark.row("A6.3")
def test_what_a_consumer_asks_for_has_a_type(client: RawClient, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    wrong = {"x-priority": ("high", '"expected integer, got longstr"'),
             "x-cancel-on-ha-failover": (1, "{unacceptable_type,signedint}")}  # fmt: skip
    for channel, (argument, (value, said)) in enumerate(wrong.items(), 1):
        client.send(method(channel, Basic.Consume(queue=name, arguments={argument: value})))
        text = f"PRECONDITION_FAILED - invalid arg '{argument}' for queue '{name}' in vhost '/': {said}"
        client.expect_channel_close(channel, 406, text)


@pytest.mark.row("A6.1")
def test_large_messages_come_unharmed_to_who_takes_them_slowly(
    broker: RealBroker, client: RawClient, other: RawClient, name: str
) -> None:
    """While others' go the same way: what lies where the next ones will lie is not given to a client late."""
    sizes = [1 << 20, 20_000, 300_000, 1 << 20, 40_000, 700_000, 1 << 20, 16_400] * 3
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    with RawClient(broker.port, receive_bytes=1 << 12).shake_hands() as slow:
        for queue, consumer in ((f"{name}-slow", slow), (f"{name}-fast", other)):
            declare(client, queue, exclusive=False, auto_delete=True)
            consumer.ask(1, Basic.Consume(queue=queue, no_ack=True, consumer_tag="c"), Basic.ConsumeOk)
        for content in bodies:
            client.send(publish(1, "", f"{name}-slow", content) + publish(1, "", f"{name}-fast", content[::-1]))
            assert delivered(other)[1] == content
        assert [delivered(slow)[1] for _ in bodies] == bodies
