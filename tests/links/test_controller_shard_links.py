"""Test how long the controller waits for the shards of other nodes, with a clock of the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.peers import shard_links
from shardmq.broker.controller.peers.shard_links import (
    ANSWER_S_MAX,
    AWAY_MARGIN_S,
    LEADERS_WAITED_FOR_MAX,
    ShardLinks,
)
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.session import SessionKeys

NODE_TIMEOUT_S = 20.0


class Queues:
    """An authority without queues."""

    def queues_of_shard(self, shard: int) -> list[wire.QueueSpec]:
        return []

    def queue_gone(self, id: int, reason: str) -> None: ...


class Unreached:
    """A dialer that reaches nobody."""

    incarnation = 1

    def __init__(self, _context: Any, address: str, *_: Any, **_calls: Any) -> None:
        self.address = address

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...

    def close(self) -> None: ...

    def send(self, message: bytes) -> None: ...


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


async def test_each_next_leader_of_a_shard_is_waited_for_but_not_without_end(
    links: ShardLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_links, "Dialer", Unreached)
    loop, now, wait_s = asyncio.get_running_loop(), links._began_at, NODE_TIMEOUT_S + AWAY_MARGIN_S
    monkeypatch.setattr(loop, "time", lambda: now)
    shard, address = links.shards[0], "tcp://node:0"
    links.learn(0, address)
    for epoch in (1, 2):
        links._hello(shard, epoch, wire.Hello(1, True))
        assert not links.is_away(0)
        links._session_ended(shard)
        now += wait_s + 1
        for port in range(LEADERS_WAITED_FOR_MAX):
            links.learn(0, address)
            assert links.is_away(0), "the address is the same"
            address = f"tcp://node-{epoch}:{port}"
            links.learn(0, address)
            now += wait_s
            assert not links.is_away(0), "the node may have to recover the shard"
            now += 1
        links.learn(0, address := f"tcp://node-{epoch}:again")
        assert links.is_away(0), "the address changes for ever"


async def test_what_nobody_waits_for_any_more_is_not_asked_of_the_next_process(
    links: ShardLinks,
) -> None:
    shard = links.shards[0]
    kept, given_up = (links.request(0, wire.Stats) for _ in range(2))
    given_up.cancel()
    await asyncio.sleep(0)
    assert [waiting.reply for waiting in shard.waiting.values()] == [kept]
    kept.cancel()
