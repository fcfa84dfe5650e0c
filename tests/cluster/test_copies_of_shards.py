"""Shards with copies: `kill -9` of a whole node loses nothing that was confirmed.

The queues of the node go on at another one, in order, and the node follows when it is back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from typer.testing import CliRunner

from shardmq.broker.controller.streams.tickets import Tickets
from shardmq.broker.routing.placement import place
from shardmq.cluster.secret import keys_of
from shardmq.supervisor.cli.app import app
from tests.support.etcd import RealEtcd
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import (
    NAME,
    SECRET,
    RealCluster,
    api,
    connect,
    login,
    names_on,
    put,
    wait_for_nodes,
)

# A node takes half a minute to start on a crowded machine, and each test starts some.
pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]
QUEUES = 6
PERSISTENT = pika.BasicProperties(delivery_mode=2)
# The time to live of a lease, the time after which a silent member leaves the in-sync set, and what
# a crowded machine adds to both.
WITHOUT_CONFIRMS_S_MAX = 2 + 5 + 15
CONFIRMS_MORE = 200
MIRRORED = 3  # shards with two copies
DELAY_MS = 20_000
# A hand-over takes 0.2 s on a machine that is not crowded. After 2 s, publishes are nacked, and the
# rest of this is for the publisher to wake up.
HAND_OVER_S_MAX = 5.0
# Positions in streams are synced each second, and nobody waits for that.
POSITIONS_LAST_S = 3.0
# Python runs a module of this name at each start, if it finds one.
PATCH_NAME = "sitecustomize.py"
CONFIRMS_ALONE = """
from shardmq.cluster.rules import Leader

Leader._numbers = lambda self, nodes: ()
"""
# Of the three nodes: what was confirmed must be there whatever each of them compresses by.
COMPRESSION = ("zstd", "lz4", "none")
LARGE = b"many words " * 1000
# Beside the shards with two copies one node has a shard without any, and one with three.
SETS = {"node-1": ["1:1", "1:3"]}
SHARDS = 3 + 2  # one of each node, and those in sets
SIZE = "x-quorum-initial-group-size"


@pytest.fixture(scope="module")
def cluster(real: RealEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    RealBroker.may_start = True
    directory = tmp_path_factory.mktemp("copies")
    by_node = {
        f"node-{index}": {"SHARDMQ_CLUSTER_COMPRESSION": method}
        for index, method in enumerate(COMPRESSION)
    }
    environment = {"SHARDMQ_READER_FROM_FOLLOWERS": "true"}
    with RealCluster(
        directory, real, replicas=2, by_node=by_node, environment=environment, sets=SETS
    ) as made:
        wait_for_nodes(made.nodes[0], 3)
        made.wait_for_copies()
        yield made


class Pump(threading.Thread):
    """A publisher at one node, which goes on at another node when its own is gone.

    confirmed: the numbers that were confirmed, by queue.
    longest_s: the longest time without a confirm.
    """

    def __init__(self, nodes: list[RealBroker], queues: list[str]) -> None:
        super().__init__(daemon=True)
        self._nodes = nodes
        self._ends = threading.Event()
        self.confirmed: dict[str, list[int]] = {queue: [] for queue in queues}
        self.count = 0
        self.nacked = 0
        self.longest_s = 0.0
        self._last = time.monotonic()

    def run(self) -> None:
        number, node, channel = 0, 0, None
        queues = list(self.confirmed)
        while not self._ends.is_set():
            number += 1
            queue = queues[number % len(queues)]
            try:
                channel = channel or _confirming(self._nodes[node % len(self._nodes)])
                channel.basic_publish("", queue, b"%d" % number, PERSISTENT, mandatory=True)
            except pika.exceptions.NackError:
                self.nacked += 1
                continue
            except (pika.exceptions.AMQPError, AMQPConnectorException, OSError):
                channel = None
                node += 1
                time.sleep(0.05)
                continue
            self.confirmed[queue].append(number)
            self.count += 1
            now = time.monotonic()
            self.longest_s, self._last = max(self.longest_s, now - self._last), now

    def end(self) -> None:
        self._ends.set()
        self.join(60)
        assert not self.is_alive()


@pytest.fixture(autouse=True)
def no_pump_is_left() -> Iterator[None]:
    """End the publishers of a test that failed: they would try to connect for ever."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, Pump):
            thread.end()


def _confirming(node: RealBroker) -> BlockingChannel:
    channel = connect(node).channel()
    channel.confirm_delivery()
    return channel


def all_of(node: RealBroker, queue: str) -> list[int]:
    """Take all messages of a queue, to which nobody publishes any more, at a node."""
    found: list[int] = []
    with connect(node) as connection:
        channel = connection.channel()
        count = channel.queue_declare(queue, passive=True).method.message_count
        if count:
            for _, _, body in channel.consume(queue, auto_ack=True):
                found.append(int(body))
                if len(found) == count:
                    break
            channel.cancel()
    return found


def more_confirms(pumps: list[Pump]) -> None:
    goals = [pump.count + CONFIRMS_MORE for pump in pumps]
    wait_until(
        lambda: all(pump.count >= goal for pump, goal in zip(pumps, goals, strict=True)),
        "more confirms",
    )


def pumping(cluster: RealCluster, name: str, at: Iterable[int] = range(3)) -> list[Pump]:
    """Return publishers that have begun, one for each of the nodes at these places."""
    pumps = []
    for first in at:
        queues = [f"{name}-{first}-{index}" for index in range(QUEUES)]
        with connect(cluster.nodes[first]) as client:
            for queue in queues:
                client.channel().queue_declare(queue, durable=True)
        # The front door of the first node is gone for a while when the node is killed.
        nodes = cluster.nodes[first:] + cluster.nodes[:first]
        pumps.append(Pump(nodes, queues))
    for pump in pumps:
        pump.start()
    more_confirms(pumps)
    return pumps


def check(cluster: RealCluster, pumps: list[Pump]) -> None:
    """End the publishers: each message that was confirmed is there once, in order."""
    for pump in pumps:
        pump.end()
    for pump in pumps:
        for queue, confirmed in pump.confirmed.items():
            found = all_of(cluster.nodes[0], queue)
            assert set(confirmed) <= set(found)
            assert found == sorted(set(found))


def wait_for_others(cluster: RealCluster, lost: RealBroker) -> None:
    """Wait until other nodes lead all shards."""
    wait_until(
        lambda: all(
            cluster.named(record.leader) is not lost for record in cluster.copies().values()
        ),
        "other nodes to lead",
    )


@pytest.mark.row("K1", "K4", "P3")
@pytest.mark.torture
def test_nodes_are_killed_one_after_the_other_and_nothing_confirmed_is_lost(
    cluster: RealCluster, name: str
) -> None:
    pumps = pumping(cluster, name)
    for turn in range(2):
        leader = cluster.leader()
        lost = leader if turn else cluster.others(leader)[0]
        lost.kill_all()
        wait_for_others(cluster, lost)
        more_confirms(pumps)
        lost.restart()
        cluster.wait_for_copies()
        more_confirms(pumps)
    check(cluster, pumps)
    for pump in pumps:
        assert pump.longest_s < WITHOUT_CONFIRMS_S_MAX


def test_each_node_compresses_as_its_own_setting_says(cluster: RealCluster, name: str) -> None:
    first = cluster.nodes[0]
    with connect(first) as client:
        channel = client.channel()
        channel.confirm_delivery()
        for queue in names_on(MIRRORED, name, MIRRORED):
            channel.queue_declare(queue, durable=True)
            for _ in range(20):
                channel.basic_publish("", queue, LARGE, PERSISTENT)
    methods = {f"shardmq@node-{index}": method for index, method in enumerate(COMPRESSION)}

    def are_as_told() -> bool:
        """Return whether the bytes of each shard show it; they are a second old."""
        return all(
            row["replica_plain_bytes"] > 20 * len(LARGE)
            and (methods[row["node"]] == "none")
            == (row["replica_sent_bytes"] == row["replica_plain_bytes"])
            for row in api(first, "shards")
            if row["replicas"] == 2  # the queues lie on no other shard
        )

    wait_until(are_as_told, "the bytes that were sent")


@pytest.mark.row("K1", "C1.14")
def test_queues_lie_on_as_many_nodes_as_they_ask_for_and_survive_accordingly(
    cluster: RealCluster, name: str
) -> None:
    first, lost = cluster.nodes[:2]
    put(
        first,
        f"policies/%2F/{name}",
        {"pattern": f"^{name}-3$", "definition": {"replicas": 3}, "apply-to": "queues"},
    )
    # The second of the three shards with two copies is that of the node that will be lost.
    names = (f"{name}-2-{index}" for index in range(1000))
    two = next(queue for queue in names if place("/", queue, 3) == 1)
    asked = {f"{name}-1": {SIZE: 1}, two: {}, f"{name}-3": {"x-queue-type": "quorum"}}
    with connect(first) as client:
        channel = client.channel()
        channel.confirm_delivery()
        for queue, arguments in asked.items():
            channel.queue_declare(queue, durable=True, arguments=arguments)
            channel.basic_publish("", queue, b"7", PERSISTENT, mandatory=True)
    found = {queue: api(first, f"queues/%2F/{queue}") for queue in asked}
    for queue, row in found.items():
        copies = int(queue.removeprefix(name)[1])
        on = [
            node
            for node in cluster.nodes
            for place in ("", "copies/")
            if (node.data_dir / f"{place}shard-{row['shard']:02d}").is_dir()
        ]
        assert (len(on), len(row["members"])) == (copies, copies)
        assert (row["replicas"], row["replicas_wanted"]) == (copies, copies)
    lost.kill_all()
    wait_for_others(cluster, lost)
    wait_for_nodes(first, 2)
    assert found[two]["shard"] == 1
    for queue in (two, f"{name}-3"):
        assert all_of(first, queue) == [7]
        status = api(first, f"queues/quorum/%2F/{queue}/status")
        assert "shardmq@node-1" not in [
            r["Node Name"] for r in status if r["Raft State"] == "leader"
        ]
    [alone] = api(first, f"queues/quorum/%2F/{name}-1/status")
    assert (alone["Node Name"], alone["Raft State"]) == ("shardmq@node-1", "noproc")
    with (
        connect(first) as client,
        pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"),
    ):
        client.channel().basic_get(f"{name}-1")
    lost.restart()
    cluster.wait_for_copies()
    assert all_of(first, f"{name}-1") == [7]


def test_a_node_that_stood_still_follows_those_who_lead_now(
    cluster: RealCluster, name: str
) -> None:
    pumps = pumping(cluster, name)
    leader = cluster.leader()
    led = [record.leader for record in cluster.copies().values()]
    others = cluster.others(leader)
    lost = next((node for node in others if f"shardmq@{node.data_dir.name}" in led), leader)
    pids = [lost.process.pid, *(child["pid"] for child in lost.status()["children"])]
    for pid in filter(None, pids):
        os.kill(pid, signal.SIGSTOP)
    wait_for_others(cluster, lost)
    for pid in filter(None, pids):
        os.kill(pid, signal.SIGCONT)
    cluster.wait_for_copies()
    wait_for_nodes(leader, 3)
    more_confirms(pumps)
    check(cluster, pumps)


def test_a_node_that_stops_in_order_hands_its_shards_over(cluster: RealCluster, name: str) -> None:
    pumps = pumping(cluster, name)
    lost = cluster.named(cluster.copies()[1].leader)
    lost.stop()
    assert all(cluster.named(each.leader) is not lost for each in cluster.copies().values())
    more_confirms(pumps)
    lost.restart()
    cluster.wait_for_copies()
    check(cluster, pumps)


def test_acks_offsets_delays_and_sequences_are_on_the_copies(
    cluster: RealCluster, name: str
) -> None:
    """Whatever a shard keeps is there at the node that leads next, not only messages.

    Consumers at other nodes go on under their tags.
    """
    lost = cluster.named(cluster.copies()[0].leader)
    rest = cluster.others(lost)
    of_kind = {
        kind: names_on(MIRRORED, f"{name}-{kind}", MIRRORED) for kind in ("a", "s", "d", "c")
    }
    with connect(rest[0]) as client:
        channel = client.channel()
        channel.confirm_delivery()
        for acked, stream, delayed, plain in zip(*of_kind.values(), strict=True):
            channel.queue_declare(plain, durable=True)
            channel.queue_declare(acked, durable=True)
            channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
            channel.queue_declare(delayed, durable=True)
            inner = {"x-delayed-type": "fanout"}
            channel.exchange_declare(delayed, "x-delayed-message", durable=True, arguments=inner)
            channel.queue_bind(delayed, delayed)
            for number in range(1, 7):
                channel.basic_publish("", acked, b"%d" % number, sequenced(name, number))
                channel.basic_publish("", stream, b"%d" % number, PERSISTENT)
            later = pika.BasicProperties(delivery_mode=2, headers={"x-delay": DELAY_MS})
            channel.basic_publish(delayed, "", b"1", later)
            taking = client.channel()
            taking.tx_select()
            for _ in range(3):
                method, _, _ = taking.basic_get(acked)
                taking.basic_ack(method.delivery_tag)
            taking.tx_commit()
            taking.close()
            assert read(client, stream, 4, "reader") == [1, 2, 3, 4]
        rows = api(rest[0], "queues")
    on_lost = {row["name"] for row in rows if row["node"] == f"shardmq@{lost.data_dir.name}"}
    for kind in ("a", "s", "c"):
        assert on_lost.intersection(of_kind[kind])
    consumed = min(on_lost.intersection(of_kind["c"]))
    with connect(rest[0]) as client, connect(rest[1]) as publishing:
        channel = publishing.channel()
        channel.confirm_delivery()
        got: list[tuple[str, int, bool]] = []

        def take(_: object, method: pika.spec.Basic.Deliver, __: object, body: bytes) -> None:
            got.append((method.consumer_tag, int(body), method.redelivered))

        def wait_for(number: int) -> None:
            wait_until(
                lambda: client.process_data_events(0.05) or bool(got and got[-1][1] == number),
                f"message {number}",
            )

        tag = client.channel().basic_consume(consumed, take)
        getting, rows = client.channel(), []
        taken = next(queue for queue in on_lost if queue.startswith(f"{name}-a-"))
        stream = next(queue for queue in on_lost if queue.startswith(f"{name}-s-"))
        assert getting.basic_get(taken)[2] == b"4"
        reading = client.channel()
        reading.basic_qos(prefetch_count=100)

        def take_row(_: object, method: pika.spec.Basic.Deliver, __: object, body: bytes) -> None:
            rows.append((method.consumer_tag, int(body)))

        reading.basic_consume(
            stream, take_row, consumer_tag="rows", arguments={"x-stream-offset": "first"}
        )
        for number in (1, 2):
            channel.basic_publish("", consumed, b"%d" % number, PERSISTENT)
        wait_for(2)
        time.sleep(POSITIONS_LAST_S)
        lost.kill_all()
        wait_for_others(cluster, lost)
        publish_at_last(channel, consumed, b"3", PERSISTENT)
        wait_for(3)  # it may come twice, if the first try was nacked
        again = [(tag, 1, True), (tag, 2, True)]
        assert got[:5] == [(tag, 1, False), (tag, 2, False), *again, (tag, 3, False)]
        publish_at_last(channel, stream, b"7", PERSISTENT)
        wait_until(
            lambda: client.process_data_events(0.05) or bool(rows and rows[-1][1] == 7), "row 7"
        )
        # The rows that were not acknowledged come again, and no row is left out.
        assert {tag for tag, _ in rows} == {"rows"}
        assert [row for _, row in rows][-7:] == [1, 2, 3, 4, 5, 6, 7]
        method, _, body = getting.basic_get(taken)
        assert (method.redelivered, body) == (True, b"4"), "it goes on at the same channel"
    with connect(rest[1]) as client:
        channel = client.channel()
        channel.confirm_delivery()
        for acked, stream, delayed, _ in zip(*of_kind.values(), strict=True):
            for number in (5, 6, 7):
                publish_at_last(channel, acked, b"%d" % number, sequenced(name, number))
            assert all_of(rest[1], acked) == [4, 5, 6, 7]
            assert read(client, stream, 2, "reader") == [5, 6]
            wait_until(
                lambda delayed=delayed: all_of(rest[1], delayed) == [1],  # type: ignore[misc]
                "a delayed message",
            )
    lost.restart()
    cluster.wait_for_copies()


def sequenced(producer: str, number: int) -> pika.BasicProperties:
    headers = {"x-producer-id": producer, "x-sequence": number}
    return pika.BasicProperties(delivery_mode=2, headers=headers)


def publish_at_last(
    channel: BlockingChannel, queue: str, body: bytes, properties: pika.BasicProperties
) -> None:
    """Publish a message until it is confirmed.

    One in a sequence that may be lost closes its channel.
    """
    end = time.monotonic() + WITHOUT_CONFIRMS_S_MAX
    while True:
        try:
            if not channel.is_open:
                channel = channel.connection.channel()
                channel.confirm_delivery()
            return channel.basic_publish("", queue, body, properties)
        except (pika.exceptions.NackError, pika.exceptions.ChannelClosedByBroker):
            assert time.monotonic() < end


def read(client: pika.BlockingConnection, stream: str, count: int, tag: str) -> list[int]:
    """Read the next messages of a stream, from the position that a tag has."""
    channel, found = client.channel(), []
    channel.basic_qos(prefetch_count=1)
    arguments = {"x-stream-automatic-offset-tracking": True, "x-stream-offset": "first"}

    def take(_: object, method: pika.spec.Basic.Deliver, __: object, body: bytes) -> None:
        if len(found) < count:
            found.append(int(body))
            channel.basic_ack(method.delivery_tag)

    channel.basic_consume(stream, take, consumer_tag=tag, arguments=arguments)
    wait_until(lambda: client.process_data_events(0.05) or len(found) == count, "rows")
    channel.close()
    return found


def rows_at(url: str, login_of: RealBroker | None = None) -> tuple[str, bytes]:
    """Return the answer to a request, and the URL that gave it after all redirections."""
    request = urllib.request.Request(url)
    if login_of is not None:
        request.add_unredirected_header("Authorization", f"Basic {login(login_of)}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.url, answer.read()


def test_rows_of_a_stream_are_read_at_a_node_that_follows(cluster: RealCluster, name: str) -> None:
    """They are those of the leader, whose reader is asked for nothing; without a copy it is."""
    cluster.wait_for_copies()
    at = cluster.nodes[0]
    with connect(at) as client:
        channel = client.channel()
        channel.confirm_delivery()
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        for number in range(200):
            channel.basic_publish("", name, b"%d" % number * 50, PERSISTENT)
    shard = next(row["shard"] for row in api(at, "queues") if row["name"] == name)
    record = cluster.copies()[shard]
    leader = cluster.named(record.leader)
    (follower,) = (cluster.named(each) for each in record.in_sync if each != record.leader)
    urls = [f"http://{node.http}/api/streams/%2F/{name}/0/arrow" for node in cluster.nodes]

    # The leader itself, by a ticket that does not speak of copies.
    url, found = rows_at(urls[0], at)
    tickets = Tickets(keys_of(SECRET, NAME).ticket_key)
    ticket = tickets.read(url.rpartition("/")[2], time.time())
    assert ticket is not None and ticket.scan.there == (0, 200)
    scan = msgspec.structs.replace(ticket.scan, there=None)
    at_leader = f"http://{leader.http}/stream-rows/{tickets.text(ticket.id, scan, time.time())}"
    assert rows_at(at_leader) == (at_leader, found)

    reader = leader.pid("reader")
    os.kill(reader, signal.SIGSTOP)
    try:
        for node, url in zip(cluster.nodes, urls, strict=True):
            assert_read_at(follower, rows_at(url, node), found)
    finally:
        os.kill(reader, signal.SIGCONT)
    stopped = follower.pid("shard", shard)
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_until(
            lambda: set(cluster.copies()[shard].in_sync) == {record.leader}, "the copy to leave"
        )
        # Who was sent to the copy before is sent on to the leader.
        late = tickets.text(ticket.id, ticket.scan, time.time())
        assert_read_at(leader, rows_at(f"http://{follower.http}/stream-rows/{late}"), found)
        wait_until(
            lambda: rows_at(urls[0], at)[0].startswith(f"http://{leader.http}/"),
            "the leader to be read",
        )
    finally:
        os.kill(stopped, signal.SIGCONT)
    cluster.wait_for_copies()


def assert_read_at(node: RealBroker, answer: tuple[str, bytes], rows: bytes) -> None:
    url, found = answer
    assert url.startswith(f"http://{node.http}/stream-rows/")
    assert found == rows


def test_a_snapshot_of_a_cluster_is_restored_with_an_etcd_that_knows_nothing_and_on_one_host(
    cluster: RealCluster, name: str, own: RealEtcd, tmp_path: Path
) -> None:
    """What was confirmed before the call is there, in order, and users may go on."""
    pumps = pumping(cluster, name, [0])
    before = {queue: list(found) for pump in pumps for queue, found in pump.confirmed.items()}
    monday = tmp_path / "monday"
    told = CliRunner().invoke(
        app, ["snapshot", str(monday), "--data-dir", str(cluster.nodes[1].data_dir)]
    )
    assert told.exit_code == 0 and "monday of each host" in told.output, told.output
    again = CliRunner().invoke(
        app, ["snapshot", str(monday), "--data-dir", str(cluster.nodes[1].data_dir)]
    )
    assert again.exit_code != 0 and "is not empty" in again.output
    more_confirms(pumps)
    check(cluster, pumps)
    merged = CliRunner().invoke(app, ["store", "merge", str(monday), str(tmp_path / "one")])
    assert merged.exit_code == 0, merged.output

    def check_restored(node: RealBroker) -> None:
        for queue, confirmed in before.items():
            found = all_of(node, queue)
            assert found == sorted(set(found)) and set(confirmed) <= set(found)

    one = RealBroker(tmp_path / "one", shards=SHARDS)
    try:
        check_restored(one)
    finally:
        one.clean_up()
    for part in list(monday.iterdir()):
        part.rename(monday / part.name.removeprefix("shardmq@"))
    with RealCluster(monday, own, replicas=2) as restored:
        wait_until(
            lambda: [len(record.in_sync) for record in restored.copies().values()] == [2] * SHARDS,
            "two copies of each shard",
        )
        check_restored(restored.nodes[2])


def elect(node: RealBroker, shard: int, name: str, *words: str) -> tuple[bool, str]:
    """Ask a node for an unclean election; return whether it was done, and the words."""
    where = ("--data-dir", str(node.data_dir))
    found = CliRunner().invoke(app, ["cluster", "elect-unclean", str(shard), name, *words, *where])
    return found.exit_code == 0, found.output


def test_an_operator_lets_a_copy_lead_when_the_last_node_in_sync_has_lost_its_disk(
    cluster: RealCluster, name: str
) -> None:
    """The shard is what the copy was: what was confirmed behind that is lost, and nothing else."""
    at, queue = cluster.nodes[0], name
    with connect(at) as client:
        client.channel().queue_declare(queue, durable=True)
    (shard,) = (row["shard"] for row in api(at, "queues") if row["name"] == queue)
    record = cluster.copies()[shard]
    leader = cluster.named(record.leader)
    (follower,) = (cluster.named(each) for each in record.in_sync if each != record.leader)
    confirmed = Pump([at], [queue])
    confirmed.start()
    more_confirms([confirmed])
    target = follower.data_dir.name
    is_done, said = elect(at, shard, target, "--lose")
    assert not is_done and "is in sync and alive" in said
    pid = follower.pid("shard", shard)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: len(cluster.copies()[shard].in_sync) == 1, "the copy to be left out")
        more_confirms([confirmed])
        confirmed.end()
        held = next(leader.data_dir.rglob(f"shard-{shard:02d}.copy"))
        held.unlink()
        os.kill(leader.pid("shard", shard), signal.SIGKILL)
    finally:
        os.kill(pid, signal.SIGCONT)
    # Until then the node that led may be alive without a word, or may not be alive yet.
    wait_until(lambda: "say --lose" in elect(at, shard, target)[1], "the copy that is lost")
    is_done, said = elect(at, shard, target)
    assert f"the copy of shardmq@{target} ends at operation" in said and not is_done
    assert cluster.copies()[shard].leader == record.leader
    is_done, said = elect(at, shard, target, "--lose")
    assert is_done and f"shardmq@{target} leads shard {shard}" in said
    cluster.wait_for_copies()
    with connect(at) as client:
        channel = client.channel()
        channel.confirm_delivery()
        publish_at_last(channel, queue, b"%d" % (confirmed.confirmed[queue][-1] + 1), PERSISTENT)
    numbers = confirmed.confirmed[queue]
    found = all_of(at, queue)
    *kept, last = found
    assert last == numbers[-1] + 1
    assert CONFIRMS_MORE <= len(kept) < len(numbers)
    assert kept == numbers[: len(kept)]
    assert any("uncleanly" in node.log_path.read_text() for node in cluster.nodes)


@pytest.mark.row("K3")
@pytest.mark.parametrize("confirms_alone", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_a_confirm_says_that_a_follower_has_the_message(
    own: RealEtcd, tmp_path: Path, *, confirms_alone: bool
) -> None:
    """A leader that confirms before its follower has synced loses messages, and this finds it."""
    environment = {}
    if confirms_alone:
        (tmp_path / PATCH_NAME).write_text(CONFIRMS_ALONE)
        path = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{path}"
    with RealCluster(tmp_path, own, 2, replicas=2, environment=environment) as cluster:
        cluster.wait_for_copies()
        first, second = cluster.nodes
        with connect(first) as client:
            for index in range(QUEUES):
                client.channel().queue_declare(f"q{index}", durable=True)
        queue = next(row["name"] for row in api(first, "queues") if row["shard"] == 0)
        pump = Pump([first], [queue])
        pump.start()
        more_confirms([pump])
        follower = second.pid("shard", 0)
        os.kill(follower, signal.SIGSTOP)
        time.sleep(1)  # less than it takes until the follower is out of the in-sync set
        first.kill_all()
        # What has reached the follower's host and not its disk is lost with the process.
        os.kill(follower, signal.SIGKILL)
        wait_until(lambda: cluster.copies()[0].leader == "shardmq@node-1", "the other node to lead")
        wait_for_nodes(second, 1)
        pump.end()
        found = all_of(second, queue)
        is_lost = not set(pump.confirmed[queue]) <= set(found)
        assert is_lost == confirms_alone


def test_too_few_nodes_confirm_nothing_and_a_power_cut_of_all_loses_nothing(
    own: RealEtcd, tmp_path: Path
) -> None:
    environment = {"SHARDMQ_CLUSTER_MIN_IN_SYNC": "2", "SHARDMQ_SHARDS_DISK_STALL_S": "1"}
    with RealCluster(
        tmp_path, own, 2, replicas=2, environment=environment, together=True
    ) as cluster:
        cluster.wait_for_copies()
        first, second = cluster.nodes
        queues = [f"q{index}" for index in range(QUEUES)]
        with connect(first) as client:
            for queue in queues:
                client.channel().queue_declare(queue, durable=True)
        pump = Pump([first], queues)
        pump.start()
        more_confirms([pump])
        second.kill_all()
        wait_for_others(cluster, second)
        count = pump.count
        time.sleep(2)
        assert pump.count == count
        expected = ["too few nodes are in sync", ["shardmq@node-0"], 1]
        names = ("alarm", "in_sync", "replica_in_sync")
        # A shard says so when something waits for a sync: the one of the publish under way does.
        wait_until(
            lambda: expected in [[row.get(name) for name in names] for row in api(first, "shards")],
            "the true reason",
        )
        assert "disk does not answer" not in first.log_path.read_text()
        with connect(first) as client:
            assert client.channel().basic_get(queues[0])[2], "consumers go on"
        second.restart()
        cluster.wait_for_copies()
        more_confirms([pump])
        for node in cluster.nodes:
            node.kill_all()
        starting = [threading.Thread(target=node.restart) for node in cluster.nodes]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        cluster.wait_for_copies()
        check(cluster, [pump])


def test_a_node_that_is_back_leads_its_shards_again_and_nothing_is_nacked(
    own: RealEtcd, tmp_path: Path
) -> None:
    environment = {"SHARDMQ_CLUSTER_GIVE_BACK_AFTER_S": "1"}
    with RealCluster(
        tmp_path, own, replicas=2, shards=2, environment=environment, together=True
    ) as cluster:
        cluster.wait_for_copies()
        homes = {shard: record.leader for shard, record in cluster.copies().items()}
        lost = cluster.nodes[1]
        lost.kill_all()
        wait_for_others(cluster, lost)
        lost.restart()
        cluster.wait_for_copies()
        # Clients at the other two nodes, which are there all the time.
        pumps = pumping(cluster, "back", [0, 2])
        wait_until(
            lambda: {s: r.leader for s, r in cluster.copies().items()} == homes, "leads to go back"
        )
        more_confirms(pumps)
        check(cluster, pumps)
        print(f"longest without a confirm: {[round(pump.longest_s, 3) for pump in pumps]} s")
        assert [pump.nacked for pump in pumps] == [0, 0]
        assert all(pump.longest_s < HAND_OVER_S_MAX for pump in pumps)


def test_a_node_that_is_lost_for_long_is_replaced_and_may_be_forgotten(
    own: RealEtcd, tmp_path: Path
) -> None:
    environment = {"SHARDMQ_CLUSTER_REPLACE_AFTER_S": "1"}
    with RealCluster(tmp_path, own, replicas=2, environment=environment) as cluster:
        cluster.wait_for_copies()
        pumps = pumping(cluster, "lost", [0])
        lost = cluster.nodes[2]
        name = f"shardmq@{lost.data_dir.name}"
        lost.kill_all()
        wait_until(
            lambda: all(
                len(record.in_sync) == 2 and name not in record.in_sync
                for record in cluster.copies().values()
            ),
            "the copies of the lost node at others",
        )
        more_confirms(pumps)
        lost.restart()
        wait_for_nodes(cluster.nodes[0], 3)
        more_confirms(pumps)
        # It is gone for good. Its shard goes on where all of it is, also after a restart there.
        lost.kill_all()
        wait_for_nodes(cluster.nodes[0], 2)
        wait_for_others(cluster, lost)
        leader = cluster.copies()[2].leader
        told = api(cluster.nodes[1], f"nodes/{name}/forget", {})
        assert (told["new_homes"], told["shards_lost"], told["queues_lost"]) == (
            {"2": leader},
            [],
            0,
        )
        wait_until(lambda: len(api(cluster.nodes[0], "nodes")) == 2, "the node to go")
        cluster.named(leader).stop()
        cluster.named(leader).restart()
        cluster.wait_for_copies()
        more_confirms(pumps)
        check(cluster, pumps)
        with pytest.raises(AssertionError, match=f"the node '{name}' was forgotten"):
            lost.restart()
        assert lost.process.wait() == 2
