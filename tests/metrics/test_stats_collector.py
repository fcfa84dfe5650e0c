"""Numbers are asked for some queues at a time, and no more often than is cheap."""

from __future__ import annotations

import asyncio

import pytest

from shardmq.broker.controller.management.metrics import stats_collector
from shardmq.broker.controller.management.metrics.message_stats import (
    all_message_stats,
    depth_rates,
    depths,
    exchange_stats,
    message_stats,
)
from shardmq.broker.controller.management.metrics.stats import (
    RATE_S_MAX,
    STATS_FRESH_S,
    Rates,
    Stats,
)
from shardmq.broker.controller.management.metrics.stats_collector import StatsCollector
from shardmq.broker.controller.management.resources import channels
from shardmq.broker.controller.peers.shard_links import ShardSilent
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.control import DoorReport
from shardmq.shardd.wire import messages as wire
from tests.http_api.conftest import OWNER, FakeShards, ReportingDoors


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> FakeShards:
    monkeypatch.setattr(wire, "STATS_QUEUES_MAX", 3)
    shards = FakeShards()
    shards.part = 3
    shards.ids = {0: set(range(10)), 1: set(range(10, 14))}
    return shards


async def test_all_queues_are_looked_over_in_parts(shards: FakeShards) -> None:
    stats = await StatsCollector(shards, ReportingDoors(), Clock()).now()
    assert sorted(stats.queues) == list(range(14))
    assert stats.totals["ready"] == 14 * 3
    assert [asked.passed for asked in shards.asked].count(9) == 1
    assert len(stats.consumers) == 14


@pytest.mark.parametrize("part", [1, 2, 4, 7])
async def test_a_shard_of_another_release_tells_of_as_many_at_a_time_as_it_likes(
    shards: FakeShards, part: int
) -> None:
    shards.part = part
    stats = await StatsCollector(shards, ReportingDoors(), Clock()).now()
    assert (sorted(stats.queues), stats.totals["ready"]) == (list(range(14)), 14 * 3)


async def test_counters_of_queues_that_are_gone_stay_in_the_totals(shards: FakeShards) -> None:
    shards.process[0] = {"gone_published": 1000.0}
    stats = await StatsCollector(shards, ReportingDoors(), Clock()).now()
    assert stats.totals["published"] == 1000 + 14 * 5


async def test_some_queues_are_asked_for_by_their_shards_alone(shards: FakeShards) -> None:
    stats = await StatsCollector(shards, ReportingDoors(), Clock()).of(
        [QueuePut("/", "a", 1, 0), QueuePut("/", "b", 99, 0)]
    )
    assert [asked.queues for asked in shards.asked] == [[1, 99]]
    known, unused = stats.queue(QueuePut("/", "a", 1, 0)), stats.queue(QueuePut("/", "b", 99, 0))
    assert known is not None and known.ready == 3
    assert unused == wire.QueueStats(99), "one that is not used yet is empty, not unknown"
    assert stats.queue(QueuePut("/", "c", 12, 1)) is None


def shown_rate(stats: Stats, queue: int) -> float | None:
    """As it is served: None where there is none."""
    found: dict[str, float] = message_stats(stats, stats.queues[queue]).get("publish_details", {})
    return found.get("rate")


async def test_the_first_look_at_a_queue_has_the_rate_since_the_last_sample(
    shards: FakeShards,
) -> None:
    clock, queue = Clock(), QueuePut("/", "a", 1, 0)
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    await gatherer.sample()
    for later in (2, 4, stats_collector.SAMPLE_S):
        clock.now, shards.published = 100.0 + later, 5 + 10 * later
        assert shown_rate(await gatherer.of([queue]), 1) == 10.0
    for _ in range(20):  # nobody looks for a while
        await gatherer.sample()
        clock.now += stats_collector.SAMPLE_S
        shards.published += 15
    assert shown_rate(await gatherer.of([queue]), 1) == 15 / stats_collector.SAMPLE_S
    assert shown_rate(await gatherer.now(), 1) == 15 / stats_collector.SAMPLE_S


async def test_what_is_not_known_is_not_shown_as_0(shards: FakeShards) -> None:
    clock, queue = Clock(), QueuePut("/", "a", 1, 0)
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    alone = await gatherer.of([queue])
    whole = await gatherer.now()
    for stats in (alone, whole):
        assert shown_rate(stats, 1) is None
        assert depth_rates(stats, stats.queues[1]) == {}
        assert not [name for name in all_message_stats(stats) if name.endswith("_details")]
        assert depths(stats).keys() == {"messages", "messages_ready", "messages_unacknowledged"}
    clock.now += 2
    assert shown_rate(await gatherer.of([queue]), 1) == 0.0, "now it is known, and it is 0"
    shards.published = 1
    clock.now += 2
    assert shown_rate(await gatherer.now(), 1) is None, "its shard began anew"
    clock.now += RATE_S_MAX + 1
    assert shown_rate(await gatherer.of([queue]), 1) is None, "too long ago to be a rate of now"


async def test_a_queue_that_is_new_since_the_sample_counted_from_0(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    await gatherer.sample()
    shards.ids[0].add(77)
    clock.now += 2
    assert shown_rate(await gatherer.of([QueuePut("/", "new", 77, 0)]), 77) == 2.5


async def test_a_queue_whose_shard_was_silent_at_the_sample_has_no_rate(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    shards.shards[0].ready = False
    await gatherer.sample()
    shards.shards[0].ready = True
    clock.now += 2
    assert shown_rate(await gatherer.of([QueuePut("/", "a", 1, 0)]), 1) is None


async def test_samples_use_a_small_share_of_a_processor_and_no_more_than_three_are_kept(
    shards: FakeShards,
) -> None:
    clock = Clock()
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    assert gatherer.sample_s == stats_collector.SAMPLE_S
    before = shards.stats

    def slow(shard: int, asked: wire.Stats):  # type: ignore[no-untyped-def]
        clock.now += 0.03
        return before(shard, asked)

    shards.stats = slow  # type: ignore[method-assign]
    noted: list[Stats] = []
    gatherer.noted.append(noted.append)
    for _ in range(5):
        await gatherer.sample()
        clock.now += gatherer.sample_s
    assert len(noted) == 5
    took = 0.03 * len(shards.asked) / 5
    assert gatherer.sample_s == pytest.approx(took * stats_collector.SAMPLE_SHARE)
    kept = [noted[-1], noted[-1].before, noted[-2].before]
    assert kept[1] is noted[-2] and noted[-3].before is None


async def test_a_dear_look_at_everything_is_kept_longer(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    before = shards.stats

    def slow(shard: int, asked: wire.Stats):  # type: ignore[no-untyped-def]
        clock.now += 0.05
        return before(shard, asked)

    shards.stats = slow  # type: ignore[method-assign]
    await gatherer.now()
    asked = len(shards.asked)
    assert gatherer.fresh_s == pytest.approx(0.05 * asked * stats_collector.FRESH_SHARE)
    clock.now += gatherer.fresh_s * 0.9
    await gatherer.now()
    assert len(shards.asked) == asked
    clock.now += gatherer.fresh_s
    await gatherer.now()
    assert len(shards.asked) == 2 * asked


async def test_a_look_that_waited_for_a_silent_shard_is_not_kept_longer(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    before = shards.stats

    def silent(shard: int, asked: wire.Stats):  # type: ignore[no-untyped-def]
        if shard == 0:
            clock.now += stats_collector.STATS_S_MAX
            reply = asyncio.get_running_loop().create_future()
            reply.set_exception(ShardSilent("shard 0"))
            return reply
        return before(shard, asked)

    shards.stats = silent  # type: ignore[method-assign]
    stats = await gatherer.now()
    assert sorted(stats.queues) == [10, 11, 12, 13]
    assert gatherer.fresh_s == STATS_FRESH_S


def test_rates_are_made_of_looks_that_are_not_too_close() -> None:
    clock = Clock()
    rates = Rates(clock)
    assert rates.of({"x": 10}) == {}
    clock.now += 0.5
    assert rates.of({"x": 11}) == {"x": 2.0}
    clock.now += 1.5
    assert rates.of({"x": 20}) == {"x": 5.0}
    clock.now += 0.5
    assert rates.of({"x": 20}) == {"x": 4.0}
    clock.now += 1.0
    assert rates.of({"x": 5}) == {}, (
        "it started anew, and nobody knows what it counted before its end"
    )


def test_what_may_fall_has_negative_rates_and_what_was_not_known_before_none() -> None:
    clock = Clock()
    rates = Rates(clock, may_fall=True)
    assert rates.of({"x": 10}) == {}
    clock.now += 2
    assert rates.of({"x": 4, "new": 9}) == {"x": -3.0}


NOT_SAID = (
    "deliver", "deliver_no_ack", "get", "get_no_ack", "get_empty", "ack", "redeliver", "confirm",
    "return_unroutable", "drop_unroutable",
)  # fmt: skip


async def test_a_queue_and_a_channel_have_the_rates_between_two_looks(shards: FakeShards) -> None:
    clock, doors = Clock(), ReportingDoors()
    gatherer = StatsCollector(shards, doors, clock)
    first = await gatherer.now()
    known = first.queues[1]
    assert depth_rates(first, known) == {}
    clock.now += 10
    stats = await gatherer.now()
    fuller = wire.QueueStats(1, known.ready + 30, known.unacked - 1)
    assert depth_rates(stats, fuller) == {
        "messages_details": {"rate": 2.9},
        "messages_ready_details": {"rate": 3.0},
        "messages_unacknowledged_details": {"rate": -0.1},
    }
    before = stats.clients_before
    assert before.at == 100.0 and before.channels[(OWNER, 1)]["published"] == 5
    (row,) = [report for report in stats.clients.channels.values() if report["number"] == 1]
    assert channels.message_stats(stats, row | {"published": 25}) == {
        "publish": 25, "publish_details": {"rate": 2.0}, "deliver_get": 2,
        "deliver_get_details": {"rate": 0.0}, **dict.fromkeys(NOT_SAID, 0),
        **{f"{name}_details": {"rate": 0.0} for name in NOT_SAID},
    }  # fmt: skip


@pytest.mark.row("G4.2")
def test_a_queue_tells_apart_what_nobody_acknowledges() -> None:
    shown = message_stats(
        Stats(), wire.QueueStats(1, delivered=100, delivered_auto=30, got=20, got_auto=5)
    )
    assert {name: count for name, count in shown.items() if count} == {
        "deliver": 50, "deliver_no_ack": 30, "get": 15, "get_no_ack": 5, "deliver_get": 100,
    }  # fmt: skip


class CountingDoors(ReportingDoors):
    """Two front doors.

    `came` messages came to an exchange and went to twice as many queues.
    """

    came = 0

    async def reports(self, totals_only: bool = False) -> list[DoorReport]:
        exchanges = (
            []
            if totals_only or not self.came
            else [("/", "e", self.came, 2 * self.came), ("v", "e", 1, 0)]
        )
        return [DoorReport(1, [], [], {}, exchanges=exchanges)] * 2


@pytest.mark.row("G4.2")
async def test_an_exchange_has_the_sums_of_all_front_doors_and_the_rates_between_two_looks(
    shards: FakeShards,
) -> None:
    clock, doors = Clock(), CountingDoors()
    gatherer = StatsCollector(shards, doors, clock)
    assert exchange_stats(await gatherer.now(), "/", "e") == {}
    shown = []
    for came in (10, 30):
        clock.now += 10
        doors.came = came
        shown.append(exchange_stats(await gatherer.now(), "/", "e"))
    assert shown == [
        {
            "publish_in": 20, "publish_in_details": {"rate": 2.0},
            "publish_out": 40, "publish_out_details": {"rate": 4.0},
        },
        {
            "publish_in": 60, "publish_in_details": {"rate": 4.0},
            "publish_out": 120, "publish_out_details": {"rate": 8.0},
        },
    ]  # fmt: skip


@pytest.mark.row("G4.2")
async def test_all_queues_together_show_what_clients_did(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    await gatherer.now()
    clock.now += 10
    shards.ids[1] = set()
    stats = await gatherer.now()
    shown = all_message_stats(stats)
    assert (shown["publish"], shown["publish_details"]) == (7, {"rate": 0.0})
    assert (shown["ack"], shown["confirm"]) == (10, 0)
    depth = depths(stats)
    assert (depth["messages_ready"], depth["messages"]) == (30, 40)
    assert depth["messages_ready_details"] == {"rate": -1.2}


async def test_who_wants_totals_does_not_have_every_connection_described(
    shards: FakeShards,
) -> None:
    gatherer = StatsCollector(shards, ReportingDoors(), Clock())
    totals = await gatherer.now(totals_only=True)
    assert (totals.clients.connections, totals.clients.channels, totals.counters["channels"]) == (
        {},
        {},
        1,
    )
    whole = await gatherer.now()
    assert len(whole.clients.connections) == len(whole.clients.channels) == 1
    assert await gatherer.now(totals_only=True) is whole


@pytest.mark.parametrize("at_once", [False, True])
async def test_who_asks_for_totals_and_who_for_everything_share_a_look(
    shards: FakeShards, at_once: bool
) -> None:
    clock = Clock()
    gatherer = StatsCollector(shards, ReportingDoors(), clock)
    for _ in range(3):  # as monitoring does, again and again
        asked = len(shards.asked)
        if at_once:
            totals, whole = await asyncio.gather(gatherer.now(totals_only=True), gatherer.now())
        else:
            totals = await gatherer.now(totals_only=True)
            assert (totals.clients.connections, totals.clients.channels) == ({}, {})
            clock.now += 0.5
            whole, again = await asyncio.gather(gatherer.now(), gatherer.now())
            assert again is whole
        assert whole is totals
        assert (
            len(whole.clients.connections),
            len(whole.clients.channels),
            whole.counters["channels"],
        ) == (1, 1, 1)
        assert len(shards.asked) - asked == asked_by_one_look(shards)
        clock.now += 5


def asked_by_one_look(shards: FakeShards) -> int:
    return sum(-(-len(ids) // shards.part) for ids in shards.ids.values())
