"""A disk runs full: publishers are blocked and told why.

Deliveries and acknowledgements go on, and publishers too when there is room again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import aiormq
import pytest
from pamqp import base, commands

from tests.support.crash_clients import Listener, Publishing, connected, wait_for
from tests.support.raw_client import RawClient, publish
from tests.support.raw_client import method as raw_method
from tests.support.real_broker import RealBroker, wait_until
from tests.support.small_disk import small_disk, take_all_bytes, take_all_inodes

pytestmark = pytest.mark.crash

DISK_MIB = 64
FREE_MIN_MIB = 24
BODY_BYTES = 100_000

SETTINGS = """
[shards]
segment_bytes = {}
disk_free_min_bytes = {}
"""


@pytest.fixture
def inodes() -> int:
    """0: as many as there are."""
    return 0


@pytest.fixture
def disk(tmp_path: Path, inodes: int) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", mib=DISK_MIB, inodes=inodes) as made:
        yield made


@pytest.fixture
def free_min_mib() -> int:
    return FREE_MIN_MIB


@pytest.fixture
def broker(disk: Path, tmp_path: Path, free_min_mib: int) -> Iterator[RealBroker]:
    settings = tmp_path / "broker.toml"
    settings.write_text(SETTINGS.format(4 << 20, free_min_mib << 20))
    made = RealBroker(disk / "data", shards=1, forked=False, more=("--config", str(settings)))
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


async def test_publishers_are_blocked_and_nothing_confirmed_is_lost(broker: RealBroker) -> None:
    listener = Listener(broker)
    try:
        async with connected(broker) as publishing, connected(broker) as consuming:
            channel = await publishing.channel()
            await channel.declare_queue("q", durable=True)
            publisher = Publishing(channel, "q", 20, padding=BODY_BYTES)
            await wait_for(lambda: listener.blocked, "connection.blocked")
            assert listener.reasons == ["low on disk"]
            await asyncio.sleep(0.3)
            held = len(publisher.confirmed)
            arrived: set[bytes] = set()
            reader = await consuming.channel()
            await reader.set_qos(10)
            queue = await reader.get_queue("q")

            async def collect(message: object) -> None:
                arrived.add(message.body.partition(b":")[0])  # type: ignore[attr-defined]
                await message.ack()  # type: ignore[attr-defined]

            await queue.consume(collect)
            await wait_for(lambda: len(arrived) >= held, "deliveries while publishers are blocked")
            await wait_for(lambda: not listener.blocked, "connection.unblocked")
            await wait_for(lambda: len(publisher.confirmed) > held + 20, "confirms afterwards")
            await publisher.finish()
            await wait_for(lambda: set(publisher.confirmed) <= arrived, "all that was confirmed")
    finally:
        listener.stop()


@pytest.mark.parametrize("free_min_mib", [0])
async def test_with_not_a_byte_left_publishes_are_nacked_and_the_rest_goes_on(
    broker: RealBroker, disk: Path, free_min_mib: int
) -> None:
    """Another program took the room that the alarm was to keep."""
    async with connected(broker) as publishing, connected(broker) as consuming:
        channel = await publishing.channel()
        reader = await consuming.channel()
        await reader.set_qos(10)
        queue = await channel.declare_queue("q", durable=True)
        publisher = Publishing(channel, "q", 5, padding=BODY_BYTES)
        await wait_for(lambda: len(publisher.confirmed) > 50, "confirms")
        free = take_all_bytes(disk)
        await wait_for(lambda: publisher.nacked > 0, "nacks")
        transactional = await publishing.channel(publisher_confirms=False)
        transaction = transactional.transaction()
        await transaction.select()
        await transactional.default_exchange.publish(
            aio_pika.Message(bytes(5 << 20), delivery_mode=2), "q"
        )
        with pytest.raises(aiormq.exceptions.ChannelPreconditionFailed):
            await transaction.commit()
        with contextlib.suppress(aiormq.exceptions.AMQPError):  # refused, but no process ends
            async with connected(broker) as other:
                await asyncio.wait_for(
                    (await other.channel()).declare_queue("other", durable=True), 60
                )
        arrived: set[bytes] = set()

        async def collect(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            arrived.add(message.body.partition(b":")[0])
            await message.ack()

        await (await reader.get_queue(queue.name)).consume(collect)
        await wait_for(lambda: set(publisher.confirmed) <= arrived, "deliveries on a full disk")
        free()
        before = len(publisher.confirmed)
        await wait_for(lambda: len(publisher.confirmed) > before + 10, "confirms afterwards")
        await publisher.finish()
        await wait_for(lambda: set(publisher.confirmed) <= arrived, "all that was confirmed")
        assert all(child["restarts"] == 0 for child in broker.status()["children"])


def call(broker: RealBroker, method: str, path: str, body: object = None) -> tuple[int, str]:
    """Status and reason of a call of the HTTP API."""
    host, _, port = broker.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    login = base64.b64encode(b"guest:guest").decode()
    try:
        connection.request(method, path, json.dumps(body), {"Authorization": f"Basic {login}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


POLICY = {"pattern": "^a", "definition": {"max-length": 9}, "apply-to": "queues", "priority": 0}
PUTS: dict[str, object] = {
    "/api/queues/%2f/{}": {"durable": True},
    "/api/queues/%2f/{}-stream": {"durable": True, "arguments": {"x-queue-type": "stream"}},
    "/api/exchanges/%2f/{}": {"type": "topic", "durable": True},
    "/api/exchanges/%2f/{}-shards": {
        "type": "x-random",
        "durable": True,
        "arguments": {"x-shards": 2},
    },
    "/api/users/{}": {"password": "p", "tags": ""},
    "/api/vhosts/{}": {},
    "/api/policies/%2f/{}": POLICY,
    "/api/operator-policies/%2f/{}": POLICY,
    "/api/global-parameters/{}": {"value": {"a": 1}},
}
DECLARES = {
    "queue": lambda channel, name: channel.declare_queue(f"{name}-amqp", durable=True),
    "stream": lambda channel, name: channel.declare_queue(
        f"{name}-amqp-stream", durable=True, arguments={"x-queue-type": "stream"}
    ),
    "exchange": lambda channel, name: channel.declare_exchange(
        f"{name}-amqp", "topic", durable=True
    ),
    "stream exchange": lambda channel, name: channel.declare_exchange(
        f"{name}-amqp-shards", "x-random", durable=True, arguments={"x-shards": 2}
    ),
    "server-named queue": lambda channel, name: channel.declare_queue("", exclusive=True),
}


async def declare_all(broker: RealBroker, name: str, refused: bool) -> None:
    for kind, declare in DECLARES.items():
        async with connected(broker) as connection:
            channel = await connection.channel()
            if refused:
                with pytest.raises(aiormq.exceptions.AMQPError, match="no room for definitions"):
                    await asyncio.wait_for(declare(channel, name), 60)
            else:
                assert await asyncio.wait_for(declare(channel, name), 60), kind
    for path, body in PUTS.items():
        status, text = call(broker, "PUT", path.format(name), body)
        if refused:
            assert (path, status) == (path, 507) and "no room for definitions" in text
        else:
            assert status in (201, 204), (path, status, text)


async def publish_and_get(broker: RealBroker, queue: str, body: bytes) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.default_exchange.publish(aio_pika.Message(body, delivery_mode=2), queue)
        message = await (await channel.get_queue(queue)).get(timeout=60)
        assert message is not None and message.body == body
        await message.ack()


@pytest.mark.parametrize(
    ("free_min_mib", "inodes"), [pytest.param(0, 0, marks=pytest.mark.torture), (0, 400)]
)
async def test_on_a_full_disk_declares_are_refused_no_process_ends_and_every_start_works(
    broker: RealBroker, disk: Path, inodes: int, free_min_mib: int
) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.declare_queue("kept", durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"stays", delivery_mode=2), "kept")
    await declare_all(broker, "before", refused=False)
    fill = take_all_inodes if inodes else take_all_bytes
    free = fill(disk)
    await declare_all(broker, "full", refused=True)
    assert call(broker, "DELETE", "/api/users/before")[0] == 204
    assert call(broker, "DELETE", "/api/queues/%2f/before")[0] == 204
    assert call(broker, "GET", "/api/overview")[0] == 200
    for kind in ("controller", "shard", "front-door"):
        kill_child(broker, kind)
    await declare_all(broker, "full", refused=True)
    broker.kill_all()
    broker.restart()
    await declare_all(broker, "full", refused=True)
    broker.stop()
    broker.restart()
    assert call(broker, "GET", "/api/users/before")[0] == 404
    assert call(broker, "GET", "/api/queues/%2f/before")[0] == 404
    assert call(broker, "GET", "/api/queues/%2f/before-amqp-stream")[0] == 200
    free()
    await declare_all(broker, "after", refused=False)
    async with connected(broker) as connection:
        message = await (await (await connection.channel()).get_queue("kept")).get(timeout=60)
        assert message is not None and message.body == b"stays"
    await publish_and_get(broker, "after", b"again")


def refused_with_541(broker: RealBroker, asked: base.Frame) -> None:
    """Check that the broker closes the connection for want of room, and names the method."""
    with RawClient(broker.port) as client:
        client.shake_hands()
        client.send(raw_method(1, asked))
        said = client.expect(commands.Connection.Close)
        assert said.reply_code == 541 and "no room" in said.reply_text
        assert (said.class_id, said.method_id) == (asked.index >> 16, asked.index & 0xFFFF)


@pytest.mark.parametrize(("free_min_mib", "inodes"), [(0, 400)])
async def test_on_a_full_disk_purges_of_streams_and_reply_queues_are_refused_by_name(
    broker: RealBroker, disk: Path, inodes: int, free_min_mib: int
) -> None:
    purge, path = commands.Queue.Purge(queue="kept"), "/api/queues/%2f/kept"
    shards = "/api/virtual-queues/%2f/kept-shards/contents"
    reader = commands.Basic.Consume(
        queue="kept", consumer_tag="r", arguments={"x-stream-offset": "first"}
    )
    replies = commands.Basic.Consume(queue="amq.rabbitmq.reply-to", no_ack=True)
    arguments = {"x-shards": 1, "x-shard-arguments": {"x-queue-type": "stream"}}
    with RawClient(broker.port) as client:
        client.shake_hands()
        declare = commands.Queue.Declare(
            queue="kept", durable=True, arguments={"x-queue-type": "stream"}
        )
        client.ask(1, declare, commands.Queue.DeclareOk)
        declared = commands.Exchange.Declare(
            exchange="kept-shards", exchange_type="x-random", durable=True, arguments=arguments
        )
        client.ask(1, declared, commands.Exchange.DeclareOk)
        client.ask(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        for exchange, key in (("", "kept"), ("kept-shards", "any")):
            client.send(publish(1, exchange, key, b"stays"))
            client.expect(commands.Basic.Ack)
    free = take_all_inodes(disk)
    refused_with_541(broker, purge)
    refused_with_541(broker, commands.Queue.Purge(queue="kept-shards"))
    refused_with_541(broker, replies)
    for asked in (f"{path}/contents", shards):
        status, text = call(broker, "DELETE", asked)
        assert (asked, status) == (asked, 507) and "is not purged: no room" in text
    with RawClient(broker.port) as client:
        client.shake_hands()
        client.ask(1, commands.Basic.Qos(prefetch_count=9), commands.Basic.QosOk)
        client.ask(1, reader, commands.Basic.ConsumeOk)
        client.expect(commands.Basic.Deliver)
        assert client.content() == b"stays"
    free()
    with RawClient(broker.port) as client:
        client.shake_hands()
        client.ask(1, replies, commands.Basic.ConsumeOk)
        assert client.ask(1, purge, commands.Queue.PurgeOk).message_count == 1
    assert call(broker, "DELETE", shards)[0] == 204
    # A shard that did not answer in time has no numbers, for a second.
    wait_until(
        lambda: json.loads(call(broker, "GET", path)[1]).get("messages") == 0,
        "the stream to be empty",
    )


def kill_child(broker: RealBroker, kind: str) -> None:
    """As `RealBroker.kill`, where status.json may not be up to date: the disk is full."""
    pids = children_of(broker.process.pid, kind)
    os.kill(pids[0], signal.SIGKILL)

    def is_back() -> bool:
        now = children_of(broker.process.pid, kind)
        return (
            bool(now)
            and now[0] != pids[0]
            and call(broker, "GET", "/api/health/checks/local-alarms")[0] != 0
        )

    def answers() -> bool:
        try:
            return is_back()
        except OSError:
            return False

    wait_until(answers, f"{kind} to come back", 120)


MODULES = {
    "controller": "shardmq.broker.controller",
    "shard": "shardmq.shardd",
    "front-door": "shardmq.broker.front_door",
}


def children_of(pid: int, kind: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and f"-m\0{MODULES[kind]}\0" in (path / "cmdline").read_text():
                found.append(int(path.name))
    return sorted(found)
