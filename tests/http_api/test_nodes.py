"""The HTTP API tells of the nodes of a cluster, and of the one that was called."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from shardmq.broker.controller.cluster_view import Claimed
from shardmq.broker.controller.disk_watch import DiskWatch
from shardmq.broker.controller.management import call
from shardmq.broker.controller.management.app import api_app
from shardmq.broker.controller.management.http_connections import SERVER
from shardmq.broker.controller.node_facts import ETCD_AWAY, Certificate, facts_of
from shardmq.cluster.replicas import Replicas, ReplicasOfShards
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.http_api.fake_cluster import DOWN, LEADER, NODES, OTHER, in_cluster

api = conftest.api

CHECKS = "/api/health/checks"
CallTo = Callable[[str], None]


@pytest.fixture
async def cluster(api: Api) -> AsyncIterator[Api]:
    """Yield the API of a cluster, of which the leader is called."""
    context = await in_cluster(api)
    server = TestServer(api_app(context))
    await server.start_server(**SERVER)
    async with TestClient(server) as client:
        yield replace(api, client=client, context=context)


@pytest.fixture
def call_to(monkeypatch: pytest.MonkeyPatch) -> CallTo:
    """Return a function that says which node relays the calls from now on."""

    def set_called(node: str) -> None:
        monkeypatch.setattr(call, "called_node", lambda context, request: node)

    return set_called


def know(cluster: Api, in_sync: list[str], **copies: list[str]) -> None:
    by_shard = {int(name.removeprefix("shard")): nodes for name, nodes in copies.items()}
    cluster.context.cluster.know(NODES, in_sync, by_shard)


def tell(cluster: Api, node: str, **changed: Any) -> None:
    """Let a node tell other facts."""
    facts = facts_of(cluster.context.config, cluster.context.memory, 1.0)
    cluster.context.cluster.tell(node, msgspec.structs.replace(facts, **changed))


async def test_a_node_has_the_shards_that_it_leads_and_those_of_which_it_has_all(
    cluster: Api,
) -> None:
    know(cluster, [LEADER], shard0=[LEADER, OTHER], shard2=[OTHER])
    rows = {row["name"]: row for row in await cluster.get("/api/nodes")}
    found = {name: row["in_sync_shards"] for name, row in rows.items()}
    assert found == {LEADER: [0], OTHER: [0, 2], DOWN: []}


async def test_all_nodes_are_listed_with_their_own_figures(cluster: Api) -> None:
    rows = await cluster.get("/api/nodes")
    assert [(row["name"], row["running"], row["is_leader"]) for row in rows] == [
        (LEADER, True, True), (OTHER, True, False), (DOWN, False, False),
    ]  # fmt: skip
    first, second, down = rows
    assert [row["mem_used"] for row in (first, second)] == [10, 5]
    for name in ("sockets_used", "connection_created"):
        assert [row[name] for row in (first, second)] == [1, 1], name
    assert [row["channel_created"] for row in (first, second)] == [2, 2]
    assert [row["queue_created"] for row in (first, second)] == [6, 0]
    assert (first["etcd_up"], second["etcd_up"]) == (True, False)
    assert down == {
        "name": DOWN, "type": "disc", "running": False, "cluster_links": [], "alarms": [],
        "shards": [2], "in_sync_shards": [], "is_leader": False, "has_definitions": False,
    }  # fmt: skip
    assert await cluster.get(f"/api/nodes/{DOWN}") == down
    for path in ("memory", "memory/relative"):
        assert await cluster.get(f"/api/nodes/{DOWN}/{path}") == {"memory": "not_available"}
    assert (await cluster.call("GET", "/api/nodes/shardmq@nobody"))[0] == 404


async def test_a_node_that_leads_no_shard_says_how_much_of_its_disk_is_free(cluster: Api) -> None:
    know = cluster.context.cluster.know
    know([node._replace(shards=()) if node.name == OTHER else node for node in NODES])
    assert "disk_free" not in await cluster.get(f"/api/nodes/{OTHER}")
    tell(cluster, OTHER, disk_free_bytes=12_345)
    row = await cluster.get(f"/api/nodes/{OTHER}")
    assert row["disk_free"] == 12_345 and "disk_free_limit" not in row
    tell(cluster, LEADER, disk_free_bytes=1)
    assert (await cluster.get(f"/api/nodes/{LEADER}")).get("disk_free") != 1, "its shards tell it"


async def test_the_disk_is_looked_at_and_one_that_is_gone_is_not_known(tmp_path: Path) -> None:
    watch = DiskWatch(str(tmp_path))
    assert watch.free_bytes == -1
    for is_there in (True, False):
        if not is_there:
            tmp_path.rmdir()
        watch.look()
        assert watch._thread is not None
        watch._thread.join(30)
        assert (watch.free_bytes > 0) is is_there


async def test_the_name_of_a_cluster_comes_with_its_nodes(cluster: Api) -> None:
    nodes = (await cluster.get("/api/cluster-name"))["nodes"]
    assert [(row["name"], row["running"]) for row in nodes] == [
        (LEADER, True), (OTHER, True), (DOWN, False),
    ]  # fmt: skip
    assert [row["is_leader"] for row in nodes] == [True, False, False]


async def test_an_alarm_says_which_node_does_not_hear_etcd_and_ends_by_itself(
    cluster: Api, call_to: CallTo
) -> None:
    alarm = {"node": OTHER, "alarm": ETCD_AWAY}
    status, said = await cluster.call("GET", f"{CHECKS}/alarms")
    assert (status, said["alarms"]) == (503, [alarm])
    assert (await cluster.get("/api/overview"))["alarms"] == [alarm]
    assert (await cluster.get(f"{CHECKS}/local-alarms"))["status"] == "ok"
    call_to(OTHER)
    assert (await cluster.call("GET", f"{CHECKS}/local-alarms"))[0] == 503
    # Clients are served all the same.
    assert (await cluster.get(f"{CHECKS}/is-in-service"))["status"] == "ok"
    tell(cluster, OTHER)
    assert (await cluster.get(f"{CHECKS}/alarms"))["status"] == "ok"
    assert (await cluster.get("/api/overview"))["alarms"] == []


async def test_checks_are_of_the_node_that_was_called(cluster: Api, call_to: CallTo) -> None:
    tell(cluster, OTHER, listeners={"amqps": ["10.0.0.2:5671"]})
    assert (await cluster.get(f"{CHECKS}/port-listener/5672"))["port"] == 5672
    assert (await cluster.call("GET", f"{CHECKS}/port-listener/5671"))[0] == 503
    assert (await cluster.call("GET", f"{CHECKS}/protocol-listener/amqps"))[0] == 503
    cluster.shards.shards[1].ready = False
    assert (await cluster.get(f"{CHECKS}/is-in-service"))["status"] == "ok"
    call_to(OTHER)
    assert (await cluster.get(f"{CHECKS}/port-listener/5671"))["port"] == 5671
    assert (await cluster.get(f"{CHECKS}/protocol-listener/amqps"))["protocols"] == ["amqp/ssl"]
    status, said = await cluster.call("GET", f"{CHECKS}/is-in-service")
    assert (status, said["reason"]) == (503, "shards not ready: 1")
    status, said = await cluster.call("GET", f"/api/healthchecks/node/{DOWN}")
    assert (status, said["reason"]) == (503, "nodedown")


async def test_certificates_are_those_of_the_node_that_was_called(
    cluster: Api, call_to: CallTo
) -> None:
    tell(cluster, OTHER, certificates=[Certificate("/etc/tls/host.pem", 1.0)])
    path = f"{CHECKS}/certificate-expiration/1/days"
    assert (await cluster.get(path))["status"] == "ok"
    call_to(OTHER)
    status, said = await cluster.call("GET", path)
    assert (status, said["expired"][0]["certificate"]) == (503, "/etc/tls/host.pem")
    tell(cluster, OTHER, certificates=[Certificate("/etc/tls/host.pem", 0.0, "gone")])
    assert (await cluster.call("GET", path))[1]["reason"] == "/etc/tls/host.pem: gone"


async def test_a_node_is_critical_that_alone_has_definitions_or_quorum_queues(
    cluster: Api, call_to: CallTo
) -> None:
    path = f"{CHECKS}/node-is-quorum-critical"
    assert await cluster.get(f"{CHECKS}/node-is-mirror-sync-critical") == {"status": "ok"}
    assert await cluster.get(path) == {"status": "ok"}
    know(cluster, [LEADER, DOWN])  # the other node that has all is down
    status, said = await cluster.call("GET", path)
    assert status == 503 and "No other node has all definitions" in said["reason"]
    know(cluster, [LEADER, OTHER])
    quorum = {"arguments": {"x-queue-type": "quorum"}, "durable": True}
    shards = set()
    for number in range(6):
        assert (await cluster.call("PUT", f"/api/queues/%2F/quorum-{number}", quorum))[0] == 201
        shards.add(cluster.context.catalog.vhosts["/"].queues[f"quorum-{number}"].shard)
    assert shards == {0, 1}
    for node, shard in ((LEADER, 0), (OTHER, 1)):
        call_to(node)
        status, said = await cluster.call("GET", path)
        queues = cluster.context.catalog.vhosts["/"].queues
        assert status == 503 and said["queues"]
        assert {queues[row["name"]].shard for row in said["queues"]} == {shard}
    know(cluster, [LEADER, OTHER], shard0=[LEADER, OTHER], shard1=[OTHER, DOWN])
    call_to(LEADER)
    assert await cluster.get(path) == {"status": "ok"}
    call_to(OTHER)
    assert (await cluster.call("GET", path))[0] == 503


async def test_a_queue_has_the_nodes_of_its_shard_as_members(cluster: Api) -> None:
    know(cluster, [LEADER, OTHER], shard0=[LEADER, OTHER, DOWN])
    rows = {row["shard"]: row for row in await cluster.get("/api/queues")}
    for shard, leader, members, online in (
        (0, LEADER, [LEADER, OTHER, DOWN], [LEADER, OTHER]),
        (1, OTHER, [OTHER], [OTHER]),  # without copies
    ):
        row = rows[shard]
        assert (row["leader"], row["members"], row["online"]) == (leader, members, online)


async def test_rabbitmqs_rebalancing_moves_queues_in_a_cluster_only(
    api: Api,
) -> None:
    begun: list[str] = []
    for context, wanted in ((api.context, []), (await in_cluster(api), ["moves"])):
        fake: Any = SimpleNamespace(rebalance=lambda: begun.append("moves"))
        server = TestServer(api_app(replace(context, relocating=fake)))
        await server.start_server(**SERVER)
        async with TestClient(server) as client:
            called = replace(api, client=client)
            assert (await called.call("POST", "/api/rebalance/queues"))[0] == 204
        assert begun == wanted


async def test_logins_are_those_of_the_node(cluster: Api) -> None:
    rows = {row["protocol"]: row for row in await cluster.get(f"/api/auth/attempts/{OTHER}")}
    assert rows["http"]["auth_attempts"] == 0
    rows = {row["protocol"]: row for row in await cluster.get(f"/api/auth/attempts/{LEADER}")}
    assert rows["http"]["auth_attempts"] > 0


async def test_shards_say_on_how_many_nodes_they_are_to_be(cluster: Api) -> None:
    numbers = ReplicasOfShards({1: Replicas(5, 4)}, Replicas(3))
    members = Claimed((LEADER, OTHER, DOWN), 2)
    copies = {0: [LEADER, OTHER], 1: [LEADER, OTHER]}
    cluster.context.cluster.know(NODES, [LEADER], copies, numbers, {0: members, 1: members})
    for path in ("/api/shards", "/api/shards/load"):
        rows = await cluster.get(path)
        assert [(row["replicas"], row["min_in_sync"]) for row in rows] == [(3, 2), (5, 4)]
    alone = {0: Claimed((LEADER,), 1)}  # others will take copies
    cluster.context.cluster.know(NODES, [LEADER], {0: [LEADER]}, numbers, alone)
    assert (await cluster.get("/api/shards"))[0]["min_in_sync"] == 1


@pytest.mark.row("G3.7", "C1.14")
async def test_queues_say_which_copies_they_ask_for_and_have(cluster: Api) -> None:
    numbers = ReplicasOfShards({1: Replicas(1)}, Replicas(3))
    members = Claimed((DOWN, OTHER, LEADER), 4)
    cluster.context.cluster.know(NODES, [LEADER], {0: [LEADER, DOWN]}, numbers, {0: members})
    sized = {"arguments": {"x-quorum-initial-group-size": 5}, "durable": True}
    for number in range(8):
        assert (await cluster.call("PUT", f"/api/queues/%2F/sized-{number}", sized))[0] == 201
    rows = [row for row in await cluster.get("/api/queues/%2F") if row["name"][:6] == "sized-"]
    assert {row["shard"] for row in rows} == {0, 1}
    for row in rows:
        found = {key: row[key] for key in row if key.startswith(("replicas", "min_in_sync"))}
        has = (3, 2) if row["shard"] == 0 else (1, 1)
        assert found == {
            "replicas": has[0], "min_in_sync": has[1], "replicas_wanted": 5,
            "min_in_sync_wanted": 3,
        }  # fmt: skip
        status = await cluster.get(f"/api/queues/quorum/%2F/{row['name']}/status")
        assert [tuple(each.values()) for each in status] == (
            [
                (LEADER, "leader", "voter", True, 4),
                (DOWN, "noproc", "voter", True, 4),
                (OTHER, "follower", "promotable", False, 4),
            ]
            if row["shard"] == 0
            else [(OTHER, "leader", "voter", True, None)]
        )


async def test_shards_say_on_which_nodes_they_are(cluster: Api) -> None:
    know(cluster, [LEADER, OTHER], shard1=[LEADER, OTHER])
    for path in ("/api/shards", "/api/shards/load"):
        rows = await cluster.get(path)
        assert [(row["node"], row["in_sync"]) for row in rows] == [
            (LEADER, [LEADER]), (OTHER, [LEADER, OTHER]),
        ]  # fmt: skip
