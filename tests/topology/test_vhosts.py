"""Test what a vhost says of itself."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.access.test_access import status
from tests.support.brokers import Api
from tests.support.real_broker import RealBroker


@pytest.mark.row("I19")
def test_a_vhost_is_described_and_tagged(api: Api, name: str) -> None:
    api(f"/api/vhosts/{name}", method="PUT", body={"description": "for tests", "tags": "a,b"})
    row = api(f"/api/vhosts/{name}")
    assert (row["description"], row["tags"], row["default_queue_type"]) == (
        "for tests",
        ["a", "b"],
        "classic",
    )
    assert row["metadata"] == {
        "description": "for tests",
        "tags": ["a", "b"],
        "default_queue_type": "classic",
    }
    api(f"/api/vhosts/{name}", method="DELETE")


def test_the_copies_that_a_vhost_asks_for_are_checked_and_stay(api: Api, name: str) -> None:
    path = f"/api/vhosts/{name}"
    for body, why in (
        ({"replicas": 8}, "Expected `int` <= 7"),
        ({"replicas": -1}, "Expected `int` >= 0"),
        ({"replicas": 2, "min_in_sync": 3}, "min_in_sync: 3 is more than 2 replicas"),
    ):
        code, reason = refusal(api, path, "PUT", body)
        assert code == 400 and why in reason
    api(path, method="PUT", body={"replicas": 2, "min_in_sync": 2})
    api(path, method="PUT", body={"description": "the same copies"})
    row = api(path)
    assert (row["replicas"], row["min_in_sync"], row["metadata"]["replicas"]) == (2, 2, 2)
    assert refusal(api, path, "PUT", {"replicas": 1})[0] == 400
    api(path, method="PUT", body={"replicas": 0, "min_in_sync": 0})
    assert "replicas" not in api(path)["metadata"]
    api(path, method="DELETE")


@pytest.mark.row("I19")
def test_a_protected_vhost_is_not_deleted(api: Api, name: str) -> None:
    api(f"/api/vhosts/{name}", method="PUT", body={"protected_from_deletion": True})
    api(f"/api/vhosts/{name}", method="PUT", body={"description": "still protected"})
    text = f"Refusing to delete virtual host '{name}' because it is protected from deletion"
    assert refusal(api, f"/api/vhosts/{name}", "DELETE") == (412, text)
    api(f"/api/vhosts/{name}/deletion/protection", method="DELETE")
    assert api(f"/api/vhosts/{name}")["protected_from_deletion"] is False
    api(f"/api/vhosts/{name}/deletion/protection", method="POST")
    assert refusal(api, f"/api/vhosts/{name}", "DELETE") == (412, text)
    api(f"/api/vhosts/{name}/deletion/protection", method="DELETE")
    api(f"/api/vhosts/{name}", method="DELETE")


@pytest.mark.broker
@pytest.mark.row("I19", "J14")
def test_what_is_said_of_a_vhost_travels_with_definitions_and_outlives_a_restart(
    tmp_path: Path, name: str
) -> None:
    broker = RealBroker(tmp_path / "data", shards=1)
    try:
        body = {
            "description": "d",
            "tags": "t",
            "default_queue_type": "quorum",
            "protected_from_deletion": True,
            "replicas": 3,
            "min_in_sync": 2,
        }
        assert status(broker, f"/api/vhosts/{name}", "guest", "guest", "PUT", body) == 201
        broker.stop()
        broker.restart()
        exported = _definitions(broker)
        about = {
            "description": "d",
            "tags": ["t"],
            "default_queue_type": "quorum",
            "protected_from_deletion": True,
            "replicas": 3,
            "min_in_sync": 2,
        }
        assert _of(exported, name)["metadata"] == about
        assert (
            status(broker, f"/api/vhosts/{name}/deletion/protection", "guest", "guest", "DELETE")
            == 204
        )
        assert status(broker, f"/api/vhosts/{name}", "guest", "guest", "DELETE") == 204
        said = status(broker, "/api/definitions", "guest", "guest", "POST", exported)
        assert said == 200  # with a warning: a quorum queue is like any other
        assert _of(_definitions(broker), name)["metadata"] == about
        broker.stop()
    finally:
        broker.clean_up()


def refusal(api: Api, path: str, how: str, body: Any = None) -> tuple[int, str]:
    """Status and reason of what guest may not do."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        api(path, method=how, body=body)
    return refused.value.code, json.loads(refused.value.read())["reason"]


def _definitions(broker: RealBroker) -> Any:
    request = urllib.request.Request(f"http://{broker.http}/api/definitions")
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def _of(exported: Any, vhost: str) -> dict[str, Any]:
    return next(dict(row) for row in exported["vhosts"] if row["name"] == vhost)
