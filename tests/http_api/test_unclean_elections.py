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
from shardmq.cluster.unclean import Announce, NoCopies, NotElected, OutcomeUnknown, Prospect
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.http_api.fake_cluster import OTHER, in_cluster

api = conftest.api
PATH = f"/api/shards/1/elect-unclean/{OTHER}"


class Elections:
    """Elections of shard 1. `why` refuses them, and `outcome` is what comes of the record."""

    def __init__(self) -> None:
        self.elected: list[tuple[int, str]] = []
        self.why = ""
        self.outcome: Exception | None = None

    async def look(self, shard: int, node: str) -> Prospect:
        if shard != 1:
            raise NoCopies
        if self.why:
            raise NotElected(self.why)
        return Prospect(Record(6, node, 1, "s", {node: "copy"}), "8 operations may be lost")

    async def elect(self, shard: int, node: str, announce: Announce) -> Prospect:
        found = await self.look(shard, node)
        announce(found)
        if self.outcome is not None:
            raise self.outcome
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
    begun, ended = (record.getMessage() for record in caplog.records)
    assert begun == (
        f"user 'guest' has {OTHER} elected to lead shard 1 in term 6, uncleanly: "
        "8 operations may be lost"
    )
    assert ended == f"{OTHER} leads shard 1 in term 6 now"


async def test_an_election_whose_outcome_nobody_knows_is_not_said_to_be_refused(
    cluster: Api, elections: Elections, caplog: pytest.LogCaptureFixture
) -> None:
    for outcome, words in (
        (OutcomeUnknown("e1 is silent"), f"nobody knows whether {OTHER} leads shard 1 now: e1 is"),
        (NotElected("a is back"), f"user 'guest' may not let {OTHER} lead shard 1 uncleanly: a is"),
    ):
        elections.outcome = outcome
        caplog.clear()
        status, refusal = await cluster.call("POST", PATH, {"lose": True})
        assert status == 400 and str(outcome) in refusal["reason"]
        begun, ended = caplog.records
        assert begun.levelname == "CRITICAL" and "8 operations may be lost" in begun.getMessage()
        assert words in ended.getMessage()
        assert ("look" in refusal["reason"]) == isinstance(outcome, OutcomeUnknown)


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
