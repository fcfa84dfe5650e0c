"""Pages are sorted by any column, and only the rows of the page are made."""

from __future__ import annotations

import asyncio
import random
from asyncio import Future
from collections.abc import Callable
from typing import Any

import pytest

from shardmq.broker.controller.management.metrics import stats_collector
from shardmq.broker.controller.management.resources import queues
from shardmq.broker.controller.management.responses import listing, queue_sort_keys
from shardmq.shardd.wire import messages as wire
from tests.http_api.conftest import Api

QUEUES = 60
PAGE = 5
COUNTED = [
    f"message_stats.{name}{end}"
    for name in queue_sort_keys.QUEUE_COUNTERS
    for end in ("", "_details.rate")
]
COLUMNS = [
    *queue_sort_keys.NUMBERS,
    *queue_sort_keys.TEXTS,
    *queue_sort_keys.POLICIES,
    "members",
    "online",
    "state",
    "name",
    "shard",
    *COUNTED,
]


def uneven(seed: int) -> Callable[[int], wire.QueueStats]:
    """Numbers of its own for each queue; those of later looks are larger."""
    looks: dict[int, int] = {}

    def of(id: int) -> wire.QueueStats:
        looks[id] = look = looks.get(id, 0) + 1
        own = random.Random(f"{seed} {id}")
        sizes = [own.randrange(9) for _ in range(5)]
        return wire.QueueStats(id, *sizes, *(own.randrange(1, 50) * look for _ in range(6)))

    return of


@pytest.fixture
async def many(api: Api, monkeypatch: pytest.MonkeyPatch) -> Api:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    stats = uneven(seed)

    def answered(shard: int, asked: wire.Stats) -> Future[Any]:
        known = sorted(api.shards.ids[shard])
        found = [
            stats(id)
            for id in (known if asked.queues is None else set(known) & set(asked.queues))
            if id % 7
        ]
        reply: Future[Any] = asyncio.get_running_loop().create_future()
        reply.set_result(wire.StatsReply(1, found, [], {"rss_bytes": 1.0}, 0))
        return reply

    monkeypatch.setattr(api.shards, "stats", answered)
    policy = {"pattern": "[13]$", "definition": {"max-length": 5}, "apply-to": "queues"}
    assert (await api.call("PUT", "/api/policies/%2F/odd", policy))[0] == 201
    for number in range(QUEUES):
        arguments = {"x-max-length": number} if number % 3 else {}
        assert (await api.call("PUT", f"/api/queues/%2F/q{number}", {"arguments": arguments}))[
            0
        ] == 201
    await api.call("PUT", "/api/queues/%2F/q7/pause")
    return api


@pytest.mark.row("G1.11")
@pytest.mark.parametrize("reverse", ["false", "true"])
async def test_every_column_sorts_without_rows_of_others(
    many: Api, monkeypatch: pytest.MonkeyPatch, reverse: str
) -> None:
    rows, made = queues.row, []
    monkeypatch.setattr(queues, "row", lambda *given: made.append(given) or rows(*given))
    for column in COLUMNS:
        made.clear()
        path = f"/api/queues?page_size={PAGE}&sort={column}&sort_reverse={reverse}"
        monkeypatch.setattr(stats_collector, "STATS_FRESH_S", 3600.0)  # all pages of one look
        pages = [await many.get(f"{path}&page={page}") for page in range(1, QUEUES // PAGE + 1)]
        shown = [row for page in pages for row in page["items"]]
        assert sorted(row["name"] for row in shown) == sorted(
            f"q{number}" for number in range(QUEUES)
        ), column
        keys = [listing._sort_key(listing._at(row, column)) for row in shown]
        texts = column in queue_sort_keys.POLICIES
        # no policy: the empty name
        keys = [(2, "") if texts and key == (0, 0) else key for key in keys]
        assert keys == sorted(keys, reverse=reverse == "true"), column
        assert len(made) <= QUEUES, column


async def test_a_column_nobody_knows_keeps_all_queues(many: Api) -> None:
    found = await many.get("/api/queues?page=1&page_size=500&sort=no_such.column")
    assert found["item_count"] == QUEUES
    assert await queue_sort_keys.keys(many.context, "message_stats.no_such") is None


async def test_where_a_look_takes_long_nobody_waits_for_the_next(many: Api) -> None:
    now = 1000.0
    stats = stats_collector.StatsCollector(many.shards, many.doors, clock=lambda: now)  # type: ignore[arg-type]
    first = await stats.lately()
    stats._took = 1.0
    assert await stats.lately() is first
    now += stats.fresh_s + 1
    assert await stats.lately() is first
    assert stats._collecting is not None
    await stats._collecting  # the one that was begun
    second = await stats.lately()
    assert second is not first
    assert second.at == now
    stats._took = 1.0
    now += stats_collector.ORDER_S_MAX
    assert await stats.lately() is not second


async def test_pages_follow_queues_that_come_and_go(api: Api) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(60):
        vhost, name = chance.choice(["%2F", "v"]), f"q{chance.randrange(12):02}"
        if chance.random() < 0.1:
            await api.call(chance.choice(["PUT", "DELETE"]), "/api/vhosts/v")
        else:
            await api.call(chance.choice(["PUT", "PUT", "DELETE"]), f"/api/queues/{vhost}/{name}")
        for path in ("/api/queues", "/api/queues/%2F"):
            there = sorted((row["vhost"], row["name"]) for row in await api.get(path))
            for reverse in ("false", "true"):
                page = await api.get(f"{path}?page=1&page_size=500&sort_reverse={reverse}")
                shown = [(row["vhost"], row["name"]) for row in page["items"]]
                assert (shown, page["total_count"]) == (
                    there[::-1] if reverse == "true" else there,
                    len(there),
                )
