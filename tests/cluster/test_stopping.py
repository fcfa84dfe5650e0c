"""All nodes of a cluster are stopped in order at the same moment."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pika
import pytest

from shardmq.shardd.process import LAST_SYNCS_S_MAX
from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import RealCluster, api, connect, wait_for_nodes

pytestmark = pytest.mark.broker
# What may not be in the log of an orderly stop.
TROUBLE: Final = re.compile(
    r".* (?:ERROR|CRITICAL) .*|.* supervisor: .* ended: (?!exit status 0$).*"
)
QUEUES: Final = 6
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2)


def stop_all(cluster: RealCluster) -> float:
    """Stop all nodes at once, check that each ends with status 0, and return the seconds."""
    began = time.monotonic()
    with ThreadPoolExecutor(len(cluster.nodes)) as stopping:
        list(stopping.map(RealBroker.stop, cluster.nodes))
    return time.monotonic() - began


def test_all_processes_end_in_order_when_all_nodes_stop_at_once(
    etcd_program: str, tmp_path: Path
) -> None:
    (tmp_path / "etcd").mkdir()
    with (
        RealEtcd(tmp_path / "etcd") as etcd,
        RealCluster(tmp_path, etcd, replicas=3, together=True) as cluster,
    ):
        wait_for_nodes(cluster.nodes[0], 3)
        cluster.wait_for_copies()
        with connect(cluster.nodes[0]) as client:
            channel = client.channel()
            channel.confirm_delivery()
            for queue in map(str, range(QUEUES)):
                channel.queue_declare(queue, durable=True)
                channel.basic_publish("", queue, queue.encode(), PERSISTENT)
        before = {node: len(node.log_path.read_text()) for node in cluster.nodes}
        took_s = stop_all(cluster)
        said = [
            line
            for node in cluster.nodes
            for line in node.log_path.read_text()[before[node] :].splitlines()
        ]
        assert [line for line in said if TROUBLE.fullmatch(line)] == []
        assert took_s < LAST_SYNCS_S_MAX, "the nodes have waited for each other"
        back = cluster.nodes[1:]  # enough for each shard, whichever node has led it
        with ThreadPoolExecutor(len(back)) as starting:
            list(starting.map(RealBroker.restart, back))
        wait_until(
            lambda: sum(row["messages"] for row in api(back[0], "queues")) == QUEUES,
            "all messages",
        )
        with connect(back[0]) as client:
            channel = client.channel()
            for queue in map(str, range(QUEUES)):
                assert channel.basic_get(queue, auto_ack=True)[2] == queue.encode()
