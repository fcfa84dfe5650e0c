"""Which way messages go while applications move, in random histories of two brokers and a queue.

A publisher and a consumer move from one broker to the other. Whoever moves second, waits for the
hint that it may, unless it is hasty.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

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
        # A consumer that has left the old broker still has messages, and may give them back.
        (Seen(unacked=1, consumers=1), Step(rules.AT_OLD, is_paused=True)),
        (Seen(unacked=1, ready=3, here=4, consumers=1), Step(rules.AT_OLD, is_paused=True)),
        (Seen(unacked=1), Step(rules.AT_OLD, is_paused=True)),
        # A paused queue is resumed when that could be done for long enough.
        (Seen(here=4, consumers=1, is_paused=True), Step(rules.AT_OLD, is_paused=True)),
        (Seen(ready=3, consumers=1, is_paused=True), Step(rules.AT_OLD, is_paused=True)),
        (Seen(is_paused=True), Step(rules.AT_OLD, is_paused=True)),
        (Seen(consumers=1, is_paused=True, is_settled=True), Step(rules.HERE, has_bridge=True)),
        (Seen(is_paused=True, is_settled=True), Step(rules.QUIET)),
        (Seen(here=4, ready=1, consumers=1, is_paused=True), Step(rules.HELD, is_paused=True)),
        (Seen(is_paused=True, has_bridge=True), Step(rules.HERE, has_bridge=True)),
        # The old broker does not say what is in the queue.
        (Seen(is_unknown=True), Step(rules.AT_OLD)),
        (Seen(is_unknown=True, consumers=1), Step(rules.AT_OLD)),
        (Seen(is_unknown=True, here=4, consumers=1, is_paused=True, is_settled=True),
         Step(rules.AT_OLD, is_paused=True)),
        (Seen(is_unknown=True, has_bridge=True), Step(rules.AT_OLD, has_bridge=True)),
        # A bridge stays until the end.
        (Seen(ready=3, old_consumers=2, has_bridge=True), Step(rules.COMING, has_bridge=True)),
        (Seen(ready=3, here=9, has_bridge=True), Step(rules.COMING, has_bridge=True)),
        (Seen(has_bridge=True), Step(rules.HERE, has_bridge=True)),
    ],
)  # fmt: skip
def test_a_queue_has_one_home(seen: Seen, expected: Step) -> None:
    assert step(seen) == expected


def test_messages_come_at_the_end_without_consumers() -> None:
    assert step(Seen(ready=1), is_finishing=True) == Step(rules.COMING, has_bridge=True)
    assert step(Seen(ready=1, here=1), is_finishing=True) == Step(rules.HELD, is_paused=True)
    assert step(Seen(ready=1, here=1), any_order=True, is_finishing=True).has_bridge
    assert not step(Seen(ready=1, old_consumers=1), is_finishing=True).has_bridge


def test_messages_at_the_end_come_when_nobody_has_any() -> None:
    left = Seen(unacked=1, here=1, is_paused=True)
    assert step(left, is_finishing=True) == Step(rules.AT_OLD, is_paused=True)
    assert step(Seen(is_paused=True), is_finishing=True) == Step(rules.QUIET)
    assert step(Seen(is_unknown=True), is_finishing=True) == Step(rules.AT_OLD)


NUMBERS = {"messages_ready": 3, "messages_unacknowledged": 2, "consumers": 1}


@pytest.mark.parametrize(
    ("row", "counts", "bridge", "expected"),
    [
        (NUMBERS, None, None, Seen(ready=3, unacked=2, old_consumers=1)),
        (NUMBERS, (1, 0), None, Seen(ready=1, unacked=2)),
        (NUMBERS, (1, 1), {}, Seen(ready=1, unacked=2, has_bridge=True)),
        (NUMBERS, (0, 1), {"pending": 9}, Seen(unacked=9, has_bridge=True)),
        ({**NUMBERS, "message_stats": {"publish_details": {"rate": 0.2}}}, (0, 0), None,
         Seen(unacked=2, is_published=True)),
        ({"messages_unacknowledged": 0}, (3, 0), None, Seen(ready=3)),
        # The old broker does not have the queue, or has it and does not serve it.
        (None, None, None, Seen()),
        (None, None, {}, Seen(has_bridge=True)),
        ({"state": "down"}, None, None, Seen(is_unknown=True)),
        ({"state": "stopped", **NUMBERS}, None, None,
         Seen(ready=3, unacked=2, old_consumers=1, is_unknown=True)),
        ({}, (0, 0), None, Seen(is_unknown=True)),
        ({"messages_unacknowledged": 0}, None, None, Seen(is_unknown=True)),
    ],
)  # fmt: skip
def test_what_the_old_broker_lists(
    row: dict[str, Any] | None,
    counts: tuple[int, int] | None,
    bridge: dict[str, Any] | None,
    expected: Seen,
) -> None:
    assert rules.seen_of(row, counts, {}, bridge) == expected
    here = {"messages": 4, "consumers": 2, "state": "paused"}
    assert rules.seen_of(row, counts, here, bridge) == expected._replace(
        here=4, consumers=2, is_paused=True
    )


def test_a_queue_settles_while_it_could_be_resumed() -> None:
    empty = Seen(consumers=1, is_paused=True)
    assert rules.settling_since(empty, None, 7.0) == 7.0
    assert rules.settling_since(empty, 3.0, 7.0) == 3.0
    for seen in (Seen(consumers=1), empty._replace(unacked=1), empty._replace(is_unknown=True)):
        assert rules.settling_since(seen, 3.0, 7.0) is None
    newer = empty._replace(ready=1, here=1)
    assert rules.settling_since(newer, 3.0, 7.0) is None
    assert rules.settling_since(newer, 3.0, 7.0, any_order=True) == 3.0


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
    assert rules.bridges_in([*rows, *others]) == {
        Queue("v", name): rules.bridge(Queue("v", name), "amqp://old/v") for name in names
    }


@pytest.mark.parametrize(
    "here",
    [
        {"arguments": {"x-message-ttl": 1}},
        {"arguments": {"x-expires": 1}},
        {"effective_policy_definition": {"message-ttl": 1}},
        {"effective_policy_definition": {"expires": 1}},
    ],
)
def test_publishers_do_not_move_first_if_messages_expire(here: dict[str, Any]) -> None:
    seen = rules.seen_of(NUMBERS, None, here, None)
    assert "publishers may move" not in rules.hint(seen, rules.AT_OLD)
    other = rules.seen_of(NUMBERS, None, {"arguments": {}}, None)
    assert "publishers may move" in rules.hint(other, rules.AT_OLD)


class World:
    """One queue at two brokers, a publisher, a consumer, and the bridge between them.

    The old broker lists its numbers anew each LISTED_S, and its node may be down for a while. Its
    consumer leaves with messages that it has yet to acknowledge or to give back. With `is_hasty`
    nobody waits for a hint.
    """

    def __init__(
        self, random: random.Random, any_order: bool = False, is_hasty: bool = False
    ) -> None:
        self.random, self.any_order, self.is_hasty = random, any_order, is_hasty
        self.old: deque[int] = deque()
        self.here: deque[int] = deque()
        self.taken: deque[int] = deque()  # that the consumer of the old broker has
        self.unacked: deque[int] = deque()  # that the bridge has
        self.published = 0
        self.publisher = self.consumer = "old"
        self.got: list[int] = []
        self.bridge = self.paused = self.down = False
        self.now_s = 0.0
        self.since_s: float | None = None
        self.listed: dict[str, Any] = {}
        self.list()

    def list(self) -> None:
        """Let the old broker collect its numbers."""
        self.listed_s = self.now_s
        self.listed = {
            "messages_ready": len(self.old),
            "messages_unacknowledged": len(self.unacked) + len(self.taken),
            "consumers": (self.consumer == "old") + self.bridge,
            "message_stats": {"publish_details": {"rate": float(self.publisher == "old")}},
        }

    def seen(self) -> Seen:
        here = {
            "messages": len(self.here),
            "consumers": int(self.consumer == "here"),
            "state": "paused" if self.paused else "running",
        }
        bridge = {"pending": len(self.unacked)} if self.bridge else None
        if self.down:
            return rules.seen_of({"state": "down"}, None, here, bridge)
        counts = len(self.old), (self.consumer == "old") + self.bridge
        return rules.seen_of(self.listed, counts, here, bridge)

    def look(self) -> None:
        """Look at the queue and carry out what follows."""
        seen = self.seen()
        self.since_s = rules.settling_since(seen, self.since_s, self.now_s, self.any_order)
        is_settled = self.since_s is not None and self.now_s - self.since_s > rules.LISTED_S
        found = step(seen._replace(is_settled=is_settled), self.any_order)
        self.bridge, self.paused = found.has_bridge, found.is_paused

    def hint(self, **changed: bool) -> str:
        seen = self.seen()._replace(**changed)
        return rules.hint(seen, step(seen, self.any_order).state)

    def act(self) -> None:
        self.now_s += self.random.random()
        if self.now_s - self.listed_s >= rules.LISTED_S:
            self.list()
        match self.random.choice("ppcccaabbblllPCRd"):
            case "p" if self.published < MESSAGES and not (self.down and self.publisher == "old"):
                (self.old if self.publisher == "old" else self.here).append(self.published)
                self.published += 1
            case "c" if self.consumer == "old" and self.old and not self.down:
                self.taken.append(self.old.popleft())
            case "c" if self.consumer == "here" and self.here and not self.paused:
                self.got.append(self.here.popleft())
            case "a" if self.taken and not self.down:
                if self.random.random() < 0.8:
                    self.got.append(self.taken.popleft())
                else:
                    self.old.extendleft(reversed(self.taken))
                    self.taken.clear()
            case "b" if self.bridge and self.old and not self.down and self.random.random() < 0.5:
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
            case "d":
                self.down = not self.down and self.random.random() < 0.3

    def finish(self) -> None:
        """Let all be over: both have moved, and a queue that is held gets its old consumer back."""
        self.down = False
        for _ in range(3 * MESSAGES):
            self.now_s += 2 * rules.LISTED_S
            self.publisher = "here"
            self.got += self.taken
            self.taken.clear()
            self.list()
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
