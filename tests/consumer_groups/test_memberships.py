"""Test the controller's shell around groups.

Nothing moves before all front doors have told what they hold, or the dead have let go.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from typing import Any

import msgspec

from shardmq.broker.controller.groups.memberships import Memberships
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    CLOSING,
    SETTLING,
    Cut,
    ExchangeDelete,
    ExchangePut,
    QueuePut,
    ShardOf,
    VhostPut,
)
from shardmq.broker.shared.control import (
    Ask,
    AssignmentGivenUp,
    AssignmentName,
    AssignmentOrder,
    ConsumerHere,
    ConsumerJoin,
    ConsumerLeave,
    ConsumersHere,
    ConsumeTerms,
    MarkPassed,
    VirtualLook,
)
from shardmq.shardd.wire import messages as wire

TERMS = ConsumeTerms("", "group", False, 0, False, "0.1.1", 1, "tag")
QUEUES = (11, 12)


class FakeDoors:
    def __init__(self) -> None:
        self.orders: list[tuple[int, str, int, int]] = []
        # kind, queue, stop, mark, fresh
        self.said: list[tuple[str, int, int | None, int | None, bool]] = []

    def give_orders(self, door: int, incarnation: int, orders: list[AssignmentOrder]) -> None:
        self.orders += [
            (door, order.kind, order.number, order.assignment.queue) for order in orders
        ]
        self.said += [
            (order.kind, order.assignment.queue, order.stop, order.mark, order.fresh)
            for order in orders
        ]

    def take(self) -> list[tuple[int, str, int, int]]:
        taken, self.orders = self.orders, []
        return taken


class FakeShards:
    def __init__(self) -> None:
        self.asked: list[tuple[int, Future[Any]]] = []

    def request(self, shard: int, message: Callable[[int], wire.Message]) -> Future[Any]:
        assert isinstance(message(1), wire.Count)
        reply: Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((shard, reply))
        return reply


class Bench:
    def __init__(self, doors: int) -> None:
        self.catalog = Catalog()
        self.catalog.apply(VhostPut("/"))
        self.catalog.apply(ExchangePut("/", "e", "x-modulus-hash"))
        for index, id in enumerate(QUEUES):
            self.catalog.apply(QueuePut("/", f"e - {index}", id, index, part=ShardOf("e", index)))
        self.doors, self.shards = FakeDoors(), FakeShards()
        self.memberships = Memberships(
            self.catalog, self.doors, self.shards, range(doors), lambda shard: 0
        )
        self.answers: list[tuple[int, str, dict[str, Any]]] = []

    def change(self, *changes: QueuePut) -> None:
        for change in changes:
            self.catalog.apply(change)
        self.memberships.changed([*changes])

    def ask(self, door: int, what: ConsumerJoin | VirtualLook) -> None:
        self.memberships.asked(
            Ask(1, what, f"{door}.1.9", "guest"), lambda *said: self.answers.append(said)
        )

    def join(
        self, door: int, number: int, exchange: str = "e", terms: ConsumeTerms = TERMS
    ) -> None:
        self.ask(door, ConsumerJoin("/", exchange, number, terms))


async def test_nothing_is_given_before_every_front_door_has_said_what_it_holds() -> None:
    bench = Bench(doors=2)
    bench.memberships.news(0, 1, ConsumersHere([]))
    bench.join(0, 5)
    assert bench.answers == [(0, "", {})] and not bench.doors.take()
    held = ConsumerHere(7, "/", "e", TERMS, False, [AssignmentName(11, 0), AssignmentName(12, 0)])
    bench.memberships.news(1, 1, ConsumersHere([held]))
    assert bench.doors.take() == [(1, "take", 7, 12)]
    bench.memberships.news(1, 1, AssignmentGivenUp(7, AssignmentName(12, 0)))
    assert bench.doors.take() == [(0, "give", 5, 12)]


async def test_shards_of_a_dead_front_door_wait_until_they_have_put_back_what_it_held() -> None:
    bench = Bench(doors=2)
    for door in (0, 1):
        bench.memberships.news(door, 1, ConsumersHere([]))
    bench.join(0, 5)
    bench.join(1, 6)
    bench.memberships.news(0, 1, AssignmentGivenUp(5, AssignmentName(12, 0)))
    assert (1, "give", 6, 12) in bench.doors.take()
    bench.memberships.door_gone(1, 1)
    assert [shard for shard, _ in bench.shards.asked] == [1]
    assert not [order for order in bench.doors.take() if order[1] == "give"]
    bench.shards.asked[0][1].set_result(wire.Refused(1, 404, "gone"))
    await asyncio.sleep(0)
    assert bench.doors.take() == [(0, "give", 5, 12)]


async def test_a_shard_that_does_not_answer_holds_up_nobody_for_ever() -> None:
    bench = Bench(doors=1)
    bench.memberships.news(0, 1, ConsumersHere([]))
    bench.join(0, 5)
    bench.memberships.door_gone(0, 1)
    for _, reply in bench.shards.asked:
        reply.set_exception(TimeoutError("silent"))
    await asyncio.sleep(0)
    assert not bench.memberships.groups.queues


async def test_consumers_are_closed_when_the_exchange_goes_and_others_refused() -> None:
    bench = Bench(doors=1)
    bench.memberships.news(0, 1, ConsumersHere([]))
    bench.join(0, 5)
    bench.doors.take()
    bench.catalog.apply(ExchangeDelete("/", "e"))
    bench.memberships.changed([ExchangeDelete("/", "e")])
    assert [(kind, number) for _, kind, number, _ in bench.doors.take()] == [("close", 5)]
    bench.join(0, 6)
    assert bench.answers[-1] == (404, "no queue 'e' in vhost '/'", {})


async def test_a_queue_made_anew_under_its_name_is_another_shard() -> None:
    bench = Bench(doors=1)
    bench.memberships.news(0, 1, ConsumersHere([]))
    bench.join(0, 5)
    bench.doors.take()
    again = QueuePut("/", "e - 1", 13, 1, part=ShardOf("e", 1))
    bench.catalog.apply(again)
    bench.memberships.changed([again])
    assert sorted(bench.doors.take()) == [(0, "give", 5, 13), (0, "take", 5, 12)]


async def test_a_shard_is_given_to_nobody_before_front_doors_know_it() -> None:
    bench = Bench(doors=1)
    bench.memberships.news(0, 1, ConsumersHere([]))
    more = QueuePut("/", "e - 2", 13, 0, part=ShardOf("e", 2))
    bench.catalog.apply(more)
    bench.join(0, 5)
    assert sorted(queue for _, _, _, queue in bench.doors.take()) == [11, 12]
    bench.memberships.changed([more])
    assert bench.doors.take() == [(0, "give", 5, 13)]


async def test_looking_counts_consumers_and_what_they_have_at_the_shards() -> None:
    bench = Bench(doors=1)
    bench.memberships.news(0, 1, ConsumersHere([]))
    bench.join(0, 5)
    bench.ask(0, VirtualLook("/", "e"))
    assert bench.answers[-1] == (0, "", {"consumers": 1, "seats": 2})
    bench.memberships.news(0, 1, ConsumerLeave(5))
    bench.ask(0, VirtualLook("/", "e"))
    assert bench.answers[-1] == (0, "", {"consumers": 0, "seats": 2})
    for queue in QUEUES:
        bench.memberships.news(0, 1, AssignmentGivenUp(5, AssignmentName(queue, 0)))
    bench.ask(0, VirtualLook("/", "e"))
    assert bench.answers[-1] == (0, "", {"consumers": 0, "seats": 0})


async def test_who_reads_streams_is_bound_until_its_group_has_got_over_a_change() -> None:
    bench = Bench(doors=1)
    bench.memberships.news(0, 1, ConsumersHere([]))
    bench.join(0, 5)
    assert all(order[-3:] == (None, None, False) for order in bench.doors.said)
    bench.doors.said.clear()
    more = QueuePut("/", "e - 2", 13, 0, part=ShardOf("e", 2, held=CLOSING))
    bench.change(more)
    assert bench.doors.said == [("give", 13, None, None, True)]
    bench.doors.said.clear()
    bench.change(
        msgspec.structs.replace(more, part=ShardOf("e", 2, held=SETTLING, cuts=(Cut(1, 0, True),)))
    )
    bounds = {
        queue: (stop, mark) for kind, queue, stop, mark, _ in bench.doors.said if kind == "bound"
    }
    assert bounds == {13: (0, None)}
    bench.doors.said.clear()
    bench.change(
        QueuePut("/", "e - 0", 11, 0, part=ShardOf("e", 0, cuts=(Cut(1, 7, False),))),
        msgspec.structs.replace(more, part=ShardOf("e", 2, cuts=(Cut(1, 0, True),))),
    )
    assert bench.doors.said == [("bound", 11, None, 7, False)]
    bench.doors.said.clear()
    bench.memberships.news(0, 1, MarkPassed(5, AssignmentName(11, 0), 9))
    assert bench.doors.said == [("bound", 11, None, None, False), ("bound", 13, None, None, False)]


async def test_who_was_bound_before_a_start_of_the_controller_is_told_anew() -> None:
    bench = Bench(doors=1)
    bench.catalog.apply(
        QueuePut("/", "e - 0", 11, 0, part=ShardOf("e", 0, cuts=(Cut(1, 7, False),)))
    )
    bench.catalog.apply(
        QueuePut("/", "e - 1", 12, 1, part=ShardOf("e", 1, cuts=(Cut(1, 3, True),)))
    )
    held = ConsumerHere(7, "/", "e", TERMS, False, [AssignmentName(11, 0), AssignmentName(12, 0)])
    bench.memberships.news(0, 1, ConsumersHere([held]))
    assert sorted(bench.doors.said) == [
        ("bound", 11, None, 7, False),
        ("bound", 12, 3, None, False),
    ]
