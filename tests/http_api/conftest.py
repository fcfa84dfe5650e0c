"""A controller without processes around it.

The catalog, definitions and authority are real; shards and front doors are in memory.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.cluster_view import ClusterView
from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.loading import load_or_begin
from shardmq.broker.controller.management.app import api_app
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.http_connections import SERVER
from shardmq.broker.controller.management.metrics.stats_collector import StatsCollector
from shardmq.broker.controller.node_facts import facts_of
from shardmq.broker.controller.peers.presence import Presence
from shardmq.broker.controller.resharding.shard_sets import NODE
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import ConnectionInfo, DoorReport
from shardmq.shardd.wire import messages as wire
from tests.support.fake_doors import FakeDoors

OWNER = "0.7.1"
CONNECTION = "127.0.0.1:5000 -> 127.0.0.1:5672"


@dataclass
class Clock:
    """The monotonic clock, which a test can set back to make a past."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class FakeShard:
    number: int
    pid: int = 1
    ready: bool = True
    alarm: str = ""


class FakeShards:
    """Shards that answer Done to everything.

    Every known queue has three ready messages and one that is not acknowledged.
    """

    count = 2

    def __init__(self) -> None:
        self.shards = [FakeShard(0), FakeShard(1)]
        self.sent: list[Any] = []
        self.ids: dict[int, set[int]] = {0: set(), 1: set()}
        self.asked: list[wire.Stats] = []
        self.published = 5  # in each queue
        self.part = wire.STATS_QUEUES_MAX  # queues in one reply
        self.silent = False
        self.are_empty = False  # then queues may be deleted if they are empty
        self.streams: list[wire.StreamStats] = []
        self.process: dict[int, dict[str, float]] = {0: {"rss_bytes": 1.0}, 1: {}}

    def is_away(self, shard: int) -> bool:
        return False

    def request(
        self, shard: int, message: Callable[[int], wire.Message], wait_s: float = 0.0
    ) -> Future[Any]:
        sent = message(1)
        if isinstance(sent, wire.Stats):
            return self.stats(shard, sent)
        self.sent.append(sent)
        if isinstance(sent, wire.CreateQueues):
            self.ids[shard].update(spec.id for spec in sent.queues)
        reply: Future[Any] = asyncio.get_running_loop().create_future()
        refused = isinstance(sent, wire.DeleteQueue) and sent.if_empty and not self.are_empty
        reply.set_result(wire.Refused(1, 406, "not empty") if refused else wire.Done(1, messages=3))
        return reply

    async def messages(self, queues: Iterable[QueuePut]) -> dict[int, int]:
        return {} if self.silent else {queue.id: 4 for queue in queues}

    def stats(self, shard: int, asked: wire.Stats) -> Future[Any]:
        self.asked.append(asked)
        reply: Future[Any] = asyncio.get_running_loop().create_future()
        if not self.silent:
            known = sorted(self.ids[shard])
            end = asked.passed + self.part
            ids = (
                known[asked.passed : end]
                if asked.queues is None
                else sorted(set(known) & set(asked.queues))
            )
            rest = 0 if asked.queues is not None else max(0, len(known) - end)
            queues = [
                wire.QueueStats(id, 3, 1, 1, 30, 10, self.published, 2, 1, 0, 0) for id in ids
            ]
            consumers = [
                wire.ConsumerStats(id, 0, 1, 1, "tag", False, False, 10, True) for id in ids
            ]
            reply.set_result(
                wire.StatsReply(
                    1,
                    queues,
                    consumers,
                    self.process[shard],
                    rest,
                    [stream for stream in self.streams if stream.id in ids],
                )
            )
        return reply


class ReportingDoors(FakeDoors):
    """A front door with two consumers, of which one client sends and receives."""

    async def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        return [
            {
                "owner": owner,
                "channel": 1,
                "consumer_tag": "tag",
                "delivery_tag": tag,
                "unacked_for": 10 * tag,
            }
            for owner, tag in ((OWNER, 1), ("0.7.2", 2))
        ]

    async def holders(self, queue_id: int) -> list[dict[str, Any]]:
        return [
            {
                "owner": owner,
                "channel": 1,
                "consumer_tag": "tag",
                "messages_unacknowledged": count,
                "unacked_for": 10 * count,
            }
            for owner, count in ((OWNER, 1), ("0.7.2", 2))
        ]

    async def reports(self, totals_only: bool = False) -> list[DoorReport]:
        counters = {"received": 7.0, "channels_opened": 3.0, "connections": 1.0, "channels": 1.0}
        counters |= {"logins_succeeded": 4.0, "logins_failed": 2.0}
        counters |= {
            "message_bytes.0": 2.0,
            "message_bytes.7": 4.0,
            "message_bytes.30": 1.0,
            "message_bytes.sum": 1e9,
        }
        if totals_only:
            return [DoorReport(1, [], [], counters)]
        counts = (
            "messages_unacknowledged",
            "messages_unconfirmed",
            "messages_uncommitted",
            "acks_uncommitted",
        )
        channel: dict[str, Any] = {
            "owner": OWNER,
            "number": 1,
            "prefetch_count": 10,
            "global_prefetch_count": 0,
        }
        channel |= {
            "consumer_count": 1,
            "confirm": False,
            "transactional": False,
            "published": 5,
            "delivered": 2,
        }
        channel |= dict.fromkeys(counts, 0)
        connection = {"owner": OWNER, "channels": 1, "state": "running"}
        connection |= {"recv_cnt": 3, "send_cnt": 2}
        return [DoorReport(1, [connection], [channel], counters)]


@dataclass
class Api:
    client: TestClient[Any, Any]
    authority: Authority
    shards: FakeShards
    doors: ReportingDoors
    context: Context
    clock: Clock  # of the numbers that are collected
    login: tuple[str, str] | None = ("guest", "guest")

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        """Status and decoded body."""
        login = base64.b64encode(":".join(self.login or ()).encode()).decode()
        headers = {
            **more.pop("headers", {}),
            **({"Authorization": f"Basic {login}"} if self.login else {}),
        }
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        async with self.client.request(
            method, URL(path, encoded=True), data=data, headers=headers, **more
        ) as r:
            raw = await r.read()
            self.headers = r.headers
            is_json = r.content_type == "application/json"
            return r.status, json.loads(raw) if is_json and raw else raw.decode()

    async def get(self, path: str) -> Any:
        status, found = await self.call("GET", path)
        assert status == 200, (status, found)
        return found


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    config = ControllerConfig(data_dir=str(tmp_path), runtime_dir=str(tmp_path), boot="b", shards=2)
    definitions = Definitions(tmp_path, "b")
    shards, doors, presence = FakeShards(), ReportingDoors(), Presence()
    placement = Placement(range(config.shards))
    catalog = load_or_begin(definitions, config)
    authority = Authority(catalog, definitions, doors, shards, presence, placement)
    presence.up(
        ConnectionInfo(
            OWNER,
            CONNECTION,
            "guest",
            "/",
            "127.0.0.1",
            5000,
            "127.0.0.1",
            5672,
            "AMQP 0-9-1",
            "PLAIN",
            False,
            131072,
            2047,
            60,
            1,
            {"connection_name": "me"},
        )
    )
    status = {
        "pid": os.getpid(),
        "amqp": "127.0.0.1:5672",
        "http": "127.0.0.1:15672",
        "listeners": {"amqp": ["127.0.0.1:5672", "[::1]:5672"], "http": ["127.0.0.1:15672"]},
        "children": [
            {
                "name": "shard-0",
                "kind": "shard",
                "index": 0,
                "pid": 1,
                "state": "ready",
                "restarts": 2,
                "started_at": 1.0,
            }
        ],
    }
    (tmp_path / "status.json").write_text(json.dumps(status))
    writer = asyncio.create_task(authority.run())
    clock = Clock()
    view = ClusterView(0, NODE, (0, 1), lambda: facts_of(context.config, context.memory))
    context = Context(
        authority,
        presence,
        shards,
        doors,
        lambda: config,
        StatsCollector(shards, doors, clock),
        view,
    )  # type: ignore[arg-type]
    server = TestServer(api_app(context))
    await server.start_server(**SERVER)
    async with TestClient(server) as client:
        yield Api(client, authority, shards, doors, context, clock)
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    definitions.close()
