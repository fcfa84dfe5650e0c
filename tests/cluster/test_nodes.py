"""Three brokers of one cluster: any node shows all, and serves queues wherever they lie."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pika
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.support.etcd import RealEtcd
from tests.support.real_broker import SOURCE, RealBroker, wait_until
from tests.support.real_cluster import (
    NAME,
    RealCluster,
    api,
    connect,
    names_on,
    node_arguments,
    node_environment,
    wait_for_nodes,
)

pytestmark = pytest.mark.broker
QUEUES = 9
MESSAGES = 20
WINDOWS, WINDOW_BYTES = 4, 1 << 20
# Behind this a lease of 2 s that nobody renews has surely ended.
LAPSED_S = 3.0
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.fixture(scope="module")
def cluster(real: RealEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    RealBroker.may_start = True
    with RealCluster(tmp_path_factory.mktemp("cluster"), real) as made:
        wait_for_nodes(made.nodes[0], 3)
        yield made


def names_of(name: str) -> list[str]:
    """Return names of queues, as many for each node, which has one shard."""
    return names_on(3, name, QUEUES)


def fill(cluster: RealCluster, name: str) -> None:
    """Declare queues at one node after the other, and publish to each at another node."""
    connections = [connect(node) for node in cluster.nodes]
    channels = [connection.channel() for connection in connections]
    for channel in channels:
        channel.confirm_delivery()
    for index, queue in enumerate(names_of(name)):
        channels[index % 3].queue_declare(queue, durable=True)
        for number in range(MESSAGES):
            channel = channels[(index + number) % 3]
            channel.basic_publish("", queue, b"%d" % number, PERSISTENT, mandatory=True)
    for connection in connections:
        connection.close()


def drain(node: RealBroker, queue: str) -> list[int]:
    """Take all messages of a queue at a node."""
    connection = connect(node)
    channel, got = connection.channel(), []
    while (found := channel.basic_get(queue, auto_ack=True))[0] is not None:
        got.append(int(found[2]))
    connection.close()
    return got


@pytest.mark.row("K5", "P3")
def test_queues_are_used_at_all_nodes_and_lie_on_all(cluster: RealCluster, name: str) -> None:
    fill(cluster, name)
    rows = api(cluster.nodes[2], "queues")
    assert {row["name"] for row in rows if row["name"].startswith(name)} == set(names_of(name))
    for index, queue in enumerate(names_of(name)):
        assert drain(cluster.nodes[(index + 1) % 3], queue) == list(range(MESSAGES))


def test_what_is_bound_at_one_node_is_routed_at_all_others(cluster: RealCluster, name: str) -> None:
    connections = [connect(node) for node in cluster.nodes]
    binding, *publishing = [connection.channel() for connection in connections]
    binding.exchange_declare(name, "direct")
    binding.queue_declare(name)
    for channel in publishing:
        channel.confirm_delivery()
    for key in map(str, range(MESSAGES)):
        binding.queue_bind(name, name, key)
        for channel in publishing:
            channel.basic_publish(name, key, b"x", mandatory=True)  # raises if it is returned
    for connection in connections:
        connection.close()


@pytest.mark.row("K12")
def test_all_nodes_answer_the_api_alike(cluster: RealCluster) -> None:
    answers = [api(node, "nodes") for node in cluster.nodes]
    assert [[row["name"] for row in rows] for rows in answers] == [
        [f"shardmq@node-{index}" for index in range(3)]
    ] * 3
    assert [api(node, "overview")["node"] for node in cluster.nodes] == [
        f"shardmq@node-{index}" for index in range(3)
    ]
    shards = sorted(shard for row in answers[0] for shard in row["shards"])
    assert shards == [0, 1, 2]


def test_a_consumer_at_another_node_gets_what_comes(cluster: RealCluster, name: str) -> None:
    here, there = connect(cluster.nodes[0]), connect(cluster.nodes[1])
    consuming, publishing = here.channel(), there.channel()
    for queue in names_of(name):
        publishing.queue_declare(queue)
    got: list[tuple[str, int]] = []

    def take(channel: object, method: object, properties: object, body: bytes) -> None:
        queue, number = body.decode().rsplit("/", 1)
        got.append((queue, int(number)))
        consuming.basic_ack(method.delivery_tag)  # type: ignore[attr-defined]

    for queue in names_of(name):
        consuming.basic_consume(queue, take)
    for number in range(MESSAGES):
        for queue in names_of(name):
            publishing.basic_publish("", queue, f"{queue}/{number}".encode())
    there.process_data_events(0)
    wait_until(
        lambda: here.process_data_events(0.01) or len(got) == MESSAGES * QUEUES, "all messages"
    )
    for queue in names_of(name):
        assert [number for each, number in got if each == queue] == list(range(MESSAGES))
    here.close()
    there.close()


def test_the_controller_that_leads_dies_and_leads_again(cluster: RealCluster, name: str) -> None:
    fill(cluster, name)
    leader = cluster.leader()
    clients = [connect(node) for node in cluster.nodes]  # stay through all of it
    leader.kill("controller")
    for index, queue in enumerate(names_of(f"{name}-later")):
        clients[index % 3].channel().queue_declare(queue, durable=True)
    for index, queue in enumerate(names_of(name)):
        assert drain(cluster.nodes[index % 3], queue) == list(range(MESSAGES))
    for client in clients:
        client.close()


def test_a_node_dies_and_comes_back_with_its_messages(cluster: RealCluster, name: str) -> None:
    fill(cluster, name)
    leader = cluster.leader()
    lost = cluster.others(leader)[0]
    lost.kill_all()
    wait_for_nodes(leader, 2)
    row = next(row for row in api(leader, "nodes") if not row["running"])
    assert cluster.named(row["name"]) is lost
    with connect(leader) as client:
        # New queues are placed on the nodes that live.
        channel = client.channel()
        channel.confirm_delivery()
        for queue in names_of(f"{name}-new"):
            channel.queue_declare(queue, durable=True)
            channel.basic_publish("", queue, b"1", PERSISTENT, mandatory=True)
    where = {each["name"]: each["node"] for each in api(leader, "queues?columns=name,node")}
    down = next(queue for queue in names_of(name) if where[queue] == row["name"])
    check_that_nobody_waits_for(leader, down, row["name"], f"{name}-new-0")
    lost.restart()
    wait_for_nodes(leader, 3)
    for index, queue in enumerate(names_of(name)):
        assert drain(cluster.nodes[index % 3], queue) == list(range(MESSAGES))


def check_that_nobody_waits_for(node: RealBroker, queue: str, home: str, other: str) -> None:
    """Use a queue of a node that is down: all ends within a bound, and other queues are served."""
    text = f"home node '{home}' of durable queue '{queue}' in vhost '/' is down or inaccessible"
    for ask in (
        lambda channel: channel.basic_get(queue),
        lambda channel: channel.queue_declare(queue, passive=True),
        lambda channel: channel.queue_purge(queue),
        lambda channel: channel.basic_consume(queue, lambda *_: None),
    ):
        with connect(node) as client, pytest.raises(pika.exceptions.ChannelClosedByBroker) as said:
            ask(client.channel())
        assert (said.value.reply_code, said.value.reply_text) == (404, f"NOT_FOUND - {text}")
    with connect(node) as client:
        publisher, channel = client.channel(), client.channel()
        for _ in range(WINDOWS):  # more than may wait for a shard
            publisher.basic_publish("", queue, bytes(WINDOW_BYTES))
        publisher.basic_publish("", other, b"behind them")
        wait_until(
            lambda: channel.queue_declare(other, passive=True).method.message_count == 2,
            "what was published behind messages for a node that is down",
        )
        publisher.confirm_delivery()
        with pytest.raises(pika.exceptions.NackError):
            publisher.basic_publish("", queue, b"", PERSISTENT)


@pytest.mark.row("P3")
def test_the_node_that_leads_dies_and_another_one_takes_over(
    cluster: RealCluster, name: str
) -> None:
    """Twice, so that a node that came back leads what was answered while it was away."""
    for turn in range(2):
        names = names_of(f"{name}-{turn}")
        lost = cluster.leader()
        rest = cluster.others(lost)
        with connect(rest[0]) as client:
            for queue in names:
                client.channel().queue_declare(queue, durable=True)
            lost.kill_all()
            client.channel().queue_declare(f"{name}-{turn}-after", durable=True)
            wait_until(lambda rest=rest: api(rest[1], "overview"), "HTTP at another node")  # type: ignore[misc]
        wait_for_nodes(rest[0], 2)
        assert cluster.leader() in rest
        found = {row["name"] for row in api(rest[1], "queues")}
        assert {*names, f"{name}-{turn}-after"} <= found
        lost.restart()
        wait_for_nodes(rest[0], 3)
        wait_until(lambda: len(in_sync(cluster)) == 3, "the copy to be in sync")


def in_sync(cluster: RealCluster) -> dict[str, str]:
    """Return the in-sync set of the definitions, from etcd."""
    key = f"/shardmq/{NAME}/controller".encode()
    (pair,) = cluster.etcd.ask("kv/range", key=key)["kvs"]
    found: dict[str, str] = json.loads(b64decode(pair["value"]))["in_sync"]
    return found


def test_without_etcd_all_goes_on_and_nodes_come_back_when_it_does(
    cluster: RealCluster, name: str
) -> None:
    cluster.etcd.only.kill()
    fill(cluster, name)
    for index, queue in enumerate(names_of(name)):
        assert drain(cluster.nodes[index % 3], queue) == list(range(MESSAGES))
    names = {f"shardmq@node-{index}" for index in range(3)}
    wait_until(lambda: silent_nodes(cluster.nodes[1]) == names, "an alarm of each node")
    for node in cluster.nodes:
        assert metrics(node)["shardmq_cluster_etcd_up"] == 0
    assert "etcd does not answer" in shardctl(cluster.nodes[2], "cluster_status")
    cluster.etcd.only.start()
    wait_for_nodes(cluster.nodes[0], 3)
    wait_until(lambda: not silent_nodes(cluster.nodes[1]), "the alarms to end")


def test_a_node_lives_for_the_others_whatever_its_processes_do(cluster: RealCluster) -> None:
    """A shard that recovers for long, or a process that waits for others, ends no lease."""
    node = cluster.others(cluster.leader())[0]
    pids = [child["pid"] for child in node.status()["children"] if child["pid"]]
    before = sign_of_life(cluster, node)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LAPSED_S)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert sign_of_life(cluster, node) == before
    wait_for_nodes(cluster.leader(), 3)


def sign_of_life(cluster: RealCluster, node: RealBroker) -> tuple[int, int]:
    """Return the lease of a node, and the revision in which its key was made."""
    prefix = f"/shardmq/{NAME}/nodes/"
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    for pair in cluster.etcd.ask("kv/range", key=prefix.encode(), range_end=end.encode())["kvs"]:
        if json.loads(b64decode(pair["value"]))["name"] == f"shardmq@{node.data_dir.name}":
            return int(pair["lease"]), int(pair["create_revision"])
    raise AssertionError("the node has no key")


def silent_nodes(node: RealBroker) -> set[str]:
    """Return the nodes that do not hear etcd, by what any of them says."""
    alarms = api(node, "overview")["alarms"]
    return {row["node"] for row in alarms if row["alarm"] == "etcd does not answer"}


def metrics(node: RealBroker, query: str = "") -> dict[str, float]:
    """Return the metrics of a node as it shows them, the series of a metric added up."""
    with urllib.request.urlopen(f"http://{node.metrics}/metrics{query}", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if sample.name == "rabbitmq_identity_info":
                assert sample.labels["rabbitmq_node"] == f"shardmq@{node.data_dir.name}"
    return found


def shardctl(node: RealBroker, *words: str) -> str:
    found = CliRunner().invoke(app, [*words, "--data-dir", str(node.data_dir)])
    assert found.exit_code == 0, found.output
    return found.output


def test_no_process_waits_for_ever_for_nodes_that_are_gone(
    etcd_program: str, tmp_path: Path
) -> None:
    """A power cut of all nodes but for some processes of one of them, and of etcd."""
    (tmp_path / "etcd").mkdir()
    with (
        RealEtcd(tmp_path / "etcd") as etcd,
        RealCluster(tmp_path, etcd, replicas=3, together=True) as cluster,
    ):
        wait_for_nodes(cluster.nodes[0], 3)
        cluster.wait_for_copies()
        first, *others = cluster.nodes
        with connect(first) as client:
            client.channel().queue_declare("declared", durable=True)
        pids = [child["pid"] for child in first.status()["children"]]
        etcd.members[0].kill()
        for node in others:
            node.kill_all()
        first.process.kill()
        first.process.wait()
        wait_until(lambda: not any(map(is_running, pids)), "all processes to end", 60)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_node_shows_its_own_figures(cluster: RealCluster, name: str) -> None:
    fill(cluster, name)
    clients = [connect(node) for node in (cluster.nodes[0], *cluster.nodes)]

    def shown(metric: str) -> list[float]:
        return [metrics(node)[metric] for node in cluster.nodes]

    wait_until(lambda: shown("rabbitmq_connections") == [2, 1, 1], "the connections to be counted")
    # The numbers that are shown may be some seconds old, and messages of other tests are there.
    for metric, least in (
        ("rabbitmq_queues", QUEUES),
        ("rabbitmq_queue_messages_ready", QUEUES * MESSAGES),
        ("rabbitmq_global_messages_received_total", QUEUES * MESSAGES),
    ):
        wait_until(
            lambda metric=metric, least=least: (  # type: ignore[misc]
                all(found := shown(metric))
                and sum(found) == metrics(cluster.nodes[1], "?cluster=1")[metric] >= least
            ),
            metric,
        )
    assert sorted(shown("shardmq_cluster_leader")) == [0, 0, 1]
    for client in clients:
        client.close()
    assert "ready" not in shardctl(cluster.nodes[1], "await_online_nodes", "3", "-t", "60")
    words = shardctl(cluster.nodes[1], "cluster", "status", "-s").splitlines()
    assert [line.split("\t")[:2] for line in words] == [
        [f"shardmq@node-{index}", "true"] for index in range(3)
    ]
    assert [line.split("\t")[3] for line in words] == ["false"] * 3, "none is being drained"


def refusal(
    directory: Path, *arguments: str, module: str = "shardmq.supervisor", **environment: str
) -> str:
    """Return what a node says that must not start; its exit status is 2."""
    ended = subprocess.run(
        [
            sys.executable, "-m", module, "--data-dir", str(directory),
            "--amqp-port", "0", "--http-port", "0", "--metrics-port", "0", *arguments,
        ],
        cwd=SOURCE, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def test_who_is_no_node_of_the_cluster_is_told_why(cluster: RealCluster, tmp_path: Path) -> None:
    etcd, variables = cluster.etcd, node_environment()
    arguments = node_arguments(etcd, "node-1")

    def is_refused(why: str, said: str) -> None:
        """Check that both sides say why."""
        assert why in said
        for node in cluster.nodes:
            wait_until(partial(node.has_logged, why), "the other side")

    is_refused(
        "has a node 'shardmq@node-1' with another data directory",
        refusal(tmp_path / "other", *arguments, **variables),
    )
    (tmp_path / "own" / "shard-07").mkdir(parents=True)
    is_refused(
        "only the first node of a cluster may bring data",
        refusal(tmp_path / "own", *node_arguments(etcd, "node-9"), **variables),
    )
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "cluster.json").write_text(
        '{"cluster":"tea","node":"shardmq@a","identity":"00"}'
    )
    is_refused(
        "belongs to the node 'shardmq@a' of the cluster 'tea'",
        refusal(tmp_path / "moved", *node_arguments(etcd, "a"), **variables),
    )
    is_refused(
        "the cluster has another secret than cluster.secret says",
        refusal(
            tmp_path / "stranger",
            *node_arguments(etcd, "stranger"),
            **node_environment("another secret"),
        ),
    )
    del variables["SHARDMQ_CLUSTER_SECRET"]
    assert "cluster.secret: it must be set" in refusal(
        tmp_path / "x", *node_arguments(etcd, "a"), **variables
    )
