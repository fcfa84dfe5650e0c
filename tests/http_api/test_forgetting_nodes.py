"""A node is forgotten with its queues, and a refusal says what has happened already."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from shardmq.broker.controller.management.app import api_app
from shardmq.broker.controller.management.http_connections import SERVER
from shardmq.cluster.membership import Inheritance, NoPlace
from shardmq.cluster.pairs import EtcdAway
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.http_api.fake_cluster import DOWN, in_cluster

api = conftest.api
PATH = f"/api/nodes/{DOWN}/forget"


class Relocating:
    """Knows which queues lie on shards: as many as there are."""

    def __init__(self, api: Api) -> None:
        self._index = api.context.catalog.index

    def on_shards(self, shards: Collection[int]) -> list[Any]:
        return [queue for queue in self._index.all() if queue.shard in shards]


@pytest.mark.parametrize(
    ("looked", "asked", "said", "are_left"),
    [
        (NoPlace("node 2 lives"), None, f"'{DOWN}' is not forgotten (node 2 lives)", True),
        (
            None,
            NoPlace("node 2 lives"),
            "its queues are lost already; the node is not forgotten: ask again (node 2 lives)",
            False,
        ),
        (
            None,
            EtcdAway("silent", unknown=True),
            "its queues are lost already; the node may be forgotten or not: ask again (silent)",
            False,
        ),
    ],
)
async def test_a_refusal_says_whether_the_queues_are_lost_already(
    api: Api, looked: Exception | None, asked: Exception | None, said: str, are_left: bool
) -> None:
    context = await in_cluster(api)
    lost = sorted({queue.shard for queue in context.catalog.index.all()})[:1]

    async def forget(number: int, may_be: Collection[int] | None = None) -> Inheritance:
        refusal = looked if may_be is None else asked
        if refusal is not None:
            raise refusal
        return Inheritance(lost, {})

    relocating: Any = Relocating(api)
    context = replace(context, relocating=relocating, forget_node=forget)
    server = TestServer(api_app(context))
    await server.start_server(**SERVER)
    async with TestClient(server) as client:
        cluster = replace(api, client=client, context=context)
        status, refusal = await cluster.call("POST", PATH, {"lose": True})
    assert (status, refusal["reason"]) == (400, said)
    assert bool(relocating.on_shards(lost)) == are_left
