"""The paths of RabbitMQ 4.1 are here, or it is known why not; clients of streams there are none.

In the lists a colon stands for a name. They have the paths of the management plugin and of the
plugins for streams, federation, shovels, tracing and top.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.management.app import RESOURCES
from shardmq.broker.controller.management.resources.super_streams import PARTITIONS_MAX
from shardmq.broker.controller.management.responses.openapi import PART
from shardmq.broker.controller.stored.definitions import LOG_NAME
from shardmq.broker.controller.stored.room import GrowingLog
from shardmq.shardd.wire import messages as wire
from tests.http_api.conftest import CONNECTION, Api
from tests.http_api.test_api import NAME, make

HERE = """
aliveness-test/: all-configuration auth auth/attempts/: auth/attempts/:/source
auth/hash_password/: bindings bindings/: bindings/:/e/:/:/: bindings/:/e/:/:/:/: channels
channels/: cluster-name config/effective connections connections/: connections/:/channels
connections/:/sessions connections/username/: consumers consumers/: definitions definitions/:
deprecated-features deprecated-features/used exchanges exchanges/: exchanges/:/:
exchanges/:/:/bindings/destination exchanges/:/:/bindings/source exchanges/:/:/publish extensions
feature-flags feature-flags/:/enable global-parameters global-parameters/: health/checks/alarms
health/checks/below-node-connection-limit health/checks/certificate-expiration/:/:
health/checks/is-in-service health/checks/local-alarms health/checks/metadata-store/initialized
health/checks/metadata-store/initialized/with-data health/checks/node-is-quorum-critical
health/checks/port-listener/: health/checks/protocol-listener/:
health/checks/quorum-queues-without-elected-leaders/all-vhosts
health/checks/quorum-queues-without-elected-leaders/all-vhosts/pattern/:
health/checks/quorum-queues-without-elected-leaders/vhost/:
health/checks/quorum-queues-without-elected-leaders/vhost/:/pattern/:
health/checks/ready-to-serve-clients health/checks/virtual-hosts healthchecks/node
healthchecks/node/: nodes nodes/: nodes/:/memory nodes/:/memory/relative operator-policies
operator-policies/: operator-policies/:/: overview parameters parameters/: parameters/:/:
parameters/:/:/: permissions permissions/:/: policies policies/: policies/:/: queues queues/:
queues/:/: queues/:/:/actions queues/:/:/bindings queues/:/:/contents queues/:/:/get
queues/detailed queues/quorum/:/:/status rebalance/queues reset reset/:
stream/:/:/tracking stream/connections
stream/connections/: stream/connections/:/: stream/connections/:/:/consumers
stream/connections/:/:/publishers stream/consumers stream/consumers/: stream/publishers
stream/publishers/: stream/publishers/:/: stream/super-streams/:/: topic-permissions
topic-permissions/:/: topic-permissions/:/:/: user-limits user-limits/: user-limits/:/: users
users/: users/:/permissions users/:/topic-permissions users/bulk-delete users/without-permissions
version vhost-limits vhost-limits/: vhost-limits/:/: vhosts vhosts/: vhosts/:/channels
vhosts/:/connections vhosts/:/deletion/protection vhosts/:/permissions vhosts/:/start/:
vhosts/:/topic-permissions whoami
shovels shovels/: shovels/vhost/:/: shovels/vhost/:/:/restart
federation-links federation-links/: federation-links/:/state/down federation-links/state/down
federation-links/vhost/:/:/:/restart
"""
NOT_HERE = {
    "it is about Erlang": """
nodes/:/memory/ets nodes/:/memory/ets/: nodes/:/memory/ets/:/relative nodes/:/memory/ets/relative
process/: top/: top/ets/:
""",
    "a queue has the copies of its shard": """
queues/quorum/:/:/replicas/add queues/quorum/:/:/replicas/delete
queues/quorum/replicas/on/:/grow queues/quorum/replicas/on/:/shrink
""",
    "there is no file of traces": """
trace-files trace-files/: trace-files/node/: trace-files/node/:/: traces traces/: traces/:/:
traces/node/: traces/node/:/: traces/node/:/:/:
""",
    "it sets a cookie, and a cookie is sent by other sites too": "login",
}

CONSUMERS, PUBLISHERS = "stream/consumers", "stream/publishers"


@pytest.fixture
async def made(api: Api) -> Api:
    await make(api)
    assert (await put_stream(api, "s"))[0] == 201
    api.shards.are_empty = True
    return api


async def put_stream(api: Api, name: str) -> tuple[int, Any]:
    body = {"arguments": {"x-queue-type": "stream"}}
    return await api.call("PUT", f"/api/queues/%2F/{name}", body)


def test_each_path_of_rabbitmq_is_here_or_it_is_known_why_not() -> None:
    there = set()
    for route in (route for resource in RESOURCES for route in resource.ROUTES):
        choices = [(part[0], part[2].split("|")) for part in PART.finditer(route.path) if part[2]]
        spelt = [route.path.replace(part, one) for part, ones in choices for one in ones]
        there.update(PART.sub(":", path).removeprefix("/api/") for path in (route.path, *spelt))
    assert len(HERE.split()) == 129
    assert set(HERE.split()) - there == set()
    assert there & {path for paths in NOT_HERE.values() for path in paths.split()} == set()


@pytest.mark.row("G3.13")
async def test_nobody_is_connected_by_the_stream_protocol(made: Api) -> None:
    for what in ("stream/connections", CONSUMERS, PUBLISHERS):
        for path in (what, f"{what}/%2F"):
            assert await made.get(f"/api/{path}") == []
            page = await made.get(f"/api/{path}?page=1")
            assert (page["total_count"], page["items"]) == (0, [])
        assert (await made.call("GET", f"/api/{what}/x"))[0] == 404
    assert await made.get(f"/api/{PUBLISHERS}/%2F/s") == []
    for method, path in (
        ("GET", f"{PUBLISHERS}/%2F/x"),
        ("GET", f"stream/connections/%2F/{NAME}"),
        ("DELETE", f"stream/connections/%2F/{NAME}"),
        ("GET", f"stream/connections/%2F/{NAME}/consumers"),
        ("GET", f"stream/connections/%2F/{NAME}/publishers"),
        ("GET", "stream/%2F/x/tracking"),
        ("GET", "stream/x/s/tracking"),
    ):
        status, found = await made.call(method, f"/api/{path}")
        assert (status, found) == (404, {"error": "Object Not Found", "reason": "Not Found"}), path
    assert made.doors.closed == [], f"{CONNECTION} is one of AMQP"


async def test_tracking_shows_the_last_offset_that_each_name_has_acknowledged(made: Api) -> None:
    queue = made.context.catalog.vhosts["/"].queues["s"]
    made.shards.streams = [wire.StreamStats(queue.id, 0, 9, 1, 0, {"a": 5, "b": 9, "new": 0})]
    path, offsets = "/api/stream/%2F/s/tracking", {"a": 4, "b": 8}
    assert await made.get(path) == {"offsets": offsets, "writers": {}}
    assert await made.get(f"{path}?type=offset") == {"offsets": offsets}
    assert await made.get(f"{path}?type=writer") == {"writers": {}}
    status, found = await made.call("GET", "/api/stream/%2F/q/tracking")
    assert (status, found["reason"]) == (400, "queue 'q' in vhost '/' is not a stream")
    made.shards.silent = True
    status, found = await made.call("GET", path)
    assert (status, found["reason"]) == (503, "The stream leader is not available")
    made.login = ("manager", "x")
    assert (await made.call("GET", path))[0] == 401


# -- super streams ---------------------------------------------------------------------------------


@pytest.mark.row("G3.13", "D12")
@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ({"partitions": 3, "arguments": {"max-age": "1h"}}, ["0", "1", "2"]),
        ({"partitions": "1", "arguments": {"x-max-age": "1h"}}, ["0"]),
        ({"binding-keys": "eu, us", "arguments": {"max-age": "1h"}, "node": "n"}, ["eu", "us"]),
    ],
)
async def test_a_super_stream_is_an_exchange_with_a_stream_for_each_key(
    made: Api, body: dict[str, Any], keys: list[str]
) -> None:
    path = "/api/stream/super-streams/%2F/sup"
    queues = len(await made.get("/api/queues"))
    assert await made.call("PUT", path, body) == (204, "")
    exchange = await made.get("/api/exchanges/%2F/sup")
    assert (exchange["type"], exchange["durable"]) == ("direct", True)
    assert exchange["arguments"] == {"x-super-stream": True}
    assert "shard_queues" not in exchange
    bound = await made.get("/api/exchanges/%2F/sup/bindings/source")
    assert [(b["destination"], b["routing_key"], b["arguments"]) for b in bound] == [
        (f"sup-{key}", key, {"x-stream-partition-order": order}) for order, key in enumerate(keys)
    ]
    for key in keys:
        stream = await made.get(f"/api/queues/%2F/sup-{key}")
        assert stream["arguments"] == {"x-queue-type": "stream", "x-max-age": "1h"}
        assert stream["durable"] is True
    assert len(await made.get("/api/queues")) == queues + len(keys), "there are no others"
    status, found = await made.call("PUT", path, body)
    assert (status, found["reason"]) == (400, "there is already an exchange named sup")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "Must specify partitions or binding keys"),
        ({"partitions": 1, "binding-keys": "a"}, "Specify partitions or binding keys, not both"),
        ({"partitions": 0}, "partitions: not a number from 1 to 1000"),
        ({"partitions": PARTITIONS_MAX + 1}, "partitions: not a number from 1 to 1000"),
        ({"partitions": "many"}, "partitions: not a number from 1 to 1000"),
        ({"partitions": []}, "Expected `int | str | null`, got `array` - at `$.partitions`"),
        ({"binding-keys": " , "}, "binding-keys: not from 1 to 1000 keys"),
        ({"binding-keys": "a,b, a"}, "binding-keys: a key is there twice"),
        ({"binding-keys": "x" * 300}, "longer than 255 bytes"),
        ({"partitions": 1, "arguments": {"max-agee": "1h"}}, "arguments: there is no max-agee; "),
        ({"partitions": 1, "arguments": {"max-age": "soon"}}, "max-age"),
        ({"partitions": 1, "arguments": {"max-length-bytes": "x"}}, "max-length-bytes: not a num"),
        ({"partitions": 1, "arguments": [1]}, "Expected `object`, got `array`"),
    ],
)
async def test_a_super_stream_that_cannot_be_is_not_made(
    made: Api, body: dict[str, Any], reason: str
) -> None:
    before = await made.get("/api/definitions")
    status, found = await made.call("PUT", "/api/stream/super-streams/%2F/sup", body)
    assert (status, found["error"]) == (400, "bad_request")
    assert reason in found["reason"]
    assert await made.get("/api/definitions") == before


async def test_a_super_stream_is_made_whole_or_not_at_all(made: Api) -> None:
    assert (await put_stream(made, "taken-1"))[0] == 201
    limit = {"value": len(await made.get("/api/queues")) + 2}
    assert (await made.call("PUT", "/api/vhost-limits/%2F/max-queues", limit))[0] == 204
    before = await made.get("/api/definitions")
    path = "/api/stream/super-streams/%2F/"
    status, found = await made.call("PUT", f"{path}taken", {"partitions": 3})
    assert (status, found["reason"]) == (400, "there is already a queue named taken-1")
    assert (await made.call("PUT", f"{path}sup", {"partitions": 3}))[0] == 400
    assert (await made.call("PUT", f"{path}amq.sup", {"partitions": 1}))[0] == 401
    assert await made.get("/api/definitions") == before
    assert await made.call("PUT", f"{path}sup", {"partitions": 2}) == (204, "")


async def test_no_crash_can_come_between_two_parts_of_a_super_stream(
    made: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    ask = made.authority.ask

    async def counting(request: Any, **more: Any) -> Any:
        asked.append(request)
        return await ask(request, **more)

    log = Path(made.context.config.data_dir) / LOG_NAME
    appended: list[bytes] = []
    append = GrowingLog.append

    def appending(self: GrowingLog, data: bytes) -> None:
        appended.append(data)
        append(self, data)

    monkeypatch.setattr(made.authority, "ask", counting)
    monkeypatch.setattr(GrowingLog, "append", appending)
    path = "/api/stream/super-streams/%2F/sup"
    assert await made.call("PUT", path, {"partitions": 400}) == (204, "")
    assert len(asked) == len(appended) == 1, "a kill -9 finds all in the log, or nothing"
    assert appended[0] in log.read_bytes()
    churn = made.authority.queue_churn()
    assert churn["queues_declared"] >= churn["queues_created"] >= 400


async def test_a_user_needs_the_rights_of_each_step(made: Api) -> None:
    await made.call(
        "PUT", "/api/permissions/%2F/manager", {"configure": "^sup(-0)?$", "write": "", "read": ""}
    )
    before = await made.get("/api/definitions")
    made.login = ("manager", "x")
    path = "/api/stream/super-streams/%2F/sup"
    status, found = await made.call("PUT", path, {"partitions": 2})
    assert (status, found["error"]) == (401, "not_authorised")
    made.login = ("guest", "guest")
    assert await made.get("/api/definitions") == before
    made.login = ("nobody", "x")
    assert (await made.call("PUT", path, {"partitions": 2}))[0] == 401
