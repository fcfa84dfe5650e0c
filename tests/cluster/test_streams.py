"""Streams by HTTP in a cluster: any node leads to the rows, wherever they lie and who dies."""

from __future__ import annotations

import http.client
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pika
import pytest

from pyspark_shardmq.fetch import Broker
from pyspark_shardmq.offsets import Range
from pyspark_shardmq.options import read_options
from tests.support.certificates import Authority
from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import RealCluster, api, connect, wait_for_nodes

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.broker
LOGIN = b64encode(b"guest:guest").decode()
ROWS = 300
ROW_BYTES = 10_000  # so that a scan has several batches
STREAM = {"x-queue-type": "stream"}
# So slow that a scan can be met on its way.
BYTES_PER_S = 1_000_000


@pytest.fixture(scope="module")
def cluster(real: RealEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    RealBroker.may_start = True
    directory = tmp_path_factory.mktemp("cluster")
    authority = Authority(directory)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SHARDMQ_READER_BYTES_PER_S", str(BYTES_PER_S))
        patched.setenv("SHARDMQ_LISTEN_AMQPS_PORT", "0")
        patched.setenv("SHARDMQ_LISTEN_HTTPS_PORT", "0")
        certificate = authority.make("server.pem", "CN=localhost", hosts=("127.0.0.1",))
        patched.setenv("SHARDMQ_TLS_CERT", str(certificate))
        patched.setenv("SSL_CERT_FILE", str(authority.ca))  # for clients
        with RealCluster(directory, real, replicas=2) as made:
            wait_for_nodes(made.nodes[0], 3)
            yield made


def body(number: int) -> bytes:
    return b"%d" % number + b"." * ROW_BYTES


def fill(
    cluster: RealCluster, name: str, rows: int = ROWS, nodes: list[RealBroker] | None = None
) -> dict[str, str]:
    """Declare a stream on each node, fill them, and return them by the name of their node."""
    wanted = {f"shardmq@{node.data_dir.name}" for node in nodes or cluster.nodes}
    with connect(cluster.nodes[0]) as connection:
        channel = connection.channel()
        found: dict[str, str] = {}
        for index in range(100):
            queue = f"{name} {index}"
            channel.queue_declare(queue, durable=True, arguments=STREAM)
            node = api(cluster.nodes[0], f"queues/%2F/{quote(queue)}")["node"]
            if node in found or node not in wanted:
                channel.queue_delete(queue)
                continue
            found[node] = queue
            if found.keys() == wanted:
                break
        for queue in found.values():
            publish(connection, queue, range(rows))
    for queue in found.values():
        wait_until(lambda queue=queue: next_of(cluster.nodes[0], queue) == rows, "all rows")  # type: ignore[misc]
    return found


def publish(connection: pika.BlockingConnection, queue: str, numbers: range) -> None:
    channel = connection.channel()
    for number in numbers:
        channel.basic_publish("", queue, body(number), pika.BasicProperties(delivery_mode=2))
    channel.close()


def stream_of(node: RealBroker, queue: str) -> dict[str, Any]:
    found: dict[str, Any] = api(node, f"streams/%2F/{quote(queue)}")
    return found


def next_of(node: RealBroker, queue: str) -> int:
    next_: int = stream_of(node, queue)["shards"][0]["next"]
    return next_


def answer_of(url: str, *, login: bool) -> tuple[http.client.HTTPResponse, bytes]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    headers = {"Authorization": f"Basic {LOGIN}"} if login else {}
    connection.request("GET", url.removeprefix(f"http://{parts.netloc}"), headers=headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    return answer, said


def arrow(node: RealBroker, queue: str) -> str:
    return f"http://{node.http}/api/streams/%2F/{quote(queue)}/0/arrow?columns=offset,value"


def broker(*nodes: RealBroker, scheme: str = "http") -> Broker:
    urls = ",".join(f"{scheme}://{node.addresses[scheme]}" for node in nodes)
    return Broker(read_options({"shardmq.url": urls, "subscribe": "any"}).connection)


def scanned(connector: Broker, queue: str) -> list[bytes]:
    (shard,) = connector.inspect(queue).shards
    one = Range(queue, shard.shard, shard.id, shard.first, shard.next)
    return [
        value for batch in connector.scan(one, ["value"]) for value in batch["value"].to_pylist()
    ]


def test_each_node_leads_to_the_rows_of_each(cluster: RealCluster, name: str) -> None:
    leader = cluster.leader()
    for holder, queue in fill(cluster, name, 50).items():
        shown = [stream_of(node, queue) for node in cluster.nodes]
        assert shown[0] == shown[1] == shown[2]
        assert sorted(shown[0]["nodes"].values()) == sorted(
            [f"http://{node.http}", f"https://{node.addresses['https']}"] for node in cluster.nodes
        )
        for node in cluster.nodes:
            answer, said = answer_of(arrow(node, queue), login=True)
            if not (node is leader and cluster.named(holder) is leader):
                assert answer.status == 307
                location = answer.getheader("Location", "")
                assert location == json.loads(said)["location"]
                assert f"http://{urlsplit(location).netloc}" in shown[0]["nodes"][holder]
                # A connection that was relayed ends where the next request must not be.
                assert (answer.getheader("Connection") == "close") == (
                    node is cluster.named(holder)
                )
                answer, said = answer_of(location, login=False)
            assert answer.status == 200
            assert answer.getheader("Shardmq-Stream-Id") == shown[0]["id"]
            table = pa.ipc.open_stream(said).read_all()
            assert table["value"].to_pylist() == [body(number) for number in range(50)]
            assert scanned(broker(node), queue) == table["value"].to_pylist()


def test_by_https_rows_come_by_https(
    cluster: RealCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    connect_to = Broker._connection_to

    def opening(self: Broker, url: str) -> http.client.HTTPConnection:
        opened.append(url)
        return connect_to(self, url)

    monkeypatch.setattr(Broker, "_connection_to", opening)
    for holder, queue in fill(cluster, name, 20).items():
        for node in cluster.nodes:
            rows = scanned(broker(node, scheme="https"), queue)
            assert rows == [body(number) for number in range(20)]
            assert opened[-1] == f"https://{cluster.named(holder).addresses['https']}"
    assert all(url.startswith("https://") for url in opened)


def test_a_ticket_is_good_at_any_node_and_only_whole(cluster: RealCluster, name: str) -> None:
    """The leader reads for a client who comes to a node that has not the stream."""
    for queue in fill(cluster, name, 20).values():
        for node in cluster.nodes:
            answer, _ = answer_of(arrow(node, queue), login=True)
            if answer.status == 307:
                break
        path = urlsplit(answer.getheader("Location", "")).path
        for node in cluster.nodes:
            answer, said = answer_of(f"http://{node.http}{path}", login=False)
            assert answer.status == 200
            assert len(pa.ipc.open_stream(said).read_all()) == 20
            answer, said = answer_of(f"http://{node.http}{path[:-1]}", login=False)
            assert (answer.status, json.loads(said)["error"]) == (401, "not_authorised")


def test_offsets_times_groups_and_news_are_those_of_one_broker(
    cluster: RealCluster, name: str
) -> None:
    streams = fill(cluster, name, 20)
    for node in cluster.nodes:
        connector = broker(node)
        for queue in streams.values():
            assert connector.offsets_at(queue, 0) == {0: 0}
            assert connector.offsets_at(queue, 1 << 42) == {0: 20}
            path = f"streams/%2F/{quote(queue)}"
            request = http.client.HTTPConnection(*node.http.rsplit(":", 1))  # type: ignore[arg-type]
            request.request(
                "PUT",
                f"/api/{path}/groups/readers",
                json.dumps({"shards": {"0": {"next": 15}}}),
                {"Authorization": f"Basic {LOGIN}"},
            )
            assert request.getresponse().status == 204
            wait_until(lambda node=node, path=path: lag_of(node, path) == 5, "the lag")  # type: ignore[misc]
            got = messages(node, queue)
            assert got == [body(19).decode()]
        # A row that comes while somebody waits.
        for at, queue in enumerate(streams.values()):
            after = next_of(node, queue)
            found: list[int] = []

            def wait(queue: str = queue, after: int = after, found: list[int] = found) -> None:
                found.append(broker(node).inspect(queue, {0: after}, 20_000).shards[0].next)  # noqa: B023

            waiting = threading.Thread(target=wait)
            waiting.start()
            with connect(cluster.nodes[at]) as connection:
                publish(connection, queue, range(19, 20))
            waiting.join(15)
            assert found == [after + 1]
            streams_end = next_of(node, queue)
            assert streams_end == after + 1
        streams = fill(cluster, f"{name} again {node.http}", 20)


def lag_of(node: RealBroker, path: str) -> int | None:
    return next((row["lag"] for row in api(node, f"{path}/groups")), None)


def messages(node: RealBroker, queue: str) -> list[str]:
    """Return the last message of a stream, as the page shows it."""
    connection = http.client.HTTPConnection(*node.http.rsplit(":", 1), timeout=60)  # type: ignore[arg-type]
    connection.request(
        "POST",
        f"/api/queues/%2F/{quote(queue)}/stream",
        json.dumps({"offset": 19, "count": 1}),
        {"Authorization": f"Basic {LOGIN}"},
    )
    answer = connection.getresponse()
    said = json.load(answer)
    assert answer.status == 200, said
    return [row["payload"] for row in said]


def test_rows_are_published_at_any_node(cluster: RealCluster, name: str) -> None:
    for queue in fill(cluster, name, 1).values():
        for node in cluster.nodes:
            rows = pa.record_batch({"value": [b"by HTTP"], "routing_key": [queue]})
            assert broker(node).publish("", rows).rows == 1
        wait_until(lambda queue=queue: next_of(node, queue) == 4, "the rows")  # type: ignore[misc]  # noqa: B023


def test_only_who_may_read_gets_a_ticket(cluster: RealCluster, name: str) -> None:
    node = cluster.nodes[1]
    login = b64encode(b"guest:wrong").decode()
    for queue in fill(cluster, name, 1).values():
        parts = urlsplit(arrow(node, queue))
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        connection.request("GET", parts.path, headers={"Authorization": f"Basic {login}"})
        answer = connection.getresponse()
        answer.read()
        assert (answer.status, answer.getheader("Location")) == (401, None)


def are_in_sync(cluster: RealCluster) -> bool:
    """Return whether each shard has two copies, and each node the definitions."""
    copies = cluster.copies().values()
    return len(copies) == 3 and {len(each.in_sync) for each in copies} == {2}


def test_a_node_dies_during_a_read_and_each_row_comes_once(cluster: RealCluster, name: str) -> None:
    """First a node that does not lead, then the one that leads; others have copies of its stream.

    It comes last, because shards stay where they went.
    """
    ids: dict[str, str] = {}
    for turn in ("follower", "leader"):
        wait_until(lambda: are_in_sync(cluster), "the copies to be in sync")
        leader = cluster.leader()
        lost = leader if turn == "leader" else cluster.others(leader)[0]
        rest = cluster.others(lost)
        queue = fill(cluster, f"{name} {turn}", nodes=[lost])[f"shardmq@{lost.data_dir.name}"]
        ids[queue] = stream_of(lost, queue)["id"]
        got: list[bytes] = []
        connector = broker(*rest)
        one = Range(queue, 0, ids[queue], 0, ROWS)
        for batch in connector.scan(one, ["value"]):
            if not got:
                assert batch.num_rows < ROWS
                lost.kill_all()
            got += batch["value"].to_pylist()
        assert got == [body(number) for number in range(ROWS)]
        # Whoever leads now knows the streams by the ids that they had.
        assert {each: stream_of(rest[0], each)["id"] for each in ids} == ids
        lost.restart()
        wait_for_nodes(rest[0], 3)
