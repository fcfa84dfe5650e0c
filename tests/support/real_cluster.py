"""Several brokers that are one cluster, with an etcd of their own.

All are at 127.0.0.1, or at the addresses of a network of hosts (tests/support/namespaces.py).
"""

from __future__ import annotations

import itertools
import json
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import pika

from shardmq.broker.routing.placement import place
from shardmq.cluster.replicas import shard_set
from shardmq.cluster.rules import Record
from tests.support.etcd import RealEtcd
from tests.support.namespaces import Network
from tests.support.real_broker import RealBroker, wait_until

NAME: Final = "coffee"
SECRET: Final = "a secret of the tests of clusters"
# The user guest may log in from its own host only.
USER: Final = "tester"


def names_on(shards: int, prefix: str, count: int) -> list[str]:
    """Return names of queues that lie on each shard of so many in turn, and on shard 0 first."""

    def of(shard: int) -> Iterator[str]:
        names = (f"{prefix}-{number}" for number in itertools.count())
        return (each for each in names if place("/", each, shards) == shard)

    names = [of(shard) for shard in range(shards)]
    return [next(names[index % shards]) for index in range(count)]


def node_arguments(
    etcd: RealEtcd, name: str, cluster: str = NAME, address: str = "127.0.0.1"
) -> tuple[str, ...]:
    """Return the flags that make a broker a node of a cluster."""
    return (
        "--bind", address, "--address", address, "--cluster-name", cluster,
        "--etcd", ",".join(etcd.endpoints), "--node", name,
    )  # fmt: skip


def node_environment(secret: str = SECRET, user: str = "guest") -> dict[str, str]:
    """Return the variables of a node: its secret and user, any free ports, and a short lease."""
    return {
        "SHARDMQ_CLUSTER_SECRET": secret,
        "SHARDMQ_CLUSTER_PORT": "0",
        "SHARDMQ_CLUSTER_NODE_TIMEOUT_S": "2",
        "SHARDMQ_USERS_DEFAULT_USER": user,
        "SHARDMQ_USERS_DEFAULT_PASS": user,
        "SHARDMQ_USERS_HTTP_WITHOUT_TLS": "true",
    }


def login(node: RealBroker) -> str:
    """Return the credentials of a node's user, for the header Authorization."""
    return b64encode(f"{node.user}:{node.user}".encode()).decode()


def node_name(index: int) -> str:
    """Return the name of a node, which is that of its host and of its data directory, too."""
    return f"node-{index}"


class RealCluster:
    """The nodes of a cluster, as a context manager. The first one leads at first.

    Args:
        directory: Has the data directory of each node, by the name of the node.
        etcd: The etcd of the cluster.
        nodes: The number of nodes.
        shards: The number of shards of each node.
        replicas: The number of nodes that have the messages of a shard.
        environment: Variables that each node has besides.
        by_node: Variables that one node has besides, by its name.
        network: The hosts of the nodes, by their names.
        more: Flags that each node has besides.
        sets: More shards that a node has, in sets: cluster.shard_sets, by its name.
        together: Start all nodes but the first one at once. Who has which shards is then unknown.
    """

    def __init__(
        self,
        directory: Path,
        etcd: RealEtcd,
        nodes: int = 3,
        shards: int = 1,
        replicas: int = 1,
        environment: Mapping[str, str] | None = None,
        network: Network | None = None,
        more: tuple[str, ...] = (),
        together: bool = False,
        by_node: Mapping[str, Mapping[str, str]] | None = None,
        sets: Mapping[str, list[str]] | None = None,
    ) -> None:
        self._by_node = by_node or {}
        self._sets = sets or {}
        self._together = together
        self._directory = directory
        self.etcd = etcd
        self._shards = shards
        self._count = nodes
        self._replicas = replicas
        self._network = network
        self._more = more
        self._user = "guest" if network is None else USER
        self._environment = {
            **node_environment(user=self._user),
            "SHARDMQ_CLUSTER_REPLICAS": str(replicas),
            **(environment or {}),
        }
        self.nodes: list[RealBroker] = []

    def __enter__(self) -> RealCluster:
        try:
            self._start(0)
            with ThreadPoolExecutor(self._count if self._together else 1) as starting:
                list(starting.map(self._start, range(1, self._count)))
            self.nodes.sort(key=lambda node: node.data_dir.name)
        except BaseException:
            self.clean_up()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clean_up()

    def _start(self, index: int) -> None:
        self.nodes.append(self.new_node(node_name(index)))

    def new_node(self, name: str) -> RealBroker:
        """Start a node with a data directory of its name."""
        network = self._network
        host = "127.0.0.1" if network is None else network.address(name)
        sets = self._sets.get(name, [])
        of_sets = {"SHARDMQ_CLUSTER_SHARD_SETS": ",".join(sets)} if sets else {}
        return RealBroker(
            self._directory / name,
            shards=self._shards + sum(shard_set(each).shards for each in sets),
            more=(*node_arguments(self.etcd, name, address=host), *self._more),
            environment={**self._environment, **of_sets, **self._by_node.get(name, {})},
            host=host,
            user=self._user,
            prefix=() if network is None else network.command(name),
        )

    def copies(self) -> dict[int, Record]:
        """Return the records of the shards that have copies, from etcd."""
        prefix = f"/shardmq/{NAME}/copies/"
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        rows = self.etcd.ask("kv/range", key=prefix.encode(), range_end=end.encode())
        return {
            int(b64decode(row["key"]).decode().removeprefix(prefix)): msgspec.json.decode(
                b64decode(row["value"]), type=Record
            )
            for row in rows.get("kvs", ())
        }

    def can_lose(self, node: RealBroker) -> bool:
        """Return whether other nodes have all definitions, and all of each shard with copies."""
        key = f"/shardmq/{NAME}/controller".encode()
        (row,) = self.etcd.ask("kv/range", key=key)["kvs"]
        definitions = msgspec.json.decode(b64decode(row["value"]), type=Record)
        return all(
            any(self.named(name) is not node for name in record.in_sync)
            for record in (definitions, *self.copies().values())
        )

    def wait_for_copies(self) -> None:
        """Wait until each shard has as many nodes in sync as it is to have."""
        sets = [shard_set(each) for node in self._sets.values() for each in node]
        more = [each.replicas.count for each in sets for _ in range(each.shards)]
        wanted = [self._replicas] * self._shards * self._count + [n for n in more if n > 1]
        wait_until(
            lambda: (
                sorted(len(record.in_sync) for record in self.copies().values()) == sorted(wanted)
            ),
            "all copies to be in sync",
        )

    def clean_up(self) -> None:
        for node in self.nodes:
            node.clean_up()

    def leader(self) -> RealBroker:
        """Return the node that leads, by what any node that answers says."""
        for node in self.nodes:
            try:
                rows = api(node, "nodes")
            except OSError:
                continue
            for row in rows:
                if row["is_leader"]:
                    return self.named(row["name"])
        raise AssertionError("no node answers")

    def named(self, name: str) -> RealBroker:
        """Return a node by its name in listings."""
        return next(node for node in self.nodes if name == f"shardmq@{node.data_dir.name}")

    def others(self, node: RealBroker) -> list[RealBroker]:
        return [each for each in self.nodes if each is not node]


def api(node: RealBroker, path: str, body: Any = None) -> Any:
    """GET a path of the API at a node, or POST a body there."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{node.http}/api/{path}", data)
    request.add_header("Authorization", f"Basic {login(node)}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def put(node: RealBroker, path: str, body: Any) -> None:
    """PUT a body to a path of the API at a node."""
    request = urllib.request.Request(
        f"http://{node.http}/api/{path}", json.dumps(body).encode(), method="PUT"
    )
    request.add_header("Authorization", f"Basic {login(node)}")
    with urllib.request.urlopen(request, timeout=60):
        pass


def connect(node: RealBroker) -> pika.BlockingConnection:
    parameters = pika.URLParameters(node.url)
    parameters.blocked_connection_timeout = 60
    parameters.socket_timeout = 60
    return pika.BlockingConnection(parameters)


def wait_for_nodes(node: RealBroker, running: int) -> None:
    """Wait until a node lists so many nodes that run."""
    wait_until(
        lambda: sum(row["running"] for row in api(node, "nodes")) == running,
        f"{running} nodes to run",
    )
