"""An unclean election needs a cluster, a copy that may lead, and the word that messages may go."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp.test_utils import TestClient, TestServer

from shardmq.broker.controller.management.app import api_app
from shardmq.broker.controller.management.http_connections import SERVER
from shardmq.cluster.rules import Record
from shardmq.cluster.unclean import NoCopies, NotElected, Prospect
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.http_api.fake_cluster import OTHER, in_cluster

api = conftest.api
PATH = f"/api/shards/1/elect-unclean/{OTHER}"


class Elections:
    """Elections of shard 1; `why` refuses them."""

    def __init__(self) -> None:
        self.elected: list[tuple[int, str]] = []
        self.why = ""

    async def look(self, shard: int, node: str) -> Prospect:
        if shard != 1:
            raise NoCopies
        if self.why:
            raise NotElected(self.why)
        return Prospect(Record(6, node, 1, "s", {node: "copy"}), "8 operations may be lost")

    async def elect(self, shard: int, node: str) -> Prospect:
        found = await self.look(shard, node)
        self.elected.append((shard, node))
        return found


@pytest.fixture
def elections() -> Elections:
    return Elections()


@pytest.fixture
async def cluster(api: Api, elections: Elections) -> AsyncIterator[Api]:
    context = replace(await in_cluster(api), elections=elections)
    server = TestServer(api_app(context))
    await server.start_server(**SERVER)
    async with TestClient(server) as client:
        yield replace(api, client=client, context=context)


async def test_a_copy_is_elected_when_the_user_gives_messages_up_and_the_log_says_who(
    cluster: Api, elections: Elections, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"shard": 1, "node": OTHER, "term": 6, "loss": "8 operations may be lost"}
    assert await cluster.get(PATH) == found
    for body in ({}, {"lose": False}):
        status, refusal = await cluster.call("POST", PATH, body)
        assert status == 400 and "8 operations may be lost" in refusal["reason"]
    assert elections.elected == []
    with caplog.at_level(logging.WARNING):
        assert await cluster.call("POST", PATH.replace("shardmq@", ""), {"lose": True}) == (
            200, found
        )  # fmt: skip
    assert elections.elected == [(1, OTHER)]
    (record,) = caplog.records
    assert f"user 'guest' lets {OTHER} lead shard 1 in term 6" in record.getMessage()


async def test_an_election_that_must_not_be_is_refused(
    cluster: Api, elections: Elections, caplog: pytest.LogCaptureFixture
) -> None:
    elections.why = "a is in sync and alive"
    for method, body in (("GET", None), ("POST", {"lose": True})):
        status, refusal = await cluster.call(method, PATH, body)
        assert status == 400 and "a is in sync and alive" in refusal["reason"]
    assert elections.elected == []
    assert "may not let" in caplog.text
    elections.why = ""
    for path, expected in (
        (PATH.replace("/1/", "/2/"), 404),
        (PATH.replace(OTHER, "nobody"), 404),
        (PATH.replace("/1/", "/-1/"), 400),
        (PATH.replace("/1/", "/x/"), 400),
    ):
        assert (await cluster.call("GET", path))[0] == expected
        assert (await cluster.call("POST", path, {"lose": True}))[0] == expected


async def test_one_host_has_nobody_to_elect(api: Api) -> None:
    path = "/api/shards/0/elect-unclean/shardmq@localhost"
    status, refusal = await api.call("POST", path, {"lose": True})
    assert status == 400 and "no cluster" in refusal["reason"]
