"""Start a broker of two nodes and one alone, and say what a message costs whose queue is elsewhere.

The generator's queue is named so that it lies on the node that is wanted. Of a node with its own
queue only the node counts; with the queue elsewhere both nodes count. etcd never does.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from brokers import OWN_NAME, own_broker
from generator import RunFailed, Target
from load.families import ALONE, ELSEWHERE, ON_ONE_NODE

from shardmq.broker.routing.placement import place

ETCD_S_MAX = 20.0
LOOK_S = 0.05
END_S_MAX = 10.0
ADDRESSES = ("127.0.0.2", "127.0.0.3")
PREFIXES_MAX = 1000
MODEL_NODES = (1, 2, 3, 4, 8, 16, 32, 64)
MODEL_CORES = 8
SIZES = {"small": 16, "kib": 1024}  # scenarios that differ in the bytes of a body alone


@contextmanager
def nodes_and_alone(data_parent: Path | None) -> Iterator[tuple[Target, Target, Target]]:
    """Run two nodes with a shard each and a broker with one shard.

    The targets are a node that has the queue, the broker alone, and a node whose queue lies on the
    other one.
    """
    one_shard = ("--shards", "1", "--front-doors", "1")
    with ExitStack() as running:
        endpoint = running.enter_context(etcd())
        secret = secrets.token_urlsafe()
        nodes = [
            running.enter_context(
                own_broker(
                    data_parent,
                    flags=(
                        *one_shard, "--bind", address, "--address", address, "--etcd", endpoint,
                        "--cluster-name", "bench", "--node", f"node-{index}",
                    ),
                    variables={"SHARDMQ_CLUSTER_SECRET": secret, "SHARDMQ_CLUSTER_PORT": "0"},
                )
            )
            for index, address in enumerate(ADDRESSES)
        ]  # fmt: skip
        alone = running.enter_context(own_broker(data_parent, flags=one_shard))
        # The first node has shard 0, the second shard 1, in the order of their starts.
        near, far = ((f"--prefix={prefix_at(shard)}",) for shard in range(2))
        other = nodes[1].pid
        assert other is not None
        yield (
            Target(OWN_NAME, nodes[0].url, nodes[0].pid, options=near),
            Target(ALONE, alone.url, alone.pid),
            Target(ELSEWHERE, nodes[0].url, nodes[0].pid, other_pids=(other,), options=far),
        )


def prefix_at(shard: int) -> str:
    """Return a prefix with which the generator's first queue lies on this shard of two."""
    prefixes = (f"bench{number}" for number in range(PREFIXES_MAX))
    return next(each for each in prefixes if place("/", f"{each}-0", 2) == shard)


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


# -- the model -------------------------------------------------------------------------------------


def model(scenarios: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a message costs here and elsewhere, and what N nodes would carry; "" if unknown.

    With queues and clients spread evenly over N nodes, (N - 1) / N of all messages cross from one
    node to another. So a message costs here + (elsewhere - here) (N - 1) / N on average, and N
    nodes carry as many as their cores can pay for. The model assumes that the network is not the
    limit, that batches are as full as here, and that a session to one more node costs nothing:
    a node sends to each of the others what its clients publish within one pass.
    """
    costs = {
        name: (here, elsewhere)
        for name in ON_ONE_NODE
        if (taken := scenarios.get(f"cluster-{name}"))
        and (here := cost_us(taken, OWN_NAME))
        and (elsewhere := cost_us(taken, ELSEWHERE))
    }
    if not costs:
        return ""
    lines = ["| CPU of a message, us | here | elsewhere | crossing |", "| --- | --: | --: | --: |"]
    for name, (here, elsewhere) in costs.items():
        lines.append(f"| {name} | {here:.2f} | {elsewhere:.2f} | {elsewhere - here:.2f} |")
    if SIZES.keys() <= costs.keys():
        lines += ["", crossing({size: costs[name] for name, size in SIZES.items()})]
    lines += ["", table_of_nodes(costs)]
    return "\n".join(lines)


def cost_us(taken: Mapping[str, Any], name: str) -> float:
    medians = taken.get(name, {}).get("median", {})
    if per_s := medians.get("per_cpu_s"):
        return 1e6 / float(per_s)
    return float(medians.get("cpu_us", 0.0))


def crossing(by_bytes: Mapping[int, tuple[float, float]]) -> str:
    """Say how the cost of crossing depends on the bytes of a body, by a line through two sizes."""
    (small, a), (large, b) = sorted(by_bytes.items())
    each_byte = ((b[1] - b[0]) - (a[1] - a[0])) / (large - small)
    fixed = (a[1] - a[0]) - small * each_byte
    return (
        f"Crossing in batches costs {fixed:.2f} us a message and {each_byte * 1000:.2f} ns a byte: "
        "copies into and out of ZeroMQ's parts, encryption and its check, and TCP."
    )


def table_of_nodes(costs: Mapping[str, Sequence[float]]) -> str:
    heads = ["nodes", *(f"{name}, messages/s" for name in costs)]
    lines = [f"Model, nodes of {MODEL_CORES} cores:", ""]
    lines += [f"| {' | '.join(heads)} |", f"| {' | '.join(['--:'] * len(heads))} |"]
    for nodes in MODEL_NODES:
        cells = [
            f"{nodes * MODEL_CORES * 1e6 / (here + (elsewhere - here) * (nodes - 1) / nodes):,.0f}"
            for here, elsewhere in costs.values()
        ]
        lines.append(f"| {nodes} | {' | '.join(cells)} |")
    return "\n".join(lines)
