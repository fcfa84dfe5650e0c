"""Which way messages go while applications move, in random histories of two brokers and a queue.

A publisher and a consumer move from one broker to the other. Whoever moves second, waits for the
hint that it may, unless it is hasty.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from shardmq.supervisor.cli import migration_rules as rules
from shardmq.supervisor.cli.migration_rules import Queue, Seen, Step, step

HISTORIES = 100
MESSAGES = 10
STEPS = 150


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # Nobody has moved.
        (Seen(), Step(rules.QUIET)),
        (Seen(ready=3), Step(rules.AT_OLD, is_paused=True)),
        (Seen(old_consumers=1), Step(rules.AT_OLD, is_paused=True)),
        (Seen(is_published=True), Step(rules.AT_OLD, is_paused=True)),
        # Consumers come here.
        (Seen(ready=3, consumers=1), Step(rules.COMING, has_bridge=True)),
        (Seen(is_published=True, consumers=1), Step(rules.COMING, has_bridge=True)),
        (Seen(consumers=1), Step(rules.HERE, has_bridge=True)),
        # Some consumers are still at the old broker.
        (Seen(ready=3, consumers=1, old_consumers=1), Step(rules.AT_OLD, is_paused=True)),
        (Seen(unacked=1, consumers=1, old_consumers=1), Step(rules.AT_OLD, is_paused=True)),
        (Seen(is_published=True, consumers=1, old_consumers=1), Step(rules.AT_OLD, is_paused=True)),
        (Seen(here=4, consumers=1, old_consumers=1), Step(rules.HERE, has_bridge=True)),
        # Publishers came here first.
        (Seen(here=4, old_consumers=1), Step(rules.AT_OLD, is_paused=True)),
        (Seen(here=4, consumers=1), Step(rules.HERE, has_bridge=True)),
        (Seen(here=4, ready=1, consumers=1), Step(rules.HELD, is_paused=True)),
        (Seen(here=4), Step(rules.QUIET)),
        # A bridge stays until the end.
        (Seen(ready=3, old_consumers=2, has_bridge=True), Step(rules.COMING, has_bridge=True)),
        (Seen(ready=3, here=9, has_bridge=True), Step(rules.COMING, has_bridge=True)),
        (Seen(has_bridge=True), Step(rules.HERE, has_bridge=True)),
    ],
)
def test_a_queue_has_one_home(seen: Seen, expected: Step) -> None:
    assert step(seen) == expected


def test_messages_come_at_the_end_without_consumers() -> None:
    assert step(Seen(ready=1), is_finishing=True) == Step(rules.COMING, has_bridge=True)
    assert step(Seen(ready=1, here=1), is_finishing=True) == Step(rules.HELD, is_paused=True)
    assert step(Seen(ready=1, here=1), any_order=True, is_finishing=True).has_bridge
    assert not step(Seen(ready=1, old_consumers=1), is_finishing=True).has_bridge


def test_names_of_bridges_find_their_queues() -> None:
    names = ["a", "a b/ü", "q" * 255, "ü" * 127]
    rows = [
        {
            "vhost": "v",
            "name": rules.bridge_name(name),
            "value": rules.bridge(Queue("v", name), "amqp://old/v"),
        }
        for name in names
    ]
    assert all(len(row["name"].encode()) <= rules.NAME_BYTES_MAX for row in rows)
    others = [
        {"vhost": "v", "name": "migration-x", "value": {"src-queue": "y"}},
        {"vhost": "v", "name": "mine", "value": {"src-queue": "mine"}},
        {"vhost": "v", "name": "odd", "value": None},
    ]
    assert set(rules.bridges_in([*rows, *others])) == {Queue("v", name) for name in names}


class World:
    """One queue at two brokers, a publisher, a consumer, and the bridge between them.

    With `is_hasty` nobody waits for a hint.
    """

    def __init__(
        self, random: random.Random, any_order: bool = False, is_hasty: bool = False
    ) -> None:
        self.random, self.any_order, self.is_hasty = random, any_order, is_hasty
        self.old: deque[int] = deque()
        self.here: deque[int] = deque()
        self.unacked: deque[int] = deque()  # that the bridge has
        self.published = 0
        self.publisher = self.consumer = "old"
        self.got: list[int] = []
        self.bridge = self.paused = False

    def seen(self) -> Seen:
        return Seen(
            ready=len(self.old),
            unacked=len(self.unacked),
            old_consumers=self.consumer == "old",
            is_published=self.publisher == "old",
            here=len(self.here),
            consumers=self.consumer == "here",
            has_bridge=self.bridge,
            is_paused=self.paused,
        )

    def look(self) -> None:
        """Look at the queue and carry out what follows."""
        found = step(self.seen(), self.any_order)
        self.bridge, self.paused = found.has_bridge, found.is_paused

    def hint(self, **changed: bool) -> str:
        seen = self.seen()._replace(**changed)
        return rules.hint(seen, step(seen, self.any_order).state)

    def act(self) -> None:
        match self.random.choice("ppcccbbblllPCR"):
            case "p" if self.published < MESSAGES:
                (self.old if self.publisher == "old" else self.here).append(self.published)
                self.published += 1
            case "c" if self.consumer == "old" and self.old:
                self.got.append(self.old.popleft())
            case "c" if self.consumer == "here" and self.here and not self.paused:
                self.got.append(self.here.popleft())
            case "b" if self.bridge and self.old and self.random.random() < 0.5:
                self.unacked.append(self.old.popleft())
            case "b" if self.unacked:
                self.here.append(self.unacked.popleft())
            case "l":
                self.look()
            case "P" if self.publisher == "old":
                # It publishes no more, and begins here when nothing is left to come.
                hint = self.hint(is_published=False)
                if self.consumer == "old" or self.is_hasty or hint == "its publishers may move":
                    self.publisher = "here"
            case "C" if self.consumer == "old":
                hint = self.hint()
                if self.publisher == "old" or self.is_hasty or hint == "its consumers may move":
                    self.consumer = "none"
            case "C" if self.consumer == "none":
                self.consumer = "here"
            case "R" if step(self.seen(), self.any_order).state == rules.HELD:
                self.consumer = "old"

    def finish(self) -> None:
        """Let all be over: both have moved, and a queue that is held gets its old consumer back."""
        for _ in range(3 * MESSAGES):
            self.publisher = "here"
            self.look()
            if step(self.seen(), self.any_order).state == rules.HELD:
                self.got += self.old
                self.old.clear()
            self.consumer = "here"
            self.look()
            self.here += [*self.unacked, *(self.old if self.bridge else ())]
            self.unacked.clear()
            if self.bridge:
                self.old.clear()
            if not self.paused:
                self.got += self.here
                self.here.clear()


def played(seed: int, **how: bool) -> World:
    world = World(random.Random(seed), **how)
    world.look()
    for _ in range(STEPS):
        world.act()
    world.finish()
    return world


def test_none_is_lost_and_order_is_kept(request: pytest.FixtureRequest) -> None:
    first = int(request.config.getoption("--seed"))
    for seed in range(first, first + HISTORIES):
        world = played(seed)
        assert world.got == list(range(world.published)), f"seed {seed}"


@pytest.mark.parametrize("any_order", [False, True])
def test_who_does_not_wait_loses_order_and_no_message(any_order: bool) -> None:
    worlds = [played(seed, is_hasty=True, any_order=any_order) for seed in range(HISTORIES)]
    assert all(sorted(world.got) == list(range(world.published)) for world in worlds)
    assert any(world.got != sorted(world.got) for world in worlds)
