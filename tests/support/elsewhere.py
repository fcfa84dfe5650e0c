"""A node of a cluster whose clients have all of their queues on another node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker
from tests.support.real_cluster import RealCluster, api, put, wait_for_nodes

# If this is set, the broker of tests/support/brokers.py is such a node.
ELSEWHERE: Final = "SHARDMQ_TEST_ELSEWHERE"


@contextmanager
def node_without_queues(directory: Path) -> Iterator[RealBroker]:
    """Run two nodes and an etcd; yield the node that does not lead and takes no queues."""
    (directory / "etcd").mkdir()
    with RealEtcd(directory / "etcd") as etcd, RealCluster(directory, etcd, nodes=2) as cluster:
        leader, other = cluster.nodes
        wait_for_nodes(other, 2)
        put(leader, f"nodes/shardmq@{other.data_dir.name}/drain", {})
        yield other
        at = {row["node"] for row in api(leader, "queues")}
        assert at <= {f"shardmq@{leader.data_dir.name}"}
        for node in cluster.nodes:
            node.stop()
            assert "Traceback" not in node.log_path.read_text()
