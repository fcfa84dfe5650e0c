"""Calls that destroy take as much as was asked for.

A call with an unknown name destroys nothing.
"""

from __future__ import annotations

import pytest

from shardmq.broker.controller.management.app import RESOURCES
from shardmq.broker.controller.management.responses.openapi import PART
from shardmq.shardd.wire import messages as wire
from tests.http_api.conftest import Api

CHANGES_BY_DESTROYING = {  # beside all DELETE
    ("POST", "/api/users/bulk-delete"),
    ("POST", "/api/queues/{vhost}/{queue}/get"),
    ("POST", "/api/queues/{vhost}/{queue}/move"),
}
DESTROYING = [route for resource in RESOURCES for route in resource.ROUTES if route.destroys]


@pytest.fixture
async def made(api: Api) -> Api:
    await api.call("PUT", "/api/queues/%2F/q", {})
    await api.call("PUT", "/api/queues/%2F/s", {"arguments": {"x-queue-type": "stream"}})
    for exchange in ("e", "f"):
        body = {"exchange": exchange, "write": "w", "read": "r"}
        await api.call("PUT", "/api/topic-permissions/%2F/guest", body)
    api.shards.sent.clear()
    return api


def test_all_that_destroys_knows_its_parameters() -> None:
    found = {(route.method, route.path) for route in DESTROYING}
    assert {each for each in found if each[0] != "DELETE"} == CHANGES_BY_DESTROYING
    assert all(
        route.destroys
        for resource in RESOURCES
        for route in resource.ROUTES
        if route.method == "DELETE"
    )


@pytest.mark.parametrize("route", DESTROYING, ids=lambda route: f"{route.method} {route.path}")
async def test_a_parameter_that_is_not_known_or_is_there_twice_destroys_nothing(
    made: Api, route: object
) -> None:
    path = PART.sub(
        lambda part: {"vhost": "%2F", "queue": "q", "user": "guest", "kind": "q"}.get(part[1], "e"),
        route.path,
    )  # type: ignore[attr-defined]
    before, version = list(made.shards.sent), made.context.catalog.version
    twice = [f"{name}=true&{name}=true" for name in route.query or ()]  # type: ignore[attr-defined]
    for query in ("cuont=2", "page=1", "if_unused=true", *twice):
        status, found = await made.call(route.method, f"{path}?{query}")  # type: ignore[attr-defined]
        assert (status, found["error"]) == (400, "bad_request"), (query, found)
    assert (made.shards.sent, made.context.catalog.version) == (before, version)


@pytest.mark.parametrize("flag", ["yes", "", "tru", "on"])
async def test_a_condition_that_is_neither_yes_nor_no_deletes_nothing(made: Api, flag: str) -> None:
    for path in (
        "queues/%2F/q?if-unused",
        "queues/%2F/q?if-empty",
        "exchanges/%2F/amq.topic?if-unused",
    ):
        status, found = await made.call("DELETE", f"/api/{path}={flag}")
        assert (status, found["error"]) == (400, "bad_request")
    assert made.shards.sent == []


async def test_a_purge_takes_so_many_as_it_says(made: Api) -> None:
    assert (await made.call("DELETE", "/api/queues/%2F/q/contents?count=2"))[0] == 204
    assert [(type(sent), sent.count) for sent in made.shards.sent] == [(wire.Purge, 2)]
    assert await made.call("DELETE", "/api/queues/%2F/q/contents?count=500") == (204, "")
    assert made.headers["X-Messages-Purged"] == "3"  # there are no more
    made.shards.sent.clear()
    assert (await made.call("DELETE", "/api/queues/%2F/q/contents"))[0] == 204
    assert made.headers["X-Messages-Purged"] == "3"
    assert [(type(sent), sent.count) for sent in made.shards.sent] == [(wire.Purge, None)]


@pytest.mark.parametrize("count", ["0", "-1", "x", "", "1.5", "9" * 5000, "all"])
async def test_a_purge_of_no_number_purges_nothing(made: Api, count: str) -> None:
    status, found = await made.call("DELETE", f"/api/queues/%2F/q/contents?count={count}")
    assert (status, found["reason"][:6]) == (400, "count:")
    assert made.shards.sent == []


async def test_a_stream_is_purged_as_a_whole_or_not_at_all(made: Api) -> None:
    assert (await made.call("DELETE", "/api/queues/%2F/s/contents?count=2"))[0] == 400
    assert (await made.call("DELETE", "/api/queues/%2F/s/contents"))[0] == 204
    assert [type(sent) for sent in made.shards.sent] == [wire.Purge]


async def test_a_topic_permission_goes_by_the_exchange_in_the_path(made: Api) -> None:
    (only,) = await made.get("/api/topic-permissions/%2F/guest/f")
    assert only["exchange"] == "f"
    for exchange in ("e", "nobody", "e"):  # gone already is gone, as in RabbitMQ
        assert (await made.call("DELETE", f"/api/topic-permissions/%2F/guest/{exchange}"))[0] == 204
        assert [row["exchange"] for row in await made.get("/api/topic-permissions/%2F/guest")] == [
            "f"
        ]
    assert (await made.call("DELETE", "/api/topic-permissions/%2F/guest/f"))[0] == 204
    assert (await made.call("DELETE", "/api/topic-permissions/%2F/guest/f"))[0] == 404, (
        "there is no right at all"
    )


async def test_the_cluster_has_an_id_among_the_global_parameters(made: Api) -> None:
    path = "/api/global-parameters/internal_cluster_id"
    own = (await made.get(path))["value"]
    assert own.startswith("rabbitmq-cluster-id-")
    assert {"name": "internal_cluster_id", "value": own} in await made.get("/api/global-parameters")
    assert (await made.get("/api/definitions"))["global_parameters"] == [
        {"name": "internal_cluster_id", "value": own}
    ]
    assert (await made.call("PUT", path, {"value": "another"}))[0] in (201, 204)
    assert (await made.get(path))["value"] == "another"
    assert 'rabbitmq_cluster_permanent_id="another"' in (await made.call("GET", "/metrics"))[1]
    assert (await made.call("DELETE", path))[0] == (await made.call("DELETE", path))[0] == 204
    assert (await made.get(path))["value"] == own
