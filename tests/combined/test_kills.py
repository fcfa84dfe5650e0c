"""A shard that is a front door dies with the connections of its clients.

No confirmed message is lost. Its clients come again elsewhere at once. The clients of other front
doors wait for its queues.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import pika
import pika.exceptions
import pytest

from tests.consumer_groups.test_kills import test_processes_of_the_broker_die as test_groups
from tests.support.brokers import Api
from tests.support.crash_clients import connected_to_both_doors, wait_for
from tests.support.kill_rounds import Rounds, started
from tests.support.real_broker import RealBroker, is_running, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.crash]

__all__ = ["test_groups"]

ROUNDS = 4
MESSAGES = 400
ANOTHER_S = 5.0


@pytest.fixture(scope="module")
def broker(combined: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Yield a broker whose processes may die often."""
    with started(tmp_path_factory.mktemp("killable")) as made:
        yield made


def queue_on(connection: pika.BlockingConnection, api: Api, name: str, shard: int) -> str:
    """Declare a durable queue that lies on this shard; return its name."""
    channel = connection.channel()
    for number in range(64):
        queue = f"{name}-{number}"
        channel.queue_declare(queue, durable=True)
        if api(f"/api/queues/%2F/{queue}")["shard"] == shard:
            return queue
    raise AssertionError(f"no queue lies on shard {shard}")


async def test_a_consumer_elsewhere_gets_all_that_was_confirmed_in_order_after_a_kill(
    broker: RealBroker, connection: pika.BlockingConnection, api: Api, name: str
) -> None:
    queue = queue_on(connection, api, name, 0)
    connection.close()  # it may be one of the process that is killed
    got: list[int] = []
    async with connected_to_both_doors(broker) as (_, away):
        channel = await away.channel()

        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            if not got or int(message.body) > got[-1]:
                got.append(int(message.body))
            assert int(message.body) == got[-1] or message.redelivered
            await message.ack()

        await (await channel.get_queue(queue)).consume(take)
        publisher = await away.channel()
        confirmed: list[int] = []
        killed_at = MESSAGES // 2
        for number in range(MESSAGES):
            if number == killed_at:
                os.kill(broker.pid("shard", 0), signal.SIGKILL)
            message = aio_pika.Message(
                b"%d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            try:
                await publisher.default_exchange.publish(message, queue)
                confirmed.append(number)
            except aio_pika.exceptions.DeliveryError:  # nacked: the shard was gone
                pass
        assert not away.is_closed
        await wait_for(lambda: set(confirmed) <= set(got), "all that was confirmed")
        assert len(confirmed) > killed_at and confirmed[-1] > killed_at
    wait_until(lambda: ready(broker, 0), "shard 0 to be back")


def test_clients_of_a_process_that_died_come_again_at_once_elsewhere(
    broker: RealBroker, api: Api
) -> None:
    old, connected, slowest_s = broker.pid("shard", 0), 0, 0.0
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: not is_running(old), "the process to end")
    while not broker.is_replaced("shard", 0, old):
        began = time.monotonic()
        # The supervisor may not have heard of the end, or the next process begins to listen.
        with contextlib.suppress(pika.exceptions.AMQPConnectionError):
            with pika.BlockingConnection(pika.URLParameters(broker.url)) as made:
                made.channel().basic_publish("", "nobody", b"")
                connected += 1
        slowest_s = max(slowest_s, time.monotonic() - began)
    assert connected > 5 and slowest_s < ANOTHER_S


def ready(broker: RealBroker, shard: int) -> bool:
    (state,) = [
        child["state"]
        for child in broker.status()["children"]
        if (child["kind"], child["index"]) == ("shard", shard)
    ]
    return bool(state == "ready")


def test_a_stop_loses_nothing_that_was_confirmed_and_marks_the_end(
    tmp_path: Path, combined: None
) -> None:
    made = RealBroker(tmp_path / "data")
    try:
        with pika.BlockingConnection(pika.URLParameters(made.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for queue in ("a", "b", "c"):
                channel.queue_declare(queue, durable=True)
                for _ in range(20):
                    channel.basic_publish("", queue, b"x", pika.BasicProperties(delivery_mode=2))
        made.stop()
        made.restart()
        with pika.BlockingConnection(pika.URLParameters(made.url)) as connection:
            channel = connection.channel()
            for queue in ("a", "b", "c"):
                assert channel.queue_declare(queue, passive=True).method.message_count == 20
        made.stop()
        assert made.log_path.read_text().count("drained") == 4
    finally:
        made.clean_up()


def test_a_port_in_use_is_said_in_words(tmp_path: Path, combined: None) -> None:
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(AssertionError, match="listen.amqp_port: .*Address already in use"):
            RealBroker(tmp_path / "data", more=("--amqp-port", str(port)))


def test_a_socket_of_systemd_is_shared_and_goes_on_listening(
    tmp_path: Path, combined: None
) -> None:
    with started(tmp_path, command=("tests.support.activated_broker",)) as made:
        for shard in (0, 1, 0):
            old = made.pid("shard", shard)
            os.kill(old, signal.SIGKILL)
            wait_until(lambda old=old: not is_running(old), "the process to end")  # type: ignore[misc]
            # Nobody is refused or reset: the other process takes the connection.
            pika.BlockingConnection(pika.URLParameters(made.url)).close()
            wait_until(
                lambda shard=shard, old=old: made.is_replaced("shard", shard, old),  # type: ignore[misc]
                f"shard {shard} to be back",
            )


def test_what_runs_where_is_shown(broker: RealBroker, api: Api) -> None:
    shards = [row for row in api("/api/processes") if row["kind"] == "shard"]
    assert [(row["index"], row["front_door"]) for row in shards] == [(0, 0), (1, 1)]
    text = urllib.request.urlopen(f"http://{broker.metrics}/metrics", timeout=60).read().decode()
    for number in (0, 1):
        labels = f'front_door="{number}",process="shard-{number}"'
        assert f"shardmq_front_door_connections{{{labels}}}" in text


@pytest.mark.timeout(600)
def test_every_promise_holds_through_rounds_of_kills(
    tmp_path: Path, request: pytest.FixtureRequest, combined: None
) -> None:
    with started(tmp_path) as made:
        counts = Rounds(made, request.config.option.seed).run(ROUNDS)
        assert counts["deaths"] >= ROUNDS and counts["confirmed"] > 1000
