"""A policy reaches all queues in slices, and each shard learns what holds in the end."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from shardmq.broker.controller.pending import Pending
from shardmq.broker.controller.policy_walks import CHANGED_QUEUES_MAX, SLICE_S, PolicyWalks
from shardmq.broker.controller.shard_orders import ShardOrders
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    ParameterDelete,
    ParameterPut,
    QueueDelete,
    QueuePut,
    VhostDelete,
    VhostPut,
)
from shardmq.shardd.wire import messages as wire
from tests.support.fake_controller_peers import FakeShards

QUEUE_S = 0.0001  # the time of the clock for one queue


class World:
    """A catalog and its shards, with a clock that only goes on when a queue is looked at."""

    def __init__(self) -> None:
        self.catalog, self.shards = Catalog(routes=False), FakeShards()
        self.orders = ShardOrders(
            self.catalog, self.shards, lambda requests, first: None, lambda: None
        )
        self.walks = PolicyWalks(self.catalog, self.shards, self.orders._changed_spec, self._clock)
        self.orders.policy_walks = self.walks
        self.now_s = 0.0
        self.looks: list[int] = [0]  # queues that were looked at in each pass of the loop
        self.next_id = 0
        self.answered: list[int] = []
        self.said: list[tuple[int, str]] = []
        self.catalog.apply(VhostPut("/"))

    def _clock(self) -> float:
        self.now_s += QUEUE_S
        self.looks[-1] += 1
        return self.now_s

    def declare(self, name: str) -> None:
        self.next_id += 1
        queue = QueuePut("/", name, self.next_id, self.next_id % 2)
        self.catalog.apply(queue)
        self.tell(queue)

    def tell(self, queue: QueuePut) -> None:
        self.shards.queues[queue.id] = self.orders._spec(queue)

    def delete(self, name: str) -> None:
        queue = self.catalog.queue("/", name)
        if queue is not None:
            self.catalog.apply(QueueDelete("/", name))
            del self.shards.queues[queue.id]

    def change(self, change: AnyChange) -> None:
        """Change the policies as the authority does."""
        number = len(self.answered)
        self.answered.append(0)

        def answer(code: int, text: str, result: dict[str, Any]) -> None:
            self.answered[number] += 1
            self.said.append((code, text))

        pending = Pending(change, "", answer)
        pending.waits = 1
        vhost = self.catalog.vhosts["/"]
        before = vhost.policies
        self.catalog.apply(change)
        self.walks.begin(pending, vhost, before)
        pending.one_came()

    async def one_pass(self) -> None:
        self.looks.append(0)
        await asyncio.sleep(0)

    async def settle(self) -> None:
        while not all(self.answered):
            await self.one_pass()

    def disagreeing(self) -> dict[str, Any]:
        """Return the queues whose shard knows other arguments than hold, or whose id is gone."""
        known = {spec.id: spec.arguments for spec in self.shards.queues.values()}
        right = {
            spec.id: spec.arguments for shard in range(2) for spec in self.orders.queues_of(shard)
        }
        return {} if known == right else {"known": known, "right": right}


def policy(name: str, pattern: str, length: int, priority: int = 0) -> ParameterPut:
    definition = {"max-length": length}
    value = {"pattern": pattern, "definition": definition, "priority": priority}
    return ParameterPut("/", "policy", name, value)


async def test_a_pass_of_the_loop_looks_at_few_of_many_queues() -> None:
    world = World()
    for i in range(20_000):
        world.catalog.apply(QueuePut("/", f"q{i}", i + 1, i % 2))
    world.change(policy("p", "", 5))
    await world.settle()
    assert world.answered == [1]
    assert len(world.shards.queues) == 20_000
    assert max(world.looks) <= SLICE_S / QUEUE_S + 3
    sent = [message for _, message in world.shards.received]
    assert all(isinstance(message, wire.CreateQueues) for message in sent)
    assert not world.disagreeing()


async def test_a_message_to_a_shard_stays_short_however_quick_the_slices_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    monkeypatch.setattr(world.walks, "_clock", lambda: 0.0)
    for i in range(2 * CHANGED_QUEUES_MAX + 1):
        world.catalog.apply(QueuePut("/", f"q{i}", i + 1, 0))
    world.change(policy("p", "", 5))
    await world.settle()
    sizes = [len(message.queues) for _, message in world.shards.received]
    assert sizes == [CHANGED_QUEUES_MAX, CHANGED_QUEUES_MAX, 1]


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_changes_between_slices_each_shard_knows_what_holds(seed: int) -> None:
    rnd = random.Random(seed)
    world = World()
    for i in range(300):
        world.declare(f"{rnd.choice('abc')}{i}")
    for _ in range(40):
        what = rnd.randrange(7)
        name = f"{rnd.choice('abc')}{rnd.randrange(320)}"
        if what == 0 and world.catalog.queue("/", name) is None:
            world.declare(name)
        elif what == 1:
            world.delete(name)
        elif what == 2:
            pattern = rnd.choice(["^a", "[ab]", "", "1$", r"^(?!a).*0"])
            length = rnd.choice([1, 2])
            world.change(policy(rnd.choice("pqr"), pattern, length, rnd.randrange(3)))
        elif what == 3 and world.catalog.parameters:
            _, component, name = rnd.choice(list(world.catalog.parameters))
            world.change(ParameterDelete("/", component, name))
        elif what == 4 and (queue := world.catalog.queue("/", name)) is not None:
            world.tell(queue)  # such as a queue that is paused
        else:
            await world.one_pass()
    await world.settle()
    assert not world.disagreeing()
    assert set(world.answered) <= {1}


async def test_a_vhost_that_goes_between_slices_takes_its_queues_along() -> None:
    world = World()
    for i in range(300):
        world.declare(f"q{i}")
    world.change(policy("p", "", 5))
    await world.one_pass()
    await world.one_pass()
    told = len(world.shards.received)
    assert told
    world.catalog.apply(VhostDelete("/"))
    await world.settle()
    assert len(world.shards.received) == told
    assert world.answered == [1]


async def test_a_policy_that_matches_nothing_sends_nothing() -> None:
    world = World()
    world.declare("q")
    world.change(policy("p", "^x", 5))
    await world.settle()
    assert world.answered == [1]
    assert not world.shards.received


async def test_many_policies_at_once_take_one_slice_in_a_pass_and_one_walk() -> None:
    world = World()
    for i in range(1000):
        world.declare(f"q{i}")
    for i in range(100):
        world.change(policy(f"p{i}", f"{i % 10}$", i, i))
    await world.one_pass()
    for i in range(100):
        world.change(policy(f"p{i}", f"{i % 10}$", i + 1, i))
    await world.settle()
    assert world.answered == [1] * 200
    assert max(world.looks) <= SLICE_S / QUEUE_S + 3
    assert sum(world.looks) < 2.2 * 1000
    assert not world.disagreeing()


async def test_a_shard_that_does_not_answer_fails_the_requests_of_the_walk() -> None:
    world = World()
    world.declare("q")
    world.shards.hold = True
    world.change(policy("p", "", 5))
    world.change(policy("o", "", 6))
    await world.one_pass()
    await world.one_pass()
    assert not any(world.answered)
    ((reply, _),) = world.shards._held
    reply.set_exception(OSError("no shard"))
    await world.settle()
    assert world.answered == [1, 1]
    assert set(world.said) == {(541, "no shard")}


async def test_a_walk_that_fails_does_not_hold_up_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.declare("q")
    with monkeypatch.context() as patch:
        patch.setattr(world.walks, "_spec", lambda queue: 1 / 0)
        world.change(policy("p", "", 5))
        await world.settle()
    assert world.said == [(541, "internal error")]
    assert "policies of vhost '/' do not reach all queues" in caplog.text
    world.change(policy("p", "", 6))
    await world.settle()
    assert not world.disagreeing()
