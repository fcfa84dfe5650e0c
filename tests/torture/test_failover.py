"""Another node confirms soon after the death of a leader's host that had ten million messages."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Final

import pika
import pytest
from pika.exceptions import AMQPError, NackError, UnroutableError

from shardmq.broker.routing.placement import place
from tests.support.etcd import RealEtcd
from tests.support.real_broker import SOURCE, RealBroker
from tests.support.real_cluster import RealCluster, connect

pytestmark = [pytest.mark.torture, pytest.mark.broker, pytest.mark.timeout(1800)]

NODES: Final = 3
MESSAGES: Final = 10_000_000
NODE_TIMEOUT_S: Final = 6  # the default
CONFIRMED_WITHIN_S: Final = NODE_TIMEOUT_S + 2.0
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2)


def test_a_leader_with_ten_million_messages_is_replaced_in_seconds(
    tmp_path: Path, etcd_program: str
) -> None:
    prefix = next(each for each in map("many{}".format, range(100)) if place_of(each) == 0)
    name = f"{prefix}-0"
    (tmp_path / "etcd").mkdir()
    environment = {"SHARDMQ_CLUSTER_NODE_TIMEOUT_S": str(NODE_TIMEOUT_S)}
    with (
        RealEtcd(tmp_path / "etcd") as etcd,
        RealCluster(tmp_path, etcd, NODES, replicas=NODES, environment=environment) as cluster,
    ):
        cluster.wait_for_copies()
        leader = cluster.named(cluster.copies()[0].leader)
        other = cluster.others(leader)[0]
        fill(leader, prefix, tmp_path)
        died = time.monotonic()
        leader.kill_all()
        confirmed = confirmed_at(other, name, until=died + 60)
        with connect(other) as connection:
            found = connection.channel().queue_declare(name, passive=True).method.message_count
        print(f"confirmed after {confirmed - died:.2f} s, {found} messages")
        assert confirmed - died < CONFIRMED_WITHIN_S
        assert found == MESSAGES + 1


def place_of(prefix: str) -> int:
    return place("/", f"{prefix}-0", NODES)


def fill(node: RealBroker, prefix: str, directory: Path) -> None:
    """Publish the messages, each confirmed, by the generator of the measurements."""
    load, program = SOURCE / "bench" / "load", directory / "amqpload"
    subprocess.run(["make", "--silent", "-C", str(load), f"OUT={program}"], check=True)
    options = [
        "--url", node.url, "--prefix", prefix, "--no-consume", "--keep", "--persistent",
        "--durable", "--confirms", "5000", "--messages", str(MESSAGES), "--body", "16",
    ]  # fmt: skip
    subprocess.run([str(program), *options], check=True, stdout=subprocess.DEVNULL)


def confirmed_at(node: RealBroker, queue: str, until: float) -> float:
    """Publish until a message is confirmed, and return that time."""
    while time.monotonic() < until:
        try:
            with connect(node) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                while time.monotonic() < until:
                    try:
                        channel.basic_publish("", queue, b"", PERSISTENT, mandatory=True)
                        return time.monotonic()
                    except (NackError, UnroutableError):
                        time.sleep(0.02)
        except AMQPError:
            time.sleep(0.02)
    raise AssertionError("nothing was confirmed")
