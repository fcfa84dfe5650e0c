"""The HTTP API makes snapshots for administrators, where nothing is yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from shardmq.broker.controller.management.app import api_app
from shardmq.broker.controller.management.http_connections import SERVER
from shardmq.broker.controller.stored.snapshot_directory import NoSnapshot
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.http_api.fake_cluster import in_cluster

api = conftest.api


class Snapshots:
    def __init__(self) -> None:
        self.made: list[Path] = []
        self.more: dict[str, Any] = {}

    async def make(self, target: Path) -> dict[str, Any]:
        if self.made:
            raise NoSnapshot(f"{target} is not empty")
        self.made.append(target)
        return self.more


@pytest.fixture
async def made(api: Api) -> AsyncIterator[Api]:
    snapshots: Any = Snapshots()
    context = replace(api.context, snapshots=snapshots)
    server = TestServer(api_app(context))
    await server.start_server(**SERVER)
    async with TestClient(server) as client:
        yield replace(api, client=client, context=context)


async def test_a_snapshot_is_made_once(made: Api) -> None:
    body = {"directory": "/var/backups/one"}
    assert await made.call("POST", "/api/snapshots", body) == (200, body)
    status, refusal = await made.call("POST", "/api/snapshots", body)
    assert status == 400 and "is not empty" in refusal["reason"]


@pytest.mark.parametrize(
    "directory",
    ["", "relative", "/a\0b", "/a\nb", "/a\x1b[2J", "/a\x7f", "/a\x85", "/" + "a" * 4000, 7, None],
)
async def test_a_bad_directory_is_refused(made: Api, directory: object) -> None:
    status, refusal = await made.call("POST", "/api/snapshots", {"directory": directory})
    assert status == 400 and "directory" in refusal["reason"]


async def test_of_a_cluster_the_parts_are_told(api: Api) -> None:
    snapshots: Any = Snapshots()
    snapshots.more = {"snapshot": "1f", "parts": {"shardmq@a": [0]}, "nodes_away": ["shardmq@c"]}
    context = replace(await in_cluster(api), snapshots=snapshots)
    server = TestServer(api_app(context))
    await server.start_server(**SERVER)
    async with TestClient(server) as client:
        cluster = replace(api, client=client, context=context)
        answer = await cluster.call("POST", "/api/snapshots", {"directory": "/a"})
    assert answer == (200, {"directory": "/a", **snapshots.more})
