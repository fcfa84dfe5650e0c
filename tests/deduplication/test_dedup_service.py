"""A front door that asks a shard: each publish is answered, each first one accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.broker.front_door.publish import dedup_service
from shardmq.broker.front_door.publish.dedup_service import (
    DedupAnswers,
    DedupId,
    DedupService,
    digest,
    home_of,
)
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, QueuePut
from shardmq.broker.shared.deduplication import HEADER, DedupRule
from shardmq.shardd.wire import messages as wire
from tests.support.answered import Answered

EXCHANGE = ExchangePut("/", "x", "fanout")
RULE = DedupRule(HEADER, 10, None)


class FakeLinks:
    """Two shards that answer when the test says so."""

    def __init__(self) -> None:
        self.of_cluster: list[int] | None = None
        self.links = self.known = [SimpleNamespace(shard=shard, up=True) for shard in range(2)]
        self.asked: list[tuple[int, Any, asyncio.Future[Any]]] = []
        self.told: list[tuple[int, Any]] = []

    def ask(self, shard: int, make: Callable[[int], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((shard, make(len(self.asked) + 1), future))
        return future

    def tell(self, shard: int, what: Any) -> None:
        self.told.append((shard, what))

    def answer(self, *verdicts: int) -> None:
        _, what, future = self.asked.pop(0)
        assert len(what.ids) == len(verdicts)
        future.set_result(wire.DedupVerdicts(what.request, bytes(verdicts)))


def door() -> tuple[DedupService, FakeLinks]:
    links: Any = FakeLinks()
    return DedupService(links), links


def want(id: str) -> DedupId:
    return DedupId.of(EXCHANGE, RULE, ("str", id), None)


async def asked_about(
    service: DedupService, links: FakeLinks, ids: str, *verdicts: int
) -> DedupAnswers:
    task = asyncio.ensure_future(service.ask([want(id) for id in ids]))
    await asyncio.sleep(0)
    links.answer(*verdicts)
    return await task


def followed(asked: DedupAnswers, id: str) -> Answered:
    copy, again = asked.take(EXCHANGE, ("str", id))
    assert copy is not None and again
    follower = Answered()
    copy.follow(follower)
    return follower


async def test_the_first_is_accounted_for_when_it_is_stored_and_when_it_is_not() -> None:
    service, links = door()
    asked = await asked_about(service, links, "abc", wire.FIRST, wire.FIRST, wire.FIRST)
    for id, stored in (("a", True), ("b", False)):
        copy, again = asked.take(EXCHANGE, ("str", id))
        assert copy is not None and not again
        copy.shards += 1
        copy.confirmed()
        copy.confirmed() if stored else copy.lost()
    asked.release()  # c was not published after all
    await asyncio.sleep(0)
    assert links.told == [(home_of(EXCHANGE, [0, 1]), wire.DedupOutcome([1], [2, 3]))]


async def test_another_is_answered_as_the_first_whenever_that_is_known() -> None:
    service, links = door()
    asked = await asked_about(service, links, "abc", wire.STORED_BEFORE, wire.FOLLOWS, wire.FOLLOWS)
    shard = home_of(EXCHANGE, [0, 1])
    assert followed(asked, "a").said == ["ack"]
    early = followed(asked, "b")
    assert early.said == []
    service.told(shard, wire.DedupOutcome([2], [3]))
    assert early.said == ["ack"]
    assert followed(asked, "c").said == ["nack"]
    assert asked.take(EXCHANGE, ("str", "a")) == (None, False)


async def test_what_is_told_before_the_answer_is_looked_at_counts() -> None:
    service, links = door()
    task = asyncio.ensure_future(service.ask([want("a")]))
    await asyncio.sleep(0)
    links.answer(wire.FOLLOWS)
    service.told(home_of(EXCHANGE, [0, 1]), wire.DedupOutcome([], [1]))
    assert followed(await task, "a").said == ["nack"]


async def test_a_shard_that_is_away_is_not_asked_and_the_message_passes() -> None:
    service, links = door()
    links.links[home_of(EXCHANGE, [0, 1])].up = False
    asked = await service.ask([want("a")])
    assert links.asked == [] and asked.take(EXCHANGE, ("str", "a")) == (None, False)


async def test_a_shard_that_does_not_answer_is_not_waited_for_and_hears_that_nothing_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dedup_service, "ANSWER_S_MAX", 0)
    service, links = door()
    asked = await service.ask([want("a"), want("b")])
    assert asked.take(EXCHANGE, ("str", "a")) == (None, False)
    links.answer(wire.FIRST, wire.STORED_BEFORE)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert links.told == [(home_of(EXCHANGE, [0, 1]), wire.DedupOutcome([], [1]))]


async def test_a_client_that_leaves_meanwhile_has_published_nothing() -> None:
    service, links = door()
    task = asyncio.ensure_future(service.ask([want("a")]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    links.answer(wire.FIRST)
    for _ in range(3):
        await asyncio.sleep(0)
    assert links.told == [(home_of(EXCHANGE, [0, 1]), wire.DedupOutcome([], [1]))]


@pytest.mark.parametrize("how", ["restarted", "away", "silent"])
async def test_who_follows_what_nobody_knows_any_more_is_told_no(how: str) -> None:
    service, links = door()
    shard, now = home_of(EXCHANGE, [0, 1]), asyncio.get_running_loop().time()
    asked = await asked_about(service, links, "a", wire.FOLLOWS)
    follower = followed(asked, "a")
    task = asyncio.ensure_future(service.ask([want("b")]))  # asked again: it waits
    await asyncio.sleep(0)
    service.tick(now)
    assert follower.said == []
    if how == "restarted":
        service.restarted(shard)
    elif how == "away":
        links.links[shard].up = False
        service.tick(now)
    else:
        service.tick(now + dedup_service.FOLLOW_S_MAX + 1)
    assert follower.said == ["nack"]
    links.answer(wire.FOLLOWS)
    late = followed(await task, "b")
    service.told(shard, wire.DedupOutcome([2], []))
    assert late.said == ["ack"]


async def test_many_ids_are_several_questions_and_all_are_answered() -> None:
    service, links = door()
    count = dedup_service.QUESTION_IDS_MAX + 1
    task = asyncio.ensure_future(service.ask([want(str(n)) for n in range(count)]))
    await asyncio.sleep(0)
    assert [len(what.ids) for _, what, _ in links.asked] == [dedup_service.QUESTION_IDS_MAX, 1]
    assert [what.first for _, what, _ in links.asked] == [1, dedup_service.QUESTION_IDS_MAX + 1]
    links.answer(*[wire.STORED_BEFORE] * dedup_service.QUESTION_IDS_MAX)
    links.answer(wire.FIRST)
    asked = await task
    assert asked.take(EXCHANGE, ("str", "0"))[1] is True
    assert asked.take(EXCHANGE, ("str", str(count - 1)))[1] is False


async def test_an_exchange_that_is_deleted_begins_anew() -> None:
    service, links = door()
    await asked_about(service, links, "a", wire.STORED_BEFORE)
    catalog = Catalog()
    service.catalog_changed(catalog)
    service.catalog_changed(catalog)
    assert links.told == [(home_of(EXCHANGE, [0, 1]), wire.DedupForget("//x"))]


async def test_front_doors_agree_on_who_remembers_though_one_knows_fewer_shards() -> None:
    """A front door that is started while a node is down has not learnt of the shards there."""
    exchanges = [ExchangePut("/", name, "fanout") for name in "abcdefgh"]
    asked: set[frozenset[tuple[str, int]]] = set()
    for known in ([0, 1, 3], [3, 0], [0]):
        service, links = door()
        links.links = [SimpleNamespace(shard=shard, up=True) for shard in range(4)]
        links.known = [links.links[shard] for shard in known]
        links.of_cluster = [0, 1, 3]  # 2 was lost with a node
        homes = set()
        for exchange in exchanges:
            wanted = DedupId.of(exchange, RULE, ("str", "a"), None)
            asking = asyncio.ensure_future(service.ask([wanted]))
            await asyncio.sleep(0)
            homes.add((exchange.name, links.asked[-1][0]))
            asking.cancel()
        asked.add(frozenset(homes))
    (homes_of_all,) = asked
    assert {shard for _, shard in homes_of_all} == {0, 1, 3}


def test_a_queue_is_remembered_where_it_lives_and_ids_of_two_kinds_are_two() -> None:
    assert home_of(QueuePut("/", "q", 5, 1), [0, 1]) == 1
    assert (
        len(
            {
                digest(("str", "1")),
                digest(("int", "1")),
                digest(("str", "2")),
                digest(("str", b"1" * 16)),
            }
        )
        == 4
    )
