"""Test streams as an AMQP client sees them."""

from __future__ import annotations

import datetime
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import aio_pika
import pika
import pytest
from pamqp import base
from pamqp.commands import Basic, Confirm, Exchange, Queue

from tests.support.proving import proving
from tests.support.raw_client import RawClient, method
from tests.support.real_broker import PATIENCE_S, RealBroker, wait_until

STREAM = {"x-queue-type": "stream"}
SEGMENT_BYTES = "x-stream-max-segment-size-bytes"
IDLE_S = 0.3  # without a message: no more are to come
Api = Callable[..., Any]


class Stream:
    """A pika channel with a stream; `publish` waits for the confirm."""

    def __init__(self, broker: RealBroker, name: str, **arguments: Any) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        self.name = name
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        self.channel.basic_qos(prefetch_count=100)
        more = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.channel.queue_declare(name, durable=True, arguments=STREAM | more)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def publish(self, *bodies: str, **headers: Any) -> None:
        for body in bodies:
            properties = pika.BasicProperties(headers=headers or None)
            self.channel.basic_publish("", self.name, body.encode(), properties, mandatory=True)

    def read(
        self,
        least: int,
        most: int = 1000,
        tag: str | None = None,
        ack: bool = True,
        **arguments: Any,
    ) -> list[tuple[int, str]]:
        """Return (offset, body) of what a consumer gets.

        It waits for `least` messages, then until none comes for a while.
        """
        found: list[tuple[int, str]] = []
        wanted = {key.replace("_", "-"): value for key, value in arguments.items()}

        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            if len(found) < most:
                found.append((int(properties.headers["x-stream-offset"]), body.decode()))
                if ack:
                    channel.basic_ack(method.delivery_tag)

        consumer = self.channel.basic_consume(
            self.name, on_message, consumer_tag=tag, arguments=wanted
        )
        give_up = time.monotonic() + PATIENCE_S
        while len(found) < least and time.monotonic() < give_up:
            self.connection.process_data_events(IDLE_S)
        end = time.monotonic() + IDLE_S
        while len(found) < most and (left := end - time.monotonic()) > 0:
            before = len(found)
            self.connection.process_data_events(left)
            if len(found) > before:
                end = time.monotonic() + IDLE_S
        self.channel.basic_cancel(consumer)
        return found


REFUSED = "PRECONDITION_FAILED - invalid {} '{}' for queue 'NAME' in vhost '/'"
OF_TYPE = REFUSED + " of queue type rabbit_{}_queue"
DECLARES: list[tuple[str, base.Frame, str]] = [
    ("D1", Queue.Declare(queue="NAME", durable=True, exclusive=True, arguments=STREAM),
     REFUSED.format("property", "exclusive-owner")),
    ("D1", Queue.Declare(queue="NAME", durable=True, auto_delete=True, arguments=STREAM),
     REFUSED.format("property", "auto-delete")),
    ("D1", Queue.Declare(queue="NAME", arguments=STREAM),
     REFUSED.format("property", "non-durable")),
    *(
        ("D1", Queue.Declare(queue="NAME", durable=True, arguments=STREAM | {key: value}),
         OF_TYPE.format("arg", key, "stream"))
        for key, value in {
            "x-dead-letter-exchange": "x", "x-dead-letter-routing-key": "k", "x-expires": 1000,
            "x-delivery-limit": 3, "x-overflow": "drop-head", "x-single-active-consumer": True,
            "x-max-priority": 5, "x-message-ttl": 1000,
        }.items()
    ),
    ("D6", Queue.Declare(queue="NAME", durable=True, arguments={"x-max-age": "1h"}),
     OF_TYPE.format("arg", "x-max-age", "classic")),
    *(
        ("D6", Queue.Declare(queue="NAME", durable=True, arguments=STREAM | {"x-max-age": age}),
         REFUSED.format("arg", "x-max-age") + ": invalid_max_age")
        for age in ("", "5", "h", "1w", "-1h", "1 h")
    ),
    ("D6",
     Queue.Declare(queue="NAME", durable=True, arguments=STREAM | {SEGMENT_BYTES: 3000000001}),
     REFUSED.format("arg", SEGMENT_BYTES) + ": {max_value_exceeded,3000000001}"),
    ("D6", Queue.Declare(queue="NAME", durable=True, arguments=STREAM | {SEGMENT_BYTES: 0}),
     REFUSED.format("arg", SEGMENT_BYTES) + ": {value_zero,0}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "text"), [proving(case[0], str(i), *case[1:]) for i, case in enumerate(DECLARES)]
)
def test_what_no_stream_can_be_is_refused(
    client: RawClient, name: str, what: base.Frame, text: str
) -> None:
    what.queue = name  # type: ignore[attr-defined] # a Queue.Declare
    client.send(method(2, what))
    client.expect_channel_close(2, 406, text.replace("NAME", name))


@pytest.mark.row("D1")
def test_a_stream_is_declared_again_and_is_no_other_queue(client: RawClient, name: str) -> None:
    declare = Queue.Declare(queue=name, durable=True, arguments=STREAM | {"x-max-age": "1h"})
    client.ask(1, declare, Queue.DeclareOk)
    client.ask(1, declare, Queue.DeclareOk)
    client.send(method(1, Queue.Declare(queue=name, durable=True)))
    client.expect_channel_close(
        1, 406, f"PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue '{name}'"
    )
    client.send(method(2, Queue.Declare(queue=name, durable=True, arguments=STREAM)))
    client.expect_channel_close(
        2, 406, f"PRECONDITION_FAILED - inequivalent arg 'x-max-age' for queue '{name}'"
    )


@pytest.mark.row("D2")
def test_offsets_count_from_0_and_each_delivery_says_its_own(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        stream.publish("a", "b")
        stream.publish("c", other="header")
        assert stream.read(3, x_stream_offset="first") == [(0, "a"), (1, "b"), (2, "c")]
        assert stream.read(3, x_stream_offset="first") == [(0, "a"), (1, "b"), (2, "c")], (
            "what was read stays"
        )


@pytest.mark.row("D2")
def test_a_message_that_comes_from_another_stream_has_the_offset_of_this_one(
    broker: RealBroker, name: str
) -> None:
    with Stream(broker, name) as stream:
        stream.publish("a", **{"x-stream-offset": 77, "x": "y"})
        assert stream.read(1, x_stream_offset="first") == [(0, "a")]


@pytest.mark.row("D3")
@pytest.mark.parametrize(
    ("qos", "consume", "code", "text"),
    [
        (Basic.Qos(prefetch_count=0), Basic.Consume(), 406,
         "PRECONDITION_FAILED - consumer prefetch count is not set for stream queue 'NAME' in "
         "vhost '/'"),
        (Basic.Qos(prefetch_count=5), Basic.Consume(exclusive=True), 406,
         "PRECONDITION_FAILED - Stream consumers must not be exclusive"),
        (Basic.Qos(prefetch_count=5), Basic.Consume(no_ack=True), 540,
         "NOT_IMPLEMENTED - automatic acknowledgement not supported by stream queue 'NAME' in "
         "vhost '/'"),
        (Basic.Qos(prefetch_count=5, global_=True), Basic.Consume(), 540,
         "NOT_IMPLEMENTED - queue 'NAME' in vhost '/' does not support global qos"),
    ],
    ids=["no prefetch", "exclusive", "no ack", "global qos"],
)  # fmt: skip
def test_a_consumer_needs_prefetch_and_acks(
    client: RawClient, name: str, qos: Basic.Qos, consume: Basic.Consume, code: int, text: str
) -> None:
    client.ask(2, Queue.Declare(queue=name, durable=True, arguments=STREAM), Queue.DeclareOk)
    client.ask(2, qos, Basic.QosOk)
    consume.queue = name
    client.send(method(2, consume))
    if code == 540:
        client.expect_close(code, text.replace("NAME", name))
    else:
        client.expect_channel_close(2, code, text.replace("NAME", name))


@pytest.mark.row("D4")
def test_a_consumer_begins_where_it_says(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        stream.publish(*"abcdef")
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        for offset, expected in (
            ("first", "abcdef"), ("last", "f"), ("next", ""), (0, "abcdef"), (4, "ef"), (100, ""),
            (-2, "ef"), (-100, "abcdef"), ("1h", "abcdef"), ("0s", ""), (later, ""),
            (datetime.datetime(2020, 1, 1), "abcdef"),
        ):  # fmt: skip
            found = stream.read(len(expected), x_stream_offset=offset)
            assert "".join(body for _, body in found) == expected, offset
        assert stream.read(0) == [], "without an offset: what comes next"


@pytest.mark.row("D4")
@pytest.mark.parametrize("offset", ["", "First", "5x", "m", True, 1.5, ["first"], None], ids=repr)
def test_what_is_no_offset_is_refused(client: RawClient, name: str, offset: Any) -> None:
    client.ask(2, Queue.Declare(queue=name, durable=True, arguments=STREAM), Queue.DeclareOk)
    client.ask(2, Basic.Qos(prefetch_count=5), Basic.QosOk)
    consume = Basic.Consume(queue=name, arguments={"x-stream-offset": offset})
    if offset is None:  # void: as if it was not there
        client.ask(2, consume, Basic.ConsumeOk)
        return
    client.send(method(2, consume))
    client.expect_channel_close(
        2, 406, "PRECONDITION_FAILED - x-stream-offset must be an integer, a timestamp"
    )


@pytest.mark.row("D5")
def test_a_named_consumer_goes_on_behind_what_it_has_acknowledged(
    broker: RealBroker, name: str
) -> None:
    with Stream(broker, name) as stream:
        assert stream.read(0, tag="auditor") == []
        stream.publish(*"abcdef")
        assert stream.read(2, 2, tag="auditor") == [(0, "a"), (1, "b")]
        assert stream.read(1, 1, tag="auditor", ack=False) == [(2, "c")]
        assert stream.read(0, 1, tag="other") == [], "another name"
    with Stream(broker, name) as stream:
        assert [body for _, body in stream.read(4, tag="auditor")] == list("cdef")
        assert stream.read(0, tag="auditor") == []
        assert len(stream.read(6, tag="auditor", x_stream_offset="first")) == 6, (
            "an offset goes before the position"
        )
        assert stream.read(0, tag="auditor") == [], "which stays as it was"


@pytest.mark.row("D5")
def test_tracking_is_asked_for_or_forbidden_by_an_argument(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        stream.publish(*"abc")
        tracked = {"x_stream_offset": "first", "x_stream_automatic_offset_tracking": True}
        assert [body for _, body in stream.read(1, 1, tag="t", **tracked)] == ["a"]
        assert [body for _, body in stream.read(2, tag="t", **tracked)] == ["b", "c"]
        untracked = {"x_stream_automatic_offset_tracking": False}
        assert stream.read(0, tag="u", **untracked) == []
        stream.publish("d")
        assert stream.read(0, tag="u", **untracked) == [], "it has no position"


@pytest.mark.row("D5")
def test_what_a_consumer_gives_back_comes_to_it_again(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        stream.publish(*"abc")
        got: list[tuple[str, bool]] = []

        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            got.append((body.decode(), method.redelivered))
            if body == b"b" and not method.redelivered:
                channel.basic_nack(method.delivery_tag, requeue=True)
            elif body == b"c":
                channel.basic_reject(method.delivery_tag, requeue=False)
            else:
                channel.basic_ack(method.delivery_tag)

        stream.channel.basic_consume(name, on_message, arguments={"x-stream-offset": "first"})
        while len(got) < 4:
            stream.connection.process_data_events(5)
        assert sorted(got) == [("a", False), ("b", False), ("b", True), ("c", False)]
        assert len(stream.read(3, x_stream_offset="first")) == 3


@pytest.mark.row("D6")
@pytest.mark.parametrize(
    "limit", [{"x_max_length_bytes": 20_000}, {"x_max_length": 20}], ids=["bytes", "messages"]
)
def test_the_oldest_segments_go_and_the_last_one_stays(
    broker: RealBroker, name: str, limit: dict[str, int]
) -> None:
    with Stream(broker, name, x_stream_max_segment_size_bytes=10_000, **limit) as stream:
        for number in range(100):
            stream.publish(f"{number}:" + 990 * "x")
        wait_until(lambda: stream.read(1, 1, x_stream_offset="first")[0][0] >= 60, "room made")
        first = stream.read(1, 1, x_stream_offset="first")[0][0]
        found = [offset for offset, _ in stream.read(100 - first, x_stream_offset=0)]
        assert found == list(range(found[0], 100))
        assert 2 <= len(found) <= 40


@pytest.mark.row("D6")
def test_what_is_too_old_goes_by_policy(broker: RealBroker, api: Api, name: str) -> None:
    with Stream(broker, name, x_stream_max_segment_size_bytes=5000) as stream:
        for number in range(20):
            stream.publish(f"{number}:" + 990 * "x")
        assert stream.read(1, 1, x_stream_offset="first")[0][0] == 0
        body = {"pattern": f"^{name}$", "definition": {"max-age": "1s"}, "apply-to": "streams"}
        api(f"/api/policies/%2f/{name}", method="PUT", body=body)
        wait_until(lambda: stream.read(1, 1, x_stream_offset="first")[0][0] > 10, "room made")
        assert stream.read(1, 1, x_stream_offset="first")[0][0] < 20
        api(f"/api/policies/%2f/{name}", method="DELETE")


@pytest.mark.row("D7")
def test_a_filter_lets_through_what_has_one_of_its_values(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        for number in range(4):
            stream.publish(f"n{number}", **{"x-stream-filter-value": "north"})
            stream.publish(f"s{number}", **{"x-stream-filter-value": "south"})
            stream.publish(f"-{number}")

        def bodies(least: int, **arguments: Any) -> list[str]:
            return [body for _, body in stream.read(least, x_stream_offset="first", **arguments)]

        assert bodies(4, x_stream_filter="north") == ["n0", "n1", "n2", "n3"]
        assert bodies(4, x_stream_filter=["south", "west"]) == ["s0", "s1", "s2", "s3"]
        assert bodies(8, x_stream_filter="north", x_stream_match_unfiltered=True) == [
            "n0", "-0", "n1", "-1", "n2", "-2", "n3", "-3",
        ]  # fmt: skip
        assert bodies(0, x_stream_filter="west") == []
        assert len(bodies(12, x_stream_filter=[])) == 12


@pytest.mark.row("D7")
@pytest.mark.parametrize(
    "arguments",
    [{"x-stream-filter": 5}, {"x-stream-filter": ["a", 5]}, {"x-stream-match-unfiltered": "yes"}],
    ids=str,
)
def test_what_is_no_filter_is_refused(
    client: RawClient, name: str, arguments: dict[str, Any]
) -> None:
    client.ask(2, Queue.Declare(queue=name, durable=True, arguments=STREAM), Queue.DeclareOk)
    client.ask(2, Basic.Qos(prefetch_count=5), Basic.QosOk)
    client.send(method(2, Basic.Consume(queue=name, arguments=arguments)))
    client.expect_channel_close(2, 406, f"PRECONDITION_FAILED - {next(iter(arguments))} must be a")


@pytest.mark.row("D8")
def test_get_is_refused(client: RawClient, name: str) -> None:
    client.ask(2, Queue.Declare(queue=name, durable=True, arguments=STREAM), Queue.DeclareOk)
    client.send(method(2, Basic.Get(queue=name)))
    client.expect_close(
        540,
        f"NOT_IMPLEMENTED - basic.get not supported by stream queues queue '{name}' in vhost '/'",
    )


@pytest.mark.row("D8")
def test_purge_takes_all_messages_and_offsets_go_on(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        stream.publish(*"abc")
        assert stream.channel.queue_declare(name, passive=True).method.message_count == 3
        assert stream.channel.queue_purge(name).method.message_count == 3
        assert stream.channel.queue_declare(name, passive=True).method.message_count == 0
        stream.publish("d")
        assert stream.read(1, x_stream_offset="first") == [(3, "d")]


@pytest.mark.row("D15")
def test_a_stream_is_listed_with_its_offsets_and_how_far_consumers_are(
    broker: RealBroker, api: Api, name: str
) -> None:
    with Stream(broker, name) as stream:
        stream.publish(*"abcdef")
        stream.channel.basic_qos(prefetch_count=2)
        stream.channel.basic_consume(
            name, lambda *_: None, consumer_tag="slow", arguments={"x-stream-offset": 1}
        )
        path = f"/api/queues/%2f/{urllib.parse.quote(name)}"
        wait_until(
            lambda: api(path).get("messages_unacknowledged") == 2, "two messages on their way"
        )
        shown = api(path)
        assert (shown["type"], shown["messages"], shown["consumers"]) == ("stream", 6, 1)
        assert (shown["first_offset"], shown["last_offset"], shown["segments"]) == (0, 5, 1)
        (consumer,) = shown["consumer_details"]
        assert (consumer["offset"], consumer["offset_lag"]) == (1, 5)


@pytest.mark.row("D1")
def test_a_message_for_a_stream_and_other_queues_reaches_them_all(
    client: RawClient, broker: RealBroker, name: str
) -> None:
    client.ask(1, Exchange.Declare(exchange=name, exchange_type="fanout"), Exchange.DeclareOk)
    client.ask(1, Queue.Declare(queue=name, durable=True, arguments=STREAM), Queue.DeclareOk)
    queues = [name, *(f"{name}-{n}" for n in range(4))]  # on both shards
    for queue in queues:
        if queue != name:
            client.ask(1, Queue.Declare(queue=queue, durable=True), Queue.DeclareOk)
        client.ask(1, Queue.Bind(queue=queue, exchange=name), Queue.BindOk)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    with Stream(broker, name) as stream:
        stream.channel.basic_publish(name, "", b"x")
        for queue in queues[1:]:
            assert stream.channel.basic_get(queue, auto_ack=True)[2] == b"x"
        assert stream.read(1, x_stream_offset="first") == [(0, "x")]


@pytest.mark.row("D1")
def test_a_deleted_stream_takes_its_messages_along(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        stream.publish("a")
        assert stream.channel.queue_delete(name).method.message_count == 1
    with Stream(broker, name) as stream:
        stream.publish("b")
        assert stream.read(1, x_stream_offset="first") == [(0, "b")]


@pytest.mark.row("D2")
async def test_aio_pika_reads_a_stream(broker: RealBroker, name: str) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.declare_queue(name, durable=True, arguments=STREAM)
        for number in range(50):
            await channel.default_exchange.publish(aio_pika.Message(b"%d" % number), name)
        async with queue.iterator(arguments={"x-stream-offset": "first"}) as messages:
            async for message in messages:
                number = int(message.body)
                assert message.headers["x-stream-offset"] == number
                await message.ack()
                if number == 49:
                    break


@pytest.mark.row("D16")
def test_every_reader_sees_the_same_sequence(broker: RealBroker, name: str) -> None:
    with Stream(broker, name) as stream:
        for number in range(200):
            stream.channel.basic_publish("", name, b"%d" % number)
        first = stream.read(200, x_stream_offset="first")
        assert len(first) == 200
        with Stream(broker, name) as other:
            assert other.read(200, x_stream_offset="first") == first
