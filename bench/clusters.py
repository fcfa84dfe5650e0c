"""Start the clusters that are measured, each node with a shard.

The generator's queue is named so that it lies on the node that is wanted. etcd never counts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from brokers import OWN_NAME, own_broker
from generator import RunFailed, Target
from load.families import ALONE, BY_COPIES, ELSEWHERE
from prometheus_client.parser import text_string_to_metric_families

from shardmq.broker.routing.placement import place

ETCD_S_MAX = 20.0
IN_SYNC_S_MAX = 60.0
ANSWER_S_MAX = 10.0
LOOK_S = 0.05
END_S_MAX = 10.0
PREFIXES_MAX = 1000
IN_SYNC, SENT_BYTES = "shardmq_replica_in_sync", "shardmq_replica_sent_bytes_total"
STORED = "shardmq_shard_appended_messages_total"
ONE_SHARD = ("--shards", "1", "--front-doors", "1")


@contextmanager
def nodes_and_alone(data_parent: Path | None) -> Iterator[tuple[Target, ...]]:
    """Run two nodes without copies of messages, and a broker alone, with a shard each.

    The targets are a node that has the queue, the broker alone, and a node whose queue lies on the
    other one. Of a node with its own queue only the node counts; with the queue elsewhere both do.
    """
    with ExitStack() as running:
        nodes = running.enter_context(cluster(data_parent, nodes=2, copies=1))
        alone = running.enter_context(own_broker(data_parent, flags=ONE_SHARD))
        near, far = ((f"--prefix={prefix_at(shard, of=2)}",) for shard in range(2))
        other = nodes[1].pid
        assert other is not None
        yield (
            Target(OWN_NAME, nodes[0].url, nodes[0].pid, options=near),
            Target(ALONE, alone.url, alone.pid),
            Target(ELSEWHERE, nodes[0].url, nodes[0].pid, other_pids=(other,), options=far),
        )


@contextmanager
def nodes_with_copies(data_parent: Path | None) -> Iterator[tuple[Target, ...]]:
    """Run a cluster of two nodes, one of one, and one of three, each with all copies it can have.

    The queue is at the first node of each, whose CPU counts. What the others take is told beside it
    (`follower_cpu`).
    """
    with ExitStack() as running:
        targets = []
        for name, copies in BY_COPIES.items():
            first, *others = running.enter_context(cluster(data_parent, copies, copies))
            wait_for_copies(first.http, copies)
            targets.append(
                Target(
                    name,
                    first.url,
                    first.pid,
                    first.http,
                    follower_pids=tuple(other.pid for other in others if other.pid),
                    sent=partial(numbers, first.http, SENT_BYTES, STORED) if others else None,
                    options=(f"--prefix={prefix_at(0, of=copies)}",),
                )
            )
        yield tuple(targets)


@contextmanager
def cluster(data_parent: Path | None, nodes: int, copies: int) -> Iterator[list[Target]]:
    """Run the nodes of a cluster with an etcd of its own. Raises RunFailed.

    The first node has shard 0, the next one shard 1, in the order of their starts.
    """
    with ExitStack() as running:
        endpoint = running.enter_context(etcd())
        variables = {
            "SHARDMQ_CLUSTER_SECRET": secrets.token_urlsafe(),
            "SHARDMQ_CLUSTER_PORT": "0",
            "SHARDMQ_CLUSTER_REPLICAS": str(copies),
        }
        found = []
        for index in range(nodes):
            address = f"127.0.0.{index + 2}"
            flags = (
                *ONE_SHARD, "--bind", address, "--address", address, "--etcd", endpoint,
                "--cluster-name", "bench", "--node", f"node-{index}",
            )  # fmt: skip
            found.append(
                running.enter_context(own_broker(data_parent, flags=flags, variables=variables))
            )
        yield found


def prefix_at(shard: int, of: int) -> str:
    """Return a prefix with which the generator's first queue lies on this shard of so many."""
    prefixes = (f"bench{number}" for number in range(PREFIXES_MAX))
    return next(each for each in prefixes if place("/", f"{each}-0", of) == shard)


def wait_for_copies(http: str, copies: int) -> None:
    """Wait until so many nodes have all of the shard of this node. Raises RunFailed."""
    until = time.monotonic() + IN_SYNC_S_MAX
    while copies > 1 and numbers(http, IN_SYNC, STORED)[0] < copies:
        if time.monotonic() > until:
            raise RunFailed(f"there are not {copies} copies after {IN_SYNC_S_MAX:.0f} s")
        time.sleep(LOOK_S)


def numbers(http: str, one: str, other: str) -> tuple[float, float]:
    """Return two metrics, each summed over the shards of this node."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=ANSWER_S_MAX) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value  # type: ignore[assignment]
    return found[one], found[other]


@contextmanager
def etcd() -> Iterator[str]:
    """Run an etcd of one member on free ports, and yield its endpoint. Raises RunFailed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = shutil.which("etcd", path=path)
    if program is None:
        raise RunFailed("no etcd is installed (Debian has it in the package etcd-server)")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        ports = [sock.getsockname()[1] for sock in (one, other)]
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    with tempfile.TemporaryDirectory(prefix="bench-etcd-") as directory:
        command = [
            program, "--name", "bench", "--data-dir", directory, "--logger", "zap",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"bench={peer}",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(process, ports[0])
            yield client
        finally:
            process.terminate()
            try:
                process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until somebody listens at a port. Raises RunFailed."""
    until = time.monotonic() + ETCD_S_MAX
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(LOOK_S)
    raise RunFailed("etcd does not answer")
