"""What a message costs does not depend on how many others wait: counted in steps, not in time."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from shardmq.shardd.queues import Consumer, Queue, Window, limits_of
from shardmq.shardd.queues.delay_queue import DelayQueue
from shardmq.shardd.store.format.record import Arrival

BATCH = 250
FEW, MANY = 2_000, 128_000
MORE = 2_000  # messages whose steps are counted
HOUR_MS = 3_600_000
SIZE = 16


class Store:
    """All messages are alike, nothing is kept."""

    def read(self, entries: array[int], bytes_max: int) -> tuple[bytes, array[int]]:
        count = max(1, min(len(entries), bytes_max // SIZE))
        return bytes(SIZE * count), array("I", [SIZE]) * count

    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes, array[int]]:
        return self.read(entries, bytes_max)

    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None:
        pass

    def deliver(
        self,
        consumer: Consumer,
        first_number: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        pass


def steps(act: Callable[[], object]) -> int:
    """Functions called, of Python and compiled ones."""
    count = 0

    def called(_frame: Any, what: str, _argument: Any) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    sys.setprofile(called)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def publish(queue: Queue, facts: list[int], first: int) -> None:
    for at in range(0, len(facts), BATCH):
        some = facts[at : at + BATCH]
        entries = array("Q", [first + at + i << 4 for i in range(len(some))])
        queue.publish(
            Arrival(1, entries, SIZE * len(some), array("Q", some) if any(some) else None), 0
        )


def costs(queue: Queue, store: Store, fact: Callable[[], int], waiting: int) -> dict[str, int]:
    """Return the steps for messages in a queue with `waiting` others.

    The messages are published, handed out, requeued one by one, and let go.
    """
    publish(queue, [fact() for _ in range(waiting)], 1)
    more = [fact() for _ in range(MORE)]
    found = {"publish": steps(lambda: publish(queue, more, 1 + waiting))}
    if isinstance(queue, DelayQueue):
        found["due"] = steps(lambda: queue.deliver(2 * HOUR_MS, store, 1 << 30))  # type: ignore[arg-type]
        return found
    consumer = Consumer(queue, None, 1, Window(1 << 40), prefetch=MORE)
    queue.attach(consumer)
    found["deliver"] = steps(lambda: queue.deliver(0, store, 1 << 30))  # type: ignore[arg-type]
    queue.detach(consumer, 0)
    held = sorted(consumer.unacked.held())
    consumer.unacked.take_all()
    found["requeue"] = steps(lambda: [queue.requeue(array("Q", [entry]), SIZE) for entry in held])
    before = queue.backlog.ready_count
    gone = steps(lambda: queue.backlog.expire(2 * HOUR_MS, MORE))
    # some more than asked for: a step takes what it finds
    expired = before - queue.backlog.ready_count
    if expired:
        found["expire"] = gone * MORE // expired
    return found


@pytest.mark.row("C1.3", "C1.8", "B1.10")
@pytest.mark.parametrize(
    "kind", ["plain", "ttl", "queue ttl", "priority", "priority and ttl", "delayed"]
)
def test_a_message_costs_as_many_steps_in_a_deep_queue_as_in_a_flat_one(kind: str) -> None:
    arguments = {
        "queue ttl": {"x-message-ttl": HOUR_MS},
        "priority": {"x-max-priority": 9},
        "priority and ttl": {"x-max-priority": 9},
        "delayed": {"x-delays-for": "e"},
    }
    rng = random.Random(1)

    def fact() -> int:
        priority = rng.randrange(10) << 56 if "priority" in kind else 0
        return priority | (
            rng.randrange(1, HOUR_MS) + HOUR_MS
            if kind in ("ttl", "priority and ttl", "delayed")
            else 0
        )

    def of(waiting: int) -> dict[str, int]:
        store = Store()
        made = DelayQueue if kind == "delayed" else Queue
        return costs(made(1, store, limits_of(arguments.get(kind, {}))), store, fact, waiting)  # type: ignore[arg-type]

    few, many = of(FEW), of(MANY)
    # What is done once in a while (forgetting what is past) may fall into the one and not into the
    # other.
    assert all(many[what] <= 1.5 * few[what] + 50 for what in few), (few, many)
