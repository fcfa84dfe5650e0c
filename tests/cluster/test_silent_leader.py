"""The controller that leads is silent or gone: what the other nodes answer over HTTP meanwhile."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import RealCluster, login, wait_for_nodes

pytestmark = pytest.mark.broker
CALL_S_MAX: Final = 30.0
# A node answers its own checks at once. The bound allows for a machine with other work.
AT_ONCE_S: Final = 2.0
PROBE_S: Final = 6.0  # Relay.PROBE_S_MAX, on such a machine
CHECKS: Final = "/api/health/checks"
# Its shard is low on disk from the start.
FULL: Final = "node-2"
NO_ROOM: Final = {"SHARDMQ_SHARDS_DISK_FREE_MIN_BYTES": str(1 << 50)}


@pytest.fixture(scope="module")
def cluster(real: RealEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    RealBroker.may_start = True
    directory = tmp_path_factory.mktemp("cluster")
    with RealCluster(directory, real, by_node={FULL: NO_ROOM}) as made:
        wait_for_nodes(made.nodes[0], 3)
        yield made


def get(node: RealBroker, path: str, address: str = "") -> tuple[int, Any, float]:
    """GET a path at a node by a connection of its own; return status, JSON and seconds.

    Raises OSError.
    """
    began = time.monotonic()
    connection = http.client.HTTPConnection(address or node.http, timeout=CALL_S_MAX)
    connection.request("GET", path, headers={"Authorization": f"Basic {login(node)}"})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, json.loads(said) if is_json else said, time.monotonic() - began


@contextmanager
def frozen(node: RealBroker) -> Iterator[None]:
    """Let the controller of a node stand still; the supervisor would kill it after 30 s."""
    pid = node.pid("controller")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_node_answers_its_own_checks_while_the_leader_is_silent(cluster: RealCluster) -> None:
    leader = cluster.leader()
    wait_until(
        lambda: all(
            get(node, f"{CHECKS}/is-in-service")[0] == 200 for node in cluster.others(leader)
        ),
        "all nodes to serve",
    )
    with frozen(leader):
        for node in cluster.others(leader):
            port = node.amqp.rpartition(":")[2]
            is_full = node.data_dir.name == FULL
            for path, passes in {
                "is-in-service": True,
                "ready-to-serve-clients": True,
                "virtual-hosts": True,
                "local-alarms": not is_full,
                f"port-listener/{port}": True,
                "port-listener/1": False,
                "protocol-listener/amqp": True,
                "certificate-expiration/1/weeks": True,
            }.items():
                status, said, took_s = get(node, f"{CHECKS}/{path}")
                assert (status, took_s < AT_ONCE_S) == (200 if passes else 503, True), (path, said)
                if path == "local-alarms" and is_full:
                    (alarm,) = said["alarms"]
                    assert alarm["alarm"] == "low on disk" and alarm["node"].endswith(FULL)
            for words in (("ping",), ("diagnostics", "check_running")):
                began = time.monotonic()
                found = CliRunner().invoke(app, [*words, "--data-dir", str(node.data_dir)])
                assert found.exit_code == 0, found.output
                assert time.monotonic() - began < AT_ONCE_S
        # These are questions to the leader, or about the whole cluster.
        for path, address in ((f"{CHECKS}/alarms", ""), ("/metrics", node.metrics)):
            status, said, took_s = get(node, path, address)
            assert (status, said["error"]) == (503, "no_leader") and took_s < PROBE_S, path
    wait_for_nodes(leader, 3)


def test_a_node_whose_shard_does_not_serve_says_so_while_the_leader_is_silent(
    cluster: RealCluster,
) -> None:
    leader = cluster.leader()
    node = cluster.others(leader)[0]
    index = next(row["index"] for row in node.status()["children"] if row["kind"] == "shard")
    with frozen(leader):
        os.kill(node.pid("shard", index), signal.SIGKILL)
        # Nobody tells the next process which queues it has.
        wait_until(lambda: get(node, f"{CHECKS}/is-in-service")[0] == 503, "the check to fail")
        said = get(node, f"{CHECKS}/ready-to-serve-clients")[1]
        assert said == {"status": "failed", "reason": f"shards not ready: {index}"}
    wait_until(lambda: get(node, f"{CHECKS}/is-in-service")[0] == 200, "the shard to serve")


def test_no_call_is_cut_when_another_node_begins_to_lead(cluster: RealCluster) -> None:
    lost = cluster.leader()
    outcomes: Counter[str] = Counter()
    is_over = threading.Event()

    def call(node: RealBroker) -> None:
        while not is_over.is_set():
            try:
                outcomes[str(get(node, "/api/vhosts")[0])] += 1
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
