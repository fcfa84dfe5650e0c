"""Test streams in the HTTP API without the reader's process.

Known facts are shown, and calls that need the reader say that it is missing.
"""

from __future__ import annotations

import importlib.util
import uuid

import msgspec
import pytest

from shardmq.broker.routing import hidden
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.board import Board, path_of
from tests.http_api.conftest import Api

STREAM = {"arguments": {"x-queue-type": "stream"}}


async def declared(api: Api, name: str) -> int:
    """Declare a stream; return the id of its queue."""
    assert (await api.call("PUT", f"/api/queues/%2F/{name}", STREAM))[0] == 201
    queue = api.context.catalog.queue("/", name)
    assert queue is not None
    return queue.id


async def test_a_stream_is_shown_as_its_shard_said(api: Api) -> None:
    id = await declared(api, "s")
    await api.call("PUT", "/api/queues/%2F/plain", {})
    (silent,) = (await api.get("/api/streams/%2F/s"))["shards"]
    assert (silent["first"], silent["next"], silent["state"]) == (None, None, "down")
    queue = api.context.catalog.queue("/", "s")
    assert queue is not None
    board = Board(path_of(api.context.config.runtime_dir, queue.shard))
    board.put(id, 3, 8)
    board.show()
    shown = await api.get("/api/streams/%2F/s")
    assert shown["shards"] == [
        {"shard": 0, "queue": "s", "id": shown["id"], "first": 3, "next": 8, "state": "running"}
    ]
    assert uuid.UUID(shown["id"]).version == 5
    assert await api.get("/api/streams") == [
        {"name": "s", "vhost": "/", "kind": "queue", "shards": 1}
    ]


async def test_the_id_outlives_what_asks_for_it(api: Api) -> None:
    await declared(api, "s")
    first = (await api.get("/api/streams/%2F/s"))["id"]
    assert (await api.get("/api/streams/%2F/s"))["id"] == first
    await api.call("DELETE", "/api/queues/%2F/s")
    await declared(api, "s")
    assert (await api.get("/api/streams/%2F/s"))["id"] != first


@pytest.mark.parametrize(("installed", "status"), [(True, 503), (False, 501)])
async def test_what_needs_the_reader_says_what_is_missing(
    api: Api, monkeypatch: pytest.MonkeyPatch, installed: bool, status: int
) -> None:
    await declared(api, "s")
    found = importlib.util.find_spec("json") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    calls = [
        ("GET", "/api/streams/%2F/s/0/arrow", None),
        ("GET", "/api/streams/%2F/s/offset-for-time?timestamp=1", None),
        ("POST", "/api/exchanges/%2F/amq.fanout/arrow", b"x"),
    ]
    for method, path, body in calls:
        got, said = await api.call(method, path, body)
        assert got == status and ("pip install pyarrow" in said["reason"]) != installed, path


@pytest.mark.parametrize(
    "path",
    [
        "/api/streams?name=s",
        "/api/streams/%2F/s?wait_ms=30001",
        "/api/streams/%2F/s?wait_ms=1&after=x",
        "/api/streams/%2F/s?wait_ms=1&after=0:-1",
        "/api/streams/%2F/s/offset-for-time",
        "/api/streams/%2F/s/offset-for-time?timestamp=soon",
        "/api/streams/%2F/s/0/arrow?from=-1",
        "/api/streams/%2F/s/0/arrow?to=9223372036854775808",
        "/api/streams/%2F/s/0/arrow?columns=value,colour",
        "/api/streams/%2F/s/0/arrow?filter=since:now",
        "/api/streams/%2F/s/0/arrow?filter=key:a&filter=key:b",
    ],
)
async def test_bad_input_is_refused(api: Api, path: str) -> None:
    await declared(api, "s")
    status, said = await api.call("GET", path)
    assert status == 400 and said["error"] == "bad_request"


@pytest.mark.parametrize(
    "path", ["none", "plain", "s/1/arrow", "plain/0/arrow", "none/offset-for-time?timestamp=1"]
)
async def test_what_is_no_stream_is_not_found(api: Api, path: str) -> None:
    await declared(api, "s")
    await api.call("PUT", "/api/queues/%2F/plain", {})
    assert (await api.call("GET", f"/api/streams/%2F/{path}"))[0] == 404


async def test_how_far_a_group_has_come_is_told_to_the_shard(api: Api) -> None:
    id = await declared(api, "s")
    stream = (await api.get("/api/streams/%2F/s"))["id"]
    path = "/api/streams/%2F/s/groups/g%2F1"
    assert (await api.call("PUT", path, {"shards": {"0": {"next": 7, "id": stream}}}))[0] == 204
    assert api.shards.sent[-1] == wire.StoreOffset(1, id, "g/1", 7)
    assert (await api.call("DELETE", path))[0] == 204
    assert api.shards.sent[-1] == wire.StoreOffset(1, id, "g/1", None)
    assert await api.get("/api/streams/%2F/s/groups") == []
    assert (await api.call("GET", path))[0] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"shards": {"1": {"next": 7}}}, 400),
        ({"shards": {"0": {"next": -1}}}, 400),
        ({"shards": {"0": {"next": 1 << 63}}}, 400),
        ({"shards": {"0": 7}}, 400),
        ({"shards": {"0": {"next": 7, "id": "another"}}}, 412),
    ],
)
async def test_positions_that_cannot_be_are_refused(api: Api, body: object, status: int) -> None:
    await declared(api, "s")
    sent = len(api.shards.sent)
    assert (await api.call("PUT", "/api/streams/%2F/s/groups/g", body))[0] == status
    assert (await api.call("PUT", "/api/streams/%2F/s/groups/" + "g" * 256, {"shards": {}}))[
        0
    ] == 400
    assert len(api.shards.sent) == sent


async def test_groups_are_for_who_may_read_the_stream(api: Api) -> None:
    await declared(api, "s")
    await api.call("PUT", "/api/users/u", {"password": "p", "tags": "management"})
    await api.call("PUT", "/api/permissions/%2F/u", {"configure": ".*", "write": ".*", "read": ""})
    api.login = ("u", "p")
    for method, body in [("GET", None), ("PUT", {"shards": {"0": {"next": 0}}}), ("DELETE", None)]:
        assert (await api.call(method, "/api/streams/%2F/s/groups/g", body))[0] == 401


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere/s", "there is no vhost 'nowhere'"),
        ("%2F/none", "there is no queue or exchange 'none' in vhost '/'"),
        ("%2F/plain", "queue 'plain' in vhost '/' is of type classic, not a stream"),
        ("%2F/amq.topic", "exchange 'amq.topic' in vhost '/' has no shards that are streams"),
        ("%2F/s/3/arrow", "'s' has no shard 3, but 1 shards"),
    ],
)
async def test_why_there_is_no_such_stream_is_said(api: Api, path: str, why: str) -> None:
    await declared(api, "s")
    await api.call("PUT", "/api/queues/%2F/plain", {})
    assert await api.call("GET", f"/api/streams/{path}") == (
        404,
        {"error": "Object Not Found", "reason": why},
    )


async def test_a_super_stream_whose_streams_have_offsets_of_their_own_is_named(api: Api) -> None:
    body = {"binding-keys": ", ".join(f"{key:02}" for key in range(11))}
    assert (await api.call("PUT", "/api/stream/super-streams/%2F/orders", body))[0] in (201, 204)
    status, said = await api.call("GET", "/api/streams/%2F/orders/groups")
    names = ", ".join(f"'orders-{key:02}'" for key in range(10))
    assert (status, said["reason"]) == (
        404,
        "exchange 'orders' in vhost '/' has no shards that are streams, but is a super stream with "
        f"the streams {names} and 1 more",
    )


async def test_what_an_exchange_keeps_for_itself_is_no_stream(api: Api) -> None:
    """Its queue is nobody's to see, whatever type it is made with."""
    await declared(api, "s")
    made = api.context.catalog.queue("/", "s")
    assert made is not None
    api.context.catalog.apply(
        msgspec.structs.replace(made, name=hidden.queue_name(hidden.PERSISTENT, "x"), id=99)
    )
    assert [stream["name"] for stream in await api.get("/api/streams")] == ["s"]
    assert (await api.call("GET", "/api/streams/%2F/amq.persistent.x"))[0] == 404


async def test_of_a_shard_its_exchange_is_said(api: Api) -> None:
    shards = {"x-shards": 2, "x-shard-arguments": {"x-queue-type": "stream"}}
    body = {"type": "x-modulus-hash", "durable": True, "arguments": shards}
    assert (await api.call("PUT", "/api/exchanges/%2F/orders", body))[0] == 201
    await declared(api, "s")
    listed = {stream["name"]: stream for stream in await api.get("/api/streams")}
    assert listed["s"].get("exchange") is None and listed["orders"].get("exchange") is None
    queues = [shard["queue"] for shard in (await api.get("/api/streams/%2F/orders"))["shards"]]
    assert len(queues) == 2 and {listed[queue]["exchange"] for queue in queues} == {"orders"}
