"""Test stream exchanges over a whole broker.

They are made in each way, seen everywhere, and changed and ended without loss.
"""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import aio_pika.exceptions
import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.support.real_broker import RealBroker, wait_until

NODE = "shardmq@localhost"
EMPTY_S_MAX = 60.0  # two looks at an empty queue, on a crowded machine


def shardctl(broker: RealBroker, *arguments: str) -> str:
    """Run shardctl, which must succeed; return its output."""
    result = CliRunner().invoke(
        app, [*arguments, "--url", f"http://{broker.http.replace('0.0.0.0', '127.0.0.1')}"]
    )
    assert result.exit_code == 0, result.output
    return result.output


def rows(broker: RealBroker, *arguments: str) -> Any:
    return json.loads(shardctl(broker, *arguments, "--formatter", "json"))


@pytest.fixture
def vhost(broker: RealBroker, name: str) -> Iterator[str]:
    shardctl(broker, "add_vhost", name)
    shardctl(broker, "set_permissions", "--vhost", name, "guest", ".*", ".*", ".*")
    yield name
    shardctl(broker, "delete_vhost", name)


@pytest.fixture
def channel(broker: RealBroker, vhost: str) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.ConnectionParameters(broker.host, broker.port, vhost))
    made = connection.channel()
    made.confirm_delivery()
    yield made
    connection.close()


def shards_of(broker: RealBroker, vhost: str, exchange: str) -> list[dict[str, Any]]:
    columns = ("name", "exchange", "index", "shard", "shard_state", "durable")
    found = [
        row
        for row in rows(broker, "list_queues", *columns, "--vhost", vhost)
        if row["exchange"] == exchange
    ]
    return sorted(found, key=lambda row: row["index"])


def names_of(broker: RealBroker, vhost: str, exchange: str) -> list[str]:
    return [row["name"] for row in shards_of(broker, vhost, exchange)]


def counts(channel: BlockingChannel, queues: list[dict[str, Any]]) -> list[int]:
    """Ready messages; listings may be a moment old."""
    return [channel.queue_declare(row["name"], passive=True).method.message_count for row in queues]


def publish(channel: BlockingChannel, exchange: str, count: int) -> None:
    for i in range(count):
        channel.basic_publish(
            exchange, f"key-{i}", f"{i}".encode(), pika.BasicProperties(delivery_mode=2), True
        )


@pytest.mark.row("E2.3", "E2.4", "E2.5", "E3.10")
@pytest.mark.parametrize("type", ["x-consistent-hash", "x-modulus-hash", "x-random"])
def test_x_shards_makes_queues_that_get_each_message_once(
    broker: RealBroker, channel: BlockingChannel, vhost: str, type: str
) -> None:
    channel.exchange_declare("images", type, durable=True, arguments={"x-shards": 4})
    publish(channel, "images", 200)
    found = shards_of(broker, vhost, "images")
    assert [row["name"] for row in found] == [f"sharding: images - {NODE} - {i}" for i in range(4)]
    assert [row["index"] for row in found] == [0, 1, 2, 3]
    assert sorted(row["shard"] for row in found) == [0, 0, 1, 1]
    assert {(row["shard_state"], row["durable"]) for row in found} == {("active", True)}
    assert sum(counts(channel, found)) == 200
    assert min(counts(channel, found)) > 20
    (exchange,
     ) = [row for row in rows(broker, "list_exchanges", "name", "shard_queues", "--vhost", vhost)
                   if row["name"] == "images"]  # fmt: skip
    assert exchange["shard_queues"] == [row["name"] for row in found]


@pytest.mark.row("E2.1", "E2.2", "J15")
def test_a_policy_as_rabbitmq_sharding_takes_it(
    broker: RealBroker, channel: BlockingChannel, vhost: str
) -> None:
    channel.exchange_declare("shard.images", "x-modulus-hash")
    definition = '{"shards-per-node": 2, "routing-key": "1234"}'
    shardctl(broker, "set_policy", "images-shard", "^shard.images$", definition, "--vhost", vhost)
    assert names_of(broker, vhost, "shard.images") == [
        f"sharding: shard.images - {NODE} - {i}" for i in range(2)
    ]
    publish(channel, "shard.images", 50)
    assert sum(counts(channel, shards_of(broker, vhost, "shard.images"))) == 50
    refused = CliRunner().invoke(
        app,
        [
            "set_policy",
            "p",
            "^x",
            '{"shards-per-node": 0}',
            "--vhost",
            vhost,
            "--url",
            f"http://{broker.http}",
        ],
    )
    assert refused.exit_code == 70
    assert "shards-per-node should be greater than 0, actually was 0" in refused.output


@pytest.mark.row("E1.1", "E1.2", "E1.3", "E1.4", "E1.5", "E1.7", "E1.14")
def test_a_stream_definition_as_the_first_plugin_takes_it(
    broker: RealBroker, channel: BlockingChannel, vhost: str
) -> None:
    shardctl(broker, "set_parameter", "stream", "routing-key", '"4321"', "--vhost", vhost)
    said = '{"local-username": "guest", "shards-per-node": 2, "routing-key": "1234"}'
    shardctl(broker, "set_parameter", "stream-definition", "my_stream", said, "--vhost", vhost)
    shardctl(
        broker,
        "set_policy",
        "my_stream",
        r"^shard\.",
        '{"stream-definition": "my_stream"}',
        "--vhost",
        vhost,
    )
    channel.exchange_declare("shard.logs_stream", "x-consistent-hash", durable=True)
    assert names_of(broker, vhost, "shard.logs_stream") == [
        f"stream: shard.logs_stream - {NODE} - {i}" for i in (0, 1)
    ]
    assert keys_of(broker, vhost) == {"1234"}
    publish(channel, "shard.logs_stream", 50)
    said = '{"shards-per-node": 3}'
    shardctl(broker, "set_parameter", "stream-definition", "my_stream", said, "--vhost", vhost)
    # The bindings change when the shards of the new queue know it.
    wait_until(lambda: keys_of(broker, vhost) == {"4321"}, "the bindings to change")
    found = shards_of(broker, vhost, "shard.logs_stream")
    assert [row["shard_state"] for row in found] == ["active"] * 3
    assert sum(counts(channel, found)) == 50


def keys_of(broker: RealBroker, vhost: str) -> set[str]:
    found = rows(broker, "list_bindings", "source_name", "routing_key", "--vhost", vhost)
    return {row["routing_key"] for row in found if row["source_name"]}


@pytest.mark.row("E2.13", "E2.14", "E2.11")
def test_fewer_shards_keep_what_is_in_the_others_until_it_is_taken(
    broker: RealBroker, channel: BlockingChannel, vhost: str
) -> None:
    channel.exchange_declare("e", "x-modulus-hash")
    shardctl(broker, "set_policy", "p", "^e$", '{"shards-per-node": 4}', "--vhost", vhost)
    publish(channel, "e", 100)
    shardctl(broker, "set_policy", "p", "^e$", '{"shards-per-node": 2}', "--vhost", vhost)
    before = shards_of(broker, vhost, "e")
    assert [row["shard_state"] for row in before] == ["active", "active", "draining", "draining"]
    there = counts(channel, before)
    assert sum(there) == 100
    publish(channel, "e", 100)
    after = shards_of(broker, vhost, "e")
    assert counts(channel, after)[2:] == there[2:]
    # the last message of a queue may be with a consumer
    held, _, _ = channel.basic_get(after[2]["name"])
    assert held is not None
    for row in after[2:]:
        while channel.basic_get(row["name"], auto_ack=True)[0] is not None:
            pass
    wait_until(
        lambda: len(names_of(broker, vhost, "e")) == 3, "the emptied queue to go", EMPTY_S_MAX
    )
    assert after[2]["name"] in names_of(broker, vhost, "e")
    channel.basic_ack(held.delivery_tag)
    wait_until(lambda: len(names_of(broker, vhost, "e")) == 2, "the other one to go", EMPTY_S_MAX)


@pytest.mark.row("E2.15")
def test_a_deleted_exchange_leaves_its_messages_until_they_are_taken_or_says_delete(
    broker: RealBroker, channel: BlockingChannel, vhost: str
) -> None:
    for exchange, choice in (("stays", "drain"), ("goes", "delete"), ("empty", "drain")):
        arguments: dict[str, Any] = {"x-shards": 2, "x-shards-when-gone": choice}
        channel.exchange_declare(exchange, "x-random", arguments=arguments)
    publish(channel, "stays", 20)
    publish(channel, "goes", 20)
    for exchange in ("stays", "goes", "empty"):
        channel.exchange_delete(exchange, if_unused=True)
    assert names_of(broker, vhost, "goes") == []
    wait_until(
        lambda: not names_of(broker, vhost, "empty"), "empty shard queues to go", EMPTY_S_MAX
    )
    assert sum(counts(channel, shards_of(broker, vhost, "stays"))) == 20
    channel.exchange_declare("stays", "x-random", arguments={"x-shards": 2})
    assert [row["shard_state"] for row in shards_of(broker, vhost, "stays")] == ["active"] * 2


async def test_a_refused_message_is_the_one_that_is_nacked(broker: RealBroker, name: str) -> None:
    """Messages of many keys in one read go to their queues in another order.

    Their confirms name the right ones.
    """
    connection = await aio_pika.connect(broker.url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        arguments: dict[str, Any] = {
            "x-shards": 4,
            "x-shard-arguments": {"x-max-length": 5, "x-overflow": "reject-publish"},
            "x-shards-when-gone": "delete",
        }
        exchange = await channel.declare_exchange(name, "x-consistent-hash", arguments=arguments)
        published = [
            exchange.publish(aio_pika.Message(f"{i}".encode()), f"key-{i}", mandatory=False)
            for i in range(300)
        ]
        outcomes = await asyncio.gather(*published, return_exceptions=True)
        refused = {
            i
            for i, outcome in enumerate(outcomes)
            if isinstance(outcome, aio_pika.exceptions.DeliveryError)
        }
        stored: set[int] = set()
        for index in range(4):
            queue = await channel.get_queue(f"sharding: {name} - {NODE} - {index}")
            while (message := await queue.get(no_ack=True, fail=False)) is not None:
                stored.add(int(message.body))
        assert len(stored) == 20
        assert stored == set(range(300)) - refused
        await channel.exchange_delete(name)


@pytest.mark.row("E2.2")
def test_a_number_that_cannot_be_closes_the_channel(channel: BlockingChannel) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
        channel.exchange_declare("e", "x-random", arguments={"x-shards": 0})
    assert closed.value.reply_code == 406
    assert (
        closed.value.reply_text
        == "PRECONDITION_FAILED - x-shards should be greater than 0, actually was 0"
    )


@pytest.mark.row("E3.3", "E3.5", "E3.2")
@pytest.mark.parametrize("algorithm", ["ring", "jump"])
def test_what_route_explain_says_is_what_happens(
    broker: RealBroker, channel: BlockingChannel, vhost: str, algorithm: str
) -> None:
    arguments: dict[str, Any] = {"x-shards": 5, "hash-header": "customer", "x-algorithm": algorithm}
    channel.exchange_declare("e", "x-consistent-hash", arguments=arguments)
    for i in range(20):
        said = rows(broker, "route", "explain", "e", "k", f"customer=c{i}", "--vhost", vhost)
        channel.basic_publish("e", "k", b"x", pika.BasicProperties(headers={"customer": f"c{i}"}))
        (queue,) = said["queues"]
        assert channel.basic_get(queue["name"], auto_ack=True)[0] is not None
        assert said["hops"][0]["hash"]["hashed"] == f"c{i}"


def test_route_explain_and_ring_show_in_words(
    broker: RealBroker, channel: BlockingChannel, vhost: str
) -> None:
    channel.exchange_declare(
        "e", "x-consistent-hash", arguments={"x-shards": 2, "alternate-exchange": "amq.fanout"}
    )
    told = shardctl(broker, "route", "explain", "e", "k", "--vhost", vhost)
    assert "exchange 'e' (x-consistent-hash): queue 'sharding: e - " in told
    assert "rendezvous of 2 by routing key 'k'" in told
    assert "no match" in shardctl(broker, "route", "explain", "amq.direct", "k", "--vhost", vhost)
    shown = shardctl(broker, "ring", "show", "e", "--vhost", vhost)
    assert shown.count("50.00%") == 2
    refused = CliRunner().invoke(
        app, ["ring", "show", "amq.topic", "--url", f"http://{broker.http}"]
    )
    assert refused.exit_code == 70
    assert "exchange 'amq.topic' of type topic does not spread its messages" in refused.output
    missing = CliRunner().invoke(
        app, ["route", "explain", "none", "k", "--url", f"http://{broker.http}"]
    )
    assert missing.exit_code == 65
    assert "exchange 'none' in vhost '/' does not exist" in missing.output


@pytest.mark.broker
@pytest.mark.row("E2.5", "E3.8")
def test_after_a_restart_the_set_is_whole_and_every_key_goes_where_it_went(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data")
    try:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        channel.confirm_delivery()
        channel.exchange_declare("e", "x-consistent-hash", durable=True, arguments={"x-shards": 5})
        publish(channel, "e", 100)
        channel.queue_delete(f"sharding: e - {NODE} - 4")
        before = shards_of(broker, "/", "e")
        # the one deleted is made anew at once
        assert [row["index"] for row in before] == [0, 1, 2, 3, 4]
        assert (
            channel.queue_declare(f"sharding: e - {NODE} - 4", passive=True).method.message_count
            == 0
        )
        owners = {key: owner(broker, key) for key in map(str, range(30))}
        connection.close()
        broker.stop()
        broker.restart()
        assert shards_of(broker, "/", "e") == before
        assert {key: owner(broker, key) for key in owners} == owners
        broker.stop()
    finally:
        broker.clean_up()


@pytest.mark.broker
@pytest.mark.row("E2.17")
def test_a_killed_shard_loses_nothing_that_was_confirmed(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data")
    try:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        channel.confirm_delivery()
        channel.exchange_declare("e", "x-consistent-hash", durable=True, arguments={"x-shards": 4})
        confirmed = {i for i in range(400) if published(broker, channel, i)}
        assert len(confirmed) > 300
        stored: set[int] = set()
        for row in shards_of(broker, "/", "e"):
            while (got := channel.basic_get(row["name"], auto_ack=True))[0] is not None:
                stored.add(int(got[2]))
        assert confirmed <= stored
        connection.close()
        broker.stop()
    finally:
        broker.clean_up()


def published(broker: RealBroker, channel: BlockingChannel, number: int) -> bool:
    """Whether it was confirmed. A shard is killed in the middle of all."""
    if number == 200:
        broker.kill("shard", 0)
    try:
        persistent = pika.BasicProperties(delivery_mode=2)
        channel.basic_publish(
            "e", f"key-{number}", f"{number}".encode(), persistent, mandatory=True
        )
    except pika.exceptions.NackError:
        return False
    return True


@pytest.mark.row("E2.21")
def test_the_shards_may_be_streams(
    broker: RealBroker, channel: BlockingChannel, vhost: str
) -> None:
    arguments: dict[str, Any] = {"x-shards": 2, "x-shard-arguments": {"x-queue-type": "stream"}}
    channel.exchange_declare("e", "x-consistent-hash", durable=True, arguments=arguments)
    publish(channel, "e", 20)
    found = rows(broker, "list_queues", "name", "type", "exchange", "--vhost", vhost)
    assert [row["type"] for row in found if row["exchange"] == "e"] == ["stream", "stream"]


def owner(broker: RealBroker, key: str) -> str:
    (queue,) = rows(broker, "route", "explain", "e", key)["queues"]
    return str(queue["name"])


@pytest.mark.row("E2.5")
def test_definitions_go_out_and_in_with_their_sets(
    broker: RealBroker, channel: BlockingChannel, vhost: str
) -> None:
    channel.exchange_declare("e", "x-consistent-hash", durable=True, arguments={"x-shards": 3})
    shardctl(broker, "set_policy", "p", "^f$", '{"shards-per-node": 2}', "--vhost", vhost)
    channel.exchange_declare("f", "x-modulus-hash", durable=True)
    exported = http(broker, "GET", f"definitions/{vhost}")
    copy = f"{vhost}-copy"
    shardctl(broker, "add_vhost", copy)
    http(broker, "POST", f"definitions/{copy}", exported)
    for exchange in ("e", "f"):
        assert names_of(broker, copy, exchange) == names_of(broker, vhost, exchange)
    shardctl(broker, "delete_vhost", copy)


def http(broker: RealBroker, method: str, path: str, body: Any = None) -> Any:
    address = broker.http.replace("0.0.0.0", "127.0.0.1")
    headers = {"Authorization": f"Basic {base64.b64encode(b'guest:guest').decode()}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{address}/api/{path}", data, headers, method=method),
        timeout=30,
    ) as answer:
        text = answer.read()
        return json.loads(text) if text else None
