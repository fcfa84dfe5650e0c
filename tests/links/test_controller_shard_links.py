"""Test how long the controller waits for the shards of other nodes, with a clock of the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.peers.shard_links import ANSWER_S_MAX, AWAY_MARGIN_S, ShardLinks
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.session import SessionKeys

NODE_TIMEOUT_S = 20.0


class Queues:
    """An authority without queues."""

    def queues_of_shard(self, shard: int) -> list[wire.QueueSpec]:
        return []

    def queue_gone(self, id: int, reason: str) -> None: ...


@pytest.fixture
async def links(tmp_path: Path) -> Any:
    """Yield the links of a controller of a cluster, whose node has no shards."""
    made = ShardLinks(1, 5, [], SessionKeys("", ""), 2, NODE_TIMEOUT_S)
    made.handler = Queues()
    await made.start(tmp_path)
    yield made
    await made.stop()


async def test_a_shard_is_waited_for_until_another_node_has_had_the_time_to_lead_it(
    links: ShardLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, now = asyncio.get_running_loop(), links._began_at
    monkeypatch.setattr(loop, "time", lambda: now + NODE_TIMEOUT_S + AWAY_MARGIN_S)
    assert not links.is_away(0) and not links.is_away(7), "also one that it learns of later"
    monkeypatch.setattr(loop, "time", lambda: now + NODE_TIMEOUT_S + AWAY_MARGIN_S + 0.1)
    assert links.is_away(0) and links.is_away(7)
    assert links._answer_s_max > NODE_TIMEOUT_S + AWAY_MARGIN_S  # or 541 comes before 404
    assert links._answer_s_max >= ANSWER_S_MAX
