"""Who sets a shovel of this broker must be allowed to enter the vhosts of its ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http_api.conftest import Api

RIGHTS = {"configure": "^mine", "write": r"^(mine.*|amq\.default|)$", "read": "^(mine|read)"}
MINE = {"src-uri": "amqp://", "src-queue": "mine", "dest-uri": "amqp://", "dest-queue": "mine-too"}


@pytest.fixture
async def mover(api: Api) -> Api:
    """Return the API for a policymaker whose queues and exchanges are called mine."""
    user = {
        "password": "x",
        "tags": "policymaker",
        "hashing_algorithm": "rabbit_password_hashing_sha256",
    }
    for path, body in (
        ("users/mover", user),
        ("permissions/%2F/mover", RIGHTS),
        ("vhosts/closed", {}),
    ):
        assert (await api.call("PUT", f"/api/{path}", body))[0] == 201
    api.login = ("mover", "x")
    return api


async def set_shovel(api: Api, value: dict[str, Any]) -> int:
    given = {key: item for key, item in (MINE | value).items() if item is not None}
    status, _ = await api.call("PUT", "/api/parameters/shovel/%2F/s", {"value": given})
    return status


@pytest.mark.row("I16")
@pytest.mark.parametrize(
    "value",
    [
        {},
        {"src-queue": "read", "src-predeclared": True},
        {"src-queue": None, "src-exchange": "read"},
        {"dest-queue": None, "dest-exchange": "mine"},
        {"src-uri": "amqp://user:password@elsewhere", "src-queue": "other"},
        {"dest-uri": "https://elsewhere/path", "dest-queue": None},
        {"src-queue": "other"},
        {"src-queue": None, "src-exchange": "other"},
        {"dest-queue": "other"},
        {"dest-queue": None, "dest-exchange": "other"},
        {"dest-queue": None},  # any exchange
    ],
)
async def test_who_may_enter_a_vhost_may_move_anything_in_it(
    mover: Api, value: dict[str, Any]
) -> None:
    assert await set_shovel(mover, value) == 201


@pytest.mark.row("I16")
@pytest.mark.parametrize(
    "value",
    [
        {"src-uri": "amqp:///closed"},
        {"dest-uri": ["amqp://", "amqp:///closed"]},
        {"dest-uri": "amqp://guest@"},
    ],
)
async def test_other_vhosts_and_users_are_refused(mover: Api, value: dict[str, Any]) -> None:
    assert await set_shovel(mover, value) == 401
    mover.login = ("guest", "guest")
    assert (await mover.call("GET", "/api/parameters/shovel/%2F/s"))[0] == 404


@pytest.mark.row("I16")
async def test_an_encrypted_uri_whose_vhost_nobody_sees_is_refused(mover: Api) -> None:
    assert await set_shovel(mover, {"src-uri": "encrypted:gAAAA"}) == 400
    assert await set_shovel(mover, {"dest-uri": ["amqp://", "encrypted:gAAAA"]}) == 400
    other = {"src-protocol": "amqp10", "src-uri": "encrypted:gAAAA"}  # of which nothing is checked
    assert await set_shovel(mover, other) == 400
    given = {"value": {"uri": "encrypted:gAAAA"}}
    assert (await mover.call("PUT", "/api/parameters/federation-upstream/%2F/u", given))[0] == 400


@pytest.mark.row("I16", "J10")
@pytest.mark.parametrize(
    ("uri", "status"),
    [("amqp://", 201), ("amqp://elsewhere", 201), ("amqp:///closed", 401), ("amqp://guest@", 401)],
)
async def test_who_sets_an_upstream_must_be_allowed_to_enter_its_vhost(
    mover: Api, uri: str, status: int
) -> None:
    path = "/api/parameters/federation-upstream"
    upstream, element = {"uri": uri}, [{"upstream": "u", "uri": ["amqp://elsewhere", uri]}]
    assert (await mover.call("PUT", f"{path}/%2F/u", {"value": upstream}))[0] == status
    assert (await mover.call("PUT", f"{path}-set/%2F/u", {"value": element}))[0] == status
    assert (await mover.call("PUT", f"{path}/%2F/u", {"value": {"uri": 1}}))[0] == 400
