"""The controller that leads is silent or gone: what the other nodes answer over HTTP meanwhile."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker
from tests.support.real_cluster import RealCluster, login, wait_for_nodes

pytestmark = pytest.mark.broker
CALL_S_MAX = 30.0


@pytest.fixture(scope="module")
def cluster(real: RealEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    RealBroker.may_start = True
    with RealCluster(tmp_path_factory.mktemp("cluster"), real) as made:
        wait_for_nodes(made.nodes[0], 3)
        yield made


def status_of(node: RealBroker, path: str) -> int:
    """GET a path at a node by a connection of its own; return the status. Raises OSError."""
    connection = http.client.HTTPConnection(node.http, timeout=CALL_S_MAX)
    connection.request("GET", path, headers={"Authorization": f"Basic {login(node)}"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_no_call_is_cut_when_another_node_begins_to_lead(cluster: RealCluster) -> None:
    lost = cluster.leader()
    outcomes: Counter[str] = Counter()
    is_over = threading.Event()

    def call(node: RealBroker) -> None:
        while not is_over.is_set():
            try:
                outcomes[str(status_of(node, "/api/vhosts"))] += 1
            except (OSError, http.client.HTTPException) as error:
                outcomes[repr(error)] += 1

    calling = [
        threading.Thread(target=call, args=(node,)) for node in cluster.others(lost) for _ in "abc"
    ]
    for thread in calling:
        thread.start()
    try:
        lost.kill_all()
        wait_for_nodes(cluster.others(lost)[0], 2)
    finally:
        is_over.set()
        for thread in calling:
            thread.join()
        lost.restart()
        wait_for_nodes(lost, 3)
    assert outcomes["200"] and outcomes.keys() <= {"200", "503"}, outcomes
