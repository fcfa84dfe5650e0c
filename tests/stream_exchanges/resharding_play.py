"""Play random lives of a stream exchange whose number of shards changes.

A life has a controller, and a front door whose own copy of the catalog hears of changes late. One
thing happens at a time.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.resharding.reshard_progress import step_of
from shardmq.broker.controller.resharding.resharding import ExchangeName, Resharding
from shardmq.broker.controller.resharding.states import STEPS, Step
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, QueuePut
from shardmq.broker.routing import route
from shardmq.broker.shared.control import Answer
from shardmq.shardd.wire import messages as wire
from tests.stream_exchanges.test_shard_sets import World

KEYS = "abcdefgh"
NAME = ExchangeName("/", "e")
Sent = tuple[str, int]


class ReshardingPlay(ABC):
    """A play of messages and changes of the number of shards.

    `last` has the number of published messages of each key. `on_the_way` has the messages that have
    not arrived at their queues, by id.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World()
        self.world.follows = False
        self.door = Catalog()
        self.to_door: list[AnyChange] = []
        self.on_the_way: list[tuple[int, Sent]] = []
        self.epochs = 0
        self.last = dict.fromkeys(KEYS, 0)
        self.world.catalog.apply = self._noted(self.world.catalog.apply)  # type: ignore[method-assign]
        for change in self.world.catalog.changes():
            self.door.apply(change)
        self.carrier = self.new_carrier()
        self.seen_step = Step.NONE
        self.world.ask = self._watched(self.world.ask)  # type: ignore[method-assign]

    def _noted(self, apply: Callable[[AnyChange], None]) -> Callable[[AnyChange], None]:
        def noted(change: AnyChange) -> None:
            apply(change)
            self.to_door.append(change)

        return noted

    def _watched(self, ask: Callable[[Any], Decision]) -> Callable[[Any], Decision]:
        def watched(request: Any) -> Decision:
            self.note_step()
            decision = ask(request)
            self.note_step()
            return decision

        return watched

    def new_carrier(self) -> Resharding:
        return Resharding(self.world.catalog, self, self, self)

    def note_step(self) -> None:
        """Check that the reshard came here from a step that the table names."""
        parts = self.world.vhost.parts("e")
        step = step_of(parts, self.carrier.progress.get(NAME))
        assert step == self.seen_step or step in STEPS[self.seen_step], (self.seen_step, step)
        self.seen_step = step

    # -- what the carrier sees of the others

    @abstractmethod
    async def ask(self, request: Any) -> Answer: ...

    @abstractmethod
    async def tell_shards(self, queues: list[QueuePut]) -> list[QueuePut]: ...

    @abstractmethod
    async def fence(self) -> bool: ...

    @abstractmethod
    def request(
        self, shard: int, message: Callable[[int], wire.Message]
    ) -> asyncio.Future[Any]: ...

    def epoch(self, shard: int) -> int:
        return self.epochs

    # -- what happens

    @abstractmethod
    def set(self, number: int) -> None:
        """So many shards are wanted from now on."""

    def door_applies(self) -> None:
        for change in self.to_door:
            self.door.apply(change)
        self.to_door.clear()

    def publish(self) -> None:
        key = self.random.choice(KEYS)
        self.last[key] += 1
        (name,) = route(self.door.vhosts["/"].table, "e", key).queues
        queue = self.door.queue("/", name)
        assert queue is not None
        self.on_the_way.append((queue.id, (key, self.last[key])))

    def step(self) -> None:
        asyncio.run(self.carrier.step(NAME))
        self.note_step()

    def run(self, steps: list[tuple[str, int]]) -> None:
        for step, number in steps:
            if step == "set":
                self.set(number)
            else:
                getattr(self, step)()
