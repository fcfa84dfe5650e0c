"""The name of a stream exchange is a queue.

It is consumed, got, purged and deleted over all its shards, from any connection.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.support.real_broker import RealBroker, wait_until

SHARDS = 4
KEYS = 40
WITHIN_S = 60.0


@pytest.fixture
def channel(connection: pika.BlockingConnection, name: str) -> Iterator[BlockingChannel]:
    """With a stream exchange of that name."""
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare(name, "x-modulus-hash", durable=True, arguments={"x-shards": SHARDS})
    yield channel
    if connection.is_open:
        connection.channel().exchange_delete(name)


def publish(channel: BlockingChannel, name: str, count: int = KEYS) -> None:
    for number in range(count):
        channel.basic_publish(name, f"key-{number % KEYS}", str(number).encode(), mandatory=True)


class Consumer:
    def __init__(
        self, broker: RealBroker, name: str, *, prefetch: int = 0, ack: bool = True, **more: Any
    ) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        self.channel = self.connection.channel()
        self.channel.basic_qos(prefetch_count=prefetch)
        self.got: list[Any] = []
        self.ack = ack
        self.cancelled: list[str] = []
        self.channel.add_on_cancel_callback(
            lambda frame: self.cancelled.append(frame.method.consumer_tag)
        )
        self.tag = self.channel.basic_consume(name, self._receive, **more)

    def _receive(self, channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        self.got.append((method, body))
        if self.ack:
            channel.basic_ack(method.delivery_tag)

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body in self.got]

    def run(self, seconds: float = 0.01) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.connection.process_data_events(left)

    def close(self) -> None:
        if self.connection.is_open:
            self.connection.close()


def look(broker: RealBroker, name: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{broker.http}/api/virtual-queues/%2F/{quote(name, safe='')}"
    )
    request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def divided(broker: RealBroker, name: str, loads: list[int]) -> None:
    """Wait until the consumers have so many shards each, and no shard is moving."""

    def is_so() -> bool:
        found = look(broker, name)
        owned = all(len(shard["owners"]) == 1 for shard in found["shards"])
        return (
            owned
            and not found["moving"]
            and sorted(len(each["shards"]) for each in found["consumers"]) == loads
        )

    wait_until(is_so, f"{loads} shards of the consumers", WITHIN_S)


def run_until(happened: Any, *consumers: Consumer) -> None:
    end = time.monotonic() + WITHIN_S
    while not happened():
        assert time.monotonic() < end
        for consumer in consumers:
            consumer.run()


@pytest.mark.row("E1.6", "E1.8", "E2.18")
def test_one_consumer_gets_everything(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    publish(channel, name)
    consumer = Consumer(broker, name)
    run_until(lambda: len(consumer.got) == KEYS, consumer)
    assert sorted(consumer.bodies) == sorted(str(n).encode() for n in range(KEYS))
    assert [method.delivery_tag for method, _ in consumer.got] == list(range(1, KEYS + 1))
    divided(broker, name, [SHARDS])
    consumer.close()


@pytest.mark.row("E2.7", "E2.18")
def test_consumers_divide_the_shards_however_they_come_and_go(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    consumers = [Consumer(broker, name) for _ in range(3)]
    divided(broker, name, [1, 1, 2])
    publish(channel, name)
    run_until(lambda: sum(len(each.got) for each in consumers) == KEYS, *consumers)
    assert all(each.got for each in consumers)
    consumers[0].channel.basic_cancel(consumers[0].tag)
    divided(broker, name, [2, 2])
    consumers[1].close()
    divided(broker, name, [SHARDS])
    more = [Consumer(broker, name) for _ in range(4)]
    divided(broker, name, [0, 1, 1, 1, 1])
    for each in (*consumers, *more):
        each.close()


@pytest.mark.row("E2.19")
def test_one_shard_moves_only_when_its_messages_are_settled(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    slow = Consumer(broker, name, ack=False, arguments={"x-handover-timeout": 60_000})
    publish(channel, name)
    run_until(lambda: len(slow.got) == KEYS, slow)
    other = Consumer(broker, name)
    publish(channel, name)
    run_until(lambda: len(slow.got) > KEYS, slow, other)
    assert not other.got and look(broker, name)["moving"] == SHARDS // 2
    slow.channel.basic_ack(slow.got[-1][0].delivery_tag, multiple=True)
    slow.ack = True
    run_until(lambda: len(slow.got) + len(other.got) == 2 * KEYS, slow, other)
    assert other.got and not any(method.redelivered for method, _ in other.got)
    divided(broker, name, [2, 2])
    slow.close()
    other.close()


def test_what_is_held_too_long_is_requeued_and_a_late_ack_is_no_error(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    slow = Consumer(broker, name, ack=False)
    publish(channel, name)
    run_until(lambda: len(slow.got) == KEYS, slow)
    other = Consumer(broker, name)
    began = time.monotonic()
    run_until(lambda: other.got, slow, other)
    assert time.monotonic() - began < 1.5
    run_until(lambda: look(broker, name)["moving"] == 0, slow, other)
    assert all(method.redelivered for method, _ in other.got)
    slow.channel.basic_ack(slow.got[-1][0].delivery_tag, multiple=True)
    slow.run(0.1)
    assert slow.channel.is_open
    assert channel.queue_declare(name, passive=True).method.message_count == 0
    slow.close()
    other.run(0.1)
    held = len([1 for method, _ in other.got])
    assert 0 < held < KEYS  # the shards that stayed were settled by the slow one
    other.close()


def test_prefetch_is_the_total_of_all_shards(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    publish(channel, name)
    consumer = Consumer(broker, name, prefetch=3, ack=False)
    consumer.run(0.3)
    assert len(consumer.got) == 3
    consumer.channel.basic_ack(2, multiple=True)
    consumer.run(0.3)
    assert len(consumer.got) == 5
    consumer.ack = True
    consumer.channel.basic_ack(5, multiple=True)
    run_until(lambda: len(consumer.got) == KEYS, consumer)
    assert len(set(consumer.bodies)) == KEYS
    consumer.close()


def test_one_busy_shard_may_use_the_whole_prefetch(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    for _ in range(20):
        channel.basic_publish(name, "one key", b"x")
    consumer = Consumer(broker, name, prefetch=10, ack=False)
    run_until(lambda: len(consumer.got) == 10, consumer)
    consumer.close()


def test_nothing_is_lost_or_doubled_when_a_consumer_cancels(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    first = Consumer(broker, name, prefetch=7, ack=False)
    publish(channel, name)
    run_until(lambda: len(first.got) == 7, first)
    first.channel.basic_cancel(first.tag)
    time.sleep(1.0)
    # nobody wants them: kept
    assert channel.queue_declare(name, passive=True).method.message_count == KEYS - 7
    first.channel.basic_ack(first.got[-1][0].delivery_tag, multiple=True)
    first.run(0.1)
    second = Consumer(broker, name)
    run_until(lambda: len(second.got) == KEYS - 7, second)
    assert not {*first.bodies} & {*second.bodies}
    assert not any(method.redelivered for method, _ in second.got)
    first.close()
    second.close()


@pytest.mark.row("E1.8", "E2.8")
def test_get_goes_round_all_shards(channel: BlockingChannel, name: str) -> None:
    publish(channel, name, 2 * KEYS)
    bodies, left = [], []
    for _ in range(2 * KEYS):
        method, _properties, body = channel.basic_get(name, auto_ack=False)
        assert method is not None
        bodies.append(body)
        left.append(method.message_count)
        channel.basic_ack(method.delivery_tag)
    assert channel.basic_get(name)[0] is None
    assert sorted(bodies) == sorted(str(n).encode() for n in range(2 * KEYS))
    assert left == list(range(2 * KEYS - 1, -1, -1))


@pytest.mark.row("E1.10", "E2.9", "E2.10")
def test_purge_and_counts_are_of_the_whole_set(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    publish(channel, name)
    assert channel.queue_declare(name, passive=True).method.message_count == KEYS
    assert channel.queue_purge(name).method.message_count == KEYS
    consumer = Consumer(broker, name)
    divided(broker, name, [SHARDS])
    found = channel.queue_declare(name, passive=True).method
    assert (found.queue, found.message_count, found.consumer_count) == (name, 0, 1)
    consumer.close()


@pytest.mark.row("E1.10", "E2.10")
def test_delete_empties_the_whole_set_and_the_exchange_goes_on(
    broker: RealBroker, connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    publish(channel, name)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="not empty"):
        connection.channel().queue_delete(name, if_empty=True)
    assert channel.queue_delete(name).method.message_count == KEYS
    publish(channel, name)  # mandatory: there are shards again
    consumer = Consumer(broker, name)
    run_until(lambda: len(consumer.got) == KEYS, consumer)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="in use"):
        connection.channel().queue_delete(name, if_unused=True)
    assert channel.queue_delete(name).method.message_count == 0
    publish(channel, name)
    run_until(lambda: len(consumer.got) == 2 * KEYS, consumer)
    assert not consumer.cancelled
    consumer.close()


@pytest.mark.row("E1.9", "E2.10")
@pytest.mark.parametrize("act", ["declare", "bind", "unbind"])
def test_the_name_cannot_be_declared_or_bound(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str, act: str
) -> None:
    other = connection.channel()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        if act == "declare":
            other.queue_declare(name)
        elif act == "bind":
            other.queue_bind(name, "amq.direct", "key")
        else:
            other.queue_unbind(name, "amq.direct", "key")
    assert refused.value.reply_code == 406
    assert (
        refused.value.reply_text
        == f'PRECONDITION_FAILED - Can\'t {act} sharded queue: <<"{name}">>'
    )


@pytest.mark.row("E2.12")
def test_a_real_queue_of_that_name_is_out_of_reach_while_the_exchange_is_a_stream(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare(name, durable=True)
    channel.basic_publish("", name, b"hidden")
    channel.exchange_declare(name, "x-modulus-hash", durable=True, arguments={"x-shards": 2})
    assert channel.basic_get(name)[0] is None
    assert channel.queue_purge(name).method.message_count == 0
    assert channel.queue_delete(name).method.message_count == 0
    channel.exchange_delete(name)
    assert channel.basic_get(name, auto_ack=True)[2] == b"hidden"
    channel.queue_delete(name)


@pytest.mark.row("E2.11")
def test_a_shard_can_be_used_by_its_own_name(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    publish(channel, name)
    queues = [shard["queue"] for shard in look(broker, name)["shards"]]
    counts = [channel.queue_declare(queue, passive=True).method.message_count for queue in queues]
    assert sum(counts) == KEYS and len(queues) == SHARDS
    assert channel.queue_purge(queues[0]).method.message_count == counts[0]
    assert channel.queue_declare(name, passive=True).method.message_count == KEYS - counts[0]


def test_consumers_are_told_when_the_exchange_goes(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    consumers = [
        Consumer(broker, name),
        Consumer(broker, name, arguments={"x-shard-assignment": "least"}),
    ]
    channel.exchange_delete(name)
    run_until(lambda: all(each.cancelled == [each.tag] for each in consumers), *consumers)
    for each in consumers:
        assert each.channel.is_open
        each.close()


@pytest.mark.row("E2.6", "E2.22")
def test_least_takes_the_shards_in_turn(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    consumers = [
        Consumer(broker, name, arguments={"x-shard-assignment": "least"}) for _ in range(SHARDS + 1)
    ]
    found = look(broker, name)
    queues = [shard["queue"] for shard in found["shards"]]
    assert [each["shards"] for each in found["consumers"]] == [
        [queue] for queue in [*queues, queues[0]]
    ]
    publish(channel, name)
    run_until(lambda: sum(len(each.got) for each in consumers) == KEYS, *consumers)
    for each in consumers:
        each.close()


def test_shardctl_shows_who_owns_what(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    consumers = [Consumer(broker, name, consumer_tag=f"tag-{n}") for n in range(2)]
    divided(broker, name, [2, 2])
    url = ["--url", f"http://{broker.http}", "--formatter", "json"]
    listed = CliRunner().invoke(app, ["list_virtual_queues", *url])
    assert {"name": name, "shards": SHARDS, "consumers": 2, "moving": 0} in json.loads(
        listed.stdout
    )
    owners = json.loads(CliRunner().invoke(app, ["list_shard_owners", name, *url]).stdout)
    assert sorted(row["owner"] for row in owners) == ["tag-0", "tag-0", "tag-1", "tag-1"]
    assert [row["index"] for row in owners] == list(range(SHARDS))
    refused = CliRunner().invoke(app, ["list_shard_owners", "amq.direct", *url])
    assert refused.exit_code == 65 and "virtual queue 'amq.direct' in vhost '/'" in refused.output
    for each in consumers:
        each.close()


@pytest.mark.row("E1.8")
def test_random_is_one_shard(broker: RealBroker, channel: BlockingChannel, name: str) -> None:
    consumer = Consumer(broker, name, arguments={"x-shard-assignment": "random"})
    (shown,) = look(broker, name)["consumers"]
    assert len(shown["shards"]) == 1
    consumer.close()


def test_who_is_exclusive_is_alone(broker: RealBroker, channel: BlockingChannel, name: str) -> None:
    alone = Consumer(broker, name, exclusive=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        Consumer(broker, name)
    assert (
        refused.value.reply_text == f"ACCESS_REFUSED - queue '{name}' in vhost '/' in exclusive use"
    )
    alone.close()
    Consumer(broker, name).close()


def test_lower_priorities_stand_by(broker: RealBroker, channel: BlockingChannel, name: str) -> None:
    high, low = Consumer(broker, name, arguments={"x-priority": 5}), Consumer(broker, name)
    divided(broker, name, [0, SHARDS])
    publish(channel, name)
    run_until(lambda: len(high.got) == KEYS, high, low)
    high.close()
    publish(channel, name)
    run_until(lambda: len(low.got) == KEYS, low)
    low.close()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("x-shard-assignment", "most"),
        ("x-shard-assignment", 1),
        ("x-group", 5),
        ("x-key-affinity", "yes"),
        ("x-handover-timeout", -1),
        ("x-handover-timeout", "1s"),
        ("x-priority", "high"),
    ],
)
def test_arguments_are_checked(
    broker: RealBroker, channel: BlockingChannel, name: str, argument: str, value: Any
) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        Consumer(broker, name, arguments={argument: value})
    assert refused.value.reply_code == 406
    assert refused.value.reply_text.startswith(
        f"PRECONDITION_FAILED - invalid arg '{argument}' for queue '{name}'"
    )


def test_without_acks_too(broker: RealBroker, channel: BlockingChannel, name: str) -> None:
    publish(channel, name)
    consumers = [Consumer(broker, name, ack=False, auto_ack=True) for _ in range(2)]
    run_until(lambda: sum(len(each.got) for each in consumers) == KEYS, *consumers)
    publish(channel, name)
    run_until(lambda: sum(len(each.got) for each in consumers) == 2 * KEYS, *consumers)
    divided(broker, name, [2, 2])
    for each in consumers:
        each.close()


def test_a_transaction_holds_its_acks_until_it_is_committed(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    consumer = Consumer(broker, name, ack=False)
    consumer.channel.tx_select()
    publish(channel, name)
    run_until(lambda: len(consumer.got) == KEYS, consumer)
    consumer.channel.basic_ack(0, multiple=True)
    consumer.channel.tx_commit()
    consumer.close()
    assert channel.queue_declare(name, passive=True).method.message_count == 0


def test_a_key_stays_with_one_consumer_while_it_has_an_unacknowledged_message_of_it(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare(name, "x-modulus-hash", durable=True, arguments={"x-shards": 2})
    arguments = {"x-key-affinity": True}
    consumers = [
        Consumer(broker, name, prefetch=4, ack=False, arguments=arguments) for _ in range(5)
    ]
    shared(broker, name, [2, 3])
    publish(channel, name, 2 * KEYS)
    acknowledged: set[bytes] = set()
    last: dict[str, int] = {}
    while len(acknowledged) < 2 * KEYS:
        run_until(lambda: sum(len(each.got) for each in consumers) > len(acknowledged), *consumers)
        for consumer in consumers:
            consumer.run(0.02)
        # Of what is unacknowledged now, each key is with one consumer only.
        keys = [
            {method.routing_key for method, body in each.got if body not in acknowledged}
            for each in consumers
        ]
        assert sum(map(len, keys)) == len(set().union(*keys))
        for consumer in consumers:
            for method, body in consumer.got:
                if body not in acknowledged:
                    assert int(body) > last.get(method.routing_key, -1) and not method.redelivered
                    last[method.routing_key] = int(body)
                    acknowledged.add(body)
                    consumer.channel.basic_ack(method.delivery_tag)
    for consumer in consumers:
        consumer.close()
    connection.channel().exchange_delete(name)


@pytest.mark.row("D12", "D13")
def test_streams_are_read_whole_by_each_and_divided_within_a_group(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    arguments = {"x-shards": SHARDS, "x-shard-arguments": {"x-queue-type": "stream"}}
    channel.exchange_declare(name, "x-modulus-hash", durable=True, arguments=arguments)
    publish(channel, name)
    first = {"x-stream-offset": "first"}
    alone = [Consumer(broker, name, prefetch=40, arguments=first) for _ in range(2)]
    run_until(lambda: all(len(each.got) == KEYS for each in alone), *alone)
    group = [
        Consumer(broker, name, prefetch=40, arguments=first | {"x-group": "g"}) for _ in range(2)
    ]
    run_until(lambda: sum(len(each.got) for each in group) >= KEYS, *group)
    assert {*group[0].bodies, *group[1].bodies} == {str(n).encode() for n in range(KEYS)}
    for each in (*alone, *group):
        each.run(0.1)
        each.close()
    publish(channel, name)
    later = Consumer(broker, name, prefetch=40, arguments=first | {"x-group": "g"})
    run_until(lambda: len(later.got) >= KEYS, later)
    later.run(0.2)
    assert len(later.got) == KEYS  # the group goes on where it was
    later.close()
    channel.exchange_delete(name)


def shared(broker: RealBroker, name: str, loads: list[int]) -> None:
    """Until the shards have so many consumers each."""

    def is_so() -> bool:
        found = look(broker, name)
        return (
            not found["moving"]
            and sorted(len(shard["owners"]) for shard in found["shards"]) == loads
        )

    wait_until(is_so, f"{loads} consumers of the shards", WITHIN_S)


def test_the_limit_of_a_channel_holds_too_and_what_is_recovered_or_rejected_comes_again(
    broker: RealBroker, channel: BlockingChannel, name: str
) -> None:
    publish(channel, name)
    consumer = Consumer(broker, name, prefetch=7, ack=False)

    def gets(count: int) -> None:
        """So many in all, and no more."""
        run_until(lambda: len(consumer.got) >= count, consumer)
        consumer.run(0.2)
        assert len(consumer.got) == count

    gets(7)
    consumer.channel.basic_qos(prefetch_count=3, global_qos=True)
    consumer.channel.basic_ack(5, multiple=True)
    gets(8)  # two of the seven, and one more
    consumer.channel.basic_qos(prefetch_count=0, global_qos=True)
    gets(5 + 7)
    recovered = {body for _, body in consumer.got[5:12]}
    consumer.channel.basic_recover(requeue=True)
    gets(5 + 7 + 7)
    again = consumer.got[-7:]  # some may be of shards whose turn it is
    assert all(method.redelivered == (body in recovered) for method, body in again)
    consumer.channel.basic_nack(again[-1][0].delivery_tag, multiple=True, requeue=False)
    consumer.ack = True
    run_until(lambda: channel.queue_declare(name, passive=True).method.message_count == 0, consumer)
    consumer.run(0.2)
    consumer.close()
    settled = {body for _, body in consumer.got}
    assert len(settled) == KEYS
    assert {body for method, body in consumer.got if method.redelivered} == recovered
    assert channel.queue_declare(name, passive=True).method.message_count == 0
