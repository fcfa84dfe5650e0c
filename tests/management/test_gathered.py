"""Numbers are asked for some queues at a time, and no more often than is cheap."""

from __future__ import annotations

import asyncio

import pytest

from broker.changes import QueuePut
from broker.controller.authority import ShardSilent
from broker.controller.management import channels, gathered
from broker.controller.management.gathered import Gatherer, message_stats
from shardd.wire import messages as wire
from tests.management.conftest import OWNER, FakeDoors, FakeShards


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
    stats = await Gatherer(shards, FakeDoors(), Clock()).now()
    assert sorted(stats.queues) == list(range(14))
    assert stats.totals["ready"] == 14 * 3
    assert [asked.passed for asked in shards.asked].count(9) == 1
    assert len(stats.consumers) == 14


@pytest.mark.parametrize("part", [1, 2, 4, 7])
async def test_a_shard_of_another_release_tells_of_as_many_at_a_time_as_it_likes(shards: FakeShards, part: int) -> None:
    shards.part = part
    stats = await Gatherer(shards, FakeDoors(), Clock()).now()
    assert (sorted(stats.queues), stats.totals["ready"]) == (list(range(14)), 14 * 3)


async def test_counters_of_queues_that_are_gone_stay_in_the_totals(shards: FakeShards) -> None:
    shards.process[0] = {"gone_published": 1000.0}
    stats = await Gatherer(shards, FakeDoors(), Clock()).now()
    assert stats.totals["published"] == 1000 + 14 * 5


async def test_some_queues_are_asked_for_by_their_shards_alone(shards: FakeShards) -> None:
    stats = await Gatherer(shards, FakeDoors(), Clock()).of([QueuePut("/", "a", 1, 0), QueuePut("/", "b", 99, 0)])
    assert [asked.queues for asked in shards.asked] == [[1, 99]]
    known, unused = stats.queue(QueuePut("/", "a", 1, 0)), stats.queue(QueuePut("/", "b", 99, 0))
    assert known is not None and known.ready == 3
    assert unused == wire.QueueStats(99), "one that is not used yet is empty, not unknown"
    assert stats.queue(QueuePut("/", "c", 12, 1)) is None


async def test_a_rate_is_made_of_two_looks_whoever_looked(shards: FakeShards) -> None:
    clock, queue = Clock(), QueuePut("/", "a", 1, 0)
    gatherer = Gatherer(shards, FakeDoors(), clock)
    assert message_stats(first := await gatherer.of([queue]), first.queues[1])["publish_details"] == {"rate": 0.0}
    clock.now += 2
    shards.published = 25  # 20 more
    for _ in range(2):  # the second look comes too soon to make another rate
        stats = await gatherer.of([queue])
        shown = message_stats(stats, stats.queues[1])
        assert (shown["publish"], shown["publish_details"]) == (25, {"rate": 10.0})


async def test_a_dear_look_at_everything_is_kept_longer(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = Gatherer(shards, FakeDoors(), clock)
    before = shards.stats

    def slow(shard: int, asked: wire.Stats):  # type: ignore[no-untyped-def]
        clock.now += 0.05
        return before(shard, asked)

    shards.stats = slow  # type: ignore[method-assign]
    await gatherer.now()
    asked = len(shards.asked)
    assert gatherer.fresh_s == pytest.approx(0.05 * asked * gathered.FRESH_SHARE)
    clock.now += gatherer.fresh_s * 0.9
    await gatherer.now()
    assert len(shards.asked) == asked
    clock.now += gatherer.fresh_s
    await gatherer.now()
    assert len(shards.asked) == 2 * asked


async def test_a_look_that_waited_for_a_silent_shard_is_not_kept_longer(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = Gatherer(shards, FakeDoors(), clock)
    before = shards.stats

    def silent(shard: int, asked: wire.Stats):  # type: ignore[no-untyped-def]
        if shard == 0:
            clock.now += gathered.STATS_S_MAX
            reply = asyncio.get_running_loop().create_future()
            reply.set_exception(ShardSilent("shard 0"))
            return reply
        return before(shard, asked)

    shards.stats = silent  # type: ignore[method-assign]
    stats = await gatherer.now()
    assert sorted(stats.queues) == [10, 11, 12, 13]
    assert gatherer.fresh_s == gathered.STATS_FRESH_S


def test_rates_are_made_of_looks_that_are_not_too_close() -> None:
    clock = Clock()
    rates = gathered.Rates(clock)
    assert rates.of({"x": 10}) == {"x": 0.0}
    clock.now += 0.5
    assert rates.of({"x": 11}) == {"x": 2.0}
    clock.now += 1.5
    assert rates.of({"x": 20}) == {"x": 5.0}
    clock.now += 0.5
    assert rates.of({"x": 20}) == {"x": 4.0}
    clock.now += 1.0
    assert rates.of({"x": 5}) == {"x": 0.0}, "what started anew counts from 0"


def test_what_may_fall_has_negative_rates_and_what_was_not_known_before_none() -> None:
    clock = Clock()
    rates = gathered.Rates(clock, may_fall=True)
    assert rates.of({"x": 10}) == {"x": 0.0}
    clock.now += 2
    assert rates.of({"x": 4, "new": 9}) == {"x": -3.0, "new": 0.0}


async def test_a_queue_and_a_channel_have_the_rates_between_two_looks(shards: FakeShards) -> None:
    clock, doors = Clock(), FakeDoors()
    gatherer = Gatherer(shards, doors, clock)
    first = await gatherer.now()
    known = first.queues[1]
    assert all(each == {"rate": 0.0} for each in gathered.depth_rates(first, known).values())
    clock.now += 10
    stats = await gatherer.now()
    fuller = wire.QueueStats(1, known.ready + 30, known.unacked - 1)
    assert gathered.depth_rates(stats, fuller) == {
        "messages_details": {"rate": 2.9},
        "messages_ready_details": {"rate": 3.0},
        "messages_unacknowledged_details": {"rate": -0.1},
    }
    at, before = stats.channels_before
    assert at == 100.0 and before[(OWNER, 1)]["published"] == 5
    (row,) = [report for report in stats.channels if report["number"] == 1]
    assert channels.message_stats(stats, row | {"published": 25}) == {
        "publish": 25, "publish_details": {"rate": 2.0}, "deliver_get": 2, "deliver_get_details": {"rate": 0.0},
    }  # fmt: skip


@pytest.mark.row("G4.2")
async def test_all_queues_together_show_what_clients_did(shards: FakeShards) -> None:
    clock = Clock()
    gatherer = Gatherer(shards, FakeDoors(), clock)
    await gatherer.now()
    clock.now += 10
    shards.ids[1] = set()
    stats = await gatherer.now()
    shown = gathered.all_message_stats(stats)
    assert (shown["publish"], shown["publish_details"]) == (7, {"rate": 0.0})
    assert (shown["ack"], shown["confirm"]) == (10, 0)
    depth = gathered.depths(stats)
    assert (depth["messages_ready"], depth["messages"]) == (30, 40)
    assert depth["messages_ready_details"] == {"rate": -1.2}


async def test_who_wants_totals_does_not_have_every_connection_described(shards: FakeShards) -> None:
    gatherer = Gatherer(shards, FakeDoors(), Clock())
    totals = await gatherer.now(totals_only=True)
    assert (totals.connections, totals.channels, totals.counters["channels"]) == ({}, [], 1)
    whole = await gatherer.now()
    assert len(whole.connections) == len(whole.channels) == 1
    assert await gatherer.now(totals_only=True) is whole


@pytest.mark.parametrize("at_once", [False, True])
async def test_who_asks_for_totals_and_who_for_everything_share_a_look(shards: FakeShards, at_once: bool) -> None:
    clock = Clock()
    gatherer = Gatherer(shards, FakeDoors(), clock)
    for _ in range(3):  # as monitoring does, again and again
        asked = len(shards.asked)
        if at_once:
            totals, whole = await asyncio.gather(gatherer.now(totals_only=True), gatherer.now())
        else:
            totals = await gatherer.now(totals_only=True)
            assert (totals.connections, totals.channels) == ({}, [])
            clock.now += 0.5
            whole, again = await asyncio.gather(gatherer.now(), gatherer.now())
            assert again is whole
        assert whole is totals
        assert (len(whole.connections), len(whole.channels), whole.counters["channels"]) == (1, 1, 1)
        assert len(shards.asked) - asked == asked_by_one_look(shards)
        clock.now += 5


def asked_by_one_look(shards: FakeShards) -> int:
    return sum(-(-len(ids) // shards.part) for ids in shards.ids.values())
