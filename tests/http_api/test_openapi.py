"""The API's description has each route, each body, each field, and the fuzzer's examples."""

from __future__ import annotations

from typing import Any

import pytest

from shardmq.broker.controller.management.app import RESOURCES
from shardmq.broker.controller.management.responses.openapi import PART
from shardmq.broker.controller.management.responses.schemas import ROWS
from tests.http_api.conftest import Api
from tests.http_api.test_api import READS, make

SHOWS = {
    PART.sub(r"{\1}", route.path): route.shows
    for resource in RESOURCES
    for route in resource.ROUTES
    if route.method == "GET" and route.shows is not None
}

# Of the 59 paths that both RabbitMQ and LavinMQ serve.
SHARED = """
aliveness-test/: bindings bindings/: bindings/:/e/:/:/: bindings/:/e/:/:/:/: channels channels/:
connections connections/: connections/:/channels connections/username/: consumers consumers/:
definitions definitions/: exchanges exchanges/: exchanges/:/: exchanges/:/:/bindings/:
exchanges/:/:/publish extensions global-parameters global-parameters/: nodes nodes/:
operator-policies operator-policies/: operator-policies/:/: overview parameters parameters/:
parameters/:/: parameters/:/:/: permissions permissions/:/: policies policies/: policies/:/: queues
queues/: queues/:/: queues/:/:/bindings queues/:/:/contents queues/:/:/get users users/:
users/:/permissions users/bulk-delete users/without-permissions vhost-limits vhost-limits/:
vhost-limits/:/: vhosts vhosts/: vhosts/:/channels vhosts/:/connections vhosts/:/permissions whoami
"""


@pytest.fixture
async def made(api: Api) -> Api:
    await make(api)
    return api


async def document(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = await api.get("/api/openapi.json")
    return found


async def test_every_route_is_described_and_nothing_else(api: Api) -> None:
    api.login = None  # none is needed
    described = {
        (m.upper(), path)
        for path, operations in (await document(api))["paths"].items()
        for m in operations
    }
    assert described == {(r.method, PART.sub(r"{\1}", r.path)) for m in RESOURCES for r in m.ROUTES}


async def test_every_operation_is_summed_up_in_a_sentence(api: Api) -> None:
    for path, operations in (await document(api))["paths"].items():
        for operation in operations.values():
            summary = operation["summary"]
            assert summary != operation["operationId"], f"{path}: the handler needs a docstring"
            assert summary[0].isupper() and summary.endswith("."), (path, summary)


async def test_statuses_are_described_as_calls_answer_them(made: Api) -> None:
    paths = (await document(made))["paths"]

    def successes(method: str, path: str) -> set[str]:
        return {code for code in paths[path][method]["responses"] if code < "300"}

    made_path = "/api/stream/super-streams/{vhost}/{name}"
    assert successes("put", made_path) == {"204"}
    assert "NAME-(N-1)" in paths[made_path]["put"]["summary"]
    super_stream = "/api/stream/super-streams/%2F/sup"
    assert (await made.call("PUT", super_stream, {"partitions": 1}))[0] == 204
    assert (await made.call("PUT", super_stream, {"partitions": 1}))[0] == 400
    assert successes("put", "/api/queues/{vhost}/{queue}") == {"201", "204"}
    for status in (201, 204):
        assert (await made.call("PUT", "/api/queues/%2F/described", {}))[0] == status
    limit = "/api/vhost-limits/{vhost}/{name}"
    assert successes("put", limit) == {"204"}
    assert (await made.call("PUT", "/api/vhost-limits/%2F/max-queues", {"value": 90}))[0] == 204
    assert successes("post", "/api/users/bulk-delete") == {"204"}
    assert (await made.call("POST", "/api/users/bulk-delete", {"users": []}))[0] == 204
    assert successes("post", "/api/bindings/{vhost}/e/{source}/{kind}/{destination}") == {"201"}


@pytest.mark.row("G1.1", "G1.2", "G1.3", "G1.4", "G1.5", "G1.6", "G1.7")
async def test_all_paths_that_other_brokers_share_are_there(api: Api) -> None:
    there = {PART.sub(":", path.removeprefix("/api/")) for path in (await document(api))["paths"]}
    shared = set(SHARED.split())
    assert len(shared) == 58  # bindings/source and bindings/destination are one route
    assert shared - there == set()


@pytest.mark.row("G4.1", "G4.3", "G4.4", "G4.5", "G4.6")
async def test_what_is_shown_has_all_the_fields_that_are_promised(made: Api) -> None:
    checked = set()
    for path in READS:
        status, found = await made.call("GET", f"/api/{path}")
        assert status == 200
        name = next((shown for of, shown in SHOWS.items() if _is(path, of)), None)
        if name is None:
            continue
        rows = found if isinstance(found, list) else [found]
        name = name[0] if isinstance(name, list) else name
        for row in rows:
            missing = {field.partition(":")[0] for field in ROWS[name].split()} - row.keys()
            assert not missing, (path, missing)
        checked.update([name] if rows else [])
    unshown = {
        "Message",
        "Routed",
        "Moved",
        "Hashed",
        "Explained",
        "Check",
        "Import",
        "LogLine",
        "Error",
        "StreamGroup",
        "StreamPublisher",
        "StreamTracking",
        "Warned",
        "Shovel",  # tests/bridges/test_shovels.py
        "FederationLink",  # tests/bridges/test_federation.py
    }
    assert checked >= ROWS.keys() - unshown


def _is(path: str, of: str) -> bool:
    parts, wanted = path.split("/"), of.removeprefix("/api/").split("/")
    literal = [one for one in SHOWS if one == f"/api/{path}"]
    if literal:
        return of == literal[0]
    return len(parts) == len(wanted) and all(
        w.startswith("{") or w == p for p, w in zip(parts, wanted, strict=True)
    )
