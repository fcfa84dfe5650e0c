"""A drain shows which queues it has not moved, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from shardmq.broker.controller.management.resources import node_drains
from shardmq.broker.controller.moving.mover import NOT_SHORTER, MoveProgress
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.http_api.fake_cluster import LEADER, in_cluster

api = conftest.api


async def test_a_drain_names_the_moves_that_do_not_go_on(api: Api) -> None:
    context = await in_cluster(api)
    queues = list(context.catalog.index.all())[:3]
    moves = {
        ("/", queues[0].name): MoveProgress(waits_for=NOT_SHORTER),
        ("/", queues[1].name): MoveProgress(),
    }
    relocating = mock.Mock(on_node=lambda node: queues, left_behind=lambda queues: [])
    call: Any = mock.Mock(context=replace(context, moves=moves, relocating=relocating))
    call.part, call.catalog = lambda name: LEADER, context.catalog
    shown = await node_drains.drained(call)
    assert shown["held_up"] == [{"vhost": "/", "name": queues[0].name, "why": NOT_SHORTER}]
